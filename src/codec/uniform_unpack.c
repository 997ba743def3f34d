/* uniform_unpack.c - pages of uniform codes as tiles for attention: kernels unpack codes, then each
 * group gets its line (scale, zero point).
 *
 * Columns of a tile are tokens for K and channels for V. A group may lie along the tile's rows:
 * then the line of a number depends on its column. Or a group lies across the rows: then
 * neighbouring rows share lines. Scaling kernels take whole rows of lines in both cases. */
#include <string.h>

#include "uniform.h"

/* The most lines of a page: groups of 8 channels in every token. Codecs with groups of tokens have
 * fewer. */
#define MAX_LINES (KVANT_MAX_HEAD_DIM / 8 * KVANT_PAGE_TOKENS)

/* Every line of a page, in the order in which scales are stored. */
typedef struct page_lines {
    _Alignas(64) float scale[MAX_LINES];
    _Alignas(64) float zero[MAX_LINES];
} page_lines;

/* Lines of one row of the tile, in the order of its columns. */
typedef struct row_lines {
    _Alignas(64) float scale[KVANT_MAX_PADDED_DIM];
    _Alignas(64) float zero[KVANT_MAX_PADDED_DIM];
} row_lines;

static void read_lines(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                       page_lines *all)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    const uint16_t *stored = kvant_codec_metadata_of(codec, page);
    uint32_t n = (uint32_t)kvant_uniform_n_scales(codec);
    kernels->half_to_float(stored, all->scale, n);
    if (u->mode == KVANT_UNIFORM_SYM)
        memset(all->zero, 0, n * sizeof *all->zero);
    else
        kernels->half_to_float(stored + n, all->zero, n);
    for (uint32_t i = 0; u->mode != KVANT_UNIFORM_ASYM && i < n; i++) {
        kvant_uniform_line line = kvant_uniform_line_of(u, stored[i], all->scale[i], all->zero[i]);
        all->scale[i] = line.scale;
        all->zero[i] = line.zero;
    }
}

static void token_lines(const page_lines *all, uint32_t group, row_lines *row)
{
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        row->scale[kvant_token_position(t)] = all->scale[group * KVANT_PAGE_TOKENS + t];
        row->zero[kvant_token_position(t)] = all->zero[group * KVANT_PAGE_TOKENS + t];
    }
}

/* K, groups of channels: a group is neighbouring rows of the tile, which share a line per token. */
static void scale_key_tokens(const kvant_codec *codec, const kvant_kernels *kernels,
                             const page_lines *all, float *tile)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    row_lines row;
    for (uint32_t group = 0; group < u->n_groups; group++) {
        uint32_t first = group * u->group, left = codec->info.head_dim - first;
        token_lines(all, group, &row);
        kernels->scale_columns(tile + (size_t)first * KVANT_PAGE_TOKENS,
                               left < u->group ? left : u->group, KVANT_PAGE_TOKENS, row.scale,
                               row.zero);
    }
}

/* K, groups of tokens. Positions of tokens run through the 4 token tiles first. So the lines of the
 * 4 tiles repeat along a row. The kernel gets a row of 64 columns as 4 rows of 16. */
static void scale_key_channels(const kvant_codec *codec, const kvant_kernels *kernels,
                               const page_lines *all, float *tile)
{
    uint32_t group = kvant_uniform_of(codec)->group, padded = codec->layout.padded_dim;
    _Alignas(64) float scale[KVANT_TILE], zero[KVANT_TILE];
    for (uint32_t j = 0; j < codec->info.head_dim; j++) {
        for (uint32_t i = 0; i < KVANT_TILE; i++) {
            uint32_t at = KVANT_TILE * (i % 4) / group * padded + j;
            scale[i] = all->scale[at];
            zero[i] = all->zero[at];
        }
        kernels->scale_columns(tile + (size_t)j * KVANT_PAGE_TOKENS, 4, KVANT_TILE, scale, zero);
    }
}

/* V, one group a token. */
static void scale_value_rows(const kvant_codec *codec, const kvant_kernels *kernels,
                             const page_lines *all, float *tile)
{
    row_lines row;
    token_lines(all, 0, &row);
    kernels->scale_rows(tile, KVANT_PAGE_TOKENS, codec->layout.padded_dim, row.scale, row.zero);
}

/* Spreads one number per group, 64 apart, to every column of a row of the tile. A group is a
 * whole number of half channel tiles. Column order runs through the channel tiles of a row group
 * first (4 tiles, fewer in the last), so the numbers of their halves repeat 8 times. */
static void spread(const kvant_layout *layout, const uint8_t *group_of_half, const float *numbers,
                   float *row)
{
    for (uint32_t first = 0; first < layout->row_tiles; first += 4)
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t tiles = kvant_layout_group_tiles(layout, first / 4);
            const uint8_t *group = group_of_half + 2 * first + half;
            float *column = row + 16 * first + 8 * tiles * half;
            if (tiles == 4) {
                const float four[4] = { numbers[group[0] * KVANT_PAGE_TOKENS],
                                        numbers[group[2] * KVANT_PAGE_TOKENS],
                                        numbers[group[4] * KVANT_PAGE_TOKENS],
                                        numbers[group[6] * KVANT_PAGE_TOKENS] };
                for (uint32_t i = 0; i < 8; i++)
                    memcpy(column + 4 * i, four, sizeof four);
                continue;
            }
            for (uint32_t i = 0; i < 8 * tiles; i++)
                column[i] = numbers[group[2 * (i % tiles)] * KVANT_PAGE_TOKENS];
        }
}

/* V, groups of channels: every row of the tile is a token and has its own lines. */
static void scale_value_tokens(const kvant_codec *codec, const kvant_kernels *kernels,
                               const page_lines *all, float *tile)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    uint32_t padded = codec->layout.padded_dim;
    uint8_t group_of_half[KVANT_MAX_PADDED_DIM / 8];
    row_lines row;
    for (uint32_t half = 0; half < padded / 8; half++) {
        /* padding channels beyond the last group use the line of that group */
        uint32_t group = 8 * half / u->group;
        group_of_half[half] = (uint8_t)(group < u->n_groups ? group : u->n_groups - 1);
    }
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        spread(&codec->layout, group_of_half, all->scale + t, row.scale);
        spread(&codec->layout, group_of_half, all->zero + t, row.zero);
        kernels->scale_columns(tile + (size_t)kvant_token_position(t) * padded, 1, padded,
                               row.scale, row.zero);
    }
}

/* V, groups of tokens: the tokens of a group share a line per channel. */
static void scale_value_channels(const kvant_codec *codec, const kvant_kernels *kernels,
                                 const page_lines *all, float *tile)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    uint32_t padded = codec->layout.padded_dim;
    row_lines row;
    for (uint32_t first = 0; first < KVANT_PAGE_TOKENS; first += u->group) {
        for (uint32_t j = 0; j < padded; j++) {
            uint32_t position = kvant_layout_row_position(&codec->layout, j);
            row.scale[position] = all->scale[first / u->group * padded + j];
            row.zero[position] = all->zero[first / u->group * padded + j];
        }
        for (uint32_t t = first; t < first + u->group; t++)
            kernels->scale_columns(tile + (size_t)kvant_token_position(t) * padded, 1, padded,
                                   row.scale, row.zero);
    }
}

static void scale_values(const kvant_codec *codec, const kvant_kernels *kernels,
                         const page_lines *all, float *tile)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    if (u->per_channel)
        scale_value_channels(codec, kernels, all, tile);
    else if (u->n_groups > 1)
        scale_value_tokens(codec, kernels, all, tile);
    else
        scale_value_rows(codec, kernels, all, tile);
}

static void scale_keys(const kvant_codec *codec, const kvant_kernels *kernels,
                       const page_lines *all, float *tile)
{
    uint32_t d = codec->info.head_dim;
    if (kvant_uniform_of(codec)->per_channel)
        scale_key_channels(codec, kernels, all, tile);
    else
        scale_key_tokens(codec, kernels, all, tile);
    memset(tile + (size_t)d * KVANT_PAGE_TOKENS, 0,
           (size_t)(codec->layout.padded_dim - d) * KVANT_PAGE_TOKENS * sizeof *tile);
}

void kvant_uniform_unpack(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                          float *tile)
{
    page_lines all;
    read_lines(codec, kernels, page, &all);
    kernels->unpack(&codec->layout, page, NULL, 0, tile);
    if (codec->info.role == KVANT_ROLE_V)
        scale_values(codec, kernels, &all, tile);
    else
        scale_keys(codec, kernels, &all, tile);
}

/* Converts the halves of all channels, in the order of positions, and fills the rest with 0. */
static void channel_halves(const kvant_codec *codec, const kvant_kernels *kernels,
                           const uint16_t *stored, float *out)
{
    uint32_t d = codec->info.head_dim, whole = d / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;
    for (uint32_t j = 0; j < whole; j += KVANT_PAGE_TOKENS)
        kernels->token_halves(stored + j, out + j);
    if (whole == d)
        return;
    _Alignas(64) uint16_t tail[KVANT_PAGE_TOKENS] = { 0 };
    memcpy(tail, stored + whole, (d - whole) * sizeof *tail);
    kernels->token_halves(tail, out + whole);
}

static void read_bands(const kvant_codec *codec, const kvant_kernels *kernels,
                       const uint16_t *stored, float *out)
{
    const kvant_code_product *product = &codec->product;
    for (uint32_t band = 0; band < product->n_bands; band++, out += product->stride)
        if (kvant_uniform_of(codec)->per_channel)
            channel_halves(codec, kernels, stored + (size_t)band * codec->layout.padded_dim, out);
        else
            kernels->token_halves(stored + (size_t)band * KVANT_PAGE_TOKENS, out);
}

void kvant_uniform_lines(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                         kvant_code_lines *lines)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    const uint16_t *stored = kvant_codec_metadata_of(codec, page);
    uint32_t n = codec->product.n_bands * codec->product.stride;
    read_bands(codec, kernels, stored, lines->scale);
    if (!codec->product.has_zero)
        return;
    read_bands(codec, kernels, stored + kvant_uniform_n_scales(codec), lines->zero);
    if (kvant_uniform_is_hybrid(u)) /* -scale * bias + scale * bias = 0 for symmetric groups */
        for (uint32_t i = 0; i < n; i++) {
            bool asymmetric = signbit(lines->scale[i]);
            lines->scale[i] = fabsf(lines->scale[i]);
            lines->zero[i] = asymmetric ? lines->zero[i] + lines->scale[i] * u->bias : 0;
        }
    else
        for (uint32_t i = 0; i < n; i++)
            lines->zero[i] += lines->scale[i] * u->bias;
}
