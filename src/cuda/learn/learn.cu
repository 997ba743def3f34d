/* learn.cu - learns key transforms from keys and queries in GPU memory (kvant_cuda_learn).
 *
 * A thread block has one part of a kv head ("sub-head"), and its moments are in binary64. Sums of
 * products are shared among blocks by tiles of the matrix, so no sum depends on a block's time. If
 * shared memory is too small for a matrix, the matrix is in GPU memory, with the same results. */
#include "../checks.h"
#include "../launch.h"
#include "../table.h"

#include <cuda_fp16.h>

#include "../../device/learn_room.h"
#include "sums.h"

namespace kvant
{

constexpr int TILE = 64, SUM_THREADS = 256, SUM_VECTORS = 32, PHASE_THREADS = 256,
              VECTOR_THREADS = 128;
static_assert(LEARN_SLICE == KVANT_LEARN_SLICE, "one size of slices");
constexpr uint32_t MOST_GRID = 65535;

/* The arguments of all kernels. */
struct LearnCall {
    kvant_cuda_learn_args args;
    kvant_learn_room room;
};
static_assert(sizeof(LearnCall) <= 4096 - 64, "kernels take 4 KB of arguments");

__device__ static char *room_at(const LearnCall &call, size_t offset)
{
    return static_cast<char *>(call.args.workspace) + offset;
}

__device__ static uint32_t parts_of(const LearnCall &call)
{
    return call.args.head_dim / call.args.part;
}

__device__ static learn_input input_of(const LearnCall &call, uint32_t sub)
{
    const size_t vectors = kvant_learn_vectors(&call.args);
    learn_input in;
    in.args = &call.args;
    in.kv_head = sub / parts_of(call);
    in.part = sub % parts_of(call);
    in.phases = reinterpret_cast<const float *>(room_at(call, call.room.phases));
    in.counts = reinterpret_cast<uint8_t *>(room_at(call, call.room.flags)) + sub * vectors;
    in.vectors =
        reinterpret_cast<float *>(room_at(call, call.room.work)) + sub * vectors * call.args.part;
    return in;
}

__device__ static learn_rule rule_of(const LearnCall &call, uint32_t sub)
{
    float *at = reinterpret_cast<float *>(room_at(call, call.room.rules)) +
                sub * kvant_learn_rule(call.args.part);
    const learn_rule rule = { at, at + call.args.part, at + 2 * call.args.part };
    return rule;
}

__device__ static float *sums_of(const LearnCall &call, uint32_t sub)
{
    return reinterpret_cast<float *>(room_at(call, call.room.sums)) +
           sub * kvant_learn_sums(&call.args);
}

__global__ void __launch_bounds__(PHASE_THREADS)
    phase_kernel(const __grid_constant__ LearnCall call)
{
    const uint32_t pairs = call.args.head_dim / 2, i = blockIdx.x * PHASE_THREADS + threadIdx.x;
    if (i / pairs < call.args.n_rows + call.args.n_tokens)
        learn_phase(&call.args, (int)(i / pairs), (int)(i % pairs),
                    reinterpret_cast<float *>(room_at(call, call.room.phases)) + 2 * (size_t)i);
}

__global__ void __launch_bounds__(TEAM_THREADS) rule_kernel(const __grid_constant__ LearnCall call)
{
    __shared__ learn_sample sample;
    const learn_input in = input_of(call, blockIdx.x);
    learn_make_rule(&in, &sample, rule_of(call, blockIdx.x));
}

/* A line per vector. */
__global__ void __launch_bounds__(VECTOR_THREADS)
    vector_kernel(const __grid_constant__ LearnCall call)
{
    const learn_input in = input_of(call, blockIdx.y);
    const uint32_t i = (blockIdx.x * VECTOR_THREADS + threadIdx.x) / TEAM_WIDTH;
    if (i < kvant_learn_vectors(&call.args))
        learn_make_vector(&in, (int)i, rule_of(call, blockIdx.y));
}

/* A block adds the products of a slice of vectors in a tile of 64 x 64 channels, vector after
 * vector. The block of the first tile of keys also adds the keys. */
__global__ void __launch_bounds__(SUM_THREADS) sum_kernel(const __grid_constant__ LearnCall call)
{
    __shared__ alignas(16) float z[SUM_VECTORS][LEARN_MOST + 4];
    const learn_input in = input_of(call, blockIdx.z);
    const uint32_t key_slices = kvant_learn_key_slices(&call.args);
    const int n = (int)call.args.part, tile = (int)blockIdx.x, slice = (int)blockIdx.y,
              row = (tile > 0 ? TILE : 0) + (int)threadIdx.x / 16 * 4,
              column = (tile > 1 ? TILE : 0) + (int)threadIdx.x % 16 * 4;
    const bool is_key = slice < (int)key_slices;
    const int own = is_key ? slice : slice - (int)key_slices,
              all = is_key ? (int)call.args.n_rows : learn_n_queries(&call.args),
              left = all - own * LEARN_SLICE, n_vectors = left < LEARN_SLICE ? left : LEARN_SLICE;
    const float *vectors =
        in.vectors + ((is_key ? 0 : call.args.n_rows) + (size_t)own * LEARN_SLICE) * n;
    float *const sums = sums_of(call, blockIdx.z), *const out = sums + (size_t)key_slices * n +
                                                                (size_t)slice * n * n;
    float sum[4][4] = {}, total = 0;
    for (int i = (int)threadIdx.x; i < SUM_VECTORS * (LEARN_MOST + 4); i += SUM_THREADS)
        z[i / (LEARN_MOST + 4)][i % (LEARN_MOST + 4)] = 0;
    for (int first = 0; first < n_vectors; first += SUM_VECTORS) {
        const int some = n_vectors - first < SUM_VECTORS ? n_vectors - first : SUM_VECTORS;
        __syncthreads();
        for (int i = (int)threadIdx.x / 32; i < some; i += SUM_THREADS / 32)
            for (int j = (int)threadIdx.x % 32; j < n; j += 32)
                z[i][j] = vectors[(size_t)(first + i) * n + j];
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
                out[(row + i) * n + column + j] = sum[i][j];
    if (is_key && tile == 0 && (int)threadIdx.x < n)
        sums[slice * n + threadIdx.x] = total;
}

__global__ void __launch_bounds__(TEAM_THREADS, 1)
    solve_kernel(const __grid_constant__ LearnCall call, bool shares)
{
    extern __shared__ double dynamic[];
    __shared__ double small[LEARN_SMALL];
    __shared__ float center[LEARN_MOST], start[LEARN_MOST];
    const kvant_cuda_learn_args &args = call.args;
    const uint32_t sub = blockIdx.x, n_subs = gridDim.x, transform = blockIdx.y, n = args.part;
    const size_t matrix = kvant_learn_matrix(n), at = (size_t)transform * n_subs + sub;
    double *const work =
        reinterpret_cast<double *>(room_at(call, call.room.work)) + at * 4 * matrix;
    const learn_input in = input_of(call, sub);
    const int key_slices = (int)kvant_learn_key_slices(&args);
    const float *const own = sums_of(call, sub);
    const learn_sums sums = { in.counts,
                              (int)args.n_rows,
                              learn_n_queries(&args),
                              key_slices,
                              (int)kvant_learn_query_slices(&args),
                              rule_of(call, sub).origin,
                              own,
                              own + (size_t)key_slices * n,
                              own + (size_t)key_slices * n * (n + 1) };
    learn_space space = { shares ? dynamic : work + 3 * matrix, work, work + matrix,
                          work + 2 * matrix };
    learn_turns turns = {};
    turns.pairs = args.pairs + in.part * (n / 2);
    turns.n = (int)(n / 2);
    turns.n_buckets = (int)args.spans[transform].n_buckets;
    turns.edge = args.spans[transform].edges;
    learn_set_small(&space, small);
    learn_solve(&sums, &turns, args.center_span, args.head_dim, &space, (int)n,
                args.triangles + at * kvant_triangle_size((size_t)n), center, start,
                reinterpret_cast<double *>(room_at(call, call.room.balance)) + 2 * at);
    TEAM_EACH (i, 0, (int)n) {
        const size_t channel = in.kv_head * args.head_dim +
                               kvant_part_channel(args.head_dim, args.part, in.part, (uint32_t)i);
        args.centers[(size_t)transform * args.n_kv_heads * args.head_dim + channel] = center[i];
        if (transform == 0)
            args.start[channel] = start[i];
    }
}

__global__ void __launch_bounds__(TEAM_THREADS)
    balance_kernel(const __grid_constant__ LearnCall call)
{
    const uint32_t parts = parts_of(call);
    const size_t at = ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * parts;
    learn_balance((int)call.args.part, (int)parts,
                  reinterpret_cast<double *>(room_at(call, call.room.balance)) + 2 * at,
                  call.args.triangles + at * kvant_triangle_size((size_t)call.args.part));
}

static kvant_status launch(const void *kernel, dim3 grid, unsigned threads, const LearnCall &call,
                           cudaStream_t stream)
{
    void *parameters[] = { const_cast<LearnCall *>(&call) };
    return from_cuda(cudaLaunchKernel(kernel, grid, dim3(threads), parameters, 0, stream));
}

static kvant_status launch_solve(const LearnCall &call, uint32_t subs, cudaStream_t stream)
{
    const int bytes = (int)(call.args.part * call.args.part * sizeof(double));
    const void *kernel = reinterpret_cast<const void *>(solve_kernel);
    const cudaError_t error = allow_shared(kernel, bytes + 16 * 1024);
    bool shares = error == cudaSuccess;
    void *parameters[] = { const_cast<LearnCall *>(&call), &shares };
    if (!shares && error != cudaErrorNotSupported)
        return from_cuda(error);
    return from_cuda(cudaLaunchKernel(kernel, dim3(subs, call.args.n_transforms),
                                      dim3(TEAM_THREADS), parameters, shares ? bytes : 0, stream));
}

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

static bool valid(const kvant_cuda_learn_args &args)
{
    const bool shape = args.part >= 2 && args.part <= LEARN_MOST && args.part % 2 == 0 &&
                       args.head_dim >= args.part && args.head_dim <= KVANT_CUDA_MOST_DIM &&
                       args.head_dim % args.part == 0 && args.n_kv_heads > 0 &&
                       args.n_kv_heads <= 1024 && args.n_transforms > 0 &&
                       args.n_transforms <= KVANT_CUDA_LEARN_TRANSFORMS;
    const bool keys = (args.type == KVANT_CUDA_F32 || args.type == KVANT_CUDA_F16) && args.rows &&
                      args.n_rows > 0 && args.n_rows <= MOST_GRID;
    const bool queries =
        args.n_tokens == 0 ||
        (args.group > 0 && args.group <= 1024 && args.batch_tokens > 0 &&
         args.n_tokens <= args.batch_tokens * KVANT_CUDA_LEARN_BATCHES && args.n_tokens <= 4096);
    if (!shape || !keys || !queries || !args.triangles || !args.centers || !args.start ||
        !args.workspace || !aligned(args.workspace) || !valid_spans(args))
        return false;
    for (uint32_t i = 0; i * args.batch_tokens < args.n_tokens; i++)
        if (!args.queries[i])
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
    const LearnCall call = { *args, kvant_learn_room_of(args) };
    const cudaStream_t at = static_cast<cudaStream_t>(stream);
    const uint32_t subs = args->n_kv_heads * (args->head_dim / args->part),
                   entries = (args->n_rows + args->n_tokens) * (args->head_dim / 2),
                   lines = VECTOR_THREADS / TEAM_WIDTH, tiles = args->part > TILE ? 3 : 1,
                   slices = kvant_learn_key_slices(args) + kvant_learn_query_slices(args),
                   vectors = (uint32_t)kvant_learn_vectors(args);
    kvant_status status =
        launch((const void *)phase_kernel, dim3((entries + PHASE_THREADS - 1) / PHASE_THREADS),
               PHASE_THREADS, call, at);
    if (status == KVANT_OK)
        status = launch((const void *)rule_kernel, dim3(subs), TEAM_THREADS, call, at);
    if (status == KVANT_OK)
        status = launch((const void *)vector_kernel, dim3((vectors + lines - 1) / lines, subs),
                        VECTOR_THREADS, call, at);
    if (status == KVANT_OK)
        status = launch((const void *)sum_kernel, dim3(tiles, slices, subs), SUM_THREADS, call, at);
    if (status == KVANT_OK)
        status = launch_solve(call, subs, at);
    if (status == KVANT_OK && args->head_dim > args->part)
        status = launch((const void *)balance_kernel, dim3(args->n_kv_heads, args->n_transforms),
                        TEAM_THREADS, call, at);
    return status;
}
