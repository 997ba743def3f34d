/* blocks.cu - attention of few query rows over rows in ggml's formats q8_0 and q4_0, where llama.cpp left them.
 *
 * Tokens are dealt to thread blocks, then to warps, 16 at a time. A warp copies its rows to shared memory a few tiles
 * ahead (cp.async), because rows of 34 or 18 bytes per 32 numbers fit no vector load. Scores are Q K^T by m16n8k16:
 * 16 query rows, 8 tokens; channels are in the order in which a lane reads codes. Their layout is that of the weights'
 * operand in V^T P^T, so nothing is exchanged between lanes. Codes become fp16 exactly; a block's scale multiplies sums
 * of scores, and values. The thread block that ends last adds the parts in order. */
#include "../checks.h"
#include "../launch.h"
#include "../params.h"
#include "../rotate.cuh"
#include "../table.h"

#include <algorithm>

#include "../ptx.cuh"

#include "../attention/combine.cuh"

using namespace kvant;

namespace
{

constexpr int TILE = 16, WARPS = 4, MOST_ROWS = 16, MOST_PARTS = 1024, STAGES = 3, MOST_PAIRS = 16384;
constexpr size_t PAIR_COUNTERS = MOST_PAIRS * sizeof(uint32_t);
constexpr float LOG2E = 1.44269504f, UNIT = 8; /* weights are 2^UNIT at most, so that small ones are normal halves */

struct Q8 {
    static constexpr uint32_t TYPE = 8;
    static constexpr int BYTES = 34, ZERO = 128;
};

struct Q4 {
    static constexpr uint32_t TYPE = 2;
    static constexpr int BYTES = 18, ZERO = 8;
};

/* Bytes between rows in shared memory: an odd number of 16, so that pairs of rows are in different banks. */
constexpr int stride_of(int row_bytes)
{
    return ((row_bytes + 15) / 16 | 1) * 16;
}

template <class F, int D> struct Shape {
    static constexpr int ROW = D / 32 * F::BYTES, STRIDE = stride_of(ROW), UNIT_BYTES = ROW % 16 == 0 ? 16 : ROW % 8 == 0 ? 8 : 4;
    static constexpr int STAGE = 2 * TILE * STRIDE, RING = WARPS * STAGES * STAGE;
};

struct Problem {
    kvant_cuda_block_args a;
    int group, rows, tiles, splits, tiles_a_split;
    uint32_t *counters; /* per (sequence, kv head); zeros */
    float *parts;       /* per (sequence, kv head, split): rows x D sums, then maxima, then totals */
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
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(N) : "memory");
}

/* The rows of a tile by a warp; beyond the last token that one again. A row has 16 or 8 pieces and one. */
template <class S> KVANT_INLINE void copy_rows(uint8_t *to, const uint8_t *from, size_t stride, int first, int n_tokens, int lane)
{
    constexpr int PIECE = S::UNIT_BYTES, LANES = S::ROW / PIECE - 1, ROWS = 32 / LANES;
    static_assert(LANES == 16 || LANES == 8, "");
    const int row = lane / LANES, column = lane % LANES * PIECE;
    if (first + TILE <= n_tokens) {
        const uint8_t *at = from + (size_t)(first + row) * stride + column;
        uint8_t *mine = to + row * S::STRIDE + column;
#pragma unroll
        for (int i = 0; i < TILE / ROWS; i++, at += ROWS * stride)
            copy_async<PIECE>(mine + i * ROWS * S::STRIDE, at);
    } else {
        for (int i = row; i < TILE; i += ROWS)
            copy_async<PIECE>(to + i * S::STRIDE + column, from + (size_t)min(first + i, n_tokens - 1) * stride + column);
    }
    if (lane < TILE)
        copy_async<PIECE>(to + lane * S::STRIDE + LANES * PIECE, from + (size_t)min(first + lane, n_tokens - 1) * stride + LANES * PIECE);
}

/* ---- codes ---- */

/* Four bytes at AT + 4 * words; AT is even, rows begin at a multiple of 16. */
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

/* Two codes that are bytes of `bytes`, less ZERO. selector: 0x4140 for bytes 0 and 1. */
template <class F> KVANT_INLINE __half2 halves(uint32_t bytes, uint32_t selector)
{
    const uint32_t raw = prmt(bytes, 0x64646464u, selector);
    return __hsub2(*reinterpret_cast<const __half2 *>(&raw), __float2half2_rn(1024 + F::ZERO));
}

/* Lane t of four: eight channels of a block, as two words of four. */
template <class F, int J> KVANT_INLINE void read_keys(const uint8_t *row, int t, uint32_t (&word)[2])
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

/* Lane g of eight: four channels of a block, of two tokens: [m][h] is channel value_channel(g, m) + h. */
template <class F, int J>
KVANT_INLINE void read_values(const uint8_t *first, const uint8_t *second, int g, __half2 scale, uint32_t (&pair)[2][2])
{
    if constexpr (F::TYPE == Q8::TYPE) {
        const uint32_t a = word_at<J * Q8::BYTES + 2>(first, g) ^ 0x80808080u,
                       b = word_at<J * Q8::BYTES + 2>(second, g) ^ 0x80808080u;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint32_t x = prmt(a, b, m == 0 ? 0x5140 : 0x7362);
            pair[m][0] = as_word(__hmul2(halves<F>(x, 0x4140), scale));
            pair[m][1] = as_word(__hmul2(halves<F>(x, 0x4342), scale));
        }
    } else {
        const uint32_t x = reinterpret_cast<const uint16_t *>(first)[J * 9 + 1 + g] |
                           (uint32_t) reinterpret_cast<const uint16_t *>(second)[J * 9 + 1 + g] << 16;
#pragma unroll
        for (int m = 0; m < 2; m++) {
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

template <class F, int D> KVANT_INLINE void load_queries(const Problem &p, int sequence, int kv_head, int lane, Queries<F, D> &q)
{
    const float scale = p.a.scale * LOG2E;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = lane / 4 + 8 * h;
        const float *from = p.a.q + sequence * p.a.q_batch_stride + row / p.group * p.a.q_token_stride +
                            (kv_head * p.group + row % p.group) * p.a.q_head_stride;
#pragma unroll
        for (int j = 0; j < D / 32; j++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const int channel = 32 * j + key_channel<F>(lane % 4, i) + 2 * k;
                    const bool there = row < p.rows;
                    q.operand[j][i][2 * k + h] =
                        as_word(__floats2half2_rn(there ? from[channel] * scale : 0, there ? from[channel + 1] * scale : 0));
                }
    }
}

template <class F, int D, int J = 0>
KVANT_INLINE void add_scores(const uint8_t *keys, const Queries<F, D> &q, int lane, float (&s)[2][4])
{
    if constexpr (J < D / 32) {
        using S = Shape<F, D>;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint8_t *row = keys + (8 * n + lane / 4) * S::STRIDE, *pair = keys + (8 * n + 2 * (lane % 4)) * S::STRIDE;
            float sum[4] = {};
            uint32_t word[2];
            read_keys<F, J>(row, lane % 4, word);
#pragma unroll
            for (int i = 0; i < 2; i++)
                mma(sum, q.operand[J][i], as_word(halves<F>(word[i], 0x4140)), as_word(halves<F>(word[i], 0x4342)));
            const float first = __half2float(scale_at<F>(pair, J)), second = __half2float(scale_at<F>(pair + S::STRIDE, J));
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[n][i] = fmaf(sum[i], i % 2 == 0 ? first : second, s[n][i]);
        }
        add_scores<F, D, J + 1>(keys, q, lane, s);
    }
}

template <class F, int D, int N, int J = 0>
KVANT_INLINE void add_values(const uint8_t *values, const uint32_t (&weights)[N][2], int lane, float (&o)[D / 32][2][N][4])
{
    if constexpr (J < D / 32) {
        using S = Shape<F, D>;
        uint32_t pair[2][2][2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint8_t *first = values + (8 * n + 2 * (lane % 4)) * S::STRIDE, *second = first + S::STRIDE;
            read_values<F, J>(first, second, lane / 4, __halves2half2(scale_at<F>(first, J), scale_at<F>(second, J)), pair[n]);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint32_t a[4] = { pair[0][m][0], pair[0][m][1], pair[1][m][0], pair[1][m][1] };
#pragma unroll
            for (int n = 0; n < N; n++)
                mma(o[J][m][n], a, weights[n][0], weights[n][1]);
        }
        add_values<F, D, N, J + 1>(values, weights, lane, o);
    }
}

/* ALiBi's, as in kvant/attention.h. */
KVANT_INLINE float slope_of(const kvant_cuda_block_args &a, int head)
{
    if (a.max_bias <= 0)
        return 1;
    const int n = 1 << (31 - __clz((int)a.n_heads));
    return exp2f(-a.max_bias * (head < n ? (head + 1.0f) / n : (2.0f * (head - n) + 1) / (2.0f * n)));
}

/* What a lane knows of its query rows g and g + 8. */
struct Row {
    const __half2 *mask; /* NULL: none */
    float slope, top, total;
};

KVANT_INLINE Row row_of(const Problem &p, int sequence, int kv_head, int row)
{
    const __half *mask = reinterpret_cast<const __half *>(p.a.mask);
    const bool masked = mask && row < p.rows;
    return { masked ? reinterpret_cast<const __half2 *>(mask + sequence * p.a.mask_batch_stride + row / p.group * p.a.mask_token_stride)
                    : nullptr,
             slope_of(p.a, kv_head * p.group + row % p.group), -INFINITY, 0 };
}

KVANT_INLINE float capped(float score, float cap)
{
    return cap > 0 ? cap * LOG2E * tanhf(score / (LOG2E * cap)) : score;
}

/* Scores of a row's four tokens become weights; returns the factor for what was added before. */
KVANT_INLINE float weigh(const Problem &p, Row &row, int first, int n_tokens, float (&s)[2][2])
{
    float top = row.top;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int token = first + 8 * n;
        const float2 bias = row.mask && token < n_tokens ? __half22float2(row.mask[token / 2]) : make_float2(0, 0);
        s[n][0] = token < n_tokens ? capped(s[n][0], p.a.logit_softcap) + row.slope * bias.x * LOG2E : -INFINITY;
        s[n][1] = token + 1 < n_tokens ? capped(s[n][1], p.a.logit_softcap) + row.slope * bias.y * LOG2E : -INFINITY;
        top = fmaxf(top, fmaxf(s[n][0], s[n][1]));
    }
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    const float base = top == -INFINITY ? 0 : top, factor = exp2f(row.top - base);
    row.total *= factor;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[n][i] = exp2_fast(s[n][i] - base + UNIT);
            row.total += s[n][i];
        }
    row.top = top;
    return factor;
}

/* N: of 8 query rows each. */
template <class F, int D, int N> struct Warp {
    float o[D / 32][2][N][4];
    Row rows[N];

    KVANT_INLINE void start(const Problem &p, int sequence, int kv_head, int lane)
    {
#pragma unroll
        for (int n = 0; n < N; n++)
            rows[n] = row_of(p, sequence, kv_head, lane / 4 + 8 * n);
#pragma unroll
        for (int i = 0; i < D / 32 * 2 * N * 4; i++)
            (&o[0][0][0][0])[i] = 0;
    }

    KVANT_INLINE void scale(int n, float factor, int lane)
    {
        if (!__any_sync(FULL, factor != 1))
            return;
        const float first = __shfl_sync(FULL, factor, 8 * (lane % 4)), second = __shfl_sync(FULL, factor, 8 * (lane % 4) + 4);
#pragma unroll
        for (int j = 0; j < D / 32; j++)
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    o[j][m][n][i] *= i % 2 == 0 ? first : second;
    }

    KVANT_INLINE void add(const Problem &p, const Queries<F, D> &q, const uint8_t *keys, const uint8_t *values, int first, int lane)
    {
        float s[2][4] = {};
        uint32_t weights[N][2];
        add_scores<F, D>(keys, q, lane, s);
#pragma unroll
        for (int n = 0; n < N; n++) {
            float mine[2][2] = { { s[0][2 * n], s[0][2 * n + 1] }, { s[1][2 * n], s[1][2 * n + 1] } };
            scale(n, weigh(p, rows[n], first + 2 * (lane % 4), (int)p.a.n_tokens, mine), lane);
            weights[n][0] = as_word(__floats2half2_rn(mine[0][0], mine[0][1]));
            weights[n][1] = as_word(__floats2half2_rn(mine[1][0], mine[1][1]));
        }
        add_values<F, D, N>(values, weights, lane, o);
    }

    /* sums: MOST_ROWS x D of this warp, tops and totals MOST_ROWS. */
    KVANT_INLINE void store(float *sums, float *tops, float *totals, int lane)
    {
#pragma unroll
        for (int n = 0; n < N; n++) {
            float total = rows[n].total;
            total += __shfl_xor_sync(FULL, total, 1);
            total += __shfl_xor_sync(FULL, total, 2);
            if (lane % 4 == 0) {
                tops[lane / 4 + 8 * n] = rows[n].top;
                totals[lane / 4 + 8 * n] = total;
            }
#pragma unroll
            for (int j = 0; j < D / 32; j++)
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sums[(8 * n + 2 * (lane % 4) + i % 2) * D + 32 * j + value_channel<F>(lane / 4, m) + i / 2] = o[j][m][n][i];
        }
    }
};

/* ---- kernels ---- */

template <class F, int D> KVANT_INLINE void copy_tile(const Problem &p, uint8_t *stage, const uint8_t *k, const uint8_t *v, int tile, int end, int lane)
{
    using S = Shape<F, D>;
    if (tile < end) {
        copy_rows<S>(stage, k, p.a.k.token_stride, tile * TILE, (int)p.a.n_tokens, lane);
        copy_rows<S>(stage + TILE * S::STRIDE, v, p.a.v.token_stride, tile * TILE, (int)p.a.n_tokens, lane);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* What the warps of a thread block have, made one part. */
template <int D> KVANT_INLINE void add_warps(const Problem &p, const float *shared, int pair, int split)
{
    const float *tops = shared + WARPS * MOST_ROWS * D, *totals = tops + WARPS * MOST_ROWS;
    float *part = part_of(p, pair, split);
    for (int i = threadIdx.x; i < p.rows * D; i += WARPS * 32) {
        const int row = i / D;
        float top = -INFINITY, sum = 0, total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            top = fmaxf(top, tops[w * MOST_ROWS + row]);
        const float base = top == -INFINITY ? 0 : top;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float factor = exp2f(tops[w * MOST_ROWS + row] - base);
            sum = fmaf(factor, shared[w * MOST_ROWS * D + i], sum);
            total = fmaf(factor, totals[w * MOST_ROWS + row], total);
        }
        __stcg(part + i, sum);
        if (i % D == 0) {
            __stcg(part + p.rows * D + row, top);
            __stcg(part + p.rows * (D + 1) + row, total);
        }
    }
}

/* Of a row's parts: what each counts, in shared memory, so that they add up to the output. By a warp. */
KVANT_INLINE void weigh_parts(const Problem &p, const float *tops, int head, int lane, float *weights)
{
    const float *totals = tops + p.rows, sink = p.a.sinks ? p.a.sinks[head] * LOG2E : -INFINITY;
    float top = sink, total = 0;
    for (int i = lane; i < p.splits; i += 32)
        top = fmaxf(top, __ldcg(tops + i * p.part_floats));
    for (int k = 16; k > 0; k /= 2)
        top = fmaxf(top, __shfl_xor_sync(FULL, top, k));
    const float base = top == -INFINITY ? 0 : top;
    for (int i = lane; i < p.splits; i += 32) {
        weights[i] = exp2f(__ldcg(tops + i * p.part_floats) - base);
        total = fmaf(weights[i], __ldcg(totals + i * p.part_floats), total);
    }
    for (int k = 16; k > 0; k /= 2)
        total += __shfl_xor_sync(FULL, total, k);
    total += exp2f(sink - base + UNIT);
    for (int i = lane; i < p.splits; i += 32)
        weights[i] *= total > 0 ? 1 / total : 0;
}

/* The parts of a (sequence, kv head), and sinks, by the thread block that ends last. */
template <int D> KVANT_INLINE void write_rows(const Problem &p, int sequence, int kv_head, int pair, float *weights)
{
    const float *parts = part_of(p, pair, 0);
    for (int row = threadIdx.x / 32; row < p.rows; row += WARPS)
        weigh_parts(p, parts + p.rows * D + row, kv_head * p.group + row % p.group, threadIdx.x % 32, weights + row * p.splits);
    __syncthreads();
    for (int i = threadIdx.x; i < p.rows * D / 4; i += WARPS * 32) {
        const int row = i / (D / 4), head = kv_head * p.group + row % p.group;
        float4 sum = {};
#pragma unroll 8
        for (int j = 0; j < p.splits; j++) {
            const float4 x = __ldcg(reinterpret_cast<const float4 *>(parts + j * p.part_floats) + i);
            const float weight = weights[row * p.splits + j];
            sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
            sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
        }
        float *out = p.a.out + sequence * p.a.out_batch_stride + row / p.group * p.a.out_token_stride + head * p.a.out_head_stride +
                     i % (D / 4) * 4;
        out[0] = sum.x, out[1] = sum.y, out[2] = sum.z, out[3] = sum.w;
    }
}

template <class F, int D, int N> __global__ void __launch_bounds__(WARPS * 32, D > 128 ? 2 : N > 1 && D > 64 ? 3 : 4) blocks_kernel(const __grid_constant__ Problem p)
{
    using S = Shape<F, D>;
    extern __shared__ __align__(16) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y, sequence = blockIdx.z;
    const int begin = blockIdx.x * p.tiles_a_split, end = min(begin + p.tiles_a_split, p.tiles);
    const uint8_t *k = static_cast<const uint8_t *>(p.a.k.data) + sequence * p.a.k.batch_stride + kv_head * p.a.k.head_stride,
                  *v = static_cast<const uint8_t *>(p.a.v.data) + sequence * p.a.v.batch_stride + kv_head * p.a.v.head_stride;
    uint8_t *ring = memory + warp * STAGES * S::STAGE;
    Queries<F, D> q;
    Warp<F, D, N> w;

    for (int i = 0; i < STAGES - 1; i++)
        copy_tile<F, D>(p, ring + i * S::STAGE, k, v, begin + warp + i * WARPS, end, lane);
    load_queries<F, D>(p, sequence, kv_head, lane, q);
    w.start(p, sequence, kv_head, lane);
    for (int tile = begin + warp, i = 0; tile < end; tile += WARPS, i++) {
        copy_tile<F, D>(p, ring + (i + STAGES - 1) % STAGES * S::STAGE, k, v, tile + (STAGES - 1) * WARPS, end, lane);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncwarp();
        const uint8_t *stage = ring + i % STAGES * S::STAGE;
        w.add(p, q, stage, stage + TILE * S::STRIDE, tile * TILE, lane);
        __syncwarp(); /* this stage is written next */
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    float *shared = reinterpret_cast<float *>(memory), *tops = shared + WARPS * MOST_ROWS * D;
    w.store(shared + warp * MOST_ROWS * D, tops + warp * MOST_ROWS, tops + (WARPS + warp) * MOST_ROWS, lane);
    __syncthreads();
    const int pair = sequence * gridDim.y + kv_head;
    add_warps<D>(p, shared, pair, blockIdx.x);
    __shared__ uint32_t before;
    if (ends_last(p.counters + pair, p.splits, before))
        write_rows<D>(p, sequence, kv_head, pair, shared);
}

/* ---- launches ---- */

/* As many thread blocks as run at once, if there are tiles for them, and room for what each part of a row counts. */
cudaError_t split(Problem &p, const void *kernel, int shared)
{
    int device = 0, multiprocessors = 0, blocks = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, WARPS * 32, shared);
    const int pairs = (int)(p.a.batch * p.a.n_kv_heads),
              most = std::max(1, std::min({ multiprocessors * blocks / pairs, MOST_PARTS / pairs, (p.tiles + WARPS - 1) / WARPS,
                                             shared / (int)sizeof(float) / p.rows })),
              each = std::max(1, (p.tiles + most - 1) / most);
    p.tiles_a_split = (each + WARPS - 1) / WARPS * WARPS;
    p.splits = std::max(1, (p.tiles + p.tiles_a_split - 1) / p.tiles_a_split);
    return error;
}

template <class F, int D, int N> cudaError_t launch(Problem &p, cudaStream_t stream)
{
    constexpr int room = std::max(Shape<F, D>::RING, (int)sizeof(float) * WARPS * MOST_ROWS * (D + 2));
    const void *kernel = reinterpret_cast<const void *>(blocks_kernel<F, D, N>);
    cudaError_t error = allow_shared(kernel, room);
    if (error == cudaSuccess)
        error = split(p, kernel, room);
    if (error != cudaSuccess)
        return error;
    blocks_kernel<F, D, N><<<dim3(p.splits, p.a.n_kv_heads, p.a.batch), WARPS * 32, room, stream>>>(p);
    return cudaGetLastError();
}

template <class F, int D> cudaError_t launch_rows(Problem &p, cudaStream_t stream)
{
    return p.rows > 8 ? launch<F, D, 2>(p, stream) : launch<F, D, 1>(p, stream);
}

template <class F> cudaError_t launch_format(Problem &p, cudaStream_t stream)
{
    switch (p.a.head_dim) {
    case 64: return launch_rows<F, 64>(p, stream);
    case 128: return launch_rows<F, 128>(p, stream);
    case 256: return launch_rows<F, 256>(p, stream);
    default: return cudaErrorNotSupported;
    }
}

bool valid_rows(const kvant_cuda_block_rows &rows, const kvant_cuda_block_args &a)
{
    const size_t bytes = a.head_dim / 32 * (rows.type == Q8::TYPE ? Q8::BYTES : Q4::BYTES),
                 unit = bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 4;
    return rows.data && (reinterpret_cast<uintptr_t>(rows.data) | rows.token_stride | rows.head_stride | rows.batch_stride) % unit == 0;
}

bool valid_mask(const kvant_cuda_block_args &a)
{
    return reinterpret_cast<uintptr_t>(a.mask) % 4 == 0 && a.mask_token_stride % 2 == 0 && a.mask_batch_stride % 2 == 0;
}

bool takes(const kvant_cuda_block_args &a)
{
    const bool heads = a.n_kv_heads > 0 && a.n_heads % a.n_kv_heads == 0 && (uint64_t)a.n_kv_heads * a.batch <= MOST_PAIRS;
    return heads && (a.k.type == Q8::TYPE || a.k.type == Q4::TYPE) && a.k.type == a.v.type &&
           (a.head_dim == 64 || a.head_dim == 128 || a.head_dim == 256) && valid_rows(a.k, a) && valid_rows(a.v, a) && valid_mask(a) &&
           (uint64_t)(a.n_heads / a.n_kv_heads) * a.query_tokens <= MOST_ROWS && a.n_tokens <= INT32_MAX - TILE;
}

size_t part_floats(const kvant_cuda_block_args &a)
{
    return ((size_t)(a.n_heads / a.n_kv_heads * a.query_tokens) * (a.head_dim + 2) + 3) / 4 * 4;
}

} // namespace

size_t kvant_cuda_table_block_workspace(const kvant_cuda_block_args *args)
{
    return takes(*args) ? PAIR_COUNTERS + ((size_t)args->batch * args->n_kv_heads + MOST_PARTS) * part_floats(*args) * sizeof(float) : 0;
}

kvant_status kvant_cuda_table_block_attention(const kvant_cuda_block_args *args, kvant_cuda_stream stream)
{
    if (!takes(*args))
        return KVANT_ERR_UNSUPPORTED;
    if (!args->q || !args->out || !args->workspace || args->workspace_bytes < kvant_cuda_table_block_workspace(args))
        return KVANT_ERR_ARGUMENT;
    if (args->batch == 0 || args->query_tokens == 0)
        return KVANT_OK;
    Problem p{};
    p.a = *args;
    p.group = (int)(args->n_heads / args->n_kv_heads);
    p.rows = p.group * (int)args->query_tokens;
    p.tiles = ((int)args->n_tokens + TILE - 1) / TILE;
    p.part_floats = part_floats(*args);
    p.counters = static_cast<uint32_t *>(args->workspace);
    p.parts = reinterpret_cast<float *>(static_cast<char *>(args->workspace) + PAIR_COUNTERS);
    cudaStream_t on = static_cast<cudaStream_t>(stream);
    return from_cuda(args->k.type == Q8::TYPE ? launch_format<Q8>(p, on) : launch_format<Q4>(p, on));
}
