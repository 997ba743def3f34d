/* chunks.cuh - the kinds of chunk codes, and the constants that kernels need for any kind: warps,
 * tables, tiles. */
#pragma once

#include "hqmq.cuh"
#include "octopus.cuh"

namespace kvant
{

using Octopus2 = Octopus<2>;
using Octopus3 = Octopus<3>;
using Octopus4 = Octopus<4>;

/* X(name in params.h, kind): the kinds that tile kernels unpack, for cases of a switch. */
#if KVANT_PAPERS
#define KVANT_CUDA_CHUNK_KINDS(X)                                                                  \
    X(KVANT_CUDA_OCTOPUS2, Octopus2)                                                               \
    X(KVANT_CUDA_OCTOPUS3, Octopus3)                                                               \
    X(KVANT_CUDA_OCTOPUS4, Octopus4)                                                               \
    X(KVANT_CUDA_HQMQ_S96R4, HqmqS96R4)
#else
#define KVANT_CUDA_CHUNK_KINDS(X)
#endif

/* Warps per multiprocessor, if there is room for them. */
template <class C> __host__ __device__ constexpr int most_warps()
{
    if constexpr (HAS_CHUNKS<C>)
        return C::MOST_WARPS;
    else
        return 8;
}

/* Bytes of a kind's table; 0 for other kinds. */
template <class C, bool LARGE, int D, int TILES> __host__ __device__ constexpr int table_bytes()
{
    if constexpr (HAS_CHUNKS<C>)
        return (C::ENTRIES * C::ENTRY_BYTES * C::template copies<LARGE, D, TILES>() + 15) / 16 * 16;
    else
        return 0;
}

template <class C, int COPIES>
KVANT_INLINE ChunkTable<COPIES> chunk_table(const uint8_t *entries,
                                            const kvant_cuda_directions &book, int lane)
{
    ChunkTable<COPIES> t{ shared_address(entries) + C::ENTRY_BYTES * (lane % COPIES), {}, {} };
    if constexpr (C::CHANNELS == 3)
        unrolled_for (int k = 0; k < 8; k++) {
            const uint32_t level = __half_as_ushort(__float2half_rn(book.norm[k]));
            t.norm_low[k / 4] |= (level & 255) << 8 * (k % 4);
            t.norm_high[k / 4] |= level >> 8 << 8 * (k % 4);
        }
    return t;
}

/* Tiles of an operand: columns for keys, rows for values. */
template <class C, int D> __host__ __device__ constexpr int key_tiles()
{
    if constexpr (HAS_CHUNKS<C>)
        return 2 * ChunkPlaces<C, D>::KEY_STEPS;
    else
        return D / 16;
}

template <class C, int D> __host__ __device__ constexpr int value_tiles()
{
    if constexpr (HAS_CHUNKS<C>)
        return ChunkPlaces<C, D>::VALUE_GROUPS * ChunkPlaces<C, D>::GROUP_TILES;
    else
        return D / 16;
}

/* The channel of a row of a tile of values; D or more: none. */
template <class C, int D> KVANT_INLINE int value_channel(int tile, int row, int far)
{
    if constexpr (HAS_CHUNKS<C>) {
        constexpr int T = ChunkPlaces<C, D>::GROUP_TILES;
        const int at = 2 * (tile % T) + far;
        const int chunk =
            ChunkPlaces<C, D>::GROUP_CHUNKS * (tile / T) + 8 * (at / C::CHANNELS) + row;
        return C::CHANNELS * chunk + at % C::CHANNELS;
    } else
        return 16 * tile + row + 8 * far;
}

} // namespace kvant
