/* further_tiles.cuh - queries through several matrices, for a stretch of pages whose keys have several: a tile for each,
 * and which of them a warp's sums count.
 *
 * The first tile is in shared memory, as if it were the only one. Others are in device memory: most stretches have
 * none, and a warp reads one as it comes to the first page of its matrix. */
#pragma once

#include "query.cuh"

namespace kvant
{

/* The thread block's tile i > 0. */
template <int D, class Q> KVANT_INLINE Q &further_tile(const AttentionArgs &p, int i)
{
    static_assert(sizeof(Q) <= query_tile_bytes(D), "their room");
    return *reinterpret_cast<Q *>(p.further_tiles +
                                  (blockIdx.x * (KVANT_CUDA_MOST_MATRICES - 1) + i - 1) *
                                      query_tile_bytes(D));
}

/* Tile i. */
template <int D, bool MANY, class Q>
KVANT_INLINE const Q &tile_at(const AttentionArgs &p, const Q &first, int i)
{
    return !MANY || i == 0 ? first : further_tile<D, Q>(p, i);
}

/* A tile of queries whose scores a warp's sums count, and what their keys' centre adds to these. None at first. */
template <int TILES> struct Counted {
    int tile;
    float bias[TILES][2];

    KVANT_INLINE void begin()
    {
        tile = -1;
        unrolled_for (int t = 0; t < TILES; t++)
            bias[t][0] = bias[t][1] = 0;
    }
    /* Scores of tile i from here on. */
    template <class A, class Q>
    KVANT_INLINE void change(A (&sums)[TILES], const Q &queries, int i, int lane)
    {
        tile = i;
        unrolled_for (int t = 0; t < TILES; t++)
            unrolled_for (int h = 0; h < 2; h++) {
                const float own = queries.bias[8 * t + 2 * (lane & 3) + h];
                sums[t].max[h] += bias[t][h] - own;
                bias[t][h] = own;
            }
    }
    /* Whole scores. */
    template <class A> KVANT_INLINE void end(A (&sums)[TILES]) const
    {
        unrolled_for (int t = 0; t < TILES; t++)
            unrolled_for (int h = 0; h < 2; h++)
                sums[t].max[h] += bias[t][h];
    }
};

/* What a page's own centre adds to the scores of a lane's columns of tile t. */
struct PageOffsets {
    float x[2];

    /* <q, centre>: a lane multiplies some pairs of channels of four columns, then lanes exchange
     * sums. Instructions come from memory, so the second four are the same code. */
    template <int D>
    KVANT_INLINE void find(const AttentionArgs &p, const Pair &pair, int page, int t, int lane)
    {
        constexpr int N = (D / 2 + 31) / 32;
        const size_t block = pair.b * p.table_stride + page;
        const uint32_t number =
            p.block_centers.transform_ids ? __ldg(p.block_centers.transform_ids + block) : 0;
        const float *phase = p.block_centers.phases + block * D,
                    *start =
                        p.block_centers.start + ((size_t)number * p.kv_heads + pair.kv_head) * D,
                    *q = p.plain_q + pair.b * p.plain_batch_stride +
                         (pair.kv_head * p.heads_a_kv + pair.first_column + 8 * t) *
                             p.plain_head_stride;
        ushort2 channels[N];
        float first[N], second[N], half[2][2] = {};
        unrolled_for (int i = 0; i < N; i++) {
            const int at = lane + 32 * i;
            const bool there = D / 2 % 32 == 0 || at < D / 2;
            channels[i] =
                __ldg(reinterpret_cast<const ushort2 *>(p.block_centers.pairs) + (there ? at : 0));
            const float cosine = there ? load_here(phase + at) : 0,
                        sine = there ? load_here(phase + D / 2 + at) : 0,
                        a = load_here(start + channels[i].x), b = load_here(start + channels[i].y);
            first[i] = a * cosine - b * sine, second[i] = b * cosine + a * sine;
        }
        const int columns = pair.n_columns - 8 * t;
        const uint32_t stride = (uint32_t)p.plain_head_stride;
#pragma unroll 1
        for (int j = 0; j < 2 && 4 * j < columns; j++) {
            float near[4][N], far[4][N], sums[4], own[2];
            unrolled_for (int n = 0; n < 4;
                          n++) { /* no branches: loads are on their way together */
                const float *row = q + (size_t)(uint32_t)min(4 * j + n, columns - 1) * stride;
                unrolled_for (int i = 0; i < N; i++)
                    near[n][i] = load_here(row + channels[i].x),
                    far[n][i] = load_here(row + channels[i].y);
            }
            unrolled_for (int n = 0; n < 4; n++) {
                sums[n] = 0;
                unrolled_for (int i = 0; i < N; i++)
                    sums[n] += near[n][i] * first[i] + far[n][i] * second[i];
                sums[n] = 4 * j + n < columns ? sums[n] : 0;
            }
            of_neighbours(sums, lane, own);
            unrolled_for (int h = 0; h < 2; h++)
                half[1][h] = own[h], half[0][h] = j == 0 ? own[h] : half[0][h];
        }
        if (columns <= 4)
            half[1][0] = half[1][1] = 0;
        take_own(half, lane);
    }
    /* The sums over two lanes of columns 2 (lane mod 2) and + 1 of four. */
    KVANT_INLINE void of_neighbours(const float (&sums)[4], int lane, float (&own)[2])
    {
        unrolled_for (int h = 0; h < 2; h++)
            own[h] = (lane & 1 ? sums[2 + h] : sums[h]) +
                     __shfl_xor_sync(FULL, lane & 1 ? sums[h] : sums[2 + h], 1);
    }
    /* The sums over all lanes of columns 2 (lane mod 4) and + 1. */
    KVANT_INLINE void take_own(const float (&half)[2][2], int lane)
    {
        unrolled_for (int h = 0; h < 2; h++) {
            const float own = lane & 2 ? half[1][h] : half[0][h],
                        other = lane & 2 ? half[0][h] : half[1][h];
            x[h] = own + __shfl_xor_sync(FULL, other, 2);
#pragma unroll 1
            for (int k = 4; k < 32; k *= 2)
                x[h] += __shfl_xor_sync(FULL, x[h], k);
        }
    }
    /* Before the page's scores, which take longer than the way to memory, where there are registers for it. */
    template <int D, bool GENERAL>
    KVANT_INLINE void ask(const AttentionArgs &p, const Pair &pair, int page, int t, int lane)
    {
        if (!GENERAL && p.block_centers.start) {
            find<D>(p, pair, page, t, lane);
            return;
        }
        const float *from = p.page_offsets ? offsets_of(p, pair, page) : nullptr;
        unrolled_for (int h = 0; h < 2; h++)
            x[h] = from ? page_offset(pair, from, 8 * t + 2 * (lane & 3) + h) : 0;
    }
    template <int N> KVANT_INLINE void add(const AttentionArgs &p, float (&s)[N][4]) const
    {
        unrolled_for (int i = 0; i < N; i++)
            unrolled_for (int k = 0; k < 4; k++)
                s[i][k] = fmaf(x[k % 2], p.scale_log2, s[i][k]);
    }
};

/* Fills the tiles of a stretch's queries, whose first one's rows were loaded; the same code for all of them, as
 * instructions come from memory, too. The caller synchronises before and after. */
template <class C, int D, bool MANY, class R, class Q>
KVANT_INLINE void prepare_tiles(const AttentionArgs &p, const Pair &pair, const Matrices &matrices,
                                int first_position, Q &first, R &rows, int warp, int lane)
{
    Q *queries = &first;
    uint32_t rest = MANY ? matrices.used & (matrices.used - 1) : 0;
#pragma unroll 1
    for (int i = 1;; i++, rest &= rest - 1) {
        rows.template prepare<C>(*queries, p, pair, first_position, warp, lane);
        if (!rest)
            break;
        rows.load(p, pair, __ffs(rest) - 1, warp, lane);
        queries = &further_tile<D, Q>(p, i);
    }
}

} // namespace kvant
