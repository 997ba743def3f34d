/* decode_rows.cuh - tiles of codecs that have no decoder of operands: polar codes, tiers,
 * centroids, and outliers of a page. A warp decodes a token to the CPU's numbers
 * (any/general_decode.h) and rounds each number once. */
#pragma once

#include "../any/decode_planes.cuh"

namespace kvant
{

__device__ static __noinline__ void decode_rows(const kvant_general &g, const DecodedTile tile)
{
    const float *numbers = reinterpret_cast<const float *>(tile.scratch());
    rolled_for (int t = tile.rank; t < TILE_TOKENS; t += tile.team_warps) {
        const bool valid = t < tile.valid;
        if (valid)
            decode_general(&g, tile.page, tile.first + t, reinterpret_cast<float *>(tile.scratch()),
                           tile.lane, tile.kv_head);
        float largest = 0;
        for (int channel = tile.lane; valid && channel < tile.d; channel += 32)
            largest = fmaxf(largest, fabsf(numbers[channel]));
        const float unit = fmaxf(power_above(largest_of(largest)), LEAST_UNIT),
                    inverse = inverse_of(unit);
        __half *row = tile.numbers() + t * tile.stride;
        for (int channel = tile.lane; channel < tile.d; channel += 32)
            row[channel] = __float2half_rn(valid ? numbers[channel] * inverse : 0);
        if (tile.lane == 0)
            tile.units()[t] = unit;
        __syncwarp(); /* the numbers have been read */
    }
}

} // namespace kvant
