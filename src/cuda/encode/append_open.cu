/* append_open.cu - rows of numbers into open pages: rotated, rounded to fp16, row by row. A warp takes a
 * row. */
#include "append.h"
#include "../launch.h"
#include "../layout.cuh"
#include "../rotate.cuh"

namespace kvant
{

constexpr int WARPS = 8;

template <int D>
__global__ void __launch_bounds__(WARPS * 32) append_open_kernel(const __grid_constant__ AppendArgs args)
{
    const AppendRole &role = args.roles[blockIdx.z];
    const int lane = threadIdx.x & 31, kv_head = blockIdx.y;
    const uint32_t token = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const int64_t slot = token < args.n_tokens ? args.slots[token] : -1;
    if (slot < 0)
        return;
    Row<D> row =
        load_row<D>(role.rows, token * role.token_stride + kv_head * role.row_head_stride, args.type, lane);
    bool finite = true, in_range = true;
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++) {
        if (role.center)
            row.x[j] = __fsub_rn(row.x[j], role.center[kv_head * D + lane + 32 * j]);
        if (role.factors)
            row.x[j] = __fdiv_rn(row.x[j], role.factors[kv_head * D + lane + 32 * j]);
        finite &= fabsf(row.x[j]) <= 3.4028234e38f;
    }
    transform(row, role.codec, weights_of(role.codec, role.weights, kv_head), lane);
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++)
        in_range &= fabsf(row.x[j]) <= 65504.0f;
    finite = __all_sync(FULL, finite);
    if (!__all_sync(FULL, in_range)) {
        if (lane == 0 && args.refused)
            atomicOr(args.refused, finite ? KVANT_CUDA_ROW_RANGE : KVANT_CUDA_ROW_NONFINITE);
        return;
    }
    uint8_t *page = role.base + (size_t)(slot / PAGE_TOKENS) * role.block_stride + kv_head * role.head_stride;
    store_row(page, (size_t)(slot % PAGE_TOKENS) * D, KVANT_CUDA_F16, lane, row);
}

cudaError_t launch_append_open(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                               cudaStream_t stream)
{
    dim3 grid((args.n_tokens + WARPS - 1) / WARPS, n_kv_heads, n_roles);
    return with_head_dim(head_dim, [&](auto d) {
        append_open_kernel<decltype(d)::value><<<grid, WARPS * 32, 0, stream>>>(args);
        return cudaGetLastError();
    });
}

} // namespace kvant
