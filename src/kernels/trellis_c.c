/* trellis_c.c - the search of trellis codes in portable C, the reference. Every level must repeat
 * it bit by bit. */
#include <string.h>

#include "../base/attributes.h" /* little endian */
#include "kernels.h"

#define NAME(function) function##_c

/* States that share their highest bits, and so share the effect of these bits on the subset. */
#define BLOCK 16u

/* a + b, at most 65535, in a form that compilers vectorise with 16-bit numbers. */
static uint16_t add_limited(uint16_t a, uint16_t b)
{
    const uint16_t most = (uint16_t)(UINT16_MAX - b);
    return (uint16_t)((a < most ? a : most) + b);
}

/* Packs 8 flags into bits. */
static uint32_t pack_flags(const uint8_t *flags)
{
    uint64_t word;
    memcpy(&word, flags, sizeof word);
    return (uint32_t)(word * 0x0102040810204080u >> 56);
}

/* The costs of a block of states, for each subset z of its first state. */
typedef struct block_costs {
    uint16_t of[KVANT_TRELLIS_SUBSETS][BLOCK];
} block_costs;

static void spread_costs(const kvant_trellis *trellis, uint32_t cell, block_costs *costs)
{
    for (uint32_t z = 0; z < KVANT_TRELLIS_SUBSETS; z++)
        for (uint32_t i = 0; i < BLOCK; i++)
            costs->of[z][i] = trellis->costs[cell][z ^ trellis->subsets[i][0] / 2u];
}

/* Computes the new states of a block and of the corresponding states in the upper half. The
 * decisions of even new states go to flags[0], the decisions of odd new states to flags[1]. */
static void advance_block(const uint16_t *near, const uint16_t *far, const uint16_t *first,
                          const uint16_t *second, uint16_t *to, uint8_t flags[2][BLOCK])
{
    for (uint32_t i = 0; i < BLOCK; i++) {
        const uint16_t low0 = add_limited(first[i], near[i]),
                       high0 = add_limited(second[i], far[i]);
        const uint16_t low1 = add_limited(first[i], far[i]),
                       high1 = add_limited(second[i], near[i]);
        to[2 * i] = high0 < low0 ? high0 : low0;
        to[2 * i + 1] = high1 < low1 ? high1 : low1;
        flags[0][i] = high0 < low0;
        flags[1][i] = high1 < low1;
    }
}

static void advance_c(const kvant_trellis *trellis, uint32_t states, uint32_t cell,
                      const uint16_t *from, uint16_t *to, uint32_t *decisions)
{
    const uint32_t half = states / 2;
    block_costs costs;
    spread_costs(trellis, cell, &costs);
    memset(decisions, 0, states / 8);
    for (uint32_t i = 0; i < half; i += BLOCK) {
        const uint32_t z = trellis->subsets[i][0] / 2u;
        uint8_t flags[2][BLOCK];
        advance_block(costs.of[z], costs.of[z ^ KVANT_TRELLIS_SWAP], from + i, from + half + i,
                      to + 2 * i, flags);
        for (uint32_t odd = 0; odd < 2; odd++)
            decisions[(odd * half + i) / 32] |=
                (pack_flags(flags[odd]) | pack_flags(flags[odd] + 8) << 8) << i % 32;
    }
    for (uint32_t i = 1; cell == KVANT_TRELLIS_NO_NUMBER && i < states; i += 2)
        to[i] = UINT16_MAX;
}

static void lower_c(uint16_t *metric, uint32_t states)
{
    uint16_t least = UINT16_MAX;
    for (uint32_t i = 0; i < states; i++)
        least = metric[i] < least ? metric[i] : least;
    for (uint32_t i = 0; i < states; i++)
        metric[i] = (uint16_t)(metric[i] - least);
}

static uint32_t best_c(const uint16_t *metric, uint32_t states)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < states; i++)
        best = metric[i] < metric[best] ? i : best;
    return best;
}

/* to ^= bit where from is 1. Uses bytes only, so that compilers process 16 at a time. */
static void add_bits(const uint8_t *restrict from, uint32_t n, uint8_t bit, uint8_t *restrict to)
{
    for (uint32_t i = 0; i < n; i++)
        to[i] ^= (uint8_t)(0 - from[i]) & bit;
}

void kvant_trellis_subsets(const kvant_trellis *trellis, const uint8_t *bits, uint32_t n,
                           uint8_t *subsets)
{
    uint8_t circle[KVANT_TRELLIS_MAX_MEMORY + KVANT_TRELLIS_MAX_STEPS];
    const uint32_t memory = trellis->memory;
    memcpy(circle, bits + n - memory, memory);
    memcpy(circle + memory, bits, n);
    memset(subsets, 0, n);
    for (uint32_t p = 0; p < KVANT_TRELLIS_PARITIES; p++)
        for (uint32_t tap = 0; tap <= memory; tap++)
            if (trellis->taps[p] >> tap & 1)
                add_bits(circle + memory - tap, n, (uint8_t)(1 << p), subsets);
}

/* Computes the levels of a token's padded_dim codes. */
static void token_levels(const kvant_trellis *trellis, const kvant_layout *layout, const void *page,
                         uint32_t token, int8_t *levels)
{
    uint8_t codes[KVANT_MAX_PADDED_DIM], bits[KVANT_TRELLIS_MAX_STEPS] = { 0 },
                                         subsets[KVANT_TRELLIS_MAX_STEPS];
    kvant_layout_get(layout, page, token, codes);
    for (uint32_t j = 0; j < layout->padded_dim; j++)
        bits[trellis->steps[j]] = codes[j] & 1;
    kvant_trellis_subsets(trellis, bits, trellis->n_steps, subsets);
    for (uint32_t j = 0; j < layout->padded_dim; j++)
        levels[j] =
            trellis->levels[KVANT_TRELLIS_SUBSETS * (codes[j] / 2u) + subsets[trellis->steps[j]]];
}

static size_t position_of(uint32_t i)
{
    return i / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS + kvant_token_position(i % KVANT_PAGE_TOKENS);
}

KVANT_TRELLIS_DOTS_FN(kvant_trellis_dots_c)
{
    const bool key = layout->role == KVANT_ROLE_K;
    for (uint32_t i = 0; i < n; i++)
        memset(dots + i * dots_stride, 0,
               (layout->row_tiles + 3) / 4 * KVANT_PAGE_TOKENS * sizeof *dots);
    for (uint32_t token = 0; token < KVANT_PAGE_TOKENS; token++) {
        int8_t levels[KVANT_MAX_PADDED_DIM];
        token_levels(trellis, layout, page, token, levels);
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t j = 0; j < layout->padded_dim; j++) {
                const uint32_t row = key ? token : j, column = key ? j : token;
                dots[i * dots_stride + position_of(row)] +=
                    levels[j] * x[i * x_stride + position_of(column)];
            }
    }
}

KVANT_TRELLIS_VALUES_FN(kvant_trellis_values_c)
{
    for (uint32_t token = 0; token < KVANT_PAGE_TOKENS; token++) {
        const uint32_t at = kvant_token_position(token);
        int8_t levels[KVANT_MAX_PADDED_DIM];
        token_levels(trellis, layout, page, token, levels);
        for (uint32_t j = 0; j < layout->padded_dim; j++)
            tile[(size_t)at * layout->padded_dim + kvant_layout_row_position(layout, j)] =
                (float)levels[j] * unit * scale[at];
    }
}

static void circle_levels(const kvant_trellis *trellis, const kvant_pack_format *format,
                          const uint8_t *codes, uint32_t quad, uint32_t n_quads, uint32_t v,
                          uint8_t *levels)
{
    uint8_t bits[KVANT_TRELLIS_MAX_STEPS] = { 0 }, subsets[KVANT_TRELLIS_MAX_STEPS];
    for (uint32_t i = 0; i < 4 * n_quads; i++)
        bits[kvant_pack_step(format->bits, n_quads, i)] =
            kvant_pack_get(format->bits, codes, 4 * quad + i, v) & 1;
    kvant_trellis_subsets(trellis, bits, 4 * n_quads, subsets);
    for (uint32_t i = 0; i < 4 * n_quads; i++) {
        const uint32_t code = kvant_pack_get(format->bits, codes, 4 * quad + i, v);
        const uint32_t subset = subsets[kvant_pack_step(format->bits, n_quads, i)];
        kvant_pack_part at = { 0 };
        kvant_pack_next(8, 4 * quad + i, v, &at);
        levels[at.byte] =
            (uint8_t)(trellis->levels[KVANT_TRELLIS_SUBSETS * (code / 2) + subset] + 128);
    }
}

KVANT_TRELLIS_PACK_FN(kvant_trellis_pack_c)
{
    for (uint32_t circle = 0; circle < kvant_pack_circles(format); circle++) {
        const uint32_t quad = kvant_pack_circle(format, circle),
                       end = kvant_pack_circle(format, circle + 1);
        for (uint32_t v = 0; v < KVANT_PACK_VECTORS; v++)
            circle_levels(trellis, format, codes, quad, end - quad, v, levels);
    }
}

#include "trellis_path_template.h"

KVANT_TRELLIS_PATH_FN(kvant_trellis_path_c)
{
    path_c(trellis, cells, n, work, bits);
}
