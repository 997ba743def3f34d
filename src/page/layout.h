/* layout.h - where the code of (token, channel) is in a page: planes, tiles, lanes, fields
 * (format.md). Owns the arithmetic of the code plane for scalar codes. Knows nothing of scales or
 * values. */
#pragma once

#include <stdbool.h>

#include <kvant/codec.h>

#define KVANT_MAX_PLANES 3                      /* 7 bits are planes of 4, 2 and 1 bits */
#define KVANT_TILE 16u                          /* rows and columns of a matrix operand of GPUs */
#define KVANT_MAX_PADDED_DIM KVANT_MAX_HEAD_DIM /* 512 is a multiple of 16 already */

typedef struct kvant_plane {
    uint32_t bits;      /* 4, 2 or 1 */
    uint32_t shift;     /* the lowest bit of the plane within the code */
    uint32_t tiles;     /* column tiles per word, 4 / bits */
    uint32_t units;     /* column units, ceil(column tiles / tiles) */
    size_t word_offset; /* where the plane begins in the page, in 32-bit words */
} kvant_plane;

typedef struct kvant_layout {
    kvant_role role;
    uint32_t head_dim, padded_dim, bits;
    uint32_t row_tiles, column_tiles;
    uint32_t n_planes;
    kvant_plane planes[KVANT_MAX_PLANES];
    size_t code_bytes;
    uint16_t positions[KVANT_MAX_PADDED_DIM]; /* per row: kvant_layout_row_position */
    bool moved;                               /* some positions differ from the tiles' order */
} kvant_layout;

void kvant_layout_init(kvant_layout *layout, kvant_role role, uint32_t head_dim, uint32_t bits);

/* The number of row tiles in row group g: 4, or fewer in the last group. */
static inline uint32_t kvant_layout_group_tiles(const kvant_layout *layout, uint32_t g)
{
    uint32_t left = layout->row_tiles - 4 * g;
    return left < 4 ? left : 4;
}

/* Writes or reads the codes of all channels of one token. codes: padded_dim bytes; put needs zeros
 * as padding. */
void kvant_layout_put(const kvant_layout *layout, void *page, uint32_t token, const uint8_t *codes);
void kvant_layout_get(const kvant_layout *layout, const void *page, uint32_t token, uint8_t *codes);

/* The position of tile row `row` (a token for K, a channel for V) in an unpacked tile. Unpacked
 * tiles keep the order of the words in the page, so that unpacking needs no shuffle. */
static inline uint32_t kvant_layout_row_position(const kvant_layout *layout, uint32_t row)
{
    return layout->positions[row];
}

/* Sets the position of a row, for values whose codes are not in tiles. */
static inline void kvant_layout_move_row(kvant_layout *layout, uint32_t row, uint32_t position)
{
    layout->positions[row] = (uint16_t)position;
    layout->moved = true;
}

/* The position of a token in an unpacked page of K or V. For V tokens are columns. Both roles use
 * the same positions. */
static inline uint32_t kvant_token_position(uint32_t token)
{
    uint32_t tile = token / 16, r = token % 16;
    return 32 * (r / 8) + 4 * (r % 8) + tile;
}
