/* trellis_template.h - the trellis search with vectors of 16-bit numbers. The metrics of all states
 * stay in registers from the first step to the last. The including file defines NAME and
 *
 *   vh, HALVES                       a vector, the count of its numbers: 8, 16 or 32
 *   vh_load vh_store vh_min vh_or
 *   vh_add_limited                   sum of unsigned numbers, limited to 65535
 *   vh_least(v)                      the least number, in all places
 *   vh_lower(v, least)               v - least, but 65535 where v is 65535
 *   vh_repeat(p)                     8 numbers in every 128 bits
 *   vh_pick(table, bytes)            pshufb
 *   vh_odd()                         65535 in all odd places, 0 in even places
 *   vh_pair(a, b, out)               a0 b0 a1 b1 ... in two vectors
 *   below_mask(a, b)                 bit j: number j of a is below number j of b, of which none is
 *                                    above; 32 / HALVES vectors each */
#define TRELLIS_VECTORS (KVANT_TRELLIS_STATES / HALVES)
#define HALF_VECTORS (TRELLIS_VECTORS / 2)

/* Subset z of window 2 i, and z ^ change, as the bytes of a 16-bit number for vh_pick. */
#define SUBSET_BYTES(i, change)                                                                    \
    0x0100 + 0x0202 * ((((i) >> 2 & 1) | (((i) ^ (i) >> 4) & 1) << 2) ^ (change))
#define FOUR_SUBSETS(i, change)                                                                    \
    SUBSET_BYTES(i, change), SUBSET_BYTES((i) + 1, change), SUBSET_BYTES((i) + 2, change),         \
        SUBSET_BYTES((i) + 3, change)
#define ALL_SUBSETS(change)                                                                        \
    { FOUR_SUBSETS(0, change),  FOUR_SUBSETS(4, change),  FOUR_SUBSETS(8, change),                 \
      FOUR_SUBSETS(12, change), FOUR_SUBSETS(16, change), FOUR_SUBSETS(20, change),                \
      FOUR_SUBSETS(24, change), FOUR_SUBSETS(28, change) }

static const _Alignas(64) uint16_t near_subsets[32] = ALL_SUBSETS(0), far_subsets[32] = ALL_SUBSETS(
                                                                          KVANT_TRELLIS_SWAP);

/* Advances the metrics of all states by one step; returns the decisions. */
KVANT_INLINE uint64_t advance(const uint16_t *costs, vh metric[TRELLIS_VECTORS])
{
    const vh table = vh_repeat(costs);
    vh low[2][HALF_VECTORS], least[2][HALF_VECTORS];
#pragma GCC unroll 4
    for (uint32_t v = 0; v < HALF_VECTORS; v++) {
        /* bit 3 of i changes no subset, so vectors of 8 numbers share their costs */
        const vh near = vh_pick(table, vh_load(near_subsets + (HALVES * v & 16))),
                 far = vh_pick(table, vh_load(far_subsets + (HALVES * v & 16)));
        const vh first = metric[v], second = metric[HALF_VECTORS + v];
        low[0][v] = vh_add_limited(first, near);
        low[1][v] = vh_add_limited(first, far);
        least[0][v] = vh_min(low[0][v], vh_add_limited(second, far));
        least[1][v] = vh_min(low[1][v], vh_add_limited(second, near));
    }
#pragma GCC unroll 4
    for (uint32_t v = 0; v < HALF_VECTORS; v++)
        vh_pair(least[0][v], least[1][v], metric + 2 * v);
    return below_mask(least[0], low[0]) | (uint64_t)below_mask(least[1], low[1]) << 32;
}

KVANT_INLINE void lower(vh metric[TRELLIS_VECTORS])
{
    vh least = metric[0];
#pragma GCC unroll 8
    for (uint32_t v = 1; v < TRELLIS_VECTORS; v++)
        least = vh_min(least, metric[v]);
    least = vh_least(least);
#pragma GCC unroll 8
    for (uint32_t v = 0; v < TRELLIS_VECTORS; v++)
        metric[v] = vh_lower(metric[v], least);
}

static void NAME(pass)(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,
                       uint32_t before, uint16_t *states, uint64_t *decisions)
{
    uint32_t at = (n - before % n) % n;
    vh metric[TRELLIS_VECTORS];
#pragma GCC unroll 8
    for (uint32_t v = 0; v < TRELLIS_VECTORS; v++)
        metric[v] = vh_load(states + HALVES * v);
    for (uint32_t step = 0; step < before + n; step++) {
        const uint32_t cell = cells[at];
        at = at + 1 < n ? at + 1 : 0;
        if (step && step % KVANT_TRELLIS_LOWER_STEPS == 0)
            lower(metric);
        decisions[step < before ? 0 : step - before] = advance(trellis->costs[cell], metric);
        if (KVANT_UNLIKELY(cell == KVANT_TRELLIS_NO_NUMBER)) /* a 1 is impossible */
#pragma GCC unroll 8
            for (uint32_t v = 0; v < TRELLIS_VECTORS; v++)
                metric[v] = vh_or(metric[v], vh_odd());
    }
#pragma GCC unroll 8
    for (uint32_t v = 0; v < TRELLIS_VECTORS; v++)
        vh_store(states + HALVES * v, metric[v]);
}

#include "trellis_path_template.h"

static KVANT_TRELLIS_PATH_FN(NAME(trellis_path))
{
    NAME(path)(trellis, cells, n, bits);
}
