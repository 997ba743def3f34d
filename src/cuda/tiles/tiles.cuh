/* tiles.cuh - attention of many query tokens over compressed pages: the kernel.
 *
 * A thread block takes a tile of query rows (query tokens x heads of one kv head) and the pages that
 * they see, or one of several equal parts of them. One warpgroup unpacks keys, one values
 * (unpack.cuh); the others, 64 rows each, multiply: scores, online softmax in fp32, weights rounded
 * to fp16, values. So unpacking and multiplying overlap, and a page is unpacked once for 64 or 128
 * rows.
 *
 * Weights are 2^(score + log2(unit of the values' page) - maximum): units of pages cost nothing,
 * and fp16 weights use their range whatever the size of the values.
 *
 * Parts are added in order by the thread block that ends last, so the same input gives the same
 * bits. */
#ifndef KVANT_CUDA_TILES_CUH
#define KVANT_CUDA_TILES_CUH

#include "../attention/combine.cuh"
#include "../attention/scores.cuh"
#include "unpack.cuh"

namespace kvant
{

constexpr int MOST_STAGES = 2; /* unpacked pages */

/* Named barriers; 0 is __syncthreads. A matrix is full for each multiplying warpgroup by itself, so
 * that they need not wait for each other. Barriers count warps: lanes that are apart would count
 * twice. */
enum Barrier { K_UNPACKERS = 1, K_EMPTY = 2, V_EMPTY = 4, K_FULL = 6, V_FULL = 10, V_UNPACKERS = 14 };

__device__ __forceinline__ void wait_at(int barrier, int threads)
{
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_at(int barrier, int threads)
{
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

constexpr float HIDDEN = -1; /* in place of a unit: nobody sees the page */

/* Rows of a tile and units of pages. Matrices lie before it. */
template <int ROWS> struct TileRows {
    size_t mask_row[ROWS];
    float factor[ROWS], slope[ROWS]; /* as in QueryTile */
    int position[ROWS];
    float max[ROWS], sum[ROWS];
    float k_unit[MOST_STAGES];
    float2 v_unit[MOST_STAGES]; /* its binary logarithm, its inverse */
    uint32_t before; /* parts that ended before this one */
};

/* Shared memory: `stages` matrices of keys, as many of values; before them queries, which then are
 * in registers, and after them rows of the result take the same place. Then TileRows, tables, the
 * ring. */
template <int D, int GROUPS> struct TileMemory {
    static constexpr int ROWS = GROUPS * GROUP_ROWS;

    __host__ __device__ static int rows_at(int stages)
    {
        constexpr int RESULT = ROWS * D * 4; /* queries are fewer bytes */
        const int matrices = stages * (KEY_TILE_BYTES<D> + VALUE_TILE_BYTES<D>);
        return matrices > RESULT ? matrices : RESULT;
    }
};

/* What a thread block does. */
struct TileWork {
    Pair pair;
    int first_position, length;
    int first_page, end_page;
    int item; /* of those that share counters and partial results: all parts of a tile */
    int part;
};

template <int ROWS> __device__ __forceinline__ TileWork find_work(const TileArgs &p)
{
    const Lengths<true, ROWS> lengths{ p };
    TileWork w;
    int i = blockIdx.x;
    w.part = i % p.splits, i /= p.splits, w.item = i;
    const int tile = p.tiles - 1 - i % p.tiles; /* the longest first */
    i /= p.tiles;
    w.pair.kv_head = i % p.kv_heads, w.pair.b = i / p.kv_heads;
    const int rows = lengths.queries(w.pair.b) * p.heads_a_kv;
    w.pair.first_column = tile * ROWS;
    w.pair.n_columns = max(min(rows - tile * ROWS, ROWS), 0);
    w.length = lengths.length(w.pair.b);
    w.first_position = lengths.first_position(w.pair.b);
    const int from = w.first_position + column_of<true>(p, w.pair, 0).token,
              last = w.first_position + column_of<true>(p, w.pair, max(w.pair.n_columns - 1, 0)).token;
    const int end = p.causal ? min(max(last + 1, 0), w.length) : w.length;
    const int first = p.window == INT_MAX ? 0 : max(from - p.window + 1, 0) / PAGE_TOKENS;
    const int pages = max((end + PAGE_TOKENS - 1) / PAGE_TOKENS - first, 0);
    w.first_page = first + (int)((int64_t)pages * w.part / p.splits);
    w.end_page = first + (int)((int64_t)pages * (w.part + 1) / p.splits);
    return w;
}

/* Query rows, transformed, divided by a power of two above their largest number, as fp16, with the
 * sign of the softmax scale: a row's factor is not negative, so the largest product has the largest
 * score. */
template <int D, int ROWS>
__device__ __forceinline__ void load_queries(const TileArgs &p, const TileWork &work, uint8_t *tile,
                                             TileRows<ROWS> &rows, int warp, int n_warps, int lane)
{
#pragma unroll 1
    for (int n = warp; n < ROWS; n += n_warps) {
        const Column column = column_of<true>(p, work.pair, min(n, max(work.pair.n_columns - 1, 0)));
        const QueryRow at = query_row(p, work.pair.b, column.token);
        Row<D> row{};
        if (n < work.pair.n_columns)
            row = load_row<D>(p.q, at.q + column.head * p.q_head_stride, p.type, lane);
#pragma unroll
        for (int j = 0; p.k_scale && j < Row<D>::PER_LANE; j++)
            row.x[j] *= p.k_scale[work.pair.kv_head * D + lane + 32 * j];
        rotate(row, p.k_rotation, lane);
        float largest = 0;
#pragma unroll
        for (int j = 0; j < Row<D>::PER_LANE; j++)
            largest = fmaxf(largest, fabsf(row.x[j]));
        const float unit = power_above(largest_of(largest)), inverse = copysignf(__frcp_rn(unit), p.scale_log2);
#pragma unroll
        for (int j = 0; j < Row<D>::PER_LANE; j++)
            *reinterpret_cast<__half *>(tile + place_of(ROWS, n, lane + 32 * j)) =
                __float2half_rn(row.x[j] * inverse);
        if (lane == 0) {
            rows.factor[n] = unit * fabsf(p.scale_log2);
            rows.position[n] = work.first_position + column.token;
            rows.slope[n] = slope_of(p, column.head);
            rows.mask_row[n] = at.row * p.mask_token_stride;
        }
    }
}

/* ---- the warpgroups that unpack ---- */

/* Of keys, or of values. */
template <int D, int GROUPS, bool KEYS> struct Unpacker {
    static constexpr int SHARERS = GROUP_THREADS * (1 + GROUPS); /* threads that fill or empty a matrix */
    const TileArgs &p;
    const TileWork &work;
    uint8_t *memory;
    TileRows<GROUPS * GROUP_ROWS> &rows;
    const int32_t *table;
    int warp, lane;

    __device__ __forceinline__ const uint8_t *page_of(int entry) const
    {
        const PageSource &from = entry < 0 ? (KEYS ? p.k_open : p.v_open) : KEYS ? p.k : p.v;
        return from.base + (size_t)(uint32_t)(entry < 0 ? -1 - entry : entry) * from.block_stride +
               work.pair.kv_head * from.head_stride;
    }

    __device__ __forceinline__ uint8_t *slot_of(int page) const
    {
        return memory + p.ring_at + (page - work.first_page) % RING * (p.k_page + p.v_page) + (KEYS ? 0 : p.k_page);
    }

    /* Starts copies of a page's codes, 16 bytes a thread at a time; an empty group where there is
     * nothing to copy, so that groups count pages. */
    __device__ __forceinline__ void fetch(int page) const
    {
        const int entry = page < work.end_page ? __ldg(table + page) : -1;
        if (p.ring && entry >= 0) {
            uint8_t *to = slot_of(page);
            const uint8_t *from = page_of(entry);
            for (uint32_t i = 16 * (32 * warp + lane); i < (KEYS ? p.k.bytes : p.v.bytes); i += 16 * GROUP_THREADS)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)), "l"(from + i)
                             : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    template <class P> __device__ __forceinline__ void unpack(int page, int stage) const
    {
        const int entry = __ldg(table + page);
        const Unpacking u{ KEYS ? p.keys : p.values,
                           entry >= 0 && p.ring ? slot_of(page) : page_of(entry),
                           memory + (KEYS ? p.k_table_at : p.v_table_at),
                           memory + (KEYS ? stage * KEY_TILE_BYTES<D>
                                          : p.stages * KEY_TILE_BYTES<D> + stage * VALUE_TILE_BYTES<D>),
                           p.one,
                           entry == KVANT_CUDA_NO_BLOCK ? 0 : min(work.length - page * PAGE_TOKENS, PAGE_TOKENS),
                           warp,
                           lane };
        if (page - work.first_page >= p.stages)
            wait_at((KEYS ? K_EMPTY : V_EMPTY) + stage, SHARERS);
        float unit = 1;
        if (entry < 0)
            unpack_open<D, KEYS>(u);
        else
            unit = unpack_page<D, KEYS>(u);
        if (warp == 0 && lane == 0 && KEYS)
            rows.k_unit[stage] = entry == KVANT_CUDA_NO_BLOCK ? HIDDEN : unit;
        else if (warp == 0 && lane == 0)
            rows.v_unit[stage] = make_float2(log2f(unit), __frcp_rn(unit));
        P::publish();
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            arrive_at((KEYS ? K_FULL : V_FULL) + MOST_STAGES * g + stage, 2 * GROUP_THREADS);
    }

    template <class P> __device__ __forceinline__ void run() const
    {
        for (int i = 0; i < RING - 1; i++)
            fetch(work.first_page + i);
        int stage = 0;
#pragma unroll 1
        for (int page = work.first_page; page < work.end_page; page++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
            /* the page is there, and the one before it is done with */
            wait_at(KEYS ? K_UNPACKERS : V_UNPACKERS, GROUP_THREADS);
            fetch(page + RING - 1);
            unpack<P>(page, stage);
            if (++stage == p.stages)
                stage = 0;
        }
    }
};

/* ---- the warpgroups that multiply ---- */

/* Softmax of a lane's two rows (h): the running maximum and sum, and the sums of values. */
template <int D> struct RowSums {
    float o[D / 8][4], max[2], sum[2];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
        max[0] = max[1] = NEVER, sum[0] = sum[1] = 0;
    }

    /* Weights of scores s[j] * factor, for values of this unit. */
    __device__ __forceinline__ void weigh(const float (&s)[8][4], const float (&factor)[2], float2 unit,
                                          uint32_t (&w)[4][4])
    {
        float shift[2], shrink[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = s[0][2 * h];
#pragma unroll
            for (int j = 0; j < 8; j++)
                top = fmaxf(top, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
            top = fmaxf(max[h], top * factor[h] + unit.x);
            shrink[h] = exp2_fast(max[h] - top);
            max[h] = top;
            shift[h] = unit.x - top;
        }
        if (__any_sync(FULL, shrink[0] != 1 || shrink[1] != 1))
#pragma unroll
            for (int h = 0; h < 2; h++) {
                sum[h] *= shrink[h];
#pragma unroll
                for (int i = 0; i < D / 8; i++)
                    o[i][2 * h] *= shrink[h], o[i][2 * h + 1] *= shrink[h];
            }
        float total[2] = { 0, 0 };
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float x = exp2_fast(fmaf(s[j][2 * h], factor[h], shift[h])),
                            y = exp2_fast(fmaf(s[j][2 * h + 1], factor[h], shift[h]));
                total[h] += x + y;
                w[j / 2][2 * (j % 2) + h] = pack_half2(x, y);
            }
        sum[0] += total[0] * unit.y;
        sum[1] += total[1] * unit.y;
    }
};

/* Softcap, mask or ALiBi, hidden tokens: on the scores of one page, which are multiplied by factor
 * before, unless there is nothing to change. */
template <int ROWS>
__device__ __forceinline__ void change_rows(const TileArgs &p, const TileRows<ROWS> &rows, const int (&row)[2],
                                            const Seen &seen, int first, int length, int lane, float (&s)[8][4],
                                            float (&factor)[2])
{
    const bool biased = p.softcap_log2 > 0 || p.mask || p.max_bias > 0,
               hides = first < seen.from || first + PAGE_TOKENS - 1 > seen.to || first + PAGE_TOKENS > length;
    if (!biased && !hides)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int position = rows.position[row[h]];
        const float slope = rows.slope[row[h]];
        const uint16_t *mask = p.mask + rows.mask_row[row[h]];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float &x = s[i / 2][2 * h + i % 2];
            const int token = first + 8 * (i / 2) + 2 * (lane & 3) + i % 2;
            x *= factor[h];
            if (p.softcap_log2 > 0)
                x = soften(x, p.softcap_log2);
            if (p.mask)
                x += token < length ? slope * __half2float(__ushort_as_half(__ldg(mask + token))) : 0;
            else if (p.max_bias > 0)
                x += slope * (float)(token - position);
            if (token >= length || (p.causal && token > position) || position - token >= p.window)
                x = -INFINITY;
        }
        factor[h] = 1;
    }
}

template <class P, int D, int GROUPS>
__device__ __forceinline__ void attend_rows(const TileArgs &p, const TileWork &work, const uint8_t *memory,
                                            const TileRows<GROUPS * GROUP_ROWS> &rows, int group, int warp, int lane,
                                            RowSums<D> &sums)
{
    using M = TileMemory<D, GROUPS>;
    constexpr int SHARERS = GROUP_THREADS * (1 + GROUPS);
    const int first_row = GROUP_ROWS * group + WARP_ROWS * warp;
    const int row[2] = { first_row + (lane >> 2), first_row + (lane >> 2) + 8 };
    const float factor[2] = { rows.factor[row[0]], rows.factor[row[1]] };
    const Seen seen = seen_by_all(p, work.pair, work.first_position);
    QueryOperand<D> q;
    q.load(memory, M::ROWS, first_row, lane);
    __syncthreads(); /* matrices may take their place */
    int stage = 0;
#pragma unroll 1
    for (int page = work.first_page; page < work.end_page; page++) {
        const uint8_t *keys = memory + stage * KEY_TILE_BYTES<D>,
                      *values = memory + p.stages * KEY_TILE_BYTES<D> + stage * VALUE_TILE_BYTES<D>;
        const bool again = page + p.stages < work.end_page; /* the stage is filled again */
        float s[8][4] = {};
        uint32_t w[4][4];
        wait_at(K_FULL + MOST_STAGES * group + stage, 2 * GROUP_THREADS);
        P::template scores<D>(s, q, keys, lane);
        const float unit = rows.k_unit[stage];
        float of_page[2] = { factor[0] * unit, factor[1] * unit };
        if (again)
            arrive_at(K_EMPTY + stage, SHARERS);
        change_rows(p, rows, row, seen, page * PAGE_TOKENS, unit == HIDDEN ? 0 : work.length, lane, s, of_page);
        wait_at(V_FULL + MOST_STAGES * group + stage, 2 * GROUP_THREADS);
        sums.weigh(s, of_page, rows.v_unit[stage], w);
        P::template add<D>(sums.o, w, values, lane);
        if (again)
            arrive_at(V_EMPTY + stage, SHARERS);
        if (++stage == p.stages)
            stage = 0;
    }
}

/* A warpgroup's rows to shared memory. */
template <int D, int ROWS>
__device__ __forceinline__ void store_rows(const RowSums<D> &sums, float *out, TileRows<ROWS> &rows, int first_row,
                                           int lane)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = first_row + (lane >> 2) + 8 * h;
        float total = sums.sum[h];
        total += __shfl_xor_sync(FULL, total, 1);
        total += __shfl_xor_sync(FULL, total, 2);
        if ((lane & 3) == 0)
            rows.max[row] = sums.max[h], rows.sum[row] = total;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            *reinterpret_cast<float2 *>(out + row * D + 8 * i + 2 * (lane & 3)) =
                make_float2(sums.o[i][2 * h], sums.o[i][2 * h + 1]);
    }
}

/* ---- the end of a tile ---- */

/* Partial results of a part: rows, then maximum and sum of each. */
template <int D, int ROWS> __device__ __forceinline__ float *part_of(const TileArgs &p, int item, int part)
{
    return p.partials + (size_t)(item * p.splits + part) * (ROWS * (D + 2));
}

template <int D, int ROWS>
__device__ __forceinline__ void leave_part(const TileArgs &p, const TileWork &work, const float *result,
                                           const TileRows<ROWS> &rows)
{
    float *to = part_of<D, ROWS>(p, work.item, work.part);
    for (int i = threadIdx.x; i < work.pair.n_columns * D; i += blockDim.x)
        __stcg(to + i, result[i]);
    for (int i = threadIdx.x; i < work.pair.n_columns; i += blockDim.x)
        __stcg(reinterpret_cast<float2 *>(to + ROWS * D) + i, make_float2(rows.max[i], rows.sum[i]));
}

/* Row n of all parts, in their order. */
template <int D, int ROWS>
__device__ __forceinline__ HeadSum<D> add_parts(const TileArgs &p, const TileWork &work, int n, int lane)
{
    HeadSum<D> total{};
    total.max = NEVER;
    auto scalars = [&](int part) {
        return __ldcg(reinterpret_cast<const float2 *>(part_of<D, ROWS>(p, work.item, part) + ROWS * D) + n);
    };
    for (int i = 0; i < p.splits; i++)
        total.max = fmaxf(total.max, scalars(i).x);
    for (int i = 0; i < p.splits; i++) {
        const float2 own = scalars(i);
        const float weight = exp2_fast(own.x - total.max), *row = part_of<D, ROWS>(p, work.item, i) + n * D + lane;
        total.sum += weight * own.y;
#pragma unroll
        for (int j = 0; j < Row<D>::PER_LANE; j++)
            total.row.x[j] += weight * __ldcg(row + 32 * j);
    }
    return total;
}

template <int D, int ROWS>
__device__ __forceinline__ void finish_tile(const TileArgs &p, const TileWork &work, const float *result,
                                            TileRows<ROWS> &rows, int warp, int n_warps, int lane)
{
    if (p.splits > 1) {
        leave_part<D, ROWS>(p, work, result, rows);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0)
            rows.before = count_up(p.counters + work.item, p.splits - 1);
        __syncthreads();
        if ((int)rows.before != p.splits - 1)
            return;
        __threadfence();
    }
#pragma unroll 1
    for (int n = warp; n < work.pair.n_columns; n += n_warps) {
        HeadSum<D> total;
        if (p.splits > 1)
            total = add_parts<D, ROWS>(p, work, n, lane);
        else {
            total.max = rows.max[n], total.sum = rows.sum[n];
#pragma unroll
            for (int j = 0; j < Row<D>::PER_LANE; j++)
                total.row.x[j] = result[n * D + lane + 32 * j];
        }
        write_output<true, D>(p, work.pair, n, total, lane);
    }
}

/* Registers of a thread, of 65536 that a block has: 3 or 4 warpgroups begin with 168 or 128 each. */
__host__ __device__ constexpr int unpack_registers(int groups)
{
    return groups == 1 ? 128 : 88;
}

__host__ __device__ constexpr int multiply_registers(int groups)
{
    return groups == 1 ? 240 : 168;
}

template <class P, int D, int GROUPS> __device__ __forceinline__ void attend_tile(const TileArgs &p)
{
    using M = TileMemory<D, GROUPS>;
    extern __shared__ __align__(1024) uint8_t memory[];
    TileRows<M::ROWS> &rows = *reinterpret_cast<TileRows<M::ROWS> *>(memory + M::rows_at(p.stages));
    const int lane = threadIdx.x & 31, warp = __shfl_sync(FULL, threadIdx.x >> 5, 0), n_warps = blockDim.x / 32,
              group = warp / 4;
    const TileWork work = find_work<M::ROWS>(p);
    if (work.pair.n_columns == 0)
        return;
    load_queries<D, M::ROWS>(p, work, memory, rows, warp, n_warps, lane);
    fill_table(p.keys, memory + p.k_table_at);
    fill_table(p.values, memory + p.v_table_at);
    __syncthreads();
    float *result = reinterpret_cast<float *>(memory);
    if (group >= GROUPS) {
        P::template registers<unpack_registers(GROUPS), false>();
        __syncthreads();
        const int32_t *table = p.table + work.pair.b * p.table_stride;
        if (group == GROUPS)
            Unpacker<D, GROUPS, true>{ p, work, memory, rows, table, warp % 4, lane }.template run<P>();
        else
            Unpacker<D, GROUPS, false>{ p, work, memory, rows, table, warp % 4, lane }.template run<P>();
        __syncthreads();
    } else {
        P::template registers<multiply_registers(GROUPS), true>();
        RowSums<D> sums;
        sums.clear();
        attend_rows<P, D, GROUPS>(p, work, memory, rows, group, warp % 4, lane, sums);
        __syncthreads(); /* nobody reads matrices any more */
        store_rows<D>(sums, result, rows, GROUP_ROWS * group + WARP_ROWS * (warp % 4), lane);
    }
    __syncthreads();
    finish_tile<D>(p, work, result, rows, warp, n_warps, lane);
}

template <int D, int GROUPS>
__global__ void __launch_bounds__(GROUP_THREADS *(2 + GROUPS), 1) tile_kernel(const __grid_constant__ TileArgs p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    /* by wgmma, scores of 64 channels are wrong from the second page on; the cause is not found */
    attend_tile<typename std::conditional<D == 64, WarpProducts, GroupProducts>::type, D, GROUPS>(p);
#elif defined(__CUDA_ARCH__)
    attend_tile<WarpProducts, D, GROUPS>(p);
#endif
}

template <int D, int GROUPS> TileKernel tile_kernel_of(int stages)
{
    using M = TileMemory<D, GROUPS>;
    return TileKernel{ (const void *)tile_kernel<D, GROUPS>, GROUP_THREADS * (2 + GROUPS), M::ROWS,
                       M::rows_at(stages) + (int)sizeof(TileRows<M::ROWS>) };
}

} // namespace kvant

#endif
