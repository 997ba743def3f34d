/* decode_tile.cuh - a tile: 32 tokens of a page as fp16 numbers in shared memory, by a team of warps.
 * attention.cu multiplies tiles. A family has two decoders:
 *
 *     read_any (rows.cuh)   a token's row by a warp, bit by bit the CPU's numbers. Every family has this
 *                           one; decode.cu needs it. Tiles use it when there is no other.
 *     decode_tile (below)   a whole tile, fast. */
#pragma once

#include "decode_chunks.cuh"
#include "decode_polar.cuh"
#include "decode_rotated.cuh"
#include "decode_trellis.cuh"
#include "decode_uniform.cuh"

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

__device__ static __noinline__ void decode_rows(const kvant_cuda_codec &codec, const AnyBook &book, const DecodedTile tile)
{
    fill_rows(tile, [&](int token) {
        return read_any<MOST_DIM>(codec, book, tile.page, token, tile.scratch, tile.lane, tile.kv_head);
    });
}

__device__ static __noinline__ void decode_open(const DecodedTile tile, kvant_cuda_type type)
{
    fill_rows(tile, [&](int token) {
        return load_any<MOST_DIM>(tile.page, (size_t)token * tile.d, type, tile.d, tile.lane);
    });
}

template <bool KEYS> KVANT_INLINE void decode_chunk_codes(const kvant_general &g, const DecodedTile &tile)
{
    g.view.kind == KVANT_GENERAL_TRIPLETS ? decode_chunks<3, KEYS>(g, tile) : decode_chunks<4, KEYS>(g, tile);
}

/* Codecs in the general form. */
template <bool KEYS>
KVANT_INLINE void decode_family(const kvant_cuda_codec &codec, const AnyBook &book, const DecodedTile &tile)
{
    const kvant_general &g = codec.general;
    const kvant_codebook_place &levels = g.view.books[0];
    switch (g.view.kind) {
    case KVANT_GENERAL_RAW:
        return decode_open(tile, g.view.raw == 0 ? KVANT_CUDA_F32 : g.view.raw == 1 ? KVANT_CUDA_F16 : KVANT_CUDA_BF16);
    case KVANT_GENERAL_POLAR: return decode_polar<KEYS>(g, tile);
    case KVANT_GENERAL_CODEBOOK: decode_book<KEYS>((int)levels.bits, (int)g.metadata, g.tables + levels.values, tile); break;
    case KVANT_GENERAL_TRIPLETS:
    case KVANT_GENERAL_DIRECTIONS: decode_chunk_codes<KEYS>(g, tile); break;
    case KVANT_GENERAL_SKETCH: clear_tile(tile); break;
    case KVANT_GENERAL_TIERS:
        if (g.fragments && tile.d <= MOST_TIERS_DIM)
            return decode_tiers<KEYS>(g, tile);
        return decode_rows(codec, book, tile);
    default: return decode_rows(codec, book, tile);
    }
    if (g.view.sketched)
        add_sketch<KEYS>(g, tile);
}

/* Of a sealed page. WITH: Decoders. */
template <bool KEYS, unsigned WITH>
KVANT_INLINE void decode_tile(const kvant_cuda_codec &codec, const AnyBook &book, const DecodedTile &tile)
{
    const kvant_cuda_params &c = codec.params;
    if (c.codes == KVANT_CUDA_CODES_CODEBOOK)
        return decode_book<KEYS>((int)c.bits, (int)c.metadata_offset, book.values, tile);
    if (is_uniform(codec))
        return decode_uniform_codes<KEYS, (WITH & GROUPS) != 0>(codec.general, tile);
    if constexpr ((WITH & TRELLISES) != 0)
        if (c.codes == KVANT_CUDA_CODES_TRELLIS)
            return decode_trellis<KEYS>(c, book.trellis.whole, tile);
    if constexpr ((WITH & FAMILIES) != 0)
        decode_family<KEYS>(codec, book, tile);
    else if constexpr ((WITH & CHUNKS) != 0)
        decode_chunk_codes<KEYS>(codec.general, tile);
}

} // namespace kvant
