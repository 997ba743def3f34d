/* append_few.cu - appends the few rows of a decode step: a warp takes a row from its numbers to the
 * words of its page.
 *
 * Such a call computes next to nothing. It waits: for arguments, for slots and rows, for the words
 * of pages, and for instructions that no cache holds. So the code is short, loops stay loops, rows
 * are asked for together with their slot, all arguments before the kernel before this one has ended, and
 * the words of the page while the row is worked on. Words are changed by two atomics whose answer nobody waits for. And while
 * slots and rows come, a second warp rehearses: it does all the same with zeros, without stores, so that
 * the instructions are there when the numbers are.
 *
 * Keys with a matrix (transform=file) have a thread block of head_dim threads, of which each makes
 * one number of the row, and asks for its column of the matrix before anything else. */
#include "append_tokens.cuh"
#include "token_words.cuh"
#include "../launch.h"

#include <algorithm>

namespace kvant
{

constexpr uint32_t MOST_REHEARSED = 8; /* tokens; more warps fetch instructions for each other */

/* What of AppendRole and kvant_cuda_params these kernels need: little, because every line of
 * arguments is waited for. */
struct FewRole {
    const void *rows;
    uint8_t *base;
    size_t token_stride, row_head_stride, block_stride, head_stride;
    const float *center, *scale, *weights;
    float *exact;
    uint32_t codes, bits, keys, metadata_offset, affine, weighting, symmetric, unbiased;
    float levels, offset, inverse_sqrt_dim;
    kvant_cuda_rotation rotation;
};

struct OpenBook {};
struct NarrowBook {
    static constexpr uint32_t LEVELS = KVANT_CUDA_MAX_LEVELS;
    float thresholds[LEVELS], values[LEVELS], slope, gain, middle; /* of the curve: params.h */
};
struct WideBook {
    static constexpr uint32_t LEVELS = KVANT_CUDA_WIDE_LEVELS;
    float thresholds[LEVELS], values[LEVELS];
};

template <class Book> struct FewArgs {
    const int64_t *slots;
    uint32_t *refused;
    bool slots_ready;
    kvant_cuda_type type;
    FewRole roles[2];
    Book books[2];
    QueryArgs queries; /* of a last role, with a matrix; q NULL: none */
};

/* Numbers as they come, so that nobody waits for them yet. */
template <int D> struct RawRow {
    uint32_t bits[Row<D>::PER_LANE];

    KVANT_INLINE void load(const void *from, size_t offset, kvant_cuda_type type, int lane)
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            bits[j] = type == KVANT_CUDA_F32 ? static_cast<const uint32_t *>(from)[offset + lane + 32 * j]
                                             : static_cast<const uint16_t *>(from)[offset + lane + 32 * j];
    }

    KVANT_INLINE Row<D> numbers(kvant_cuda_type type) const
    {
        Row<D> row;
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
            __half_raw half;
            half.x = (uint16_t)bits[j];
            row.x[j] = type == KVANT_CUDA_F16 ? __half2float(half)
                                              : __uint_as_float(type == KVANT_CUDA_F32 ? bits[j] : bits[j] << 16);
        }
        return row;
    }
};

/* What a row is shifted by, divided by and multiplied with; asked for before the row, because no kernel before
 * this one writes them. Most codecs have none of these. */
template <int D> struct Affine {
    float center[Row<D>::PER_LANE], scale[Row<D>::PER_LANE], weights[Row<D>::PER_LANE];

    KVANT_INLINE void load(const FewRole &role, bool any, int at)
    {
        fill(center, any ? role.center : nullptr, at, 0);
        fill(scale, any ? role.scale : nullptr, at, 1);
        fill(weights, any && role.weighting == KVANT_CUDA_WEIGHTING_DIAGONAL ? role.weights : nullptr, at, 1);
    }

    KVANT_INLINE static void fill(float (&to)[Row<D>::PER_LANE], const float *from, int at, float none)
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            to[j] = none;
        if (from)
            unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
                to[j] = from[at + 32 * j];
    }

    /* A division takes many instructions: they are left out where there is nothing to divide by. */
    KVANT_INLINE void apply(Row<D> &row, bool divides) const
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            row.x[j] = __fsub_rn(row.x[j], center[j]);
        if (divides)
            unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
                row.x[j] = __fdiv_rn(row.x[j], scale[j]);
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            row.x[j] = __fmul_rn(row.x[j], weights[j]);
    }
};

/* y = R W ((x - c) / s). A number that is not finite stays so through the centre, the scale and W. */
template <int D>
KVANT_INLINE void few_row(Row<D> &row, const FewRole &role, const Affine<D> &affine, int lane, bool &finite)
{
    if (role.affine)
        affine.apply(row, role.scale != nullptr);
    finite = true;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        finite &= is_finite(row.x[j]);
    rotate(row, role.rotation, lane);
}

/* The same by all threads of a block of D for keys with a matrix, as combine_rows has it: the sum
 * goes through the rows of the matrix in their order. */
template <int D>
KVANT_INLINE Row<D> few_row_through_matrix(const FewRole &role, kvant_cuda_type type, size_t row_at, int kv_head,
                                           bool &finite)
{
    constexpr int AHEAD = D > 128 ? 64 : D;
    __shared__ float x[D], y[D];
    const int channel = threadIdx.x, at = kv_head * D + channel;
    const float *column = role.weights + (size_t)kv_head * D * D + channel;
    float weights[AHEAD], number = load_number(role.rows, row_at + channel, type), sum = 0;
    unrolled_for (int i = 0; i < AHEAD; i++)
        weights[i] = column[(size_t)i * D];
    if (role.center)
        number = __fsub_rn(number, role.center[at]);
    if (role.scale)
        number = __fdiv_rn(number, role.scale[at]);
    x[channel] = number;
    finite = __syncthreads_and(is_finite(number));
    unrolled_for (int first = 0; first < D; first += AHEAD) {
        if (first > 0)
            unrolled_for (int i = 0; i < AHEAD; i++)
                weights[i] = column[(size_t)(first + i) * D];
        unrolled_for (int i = 0; i < AHEAD; i++)
            sum = __fadd_rn(sum, __fmul_rn(x[first + i], weights[i]));
    }
    y[channel] = sum;
    __syncthreads();
    Row<D> row;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        row.x[j] = y[threadIdx.x % 32 + 32 * j];
    return row;
}

/* A token's queries of a kv head through their matrix: four heads at a time, a channel a thread. */
template <int D> KVANT_INLINE void few_queries(const QueryArgs &args, uint32_t token, int kv_head, int n_kv_heads)
{
    constexpr int HEADS = 4, AHEAD = D > 128 ? 64 : D;
    __shared__ float4 q[D];
    const int channel = threadIdx.x, n = (int)args.heads_a_kv;
    const float *column = args.inverse_weights + (size_t)kv_head * D * D + channel;
    float weights[AHEAD];
    unrolled_for (int i = 0; i < AHEAD; i++)
        weights[i] = column[(size_t)i * D];
    wait_for_former();
#pragma unroll 1
    for (int head = 0; head < n; head += HEADS) {
        float x[HEADS], sum[HEADS] = {};
        unrolled_for (int h = 0; h < HEADS; h++)
            x[h] = head + h < n ? load_number(args.q, token * args.batch_stride + (kv_head * n + head + h) * args.head_stride + channel, args.type) : 0;
        __syncthreads();
        q[channel] = make_float4(x[0], x[1], x[2], x[3]);
        __syncthreads();
        unrolled_for (int first = 0; first < D; first += AHEAD) {
            if (AHEAD < D && first + head > 0)
                unrolled_for (int i = 0; i < AHEAD; i++)
                    weights[i] = column[(size_t)(first + i) * D];
            unrolled_for (int i = 0; i < AHEAD; i++) {
                const float4 y = q[first + i];
                sum[0] = fmaf(weights[i], y.x, sum[0]);
                sum[1] = fmaf(weights[i], y.y, sum[1]);
                sum[2] = fmaf(weights[i], y.z, sum[2]);
                sum[3] = fmaf(weights[i], y.w, sum[3]);
            }
        }
        unrolled_for (int h = 0; h < HEADS; h++)
            if (head + h < n)
                args.out[(((size_t)token * n_kv_heads + kv_head) * n + head + h) * D + channel] = sum[h];
    }
}

/* A NaN is above or below all numbers here, whatever its sign, so the extremes tell of it. */
template <int D> __device__ __forceinline__ void extremes(const Row<D> &y, float &min, float &max)
{
    min = y.x[0], max = y.x[0];
    unrolled_for (int j = 1; j < Row<D>::PER_LANE; j++)
        min = min_or_nan(min, y.x[j]), max = max_or_nan(max, y.x[j]);
#pragma unroll 1
    for (int k = 16; k > 0; k /= 2) {
        min = min_or_nan(min, __shfl_xor_sync(FULL, min, k));
        max = max_or_nan(max, __shfl_xor_sync(FULL, max, k));
    }
}

template <int D>
KVANT_INLINE Quantized few_uniform(uint32_t (&codes)[Row<D>::PER_LANE], const FewRole &role, const Row<D> &y)
{
    float min, max;
    extremes<D>(y, min, max);
    min = __fadd_rn(min, 0.0f); /* -0 becomes 0, as the CPU has it */
    const float zero = role.symmetric ? 0 : to_half_and_back(min),
                range = role.symmetric ? fmaxf(fabsf(min), fabsf(max)) : __fadd_rn(__fsub_rn(max, min), 0.0f),
                scale = to_half_and_back(__fdiv_rn(range, role.levels)), inverse = scale > 0 ? __frcp_rn(scale) : 0,
                low = role.symmetric ? -role.levels : 0;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        const float level = rintf(__fmul_rn(__fsub_rn(y.x[j], zero), inverse));
        codes[j] = (uint32_t)(fminf(fmaxf(level, low), role.levels) - role.offset);
    }
    return Quantized{ scale, role.symmetric ? 0 : min, fabsf(min) <= 65504.0f && fabsf(max) <= 65504.0f };
}

/* A code is the number of thresholds below: the curve gives it, or one less. */
template <int N>
KVANT_INLINE void find_few(uint32_t (&codes)[N], const NarrowBook &book, uint32_t, const float (&y)[N],
                           float inverse)
{
    const float slope = book.slope * inverse;
    unrolled_for (int j = 0; j < N; j++) {
        const uint32_t guess =
            __float_as_uint(fmaf(tanh_approximately(y[j] * slope), book.gain, book.middle)) >> 3 & 15u;
        codes[j] = guess + (__fmul_rn(y[j], inverse) > book.thresholds[guess] ? 1 : 0);
    }
}

template <int N>
KVANT_INLINE void find_few(uint32_t (&codes)[N], const WideBook &book, uint32_t bits, const float (&y)[N],
                           float inverse)
{
    unrolled_for (int j = 0; j < N; j++)
        codes[j] = 0;
#pragma unroll 1
    for (uint32_t step = 1u << (bits - 1); step > 0; step /= 2)
        unrolled_for (int j = 0; j < N; j++)
            codes[j] += __fmul_rn(y[j], inverse) > book.thresholds[codes[j] + step - 1] ? step : 0;
}

template <int D, class Book>
KVANT_INLINE Quantized few_codebook(uint32_t (&codes)[Row<D>::PER_LANE], const FewRole &role, const Book &book,
                                    const Row<D> &y, int lane)
{
    const float squares = dot_rows<D>(y, y, lane), norm = __fmul_rn(__fsqrt_rn(squares), role.inverse_sqrt_dim),
                scale = to_half_and_back(norm), inverse = scale > 0 ? __frcp_rn(scale) : 0;
    Row<D> decoded;
    float stored = scale;
    find_few(codes, book, role.bits, y.x, inverse);
    if (role.unbiased) {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            decoded.x[j] = book.values[codes[j]];
        const float product = dot_rows<D>(y, decoded, lane);
        stored = scale > 0 ? product > 0 ? __fdiv_rn(squares, product) : 0 : scale;
    }
    return Quantized{ stored, 0, norm <= 65504.0f && stored <= 65504.0f };
}

KVANT_INLINE void refuse_few(uint32_t *refused, bool finite, int lane)
{
    if (refused && lane == 0)
        atomicOr(refused, finite ? KVANT_CUDA_ROW_RANGE : KVANT_CUDA_ROW_NONFINITE);
}

/* Words, by a warp: all at once, where one after another would be waited for one by one. */
template <class T> __device__ __forceinline__ void copy_words(T &to, const T &from, uint32_t n, int lane)
{
#pragma unroll 1
    for (uint32_t i = lane; i < n; i += 32)
        reinterpret_cast<uint32_t *>(&to)[i] = reinterpret_cast<const uint32_t *>(&from)[i];
}

KVANT_INLINE void copy_book(OpenBook &, const OpenBook &, const FewRole &, int)
{
}

KVANT_INLINE void copy_book(NarrowBook &to, const NarrowBook &from, const FewRole &role, int lane)
{
    if (role.codes == KVANT_CUDA_CODES_CODEBOOK)
        copy_words(to, from, sizeof to / 4, lane);
}

KVANT_INLINE void copy_book(WideBook &to, const WideBook &from, const FewRole &role, int lane)
{
#pragma unroll 1
    for (uint32_t i = lane; i < 1u << role.bits; i += 32)
        to.thresholds[i] = from.thresholds[i], to.values[i] = from.values[i];
}

/* rehearsed: nothing is to be stored. */
template <int D>
KVANT_INLINE void write_open(const FewArgs<OpenBook> &args, const FewRole &role, const Row<D> &y, uint8_t *page,
                             int token, bool finite, bool rehearsed, int lane)
{
    bool in_range = true;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        in_range &= fabsf(y.x[j]) <= 65504.0f;
    if (!__all_sync(FULL, in_range)) {
        refuse_few(rehearsed ? nullptr : args.refused, finite, lane);
        return;
    }
    if (rehearsed)
        return;
    const size_t at = (size_t)token * D;
    store_row(page, at, KVANT_CUDA_F16, lane, y);
    if (role.exact)
        store_row(role.exact, (page - role.base) / sizeof(uint16_t) + at, KVANT_CUDA_F32, lane, y);
}

/* By one warp. */
template <int D, class Book>
KVANT_INLINE void write_codes_of(const FewArgs<Book> &args, const FewRole &role, const Book &book, const Row<D> &y,
                                 uint8_t *page, int at, bool finite, bool rehearsed, int lane)
{
    uint32_t codes[Row<D>::PER_LANE];
    const Quantized q = role.codes == KVANT_CUDA_CODES_CODEBOOK ? few_codebook<D>(codes, role, book, y, lane)
                                                                : few_uniform<D>(codes, role, y);
    if (!q.in_range) {
        refuse_few(rehearsed ? nullptr : args.refused, finite, lane);
        return;
    }
    uint16_t *numbers = reinterpret_cast<uint16_t *>(page + role.metadata_offset) + at;
    if (lane == 0 && !rehearsed)
        numbers[0] = __half_as_ushort(__float2half_rn(q.scale));
    if (lane == 0 && !rehearsed && role.codes == KVANT_CUDA_CODES_UNIFORM && !role.symmetric)
        numbers[PAGE_TOKENS] = __half_as_ushort(__float2half_rn(q.zero));
    uint32_t *words = reinterpret_cast<uint32_t *>(page);
    if (role.keys)
        TokenWords<D, true>(at, lane).put(words, codes, role.bits, !rehearsed);
    else
        TokenWords<D, false>(at, lane).put(words, codes, role.bits, !rehearsed);
}

/* MATRIX: some role has one; D threads then work, of which a role without a matrix needs the first 32.
 * Else one warp works, and another one may rehearse. A last warp lets attention begin, which waits longer
 * for its arguments than for these rows. What came before is complete then, so queries are ready, too. */
template <int D, class Book, bool MATRIX>
__global__ void __launch_bounds__(MATRIX ? D + 32 : 96) append_few_kernel(const __grid_constant__ FewArgs<Book> args)
{
    if (threadIdx.x + 32 >= blockDim.x) {
        wait_for_former();
        begin_next();
        return;
    }
    if (MATRIX && args.queries.q && blockIdx.z == gridDim.z - 1) {
        few_queries<D>(args.queries, blockIdx.x, blockIdx.y, gridDim.y);
        return;
    }
    constexpr bool OPEN = std::is_same<Book, OpenBook>::value;
    __shared__ Book books[2];
    __shared__ FewRole roles[2];
    const FewRole &given = args.roles[blockIdx.z];
    const int lane = threadIdx.x & 31, kv_head = blockIdx.y;
    const bool first_warp = threadIdx.x < 32, rehearses = !MATRIX && !first_warp,
               through_matrix = MATRIX && given.weighting == KVANT_CUDA_WEIGHTING_FULL;
    FewRole &role = roles[rehearses];
    Book &book = books[rehearses];
    const size_t row_at = blockIdx.x * given.token_stride + kv_head * given.row_head_stride;
    bool finite = true;
    RawRow<D> raw{};
    if (MATRIX && !through_matrix && !first_warp)
        return;
    if (first_warp || rehearses) {
        copy_words(role, given, sizeof role / 4, lane);
        copy_book(book, args.books[blockIdx.z], given, lane);
        __syncwarp();
    }
    Affine<D> affine;
    affine.load(role, !through_matrix && first_warp && role.affine, kv_head * D + lane);
    if (through_matrix)
        for (int i = threadIdx.x; i < D * D * (int)sizeof(float) / 128; i += D)
            prefetch_line(given.weights + (size_t)kv_head * D * D, 128 * i);
    if (!rehearses && !args.slots_ready)
        wait_for_former();
    const int64_t slot = rehearses ? 0 : args.slots[blockIdx.x];
    if (!rehearses)
        wait_for_former(); /* for a slot below 0, too: the next kernel may count on what came before this one */
    if (!through_matrix && !rehearses) /* before the slot is there */
        raw.load(given.rows, row_at, args.type, lane);
    const int at = (int)(slot % PAGE_TOKENS);
    uint8_t *page = given.base + (size_t)page_number(slot) * given.block_stride + kv_head * given.head_stride;
    if (!OPEN && first_warp && slot >= 0 && role.keys)
        TokenWords<D, true>(at, lane).ask_for(reinterpret_cast<uint32_t *>(page), role.bits);
    else if (!OPEN && first_warp && slot >= 0)
        TokenWords<D, false>(at, lane).ask_for(reinterpret_cast<uint32_t *>(page), role.bits);
    if (slot < 0)
        return;
    Row<D> y = raw.numbers(args.type);
    if (through_matrix)
        y = few_row_through_matrix<D>(given, args.type, row_at, kv_head, finite);
    else
        few_row<D>(y, role, affine, lane, finite);
    finite = __all_sync(FULL, finite);
    if (!first_warp && !rehearses)
        return;
    if constexpr (OPEN)
        write_open<D>(args, role, y, page, at, finite, rehearses, lane);
    else
        write_codes_of<D>(args, role, book, y, page, at, finite, rehearses, lane);
}

static FewRole few_role(const AppendRole &from)
{
    const kvant_cuda_params &codec = from.codec;
    return FewRole{ from.rows,        from.base,       from.token_stride,     from.row_head_stride,
                    from.block_stride, from.head_stride, from.center,          from.scale,
                    from.weights,     from.exact,      (uint32_t)codec.codes, codec.bits,
                    codec.role == KVANT_ROLE_K, codec.metadata_offset,
                    from.center || from.scale || codec.weighting == KVANT_CUDA_WEIGHTING_DIAGONAL,
                    (uint32_t)codec.weighting, codec.symmetric,
                    codec.unbiased,   codec.levels,    codec.offset,          codec.inverse_sqrt_dim,
                    codec.rotation };
}

static void fill_book(OpenBook &, const kvant_cuda_codec &) {}

static void fill_book(NarrowBook &book, const kvant_cuda_codec &codec)
{
    std::copy_n(codec.params.thresholds, NarrowBook::LEVELS, book.thresholds);
    std::copy_n(codec.params.values, NarrowBook::LEVELS, book.values);
    book.slope = codec.params.guess_slope;
    book.gain = codec.params.guess_gain;
    book.middle = codec.params.guess_middle;
}

static void fill_book(WideBook &book, const kvant_cuda_codec &codec)
{
    std::copy_n(codec.wide.thresholds, WideBook::LEVELS, book.thresholds);
    std::copy_n(codec.wide.values, WideBook::LEVELS, book.values);
}

template <class Book>
static cudaError_t launch(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads, cudaStream_t stream)
{
    FewArgs<Book> p{ args.slots, args.refused, args.slots_ready, args.type, {}, {}, args.queries };
    bool matrix = false;
    for (int i = 0; i < n_roles; i++) {
        p.roles[i] = few_role(args.roles[i]);
        fill_book(p.books[i], *args.roles[i].source);
        matrix |= args.roles[i].codec.weighting == KVANT_CUDA_WEIGHTING_FULL;
    }
    const dim3 grid(args.n_tokens, n_kv_heads, n_roles + (args.queries.q ? 1 : 0));
    return with_head_dim(head_dim, [&](auto d) {
        constexpr int D = decltype(d)::value;
        void *parameters[] = { &p };
        if (matrix)
            return launch_early((const void *)append_few_kernel<D, Book, true>, grid, D + 32, parameters, 0, stream);
        return launch_early((const void *)append_few_kernel<D, Book, false>, grid, args.n_tokens <= MOST_REHEARSED ? 96 : 64,
                            parameters, 0, stream);
    });
}

cudaError_t launch_append_few(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                              cudaStream_t stream)
{
    const kvant_cuda_params &codec = args.roles[0].codec;
    if (codec.codes == KVANT_CUDA_CODES_OPEN)
        return launch<OpenBook>(args, head_dim, n_roles, n_kv_heads, stream);
    if (codec.kind == KVANT_CUDA_CODEBOOK_WIDE)
        return launch<WideBook>(args, head_dim, n_roles, n_kv_heads, stream);
    return launch<NarrowBook>(args, head_dim, n_roles, n_kv_heads, stream);
}

} // namespace kvant
