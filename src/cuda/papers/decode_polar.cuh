/* decode_polar.cuh - tiles of polar codes (format.md, "Polar codes"). First, codes are put in their
 * places in the tile. Then a warp decodes a token, and each lane multiplies the factors of its
 * channels. */
#pragma once

#include "../any/decode_planes.cuh"

namespace kvant
{

__device__ static __noinline__ void decode_angles(const kvant_general &g, const DecodedTile tile)
{
    const uint16_t *scales =
        reinterpret_cast<const uint16_t *>(tile.page + g.metadata) + tile.first;
    uint32_t *codes = reinterpret_cast<uint32_t *>(tile.scratch());
#pragma unroll 1
    for (int token = tile.rank; token < TILE_TOKENS; token += tile.team_warps) {
        const float stored = token < tile.valid ? half_at(scales, token) : 0,
                    unit = fmaxf(power_above(stored), LEAST_UNIT),
                    scale = stored * inverse_of(unit);
        __half *row = tile.numbers() + token * tile.stride;
        for (int channel = tile.lane; channel < tile.d; channel += 32)
            codes[channel] = __half_as_ushort(row[channel]);
        __syncwarp();
        for (int channel = tile.lane; channel < tile.d; channel += 32)
            row[channel] = __float2half_rn(scale * general_polar_number(&g, codes, channel));
        if (tile.lane == 0)
            tile.units()[token] = unit;
        __syncwarp();
    }
}

template <bool KEYS> KVANT_INLINE void decode_polar(const kvant_general &g, const DecodedTile &tile)
{
    place_codes<KEYS, 4>((int)g.view.polar.bits, tile);
    decode_angles(g, tile);
}

} // namespace kvant
