/* keys.cuh - scores of a sealed page's keys: products of codes, then the scales of each grouping.
 *
 * A scale per token acts on the token's score. A scale for channels of a token acts on the part
 * of the score from these channels. A scale for tokens of a channel acts on the query: the
 * query's operands are multiplied by the scales of each group of tokens before they meet the codes.
 * All this is done for groups of group_step numbers. Larger groups have the same scale several
 * times. Zero points of groups are an operand of their own, with one column per group. */
#pragma once

#include "query.cuh"
#include "softmax.cuh"
#include "../trellis/trellis_bytes.cuh"

namespace kvant
{

/* The numbers that make a score from an accumulator. factor[h] is for rows r and, with ROW8
 * included, r + 8. A zero point multiplies base[h] (uniform), or base[h] is added before the scale
 * (codebook). */
template <class C, int D> struct ScoreFactors {
    float factor[2], factor8[2], base[2];
    uint32_t group_sums[2]; /* CHANNELS: operand that zero points are multiplied by */
};

/* The amount that a 1 in a score's accumulator stands for. */
template <class C, bool BYTES> KVANT_INLINE constexpr float code_unit()
{
    if constexpr (HAS_CHUNKS<C>)
        return C::UNIT;
    return BYTES || HAS_WIDE_BOOK<C> ? 1.0f : UNIT;
}

/* Sums of the query over groups of channels as an operand whose rows are groups. It has the rounded
 * sums and, 4 or 8 rows behind them, the rounding errors. */
template <int GROUPS, class Q>
KVANT_INLINE void load_group_sums(const Q &tile, float times, int lane, uint32_t (&b)[2])
{
    constexpr int LOST = GROUPS <= 4 ? 4 : 8;
    float x[2];
    unrolled_for (int i = 0; i < 2; i++) {
        const int g = (2 * (lane & 3) + i) % LOST;
        x[i] = g < GROUPS ? tile.group_sum[lane >> 2][min(g, GROUPS - 1)] * times : 0;
    }
    const uint32_t sums = pack_half2(x[0], x[1]);
    const __half2 h = *reinterpret_cast<const __half2 *>(&sums);
    const uint32_t lost = pack_half2(x[0] - __low2float(h), x[1] - __high2float(h));
    b[0] = LOST == 8 || (lane & 3) < 2 ? sums : lost;
    b[1] = LOST == 8 ? lost : 0;
}

/* The factors of a lane for the 8 columns from 8 * t on. */
template <class C, int D, class Q>
KVANT_INLINE ScoreFactors<C, D> score_factors(const Q &tile, int t, int lane, float step,
                                              float bias, int symmetric, float offset)
{
    ScoreFactors<C, D> f;
    unrolled_for (int h = 0; h < 2; h++) {
        const int column = 8 * t + 2 * (lane & 3) + h;
        float x = tile.factor[column] * (Q::BYTES                      ? step * (1 / FIXED_ONE)
                                         : C::BIASED || HAS_TRELLIS<C> ? step
                                                                       : 1.0f);
        f.factor[h] = x * code_unit<C, Q::BYTES>();
        f.factor8[h] = x * (code_unit<C, Q::BYTES>() / C::ROW8);
        f.base[h] = C::GROUP != KVANT_CUDA_GROUP_TOKEN
                        ? x
                        : x * tile.sum[column] * (C::BIASED ? -bias : 1.0f);
    }
    if constexpr (C::GROUP == KVANT_CUDA_GROUP_CHANNELS)
        load_group_sums<D / group_step<C, D>()>(tile, symmetric ? offset : 1.0f, lane,
                                                f.group_sums);
    return f;
}

/* s: accumulators in, scores (log2) out. */
template <class C, int D>
KVANT_INLINE void scale_scores(float (&s)[4][4], const ScoreFactors<C, D> &f, const TokenScales &t)
{
    unrolled_for (int i = 0; i < 8; i++)
        unrolled_for (int h = 0; h < 2; h++) {
            float &x = s[i / 2][2 * (i & 1) + h];
            float k = i & 1 ? f.factor8[h] : f.factor[h];
            if constexpr (C::BIASED)
                x = t.scale[i] * (x * k + f.base[h]);
            else if constexpr (!HAS_ZEROS<C>)
                x = x * k * t.scale[i];
            else
                x = x * k * t.scale[i] + t.zero[i] * f.base[h];
        }
}

/* Scales and zero points of a page, as fp16 in shared memory. */
struct GroupScales {
    const __half *scale,
        *zero; /* zero is not read when the codes are symmetric: then it is offset * scale */
    int symmetric;
    float offset;
    int log, stride; /* of groups; between the numbers of neighbouring ones */

    /* The distance from a page's first scales to the scales of the group that has this channel, or
     * this token. */
    KVANT_INLINE int at(int first) const
    {
        return (first >> log) * stride;
    }

    /* Zero points, or scales, which offset times are zero points. */
    KVANT_INLINE const __half *zeros() const
    {
        return symmetric ? scale : zero;
    }
    KVANT_INLINE float zero_unit() const
    {
        return symmetric ? offset : 1.0f;
    }
};

template <class C, int D>
KVANT_INLINE GroupScales group_scales(const uint8_t *metadata, int symmetric, float offset,
                                      const GroupPlaces &places)
{
    const __half *numbers = reinterpret_cast<const __half *>(metadata);
    return GroupScales{ numbers,    numbers + places.n_scales,
                        symmetric,  offset,
                        places.log, C::GROUP == KVANT_CUDA_GROUP_TOKENS ? D : PAGE_TOKENS };
}

/* Removes the signs of the scales of hybrid groups: a group without a zero point gets offset times
 * its scale. The caller orders this before the next copy into the page's slot. */
static __device__ __noinline__ void split_hybrid(uint8_t *metadata, const GroupPlaces places,
                                                 float offset, int lane)
{
    uint32_t *scales = reinterpret_cast<uint32_t *>(metadata),
             *zeros = scales + places.n_scales / 2;
#pragma unroll 4
    for (int i = lane; i < places.n_scales / 2; i += 32) {
        const uint32_t stored = scales[i], size = stored & 0x7fff7fffu, zero = zeros[i];
        const float2 x = __half22float2(*reinterpret_cast<const __half2 *>(&size));
        const uint32_t own = pack_half2(offset * x.x, offset * x.y);
        scales[i] = size;
        zeros[i] = prmt(stored >> 15 & 1 ? zero : own, stored >> 31 ? zero : own, 0x7610);
    }
    __syncwarp();
}

KVANT_INLINE uint32_t pair_at(const __half *numbers, int at)
{
    return *reinterpret_cast<const uint32_t *>(numbers + at);
}

KVANT_INLINE uint32_t multiply_pairs(uint32_t a, uint32_t b)
{
    __half2 c = __hmul2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
    return *reinterpret_cast<uint32_t *>(&c);
}

/* Zero points are an operand with tokens as rows and groups as columns. So one product gives their
 * share of all scores. */
template <class C, int D>
KVANT_INLINE void score_channel_groups(const uint8_t *page, const uint32_t (&q)[D / 16][2],
                                       const ScoreFactors<C, D> &f, const Bytes &table,
                                       const GroupScales &m, int lane, float (&s)[4][4])
{
    constexpr int STEP = group_step<C, D>(), GROUPS = D / STEP, LOST = GROUPS <= 4 ? 4 : 8;
    const __half *zeros = m.zeros() + m.at(min(lane % LOST, GROUPS - 1) * STEP) + 8 * (lane >> 3);
    unrolled_for (int i = 0; i < 2; i++) {
        uint32_t z[4];
        load_matrices<true>(z, zeros + 32 * i);
        unrolled_for (int k = 0; k < 2; k++) {
            const uint32_t a[4] = { z[2 * k], z[2 * k + 1], LOST == 8 ? z[2 * k] : 0,
                                    LOST == 8 ? z[2 * k + 1] : 0 };
            mma(s[2 * i + k], a, f.group_sums[0], f.group_sums[1]);
        }
    }
    /* Rows of even number are one group's scales, odd ones the next one's: transposed, a lane has
     * both of its token. */
    float part[4][4];
    uint32_t pairs[2][4]; /* of tokens 32 i + 8 j */
    for_each_tile<C, 4, D / 16>(page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) {
        const int g = 16 * ct / STEP;
        if (16 * ct % STEP == 0)
            part[rt][0] = part[rt][1] = part[rt][2] = part[rt][3] = 0;
        mma(part[rt], a, q[ct][0], q[ct][1]);
        if (16 * (ct + 1) % STEP != 0)
            return;
        if (rt == 0 && g % 2 == 0) {
            const __half *at =
                m.scale + m.at((min(g, GROUPS - 2) + (lane & 1)) * STEP) + 8 * (lane >> 3);
            load_matrices<true>(pairs[0], at);
            load_matrices<true>(pairs[1], at + 32);
        }
        unrolled_for (int e = 0; e < 2; e++) {
            const __half2 both =
                *reinterpret_cast<const __half2 *>(&pairs[rt / 2][2 * (rt % 2) + e]);
            const bool second = g - min(g / 2 * 2, GROUPS - 2) == 1;
            const float scale =
                (second ? __high2float(both) : __low2float(both)) * (e ? UNIT / C::ROW8 : UNIT);
            unrolled_for (int h = 0; h < 2; h++)
                s[rt][2 * e + h] += part[rt][2 * e + h] * scale;
        }
    });
    unrolled_for (int i = 0; i < 16; i++)
        s[i / 4][i % 4] *= f.base[i % 2];
}

/* Scales of 32 channels of each of two groups of tokens, or of 16 of each of four, are operands for
 * all heads: rows at the same place. Zero points are an operand whose rows are groups, so one
 * product for a tile of channels gives the parts of all groups. */
template <class C, int D>
KVANT_INLINE void score_token_groups(const uint8_t *page, const uint32_t (&q)[D / 16][2],
                                     const ScoreFactors<C, D> &f, const Bytes &table,
                                     const GroupScales &m, int lane, float (&s)[4][4])
{
    constexpr int STEP = group_step<C, D>(), GROUPS = PAGE_TOKENS / STEP;
    constexpr bool ONE =
        C::TILES == 1; /* tile of channels at a time, else two of one group of tokens */
    float zero[4] = {};
    const __half *zeros = m.zeros() + m.at((lane & (GROUPS - 1)) * STEP) + 8 * (lane >> 3);
    unrolled_for (int i = 0; i < D / 32; i++) {
        uint32_t z[4];
        load_matrices<false>(z, zeros + 32 * i);
        unrolled_for (int k = 0; k < 2; k++) {
            const uint32_t a[4] = { z[2 * k], 0, z[2 * k + 1], 0 };
            mma(zero, a, q[2 * i + k][0], q[2 * i + k][1]);
        }
    }
    uint32_t scaled[ONE ? GROUPS : C::TILES]
                   [2]; /* of token groups; of column tiles, for the token group at hand */
    for_each_tile<C, 4, D / 16>(page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) {
        uint32_t(&b)[2] = scaled[ONE ? 16 * rt / STEP : ct % C::TILES];
        uint32_t x[4];
        if (ONE && rt == 0)
            unrolled_for (int g = 0; g < GROUPS; g += 2) {
                load_matrices<false>(x, m.scale + m.at((g + (lane >> 4)) * STEP) + 16 * ct +
                                            (lane & 8));
                unrolled_for (int i = 0; i < 4; i++)
                    scaled[g + i / 2][i % 2] = multiply_pairs(q[ct][i % 2], x[i]);
            }
        if (!ONE && rt % 2 == 0 && ct % 2 == 0) {
            load_matrices<false>(x, m.scale + m.at(rt / 2 * STEP) + 16 * ct + 8 * (lane >> 3));
            unrolled_for (int i = 0; i < 4; i++)
                scaled[ct % C::TILES + i / 2][i % 2] = multiply_pairs(q[ct + i / 2][i % 2], x[i]);
        }
        mma(s[rt], a, b[0], b[1]);
    });
    float bases[GROUPS][2]; /* row g has group g's part */
    unrolled_for (int h = 0; h < 2; h++) {
        const float own = zero[h] * (m.zero_unit() * f.base[h]);
        unrolled_for (int g = 0; g < GROUPS; g++)
            bases[g][h] = __shfl_sync(FULL, own, 4 * g + (lane & 3));
    }
    unrolled_for (int i = 0; i < 8; i++)
        unrolled_for (int h = 0; h < 2; h++) {
            float &x = s[i / 2][2 * (i & 1) + h];
            x = x * (i & 1 ? f.factor8[h] : f.factor[h]) + bases[i / 2 * 16 / STEP][h];
        }
}

/* The operands of the first two column tiles become the last two, all others move up. */
template <int N> KVANT_INLINE void next_pair(uint32_t (&q)[N][2])
{
    const uint32_t first[4] = { q[0][0], q[0][1], q[1][0], q[1][1] };
    unrolled_for (int i = 0; i < 2 * N - 4; i++)
        q[i / 2][i % 2] = q[i / 2 + 2][i % 2];
    unrolled_for (int i = 0; i < 4; i++)
        q[N - 2 + i / 2][i % 2] = first[i];
}

/* Products of bytes are exact. Products with the upper bytes of the query's numbers count 256
 * times. Sums of up to 128 products stay below 2^22 (127 * 255 * 128). A sum that begins at the
 * bits of 1.5 * 2^23 therefore has the bits of the float 1.5 * 2^23 + sum. Bytes of a trellis
 * have no sign. Their sums with lower bytes begin at 2^23. They stay below 2^24, because they grow
 * by less than 2^23. Their sums with upper bytes begin at 1.5 * 2^23 (255 * 128 * 128). */
template <class C, int D, bool PLAIN, int TILES, class T>
KVANT_INLINE void multiply_bytes(const uint8_t *page, uint32_t (&q)[TILES][D / 16][2],
                                 const uint4 *operands, const T &table, int lane,
                                 float (&s)[TILES][4][4])
{
    constexpr bool AS_FLOAT = D <= 128;
    constexpr float HIGH = 12582912, LOW = HAS_TRELLIS<C> ? 8388608 : HIGH;
    int32_t low[TILES][4][4], high[TILES][4][4];
    unrolled_for (int t = 0; t < TILES; t++)
        unrolled_for (int i = 0; i < 16; i++) {
            low[t][i / 4][i % 4] = AS_FLOAT ? HAS_TRELLIS<C> ? 0x4b000000 : 0x4b400000 : 0;
            high[t][i / 4][i % 4] = AS_FLOAT ? 0x4b400000 : 0;
        }
    auto multiply = [&](int rt, int pair, const uint32_t(&a)[4]) {
        unrolled_for (int t = 0; t < TILES; t++) {
            mma_bytes<!HAS_TRELLIS<C>, false>(low[t][rt], a, q[t][2 * pair][0], q[t][2 * pair][1]);
            mma_bytes<!HAS_TRELLIS<C>, true>(high[t][rt], a, q[t][2 * pair + 1][0],
                                             q[t][2 * pair + 1][1]);
        }
    };
    if constexpr (HAS_TRELLIS<C> && PLAIN) {
        uint4 own; /* of the pair */
        for_each_trellis_byte<C, D, PLAIN>(
            page, lane, table,
            [&](int rt, int pair, const uint32_t(&a)[4]) {
                if (rt == 0)
                    own = operands[32 * pair + lane];
                mma_bytes<false, false>(low[0][rt], a, own.x, own.y);
                mma_bytes<false, true>(high[0][rt], a, own.z, own.w);
            },
            [] {});
    } else if constexpr (HAS_TRELLIS<C>) /* all pairs rotate q back to its first order */
        for_each_trellis_byte<C, D, PLAIN>(
            page, lane, table, [&](int rt, int, const uint32_t(&a)[4]) { multiply(rt, 0, a); },
            [&] {
                unrolled_for (int t = 0; t < TILES; t++)
                    next_pair(q[t]);
            });
    else
        for_each_key_pair<C, D / 16>(page, lane, table, multiply);
    unrolled_for (int i = 0; i < 16 * TILES; i++) {
        const int32_t l = low[i / 16][i / 4 % 4][i % 4], h = high[i / 16][i / 4 % 4][i % 4];
        s[i / 16][i / 4 % 4][i % 4] =
            AS_FLOAT ? (__int_as_float(h) - HIGH) * 256 + (__int_as_float(l) - LOW)
                     : (float)(h * 256 + l);
    }
}

/* Scores (log2) of a page's tokens, 8 columns per tile. A code is unpacked once for all tiles.
 * codes: bytes of codes in front of the metadata. Kinds with groups have one tile. PLAIN: q of
 * keys with trellis codes is read from `operands`, which put_operand filled. */
template <class C, int D, bool BYTES, bool PLAIN = false, int TILES, class T>
KVANT_INLINE void score_page(const uint8_t *page, int codes,
                             uint32_t (&q)[TILES][key_tiles<C, D>()][2],
                             const ScoreFactors<C, D> (&factors)[TILES], const T &table,
                             int symmetric, float offset, const GroupPlaces &places, int lane,
                             float (&s)[TILES][4][4], const uint4 *operands = nullptr)
{
    unrolled_for (int i = 0; i < 16 * TILES; i++)
        s[i / 16][i / 4 % 4][i % 4] = 0;
    if constexpr (C::GROUP == KVANT_CUDA_GROUP_TOKEN) {
        auto multiply = [&](int rt, int ct, const uint32_t(&a)[4]) {
            unrolled_for (int t = 0; t < TILES; t++)
                mma(s[t][rt], a, q[t][ct][0], q[t][ct][1]);
        };
        if constexpr (HAS_CHUNKS<C>)
            C::template for_each_key_tile<D>(page, lane, table, multiply);
        else if constexpr (HAS_WIDE_BOOK<C>)
            for_each_wide_key<C, D>(page, lane, table, multiply);
        else if constexpr (BYTES)
            multiply_bytes<C, D, PLAIN>(page, q, operands, table, lane, s);
        else if constexpr (HAS_TRELLIS<C> && C::BITS == 4)
            for_each_trellis_key4<C, D>(page, lane, table, multiply);
        else if constexpr (HAS_TRELLIS<C>)
            for_each_trellis_key<C, D>(page, lane, table, multiply);
        else
            for_each_tile<C, 4, D / 16>(page, lane, table, multiply);
        const TokenScales scales = load_scales<C>(page + codes, lane, symmetric, offset);
        unrolled_for (int t = 0; t < TILES; t++)
            scale_scores<C, D>(s[t], factors[t], scales);
    } else {
        static_assert(TILES == 1, "scales of groups multiply operands");
        const GroupScales m = group_scales<C, D>(page + codes, symmetric, offset, places);
        if constexpr (C::GROUP == KVANT_CUDA_GROUP_CHANNELS)
            score_channel_groups<C, D>(page, q[0], factors[0], table, m, lane, s[0]);
        else
            score_token_groups<C, D>(page, q[0], factors[0], table, m, lane, s[0]);
    }
}

} // namespace kvant
