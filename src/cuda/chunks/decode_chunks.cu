/* decode_chunks.cu - decodes pages of codes of several channels (octopus, hqmq) to rows, bit by bit
 * as on the CPU. A thread block takes one page, a warp one token at a time, a lane some channels
 * with the codes of their chunks. */
#include "chunk_numbers.cuh"
#include "../launch.h"
#include "../pages/write_row.cuh"

namespace kvant
{

struct ChunkDecodeArgs {
    DecodeArgs decode;
    kvant_cuda_book book;
};

__device__ __forceinline__ uint32_t read_chunk(const kvant_cuda_params &codec, int n_chunks, const uint32_t *words,
                                               int token, int chunk)
{
    uint32_t code = 0;
    for_each_chunk_plane((int)codec.bits, n_chunks, codec.role == KVANT_ROLE_K, [&](int p, int first, int shift) {
        const Place where = chunk_place(p, n_chunks, codec.role == KVANT_ROLE_K, token, chunk);
        code |= (__ldg(words + first + where.word) >> where.bit & ((1u << p) - 1)) << shift;
    });
    return code;
}

__device__ __forceinline__ float decode_channel(const OctopusLevels &levels, const kvant_cuda_book &book,
                                                uint32_t code, int i, float scale)
{
    const Point p = octopus_triplet(levels, book.direction_bits, code, scale);
    return i == 0 ? p.x : i == 1 ? p.y : p.z;
}

/* An index beyond the directions decodes to zero. */
__device__ __forceinline__ float decode_channel(const HqmqSecondaries &levels, const kvant_cuda_book &book,
                                                uint32_t code, int i, float scale)
{
    const uint32_t index = code & ((1u << book.index_bits) - 1), radius = code >> book.index_bits;
    return index < 24 * book.n_secondaries
               ? __fmul_rn(__fmul_rn(scale, (float)radius), hqmq_component(levels, index, i))
               : 0;
}

template <int D, int CHANNELS>
__global__ void __launch_bounds__(WARPS * 32) decode_chunks_kernel(const __grid_constant__ ChunkDecodeArgs all)
{
    __shared__ typename ChunkBook<CHANNELS>::Levels levels;
    const DecodeArgs &args = all.decode;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    const uint8_t *page =
        args.base + (size_t)(uint32_t)args.blocks[blockIdx.x] * args.block_stride + kv_head * args.head_stride;
    const __half *scales = reinterpret_cast<const __half *>(page + args.codec.metadata_offset);
    levels.load(all.book);
    __syncthreads();
    for (int t = warp; t < PAGE_TOKENS; t += WARPS) {
        const float scale = __half2float(scales[t]);
        Row<D> row;
#pragma unroll
        for (int j = 0; j < Row<D>::PER_LANE; j++) {
            const int channel = lane + 32 * j;
            const uint32_t code = read_chunk(args.codec, (int)all.book.n_chunks,
                                             reinterpret_cast<const uint32_t *>(page), t, channel / CHANNELS);
            row.x[j] = decode_channel(levels, all.book, code, channel % CHANNELS, scale);
        }
        write_row(args, row, t, kv_head, lane);
    }
}

cudaError_t launch_decode_chunks(const DecodeArgs &args, const kvant_cuda_book &book, uint32_t head_dim,
                                 uint32_t n_blocks, uint32_t n_kv_heads, cudaStream_t stream)
{
    const ChunkDecodeArgs p{ args, book };
    const dim3 grid(n_blocks, n_kv_heads);
    const bool triplets = args.codec.codes == KVANT_CUDA_CODES_TRIPLETS;
    return with_head_dim(head_dim, [&](auto d) {
        if (triplets)
            decode_chunks_kernel<decltype(d)::value, 3><<<grid, WARPS * 32, 0, stream>>>(p);
        else
            decode_chunks_kernel<decltype(d)::value, 4><<<grid, WARPS * 32, 0, stream>>>(p);
        return cudaGetLastError();
    });
}

} // namespace kvant
