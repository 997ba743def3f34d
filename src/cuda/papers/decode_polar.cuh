/* decode_polar.cuh - tiles of polar codes (format.md, "Polar codes"). A number is the row's length
 * times a cosine or a sine for each list of the tree.
 *
 * First, codes are put in their places in the tile. Then a lane decodes 16 channels of a token: it
 * reads the lists above them one after another, and the last four lists from registers. All lanes
 * of a row read its codes before any of them writes. */
#pragma once

#include "../any/decode_planes.cuh"

namespace kvant
{

/* The 16 channels of a lane, which lie below one node of list 4. */
struct PolarLeaves {
    const kvant_general &g;
    int node;
    /* cosines, then sines, of the last four lists: for all pairs of the lane but the last, and for
     * the last pair */
    const float *books[4], *ends[4];

    KVANT_INLINE PolarLeaves(const kvant_general &g_, int node_) : g(g_), node(node_)
    {
        unrolled_for (int list = 0; list < 4; list++) {
            books[list] = general_polar_book(&g, list, false);
            ends[list] = general_polar_book(&g, list, 16 * (node + 1) == (int)g.head_dim);
            keep(books[list]), keep(ends[list]);
        }
    }

    KVANT_INLINE int pairs(int list) const
    {
        return (((int)g.head_dim - 1 >> list) + 1) / 2;
    }

    /* The product over the upper lists. codes: the codes of the token. An odd node has no pair. */
    KVANT_INLINE float radius(const uint16_t *codes) const
    {
        float radius = g.view.polar.sqrt_dim;
        int end = (int)g.head_dim - 1; /* the end of the list's codes */
        for (int list = (int)g.view.polar.depth - 1; list >= 4; list--) {
            const int at = node >> (list - 4), pair = at >> 1, n = pairs(list);
            end -= n;
            if (pair < n)
                radius *= __ldg(general_polar_book(&g, list, pair == n - 1) + (at & 1 ? 16 : 0) +
                                codes[end + pair]);
        }
        return radius;
    }

    /* Computes the N nodes of a list from the nodes of the list above, in place. first: the list's
     * first code. */
    template <int N> KVANT_INLINE void split(float (&x)[16], int list, const uint16_t *first) const
    {
        uint32_t words[(N + 1) / 2];
        if constexpr (N == 1)
            words[0] = first[node];
        else
            unrolled_for (int i = 0; i < N / 2; i++)
                words[i] = reinterpret_cast<const uint32_t *>(first + N * node)[i];
        unrolled_for (int i = N - 1; i >= 0; i--) {
            const float *book = (i == N - 1 ? ends : books)[list] +
                                (words[i / 2] >> 16 * (i % 2) & 0xffffu),
                        above = x[i];
            x[2 * i + 1] = above * __ldg(book + 16);
            x[2 * i] = above * __ldg(book);
        }
    }

    KVANT_INLINE void numbers(float (&x)[16], const uint16_t *codes) const
    {
        /* a multiple of 16, so the last four lists have no odd node */
        const int d = (int)g.head_dim;
        x[0] = radius(codes);
        split<1>(x, 3, codes + d / 2 + d / 4 + d / 8);
        split<2>(x, 2, codes + d / 2 + d / 4);
        split<4>(x, 1, codes + d / 2);
        split<8>(x, 0, codes);
    }
};

__device__ static __noinline__ void decode_leaves(const kvant_general &g, const DecodedTile tile)
{
    const uint16_t *scales =
        reinterpret_cast<const uint16_t *>(tile.page + g.metadata) + tile.first;
    int lanes = 1; /* lanes per token */
    while (16 * lanes < tile.d)
        lanes *= 2;
    const int tokens = 32 / lanes, node = tile.lane % lanes;
    const bool there = 16 * node < tile.d;
    const PolarLeaves leaves(g, node);
#pragma unroll 1
    for (int first = tokens * tile.rank; first < TILE_TOKENS; first += tokens * tile.team_warps) {
        const int token = first + tile.lane / lanes;
        const float stored = token < tile.valid ? half_at(scales, token) : 0,
                    unit = fmaxf(power_above(stored), LEAST_UNIT),
                    scale = stored * inverse_of(unit);
        __half *row = tile.numbers() + token * tile.stride;
        float x[16];
        if (there)
            leaves.numbers(x, reinterpret_cast<const uint16_t *>(row));
        __syncwarp();
        if (node == 0)
            tile.units()[token] = unit;
        unrolled_for (int i = 0; i < 16; i += 8)
            if (there)
                *reinterpret_cast<uint4 *>(row + 16 * node + i) =
                    make_uint4(pack_half2(scale * x[i], scale * x[i + 1]),
                               pack_half2(scale * x[i + 2], scale * x[i + 3]),
                               pack_half2(scale * x[i + 4], scale * x[i + 5]),
                               pack_half2(scale * x[i + 6], scale * x[i + 7]));
        __syncwarp();
    }
}

template <bool KEYS> KVANT_INLINE void decode_polar(const kvant_general &g, const DecodedTile &tile)
{
    place_codes<KEYS, 4>((int)g.view.polar.bits, tile);
    decode_leaves(g, tile);
}

} // namespace kvant
