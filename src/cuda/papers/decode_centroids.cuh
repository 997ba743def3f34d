/* decode_centroids.cuh - adds centroids to tiles of uniform codes (any/decode_uniform.cuh). */
#pragma once

#include "../any/decode_uniform.cuh"

namespace kvant
{

/* Adds its centroid to each token, in a common unit. */
__device__ static __noinline__ void add_wide_centroids(const kvant_general &g,
                                                       const DecodedTile tile)
{
    constexpr int LOADS = KVANT_CUDA_MOST_DIM / 32;
    const general_team team{ tile.lane, 32, tile.kv_head };
#pragma unroll 1
    for (int t = tile.rank; t < TILE_TOKENS; t += tile.team_warps) {
        const float *centroid = t < tile.valid
                                    ? general_centroid(team, &g, tile.page, tile.first + t)
                                    : nullptr; /* NULL: never written */
        float x[LOADS], largest = 0;
        unrolled_for (int i = 0; i < LOADS; i++) {
            x[i] =
                centroid && tile.lane + 32 * i < tile.d ? __ldg(centroid + tile.lane + 32 * i) : 0;
            largest = fmaxf(largest, fabsf(x[i]));
        }
        const float before = tile.units()[t],
                    unit = fmaxf(before, power_above(largest_of(largest))),
                    inverse = inverse_of(unit);
        unrolled_for (int i = 0; i < LOADS; i++)
            if (tile.lane + 32 * i < tile.d) {
                __half &number = tile.numbers()[t * tile.stride + tile.lane + 32 * i];
                number = __float2half_rn((centroid ? before : 0) * inverse * __half2float(number) +
                                         inverse * x[i]);
            }
        __syncwarp();
        if (tile.lane == 0)
            tile.units()[t] = unit;
    }
}

/* The same for up to 128 channels and one warp: a lane knows a token's centroid and unit, and adds
 * four channels. */
__device__ static __noinline__ void add_narrow_centroids(const kvant_general &g,
                                                         const DecodedTile tile)
{
    constexpr int ROWS = 8;
    const general_team team{ tile.lane, 32, tile.kv_head };
    const int channel = 4 * tile.lane;
    const bool has = channel < tile.d;
    const float *table = general_table(team, &g, g.view.uniform.centroids),
                *own = tile.lane < tile.valid
                           ? general_centroid(team, &g, tile.page, tile.first + tile.lane)
                           : nullptr;
    const int place = own ? (int)(own - table) : -1; /* -1: the token was never written */
    float own_unit = tile.units()[tile.lane];
    __half *numbers = tile.numbers() + channel;
#pragma unroll 1
    for (int first = 0; first < TILE_TOKENS; first += ROWS) {
        float4 x[ROWS];
        unrolled_for (int r = 0; r < ROWS; r++) {
            const int at = __shfl_sync(FULL, place, first + r);
            x[r] = has && at >= 0 ? __ldg(reinterpret_cast<const float4 *>(table + at + channel))
                                  : make_float4(0, 0, 0, 0);
        }
        unrolled_for (int r = 0; r < ROWS; r++) {
            const int t = first + r;
            const float before = __shfl_sync(FULL, own_unit, t),
                        size = __shfl_sync(FULL, place, t) >= 0 ? before : 0,
                        largest = largest_of(fmaxf(fmaxf(fabsf(x[r].x), fabsf(x[r].y)),
                                                   fmaxf(fabsf(x[r].z), fabsf(x[r].w)))),
                        unit = fmaxf(before, power_above(largest)), inverse = inverse_of(unit),
                        by = size * inverse;
            own_unit = tile.lane == t ? unit : own_unit;
            if (!has)
                continue;
            uint2 &there = *reinterpret_cast<uint2 *>(numbers + t * tile.stride);
            const float2 low = __half22float2(*reinterpret_cast<const __half2 *>(&there.x)),
                         high = __half22float2(*reinterpret_cast<const __half2 *>(&there.y));
            there = make_uint2(
                pack_half2(by * low.x + inverse * x[r].x, by * low.y + inverse * x[r].y),
                pack_half2(by * high.x + inverse * x[r].z, by * high.y + inverse * x[r].w));
        }
    }
    tile.units()[tile.lane] = own_unit;
}

KVANT_INLINE void add_centroids(const kvant_general &g, const DecodedTile &tile)
{
    tile.wait();
    const bool wide = reinterpret_cast<uintptr_t>(g.tables + g.view.uniform.centroids) % 16 == 0 &&
                      g.head_stride % 4 == 0;
    tile.d <= 128 && wide ? add_narrow_centroids(g, tile) : add_wide_centroids(g, tile);
}

} // namespace kvant
