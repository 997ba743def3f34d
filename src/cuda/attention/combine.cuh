/* combine.cuh - combines the sums of a pair (sequence, group of query heads). Warps of a thread
 * block combine them through shared memory, thread blocks through the workspace, both in a fixed
 * order. Then divides, undoes the rotation and writes the output. */
#pragma once

#include "attention.h"
#include "query.cuh"
#include "softmax.cuh"

namespace kvant
{

template <int WARPS, int COLUMNS> struct WarpResults {
    /* Where the warp's rows begin, counted in numbers from the first slot. Below 0: the warp had no
     * page of this pair. */
    int at[WARPS];
    float max[WARPS][COLUMNS], sum[WARPS][COLUMNS];

    /* Of tile t. */
    KVANT_INLINE void put(int warp, int lane, int rows_at, int t, const float (&m)[2],
                          const float (&s)[2])
    {
        if (lane == 0)
            at[warp] = rows_at;
        if (lane < 4)
            unrolled_for (int h = 0; h < 2; h++)
                max[warp][8 * t + 2 * lane + h] = m[h], sum[warp][8 * t + 2 * lane + h] = s[h];
    }
};

template <int D> struct HeadSum {
    Row<D> row;
    float max, sum;
};

/* Adds the sums of the block's warps for column n. A lane gets its own channels. Each lane
 * computes the weight of one warp first, so that the loads that follow are independent. */
template <int D, int WARPS, int COLUMNS>
KVANT_INLINE HeadSum<D> add_warps(const WarpResults<WARPS, COLUMNS> &results, const float *slots,
                                  int n, int lane)
{
    constexpr int SPAN =
        WARPS > 8 ? 16 : 8; /* lanes that add up; all further lanes repeat this, because all lanes
                             * need the sum */
    static_assert(WARPS <= SPAN, "a warp a lane");
    const int one = min(lane % SPAN, WARPS - 1);
    const bool any = lane % SPAN < WARPS && results.at[one] >= 0;
    const float own = any ? results.max[one][n] : NEVER, own_sum = results.sum[one][n];
    HeadSum<D> total;
    total.max = largest_of(own);
    const float weight = any ? exp2_fast(own - total.max) : 0;
    total.sum = any ? weight * own_sum : 0;
    unrolled_for (int k = SPAN / 2; k > 0; k /= 2)
        total.sum += __shfl_xor_sync(FULL, total.sum, k);
    total.row.each(lane, [&](float &x, int) { x = 0; });
#pragma unroll 2
    for (int w = 0; w < WARPS; w++) {
        const int at = results.at[w];
        const float *row = slots + max(at, 0) + n * (D + 4) + lane;
        const float scale = __shfl_sync(FULL, weight, w);
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
            const float x = row[32 * j]; /* anything where there are no sums */
            total.row.x[j] += at < 0 ? 0 : scale * x;
        }
    }
    return total;
}

/* The end of a softmax: the factor of a row of sums, the tokens' part of all weights, and the
 * log-sum-exp. The sums of no tokens give zeros. */
struct SoftmaxEnd {
    float factor, share, lse;
};

/* A sink is one more logit, of a token whose value is 0. */
template <bool GENERAL>
KVANT_INLINE SoftmaxEnd end_of(const AttentionArgs &p, int head, float max, float sum)
{
    const bool sees = sum > 0;
    float all = sum, shrink = 1;
    if (GENERAL && p.sinks) {
        const float sink = p.sinks[head] * LOG2_E, top = fmaxf(max, sink);
        shrink = exp2f(max - top);
        max = top;
        sum *= shrink;
        all = sum + exp2f(sink - top);
    }
    const float inverse = sees ? 1 / all : 0;
    return SoftmaxEnd{ shrink * inverse, GENERAL || !sees ? sum * inverse : 1,
                       sees                 ? (max + log2f(all)) * 0.69314718055994531f
                       : GENERAL && p.sinks ? p.sinks[head]
                                            : -INFINITY };
}

/* The scale and the centre of the lane's channels of a kv head's values. */
template <int D> struct OutputChannels {
    Row<D> scale, center;

    /* The loads are issued in this place: before a count, because no load passes it. */
    KVANT_INLINE void load(const AttentionArgs &p, int kv_head, int lane)
    {
        load(scale, p.v_scale, kv_head, lane);
        load(center, p.v_center, kv_head, lane);
    }
    KVANT_INLINE static void load(Row<D> &row, const float *from, int kv_head, int lane)
    {
        row.each(lane, [&](float &x, int channel) {
            x = from ? load_here(from + kv_head * D + channel) : 0;
        });
    }
};

/* Without `stores`, nothing is written. */
template <bool GENERAL, int D>
KVANT_INLINE void write_output(const AttentionArgs &p, const Pair &pair, int n, HeadSum<D> &total,
                               const OutputChannels<D> &channels, int lane, bool stores = true)
{
    const Column column = column_of<GENERAL>(p, pair, n);
    const QueryRow row = query_row(p, pair.b, column.token);
    const SoftmaxEnd end = end_of<GENERAL>(p, column.head, total.max, total.sum);
    total.row.each(lane, [&](float &x, int) { x *= end.factor; });
    rotate_back(total.row, p.v_rotation, lane);
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        float &x = total.row.x[j];
        if (p.v_scale)
            x *= channels.scale.x[j];
        if (p.v_center)
            x += end.share * channels.center.x[j];
    }
    if (!stores)
        return;
    store_row(p.out, row.out + column.head * p.out_head_stride, p.out_type, lane, total.row);
    if (p.lse && lane == 0)
        p.lse[row.row * p.kv_heads * p.heads_a_kv + column.head] = end.lse;
}

/* Whether this thread block is the last of n that count here. The last one sees what n - 1 other
 * blocks wrote before they counted. All threads call it; `before` is in shared memory. */
KVANT_INLINE bool ends_last(uint32_t *counter, int n, uint32_t &before)
{
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        before = count_up(counter, n - 1);
    __syncthreads();
    if ((int)before != n - 1)
        return false;
    __threadfence();
    return true;
}

/* A partial result: rows in the order of lanes, then (max, sum) of each column. */
template <int D> KVANT_INLINE float *partial_row(float *partials, int index, int n, int lane)
{
    return partials + (size_t)index * partial_floats(D) + n * D + lane * Row<D>::PER_LANE;
}

template <int D> KVANT_INLINE float *partial_scalars(float *partials, int index, int n)
{
    return partials + (size_t)index * partial_floats(D) + MOST_COLUMNS * D + 2 * n;
}

/* Vector stores, because a count waits until all of them are done. */
template <int D>
KVANT_INLINE void write_partial(const AttentionArgs &p, int index, int n, const HeadSum<D> &total,
                                int lane)
{
    constexpr int N = Row<D>::PER_LANE;
    float *row = partial_row<D>(p.partials, index, n, lane);
    if constexpr (N % 4 == 0)
        unrolled_for (int j = 0; j < N; j += 4)
            __stcg(reinterpret_cast<float4 *>(row + j),
                   make_float4(total.row.x[j], total.row.x[j + 1], total.row.x[j + 2],
                               total.row.x[j + 3]));
    else
        unrolled_for (int j = 0; j < N; j++)
            __stcg(row + j, total.row.x[j]);
    if (lane == 0)
        __stcg(reinterpret_cast<float2 *>(partial_scalars<D>(p.partials, index, n)),
               make_float2(total.max, total.sum));
}

/* Loads a lane's part of a row. Vector loads, because the last block's time is the latency of
 * these. */
template <int D> KVANT_INLINE Row<D> load_partial(const float *from)
{
    constexpr int N = Row<D>::PER_LANE;
    Row<D> row;
    if constexpr (N % 4 == 0) {
        unrolled_for (int j = 0; j < N; j += 4) {
            float4 x = __ldcg(reinterpret_cast<const float4 *>(from + j));
            row.x[j] = x.x, row.x[j + 1] = x.y, row.x[j + 2] = x.z, row.x[j + 3] = x.w;
        }
    } else {
        unrolled_for (int j = 0; j < N; j++)
            row.x[j] = __ldcg(from + j);
    }
    return row;
}

/* Maximum and sum of block i. */
template <int D> KVANT_INLINE float2 load_scalars(float *partials, const Share &share, int n, int i)
{
    const float *at = partial_scalars<D>(partials, share.partial(i), n);
    return i < share.n_blocks ? __ldcg(reinterpret_cast<const float2 *>(at))
                              : make_float2(NEVER, 0);
}

constexpr int ROWS_AT_ONCE = 16; /* of partial results */

/* The weights of 128 blocks of a pair: lane l has every 32nd block's from l on. */
struct BlockWeights {
    static constexpr int GROUPS = 4, BLOCKS = 32 * GROUPS;
    float weight[GROUPS];

    /* Finds the weights of blocks `from` and up. If these are the first, also finds the maximum of
     * all blocks. Adds the blocks' sums. */
    template <int D>
    KVANT_INLINE void find(float *partials, const Share &share, int n, int from, int lane,
                           float &max, float &sum)
    {
        float2 scalars[GROUPS];
        float top = NEVER;
        unrolled_for (int g = 0; g < GROUPS; g++)
            scalars[g] = load_scalars<D>(partials, share, n, from + 32 * g + lane);
        unrolled_for (int g = 0; g < GROUPS; g++)
            top = fmaxf(top, scalars[g].x);
#pragma unroll 1
        for (int i = BLOCKS + lane; from == 0 && i < share.n_blocks; i += 32)
            top = fmaxf(top, load_scalars<D>(partials, share, n, i).x);
        max = from == 0 ? largest_of(top) : max;
        unrolled_for (int g = 0; g < GROUPS; g++) {
            weight[g] = exp2_fast(scalars[g].x - max);
            sum += weight[g] * scalars[g].y;
            weight[g] = from + 32 * g + lane < share.n_blocks ? weight[g] : 0;
        }
    }
    /* Puts the second group in the place of the first, and so on. */
    KVANT_INLINE void next()
    {
        unrolled_for (int g = 1; g < GROUPS; g++)
            weight[g - 1] = weight[g];
    }
};

/* Sum over the blocks of the pair of column n, in the order of blocks whichever of them is the
 * last. Rows are loaded many at a time, and the first of them before their weights are known:
 * the other blocks are done, so what counts is how many trips to memory stand behind each other.
 * It also counts how many instructions there are, because they come from memory, too: there is
 * one loop for any number of blocks. */
template <int D>
KVANT_INLINE HeadSum<D> add_blocks(const AttentionArgs &p, const Share &share, int n, int lane)
{
    const int blocks = share.n_blocks;
    HeadSum<D> total{};
    BlockWeights weights;
#pragma unroll 1
    for (int from = 0; from < blocks; from += ROWS_AT_ONCE) {
        Row<D> rows[ROWS_AT_ONCE];
        unrolled_for (int k = 0; k < ROWS_AT_ONCE; k++)
            /* beyond the last block: its row, with weight 0 */
            rows[k] = load_partial<D>(
                partial_row<D>(p.partials, share.partial(min(from + k, blocks - 1)), n, lane));
        if (from % BlockWeights::BLOCKS == 0)
            weights.find<D>(p.partials, share, n, from, lane, total.max, total.sum);
        unrolled_for (int k = 0; k < ROWS_AT_ONCE; k++) {
            const float scale = __shfl_sync(FULL, weights.weight[0], from % 32 + k);
            unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
                total.row.x[j] += scale * rows[k].x[j];
        }
        if ((from + ROWS_AT_ONCE) % 32 == 0)
            weights.next();
    }
    total.sum = warp_sum(total.sum);
    return total;
}

/* Leaves the block's partial result of column n; true in the warp that is the last of the pair's to
 * do so. One lane's release and acquire do for the warp: they cover the accesses that the barriers
 * before and after them order. The counter wraps to 0 at the last block, so that it is ready for
 * the next call. */
template <int D>
KVANT_INLINE bool leave_partial(const AttentionArgs &p, const Share &share, int n,
                                const HeadSum<D> &total, int lane)
{
    write_partial<D>(p, share.own, n, total, lane);
    const uint32_t last = share.n_blocks - 1;
    uint32_t before = 0;
    __syncwarp();
    if (lane == 0)
        before = count_up(p.counters + share.first_block * MOST_COLUMNS + n, last);
    __syncwarp();
    return __shfl_sync(FULL, before, 0) == last;
}

/* Called by the whole block once the warps' sums of the pair are in shared memory. Without
 * `stores`, there is no output. */
template <int D, bool GENERAL, int WARPS, int COLUMNS>
KVANT_INLINE void finish_pair(const AttentionArgs &p, const WarpResults<WARPS, COLUMNS> &results,
                              const float *slots, const Pair &pair, const Share &share, bool stores,
                              int warp, int lane)
{
#pragma unroll 1
    for (int n = warp; n < pair.n_columns; n += WARPS) {
        OutputChannels<D> channels;
        channels.load(p, pair.kv_head, lane);
        HeadSum<D> total = add_warps<D>(results, slots, n, lane);
        if (!share.whole) {
            if (!leave_partial<D>(p, share, n, total, lane))
                continue;
            total = add_blocks<D>(p, share, n, lane);
        }
        write_output<GENERAL, D>(p, pair, n, total, channels, lane, stores);
    }
}

} // namespace kvant
