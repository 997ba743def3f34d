/* decode_tile.cuh - a tile: 32 tokens of a page as fp16 numbers in shared memory, by a team of warps.
 * attention.cu multiplies tiles. A family has two decoders:
 *
 *     read_any (rows.cuh)   a token's row by a warp, bit by bit the CPU's numbers. Every family has this
 *                           one; decode.cu needs it. Tiles use it when there is no other.
 *     decode_tile (below)   a whole tile, fast. */
#pragma once

#include "decode_chunks.cuh"
#include "decode_trellis.cuh"

namespace kvant
{

/* Row by row: read(t). Warps of the team take turns. */
template <class F> KVANT_INLINE void fill_rows(const DecodedTile &tile, F &&read)
{
#pragma unroll 1
    for (int t = tile.rank; t < TILE_TOKENS; t += tile.team_warps) {
        Row<MOST_DIM> row{};
        if (t < tile.valid)
            row = read(tile.first + t);
        float largest = 0;
        unrolled_for (int j = 0; j < Row<MOST_DIM>::PER_LANE; j++)
            largest = fmaxf(largest, fabsf(row.x[j]));
        const float unit = fmaxf(power_above(largest_of(largest)), LEAST_UNIT), inverse = inverse_of(unit);
        each_of(row, tile.d, tile.lane, [&](float x, int channel) {
            tile.numbers[t * tile.stride + channel] = __float2half_rn(x * inverse);
        });
        if (tile.lane == 0)
            tile.units[t] = unit;
    }
}

__device__ __noinline__ void decode_rows(const kvant_cuda_codec &codec, const AnyBook &book, const DecodedTile tile)
{
    fill_rows(tile, [&](int token) {
        return read_any<MOST_DIM>(codec, book, tile.page, token, tile.scratch, tile.lane, tile.kv_head);
    });
}

__device__ __noinline__ void decode_open(const DecodedTile tile)
{
    fill_rows(tile, [&](int token) {
        return load_any<MOST_DIM>(tile.page, (size_t)token * tile.d, KVANT_CUDA_F16, tile.d, tile.lane);
    });
}

/* What a kernel can decode: a decoder that needs many registers would keep attention's sums in memory for all. */
enum class Decoders {
    PLAIN, /* a code per channel and a scale per token */
    TILES, /* groups, trellises and chunks, too */
    ALL
};

__host__ __device__ inline Decoders decoders_for(const kvant_cuda_codec &codec)
{
    switch (codec.params.codes) {
    case KVANT_CUDA_CODES_OPEN:
    case KVANT_CUDA_CODES_CODEBOOK: return Decoders::PLAIN;
    case KVANT_CUDA_CODES_UNIFORM: return has_groups(codec) ? Decoders::TILES : Decoders::PLAIN;
    case KVANT_CUDA_CODES_TRELLIS: return Decoders::TILES;
    default: return has_chunk_tiles(codec) ? Decoders::TILES : Decoders::ALL;
    }
}

/* Of a sealed page. */
template <bool KEYS, Decoders WITH>
KVANT_INLINE void decode_tile(const kvant_cuda_codec &codec, const AnyBook &book, const DecodedTile &tile)
{
    const kvant_cuda_codes codes = codec.params.codes;
    if (WITH == Decoders::PLAIN || codes == KVANT_CUDA_CODES_UNIFORM || codes == KVANT_CUDA_CODES_CODEBOOK)
        return decode_planes<KEYS, WITH == Decoders::PLAIN>(codec, book.values, tile);
    if constexpr (WITH != Decoders::PLAIN) {
        if (codes == KVANT_CUDA_CODES_TRELLIS)
            return decode_trellis<KEYS>(codec.params, book.trellis.whole, tile);
        if (has_chunk_tiles(codec))
            return codec.general.view.kind == KVANT_GENERAL_TRIPLETS ? decode_chunks<3, KEYS>(codec.general, tile)
                                                                     : decode_chunks<4, KEYS>(codec.general, tile);
    }
    if constexpr (WITH == Decoders::ALL)
        decode_rows(codec, book, tile);
}

} // namespace kvant
