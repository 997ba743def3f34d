/* seal_pages.cuh - kernels that seal pages whose rows depend on each other, with a thread block per
 * page. The first tier's channels depend on all rows of a page, and so do outliers of a page. */
#pragma once

#include "../any/general_space.cuh"

namespace kvant
{

/* Calls encode(space, t) with row t in the space of a warp. */
template <int P, class F>
KVANT_INLINE void each_row(const OpenRows &open, GeneralSpace<P> *spaces, F &&encode)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const general_space s = spaces[warp].view();
    for (int t = warp; t < PAGE_TOKENS; t += WARPS) {
        Row<P> row = load_any<P>(open.rows, (size_t)(t < open.n_tokens ? t : 0) * open.d,
                                 KVANT_CUDA_F16, open.d, lane);
        share_row(row, s.y, lane);
        encode(s, t);
    }
}

__device__ __noinline__ void encode_tiers(const kvant_general *g, const general_space *s, int token,
                                          uint8_t *page, int lane)
{
    general_encode_tiers(general_team{ lane, 32, 0 }, g, s, token, page);
}

template <int P>
__global__ void __launch_bounds__(WARPS * 32)
    seal_tiers_kernel(const __grid_constant__ AnyAppendArgs args)
{
    __shared__ GeneralSpace<P> spaces[WARPS];
    __shared__ float energy[P];
    __shared__ uint32_t mask[P / 32];
    const kvant_general &g = args.codec.general;
    const OpenRows open = open_rows(args);
    const int lane = threadIdx.x & 31;
    if (open.n_tokens <= 0)
        return;
    for (int j = threadIdx.x; j < open.d; j += WARPS * 32) {
        const general_run numbers = open.channel(j, 0);
        energy[j] = general_energy(&numbers);
        mask[j / 32] = 0;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < open.d; j += WARPS * 32)
        if (general_is_outlier(&g, energy, j))
            atomicOr(&mask[j / 32], 1u << j % 32);
    __syncthreads();
    if ((int)threadIdx.x < (open.d + 31) / 32)
        reinterpret_cast<uint32_t *>(open.page + g.view.tiers.mask)[threadIdx.x] =
            mask[threadIdx.x];
    __syncthreads();
    each_row<P>(open, spaces,
                [&](const general_space &s, int t) { encode_tiers(&g, &s, t, open.page, lane); });
}

__device__ __noinline__ void encode_pooled(const kvant_general *g, const general_space *s,
                                           int token, uint8_t *page, int lane,
                                           const general_pool *pool)
{
    general_encode_pooled(general_team{ lane, 32, 0 }, g, s, token, page, pool);
}

template <int P>
__global__ void __launch_bounds__(WARPS * 32)
    seal_pools_kernel(const __grid_constant__ AnyAppendArgs args)
{
    __shared__ GeneralSpace<P> spaces[WARPS];
    __shared__ general_outlier_count counts[PAGE_TOKENS];
    const kvant_general &g = args.codec.general;
    const OpenRows open = open_rows(args);
    const int lane = threadIdx.x & 31;
    const general_team block{ (int)threadIdx.x, WARPS * 32, 0 };
    if (open.n_tokens <= 0)
        return;
    const general_page rows{ open.rows, open.n_tokens, open.d };
    const general_pool pool = general_choose_pool(block, &g, &rows);
    if (threadIdx.x < PAGE_TOKENS)
        counts[threadIdx.x] = general_count_outliers(&g, &rows, &pool, threadIdx.x);
    __syncthreads();
    each_row<P>(open, spaces, [&](const general_space &s, int t) {
        const general_pool own = general_pool_at(pool, counts, t);
        encode_pooled(&g, &s, t, open.page, lane, &own);
    });
    general_clear_slots(block, &g, general_pool_at(pool, counts, PAGE_TOKENS).slot, open.page);
}

} // namespace kvant
