/* values.cuh - weighted sums of a sealed page's values: scores to weights, products of codes, and the scales
 * of each grouping outside of them.
 *
 * A scale a token acts on the token's weight. A scale for 32 channels of a token makes the weights
 * different for each group of channels: fp16 weights are multiplied by fp16 scales, both relative to
 * powers of two that keep them in fp16's range. A scale for 32 tokens of a channel acts on the sum over
 * these tokens. */
#ifndef KVANT_CUDA_VALUES_CUH
#define KVANT_CUDA_VALUES_CUH

#include "keys.cuh"

namespace kvant
{

/* The scores of tokens valid .. 63 of a page become those of tokens that are not there. */
__device__ __forceinline__ void hide_tokens(float (&s)[4][4], int valid, int row)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (16 * (i / 2) + 8 * (i & 1) + row >= valid)
            s[i / 2][2 * (i & 1)] = s[i / 2][2 * (i & 1) + 1] = -INFINITY;
}

/* Of two numbers of tokens token and token + 1, those of tokens below valid; the others are 0, whatever
 * stands there. */
__device__ __forceinline__ uint32_t keep_valid(uint32_t pair, int token, int valid)
{
    return token + 1 < valid ? pair : token < valid ? pair & 0xffffu : 0;
}

/* Weights 2^(s - max) * size as operands, tokens as rows; their sum is added up before they are rounded. */
template <class A>
__device__ __forceinline__ void weigh(A &sums, const float (&s)[4][4], float size, uint32_t (&p)[4][2])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float e0 = exp2_fast(s[i / 2][2 * (i & 1)] - sums.max[0]),
              e1 = exp2_fast(s[i / 2][2 * (i & 1) + 1] - sums.max[1]);
        sums.sum[0] += e0;
        sums.sum[1] += e1;
        p[i / 2][i & 1] = transpose8x8(pack_half2(e0 * size, e1 * size));
    }
}

/* A power of two above the numbers of 64 tokens in so many arrays, between 2^-13 and 2^14, and its inverse
 * as two halves. */
struct Size {
    float value, log2;
    uint32_t inverse;
};

template <int ARRAYS> __device__ __forceinline__ Size size_of(const __half *numbers, int lane, int valid)
{
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < ARRAYS; i++) {
        uint32_t pair = keep_valid(pair_at(numbers, PAGE_TOKENS * i + 2 * lane), 2 * lane, valid) & 0x7fff7fffu;
        largest = max(largest, max(pair & 0xffffu, pair >> 16));
    }
    /* halves without a sign are in the order of whole numbers */
    const uint32_t exponent = min(max(__reduce_max_sync(FULL, largest) >> 10, 1u), 28u), down = 29 - exponent;
    return Size{ __uint_as_float((exponent + 1 + 112) << 23), (float)exponent - 14, down << 10 | down << 26 };
}

template <class C, int D>
__device__ __forceinline__ void add_channel_groups(const uint8_t *page, const Bytes &table, const GroupScales &m,
                                                   int lane, int valid, float (&s)[4][4], Accumulator<C, D> &sums)
{
    const Size size = size_of<D / 32>(m.scale, lane, valid);
    const Size zeros = m.symmetric ? Size{} : size_of<D / 32>(m.zero, lane, valid);
    const uint32_t offset = pair_of(m.offset);
    sums.raise(s, size.log2);
    uint32_t p[4][2], weights[2][2];
    weigh(sums, s, size.value, p);
    float zero[D / 32][4] = {};
    for_each_tile<C, D / 16, 4>(page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) {
        uint32_t(&w)[2] = weights[ct % 2];
        if (rt % 2 == 0) {
            uint32_t z[2];
#pragma unroll
            for (int far = 0; far < 2; far++) {
                const int token = 16 * ct + 8 * far + 2 * (lane & 3), at = rt / 2 * PAGE_TOKENS + token;
                uint32_t scale = pair_at(m.scale, at);
                z[far] = m.symmetric ? offset : multiply_pairs(pair_at(m.zero, at), zeros.inverse);
                if (valid < PAGE_TOKENS) {
                    scale = keep_valid(scale, token, valid);
                    z[far] = keep_valid(z[far], token, valid);
                }
                w[far] = multiply_pairs(p[ct][far], multiply_pairs(scale, size.inverse));
            }
            mma_row(zero[rt / 2], z[0], z[1], m.symmetric ? w : p[ct]);
        }
        mma(sums.o[rt], a, w[0], w[1]);
    });
    const float one = m.symmetric ? 1 : zeros.value / size.value;
#pragma unroll
    for (int g = 0; g < D / 32; g++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            sums.zero[g][h] += zero[g][h] * one;
}

template <class C, int D>
__device__ __forceinline__ void add_token_groups(const uint8_t *page, const Bytes &table, const GroupScales &m,
                                                 int lane, int valid, float (&s)[4][4], Accumulator<C, D> &sums)
{
    sums.raise(s, 0);
    uint32_t p[4][2];
    weigh(sums, s, 1, p);
    float total[2][4] = {}, part[4][4];
#pragma unroll
    for (int ct = 0; ct < 4; ct++)
        mma_row(total[ct / 2], 0x3c003c00u, 0x3c003c00u, p[ct]);
    for_each_tile<C, D / 16, 4>(page, lane, table, [&](int rt, int ct, const uint32_t(&a)[4]) {
        float(&x)[4] = part[rt % 4];
        if (ct % 2 == 0)
            x[0] = x[1] = x[2] = x[3] = 0;
        mma(x, a, p[ct][0], p[ct][1]);
        if (ct % 2 == 0)
            return;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float2 y = scale_and_zero(m, ct / 2 * D + 16 * rt + 8 * e + (lane >> 2));
            if (32 * (ct / 2) >= valid) /* a group that was never written */
                y = make_float2(0, 0);
#pragma unroll
            for (int h = 0; h < 2; h++)
                sums.o[rt][2 * e + h] += x[2 * e + h] * (y.x * UNIT) + total[ct / 2][h] * (e ? y.y * C::ROW8 : y.y);
        }
    });
}

/* Adds a page's values, weighted by the scores, to the sums. */
template <class C, int D, bool LARGE, class T>
__device__ __forceinline__ void add_page(const uint8_t *page, int codes, const T &table, int symmetric,
                                         float offset, int lane, int valid, float (&s)[4][4],
                                         Accumulator<C, D> &sums)
{
    if constexpr (C::GROUP == KVANT_CUDA_GROUP_TOKEN) {
        TokenScales scales = load_scales<C>(page + codes, lane >> 2, symmetric, offset);
        if (valid < PAGE_TOKENS)
            mask_tokens(s, scales, valid, lane >> 2);
        uint32_t weights[4][2];
        sums.weigh(s, scales, weights);
        auto multiply = [&](int rt, int ct, const uint32_t(&a)[4]) {
            mma(sums.o[rt], a, weights[ct][0], weights[ct][1]);
        };
        if constexpr (HAS_CHUNKS<C>)
            C::template for_each_value_tile<D, LARGE>(page, lane, table, multiply);
        else {
            reorder<C::ORDER, 4>(weights);
            for_each_tile<C, D / 16, 4>(page, lane, table, multiply);
        }
    } else {
        const GroupScales m = group_scales<C, D>(page + codes, symmetric, offset);
        if (valid < PAGE_TOKENS)
            hide_tokens(s, valid, lane >> 2);
        if constexpr (C::GROUP == KVANT_CUDA_GROUP_CHANNELS32)
            add_channel_groups<C, D>(page, table, m, lane, valid, s, sums);
        else
            add_token_groups<C, D>(page, table, m, lane, valid, s, sums);
    }
}

} // namespace kvant

#endif
