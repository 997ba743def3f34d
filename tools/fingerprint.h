/* fingerprint.h - 64-bit FNV-1a of bytes: enough to tell models, texts and settings apart, no protection against
 * anybody who wants two to look alike. */
#ifndef KVANT_TOOLS_FINGERPRINT_H
#define KVANT_TOOLS_FINGERPRINT_H

#include <stddef.h>
#include <stdint.h>

#define FINGERPRINT_START 0xcbf29ce484222325u

/* The fingerprint of what came before, continued by n bytes, or by the 8 bytes of a number. */
uint64_t fingerprint_bytes(uint64_t fingerprint, const void *bytes, size_t n);
uint64_t fingerprint_number(uint64_t fingerprint, uint64_t number);

/* Of the file's size and of 256 blocks of 4 KiB spread over it, read in a moment; 0 when it cannot be opened. */
uint64_t fingerprint_file(const char *path);

#endif /* KVANT_TOOLS_FINGERPRINT_H */
