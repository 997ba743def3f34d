/* trellis_template.h - the search of trellis codes for vectors of 16-bit numbers. The including file defines NAME and
 *
 *   vh, HALVES                       a vector, its numbers
 *   vh_load vh_store vh_set vh_sub vh_min vh_add_limited    of unsigned numbers, the sum limited to 65535
 *   vh_repeat(p)                     8 numbers in every 128 bits
 *   vh_swap_pairs(v)                 of every 4 numbers the first two and the last two exchanged
 *   vh_pick(table, bytes)            pshufb
 *   vh_store_pairs(p, a, b)          a0 b0 a1 b1 ...
 *   below_mask(a, b)                 bit j: number j of a is below that of b, for 32 / HALVES vectors each */
#define TRELLIS_VECTORS (32 / HALVES)

typedef struct trellis_costs {
    vh near, far; /* of subsets, and of those that the swap makes of them */
} trellis_costs;

/* The 64 new states of the states i ... i + 31 and the other half's. */
KVANT_INLINE void advance_block(const kvant_trellis *trellis, const trellis_costs *costs, uint32_t half, uint32_t i,
                                const uint16_t *from, uint16_t *to, uint32_t *decisions)
{
    vh low[2][TRELLIS_VECTORS], high[2][TRELLIS_VECTORS];
#pragma GCC unroll 8
    for (uint32_t v = 0; v < TRELLIS_VECTORS; v++) {
        const uint32_t at = i + HALVES * v;
        const vh subsets = vh_load(trellis->subsets[at]);
        const vh near = vh_pick(costs->near, subsets), far = vh_pick(costs->far, subsets);
        const vh first = vh_load(from + at), second = vh_load(from + half + at);
        low[0][v] = vh_add_limited(first, near);
        low[1][v] = vh_add_limited(first, far);
        high[0][v] = vh_add_limited(second, far);
        high[1][v] = vh_add_limited(second, near);
        vh_store_pairs(to + 2 * at, vh_min(low[0][v], high[0][v]), vh_min(low[1][v], high[1][v]));
    }
    decisions[i / 32] = below_mask(high[0], low[0]);
    decisions[half / 32 + i / 32] = below_mask(high[1], low[1]);
}

KVANT_INLINE void NAME(advance)(const kvant_trellis *trellis, uint32_t states, uint32_t cell, const uint16_t *from,
                                uint16_t *to, uint32_t *decisions)
{
    static const uint16_t nothing[KVANT_TRELLIS_SUBSETS];
    const bool number = cell != KVANT_TRELLIS_NO_NUMBER;
    const vh near = vh_repeat(number ? trellis->costs[cell] : nothing);
    const trellis_costs costs = { near, vh_swap_pairs(near) };
#pragma GCC unroll 4
    for (uint32_t i = 0; i < states / 2; i += 32)
        advance_block(trellis, &costs, states / 2, i, from, to, decisions);
    for (uint32_t i = 1; !number && i < states; i += 2)
        to[i] = UINT16_MAX;
}

KVANT_INLINE void NAME(lower)(uint16_t *metric, uint32_t states)
{
    uint16_t lanes[HALVES], least = UINT16_MAX;
    vh v = vh_load(metric);
    for (uint32_t i = HALVES; i < states; i += HALVES)
        v = vh_min(v, vh_load(metric + i));
    vh_store(lanes, v);
    for (uint32_t i = 0; i < HALVES; i++)
        least = lanes[i] < least ? lanes[i] : least;
    for (uint32_t i = 0; i < states; i += HALVES)
        vh_store(metric + i, vh_sub(vh_load(metric + i), vh_set((int16_t)least)));
}

#include "trellis_path_template.h"

static KVANT_TRELLIS_PATH_FN(NAME(trellis_path))
{
    NAME(path)(trellis, cells, n, bits);
}

#define LEVEL_HAS_TRELLIS
