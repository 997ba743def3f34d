/* decode_polar.cuh - tiles of polar codes (format.md, "Polar codes"): a number is the row's length times a cosine or a
 * sine for each list of the tree.
 *
 * Codes come into their places in the tile first. Then a lane takes 16 channels of a token: the lists above them one
 * after the other, the last four lists from registers. A row's lanes have read its codes before one of them writes. */
#pragma once

#include "decode_planes.cuh"

namespace kvant
{

/* The lane's 16 channels: those below a node of list 4. */
struct PolarLeaves {
    const kvant_general &g;
    const uint16_t *codes; /* of the token */
    int node;

    KVANT_INLINE int pairs(int list) const
    {
        return (((int)g.head_dim - 1 >> list) + 1) / 2;
    }

    KVANT_INLINE float turned(float radius, int list, int pair, uint32_t code, bool sine) const
    {
        return radius * __ldg(general_polar_book(&g, list, pair == pairs(list) - 1) + (sine ? 16 : 0) + code);
    }

    /* The product over the lists above. An odd node has no pair. */
    KVANT_INLINE float radius() const
    {
        float radius = g.view.polar.sqrt_dim;
        int end = (int)g.head_dim - 1; /* of the codes of a list */
        for (int list = (int)g.view.polar.depth - 1; list >= 4; list--) {
            const int at = node >> (list - 4), pair = at >> 1;
            end -= pairs(list);
            if (pair < pairs(list))
                radius = turned(radius, list, pair, codes[end + pair], at & 1);
        }
        return radius;
    }

    /* A list's nodes from those of the list above it, N of them, in place. first: the list's first code. */
    template <int N> KVANT_INLINE void split(float (&x)[16], int list, const uint16_t *first) const
    {
        uint16_t own[N];
        unrolled_for (int i = 0; i < N; i++)
            own[i] = first[N * node + i];
        unrolled_for (int i = N - 1; i >= 0; i--) {
            const float above = x[i];
            x[2 * i + 1] = turned(above, list, N * node + i, own[i], true);
            x[2 * i] = turned(above, list, N * node + i, own[i], false);
        }
    }

    KVANT_INLINE void numbers(float (&x)[16]) const
    {
        const int d = (int)g.head_dim; /* a multiple of 16: the last four lists have no odd node */
        x[0] = radius();
        split<1>(x, 3, codes + d / 2 + d / 4 + d / 8);
        split<2>(x, 2, codes + d / 2 + d / 4);
        split<4>(x, 1, codes + d / 2);
        split<8>(x, 0, codes);
    }
};

__device__ static __noinline__ void decode_leaves(const kvant_general &g, const DecodedTile tile)
{
    const uint16_t *scales = reinterpret_cast<const uint16_t *>(tile.page + g.metadata) + tile.first;
    int lanes = 1; /* of a token */
    while (16 * lanes < tile.d)
        lanes *= 2;
    const int tokens = 32 / lanes;
#pragma unroll 1
    for (int first = tokens * tile.rank; first < TILE_TOKENS; first += tokens * tile.team_warps) {
        const int token = first + tile.lane / lanes, node = tile.lane % lanes;
        const bool there = 16 * node < tile.d;
        const float stored = token < tile.valid ? half_at(scales, token) : 0, unit = fmaxf(power_above(stored), LEAST_UNIT),
                    scale = stored * inverse_of(unit);
        __half *row = tile.numbers() + token * tile.stride;
        float x[16];
        if (there)
            PolarLeaves{ g, reinterpret_cast<const uint16_t *>(row), node }.numbers(x);
        __syncwarp();
        if (node == 0)
            tile.units()[token] = unit;
        unrolled_for (int i = 0; i < 16; i += 8)
            if (there)
                *reinterpret_cast<uint4 *>(row + 16 * node + i) =
                    make_uint4(pack_half2(scale * x[i], scale * x[i + 1]), pack_half2(scale * x[i + 2], scale * x[i + 3]),
                               pack_half2(scale * x[i + 4], scale * x[i + 5]), pack_half2(scale * x[i + 6], scale * x[i + 7]));
        __syncwarp();
    }
}

template <bool KEYS> KVANT_INLINE void decode_polar(const kvant_general &g, const DecodedTile &tile)
{
    place_codes<KEYS, 4>((int)g.view.polar.bits, tile);
    decode_leaves(g, tile);
}

} // namespace kvant
