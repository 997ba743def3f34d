/* query.cuh - prepares queries: rotates them, rounds them to 16 bits and lays them out as MMA
 * operands.
 *
 * A row's numbers are divided by a power of two above the largest, so fp16's range is never a
 * limit. The factor returns in fp32 with the softmax scale.
 *
 * Look-ups of codebook keys give bytes. With 8 columns these keys are multiplied as bytes, and a
 * number of the query is 16 bits of fixed point in two bytes. With 16 columns bytes would need more
 * registers than there are. */
#pragma once

#include "../papers/chunks.cuh"
#include "../rotate.cuh"
#include "../trellis/trellis.cuh"
#include "schedule.cuh"

namespace kvant
{

constexpr float FIXED_ONE = 32767;
constexpr float LOG2_E = 1.44269504088896341f;

/* BYTES: for products of bytes. */
template <int D, int COLUMNS_, bool BYTES_> struct QueryTile {
    static constexpr int COLUMNS = COLUMNS_;
    static constexpr bool BYTES = BYTES_;
    static constexpr int STRIDE = D + 8; /* keeps the 8 columns of an operand in different banks */
    alignas(16) __half rows[COLUMNS * STRIDE];
    /* rows * FIXED_ONE; of keys with trellis codes as operands (put_operand) */
    alignas(16) int16_t fixed[BYTES ? COLUMNS * STRIDE : 8];
    float factor[COLUMNS];            /* score (log2) = factor * <rows, codes> ... */
    float sum[COLUMNS];               /* ... + sum of the row * factor * zero point */
    float bias[COLUMNS];              /* what the keys' centre adds to all of these scores */
    float group_sum[COLUMNS][D / 16]; /* of group_step channels each, for kinds with such groups */
    /* Used by general kernels only (scores.cuh). */
    int position[COLUMNS];
    float slope[COLUMNS];     /* of the head, times log2(e) */
    size_t mask_row[COLUMNS]; /* where the token's row of the mask begins */
};

/* The matrices of a stretch's keys, a bit each, and the tiles of queries through them
 * (further_tiles.cuh). */
struct Matrices {
    uint32_t used;

    KVANT_INLINE int first() const
    {
        return __ffs(used) - 1;
    }
    /* Which of the tiles has matrix m. */
    KVANT_INLINE int tile_of(int m) const
    {
        return __popc(used & ((1u << m) - 1));
    }
};

/* The number of a page's matrix and centre. */
KVANT_INLINE int matrix_of(const AttentionArgs &p, int b, int page)
{
    return p.matrices ? __ldg(p.matrices + b * p.table_stride + page) : 0;
}

/* The first page from this one on, below end, whose keys have another number. By a whole warp. */
KVANT_INLINE int end_of_run(const AttentionArgs &p, int b, int page, int end, int lane)
{
    const int own = page < end ? matrix_of(p, b, page) : 0;
#pragma unroll 1
    for (; p.matrices && page < end; page += 32) {
        const uint32_t other =
            __ballot_sync(FULL, page + lane < end && matrix_of(p, b, page + lane) != own);
        if (other)
            return page + __ffs(other) - 1;
    }
    return end;
}

/* Where a page's offsets (cuda.h) for a pair's columns begin. */
KVANT_INLINE size_t offsets_at(const AttentionArgs &p, const Pair &pair, int page)
{
    const size_t at = ((size_t)pair.b * p.kv_heads + pair.kv_head) * p.table_stride + page;
    return at * (p.query_tokens * p.heads_a_kv) + pair.first_column;
}

/* The same place in memory. Valid if an earlier launch has computed the offsets. */
KVANT_INLINE const float *offsets_of(const AttentionArgs &p, const Pair &pair, int page)
{
    return p.page_offsets + offsets_at(p, pair, page);
}

/* The offset of column n, which the caller multiplies by scale_log2. The load is issued in this
 * place. */
KVANT_INLINE float page_offset(const Pair &pair, const float *offsets, int n)
{
    return n < pair.n_columns ? load_here(offsets + n) : 0;
}

/* The offset at which the queries through a matrix begin. */
KVANT_INLINE size_t queries_through(const AttentionArgs &p, int matrix)
{
    return p.q_ids[matrix] * p.q_matrix_stride;
}

/* The address of the keys' centre; NULL if there is none. */
KVANT_INLINE const float *center_of(const AttentionArgs &p, int matrix, int kv_head, int d)
{
    return p.k_center ? p.k_center + ((size_t)matrix * p.kv_heads + kv_head) * d : nullptr;
}

/* The lane's numbers of it; zeros if there is none. */
template <int D>
KVANT_INLINE Row<D> load_center(const AttentionArgs &p, int matrix, int kv_head, int lane)
{
    const float *from = center_of(p, matrix, kv_head, D);
    Row<D> center;
    center.each(lane, [&](float &x, int channel) { x = from ? __ldg(from + channel) : 0; });
    return center;
}

/* The number that the centre adds to all scores of a row. */
template <int D>
KVANT_INLINE float bias_of(const AttentionArgs &p, const Row<D> &row, const Row<D> &center)
{
    float sum = 0;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        sum = fmaf(row.x[j], center.x[j], sum);
    return p.k_center ? warp_sum(sum) * p.scale_log2 : 0;
}

/* Puts a number of column n where the lane that multiplies it reads it. For each pair of column
 * tiles, a lane has 16 bytes: the lower bytes of the first tile's numbers, those of the second
 * tile, then the upper bytes of both. */
KVANT_INLINE void put_operand(int16_t *operands, int n, int channel, int x)
{
    uint8_t *at = reinterpret_cast<uint8_t *>(operands) +
                  16 * (channel / 32 * 32 + 4 * n + channel % 8 / 2) + channel / 16 % 2 * 4 +
                  channel / 8 % 2 * 2 + channel % 2;
    at[0] = (uint8_t)x;
    at[8] = (uint8_t)(x >> 8);
}

/* center: of keys, or NULL where a kernel knows none. */
template <class C, int D, class Q>
KVANT_INLINE void prepare_row(Q &tile, const AttentionArgs &p, int n, Row<D> &row,
                              const Row<D> *center, int kv_head, int lane)
{
    const float bias = center ? bias_of<D>(p, row, *center) : 0;
    if (p.k_scale)
        row.each(lane, [&](float &x, int channel) { x *= p.k_scale[kv_head * D + channel]; });
    rotate(row, p.k_rotation, lane);
    float largest = 0, sum = 0;
    row.each(lane, [&](float &x, int) { largest = fmaxf(largest, fabsf(x)); });
    float unit = power_above(largest_of(largest)), inverse = __frcp_rn(unit);
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        __half h = __float2half_rn(row.x[j] * inverse);
        tile.rows[n * Q::STRIDE + lane + 32 * j] = h; /* for open pages, whatever the kind */
        if constexpr (Q::BYTES) {
            int v = __float2int_rn(row.x[j] * inverse * FIXED_ONE);
            if constexpr (HAS_TRELLIS<C>)
                put_operand(tile.fixed, n, lane + 32 * j, v);
            else
                tile.fixed[n * Q::STRIDE + lane + 32 * j] = (int16_t)v;
            sum += (float)v;
        } else
            sum += __half2float(h);
        if constexpr (C::GROUP == KVANT_CUDA_GROUP_CHANNELS) {
            constexpr int STEP = group_step<C, D>();
            float of_group = __half2float(h);
            unrolled_for (int k = 1; k < STEP; k *= 2)
                of_group += __shfl_xor_sync(FULL, of_group, k);
            if (lane % STEP == 0)
                tile.group_sum[n][(32 * j + lane) / STEP] = of_group;
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        tile.factor[n] = unit * p.scale_log2;
        tile.sum[n] = sum;
        if (center)
            tile.bias[n] = bias;
    }
}

/* ALiBi as in Press et al. 2022 (kvant/attention.h), times log2(e). */
KVANT_INLINE float slope_of(const AttentionArgs &p, int head)
{
    if (p.max_bias == 0)
        return LOG2_E;
    const int n_heads = p.kv_heads * p.heads_a_kv, n = 1 << (31 - __clz(n_heads));
    const float steps =
        head < n ? (float)(head + 1) / (float)n : (float)(2 * (head - n) + 1) / (float)(2 * n);
    return LOG2_E * exp2f(-p.max_bias * steps);
}

/* A warp's query rows of a pair through one matrix, loaded ahead of use: columns n, n + WARPS,
 * ... MANY: of the kernel. */
template <int D, int WARPS, bool GENERAL, int COLUMNS, bool MANY> struct QueryRows {
    static constexpr int N = (COLUMNS + WARPS - 1) / WARPS;
    Row<D> rows[N], center;

    /* Columns that a pair does not have become zeros: their results are never read, but NaNs would
     * make every page compute its weights twice. */
    KVANT_INLINE void load(const AttentionArgs &p, const Pair &pair, int matrix, int warp, int lane)
    {
        if (MANY)
            center = load_center<D>(p, matrix, pair.kv_head, lane);
        unrolled_for (int i = 0; i < N; i++) {
            const int n = warp + i * WARPS;
            if (n < pair.n_columns) {
                const Column column = column_of<GENERAL>(p, pair, n);
                const size_t at = query_row(p, pair.b, column.token).q;
                rows[i] = load_row<D>(p.q,
                                      (MANY ? queries_through(p, matrix) : 0) + at +
                                          column.head * p.q_head_stride,
                                      p.type, lane);
            } else
                rows[i].each(lane, [](float &x, int) { x = 0; });
        }
    }

    /* Fills the tile; the caller synchronises before and after. first_position: of the sequence's
     * query tokens. */
    template <class C, class Q>
    KVANT_INLINE void prepare(Q &tile, const AttentionArgs &p, const Pair &pair, int first_position,
                              int warp, int lane)
    {
        unrolled_for (int i = 0; i < N; i++) {
            const int n = warp + i * WARPS;
            if (n >= COLUMNS)
                break;
            prepare_row<C, D>(tile, p, n, rows[i], MANY ? &center : nullptr, pair.kv_head, lane);
            if (GENERAL && lane == 0) {
                const Column column = column_of<GENERAL>(p, pair, min(n, pair.n_columns - 1));
                tile.position[n] = first_position + column.token;
                tile.slope[n] = slope_of(p, column.head);
                tile.mask_row[n] = query_row(p, pair.b, column.token).row * p.mask_token_stride;
            }
        }
    }
};

/* The lane's operand registers of one tile of 8 columns. Halves: of column lane / 4, channels 2
 * (lane mod 4) and the next one of each tile, and the two channels 8 further. */
template <int D> KVANT_INLINE void load_pairs(const void *rows, uint32_t (&q)[D / 16][2], int lane)
{
    constexpr int STRIDE = D + 8;
    const uint16_t *row =
        static_cast<const uint16_t *>(rows) + (lane >> 2) * STRIDE + 2 * (lane & 3);
    unrolled_for (int ct = 0; ct < D / 16; ct++) {
        q[ct][0] = *reinterpret_cast<const uint32_t *>(row + 16 * ct);
        q[ct][1] = *reinterpret_cast<const uint32_t *>(row + 16 * ct + 8);
    }
}

/* Bytes of two tiles t and t + 1. The lower bytes of their 8 numbers are in q[t], the upper bytes
 * in q[t + 1], four in a register. Their order is the order of the kind's look-ups. */
template <class C, int D>
KVANT_INLINE void load_bytes(const int16_t *fixed, uint32_t (&q)[D / 16][2], int lane)
{
    if constexpr (HAS_TRELLIS<C>) {
        unrolled_for (int t = 0; t < D / 16; t += 2) {
            const uint4 x = reinterpret_cast<const uint4 *>(fixed)[16 * t + lane];
            q[t][0] = x.x, q[t][1] = x.y, q[t + 1][0] = x.z, q[t + 1][1] = x.w;
        }
        return;
    }
    load_pairs<D>(fixed, q, lane);
    unrolled_for (int t = 0; t < D / 16; t += 2) {
        uint32_t low[2], high[2];
        if constexpr (C::ORDER == Order::COLUMNS_AND_8) {
            unrolled_for (int i = 0; i < 2; i++) {
                low[i] = prmt(q[t + i][0], q[t + i][1], 0x6240);
                high[i] = prmt(q[t + i][0], q[t + i][1], 0x7351);
            }
        } else {
            unrolled_for (int i = 0; i < 2; i++) { /* columns c, then c + 1, of both tiles */
                uint32_t near = prmt(q[t][0], q[t][1], i ? 0x7362 : 0x5140),
                         next = prmt(q[t + 1][0], q[t + 1][1], i ? 0x7362 : 0x5140);
                low[i] = prmt(near, next, 0x5410);
                high[i] = prmt(near, next, 0x7632);
            }
        }
        q[t][0] = low[0], q[t][1] = low[1];
        q[t + 1][0] = high[0], q[t + 1][1] = high[1];
    }
}

/* Chunks of channels. A lane's columns of tiles 2i and 2i + 1 have chunk 8i + 2 (lane mod 4) and
 * the next one. Beyond the last channel they are zeros, so any result of a look-up will do
 * there. */
template <class C, int D>
KVANT_INLINE void load_chunks(const __half *rows, uint32_t (&q)[key_tiles<C, D>()][2], int lane)
{
    constexpr int STRIDE = D + 8;
    const uint16_t *row = reinterpret_cast<const uint16_t *>(rows) + (lane >> 2) * STRIDE;
    unrolled_for (int t = 0; t < key_tiles<C, D>(); t++) {
        const int channel = C::CHANNELS * (8 * (t / 2) + 2 * (lane & 3) + t % 2);
        uint32_t x[4];
        unrolled_for (int k = 0; k < 4; k++)
            x[k] = k < C::CHANNELS && channel + k < D ? row[channel + k] : 0;
        q[t][0] = x[0] | x[1] << 16;
        q[t][1] = x[2] | x[3] << 16;
    }
}

/* Loads the operands of the 8 columns from 8 * t on. */
template <class C, int D, class Q>
KVANT_INLINE void load_operands(const Q &tile, int t, uint32_t (&q)[key_tiles<C, D>()][2], int lane)
{
    const int first = t * (int)TILE_COLUMNS * Q::STRIDE;
    if constexpr (HAS_CHUNKS<C>) {
        load_chunks<C, D>(tile.rows + first, q, lane);
    } else if constexpr (!Q::BYTES) {
        load_pairs<D>(tile.rows + first, q, lane);
        reorder<C::ORDER, D / 16>(q);
    } else
        load_bytes<C, D>(tile.fixed + first, q, lane);
}

} // namespace kvant
