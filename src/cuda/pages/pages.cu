/* pages.cu - whole pages: decodes them to rows (prefill needs 16-bit keys and values) and copies
 * blocks.
 *
 * Decoding follows the CPU's arithmetic bit by bit. A thread block takes one page, a warp one token
 * at a time. The page's words are read once from memory and then from the first-level cache. */
#include "../launch.h"
#include "read_code.cuh"
#include "write_row.cuh"

#include <algorithm>
#include <iterator>

namespace kvant
{

/* Which of a page's scales a number has. */
__device__ __forceinline__ int scale_index(const kvant_cuda_params &codec, int token, int channel)
{
    return codec.grouping == KVANT_CUDA_GROUP_TOKENS32     ? token / 32 * (int)codec.head_dim + channel
           : codec.grouping == KVANT_CUDA_GROUP_CHANNELS32 ? channel / 32 * PAGE_TOKENS + token
                                                           : token;
}

template <int D>
__device__ __forceinline__ Row<D> read_row(const kvant_cuda_params &codec, const float *values, const uint8_t *page,
                                           int token, int lane)
{
    const __half *numbers = reinterpret_cast<const __half *>(page + codec.metadata_offset);
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
    if (codec.codes == KVANT_CUDA_CODES_OPEN)
        return load_row<D>(page, (size_t)token * D, KVANT_CUDA_F16, lane);
    bool codebook = codec.codes == KVANT_CUDA_CODES_CODEBOOK;
    Row<D> row;
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++) {
        const int channel = lane + 32 * j, at = scale_index(codec, token, channel);
        float scale = __half2float(numbers[at]);
        float zero = codebook || codec.symmetric ? 0 : __half2float(numbers[codec.n_scales + at]);
        uint32_t code = read_code(codec, words, token, channel);
        row.x[j] = codebook ? __fmul_rn(scale, values[code])
                            : __fadd_rn(__fmul_rn(scale, __fadd_rn((float)code, codec.offset)), zero);
    }
    return row;
}

struct WideDecodeArgs : DecodeArgs {
    float values[KVANT_CUDA_WIDE_LEVELS];
};

__device__ __forceinline__ void load_values(float (&values)[KVANT_CUDA_MAX_LEVELS], const DecodeArgs &args)
{
    if (threadIdx.x < KVANT_CUDA_MAX_LEVELS)
        values[threadIdx.x] = args.codec.values[threadIdx.x];
}

__device__ __forceinline__ void load_values(float (&values)[KVANT_CUDA_WIDE_LEVELS], const WideDecodeArgs &args)
{
    static_assert(KVANT_CUDA_WIDE_LEVELS == WARPS * 32, "a thread loads a value");
    values[threadIdx.x] = args.values[threadIdx.x];
}

template <int D, class Args>
__global__ void __launch_bounds__(WARPS * 32) decode_kernel(const __grid_constant__ Args args)
{
    constexpr bool WIDE = std::is_same<Args, WideDecodeArgs>::value;
    __shared__ float values[WIDE ? KVANT_CUDA_WIDE_LEVELS : KVANT_CUDA_MAX_LEVELS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    const uint8_t *page =
        args.base + (size_t)(uint32_t)args.blocks[blockIdx.x] * args.block_stride + kv_head * args.head_stride;
    load_values(values, args);
    __syncthreads();
    for (int t = warp; t < PAGE_TOKENS; t += WARPS) {
        Row<D> row = read_row<D>(args.codec, values, page, t, lane);
        write_row(args, row, t, kv_head, lane);
    }
}

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

cudaError_t launch_decode(const DecodeArgs &args, uint32_t head_dim, uint32_t n_blocks, uint32_t n_kv_heads,
                          cudaStream_t stream)
{
    return with_head_dim(head_dim, [&](auto d) {
        decode_kernel<decltype(d)::value, DecodeArgs><<<dim3(n_blocks, n_kv_heads), WARPS * 32, 0, stream>>>(args);
        return cudaGetLastError();
    });
}

cudaError_t launch_decode_wide(const DecodeArgs &args, const kvant_cuda_wide_book &book, uint32_t head_dim,
                               uint32_t n_blocks, uint32_t n_kv_heads, cudaStream_t stream)
{
    WideDecodeArgs p{};
    static_cast<DecodeArgs &>(p) = args;
    std::copy(std::begin(book.values), std::end(book.values), p.values);
    return with_head_dim(head_dim, [&](auto d) {
        decode_kernel<decltype(d)::value, WideDecodeArgs><<<dim3(n_blocks, n_kv_heads), WARPS * 32, 0, stream>>>(p);
        return cudaGetLastError();
    });
}

cudaError_t launch_copy(const CopyArgs &args, uint32_t n_blocks, uint32_t n_kv_heads, cudaStream_t stream)
{
    copy_kernel<<<dim3(n_blocks, n_kv_heads), 256, 0, stream>>>(args);
    return cudaGetLastError();
}

} // namespace kvant
