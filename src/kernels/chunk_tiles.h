/* chunk_tiles.h - the order of channels in unpacked tiles of chunk codes. Kernels write this order,
 * and codecs report it to attention (kvant_layout.positions).
 *
 * Keys keep the order of channels. Values of triplets lie component by component: the first
 * components of all chunks come first. So kernels store vectors of chunks without shuffles. Values
 * of 4-channel chunks keep the order of channels. */
#pragma once

#include <string.h>

#include "../base/half.h"
#include "kernels.h"

/* Component j of chunk c is number first[j] + c of a token's row. n[j] chunks have a component
 * j. */
typedef struct kvant_triplet_positions {
    uint32_t first[3], n[3];
} kvant_triplet_positions;

static inline kvant_triplet_positions kvant_triplet_positions_of(uint32_t dim)
{
    const uint32_t x = (dim + 2) / 3, y = (dim + 1) / 3;
    return (kvant_triplet_positions){ { 0, x, x + y }, { x, y, dim / 3 } };
}

static inline uint32_t kvant_padded_dim(uint32_t dim)
{
    return (dim + KVANT_TILE - 1) / KVANT_TILE * KVANT_TILE;
}

/* Zeroes the padding channels of K. */
static inline void kvant_clear_padding(uint32_t dim, float *tile)
{
    memset(tile + (size_t)dim * KVANT_PAGE_TOKENS, 0,
           (size_t)(kvant_padded_dim(dim) - dim) * KVANT_PAGE_TOKENS * sizeof *tile);
}

/* Writes the first n numbers of a slot, `step` apart. */
static inline void kvant_place_outlier(const uint16_t *outliers, uint32_t slot, uint32_t token,
                                       uint32_t n, size_t step, float *out)
{
    const uint16_t *half = outliers + ((size_t)slot * KVANT_PAGE_TOKENS + token) * 4;
    for (uint32_t j = 0; j < n; j++)
        out[j * step] = kvant_half_to_float(half[j]);
}
