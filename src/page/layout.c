/* layout.c - see layout.h; the formulas are those of docs/format.md, "Scalar codes". */
#include "layout.h"

static const uint8_t plane_bits[9][KVANT_MAX_PLANES] = {
    { 0 }, { 1 }, { 2 }, { 2, 1 }, { 4 }, { 4, 1 }, { 4, 2 }, { 4, 2, 1 }, { 4, 4 },
};

void kvant_layout_init(kvant_layout *layout, kvant_role role, uint32_t head_dim, uint32_t bits)
{
    uint32_t padded = (head_dim + KVANT_TILE - 1) / KVANT_TILE * KVANT_TILE;
    uint32_t rows = role == KVANT_ROLE_K ? KVANT_PAGE_TOKENS : padded;
    uint32_t columns = role == KVANT_ROLE_K ? padded : KVANT_PAGE_TOKENS;
    *layout = (kvant_layout){ .role = role, .head_dim = head_dim, .padded_dim = padded, .bits = bits,
                              .row_tiles = rows / KVANT_TILE, .column_tiles = columns / KVANT_TILE };
    size_t words = 0;
    uint32_t shift = 0;
    for (uint32_t i = 0; i < KVANT_MAX_PLANES && plane_bits[bits][i]; i++) {
        uint32_t p = plane_bits[bits][i], tiles = 4 / p;
        uint32_t units = (layout->column_tiles + tiles - 1) / tiles;
        layout->planes[i] =
            (kvant_plane){ .bits = p, .shift = shift, .tiles = tiles, .units = units, .word_offset = words };
        words += (size_t)32 * units * layout->row_tiles;
        shift += p;
        layout->n_planes++;
    }
    layout->code_bytes = words * sizeof(uint32_t);
}

typedef struct position {
    size_t word;
    uint32_t bit;
} position;

static position locate(const kvant_layout *layout, const kvant_plane *plane, uint32_t row, uint32_t column)
{
    uint32_t rt = row / 16, r = row % 16, ct = column / 16, c = column % 16, g = rt / 4;
    uint32_t tiles = kvant_layout_group_tiles(layout, g), lane = 4 * (r % 8) + c % 8 / 2;
    uint32_t field = 4 * (ct % plane->tiles) + r / 8 + 2 * (c / 8);
    size_t word = plane->word_offset + (size_t)128 * g * plane->units +
                  (size_t)(32 * (ct / plane->tiles) + lane) * tiles + rt % 4;
    return (position){ word, plane->bits * field + 16 * (c % 2) };
}

static position locate_code(const kvant_layout *layout, const kvant_plane *plane, uint32_t token, uint32_t channel)
{
    return layout->role == KVANT_ROLE_K ? locate(layout, plane, token, channel)
                                        : locate(layout, plane, channel, token);
}

void kvant_layout_put(const kvant_layout *layout, void *page, uint32_t token, const uint8_t *codes)
{
    uint32_t *words = page;
    for (uint32_t i = 0; i < layout->n_planes; i++) {
        const kvant_plane *plane = &layout->planes[i];
        uint32_t mask = (1u << plane->bits) - 1;
        for (uint32_t channel = 0; channel < layout->head_dim; channel++) {
            position at = locate_code(layout, plane, token, channel);
            uint32_t code = (uint32_t)codes[channel] >> plane->shift & mask;
            words[at.word] = (words[at.word] & ~(mask << at.bit)) | code << at.bit;
        }
    }
}

void kvant_layout_get(const kvant_layout *layout, const void *page, uint32_t token, uint8_t *codes)
{
    const uint32_t *words = page;
    for (uint32_t channel = 0; channel < layout->head_dim; channel++)
        codes[channel] = 0;
    for (uint32_t i = 0; i < layout->n_planes; i++) {
        const kvant_plane *plane = &layout->planes[i];
        uint32_t mask = (1u << plane->bits) - 1;
        for (uint32_t channel = 0; channel < layout->head_dim; channel++) {
            position at = locate_code(layout, plane, token, channel);
            codes[channel] |= (uint8_t)((words[at.word] >> at.bit & mask) << plane->shift);
        }
    }
}

uint32_t kvant_layout_row_position(const kvant_layout *layout, uint32_t row)
{
    uint32_t rt = row / 16, r = row % 16, g = rt / 4, tiles = kvant_layout_group_tiles(layout, g);
    return 64 * g + 8 * tiles * (r / 8) + tiles * (r % 8) + rt % 4;
}
