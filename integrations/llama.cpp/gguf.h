/* gguf.h - reads the keys of a model's file: GGUF, version 2 or 3, on little-endian machines. The
 * plug-in and the kvant command (tools/gguf_file.c) use it. No length is trusted: a string or an
 * array that is longer than the rest of the file ends the reading. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum { GGUF_UINT32 = 4, GGUF_INT32 = 5, GGUF_STRING = 8, GGUF_ARRAY = 9 };

enum { GGUF_TEXT = 256 }; /* bytes of a name or of a text, with a 0; a longer text becomes "" */

typedef struct gguf_reader {
    FILE *file;
    uint64_t left; /* bytes behind the position */
    uint64_t n_keys;
} gguf_reader;

typedef struct gguf_value {
    uint32_t type;
    uint32_t number;      /* a 32-bit whole number; of other types 0 */
    char text[GGUF_TEXT]; /* a string; of other types "" */
} gguf_value;

/* Reads the head of a file, from its beginning on. `bytes` is the size of the file. False if the
 * file is no GGUF file. */
bool gguf_begin(gguf_reader *reader, FILE *file, uint64_t bytes);

/* Read the name of the next key, and then its value. False after the last key, or when the key
 * cannot be read. */
bool gguf_take_name(gguf_reader *reader, char name[GGUF_TEXT]);
bool gguf_take_value(gguf_reader *reader, gguf_value *value);
