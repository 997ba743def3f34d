/* args.h - command lines: one table per option list gives parsing, help and, through --describe, the
 * man page, the reference and the completions of shells (kvant/commands/reference.py).
 *
 * Values are strings. args_u32 and args_double turn them into numbers; their errors name the
 * option, the value and the valid range. Options keep their order, which `-k A -v B -k C` relies
 * on.
 */
#ifndef KVANT_TOOLS_ARGS_H
#define KVANT_TOOLS_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct arg_option {
    int id;            /* handed to the handler; unique within the table */
    char letter;       /* 0: long form only */
    const char *name;  /* without dashes */
    const char *value; /* NULL for a switch */
    const char *help;
} arg_option;

typedef struct arg_spec {
    const char *command; /* "eval" */
    const char *usage;   /* what follows the command in the usage line */
    const char *about;   /* a paragraph */
    const arg_option *options;
    size_t n_options;
    const char *notes; /* printed after the options, or NULL */
} arg_spec;

/* Returns false after complaining about the value. */
typedef bool (*arg_handler)(void *user, int id, const char *value);

/* Calls the handler for every option up to the first word that is none; *rest is its index in argv.
 * Returns -1 to go on, or the exit code to leave with (after --help, or after a complaint). */
int args_parse(const arg_spec *spec, int argc, char **argv, arg_handler handler, void *user, int *rest);

/* For commands that take no words: args_parse, and a complaint when one is there. */
int args_parse_all(const arg_spec *spec, int argc, char **argv, arg_handler handler, void *user);

bool args_u32(const char *option, const char *text, uint32_t min, uint32_t max, uint32_t *value);
/* The words of "A,B,...", each of at most 31 bytes, one after another to `take`, until it returns
 * false. */
bool args_list(const char *option, const char *text, bool (*take)(void *user, char *word), void *user);
/* "N,N,...": up to room numbers. */
bool args_u32_list(const char *option, const char *text, uint32_t min, uint32_t max, uint32_t *values, size_t room,
                   size_t *n);
bool args_double(const char *option, const char *text, double min, double max, double *value);

/* Of n names the one that word is most probably meant for, or NULL: a beginning of it or the other
 * way round, else a slip of the keyboard. Capital letters do not matter. */
const char *args_closest(const char *word, const char *const *names, size_t n);

/* For a word that names no command (benchmark, ...): complains, suggests the closest of n names and
 * the help, "kvant --help lists the commands". Returns the exit code. */
int args_unknown_word(const char *what, const char *word, const char *const *names, size_t n, const char *help);

#endif /* KVANT_TOOLS_ARGS_H */
