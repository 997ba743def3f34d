/* further_tiles.cuh - queries through several matrices, for a stretch of pages whose keys have
 * several: a tile for each, and which of them a warp's sums count.
 *
 * The first tile is in shared memory, as if it were the only one. Others are in device memory:
 * most stretches have none, and a warp reads one as it comes to the first page of its matrix. */
#pragma once

#include "query.cuh"

namespace kvant
{

/* The thread block's tile i > 0. */
template <int D, class Q> KVANT_INLINE Q &further_tile(const AttentionArgs &p, int i)
{
    static_assert(sizeof(Q) <= query_tile_bytes(D), "their room");
    return *reinterpret_cast<Q *>(p.further_tiles +
                                  ((i - 1) * gridDim.x + blockIdx.x) * query_tile_bytes(D));
}

/* Tile i. */
template <int D, bool MANY, class Q>
KVANT_INLINE const Q &tile_at(const AttentionArgs &p, const Q &first, int i)
{
    return !MANY || i == 0 ? first : further_tile<D, Q>(p, i);
}

/* A tile of queries whose scores a warp's sums count, and what their keys' centre adds to these.
 * None at first. */
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

/* Fills the tiles of a stretch's queries, whose first one's rows were loaded; the same code for
 * all of them, as instructions come from memory, too. The caller synchronises before and after. */
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
