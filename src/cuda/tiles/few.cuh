/* few.cuh - attention of up to 64 query rows per kv head over compressed pages.
 *
 * Every warpgroup has all rows and every GROUPS-th page, and does everything with it: unpacks keys,
 * multiplies, weighs, unpacks values, multiplies. So a warpgroup waits for nobody but its codes, and
 * the others have work while it waits. The results are added in the end. */
#pragma once

#include "multiply.cuh"
#include "unpack.cuh"

namespace kvant
{

/* As many warpgroups as sums of values leave registers for. */
template <int D> constexpr int FEW_GROUPS = D > 128 ? 2 : 3;

template <int D> constexpr int PAGE_MATRICES = KEY_TILE_BYTES<D> + VALUE_TILE_BYTES<D>;

/* Shared memory: queries, a page's matrices per warpgroup, then TileRows, tables, codes. */
template <class P, int D> struct PageWorker {
    static constexpr int GROUPS = FEW_GROUPS<D>;
    const TileArgs &p;
    const TileWork &work;
    uint8_t *memory, *matrices;
    TileRows<GROUPS> &rows;
    uint64_t *codes; /* barriers of the slots */
    const int32_t *table;
    int group, warp, lane;

    KVANT_INLINE void wait_for_group() const
    {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(GROUP_THREADS) : "memory");
    }

    template <bool KEYS> KVANT_INLINE const uint8_t *page_of(int entry) const
    {
        const PageSource &from = entry < 0 ? (KEYS ? p.k_open : p.v_open) : KEYS ? p.k : p.v;
        return from.base + (size_t)(uint32_t)(entry < 0 ? -1 - entry : entry) * from.block_stride +
               work.pair.kv_head * from.head_stride;
    }

    KVANT_INLINE uint8_t *slot_of(int slot) const
    {
        return memory + p.ring_at + (2 * group + slot) * (p.k_page + p.v_page);
    }

    KVANT_INLINE int entry_of(int page) const
    {
        return page < work.end_page ? __ldg(table + page) : KVANT_CUDA_NO_BLOCK;
    }

    KVANT_INLINE void fetch(int page, int entry, int slot) const
    {
        if (page < work.end_page)
            copy_two(slot_of(slot), entry >= 0 ? page_of<true>(entry) : nullptr, p.k.bytes, slot_of(slot) + p.k_page,
                     entry >= 0 ? page_of<false>(entry) : nullptr, p.v.bytes, codes[slot], 32 * warp + lane);
    }

    /* Returns the unit. */
    template <bool KEYS> KVANT_INLINE float unpack(int page, int entry, int slot) const
    {
        int own_warp = warp, own_lane = lane;
        uint32_t one = p.one;
        forget(own_warp, own_lane, one);
        const Unpacking u{ KEYS ? p.keys : p.values,
                           slot_of(slot) + (KEYS ? 0 : p.k_page),
                           memory + (KEYS ? p.k_table_at : p.v_table_at),
                           matrices + (KEYS ? 0 : KEY_TILE_BYTES<D>),
                           one,
                           entry == KVANT_CUDA_NO_BLOCK ? 0 : min(work.length - page * PAGE_TOKENS, PAGE_TOKENS),
                           own_warp,
                           own_lane,
                           GROUP_WARPS * group + own_warp };
        const Unpacking far{ u.codec, page_of<KEYS>(entry), u.table, u.tile, u.one, u.valid, u.warp, u.lane, u.user };
        float unit = 1;
        if (entry < 0)
            unpack_open<D, KEYS>(far);
        else
            unit = unpack_page<D, KEYS>(u);
        P::publish();
        return unit;
    }

    KVANT_INLINE void run(RowSums<D> &sums) const
    {
        const Seen seen = seen_by_all(p, work.pair, work.first_position);
        const int row[2] = { WARP_ROWS * warp + (lane >> 2), WARP_ROWS * warp + (lane >> 2) + 8 };
        const bool has_rows = WARP_ROWS * warp < work.pair.n_columns;
        float s[8][4];
        uint32_t w[4][4];
        int page = work.first_page + group, entry = entry_of(page), next = entry_of(page + GROUPS);
        fetch(page, entry, 0);
        Turn turn{ 0, 0 };
#pragma unroll 1
        for (; page < work.end_page; page += GROUPS) {
            wait_for(codes[turn.at], turn.phase);
            const float k_unit = unpack<true>(page, entry, turn.at);
            wait_for_group(); /* keys are written; nobody reads values or codes of the page before */
            turn = turn.after(1, 2);
            fetch(page + GROUPS, next, turn.at);
            P::begin();
            P::template scores<D>(s, memory, matrices, WARP_ROWS * warp, lane);
            P::template finish<0>();
            P::hold(s);
            const float v_unit = unpack<false>(page, entry, turn.at ^ 1);
            wait_for_group(); /* values are written; nobody reads keys */
            if (has_rows)
                weigh(page, entry, k_unit, v_unit, seen, row, s, sums);
            else
                unrolled_for (int j = 0; j < 8; j++)
                    s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;
            round_weights(s, w);
            P::hold(sums.o);
            P::hold(w);
            P::begin();
            P::template add<D>(sums.o, w, matrices + KEY_TILE_BYTES<D>, lane);
            P::template finish<0>();
            P::hold(sums.o);
            entry = next;
            next = entry_of(page + 2 * GROUPS);
        }
    }

    KVANT_INLINE void weigh(int page, int entry, float k_unit, float v_unit, const Seen &seen, const int (&row)[2],
                            float (&s)[8][4], RowSums<D> &sums) const
    {
        float factor[2] = { rows.factor[row[0]] * k_unit, rows.factor[row[1]] * k_unit }, shrink[2];
        const float log = log2f(v_unit);
        change_rows(p, rows, row, seen, page * PAGE_TOKENS, entry == KVANT_CUDA_NO_BLOCK ? 0 : work.length, lane, s,
                    factor);
        if (sums.raise(s, factor, log, shrink))
            sums.scale(shrink);
        sums.weigh(s, factor, log, __frcp_rn(v_unit));
    }
};

template <class P, int D> KVANT_INLINE void attend_few(const TileArgs &p)
{
    constexpr int GROUPS = FEW_GROUPS<D>;
    using M = TileMemory<D, GROUPS>;
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ uint64_t codes[GROUPS][2];
    TileRows<GROUPS> &rows = *reinterpret_cast<TileRows<GROUPS> *>(memory + M::rows_at(1, GROUPS));
    const int lane = threadIdx.x & 31, warp = __shfl_sync(FULL, threadIdx.x >> 5, 0), n_warps = blockDim.x / 32,
              group = warp / GROUP_WARPS;
    const TileWork work = find_work(p);
    if (work.pair.n_columns == 0)
        return;
    if (threadIdx.x < GROUPS * 2)
        init_barrier(codes[threadIdx.x / 2][threadIdx.x % 2], COPY_ARRIVALS);
    publish_barriers();
    load_queries<P, D>(p, work, memory, rows, warp, n_warps, lane);
    fill_table(p.keys, memory + p.k_table_at);
    fill_table(p.values, memory + p.v_table_at);
    __syncthreads();
    float *results = reinterpret_cast<float *>(memory + M::keys_at(1));
    RowSums<D> sums;
    sums.clear();
    PageWorker<P, D>{ p,    work,         memory, memory + M::keys_at(1) + group * PAGE_MATRICES<D>,
                      rows, codes[group], p.table + work.pair.b * p.table_stride,
                      group, warp % GROUP_WARPS, lane }
        .run(sums);
    __syncthreads();
    store_rows<D>(sums, results, rows, GROUP_ROWS * group + WARP_ROWS * (warp % GROUP_WARPS), lane);
    __syncthreads();
    finish_tile<D>(p, work, results, rows, warp, n_warps, lane);
}

template <int D>
__global__ void __launch_bounds__(GROUP_THREADS *FEW_GROUPS<D>, 1) few_kernel(const __grid_constant__ TileArgs p)
{
    attend_few<Products, D>(p);
}

template <int D> FewKernel few_kernel_of()
{
    return FewKernel{ (const void *)few_kernel<D>, GROUP_THREADS * FEW_GROUPS<D>, FEW_GROUPS<D>,
                      TileMemory<D, FEW_GROUPS<D>>::bytes(1, FEW_GROUPS<D>) };
}

#define KVANT_INSTANTIATE_few(D) template FewKernel few_kernel_of<D>()

} // namespace kvant
