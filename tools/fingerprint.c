/* fingerprint.c - FNV-1a of bytes, numbers, texts and files. */
#include "fingerprint.h"

#include <stdio.h>
#include <string.h>

uint64_t fingerprint_number(uint64_t fingerprint, uint64_t number)
{
    unsigned char bytes[8]; /* the same on every machine */
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(number >> 8 * i);
    return kvant_fnv1a(fingerprint, bytes, sizeof bytes);
}

uint64_t fingerprint_string(uint64_t fingerprint, const char *text)
{
    return text != NULL ? kvant_fnv1a(fingerprint, text, strlen(text) + 1)
                        : kvant_fnv1a(fingerprint, "\1", 2);
}

uint64_t fingerprint_words(uint64_t fingerprint, const void *bytes, size_t n)
{
    const size_t whole = n / 8 * 8;
    fingerprint = kvant_fnv1a_words(fingerprint, bytes, whole);
    return kvant_fnv1a(fingerprint, (const unsigned char *)bytes + whole, n - whole);
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
