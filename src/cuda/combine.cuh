/* combine.cuh - how the sums of a pair (sequence, group of query heads) come together: warps of a block through shared
 * memory, blocks through the workspace, both in a fixed order; then division, un-rotation and the output. */
#ifndef KVANT_CUDA_COMBINE_CUH
#define KVANT_CUDA_COMBINE_CUH

#include "attention.h"
#include "softmax.cuh"

namespace kvant {

struct Pair {
    int b, kv_head, first_head, n_heads;
};

__device__ __forceinline__ Pair find_pair(const AttentionArgs &p, int b, int head)
{
    int kv_head = head / p.groups, group = head - kv_head * p.groups, skipped = group * p.heads_a_group;
    return Pair{ b, kv_head, kv_head * p.heads_a_kv + skipped, min(p.heads_a_group, p.heads_a_kv - skipped) };
}

/* Where a pair's pages [first, last) and the block's piece [begin, end) lie in the line; all pieces but the last have
 * `size` pages. */
struct Share {
    int first, last, begin, end, size;

    __device__ __forceinline__ bool whole() const { return first >= begin && last <= end; }
    __device__ __forceinline__ int first_block() const { return first / size; }
    __device__ __forceinline__ int n_blocks() const { return (last - 1) / size - first_block() + 1; }
    /* The pair begins in its first block, which ends in the middle of it; its other blocks begin in the middle of it. */
    __device__ __forceinline__ int partial(int i) const { return 2 * (first_block() + i) + (i == 0 ? 1 : 0); }
};

template <int WARPS>
struct WarpResults {
    const float *rows[WARPS]; /* NULL: the warp had no page of this pair */
    float max[WARPS][HEADS], sum[WARPS][HEADS];
    bool last;

    __device__ __forceinline__ void put(int warp, int lane, bool any, const uint8_t *slot, const float (&m)[2],
                                        const float (&s)[2])
    {
        if (lane == 0)
            rows[warp] = any ? reinterpret_cast<const float *>(slot) : nullptr;
        if (lane < 4)
#pragma unroll
            for (int h = 0; h < 2; h++)
                max[warp][2 * lane + h] = m[h], sum[warp][2 * lane + h] = s[h];
    }
};

template <int D, int WARPS>
struct CombineSpace {
    float rows[WARPS][D], sum[WARPS];
};

template <int D>
struct HeadSum {
    Row<D> row;
    float max, sum;
};

/* Sum over the block's warps of head n; the lane's channels. */
template <int D, int WARPS>
__device__ __forceinline__ HeadSum<D> add_warps(const WarpResults<WARPS> &results, int n, int lane)
{
    HeadSum<D> total;
    total.max = NEVER;
    total.sum = 0;
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++)
        total.row.x[j] = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        if (results.rows[w])
            total.max = fmaxf(total.max, results.max[w][n]);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        if (results.rows[w]) {
            float weight = exp2_fast(results.max[w][n] - total.max);
            total.sum += weight * results.sum[w][n];
#pragma unroll
            for (int j = 0; j < Row<D>::PER_LANE; j++)
                total.row.x[j] += weight * results.rows[w][n * (D + 4) + lane + 32 * j];
        }
    return total;
}

template <int D>
__device__ __forceinline__ void write_output(const AttentionArgs &p, const Pair &pair, int n, HeadSum<D> &total, int lane)
{
    float inverse = 1 / total.sum;
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++)
        total.row.x[j] *= inverse;
    rotate_back(total.row, p.v_rotation, lane);
#pragma unroll
    for (int j = 0; p.v_center && j < Row<D>::PER_LANE; j++)
        total.row.x[j] += p.v_center[pair.kv_head * D + lane + 32 * j];
    int head = pair.first_head + n;
    store_row(p.out, pair.b * p.out_batch_stride + head * p.out_head_stride, p.type, lane, total.row);
    if (p.lse && lane == 0)
        p.lse[(size_t)pair.b * p.kv_heads * p.heads_a_kv + head] =
            (total.max + log2f(total.sum)) * 0.69314718055994531f;
}

/* A partial result: n_heads rows in the order of lanes, then (max, sum) of each head. */
template <int D>
__device__ __forceinline__ float *partial_row(const AttentionArgs &p, int index, int n, int lane)
{
    return p.partials + (size_t)index * partial_floats(D) + n * D + lane * Row<D>::PER_LANE;
}

template <int D>
__device__ __forceinline__ float *partial_scalars(const AttentionArgs &p, int index, int n)
{
    return p.partials + (size_t)index * partial_floats(D) + HEADS * D + 2 * n;
}

template <int D>
__device__ __forceinline__ void write_partial(const AttentionArgs &p, int index, int n, const HeadSum<D> &total, int lane)
{
    float *row = partial_row<D>(p, index, n, lane);
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++)
        __stcg(row + j, total.row.x[j]);
    if (lane == 0) {
        float *scalars = partial_scalars<D>(p, index, n);
        __stcg(scalars, total.max);
        __stcg(scalars + 1, total.sum);
    }
}

/* Adds weight * row. Vector loads, because the last block's time is the latency of these. */
template <int D>
__device__ __forceinline__ void add_row(Row<D> &to, const float *row, float weight)
{
    constexpr int N = Row<D>::PER_LANE;
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 4) {
            float4 x = __ldcg(reinterpret_cast<const float4 *>(row + j));
            to.x[j] += weight * x.x, to.x[j + 1] += weight * x.y;
            to.x[j + 2] += weight * x.z, to.x[j + 3] += weight * x.w;
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            to.x[j] += weight * __ldcg(row + j);
    }
}

/* Sum over the pair's partial results from .. to - 1 of head n, relative to maximum max. */
template <int D>
__device__ __forceinline__ HeadSum<D> add_partials(const AttentionArgs &p, const Share &share, int n, int from, int to,
                                                   float max, int lane)
{
    HeadSum<D> total;
    total.max = max;
    total.sum = 0;
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++)
        total.row.x[j] = 0;
    for (int base = from; base < to; base += 32) {
        float weight = 0;
        if (base + lane < to) {
            const float *scalars = partial_scalars<D>(p, share.partial(base + lane), n);
            weight = exp2_fast(__ldcg(scalars) - max);
            total.sum += weight * __ldcg(scalars + 1);
        }
        int count = min(32, to - base);
#pragma unroll 8
        for (int i = 0; i < count; i++)
            add_row<D>(total.row, partial_row<D>(p, share.partial(base + i), n, lane),
                       __shfl_sync(FULL, weight, i));
    }
    total.sum = warp_sum(total.sum);
    return total;
}

template <int D>
__device__ __forceinline__ float max_of_partials(const AttentionArgs &p, const Share &share, int n, int lane)
{
    float max = NEVER;
    for (int i = lane; i < share.n_blocks(); i += 32)
        max = fmaxf(max, __ldcg(partial_scalars<D>(p, share.partial(i), n)));
    return warp_max(max);
}

/* The last block of a pair: heads over warps, and where warps are left, several parts of a head's blocks. */
template <int D, int WARPS>
__device__ __forceinline__ void combine_blocks(const AttentionArgs &p, CombineSpace<D, WARPS> &space, const Pair &pair,
                                               const Share &share, int warp, int lane)
{
    const int parts = max(WARPS / pair.n_heads, 1), blocks = share.n_blocks();
    const int passes = (pair.n_heads * parts + WARPS - 1) / WARPS;
    for (int pass = 0; pass < passes; pass++) {
        int job = pass * WARPS + warp, n = job / parts, part = job % parts;
        bool busy = n < pair.n_heads;
        HeadSum<D> total;
        if (busy) {
            total = add_partials<D>(p, share, n, blocks * part / parts, blocks * (part + 1) / parts,
                                    max_of_partials<D>(p, share, n, lane), lane);
#pragma unroll
            for (int j = 0; j < Row<D>::PER_LANE; j++)
                space.rows[warp][lane + 32 * j] = total.row.x[j];
            space.sum[warp] = total.sum;
        }
        __syncthreads();
        if (busy && part == 0) {
            for (int other = 1; other < parts; other++) {
                total.sum += space.sum[warp + other];
#pragma unroll
                for (int j = 0; j < Row<D>::PER_LANE; j++)
                    total.row.x[j] += space.rows[warp + other][lane + 32 * j];
            }
            write_output<D>(p, pair, n, total, lane);
        }
        __syncthreads();
    }
}

/* Called by the whole block once the warps' sums of the pair are in shared memory. */
template <int D, int WARPS>
__device__ __forceinline__ void finish_pair(const AttentionArgs &p, WarpResults<WARPS> &results,
                                            CombineSpace<D, WARPS> &space, const Pair &pair, const Share &share, int warp,
                                            int lane)
{
    const int own = share.begin > share.first ? 2 * blockIdx.x : 2 * blockIdx.x + 1;
    for (int n = warp; n < pair.n_heads; n += WARPS) {
        HeadSum<D> total = add_warps<D, WARPS>(results, n, lane);
        if (share.whole())
            write_output<D>(p, pair, n, total, lane);
        else
            write_partial<D>(p, own, n, total, lane);
    }
    if (share.whole())
        return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned n = share.n_blocks();
        /* wraps to 0 at the last block, so that the counters are ready for the next call */
        results.last = atomicInc(p.counters + share.first_block(), n - 1) == n - 1;
    }
    __syncthreads();
    if (!results.last)
        return;
    __threadfence();
    combine_blocks<D, WARPS>(p, space, pair, share, warp, lane);
}

} // namespace kvant

#endif
