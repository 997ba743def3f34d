/* attention.cu - attention of any head_dim over pages of any pair of codecs. In plain form: 32 tokens at
 * a time are decoded to fp16 in shared memory, keys first, then values in the same place, and multiplied
 * by mma.m16n8k16.
 *
 * A thread block takes up to MOST_ROWS query rows of one kv head and all pages that they see, or one of
 * several equal parts of them; the block that ends last adds the parts in order. Every row of a page is
 * divided by a power of two above its largest number, its unit. Weights are 2^(score + log2(unit of the
 * values) - maximum), as in the tile kernels. */
#include "any.h"
#include "rows.cuh"

#include "../attention/combine.cuh"
#include "../attention/scores.cuh"
#include "../attention/softmax.cuh"
#include "../checks.h"
#include "../launch.h"

#include <algorithm>
#include <climits>

namespace kvant
{

constexpr int WARPS = 8, TOKENS = 32, SCORE_STRIDE = TOKENS + 4, WEIGHT_STRIDE = TOKENS + 8;
constexpr float LEAST_UNIT = 0x1p-40f; /* so that weights over units stay within fp32 */

struct AnyAttentionArgs : AttentionArgs {
    kvant_cuda_codec keys, values;
    int tiles, splits; /* as in TileArgs */
    int scratch;       /* bytes of a warp's in which rows are decoded */
};

/* Channels that a kernel has registers for, and its query rows. */
template <int CHANNELS> struct AnyShape {
    static constexpr int ROWS = CHANNELS > 256 ? 32 : 64, ROW_TILES = ROWS / 16, OUT_TILES = CHANNELS / (8 * WARPS),
                         AT_ONCE = CHANNELS > 256 ? 1 : CHANNELS > 128 ? 2 : 4, /* tokens that a warp decodes */
                         BLOCKS = CHANNELS > 128 ? 1 : 2;                       /* of a multiprocessor */

    /* Shared memory: queries, a tile, scores, weights, trellis bits, where results stand in the end. */
    __host__ __device__ static int stride(int d)
    {
        return d + 8; /* halves; rows begin in different banks */
    }
    __host__ __device__ static int bytes(int d, int scratch)
    {
        const int work = (ROWS + TOKENS) * stride(d) * 2 + ROWS * (SCORE_STRIDE * 4 + WEIGHT_STRIDE * 2) + WARPS * scratch;
        return work > ROWS * d * 4 ? work : ROWS * d * 4;
    }
};

struct AnyRows {
    static constexpr int ROWS = 64;
    AnyBook books[2];
    size_t mask_row[ROWS];
    float factor[ROWS], slope[ROWS], max[ROWS], sum[ROWS], shrink[ROWS];
    int position[ROWS];
    float units[2][TOKENS];
    uint32_t before; /* parts that ended before this one */
};

struct AnyWork {
    Pair pair;
    int first_position, length, first_page, end_page, item, part;
};

template <int ROWS> __device__ AnyWork find_any_work(const AnyAttentionArgs &p)
{
    const Lengths<true, ROWS> lengths{ p };
    AnyWork w;
    int i = blockIdx.x;
    w.part = i % p.splits, i /= p.splits, w.item = i;
    const int tile = i % p.tiles;
    i /= p.tiles;
    w.pair.kv_head = i % p.kv_heads, w.pair.b = i / p.kv_heads;
    w.pair.first_column = tile * ROWS;
    w.pair.n_columns = max(min(lengths.queries(w.pair.b) * p.heads_a_kv - tile * ROWS, ROWS), 0);
    w.length = lengths.length(w.pair.b);
    w.first_position = lengths.first_position(w.pair.b);
    const int last = w.first_position + column_of<true>(p, w.pair, max(w.pair.n_columns - 1, 0)).token,
              end = p.causal ? min(max(last + 1, 0), w.length) : w.length, first = lengths.first_page(w.pair.b),
              pages = max((end + PAGE_TOKENS - 1) / PAGE_TOKENS - first, 0);
    w.first_page = first + (int)((int64_t)pages * w.part / p.splits);
    w.end_page = first + (int)((int64_t)pages * (w.part + 1) / p.splits);
    return w;
}

/* A power of two above all numbers of a row. */
template <int P> KVANT_INLINE float unit_of(const Row<P> &row)
{
    float largest = 0;
    unrolled_for (int j = 0; j < Row<P>::PER_LANE; j++)
        largest = fmaxf(largest, fabsf(row.x[j]));
    return power_above(largest_of(largest));
}

template <int CHANNELS> struct AnyAttention {
    using S = AnyShape<CHANNELS>;
    using R = Row<CHANNELS>;
    const AnyAttentionArgs &p;
    const AnyWork &work;
    AnyRows &rows;
    __half *queries, *tile;
    float *scores;
    __half *weights;
    uint8_t *bits;
    int d, lane, warp, row_tiles;
    float o[S::ROW_TILES][S::OUT_TILES][4];

    __device__ AnyAttention(const AnyAttentionArgs &p_, const AnyWork &work_, AnyRows &rows_, uint8_t *memory)
        : p(p_), work(work_), rows(rows_), d((int)p_.keys.params.head_dim), lane(threadIdx.x & 31),
          warp(threadIdx.x >> 5), row_tiles((work_.pair.n_columns + 15) / 16), o{}
    {
        queries = reinterpret_cast<__half *>(memory);
        tile = queries + S::ROWS * S::stride(d);
        scores = reinterpret_cast<float *>(tile + TOKENS * S::stride(d));
        weights = reinterpret_cast<__half *>(scores + S::ROWS * SCORE_STRIDE);
        bits = reinterpret_cast<uint8_t *>(weights + S::ROWS * WEIGHT_STRIDE) + warp * p.scratch;
    }

    KVANT_INLINE void put_row(__half *to, R &row, float inverse) const
    {
        each_of(row, d, lane, [&](float x, int channel) { to[channel] = __float2half_rn(x * inverse); });
    }

    /* As load_queries of tiles.cuh. */
    KVANT_INLINE void load_queries()
    {
#pragma unroll 1
        for (int n = warp; n < 16 * row_tiles; n += WARPS) {
            const Column column = column_of<true>(p, work.pair, min(n, work.pair.n_columns - 1));
            const QueryRow at = query_row(p, work.pair.b, column.token);
            R row{};
            if (n < work.pair.n_columns)
                row = load_any<CHANNELS>(p.q, at.q + column.head * p.q_head_stride, p.type, d, lane);
            if (p.k_scale)
                each_of(row, d, lane, [&](float &x, int channel) { x *= p.k_scale[work.pair.kv_head * d + channel]; });
            if (p.k_rotation.block)
                rotate(row, p.keys.any.rotation, lane);
            const float unit = unit_of(row);
            put_row(queries + n * S::stride(d), row, __frcp_rn(unit));
            if (lane == 0) {
                rows.factor[n] = unit * p.scale_log2;
                rows.position[n] = work.first_position + column.token;
                rows.slope[n] = slope_of(p, column.head);
                rows.mask_row[n] = at.row * p.mask_token_stride;
                rows.max[n] = NEVER, rows.sum[n] = 0;
            }
        }
    }

    KVANT_INLINE const uint8_t *page_of(bool values, int32_t entry) const
    {
        const PageSource &from = entry < 0 ? (values ? p.v_open : p.k_open) : values ? p.v : p.k;
        return from.base + (size_t)(uint32_t)(entry < 0 ? -1 - entry : entry) * from.block_stride +
               work.pair.kv_head * from.head_stride;
    }

    /* Pages that are needed next. */
    KVANT_INLINE void ask_for(int32_t entry) const
    {
        const uint32_t bytes = entry < 0 ? 0 : max(p.k.bytes, p.v.bytes);
        for (uint32_t at = 128 * threadIdx.x; at < bytes; at += 128 * WARPS * 32) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(page_of(false, entry) + min(at, p.k.bytes - 1)));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(page_of(true, entry) + min(at, p.v.bytes - 1)));
        }
    }

    /* Tokens first, first + 1, ... of a page, of which n are there; zeros for the others. */
    KVANT_INLINE void decode(bool values, int32_t entry, int first, int n)
    {
        const kvant_cuda_codec &codec = values ? p.values : p.keys;
        const uint8_t *page = page_of(values, entry);
#pragma unroll S::AT_ONCE
        for (int t = warp; t < TOKENS; t += WARPS) {
            R row{};
            if (t < n && entry < 0)
                row = load_any<CHANNELS>(page, (size_t)(first + t) * d, KVANT_CUDA_F16, d, lane);
            else if (t < n)
                row = read_any<CHANNELS>(codec, rows.books[values], page, first + t, bits, lane, work.pair.kv_head);
            const float unit = fmaxf(unit_of(row), LEAST_UNIT);
            put_row(tile + t * S::stride(d), row, __frcp_rn(unit));
            if (lane == 0)
                rows.units[values][t] = unit;
        }
    }

    /* Scores of 16 rows and 16 tokens a warp. */
    KVANT_INLINE void multiply_keys() const
    {
#pragma unroll 1
        for (int i = warp; i < 2 * row_tiles; i += WARPS) {
            const int rt = i / 2, half = i % 2;
            float s[2][4] = {};
#pragma unroll 4
            for (int k = 0; k < d; k += 16) {
                uint32_t a[4], b[4];
                load_matrices<false>(a, queries + (16 * rt + (lane & 15)) * S::stride(d) + k + 8 * (lane >> 4));
                load_matrices<false>(b, tile + (16 * half + 8 * (lane >> 4) + (lane & 7)) * S::stride(d) + k +
                                            8 * (lane >> 3 & 1));
                mma(s[0], a, b[0], b[1]);
                mma(s[1], a, b[2], b[3]);
            }
            unrolled_for (int j = 0; j < 2; j++)
                unrolled_for (int h = 0; h < 2; h++)
                    *reinterpret_cast<float2 *>(scores + (16 * rt + (lane >> 2) + 8 * h) * SCORE_STRIDE + 16 * half +
                                                8 * j + 2 * (lane & 3)) = make_float2(s[j][2 * h], s[j][2 * h + 1]);
        }
    }

    /* Of a row and the lane's token. */
    KVANT_INLINE float changed(float x, int row, int token) const
    {
        if (p.softcap_log2 > 0)
            x = soften(x, p.softcap_log2);
        const int position = rows.position[row];
        if (token >= work.length || (p.causal && token > position) || position - token >= p.window)
            return -INFINITY;
        if (p.mask)
            return x + rows.slope[row] * __half2float(__ushort_as_half(__ldg(p.mask + rows.mask_row[row] + token)));
        return p.max_bias > 0 ? x + rows.slope[row] * (float)(token - position) : x;
    }

    KVANT_INLINE void weigh(int first_token) const
    {
        const float exponent = log2f(rows.units[1][lane]);
#pragma unroll 1
        for (int row = warp; row < 16 * row_tiles; row += WARPS) {
            const float x = changed(scores[row * SCORE_STRIDE + lane] * (rows.factor[row] * rows.units[0][lane]), row,
                                    first_token + lane),
                        before = rows.max[row], top = fmaxf(before, largest_of(x + exponent)),
                        total = warp_sum(exp2_fast(x - top));
            weights[row * WEIGHT_STRIDE + lane] = __float2half_rn(exp2_fast(x + exponent - top));
            const float shrink = exp2_fast(before - top);
            if (lane == 0) {
                rows.sum[row] = rows.sum[row] * shrink + total;
                rows.max[row] = top, rows.shrink[row] = shrink;
            }
        }
    }

    KVANT_INLINE void multiply_values()
    {
        unrolled_for (int rt = 0; rt < S::ROW_TILES; rt++) {
            if (rt >= row_tiles)
                break;
            uint32_t a[2][4];
            unrolled_for (int k = 0; k < 2; k++)
                load_matrices<false>(a[k], weights + (16 * rt + (lane & 15)) * WEIGHT_STRIDE + 16 * k + 8 * (lane >> 4));
            const float shrink[2] = { rows.shrink[16 * rt + (lane >> 2)], rows.shrink[16 * rt + (lane >> 2) + 8] };
            unrolled_for (int i = 0; i < S::OUT_TILES; i++) {
                const int channel = 8 * (warp + WARPS * i);
                if (channel >= d)
                    break;
                uint32_t b[4];
                load_matrices<true>(b, tile + lane * S::stride(d) + channel);
                unrolled_for (int k = 0; k < 4; k++)
                    o[rt][i][k] *= shrink[k / 2];
                mma(o[rt][i], a[0], b[0], b[1]);
                mma(o[rt][i], a[1], b[2], b[3]);
            }
        }
    }

    KVANT_INLINE void run()
    {
        const int32_t *table = p.table + work.pair.b * p.table_stride;
#pragma unroll 1
        for (int page = work.first_page; page < work.end_page; page++) {
            const int32_t entry = __ldg(table + page);
            ask_for(page + 1 < work.end_page ? __ldg(table + page + 1) : -1);
#pragma unroll 1
            for (int first = 0; first < PAGE_TOKENS && entry != KVANT_CUDA_NO_BLOCK; first += TOKENS) {
                const int at = page * PAGE_TOKENS + first, n = min(work.length - at, TOKENS);
                if (n <= 0)
                    break;
                __syncthreads(); /* values before these have been read */
                decode(false, entry, first, n);
                __syncthreads();
                multiply_keys();
                __syncthreads();
                decode(true, entry, first, n);
                __syncthreads();
                weigh(at);
                __syncthreads();
                multiply_values();
            }
        }
        __syncthreads();
    }

    /* Results take the place of all that was worked on. */
    KVANT_INLINE void share() const
    {
        float *out = reinterpret_cast<float *>(queries);
        unrolled_for (int rt = 0; rt < S::ROW_TILES; rt++)
            unrolled_for (int i = 0; i < S::OUT_TILES; i++) {
                const int channel = 8 * (warp + WARPS * i);
                if (rt < row_tiles && channel < d)
                    unrolled_for (int h = 0; h < 2; h++)
                        *reinterpret_cast<float2 *>(out + (16 * rt + (lane >> 2) + 8 * h) * d + channel + 2 * (lane & 3)) =
                            make_float2(o[rt][i][2 * h], o[rt][i][2 * h + 1]);
            }
        __syncthreads();
    }

    KVANT_INLINE float *part_of(int part) const
    {
        return p.partials + (size_t)(work.item * p.splits + part) * (S::ROWS * (d + 2));
    }

    KVANT_INLINE void leave() const
    {
        float *to = part_of(work.part);
        for (int i = threadIdx.x; i < work.pair.n_columns * d; i += WARPS * 32)
            __stcg(to + i, reinterpret_cast<const float *>(queries)[i]);
        for (int i = threadIdx.x; i < work.pair.n_columns; i += WARPS * 32)
            __stcg(reinterpret_cast<float2 *>(to + S::ROWS * d) + i, make_float2(rows.max[i], rows.sum[i]));
    }

    /* Row n of all parts, in their order. */
    KVANT_INLINE HeadSum<CHANNELS> add_parts(int n) const
    {
        HeadSum<CHANNELS> total{};
        auto scalars = [&](int i) { return __ldcg(reinterpret_cast<const float2 *>(part_of(i) + S::ROWS * d) + n); };
        total.max = NEVER;
        for (int i = 0; i < p.splits; i++)
            total.max = fmaxf(total.max, scalars(i).x);
        for (int i = 0; i < p.splits; i++) {
            const float2 own = scalars(i);
            const float weight = exp2_fast(own.x - total.max);
            total.sum += weight * own.y;
            each_of(total.row, d, lane, [&](float &x, int channel) { x += weight * __ldcg(part_of(i) + n * d + channel); });
        }
        return total;
    }

    KVANT_INLINE HeadSum<CHANNELS> own_row(int n) const
    {
        HeadSum<CHANNELS> own{};
        own.max = rows.max[n], own.sum = rows.sum[n];
        each_of(own.row, d, lane, [&](float &x, int channel) { x = reinterpret_cast<const float *>(queries)[n * d + channel]; });
        return own;
    }

    /* As write_output of combine.cuh. */
    KVANT_INLINE void write(int n, HeadSum<CHANNELS> &total) const
    {
        const Column column = column_of<true>(p, work.pair, n);
        const QueryRow row = query_row(p, work.pair.b, column.token);
        const SoftmaxEnd end = end_of<true>(p, column.head, total.max, total.sum);
        total.row.each(lane, [&](float &x, int) { x *= end.factor; });
        if (p.v_rotation.block)
            rotate_back(total.row, p.values.any.rotation, lane);
        each_of(total.row, d, lane, [&](float &x, int channel) {
            if (p.v_scale)
                x *= p.v_scale[work.pair.kv_head * d + channel];
            if (p.v_center)
                x += end.share * p.v_center[work.pair.kv_head * d + channel];
        });
        store_any(p.out, row.out + column.head * p.out_head_stride, p.type, d, lane, total.row);
        if (p.lse && lane == 0)
            p.lse[row.row * p.kv_heads * p.heads_a_kv + column.head] = end.lse;
    }

    KVANT_INLINE void finish()
    {
        share();
        if (p.splits > 1) {
            leave();
            if (!ends_last(p.counters + work.item, p.splits, rows.before))
                return;
        }
#pragma unroll 1
        for (int n = warp; n < work.pair.n_columns; n += WARPS) {
            HeadSum<CHANNELS> total = p.splits > 1 ? add_parts(n) : own_row(n);
            write(n, total);
        }
    }
};

template <int CHANNELS>
__global__ void __launch_bounds__(WARPS * 32, AnyShape<CHANNELS>::BLOCKS)
    attention_any_kernel(const __grid_constant__ AnyAttentionArgs p)
{
    extern __shared__ __align__(16) uint8_t memory[];
    AnyRows &rows = *reinterpret_cast<AnyRows *>(memory);
    const AnyWork work = find_any_work<AnyShape<CHANNELS>::ROWS>(p);
    if (work.pair.n_columns == 0)
        return;
    rows.books[0].load(p.keys);
    rows.books[1].load(p.values);
    AnyAttention<CHANNELS> attention(p, work, rows, memory + (sizeof(AnyRows) + 15) / 16 * 16);
    attention.load_queries();
    attention.run();
    attention.finish();
}

template <int CHANNELS>
static kvant_status launch(AnyAttentionArgs &p, int multiprocessors, int shared_bytes, cudaStream_t stream)
{
    using S = AnyShape<CHANNELS>;
    p.scratch = std::max(any_scratch(p.keys), any_scratch(p.values));
    const int bytes = (int)(sizeof(AnyRows) + 15) / 16 * 16 + S::bytes((int)p.keys.params.head_dim, p.scratch);
    const int64_t rows = (int64_t)p.query_tokens * p.heads_a_kv, tiles = (rows + S::ROWS - 1) / S::ROWS,
                  items = tiles * p.batch * p.kv_heads;
    p.tiles = (int)tiles;
    p.splits = (int)std::max<int64_t>(std::min<int64_t>(S::BLOCKS * multiprocessors / items, p.max_tokens / (2 * PAGE_TOKENS)), 1);
    if (items * p.splits > INT_MAX || bytes > shared_bytes)
        return KVANT_ERR_UNSUPPORTED;
    const cudaError_t error = allow_shared((const void *)attention_any_kernel<CHANNELS>, bytes);
    if (error != cudaSuccess)
        return from_cuda(error);
    attention_any_kernel<CHANNELS><<<(unsigned)(items * p.splits), WARPS * 32, bytes, stream>>>(p);
    return from_cuda(cudaGetLastError());
}

kvant_status launch_attention_any(const kvant_cuda_attention_args &args, const AttentionArgs &common,
                                  int multiprocessors, int shared_bytes, cudaStream_t stream)
{
    AnyAttentionArgs p{};
    static_cast<AttentionArgs &>(p) = common;
    p.keys = *args.k_codec;
    p.values = *args.v_codec;
    return with_room(p.keys.params.head_dim, [&](auto room) {
        return launch<decltype(room)::value>(p, multiprocessors, shared_bytes, stream);
    });
}

} // namespace kvant
