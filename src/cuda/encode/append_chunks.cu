/* append_chunks.cu - appends rows to pages of codes of several channels: octopus (CHANNELS = 3) and
 * hqmq (4). Also seals, as append.cu does.
 *
 * A thread block processes up to 64 tokens of one kv head and one role, a few rows at a time. Four
 * warps transform the rows (encode.cuh) into shared memory. Then each thread encodes a chunk
 * (encode_chunks.cuh), and 16 lanes per row add up the numbers for its scale in the order of
 * format.md. Codes of all tokens stay in shared memory until the words of pages are put
 * together. */
#include "append_tokens.cuh"
#include "encode_chunks.cuh"
#include "../launch.h"

namespace kvant
{

constexpr int THREADS = 256, MATRIX_WARPS = 4;

using ChunkAppendArgs = BookedAppendArgs<kvant_cuda_book>;

template <int D, int CHANNELS> struct ChunkRows {
    static constexpr int ROWS = Lanes<D>::ROWS * MATRIX_WARPS; /* rows at a time */
    static constexpr int CHUNKS = (D + CHANNELS - 1) / CHANNELS;
    /* Channels of the last triplet, and how many paddings are tried for it (one, of zeros, without
     * joint rounding). */
    static constexpr int LEFT = D % CHANNELS, WHOLE = D / CHANNELS,
                         TRIALS = LEFT == 0   ? 0
                                  : LEFT == 1 ? 10
                                              : 6;
    static constexpr int ITEMS = WHOLE + TRIALS;
    using Code = typename ChunkBook<CHANNELS>::Code;

    union {
        alignas(16) float block_centers[MATRIX_WARPS][Lanes<D>::ROWS * Lanes<D>::ROW_STRIDE];
        float rows[ROWS][D];
    };
    /* For each item. octopus: the product for the scale, and the error of trials. hqmq: squares and
     * product. */
    float first[ROWS][ITEMS], second[ROWS][ITEMS];
    Code trials[ROWS][TRIALS ? TRIALS : 1];
    Code codes[PAGE_TOKENS][CHUNKS];
    float squares[ROWS], scale[ROWS];
    bool refused[PAGE_TOKENS];
    typename ChunkBook<CHANNELS>::Levels levels;
    BlockTokens tokens;
};

template <int D>
KVANT_INLINE void quantize_item(ChunkRows<D, 3> &space, const kvant_cuda_book &book, int token,
                                int row, int item)
{
    using S = ChunkRows<D, 3>;
    const float scale = space.scale[row], inverse = scale > 0 ? __frcp_rn(scale) : 0;
    const bool whole = item < S::WHOLE;
    const float *from = space.rows[row] + 3 * min(item, S::WHOLE);
    const float x = __fmul_rn(from[0], inverse);
    float y = whole || S::LEFT == 2 ? __fmul_rn(from[1], inverse) : 0,
          z = whole ? __fmul_rn(from[2], inverse) : 0;
    const int trial = item - S::WHOLE;
    if (!whole && book.rounding == 1) {
        if (trial > 0)
            return;
    } else if (!whole) {
        const float size = __fadd_rn(fabsf(x), fabsf(y));
        const Padding pad = padding_of(S::LEFT, trial);
        y = S::LEFT == 2 ? y : __fmul_rn(pad.y, size);
        z = __fmul_rn(pad.z, size);
    }
    const TripletCode q = quantize_triplet(space.levels, book, x, y, z);
    if (whole) {
        space.codes[token][item] = (uint16_t)q.code;
        space.first[row][item] = __fmul_rn(q.norm, q.along);
    } else if constexpr (S::LEFT != 0) {
        const float2 result = trial_result<S::LEFT>(space.levels, book, q.code, x, y);
        space.trials[row][trial] = (uint16_t)q.code;
        space.first[row][item] = result.y;
        space.second[row][item] = result.x;
    }
}

template <int D>
KVANT_INLINE void quantize_item(ChunkRows<D, 4> &space, const kvant_cuda_book &book, int token,
                                int row, int item)
{
    const float4 x = *reinterpret_cast<const float4 *>(space.rows[row] + 4 * item);
    const uint32_t index = closest_direction(space.levels, (int)book.n_secondaries, x);
    float w[4];
    for (int i = 0; i < 4; i++)
        w[i] = hqmq_component(space.levels, index, i);
    space.codes[token][item] = index;
    space.first[row][item] = __fadd_rn(__fadd_rn(__fmul_rn(x.x, x.x), __fmul_rn(x.y, x.y)),
                                       __fadd_rn(__fmul_rn(x.z, x.z), __fmul_rn(x.w, x.w)));
    space.second[row][item] = __fadd_rn(__fadd_rn(__fmul_rn(x.x, w[0]), __fmul_rn(x.y, w[1])),
                                        __fadd_rn(__fmul_rn(x.z, w[2]), __fmul_rn(x.w, w[3])));
}

/* Sums and extremes over the 16 lanes of a row. Sums have the order of format.md. */
KVANT_INLINE float sum_of_row(float x)
{
    unrolled_for (int width = 8; width > 0; width /= 2)
        x = __fadd_rn(x, __shfl_xor_sync(FULL, x, width));
    return x;
}

KVANT_INLINE float max_of_row(float x)
{
    unrolled_for (int width = 8; width > 0; width /= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL, x, width));
    return x;
}

/* Computes the scale to store, with 16 lanes; also chooses the padding of the last triplet. */
template <int D>
KVANT_INLINE float finish_row(ChunkRows<D, 3> &space, const kvant_cuda_params &codec,
                              const kvant_cuda_book &book, int token, int row, int lane)
{
    using S = ChunkRows<D, 3>;
    int best = S::WHOLE;
    if constexpr (S::LEFT != 0) {
        for (int i = S::WHOLE + 1; i < S::ITEMS && book.rounding != 1; i++)
            if (space.second[row][i] < space.second[row][best])
                best = i;
        if (lane == 0)
            space.codes[token][S::WHOLE] = space.trials[row][best - S::WHOLE];
    }
    float sum = 0;
    for (int c = lane; c < S::CHUNKS; c += 16)
        sum = __fadd_rn(sum, space.first[row][c < S::WHOLE ? c : best]);
    const float product = sum_of_row(sum), scale = space.scale[row],
                inverse = scale > 0 ? __frcp_rn(scale) : 0;
    const float unbiased =
        product > 0 ? __fdiv_rn(__fmul_rn(space.squares[row], inverse), product) : 0;
    return codec.unbiased && product > 0 && unbiased <= 4 * scale ? unbiased : scale;
}

/* The radii are put into the codes here. */
template <int D>
KVANT_INLINE float finish_row(ChunkRows<D, 4> &space, const kvant_cuda_params &codec,
                              const kvant_cuda_book &book, int token, int row, int lane)
{
    using S = ChunkRows<D, 4>;
    const float top = (float)((1u << book.radius_bits) - 1);
    float largest = 0;
    for (int c = lane; c < S::CHUNKS; c += 16)
        largest = fmaxf(largest, __fsqrt_rn(space.first[row][c]));
    const float step = to_half_and_back(__fdiv_rn(max_of_row(largest), top)),
                inverse = step > 0 ? __frcp_rn(step) : 0;
    float squares = 0, products = 0;
    for (int c = lane; c < S::CHUNKS; c += 16) {
        const float level = __fsub_rn(
            __fadd_rn(__fmul_rn(__fsqrt_rn(space.first[row][c]), inverse), 8388608.0f), 8388608.0f);
        const float radius = level < top ? level : top;
        squares = __fadd_rn(squares, radius > 0 ? space.first[row][c] : 0);
        products = __fadd_rn(products, __fmul_rn(radius, space.second[row][c]));
        space.codes[token][c] |= (uint32_t)radius << book.index_bits;
    }
    squares = sum_of_row(squares);
    products = sum_of_row(products);
    return !codec.unbiased || !(step > 0) ? step : products > 0 ? __fdiv_rn(squares, products) : 0;
}

/* Loads and transforms the rows from first_token on into shared memory, and computes the sums for
 * their scales. */
template <int D, int CHANNELS>
KVANT_INLINE void load_rows(ChunkRows<D, CHANNELS> &space, const AppendArgs &args,
                            const AppendRole &role, int first_token, uint32_t chunk_at, int kv_head,
                            int warp, int lane)
{
    using L = Lanes<D>;
    const int row = warp * L::ROWS + lane / L::LANES, token = first_token + row,
              in_row = lane % L::LANES;
    float y[L::NUMBERS];
    const bool works = warp < MATRIX_WARPS, lacking = !works || space.tokens.slot[token] < 0;
    if (works) {
        const size_t row_at = lacking ? 0 : row_place(args, role, chunk_at, token, kv_head);
        transform_row<D>(y, args, role, space.block_centers[warp], lacking, row_at, kv_head, lane);
        const float squares = row_dot<D>(y, y),
                    norm = __fmul_rn(__fsqrt_rn(squares), role.codec.inverse_sqrt_dim);
        float largest = 0;
        unrolled_for (int i = 0; i < L::NUMBERS; i++)
            largest = max_or_nan(largest, fabsf(y[i]));
        unrolled_for (int k = L::LANES / 2; k > 0; k /= 2)
            largest = max_or_nan(largest, __shfl_xor_sync(FULL, largest, k));
        if (in_row == 0) {
            space.squares[row] = squares;
            space.scale[row] = to_half_and_back(norm);
            space.refused[token] = !lacking && !((CHANNELS == 3 ? norm : largest) <= 65504.0f);
        }
    }
    __syncthreads(); /* the sums overwrite the transposed rows */
    if (works)
        unrolled_for (int i = 0; i < L::NUMBERS; i++)
            if (L::LANES == L::TILES || L::OWN * in_row < 16)
                space.rows[row][i / L::OWN * 16 + L::OWN * in_row + i % L::OWN] = y[i];
    __syncthreads();
}

template <int D, int CHANNELS>
KVANT_INLINE void refuse_rows(ChunkRows<D, CHANNELS> &space, const AppendArgs &args,
                              const AppendRole &role, int first_token, uint32_t chunk_at,
                              int kv_head, int warp, int lane)
{
    using L = Lanes<D>;
    if (warp >= MATRIX_WARPS)
        return;
    const int token = first_token + warp * L::ROWS + lane / L::LANES;
    const bool refused = space.refused[token];
    if (__any_sync(FULL, refused))
        refuse<D>(args, role, space.tokens, refused, token,
                  refused ? row_place(args, role, chunk_at, token, kv_head) : 0, kv_head, lane);
}

template <int D, int CHANNELS>
KVANT_INLINE void quantize_rows(ChunkRows<D, CHANNELS> &space, const AppendArgs &args,
                                const AppendRole &role, const kvant_cuda_book &book,
                                int first_token, uint32_t chunk_at, int kv_head, int warp, int lane)
{
    using S = ChunkRows<D, CHANNELS>;
    load_rows(space, args, role, first_token, chunk_at, kv_head, warp, lane);
#pragma unroll 1
    for (int i = threadIdx.x; i < S::ROWS * S::ITEMS; i += THREADS) {
        const int row = i / S::ITEMS, token = first_token + row;
        if (space.tokens.slot[token] >= 0)
            quantize_item(space, book, token, row, i % S::ITEMS);
    }
    __syncthreads();
#pragma unroll 1
    for (int row = threadIdx.x / 16; row < S::ROWS; row += THREADS / 16) {
        const int token = first_token + row;
        const float stored = finish_row(space, role.codec, book, token, row, (int)threadIdx.x % 16);
        if (threadIdx.x % 16 == 0) {
            space.tokens.scale[token] = __half_as_ushort(__float2half_rn(stored));
            space.refused[token] |= space.tokens.slot[token] >= 0 && !(stored <= 65504.0f);
        }
    }
    __syncthreads();
    refuse_rows(space, args, role, first_token, chunk_at, kv_head, warp, lane);
    __syncthreads();
}

/* Writes all words of a page that have codes of tokens of the block. */
template <int D, int CHANNELS>
KVANT_INLINE void write_words(const ChunkRows<D, CHANNELS> &space, const kvant_cuda_params &codec,
                              uint32_t *page)
{
    constexpr int CHUNKS = ChunkRows<D, CHANNELS>::CHUNKS;
    const bool keys = codec.role == KVANT_ROLE_K;
    for_each_chunk_plane((int)codec.bits, CHUNKS, keys, [&](int p, int first, int shift) {
        const int fields = 16 / p, n_words = keys ? 4 * p * ((CHUNKS + 1) / 2) : 2 * p * CHUNKS;
        const uint32_t ones = (1u << p) - 1;
#pragma unroll 1
        for (int at = threadIdx.x; at < n_words; at += THREADS) {
            uint32_t bits = 0, mask = 0;
#pragma unroll 1
            for (int f = 0; f < fields; f++)
                unrolled_for (int half = 0; half < 2; half++) {
                    int place, chunk;
                    if (keys) { /* halves of a word are chunks */
                        const int position = at % (4 * p) + 4 * p * f;
                        place = 16 * (position % 4) + 8 * (position / 32) + position % 32 / 4;
                        chunk = 2 * (at / (4 * p)) + half;
                    } else { /* halves of a word are neighbouring tokens */
                        const int k = at / CHUNKS * fields + f;
                        place = 16 * (k % 4) + 8 * (k % 8 / 4) + 2 * (k / 8) + half;
                        chunk = at % CHUNKS;
                    }
                    const int token = space.tokens.page_tokens.at[place];
                    if (token == NONE || chunk >= CHUNKS)
                        continue;
                    bits |= (space.codes[token][chunk] >> shift & ones) << (p * f + 16 * half);
                    mask |= ones << (p * f + 16 * half);
                }
            put_bits(page + first + at, bits, mask);
        }
    });
}

/* A warp writes one token code by code. */
template <int D, int CHANNELS>
KVANT_INLINE void write_chunks(const ChunkRows<D, CHANNELS> &space, const kvant_cuda_params &codec,
                               int token, int at, uint32_t *page, int lane)
{
    constexpr int CHUNKS = ChunkRows<D, CHANNELS>::CHUNKS;
    const bool keys = codec.role == KVANT_ROLE_K;
    for_each_chunk_plane((int)codec.bits, CHUNKS, keys, [&](int p, int first, int shift) {
        const uint32_t ones = (1u << p) - 1;
        for (int chunk = lane; chunk < CHUNKS; chunk += 32) {
            const Place where = chunk_place(p, CHUNKS, keys, at, chunk);
            put_bits(page + first + where.word,
                     (space.codes[token][chunk] >> shift & ones) << where.bit, ones << where.bit);
        }
    });
}

template <int D, int CHANNELS>
__global__ void __launch_bounds__(THREADS)
    append_chunks_kernel(const __grid_constant__ ChunkAppendArgs args)
{
    using S = ChunkRows<D, CHANNELS>;
    __shared__ S space;
    const AppendRole &role = args.roles[blockIdx.z];
    const kvant_cuda_book &book = args.books[blockIdx.z];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    const uint32_t first = blockIdx.x * args.chunk;
    if (threadIdx.x < PAGE_TOKENS)
        space.tokens.slot[threadIdx.x] = slot_of(args, first);
    space.levels.load(book);
    __syncthreads();
#pragma unroll 1
    for (int t = 0; t < (int)args.chunk; t += S::ROWS)
        quantize_rows(space, args, role, book, t, first, kv_head, warp, lane);
    write_block(
        space.tokens, role, (int)args.chunk, kv_head,
        [&](uint32_t *page) { write_words(space, role.codec, page); },
        [&](int t, int at, uint32_t *page) { write_chunks(space, role.codec, t, at, page, lane); });
}

cudaError_t launch_append_chunks(const AppendArgs &args, uint32_t head_dim, int n_roles,
                                 int n_kv_heads, cudaStream_t stream)
{
    const auto p = booked<kvant_cuda_book>(
        args, n_roles, [](const kvant_cuda_codec &codec) { return codec.book; });
    const dim3 grid = grid_of(p, n_roles, n_kv_heads);
    const bool triplets = args.roles[0].codec.codes == KVANT_CUDA_CODES_TRIPLETS;
    return with_head_dim(head_dim, [&](auto d) {
        if (triplets)
            append_chunks_kernel<decltype(d)::value, 3><<<grid, THREADS, 0, stream>>>(p);
        else
            append_chunks_kernel<decltype(d)::value, 4><<<grid, THREADS, 0, stream>>>(p);
        return cudaGetLastError();
    });
}

} // namespace kvant
