/* decode_tile.cuh - a tile: 32 tokens of a page as fp16 numbers in shared memory, by a team of
 * warps. attention.cu multiplies tiles. For decode.cu, read_any (rows.cuh) computes the CPU's
 * numbers bit by bit. */
#pragma once

#include "decode_trellis.cuh"
#include "decode_uniform.cuh"
#include "decoders.h"

#if KVANT_PAPERS
#include "../papers/decode_families.cuh"
#endif

namespace kvant
{

/* Four numbers of a row. */
KVANT_INLINE float4 load_four(const uint8_t *page, int at, kvant_cuda_type type)
{
    if (type == KVANT_CUDA_F32)
        return __ldg(reinterpret_cast<const float4 *>(page) + at / 4);
    const uint2 x = __ldg(reinterpret_cast<const uint2 *>(page) + at / 4);
    if (type == KVANT_CUDA_BF16)
        return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                           __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
    const float2 low = __half22float2(*reinterpret_cast<const __half2 *>(&x.x)),
                 high = __half22float2(*reinterpret_cast<const __half2 *>(&x.y));
    return make_float4(low.x, low.y, high.x, high.y);
}

/* Copies rows of numbers, ROWS at a time, so that loads need not wait for each other. LOADS: loads
 * of a lane per row. */
template <int LOADS, int ROWS>
KVANT_INLINE void copy_rows(const DecodedTile &tile, kvant_cuda_type type)
{
    rolled_for (int first = tile.rank; first < TILE_TOKENS; first += ROWS * tile.team_warps) {
        float4 x[ROWS][LOADS];
        const auto each = [&](auto &&use) {
            unrolled_for (int r = 0; r < ROWS; r++)
                unrolled_for (int i = 0; i < LOADS; i++)
                    if (4 * tile.lane + 128 * i < tile.d)
                        use(r, 4 * tile.lane + 128 * i, x[r][i]);
                    else
                        x[r][i] = make_float4(0, 0, 0, 0);
        };
        each([&](int r, int channel, float4 &own) {
            const int t = first + r * tile.team_warps;
            own = t < tile.valid ? load_four(tile.page, (tile.first + t) * tile.d + channel, type)
                                 : make_float4(0, 0, 0, 0);
        });
        float inverse[ROWS];
        unrolled_for (int r = 0; r < ROWS; r++) {
            float largest = 0;
            unrolled_for (int i = 0; i < LOADS; i++)
                largest = fmaxf(fmaxf(largest, fmaxf(fabsf(x[r][i].x), fabsf(x[r][i].y))),
                                fmaxf(fabsf(x[r][i].z), fabsf(x[r][i].w)));
            const float unit = fmaxf(power_above(largest_of(largest)), LEAST_UNIT);
            inverse[r] = inverse_of(unit);
            if (tile.lane == 0)
                tile.units()[first + r * tile.team_warps] = unit;
        }
        each([&](int r, int channel, const float4 &own) {
            const float by = inverse[r];
            *reinterpret_cast<uint2 *>(tile.numbers() +
                                       (first + r * tile.team_warps) * tile.stride + channel) =
                make_uint2(pack_half2(own.x * by, own.y * by), pack_half2(own.z * by, own.w * by));
        });
    }
}

__device__ static __noinline__ void decode_open(const DecodedTile tile, kvant_cuda_type type)
{
    tile.d <= 128 ? copy_rows<1, 4>(tile, type) : copy_rows<4, 1>(tile, type);
}

/* Decodes a tile of a sealed page. WITH: the kernel's Decoders. */
template <bool KEYS, unsigned WITH>
KVANT_INLINE void decode_tile(const kvant_cuda_codec &codec, const AnyBook &book,
                              const DecodedTile &tile)
{
    const kvant_cuda_params &c = codec.params;
    if (c.codes == KVANT_CUDA_CODES_CODEBOOK)
        return decode_book<KEYS>((int)c.bits, (int)c.metadata_offset, book.values, tile);
    const kvant_general_view &view = codec.general.view;
    if (view.kind == KVANT_GENERAL_RAW)
        return decode_open(tile, view.raw == 0   ? KVANT_CUDA_F32
                                 : view.raw == 1 ? KVANT_CUDA_F16
                                                 : KVANT_CUDA_BF16);
    if (is_uniform(codec))
        return decode_uniform_codes<KEYS, (WITH & GROUPS) != 0>(codec.general, tile);
    if constexpr ((WITH & TRELLISES) != 0)
        if (c.codes == KVANT_CUDA_CODES_TRELLIS)
            return decode_trellis<KEYS>(c, book.trellis.whole, tile);
#if KVANT_PAPERS
    if constexpr ((WITH & FAMILIES) != 0)
        decode_family<KEYS>(codec.general, tile);
    else if constexpr ((WITH & CHUNKS) != 0)
        decode_chunk_codes<KEYS>(codec.general, tile);
#endif
}

} // namespace kvant
