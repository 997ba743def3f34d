/* fingerprint.c - FNV-1a of bytes, numbers, texts and files. */
#include "fingerprint.h"

#include <stdio.h>
#include <string.h>

#define PRIME 0x100000001b3u

uint64_t fingerprint_bytes(uint64_t fingerprint, const void *bytes, size_t n)
{
    const unsigned char *p = bytes;
    for (size_t i = 0; i < n; i++)
        fingerprint = (fingerprint ^ p[i]) * PRIME;
    return fingerprint;
}

uint64_t fingerprint_number(uint64_t fingerprint, uint64_t number)
{
    for (int i = 0; i < 8; i++)
        fingerprint = (fingerprint ^ (number >> 8 * i & 255)) * PRIME;
    return fingerprint;
}

uint64_t fingerprint_string(uint64_t fingerprint, const char *text)
{
    return text != NULL ? fingerprint_bytes(fingerprint, text, strlen(text) + 1)
                        : fingerprint_bytes(fingerprint, "\1", 2);
}

uint64_t fingerprint_words(uint64_t fingerprint, const void *bytes, size_t n)
{
    const unsigned char *p = bytes;
    for (; n >= sizeof(uint64_t); p += sizeof(uint64_t), n -= sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, p, sizeof word);
        fingerprint = (fingerprint ^ word) * PRIME;
    }
    return fingerprint_bytes(fingerprint, p, n);
}

uint64_t fingerprint_whole_file(const char *path)
{
    unsigned char block[65536];
    uint64_t fingerprint = FINGERPRINT_START;
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return 0;
    for (size_t n = fread(block, 1, sizeof block, file); n > 0;
         n = fread(block, 1, sizeof block, file))
        fingerprint = fingerprint_words(fingerprint, block, n);
    const int failed = ferror(file);
    fclose(file);
    return failed ? 0 : fingerprint;
}
