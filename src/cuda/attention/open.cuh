/* open.cuh - open pages in attention: rows of fp16 in the transformed space, read straight from
 * memory.
 *
 * Open pages are few (the end of a sequence, its first tokens) and larger than a slot of the ring,
 * so they do not pass through the ring. A page has weights relative to its own largest score, and
 * its own sums, which are added to the others in fp32. So values without a scale do not narrow the
 * range of values with a scale. */
#pragma once

#include "scores.cuh"
#include "values.cuh"

namespace kvant
{

/* Log2 of the scale that sealed values are taken to have beside open ones when the reference of
 * exponents is moved: low, because sealed weights lose range in fp16 when it is too high, and fp32
 * loses none when it is too low. */
constexpr float OPEN_EXPONENT = -16;

/* Scores (log2). A lane reads 8 neighbouring channels at once. Which channel of 32 stands in which
 * column of the product does not matter as long as the query's numbers stand in the same order. */
template <int D, class Q>
KVANT_INLINE void score_open_page(const uint8_t *page, const Q &tile, int t, int lane, float (&s)[4][4])
{
    const int row = lane >> 2, column = 8 * t + 2 * (lane & 3);
    const uint4 *q = reinterpret_cast<const uint4 *>(tile.rows + (8 * t + row) * Q::STRIDE) + (lane & 3);
    const uint4 *from = reinterpret_cast<const uint4 *>(page) + row * (D / 8) + (lane & 3);
    unrolled_for (int i = 0; i < 4; i++)
        s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
#pragma unroll 2
    for (int c = 0; c < D / 32; c++) {
        const uint4 b = q[4 * c];
        unrolled_for (int rt = 0; rt < 4; rt++) {
            const uint4 x = __ldg(from + 16 * rt * (D / 8) + 4 * c),
                        y = __ldg(from + (16 * rt + 8) * (D / 8) + 4 * c);
            const uint32_t near[4] = { x.x, y.x, x.y, y.y }, far[4] = { x.z, y.z, x.w, y.w };
            mma(s[rt], near, b.x, b.y);
            mma(s[rt], far, b.z, b.w);
        }
    }
    unrolled_for (int i = 0; i < 8; i++)
        unrolled_for (int h = 0; h < 2; h++)
            s[i / 2][2 * (i & 1) + h] *= tile.factor[column + h];
}

/* Weights relative to the page's largest score; factor[h] is what they are to be multiplied by. */
template <class A>
KVANT_INLINE void weigh_open_page(A &sums, const float (&s)[4][4], uint32_t (&p)[4][2], float (&factor)[2])
{
    float top[2] = { NEVER, NEVER }, raised[2], sum[2] = { 0, 0 };
    unrolled_for (int i = 0; i < 8; i++)
        unrolled_for (int h = 0; h < 2; h++)
            top[h] = fmaxf(top[h], s[i / 2][2 * (i & 1) + h]);
    unrolled_for (int h = 0; h < 2; h++) {
        unrolled_for (int k = 4; k < 32; k *= 2)
            top[h] = fmaxf(top[h], __shfl_xor_sync(FULL, top[h], k));
        raised[h] = top[h] + OPEN_EXPONENT;
    }
    sums.raise_to(raised);
    unrolled_for (int i = 0; i < 8; i++) {
        float e0 = exp2_fast(s[i / 2][2 * (i & 1)] - top[0]), e1 = exp2_fast(s[i / 2][2 * (i & 1) + 1] - top[1]);
        sum[0] += e0;
        sum[1] += e1;
        p[i / 2][i & 1] = transpose8x8(pack_half2(e0, e1));
    }
    unrolled_for (int h = 0; h < 2; h++) {
        factor[h] = exp2_fast(top[h] - sums.max[h]);
        sums.sum[h] += sum[h] * factor[h];
    }
}

/* A channel's numbers of two neighbouring tokens, zeros where there are none. */
template <int D> KVANT_INLINE uint32_t open_pair(const uint8_t *page, int channel, int token, int valid)
{
    const uint16_t *from = reinterpret_cast<const uint16_t *>(page) + token * D + channel;
    const uint32_t low = channel < D && token < valid ? __ldg(from) : 0,
                   high = channel < D && token + 1 < valid ? __ldg(from + D) : 0;
    return low | high << 16;
}

template <class C, int D>
KVANT_INLINE void add_open_page(const uint8_t *page, float step, int lane, int valid, float (&s)[4][4],
                                Accumulator<C, D> &sums)
{
    if (valid < PAGE_TOKENS)
        hide_tokens(s, valid, lane >> 2);
    uint32_t p[4][2];
    float factor[2];
    weigh_open_page(sums, s, p, factor);
    const float one = 1 / Accumulator<C, D>::unit(step);
    const uint32_t *from = reinterpret_cast<const uint32_t *>(page) + (lane >> 2) * (D / 2) + (lane & 3);
    unrolled_for (int rt = 0; rt < Accumulator<C, D>::TILES; rt++) {
        float x[4] = {};
        unrolled_for (int ct = 0; ct < 4; ct++) {
            uint32_t a[4];
            unrolled_for (int i = 0; i < 4; i++) { /* channels + 8 (i mod 2), tokens + 8 (i / 2) */
                const int token = 16 * ct + 8 * (i / 2);
                if constexpr (HAS_CHUNKS<C>) {
                    a[i] = open_pair<D>(page, value_channel<C, D>(rt, lane >> 2, i % 2), token + 2 * (lane & 3),
                                        valid);
                    continue;
                }
                const bool there = token + (lane >> 2) < valid;
                a[i] = transpose8x8(there ? __ldg(from + token * (D / 2) + 8 * rt + 4 * (i % 2)) : 0);
            }
            mma(x, a, p[ct][0], p[ct][1]);
        }
        unrolled_for (int h = 0; h < 2; h++) {
            sums.o[rt][h] += x[h] * (factor[h] * one);
            sums.o[rt][h + 2] += x[h + 2] * (factor[h] * one * Accumulator<C, D>::ROW8);
        }
    }
}

/* The sums of tile t with one open page added. Not inlined: it is seldom called, and long. */
template <class C, int D, bool GENERAL, class Q>
__device__ __noinline__ Accumulator<C, D> attend_open_page(const AttentionArgs &p, const Q &tile, Seen seen, int t,
                                                           int block, int kv_head, int first, int valid, int lane,
                                                           Accumulator<C, D> sums)
{
    float s[4][4];
    score_open_page<D>(p.k_open.base + (size_t)(uint32_t)block * p.k_open.block_stride +
                           kv_head * p.k_open.head_stride,
                       tile, t, lane, s);
    if constexpr (GENERAL)
        change_scores(p, tile, seen, t, first, valid, lane, s);
    add_open_page<C, D>(p.v_open.base + (size_t)(uint32_t)block * p.v_open.block_stride +
                            kv_head * p.v_open.head_stride,
                        p.v_step, lane, valid, s, sums);
    return sums;
}

} // namespace kvant
