/* append_short.cu - appends the few rows of a decode step: a warp takes a row from its numbers to
 * the words of its page.
 *
 * The kernel waits for arguments, slots, rows, words of pages, and instructions that no cache
 * holds. So it loads its arguments together, before the preceding kernel has ended (Known). It
 * loads a row with its slot, and the page's words while it works on the row. Two atomics without a
 * result change a word. While rows are loaded, further warps rehearse: each begins at a different
 * stage (Stage) and stores nothing, so that the instructions are cached in time.
 *
 * Keys with a matrix (transform=file, or first) have a thread block of head_dim threads. Each
 * thread computes one number of the row. It loads its column of the matrix before anything else. */
#include "short_matrix.cuh"
#include "token_words.cuh"

#include <algorithm>
#include <iterator>

namespace kvant
{

constexpr uint32_t MOST_REHEARSED = 8; /* tokens; more warps fetch instructions for each other */
/* With this number of tokens or more, a block has several tokens and reads its matrix once for all
 * of them: 64 tokens take 12 us on an H200, with a token a block 19 us. For 16 tokens a token a
 * block is faster, 5 instead of 7 us. */
constexpr uint32_t SEVERAL = 32;

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
KVANT_INLINE Quantized short_uniform(uint32_t (&codes)[Row<D>::PER_LANE], const Known<D> &role,
                                     const Row<D> &y)
{
    float min, max;
    extremes<D>(y, min, max);
    min = __fadd_rn(min, 0.0f); /* -0 becomes 0, as the CPU has it */
    const float zero = role.symmetric ? 0 : to_half_and_back(min),
                range = role.symmetric ? fmaxf(fabsf(min), fabsf(max))
                                       : __fadd_rn(__fsub_rn(max, min), 0.0f),
                scale = to_half_and_back(__fdiv_rn(range, role.levels)),
                inverse = scale > 0 ? __frcp_rn(scale) : 0, low = role.symmetric ? -role.levels : 0;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        const float level = rintf(__fmul_rn(__fsub_rn(y.x[j], zero), inverse));
        codes[j] = (uint32_t)(fminf(fmaxf(level, low), role.levels) - role.offset);
    }
    return Quantized{ scale, role.symmetric ? 0 : min,
                      fabsf(min) <= 65504.0f && fabsf(max) <= 65504.0f };
}

/* A code is the count of thresholds below x. The curve gives this count, or one less. */
template <int D>
KVANT_INLINE void find_short(uint32_t (&codes)[Row<D>::PER_LANE], Row<D> &values,
                             const Known<D> &known, const NarrowBook &, const Row<D> &y,
                             float inverse)
{
    const float slope = known.slope * inverse;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        const uint32_t guess =
            __float_as_uint(fmaf(tanh_approximately(y.x[j] * slope), known.gain, known.middle)) >>
                3 &
            15u;
        codes[j] =
            guess + (__fmul_rn(y.x[j], inverse) > __shfl_sync(FULL, known.entry, guess) ? 1 : 0);
        values.x[j] = __shfl_sync(FULL, known.entry, NarrowBook::LEVELS + codes[j]);
    }
}

template <int D>
KVANT_INLINE void find_short(uint32_t (&codes)[Row<D>::PER_LANE], Row<D> &values,
                             const Known<D> &known, const WideBook &book, const Row<D> &y,
                             float inverse)
{
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        codes[j] = 0;
#pragma unroll 1
    for (uint32_t step = 1u << (known.bits - 1); step > 0; step /= 2)
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            codes[j] +=
                __fmul_rn(y.x[j], inverse) > book.thresholds[codes[j] + step - 1] ? step : 0;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        values.x[j] = book.values[codes[j]];
}

template <int D, class Book>
KVANT_INLINE Quantized short_codebook(uint32_t (&codes)[Row<D>::PER_LANE], const Known<D> &known,
                                      const Book &book, const Row<D> &y, int lane)
{
    const float squares = dot_rows<D>(y, y, lane),
                norm = __fmul_rn(__fsqrt_rn(squares), known.inverse_sqrt_dim),
                scale = to_half_and_back(norm), inverse = scale > 0 ? __frcp_rn(scale) : 0;
    Row<D> decoded;
    float stored = scale;
    find_short<D>(codes, decoded, known, book, y, inverse);
    if (known.unbiased) {
        const float product = dot_rows<D>(y, decoded, lane);
        stored = scale > 0 ? product > 0 ? __fdiv_rn(squares, product) : 0 : scale;
    }
    return Quantized{ stored, 0, norm <= 65504.0f && stored <= 65504.0f };
}

/* Seldom: the slot is read again. */
template <class Book>
KVANT_INLINE void refuse_short(const FewArgs<Book> &args, uint32_t row, bool finite, int lane)
{
    if (lane == 0)
        note_refusal(args, row, args.slots[row], finite);
}

/* Copies the levels and thresholds of a codec that a warp looks up in shared memory. */
template <class Book> KVANT_INLINE void copy_book(Book &, const Book &, uint32_t, int)
{
}

KVANT_INLINE void copy_book(WideBook &to, const WideBook &from, uint32_t bits, int lane)
{
#pragma unroll 1
    for (uint32_t i = lane; i < 1u << bits; i += 32)
        to.thresholds[i] = from.thresholds[i], to.values[i] = from.values[i];
    __syncwarp();
}

template <int D>
KVANT_INLINE void write_open(const FewArgs<OpenBook> &args, uint32_t number, const ShortRole &role,
                             const Row<D> &y, uint8_t *page, int token, bool finite, Stage stage,
                             int lane)
{
    bool in_range = true;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        in_range &= fabsf(y.x[j]) <= role.levels;
    if (stage != WORKS)
        return;
    const size_t at = (size_t)token * D;
    if (!__all_sync(FULL, in_range)) {
        refuse_short(args, number, finite, lane);
        if (args.clear_refused)
            store_row(page, at, KVANT_CUDA_F16, lane, Row<D>{});
        return;
    }
    store_row(page, at, KVANT_CUDA_F16, lane, y);
    if (role.exact)
        store_row(role.exact, (page - role.base) / sizeof(uint16_t) + at, KVANT_CUDA_F32, lane, y);
}

template <int D, class Book>
KVANT_INLINE void write_codes(const FewArgs<Book> &args, uint32_t number, const Known<D> &known,
                              const Book &book, const Row<D> &y, uint8_t *page, int at, bool finite,
                              Stage stage, int lane)
{
    uint32_t codes[Row<D>::PER_LANE] = {};
    Quantized q{};
    if (stage <= QUANTIZES) {
        q = known.codes == KVANT_CUDA_CODES_CODEBOOK
                ? short_codebook<D>(codes, known, book, y, lane)
                : short_uniform<D>(codes, known, y);
        if (!q.in_range && stage == WORKS) {
            refuse_short(args, number, finite, lane);
            return;
        }
    }
    uint16_t *numbers = reinterpret_cast<uint16_t *>(page + known.metadata) + at;
    if (lane == 0 && stage == WORKS)
        numbers[0] = __half_as_ushort(__float2half_rn(q.scale));
    if (lane == 0 && stage == WORKS && known.codes == KVANT_CUDA_CODES_UNIFORM && !known.symmetric)
        numbers[PAGE_TOKENS] = __half_as_ushort(__float2half_rn(q.zero));
    uint32_t *words = reinterpret_cast<uint32_t *>(page);
    if (known.keys)
        TokenWords<D, true>(at, lane).put(words, codes, known.bits, stage == WORKS);
    else
        TokenWords<D, false>(at, lane).put(words, codes, known.bits, stage == WORKS);
}

/* A transformed row to its page, by a warp. number: the row's token in the call. */
template <int D, class Book>
KVANT_INLINE void write_row(const FewArgs<Book> &args, uint32_t number, const ShortRole &role,
                            const Known<D> &known, const Book &book, const Row<D> &y, uint8_t *page,
                            int at, bool finite, Stage stage, int lane)
{
    if constexpr (std::is_same<Book, OpenBook>::value)
        write_open<D>(args, number, role, y, page, at, finite, stage, lane);
    else
        write_codes<D>(args, number, known, book, y, page, at, finite, stage, lane);
}

template <int D, class Book>
KVANT_INLINE void request_words(const Known<D> &known, uint8_t *page, int at, int lane)
{
    if (std::is_same<Book, OpenBook>::value)
        return;
    if (known.keys)
        TokenWords<D, true>(at, lane).request(reinterpret_cast<uint32_t *>(page), known.bits);
    else
        TokenWords<D, false>(at, lane).request(reinterpret_cast<uint32_t *>(page), known.bits);
}

KVANT_INLINE int64_t slot_when_ready(const int64_t *slots, bool ready)
{
    if (!ready)
        wait_for_prior();
    const int64_t slot = slots[blockIdx.x];
    wait_for_prior(); /* for a slot below 0, too: the next kernel relies on this wait */
    return slot;
}

/* Cycles between the end of the preceding kernels and the beginning of attention. Without them,
 * attention takes 45 instead of 33 us in half of the layers of an 8B model at 28,000 tokens on an
 * H200. Every part of it takes longer there, as if the GPU had no time to load its instructions
 * ahead (cuda_head_start.csv). With 800 cycles 0.3 % of the layers are slow, with 1,600 none. */
constexpr uint32_t HEAD_START = 1200;

/* The last warp of a block lets attention begin before the block has stored its rows. Attention
 * waits longer for its arguments than for these rows. */
KVANT_INLINE void let_next_begin()
{
    wait_for_prior();
    const uint32_t begun = (uint32_t)clock();
    while ((uint32_t)clock() - begun < HEAD_START)
        ;
    begin_next();
}

/* MATRIX: some role has a matrix. D threads then work; a role without a matrix needs the first 32.
 * Without MATRIX one warp works, and further warps may rehearse. */
template <int D, class Book, bool MATRIX>
__global__ void __launch_bounds__(MATRIX ? D + 32 : 32 * (STAGES + 1))
    append_short_kernel(const __grid_constant__ FewArgs<Book> args)
{
    const int lane = threadIdx.x & 31, kv_head = blockIdx.y,
              warp = __shfl_sync(FULL, threadIdx.x >> 5,
                                 0); /* so the compiler knows that branches are the warp's */
    if (32 * (warp + 1) == blockDim.x)
        return let_next_begin();
    if (MATRIX && blockIdx.z >= args.n_roles)
        return short_queries<D>(args.queries, blockIdx.z - args.n_roles, blockIdx.x, blockIdx.x + 1,
                                blockIdx.y, gridDim.y);
    __shared__ Book books[1];
    const ShortRole &role = args.roles[blockIdx.z];
    const bool through_matrix = MATRIX && role.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL,
               first_warp = warp == 0;
    const Stage stage = MATRIX ? WORKS : (Stage)warp;
    const size_t row_at = blockIdx.x * role.token_stride + kv_head * role.row_head_stride;
    if (MATRIX && !through_matrix && !first_warp)
        return;
    Known<D> known(role);
    RawRow<D> raw;
    Affine<D> affine;
    FewCenter center{};
    int64_t slot = 0;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        raw.bits[j] =
            0x3f803c00u + lane * 0x10001u + j; /* rehearsed: numbers of some size in every type */
    if (first_warp) {
        known.request(args.books[blockIdx.z], lane);
        copy_book(books[0], args.books[blockIdx.z], known.bits, lane);
        affine.load(role, !through_matrix && role.affine, kv_head * D + lane);
    }
    KeyColumn<D> column;
    if (through_matrix && role.compact)
        column.load(role, kv_head, threadIdx.x);
    else if (through_matrix)
        for (int i = threadIdx.x; i < D * D * (int)sizeof(float) / 128; i += D)
            prefetch_line(role.key_transform + (size_t)kv_head * D * D, 128 * i);
    if (through_matrix && args.slots_ready)
        center.load(args, D);
    if (stage == WORKS)
        slot = slot_when_ready(args.slots, args.slots_ready);
    if (through_matrix && !args.slots_ready)
        center.load(args, D);
    if (first_warp) {
        if (!through_matrix)
            raw.load(role.rows, row_at, args.type, lane); /* before the slot is there */
        known.hold();
    }
    const int at = (int)(slot % PAGE_TOKENS);
    uint8_t *page =
        role.base + (size_t)page_number(slot) * known.block_stride + kv_head * known.head_stride;
    if (slot < 0)
        return;
    if (first_warp)
        request_words<D, Book>(known, page, at, lane);
    bool finite = true;
    Row<D> y = raw.numbers(args.type);
    if (through_matrix) {
        y = short_row_through_matrix<D>(role, args.type, center, column, row_at, kv_head, finite);
    } else {
        if (first_warp && role.affine)
            affine.apply(y, role.scale != nullptr);
        finite =
            is_finite<D>(y); /* a number that is not stays so through the centre, the scale and W */
    }
    if (stage <= ROTATES && (!MATRIX || first_warp))
        rotate(y, known.rotation, lane);
    finite = __all_sync(FULL, finite);
    if (!MATRIX || first_warp)
        write_row<D>(args, blockIdx.x, role, known, books[0], y, page, at, finite, stage, lane);
}

/* For SEVERAL tokens or more, if some role has a matrix. A block has a token for each warp of its D
 * threads. */
template <int D, class Book>
__global__ void __launch_bounds__(D + 32)
    append_several_kernel(const __grid_constant__ FewArgs<Book> args)
{
    constexpr int N = D / 32;
    const int lane = threadIdx.x & 31, kv_head = blockIdx.y,
              warp = __shfl_sync(FULL, threadIdx.x >> 5, 0);
    const uint32_t first = blockIdx.x * N, token = first + warp;
    if (warp == N)
        return let_next_begin();
    if (blockIdx.z >= args.n_roles)
        return short_queries<D>(args.queries, blockIdx.z - args.n_roles, first,
                                min(first + N, args.n_tokens), blockIdx.y, gridDim.y);
    __shared__ Book books[1];
    const ShortRole &role = args.roles[blockIdx.z];
    const bool through_matrix = role.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL;
    Known<D> known(role);
    Affine<D> affine;
    known.request(args.books[blockIdx.z], lane);
    if (warp == 0)
        copy_book(books[0], args.books[blockIdx.z], known.bits, lane);
    affine.load(role, !through_matrix && role.affine, kv_head * D + lane);
    if (!args.slots_ready)
        wait_for_prior();
    const int64_t slot = token < args.n_tokens ? args.slots[token] : -1;
    wait_for_prior(); /* for a slot below 0, too: the next kernel relies on this wait */
    __syncthreads();  /* the book is there */
    bool finite = true;
    Row<D> y{};
    if (through_matrix)
        y = several_rows_through_matrix<D, N>(args, role, first, kv_head, finite);
    if (slot < 0)
        return;
    const int at = (int)(slot % PAGE_TOKENS);
    uint8_t *page =
        role.base + (size_t)page_number(slot) * known.block_stride + kv_head * known.head_stride;
    request_words<D, Book>(known, page, at, lane);
    if (!through_matrix) {
        RawRow<D> raw;
        raw.load(role.rows, token * role.token_stride + kv_head * role.row_head_stride, args.type,
                 lane);
        y = raw.numbers(args.type);
        if (role.affine)
            affine.apply(y, role.scale != nullptr);
        finite = is_finite<D>(y);
    }
    rotate(y, known.rotation, lane);
    finite = __all_sync(FULL, finite);
    write_row<D>(args, token, role, known, books[0], y, page, at, finite, WORKS, lane);
}

/* The rotation of a role, which follows its matrix if it has one. */
static kvant_cuda_rotation rotation_of(const AppendRole &from)
{
    kvant_cuda_rotation rotation{ from.after.block, from.after.scale, {} };
    std::copy_n(from.after.signs, std::size(rotation.signs), rotation.signs);
    return from.after.block ? rotation : from.codec.rotation;
}

static ShortRole short_role(const AppendRole &from)
{
    const kvant_cuda_params &codec = from.codec;
    return ShortRole{ from.rows,
                      from.base,
                      from.token_stride,
                      from.row_head_stride,
                      from.block_stride,
                      from.head_stride,
                      from.center,
                      from.scale,
                      from.key_transform,
                      from.compact,
                      from.exact,
                      (uint32_t)codec.codes,
                      codec.bits,
                      codec.role == KVANT_ROLE_K,
                      codec.metadata_offset,
                      from.center || from.scale ||
                          codec.key_transform_kind == KVANT_CUDA_TRANSFORM_DIAGONAL,
                      (uint32_t)codec.key_transform_kind,
                      codec.symmetric,
                      codec.unbiased,
                      codec.codes == KVANT_CUDA_CODES_OPEN ? codec.exact_limit : codec.levels,
                      codec.offset,
                      codec.inverse_sqrt_dim,
                      rotation_of(from) };
}

static void fill_book(OpenBook &, const kvant_cuda_codec &)
{
}

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
static cudaError_t launch(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                          cudaStream_t stream)
{
    FewArgs<Book> p{ args.slots,
                     args.refused,
                     args.marks,
                     args.mark_ids,
                     args.slots_ready,
                     args.block_centers,
                     args.center_slots,
                     args.type,
                     {},
                     {},
                     (uint32_t)n_roles,
                     args.queries,
                     args.n_tokens,
                     args.clear_refused };
    bool matrix = false;
    for (int i = 0; i < n_roles; i++) {
        p.roles[i] = short_role(args.roles[i]);
        fill_book(p.books[i], *args.roles[i].source);
        matrix |= args.roles[i].codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL;
    }
    const dim3 grid(args.n_tokens, n_kv_heads,
                    n_roles + (args.queries.q ? args.queries.n_matrices : 0));
    return with_head_dim(head_dim, [&](auto d) {
        constexpr int D = decltype(d)::value;
        void *parameters[] = { &p };
        if (matrix && args.n_tokens >= SEVERAL && !args.block_centers.start)
            return launch_early((const void *)append_several_kernel<D, Book>,
                                dim3((args.n_tokens + D / 32 - 1) / (D / 32), grid.y, grid.z),
                                D + 32, parameters, 0, stream);
        if (matrix)
            return launch_early((const void *)append_short_kernel<D, Book, true>, grid, D + 32,
                                parameters, 0, stream);
        const bool rehearses = args.n_tokens <= MOST_REHEARSED &&
                               !std::is_same<Book, WideBook>::value; /* whose book is shared */
        return launch_early((const void *)append_short_kernel<D, Book, false>, grid,
                            rehearses ? 32 * (STAGES + 1) : 64, parameters, 0, stream);
    });
}

cudaError_t launch_append_short(const AppendArgs &args, uint32_t head_dim, int n_roles,
                                int n_kv_heads, cudaStream_t stream)
{
    bool wide = false;
    for (int i = 0; i < n_roles; i++)
        wide |= args.roles[i].codec.kind == KVANT_CUDA_CODEBOOK_WIDE;
    if (args.roles[0].codec.codes == KVANT_CUDA_CODES_OPEN)
        return launch<OpenBook>(args, head_dim, n_roles, n_kv_heads, stream);
    if (wide)
        return launch<WideBook>(args, head_dim, n_roles, n_kv_heads, stream);
    return launch<NarrowBook>(args, head_dim, n_roles, n_kv_heads, stream);
}

} // namespace kvant
