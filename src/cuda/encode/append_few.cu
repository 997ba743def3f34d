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
#include "few_rows.cuh"
#include "../launch.h"

namespace kvant
{

constexpr uint32_t MOST_REHEARSED = 8; /* tokens; more warps fetch instructions for each other */

template <class Book> struct FewArgs {
    const int64_t *slots;
    uint32_t *refused;
    bool slots_ready;
    kvant_cuda_type type;
    FewRole roles[2];
    Book books[2];
};

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

/* MATRIX: some role has one; blocks have D threads then, of which a role without a matrix needs the
 * first 32. Else they have one warp, or two: one that works and one that rehearses. */
template <int D, class Book, bool MATRIX>
__global__ void __launch_bounds__(MATRIX ? D : 64) append_few_kernel(const __grid_constant__ FewArgs<Book> args)
{
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
    begin_next();
    if (!rehearses && !args.slots_ready)
        wait_for_former();
    const int64_t slot = rehearses ? 0 : args.slots[blockIdx.x];
    const int at = (int)(slot % PAGE_TOKENS);
    uint8_t *page = given.base + (size_t)page_number(slot) * given.block_stride + kv_head * given.head_stride;
    if (!OPEN && first_warp && slot >= 0 && role.keys)
        TokenWords<D, true>(at, lane).ask_for(reinterpret_cast<uint32_t *>(page), role.bits);
    else if (!OPEN && first_warp && slot >= 0)
        TokenWords<D, false>(at, lane).ask_for(reinterpret_cast<uint32_t *>(page), role.bits);
    if (!rehearses)
        wait_for_former(); /* for a slot below 0, too: the next kernel may count on what came before this one */
    if (!through_matrix && !rehearses)
        raw.load(given.rows, row_at, args.type, lane);
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
        write_open<D>(args.refused, role, y, page, at, finite, rehearses, lane);
    else {
        uint32_t codes[Row<D>::PER_LANE];
        Quantized q;
        if (few_codes<D>(rehearses ? nullptr : args.refused, role, book, y, finite, lane, codes, q))
            put_codes<D>(role, codes, q, page, at, rehearses, lane);
    }
}

template <class Book>
static cudaError_t launch(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads, cudaStream_t stream)
{
    FewArgs<Book> p{ args.slots, args.refused, args.slots_ready, args.type, {}, {} };
    bool matrix = false;
    for (int i = 0; i < n_roles; i++) {
        p.roles[i] = few_role(args.roles[i]);
        fill_book(p.books[i], *args.roles[i].source);
        matrix |= args.roles[i].codec.weighting == KVANT_CUDA_WEIGHTING_FULL;
    }
    const dim3 grid(args.n_tokens, n_kv_heads, n_roles);
    return with_head_dim(head_dim, [&](auto d) {
        constexpr int D = decltype(d)::value;
        void *parameters[] = { &p };
        if (matrix)
            return launch_early((const void *)append_few_kernel<D, Book, true>, grid, D, parameters, 0, stream);
        return launch_early((const void *)append_few_kernel<D, Book, false>, grid, args.n_tokens <= MOST_REHEARSED ? 64 : 32,
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
