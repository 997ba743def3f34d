/* layout.cuh - the sizes of a page and the places of its codes as constants of a kernel
 * (format.md). */
#pragma once

#include <cstdint>

namespace kvant
{

constexpr int PAGE_TOKENS = 64;

constexpr int PLANES = 3; /* of a code, at most */

/* Bits of plane i of a code of so many bits, 0 beyond the last: 4, 2 or 1, the largest that is
 * left. */
__host__ __device__ constexpr int plane_bits(int bits, int i)
{
    int plane = 0;
    for (int left = bits; i >= 0; i--, left -= plane)
        plane = left >= 4 ? 4 : left >= 2 ? 2 : left;
    return plane;
}

/* Words of a plane of p bits with so many row and column tiles. */
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

/* Word and bit of the code at (row, column) in a plane of p bits. */
struct Place {
    int word, bit;
};

__host__ __device__ constexpr Place place(int p, int row_tiles, int column_tiles, int row, int column)
{
    int tiles = 4 / p, units = (column_tiles + tiles - 1) / tiles;
    int rt = row / 16, r = row % 16, ct = column / 16, c = column % 16, g = rt / 4;
    int left = row_tiles - 4 * g, in_group = left < 4 ? left : 4;
    int lane = 4 * (r % 8) + c % 8 / 2, field = 4 * (ct % tiles) + r / 8 + 2 * (c / 8);
    return Place{ 128 * g * units + (32 * (ct / tiles) + lane) * in_group + rt % 4, p * field + 16 * (c % 2) };
}

/* The same by shifts: of a token's channel in a plane of 2^log bits. tiles: of channels. */
__host__ __device__ constexpr Place code_place(int log, bool keys, int tiles, int token, int channel)
{
    const int row = keys ? token : channel, column = keys ? channel : token, rt = row >> 4, ct = column >> 4,
              c = column & 15, group = keys ? 0 : rt >> 2, left = keys ? 4 : tiles - 4 * group, shift = 2 - log,
              lane = 4 * (row & 7) + (c >> 1 & 3), field = 4 * (ct & ((1 << shift) - 1)) + (row >> 3 & 1) + 2 * (c >> 3);
    return Place{ (128 * group << log) + (32 * (ct >> shift) + lane) * (left < 4 ? left : 4) + (rt & 3),
                  (field << log) + 16 * (c & 1) };
}

/* Words of such a plane. */
__host__ __device__ constexpr int code_plane_words(int log, bool keys, int tiles)
{
    return keys ? ((tiles << log) + 3) / 4 * 128 : tiles * 32 << log;
}

/* use(log, first word, shift of the code) for each plane of codes of so many bits. */
template <class F> __host__ __device__ __forceinline__ void for_each_plane(int bits, bool keys, int tiles, F &&use)
{
    for (int first = 0, shift = 0, log = 0; shift < bits; shift += 1 << log) {
        const int left = bits - shift;
        log = left >= 4 ? 2 : left >= 2 ? 1 : 0;
        use(log, first, shift);
        first += code_plane_words(log, keys, tiles);
    }
}

/* Chunk codes: words of a plane of p bits, and of all planes above it, each a multiple of 16
 * bytes. */
__host__ __device__ constexpr int chunk_plane_words(int p, int chunks, bool keys)
{
    return ((keys ? 4 * p * ((chunks + 1) / 2) : 2 * p * chunks) + 3) / 4 * 4;
}

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
