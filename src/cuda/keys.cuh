/* keys.cuh - scores of a sealed page's keys: products of codes, and the scales of each grouping outside of
 * them.
 *
 * A scale a token acts on the token's score. A scale for 32 channels of a token acts on the part of the
 * score that these channels give. A scale for 32 tokens of a channel acts on the query: its operands are
 * multiplied by the scales of each group of tokens before they meet the codes, and the zero points are one
 * more row of the matrix. */
#ifndef KVANT_CUDA_KEYS_CUH
#define KVANT_CUDA_KEYS_CUH

#include "query.cuh"
#include "softmax.cuh"

namespace kvant
{

/* What turns an accumulator into a score: factor[h] for rows r and (folding in ROW8) r + 8, and
 * base[g][h], which a zero point multiplies (uniform) or which is added before the scale (codebook). */
template <class C, int D> struct ScoreFactors {
    static constexpr int BASES = C::GROUP == KVANT_CUDA_GROUP_CHANNELS32 ? D / 32 : 1;
    float factor[2], factor8[2], base[BASES][2];
};

/* What a 1 in a score's accumulator is worth. */
template <class C> __device__ __forceinline__ constexpr float code_unit()
{
    if constexpr (HAS_CHUNKS<C>)
        return C::UNIT;
    return C::BIASED ? 1.0f : UNIT;
}

template <class C, int D>
__device__ __forceinline__ ScoreFactors<C, D> score_factors(const QueryTile<D> &tile, int column, float step,
                                                            float bias)
{
    ScoreFactors<C, D> f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float x = tile.factor[column + h] * (C::BIASED ? step * (1 / FIXED_ONE) : 1.0f);
        f.factor[h] = x * code_unit<C>();
        f.factor8[h] = x * (code_unit<C>() / C::ROW8);
        if constexpr (C::GROUP == KVANT_CUDA_GROUP_CHANNELS32) {
#pragma unroll
            for (int g = 0; g < D / 32; g++)
                f.base[g][h] = x * tile.group_sum[column + h][g];
        } else
            f.base[0][h] = x * tile.sum[column + h] * (C::BIASED ? -bias : 1.0f);
    }
    return f;
}

/* s: accumulators in, scores (log2) out. */
template <class C, int D>
__device__ __forceinline__ void scale_scores(float (&s)[4][4], const ScoreFactors<C, D> &f, const TokenScales &t)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float &x = s[i / 2][2 * (i & 1) + h];
            float k = i & 1 ? f.factor8[h] : f.factor[h];
            if constexpr (HAS_CHUNKS<C>)
                x = x * k * t.scale[i];
            else if constexpr (C::BIASED)
                x = t.scale[i] * (x * k + f.base[0][h]);
            else
                x = x * k * t.scale[i] + t.zero[i] * f.base[0][h];
        }
}

/* Scales and zero points of a page, as fp16 in shared memory. */
struct GroupScales {
    const __half *scale, *zero; /* zero is not read when the codes are symmetric: then it is offset * scale */
    int symmetric;
    float offset;
};

template <class C, int D>
__device__ __forceinline__ GroupScales group_scales(const uint8_t *metadata, int symmetric, float offset)
{
    constexpr int SCALES = C::GROUP == KVANT_CUDA_GROUP_TOKENS32 ? 2 * D : D / 32 * PAGE_TOKENS;
    const __half *numbers = reinterpret_cast<const __half *>(metadata);
    return GroupScales{ numbers, numbers + SCALES, symmetric, offset };
}

/* The number of a row that an accumulator's row shares with 32 channels or tokens, and its zero point. */
__device__ __forceinline__ float2 scale_and_zero(const GroupScales &m, int at)
{
    float scale = __half2float(m.scale[at]);
    return make_float2(scale, m.symmetric ? m.offset * scale : __half2float(m.zero[at]));
}

__device__ __forceinline__ uint32_t pair_at(const __half *numbers, int at)
{
    return *reinterpret_cast<const uint32_t *>(numbers + at);
}

__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b)
{
    __half2 c = __hmul2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
    return *reinterpret_cast<uint32_t *>(&c);
}

/* Two equal halves of a small number. */
__device__ __forceinline__ uint32_t pair_of(float x)
{
    return pack_half2(x, x);
}

/* A row of numbers, the same in all 16 rows of the operand. */
__device__ __forceinline__ void mma_row(float (&d)[4], uint32_t low, uint32_t high, const uint32_t (&b)[2])
{
    const uint32_t a[4] = { low, low, high, high };
    mma(d, a, b[0], b[1]);
}

template <class C, int D>
__device__ __forceinline__ void score_channel_groups(const uint8_t *page, const uint32_t (&q)[D / 16][2],
                                                     const ScoreFactors<C, D> &f, const Bytes &table,
                                                     const GroupScales &m, int lane, float (&s)[4][4])
{
    float part[4][4];
    for_each_tile<C, 4, D / 16>(page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) {
        if (ct % 2 == 0)
            part[rt][0] = part[rt][1] = part[rt][2] = part[rt][3] = 0;
        mma(part[rt], a, q[ct][0], q[ct][1]);
        if (ct % 2 == 0)
            return;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float2 x = scale_and_zero(m, ct / 2 * PAGE_TOKENS + 16 * rt + 8 * e + (lane >> 2));
#pragma unroll
            for (int h = 0; h < 2; h++)
                s[rt][2 * e + h] +=
                    part[rt][2 * e + h] * (e ? f.factor8[h] : f.factor[h]) * x.x + x.y * f.base[ct / 2][h];
        }
    });
}

template <class C, int D>
__device__ __forceinline__ void score_token_groups(const uint8_t *page, const uint32_t (&q)[D / 16][2],
                                                   const ScoreFactors<C, D> &f, const Bytes &table,
                                                   const GroupScales &m, int lane, float (&s)[4][4])
{
    float zero[2][4] = {};
    uint32_t scaled[2][2]; /* of the column tile, odd or even, for the token group at hand */
    const uint32_t offset = pair_of(m.offset);
    for_each_tile<C, 4, D / 16>(page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) {
        uint32_t(&b)[2] = scaled[ct % 2];
        if (rt % 2 == 0) {
            const int at = rt / 2 * D + 16 * ct + 2 * (lane & 3);
            b[0] = multiply_pairs(q[ct][0], pair_at(m.scale, at));
            b[1] = multiply_pairs(q[ct][1], pair_at(m.scale, at + 8));
            if (m.symmetric)
                mma_row(zero[rt / 2], offset, offset, b);
            else
                mma_row(zero[rt / 2], pair_at(m.zero, at), pair_at(m.zero, at + 8), q[ct]);
        }
        mma(s[rt], a, b[0], b[1]);
    });
    const float one = C::ROW8 / UNIT; /* factor8 * one: a score's factor without the unit of codes */
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float &x = s[i / 2][2 * (i & 1) + h];
            x = x * (i & 1 ? f.factor8[h] : f.factor[h]) + zero[i / 4][h] * (f.factor8[h] * one);
        }
}

/* Products of bytes are exact: those with the upper bytes of the query's numbers count 256 times. Sums of
 * up to 128 of them stay below 2^22 (127 * 255 * 128), so that when they begin at the bits of 1.5 * 2^23
 * their bits are those of the float 1.5 * 2^23 + sum. */
template <class C, int D>
__device__ __forceinline__ void multiply_bytes(const uint8_t *page, const uint32_t (&q)[D / 16][2],
                                               const Bytes &table, int lane, float (&s)[4][4])
{
    constexpr bool AS_FLOAT = D <= 128;
    constexpr float START = 12582912;
    int32_t low[4][4], high[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++)
        low[i / 4][i % 4] = high[i / 4][i % 4] = AS_FLOAT ? 0x4b400000 : 0;
    for_each_key_pair<C, D / 16>(page, lane, table, [&](int rt, int pair, const uint32_t(&a)[4]) {
        mma_bytes<false>(low[rt], a, q[2 * pair][0], q[2 * pair][1]);
        mma_bytes<true>(high[rt], a, q[2 * pair + 1][0], q[2 * pair + 1][1]);
    });
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int32_t l = low[i / 4][i % 4], h = high[i / 4][i % 4];
        s[i / 4][i % 4] =
            AS_FLOAT ? (__int_as_float(h) - START) * 256 + (__int_as_float(l) - START) : (float)(h * 256 + l);
    }
}

/* Scores (log2) of a page's tokens. codes: bytes of codes, behind which the metadata stands. */
template <class C, int D, bool LARGE, class T>
__device__ __forceinline__ void score_page(const uint8_t *page, int codes,
                                           const uint32_t (&q)[key_tiles<C, D>()][2],
                                           const ScoreFactors<C, D> &factors, const T &table, int symmetric,
                                           float offset, int lane, float (&s)[4][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
    if constexpr (HAS_CHUNKS<C>) {
        C::template for_each_key_tile<D, LARGE>(
            page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) { mma(s[rt], a, q[ct][0], q[ct][1]); });
        scale_scores<C, D>(s, factors, load_scales<C>(page + codes, lane >> 2, symmetric, offset));
    } else if constexpr (C::BIASED) {
        multiply_bytes<C, D>(page, q, table, lane, s);
        scale_scores<C, D>(s, factors, load_scales<C>(page + codes, lane >> 2, symmetric, offset));
    } else if constexpr (C::GROUP == KVANT_CUDA_GROUP_TOKEN) {
        for_each_tile<C, 4, D / 16>(
            page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) { mma(s[rt], a, q[ct][0], q[ct][1]); });
        scale_scores<C, D>(s, factors, load_scales<C>(page + codes, lane >> 2, symmetric, offset));
    } else {
        const GroupScales m = group_scales<C, D>(page + codes, symmetric, offset);
        if constexpr (C::GROUP == KVANT_CUDA_GROUP_CHANNELS32)
            score_channel_groups<C, D>(page, q, factors, table, m, lane, s);
        else
            score_token_groups<C, D>(page, q, factors, table, m, lane, s);
    }
}

} // namespace kvant

#endif
