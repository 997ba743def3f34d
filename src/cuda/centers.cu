/* centers.cu - centres of blocks that turn with positions (kvant_cuda_turning): rows are taken about them, and attention is told what
 * they add to scores.
 *
 * With the products z of a query and a start, Z = (q_1 a + q_2 b, q_2 a - q_1 b) for every pair of channels, <q, centre> is the sum
 * of Z_1 cos + Z_2 sin over pairs: products of query rows and phases. */
#include "checks.h"
#include "launch.h"
#include "ptx.cuh"
#include "rotate.cuh"
#include "table.h"

#include <algorithm>
#include <climits>

namespace kvant
{

KVANT_INLINE uint32_t number_at(const kvant_cuda_turning &turning, size_t block)
{
    return turning.numbers ? __ldg(turning.numbers + block) : 0; /* stores do not wait for it */
}

KVANT_INLINE ushort2 pair_at(const kvant_cuda_turning &turning, uint32_t i)
{
    return reinterpret_cast<const ushort2 *>(turning.pairs)[i];
}

/* ---- rows ---- */

constexpr uint32_t ROW_THREADS = 256;

/* A thread has a pair of channels of a row, so that rows may lie in their own place. */
__global__ void __launch_bounds__(ROW_THREADS) center_rows_kernel(const __grid_constant__ kvant_cuda_center_rows_args args)
{
    const uint32_t n = args.head_dim / 2, in_block = threadIdx.x / n, i = threadIdx.x - in_block * n,
                   row = blockIdx.x * (ROW_THREADS / n) + in_block, token = row / args.n_kv_heads, head = row - token * args.n_kv_heads;
    begin_next();
    if (in_block >= ROW_THREADS / n || token >= args.n_tokens)
        return;
    const ushort2 pair = pair_at(args.turning, i);
    wait_for_former();
    const size_t at = token * args.token_stride + head * args.head_stride;
    float x = load_number(args.rows, at + pair.x, args.type), y = load_number(args.rows, at + pair.y, args.type);
    const int64_t slot = args.slots[token];
    if (slot >= 0) {
        const size_t block = (size_t)slot / KVANT_PAGE_TOKENS;
        const float *phase = args.turning.phases + block * args.head_dim + i,
                    *start = args.turning.start + ((size_t)number_at(args.turning, block) * args.n_kv_heads + head) * args.head_dim;
        const float cosine = phase[0], sine = phase[n], a = start[pair.x], b = start[pair.y],
                    first = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine)),
                    second = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
        x = args.add ? __fadd_rn(x, first) : __fsub_rn(x, first);
        y = args.add ? __fadd_rn(y, second) : __fsub_rn(y, second);
    }
    float *out = args.out + (size_t)row * args.head_dim;
    out[pair.x] = x, out[pair.y] = y;
}

/* ---- pages ---- */

struct OffsetArgs {
    kvant_cuda_page_offsets_args given;
    uint32_t heads_a_kv, page_tiles; /* of a sequence */
};

/* What a thread block has in shared memory of a tile of query rows and pages: PAIRS pairs of channels at a time, their two numbers
 * side by side. The stride keeps eight rows in different banks. */
template <int ROWS_, int PAGES_, int PAIRS_> struct OffsetTile {
    static constexpr int ROWS = ROWS_, PAGES = PAGES_, PAIRS = PAIRS_, THREADS = 128, STRIDE = 2 * PAIRS + 4,
                         STEP = THREADS / PAIRS; /* a thread has one pair, of every STEP-th row and page */
    alignas(16) float products[ROWS][STRIDE], phases[PAGES][STRIDE];
};

/* A thread sums a row and a page: it waits for memory. */
struct FewOffsets : OffsetTile<8, 16, 64> {
    struct Sums {
        float x = 0;
    };

    KVANT_INLINE void add(int numbers, Sums &sums) const
    {
        const float *z = products[threadIdx.x % ROWS], *phase = phases[threadIdx.x / ROWS];
#pragma unroll 4
        for (int k = 0; k < numbers; k += 4) {
            const float4 a = *reinterpret_cast<const float4 *>(z + k), b = *reinterpret_cast<const float4 *>(phase + k);
            sums.x = fmaf(a.x, b.x, sums.x), sums.x = fmaf(a.y, b.y, sums.x);
            sums.x = fmaf(a.z, b.z, sums.x), sums.x = fmaf(a.w, b.w, sums.x);
        }
    }
    template <class F> KVANT_INLINE static void each(const Sums &sums, F &&use)
    {
        use(threadIdx.x % ROWS, threadIdx.x / ROWS, sums.x);
    }
};

/* A number as two of TF32, of which the second holds what the first lacks: three products of these are binary32's except for a few units
 * in the last place. */
struct TwoParts {
    uint32_t high, low;
};

KVANT_INLINE TwoParts in_two_parts(float x)
{
    const uint32_t high = __float_as_uint(x) & 0xffffe000u;
    return TwoParts{ high, __float_as_uint(x - __uint_as_float(high)) };
}

/* Many rows wait for arithmetic: each warp multiplies 16 of them with all pages. */
struct ManyOffsets : OffsetTile<64, 64, 16> {
    struct Sums {
        float c[PAGES / 8][4] = {};
    };

    KVANT_INLINE void add(int numbers, Sums &sums) const
    {
        const int row = (int)threadIdx.x / 32 * 16 + (threadIdx.x % 32) / 4, column = threadIdx.x % 4;
#pragma unroll 1
        for (int first = 0; first < numbers; first += 8) { /* behind the last one there are zeros */
            const int k = first + column;
            const TwoParts a0 = in_two_parts(products[row][k]), a1 = in_two_parts(products[row + 8][k]),
                           a2 = in_two_parts(products[row][k + 4]), a3 = in_two_parts(products[row + 8][k + 4]);
            const uint32_t high[4] = { a0.high, a1.high, a2.high, a3.high }, low[4] = { a0.low, a1.low, a2.low, a3.low };
            unrolled_for (int j = 0; j < PAGES / 8; j++) {
                const TwoParts b0 = in_two_parts(phases[8 * j + row % 8][k]), b1 = in_two_parts(phases[8 * j + row % 8][k + 4]);
                mma_tf32(sums.c[j], low, b0.high, b1.high);
                mma_tf32(sums.c[j], high, b0.low, b1.low);
                mma_tf32(sums.c[j], high, b0.high, b1.high);
            }
        }
    }
    template <class F> KVANT_INLINE static void each(const Sums &sums, F &&use)
    {
        const int row = (int)threadIdx.x / 32 * 16 + (threadIdx.x % 32) / 4, page = threadIdx.x % 4 * 2;
        unrolled_for (int j = 0; j < PAGES / 8; j++)
            unrolled_for (int i = 0; i < 4; i++)
                use(row + i / 2 * 8, 8 * j + page + i % 2, sums.c[j][i]);
    }
};
constexpr uint32_t MOST_FEW_ROWS = 32;

/* A thread block's work; first_q: of the sequence's first query token. */
struct OffsetWork {
    uint32_t b, kv_head;
    int first_page, end_page, first_row, end_row;
    size_t first_q;
};

template <class T> KVANT_INLINE OffsetWork find_offset_work(const OffsetArgs &args)
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const uint32_t head = blockIdx.x / args.page_tiles;
    OffsetWork w;
    w.b = head / p.n_kv_heads, w.kv_head = head - w.b * p.n_kv_heads;
    w.first_page = (int)(blockIdx.x - head * args.page_tiles) * T::PAGES;
    const int pages = (int)min((size_t)(max(p.lengths[w.b], 0) + KVANT_PAGE_TOKENS - 1u) / KVANT_PAGE_TOKENS, p.table_stride);
    w.end_page = min(w.first_page + T::PAGES, pages);
    int tokens = (int)p.query_tokens;
    w.first_q = w.b * p.q_batch_stride;
    if (p.query_starts) {
        const int start = p.query_starts[w.b];
        tokens = min(p.query_starts[w.b + 1] - start, tokens);
        w.first_q = start * p.q_token_stride;
    }
    w.first_row = (int)blockIdx.y * T::ROWS;
    w.end_row = min(w.first_row + T::ROWS, tokens * (int)args.heads_a_kv);
    return w;
}

/* The numbers of the pages, a bit each. By every warp. */
KVANT_INLINE uint32_t numbers_of(const kvant_cuda_turning &turning, size_t first, int n)
{
    uint32_t own = 0;
    for (int i = threadIdx.x & 31; i < n; i += 32) {
        const uint32_t number = number_at(turning, first + i);
        own |= number < KVANT_CUDA_MOST_MATRICES ? 1u << number : 0;
    }
    return __reduce_or_sync(FULL, own);
}

/* Places of a thread's query rows; those that are not there are the last one's, so that all loads are on their way together. */
template <class T> KVANT_INLINE void find_rows(const OffsetArgs &args, const OffsetWork &w, size_t (&at)[T::ROWS / T::STEP])
{
    const kvant_cuda_page_offsets_args &p = args.given;
    unrolled_for (int i = 0; i < T::ROWS / T::STEP; i++) {
        const uint32_t r = min(w.first_row + i * T::STEP + (int)threadIdx.x / T::PAIRS, w.end_row - 1), token = r / args.heads_a_kv,
                       head = w.kv_head * args.heads_a_kv + r - token * args.heads_a_kv;
        at[i] = w.first_q + token * p.q_token_stride + head * p.q_head_stride;
    }
}

template <class T> KVANT_INLINE void load_rows(const kvant_cuda_page_offsets_args &p, const size_t (&at)[T::ROWS / T::STEP], ushort2 channels, float2 (&x)[T::ROWS / T::STEP])
{
    const float *q = static_cast<const float *>(p.q);
    if (p.type == KVANT_CUDA_F32) /* one branch for all: a branch for each would wait for each */
        unrolled_for (int i = 0; i < T::ROWS / T::STEP; i++)
            x[i] = make_float2(q[at[i] + channels.x], q[at[i] + channels.y]);
    else
        unrolled_for (int i = 0; i < T::ROWS / T::STEP; i++)
            x[i] = make_float2(load_number(p.q, at[i] + channels.x, p.type), load_number(p.q, at[i] + channels.y, p.type));
}

/* Products of the rows with start `number`, and the pages' phases: pairs from first_pair on; zeros behind the last pair. What rows and pages
 * that are not there give is not stored. */
template <class T> KVANT_INLINE void load_tile(T &tile, const OffsetArgs &args, const OffsetWork &w, const size_t (&at)[T::ROWS / T::STEP], uint32_t number, uint32_t first_pair)
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const uint32_t n = p.head_dim / 2, own = threadIdx.x % T::PAIRS, pair = min(first_pair + own, n - 1);
    const int row = (int)threadIdx.x / T::PAIRS, last = w.end_page - w.first_page - 1;
    const ushort2 channels = pair_at(p.turning, pair);
    const float *start = p.turning.start + ((size_t)number * p.n_kv_heads + w.kv_head) * p.head_dim,
                *phases = p.turning.phases + ((size_t)w.b * p.table_stride + w.first_page) * p.head_dim + pair,
                there = first_pair + own < n ? 1 : 0, a = start[channels.x] * there, b = start[channels.y] * there;
    float2 x[T::ROWS / T::STEP], phase[T::PAGES / T::STEP];
    load_rows<T>(p, at, channels, x);
    unrolled_for (int i = 0; i < T::PAGES / T::STEP; i++) {
        const float *from = phases + (size_t)min(i * T::STEP + row, last) * p.head_dim;
        phase[i] = make_float2(from[0], from[n]);
    }
    unrolled_for (int i = 0; i < T::PAGES / T::STEP; i++)
        *reinterpret_cast<float2 *>(&tile.phases[i * T::STEP + row][2 * own]) = make_float2(phase[i].x * there, phase[i].y * there);
    unrolled_for (int i = 0; i < T::ROWS / T::STEP; i++)
        *reinterpret_cast<float2 *>(&tile.products[i * T::STEP + row][2 * own]) =
            make_float2(x[i].x * a + x[i].y * b, x[i].y * a - x[i].x * b);
}

/* Those of pages with this number. */
template <class T> KVANT_INLINE void store_offsets(const OffsetArgs &args, const OffsetWork &w, uint32_t number, const typename T::Sums &sums)
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const size_t rows = (size_t)p.query_tokens * args.heads_a_kv, first = ((size_t)w.b * p.n_kv_heads + w.kv_head) * p.table_stride;
    T::each(sums, [&](int row, int page, float sum) {
        const int to = w.first_page + page, r = w.first_row + row;
        if (to < w.end_page && r < w.end_row && number_at(p.turning, w.b * p.table_stride + to) == number)
            p.offsets[(first + to) * rows + r] = sum;
    });
}

/* A tile whose pages have several numbers is done once for each: that is rare. */
template <class T> __global__ void __launch_bounds__(T::THREADS) page_offsets_kernel(const __grid_constant__ OffsetArgs args)
{
    __shared__ T tile;
    const uint32_t n = args.given.head_dim / 2;
    begin_next();
    wait_for_former();
    const OffsetWork w = find_offset_work<T>(args);
    if (w.first_page >= w.end_page || w.first_row >= w.end_row)
        return;
    size_t at[T::ROWS / T::STEP];
    find_rows<T>(args, w, at);
    uint32_t left = numbers_of(args.given.turning, w.b * args.given.table_stride + w.first_page, w.end_page - w.first_page);
#pragma unroll 1
    for (; left; left &= left - 1) {
        const uint32_t number = __ffs(left) - 1;
        typename T::Sums sums;
#pragma unroll 1
        for (uint32_t first = 0; first < n; first += T::PAIRS) {
            load_tile(tile, args, w, at, number, first);
            __syncthreads();
            tile.add(2 * (int)min(n - first, (uint32_t)T::PAIRS), sums);
            __syncthreads();
        }
        store_offsets<T>(args, w, number, sums);
    }
}

template <class T> cudaError_t launch_page_offsets(const kvant_cuda_page_offsets_args &args, cudaStream_t stream)
{
    OffsetArgs p{ args, args.n_heads / args.n_kv_heads, (uint32_t)((args.table_stride + T::PAGES - 1) / T::PAGES) };
    void *parameters[] = { &p };
    const uint32_t rows = args.query_tokens * p.heads_a_kv;
    return launch_early((const void *)page_offsets_kernel<T>, dim3(args.batch * args.n_kv_heads * p.page_tiles, (rows + T::ROWS - 1) / T::ROWS),
                        T::THREADS, parameters, 0, stream);
}

constexpr uint32_t MOST_GRID_Y = 65535;

static bool valid_turning(const kvant_cuda_turning &turning, uint32_t head_dim)
{
    return turning.pairs && reinterpret_cast<uintptr_t>(turning.pairs) % 4 == 0 && turning.start && turning.phases && head_dim > 0 &&
           head_dim % 2 == 0 && head_dim <= KVANT_CUDA_MOST_DIM;
}

/* The grid counts thread blocks, and kernels places, in 32 bits. */
static bool valid_offsets(const kvant_cuda_page_offsets_args &args)
{
    const uint32_t tokens = std::max(args.query_tokens, 1u);
    return args.q && args.lengths && args.offsets && valid_type(args.type) && valid_turning(args.turning, args.head_dim) &&
           args.n_kv_heads > 0 && args.n_heads > 0 && args.n_heads % args.n_kv_heads == 0 && args.table_stride > 0 &&
           args.table_stride <= INT_MAX / KVANT_PAGE_TOKENS && (uint64_t)args.batch * args.n_kv_heads <= INT_MAX / args.table_stride &&
           (uint64_t)tokens * (args.n_heads / args.n_kv_heads) <= MOST_GRID_Y * (uint64_t)ManyOffsets::ROWS;
}

} // namespace kvant

using namespace kvant;

kvant_status kvant_cuda_table_center_rows(const kvant_cuda_center_rows_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->rows || !args->slots || !args->out || !valid_type(args->type) ||
        args->n_kv_heads == 0 || (uint64_t)args->n_tokens * args->n_kv_heads > INT_MAX || args->add > 1 ||
        !valid_turning(args->turning, args->head_dim))
        return KVANT_ERR_ARGUMENT;
    if (args->n_tokens == 0)
        return KVANT_OK;
    kvant_cuda_center_rows_args p = *args;
    void *parameters[] = { &p };
    const uint32_t rows = p.n_tokens * p.n_kv_heads, rows_a_block = ROW_THREADS / (p.head_dim / 2);
    return from_cuda(launch_early((const void *)center_rows_kernel, dim3((rows + rows_a_block - 1) / rows_a_block), ROW_THREADS, parameters, 0,
                                  static_cast<cudaStream_t>(stream)));
}

kvant_status kvant_cuda_table_page_offsets(const kvant_cuda_page_offsets_args *given, kvant_cuda_stream stream)
{
    if (!given || given->size != sizeof *given || !valid_offsets(*given))
        return KVANT_ERR_ARGUMENT;
    kvant_cuda_page_offsets_args args = *given;
    args.query_tokens = std::max(args.query_tokens, 1u);
    if (args.batch == 0)
        return KVANT_OK;
    const bool few = args.query_tokens * (args.n_heads / args.n_kv_heads) <= MOST_FEW_ROWS;
    return from_cuda(few ? launch_page_offsets<FewOffsets>(args, static_cast<cudaStream_t>(stream))
                         : launch_page_offsets<ManyOffsets>(args, static_cast<cudaStream_t>(stream)));
}
