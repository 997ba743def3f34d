/* seal_tiers.cuh - the kernel that seals pages of tiers. The channels of the first tier depend on
 * all rows of a page, so a thread block encodes a page. */
#pragma once

#include "../any/general_space.cuh"

namespace kvant
{

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
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
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
    const general_space s = spaces[warp].view();
    for (int t = warp; t < PAGE_TOKENS; t += WARPS) {
        Row<P> row = load_any<P>(open.rows, (size_t)(t < open.n_tokens ? t : 0) * open.d,
                                 KVANT_CUDA_F16, open.d, lane);
        share_row(row, s.y, lane);
        encode_tiers(&g, &s, t, open.page, lane);
    }
}

} // namespace kvant
