/* layout.c - see layout.h. format.md, "Scalar codes", has the formulas. */
#include "layout.h"

static const uint8_t plane_bits[9][KVANT_MAX_PLANES] = {
    { 0 }, { 1 }, { 2 }, { 2, 1 }, { 4 }, { 4, 1 }, { 4, 2 }, { 4, 2, 1 }, { 4, 4 },
};

/* The position of row 16 rt + r within its row group, in the order of words (r mod 8, rt) and
 * fields (r / 8). */
static uint16_t position(const kvant_layout *layout, uint32_t row)
{
    uint32_t rt = row / 16, r = row % 16, g = rt / 4, tiles = kvant_layout_group_tiles(layout, g);
    return (uint16_t)(64 * g + 8 * tiles * (r / 8) + tiles * (r % 8) + rt % 4);
}

void kvant_layout_init(kvant_layout *layout, kvant_role role, uint32_t head_dim, uint32_t bits)
{
    uint32_t padded = (head_dim + KVANT_TILE - 1) / KVANT_TILE * KVANT_TILE;
    uint32_t rows = role == KVANT_ROLE_K ? KVANT_PAGE_TOKENS : padded;
    uint32_t columns = role == KVANT_ROLE_K ? padded : KVANT_PAGE_TOKENS;
    *layout = (kvant_layout){ .role = role,
                              .head_dim = head_dim,
                              .padded_dim = padded,
                              .bits = bits,
                              .row_tiles = rows / KVANT_TILE,
                              .column_tiles = columns / KVANT_TILE };
    size_t words = 0;
    uint32_t shift = 0;
    for (uint32_t i = 0; i < KVANT_MAX_PLANES && plane_bits[bits][i]; i++) {
        uint32_t p = plane_bits[bits][i], tiles = 4 / p;
        uint32_t units = (layout->column_tiles + tiles - 1) / tiles;
        layout->planes[i] = (kvant_plane){
            .bits = p, .shift = shift, .tiles = tiles, .units = units, .word_offset = words
        };
        words += (size_t)32 * units * layout->row_tiles;
        shift += p;
        layout->n_planes++;
    }
    layout->code_bytes = words * sizeof(uint32_t);
    for (uint32_t row = 0; row < rows; row++)
        layout->positions[row] = position(layout, row);
}

/* The bits of a plane for a word: the codes of an even and an odd column, 16 bits apart. */
static uint32_t pair(uint32_t even, uint32_t odd, const kvant_plane *plane, uint32_t mask,
                     uint32_t field)
{
    return ((even >> plane->shift & mask) | (odd >> plane->shift & mask) << 16)
           << plane->bits * field;
}

/* Writes a token of K, which is a row. A word holds 4 of its codes: columns 2q and 2q + 1 of a
 * tile, and then the columns 8 further. */
static void put_row(const kvant_layout *layout, const kvant_plane *plane, uint32_t *words,
                    uint32_t row, const uint8_t *codes)
{
    uint32_t r = row % 16, mask = (1u << plane->bits) - 1, lane_words = 4 * (r % 8) * 4 + row / 16;
    for (uint32_t ct = 0; ct < layout->column_tiles; ct++, codes += KVANT_TILE) {
        uint32_t *word =
            words + plane->word_offset + (size_t)128 * (ct / plane->tiles) + lane_words;
        uint32_t field = 4 * (ct % plane->tiles) + r / 8;
        uint32_t clear = ~pair(UINT32_MAX, UINT32_MAX, plane, mask, field) &
                         ~pair(UINT32_MAX, UINT32_MAX, plane, mask, field + 2);
        for (uint32_t q = 0; q < 4; q++)
            word[4 * q] = (word[4 * q] & clear) |
                          pair(codes[2 * q], codes[2 * q + 1], plane, mask, field) |
                          pair(codes[2 * q + 8], codes[2 * q + 9], plane, mask, field + 2);
    }
}

/* Writes a token of V, which is a column. A word holds 2 of its codes: rows r and r + 8 of a
 * tile. */
static void put_column(const kvant_layout *layout, const kvant_plane *plane, uint32_t *words,
                       uint32_t column, const uint8_t *codes)
{
    uint32_t ct = column / 16, c = column % 16, mask = (1u << plane->bits) - 1;
    uint32_t lane = 32 * (ct / plane->tiles) + c % 8 / 2;
    uint32_t bit = plane->bits * (4 * (ct % plane->tiles) + 2 * (c / 8)) + 16 * (c % 2);
    uint32_t clear = ~(mask << bit | mask << (bit + plane->bits));
    for (uint32_t rt = 0; rt < layout->row_tiles; rt++, codes += KVANT_TILE) {
        uint32_t g = rt / 4, tiles = kvant_layout_group_tiles(layout, g);
        uint32_t *word = words + plane->word_offset + (size_t)128 * g * plane->units +
                         (size_t)lane * tiles + rt % 4;
        for (uint32_t r = 0; r < 8; r++, word += 4 * tiles)
            *word = (*word & clear) | (codes[r] >> plane->shift & mask) << bit |
                    (codes[r + 8] >> plane->shift & mask) << (bit + plane->bits);
    }
}

void kvant_layout_put(const kvant_layout *layout, void *page, uint32_t token, const uint8_t *codes)
{
    for (uint32_t i = 0; i < layout->n_planes; i++)
        if (layout->role == KVANT_ROLE_K)
            put_row(layout, &layout->planes[i], page, token, codes);
        else
            put_column(layout, &layout->planes[i], page, token, codes);
}

static void get_row(const kvant_layout *layout, const kvant_plane *plane, const uint32_t *words,
                    uint32_t row, uint8_t *codes)
{
    uint32_t r = row % 16, mask = (1u << plane->bits) - 1, lane_words = 4 * (r % 8) * 4 + row / 16;
    for (uint32_t ct = 0; ct < layout->column_tiles; ct++, codes += KVANT_TILE) {
        const uint32_t *word =
            words + plane->word_offset + (size_t)128 * (ct / plane->tiles) + lane_words;
        uint32_t bit = plane->bits * (4 * (ct % plane->tiles) + r / 8), far = bit + 2 * plane->bits;
        for (uint32_t q = 0; q < 4; q++) {
            codes[2 * q] |= (uint8_t)((word[4 * q] >> bit & mask) << plane->shift);
            codes[2 * q + 1] |= (uint8_t)((word[4 * q] >> (bit + 16) & mask) << plane->shift);
            codes[2 * q + 8] |= (uint8_t)((word[4 * q] >> far & mask) << plane->shift);
            codes[2 * q + 9] |= (uint8_t)((word[4 * q] >> (far + 16) & mask) << plane->shift);
        }
    }
}

static void get_column(const kvant_layout *layout, const kvant_plane *plane, const uint32_t *words,
                       uint32_t column, uint8_t *codes)
{
    uint32_t ct = column / 16, c = column % 16, mask = (1u << plane->bits) - 1;
    uint32_t lane = 32 * (ct / plane->tiles) + c % 8 / 2;
    uint32_t bit = plane->bits * (4 * (ct % plane->tiles) + 2 * (c / 8)) + 16 * (c % 2);
    for (uint32_t rt = 0; rt < layout->row_tiles; rt++, codes += KVANT_TILE) {
        uint32_t g = rt / 4, tiles = kvant_layout_group_tiles(layout, g);
        const uint32_t *word = words + plane->word_offset + (size_t)128 * g * plane->units +
                               (size_t)lane * tiles + rt % 4;
        for (uint32_t r = 0; r < 8; r++, word += 4 * tiles) {
            codes[r] |= (uint8_t)((*word >> bit & mask) << plane->shift);
            codes[r + 8] |= (uint8_t)((*word >> (bit + plane->bits) & mask) << plane->shift);
        }
    }
}

void kvant_layout_get(const kvant_layout *layout, const void *page, uint32_t token, uint8_t *codes)
{
    for (uint32_t channel = 0; channel < layout->padded_dim; channel++)
        codes[channel] = 0;
    for (uint32_t i = 0; i < layout->n_planes; i++)
        if (layout->role == KVANT_ROLE_K)
            get_row(layout, &layout->planes[i], page, token, codes);
        else
            get_column(layout, &layout->planes[i], page, token, codes);
}
