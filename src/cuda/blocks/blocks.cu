/* blocks.cu - attention of few query rows over rows in ggml's formats q8_0 and q4_0, in llama.cpp's
 * own buffers.
 *
 * Tokens are distributed over thread blocks, then over warps, 16 at a time. A warp copies its rows
 * to shared memory a few tiles ahead (cp.async), because rows of 34 or 18 bytes per 32 numbers fit
 * no vector load. Scores are Q K^T by m16n8k16, with 16 query rows and 8 tokens. Channels are in
 * the order in which a lane reads codes. Scores have the layout of the weights' operand in V^T P^T,
 * so lanes exchange nothing. Codes become fp16 exactly. A block's scale multiplies sums of scores,
 * and values. The thread block that ends last adds the parts in order. */
#include "block_tiles.cuh"

#include "../checks.h"
#include "../launch.h"
#include "../table.h"

#include <algorithm>

using namespace kvant;
using namespace kvant::blocks;

namespace
{

constexpr int MOST_PARTS = 1024, MOST_PAIRS = 16384;
constexpr size_t PAIR_COUNTERS = MOST_PAIRS * sizeof(uint32_t);

template <class F, int D>
KVANT_INLINE void copy_tile(const Problem &p, uint8_t *stage, const uint8_t *k, const uint8_t *v,
                            int tile, int end, int lane)
{
    using S = Shape<F, D>;
    if (tile < end) {
        copy_rows<S>(stage, k, p.a.k.token_stride, tile * TILE, (int)p.a.n_tokens, lane);
        copy_rows<S>(stage + TILE * S::STRIDE, v, p.a.v.token_stride, tile * TILE,
                     (int)p.a.n_tokens, lane);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Combines the results of a thread block's warps into one part. */
template <int D>
KVANT_INLINE void add_warps(const Problem &p, const float *shared, int pair, int split)
{
    const float *tops = shared + WARPS * MOST_ROWS * D, *totals = tops + WARPS * MOST_ROWS;
    float *part = part_of(p, pair, split);
    for (int i = threadIdx.x; i < p.rows * D; i += WARPS * 32) {
        const int row = i / D;
        float top = -INFINITY, sum = 0, total = 0;
        unrolled_for (int w = 0; w < WARPS; w++)
            top = fmaxf(top, tops[w * MOST_ROWS + row]);
        const float base = top == -INFINITY ? 0 : top;
        unrolled_for (int w = 0; w < WARPS; w++) {
            const float factor = exp2f(tops[w * MOST_ROWS + row] - base);
            sum = fmaf(factor, shared[w * MOST_ROWS * D + i], sum);
            total = fmaf(factor, totals[w * MOST_ROWS + row], total);
        }
        __stcg(part + i, sum);
        if (i % D == 0) {
            __stcg(part + p.rows * D + row, top);
            __stcg(part + p.rows * (D + 1) + row, total);
        }
    }
}

/* Computes, in shared memory, the weight of each part of a row, such that the weighted parts add up
 * to the output. Called by a warp. */
KVANT_INLINE void weigh_parts(const Problem &p, const float *tops, int head, int lane,
                              float *weights)
{
    const float *totals = tops + p.rows, sink = p.a.sinks ? p.a.sinks[head] * LOG2E : -INFINITY;
    float top = sink, total = 0;
    for (int i = lane; i < p.splits; i += 32)
        top = fmaxf(top, __ldcg(tops + i * p.part_floats));
    for (int k = 16; k > 0; k /= 2)
        top = fmaxf(top, __shfl_xor_sync(FULL, top, k));
    const float base = top == -INFINITY ? 0 : top;
    for (int i = lane; i < p.splits; i += 32) {
        weights[i] = exp2f(__ldcg(tops + i * p.part_floats) - base);
        total = fmaf(weights[i], __ldcg(totals + i * p.part_floats), total);
    }
    for (int k = 16; k > 0; k /= 2)
        total += __shfl_xor_sync(FULL, total, k);
    total += exp2f(sink - base + WEIGHT_UNIT);
    for (int i = lane; i < p.splits; i += 32)
        weights[i] *= total == 0 ? 0 : 1 / total; /* NaN if the total is NaN */
}

/* Combines the parts of a (sequence, kv head), and sinks. Called by the thread block that ends
 * last. */
template <int D>
KVANT_INLINE void write_rows(const Problem &p, int sequence, int kv_head, int pair, float *weights)
{
    const float *parts = part_of(p, pair, 0);
    for (int row = threadIdx.x / 32; row < p.rows; row += WARPS)
        weigh_parts(p, parts + p.rows * D + row, kv_head * p.group + row % p.group,
                    threadIdx.x % 32, weights + row * p.splits);
    __syncthreads();
    for (int i = threadIdx.x; i < p.rows * D / 4; i += WARPS * 32) {
        const int row = i / (D / 4), head = kv_head * p.group + row % p.group;
        float4 sum = {};
#pragma unroll 8
        for (int j = 0; j < p.splits; j++) {
            const float4 x =
                __ldcg(reinterpret_cast<const float4 *>(parts + j * p.part_floats) + i);
            const float weight = weights[row * p.splits + j];
            sum.x = fmaf(weight, x.x, sum.x), sum.y = fmaf(weight, x.y, sum.y);
            sum.z = fmaf(weight, x.z, sum.z), sum.w = fmaf(weight, x.w, sum.w);
        }
        float *out = p.a.out + sequence * p.a.out_batch_stride +
                     row / p.group * p.a.out_token_stride + head * p.a.out_head_stride +
                     i % (D / 4) * 4;
        out[0] = sum.x, out[1] = sum.y, out[2] = sum.z, out[3] = sum.w;
    }
}

/* Processes a warp's tiles from begin to end. Weight 0 times NaN is NaN. So if sums are not finite,
 * they are computed again with WEIGHTED. */
template <class F, int D, int N, int STAGES, bool WEIGHTED>
KVANT_INLINE void add_tiles(const Problem &p, const Queries<F, D> &q, Warp<F, D, N> &w,
                            const uint8_t *k, const uint8_t *v, int begin, int end)
{
    using S = Shape<F, D>;
    extern __shared__ __align__(16) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y,
              sequence = blockIdx.z;
    uint8_t *ring = memory + warp * STAGES * S::STAGE;
    for (int i = 0; i < STAGES - 1; i++)
        copy_tile<F, D>(p, ring + i * S::STAGE, k, v, begin + warp + i * WARPS, end, lane);
    w.start(p, sequence, kv_head, lane);
    for (int tile = begin + warp, i = 0; tile < end; tile += WARPS, i++) {
        copy_tile<F, D>(p, ring + (i + STAGES - 1) % STAGES * S::STAGE, k, v,
                        tile + (STAGES - 1) * WARPS, end, lane);
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
        __syncwarp();
        const uint8_t *stage = ring + i % STAGES * S::STAGE;
        w.template add<WEIGHTED>(p, q, stage, stage + TILE * S::STRIDE, tile * TILE, lane);
        __syncwarp(); /* the next copy overwrites this stage */
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

template <class F, int D, int N, int STAGES>
__global__ void __launch_bounds__(WARPS * 32, D > 128           ? 2
                                              : N > 1 && D > 64 ? 3
                                                                : 4)
    blocks_kernel(const __grid_constant__ Problem p)
{
    using S = Shape<F, D>;
    extern __shared__ __align__(16) uint8_t memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y,
              sequence = blockIdx.z;
    const int begin = blockIdx.x * p.tiles_a_split, end = min(begin + p.tiles_a_split, p.tiles);
    const uint8_t *k = static_cast<const uint8_t *>(p.a.k.data) + sequence * p.a.k.batch_stride +
                       kv_head * p.a.k.head_stride,
                  *v = static_cast<const uint8_t *>(p.a.v.data) + sequence * p.a.v.batch_stride +
                       kv_head * p.a.v.head_stride;
    Queries<F, D> q;
    Warp<F, D, N> w;

    load_queries<F, D>(p, sequence, kv_head, lane, q);
    add_tiles<F, D, N, STAGES, false>(p, q, w, k, v, begin, end);
    if (!w.is_finite())
        add_tiles<F, D, N, STAGES, true>(p, q, w, k, v, begin, end);
    __syncthreads();
    float *shared = reinterpret_cast<float *>(memory), *tops = shared + WARPS * MOST_ROWS * D;
    w.store(shared + warp * MOST_ROWS * D, tops + warp * MOST_ROWS,
            tops + (WARPS + warp) * MOST_ROWS, lane);
    __syncthreads();
    const int pair = sequence * gridDim.y + kv_head;
    add_warps<D>(p, shared, pair, blockIdx.x);
    __shared__ uint32_t before;
    if (ends_last(p.counters + pair, p.splits, before))
        write_rows<D>(p, sequence, kv_head, pair, shared);
}

/* ---- launches ---- */

/* Chooses as many thread blocks as run at once, if there are tiles for them, and room for the
 * weights of a row's parts. */
cudaError_t split(Problem &p, const void *kernel, int shared)
{
    int blocks = 0;
    const cudaError_t error = blocks_at_once(kernel, WARPS * 32, shared, blocks);
    const int pairs = (int)(p.a.batch * p.a.n_kv_heads),
              most = std::max(
                  1, std::min({ blocks / pairs, MOST_PARTS / pairs, (p.tiles + WARPS - 1) / WARPS,
                                shared / (int)sizeof(float) / p.rows })),
              each = std::max(1, (p.tiles + most - 1) / most);
    p.tiles_a_split = (each + WARPS - 1) / WARPS * WARPS;
    p.splits = std::max(1, (p.tiles + p.tiles_a_split - 1) / p.tiles_a_split);
    return error;
}

template <class F, int D, int N, int STAGES> cudaError_t launch(Problem &p, cudaStream_t stream)
{
    constexpr int room = Shape<F, D>::bytes(STAGES);
    const void *kernel = reinterpret_cast<const void *>(blocks_kernel<F, D, N, STAGES>);
    cudaError_t error = allow_shared(kernel, room);
    if (error == cudaSuccess)
        error = split(p, kernel, room);
    if (error != cudaSuccess)
        return error;
    const dim3 grid(p.splits, p.a.n_kv_heads, p.a.batch);
    blocks_kernel<F, D, N, STAGES><<<grid, WARPS * 32, room, stream>>>(p);
    return cudaGetLastError();
}

template <class F, int D, int N> cudaError_t launch_stages(Problem &p, cudaStream_t stream)
{
    constexpr int LEAST = least_stages<F, D>();
    static_assert(Shape<F, D>::bytes(LEAST) <= SMALL_BYTES, "every GPU has room for these");
    const cudaError_t error = launch<F, D, N, MOST_STAGES>(p, stream);
    if constexpr (LEAST < MOST_STAGES)
        if (error == cudaErrorNotSupported)
            return launch<F, D, N, LEAST>(p, stream);
    return error;
}

template <class F, int D> cudaError_t launch_rows(Problem &p, cudaStream_t stream)
{
    return p.rows > 8 ? launch_stages<F, D, 2>(p, stream) : launch_stages<F, D, 1>(p, stream);
}

template <class F> cudaError_t launch_format(Problem &p, cudaStream_t stream)
{
    switch (p.a.head_dim) {
    case 64: return launch_rows<F, 64>(p, stream);
    case 128: return launch_rows<F, 128>(p, stream);
    case 256: return launch_rows<F, 256>(p, stream);
    default: return cudaErrorNotSupported;
    }
}

bool valid_rows(const kvant_cuda_block_rows &rows, const kvant_cuda_block_args &a)
{
    const size_t bytes = a.head_dim / 32 * (rows.type == Q8::TYPE ? Q8::BYTES : Q4::BYTES),
                 unit = bytes % 16 == 0  ? 16
                        : bytes % 8 == 0 ? 8
                                         : 4;
    return rows.data && (reinterpret_cast<uintptr_t>(rows.data) | rows.token_stride |
                         rows.head_stride | rows.batch_stride) %
                                unit ==
                            0;
}

bool valid_mask(const kvant_cuda_block_args &a)
{
    return reinterpret_cast<uintptr_t>(a.mask) % 4 == 0 && a.mask_token_stride % 2 == 0 &&
           a.mask_batch_stride % 2 == 0;
}

bool takes(const kvant_cuda_block_args &a)
{
    const bool heads = a.n_kv_heads > 0 && a.n_heads % a.n_kv_heads == 0 &&
                       (uint64_t)a.n_kv_heads * a.batch <= MOST_PAIRS;
    return heads && (a.k.type == Q8::TYPE || a.k.type == Q4::TYPE) && a.k.type == a.v.type &&
           (a.head_dim == 64 || a.head_dim == 128 || a.head_dim == 256) && valid_rows(a.k, a) &&
           valid_rows(a.v, a) && valid_mask(a) &&
           (uint64_t)(a.n_heads / a.n_kv_heads) * a.query_tokens <= MOST_ROWS &&
           a.n_tokens <= INT32_MAX - TILE;
}

size_t part_floats(const kvant_cuda_block_args &a)
{
    return ((size_t)(a.n_heads / a.n_kv_heads * a.query_tokens) * (a.head_dim + 2) + 3) / 4 * 4;
}

} // namespace

size_t kvant_cuda_table_block_workspace(const kvant_cuda_block_args *args)
{
    return takes(*args) ? PAIR_COUNTERS + ((size_t)args->batch * args->n_kv_heads + MOST_PARTS) *
                                              part_floats(*args) * sizeof(float)
                        : 0;
}

kvant_status kvant_cuda_table_block_attention(const kvant_cuda_block_args *args,
                                              kvant_cuda_stream stream)
{
    if (!takes(*args))
        return KVANT_ERR_UNSUPPORTED;
    if (!args->q || !args->out || !args->workspace ||
        args->workspace_bytes < kvant_cuda_table_block_workspace(args))
        return KVANT_ERR_ARGUMENT;
    if (args->batch == 0 || args->query_tokens == 0)
        return KVANT_OK;
    Problem p{};
    p.a = *args;
    p.group = (int)(args->n_heads / args->n_kv_heads);
    p.rows = p.group * (int)args->query_tokens;
    p.tiles = ((int)args->n_tokens + TILE - 1) / TILE;
    p.part_floats = part_floats(*args);
    p.counters = static_cast<uint32_t *>(args->workspace);
    p.parts = reinterpret_cast<float *>(static_cast<char *>(args->workspace) + PAIR_COUNTERS);
    cudaStream_t on = static_cast<cudaStream_t>(stream);
    return from_cuda(args->k.type == Q8::TYPE ? launch_format<Q8>(p, on)
                                              : launch_format<Q4>(p, on));
}
