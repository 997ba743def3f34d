/* queries.cu - multiplies queries with the matrix of transform=file: q times (R W^-1)^T.
 *
 * A thread block takes up to 8 query heads of one kv head and one sequence through one matrix. A thread has one
 * channel and a quarter of the matrix's rows, so all of its loads overlap. The quarters are added
 * in order. */
#include "../launch.h"
#include "../rotate.cuh"
#include "../ptx.cuh"
#include "queries.h"

namespace kvant
{

constexpr int QUARTERS = 4;

template <int D> struct QuerySpace {
    float q[QUERY_HEADS][D];
    float sums[QUARTERS][QUERY_HEADS][D];
};

/* A warp loads a head. */
template <int D>
KVANT_INLINE void load_queries(QuerySpace<D> &space, const QueryArgs &args, size_t sequence, uint32_t first_head,
                               uint32_t n_heads)
{
    const int lane = threadIdx.x & 31;
    for (uint32_t h = threadIdx.x >> 5; h < QUERY_HEADS; h += QUARTERS * D / 32) {
        Row<D> row{};
        if (h < n_heads)
            row = load_row<D>(args.q, sequence * args.batch_stride + (first_head + h) * args.head_stride, args.type,
                              lane);
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            space.q[h][lane + 32 * j] = row.x[j];
    }
}

template <int D, int AHEAD> KVANT_INLINE void load_weights(float (&weights)[AHEAD], const float *m, int first)
{
    unrolled_for (int k = 0; k < AHEAD; k++)
        weights[k] = m[(size_t)(first + k) * D];
}

/* AHEAD: numbers of the matrix that a thread reads at once. Few blocks wait least with many, many
 * blocks hide their waits from each other and need the registers. */
template <int D, int AHEAD>
__global__ void __launch_bounds__(QUARTERS *D) queries_kernel(const __grid_constant__ QueryArgs args)
{
    extern __shared__ uint8_t raw[];
    QuerySpace<D> &space = *reinterpret_cast<QuerySpace<D> *>(raw);
    const uint32_t kv_head = blockIdx.y, first = blockIdx.x * QUERY_HEADS;
    const uint32_t left = args.heads_a_kv - first, n_heads = left < QUERY_HEADS ? left : QUERY_HEADS;
    const uint32_t first_head = kv_head * args.heads_a_kv + first;
    const int channel = threadIdx.x % D, quarter = threadIdx.x / D, begin = quarter * (D / QUARTERS);
    const uint32_t matrix = blockIdx.z / args.batch;
    const float *m = args.inverse_weights[matrix] + (size_t)kv_head * D * D + channel;
    float sum[QUERY_HEADS] = {}, weights[AHEAD];
    load_weights<D, AHEAD>(weights, m, begin); /* on their way while queries come */
    begin_next();
    wait_for_former();
    load_queries(space, args, blockIdx.z - matrix * args.batch, first_head, n_heads);
    __syncthreads();
    unrolled_for (int i = 0; i < D / QUARTERS; i += AHEAD) {
        if (i > 0)
            load_weights<D, AHEAD>(weights, m, begin + i);
        unrolled_for (int k = 0; k < AHEAD; k++)
            unrolled_for (int h = 0; h < (int)QUERY_HEADS; h++)
                sum[h] = fmaf(weights[k], space.q[h][begin + i + k], sum[h]);
    }
    unrolled_for (int h = 0; h < (int)QUERY_HEADS; h++)
        space.sums[quarter][h][channel] = sum[h];
    __syncthreads();
    float *out = args.out + ((size_t)blockIdx.z * gridDim.y * args.heads_a_kv + first_head) * D;
    for (uint32_t h = quarter; h < n_heads; h += QUARTERS) {
        float y = 0;
        for (int i = 0; i < QUARTERS; i++)
            y += space.sums[i][h][channel];
        out[(size_t)h * D + channel] = y;
    }
}

/* Of many tokens: a thread block keeps its matrix in registers and takes ROWS query rows of its kv head after the
 * other, so the matrix is read by few blocks. Sums have the order of the kernel above. */
constexpr uint32_t ROWS = 8, ROW_BLOCKS = 528; /* four a multiprocessor */

template <int D> struct RowSpace {
    alignas(16) float q[ROWS][D];
    float sums[QUARTERS][ROWS][D];
};

template <int D>
__global__ void __launch_bounds__(QUARTERS *D) query_rows_kernel(const __grid_constant__ QueryArgs args)
{
    constexpr int N = D / QUARTERS, WARPS = QUARTERS * D / 32;
    __shared__ RowSpace<D> space;
    const uint32_t kv_head = blockIdx.y, matrix = blockIdx.z, n_rows = args.batch * args.heads_a_kv,
                   n_heads = gridDim.y * args.heads_a_kv;
    const int channel = threadIdx.x % D, quarter = threadIdx.x / D, begin = quarter * N, lane = threadIdx.x & 31;
    float weights[N];
    load_weights<D, N>(weights, args.inverse_weights[matrix] + (size_t)kv_head * D * D + channel, begin);
    begin_next();
    wait_for_former();
#pragma unroll 1
    for (uint32_t first = blockIdx.x * ROWS; first < n_rows; first += gridDim.x * ROWS) {
        for (uint32_t r = threadIdx.x >> 5; r < ROWS && first + r < n_rows; r += WARPS) {
            const uint32_t token = (first + r) / args.heads_a_kv, head = kv_head * args.heads_a_kv + (first + r) % args.heads_a_kv;
            const Row<D> row = load_row<D>(args.q, token * args.batch_stride + head * args.head_stride, args.type, lane);
            unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
                space.q[r][lane + 32 * j] = row.x[j];
        }
        __syncthreads();
        float sum[ROWS] = {};
        unrolled_for (int i = 0; i < N; i += 4)
            unrolled_for (uint32_t r = 0; r < ROWS; r++) {
                const float4 x = *reinterpret_cast<const float4 *>(&space.q[r][begin + i]);
                sum[r] = fmaf(weights[i + 3], x.w, fmaf(weights[i + 2], x.z, fmaf(weights[i + 1], x.y, fmaf(weights[i], x.x, sum[r]))));
            }
        unrolled_for (uint32_t r = 0; r < ROWS; r++)
            space.sums[quarter][r][channel] = sum[r];
        __syncthreads();
        for (uint32_t r = quarter; r < ROWS && first + r < n_rows; r += QUARTERS) {
            const uint32_t token = (first + r) / args.heads_a_kv, head = kv_head * args.heads_a_kv + (first + r) % args.heads_a_kv;
            float y = 0;
            for (int i = 0; i < QUARTERS; i++)
                y += space.sums[i][r][channel];
            args.out[(((size_t)matrix * args.batch + token) * n_heads + head) * D + channel] = y;
        }
    }
}

template <int D> cudaError_t launch_query_rows(const QueryArgs &args, uint32_t n_kv_heads, cudaStream_t stream)
{
    const uint32_t tiles = (args.batch * args.heads_a_kv + ROWS - 1) / ROWS, most = ROW_BLOCKS / (n_kv_heads * args.n_matrices);
    QueryArgs p = args;
    void *parameters[] = { &p };
    return launch_early((const void *)query_rows_kernel<D>, dim3(tiles < most ? tiles : most ? most : 1, n_kv_heads, args.n_matrices),
                        QUARTERS * D, parameters, 0, stream);
}

/* Of any head_dim: a thread block takes a query head, a thread a channel. */
__global__ void __launch_bounds__(KVANT_CUDA_MOST_DIM) queries_any_kernel(const __grid_constant__ QueryArgs args)
{
    __shared__ float q[KVANT_CUDA_MOST_DIM];
    const size_t d = blockDim.x, channel = threadIdx.x, head = blockIdx.x, matrix = blockIdx.y / args.batch,
                 sequence = blockIdx.y - matrix * args.batch;
    q[channel] = load_number(args.q, sequence * args.batch_stride + head * args.head_stride + channel, args.type);
    __syncthreads();
    const float *m = args.inverse_weights[matrix] + head / args.heads_a_kv * d * d + channel;
    float sum = 0;
#pragma unroll 8
    for (size_t i = 0; i < d; i++)
        sum = fmaf(m[i * d], q[i], sum);
    args.out[(blockIdx.y * (size_t)gridDim.x + head) * d + channel] = sum;
}

cudaError_t launch_queries(const QueryArgs &args, uint32_t head_dim, uint32_t n_kv_heads, cudaStream_t stream)
{
    const uint32_t rows = args.batch * args.n_matrices;
    const dim3 grid(groups_of(args), n_kv_heads, rows);
    if (!kvant_cuda_knows(head_dim)) {
        queries_any_kernel<<<dim3(n_kv_heads * args.heads_a_kv, rows), head_dim, 0, stream>>>(args);
        return cudaGetLastError();
    }
    const bool few = (uint64_t)grid.x * grid.y * grid.z <= 256;
    return with_head_dim(head_dim, [&](auto d) {
        constexpr int D = decltype(d)::value, ALL = D == 256 ? 32 : D / QUARTERS, MANY = D == 256 ? ALL / 2 : ALL;
        if constexpr (D <= 128) /* beyond, a thread's part of the matrix is too large */
            if (!few)
                return launch_query_rows<D>(args, n_kv_heads, stream);
        QueryArgs p = args;
        void *parameters[] = { &p };
        return launch_early(few ? (const void *)queries_kernel<D, ALL> : (const void *)queries_kernel<D, MANY>, grid,
                            QUARTERS * D, parameters, sizeof(QuerySpace<D>), stream);
    });
}

} // namespace kvant
