/* decode_centroids.cuh - adds centroids to tiles of uniform codes (any/decode_uniform.cuh). */
#pragma once

#include "../any/decode_uniform.cuh"

namespace kvant
{

/* Adds its centroid to each token, in a common unit. */
__device__ static __noinline__ void add_centroids(const kvant_general &g, const DecodedTile tile)
{
    constexpr int LOADS = KVANT_CUDA_MOST_DIM / 32;
    const general_team team{ tile.lane, 32, tile.kv_head };
    tile.wait();
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

} // namespace kvant
