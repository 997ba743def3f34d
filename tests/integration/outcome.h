/* outcome.h - runs a program in its own process, and looks for the plug-in's lines in its output.
 * It needs _POSIX_C_SOURCE for popen. */
#ifndef KVANT_TESTS_OUTCOME_H
#define KVANT_TESTS_OUTCOME_H

#include <sys/wait.h>

#include "../cases.h"

struct outcome {
    int status; /* exit status, or 128 + signal */
    char output[16384];
};

/* Runs a shell command line without core dumps, and returns its stderr and stdout together. */
static inline struct outcome run(const char *environment, const char *program,
                                 const char *arguments)
{
    struct outcome outcome = { 0 };
    char command[2048];
    size_t n;
    FILE *pipe;
    int status;

    snprintf(command, sizeof(command), "ulimit -c 0; env GGML_NO_BACKTRACE=1 %s '%s' %s 2>&1",
             environment, program, arguments);
    pipe = popen(command, "r");
    assert_non_null(pipe);
    n = fread(outcome.output, 1, sizeof(outcome.output) - 1, pipe);
    outcome.output[n] = '\0';
    status = pclose(pipe);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
}

/* Whether the output has exactly one line of the plug-in that contains `text`. */
static inline bool says(const struct outcome *outcome, const char *text)
{
    const char *line = outcome->output;

    while ((line = strstr(line, "kvant: ")) != NULL) {
        size_t length = strcspn(line, "\n");
        const char *found = strstr(line, text);
        if (found != NULL && found < line + length)
            return true;
        line += length;
    }
    print_message("no line with \"%s\" in:\n%s\n", text, outcome->output);
    return false;
}

/* Number of lines that the plug-in wrote. */
static inline int lines_of(const struct outcome *outcome)
{
    int n = 0;

    for (const char *line = outcome->output; (line = strstr(line, "kvant: ")) != NULL; line++)
        n++;
    return n;
}

#endif
