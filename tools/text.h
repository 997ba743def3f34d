/* text.h - the texts that commands know by name. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* In place of a file: a frozen copy of kvant's manual (manual.txt), for users who have no text at
 * hand. */
#define MANUAL_TEXT "kvant:manual"

/* False after complaining, with the name and the offset, for a binary file, and when llama.cpp's
 * tokenizer cannot take the text: it throws through C. */
bool text_check(const char *name, const char *text, size_t bytes);

/* False after complaining that -f is missing. */
bool text_given(const char *command, const char *file);

/* The whole file ("-" is stdin), checked, with a 0 behind it, to be freed; NULL after
 * complaining. */
char *read_text(const char *path, size_t *bytes);
