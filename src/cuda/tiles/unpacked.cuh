/* unpacked.cuh - attention of many query tokens over compressed pages, in two passes: one kernel
 * unpacks every page once into device memory, and a second kernel multiplies.
 *
 * A matrix lies in device memory as it will lie in shared memory (operands.cuh), so that a copy of
 * consecutive bytes brings it there. In the second kernel one warpgroup only copies; two multiply,
 * 64 rows each. */
#pragma once

#include "multiply.cuh"
#include "unpack.cuh"

namespace kvant
{

template <int D> KVANT_INLINE uint8_t *unpacked_page(const Unpacked &to, int pair, int page)
{
    return to.matrices +
           ((size_t)pair * to.pages + page) * (KEY_TILE_BYTES<D> + VALUE_TILE_BYTES<D>);
}

KVANT_INLINE float4 *unit_of(const Unpacked &to, int pair, int page)
{
    return to.units + (size_t)pair * to.pages + page;
}

/* ---- unpacking ---- */

template <int D>
constexpr int UNPACK_GROUPS = D > 128 ? 2 : 4; /* warpgroups; every second one unpacks keys */

template <int D>
constexpr int TILE_BYTES =
    KEY_TILE_BYTES<D> > VALUE_TILE_BYTES<D> ? KEY_TILE_BYTES<D> : VALUE_TILE_BYTES<D>;

/* The pages of a warpgroup, one after another. */
template <int D, bool KEYS> struct PageUnpacker {
    const TileArgs &p;
    uint8_t *memory;
    uint64_t *codes; /* barriers of the two slots */
    int group, warp, lane;

    struct Page {
        int number, pair, at, kv_head, entry, valid; /* at: index among the pair's pages */
    };

    KVANT_INLINE int all() const
    {
        return p.pairs * p.unpacked.pages;
    }

    KVANT_INLINE bool there(const Page &page) const
    {
        return page.number < all();
    }

    /* Which pages are unpacked. ALL_PAGES: sealed and open ones. */
    enum Kind { SEALED_PAGES, OPEN_PAGES, ALL_PAGES };

    /* Up to 32 pages from page `number` on, one step apart. entry and valid: of the lane's page.
     * left: a bit for each page that is still to be unpacked. */
    struct PageRun {
        int number, entry, valid;
        uint32_t left;
    };

    /* The pages of a kind that some row sees. */
    KVANT_INLINE PageRun pages_from(int number, Kind kind) const
    {
        const Lengths<true, GROUP_ROWS> lengths{ p };
        PageRun s{ number, 0, 0, 0 };
        const int own = number + lane * step();
        bool wanted = own < all();
        if (wanted) {
            const int at = own % p.unpacked.pages,
                      b = (p.first_pair + own / p.unpacked.pages) / p.kv_heads;
            s.valid = lengths.length(b) - at * PAGE_TOKENS;
            s.entry = __ldg(p.table + b * p.table_stride + at);
            wanted = s.valid > 0 && at >= lengths.first_page(b) &&
                     (kind == ALL_PAGES || (kind == OPEN_PAGES) == (s.entry < 0));
        }
        s.left = __ballot_sync(FULL, wanted);
        return s;
    }

    /* The next page. */
    KVANT_INLINE Page next(PageRun &s, Kind kind) const
    {
        while (s.left == 0 && s.number < all())
            s = pages_from(s.number + 32 * step(), kind);
        const int i = s.left ? __ffs(s.left) - 1 : 0;
        Page page{ s.left ? s.number + i * step() : all(), 0, 0, 0, 0, 0 };
        s.left &= s.left - 1;
        page.pair = page.number / p.unpacked.pages, page.at = page.number % p.unpacked.pages;
        page.kv_head = (p.first_pair + page.pair) % p.kv_heads;
        page.entry = __shfl_sync(FULL, s.entry, i);
        page.valid = __shfl_sync(FULL, s.valid, i);
        return page;
    }

    KVANT_INLINE int step() const
    {
        return (int)gridDim.x * (UNPACK_GROUPS<D> / 2);
    }

    KVANT_INLINE const uint8_t *codes_of(const Page &page) const
    {
        const PageSource &source = page.entry < 0 ? (KEYS ? p.k_open : p.v_open) : KEYS ? p.k : p.v;
        return source.base +
               (size_t)(uint32_t)(page.entry < 0 ? -1 - page.entry : page.entry) *
                   source.block_stride +
               page.kv_head * source.head_stride;
    }

    KVANT_INLINE uint8_t *slot_of(int slot) const
    {
        return memory + p.ring_at + (2 * (group / 2) + slot) * (p.k_page + p.v_page) +
               (KEYS ? 0 : p.k_page);
    }

    KVANT_INLINE void fetch(const Page &page, int slot) const
    {
        if (there(page))
            copy_page(slot_of(slot), page.entry >= 0 ? codes_of(page) : nullptr,
                      KEYS ? p.k.bytes : p.v.bytes, codes[slot], 32 * warp + lane);
    }

    KVANT_INLINE void wait_for_warp_group() const
    {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(GROUP_THREADS) : "memory");
    }

    KVANT_INLINE void unpack(const Page &page, RingPhase ring_phase) const
    {
        uint8_t *tile = memory + group * TILE_BYTES<D>;
        int own_warp = warp, own_lane = lane;
        uint32_t one = p.one;
        forget(own_warp, own_lane, one);
        const int valid = page.entry == KVANT_CUDA_NO_BLOCK ? 0 : min(page.valid, PAGE_TOKENS);
        const Unpacking u{ KEYS ? p.keys : p.values,
                           slot_of(ring_phase.at),
                           memory + (KEYS ? p.k_table_at : p.v_table_at),
                           tile,
                           one,
                           valid,
                           own_warp,
                           own_lane,
                           GROUP_WARPS * (group / 2) + own_warp };
        barrier_wait(codes[ring_phase.at], ring_phase.phase);
        float unit = 1;
        if (page.entry < 0)
            unpack_open<D, KEYS>(Unpacking{ u.codec, codes_of(page), u.table, tile, one, valid,
                                            own_warp, own_lane, u.user });
        else
            unit = unpack_page<D, KEYS>(u);
        float4 *units = unit_of(p.unpacked, page.pair, page.at);
        if (warp == 0 && lane == 0 && KEYS)
            units->x = page.entry == KVANT_CUDA_NO_BLOCK ? HIDDEN : unit;
        else if (warp == 0 && lane == 0)
            units->y = log2f(unit), units->z = __frcp_rn(unit);
        wait_for_warp_group();
        constexpr int N = (KEYS ? KEY_TILE_BYTES<D> : VALUE_TILE_BYTES<D>) / 16;
        uint4 *to = reinterpret_cast<uint4 *>(unpacked_page<D>(p.unpacked, page.pair, page.at) +
                                              (KEYS ? 0 : KEY_TILE_BYTES<D>));
        unrolled_for (int i = 0; i < N / GROUP_THREADS; i++)
            to[i * GROUP_THREADS + 32 * warp + lane] =
                reinterpret_cast<const uint4 *>(tile)[i * GROUP_THREADS + 32 * warp + lane];
        wait_for_warp_group();
    }

    /* Loads a page's codes one page ahead. */
    KVANT_INLINE RingPhase run(Kind kind, RingPhase ring_phase) const
    {
        PageRun pages = pages_from((int)blockIdx.x * (UNPACK_GROUPS<D> / 2) + group / 2, kind);
        Page page = next(pages, kind);
        fetch(page, ring_phase.at);
#pragma unroll 1
        while (there(page)) {
            const Page after = next(pages, kind);
            fetch(after, ring_phase.at ^ 1);
            unpack(page, ring_phase);
            ring_phase = ring_phase.after(1, 2);
            page = after;
        }
        return ring_phase;
    }

    /* Sealed pages come first if kernels that may still run do not write them. */
    KVANT_INLINE void run() const
    {
        RingPhase ring_phase{ 0, 0 };
        rolled_for (int kind = p.sealed_ready ? SEALED_PAGES : ALL_PAGES; kind <= ALL_PAGES;
                    kind = kind == SEALED_PAGES ? OPEN_PAGES : ALL_PAGES + 1) {
            if (kind != SEALED_PAGES)
                wait_for_prior();
            ring_phase = run((Kind)kind, ring_phase);
        }
    }
};

template <int D>
__global__ void __launch_bounds__(UNPACK_GROUPS<D> *GROUP_THREADS, 1)
    unpack_kernel(const __grid_constant__ TileArgs p)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ uint64_t codes[UNPACK_GROUPS<D>][2];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(FULL, threadIdx.x >> 5, 0),
              group = warp / GROUP_WARPS;
    begin_next();
    if (threadIdx.x < 2 * UNPACK_GROUPS<D>)
        init_barrier(codes[threadIdx.x / 2][threadIdx.x % 2], COPY_ARRIVALS);
    publish_barriers();
    fill_table(p.keys, memory + p.k_table_at);
    fill_table(p.values, memory + p.v_table_at);
    __syncthreads();
    if (group % 2 == 0)
        PageUnpacker<D, true>{ p, memory, codes[group], group, warp % GROUP_WARPS, lane }.run();
    else
        PageUnpacker<D, false>{ p, memory, codes[group], group, warp % GROUP_WARPS, lane }.run();
    /* the thread has waited for earlier kernels */
    for (int i = (int)threadIdx.x; blockIdx.x == 0 && i < p.cleared; i += (int)blockDim.x)
        p.counters[i] = 0;
}

/* ---- multiplying ---- */

constexpr int ATTEND_GROUPS = 2; /* warpgroups that multiply */

/* Copies matrices, and the units together with the keys. */
template <int D, class Rows>
KVANT_INLINE void copy_matrices(const TileShape &p, const TileWork &work, uint8_t *matrices,
                                Rows &rows, int thread)
{
    if (COPY_ARRIVALS == 1 && thread >= 32)
        return;
    RingPhase ring_phase{ 0, 0 };
    rolled_for (int page = work.first_page; page < work.end_page; page++) {
        const uint8_t *from = unpacked_page<D>(p.unpacked, work.pair_at, page);
        const bool again = page - work.first_page >= p.stages;
        if (again)
            barrier_wait(rows.barriers.empty[0][ring_phase.at], ring_phase.phase ^ 1);
        copy_two(matrices + ring_phase.at * KEY_TILE_BYTES<D>, from, KEY_TILE_BYTES<D>,
                 &rows.units[ring_phase.at], unit_of(p.unpacked, work.pair_at, page),
                 sizeof(float4), rows.barriers.full[0][ring_phase.at], thread);
        if (again)
            barrier_wait(rows.barriers.empty[1][ring_phase.at], ring_phase.phase ^ 1);
        copy_page(matrices + p.stages * KEY_TILE_BYTES<D> + ring_phase.at * VALUE_TILE_BYTES<D>,
                  from + KEY_TILE_BYTES<D>, VALUE_TILE_BYTES<D>,
                  rows.barriers.full[1][ring_phase.at], thread);
        ring_phase = ring_phase.after(1, p.stages);
    }
}

/* Registers per thread. The kernel begins with 168, and its last part needs them again at the
 * end. */
constexpr int COPY_REGISTERS = 24, ATTEND_REGISTERS = 240, ALL_REGISTERS = 168;
static_assert(COPY_REGISTERS + ATTEND_GROUPS * ATTEND_REGISTERS <=
                  (1 + ATTEND_GROUPS) * ALL_REGISTERS,
              "warpgroups wait for registers that nobody has");

template <class P, int D> KVANT_INLINE void attend_unpacked(const TileShape &p)
{
    constexpr int GROUPS = ATTEND_GROUPS;
    using M = TileMemory<D, GROUPS>;
    begin_next();
    wait_for_prior();
    extern __shared__ __align__(1024) uint8_t memory[];
    TileRows<GROUPS> &rows =
        *reinterpret_cast<TileRows<GROUPS> *>(memory + M::rows_at(p.row_groups, p.stages));
    const int lane = threadIdx.x & 31, warp = __shfl_sync(FULL, threadIdx.x >> 5, 0),
              n_warps = blockDim.x / 32, group = warp / GROUP_WARPS;
    const TileWork work = find_work(p);
    if (work.pair.n_columns == 0)
        return;
    if (threadIdx.x == 0)
        rows.barriers.init(COPY_ARRIVALS, GROUP_WARPS * p.row_groups, GROUP_WARPS * GROUPS);
    load_all_queries<P, D>(p, work, memory, rows, warp, n_warps, lane);
    __syncthreads();
    uint8_t *matrices = memory + M::keys_at(p.row_groups);
    if (group == GROUPS) {
        P::template registers<COPY_REGISTERS, false>();
        copy_matrices<D>(p, work, matrices, rows, threadIdx.x % GROUP_THREADS);
        barrier_wait(rows.barriers.multiplied, 0);
        P::template registers<ALL_REGISTERS, true>();
    } else {
        P::template registers<ATTEND_REGISTERS, true>();
        const int first_row = GROUP_ROWS * group + WARP_ROWS * (warp % GROUP_WARPS);
        RowSums<D> sums;
        sums.clear();
        if (group < p.row_groups)
            Multiplier<P, D, GROUPS, true>{
                p,
                work,
                memory,
                group,
                matrices,
                rows,
                seen_by_all(p, work.pair, work.first_position),
                lane,
                { first_row + (lane >> 2), first_row + (lane >> 2) + 8 }
            }.run(sums);
        arrive_at(rows.barriers.multiplied, lane);
        barrier_wait(rows.barriers.multiplied, 0);
        store_rows<D>(sums, reinterpret_cast<float *>(matrices), rows, first_row, lane);
        P::template registers<ALL_REGISTERS, false>();
    }
    __syncthreads();
    finish_tile<D>(p, work, reinterpret_cast<float *>(matrices), rows, warp, n_warps, lane);
}

template <int D>
__global__ void __launch_bounds__(GROUP_THREADS * (1 + ATTEND_GROUPS), 1)
    attend_kernel(const __grid_constant__ TileShape p)
{
    attend_unpacked<Products, D>(p);
}

template <int D> UnpackedKernels unpacked_kernels_of()
{
    UnpackedKernels k{};
    k.unpack = (const void *)unpack_kernel<D>;
    k.attend = (const void *)attend_kernel<D>;
    k.unpack_groups = UNPACK_GROUPS<D>;
    k.unpack_threads = k.unpack_groups * GROUP_THREADS;
    k.attend_groups = ATTEND_GROUPS;
    k.attend_threads = (k.attend_groups + 1) * GROUP_THREADS;
    k.key_bytes = KEY_TILE_BYTES<D>;
    k.value_bytes = VALUE_TILE_BYTES<D>;
    for (int row_groups = 1; row_groups <= k.attend_groups; row_groups++)
        for (int stages = 1; stages <= MOST_STAGES; stages++)
            k.shared_bytes[row_groups - 1][stages - 1] =
                TileMemory<D, ATTEND_GROUPS>::bytes(row_groups, stages);
    return k;
}

#define KVANT_INSTANTIATE_unpacked(D) template UnpackedKernels unpacked_kernels_of<D>()

} // namespace kvant
