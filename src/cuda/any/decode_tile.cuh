/* decode_tile.cuh - a tile: 16 or 32 tokens of a page as fp16 numbers in shared memory, by one warp.
 * attention.cu multiplies tiles. A family has two decoders:
 *
 *     read_any (rows.cuh)   a token's row by a warp, bit by bit the CPU's numbers. Every family has this
 *                           one; decode.cu needs it. Tiles use it when there is no other.
 *     decode_tile (below)   a whole tile, fast: one case per family. */
#pragma once

#include "decode_planes.cuh"

namespace kvant
{

/* Row by row: read(t). */
template <int P, int TOKENS, class F> KVANT_INLINE void fill_rows(const DecodedTile &tile, F &&read)
{
#pragma unroll 1
    for (int t = 0; t < TOKENS; t++) {
        Row<P> row{};
        if (t < tile.valid)
            row = read(tile.first + t);
        float largest = 0;
        unrolled_for (int j = 0; j < Row<P>::PER_LANE; j++)
            largest = fmaxf(largest, fabsf(row.x[j]));
        const float unit = fmaxf(power_above(largest_of(largest)), LEAST_UNIT), inverse = inverse_of(unit);
        each_of(row, tile.d, tile.lane, [&](float x, int channel) {
            tile.numbers[t * tile.stride + channel] = __float2half_rn(x * inverse);
        });
        if (tile.lane == 0)
            tile.units[t] = unit;
    }
}

/* Not inlined: registers are for attention's sums. */
template <int P, int TOKENS>
__device__ __noinline__ void decode_rows(const kvant_cuda_codec &codec, const AnyBook &book, const DecodedTile tile)
{
    fill_rows<P, TOKENS>(tile, [&](int token) { return read_any<P>(codec, book, tile.page, token, tile.scratch, tile.lane); });
}

template <int P, int TOKENS> __device__ __noinline__ void decode_open(const DecodedTile tile)
{
    fill_rows<P, TOKENS>(tile, [&](int token) {
        return load_any<P>(tile.page, (size_t)token * tile.d, KVANT_CUDA_F16, tile.d, tile.lane);
    });
}

/* Of a sealed page. */
template <int P, int TOKENS, bool KEYS>
KVANT_INLINE void decode_tile(const kvant_cuda_codec &codec, const AnyBook &book, const DecodedTile &tile)
{
    switch (codec.params.codes) {
    case KVANT_CUDA_CODES_UNIFORM:
    case KVANT_CUDA_CODES_CODEBOOK: return decode_planes<TOKENS, KEYS>(codec, book.values, tile);
    default: return decode_rows<P, TOKENS>(codec, book, tile);
    }
}

} // namespace kvant
