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

void kvant_trellis_subsets(const kvant_trellis *trellis, const uint8_t *bits, uint8_t *subsets)
{
    const uint32_t n = trellis->n_steps, memory = trellis->memory;
    uint32_t window = 0;
    for (uint32_t before = memory; before > 0; before--)
        window = window << 1 | bits[(n - before % n) % n];
    for (uint32_t step = 0; step < n; step++) {
        window = (window << 1 | bits[step]) & ((2u << memory) - 1);
        subsets[step] = (uint8_t)kvant_trellis_subset(trellis, window);
    }
}

void kvant_trellis_page_levels(const kvant_trellis *trellis, const kvant_layout *layout, const void *page,
                               uint32_t token, int8_t *levels)
{
    uint8_t codes[KVANT_MAX_PADDED_DIM], bits[KVANT_TRELLIS_MAX_STEPS] = { 0 }, subsets[KVANT_TRELLIS_MAX_STEPS];
    kvant_layout_get(layout, page, token, codes);
    for (uint32_t j = 0; j < layout->padded_dim; j++)
        bits[trellis->steps[j]] = codes[j] & 1;
    kvant_trellis_subsets(trellis, bits, subsets);
    for (uint32_t j = 0; j < layout->padded_dim; j++)
        levels[j] = trellis->levels[KVANT_TRELLIS_SUBSETS * (codes[j] / 2u) + subsets[trellis->steps[j]]];
}

static size_t position_of(uint32_t i)
{
    return i / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS + kvant_token_position(i % KVANT_PAGE_TOKENS);
}

KVANT_TRELLIS_DOTS_FN(kvant_trellis_dots_c)
{
    const bool key = layout->role == KVANT_ROLE_K;
    for (uint32_t i = 0; i < n; i++)
        memset(dots + i * dots_stride, 0, (layout->row_tiles + 3) / 4 * KVANT_PAGE_TOKENS * sizeof *dots);
    for (uint32_t token = 0; token < KVANT_PAGE_TOKENS; token++) {
        int8_t levels[KVANT_MAX_PADDED_DIM];
        kvant_trellis_page_levels(trellis, layout, page, token, levels);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < layout->padded_dim; j++) {
                const uint32_t row = key ? token : j, column = key ? j : token;
                dots[i * dots_stride + position_of(row)] += levels[j] * x[i * x_stride + position_of(column)];
            }
    }
}

#include "trellis_path_template.h"

KVANT_TRELLIS_PATH_FN(kvant_trellis_path_c)
{
    path_c(trellis, cells, n, bits);
}
