/* open.cuh - open pages in attention: rows of fp16 in the transformed space, read straight from
 * memory.
 *
 * Open pages are few (the end of a sequence, its first tokens) and larger than a slot of the ring,
 * so they do not pass through the ring. A page waits for memory, not for arithmetic: four warps
 * share it, 16 tokens each, and ask for all of their numbers at once. Where there is room, values
 * pass through shared memory on their way to operands. The weights of these tokens are relative to
 * the tokens' own largest score. Their sums are separate, and are added to the sums of sealed pages
 * in fp32. So values without a scale do not narrow the range of values with a scale. */
#pragma once

#include "further_tiles.cuh"
#include "offsets.cuh"
#include "scores.cuh"
#include "values.cuh"

namespace kvant
{

/* The binary logarithm of the scale that sealed values are assumed to have, compared with exact
 * values, when the reference of exponents is moved. It is low: sealed weights lose range in fp16
 * when it is too high, and fp32 loses none when it is too low. */
constexpr float OPEN_EXPONENT = -16;

constexpr int OPEN_TOKENS = 16; /* of a page, to a warp */

/* Scores (log2) of the 16 tokens from `first` on of a page. A lane reads 8 neighbouring channels at
 * once. The channels of a product may have any order, if the query's numbers have the same
 * order. */
template <int D, class Q>
KVANT_INLINE void score_open_tokens(const uint8_t *page, const Q &tile, int t, int first, int lane,
                                    float (&s)[1][4])
{
    const int row = lane >> 2, column = 8 * t + 2 * (lane & 3);
    const uint4 *q =
        reinterpret_cast<const uint4 *>(tile.rows + (8 * t + row) * Q::STRIDE) + (lane & 3);
    const uint4 *from =
        reinterpret_cast<const uint4 *>(page) + (first + row) * (D / 8) + (lane & 3);
    s[0][0] = s[0][1] = s[0][2] = s[0][3] = 0;
    unrolled_for (int c = 0; c < D / 32; c++) {
        const uint4 b = q[4 * c], x = __ldg(from + 4 * c), y = __ldg(from + 8 * (D / 8) + 4 * c);
        const uint32_t near[4] = { x.x, y.x, x.y, y.y }, far[4] = { x.z, y.z, x.w, y.w };
        mma(s[0], near, b.x, b.y);
        mma(s[0], far, b.z, b.w);
    }
    unrolled_for (int i = 0; i < 4; i++)
        s[0][i] *= tile.factor[column + i % 2];
}

/* Weights relative to the tokens' largest score. The caller multiplies them by factor[h]. */
template <class A>
KVANT_INLINE void weigh_open_tokens(A &sums, const float (&s)[4], uint32_t (&p)[2],
                                    float (&factor)[2])
{
    float top[2], raised[2], sum[2] = { 0, 0 };
    unrolled_for (int h = 0; h < 2; h++) {
        top[h] = fmaxf(NEVER, fmaxf(s[h], s[2 + h]));
        unrolled_for (int k = 4; k < 32; k *= 2)
            top[h] = fmaxf(top[h], __shfl_xor_sync(FULL, top[h], k));
        raised[h] = top[h] + OPEN_EXPONENT;
    }
    sums.raise_to(raised);
    unrolled_for (int i = 0; i < 2; i++) {
        const float e0 = exp2_fast(s[2 * i] - top[0]), e1 = exp2_fast(s[2 * i + 1] - top[1]);
        sum[0] += e0;
        sum[1] += e1;
        p[i] = transpose8x8(pack_half2(e0, e1));
    }
    unrolled_for (int h = 0; h < 2; h++) {
        factor[h] = exp2_fast(top[h] - sums.max[h]);
        sums.sum[h] += sum[h] * factor[h];
    }
}

/* A channel's numbers of two neighbouring tokens, zeros where there are none. */
template <int D>
KVANT_INLINE uint32_t open_pair(const uint8_t *page, int channel, int token, int valid)
{
    const uint16_t *from = reinterpret_cast<const uint16_t *>(page) + token * D + channel;
    const uint32_t low = channel < D && token < valid ? __ldg(from) : 0,
                   high = channel < D && token + 1 < valid ? __ldg(from + D) : 0;
    return low | high << 16;
}

/* Values of the 16 tokens from `first` on as operands. If the codec has no chunks, the caller still
 * has to transpose them. */
template <class C, int D>
KVANT_INLINE void load_open_values(const uint8_t *page, int first, int valid, int lane,
                                   uint32_t (&a)[Accumulator<C, D>::TILES][4])
{
    const uint32_t *from =
        reinterpret_cast<const uint32_t *>(page) + (lane >> 2) * (D / 2) + (lane & 3);
    unrolled_for (int rt = 0; rt < Accumulator<C, D>::TILES; rt++)
        unrolled_for (int i = 0; i < 4; i++) { /* i mod 2 selects the upper channels, i / 2 the
                                                * upper tokens */
            const int token = first + 8 * (i / 2);
            if constexpr (HAS_CHUNKS<C>)
                a[rt][i] = open_pair<D>(page, value_channel<C, D>(rt, lane >> 2, i % 2),
                                        token + 2 * (lane & 3), valid);
            else
                a[rt][i] = token + (lane >> 2) < valid
                               ? __ldg(from + token * (D / 2) + 8 * rt + 4 * (i % 2))
                               : 0;
        }
}

/* Values of 16 tokens on their way through shared memory. A load of an operand's register takes 4
 * bytes of each of 8 tokens at a time, and such loads take longer than all other work on the
 * tokens. Copies take 16 bytes a lane, and operands come from shared memory transposed. */
template <int D> struct OpenRows {
    static constexpr int STRIDE = D + 8, BYTES = OPEN_TOKENS * STRIDE * 2;

    /* Begins to copy the tokens from `first` on; zeros where there are none. */
    KVANT_INLINE static void request(__half *rows, const uint8_t *page, int first, int valid,
                                     int lane)
    {
        constexpr int A_TOKEN = D / 8; /* pieces of 16 bytes */
        __syncwarp();
        unrolled_for (int i = 0; i < OPEN_TOKENS * A_TOKEN / 32; i++) {
            const int piece = lane + 32 * i, token = piece / A_TOKEN, at = piece % A_TOKEN * 8;
            copy_or_clear(shared_address(rows + token * STRIDE + at),
                          page + (size_t)((first + token) * D + at) * 2, first + token < valid);
        }
        end_copies();
    }
    KVANT_INLINE static void wait()
    {
        wait_for_copies<0>();
        __syncwarp();
    }
    /* The operand of row tile rt. */
    KVANT_INLINE static void load(const __half *rows, int rt, int lane, uint32_t (&a)[4])
    {
        load_matrices<true>(a, rows + (lane % 8 + lane / 16 * 8) * STRIDE + 16 * rt + (lane & 8));
    }
};

/* Adds 16 tokens of one exact page, from `first` on, to the sums of tile t. before: tokens before
 * the page; valid: tokens that the page has. STAGED: values come through `rows`. Inlined only where
 * there is one call: sums go through memory otherwise. */
template <class C, int D, bool GENERAL, bool MANY, bool STAGED, class Q>
KVANT_INLINE Accumulator<C, D> attend_open_tokens(const AttentionArgs &p, const Q &tile, Seen seen,
                                                  int t, int block, int first, const Pair &pair,
                                                  int before, int valid, __half *rows, int lane,
                                                  Accumulator<C, D> sums)
{
    const uint8_t *values = p.v_open.base + (size_t)(uint32_t)block * p.v_open.block_stride +
                            pair.kv_head * p.v_open.head_stride;
    uint32_t a[STAGED ? 1 : Accumulator<C, D>::TILES][4], weights[2];
    float s[1][4], factor[2];
    PageOffsets offsets;
    if (MANY && p.page_offsets) /* on their way while scores are computed */
        offsets.ask(p, pair, before / PAGE_TOKENS, t, lane);
    if constexpr (STAGED)
        OpenRows<D>::request(rows, values, first, valid, lane);
    else
        load_open_values<C, D>(values, first, valid, lane, a);
    score_open_tokens<D>(p.k_open.base + (size_t)(uint32_t)block * p.k_open.block_stride +
                             pair.kv_head * p.k_open.head_stride,
                         tile, t, first, lane, s);
    if constexpr (GENERAL)
        change_scores(p, tile, seen, t, before + first, valid - first, lane, s);
    if (MANY && p.page_offsets)
        offsets.add(p, s);
    hide_tokens(s, valid - first, lane >> 2);
    weigh_open_tokens(sums, s[0], weights, factor);
    const float one = 1 / Accumulator<C, D>::unit(p.v_step);
    if constexpr (STAGED)
        OpenRows<D>::wait();
    unrolled_for (int rt = 0; rt < Accumulator<C, D>::TILES; rt++) {
        uint32_t(&own)[4] = a[STAGED ? 0 : rt];
        float x[4] = {};
        if constexpr (STAGED)
            OpenRows<D>::load(rows, rt, lane, own);
        else if constexpr (!HAS_CHUNKS<C>)
            unrolled_for (int i = 0; i < 4; i++)
                own[i] = transpose8x8(own[i]);
        mma(x, own, weights[0], weights[1]);
        unrolled_for (int h = 0; h < 2; h++) {
            sums.o[rt][h] += x[h] * (factor[h] * one);
            sums.o[rt][h + 2] += x[h + 2] * (factor[h] * one * Accumulator<C, D>::ROW8);
        }
    }
    return sums;
}

} // namespace kvant
