/* append.cu - appends rows to pages: assigns tokens to thread blocks and warps, and reports refused
 * rows.
 *
 * A thread block processes up to 64 tokens of one kv head and one role. Its warps first quantise
 * rows into shared memory (encode.cuh). Then the tokens are written page by page (pack.cuh). */
#include "matrix_rows.cuh"
#include "../launch.h"

#include <algorithm>

namespace kvant
{

constexpr int WARPS = 8;

struct NoBook {
};
using PlainArgs = BookedAppendArgs<NoBook>;
using WideArgs = BookedAppendArgs<kvant_cuda_wide_book>;

template <int D, class Book> struct Chunk {
    alignas(16) float block_centers[WARPS][Lanes<D>::ROWS * Lanes<D>::ROW_STRIDE];
    Nibbles<D> nibbles;
    Book levels;
    BlockTokens tokens;
};

/* Called by the threads from PAGE_TOKENS on. */
KVANT_INLINE void load_levels(Levels &levels, const PlainArgs &args)
{
    const kvant_cuda_params &codec = args.roles[blockIdx.z].codec;
    const int i = (int)threadIdx.x - PAGE_TOKENS;
    if (i >= 0 && i < (int)KVANT_CUDA_MAX_LEVELS)
        levels.at[i] = make_float2(codec.thresholds[i], codec.values[i]);
}

/* Called by all threads. */
KVANT_INLINE void load_levels(WideLevels &levels, const WideArgs &args)
{
    static_assert(KVANT_CUDA_WIDE_LEVELS == WARPS * 32, "a thread loads a level");
    levels.thresholds[threadIdx.x] = args.books[blockIdx.z].thresholds[threadIdx.x];
    levels.values[threadIdx.x] = args.books[blockIdx.z].values[threadIdx.x];
}

/* Quantises the rows of tokens from first_token on; a few lanes of the warp share each row. */
template <int D, class Book>
KVANT_INLINE void quantize_rows(const AppendArgs &args, const AppendRole &role,
                                Chunk<D, Book> &chunk, float *space, int first_token,
                                uint32_t chunk_at, int kv_head, int lane)
{
    const int token = first_token + lane / Lanes<D>::LANES;
    const bool lacking = chunk.tokens.slot[token] < 0;
    if (__all_sync(FULL, lacking))
        return;
    const size_t row_at = lacking ? 0 : row_place(args, role, chunk_at, token, kv_head);
    Quantized q = encode_row<D>(chunk.nibbles, args, role, chunk.levels, space, lacking, token,
                                row_at, kv_head, lane);
    if (!lacking && lane % Lanes<D>::LANES == 0) {
        chunk.tokens.scale[token] = __half_as_ushort(__float2half_rn(q.scale));
        chunk.tokens.zero[token] = __half_as_ushort(__float2half_rn(q.zero));
    }
    bool refused = !lacking && !q.in_range;
    if (__any_sync(FULL, refused))
        refuse<D>(args, role, chunk.tokens, refused, chunk_at, token, row_at, kv_head, lane);
}

/* Appends the chunk of tokens from `first` on. */
template <int D, class Book, class Args>
KVANT_INLINE void append_chunk(const Args &args, Chunk<D, Book> &chunk, uint32_t first)
{
    const AppendRole &role = args.roles[blockIdx.z];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    if (threadIdx.x < PAGE_TOKENS)
        chunk.tokens.slot[threadIdx.x] = slot_of(args, first, args.chunk);
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < (int)args.chunk; t += MatrixRows<D, WARPS>::ROWS) {
        if (role.codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL)
            MatrixRows<D, WARPS>::transform(chunk.block_centers, args, role, chunk.tokens, t,
                                            min((int)args.chunk, (int)(args.n_tokens - first)) - t,
                                            first, kv_head);
        quantize_rows<D>(args, role, chunk, chunk.block_centers[warp], t + warp * Lanes<D>::ROWS,
                         first, kv_head, lane);
    }
    __syncthreads();
    write_block(
        chunk.tokens, role, (int)args.chunk, kv_head,
        [&](uint32_t *page) {
            write_codes<D>(role.codec, chunk.nibbles, chunk.tokens.page_tokens, page);
        },
        [&](int t, int at, uint32_t *page) {
            write_token<D>(role.codec, chunk.nibbles, t, at, page, lane);
        });
}

template <int D, class Book, class Args>
__global__ void __launch_bounds__(WARPS * 32, 4) append_kernel(const __grid_constant__ Args args)
{
    __shared__ Chunk<D, Book> chunk;
    load_levels(chunk.levels, args);
    append_chunk<D, Book>(args, chunk, blockIdx.x * args.chunk);
}

/* For a list of rows, whose length is on the device. A block takes every gridDim.x-th chunk. */
template <int D, class Book, class Args>
__global__ void __launch_bounds__(WARPS * 32, 4)
    append_list_kernel(const __grid_constant__ Args args)
{
    __shared__ Chunk<D, Book> chunk;
    const uint32_t n = row_count(args);
    if (blockIdx.x * args.chunk < n)
        load_levels(chunk.levels, args);
    begin_next();
    wait_for_prior();
#pragma unroll 1
    for (uint32_t first = blockIdx.x * args.chunk; first < n; first += gridDim.x * args.chunk) {
        append_chunk<D, Book>(args, chunk, first);
        __syncthreads(); /* the tokens are not used any more */
    }
}

/* Thread blocks of a role and kv head for a list: few, because most steps have an empty list. */
constexpr uint32_t LIST_BLOCKS = 16;

template <class Levels_, class Args>
static cudaError_t launch(const Args &p, uint32_t head_dim, int n_roles, int n_kv_heads,
                          cudaStream_t stream)
{
    return with_head_dim(head_dim, [&](auto d) {
        constexpr int D = decltype(d)::value;
        dim3 grid = grid_of(p, n_roles, n_kv_heads);
        if (!p.listed)
            return launch_kernel(append_kernel<D, Levels_, Args>, grid, WARPS * 32, 0, stream, p);
        if (p.n_tokens == 0)
            return cudaSuccess;
        grid.x = std::min(grid.x, LIST_BLOCKS);
        Args list = p;
        void *parameters[] = { &list };
        return launch_early((const void *)append_list_kernel<D, Levels_, Args>, grid, WARPS * 32,
                            parameters, 0, stream);
    });
}

cudaError_t launch_append(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                          cudaStream_t stream)
{
    const auto p = booked<NoBook>(args, n_roles, [](const kvant_cuda_codec &) { return NoBook{}; });
    return launch<Levels>(p, head_dim, n_roles, n_kv_heads, stream);
}

cudaError_t launch_append_wide(const AppendArgs &args, uint32_t head_dim, int n_roles,
                               int n_kv_heads, cudaStream_t stream)
{
    const auto p = booked<kvant_cuda_wide_book>(
        args, n_roles, [](const kvant_cuda_codec &codec) { return codec.wide; });
    return launch<WideLevels>(p, head_dim, n_roles, n_kv_heads, stream);
}

} // namespace kvant
