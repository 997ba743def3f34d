#include "fingerprint.h"

#include <stdio.h>

uint64_t fingerprint_bytes(uint64_t fingerprint, const void *bytes, size_t n)
{
    const unsigned char *p = bytes;
    for (size_t i = 0; i < n; i++)
        fingerprint = (fingerprint ^ p[i]) * 0x100000001b3u;
    return fingerprint;
}

uint64_t fingerprint_number(uint64_t fingerprint, uint64_t number)
{
    for (int i = 0; i < 8; i++)
        fingerprint = (fingerprint ^ (number >> 8 * i & 255)) * 0x100000001b3u;
    return fingerprint;
}

uint64_t fingerprint_file(const char *path)
{
    enum { BLOCKS = 256, BLOCK = 4096 };
    unsigned char block[BLOCK];
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return 0;
    const long size = fseek(file, 0, SEEK_END) == 0 ? ftell(file) : 0;
    uint64_t fingerprint = fingerprint_number(FINGERPRINT_START, (uint64_t)size);
    for (long i = 0; i < BLOCKS && fseek(file, size / BLOCKS * i, SEEK_SET) == 0; i++)
        fingerprint = fingerprint_bytes(fingerprint, block, fread(block, 1, sizeof block, file));
    fclose(file);
    return fingerprint;
}
