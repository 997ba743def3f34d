/* trellis_c.c - the search of trellis codes in portable C, the reference: what every level must repeat bit by bit. */
#include <string.h>

#include "kernels.h"

#define NAME(function) function##_c

static uint16_t add_limited(uint32_t a, uint32_t b)
{
    return (uint16_t)(a + b < UINT16_MAX ? a + b : UINT16_MAX);
}

static void advance_c(const kvant_trellis *trellis, uint32_t states, uint32_t cell, const uint16_t *from,
                      uint16_t *to, uint32_t *decisions)
{
    static const uint16_t nothing[KVANT_TRELLIS_SUBSETS];
    const bool number = cell != KVANT_TRELLIS_NO_NUMBER;
    const uint16_t *cost = number ? trellis->costs[cell] : nothing;
    const uint32_t half = states / 2;
    memset(decisions, 0, states / 8);
    for (uint32_t i = 0; i < half; i++) {
        const uint32_t z = trellis->subsets[i][0] / 2u;
        const uint16_t near = cost[z], far = cost[z ^ KVANT_TRELLIS_SWAP];
        const uint16_t low0 = add_limited(from[i], near), high0 = add_limited(from[half + i], far);
        const uint16_t low1 = add_limited(from[i], far), high1 = add_limited(from[half + i], near);
        to[2 * i] = high0 < low0 ? high0 : low0;
        to[2 * i + 1] = number ? (high1 < low1 ? high1 : low1) : UINT16_MAX;
        decisions[i / 32] |= (uint32_t)(high0 < low0) << i % 32;
        decisions[half / 32 + i / 32] |= (uint32_t)(high1 < low1) << i % 32;
    }
}

static void lower_c(uint16_t *metric, uint32_t states)
{
    uint16_t least = UINT16_MAX;
    for (uint32_t i = 0; i < states; i++)
        least = metric[i] < least ? metric[i] : least;
    for (uint32_t i = 0; i < states; i++)
        metric[i] = (uint16_t)(metric[i] - least);
}

#include "trellis_path_template.h"

KVANT_TRELLIS_PATH_FN(kvant_trellis_path_c)
{
    path_c(trellis, cells, n, bits);
}
