/* decode.cu - decodes whole pages to rows: prefill needs 16-bit keys and values, and a cache opens
 * pages.
 *
 * Decoding follows the CPU's arithmetic bit by bit. A thread block takes one page, a warp one token
 * at a time, a lane some channels. The page's words are read once from memory and then from the
 * first-level cache. A reader per sort of codes has the shared memory for it and reads a token's
 * row; what follows is the same for all: undo the transform, multiply by the scale, add the centre,
 * store. A row that stays transformed is stored as sealed rows become open ones on the CPU. */
#include "../chunks/chunk_numbers.cuh"
#include "../launch.h"
#include "../rotate.cuh"
#include "../trellis/trellis_steps.cuh"
#include "pages.h"
#include "../any/any.h"
#include "read_code.cuh"

namespace kvant
{

constexpr int WARPS = 8;

struct NoBook {};

/* One code per channel with a scale per token or group, and open pages. */
template <int D, class Book, int LEVELS> struct CodeReader {
    float values[LEVELS];

    KVANT_INLINE void load(const DecodeArgs &args, const NoBook &)
    {
        if (threadIdx.x < LEVELS)
            values[threadIdx.x] = args.codec.values[threadIdx.x];
    }
    KVANT_INLINE void load(const DecodeArgs &, const kvant_cuda_wide_book &book)
    {
        static_assert(KVANT_CUDA_WIDE_LEVELS == WARPS * 32, "a thread loads a value");
        values[threadIdx.x] = book.values[threadIdx.x];
    }

    /* Which of a page's scales a number has. */
    KVANT_INLINE static int scale_index(const kvant_cuda_params &codec, int token, int channel)
    {
        return codec.grouping == KVANT_CUDA_GROUP_TOKENS32     ? token / 32 * (int)codec.head_dim + channel
               : codec.grouping == KVANT_CUDA_GROUP_CHANNELS32 ? channel / 32 * PAGE_TOKENS + token
                                                               : token;
    }

    KVANT_INLINE Row<D> read(const kvant_cuda_params &codec, const Book &, const uint8_t *page, int token, int,
                             int lane)
    {
        const __half *numbers = reinterpret_cast<const __half *>(page + codec.metadata_offset);
        if (codec.codes == KVANT_CUDA_CODES_OPEN)
            return load_row<D>(page, (size_t)token * D, KVANT_CUDA_F16, lane);
        const bool codebook = codec.codes == KVANT_CUDA_CODES_CODEBOOK;
        Row<D> row;
        row.each(lane, [&](float &x, int channel) {
            const int at = scale_index(codec, token, channel);
            const float scale = __half2float(numbers[at]);
            const float zero = codebook || codec.symmetric ? 0 : __half2float(numbers[codec.n_scales + at]);
            const uint32_t code = read_code(codec, reinterpret_cast<const uint32_t *>(page), token, channel);
            x = codebook ? __fmul_rn(scale, values[code])
                         : __fadd_rn(__fmul_rn(scale, __fadd_rn((float)code, codec.offset)), zero);
        });
        return row;
    }
};

/* The trellis bits of the token go to shared memory in the order of steps; lanes find the subsets
 * of their channels there. */
template <int D> struct TrellisReader {
    float values[KVANT_CUDA_TRELLIS_LEVELS];
    uint8_t bits[WARPS][D];

    KVANT_INLINE void load(const DecodeArgs &, const kvant_cuda_trellis &trellis)
    {
        if (threadIdx.x < KVANT_CUDA_TRELLIS_LEVELS)
            values[threadIdx.x] = trellis.values[threadIdx.x];
    }

    KVANT_INLINE Row<D> read(const kvant_cuda_params &codec, const kvant_cuda_trellis &trellis, const uint8_t *page,
                             int token, int warp, int lane)
    {
        const float scale = __half2float(reinterpret_cast<const __half *>(page + codec.metadata_offset)[token]);
        uint32_t codes[Row<D>::PER_LANE];
        int steps[Row<D>::PER_LANE];
        __syncwarp(); /* the row before has been read */
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
            codes[j] = read_code(codec, reinterpret_cast<const uint32_t *>(page), token, lane + 32 * j);
            steps[j] = trellis_step(codec.role, (int)codec.bits, D, lane + 32 * j);
            bits[warp][steps[j]] = codes[j] & 1;
        }
        __syncwarp();
        Row<D> row;
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            row.x[j] = __fmul_rn(scale, values[8 * (codes[j] / 2) + subset_at(trellis, bits[warp], D, steps[j])]);
        return row;
    }
};

/* Codes of several channels. */
template <int D, int CHANNELS> struct ChunkReader {
    typename ChunkBook<CHANNELS>::Levels levels;

    KVANT_INLINE void load(const DecodeArgs &, const kvant_cuda_book &book)
    {
        levels.load(book);
    }

    KVANT_INLINE Row<D> read(const kvant_cuda_params &codec, const kvant_cuda_book &book, const uint8_t *page,
                             int token, int, int lane)
    {
        const float scale = __half2float(reinterpret_cast<const __half *>(page + codec.metadata_offset)[token]);
        Row<D> row;
        row.each(lane, [&](float &x, int channel) {
            const uint32_t code = read_chunk(codec, (int)book.n_chunks, reinterpret_cast<const uint32_t *>(page), token,
                                             channel / CHANNELS);
            x = decode_channel(levels, book, code, channel % CHANNELS, scale);
        });
        return row;
    }
};

template <int D> KVANT_INLINE void write_row(const DecodeArgs &args, Row<D> &row, int token, int kv_head, int lane)
{
    __shared__ __align__(16) float space[WARPS][D];
    transform_back(row, args.codec, weights_of(args.codec, args.inverse_weights, kv_head), space[threadIdx.x >> 5],
                   lane);
    if (args.scale)
        row.each(lane, [&](float &x, int channel) { x = __fmul_rn(x, args.scale[kv_head * D + channel]); });
    if (args.center)
        row.each(lane, [&](float &x, int channel) { x = __fadd_rn(x, args.center[kv_head * D + channel]); });
    if (args.transformed)
        row.each(lane, [](float &x, int) { x = fminf(fmaxf(x, -65504.0f), 65504.0f); });
    const size_t block = args.to ? args.to[blockIdx.x] : blockIdx.x;
    const size_t at = (block * PAGE_TOKENS + token) * args.token_stride + kv_head * args.out_head_stride;
    store_row(args.out, at, args.type, lane, row);
}

template <class Book> struct BookedArgs {
    DecodeArgs decode;
    Book book;
};

template <int D, class Reader, class Book>
__global__ void __launch_bounds__(WARPS * 32) decode_kernel(const __grid_constant__ BookedArgs<Book> all)
{
    __shared__ Reader reader;
    const DecodeArgs &args = all.decode;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    const uint8_t *page =
        args.base + (size_t)(uint32_t)args.blocks[blockIdx.x] * args.block_stride + kv_head * args.head_stride;
    reader.load(args, all.book);
    __syncthreads();
    for (int t = warp; t < PAGE_TOKENS; t += WARPS) {
        Row<D> row = reader.read(args.codec, all.book, page, t, warp, lane);
        write_row(args, row, t, kv_head, lane);
    }
}

cudaError_t launch_decode(const DecodeArgs &args, const kvant_cuda_codec &codec, uint32_t n_blocks,
                          uint32_t n_kv_heads, cudaStream_t stream)
{
    const dim3 grid(n_blocks, n_kv_heads);
    if (kvant_cuda_needs_any(&codec.params))
        return launch_decode_any(args, codec, n_blocks, n_kv_heads, stream);
    return with_head_dim(args.codec.head_dim, [&](auto d) {
        constexpr int D = decltype(d)::value;
        auto launch = [&](auto reader, const auto &book) {
            using Reader = typename decltype(reader)::type;
            using Book = std::decay_t<decltype(book)>;
            decode_kernel<D, Reader, Book><<<grid, WARPS * 32, 0, stream>>>(BookedArgs<Book>{ args, book });
        };
        switch (args.codec.codes) {
        case KVANT_CUDA_CODES_TRELLIS: launch(Type<TrellisReader<D>>(), codec.trellis); break;
        case KVANT_CUDA_CODES_TRIPLETS: launch(Type<ChunkReader<D, 3>>(), codec.book); break;
        case KVANT_CUDA_CODES_QUATERNIONS: launch(Type<ChunkReader<D, 4>>(), codec.book); break;
        default:
            if (args.codec.kind == KVANT_CUDA_CODEBOOK_WIDE)
                launch(Type<CodeReader<D, kvant_cuda_wide_book, KVANT_CUDA_WIDE_LEVELS>>(), codec.wide);
            else
                launch(Type<CodeReader<D, NoBook, KVANT_CUDA_MAX_LEVELS>>(), NoBook{});
        }
        return cudaGetLastError();
    });
}

} // namespace kvant
