/* decode.cu - pages of any head_dim to rows, as pages/decode.cu has it. */
#include "any.h"
#include "rows.cuh"

namespace kvant
{

constexpr int WARPS = 8;

struct AnyDecodeArgs {
    DecodeArgs decode;
    kvant_cuda_codec codec;
};

__global__ void __launch_bounds__(WARPS * 32) decode_any_kernel(const __grid_constant__ AnyDecodeArgs all)
{
    __shared__ AnyBook book;
    __shared__ float space[WARPS][MOST_DIM];
    __shared__ uint8_t bits[WARPS][MOST_DIM];
    const DecodeArgs &args = all.decode;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y, d = (int)args.codec.head_dim;
    const uint8_t *page =
        args.base + (size_t)(uint32_t)args.blocks[blockIdx.x] * args.block_stride + kv_head * args.head_stride;
    book.load(all.codec);
    __syncthreads();
    for (int t = warp; t < PAGE_TOKENS; t += WARPS) {
        AnyRow row = read_any(all.codec, book, page, t, bits[warp], lane);
        transform_back_any(row, args.codec, all.codec.any, weights_of(args.codec, args.inverse_weights, kv_head),
                           space[warp], lane);
        each_of(row, d, lane, [&](float &x, int channel) {
            if (args.scale)
                x = __fmul_rn(x, args.scale[kv_head * d + channel]);
            if (args.center)
                x = __fadd_rn(x, args.center[kv_head * d + channel]);
            if (args.transformed)
                x = fminf(fmaxf(x, -65504.0f), 65504.0f);
        });
        const size_t block = args.to ? args.to[blockIdx.x] : blockIdx.x;
        store_any(args.out, (block * PAGE_TOKENS + t) * args.token_stride + kv_head * args.out_head_stride, args.type,
                  d, lane, row);
    }
}

cudaError_t launch_decode_any(const DecodeArgs &args, const kvant_cuda_codec &codec, uint32_t n_blocks,
                              uint32_t n_kv_heads, cudaStream_t stream)
{
    decode_any_kernel<<<dim3(n_blocks, n_kv_heads), WARPS * 32, 0, stream>>>(AnyDecodeArgs{ args, codec });
    return cudaGetLastError();
}

} // namespace kvant
