/* layout.cuh - the sizes of a page and the places of its codes as constants of a kernel
 * (format.md). */
#pragma once

#include "code_position.h"

#include <cstdint>

namespace kvant
{

using Place = kvant_code_position;

constexpr int PAGE_TOKENS = 64;

constexpr int PLANES = 3; /* the most planes of a code */

/* The bits of plane i of a code of `bits` bits: the largest of 4, 2 and 1 that is left. The result
 * is 0 beyond the last plane. */
__host__ __device__ constexpr int plane_bits(int bits, int i)
{
    int plane = 0;
    for (int left = bits; i >= 0; i--, left -= plane)
        plane = left >= 4 ? 4 : left >= 2 ? 2 : left;
    return plane;
}

/* The number of words of a plane of p bits with this many row and column tiles. */
__host__ __device__ constexpr int plane_words(int p, int row_tiles, int column_tiles)
{
    return p == 0 ? 0 : (column_tiles * p + 3) / 4 * 32 * row_tiles;
}

__host__ __device__ constexpr int code_bytes(int bits, int row_tiles, int column_tiles)
{
    int words = 0;
    for (int i = 0; i < PLANES; i++)
        words += plane_words(plane_bits(bits, i), row_tiles, column_tiles);
    return 4 * words;
}

/* The place of the code at (row, column) in a plane of p bits. */
__host__ __device__ constexpr Place place(int p, int row_tiles, int column_tiles, int row,
                                          int column)
{
    int tiles = 4 / p, units = (column_tiles + tiles - 1) / tiles;
    int rt = row / 16, r = row % 16, ct = column / 16, c = column % 16, g = rt / 4;
    int left = row_tiles - 4 * g, in_group = left < 4 ? left : 4;
    int lane = 4 * (r % 8) + c % 8 / 2, field = 4 * (ct % tiles) + r / 8 + 2 * (c / 8);
    return Place{ 128 * g * units + (32 * (ct / tiles) + lane) * in_group + rt % 4,
                  p * field + 16 * (c % 2) };
}

/* Calls use(log, first word, shift of the code) for each plane of codes of `bits` bits. */
template <class F>
__host__ __device__ __forceinline__ void for_each_plane(int bits, bool keys, int tiles, F &&use)
{
    for (int first = 0, shift = 0, log = 0; shift < bits; shift += 1 << log) {
        const int left = bits - shift;
        log = left >= 4 ? 2 : left >= 2 ? 1 : 0;
        use(log, first, shift);
        first += code_plane_words(log, keys, tiles);
    }
}

/* For chunk codes: the number of words of all planes that come before the plane of p bits. */
__host__ __device__ constexpr int chunk_plane_at(int bits, int p, int chunks, bool keys)
{
    int words = 0;
    for (int wider = 16; wider > p; wider /= 2)
        if (bits & wider)
            words += chunk_plane_words(wider, chunks, keys);
    return words;
}

__host__ __device__ constexpr int chunk_code_bytes(int bits, int chunks, bool keys)
{
    return 4 * chunk_plane_at(bits, 0, chunks, keys);
}

} // namespace kvant
