/* centers.cu - centres of blocks, which RoPE rotates to the blocks' positions
 * (kvant_cuda_block_centers). It subtracts them from rows and adds them to rows, and computes their
 * products with queries, which attention adds to scores.
 *
 * A start is a centre at position 0. With its numbers a and b for a pair of channels, let Z = (q_1
 * a + q_2 b, q_2 a - q_1 b). Then <q, centre> is the sum of Z_1 cos + Z_2 sin over all pairs, which
 * is a matrix product of query rows and phases. */
#include "centers.h"

#include "checks.h"
#include "launch.h"
#include "ptx.cuh"
#include "rotate.cuh"
#include "table.h"
#include "block_center.cuh"

#include <algorithm>
#include <climits>

namespace kvant
{

/* ---- rows ---- */

constexpr uint32_t ROW_THREADS = 256;

/* A thread has a pair of channels of a row, so rows may be changed in place. */
__global__ void __launch_bounds__(ROW_THREADS)
    center_rows_kernel(const __grid_constant__ kvant_cuda_center_rows_args args)
{
    const uint32_t n = args.head_dim / 2, in_block = threadIdx.x / n,
                   i = threadIdx.x - in_block * n, row = blockIdx.x * (ROW_THREADS / n) + in_block,
                   token = row / args.n_kv_heads, head = row - token * args.n_kv_heads;
    begin_next();
    if (in_block >= ROW_THREADS / n || token >= args.n_tokens)
        return;
    const ushort2 pair = pair_at(args.block_centers, i);
    wait_for_prior();
    const size_t at = token * args.token_stride + head * args.head_stride;
    float x = load_number(args.rows, at + pair.x, args.type),
          y = load_number(args.rows, at + pair.y, args.type);
    const int64_t slot = args.slots[token];
    if (slot >= 0) {
        CenterPair own;
        own.load(args.block_centers, slot, i, head, args.n_kv_heads, args.head_dim);
        const float2 center = own.center();
        x = args.add ? __fadd_rn(x, center.x) : __fsub_rn(x, center.x);
        y = args.add ? __fadd_rn(y, center.y) : __fsub_rn(y, center.y);
    }
    float *out = args.out + (size_t)row * args.head_dim;
    out[pair.x] = x, out[pair.y] = y;
}

/* ---- pages ---- */

struct OffsetArgs {
    kvant_cuda_page_offsets_args given;
    uint32_t heads_a_kv, page_tiles; /* per sequence */
    bool ready;                      /* as in kvant_cuda_plain_queries */
};

/* A thread block's tile of query rows and pages. A warp has 16 rows, and 8 pages of each of its
 * tensor-core tiles. Tiles fit the smallest shared memory that a thread block may have, 99 KiB
 * (compute capability 8.6). PAIRS: pairs of channels of a row that a lane has at most. */
template <int ROW_WARPS_, int PAGE_WARPS, int TILES_, int PAIRS_> struct OffsetShape {
    static constexpr int ROW_WARPS = ROW_WARPS_, TILES = TILES_, WARPS = ROW_WARPS * PAGE_WARPS,
                         THREADS = 32 * WARPS, ROWS = 16 * ROW_WARPS,
                         PAGES = 8 * TILES * PAGE_WARPS, PAIRS = PAIRS_;
    /* tiles whose sums are in registers at a time */
    static constexpr int GROUP = TILES > 4 ? 4 : TILES;
    static_assert(TILES % GROUP == 0 && PAGES <= 64, "a mask has a bit for each page");
};
using FewOffsets = OffsetShape<1, 3, 1, KVANT_CUDA_MOST_DIM / 64>;
template <int D>
using ManyOffsets = OffsetShape<D <= 256 ? 4 : 2, 1,
                                D <= 128   ? 8
                                : D <= 256 ? 3
                                           : 1,
                                D / 64>;
constexpr uint32_t MOST_FEW_ROWS = 32;

/* Products of a row and a page are products of halves: a number is split into two of them, which
 * together keep 22 bits of it divided by its unit. Units of rows are powers of two above their
 * largest number. The product of both lower halves is left out. */
constexpr uint32_t STEP = 32; /* halves of a row that a warp multiplies at a time */

/* The halves of a row in shared memory that belong to cosines, and the same number for sines. The
 * last ones are zeros if there are fewer pairs. */
__host__ __device__ constexpr uint32_t cosines_of(uint32_t head_dim)
{
    return (head_dim / 2 + STEP / 2 - 1) / (STEP / 2) * (STEP / 2);
}

/* From a row to the next one, so that eight rows of an operand are in different banks. */
__host__ __device__ constexpr uint32_t row_stride(uint32_t head_dim)
{
    return 2 * cosines_of(head_dim) + 8;
}

template <class S> constexpr size_t offset_bytes(uint32_t head_dim)
{
    return 2 * (S::ROWS + S::PAGES) * row_stride(head_dim) * sizeof(__half) +
           S::ROWS * sizeof(float);
}

template <class S> constexpr bool offsets_fit(uint32_t head_dim)
{
    return offset_bytes<S>(head_dim) <= 99 * 1024;
}
static_assert(offsets_fit<FewOffsets>(512) && offsets_fit<ManyOffsets<128>>(128) &&
              offsets_fit<ManyOffsets<256>>(256) && offsets_fit<ManyOffsets<512>>(512) &&
              KVANT_CUDA_MOST_DIM == 512);

/* A thread block's shared memory: upper and lower halves of rows and of pages, and units of
 * rows. */
template <class S> struct OffsetSpace {
    __half *rows, *pages;
    float *units;
    uint32_t stride, cosines, n; /* n: pairs of channels */

    KVANT_INLINE OffsetSpace(void *shared, uint32_t head_dim)
        : rows(static_cast<__half *>(shared)), stride(row_stride(head_dim)),
          cosines(cosines_of(head_dim)), n(head_dim / 2)
    {
        pages = rows + 2 * S::ROWS * stride;
        units = reinterpret_cast<float *>(pages + 2 * S::PAGES * stride);
    }

    /* The row of upper halves (lower: 0) or of lower ones. */
    KVANT_INLINE __half *row(int lower, int i) const
    {
        return rows + (lower * S::ROWS + i) * stride;
    }
    KVANT_INLINE __half *page(int lower, int i) const
    {
        return pages + (lower * S::PAGES + i) * stride;
    }
};

/* The first of the lane's pairs number 2 k and 2 k + 1, which are neighbours. */
KVANT_INLINE uint32_t lane_pair(int k)
{
    return 64 * k + 2 * (threadIdx.x % 32);
}

/* Stores two numbers as upper and lower halves. */
KVANT_INLINE void store_split(__half *upper, __half *lower, float x, float y)
{
    const __half2 high = __floats2half2_rn(x, y);
    const float2 rounded = __half22float2(high);
    *reinterpret_cast<__half2 *>(upper) = high;
    *reinterpret_cast<__half2 *>(lower) = __floats2half2_rn(x - rounded.x, y - rounded.y);
}

/* The work of a thread block. first_q: index of the sequence's first query token. */
struct OffsetWork {
    uint32_t b, kv_head;
    int first_page, end_page, first_row, end_row;
    size_t first_q;
};

template <class S> KVANT_INLINE OffsetWork find_offset_work(const OffsetArgs &args)
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const uint32_t head = blockIdx.x / args.page_tiles;
    OffsetWork w;
    w.b = head / p.n_kv_heads, w.kv_head = head - w.b * p.n_kv_heads;
    w.first_page = (int)(blockIdx.x - head * args.page_tiles) * S::PAGES;
    const int pages =
        (int)min((size_t)(max(p.lengths[w.b], 0) + KVANT_PAGE_TOKENS - 1u) / KVANT_PAGE_TOKENS,
                 p.table_stride);
    w.end_page = min(w.first_page + S::PAGES, pages);
    int tokens = (int)p.query_tokens;
    w.first_q = w.b * p.q_batch_stride;
    if (p.query_starts) {
        const int start = p.query_starts[w.b];
        tokens = min(p.query_starts[w.b + 1] - start, tokens);
        w.first_q = start * p.q_token_stride;
    }
    w.first_row = (int)blockIdx.y * S::ROWS;
    w.end_row = min(w.first_row + S::ROWS, tokens * (int)args.heads_a_kv);
    return w;
}

/* The numbers of a tile's pages; a lane has those of two pages. All warps find the same. */
struct PageNumbers {
    uint32_t own[2];

    KVANT_INLINE PageNumbers(const kvant_cuda_block_centers &block_centers, size_t first, int n)
    {
        const int lane = threadIdx.x & 31;
        unrolled_for (int i = 0; i < 2; i++)
            own[i] = 32 * i + lane < n ? number_at(block_centers, first + 32 * i + lane)
                                       : KVANT_CUDA_MOST_MATRICES;
    }

    /* All numbers, as a bit mask. */
    KVANT_INLINE uint32_t all() const
    {
        uint32_t numbers = 0;
        unrolled_for (int i = 0; i < 2; i++)
            numbers |= own[i] < KVANT_CUDA_MOST_MATRICES ? 1u << own[i] : 0;
        return __reduce_or_sync(FULL, numbers);
    }

    /* The pages with this number, as a bit mask. */
    KVANT_INLINE uint64_t pages_with(uint32_t number) const
    {
        const uint64_t far = __ballot_sync(FULL, own[1] == number);
        return far << 32 | __ballot_sync(FULL, own[0] == number);
    }
};

/* Loads phases of pages, several at a time. Pages beyond the end are copies of the last one; tiles
 * without pages are left out. */
template <class S>
KVANT_INLINE void load_phases(const OffsetArgs &args, const OffsetWork &w,
                              const OffsetSpace<S> &space)
{
    constexpr int N = S::PAIRS <= 2 ? 8 : 1;
    const kvant_cuda_page_offsets_args &p = args.given;
    const int n_pages = (w.end_page - w.first_page + 7) / 8 * 8;
    rolled_for (int first = (int)threadIdx.x / 32; first < n_pages; first += N * S::WARPS) {
        float x[N][S::PAIRS], y[N][S::PAIRS];
        unrolled_for (int j = 0; j < N; j++) {
            const int page = min(w.first_page + first + j * S::WARPS, w.end_page - 1);
            const float *from = p.block_centers.phases + (w.b * p.table_stride + page) * p.head_dim;
            unrolled_for (int k = 0; k < S::PAIRS; k++) {
                const uint32_t i = lane_pair(k / 2) + k % 2;
                x[j][k] = i < space.n ? from[i] : 0;
                y[j][k] = i < space.n ? from[space.n + i] : 0;
            }
        }
        unrolled_for (int j = 0; j < N; j++) {
            const int at = first + j * S::WARPS;
            __half *upper = space.page(0, at), *lower = space.page(1, at);
            unrolled_for (int k = 0; k < S::PAIRS; k += 2) {
                const uint32_t i = lane_pair(k / 2), sine = space.cosines + i;
                if (at >= n_pages || i >= space.cosines)
                    continue;
                store_split(upper + i, lower + i, x[j][k], x[j][k + 1]);
                store_split(upper + sine, lower + sine, y[j][k], y[j][k + 1]);
            }
        }
    }
}

/* Where the rows of a warp lie; lane i has row i. Rows beyond the end are copies of the last one,
 * and their results are not stored. */
template <class S> KVANT_INLINE size_t place_of_row(const OffsetArgs &args, const OffsetWork &w)
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const int own = (int)threadIdx.x / 32 + (int)threadIdx.x % 32 * S::WARPS;
    const uint32_t r = min(w.first_row + own, w.end_row - 1), token = r / args.heads_a_kv,
                   head = w.kv_head * args.heads_a_kv + r - token * args.heads_a_kv;
    return w.first_q + token * p.q_token_stride + head * p.q_head_stride;
}

/* A lane's pairs of channels and of a start. */
template <class S> struct StartPairs {
    ushort2 channels[S::PAIRS];
    float2 start[S::PAIRS];

    KVANT_INLINE explicit StartPairs(const kvant_cuda_page_offsets_args &p)
    {
        unrolled_for (int k = 0; k < S::PAIRS; k++) {
            const uint32_t i = lane_pair(k / 2) + k % 2;
            channels[k] = i < p.head_dim / 2 ? pair_at(p.block_centers, i) : make_ushort2(0, 0);
        }
    }

    KVANT_INLINE void load(const kvant_cuda_page_offsets_args &p, uint32_t kv_head, uint32_t number)
    {
        const float *all =
            p.block_centers.start + ((size_t)number * p.n_kv_heads + kv_head) * p.head_dim;
        unrolled_for (int k = 0; k < S::PAIRS; k++)
            start[k] = lane_pair(k / 2) + k % 2 < p.head_dim / 2
                           ? make_float2(all[channels[k].x], all[channels[k].y])
                           : make_float2(0, 0);
    }

    /* Multiplies a row, and stores the factors of cosines and of sines. */
    KVANT_INLINE void place(const OffsetSpace<S> &space, int row, const float (&x)[S::PAIRS],
                            const float (&y)[S::PAIRS]) const
    {
        float cosine[S::PAIRS], sine[S::PAIRS], largest = 0;
        unrolled_for (int k = 0; k < S::PAIRS; k++) {
            cosine[k] = x[k] * start[k].x + y[k] * start[k].y;
            sine[k] = y[k] * start[k].x - x[k] * start[k].y;
            largest = fmaxf(largest, fmaxf(fabsf(cosine[k]), fabsf(sine[k])));
        }
        const float unit = power_above(largest_of(largest)), inverse = __frcp_rn(unit);
        __half *upper = space.row(0, row), *lower = space.row(1, row);
        unrolled_for (int k = 0; k < S::PAIRS; k += 2) {
            const uint32_t i = lane_pair(k / 2), at = space.cosines + i;
            if (i >= space.cosines)
                continue;
            store_split(upper + i, lower + i, cosine[k] * inverse, cosine[k + 1] * inverse);
            store_split(upper + at, lower + at, sine[k] * inverse, sine[k + 1] * inverse);
        }
        if (threadIdx.x % 32 == 0)
            space.units[row] = unit;
    }

    /* Loads the warp's rows, several at a time, and multiplies them. own: from place_of_row. */
    KVANT_INLINE void place_rows(const OffsetArgs &args, const OffsetSpace<S> &space,
                                 size_t own) const
    {
        constexpr int N = S::PAIRS <= 2   ? 8
                          : S::PAIRS <= 4 ? 4
                                          : 1,
                      A_WARP = (S::ROWS + S::WARPS - 1) / S::WARPS;
        static_assert(A_WARP <= 32 && A_WARP % N == 0, "a lane knows where a row is");
        const kvant_cuda_page_offsets_args &p = args.given;
        const int warp = (int)threadIdx.x / 32;
        rolled_for (int first = 0; first < A_WARP; first += N) {
            float x[N][S::PAIRS], y[N][S::PAIRS];
            unrolled_for (int j = 0; j < N; j++) {
                const size_t at = __shfl_sync(FULL, (unsigned long long)own, first + j);
                unrolled_for (int k = 0; k < S::PAIRS; k++) {
                    x[j][k] = load_number(p.q, at + channels[k].x, p.type);
                    y[j][k] = load_number(p.q, at + channels[k].y, p.type);
                }
            }
            unrolled_for (int j = 0; j < N; j++) {
                const int row = warp + (first + j) * S::WARPS;
                if (row < S::ROWS)
                    place(space, row, x[j], y[j]);
            }
        }
    }
};

/* Adds up a warp's rows and a group of its tiles, from first_tile on, over all channels. */
template <class S>
KVANT_INLINE void add_channels(const OffsetSpace<S> &space, int first_tile,
                               float (&sums)[S::GROUP][4])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % S::ROW_WARPS * 16 + lane % 16,
              page = 8 * first_tile + lane % 8;
    rolled_for (uint32_t at = 0; at < 2 * space.cosines; at += STEP) {
        uint32_t a[2][2][4]; /* upper and lower halves, 16 numbers each */
        unrolled_for (int h = 0; h < 2; h++)
            unrolled_for (int i = 0; i < 2; i++)
                load_matrices<false>(a[h][i], space.row(h, row) + at + 16 * i + lane / 16 * 8);
        unrolled_for (int j = 0; j < S::GROUP; j++) {
            uint32_t b[2][4];
            unrolled_for (int h = 0; h < 2; h++)
                load_matrices<false>(b[h], space.page(h, page + 8 * j) + at + lane / 8 * 8);
            unrolled_for (int i = 0; i < 2; i++) {
                mma(sums[j], a[1][i], b[0][2 * i], b[0][2 * i + 1]);
                mma(sums[j], a[0][i], b[1][2 * i], b[1][2 * i + 1]);
                mma(sums[j], a[0][i], b[0][2 * i], b[0][2 * i + 1]);
            }
        }
    }
}

/* Stores the sums of a group of tiles. pages: those of the group that are stored, as a bit mask. */
template <class S>
KVANT_INLINE void store_offsets(const OffsetArgs &args, const OffsetWork &w,
                                const OffsetSpace<S> &space, int first_tile, uint32_t pages,
                                const float (&sums)[S::GROUP][4])
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const size_t rows = (size_t)p.query_tokens * args.heads_a_kv,
                 first = ((size_t)w.b * p.n_kv_heads + w.kv_head) * p.table_stride;
    const int lane = (int)threadIdx.x % 32, page = w.first_page + 8 * first_tile,
              own = (int)threadIdx.x / 32 % S::ROW_WARPS * 16 + lane / 4;
    unrolled_for (int h = 0; h < 2; h++) {
        const int r = w.first_row + own + 8 * h;
        const float unit = space.units[own + 8 * h];
        unrolled_for (int j = 0; j < S::GROUP; j++)
            unrolled_for (int i = 0; i < 2; i++) {
                const int at = 8 * j + lane % 4 * 2 + i;
                if (pages >> at & 1 && r < w.end_row)
                    p.offsets[(first + page + at) * rows + r] = sums[j][2 * h + i] * unit;
            }
    }
}

/* Finds the offsets of a tile. If its pages have several numbers, which is rare, this is done once
 * for each. */
template <class S>
KVANT_INLINE void find_offsets(const OffsetArgs &args, const OffsetWork &w,
                               const OffsetSpace<S> &space)
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const size_t first = w.b * p.table_stride + w.first_page, own_row = place_of_row<S>(args, w);
    const int warp = (int)threadIdx.x / 32;
    StartPairs<S> pairs(p);
    const PageNumbers numbers(p.block_centers, first, w.end_page - w.first_page);
    load_phases<S>(args, w, space);
    uint32_t left = numbers.all();
    rolled_for (bool again = false; left; left &= left - 1, again = true) {
        const uint32_t number = __ffs(left) - 1;
        const uint64_t pages = numbers.pages_with(number);
        pairs.load(p, w.kv_head, number);
        if (again)
            __syncthreads();
        pairs.place_rows(args, space, own_row);
        __syncthreads();
        rolled_for (int g = 0; g < S::TILES; g += S::GROUP) {
            const int tile = warp / S::ROW_WARPS * S::TILES + g;
            const uint32_t own =
                (uint32_t)(pages >> 8 * tile & (((uint64_t)1 << 8 * S::GROUP) - 1));
            float sums[S::GROUP][4] = {};
            if (own == 0)
                continue;
            add_channels<S>(space, tile, sums);
            store_offsets<S>(args, w, space, tile, own, sums);
        }
    }
}

template <class S>
__global__ void __launch_bounds__(S::THREADS, 2)
    page_offsets_kernel(const __grid_constant__ OffsetArgs args)
{
    extern __shared__ __align__(16) uint8_t shared[];
    begin_next();
    if (!args.ready)
        wait_for_prior();
    const OffsetWork w = find_offset_work<S>(args);
    if (w.first_page < w.end_page && w.first_row < w.end_row)
        find_offsets<S>(args, w, OffsetSpace<S>(shared, args.given.head_dim));
    if (args.ready) /* when this kernel ends, those before it have ended, too */
        wait_for_prior();
}

template <class S>
cudaError_t launch_shape(const kvant_cuda_page_offsets_args &args, bool ready, cudaStream_t stream)
{
    const void *kernel = (const void *)page_offsets_kernel<S>;
    OffsetArgs p{ args, args.n_heads / args.n_kv_heads,
                  (uint32_t)((args.table_stride + S::PAGES - 1) / S::PAGES), ready };
    void *parameters[] = { &p };
    const uint32_t rows = args.query_tokens * p.heads_a_kv;
    const size_t bytes = offset_bytes<S>(args.head_dim);
    const dim3 grid(args.batch * args.n_kv_heads * p.page_tiles, (rows + S::ROWS - 1) / S::ROWS);
    const cudaError_t error = allow_shared(kernel, (int)bytes);
    return error == cudaSuccess ? launch_early(kernel, grid, S::THREADS, parameters, bytes, stream)
                                : error;
}

constexpr uint32_t MOST_GRID_Y = 65535;

bool valid_block_centers(const kvant_cuda_block_centers &block_centers, uint32_t head_dim)
{
    return block_centers.pairs && reinterpret_cast<uintptr_t>(block_centers.pairs) % 4 == 0 &&
           block_centers.start && block_centers.phases && head_dim > 0 && head_dim % 2 == 0 &&
           head_dim <= KVANT_CUDA_MOST_DIM;
}

/* The grid counts thread blocks in 32 bits, and kernels count places in 32 bits. */
bool valid_offsets(const kvant_cuda_page_offsets_args &args)
{
    const uint32_t tokens = std::max(args.query_tokens, 1u);
    return args.q && args.lengths && args.offsets && valid_type(args.type) &&
           valid_block_centers(args.block_centers, args.head_dim) && args.n_kv_heads > 0 &&
           args.n_heads > 0 && args.n_heads % args.n_kv_heads == 0 && args.table_stride > 0 &&
           args.table_stride <= INT_MAX / KVANT_PAGE_TOKENS &&
           (uint64_t)args.batch * args.n_kv_heads <= INT_MAX / args.table_stride &&
           (uint64_t)tokens * (args.n_heads / args.n_kv_heads) <=
               MOST_GRID_Y * (uint64_t)ManyOffsets<KVANT_CUDA_MOST_DIM>::ROWS;
}

kvant_status launch_page_offsets(kvant_cuda_page_offsets_args args, bool ready, cudaStream_t stream)
{
    args.query_tokens = std::max(args.query_tokens, 1u);
    if (args.batch == 0)
        return KVANT_OK;
    const bool few = args.query_tokens * (args.n_heads / args.n_kv_heads) <= MOST_FEW_ROWS;
    const auto launch = few                    ? launch_shape<FewOffsets>
                        : args.head_dim <= 128 ? launch_shape<ManyOffsets<128>>
                        : args.head_dim <= 256 ? launch_shape<ManyOffsets<256>>
                                               : launch_shape<ManyOffsets<512>>;
    return from_cuda(launch(args, ready, stream));
}

} // namespace kvant

using namespace kvant;

kvant_status kvant_cuda_table_center_rows(const kvant_cuda_center_rows_args *args,
                                          kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->rows || !args->slots || !args->out ||
        !valid_type(args->type) || args->n_kv_heads == 0 ||
        (uint64_t)args->n_tokens * args->n_kv_heads > INT_MAX || args->add > 1 ||
        !valid_block_centers(args->block_centers, args->head_dim))
        return KVANT_ERR_ARGUMENT;
    if (args->n_tokens == 0)
        return KVANT_OK;
    kvant_cuda_center_rows_args p = *args;
    void *parameters[] = { &p };
    const uint32_t rows = p.n_tokens * p.n_kv_heads, rows_a_block = ROW_THREADS / (p.head_dim / 2);
    return from_cuda(launch_early((const void *)center_rows_kernel,
                                  dim3((rows + rows_a_block - 1) / rows_a_block), ROW_THREADS,
                                  parameters, 0, static_cast<cudaStream_t>(stream)));
}

kvant_status kvant_cuda_table_page_offsets(const kvant_cuda_page_offsets_args *given,
                                           kvant_cuda_stream stream)
{
    if (!given || given->size != sizeof *given || !valid_offsets(*given))
        return KVANT_ERR_ARGUMENT;
    return launch_page_offsets(*given, false, static_cast<cudaStream_t>(stream));
}
