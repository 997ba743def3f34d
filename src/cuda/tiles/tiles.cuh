/* tiles.cuh - attention of several query tokens over compressed pages, in one pass.
 *
 * A thread block processes a tile of query rows (tile_rows.cuh), and the pages that they see or one
 * of several equal parts of them. One warpgroup unpacks keys, and one unpacks values (unpack.cuh).
 * All further warpgroups multiply, each with 64 rows (multiply.cuh). So unpacking and multiplying
 * overlap, and a page is unpacked once for 64 or 128 rows. */
#pragma once

#include "multiply.cuh"
#include "unpack.cuh"

namespace kvant
{

/* Warpgroups that multiply. With 256 channels, the sums of a single warpgroup take all
 * registers. */
template <int D> constexpr int MULTIPLIER_GROUPS = D > 128 ? 1 : 2;

/* The stage of a page's matrices, and the phase of its barriers for this page. at: the number of
 * pages before it. */
KVANT_INLINE int stage_of(const TileArgs &p, int at)
{
    return p.stages == 1 ? 0 : at % 2;
}

KVANT_INLINE int phase_of(const TileArgs &p, int at)
{
    return p.stages == 1 ? at : at / 2;
}

/* ---- the warpgroups that unpack ---- */

/* A warpgroup that unpacks keys, or values. */
template <int D, bool KEYS> struct Unpacker {
    const TileArgs &p;
    const TileWork &work;
    uint8_t *memory;
    TileRows<MULTIPLIER_GROUPS<D>> &rows;
    const int32_t *table;
    int warp, lane;
    /* page table entries, one page per lane: 32 pages, and the 32 pages after them */
    int32_t entries, later;

    KVANT_INLINE int32_t load_entry(int page) const
    {
        return page + lane < work.end_page ? __ldg(table + page + lane) : -1;
    }

    /* page: index among the 64 pages of which lanes have entries. */
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

    /* Starts the copy of a page's codes, once the page before it in its slot has been read. The
     * argument i is the index from the first of `entries` on. The argument `at` is the index from
     * the first of all pages on. */
    KVANT_INLINE void fetch(int i, int at, int slot) const
    {
        if (work.first_page + at >= work.end_page)
            return;
        /* With one stage, it waits for the page after that, because the barrier may be a phase
         * further. */
        const int entry = entry_of(i), before = at - p.ring + (p.stages == 1 ? 1 : 0);
        if (at >= p.ring && (COPY_ARRIVALS > 1 || warp == 0))
            barrier_wait(rows.barriers.full[!KEYS][stage_of(p, before)], phase_of(p, before));
        copy_page(slot_of(slot), entry >= 0 ? page_of(entry) : nullptr,
                  KEYS ? p.k.bytes : p.v.bytes, rows.barriers.codes[!KEYS][slot], 32 * warp + lane);
    }

    /* Unpacks a page. at: the number of pages before it; ring_phase: the phase of its slot. */
    template <class P> KVANT_INLINE void unpack(int entry, int at, int slot, int ring_phase) const
    {
        const int stage = stage_of(p, at);
        int own_warp = warp, own_lane = lane;
        uint32_t one = p.one;
        forget(own_warp, own_lane, one);
        const Unpacking u{ KEYS ? p.keys : p.values,
                           slot_of(slot),
                           memory + (KEYS ? p.k_table_at : p.v_table_at),
                           memory + TileMemory<D, MULTIPLIER_GROUPS<D>>::keys_at(p.row_groups) +
                               (KEYS ? stage * KEY_TILE_BYTES<D>
                                     : p.stages * KEY_TILE_BYTES<D> + stage * VALUE_TILE_BYTES<D>),
                           one,
                           entry == KVANT_CUDA_NO_BLOCK
                               ? 0
                               : min(work.length - (work.first_page + at) * PAGE_TOKENS,
                                     PAGE_TOKENS),
                           own_warp,
                           own_lane,
                           own_warp };
        if (at >= p.stages)
            barrier_wait(rows.barriers.empty[!KEYS][stage], phase_of(p, at) - 1);
        float unit = 1;
        if (p.ring)
            barrier_wait(rows.barriers.codes[!KEYS][slot], ring_phase);
        /* two objects, so that the compiler knows where a page lies */
        const Unpacking far{ u.codec, page_of(entry), u.table, u.tile, u.one,
                             u.valid, u.warp,         u.lane,  u.user };
        if (entry < 0)
            unpack_open<D, KEYS>(far);
        else if (p.ring)
            unit = unpack_page<D, KEYS>(u);
        else
            unit = unpack_far_page<D, KEYS>(far);
        if (warp == 0 && lane == 0 && KEYS)
            rows.units[stage].x = entry == KVANT_CUDA_NO_BLOCK ? HIDDEN : unit;
        else if (warp == 0 && lane == 0)
            rows.units[stage].y = log2f(unit), rows.units[stage].z = __frcp_rn(unit);
        P::publish();
        arrive_at(rows.barriers.full[!KEYS][stage], lane);
    }

    template <class P> KVANT_INLINE void run()
    {
        /* so that a copy never has to wait until its slot has been read */
        const int ahead = p.ring - 2;
        entries = load_entry(work.first_page);
        later = load_entry(work.first_page + 32);
        for (int i = 0; i < ahead; i++)
            fetch(i, i, i);
        int i = 0, slot = 0, ring_phase = 0;
        rolled_for (int at = 0; at < work.end_page - work.first_page; at++) {
            if (p.ring)
                fetch(i + ahead, at + ahead, slot < 2 ? slot + ahead : slot - 2);
            unpack<P>(entry_of(i), at, slot, ring_phase);
            if (++slot >= p.ring)
                slot = 0, ring_phase++;
            if (++i == 32) {
                i = 0;
                entries = later;
                later = load_entry(work.first_page + at + 1 + 32);
            }
        }
    }
};

/* Registers per thread after the split. Their sum must not exceed the registers that the block
 * starts with. A thread starts with 168 registers if there are 3 warpgroups. With 4 warpgroups it
 * starts with 128. With a larger sum, the warpgroups that want more wait for ever. Warpgroups that
 * unpack do not take registers back, so finish_tile must fit theirs. For sm_90a it needs 104 of 112
 * registers with 96 channels. With 128 channels it needs 96 of 104. */
template <int D> constexpr int UNPACK_REGISTERS = D > 128 ? 136 : D == 128 ? 104 : 112;
template <int D> constexpr int MULTIPLY_REGISTERS = D > 128 ? 232 : D == 128 ? 152 : 144;

template <class P, int D> KVANT_INLINE void attend_tile(const TileArgs &p)
{
    constexpr int GROUPS = MULTIPLIER_GROUPS<D>,
                  FIRST_REGISTERS = 65536 / (GROUP_THREADS * (2 + GROUPS)) / 8 * 8;
    static_assert(2 * UNPACK_REGISTERS<D> + GROUPS * MULTIPLY_REGISTERS<D> <=
                      (2 + GROUPS) * FIRST_REGISTERS,
                  "warpgroups wait for registers that nobody has");
    using M = TileMemory<D, GROUPS>;
    extern __shared__ __align__(1024) uint8_t memory[];
    TileRows<GROUPS> &rows =
        *reinterpret_cast<TileRows<GROUPS> *>(memory + M::rows_at(p.row_groups, p.stages));
    const int lane = threadIdx.x & 31, warp = __shfl_sync(FULL, threadIdx.x >> 5, 0),
              n_warps = blockDim.x / 32, group = warp / 4;
    const TileWork work = find_work(p);
    if (work.pair.n_columns == 0)
        return;
    if (threadIdx.x == 0)
        rows.barriers.init(KVANT_WARP_ARRIVALS * UNPACK_WARPS, GROUP_WARPS * p.row_groups,
                           GROUP_WARPS * GROUPS);
    load_all_queries<P, D>(p, work, memory, rows, warp, n_warps, lane);
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
        const int first_row = GROUP_ROWS * group + WARP_ROWS * (warp % 4);
        RowSums<D> sums;
        sums.clear();
        if (group < p.row_groups)
            Multiplier<P, D, GROUPS, false>{
                p,
                work,
                memory,
                group,
                memory + M::keys_at(p.row_groups),
                rows,
                seen_by_all(p, work.pair, work.first_position),
                lane,
                { first_row + (lane >> 2), first_row + (lane >> 2) + 8 }
            }.run(sums);
        arrive_at(rows.barriers.multiplied, lane);
        barrier_wait(rows.barriers.multiplied, 0);
        store_rows<D>(sums, results, rows, first_row, lane);
    }
    __syncthreads();
    finish_tile<D>(p, work, results, rows, warp, n_warps, lane);
}

template <int D>
__global__ void __launch_bounds__(GROUP_THREADS * (2 + MULTIPLIER_GROUPS<D>), 1)
    tile_kernel(const __grid_constant__ TileArgs p)
{
    attend_tile<Products, D>(p);
}

template <int D> TileKernel tile_kernel_of()
{
    TileKernel k{ (const void *)tile_kernel<D>,
                  GROUP_THREADS * (2 + MULTIPLIER_GROUPS<D>),
                  MULTIPLIER_GROUPS<D>,
                  {} };
    for (int row_groups = 1; row_groups <= MULTIPLIER_GROUPS<D>; row_groups++)
        for (int stages = 1; stages <= 2; stages++)
            k.fixed_bytes[row_groups - 1][stages - 1] =
                TileMemory<D, MULTIPLIER_GROUPS<D>>::bytes(row_groups, stages);
    return k;
}

#define KVANT_INSTANTIATE_tiles(D) template TileKernel tile_kernel_of<D>()

} // namespace kvant
