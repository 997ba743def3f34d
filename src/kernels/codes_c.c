/* codes_c.c - attention on codes in portable C, the reference for every level: products of codes
 * and integers, and the conversions between numbers and integers around them. */
#include <string.h>

#include "../base/half.h"
#include "code_at.h"
#include "fixed_point.h"

/* The values of one column tile of a row group, row by row: row r of row tile k is at 16 k + r. */
typedef struct value_tile {
    int16_t at[KVANT_PAGE_TOKENS][KVANT_TILE];
} value_tile;

static void read_tile(const kvant_layout *layout, const void *page, const int16_t *values,
                      uint32_t group, uint32_t ct, value_tile *tile)
{
    uint32_t tiles = kvant_layout_group_tiles(layout, group);
    for (uint32_t at = 0; at < 32 * tiles;
         at++) /* the word in the column unit: tiles x lane + row tile */
        for (uint32_t field = 0; field < 4; field++)
            for (uint32_t odd = 0; odd < 2; odd++) {
                uint32_t lane = at / tiles, column = 2 * (lane % 4) + 8 * (field / 2) + odd;
                uint32_t row = 16 * (at % tiles) + 8 * (field % 2) + lane / 4;
                uint32_t code = kvant_code_at(layout, page, group, ct, at, field, odd);
                tile->at[row][column] =
                    (int16_t)(values[code % 16] + (layout->bits > 4 ? values[16 + code / 16] : 0));
            }
}

/* Copies x of a column tile in the order of columns, whose positions are 4 apart. */
static void gather_tile(const int16_t *x, uint32_t ct, int16_t *out)
{
    const int16_t *block = x + KVANT_PAGE_TOKENS * (ct / 4) + ct % 4;
    for (uint32_t i = 0; i < KVANT_TILE; i++)
        out[i] = block[4 * i];
}

/* Adds the products of one row tile's 16 rows to dots. */
static void add_tile(const value_tile *tile, uint32_t rt, const int16_t *x, int32_t *dots)
{
    for (uint32_t r = 0; r < KVANT_TILE; r++)
        for (uint32_t c = 0; c < KVANT_TILE; c++)
            dots[kvant_token_position(KVANT_TILE * rt + r)] +=
                tile->at[KVANT_TILE * rt + r][c] * x[c];
}

KVANT_CODE_DOTS_FN(kvant_code_dots_c)
{
    value_tile tile;
    int16_t x[KVANT_TILE];
    for (uint32_t i = 0; i < n; i++)
        memset(dots + i * dots_stride, 0,
               (layout->row_tiles + 3) / 4 * KVANT_PAGE_TOKENS * sizeof *dots);
    for (uint32_t group = 0; 4 * group < layout->row_tiles; group++)
        for (uint32_t ct = factors->first; ct < factors->end; ct++) {
            read_tile(layout, page, values, group, ct, &tile);
            for (uint32_t i = 0; i < n; i++)
                for (uint32_t rt = 0; rt < kvant_layout_group_tiles(layout, group); rt++) {
                    uint32_t band = (4 * group + rt) / factors->band_tiles;
                    gather_tile(factors->x + i * factors->stride + band * factors->band_stride, ct,
                                x);
                    add_tile(&tile, rt, x, dots + i * dots_stride + KVANT_PAGE_TOKENS * group);
                }
        }
}

static float product_at(const kvant_fixed_rows *rows, const float *w, uint32_t j)
{
    return rows->scale ? w[j] * rows->scale[j] : w[j];
}

static uint32_t largest_product(const kvant_fixed_rows *rows, const float *w, uint32_t n)
{
    uint32_t largest = 0;
    for (uint32_t j = 0; j < n; j++) {
        uint32_t magnitude = kvant_float_bits(product_at(rows, w, j)) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

KVANT_FIXED_POINT_FN(kvant_fixed_point_c)
{
    for (uint32_t i = 0; i < n_rows; i++) {
        const float *w = rows->w + (size_t)i * n;
        int32_t unused[KVANT_MAX_HEAD_DIM / KVANT_TILE],
            *sums = rows->sums ? rows->sums + i * (n / KVANT_TILE) : unused;
        float inverse, zero = 0;
        rows->steps[i * rows->line_stride] =
            kvant_fixed_point_step(largest_product(rows, w, n), rows->limit, &inverse);
        memset(sums, 0, n / KVANT_TILE * sizeof *sums);
        for (uint32_t j = 0; j < n; j++) {
            int16_t x = inverse > 0 ? kvant_fixed_point_round(product_at(rows, w, j) * inverse) : 0;
            rows->x[i * rows->x_stride + j] = x;
            sums[j / KVANT_PAGE_TOKENS * 4 + j % 4] += x;
            zero += rows->zero ? w[j] * rows->zero[j] : 0;
        }
        rows->zeros[i * rows->line_stride] = zero;
    }
}

void kvant_sum_group_c(const kvant_layout *layout, uint32_t group, const int32_t *dots,
                       const kvant_code_sums *out, uint32_t i)
{
    uint32_t tiles = kvant_layout_group_tiles(layout, group), first = KVANT_PAGE_TOKENS * group;
    float *sums = out->sums + i * out->stride + first;
    for (uint32_t j = 0; j < KVANT_TILE * tiles; j++) {
        uint32_t at = j / tiles * 4 + j % tiles;
        size_t band = (size_t)i * out->n_bands + (4 * group + j % tiles) / out->band_tiles;
        float scale = out->scale ? out->scale[first + at] : 1,
              zero = out->zero ? out->zero[first + at] : 1;
        float rest = out->offsets ? out->offsets[band] * zero : 0;
        sums[j] = (out->add ? sums[j] : 0) + (float)dots[at] * (out->steps[band] * scale) + rest;
    }
}

KVANT_SUM_DOTS_FN(kvant_sum_dots_c)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t group = 0; 4 * group < layout->row_tiles; group++)
            kvant_sum_group_c(layout, group, dots + i * dots_stride + KVANT_PAGE_TOKENS * group,
                              out, i);
}

KVANT_TILE_SUMS_FN(kvant_tile_sums_c)
{
    kvant_code_dots_c(layout, page, values, factors, dots, dots_stride, n);
    kvant_sum_dots_c(layout, dots, dots_stride, out, n);
}

KVANT_TOKEN_HALVES_FN(kvant_token_halves_c)
{
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        x[kvant_token_position(t)] = kvant_half_to_float(half[t]);
}

void kvant_whole_group(const kvant_layout *layout, const void *page, uint32_t group,
                       uint32_t *words, const uint32_t **planes)
{
    uint32_t tiles = kvant_layout_group_tiles(layout, group);
    for (uint32_t i = 0; i < layout->n_planes; i++) {
        const kvant_plane *plane = &layout->planes[i];
        const uint32_t *part =
            (const uint32_t *)page + plane->word_offset + (size_t)128 * group * plane->units;
        planes[i] = words;
        for (uint32_t lane = 0; lane < 32 * plane->units; lane++, words += 4, part += tiles)
            for (uint32_t rt = 0; rt < 4; rt++)
                words[rt] = rt < tiles ? part[rt] : 0;
    }
}
