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
#pragma once

#include "../attention/combine.cuh"
#include "../attention/scores.cuh"
#include "barriers.cuh"
#include "unpack.cuh"

namespace kvant
{

/* For warpgroups that are at different places of the code; __syncthreads stands only where all
 * threads have the same code. Index 0: keys, 1: values.
 *
 *     codes[][slot]   the copy of a page arrives when its codes are in the ring
 *     full[][stage]   the four warps that unpack: a matrix and its unit are written, and the codes
 *                     of its page are read. Who multiplies waits; who asks for the next page of a
 *                     slot, too
 *     empty[][stage]  the warps that multiply with a matrix: they have read it, and it may be
 *                     written again
 *     multiplied      all warps that multiply: nobody reads matrices any more, and results may take
 *                     their place */
struct TileBarriers {
    uint64_t codes[2][MOST_RING], full[2][MOST_STAGES], empty[2][MOST_STAGES], multiplied;

    /* By one thread. readers: warps that read a matrix; multipliers: all that multiply. */
    KVANT_INLINE void init(int readers, int multipliers)
    {
        for (int i = 0; i < 2; i++) {
            for (int slot = 0; slot < MOST_RING; slot++)
                init_barrier(codes[i][slot], COPY_ARRIVALS);
            for (int stage = 0; stage < MOST_STAGES; stage++) {
                init_barrier(full[i][stage], KVANT_WARP_ARRIVALS * UNPACK_WARPS);
                init_barrier(empty[i][stage], KVANT_WARP_ARRIVALS * readers);
            }
        }
        init_barrier(multiplied, KVANT_WARP_ARRIVALS * multipliers);
        publish_barriers();
    }
};

constexpr float HIDDEN = -1; /* in place of a unit: nobody sees the page */

/* Warpgroups that multiply. With 256 channels the sums of one take all the registers. */
template <int D> constexpr int MULTIPLIER_GROUPS = D > 128 ? 1 : 2;

/* Rows of a tile and units of pages. The results of the warpgroups stand one after the other: of
 * different rows, or (by_pages) of the same rows. */
template <int D> struct TileRows {
    static constexpr int RESULTS = MULTIPLIER_GROUPS<D> * GROUP_ROWS;
    size_t mask_row[RESULTS];
    float factor[RESULTS], slope[RESULTS]; /* as in QueryTile */
    int position[RESULTS];
    float max[RESULTS], sum[RESULTS];
    float k_unit[MOST_STAGES];
    float2 v_unit[MOST_STAGES]; /* its binary logarithm, its inverse */
    uint32_t before; /* parts that ended before this one */
    TileBarriers barriers;
};

/* Shared memory: queries; `stages` matrices of keys, as many of values, whose place results take in
 * the end. Then TileRows, tables, the ring. */
template <int D> struct TileMemory {
    static constexpr int QUERY_BYTES = CHANNEL_BLOCKS<D> * GROUP_ROWS * ROW_BYTES; /* of a warpgroup */

    __host__ __device__ static int keys_at(int row_groups)
    {
        return row_groups * QUERY_BYTES;
    }
    __host__ __device__ static int rows_at(int row_groups, int stages)
    {
        constexpr int RESULT = TileRows<D>::RESULTS * D * 4;
        const int matrices = stages * (KEY_TILE_BYTES<D> + VALUE_TILE_BYTES<D>);
        return keys_at(row_groups) + (matrices > RESULT ? matrices : RESULT);
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

KVANT_INLINE TileWork find_work(const TileArgs &p)
{
    const Lengths<true, GROUP_ROWS> lengths{ p };
    const int tile_rows = p.row_groups * GROUP_ROWS;
    TileWork w;
    int i = blockIdx.x;
    w.part = i % p.splits, i /= p.splits, w.item = i;
    const int tile = p.tiles - 1 - i % p.tiles; /* the longest first */
    i /= p.tiles;
    w.pair.kv_head = i % p.kv_heads, w.pair.b = i / p.kv_heads;
    const int rows = lengths.queries(w.pair.b) * p.heads_a_kv;
    w.pair.first_column = tile * tile_rows;
    w.pair.n_columns = max(min(rows - tile * tile_rows, tile_rows), 0);
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
template <class P, int D>
KVANT_INLINE void load_queries(const TileArgs &p, const TileWork &work, uint8_t *memory, TileRows<D> &rows,
                               int warp, int n_warps, int lane)
{
#pragma unroll 1
    for (int n = warp; n < p.row_groups * GROUP_ROWS; n += n_warps) {
        uint8_t *tile = memory + n / GROUP_ROWS * TileMemory<D>::QUERY_BYTES;
        const Column column = column_of<true>(p, work.pair, min(n, max(work.pair.n_columns - 1, 0)));
        const QueryRow at = query_row(p, work.pair.b, column.token);
        Row<D> row{};
        if (n < work.pair.n_columns)
            row = load_row<D>(p.q, at.q + column.head * p.q_head_stride, p.type, lane);
        unrolled_for (int j = 0; p.k_scale && j < Row<D>::PER_LANE; j++)
            row.x[j] *= p.k_scale[work.pair.kv_head * D + lane + 32 * j];
        rotate(row, p.k_rotation, lane);
        float largest = 0;
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            largest = fmaxf(largest, fabsf(row.x[j]));
        const float unit = power_above(largest_of(largest)), inverse = copysignf(__frcp_rn(unit), p.scale_log2);
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            *reinterpret_cast<__half *>(tile + place_of(GROUP_ROWS, n % GROUP_ROWS, lane + 32 * j)) =
                __float2half_rn(row.x[j] * inverse);
        if (lane == 0) {
            rows.factor[n] = unit * fabsf(p.scale_log2);
            rows.position[n] = work.first_position + column.token;
            rows.slope[n] = slope_of(p, column.head);
            rows.mask_row[n] = at.row * p.mask_token_stride;
        }
    }
    P::publish();
}

/* Of a page's matrices, and which phase of their barriers is the page's. at: pages before it. */
KVANT_INLINE int stage_of(const TileArgs &p, int at)
{
    return p.stages == 1 ? 0 : at % MOST_STAGES;
}

KVANT_INLINE int phase_of(const TileArgs &p, int at)
{
    return p.stages == 1 ? at : at / MOST_STAGES;
}

/* ---- the warpgroups that unpack ---- */

/* Of keys, or of values. */
template <int D, bool KEYS> struct Unpacker {
    const TileArgs &p;
    const TileWork &work;
    uint8_t *memory;
    TileRows<D> &rows;
    const int32_t *table;
    int warp, lane;
    int32_t entries, later; /* of the table, a page a lane: 32 pages and the 32 after them */

    KVANT_INLINE int32_t load_entry(int page) const
    {
        return page + lane < work.end_page ? __ldg(table + page + lane) : -1;
    }

    /* page: of the 64 that lanes have, counted from the first of them. */
    KVANT_INLINE int32_t entry_of(int page) const
    {
        return __shfl_sync(FULL, page < 32 ? entries : later, page % 32);
    }

    KVANT_INLINE const uint8_t *page_of(int entry) const
    {
        const PageSource &from = entry < 0 ? (KEYS ? p.k_open : p.v_open) : KEYS ? p.k : p.v;
        return from.base + (size_t)(uint32_t)(entry < 0 ? -1 - entry : entry) * from.block_stride +
               work.pair.kv_head * from.head_stride;
    }

    KVANT_INLINE uint8_t *slot_of(int slot) const
    {
        return memory + p.ring_at + slot * (p.k_page + p.v_page) + (KEYS ? 0 : p.k_page);
    }

    /* Asks for the codes of a page, once the page before it in its slot was read. i: counted from the
     * first one of `entries`; at: from the first of all. */
    KVANT_INLINE void fetch(int i, int at, int slot) const
    {
        if (work.first_page + at >= work.end_page)
            return;
        /* With one stage, waiting for the page after that: its barrier may be a phase further. */
        const int entry = entry_of(i), before = at - p.ring + (p.stages == 1 ? 1 : 0);
        if (at >= p.ring && (COPY_ARRIVALS > 1 || warp == 0))
            wait_for(rows.barriers.full[!KEYS][stage_of(p, before)], phase_of(p, before));
        copy_page(slot_of(slot), entry >= 0 ? page_of(entry) : nullptr, KEYS ? p.k.bytes : p.v.bytes,
                  rows.barriers.codes[!KEYS][slot], 32 * warp + lane);
    }

    /* at: pages before it; turn: of its slot. */
    template <class P> KVANT_INLINE void unpack(int entry, int at, int slot, int turn) const
    {
        const int stage = stage_of(p, at);
        /* New to the compiler for each page: otherwise it keeps what all kinds of codes compute from
         * them in registers, which are too few. */
        int own_warp = warp, own_lane = lane;
        uint32_t one = p.one;
        asm volatile("" : "+r"(own_warp), "+r"(own_lane), "+r"(one));
        const Unpacking u{ KEYS ? p.keys : p.values,
                     slot_of(slot),
                     memory + (KEYS ? p.k_table_at : p.v_table_at),
                     memory + TileMemory<D>::keys_at(p.row_groups) +
                         (KEYS ? stage * KEY_TILE_BYTES<D>
                               : p.stages * KEY_TILE_BYTES<D> + stage * VALUE_TILE_BYTES<D>),
                     one,
                     entry == KVANT_CUDA_NO_BLOCK
                         ? 0
                         : min(work.length - (work.first_page + at) * PAGE_TOKENS, PAGE_TOKENS),
                     own_warp,
                     own_lane };
        if (at >= p.stages)
            wait_for(rows.barriers.empty[!KEYS][stage], phase_of(p, at) - 1);
        float unit = 1;
        if (p.ring)
            wait_for(rows.barriers.codes[!KEYS][slot], turn);
        /* two objects, so that the compiler knows where a page lies */
        const Unpacking far{ u.codec, page_of(entry), u.table, u.tile, u.one, u.valid, u.warp, u.lane };
        if (entry < 0)
            unpack_open<D, KEYS>(far);
        else if (p.ring)
            unit = unpack_page<D, KEYS>(u);
        else
            unit = unpack_far_page<D, KEYS>(far);
        if (warp == 0 && lane == 0 && KEYS)
            rows.k_unit[stage] = entry == KVANT_CUDA_NO_BLOCK ? HIDDEN : unit;
        else if (warp == 0 && lane == 0)
            rows.v_unit[stage] = make_float2(log2f(unit), __frcp_rn(unit));
        P::publish();
        arrive_at(rows.barriers.full[!KEYS][stage], lane);
    }

    template <class P> KVANT_INLINE void run()
    {
        const int ahead = p.ring - 2; /* so that nobody waits for a slot to be read */
        entries = load_entry(work.first_page);
        later = load_entry(work.first_page + 32);
        for (int i = 0; i < ahead; i++)
            fetch(i, i, i);
        int i = 0, slot = 0, turn = 0;
#pragma unroll 1
        for (int at = 0; at < work.end_page - work.first_page; at++) {
            if (p.ring)
                fetch(i + ahead, at + ahead, slot < 2 ? slot + ahead : slot - 2);
            unpack<P>(entry_of(i), at, slot, turn);
            if (++slot >= p.ring)
                slot = 0, turn++;
            if (++i == 32) {
                i = 0;
                entries = later;
                later = load_entry(work.first_page + at + 1 + 32);
            }
        }
    }
};

/* ---- the warpgroups that multiply ---- */

/* Softmax of a lane's two rows (h): the running maximum and sum, and the sums of values. */
template <int D> struct RowSums {
    float o[D / 8][4], max[2], sum[2];

    KVANT_INLINE void clear()
    {
        unrolled_for (int i = 0; i < D / 8; i++)
            o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
        max[0] = max[1] = NEVER, sum[0] = sum[1] = 0;
    }

    /* Weights of scores s[j] * factor, for values of this unit. The maximum is raised when a score
     * exceeds it by more than SLACK (softmax.cuh). */
    KVANT_INLINE void weigh(const float (&s)[8][4], const float (&factor)[2], float2 unit, uint32_t (&w)[4][4])
    {
        float top[2];
        unrolled_for (int h = 0; h < 2; h++) {
            top[h] = s[0][2 * h];
            unrolled_for (int j = 0; j < 8; j++)
                top[h] = fmaxf(top[h], fmaxf(s[j][2 * h], s[j][2 * h + 1]));
            top[h] = top[h] * factor[h] + unit.x;
        }
        if (__any_sync(FULL, top[0] > max[0] + SLACK || top[1] > max[1] + SLACK))
            unrolled_for (int h = 0; h < 2; h++) {
                top[h] = fmaxf(top[h], __shfl_xor_sync(FULL, top[h], 1));
                top[h] = fmaxf(max[h], fmaxf(top[h], __shfl_xor_sync(FULL, top[h], 2)));
                const float shrink = exp2_fast(max[h] - top[h]);
                max[h] = top[h];
                sum[h] *= shrink;
                unrolled_for (int i = 0; i < D / 8; i++)
                    o[i][2 * h] *= shrink, o[i][2 * h + 1] *= shrink;
            }
        const float shift[2] = { unit.x - max[0], unit.x - max[1] };
        float total[2] = { 0, 0 };
        unrolled_for (int j = 0; j < 8; j++)
            unrolled_for (int h = 0; h < 2; h++) {
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
template <int D>
KVANT_INLINE void change_rows(const TileArgs &p, const TileRows<D> &rows, const int (&row)[2], const Seen &seen,
                              int first, int length, int lane, float (&s)[8][4], float (&factor)[2])
{
    const bool biased = p.softcap_log2 > 0 || p.mask || p.max_bias > 0,
               hides = first < seen.from || first + PAGE_TOKENS - 1 > seen.to || first + PAGE_TOKENS > length;
    if (!biased && !hides)
        return;
    unrolled_for (int h = 0; h < 2; h++) {
        const int position = rows.position[row[h]];
        const float slope = rows.slope[row[h]];
        const uint16_t *mask = p.mask + rows.mask_row[row[h]];
        unrolled_for (int i = 0; i < 16; i++) {
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

/* A warpgroup's rows against all pages, or (by_pages) every second one. The products of a page's
 * values run beside those of the next page's keys. */
template <class P, int D> struct Multiplier {
    static constexpr int GROUPS = MULTIPLIER_GROUPS<D>;
    const TileArgs &p;
    const TileWork &work;
    const uint8_t *queries, *keys;
    TileRows<D> &rows;
    const Seen seen;
    int group, lane;
    int row[2]; /* the lane's, of the tile */

    KVANT_INLINE const uint8_t *keys_of(int at) const
    {
        return keys + stage_of(p, at) * KEY_TILE_BYTES<D>;
    }

    KVANT_INLINE const uint8_t *values_of(int at) const
    {
        return keys + p.stages * KEY_TILE_BYTES<D> + stage_of(p, at) * VALUE_TILE_BYTES<D>;
    }

    KVANT_INLINE void wait_full(bool values, int at) const
    {
        wait_for(rows.barriers.full[values][stage_of(p, at)], phase_of(p, at));
    }

    KVANT_INLINE void leave(bool values, int at) const
    {
        arrive_at(rows.barriers.empty[values][stage_of(p, at)], lane);
    }

    /* The first of the warp's rows, in its warpgroup's. */
    KVANT_INLINE int warp_row() const
    {
        return row[0] % GROUP_ROWS - lane / 4;
    }

    /* From scores to weights; at: pages before this one. */
    KVANT_INLINE void weigh(int at, float (&s)[8][4], RowSums<D> &sums, uint32_t (&w)[4][4]) const
    {
        const float unit = rows.k_unit[stage_of(p, at)];
        float factor[2] = { rows.factor[row[0]] * unit, rows.factor[row[1]] * unit };
        leave(false, at);
        change_rows(p, rows, row, seen, (work.first_page + at) * PAGE_TOKENS, unit == HIDDEN ? 0 : work.length, lane, s,
                    factor);
        wait_full(true, at);
        if (warp_row() < work.pair.n_columns - (row[0] & -GROUP_ROWS))
            sums.weigh(s, factor, rows.v_unit[stage_of(p, at)], w);
        else /* none of the warp's rows is there */
            unrolled_for (int k = 0; k < 4; k++)
                w[k][0] = w[k][1] = w[k][2] = w[k][3] = 0;
    }

    KVANT_INLINE void run(RowSums<D> &sums) const
    {
        const int step = p.by_pages ? GROUPS : 1, end = work.end_page - work.first_page;
        int at = p.by_pages ? group : 0;
        if (at >= end)
            return;
        float s[8][4];
        uint32_t w[4][4];
        wait_full(false, at);
        P::begin();
        P::template scores<D>(s, queries, keys_of(at), warp_row(), lane);
        P::template finish<0>();
        P::hold(s);
        weigh(at, s, sums, w);
#pragma unroll 1
        for (; at + step < end; at += step) {
            P::hold(sums.o);
            P::hold(w);
            P::begin();
            P::template add<D>(sums.o, w, values_of(at), lane);
            wait_full(false, at + step);
            P::begin();
            P::template scores<D>(s, queries, keys_of(at + step), warp_row(), lane);
            P::template finish<1>();
            leave(true, at);
            P::template finish<0>();
            P::hold(sums.o);
            P::hold(s);
            weigh(at + step, s, sums, w);
        }
        P::hold(sums.o);
        P::hold(w);
        P::begin();
        P::template add<D>(sums.o, w, values_of(at), lane);
        P::template finish<0>();
        P::hold(sums.o);
    }
};

/* A warpgroup's rows to shared memory; first_row: of its warp, among results. */
template <int D>
KVANT_INLINE void store_rows(const RowSums<D> &sums, float *out, TileRows<D> &rows, int first_row, int lane)
{
    unrolled_for (int h = 0; h < 2; h++) {
        const int row = first_row + (lane >> 2) + 8 * h;
        float total = sums.sum[h];
        total += __shfl_xor_sync(FULL, total, 1);
        total += __shfl_xor_sync(FULL, total, 2);
        if ((lane & 3) == 0)
            rows.max[row] = sums.max[h], rows.sum[row] = total;
        unrolled_for (int i = 0; i < D / 8; i++)
            *reinterpret_cast<float2 *>(out + row * D + 8 * i + 2 * (lane & 3)) =
                make_float2(sums.o[i][2 * h], sums.o[i][2 * h + 1]);
    }
}

/* ---- the end of a tile ---- */

/* n results for a row, in their order: result(i) gives maximum and sum, and where the lane's
 * channels lie. */
template <int D, class F> KVANT_INLINE HeadSum<D> add_results(int n, F &&result)
{
    HeadSum<D> total{};
    total.max = NEVER;
    for (int i = 0; i < n; i++)
        total.max = fmaxf(total.max, result(i).max);
    for (int i = 0; i < n; i++) {
        const auto own = result(i);
        const float weight = exp2_fast(own.max - total.max);
        total.sum += weight * own.sum;
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            total.row.x[j] += weight * own.load(j);
    }
    return total;
}

struct SharedResult {
    float max, sum;
    const float *row;
    KVANT_INLINE float load(int j) const
    {
        return row[32 * j];
    }
};

struct PartResult : SharedResult {
    KVANT_INLINE float load(int j) const
    {
        return __ldcg(row + 32 * j);
    }
};

/* Row n of the thread block's part. */
template <int D>
KVANT_INLINE HeadSum<D> own_row(const TileArgs &p, const float *results, const TileRows<D> &rows, int n, int lane)
{
    return add_results<D>(p.by_pages ? MULTIPLIER_GROUPS<D> : 1, [&](int i) {
        const int at = n + i * GROUP_ROWS;
        return SharedResult{ rows.max[at], rows.sum[at], results + at * D + lane };
    });
}

/* Partial results of a part: rows, then maximum and sum of each. */
template <int D> KVANT_INLINE float *part_of(const TileArgs &p, int item, int part)
{
    return p.partials + (size_t)(item * p.splits + part) * (TileRows<D>::RESULTS * (D + 2));
}

template <int D>
KVANT_INLINE void leave_row(const TileArgs &p, const TileWork &work, int n, const HeadSum<D> &own, int lane)
{
    float *to = part_of<D>(p, work.item, work.part);
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        __stcg(to + n * D + lane + 32 * j, own.row.x[j]);
    if (lane == 0)
        __stcg(reinterpret_cast<float2 *>(to + TileRows<D>::RESULTS * D) + n, make_float2(own.max, own.sum));
}

/* Row n of all parts. */
template <int D>
KVANT_INLINE HeadSum<D> add_parts(const TileArgs &p, const TileWork &work, int n, int lane)
{
    return add_results<D>(p.splits, [&](int i) {
        const float *part = part_of<D>(p, work.item, i);
        const float2 own = __ldcg(reinterpret_cast<const float2 *>(part + TileRows<D>::RESULTS * D) + n);
        return PartResult{ { own.x, own.y, part + n * D + lane } };
    });
}

template <int D>
KVANT_INLINE void finish_tile(const TileArgs &p, const TileWork &work, const float *results, TileRows<D> &rows,
                              int warp, int n_warps, int lane)
{
    if (p.splits > 1) {
#pragma unroll 1
        for (int n = warp; n < work.pair.n_columns; n += n_warps)
            leave_row<D>(p, work, n, own_row<D>(p, results, rows, n, lane), lane);
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
        HeadSum<D> total = p.splits > 1 ? add_parts<D>(p, work, n, lane) : own_row<D>(p, results, rows, n, lane);
        write_output<true, D>(p, work.pair, n, total, lane);
    }
}

/* Registers of a thread, of 65536 that a block has: 3 or 4 warpgroups begin with 168 or 128 each. */
template <int D> constexpr int UNPACK_REGISTERS = D > 128 ? 136 : D == 128 ? 104 : 112;
template <int D> constexpr int MULTIPLY_REGISTERS = D > 128 ? 232 : D == 128 ? 152 : 144;

template <class P, int D> KVANT_INLINE void attend_tile(const TileArgs &p)
{
    constexpr int GROUPS = MULTIPLIER_GROUPS<D>;
    using M = TileMemory<D>;
    extern __shared__ __align__(1024) uint8_t memory[];
    TileRows<D> &rows = *reinterpret_cast<TileRows<D> *>(memory + M::rows_at(p.row_groups, p.stages));
    const int lane = threadIdx.x & 31, warp = __shfl_sync(FULL, threadIdx.x >> 5, 0), n_warps = blockDim.x / 32,
              group = warp / 4;
    const TileWork work = find_work(p);
    if (work.pair.n_columns == 0)
        return;
    const int active = p.by_pages ? GROUPS : p.row_groups; /* warpgroups that multiply */
    if (threadIdx.x == 0)
        rows.barriers.init(GROUP_WARPS * (p.by_pages ? 1 : active), GROUP_WARPS * GROUPS);
    load_queries<P, D>(p, work, memory, rows, warp, n_warps, lane);
    fill_table(p.keys, memory + p.k_table_at);
    fill_table(p.values, memory + p.v_table_at);
    __syncthreads();
    float *results = reinterpret_cast<float *>(memory + M::keys_at(p.row_groups));
    if (group >= GROUPS) {
        P::template registers<UNPACK_REGISTERS<D>, false>();
        const int32_t *table = p.table + work.pair.b * p.table_stride;
        if (group == GROUPS)
            Unpacker<D, true>{ p, work, memory, rows, table, warp % 4, lane }.template run<P>();
        else
            Unpacker<D, false>{ p, work, memory, rows, table, warp % 4, lane }.template run<P>();
    } else {
        P::template registers<MULTIPLY_REGISTERS<D>, true>();
        const int own_rows = p.by_pages ? 0 : group, first_row = GROUP_ROWS * own_rows + WARP_ROWS * (warp % 4);
        RowSums<D> sums;
        sums.clear();
        if (group < active)
            Multiplier<P, D>{ p,
                              work,
                              memory + own_rows * M::QUERY_BYTES,
                              memory + M::keys_at(p.row_groups),
                              rows,
                              seen_by_all(p, work.pair, work.first_position),
                              group,
                              lane,
                              { first_row + (lane >> 2), first_row + (lane >> 2) + 8 } }
                .run(sums);
        arrive_at(rows.barriers.multiplied, lane);
        wait_for(rows.barriers.multiplied, 0);
        store_rows<D>(sums, results, rows, GROUP_ROWS * group + WARP_ROWS * (warp % 4), lane);
    }
    __syncthreads();
    finish_tile<D>(p, work, results, rows, warp, n_warps, lane);
}

template <int D>
__global__ void __launch_bounds__(GROUP_THREADS *(2 + MULTIPLIER_GROUPS<D>), 1)
    tile_kernel(const __grid_constant__ TileArgs p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    attend_tile<GroupProducts, D>(p);
#elif defined(__CUDA_ARCH__)
    attend_tile<WarpProducts, D>(p);
#endif
}

template <int D> TileKernel tile_kernel_of()
{
    TileKernel k{ (const void *)tile_kernel<D>, GROUP_THREADS * (2 + MULTIPLIER_GROUPS<D>), MULTIPLIER_GROUPS<D>, {} };
    for (int row_groups = 1; row_groups <= MULTIPLIER_GROUPS<D>; row_groups++)
        for (int stages = 1; stages <= MOST_STAGES; stages++)
            k.fixed_bytes[row_groups - 1][stages - 1] =
                TileMemory<D>::rows_at(row_groups, stages) + (int)sizeof(TileRows<D>);
    return k;
}

} // namespace kvant
