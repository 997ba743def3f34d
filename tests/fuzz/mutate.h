/* mutate.h - random numbers and mutated bytes for the fuzzers' own programs (KVANT_FUZZ_SMOKE),
 * which are the same on every machine. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define FUZZ_SEED 88172645463325252u

/* xorshift64 */
static inline uint64_t fuzz_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Mutates up to four bytes, mostly among the first `head`; one in `rarely` is anywhere. Sometimes
 * the end is cut. */
static inline void fuzz_mutate(uint8_t *bytes, size_t *n, size_t head, uint64_t rarely,
                               uint64_t *state)
{
    static const uint8_t edges[] = { 0, 1, 2, 0x7f, 0x80, 0xff };
    for (uint64_t left = fuzz_next(state) % 4 + 1; left; left--) {
        const size_t within = fuzz_next(state) % rarely && head < *n ? head : *n,
                     at = fuzz_next(state) % within;
        if (fuzz_next(state) % 2)
            bytes[at] ^= (uint8_t)(1u << fuzz_next(state) % 8);
        else
            bytes[at] = edges[fuzz_next(state) % sizeof edges];
    }
    if (fuzz_next(state) % 8 == 0)
        *n = fuzz_next(state) % *n + 1;
}
