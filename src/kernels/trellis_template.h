/* trellis_template.h - the trellis search with vectors of 16-bit numbers. The including file
 * defines NAME and
 *
 *   vh, HALVES                       a vector, the count of its numbers
 *   vh_load vh_store vh_set vh_sub vh_min
 *   vh_add_limited                   sum of unsigned numbers, limited to 65535
 *   vh_repeat(p)                     8 numbers in every 128 bits
 *   vh_swap_pairs(v)                 exchanges the first two and the last two of every 4 numbers
 *   vh_pick(table, bytes)            pshufb
 *   vh_pair(a, b, out)               a0 b0 a1 b1 ... in two vectors
 *   below_mask(a, b)                 bit j: number j of a is below number j of b, of which none is
 *                                    above; 32 / HALVES vectors each
 *
 * A level with a special search for 256 states also defines PATH_IN_PLACE. This is a header with
 * has_places (whether the search applies) and path_in_place. */
#define TRELLIS_VECTORS (32 / HALVES)

typedef struct trellis_costs {
    /* costs of all subsets (near), and of the subsets after KVANT_TRELLIS_SWAP (far) */
    vh near, far;
} trellis_costs;

/* The same costs for the subsets of 32 states. */
typedef struct block_costs {
    vh near[TRELLIS_VECTORS], far[TRELLIS_VECTORS];
} block_costs;

KVANT_INLINE void spread_costs(const kvant_trellis *trellis, const trellis_costs *costs,
                               uint32_t block, block_costs *out)
{
#pragma GCC unroll 8
    for (uint32_t v = 0; v < TRELLIS_VECTORS; v++) {
        const vh subsets = vh_load(trellis->subsets[32 * block + HALVES * v]);
        out->near[v] = vh_pick(costs->near, subsets);
        out->far[v] = vh_pick(costs->far, subsets);
    }
}

/* Whether an odd block of 32 states has the same subsets as the block before it. */
KVANT_INLINE bool blocks_are_alike(uint32_t states)
{
    return states == 256 &&
           !((KVANT_TRELLIS_256_TAP_0 | KVANT_TRELLIS_256_TAP_1 | KVANT_TRELLIS_256_TAP_2) &
             1 << 6);
}

/* Computes the new metrics of states 2i and 2i + 1, in order. The argument `first` has the metrics
 * of states i to i + 31. The argument `second` has the metrics of the same states of the upper
 * half. The number of the block is i / 32. */
KVANT_INLINE void advance_block(const block_costs *costs, uint32_t states, uint32_t block,
                                const vh *first, const vh *second, vh next[2 * TRELLIS_VECTORS],
                                uint32_t *decisions)
{
    vh low[2][TRELLIS_VECTORS], least[2][TRELLIS_VECTORS];
#pragma GCC unroll 8
    for (uint32_t v = 0; v < TRELLIS_VECTORS; v++) {
        low[0][v] = vh_add_limited(first[v], costs->near[v]);
        low[1][v] = vh_add_limited(first[v], costs->far[v]);
        least[0][v] = vh_min(low[0][v], vh_add_limited(second[v], costs->far[v]));
        least[1][v] = vh_min(low[1][v], vh_add_limited(second[v], costs->near[v]));
        vh_pair(least[0][v], least[1][v], next + 2 * v);
    }
    decisions[block] = below_mask(least[0], low[0]);
    decisions[states / 64 + block] = below_mask(least[1], low[1]);
}

KVANT_INLINE trellis_costs costs_of(const kvant_trellis *trellis, uint32_t cell)
{
    const vh near = vh_repeat(trellis->costs[cell]);
    return (trellis_costs){ near, vh_swap_pairs(near) };
}

KVANT_INLINE void NAME(advance)(const kvant_trellis *trellis, uint32_t states, uint32_t cell,
                                const uint16_t *from, uint16_t *to, uint32_t *decisions)
{
    const trellis_costs costs = costs_of(trellis, cell);
    block_costs spread;
    spread_costs(trellis, &costs, 0, &spread);
    for (uint32_t block = 0; block < states / 64; block++) {
        vh first[TRELLIS_VECTORS], second[TRELLIS_VECTORS], next[2 * TRELLIS_VECTORS];
#pragma GCC unroll 8
        for (uint32_t v = 0; v < TRELLIS_VECTORS; v++) {
            first[v] = vh_load(from + 32 * block + HALVES * v);
            second[v] = vh_load(from + states / 2 + 32 * block + HALVES * v);
        }
        if (block > 0 && (block % 2 == 0 || !blocks_are_alike(states)))
            spread_costs(trellis, &costs, block, &spread);
        advance_block(&spread, states, block, first, second, next, decisions);
#pragma GCC unroll 8
        for (uint32_t v = 0; v < 2 * TRELLIS_VECTORS; v++)
            vh_store(to + 64 * block + HALVES * v, next[v]);
    }
    if (cell == KVANT_TRELLIS_NO_NUMBER)
        for (uint32_t i = 1; i < states; i += 2)
            to[i] = UINT16_MAX;
}

KVANT_INLINE vh least_of(const vh *metric, uint32_t n)
{
    uint16_t lanes[HALVES], least = UINT16_MAX;
    vh v = metric[0];
#pragma GCC unroll 8
    for (uint32_t i = 1; i < n; i++)
        v = vh_min(v, metric[i]);
    vh_store(lanes, v);
    for (uint32_t i = 0; i < HALVES; i++)
        least = lanes[i] < least ? lanes[i] : least;
    return vh_set((int16_t)least);
}

KVANT_INLINE vh least_metric(const uint16_t *metric, uint32_t states)
{
    vh v = vh_load(metric);
    for (uint32_t i = HALVES; i < states; i += HALVES)
        v = vh_min(v, vh_load(metric + i));
    return least_of(&v, 1);
}

KVANT_INLINE uint32_t NAME(best)(const uint16_t *metric, uint32_t states)
{
    vh least[TRELLIS_VECTORS], some[TRELLIS_VECTORS];
    uint32_t best = 0, above;
    least[0] = least_metric(metric, states);
    for (uint32_t v = 1; v < TRELLIS_VECTORS; v++)
        least[v] = least[0];
    for (;; best += 32) {
        for (uint32_t v = 0; v < TRELLIS_VECTORS; v++)
            some[v] = vh_load(metric + best + HALVES * v);
        above = below_mask(least, some);
        if (above != UINT32_MAX)
            break;
    }
    for (; above & 1; above >>= 1)
        best++;
    return best;
}

KVANT_INLINE void NAME(lower)(uint16_t *metric, uint32_t states)
{
    const vh least = least_metric(metric, states);
    for (uint32_t i = 0; i < states; i += HALVES)
        vh_store(metric + i, vh_sub(vh_load(metric + i), least));
}

#include "trellis_path_template.h"
#ifdef PATH_IN_PLACE
#include PATH_IN_PLACE
#endif

static KVANT_TRELLIS_PATH_FN(NAME(trellis_path))
{
#ifdef PATH_IN_PLACE
    if (has_places(trellis, n, work)) {
        path_in_place(trellis, cells, n, work, bits);
        return;
    }
#endif
    NAME(path)(trellis, cells, n, work, bits);
}
