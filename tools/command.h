/* command.h - the conventions of kvant.c and its subcommands: exit codes, entry points, error
 * lines.
 *
 * A subcommand gets argv from its own name on, reads it with args.h, and returns an exit code.
 * Results go to stdout, everything else to stderr.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define EXIT_OK 0
#define EXIT_RUNTIME 1
#define EXIT_USAGE 2
#define EXIT_NOT_FOUND 127   /* the program that exec was asked for does not exist, as in shells */
#define EXIT_INTERRUPTED 130 /* 128 + SIGINT; every result that was complete has been printed */

int command_codecs(int argc, char **argv);
int command_state(int argc, char **argv);
int command_plugin_path(int argc, char **argv);
int command_completion(int argc, char **argv);
int command_exec(int argc, char **argv);
int command_run(int argc, char **argv);
int command_eval(int argc, char **argv);
int command_needle(int argc, char **argv);
int command_inspect(int argc, char **argv);
int command_calibrate(int argc, char **argv);
int command_capture(int argc, char **argv);
int command_selftest(int argc, char **argv);

/* Runs a command of the Python package; argv[0] is the name of the command and of its module.
 * Returns only when the command could not be started. */
int python_command(int argc, char **argv);

/* Casts away const for os_become(). Its type says that it may write to arguments, but it does not.
 * */
static inline char *program_argument(const char *word)
{
    return (char *)(uintptr_t)word;
}

/* `kvant bench model`. */
int bench_model(int argc, char **argv);

/* Prints a text that may come from a file, such as the name of a model. Control characters become
 * blanks, so that they cannot change a terminal. */
void print_plain(FILE *out, const char *text);

/* Print one line on stderr, "kvant: ..." or "  hint: ...", as print_plain does. Both return false,
 * so that a check can end with its complaint. */
bool report_line(const char *prefix, const char *format, ...);
#define complain(...) report_line("kvant: ", __VA_ARGS__)
#define hint(...) report_line("  hint: ", __VA_ARGS__)

/* Whether a file can be made there: minutes of work should not end in "permission denied". If not,
 * a line says why; it begins with `subject`, such as the name of the command. */
bool can_write_file(const char *subject, const char *path);

/* Flushes stdout: EXIT_OK, or EXIT_RUNTIME after saying that the output could not be written (a
 * full disk must not look like success). */
int finish_output(void);

/* Does nothing but remind of the build option when the command was compiled without llama.cpp's
 * headers. */
int command_without_llama(int argc, char **argv);
