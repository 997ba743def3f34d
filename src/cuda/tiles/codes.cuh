/* codes.cuh - attention of up to 64 query rows per kv head over compressed pages, without unpacked
 * pages in shared memory.
 *
 * Every warpgroup has all query rows and every GROUPS-th page. Codes become the first operand of
 * wgmma in registers (code_tiles.cuh). So query rows are columns of the products, and tokens or
 * channels of values are rows: scores^T = K q^T, sums^T = V^T weights^T. Scales of tokens multiply
 * scores and weights (softmax.cuh). A warp has 16 tokens of a page, but all warps of a warpgroup
 * add to the same sums, so they agree on the reference of exponents. */
#pragma once

#include "code_worker.cuh"

namespace kvant
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class KC, class VC, int D, int N, int GROUPS>
KVANT_INLINE void attend_codes(const TileArgs &p)
{
    using S = CodesShape<KC, VC, D, N, GROUPS>;
    extern __shared__ __align__(1024) uint8_t memory[];
    __shared__ uint64_t codes[GROUPS][S::STAGES + 1];
    auto &rows = *reinterpret_cast<CodesRows<GROUPS, N> *>(memory + S::ROWS_AT);
    const int lane = threadIdx.x & 31, warp = __shfl_sync(FULL, threadIdx.x >> 5, 0),
              n_warps = blockDim.x / 32, group = warp / GROUP_WARPS;
    const TileWork work = find_work(p);
    if (work.pair.n_columns == 0)
        return;
    if (threadIdx.x < GROUPS * (S::STAGES + 1)) {
        const int at = threadIdx.x % (S::STAGES + 1);
        init_barrier(codes[threadIdx.x / (S::STAGES + 1)][at],
                     at < S::STAGES ? COPY_ARRIVALS : KVANT_WARP_ARRIVALS * GROUP_WARPS);
    }
    publish_barriers();
    const bool as_they_are = load_code_queries<KC, VC, D, N, GROUPS>(p, work, memory, rows, warp,
                                                                     n_warps, lane),
               plain = __syncthreads_and(as_they_are) && !(p.softcap_log2 > 0) && !p.mask &&
                       !(p.max_bias > 0);
    fill_code_table<KC, D>(memory + S::TABLES_AT, p.keys);
    if constexpr (!S::ONE_TABLE)
        fill_code_table<VC, D>(memory + S::TABLES_AT + S::K_TABLE, p.values);
    __syncthreads();
    CodesWorker<KC, VC, D, N, GROUPS> worker{
        p,
        work,
        memory,
        rows,
        codes[group],
        p.table + work.pair.b * p.table_stride,
        code_table<KC, D>(memory + S::TABLES_AT, p.keys, p.one, lane),
        code_table<VC, D>(memory + S::TABLES_AT + (S::ONE_TABLE ? 0 : S::K_TABLE), p.values, p.one,
                          lane),
        seen_by_all(p, work.pair, work.first_position),
        plain,
        group,
        warp % GROUP_WARPS,
        lane
    };
    worker.clear();
    worker.run();
    worker.leave_sums();
    __syncthreads();
    float *results = reinterpret_cast<float *>(memory + S::WEIGHTS_AT);
    worker.store(results);
    __syncthreads();
    finish_tile<D, true>(p, work, results, static_cast<TileRows<GROUPS> &>(rows), warp, n_warps,
                         lane);
}

#endif

/* Only code for sm_90a has a body and static shared memory. */
template <class KC, class VC, int D, int N, int GROUPS>
__global__ void __launch_bounds__(GROUP_THREADS *CodesShape<KC, VC, D, N, GROUPS>::GROUPS, 1)
    codes_kernel(const __grid_constant__ TileArgs p)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    attend_codes<KC, VC, D, N, GROUPS>(p);
#else
    __trap();
#endif
}

template <class KC, class VC, int D, int N, int GROUPS> CodesKernel codes_kernel_of()
{
    using S = CodesShape<KC, VC, D, N, GROUPS>;
    return CodesKernel{ (const void *)codes_kernel<KC, VC, D, N, GROUPS>, GROUP_THREADS * GROUPS,
                        S::ROWS_AT + (int)sizeof(CodesRows<GROUPS, N>) };
}

/* Chooses as many warpgroups as there are registers for. */
template <class KC, class VC, int D> CodesKernel codes_kernel_for(int rows)
{
    return rows <= 32 ? codes_kernel_of<KC, VC, D, 32, 4>() : codes_kernel_of<KC, VC, D, 64, 3>();
}

} // namespace kvant
