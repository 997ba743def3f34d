/* layout.h - the place of the code of (token, channel) in a page: planes, tiles, lanes, fields
 * (format.md).
 *
 * Owns the arithmetic of the code plane for scalar codes; knows nothing of scales or numbers. */
#pragma once

#include <stdbool.h>

#include <kvant/codec.h>

#define KVANT_MAX_PLANES 3
#define KVANT_TILE 16u
#define KVANT_MAX_PADDED_DIM KVANT_MAX_HEAD_DIM /* a multiple of 16 already */

typedef struct kvant_plane {
    uint32_t bits;      /* 4, 2 or 1 */
    uint32_t shift;     /* of these bits within the code */
    uint32_t tiles;     /* column tiles a word, 4 / bits */
    uint32_t units;     /* column units, ceil(column tiles / tiles) */
    size_t word_offset; /* of the plane in the page, in 32-bit words */
} kvant_plane;

typedef struct kvant_layout {
    kvant_role role;
    uint32_t head_dim, padded_dim, bits;
    uint32_t row_tiles, column_tiles;
    uint32_t n_planes;
    kvant_plane planes[KVANT_MAX_PLANES];
    size_t code_bytes;
    uint16_t positions[KVANT_MAX_PADDED_DIM]; /* of rows in unpacked tiles, see below */
    bool moved;                               /* they are not those of tiles */
} kvant_layout;

void kvant_layout_init(kvant_layout *layout, kvant_role role, uint32_t head_dim, uint32_t bits);

/* Row tiles in row group g: 4, or what is left. */
static inline uint32_t kvant_layout_group_tiles(const kvant_layout *layout, uint32_t g)
{
    uint32_t left = layout->row_tiles - 4 * g;
    return left < 4 ? left : 4;
}

/* Writes or reads the codes of all channels of one token. codes: padded_dim bytes, the padding 0
 * for put. */
void kvant_layout_put(const kvant_layout *layout, void *page, uint32_t token, const uint8_t *codes);
void kvant_layout_get(const kvant_layout *layout, const void *page, uint32_t token, uint8_t *codes);

/* Unpacked tiles keep the order of the words in the page, so that unpacking needs no shuffle:
 * position of row tile row i (a token for K, a channel for V) in an unpacked tile of role's
 * layout. */
static inline uint32_t kvant_layout_row_position(const kvant_layout *layout, uint32_t row)
{
    return layout->positions[row];
}

/* Gives a row another position, for values whose codes are not in tiles. */
static inline void kvant_layout_move_row(kvant_layout *layout, uint32_t row, uint32_t position)
{
    layout->positions[row] = (uint16_t)position;
    layout->moved = true;
}

/* The same for the tokens of any page, also for V, whose tokens are columns: unpacked K and V agree
 * on it. */
static inline uint32_t kvant_token_position(uint32_t token)
{
    uint32_t tile = token / 16, r = token % 16;
    return 32 * (r / 8) + 4 * (r % 8) + tile;
}
