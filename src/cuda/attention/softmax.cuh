/* softmax.cuh - from a warp's MMA accumulators of scores to weights for the values, with a running
 * maximum.
 *
 * Registers follow the accumulator of mma.m16n8k16. Lane l holds tokens 16i + l / 4 and the tokens
 * 8 further. It holds query heads 2 (l mod 4) and the heads after them. A token's key scale acts on
 * its score and its value scale on its weight, so no single number is scaled.
 *
 * The reference of exponents is the running maximum of score + log2(value scale). So weights e^s
 * times value scale are at most 2^SLACK, and their largest is near it, for any scale of the values;
 * fp16 operands need this range. The reference moves only when a page exceeds it by more than
 * SLACK. */
#pragma once

#include "../papers/chunks.cuh"
#include "../rotate.cuh"
#include "../trellis/trellis.cuh"
#include "wide_keys.cuh"

namespace kvant
{

constexpr float SLACK = 8;
constexpr float NEVER = -1e30f; /* a maximum of nothing; finite, so that differences are numbers */
constexpr float UNIT = 16777216.0f; /* 2^24: operands are counted in fp16's smallest number */

/* Uniform codes, whose numbers are scale * code + zero. */
template <class C>
constexpr bool HAS_ZEROS = !C::BIASED && !HAS_CHUNKS<C> && !HAS_TRELLIS<C> && !HAS_WIDE_BOOK<C>;

/* scale[i], zero[i] of token 16 (i / 2) + 8 (i mod 2) + row. Symmetric uniform codes are those with
 * zero = offset * scale; codebooks have no zero point, their bias is taken off elsewhere; chunks
 * and trellises have neither. */
struct TokenScales {
    float scale[8], zero[8];
};

/* 64 numbers of a page's tokens. A transposed matrix has a number of every eighth token in a lane,
 * so that four matrices replace eight loads. */
KVANT_INLINE void load_token_numbers(const uint8_t *from, int lane, float (&x)[8])
{
    uint32_t pairs[4];
    load_matrices<true>(pairs,
                        reinterpret_cast<const __half *>(from) + lane / 8 * 16 + lane % 2 * 8);
    unrolled_for (int i = 0; i < 4; i++) {
        const float2 both = __half22float2(*reinterpret_cast<const __half2 *>(&pairs[i]));
        x[2 * i] = both.x;
        x[2 * i + 1] = both.y;
    }
}

template <class C>
KVANT_INLINE TokenScales load_scales(const uint8_t *metadata, int lane, int symmetric, float offset)
{
    TokenScales t;
    load_token_numbers(metadata, lane, t.scale);
    if constexpr (HAS_ZEROS<C>)
        if (!symmetric)
            load_token_numbers(metadata + 2 * PAGE_TOKENS, lane, t.zero);
    unrolled_for (int i = 0; i < 8; i++)
        if (!HAS_ZEROS<C>)
            t.zero[i] = 0;
        else if (symmetric)
            t.zero[i] = offset * t.scale[i];
    return t;
}

/* Hides tokens valid .. 63: whatever bytes stand there, their weight is 0. */
KVANT_INLINE void mask_tokens(float (&s)[4][4], TokenScales &values, int valid, int row)
{
    unrolled_for (int i = 0; i < 8; i++)
        if (16 * (i / 2) + 8 * (i & 1) + row >= valid) {
            s[i / 2][2 * (i & 1)] = s[i / 2][2 * (i & 1) + 1] = -INFINITY;
            values.scale[i] = values.zero[i] = 0;
        }
}

/* A warp's share of the sums over tokens, for its lane's two query heads. */
template <class C, int D> struct Accumulator {
    static constexpr int TILES = value_tiles<C, D>();
    float o[TILES][4];    /* sum of weight * code */
    float max[2], sum[2]; /* reference; sum of e^s */
    /* uniform: sum of e^s * zero point. One a token: over the lane's own tokens. CHANNELS: over
     * all tokens, for group lane / 4. TOKENS: not used, o has them. */
    float zero[2];
    static constexpr float ROW8 = C::GROUP == KVANT_CUDA_GROUP_TOKENS ? 1 : C::ROW8;
    float weights[4]; /* codebook: sum of weights as rounded, so that the bias cancels exactly */

    /* The amount that a 1 in o stands for; rows r + 8 are too large by ROW8. */
    __device__ static __forceinline__ float unit(float step)
    {
        if constexpr (HAS_CHUNKS<C>)
            return C::UNIT;
        return C::GROUP == KVANT_CUDA_GROUP_TOKENS
                   ? 1.0f
                   : UNIT * (C::BIASED || HAS_TRELLIS<C> ? step : 1.0f);
    }

    KVANT_INLINE void clear()
    {
        unrolled_for (int i = 0; i < TILES; i++)
            unrolled_for (int j = 0; j < 4; j++)
                o[i][j] = 0;
        unrolled_for (int h = 0; h < 2; h++)
            max[h] = NEVER, sum[h] = zero[h] = weights[h] = weights[h + 2] = 0;
    }

    /* Raises the reference when scores + exponents of the value scales exceed it by more than
     * SLACK. */
    KVANT_INLINE void raise(const float (&s)[4][4], const TokenScales &values)
    {
        float top[2] = { NEVER, NEVER };
        unrolled_for (int i = 0; i < 8; i++) {
            float exponent = log2_fast(fmaxf(values.scale[i], 5.9604645e-8f));
            unrolled_for (int h = 0; h < 2; h++)
                top[h] = fmaxf(top[h], s[i / 2][2 * (i & 1) + h] + exponent);
        }
        raise_to(top);
    }

    /* The same with one exponent for the values of the page. */
    KVANT_INLINE void raise(const float (&s)[4][4], float exponent)
    {
        float top[2] = { NEVER, NEVER };
        unrolled_for (int i = 0; i < 8; i++)
            unrolled_for (int h = 0; h < 2; h++)
                top[h] = fmaxf(top[h], s[i / 2][2 * (i & 1) + h]);
        top[0] += exponent;
        top[1] += exponent;
        raise_to(top);
    }

    /* top: of the lane's own tokens. */
    KVANT_INLINE void raise_to(float (&top)[2])
    {
        if (!__any_sync(FULL, top[0] > max[0] + SLACK || top[1] > max[1] + SLACK))
            return;
        unrolled_for (int h = 0; h < 2; h++) {
            unrolled_for (int k = 4; k < 32; k *= 2)
                top[h] = fmaxf(top[h], __shfl_xor_sync(FULL, top[h], k));
            float raised = fmaxf(max[h], top[h]), shrink = exp2_fast(max[h] - raised);
            max[h] = raised;
            sum[h] *= shrink;
            zero[h] *= shrink;
            weights[h] *= shrink;
            weights[h + 2] *= shrink;
            unrolled_for (int i = 0; i < TILES; i++)
                o[i][h] *= shrink, o[i][h + 2] *= shrink;
        }
    }

    /* Adds the lanes' shares of sum and zero; afterwards o holds finished numbers (times sum). */
    KVANT_INLINE void finish(float step, float bias, int lane)
    {
        unrolled_for (int h = 0; h < 2; h++) {
            unrolled_for (int k = 4; k < 32; k *= 2) {
                sum[h] += __shfl_xor_sync(FULL, sum[h], k);
                if constexpr (HAS_ZEROS<C> && C::GROUP == KVANT_CUDA_GROUP_TOKEN)
                    zero[h] += __shfl_xor_sync(FULL, zero[h], k);
            }
            const float factor = unit(step);
            unrolled_for (int i = 0; i < TILES; i++) {
                float base = C::BIASED ? -bias * step * weights[h] : zero[h];
                if constexpr (C::GROUP == KVANT_CUDA_GROUP_CHANNELS)
                    base =
                        __shfl_sync(FULL, zero[h], 4 * (16 * i / group_step<C, D>()) + (lane & 3));
                o[i][h] = o[i][h] * factor + base;
                o[i][h + 2] = o[i][h + 2] * (factor / ROW8) + base;
            }
        }
    }
};

/* A page's contribution to a lane's sums. */
struct PageSums {
    float sum[2], zero[2];
};

/* p: weights of a page, not yet transposed. Returns false when a weight or their sum is too large
 * for the reference. */
template <class C, int D>
KVANT_INLINE bool key_transform_of(const Accumulator<C, D> &sums, const float (&s)[4][4],
                                   const TokenScales &values, PageSums &page, uint32_t (&p)[4][2])
{
    __half2 largest = __float2half2_rn(0);
    page = PageSums{};
    unrolled_for (int i = 0; i < 8; i++) {
        float e[2];
        unrolled_for (int h = 0; h < 2; h++) {
            e[h] = exp2_fast(s[i / 2][2 * (i & 1) + h] - sums.max[h]);
            page.sum[h] += e[h];
            if constexpr (HAS_ZEROS<C>)
                page.zero[h] += e[h] * values.zero[i];
        }
        __half2 weight = __floats2half2_rn(e[0] * values.scale[i], e[1] * values.scale[i]);
        largest = __hmax2_nan(largest, weight);
        p[i / 2][i & 1] = *reinterpret_cast<uint32_t *>(&weight);
    }
    return __hble2(largest, __float2half2_rn(1 << (int)SLACK)) && page.sum[0] < 0x1p64f &&
           page.sum[1] < 0x1p64f;
}

/* p: operands for the values, tokens as rows; also adds up the sums. Weights are computed with the
 * current reference first, and again with a raised one if a weight exceeds 2^SLACK. This happens
 * rarely and is cheaper to detect than a score above the reference. The sums detect it for values
 * of scale 0. Tiles are processed together, because their dependent instructions overlap. */
template <class C, int D, int TILES>
KVANT_INLINE void weigh_tokens(Accumulator<C, D> (&sums)[TILES], const float (&s)[TILES][4][4],
                               const TokenScales &values, uint32_t (&p)[TILES][4][2])
{
    PageSums page[TILES];
#pragma unroll 1
    for (int attempt = 0; attempt < 2; attempt++) {
        bool fits = true;
        unrolled_for (int t = 0; t < TILES; t++)
            fits &= key_transform_of(sums[t], s[t], values, page[t], p[t]);
        if (attempt == 1 || __all_sync(FULL, fits))
            break;
        unrolled_for (int t = 0; t < TILES; t++)
            sums[t].raise(s[t], values);
    }
    unrolled_for (int t = 0; t < TILES; t++) {
        unrolled_for (int h = 0; h < 2; h++)
            sums[t].sum[h] += page[t].sum[h], sums[t].zero[h] += page[t].zero[h];
        unrolled_for (int i = 0; i < 8; i++)
            p[t][i / 2][i & 1] = transpose8x8(p[t][i / 2][i & 1]);
        if constexpr (C::BIASED) {
            const uint32_t ones[4] = { 0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u };
            unrolled_for (int i = 0; i < 4; i++)
                mma(sums[t].weights, ones, p[t][i][0], p[t][i][1]);
        }
    }
}

} // namespace kvant
