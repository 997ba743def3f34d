/* decode_tile.cuh - tokens of a sealed page as fp16 numbers in shared memory, by all threads of a block:
 * what attention.cu multiplies with. A family has two decoders:
 *
 *     rows.cuh, read_any         a token's row by a warp, bit by bit the CPU's numbers. Every family has
 *                                this one; decode.cu needs it. Attention uses it when there is no other.
 *     decode_tile (below)        all tokens of a tile, fast; one case per family. */
#pragma once

#include "../attention/query.cuh"
#include "rows.cuh"

namespace kvant
{

constexpr float LEAST_UNIT = 0x1p-40f; /* so that weights over units stay within fp32 */

/* The number of token first + t and channel c, over units[t], belongs into numbers[t * stride + c]. A unit
 * is a power of two, at least LEAST_UNIT, and above every number of the token. Rows valid .. tokens - 1 become zeros, with any unit. */
struct DecodedTile {
    const kvant_cuda_codec &codec;
    const AnyBook &book;  /* in shared memory */
    const uint8_t *page;  /* codes and metadata; in shared memory, or in device memory where shared memory is short */
    __half *numbers;      /* in shared memory, rows 16 bytes apart from a multiple of 128 */
    float *units;         /* in shared memory */
    uint8_t *bits;        /* scratch in shared memory: MOST_DIM bytes for each warp */
    int stride, first, tokens, valid;
    int warp, lane, warps;
};

/* A power of two above all numbers of a row. */
template <int P> KVANT_INLINE float unit_of(const Row<P> &row)
{
    float largest = 0;
    unrolled_for (int j = 0; j < Row<P>::PER_LANE; j++)
        largest = fmaxf(largest, fabsf(row.x[j]));
    return fmaxf(power_above(largest_of(largest)), LEAST_UNIT);
}

/* Row by row, as decode.cu reads them. */
template <int P> KVANT_INLINE void decode_rows(const DecodedTile &tile)
{
    const int d = (int)tile.codec.params.head_dim;
#pragma unroll 1
    for (int t = tile.warp; t < tile.tokens; t += tile.warps) {
        Row<P> row{};
        if (t < tile.valid)
            row = read_any<P>(tile.codec, tile.book, tile.page, tile.first + t, tile.bits + tile.warp * MOST_DIM, tile.lane);
        const float unit = unit_of(row), inverse = __frcp_rn(unit);
        each_of(row, d, tile.lane, [&](float x, int channel) {
            tile.numbers[t * tile.stride + channel] = __float2half_rn(x * inverse);
        });
        if (tile.lane == 0)
            tile.units[t] = unit;
    }
}

/* Called by all threads, which neither before nor after it wait for each other. */
template <int P> KVANT_INLINE void decode_tile(const DecodedTile &tile)
{
    switch (tile.codec.params.codes) {
    default: return decode_rows<P>(tile);
    }
}

} // namespace kvant
