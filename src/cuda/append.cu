/* append.cu - rows of numbers into pages: rotate, quantise, write. The bytes are those of the CPU's encoder,
 * so all arithmetic is in single roundings and in its order (docs/format.md, "Numbers").
 *
 * A block takes up to 64 tokens of one kv head and one role. First a warp a token quantises into shared
 * memory; then the tokens are written page by page. Tokens share words, so a word is stored whole when the
 * block has all of its codes, and its own bits are flipped by an atomic otherwise: other tokens of the word
 * may be written at the same time. */
#include "append.h"
#include "launch.h"
#include "layout.cuh"
#include "rotate.cuh"

namespace kvant
{

constexpr int WARPS = 8;
constexpr int FEW_TOKENS = 6; /* up to so many tokens of a page are written code by code */

template <int D> struct Chunk {
    uint8_t codes[PAGE_TOKENS][D + 4]; /* + 4: tokens in different banks */
    float thresholds[KVANT_CUDA_MAX_LEVELS], values[KVANT_CUDA_MAX_LEVELS];
    uint16_t scale[PAGE_TOKENS], zero[PAGE_TOKENS];
    int64_t slot[PAGE_TOKENS];     /* negative: no token */
    uint8_t token_at[PAGE_TOKENS]; /* of the page being written: which token of the chunk, NONE without one */
    uint32_t whole[2], single[2];  /* bit i: token i stands for its page, or is written by itself */
};

constexpr uint8_t NONE = 255;

struct Quantized {
    float scale, zero;
    bool in_range;
};

__device__ __forceinline__ uint8_t nearest(const float *thresholds, uint32_t bits, float u)
{
    uint32_t code = 0;
    for (uint32_t step = 1u << (bits - 1); step; step /= 2)
        code += u > thresholds[code + step - 1] ? step : 0;
    return (uint8_t)code;
}

__device__ __forceinline__ float to_half_and_back(float x)
{
    return __half2float(__float2half_rn(x));
}

template <int D>
__device__ __forceinline__ Quantized quantize_codebook(const kvant_cuda_params &codec, Chunk<D> &chunk, int token,
                                                       const Row<D> &y, int lane)
{
    float squares = ordered_dot(y, y);
    float norm = __fmul_rn(__fsqrt_rn(squares), codec.inverse_sqrt_dim);
    float scale = to_half_and_back(norm), inverse = scale > 0 ? __fdiv_rn(1, scale) : 0, stored = scale;
    Row<D> decoded;
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++) {
        uint8_t code = nearest(chunk.thresholds, codec.bits, __fmul_rn(y.x[j], inverse));
        chunk.codes[token][lane + 32 * j] = code;
        decoded.x[j] = chunk.values[code];
    }
    if (codec.unbiased && scale > 0) {
        float product = ordered_dot(y, decoded);
        stored = product > 0 ? __fdiv_rn(squares, product) : 0;
    }
    return Quantized{ stored, 0, norm <= 65504.0f && stored <= 65504.0f };
}

template <int D>
__device__ __forceinline__ Quantized quantize_uniform(const kvant_cuda_params &codec, Chunk<D> &chunk, int token,
                                                      const Row<D> &y, int lane)
{
    float min = y.x[0], max = y.x[0];
#pragma unroll
    for (int j = 1; j < Row<D>::PER_LANE; j++)
        min = fminf(min, y.x[j]), max = fmaxf(max, y.x[j]);
    min = __fadd_rn(-warp_max(-min), 0.0f); /* -0 becomes 0, as the CPU has it */
    max = warp_max(max);
    float zero = codec.symmetric ? 0 : to_half_and_back(min);
    float range = codec.symmetric ? fmaxf(fabsf(min), fabsf(max)) : __fadd_rn(__fsub_rn(max, min), 0.0f);
    float scale = to_half_and_back(__fdiv_rn(range, codec.levels)), inverse = scale > 0 ? __fdiv_rn(1, scale) : 0;
    float low = codec.symmetric ? -codec.levels : 0;
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++) {
        float level = rintf(__fmul_rn(__fsub_rn(y.x[j], zero), inverse));
        level = fminf(fmaxf(level, low), codec.levels);
        chunk.codes[token][lane + 32 * j] = (uint8_t)__fsub_rn(level, codec.offset);
    }
    return Quantized{ scale, codec.symmetric ? 0 : min, fmaxf(fabsf(min), fabsf(max)) <= 65504.0f };
}

template <int D> __device__ __forceinline__ bool is_finite(const Row<D> &row)
{
    bool finite = true;
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++)
        finite &= fabsf(row.x[j]) <= 3.4028234e38f;
    return __all_sync(FULL, finite);
}

/* Quantises token `token` of the chunk; its slot becomes negative when it is refused. */
template <int D>
__device__ void quantize_token(const AppendArgs &args, const AppendRole &role, Chunk<D> &chunk, int token,
                               size_t row_at, int kv_head, int lane)
{
    Row<D> row = load_row<D>(role.rows, row_at, args.type, lane);
    if (role.center)
#pragma unroll
        for (int j = 0; j < Row<D>::PER_LANE; j++)
            row.x[j] = __fsub_rn(row.x[j], role.center[kv_head * D + lane + 32 * j]);
    uint32_t reason = is_finite(row) ? 0 : KVANT_CUDA_ROW_NONFINITE;
    if (!reason) {
        rotate(row, role.codec.rotation, lane);
        bool codebook = role.codec.kind >= KVANT_CUDA_CODEBOOK2;
        Quantized q = codebook ? quantize_codebook(role.codec, chunk, token, row, lane)
                               : quantize_uniform(role.codec, chunk, token, row, lane);
        reason = is_finite(row) && q.in_range ? 0 : KVANT_CUDA_ROW_RANGE;
        if (lane == 0) {
            chunk.scale[token] = __half_as_ushort(__float2half_rn(q.scale));
            chunk.zero[token] = __half_as_ushort(__float2half_rn(q.zero));
        }
    }
    __syncwarp(); /* all lanes have seen the slot */
    if (reason && lane == 0) {
        chunk.slot[token] = -1;
        if (args.refused)
            atomicOr(args.refused, reason);
    }
}

/* Flips the bits of *word that differ from bits under mask; nobody else writes those bits. */
__device__ __forceinline__ void put_bits(uint32_t *word, uint32_t bits, uint32_t mask)
{
    atomicXor(word, (*word ^ bits) & mask);
}

struct Plane {
    int bits, shift, first_word, row_tiles, column_tiles;
};

__device__ __forceinline__ Plane plane_of(const kvant_cuda_params &codec, int i)
{
    int d = codec.head_dim / 16, rows = codec.role == KVANT_ROLE_K ? 4 : d,
        columns = codec.role == KVANT_ROLE_K ? d : 4;
    int first = plane_bits(codec.bits, 0);
    return i == 0 ? Plane{ first, 0, 0, rows, columns }
                  : Plane{ plane_bits(codec.bits, 1), first, plane_words(first, rows, columns), rows, columns };
}

/* One word of a page from the tokens that the chunk has of it. */
template <int D, int BITS, bool KEYS>
__device__ __forceinline__ void write_word(const Chunk<D> &chunk, int shift, uint32_t *words, int at)
{
    constexpr int ROW_TILES = KEYS ? 4 : D / 16, COLUMN_TILES = KEYS ? D / 16 : 4;
    constexpr int TILES = 4 / BITS, UNITS = (COLUMN_TILES + TILES - 1) / TILES;
    constexpr uint32_t ONES = (1u << BITS) - 1;
    int g = at / (128 * UNITS), in_group = min(4, ROW_TILES - 4 * g), rest = at - 128 * g * UNITS;
    int rt = 4 * g + rest % in_group, lane = rest / in_group % 32, unit = rest / in_group / 32;
    uint32_t bits = 0, mask = 0;
#pragma unroll
    for (int field = 0; field < 16 / BITS; field++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = 16 * rt + lane / 4 + 8 * (field & 1);
            int column = 16 * (unit * TILES + field / 4) + 2 * (lane % 4) + 8 * (field >> 1 & 1) + half;
            if (COLUMN_TILES % TILES != 0 && column >= 16 * COLUMN_TILES)
                continue; /* fields beyond the last tile stay zero */
            int token = chunk.token_at[KEYS ? row : column];
            if (token == NONE)
                continue;
            bits |= ((uint32_t)chunk.codes[token][KEYS ? column : row] >> shift & ONES)
                    << (BITS * field + 16 * half);
            mask |= ONES << (BITS * field + 16 * half);
        }
    if (mask == FULL)
        words[at] = bits;
    else if (mask)
        put_bits(words + at, bits, mask);
}

template <int D, int BITS, bool KEYS>
__device__ __forceinline__ void write_plane(const Chunk<D> &chunk, int shift, uint32_t *words)
{
    constexpr int N = plane_words(BITS, KEYS ? 4 : D / 16, KEYS ? D / 16 : 4);
    for (int at = threadIdx.x; at < N; at += WARPS * 32)
        write_word<D, BITS, KEYS>(chunk, shift, words, at);
}

template <int D>
__device__ __forceinline__ void write_plane(const Chunk<D> &chunk, const Plane &plane, bool keys, uint32_t *page)
{
    uint32_t *words = page + plane.first_word;
    switch (2 * plane.bits + keys) {
    case 2: return write_plane<D, 1, false>(chunk, plane.shift, words);
    case 3: return write_plane<D, 1, true>(chunk, plane.shift, words);
    case 4: return write_plane<D, 2, false>(chunk, plane.shift, words);
    case 5: return write_plane<D, 2, true>(chunk, plane.shift, words);
    case 8: return write_plane<D, 4, false>(chunk, plane.shift, words);
    default: return write_plane<D, 4, true>(chunk, plane.shift, words);
    }
}

template <int D>
__device__ void write_page(const kvant_cuda_params &codec, Chunk<D> &chunk, int leader, uint8_t *page)
{
    __syncthreads(); /* token_at of the page before is not in use any more */
    if (threadIdx.x < PAGE_TOKENS)
        chunk.token_at[threadIdx.x] = NONE;
    __syncthreads();
    if (threadIdx.x < PAGE_TOKENS && chunk.slot[threadIdx.x] >= 0 &&
        chunk.slot[threadIdx.x] / PAGE_TOKENS == chunk.slot[leader] / PAGE_TOKENS)
        chunk.token_at[chunk.slot[threadIdx.x] % PAGE_TOKENS] = (uint8_t)threadIdx.x;
    __syncthreads();
    for (int i = 0; i < 2 && plane_bits(codec.bits, i); i++)
        write_plane(chunk, plane_of(codec, i), codec.role == KVANT_ROLE_K, reinterpret_cast<uint32_t *>(page));
}

/* A warp writes one token code by code. */
template <int D>
__device__ void write_token(const kvant_cuda_params &codec, const Chunk<D> &chunk, int token, uint8_t *page,
                            int lane)
{
    int at = (int)(chunk.slot[token] % PAGE_TOKENS);
    bool keys = codec.role == KVANT_ROLE_K;
    for (int i = 0; i < 2 && plane_bits(codec.bits, i); i++) {
        Plane plane = plane_of(codec, i);
        uint32_t ones = (1u << plane.bits) - 1;
        for (int channel = lane; channel < D; channel += 32) {
            Place where =
                place(plane.bits, plane.row_tiles, plane.column_tiles, keys ? at : channel, keys ? channel : at);
            uint32_t code = (uint32_t)chunk.codes[token][channel] >> plane.shift & ones;
            put_bits(reinterpret_cast<uint32_t *>(page) + plane.first_word + where.word, code << where.bit,
                     ones << where.bit);
        }
    }
}

template <int D>
__device__ __forceinline__ uint8_t *page_of(const AppendRole &role, const Chunk<D> &chunk, int token, int kv_head)
{
    return role.base + (size_t)(chunk.slot[token] / PAGE_TOKENS) * role.block_stride + kv_head * role.head_stride;
}

/* Sorts the chunk's tokens: pages with many of them are written page by page, others token by token. */
template <int D> __device__ void count_pages(Chunk<D> &chunk)
{
    int i = threadIdx.x, count = 0;
    if (i >= PAGE_TOKENS)
        return;
    bool first = chunk.slot[i] >= 0;
    for (int j = 0; chunk.slot[i] >= 0 && j < PAGE_TOKENS; j++)
        if (chunk.slot[j] >= 0 && chunk.slot[j] / PAGE_TOKENS == chunk.slot[i] / PAGE_TOKENS) {
            first &= j >= i;
            count++;
        }
    uint32_t whole = __ballot_sync(FULL, first && count > FEW_TOKENS);
    uint32_t single = __ballot_sync(FULL, count > 0 && count <= FEW_TOKENS);
    if (i % 32 == 0)
        chunk.whole[i / 32] = whole, chunk.single[i / 32] = single;
}

template <int D>
__device__ void write_metadata(const AppendRole &role, const Chunk<D> &chunk, int token, int kv_head)
{
    int at = (int)(chunk.slot[token] % PAGE_TOKENS);
    uint16_t *numbers =
        reinterpret_cast<uint16_t *>(page_of(role, chunk, token, kv_head) + role.codec.metadata_offset);
    numbers[at] = chunk.scale[token];
    if (role.codec.kind < KVANT_CUDA_CODEBOOK2 && !role.codec.symmetric)
        numbers[PAGE_TOKENS + at] = chunk.zero[token];
}

template <int D>
__global__ void __launch_bounds__(WARPS * 32) append_kernel(const __grid_constant__ AppendArgs args)
{
    __shared__ Chunk<D> chunk;
    const AppendRole &role = args.roles[blockIdx.z];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    const uint32_t first = blockIdx.x * args.chunk;
    if (threadIdx.x < PAGE_TOKENS)
        chunk.slot[threadIdx.x] =
            threadIdx.x < args.chunk && first + threadIdx.x < args.n_tokens ? args.slots[first + threadIdx.x] : -1;
    else if (threadIdx.x < PAGE_TOKENS + KVANT_CUDA_MAX_LEVELS) {
        int i = threadIdx.x - PAGE_TOKENS;
        chunk.thresholds[i] = role.codec.thresholds[i];
        chunk.values[i] = role.codec.values[i];
    }
    __syncthreads();
    for (int t = warp; t < PAGE_TOKENS; t += WARPS)
        if (chunk.slot[t] >= 0)
            quantize_token(args, role, chunk, t, (first + t) * role.token_stride + kv_head * role.row_head_stride,
                           kv_head, lane);
    __syncthreads();
    count_pages(chunk);
    if (threadIdx.x >= 128 && threadIdx.x < 128 + PAGE_TOKENS && chunk.slot[threadIdx.x - 128] >= 0)
        write_metadata(role, chunk, threadIdx.x - 128, kv_head);
    __syncthreads();
    for (int half = 0; half < 2; half++)
        for (uint32_t left = chunk.whole[half]; left; left &= left - 1) {
            int t = 32 * half + __ffs(left) - 1;
            write_page(role.codec, chunk, t, page_of(role, chunk, t, kv_head));
        }
    for (int t = warp; t < PAGE_TOKENS; t += WARPS)
        if (chunk.single[t / 32] >> t % 32 & 1)
            write_token(role.codec, chunk, t, page_of(role, chunk, t, kv_head), lane);
}

cudaError_t launch_append(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                          cudaStream_t stream)
{
    AppendArgs p = args;
    /* a decode step has few tokens, of different pages: a token a warp, over many multiprocessors */
    p.chunk = args.n_tokens <= 512 ? WARPS : PAGE_TOKENS;
    dim3 grid((args.n_tokens + p.chunk - 1) / p.chunk, n_kv_heads, n_roles);
    return with_head_dim(head_dim, [&](auto d) {
        append_kernel<decltype(d)::value><<<grid, WARPS * 32, 0, stream>>>(p);
        return cudaGetLastError();
    });
}

} // namespace kvant
