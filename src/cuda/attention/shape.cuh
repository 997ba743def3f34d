/* shape.cuh - how many warps an attention kernel has, and what lies in its shared memory:
 * tables, slots of the ring, queries, and the sums of warps. */
#pragma once

#include "combine.cuh"
#include "open.cuh"
#include "values.cuh"

#include <type_traits>

namespace kvant
{

/* Bytes of a slot for a page's metadata. Symmetric codes need half of them. */
template <class C, int D> constexpr int metadata_bytes()
{
    if constexpr (C::GROUP == KVANT_CUDA_GROUP_TOKEN)
        return PAGE_TOKENS * (HAS_ZEROS<C> ? 4 : 2);
    else
        return PAGE_TOKENS * D / group_step<C, D>() * 4;
}

/* Pairs that have general kernels alone. Of groups those in use have more: tokens of one role,
 * channels of the other. */
template <class KC, class VC> __host__ __device__ constexpr bool is_rare()
{
    return KC::GROUP != KVANT_CUDA_GROUP_TOKEN && (KC::BITS >= 4 || KC::GROUP == VC::GROUP);
}

template <class C, int D> __host__ __device__ constexpr int page_code_bytes(bool keys)
{
    if constexpr (HAS_CHUNKS<C>)
        return chunk_code_bytes(C::BITS, ChunkPlaces<C, D>::CHUNKS, keys);
    else
        return keys ? code_bytes(C::BITS, 4, D / 16) : code_bytes(C::BITS, D / 16, 4);
}

template <class KC, class VC> __host__ __device__ constexpr bool one_table()
{
    if constexpr (std::is_same<KC, VC>::value && HAS_CHUNKS<KC>)
        return KC::SAME_TABLE;
    else
        return std::is_same<KC, VC>::value && HAS_TRELLIS<KC>;
}

/* Shared memory per block: compute capability 9.0 and 10.0, and where two blocks share a
 * multiprocessor there; 8.6, 8.9 and 12.0. */
constexpr int LARGE_BYTES = 227 * 1024, HALF_BYTES = 113 * 1024, SMALL_BYTES = 99 * 1024;

/* Warps for slots of so many bytes in so much room. With look-ups of chunks or a trellis to do, one
 * slot a warp will do. How many warps are best was measured where there is much room. */
template <class KC, class VC, int D, bool LARGE, int TILES>
__host__ __device__ constexpr int warps_for(int slot, int room)
{
    constexpr bool GROUPS =
        KC::GROUP != KVANT_CUDA_GROUP_TOKEN || VC::GROUP != KVANT_CUDA_GROUP_TOKEN;
    constexpr bool CHUNKS = HAS_CHUNKS<KC> || HAS_CHUNKS<VC>;
    /* registers are what 12 warps have too few of for keys of 4 bits, and 4 warps leave most of the
     * machine idle */
    constexpr bool EIGHT =
        TILES > 1 || (GROUPS && is_rare<KC, VC>()) ||
        ((HAS_TRELLIS<KC> || HAS_WIDE_BOOK<KC>) && (D > 128 || (D == 128 && KC::BITS >= 4)));
    for (int warps = most_warps<KC>(); CHUNKS && LARGE && TILES == 1 && D <= 128 && warps >= 8;
         warps -= 4)
        if (warps * slot <= room)
            return warps;
    if (!EIGHT && D <= 128 && !CHUNKS &&
        slot <= (KC::BIASED || VC::BIASED || GROUPS ? 9000 : 7500) && 12 * slot <= room)
        return 12;
    const int least =
        CHUNKS || EIGHT || !LARGE ? room : 152000 / 2; /* without tables two slots a warp pay */
    for (int warps = 8; warps > 1; warps = LARGE ? warps / 2 : warps - 1)
        if (warps * slot <= least)
            return warps;
    return LARGE ? 2 : 1;
}

template <class KC, class VC, int D> __host__ __device__ constexpr int most_tiles()
{
    return D <= 128 && KC::GROUP == KVANT_CUDA_GROUP_TOKEN && VC::GROUP == KVANT_CUDA_GROUP_TOKEN
               ? 2
               : 1;
}

/* Threads and memory of a kernel. One block per multiprocessor, because ending a pair costs less
 * with fewer blocks. LARGE shapes have more slots, or 12 warps where pages are so small that
 * unpacking limits the speed. */
template <class KC, class VC, int D, bool LARGE, int TILES_, int BLOCKS_> struct Shape {
    static constexpr int TILES = TILES_, COLUMNS = TILE_COLUMNS * TILES, BLOCKS = BLOCKS_;
    static constexpr int BYTES_A_BLOCK = !LARGE       ? SMALL_BYTES
                                         : BLOCKS > 1 ? HALF_BYTES
                                                      : LARGE_BYTES;
    /* Codebook keys are multiplied as bytes. With two tiles, bytes need too many registers: then
     * as halves. */
    static constexpr bool BYTES = KC::BIASED && TILES == 1;
    using Query = QueryTile<D, COLUMNS, BYTES>;
    /* Two tiles: queries are read from shared memory for every page, which is faster for uniform
     * codes (100 instead of 104 us for int-4 at 8 x 32 x 8 x 128 x 32768) and slower for others. */
    static constexpr bool RELOAD = TILES > 1 && HAS_ZEROS<KC>;
    static constexpr int K_CODES = page_code_bytes<KC, D>(true),
                         V_CODES = page_code_bytes<VC, D>(false);
    static constexpr int K_BYTES = K_CODES + metadata_bytes<KC, D>(),
                         V_BYTES = V_CODES + metadata_bytes<VC, D>();
    static constexpr int SUMS =
        COLUMNS * (D + 4) * 4; /* a slot also takes the warp's sums when a pair ends */
    static constexpr int SLOT =
        ((K_BYTES + V_BYTES > SUMS ? K_BYTES + V_BYTES : SUMS) + 127) / 128 * 128;
    /* Tables of directions of chunks, or of pairs of levels of a trellis. */
    static constexpr bool ONE_TABLE = one_table<KC, VC>();
    static constexpr int K_TABLE = table_bytes<KC, LARGE, D, TILES>() +
                                   level_bytes<KC>(level_copies<KC, LARGE>()) +
                                   wide_book_bytes<KC>(),
                         V_TABLE = ONE_TABLE ? 0
                                             : table_bytes<VC, LARGE, D, TILES>() +
                                                   level_bytes<VC>(level_copies<VC, LARGE>());
    static constexpr int TABLES = K_TABLE + V_TABLE;
    /* Shared memory that is left for slots. */
    static constexpr int OTHERS =
        TABLES + (int)sizeof(Query) + (int)sizeof(WarpResults<12, COLUMNS>) + 1024;
    static constexpr int ROOM = !LARGE || (TABLES && TILES == 1)
                                    ? BYTES_A_BLOCK - OTHERS
                                    : 217000 - TABLES - (TILES - 1) * 5000;
    static constexpr int WARPS = warps_for<KC, VC, D, LARGE, TILES>(SLOT, ROOM *BLOCKS) / BLOCKS,
                         FIT = ROOM / (WARPS * SLOT), STAGES = FIT < 4 ? FIT : 4;
    /* With one slot a warp, the next K page comes while the V page is worked on. */
    static constexpr bool SPLIT = STAGES == 1;
    /* Values of open pages go through the slot of the warp's last page. Rows of chunks have no
     * order that operands of matrices could have. */
    static constexpr bool STAGED = !HAS_CHUNKS<VC> && OpenRows<D>::BYTES <= SLOT;
};

template <class S> struct SharedMemory {
    alignas(128) uint8_t tables[S::TABLES ? S::TABLES : 16]; /* chunks.cuh wants them first */
    alignas(128) uint8_t slots[S::WARPS][S::STAGES][S::SLOT];
    uint64_t barriers[S::WARPS][S::STAGES * (S::SPLIT ? 2 : 1)];
    int32_t entries[S::WARPS][S::STAGES];
    uint8_t matrices[S::WARPS][S::STAGES];
    typename S::Query queries;
    WarpResults<S::WARPS, S::COLUMNS> results;
};

} // namespace kvant
