/* decode_trellis.cu - decodes pages of trellis codes to rows, bit by bit as on the CPU. A thread
 * block takes one page, a warp one token at a time. The trellis bits of the token go to shared
 * memory in the order of steps; lanes find the subsets of their channels there. */
#include "../launch.h"
#include "../pages/read_code.cuh"
#include "trellis_steps.cuh"
#include "../pages/write_row.cuh"

namespace kvant
{

struct TrellisDecodeArgs {
    DecodeArgs decode;
    kvant_cuda_trellis trellis;
};

template <int D>
__device__ __forceinline__ Row<D> read_row(const TrellisDecodeArgs &all, const float *values, uint8_t *bits,
                                           const uint8_t *page, int token, int lane)
{
    const kvant_cuda_params &codec = all.decode.codec;
    const float scale = __half2float(reinterpret_cast<const __half *>(page + codec.metadata_offset)[token]);
    uint32_t codes[Row<D>::PER_LANE];
    int steps[Row<D>::PER_LANE];
    __syncwarp(); /* the row before has been read */
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++) {
        codes[j] = read_code(codec, reinterpret_cast<const uint32_t *>(page), token, lane + 32 * j);
        steps[j] = trellis_step(codec.role, (int)codec.bits, D, lane + 32 * j);
        bits[steps[j]] = codes[j] & 1;
    }
    __syncwarp();
    Row<D> row;
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++)
        row.x[j] = __fmul_rn(scale, values[8 * (codes[j] / 2) + subset_at(all.trellis, bits, D, steps[j])]);
    return row;
}

template <int D>
__global__ void __launch_bounds__(WARPS * 32) decode_trellis_kernel(const __grid_constant__ TrellisDecodeArgs all)
{
    __shared__ float values[KVANT_CUDA_TRELLIS_LEVELS];
    __shared__ uint8_t bits[WARPS][D];
    const DecodeArgs &args = all.decode;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    const uint8_t *page =
        args.base + (size_t)(uint32_t)args.blocks[blockIdx.x] * args.block_stride + kv_head * args.head_stride;
    if (threadIdx.x < KVANT_CUDA_TRELLIS_LEVELS)
        values[threadIdx.x] = all.trellis.values[threadIdx.x];
    __syncthreads();
    for (int t = warp; t < PAGE_TOKENS; t += WARPS) {
        Row<D> row = read_row<D>(all, values, bits[warp], page, t, lane);
        write_row(args, row, t, kv_head, lane);
    }
}

cudaError_t launch_decode_trellis(const DecodeArgs &args, const kvant_cuda_trellis &trellis, uint32_t head_dim,
                                  uint32_t n_blocks, uint32_t n_kv_heads, cudaStream_t stream)
{
    const TrellisDecodeArgs p{ args, trellis };
    return with_head_dim(head_dim, [&](auto d) {
        decode_trellis_kernel<decltype(d)::value><<<dim3(n_blocks, n_kv_heads), WARPS * 32, 0, stream>>>(p);
        return cudaGetLastError();
    });
}

} // namespace kvant
