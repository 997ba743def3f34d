/* tile_rows.cuh - a thread block's tile of query rows (query tokens x heads of one kv head). It
 * decides the rows and pages of a block and loads queries as an operand. At the end, it adds the
 * results of warpgroups, and of thread blocks that share a tile's pages, in order, and writes them.
 * The same input gives the same bits. */
#pragma once

#include "../attention/combine.cuh"
#include "../attention/scores.cuh"
#include "barriers.cuh"
#include "tiles.h"

namespace kvant
{

/* Barriers for warpgroups that execute different code; __syncthreads is only used where all threads
 * execute the same code. Index 0: keys, 1: values.
 *
 *     codes[][slot]   the copy of a page arrives when its codes are in the ring
 *     full[][stage]   the four warps that unpack: a matrix and its unit are written, and the codes
 *                     of its page are read. Multiplying warps wait; so does the copy into this
 *                     slot
 *     empty[][stage]  the warps that multiply with a matrix: they have read it, and it may be
 *                     written again
 *     multiplied      all warps that multiply: they read matrices no more, so results may take
 *                     their place */
struct TileBarriers {
    uint64_t codes[2][MOST_RING], full[2][MOST_STAGES], empty[2][MOST_STAGES], multiplied;

    /* Called by one thread. writers: arrivals when a matrix is written; readers: warps that read a
     * matrix; multipliers: all warps that multiply. */
    KVANT_INLINE void init(int writers, int readers, int multipliers)
    {
        for (int i = 0; i < 2; i++) {
            for (int slot = 0; slot < MOST_RING; slot++)
                init_barrier(codes[i][slot], COPY_ARRIVALS);
            for (int stage = 0; stage < MOST_STAGES; stage++) {
                init_barrier(full[i][stage], writers);
                init_barrier(empty[i][stage], KVANT_WARP_ARRIVALS * readers);
            }
        }
        init_barrier(multiplied, KVANT_WARP_ARRIVALS * multipliers);
        publish_barriers();
    }
};

/* Replaces a unit of keys: no row sees the page. */
constexpr float HIDDEN = -1;

/* The rows of a tile and the units of pages. The results of GROUPS warpgroups lie one after
 * another. They belong to different rows or, with SAME_ROWS below, to the same rows. */
template <int GROUPS> struct TileRows {
    static constexpr int RESULTS = GROUPS * GROUP_ROWS;
    size_t mask_row[RESULTS];
    float factor[RESULTS], slope[RESULTS], bias[RESULTS]; /* as in QueryTile */
    int position[RESULTS];
    float max[RESULTS], sum[RESULTS];
    /* x: unit of keys; y and z: binary logarithm and inverse of the unit of values */
    alignas(16) float4 units[MOST_STAGES];
    uint32_t before; /* parts that ended before this one */
    TileBarriers barriers;
};

/* The layout of shared memory: queries, `stages` matrices of keys, as many matrices of values, then
 * TileRows. At the end, results take the place of the matrices. */
template <int D, int GROUPS> struct TileMemory {
    static constexpr int QUERY_BYTES =
        CHANNEL_BLOCKS<D> * GROUP_ROWS * ROW_BYTES; /* per warpgroup */

    __host__ __device__ static int keys_at(int row_groups)
    {
        return row_groups * QUERY_BYTES;
    }
    __host__ __device__ static int rows_at(int row_groups, int stages)
    {
        constexpr int RESULT = TileRows<GROUPS>::RESULTS * D * 4;
        const int matrices = stages * (KEY_TILE_BYTES<D> + VALUE_TILE_BYTES<D>);
        return keys_at(row_groups) + (matrices > RESULT ? matrices : RESULT);
    }
    __host__ __device__ static int bytes(int row_groups, int stages)
    {
        return rows_at(row_groups, stages) + (int)sizeof(TileRows<GROUPS>);
    }
};

/* The work of a thread block. */
struct TileWork {
    Pair pair;
    int first_position, length;
    int first_page, end_page;
    /* index among all parts of tiles; it selects the tile's counter and partial results */
    int item;
    int part;
    int pair_at; /* number of the pair (sequence, kv head) in the launch */
};

KVANT_INLINE TileWork find_work(const TileShape &p)
{
    const Lengths<true, GROUP_ROWS> lengths{ p };
    const int tile_rows = p.row_groups * GROUP_ROWS;
    TileWork w;
    int i = blockIdx.x;
    w.part = i % p.splits, i /= p.splits, w.item = i;
    const int tile = p.tiles - 1 - i % p.tiles; /* the longest tiles come first */
    w.pair_at = i /= p.tiles;
    i += p.first_pair;
    w.pair.kv_head = i % p.kv_heads, w.pair.b = i / p.kv_heads;
    const int rows = lengths.queries(w.pair.b) * p.heads_a_kv;
    w.pair.first_column = tile * tile_rows;
    w.pair.n_columns = max(min(rows - tile * tile_rows, tile_rows), 0);
    w.length = lengths.length(w.pair.b);
    w.first_position = lengths.first_position(w.pair.b);
    const int from = w.first_position + column_of<true>(p, w.pair, 0).token,
              last =
                  w.first_position + column_of<true>(p, w.pair, max(w.pair.n_columns - 1, 0)).token;
    const int end = p.causal ? min(max(last + 1, 0), w.length) : w.length;
    const int first = p.window == INT_MAX ? 0 : max(from - p.window + 1, 0) / PAGE_TOKENS;
    const int pages = max((end + PAGE_TOKENS - 1) / PAGE_TOKENS - first, 0);
    w.first_page = first + (int)((int64_t)pages * w.part / p.splits);
    w.end_page = first + (int)((int64_t)pages * (w.part + 1) / p.splits);
    return w;
}

/* The key transform of a page's keys; 0 behind the last page. */
KVANT_INLINE int matrix_at(const TileShape &p, const TileWork &work, int page)
{
    return page < work.end_page ? matrix_of(p, work.pair.b, page) : 0;
}

/* The query token and head of the tile's row n, or of the last row if there is no row n. */
KVANT_INLINE Column column_of_row(const TileShape &p, const TileWork &work, int n)
{
    return column_of<true>(p, work.pair, min(n, max(work.pair.n_columns - 1, 0)));
}

/* Row n of the tile, transformed by a key transform; zeros if there is no row n. */
template <int D>
KVANT_INLINE Row<D> load_query_row(const TileShape &p, const TileWork &work, int matrix, int n,
                                   int lane)
{
    const Column column = column_of_row(p, work, n);
    const size_t at = queries_through(p, matrix) + query_row(p, work.pair.b, column.token).q +
                      column.head * p.q_head_stride;
    return n < work.pair.n_columns ? load_row<D>(p.q, at, p.type, lane) : Row<D>{};
}

/* Transforms a row like a key. */
template <int D>
KVANT_INLINE void transform_query_row(const TileShape &p, const TileWork &work, Row<D> &row,
                                      int lane)
{
    unrolled_for (int j = 0; p.k_scale && j < Row<D>::PER_LANE; j++)
        row.x[j] *= p.k_scale[work.pair.kv_head * D + lane + 32 * j];
    rotate(row, p.k_rotation, lane);
}

/* Stores the remaining data of a row, such as its slope and its place in the mask. */
template <class Rows>
KVANT_INLINE void note_query_row(const TileShape &p, const TileWork &work, Rows &rows, int n)
{
    const Column column = column_of_row(p, work, n);
    rows.position[n] = work.first_position + column.token;
    rows.slope[n] = slope_of(p, column.head);
    rows.mask_row[n] = query_row(p, work.pair.b, column.token).row * p.mask_token_stride;
}

/* Stores a transformed row as fp16, divided by a power of two above its largest number. The row
 * gets the sign of the softmax scale, so its factor is not negative, and the largest product has
 * the largest score. */
template <int D, class Rows>
KVANT_INLINE void place_query_row(const TileShape &p, const TileWork &work, uint8_t *memory,
                                  Rows &rows, int n, Row<D> row, const Row<D> &center, int lane)
{
    uint8_t *tile = memory + n / GROUP_ROWS * TileMemory<D, 1>::QUERY_BYTES;
    const float bias = bias_of<D>(p, row, center);
    float largest = 0;
    transform_query_row<D>(p, work, row, lane);
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        largest = fmaxf(largest, fabsf(row.x[j]));
    const float unit = power_above(largest_of(largest)),
                inverse = copysignf(__frcp_rn(unit), p.scale_log2);
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        *reinterpret_cast<__half *>(tile + place_of(GROUP_ROWS, n % GROUP_ROWS, lane + 32 * j)) =
            __float2half_rn(row.x[j] * inverse);
    if (lane == 0)
        rows.factor[n] = unit * fabsf(p.scale_log2), rows.bias[n] = bias;
}

/* Loads and transforms query rows n, n + step, ... below end. Called by a warp, which waits for
 * several rows at a time. */
template <class P, int D, class Rows>
KVANT_INLINE void load_queries(const TileShape &p, const TileWork &work, int matrix,
                               uint8_t *memory, Rows &rows, int n, int end, int step, int lane)
{
    constexpr int AT_ONCE = D > 128 ? 2 : 4;
    const Row<D> center = load_center<D>(p, matrix, work.pair.kv_head, lane);
    rolled_for (; n < end; n += AT_ONCE * step) {
        Row<D> some[AT_ONCE];
        unrolled_for (int i = 0; i < AT_ONCE; i++)
            some[i] = load_query_row<D>(p, work, matrix, n + i * step, lane);
        unrolled_for (int i = 0; i < AT_ONCE; i++)
            if (n + i * step < end)
                place_query_row<D>(p, work, memory, rows, n + i * step, some[i], center, lane);
    }
    P::publish();
}

/* Loads all rows of the tile, transformed for its first page. */
template <class P, int D, class Rows>
KVANT_INLINE void load_all_queries(const TileShape &p, const TileWork &work, uint8_t *memory,
                                   Rows &rows, int warp, int n_warps, int lane)
{
    const int n_rows = p.row_groups * GROUP_ROWS;
    for (int n = threadIdx.x; n < n_rows; n += blockDim.x)
        note_query_row(p, work, rows, n);
    load_queries<P, D>(p, work, matrix_at(p, work, work.first_page), memory, rows, warp, n_rows,
                       n_warps, lane);
}

/* ---- the end of a tile ---- */

/* Combines n results of a row, in order. result(i) returns maximum and sum, and the address of the
 * lane's channels. */
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

/* Combines row n of the thread block's part. */
template <int D, bool SAME_ROWS, int GROUPS>
KVANT_INLINE HeadSum<D> own_row(const float *results, const TileRows<GROUPS> &rows, int n, int lane)
{
    return add_results<D>(SAME_ROWS ? GROUPS : 1, [&](int i) {
        const int at = n + i * GROUP_ROWS;
        return SharedResult{ rows.max[at], rows.sum[at], results + at * D + lane };
    });
}

/* The partial results of a part: rows, then maximum and sum of each. */
template <int D> KVANT_INLINE float *part_of(const TileShape &p, int item, int part)
{
    return p.partials + (size_t)(item * p.splits + part) * (MOST_TILE_ROWS * (D + 2));
}

template <int D>
KVANT_INLINE void leave_row(const TileShape &p, const TileWork &work, int n, const HeadSum<D> &own,
                            int lane)
{
    float *to = part_of<D>(p, work.item, work.part);
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        __stcg(to + n * D + lane + 32 * j, own.row.x[j]);
    if (lane == 0)
        __stcg(reinterpret_cast<float2 *>(to + MOST_TILE_ROWS * D) + n,
               make_float2(own.max, own.sum));
}

/* Combines row n of all parts. */
template <int D>
KVANT_INLINE HeadSum<D> add_parts(const TileShape &p, const TileWork &work, int n, int lane)
{
    return add_results<D>(p.splits, [&](int i) {
        const float *part = part_of<D>(p, work.item, i);
        const float2 own = __ldcg(reinterpret_cast<const float2 *>(part + MOST_TILE_ROWS * D) + n);
        return PartResult{ { own.x, own.y, part + n * D + lane } };
    });
}

template <int D, bool SAME_ROWS = false, int GROUPS>
KVANT_INLINE void finish_tile(const TileShape &p, const TileWork &work, const float *results,
                              TileRows<GROUPS> &rows, int warp, int n_warps, int lane)
{
    if (p.splits > 1) {
        rolled_for (int n = warp; n < work.pair.n_columns; n += n_warps)
            leave_row<D>(p, work, n, own_row<D, SAME_ROWS>(results, rows, n, lane), lane);
        if (!ends_last(p.counters + work.item, p.splits, rows.before))
            return;
    }
    rolled_for (int n = warp; n < work.pair.n_columns; n += n_warps) {
        OutputChannels<D> channels;
        channels.load(p, work.pair.kv_head, lane);
        HeadSum<D> total = p.splits > 1 ? add_parts<D>(p, work, n, lane)
                                        : own_row<D, SAME_ROWS>(results, rows, n, lane);
        write_output<true, D>(p, work.pair, n, total, channels, lane);
    }
}

} // namespace kvant
