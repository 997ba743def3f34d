/* chunk_values.h - the integers that a chunk code stands for: a direction from a table times a
 * length.
 *
 * Number j of a code is scale(entries[4 (code mod 2^index_bits) + j], length), where scale(a, b) is
 * a b / 2^15 with halves rounded up. With i = code / 2^index_bits, the length is step * i, or
 * lengths[i] when step is 0.
 *
 * Levels may compute the entries of triplets instead (octahedral_entry). Every level gives the same
 * integers. */
#pragma once

#include <stdint.h>
#include <stdlib.h>

#define KVANT_NUMBER_MAX_BITS 16u /* bits of a code */
/* Bits of an index. A table then has 32 KB of entries; a larger table would not stay in the nearest
 * cache. */
#define KVANT_NUMBER_MAX_INDEX 12u
#define KVANT_NUMBER_MAX_LENGTHS 4u /* bits of a length that is looked up in a table */

/* The integer that stands for 1 in the square's coordinates. The squares of a point's coordinates
 * then sum to less than 2^15 units. */
#define KVANT_OCTAHEDRAL_UNIT 32512
/* Bits of a coordinate. A permutation of 16-bit words reads this many bits of an index. */
#define KVANT_OCTAHEDRAL_MAX_BITS 5u

/* 1 / sqrt(x) in linear pieces of 1024: base + scale(x, slope). */
typedef struct kvant_octahedral_integers {
    uint32_t bits; /* bits of a coordinate */
    /* the levels of u and w, repeated to fill; |level| < KVANT_OCTAHEDRAL_UNIT */
    int16_t levels[1 << KVANT_NUMBER_MAX_INDEX / 2];
    int16_t base[32], slope[32];
} kvant_octahedral_integers;

typedef struct kvant_chunk_values {
    /* 2^index_bits entries of 4 numbers, aligned to 8; the fourth number is 0 in triplets */
    const int16_t *entries;
    /* the levels that entries were made from, or NULL */
    const kvant_octahedral_integers *octahedral;
    uint32_t components; /* 3 or 4 channels per chunk */
    uint32_t dim, index_bits;
    int32_t step; /* no number exceeds KVANT_CODE_VALUE_MAX; no entry and no length exceeds 32767 */
    int16_t lengths[1 << KVANT_NUMBER_MAX_LENGTHS];
} kvant_chunk_values;

/* a b / 2^15 with halves rounded up. Adding 2^30 before the shift keeps the shifted number from
 * being negative, because C does not define how a negative number is shifted. */
static inline int32_t kvant_scale_word(int32_t a, int32_t b)
{
    return (int32_t)((uint32_t)(a * b + (1 << 14) + (1 << 30)) >> 15) - (1 << 15);
}

static inline int32_t kvant_clamp_word(int32_t x, int32_t most)
{
    return x > most ? most : x < -most ? -most : x;
}

/* The unit vector at (u, w), indices of levels: `kvant_octahedral_point` with the fold as a limit
 * of u by 1 - |w|, and of w by 1 - |u|. */
static inline void kvant_octahedral_entry(const kvant_octahedral_integers *o, uint32_t u,
                                          uint32_t w, int16_t entry[3])
{
    const int32_t unit = KVANT_OCTAHEDRAL_UNIT, a = abs(o->levels[u]), b = abs(o->levels[w]);
    const int32_t x = kvant_clamp_word(o->levels[u], unit - b),
                  y = kvant_clamp_word(o->levels[w], unit - a);
    const int32_t z = unit - b - a;
    const int32_t squares =
        kvant_scale_word(x, x) + kvant_scale_word(y, y) + kvant_scale_word(z, z);
    const int32_t inverse =
        o->base[squares >> 10] + kvant_scale_word(squares, o->slope[squares >> 10]);
    entry[0] = (int16_t)kvant_scale_word(x, inverse);
    entry[1] = (int16_t)kvant_scale_word(y, inverse);
    entry[2] = (int16_t)kvant_scale_word(z, inverse);
}

/* The index of component j of chunk c in the permuted query. Pairing follows the words of a
 * page: two triplets side by side, or two components of a chunk of four. */
static inline uint32_t kvant_key_position(uint32_t components, uint32_t c, uint32_t j)
{
    return components == 3 ? 6 * (c / 2) + 2 * j + c % 2 : 4 * c + j;
}
