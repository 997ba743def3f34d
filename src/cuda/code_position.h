/* code_position.h - the place of a token's code in a page: word and bit (format.md). C and CUDA
 * share this header; layout.cuh has the same as constants of a kernel. */
#pragma once

#include <stdbool.h>

#if defined(__CUDACC__)
#define KVANT_PLACE __host__ __device__ constexpr
#elif defined(__cplusplus)
#define KVANT_PLACE constexpr
#else
#define KVANT_PLACE static inline
#endif

typedef struct kvant_code_position {
    int word, bit;
} kvant_code_position;

/* The place of a token's channel in a plane of 2^log bits. tiles: number of channel tiles. */
KVANT_PLACE kvant_code_position code_place(int log, bool keys, int tiles, int token, int channel)
{
    const int row = keys ? token : channel, column = keys ? channel : token, rt = row >> 4,
              ct = column >> 4, c = column & 15, group = keys ? 0 : rt >> 2,
              left = keys ? 4 : tiles - 4 * group, shift = 2 - log,
              lane = 4 * (row & 7) + (c >> 1 & 3),
              field = 4 * (ct & ((1 << shift) - 1)) + (row >> 3 & 1) + 2 * (c >> 3);
    const kvant_code_position place = {
        (128 * group << log) + (32 * (ct >> shift) + lane) * (left < 4 ? left : 4) + (rt & 3),
        (field << log) + 16 * (c & 1)
    };
    return place;
}

/* The number of words of such a plane. */
KVANT_PLACE int code_plane_words(int log, bool keys, int tiles)
{
    return keys ? ((tiles << log) + 3) / 4 * 128 : tiles * 32 << log;
}

/* The place of a token's chunk in a plane of p bits. */
KVANT_PLACE kvant_code_position chunk_place(int p, int n_chunks, bool keys, int token, int chunk)
{
    const int row = token % 8, h = token % 16 / 8, tile = token / 16;
    if (keys) {
        const int position = 32 * h + 4 * row + tile;
        const kvant_code_position place = { 4 * p * (chunk / 2) + position % (4 * p),
                                            p * (position / (4 * p)) + 16 * (chunk % 2) };
        return place;
    }
    const int k = 8 * (row / 2) + 4 * h + tile, fields = 16 / p;
    const kvant_code_position place = { n_chunks * (k / fields) + chunk,
                                        p * (k % fields) + 16 * (token % 2) };
    return place;
}

/* The number of words of such a plane, a multiple of 16 bytes. */
KVANT_PLACE int chunk_plane_words(int p, int chunks, bool keys)
{
    return ((keys ? 4 * p * ((chunks + 1) / 2) : 2 * p * chunks) + 3) / 4 * 4;
}
