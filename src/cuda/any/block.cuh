/* block.cuh - the common part of thread blocks of attention.cu: their work, the layout of shared
 * memory, and how queries come in and outputs go out. Queries are transformed and rounded, parts of
 * a context are added, outputs are transformed back. */
#pragma once

#include "decode_tile.cuh"

#include "../attention/combine.cuh"
#include "../attention/scores.cuh"

namespace kvant
{

constexpr int MOST_WARPS = 8;

/* The kernel with these decoders, for up to 8 query rows or, if `many`, for 16. Each kernel has its
 * own source file. */
template <unsigned DECODERS> const void *any_kernel(bool many);

struct AnyAttentionArgs : AttentionArgs {
    kvant_cuda_codec keys, values;
    int tiles, splits; /* as in TileArgs */
};

constexpr int WARP_CHANNELS = 128;

/* EIGHTS: number of groups of 8 query rows. */
template <int EIGHTS> struct AnyShape {
    static constexpr int ROWS = 8 * EIGHTS, OUT_TILES = WARP_CHANNELS / 16,
                         BLOCKS = 2; /* blocks per multiprocessor */
};

/* Warps of a team. */
__host__ __device__ constexpr int team_of(int d)
{
    return d <= WARP_CHANNELS ? 1 : d <= 2 * WARP_CHANNELS ? 2 : 4;
}

struct AnyRows {
    static constexpr int ROWS = 16;
    size_t mask_row[ROWS];
    float factor[ROWS], slope[ROWS], bias[ROWS], max[ROWS], sum[ROWS];
    float team_max[MOST_WARPS][ROWS], team_sum[MOST_WARPS][ROWS];
    int position[ROWS];
    uint32_t before; /* parts that ended before this one */
};

/* The layout of a thread block's shared memory, in bytes from its beginning. AnyRows, tables and
 * queries come first. For each team there is a tile and the units of keys and values. For each warp
 * there is its part of the scores, and scratch. At the end, results take the place of tiles. */
struct AnyPlaces {
    int books[2], queries, tiles, tile_bytes, units, scores, scratch, scratch_bytes, end;

    __host__ __device__ static int round_up(int n)
    {
        return (n + 15) / 16 * 16;
    }
    __host__ __device__ static int stride(int d)
    {
        return d + 8;
    }
    AnyPlaces() = default;
    __host__ __device__ AnyPlaces(const kvant_cuda_codec &k, const kvant_cuda_codec &v, int rows,
                                  int warps)
    {
        const int d = (int)k.params.head_dim, team = team_of(d), teams = warps / team;
        books[0] = round_up((int)sizeof(AnyRows));
        books[1] = books[0] + AnyBook::bytes(k);
        queries = books[1] + AnyBook::bytes(v);
        tiles = round_up(queries + rows * stride(d) * 2);
        tile_bytes = TILE_TOKENS * stride(d) * 2;
        units = tiles + teams * tile_bytes;
        scores = units + teams * 2 * TILE_TOKENS * 4;
        scratch = scores + (team > 1 ? warps * rows * TILE_TOKENS * 4 : 0);
        scratch_bytes = round_up(any_scratch(k) > any_scratch(v) ? any_scratch(k) : any_scratch(v));
        end = scratch + warps * scratch_bytes;
    }
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
    const int last =
                  w.first_position + column_of<true>(p, w.pair, max(w.pair.n_columns - 1, 0)).token,
              end = p.causal ? min(max(last + 1, 0), w.length) : w.length,
              first = lengths.first_page(w.pair.b),
              pages = max((end + PAGE_TOKENS - 1) / PAGE_TOKENS - first, 0);
    w.first_page = first + (int)((int64_t)pages * w.part / p.splits);
    w.end_page = first + (int)((int64_t)pages * (w.part + 1) / p.splits);
    return w;
}

/* The score, as a binary logarithm, of a row and a token of the sequence. */
KVANT_INLINE float changed_score(const AnyAttentionArgs &p, const AnyRows &rows, int length,
                                 float x, int row, int token)
{
    if (p.softcap_log2 > 0)
        x = soften(x, p.softcap_log2);
    const int position = rows.position[row];
    if (token >= length || (p.causal && token > position) || position - token >= p.window)
        return -INFINITY;
    if (p.mask)
        return x + rows.slope[row] *
                       __half2float(__ushort_as_half(__ldg(p.mask + rows.mask_row[row] + token)));
    return p.max_bias > 0 ? x + rows.slope[row] * (float)(token - position) : x;
}

/* ROWS: number of query rows. */
template <int ROWS> struct AnyBlock {
    const AnyAttentionArgs &p;
    const AnyWork &work;
    const AnyPlaces &places;
    uint8_t *memory;
    AnyRows &rows;
    __half *queries;
    int d, stride, lane, warp, warps, team_warps, team, teams,
        rank;                       /* rank: the warp's index in its team */
    int first_channel, end_channel; /* channels of the warp */

    __device__ AnyBlock(const AnyAttentionArgs &p_, const AnyWork &work_, const AnyPlaces &places_,
                        uint8_t *memory_)
        : p(p_), work(work_), places(places_), memory(memory_),
          rows(*reinterpret_cast<AnyRows *>(memory_)),
          queries(reinterpret_cast<__half *>(memory_ + places_.queries)),
          d((int)p_.keys.params.head_dim), stride(AnyPlaces::stride(d)), lane(threadIdx.x & 31),
          warp(__shfl_sync(FULL, threadIdx.x >> 5, 0)), warps(blockDim.x >> 5),
          team_warps(team_of(d)), team(warp / team_warps), teams(warps / team_warps),
          rank(warp % team_warps)
    {
        const int chunks = (d + 63) / 64, own = (chunks + team_warps - 1) / team_warps;
        first_channel = min(64 * own * rank, d), end_channel = min(first_channel + 64 * own, d);
    }

    /* Loops over channels in memory. Here and at the end this replaces rows in registers, because a
     * block begins with a cold instruction cache and loops have less code. */
    template <class F> KVANT_INLINE void each_channel(F &&use) const
    {
#pragma unroll 4
        for (int channel = lane; channel < d; channel += 32)
            use(channel);
    }

    /* The Hadamard rotation of a row in shared memory, without its signs (rotate.cuh). */
    KVANT_INLINE void rotate_row(float *row, int block, float scale) const
    {
        rolled_for (int distance = 1; distance < block; distance *= 2) {
            __syncwarp();
#pragma unroll 2
            for (int i = lane; i < d / 2; i += 32) {
                float *x = row + 2 * (i & -distance) + (i & (distance - 1)), a = x[0],
                      b = x[distance];
                x[0] = a + b, x[distance] = a - b;
            }
        }
        __syncwarp();
        each_channel([&](int channel) { row[channel] *= scale; });
    }

    KVANT_INLINE static float signed_by(const kvant_cuda_wide_rotation &rotation, float x,
                                        int channel)
    {
        return rotation.block && rotation.signs[channel / 32] >> channel % 32 & 1 ? -x : x;
    }

    /* Loads and transforms queries like load_queries of tile_rows.cuh. loaded() is called when the
     * warp's first row has arrived. Loads that start before that do not wait for pages; loads that
     * start later do. */
    template <class L> KVANT_INLINE void load_queries(int matrix, L &&loaded) const
    {
        const float *center = center_of(p, matrix, work.pair.kv_head, d);
        const kvant_cuda_wide_rotation &rotation = p.keys.any.rotation;
        float *row = reinterpret_cast<float *>(memory + places.tiles +
                                               warp * (places.tile_bytes / team_warps));
        rolled_for (int n = warp; n < ROWS; n += warps) {
            const Column column = column_of<true>(p, work.pair, min(n, work.pair.n_columns - 1));
            const QueryRow at = query_row(p, work.pair.b, column.token);
            float bias = 0;
            each_channel([&](int channel) {
                float x = n < work.pair.n_columns
                              ? load_number(p.q,
                                            queries_through(p, matrix) + at.q +
                                                column.head * p.q_head_stride + channel,
                                            p.type)
                              : 0;
                bias += center ? x * center[channel] : 0;
                x *= p.k_scale ? p.k_scale[work.pair.kv_head * d + channel] : 1;
                row[channel] = signed_by(rotation, x, channel);
            });
            if (n == warp)
                loaded();
            if (rotation.block)
                rotate_row(row, (int)rotation.block, rotation.scale);
            float largest = 0;
            each_channel([&](int channel) { largest = fmaxf(largest, fabsf(row[channel])); });
            const float unit = power_above(largest_of(largest)), inverse = inverse_of(unit);
            bias = warp_sum(bias) * p.scale_log2;
            each_channel([&](int channel) {
                queries[n * stride + channel] = __float2half_rn(row[channel] * inverse);
            });
            if (lane == 0) {
                rows.factor[n] = unit * p.scale_log2;
                rows.bias[n] = bias;
                rows.position[n] = work.first_position + column.token;
                rows.slope[n] = slope_of(p, column.head);
                rows.mask_row[n] = at.row * p.mask_token_stride;
            }
        }
    }

    KVANT_INLINE float *results() const
    {
        return reinterpret_cast<float *>(memory + places.tiles);
    }

    KVANT_INLINE float *part_of(int part) const
    {
        return p.partials + (size_t)(work.item * p.splits + part) * (ROWS * (d + 2));
    }

    KVANT_INLINE void leave() const
    {
        float *to = part_of(work.part);
        for (int i = threadIdx.x; i < work.pair.n_columns * d; i += blockDim.x)
            __stcg(to + i, results()[i]);
        for (int i = threadIdx.x; i < work.pair.n_columns; i += blockDim.x)
            __stcg(reinterpret_cast<float2 *>(to + ROWS * d) + i,
                   make_float2(rows.max[i], rows.sum[i]));
    }

    /* Adds 32 channels of row n of all parts, in the order of parts. */
    KVANT_INLINE void add_parts(int n, int channel) const
    {
        auto scalars = [&](int i) {
            return i < p.splits
                       ? __ldcg(reinterpret_cast<const float2 *>(part_of(i) + ROWS * d) + n)
                       : make_float2(NEVER, 0);
        };
        const float *first = part_of(0) + n * d + min(channel + lane, d - 1);
        float top = NEVER, total = 0, x = 0;
        for (int i = lane; i < p.splits; i += 32)
            top = fmaxf(top, scalars(i).x);
        top = largest_of(top);
        rolled_for (int from = 0; from < p.splits; from += 32) {
            const float2 own = scalars(from + lane);
            const float weight = exp2_fast(own.x - top);
            total += weight * own.y;
#pragma unroll 8
            for (int i = 0; i < min(p.splits - from, 32); i++)
                x += __shfl_sync(FULL, weight, i) *
                     __ldcg(first + (size_t)(from + i) * (ROWS * (d + 2)));
        }
        total = warp_sum(total);
        if (channel + lane < d)
            results()[n * d + channel + lane] = x;
        if (channel + lane == 0)
            rows.max[n] = top, rows.sum[n] = total;
    }

    /* Writes row n like write_output of combine.cuh. */
    KVANT_INLINE void write(int n) const
    {
        const kvant_cuda_wide_rotation &rotation = p.values.any.rotation;
        float *sums = results() + n * d;
        const Column column = column_of<true>(p, work.pair, n);
        const QueryRow row = query_row(p, work.pair.b, column.token);
        const SoftmaxEnd end = end_of<true>(p, column.head, rows.max[n], rows.sum[n]);
        each_channel([&](int channel) { sums[channel] *= end.factor; });
        if (rotation.block)
            rotate_row(sums, (int)rotation.block, rotation.scale);
        each_channel([&](int channel) {
            const int at = work.pair.kv_head * d + channel;
            float x = signed_by(rotation, sums[channel], channel);
            x *= p.v_scale ? p.v_scale[at] : 1;
            x += p.v_center ? end.share * p.v_center[at] : 0;
            store_number(p.out, row.out + column.head * p.out_head_stride + channel, p.out_type, x);
        });
        if (p.lse && lane == 0)
            p.lse[row.row * p.kv_heads * p.heads_a_kv + column.head] = end.lse;
    }

    /* Stores the results of this part in memory, for the part that ends last. */
    KVANT_INLINE void end() const
    {
        if (p.splits > 1) {
            leave();
            if (!ends_last(p.counters + work.item, p.splits, rows.before))
                return;
            const int rows_here = work.pair.n_columns;
            rolled_for (int i = warp; i < rows_here * ((d + 31) / 32); i += warps)
                add_parts(i % rows_here, i / rows_here * 32);
            __syncthreads();
        }
        rolled_for (int n = warp; n < work.pair.n_columns; n += warps)
            write(n);
    }
};

} // namespace kvant
