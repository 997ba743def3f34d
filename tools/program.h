/* program.h - the llama.cpp program in a command line: where it stands, and which options it is
 * given. It reads words and the environment, and never changes them. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* A command line such as `env A=1 taskset -c 0 llama-server -m M`. */
typedef struct program {
    int argc; /* the words from the program's name on */
    char **argv;
    int n_before; /* the words of other programs before it */
    char **before;
} program;

/* An option of llama.cpp's programs: its spellings and the variables that set it from outside. Both
 * lists end with NULL. */
typedef struct program_option {
    const char *names[5];
    const char *variables[3];
} program_option;

/* Finds the program: the first word whose base name begins with "llama". A word behind the first
 * one must also be an executable file, because models and users can have such names. False when
 * there is none; the program is the first word then. */
bool program_find(int argc, char **argv, program *found);

/* The option's value as llama.cpp decides it: the last one of the arguments, or else a variable's.
 * NULL when it is not given. *name, if wanted, becomes the word that gave it. */
const char *program_value(const program *p, const program_option *option, const char **name);

/* Whether the word is one of the option's spellings. */
bool program_word_is(const char *word, const program_option *option);

/* Whether the program keeps the whole cache in the computer's memory: -nkvo, or its variables. */
bool program_keeps_cache(const program *p);

/* Whether the program's arguments ask for a text only: --help, --version, a list. */
bool program_only_prints(const program *p);

/* Whether llama.cpp reads the value as "off". */
bool program_is_off(const char *value);

/* Whether the program is `llama` and has a command: `llama serve`. */
bool program_has_command(const program *p);

/* llama-bench writes lists of devices with slashes and lists of tensors with semicolons. */
bool program_is_bench(const program *p);

/* Whether the file of a program has ggml in it, so that no library of ggml's can load the plug-in
 * there. Reads the file's first 64 MiB. */
bool program_has_ggml(const char *path);
