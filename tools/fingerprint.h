/* fingerprint.h - 64-bit FNV-1a of bytes: tells models, texts and settings apart. It does not
 * protect against somebody who wants two of them to look alike. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../src/base/fnv.h"

#define FINGERPRINT_START KVANT_FNV_START

/* Continues a fingerprint by the 8 bytes of a number. kvant_fnv1a continues it by any bytes. */
uint64_t fingerprint_number(uint64_t fingerprint, uint64_t number);

/* Continued by a text with its end, so that "ab", "c" and "a", "bc" differ; NULL differs from
 * "". */
uint64_t fingerprint_string(uint64_t fingerprint, const char *text);

/* Continued by words of 8 bytes, for hundreds of megabytes: eight times as fast. Every change of
 * one word changes it. */
uint64_t fingerprint_words(uint64_t fingerprint, const void *bytes, size_t n);

/* The fingerprint of every byte of a file; 0 when the file cannot be read. */
uint64_t fingerprint_whole_file(const char *path);
