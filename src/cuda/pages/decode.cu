/* decode.cu - decodes whole pages to rows. Prefill needs 16-bit keys and values, and a cache needs
 * rows when it opens pages.
 *
 * Decoding follows the CPU's arithmetic bit by bit. A thread block decodes one page or, if there
 * are few pages, an equal part of a page's tokens. A warp decodes one token at a time, and a lane
 * some channels. The page's words are read once from memory and then from the first-level cache. A
 * row that stays transformed is stored as when the CPU opens a sealed page. */
#include "../any/rows.cuh"
#include "../launch.h"
#include "pages.h"

namespace kvant
{

template <int P> constexpr int WARPS_OF = P > 256 ? 4 : 8; /* the warps share 48 KB */

struct FullDecodeArgs {
    DecodeArgs decode;
    kvant_cuda_codec codec;
};

template <int P>
__global__ void __launch_bounds__(WARPS_OF<P> * 32)
    decode_kernel(const __grid_constant__ FullDecodeArgs all)
{
    __shared__ AnyBook book;
    constexpr int WARPS = WARPS_OF<P>;
    __shared__ float space[WARPS][3 * P]; /* first for read_any, then for the transform */
    const DecodeArgs &args = all.decode;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y,
              d = (int)args.codec.head_dim;
    if (args.blocks[blockIdx.x] < 0)
        return;
    const uint8_t *page = args.base +
                          (size_t)(uint32_t)args.blocks[blockIdx.x] * args.block_stride +
                          kv_head * args.head_stride;
    book.load(all.codec);
    __syncthreads();
    for (int t = blockIdx.z * WARPS + warp; t < PAGE_TOKENS; t += gridDim.z * WARPS) {
        Row<P> row = read_any<P>(all.codec, book, page, t, reinterpret_cast<uint8_t *>(space[warp]),
                                 lane, kv_head);
        transform_back_any(row, args.codec, all.codec.any,
                           key_transform_of(args.codec, args.inverse_key_transform, kv_head),
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
        store_any(args.out,
                  (block * PAGE_TOKENS + t) * args.token_stride + kv_head * args.out_head_stride,
                  args.type, d, lane, row);
    }
}

/* With fewer pages than this, several thread blocks decode a page. A warp takes 80 us for a token
 * and its matrix, and otherwise multiprocessors would be idle. */
constexpr uint32_t FEW_PAGES = 256;

cudaError_t launch_decode(const DecodeArgs &args, const kvant_cuda_codec &codec, uint32_t n_blocks,
                          uint32_t n_kv_heads, cudaStream_t stream)
{
    return with_room(args.codec.head_dim, [&](auto room) {
        constexpr int P = decltype(room)::value;
        const unsigned parts =
            (size_t)n_blocks * n_kv_heads < FEW_PAGES ? PAGE_TOKENS / WARPS_OF<P> : 1;
        decode_kernel<P><<<dim3(n_blocks, n_kv_heads, parts), WARPS_OF<P> * 32, 0, stream>>>(
            FullDecodeArgs{ args, codec });
        return cudaGetLastError();
    });
}

} // namespace kvant
