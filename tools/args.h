/* args.h - command lines: one option table per command gives parsing, help and, through --describe,
 * the man page, the reference and the completions of shells (scripts/reference.py).
 *
 * An option sets a member of the command's settings, or a function accepts its value. Errors name
 * the option, the value and the valid range. Options keep their order, which `-k A -v B -k C`
 * relies on. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum arg_kind {
    ARG_IS_SWITCH,
    ARG_IS_TEXT,
    ARG_IS_U32,
    ARG_IS_DOUBLE,
    ARG_IS_CALL
} arg_kind;

typedef struct arg_option {
    char letter;       /* 0: long form only */
    const char *name;  /* without dashes */
    const char *value; /* NULL for a switch */
    const char *help;
    arg_kind kind;
    size_t at; /* offset of the member in the settings: a bool, const char *, uint32_t or double.
                * ARG_IS_CALL: the function gets a pointer to this member. */
    double min, max;
    bool (*take)(void *part, const char *value); /* false after printing an error message */
} arg_option;

/* Lines of a table. AT(member) is the file's own: offsetof(settings, member). */
#define ARG_SWITCH(letter, name, member, help)                                                     \
    { letter, name, NULL, help, ARG_IS_SWITCH, AT(member), 0, 0, NULL }
#define ARG_TEXT(letter, name, value, member, help)                                                \
    { letter, name, value, help, ARG_IS_TEXT, AT(member), 0, 0, NULL }
#define ARG_U32(letter, name, value, min, max, member, help)                                       \
    { letter, name, value, help, ARG_IS_U32, AT(member), min, max, NULL }
#define ARG_DOUBLE(letter, name, value, min, max, member, help)                                    \
    { letter, name, value, help, ARG_IS_DOUBLE, AT(member), min, max, NULL }
#define ARG_CALL(letter, name, value, take, member, help)                                          \
    { letter, name, value, help, ARG_IS_CALL, AT(member), 0, 0, take }

typedef struct arg_spec {
    const char *command; /* "eval" */
    const char *usage;   /* what follows the command in the usage line */
    const char *about;   /* a paragraph */
    const arg_option *options;
    size_t n_options;
    const char *notes; /* printed after the options, or NULL */
} arg_spec;
#define ARG_OPTIONS(table) .options = (table), .n_options = sizeof(table) / sizeof *(table)

/* Fills settings from the options up to the first word that is not an option; *rest is its index in
 * argv. Returns -1 to go on, or the exit code to leave with after --help or an error message. */
int args_parse(const arg_spec *spec, int argc, char **argv, void *settings, int *rest);

/* For commands that take no words: args_parse, and a complaint when one is there. */
int args_parse_all(const arg_spec *spec, int argc, char **argv, void *settings);

bool args_u32(const char *option, const char *text, uint32_t min, uint32_t max, uint32_t *value);
/* The words of "A,B,...", each of at most 31 bytes, one after another to `take`, until it returns
 * false. */
bool args_list(const char *option, const char *text, bool (*take)(void *user, char *word),
               void *user);
/* "N,N,...": up to room numbers, ascending and each once, whatever order they were written in. */
bool args_u32_list(const char *option, const char *text, uint32_t min, uint32_t max,
                   uint32_t *values, size_t room, size_t *n);

/* Returns the one of n names that the user probably meant by `word`, or NULL. A name matches when
 * it begins the given name, when the given name begins it, or when they differ by a few typing
 * errors. Capital letters do not matter. */
const char *args_closest(const char *word, const char *const *names, size_t n);

/* For a word that names no command (benchmark, ...): complains, suggests the closest of n names and
 * the help, "kvant --help lists the commands". Returns the exit code. */
int args_unknown_word(const char *what, const char *word, const char *const *names, size_t n,
                      const char *help);
