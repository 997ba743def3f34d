/* decode_rotated.cuh - tiles of codecs with a sketch of the codes' residual. The signs of the
 * sketch lie in a rotated space of their own.
 *
 * Tokens times the rotation is a matrix product, computed by mma.m16n8k16 with tokens as rows. The
 * rotation lies in device memory in the order of operands (halves.h). Signs are operands in the
 * form in which they are read. */
#pragma once

#include "decode_chunks.cuh"

namespace kvant
{

/* Rows 16 step.. and columns 16 pair.. of the rotation, as operands of two products. */
KVANT_INLINE uint4 fragment(const kvant_general &g, int pair, int step, int lane)
{
    return __ldg(reinterpret_cast<const uint4 *>(g.tables + g.halves) +
                 (pair * (g.head_dim / 16) + step) * 32 + lane);
}

KVANT_INLINE void mma_pair(float (&sums)[2][4], const uint32_t (&a)[4], const uint4 &b)
{
    mma(sums[0], a, b.x, b.y);
    mma(sums[1], a, b.z, b.w);
}

/* Clears a tile whose numbers come from a sketch alone. */
KVANT_INLINE void clear_tile(const DecodedTile &tile)
{
    const int end = TILE_TOKENS * tile.stride / 8;
    for (int i = 32 * tile.rank + tile.lane; i < end; i += 32 * tile.team_warps)
        reinterpret_cast<uint4 *>(tile.numbers())[i] = uint4{};
    if (tile.rank == 0)
        tile.units()[tile.lane] = LEAST_UNIT;
}

/* The factors of a token: for the sums of signs, and for the numbers of the codes. They convert
 * both to a common unit. */
struct SketchScale {
    float signs, numbers;
};

/* The factors of a lane's tokens, which are rows 16 k + lane / 4 + 8 h of the products. */
struct SketchScales {
    SketchScale of[TILE_TOKENS / 16][2];

    KVANT_INLINE void share(const SketchScale &own, int lane)
    {
        unrolled_for (int k = 0; k < TILE_TOKENS / 16; k++)
            unrolled_for (int h = 0; h < 2; h++) {
                const int from = 16 * k + 8 * h + (lane >> 2);
                of[k][h] = SketchScale{ __shfl_sync(FULL, own.signs, from),
                                        __shfl_sync(FULL, own.numbers, from) };
            }
    }
};

/* The signs of tokens 16 k.. as rows of an operand. */
template <bool KEYS>
KVANT_INLINE void sign_operand(const TileCodes<1, KEYS> &codes, int u, int k, uint32_t (&a)[4])
{
    unrolled_for (int q = 0; q < 4; q++) {
        const uint32_t signs = 0x3c003c00u | codes.pair(u, k, KEYS ? q : q >> 1 | (q & 1) << 1)
                                                 << 15;
        a[q] = KEYS ? signs : transpose8x8(signs);
    }
}

/* Adds a product's numbers, for tokens 16 k.. and two neighbouring channels of the lane, to the
 * tile. */
KVANT_INLINE void add_pair(const DecodedTile &tile, const SketchScales &scales, int k, int h,
                           int channel, float x, float y)
{
    const SketchScale &by = scales.of[k][h];
    __half2 &at = *reinterpret_cast<__half2 *>(
        tile.numbers() + (16 * k + 8 * h + (tile.lane >> 2)) * tile.stride + channel);
    const float2 before = __half22float2(at);
    at = __floats2half2_rn(by.numbers * before.x + by.signs * x,
                           by.numbers * before.y + by.signs * y);
}

template <bool KEYS>
__device__ __noinline__ void add_signs(const kvant_general &g, const DecodedTile tile,
                                       const SketchScale own)
{
    constexpr int N = TILE_TOKENS / 16, PAIRS = 4;
    DecodedTile signs = tile;
    signs.page += g.view.sketch_codes;
    SketchScales scales;
    scales.share(own, tile.lane);
    rolled_for (int first = tile.first_channel; first < tile.end_channel; first += 16 * PAIRS) {
        float sums[PAIRS][N][2][4] = {};
        const int pairs = min((tile.end_channel - first) / 16, PAIRS);
        rolled_for (int c = 0; 64 * c < tile.d; c++) {
            const int n = min(tile.d / 16 - 4 * c, 4);
            TileCodes<1, KEYS> codes;
            codes.load(signs, c, n);
            unrolled_for (int u = 0; u < 4; u++) {
                if (u >= n)
                    break;
                uint32_t a[N][4];
                unrolled_for (int k = 0; k < N; k++)
                    sign_operand<KEYS>(codes, u, k, a[k]);
                unrolled_for (int i = 0; i < PAIRS; i++)
                    if (i < pairs) {
                        const uint4 b = fragment(g, first / 16 + i, 4 * c + u, tile.lane);
                        unrolled_for (int k = 0; k < N; k++)
                            mma_pair(sums[i][k], a[k], b);
                    }
            }
        }
        unrolled_for (int i = 0; i < PAIRS; i++)
            if (i < pairs)
                unrolled_for (int k = 0; k < N; k++)
                    unrolled_for (int j = 0; j < 2; j++)
                        unrolled_for (int h = 0; h < 2; h++)
                            add_pair(tile, scales, k, h,
                                     first + 16 * i + 8 * j + 2 * (tile.lane & 3),
                                     sums[i][k][j][2 * h], sums[i][k][j][2 * h + 1]);
    }
}

/* Adds the sketch to the numbers; a token's unit becomes a common unit for both. */
template <bool KEYS> KVANT_INLINE void add_sketch(const kvant_general &g, const DecodedTile &tile)
{
    tile.wait();
    const uint16_t *norms =
        reinterpret_cast<const uint16_t *>(tile.page + g.view.sketch_norms) + tile.first;
    const float norm = tile.lane < tile.valid ? half_at(norms, tile.lane) : 0,
                before = tile.units()[tile.lane], unit = fmaxf(before, power_above(norm)),
                inverse = inverse_of(unit);
    tile.wait();
    if (tile.rank == 0)
        tile.units()[tile.lane] = unit;
    add_signs<KEYS>(g, tile, SketchScale{ 1.2533141373155003f * norm * inverse, before * inverse });
}

} // namespace kvant
