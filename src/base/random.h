/* random.h - splitmix64, the generator of signs and rotations (format.md, "Transform"). */
#pragma once

#include <stdint.h>

static inline uint64_t kvant_splitmix64(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* The seed of a codec's k-th further use of random numbers, k = 1, 2, ... (format.md,
 * "Transform"). */
static inline uint64_t kvant_derived_seed(uint64_t seed, uint32_t k)
{
    uint64_t state = ~seed, derived = 0;
    while (k--)
        derived = kvant_splitmix64(&state);
    return derived;
}
