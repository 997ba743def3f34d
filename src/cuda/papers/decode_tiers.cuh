/* decode_tiers.cuh - tiles of tiers of channels. A page has its own order of channels, and each
 * tier its own rotation. Codes become operands, a product rotates them back (halves.h), and
 * channels are put into their places when they are stored. */
#pragma once

#include "decode_rotated.cuh"

namespace kvant
{

/* The codes of a tier (chunk_place), each a chunk: pairs of codes in bytes j and j + 2 of a word,
 * from bit 4 on. */
template <int BITS> struct TierCodes {
    static constexpr int FIRST = BITS >= 4 ? 4 : 2,
                         REST = BITS - FIRST; /* bits of the first and of the second plane */
    int channels;

    /* For keys: tokens 16 k + row (j = 0) and 8 further (j = 1); channels 2 c and 2 c + 1. LOW: the
     * lowest bit. */
    template <int P, int LOW>
    KVANT_INLINE static uint32_t keys(const uint32_t *plane, int c, int k, int row)
    {
        return rotate_left(plane[4 * (P * c + (row & (P - 1))) + k], LOW - row / P * P) &
               0x01010101u * (((1 << P) - 1) << LOW);
    }

    KVANT_INLINE uint32_t keys(const uint32_t *words, int c, int k, int row) const
    {
        const uint32_t x = keys<FIRST, 4>(words, c, k, row);
        if constexpr (REST > 0)
            return x | keys<REST, 4 + FIRST>(words + 2 * FIRST * channels, c, k, row);
        return x;
    }

    /* For values: tokens 16 k + 2 pair and the next one (j = 0), and 8 further (j = 1), of a
     * channel. */
    KVANT_INLINE uint32_t values(const uint32_t *words, int channel, int k, int pair) const
    {
        if constexpr (FIRST == 4) {
            const uint32_t *at = words + 2 * pair * channels + channel;
            return (rotate_left(at[0], 4 - 4 * k) & 0x00f000f0u) |
                   (rotate_left(at[channels], 12 - 4 * k) & 0xf000f000u);
        }
        const uint32_t x = rotate_left(words[pair * channels + channel], 4 - 2 * k) & 0x30303030u;
        if constexpr (REST > 0) { /* bits 0 and 4 go to bits 6 and 14 */
            const uint32_t high = words[2 * FIRST * channels + (pair >> 1) * channels + channel] >>
                                  (8 * (pair & 1) + k);
            return x | ((high & 0x00110011u) * 1088 & 0x40404040u);
        }
        return x;
    }
};

/* Finds the channel at every place in the page's order, in which outliers come first. Called by a
 * warp. D: head_dim where it is a constant, a multiple of 32; otherwise 0. */
template <int D>
KVANT_INLINE void find_order(const kvant_general &g, const uint8_t *page, uint16_t *order, int lane)
{
    const uint32_t *mask = reinterpret_cast<const uint32_t *>(page + g.view.tiers.mask);
    const int d = D ? D : (int)g.head_dim;
    __syncwarp();
    unrolled_for (int i = 0; i < D / 32; i++)
        order[general_rank(mask, D, 32 * i + lane)] = (uint16_t)(32 * i + lane);
    for (int channel = lane; D == 0 && channel < d; channel += 32)
        order[general_rank(mask, d, channel)] = (uint16_t)channel;
    __syncwarp();
}

/* The levels of two codes in bytes j and j + 2, times their tokens' scales. */
KVANT_INLINE uint32_t scaled_levels(const float *levels, uint32_t codes, int j, float x, float y)
{
    return pack_half2(__ldg(levels + (codes >> (8 * j + 4) & 15)) * x,
                      __ldg(levels + (codes >> (8 * j + 20) & 15)) * y);
}

/* The scales of both tiers, divided by the unit. For keys of tokens 8 n + lane / 4; for values of
 * tokens 8 n + 2 (lane & 3) and the next one. */
struct TierScales {
    static constexpr int N = TILE_TOKENS / 8;
    float of[2][N][2];

    template <bool KEYS> KVANT_INLINE void load(const kvant_general &g, const DecodedTile &tile)
    {
        float own[2];
        unrolled_for (int k = 0; k < 2; k++)
            own[k] = tile.lane < tile.valid ? half_at(reinterpret_cast<const uint16_t *>(
                                                          tile.page + g.view.tiers.scales[k]),
                                                      tile.first + tile.lane)
                                            : 0;
        const float unit = fmaxf(power_above(fmaxf(own[0], own[1])), LEAST_UNIT),
                    inverse = inverse_of(unit);
        if (tile.rank == 0)
            tile.units()[tile.lane] = unit;
        unrolled_for (int k = 0; k < 2; k++)
            unrolled_for (int n = 0; n < N; n++)
                unrolled_for (int e = 0; e < 2; e++)
                    of[k][n][e] =
                        __shfl_sync(FULL, own[k] * inverse,
                                    8 * n + (KEYS ? tile.lane >> 2 : 2 * (tile.lane & 3) + e));
    }
};

/* Codes 16 i.. of the page's order as operands B, whose columns are tokens. */
template <int LOW, bool KEYS>
KVANT_INLINE void tier_operands(const kvant_general &g, const DecodedTile &tile,
                                const TierScales &scales, int i, uint32_t (&b)[TierScales::N][2])
{
    const int row = tile.lane >> 2, pair = tile.lane & 3, n = (int)g.view.books[0].n;
    const TierCodes<LOW + 1> high{ n };
    const TierCodes<LOW> low{ tile.d - n };
    unrolled_for (int h = 0; h < 2; h++) {
        const int at = 16 * i + 8 * h + (KEYS ? 2 * pair : row), tier = at >= n,
                  own = at - (tier ? n : 0);
        const uint32_t *words =
            reinterpret_cast<const uint32_t *>(tile.page + g.view.tiers.codes[tier]);
        const float *levels = g.tables + g.view.books[tier].values;
        unrolled_for (int k = 0; k < TILE_TOKENS / 16; k++) {
            const int tokens = tile.first / 16 + k;
            const uint32_t codes = KEYS ? (tier ? low.keys(words, own / 2, tokens, row)
                                                : high.keys(words, own / 2, tokens, row))
                                        : (tier ? low.values(words, own, tokens, pair)
                                                : high.values(words, own, tokens, pair));
            unrolled_for (int j = 0; j < 2; j++) {
                const float(&first)[2] = scales.of[0][2 * k + j],
                      (&second)[2] = scales.of[1][2 * k + j];
                const uint32_t x = scaled_levels(levels, codes, j, tier ? second[0] : first[0],
                                                 tier ? second[1] : first[1]);
                b[2 * k + j][h] = KEYS ? x : transpose8x8(x);
            }
        }
    }
}

/* Columns 16 j.. and rows 16 i.. of the rotation, as operand A. For the head_dims of
 * direct_tiers.cuh, keys' rotations are stored transposed. */
template <bool KEYS>
KVANT_INLINE void rotation_operand(const kvant_general &g, int j, int i, int lane, uint32_t (&a)[4])
{
    const bool rotated = KEYS && kvant_cuda_rotates_tiers(&g);
    const uint4 x = rotated ? fragment(g, i, j, lane) : fragment(g, j, i, lane);
    a[0] = x.x, a[1] = x.z, a[2] = x.y, a[3] = x.w;
    if (rotated)
        a[0] = transpose8x8(x.x), a[1] = transpose8x8(x.y), a[2] = transpose8x8(x.z),
        a[3] = transpose8x8(x.w);
}

template <int LOW, bool KEYS>
__device__ __noinline__ void decode_tiers_of(const kvant_general &g, const DecodedTile tile)
{
    constexpr int N = TierScales::N, AT_ONCE = 2;
    uint16_t *order = reinterpret_cast<uint16_t *>(tile.scratch());
    TierScales scales;
    scales.load<KEYS>(g, tile);
    find_order<0>(g, tile.page, order, tile.lane);
#pragma unroll 1
    for (int first = tile.first_channel; first < tile.end_channel; first += 16 * AT_ONCE) {
        float sums[AT_ONCE][N][4] = {};
#pragma unroll 1
        for (int i = 0; 16 * i < tile.d; i++) {
            uint32_t b[N][2];
            tier_operands<LOW, KEYS>(g, tile, scales, i, b);
            unrolled_for (int j = 0; j < AT_ONCE; j++)
                if (first + 16 * j < tile.end_channel) {
                    uint32_t a[4];
                    rotation_operand<KEYS>(g, first / 16 + j, i, tile.lane, a);
                    unrolled_for (int n = 0; n < N; n++)
                        mma(sums[j][n], a, b[n][0], b[n][1]);
                }
        }
        unrolled_for (int j = 0; j < AT_ONCE; j++)
            if (first + 16 * j < tile.end_channel)
                unrolled_for (int q = 0; q < 4; q++) {
                    const int channel = order[first + 16 * j + 8 * (q >> 1) + (tile.lane >> 2)];
                    unrolled_for (int n = 0; n < N; n++)
                        tile.numbers()[(8 * n + 2 * (tile.lane & 3) + (q & 1)) * tile.stride +
                                       channel] = __float2half_rn(sums[j][n][q]);
                }
    }
}

template <bool KEYS> KVANT_INLINE void decode_tiers(const kvant_general &g, const DecodedTile &tile)
{
    g.view.books[1].bits == 2 ? decode_tiers_of<2, KEYS>(g, tile)
                              : decode_tiers_of<3, KEYS>(g, tile);
}

} // namespace kvant
