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
#include <initializer_list>

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
    bool whole_rows, whole_phases;   /* loads of 16 bytes are possible */
};

/* A thread block's tile of query rows and pages. A warp has 16 rows, and 8 pages of each of its
 * tensor-core tiles. Tiles fit the smallest shared memory that a thread block may have, 99 KiB
 * (compute capability 8.6). */
template <int ROW_WARPS_, int PAGE_WARPS, int TILES_> struct OffsetShape {
    static constexpr int ROW_WARPS = ROW_WARPS_, TILES = TILES_, WARPS = ROW_WARPS * PAGE_WARPS,
                         THREADS = 32 * WARPS, ROWS = 16 * ROW_WARPS,
                         PAGES = 8 * TILES * PAGE_WARPS;
};
using FewOffsets = OffsetShape<1, 3, 1>;
template <int D>
using ManyOffsets = OffsetShape<D <= 256 ? 4 : 2, 1,
                                D <= 128   ? 8
                                : D <= 256 ? 3
                                           : 1>;
constexpr uint32_t MOST_FEW_ROWS = 32;

constexpr uint32_t ROW_PADDING =
    4; /* numbers that pad a row in shared memory, so that eight rows are in different banks */

template <class S> constexpr size_t offset_bytes(uint32_t head_dim)
{
    return (S::ROWS + S::PAGES) * (head_dim + ROW_PADDING) * sizeof(float);
}

/* The data of a thread block in addition to query rows and phases: pairs of channels, and the two
 * numbers of a start for each pair. Up to three pairs behind the last one are zeros. */
struct OffsetPairs {
    ushort2 channels[KVANT_CUDA_MOST_DIM / 2];
    float2 starts[KVANT_CUDA_MOST_DIM / 2];
};

template <class S> constexpr bool offsets_fit(uint32_t head_dim)
{
    return offset_bytes<S>(head_dim) + sizeof(OffsetPairs) <= 99 * 1024;
}
static_assert(offsets_fit<FewOffsets>(512) && offsets_fit<ManyOffsets<128>>(128) &&
              offsets_fit<ManyOffsets<256>>(256) && offsets_fit<ManyOffsets<512>>(512) &&
              KVANT_CUDA_MOST_DIM == 512);

/* A number as the sum of two TF32 numbers. Three products of their parts give binary32's product,
 * except for a few units in the last place. */
struct TwoParts {
    uint32_t high, low;
};

KVANT_INLINE TwoParts in_two_parts(float x)
{
    const uint32_t high = __float_as_uint(x) & 0xffffe000u;
    return TwoParts{ high, __float_as_uint(x - __uint_as_float(high)) };
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

/* The set of numbers of the pages, as a bit mask. Called by every warp. */
KVANT_INLINE uint32_t numbers_of(const kvant_cuda_block_centers &block_centers, size_t first, int n)
{
    uint32_t own = 0;
    for (int i = threadIdx.x & 31; i < n; i += 32) {
        const uint32_t number = number_at(block_centers, first + i);
        own |= number < KVANT_CUDA_MOST_MATRICES ? 1u << number : 0;
    }
    return __reduce_or_sync(FULL, own);
}

/* Copies head_dim numbers, by a warp. */
KVANT_INLINE void load_vector(float *to, const void *from, size_t at, kvant_cuda_type type,
                              uint32_t head_dim, bool whole)
{
    const uint32_t lane = threadIdx.x % 32;
    if (whole)
        for (uint32_t i = 4 * lane; i < head_dim; i += 128)
            copy_or_clear(
                shared_address(to + i),
                reinterpret_cast<const uint8_t *>(static_cast<const float *>(from) + at + i), true);
    else
        for (uint32_t i = lane; i < head_dim; i += 32)
            to[i] = load_number(from, at + i, type);
}

/* The tiles of eight pages in which some page has this number, as a bit mask. Called by every
 * warp. */
KVANT_INLINE uint32_t tiles_of(const kvant_cuda_block_centers &block_centers, size_t first, int n,
                               uint32_t number)
{
    uint32_t own = 0;
    for (int i = threadIdx.x & 31; i < n; i += 32)
        own |= (uint32_t)(number_at(block_centers, first + i) == number) << i / 8;
    return __reduce_or_sync(FULL, own);
}

/* Loads query rows, phases of pages, and pairs; all loads overlap. Rows and pages beyond the end
 * are copies of the last one, and their results are not stored. Tiles without pages are left
 * out. */
template <class S>
KVANT_INLINE void load_tile(const OffsetArgs &args, const OffsetWork &w, float *shared,
                            OffsetPairs &pairs)
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const uint32_t stride = p.head_dim + ROW_PADDING, n = p.head_dim / 2;
    for (int i = (int)threadIdx.x / 32; i < S::ROWS; i += S::WARPS) {
        const uint32_t r = min(w.first_row + i, w.end_row - 1), token = r / args.heads_a_kv,
                       head = w.kv_head * args.heads_a_kv + r - token * args.heads_a_kv;
        load_vector(shared + i * stride, p.q,
                    w.first_q + token * p.q_token_stride + head * p.q_head_stride, p.type,
                    p.head_dim, args.whole_rows);
    }
    const int n_pages = (w.end_page - w.first_page + 7) / 8 * 8;
    for (int i = (int)threadIdx.x / 32; i < n_pages; i += S::WARPS) {
        const size_t page = w.b * p.table_stride + min(w.first_page + i, w.end_page - 1);
        load_vector(shared + (S::ROWS + i) * stride, p.block_centers.phases, page * p.head_dim,
                    KVANT_CUDA_F32, p.head_dim, args.whole_phases);
    }
    for (uint32_t i = threadIdx.x; i < (n + 3) / 4 * 4; i += S::THREADS)
        pairs.channels[i] = i < n ? pair_at(p.block_centers, i) : make_ushort2(0, 0);
    end_copies();
    wait_for_copies<0>();
}

KVANT_INLINE void load_starts(const OffsetArgs &args, const OffsetWork &w, uint32_t number,
                              OffsetPairs &pairs)
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const float *start =
        p.block_centers.start + ((size_t)number * p.n_kv_heads + w.kv_head) * p.head_dim;
    const uint32_t n = p.head_dim / 2;
    for (uint32_t i = threadIdx.x; i < (n + 3) / 4 * 4; i += blockDim.x) {
        const ushort2 channels = pairs.channels[i];
        pairs.starts[i] =
            i < n ? make_float2(start[channels.x], start[channels.y]) : make_float2(0, 0);
    }
}

/* Products of two query rows with a pair of a start: first the factors of cosines, then the factors
 * of sines. */
struct RowProducts {
    TwoParts parts[4];

    KVANT_INLINE RowProducts(const float *row, const float *other, ushort2 channels, float2 start)
    {
        const float x[2] = { row[channels.x], other[channels.x] },
                    y[2] = { row[channels.y], other[channels.y] };
        unrolled_for (int i = 0; i < 2; i++) {
            parts[i] = in_two_parts(x[i] * start.x + y[i] * start.y);
            parts[2 + i] = in_two_parts(y[i] * start.x - x[i] * start.y);
        }
    }
};

/* Adds up a warp's rows and pages over all pairs, four at a time. tiles: as from tiles_of. */
template <class S>
KVANT_INLINE void add_pairs(uint32_t head_dim, const float *shared, const OffsetPairs &pairs,
                            uint32_t tiles, float (&sums)[S::TILES][4])
{
    const uint32_t stride = head_dim + ROW_PADDING, n = head_dim / 2, warp = threadIdx.x / 32,
                   lane = threadIdx.x % 32;
    const float *rows = shared + (warp % S::ROW_WARPS * 16 + lane / 4) * stride,
                *phases =
                    shared + (S::ROWS + warp / S::ROW_WARPS * 8 * S::TILES + lane / 4) * stride;
    const uint32_t own_tiles = tiles >> warp / S::ROW_WARPS * S::TILES;
#pragma unroll 2
    for (uint32_t first = 0; first < n; first += 4) {
        const uint32_t own = first + lane % 4, there = min(own, n - 1);
        const RowProducts z(rows, rows + 8 * stride, pairs.channels[own], pairs.starts[own]);
        const uint32_t high[4] = { z.parts[0].high, z.parts[1].high, z.parts[2].high,
                                   z.parts[3].high },
                       low[4] = { z.parts[0].low, z.parts[1].low, z.parts[2].low, z.parts[3].low };
        unrolled_for (int j = 0; j < S::TILES; j++) {
            if (!(own_tiles >> j & 1))
                continue;
            const float *phase = phases + 8 * j * stride + there;
            const TwoParts cosine = in_two_parts(phase[0]), sine = in_two_parts(phase[n]);
            mma_tf32(sums[j], low, cosine.high, sine.high);
            mma_tf32(sums[j], high, cosine.low, sine.low);
            mma_tf32(sums[j], high, cosine.high, sine.high);
        }
    }
}

/* Stores the sums of pages with this number. */
template <class S>
KVANT_INLINE void store_offsets(const OffsetArgs &args, const OffsetWork &w, uint32_t number,
                                const float (&sums)[S::TILES][4])
{
    const kvant_cuda_page_offsets_args &p = args.given;
    const size_t rows = (size_t)p.query_tokens * args.heads_a_kv,
                 first = ((size_t)w.b * p.n_kv_heads + w.kv_head) * p.table_stride;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32,
              row = w.first_row + warp % S::ROW_WARPS * 16 + lane / 4,
              page = w.first_page + warp / S::ROW_WARPS * 8 * S::TILES + lane % 4 * 2;
    unrolled_for (int j = 0; j < S::TILES; j++)
        unrolled_for (int i = 0; i < 4; i++) {
            const int to = page + 8 * j + i % 2, r = row + i / 2 * 8;
            if (to < w.end_page && r < w.end_row &&
                number_at(p.block_centers, w.b * p.table_stride + to) == number)
                p.offsets[(first + to) * rows + r] = sums[j][i];
        }
}

/* If the pages of a tile have several numbers, which is rare, the tile is summed once for each. */
template <class S>
__global__ void __launch_bounds__(S::THREADS)
    page_offsets_kernel(const __grid_constant__ OffsetArgs args)
{
    extern __shared__ __align__(16) float shared[];
    __shared__ OffsetPairs pairs;
    begin_next();
    wait_for_prior();
    const OffsetWork w = find_offset_work<S>(args);
    if (w.first_page >= w.end_page || w.first_row >= w.end_row)
        return;
    load_tile<S>(args, w, shared, pairs);
    const size_t first = w.b * args.given.table_stride + w.first_page;
    const int n_pages = w.end_page - w.first_page;
    uint32_t left = numbers_of(args.given.block_centers, first, n_pages);
#pragma unroll 1
    for (; left; left &= left - 1) {
        const uint32_t number = __ffs(left) - 1;
        float sums[S::TILES][4] = {};
        __syncthreads();
        load_starts(args, w, number, pairs);
        __syncthreads();
        add_pairs<S>(args.given.head_dim, shared, pairs,
                     tiles_of(args.given.block_centers, first, n_pages, number), sums);
        store_offsets<S>(args, w, number, sums);
    }
}

/* Whether rows begin at multiples of 16 bytes. */
static bool in_sixteens(const void *at, std::initializer_list<size_t> strides)
{
    return reinterpret_cast<uintptr_t>(at) % 16 == 0 &&
           std::all_of(strides.begin(), strides.end(),
                       [](size_t stride) { return stride % 4 == 0; });
}

template <class S>
cudaError_t launch_page_offsets(const kvant_cuda_page_offsets_args &args, cudaStream_t stream)
{
    const void *kernel = (const void *)page_offsets_kernel<S>;
    OffsetArgs p{ args, args.n_heads / args.n_kv_heads,
                  (uint32_t)((args.table_stride + S::PAGES - 1) / S::PAGES),
                  args.type == KVANT_CUDA_F32 &&
                      in_sixteens(args.q, { args.head_dim, args.q_batch_stride, args.q_token_stride,
                                            args.q_head_stride }),
                  in_sixteens(args.block_centers.phases, { args.head_dim }) };
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
    kvant_cuda_page_offsets_args args = *given;
    args.query_tokens = std::max(args.query_tokens, 1u);
    if (args.batch == 0)
        return KVANT_OK;
    const bool few = args.query_tokens * (args.n_heads / args.n_kv_heads) <= MOST_FEW_ROWS;
    const auto launch = few                    ? launch_page_offsets<FewOffsets>
                        : args.head_dim <= 128 ? launch_page_offsets<ManyOffsets<128>>
                        : args.head_dim <= 256 ? launch_page_offsets<ManyOffsets<256>>
                                               : launch_page_offsets<ManyOffsets<512>>;
    return from_cuda(launch(args, static_cast<cudaStream_t>(stream)));
}
