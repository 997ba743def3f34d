/* report_child.c - fork, two pipes, lines of progress. */
#define _POSIX_C_SOURCE 200809L
#include "report_child.h"

#include "command.h"
#include "interrupt.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_OUTPUT ((size_t)256 << 20)

typedef struct buffer {
    char *text;
    size_t n, room;
} buffer;

typedef struct child {
    pid_t pid;
    int out, err;
    buffer output, line;
    progress *progress;
    double share, told; /* of the progress, and how much of it was added */
    const char *what;
    bool stopping;
} child;

static bool append(buffer *b, const char *bytes, size_t n)
{
    if (n > MAX_OUTPUT - b->n)
        return false;
    if (b->n + n + 1 > b->room) {
        const size_t room = 2 * (b->n + n + 1);
        char *grown = realloc(b->text, room);
        if (grown == NULL)
            return false;
        b->text = grown;
        b->room = room;
    }
    memcpy(b->text + b->n, bytes, n);
    b->n += n;
    b->text[b->n] = 0;
    return true;
}

static void add_progress(child *c, double fraction)
{
    const double now = c->share * fraction;
    progress_add(c->progress, now > c->told ? now - c->told : 0, c->what);
    c->told = now > c->told ? now : c->told;
}

/* Progress is taken in, everything else is for the user. */
static void take_line(child *c, const char *line)
{
    cJSON *event = line[0] == '{' ? cJSON_Parse(line) : NULL;
    const cJSON *fraction = cJSON_GetObjectItemCaseSensitive(event, "fraction");
    const cJSON *total = cJSON_GetObjectItemCaseSensitive(event, "total");
    if (cJSON_IsNumber(fraction) && cJSON_IsNumber(total) && total->valuedouble > 0)
        add_progress(c, fraction->valuedouble);
    else if (event == NULL)
        fprintf(stderr, "%s\n", line);
    cJSON_Delete(event);
}

static void take_messages(child *c, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] != '\n') {
            append(&c->line, &bytes[i], 1);
        } else if (c->line.n > 0) {
            take_line(c, c->line.text);
            c->line.n = 0;
        }
    }
}

/* False at the end of the stream. */
static bool take(child *c, int stream)
{
    char bytes[65536];
    const ssize_t n = read(stream, bytes, sizeof bytes);
    if (n < 0)
        return errno == EINTR || errno == EAGAIN;
    if (n > 0 && stream == c->out)
        return append(&c->output, bytes, (size_t)n);
    if (n > 0)
        take_messages(c, bytes, (size_t)n);
    return n > 0;
}

static void follow(child *c)
{
    struct pollfd streams[2] = { { .fd = c->out, .events = POLLIN }, { .fd = c->err, .events = POLLIN } };
    while (streams[0].fd >= 0 || streams[1].fd >= 0) {
        if (interrupted() && !c->stopping) {
            c->stopping = true;
            kill(c->pid, SIGINT);
        }
        if (poll(streams, 2, 200) <= 0)
            continue;
        for (size_t i = 0; i < 2; i++)
            if (streams[i].fd >= 0 && streams[i].revents != 0 && !take(c, streams[i].fd)) {
                close(streams[i].fd); /* at once: a child that we take no more from must not wait for us */
                streams[i].fd = -1;
            }
    }
}

/* In a process group of its own: Ctrl-C on a terminal goes to this process only, which passes it on; twice would kill it. */
static bool start(child *c, const char *const *arguments)
{
    int out[2], err[2];
    if (pipe(out) != 0)
        return false;
    if (pipe(err) != 0) {
        close(out[0]);
        close(out[1]);
        return false;
    }
    fflush(NULL);
    c->pid = fork();
    if (c->pid == 0) {
        setpgid(0, 0);
        dup2(out[1], STDOUT_FILENO);
        dup2(err[1], STDERR_FILENO);
        close(out[0]);
        close(out[1]);
        close(err[0]);
        close(err[1]);
        execv("/proc/self/exe", (char *const *)arguments);
        _exit(EXIT_NOT_FOUND);
    }
    close(out[1]);
    close(err[1]);
    c->out = out[0];
    c->err = err[0];
    return c->pid > 0;
}

static int wait_for(pid_t pid)
{
    int status = 0;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return EXIT_RUNTIME;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

bool child_run(const char *const *arguments, progress *progress, double share, const char *what,
               child_result *result)
{
    enum { MOST = 512 };
    const char *all[MOST + 2] = { "kvant" };
    child c = { .progress = progress, .share = share, .what = what };
    const double started = monotonic_seconds();
    size_t n = 1;
    for (; arguments[n - 1] != NULL && n < MOST; n++)
        all[n] = arguments[n - 1];
    *result = (child_result){ .code = EXIT_RUNTIME };
    if (!start(&c, all)) {
        complain("report: cannot run %s: %s", arguments[0], strerror(errno));
        return false;
    }
    follow(&c);
    result->code = wait_for(c.pid);
    if (result->code == EXIT_OK)
        add_progress(&c, 1);
    result->rows = c.output.n > 0 ? cJSON_Parse(c.output.text) : NULL;
    if (result->rows != NULL && !cJSON_IsArray(result->rows)) {
        cJSON_Delete(result->rows);
        result->rows = NULL;
    }
    result->seconds = monotonic_seconds() - started;
    free(c.output.text);
    free(c.line.text);
    return true;
}
