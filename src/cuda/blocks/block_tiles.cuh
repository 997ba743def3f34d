/* block_tiles.cuh - a warp's tile of 16 tokens in ggml's formats q8_0 and q4_0: copies, codes as
 * operands, scores, weights, sums of values. blocks.cu has the kernels. */
#pragma once

#include "../attention/combine.cuh"
#include "../params.h"
#include "../ptx.cuh"
#include "../rotate.cuh"

namespace kvant
{
namespace blocks
{

constexpr int TILE = 16, WARPS = 4, MOST_ROWS = 16;
constexpr float LOG2E = 1.44269504f,
                WEIGHT_UNIT =
                    8; /* weights are 2^WEIGHT_UNIT at most, so that small ones are normal halves */

struct Q8 {
    static constexpr uint32_t TYPE = 8;
    static constexpr int BYTES = 34, ZERO = 128;
};

struct Q4 {
    static constexpr uint32_t TYPE = 2;
    static constexpr int BYTES = 18, ZERO = 8;
};

/* The stride in shared memory, in bytes. It is an odd number of 16, so that pairs of rows are in
 * different banks. */
constexpr int stride_of(int row_bytes)
{
    return ((row_bytes + 15) / 16 | 1) * 16;
}

template <class F, int D> struct Shape {
    static constexpr int ROW = D / 32 * F::BYTES, STRIDE = stride_of(ROW),
                         UNIT_BYTES = ROW % 16 == 0  ? 16
                                      : ROW % 8 == 0 ? 8
                                                     : 4;
    static constexpr int STAGE = 2 * TILE * STRIDE;
    /* Shared memory of a thread block: the rings of the warps, and in the same place their sums at
     * the end. */
    static constexpr int bytes(int stages)
    {
        const int ring = WARPS * stages * STAGE,
                  sums = (int)sizeof(float) * WARPS * MOST_ROWS * (D + 2);
        return ring > sums ? ring : sums;
    }
};

/* Tiles of a warp that are being copied or used. There are 2 where 3 would exceed the shared memory
 * of a thread block on GPUs with 99 KB of it. This is so for q8_0 with head_dim 256 (102 KB). */
constexpr int MOST_STAGES = 3, SMALL_BYTES = 98 * 1024;
template <class F, int D> constexpr int least_stages()
{
    return Shape<F, D>::bytes(MOST_STAGES) <= SMALL_BYTES ? MOST_STAGES : 2;
}

struct Problem {
    kvant_cuda_block_args a;
    int group, rows, tiles, splits, tiles_a_split;
    uint32_t *counters; /* per (sequence, kv head); initially zero */
    float *parts; /* per (sequence, kv head, split): rows x D sums, then maxima, then totals */
    size_t part_floats; /* a multiple of 4 */
};

KVANT_INLINE float *part_of(const Problem &p, int pair, int split)
{
    return p.parts + ((size_t)pair * p.splits + split) * p.part_floats;
}

/* ---- copying ---- */

template <int N> KVANT_INLINE void copy_async(void *to, const void *from)
{
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
    if constexpr (N == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(N)
                     : "memory");
}

/* A warp copies the rows of a tile; rows beyond the last token repeat it. A row has 16 or 8 pieces,
 * and one for its scales. */
template <class S>
KVANT_INLINE void copy_rows(uint8_t *to, const uint8_t *from, size_t stride, int first,
                            int n_tokens, int lane)
{
    constexpr int PIECE = S::UNIT_BYTES, LANES = S::ROW / PIECE - 1, ROWS = 32 / LANES;
    static_assert(LANES == 16 || LANES == 8, "");
    const int row = lane / LANES, column = lane % LANES * PIECE;
    if (first + TILE <= n_tokens) {
        const uint8_t *at = from + (size_t)(first + row) * stride + column;
        uint8_t *mine = to + row * S::STRIDE + column;
        unrolled_for (int i = 0; i < TILE / ROWS; i++, at += ROWS * stride)
            copy_async<PIECE>(mine + i * ROWS * S::STRIDE, at);
    } else {
        for (int i = row; i < TILE; i += ROWS)
            copy_async<PIECE>(to + i * S::STRIDE + column,
                              from + (size_t)min(first + i, n_tokens - 1) * stride + column);
    }
    if (lane < TILE)
        copy_async<PIECE>(to + lane * S::STRIDE + LANES * PIECE,
                          from + (size_t)min(first + lane, n_tokens - 1) * stride + LANES * PIECE);
}

/* ---- codes ---- */

/* Reads four bytes at AT + 4 * words. AT is even, and rows begin at a multiple of 16. */
template <int AT> KVANT_INLINE uint32_t word_at(const uint8_t *row, int words)
{
    const uint32_t *at = reinterpret_cast<const uint32_t *>(row) + AT / 4 + words;
    return AT % 4 == 0 ? at[0] : prmt(at[0], at[1], 0x5432);
}

template <class F> KVANT_INLINE __half scale_at(const uint8_t *row, int block)
{
    return *reinterpret_cast<const __half *>(row + block * F::BYTES);
}

KVANT_INLINE uint32_t as_word(__half2 x)
{
    return *reinterpret_cast<uint32_t *>(&x);
}

/* Two bytes of `bytes` as codes, less ZERO. selector: 0x4140 for bytes 0 and 1. */
template <class F> KVANT_INLINE __half2 halves(uint32_t bytes, uint32_t selector)
{
    const uint32_t raw = prmt(bytes, 0x64646464u, selector);
    return __hsub2(*reinterpret_cast<const __half2 *>(&raw), __float2half2_rn(1024 + F::ZERO));
}

/* Lane t of four has eight channels of a block, as two words of four. */
template <class F, int J>
KVANT_INLINE void read_keys(const uint8_t *row, int t, uint32_t (&word)[2])
{
    if constexpr (F::TYPE == Q8::TYPE) {
        word[0] = word_at<J * Q8::BYTES + 2>(row, 2 * t) ^ 0x80808080u;
        word[1] = word_at<J * Q8::BYTES + 6>(row, 2 * t) ^ 0x80808080u;
    } else {
        const uint32_t both = word_at<J * Q4::BYTES + 2>(row, t);
        word[0] = both & 0x0f0f0f0fu;
        word[1] = both >> 4 & 0x0f0f0f0fu;
    }
}

/* The first of the four channels of word i. */
template <class F> KVANT_INLINE int key_channel(int t, int i)
{
    return F::TYPE == Q8::TYPE ? 8 * t + 4 * i : 16 * i + 4 * t;
}

/* Lane g of eight has four channels of a block, for two tokens: [m][h] is channel value_channel(g,
 * m) + h. */
template <class F, int J>
KVANT_INLINE void read_values(const uint8_t *first, const uint8_t *second, int g, __half2 scale,
                              uint32_t (&pair)[2][2])
{
    if constexpr (F::TYPE == Q8::TYPE) {
        const uint32_t a = word_at<J * Q8::BYTES + 2>(first, g) ^ 0x80808080u,
                       b = word_at<J * Q8::BYTES + 2>(second, g) ^ 0x80808080u;
        unrolled_for (int m = 0; m < 2; m++) {
            const uint32_t x = prmt(a, b, m == 0 ? 0x5140 : 0x7362);
            pair[m][0] = as_word(__hmul2(halves<F>(x, 0x4140), scale));
            pair[m][1] = as_word(__hmul2(halves<F>(x, 0x4342), scale));
        }
    } else {
        const uint32_t x = reinterpret_cast<const uint16_t *>(first)[J * 9 + 1 + g] |
                           (uint32_t) reinterpret_cast<const uint16_t *>(second)[J * 9 + 1 + g]
                               << 16;
        unrolled_for (int m = 0; m < 2; m++) {
            const uint32_t codes = x >> (4 * m) & 0x0f0f0f0fu;
            pair[m][0] = as_word(__hmul2(halves<F>(codes, 0x4240), scale));
            pair[m][1] = as_word(__hmul2(halves<F>(codes, 0x4341), scale));
        }
    }
}

template <class F> KVANT_INLINE int value_channel(int g, int m)
{
    return F::TYPE == Q8::TYPE ? 4 * g + 2 * m : 16 * m + 2 * g;
}

/* ---- a warp ---- */

template <class F, int D> struct Queries {
    uint32_t operand[D / 32][2][4];
};

template <class F, int D>
KVANT_INLINE void load_queries(const Problem &p, int sequence, int kv_head, int lane,
                               Queries<F, D> &q)
{
    const float scale = p.a.scale * LOG2E;
    unrolled_for (int h = 0; h < 2; h++) {
        const int row = lane / 4 + 8 * h;
        const float *from = p.a.q + sequence * p.a.q_batch_stride +
                            row / p.group * p.a.q_token_stride +
                            (kv_head * p.group + row % p.group) * p.a.q_head_stride;
        unrolled_for (int j = 0; j < D / 32; j++)
            unrolled_for (int i = 0; i < 2; i++)
                unrolled_for (int k = 0; k < 2; k++) {
                    const int channel = 32 * j + key_channel<F>(lane % 4, i) + 2 * k;
                    const bool there = row < p.rows;
                    q.operand[j][i][2 * k + h] = as_word(__floats2half2_rn(
                        there ? from[channel] * scale : 0, there ? from[channel + 1] * scale : 0));
                }
    }
}

template <class F, int D, int J = 0>
KVANT_INLINE void add_scores(const uint8_t *keys, const Queries<F, D> &q, int lane,
                             float (&s)[2][4])
{
    if constexpr (J < D / 32) {
        using S = Shape<F, D>;
        unrolled_for (int n = 0; n < 2; n++) {
            const uint8_t *row = keys + (8 * n + lane / 4) * S::STRIDE,
                          *pair = keys + (8 * n + 2 * (lane % 4)) * S::STRIDE;
            float sum[4] = {};
            uint32_t word[2];
            read_keys<F, J>(row, lane % 4, word);
            unrolled_for (int i = 0; i < 2; i++)
                mma(sum, q.operand[J][i], as_word(halves<F>(word[i], 0x4140)),
                    as_word(halves<F>(word[i], 0x4342)));
            const float first = __half2float(scale_at<F>(pair, J)),
                        second = __half2float(scale_at<F>(pair + S::STRIDE, J));
            unrolled_for (int i = 0; i < 4; i++)
                s[n][i] = fmaf(sum[i], i % 2 == 0 ? first : second, s[n][i]);
        }
        add_scores<F, D, J + 1>(keys, q, lane, s);
    }
}

/* Replaces fp16 numbers of two tokens by 0 if they are not finite; found gets a bit per token. */
KVANT_INLINE void take_finite(uint32_t &pair, uint32_t &found)
{
    constexpr uint32_t INFINITE = 0x7c00;
    if ((pair & INFINITE) == INFINITE)
        pair &= 0xffff0000u, found |= 1;
    if ((pair >> 16 & INFINITE) == INFINITE)
        pair &= 0xffffu, found |= 2;
}

/* WEIGHTED: values that are not finite do not count. Then found[n] says which of the lane's tokens
 * 8 n + 2 (lane % 4) and the next one have some. */
template <class F, int D, int N, bool WEIGHTED, int J = 0>
KVANT_INLINE void add_values(const uint8_t *values, const uint32_t (&weights)[N][2], int lane,
                             float (&o)[D / 32][2][N][4], uint32_t (&found)[2])
{
    if constexpr (J < D / 32) {
        using S = Shape<F, D>;
        uint32_t pair[2][2][2];
        unrolled_for (int n = 0; n < 2; n++) {
            const uint8_t *first = values + (8 * n + 2 * (lane % 4)) * S::STRIDE,
                          *second = first + S::STRIDE;
            read_values<F, J>(first, second, lane / 4,
                              __halves2half2(scale_at<F>(first, J), scale_at<F>(second, J)),
                              pair[n]);
        }
        if constexpr (WEIGHTED) {
            unrolled_for (int i = 0; i < 8; i++)
                take_finite((&pair[0][0][0])[i], found[i / 4]);
        }
        unrolled_for (int m = 0; m < 2; m++) {
            const uint32_t a[4] = { pair[0][m][0], pair[0][m][1], pair[1][m][0], pair[1][m][1] };
            unrolled_for (int n = 0; n < N; n++)
                mma(o[J][m][n], a, weights[n][0], weights[n][1]);
        }
        add_values<F, D, N, WEIGHTED, J + 1>(values, weights, lane, o, found);
    }
}

/* The slope of ALiBi, as in kvant/attention.h. */
KVANT_INLINE float slope_of(const kvant_cuda_block_args &a, int head)
{
    if (a.max_bias <= 0)
        return 1;
    const int n = 1 << (31 - __clz((int)a.n_heads));
    return exp2f(-a.max_bias *
                 (head < n ? (head + 1.0f) / n : (2.0f * (head - n) + 1) / (2.0f * n)));
}

/* The data of a lane's query rows g and g + 8. */
struct Row {
    const __half2 *mask; /* NULL: none */
    float slope, top, total;
};

KVANT_INLINE Row row_of(const Problem &p, int sequence, int kv_head, int row)
{
    const __half *mask = reinterpret_cast<const __half *>(p.a.mask);
    const bool masked = mask && row < p.rows;
    return { masked ? reinterpret_cast<const __half2 *>(mask + sequence * p.a.mask_batch_stride +
                                                        row / p.group * p.a.mask_token_stride)
                    : nullptr,
             slope_of(p.a, kv_head * p.group + row % p.group), -INFINITY, 0 };
}

KVANT_INLINE float capped(float score, float cap)
{
    return cap > 0 ? cap * LOG2E * tanhf(score / (LOG2E * cap)) : score;
}

/* The score of a token, or -inf if the mask hides it, whatever its key holds. */
KVANT_INLINE float masked(float score, float bias, const Problem &p, float slope)
{
    return bias == -INFINITY ? bias : capped(score, p.a.logit_softcap) + slope * bias * LOG2E;
}

/* Replaces the scores of a row's four tokens by weights; returns the factor for earlier sums. */
KVANT_INLINE float weigh(const Problem &p, Row &row, int first, int n_tokens, float (&s)[2][2])
{
    float top = row.top;
    unrolled_for (int n = 0; n < 2; n++) {
        const int token = first + 8 * n;
        const float2 bias =
            row.mask && token < n_tokens ? __half22float2(row.mask[token / 2]) : make_float2(0, 0);
        s[n][0] = token < n_tokens ? masked(s[n][0], bias.x, p, row.slope) : -INFINITY;
        s[n][1] = token + 1 < n_tokens ? masked(s[n][1], bias.y, p, row.slope) : -INFINITY;
        top = fmaxf(top, fmaxf(s[n][0], s[n][1]));
    }
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    const float base = top == -INFINITY ? 0 : top, factor = exp2f(row.top - base);
    row.total *= factor;
    unrolled_for (int n = 0; n < 2; n++)
        unrolled_for (int i = 0; i < 2; i++) {
            s[n][i] = exp2_fast(s[n][i] - base + WEIGHT_UNIT);
            row.total += s[n][i];
        }
    row.top = top;
    return factor;
}

/* N: number of groups of 8 query rows. */
template <class F, int D, int N> struct Warp {
    float o[D / 32][2][N][4];
    Row rows[N];

    KVANT_INLINE void start(const Problem &p, int sequence, int kv_head, int lane)
    {
        unrolled_for (int n = 0; n < N; n++)
            rows[n] = row_of(p, sequence, kv_head, lane / 4 + 8 * n);
        unrolled_for (int i = 0; i < D / 32 * 2 * N * 4; i++)
            (&o[0][0][0][0])[i] = 0;
    }

    KVANT_INLINE void scale(int n, float factor, int lane)
    {
        if (!__any_sync(FULL, factor != 1))
            return;
        const float first = __shfl_sync(FULL, factor, 8 * (lane % 4)),
                    second = __shfl_sync(FULL, factor, 8 * (lane % 4) + 4);
        unrolled_for (int j = 0; j < D / 32; j++)
            unrolled_for (int m = 0; m < 2; m++)
                unrolled_for (int i = 0; i < 4; i++)
                    o[j][m][n][i] *= i % 2 == 0 ? first : second;
    }

    /* Whether all sums of the warp are finite; all lanes get the answer. */
    KVANT_INLINE bool is_finite() const
    {
        float sum = 0; /* becomes NaN if a number times 0 is NaN */
        unrolled_for (int i = 0; i < D / 32 * 2 * N * 4; i++)
            sum = fmaf((&o[0][0][0][0])[i], 0, sum);
        return !__any_sync(FULL, isnan(sum));
    }

    /* Makes a row's total NaN if a value that is not finite has a weight other than 0. A lane has
     * the weights of four tokens, and some channels of their values. */
    KVANT_INLINE void spoil(const uint32_t (&found)[2], const float (&s)[N][2][2])
    {
        unrolled_for (int i = 0; i < 2; i++) {
            uint32_t all = found[i];
            all |= __shfl_xor_sync(FULL, all, 4);
            all |= __shfl_xor_sync(FULL, all, 8);
            all |= __shfl_xor_sync(FULL, all, 16);
            unrolled_for (int n = 0; n < N; n++)
                if (((all & 1) && s[n][i][0] != 0) || ((all & 2) && s[n][i][1] != 0))
                    rows[n].total = NAN;
        }
    }

    template <bool WEIGHTED>
    KVANT_INLINE void add(const Problem &p, const Queries<F, D> &q, const uint8_t *keys,
                          const uint8_t *values, int first, int lane)
    {
        float s[2][4] = {}, mine[N][2][2];
        uint32_t weights[N][2], found[2] = {};
        add_scores<F, D>(keys, q, lane, s);
        unrolled_for (int n = 0; n < N; n++) {
            unrolled_for (int i = 0; i < 4; i++)
                mine[n][i / 2][i % 2] = s[i / 2][2 * n + i % 2];
            scale(n, weigh(p, rows[n], first + 2 * (lane % 4), (int)p.a.n_tokens, mine[n]), lane);
            weights[n][0] = as_word(__floats2half2_rn(mine[n][0][0], mine[n][0][1]));
            weights[n][1] = as_word(__floats2half2_rn(mine[n][1][0], mine[n][1][1]));
        }
        add_values<F, D, N, WEIGHTED>(values, weights, lane, o, found);
        if constexpr (WEIGHTED)
            spoil(found, mine);
    }

    /* Stores this warp's sums (MOST_ROWS x D), tops and totals (MOST_ROWS each). */
    KVANT_INLINE void store(float *sums, float *tops, float *totals, int lane)
    {
        unrolled_for (int n = 0; n < N; n++) {
            float total = rows[n].total;
            total += __shfl_xor_sync(FULL, total, 1);
            total += __shfl_xor_sync(FULL, total, 2);
            if (lane % 4 == 0) {
                tops[lane / 4 + 8 * n] = rows[n].top;
                totals[lane / 4 + 8 * n] = total;
            }
            unrolled_for (int j = 0; j < D / 32; j++)
                unrolled_for (int m = 0; m < 2; m++)
                    unrolled_for (int i = 0; i < 4; i++)
                        sums[(8 * n + 2 * (lane % 4) + i % 2) * D + 32 * j +
                             value_channel<F>(lane / 4, m) + i / 2] = o[j][m][n][i];
        }
    }
};

} // namespace blocks
} // namespace kvant
