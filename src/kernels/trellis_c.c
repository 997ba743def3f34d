/* trellis_c.c - the search of trellis codes in portable C, the reference. Every level must repeat
 * it bit by bit. */
#include <string.h>

#include "../base/attributes.h" /* little endian */
#include "kernels.h"

#define NAME(function) function##_c

#define HALF (KVANT_TRELLIS_STATES / 2)

/* a + b, at most 65535, in a form that compilers vectorise with 16-bit numbers. */
static uint16_t add_limited(uint16_t a, uint16_t b)
{
    const uint16_t most = (uint16_t)(UINT16_MAX - b);
    return (uint16_t)((a < most ? a : most) + b);
}

/* Packs flags into bits. */
static uint32_t pack_flags(const uint8_t flags[HALF])
{
    uint32_t bits = 0;
    for (uint32_t i = 0; i < HALF; i += 8) {
        uint64_t word;
        memcpy(&word, flags + i, sizeof word);
        bits |= (uint32_t)(word * 0x0102040810204080u >> 56) << i;
    }
    return bits;
}

/* One step of the search, from the metrics `from` to the metrics `to`; returns the decisions. */
static uint64_t advance(const uint16_t *costs, const uint16_t *from, uint16_t *to)
{
    uint16_t near[HALF], far[HALF];
    uint8_t flags[2][HALF];
    for (uint32_t i = 0; i < HALF; i++) {
        near[i] = costs[kvant_trellis_subset(2 * i)];
        far[i] = costs[kvant_trellis_subset(2 * i) ^ KVANT_TRELLIS_SWAP];
    }
    for (uint32_t i = 0; i < HALF; i++) {
        const uint16_t first = from[i], second = from[HALF + i];
        const uint16_t low0 = add_limited(first, near[i]), high0 = add_limited(second, far[i]);
        const uint16_t low1 = add_limited(first, far[i]), high1 = add_limited(second, near[i]);
        to[2 * i] = high0 < low0 ? high0 : low0;
        to[2 * i + 1] = high1 < low1 ? high1 : low1;
        flags[0][i] = high0 < low0;
        flags[1][i] = high1 < low1;
    }
    return pack_flags(flags[0]) | (uint64_t)pack_flags(flags[1]) << HALF;
}

static void lower(uint16_t *metric)
{
    uint16_t least = UINT16_MAX;
    for (uint32_t i = 0; i < KVANT_TRELLIS_STATES; i++)
        least = metric[i] < least ? metric[i] : least;
    for (uint32_t i = 0; i < KVANT_TRELLIS_STATES; i++)
        if (metric[i] != KVANT_TRELLIS_IMPOSSIBLE)
            metric[i] = (uint16_t)(metric[i] - least);
}

static void pass_c(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n, uint32_t before,
                   uint16_t *metric, uint64_t *decisions)
{
    uint16_t next[KVANT_TRELLIS_STATES];
    for (uint32_t step = 0; step < before + n; step++) {
        const uint32_t cell = cells[(step + n * before - before) % n];
        if (step && step % KVANT_TRELLIS_LOWER_STEPS == 0)
            lower(metric);
        decisions[step < before ? 0 : step - before] = advance(trellis->costs[cell], metric, next);
        for (uint32_t i = 1; cell == KVANT_TRELLIS_NO_NUMBER && i < KVANT_TRELLIS_STATES; i += 2)
            next[i] = KVANT_TRELLIS_IMPOSSIBLE;
        memcpy(metric, next, sizeof next);
    }
}

void kvant_trellis_subsets(const uint8_t *bits, uint32_t n, uint8_t *restrict subsets)
{
    uint8_t circle[KVANT_TRELLIS_MEMORY + KVANT_TRELLIS_MAX_STEPS];
    const uint8_t *at = circle + KVANT_TRELLIS_MEMORY;
    memcpy(circle, bits + n - KVANT_TRELLIS_MEMORY, KVANT_TRELLIS_MEMORY);
    memcpy(circle + KVANT_TRELLIS_MEMORY, bits, n);
    for (uint32_t i = 0; i < n; i++, at++) /* by the taps */
        subsets[i] = (uint8_t)(at[-3] | (at[0] ^ at[-6]) << 1 | (at[-1] ^ at[-5]) << 2);
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
    kvant_trellis_subsets(bits, trellis->n_steps, subsets);
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
    kvant_trellis_subsets(bits, 4 * n_quads, subsets);
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
    path_c(trellis, cells, n, bits);
}
