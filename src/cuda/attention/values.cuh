/* values.cuh - weighted sums of a sealed page's values: scores to weights, products of codes, then
 * the scales of each grouping.
 *
 * A scale per token acts on the token's weight. A scale for channels of a token makes the
 * weights differ per group of channels: fp16 weights are multiplied by fp16 scales. Both are
 * relative to powers of two that keep them in fp16's range. A scale for tokens of a channel acts
 * on the sum over these tokens. */
#pragma once

#include "keys.cuh"

namespace kvant
{

/* Hides the tokens from `valid` on of a page: their scores become -infinity. */
template <int N> KVANT_INLINE void hide_tokens(float (&s)[N][4], int valid, int row)
{
    unrolled_for (int i = 0; i < 2 * N; i++)
        if (16 * (i / 2) + 8 * (i & 1) + row >= valid)
            s[i / 2][2 * (i & 1)] = s[i / 2][2 * (i & 1) + 1] = -INFINITY;
}

/* Sets the scales and zero points of absent tokens, or of absent groups of tokens, to 0. They may
 * hold any bits, and even 0 times such a number need not be 0. The caller orders this before the
 * next copy into the page's slot. */
template <class C, int D>
KVANT_INLINE void clear_scales(uint8_t *metadata, int symmetric, const GroupPlaces &places,
                               int valid, int lane)
{
    uint16_t *numbers = reinterpret_cast<uint16_t *>(metadata);
    constexpr bool TOKENS = C::GROUP == KVANT_CUDA_GROUP_TOKENS;
    constexpr int LENGTH = TOKENS ? D : PAGE_TOKENS;
    const int rows = places.n_scales / LENGTH;
#pragma unroll 1
    for (int row = 0; row < (symmetric ? rows : 2 * rows); row++) {
        const int first = !TOKENS                                                 ? valid
                          : (row < rows ? row : row - rows) << places.log < valid ? LENGTH
                                                                                  : 0;
#pragma unroll 1
        for (int i = first + lane; i < LENGTH; i += 32)
            numbers[row * LENGTH + i] = 0;
    }
    __syncwarp();
}

/* Weights 2^(s - max) * size as operands, tokens as rows; their sum is added up before they are
 * rounded. */
template <class A>
KVANT_INLINE void weigh(A &sums, const float (&s)[4][4], float size, uint32_t (&p)[4][2])
{
    unrolled_for (int i = 0; i < 8; i++) {
        float e0 = exp2_fast(s[i / 2][2 * (i & 1)] - sums.max[0]),
              e1 = exp2_fast(s[i / 2][2 * (i & 1) + 1] - sums.max[1]);
        sums.sum[0] += e0;
        sums.sum[1] += e1;
        p[i / 2][i & 1] = transpose8x8(pack_half2(e0 * size, e1 * size));
    }
}

/* A power of two above the numbers that 64 tokens have in one or several arrays, between 2^-13 and
 * 2^14, and its inverse as two halves. */
struct Size {
    float value, log2;
    uint32_t inverse;
};

template <int ARRAYS, int STEP> KVANT_INLINE Size size_of(const GroupScales &m, int lane)
{
    uint32_t largest = 0;
    unrolled_for (int i = 0; i < ARRAYS; i++) {
        const uint32_t pair = pair_at(m.scale, m.at(STEP * i) + 2 * lane) & 0x7fff7fffu;
        largest = max(largest, max(pair & 0xffffu, pair >> 16));
    }
    /* halves without a sign are in the order of whole numbers */
    const uint32_t exponent = min(max(__reduce_max_sync(FULL, largest) >> 10, 1u), 28u),
                   down = 29 - exponent;
    return Size{ __uint_as_float((exponent + 1 + 112) << 23), (float)exponent - 14,
                 down << 10 | down << 26 };
}

/* Zero points are an operand whose rows are groups of channels: the accumulator's rows are the
 * groups' sums. */
template <class C, int D>
KVANT_INLINE void add_channel_groups(const uint8_t *page, const Bytes &table, const GroupScales &m,
                                     int lane, float (&s)[4][4], Accumulator<C, D> &sums)
{
    constexpr int STEP = group_step<C, D>(), GROUPS = D / STEP;
    constexpr bool ONE =
        C::TILES == 1; /* tile of tokens at a time, for two of channels; else two, for two */
    const Size size = size_of<GROUPS, STEP>(m, lane);
    sums.raise(s, size.log2);
    uint32_t p[4][2], weights[ONE ? 2 : C::TILES][2];
    weigh(sums, s, size.value, p);
    float zero[4] = {};
    const __half *zeros = m.zeros() + m.at(min(lane & 7, GROUPS - 1) * STEP) + 8 * (lane >> 3);
    unrolled_for (int i = 0; i < 2; i++) {
        uint32_t z[4];
        load_matrices<false>(z, zeros + 32 * i);
        unrolled_for (int k = 0; k < 2; k++) {
            const uint32_t a[4] = { z[2 * k], 0, z[2 * k + 1], 0 };
            mma(zero, a, p[2 * i + k][0], p[2 * i + k][1]);
        }
    }
    for_each_tile<C, D / 16, 4>(page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) {
        uint32_t(&w)[2] = weights[ONE ? rt % 2 : ct % C::TILES];
        if (rt % 2 == 0 && (ONE || ct % 2 == 0)) {
            uint32_t x[4];
            load_matrices<false>(x, m.scale +
                                        (ONE ? m.at(16 * (rt + (lane >> 4))) + 16 * ct + (lane & 8)
                                             : m.at(16 * rt) + 16 * ct + 8 * (lane >> 3)));
            unrolled_for (int i = 0; i < 4; i++)
                weights[ONE ? i / 2 : ct % C::TILES + i / 2][i % 2] = multiply_pairs(
                    p[ONE ? ct : ct + i / 2][i % 2], multiply_pairs(x[i], size.inverse));
        }
        mma(sums.o[rt], a, w[0], w[1]);
    });
    const float one = m.zero_unit() / size.value;
    unrolled_for (int h = 0; h < 2; h++)
        sums.zero[h] += zero[h] * one;
}

/* The sums of the weights over each group of tokens, as an operand whose rows are groups:
 * first the rounded sums, then the rounding errors. All rows of a matrix have these 16-bit
 * numbers; transposed, all columns have them. */
template <int GROUPS>
KVANT_INLINE uint32_t load_totals(const uint32_t (&p)[4][2], float times, int lane)
{
    uint32_t rounded[GROUPS], lost[GROUPS];
    unrolled_for (int g = 0; g < GROUPS; g++) {
        float total[4] = {};
        const uint32_t ones[4] = { 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u };
        unrolled_for (int i = 4 / GROUPS * g; i < 4 / GROUPS * (g + 1); i++)
            mma(total, ones, p[i][0], p[i][1]);
        const uint32_t x = pack_half2(total[0] * times, total[1] * times);
        const __half2 h = *reinterpret_cast<const __half2 *>(&x);
        rounded[g] = transpose8x8(x);
        lost[g] = transpose8x8(
            pack_half2(total[0] * times - __low2float(h), total[1] * times - __high2float(h)));
    }
    uint32_t mine = 0; /* lane mod 4 has two rows, from row 2 (lane mod 4) on */
    unrolled_for (int i = 0; i < GROUPS / 2; i++) {
        mine = (lane & 3) == i ? prmt(rounded[2 * i], rounded[2 * i + 1], 0x5410) : mine;
        mine = (lane & 3) == GROUPS / 2 + i ? prmt(lost[2 * i], lost[2 * i + 1], 0x5410) : mine;
    }
    return mine;
}

/* Zero points are an operand with channels as rows and groups of tokens as columns. */
template <class C, int D>
KVANT_INLINE void add_token_groups(const uint8_t *page, const Bytes &table, const GroupScales &m,
                                   int lane, float (&s)[4][4], Accumulator<C, D> &sums)
{
    constexpr int STEP = group_step<C, D>(), GROUPS = PAGE_TOKENS / STEP;
    sums.raise(s, 0);
    uint32_t p[4][2];
    weigh(sums, s, 1, p);
    const uint32_t totals = load_totals<GROUPS>(p, m.zero_unit(), lane);
    const __half *zeros = m.zeros() + m.at((lane & (GROUPS - 1)) * STEP) + 8 * (lane >> 3);
    unrolled_for (int i = 0; i < D / 32; i++) {
        uint32_t z[4];
        load_matrices<true>(z, zeros + 32 * i);
        unrolled_for (int k = 0; k < 2; k++) {
            const uint32_t a[4] = { z[2 * k], z[2 * k + 1], 0, 0 };
            mma(sums.o[2 * i + k], a, totals, 0);
        }
    }
    /* Rows of even number are a group's scales, odd ones the next one's: transposed, a lane
     * has both of its channel. */
    float part[4][4];
    uint32_t pairs[2][4]; /* of row tiles 2 i and 2 i + 1 of the four at hand */
    for_each_tile<C, D / 16, 4>(page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) {
        float(&x)[4] = part[rt % 4];
        const int g = 16 * ct / STEP;
        if (16 * ct % STEP == 0)
            x[0] = x[1] = x[2] = x[3] = 0;
        mma(x, a, p[ct][0], p[ct][1]);
        if (16 * (ct + 1) % STEP != 0)
            return;
        if (g % 2 == 0 && rt % 2 == 0)
            load_matrices<true>(pairs[rt % 4 / 2], m.scale + m.at((g + (lane & 1)) * STEP) +
                                                       8 * (lane >> 3) + 16 * rt);
        unrolled_for (int e = 0; e < 2; e++) {
            const __half2 both =
                *reinterpret_cast<const __half2 *>(&pairs[rt % 4 / 2][2 * (rt % 2) + e]);
            const float scale =
                (g % 2 == 0 ? __low2float(both) : __high2float(both)) * (e ? UNIT / C::ROW8 : UNIT);
            unrolled_for (int h = 0; h < 2; h++)
                sums.o[rt][2 * e + h] += x[2 * e + h] * scale;
        }
    });
}

/* N tiles of an array of tiles, from the first one on. */
template <int N, class T, int TILES> KVANT_INLINE T (&part(T (&tiles)[TILES], int first))[N]
{
    return *reinterpret_cast<T(*)[N]>(&tiles[first]);
}

/* Adds a page's values, weighted by the scores, to the sums of each tile. A code is unpacked once
 * for all tiles. */
template <class C, int D, bool PLAIN = false, int TILES, class T>
KVANT_INLINE void add_page(const uint8_t *page, int codes, const T &table, int symmetric,
                           float offset, const GroupPlaces &places, int lane, int valid,
                           float (&s)[TILES][4][4], Accumulator<C, D> (&sums)[TILES])
{
    if constexpr (C::GROUP == KVANT_CUDA_GROUP_TOKEN) {
        TokenScales scales = load_scales<C>(page + codes, lane, symmetric, offset);
        if (valid < PAGE_TOKENS)
            unrolled_for (int t = 0; t < TILES; t++)
                mask_tokens(s[t], scales, valid, lane >> 2);
        uint32_t weights[TILES][4][2];
        if constexpr (HAS_ZEROS<C> && TILES == 2) { /* both at once would spill registers */
            weigh_tokens<C, D, 1>(part<1>(sums, 0), part<1>(s, 0), scales, part<1>(weights, 0));
            weigh_tokens<C, D, 1>(part<1>(sums, 1), part<1>(s, 1), scales, part<1>(weights, 1));
        } else
            weigh_tokens<C, D>(sums, s, scales, weights);
        if constexpr (!HAS_CHUNKS<C>)
            unrolled_for (int t = 0; t < TILES; t++)
                reorder<C::ORDER, 4>(weights[t]);
        auto multiply = [&](int rt, int ct, const uint32_t(&a)[4]) {
            unrolled_for (int t = 0; t < TILES; t++)
                mma(sums[t].o[rt], a, weights[t][ct][0], weights[t][ct][1]);
        };
        if constexpr (HAS_CHUNKS<C>)
            C::template for_each_value_tile<D>(page, lane, table, multiply);
        else if constexpr (HAS_TRELLIS<C>)
            for_each_trellis_value<C, D, PLAIN>(page, lane, table, multiply, [&] {
                unrolled_for (int i = 0; i < 6 * TILES; i++)
                    weights[i / 6][i / 2 % 3][i % 2] = weights[i / 6][i / 2 % 3 + 1][i % 2];
            });
        else
            for_each_tile<C, D / 16, 4>(page, lane, table, multiply);
    } else {
        static_assert(TILES == 1, "scales of groups multiply operands");
        const GroupScales m = group_scales<C, D>(page + codes, symmetric, offset, places);
        if (valid < PAGE_TOKENS)
            hide_tokens(s[0], valid, lane >> 2);
        if constexpr (C::GROUP == KVANT_CUDA_GROUP_CHANNELS)
            add_channel_groups<C, D>(page, table, m, lane, s[0], sums[0]);
        else
            add_token_groups<C, D>(page, table, m, lane, s[0], sums[0]);
    }
}

} // namespace kvant
