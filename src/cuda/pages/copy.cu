/* copy.cu - copies whole blocks. */
#include "pages.h"

namespace kvant
{

__global__ void copy_kernel(const __grid_constant__ CopyArgs args)
{
    size_t head = blockIdx.y * args.head_stride;
    const uint4 *from = reinterpret_cast<const uint4 *>(
        args.base + (size_t)(uint32_t)args.from[blockIdx.x] * args.block_stride + head);
    uint4 *to =
        reinterpret_cast<uint4 *>(args.base + (size_t)(uint32_t)args.to[blockIdx.x] * args.block_stride + head);
    for (size_t i = threadIdx.x; i < args.page_bytes / sizeof(uint4); i += blockDim.x)
        to[i] = from[i];
}

cudaError_t launch_copy(const CopyArgs &args, uint32_t n_blocks, uint32_t n_kv_heads, cudaStream_t stream)
{
    copy_kernel<<<dim3(n_blocks, n_kv_heads), 256, 0, stream>>>(args);
    return cudaGetLastError();
}

} // namespace kvant
