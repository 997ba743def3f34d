/* fnv.h - FNV-1a with 64 bits, for checksums of files that are read once.
 *
 * Every step is a bijection of the state, so two inputs of one length that differ in one byte never agree; others do with
 * probability 2^-64. It guards against damage, not against an adversary. */
#ifndef KVANT_BASE_FNV_H
#define KVANT_BASE_FNV_H

#include <stddef.h>
#include <stdint.h>

#define KVANT_FNV_START 0xcbf29ce484222325u

/* The state after n more bytes; state is KVANT_FNV_START in the beginning. */
static inline uint64_t kvant_fnv1a(uint64_t state, const void *bytes, size_t n)
{
    const unsigned char *at = bytes;
    for (size_t i = 0; i < n; i++)
        state = (state ^ at[i]) * 0x100000001b3u;
    return state;
}

#endif
