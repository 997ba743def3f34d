/* learn.cu - learns key transforms from keys and queries in GPU memory (kvant_cuda_learn).
 *
 * Keys and queries become vectors at position 0, whose products are added in binary32. Sums of
 * products are shared among blocks by tiles of the matrix, so no sum depends on a block's time. The
 * moments of a transform come from these sums in binary64. A thread block then makes the matrix of
 * a sub-head (call.h), which it has in its registers. */
#include "../checks.h"
#include "../table.h"

#include <cuda_fp16.h>

#include "call.h"

namespace kvant
{

constexpr int TILE = 64, SUM_THREADS = 256, SUM_VECTORS = 32, PHASE_THREADS = 256,
              VECTOR_THREADS = 128;
constexpr uint32_t MOST_GRID = 65535;
static_assert(sizeof(learn_call) <= 4096 - 64, "kernels take 4 KB of arguments");
static_assert(sizeof(learn_shared) <= 48 * 1024, "no kernel asks for more shared memory");

__global__ void __launch_bounds__(PHASE_THREADS)
    phase_kernel(const __grid_constant__ learn_call call)
{
    const uint32_t pairs = call.args.head_dim / 2, i = blockIdx.x * PHASE_THREADS + threadIdx.x;
    if (i / pairs < call.args.n_rows + call.args.n_tokens)
        learn_phase(&call.args, (int)(i / pairs), (int)(i % pairs),
                    reinterpret_cast<float *>(learn_room_at(&call, call.room.phases)) +
                        2 * (size_t)i);
}

__global__ void __launch_bounds__(TEAM_THREADS) rule_kernel(const __grid_constant__ learn_call call)
{
    __shared__ learn_sample sample;
    const learn_input in = learn_input_of(&call, blockIdx.x);
    learn_make_rule(&in, &sample, learn_rule_of(&call, blockIdx.x));
}

/* A line per vector. */
__global__ void __launch_bounds__(VECTOR_THREADS)
    vector_kernel(const __grid_constant__ learn_call call)
{
    const learn_input in = learn_input_of(&call, blockIdx.y);
    const uint32_t i = (blockIdx.x * VECTOR_THREADS + threadIdx.x) / TEAM_WIDTH;
    if (i < kvant_learn_vectors(&call.args))
        learn_make_vector(&in, (int)i, learn_rule_of(&call, blockIdx.y));
}

/* A block adds the products of a slice of vectors in a tile of 64 x 64 channels, vector after
 * vector. The block of the first tile of keys also adds the keys. */
__global__ void __launch_bounds__(SUM_THREADS) sum_kernel(const __grid_constant__ learn_call call)
{
    alignas(16) __shared__ float z[SUM_VECTORS][LEARN_MOST + 4];
    const learn_slice slice = learn_slice_of(&call, blockIdx.z, blockIdx.y);
    const int n = (int)call.args.part, tile = (int)blockIdx.x,
              row = (tile > 0 ? TILE : 0) + (int)threadIdx.x / 16 * 4,
              column = (tile > 1 ? TILE : 0) + (int)threadIdx.x % 16 * 4;
    float sum[4][4] = {}, total = 0;
    for (int i = (int)threadIdx.x; i < SUM_VECTORS * (LEARN_MOST + 4); i += SUM_THREADS)
        z[i / (LEARN_MOST + 4)][i % (LEARN_MOST + 4)] = 0;
    for (int first = 0; first < slice.n_vectors; first += SUM_VECTORS) {
        const int left = slice.n_vectors - first, some = left < SUM_VECTORS ? left : SUM_VECTORS;
        __syncthreads();
        for (int i = (int)threadIdx.x / 32; i < some; i += SUM_THREADS / 32)
            for (int j = (int)threadIdx.x % 32; j < n; j += 32)
                z[i][j] = slice.vectors[(size_t)(first + i) * n + j];
        __syncthreads();
#pragma unroll 4
        for (int vector = 0; vector < some; vector++) {
            const float4 a = *reinterpret_cast<const float4 *>(&z[vector][row]),
                         b = *reinterpret_cast<const float4 *>(&z[vector][column]);
            const float rows[4] = { a.x, a.y, a.z, a.w }, columns[4] = { b.x, b.y, b.z, b.w };
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(rows[i], columns[j], sum[i][j]);
            total += (int)threadIdx.x < n ? z[vector][threadIdx.x] : 0;
        }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (row + i < n && column + j <= row + i)
                slice.products[(row + i) * n + column + j] = sum[i][j];
    if (slice.total && tile == 0 && (int)threadIdx.x < n)
        slice.total[threadIdx.x] = total;
}

__global__ void __launch_bounds__(TEAM_THREADS)
    tables_kernel(const __grid_constant__ learn_call call)
{
    __shared__ double part[LEARN_MOST];
    __shared__ float center[LEARN_MOST], start[LEARN_MOST];
    learn_call_tables(&call, blockIdx.x, blockIdx.y, part, center, start);
}

/* A thread per two pairs of channels. */
__global__ void __launch_bounds__(LEARN_MOST / 2)
    moments_kernel(const __grid_constant__ learn_call call)
{
    if (threadIdx.x <= blockIdx.x)
        learn_call_pair(&call, blockIdx.y, blockIdx.z, (int)blockIdx.x, (int)threadIdx.x);
}

__global__ void __launch_bounds__(TEAM_THREADS, 1)
    solve_kernel(const __grid_constant__ learn_call call)
{
    __shared__ learn_shared shared;
    learn_call_solve(&call, blockIdx.x, blockIdx.y, &shared);
}

__global__ void __launch_bounds__(TEAM_THREADS)
    balance_kernel(const __grid_constant__ learn_call call)
{
    learn_call_balance(&call, blockIdx.x, blockIdx.y);
}

/* Launches kernels until a launch fails. */
struct Launcher {
    const learn_call &call;
    cudaStream_t stream;
    kvant_status status;

    void operator()(void (*kernel)(learn_call), dim3 grid, unsigned threads)
    {
        void *parameters[] = { const_cast<learn_call *>(&call) };
        if (status == KVANT_OK)
            status = from_cuda(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid,
                                                dim3(threads), parameters, 0, stream));
    }
};

static bool valid_spans(const kvant_cuda_learn_args &args)
{
    for (uint32_t i = 0; i < args.n_transforms; i++) {
        const kvant_cuda_learn_span &span = args.spans[i];
        if (span.n_buckets == 0 || span.n_buckets > KVANT_CUDA_LEARN_BUCKETS || span.edges[0] < 0)
            return false;
        for (uint32_t k = 0; k < span.n_buckets; k++)
            if (span.edges[k + 1] <= span.edges[k])
                return false;
    }
    return true;
}

static bool valid_layers(const kvant_cuda_learn_args &args)
{
    if (args.n_layers > 0)
        return args.layers && args.n_layers <= MOST_GRID / kvant_learn_subs(&args);
    for (uint32_t i = 0; i * args.batch_tokens < args.n_tokens; i++)
        if (!args.queries[i])
            return false;
    return args.rows && args.triangles && args.centers && args.start;
}

static bool valid(const kvant_cuda_learn_args &args)
{
    const bool shape = args.part >= 2 && args.part <= LEARN_MOST && args.part % 2 == 0 &&
                       args.head_dim >= args.part && args.head_dim <= KVANT_CUDA_MOST_DIM &&
                       args.head_dim % args.part == 0 && args.n_kv_heads > 0 &&
                       args.n_kv_heads <= 1024 && args.n_transforms > 0 &&
                       args.n_transforms <= KVANT_CUDA_LEARN_TRANSFORMS;
    const bool keys = (args.type == KVANT_CUDA_F32 || args.type == KVANT_CUDA_F16) &&
                      args.n_rows > 0 && args.n_rows <= MOST_GRID;
    const bool queries =
        args.n_tokens == 0 ||
        (args.group > 0 && args.group <= 1024 && args.batch_tokens > 0 &&
         args.n_tokens <= args.batch_tokens * KVANT_CUDA_LEARN_BATCHES && args.n_tokens <= 4096);
    if (!shape || !keys || !queries || !args.workspace || !aligned(args.workspace) ||
        !valid_spans(args) || !valid_layers(args))
        return false;
    for (uint32_t i = 0; i < args.head_dim / 2; i++)
        if (args.pairs[i].first >= args.part || args.pairs[i].second >= args.part)
            return false;
    return args.workspace_bytes >= kvant_learn_room_of(&args).bytes;
}

} // namespace kvant

kvant_status kvant_cuda_table_learn(const kvant_cuda_learn_args *args, kvant_cuda_stream stream)
{
    using namespace kvant;
    if (!args || args->size != sizeof *args || !valid(*args))
        return KVANT_ERR_ARGUMENT;
    const learn_call call = learn_call_of(args);
    const uint32_t subs = kvant_learn_all_subs(args),
                   entries = (args->n_rows + args->n_tokens) * (args->head_dim / 2),
                   lines = VECTOR_THREADS / TEAM_WIDTH, tiles = args->part > TILE ? 3 : 1,
                   slices = kvant_learn_key_slices(args) + kvant_learn_query_slices(args),
                   vectors = (uint32_t)kvant_learn_vectors(args);
    Launcher launch = { call, static_cast<cudaStream_t>(stream), KVANT_OK };
    launch(phase_kernel, dim3((entries + PHASE_THREADS - 1) / PHASE_THREADS), PHASE_THREADS);
    launch(rule_kernel, dim3(subs), TEAM_THREADS);
    launch(vector_kernel, dim3((vectors + lines - 1) / lines, subs), VECTOR_THREADS);
    launch(sum_kernel, dim3(tiles, slices, subs), SUM_THREADS);
    launch(tables_kernel, dim3(subs, args->n_transforms), TEAM_THREADS);
    launch(moments_kernel, dim3(args->part / 2, subs, args->n_transforms), args->part / 2);
    launch(solve_kernel, dim3(subs, args->n_transforms), TEAM_THREADS);
    if (args->head_dim > args->part)
        launch(balance_kernel, dim3(subs / (args->head_dim / args->part), args->n_transforms),
               TEAM_THREADS);
    return launch.status;
}
