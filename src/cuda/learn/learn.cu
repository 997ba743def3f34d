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

constexpr int TILE = 64, SUM_THREADS = 256, SUM_VECTORS = 16, PHASE_THREADS = 256;
constexpr uint32_t MOST_GRID = 65535;

struct LearnRoom {
    kvant_learn_room at;
    char *base;
};

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

__device__ static float *sums_of(const LearnCall &call, uint32_t sub)
{
    return reinterpret_cast<float *>(room_at(call, call.room.sums)) +
           sub * kvant_learn_sums(call.args.part);
}

__device__ static learn_input input_of(const LearnCall &call, uint32_t sub)
{
    learn_input in;
    in.args = &call.args;
    in.kv_head = sub / parts_of(call);
    in.part = sub % parts_of(call);
    in.phases = reinterpret_cast<const float *>(room_at(call, call.room.phases));
    in.counts = reinterpret_cast<uint8_t *>(room_at(call, call.room.flags)) +
                sub * kvant_learn_vectors(&call.args);
    return in;
}

__global__ void __launch_bounds__(PHASE_THREADS)
    phase_kernel(const __grid_constant__ LearnCall call)
{
    const uint32_t pairs = call.args.head_dim / 2, i = blockIdx.x * PHASE_THREADS + threadIdx.x;
    if (i / pairs < call.args.n_rows + call.args.n_tokens)
        learn_phase(&call.args, (int)(i / pairs), (int)(i % pairs),
                    reinterpret_cast<float *>(room_at(call, call.room.phases)) + 2 * (size_t)i);
}

__global__ void __launch_bounds__(TEAM_THREADS)
    choose_kernel(const __grid_constant__ LearnCall call)
{
    __shared__ learn_choice_space space;
    const learn_input in = input_of(call, blockIdx.x);
    learn_choose(&in, &space, sums_of(call, blockIdx.x),
                 reinterpret_cast<uint32_t *>(room_at(call, call.room.counts)) + 2 * blockIdx.x);
}

/* A block adds the products of a tile of 64 x 64 channels, of all keys or of all queries of a
 * sub-head, vector after vector. The block of the first tile of keys also adds the keys. */
__global__ void __launch_bounds__(SUM_THREADS) sum_kernel(const __grid_constant__ LearnCall call)
{
    __shared__ float z[SUM_VECTORS][LEARN_MOST + 4];
    const learn_input in = input_of(call, blockIdx.y);
    const int n = (int)call.args.part, n_pairs = n / 2, tile = (int)blockIdx.x,
              first_row = tile > 0 ? TILE : 0, first_column = tile > 1 ? TILE : 0,
              row = first_row + (int)threadIdx.x / 16 * 4,
              column = first_column + (int)threadIdx.x % 16 * 4;
    const bool is_key = blockIdx.z == 0;
    const int n_vectors = is_key ? (int)call.args.n_rows : learn_n_queries(&call.args);
    float *const sums = sums_of(call, blockIdx.y), *const origin = sums, *const key = sums + n,
                 *const out = sums + 2 * n + (is_key ? 0 : n * n);
    float sum[4][4] = {}, total = 0;
    for (int first = 0; first < n_vectors; first += SUM_VECTORS) {
        __syncthreads();
        for (int i = (int)threadIdx.x; i < SUM_VECTORS * n_pairs; i += SUM_THREADS) {
            const int vector = i / n_pairs, pair = i % n_pairs;
            const kvant_cuda_rope_pair p = learn_pair_at(&in, pair);
            learn_two x = { 0, 0 };
            if (first + vector < n_vectors)
                x = learn_addend(&in, is_key, first + vector, pair, origin);
            z[vector][p.first] = x.first;
            z[vector][p.second] = x.second;
        }
        __syncthreads();
        for (int vector = 0; vector < SUM_VECTORS; vector++) {
            float a[4], b[4];
            for (int i = 0; i < 4; i++) {
                a[i] = row + i < n ? z[vector][row + i] : 0;
                b[i] = column + i < n ? z[vector][column + i] : 0;
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
            total += (int)threadIdx.x < n ? z[vector][threadIdx.x] : 0;
        }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (row + i < n && column + j < n && column + j <= row + i)
                out[(row + i) * n + column + j] = sum[i][j];
    if (is_key && tile == 0 && (int)threadIdx.x < n)
        key[threadIdx.x] = total;
}

/* Without queries all directions of queries count alike. */
__global__ void __launch_bounds__(SUM_THREADS) assume_kernel(const __grid_constant__ LearnCall call)
{
    const int n = (int)call.args.part;
    float *const queries = sums_of(call, blockIdx.x) + 2 * n + n * n;
    for (int i = (int)threadIdx.x; i < n * n; i += SUM_THREADS)
        queries[i] = i / n == i % n ? KVANT_CUDA_LEARN_LEAST : 0.0f;
    if (threadIdx.x == 0)
        reinterpret_cast<uint32_t *>(room_at(call, call.room.counts))[2 * blockIdx.x + 1] =
            KVANT_CUDA_LEARN_LEAST;
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
    const float *const own = sums_of(call, sub);
    const learn_sums sums = { reinterpret_cast<uint32_t *>(room_at(call, call.room.counts)) +
                                  2 * sub,
                              own, own + n, own + 2 * n, own + 2 * n + (size_t)n * n };
    learn_space space = { shares ? dynamic : work + 3 * matrix, work, work + matrix,
                          work + 2 * matrix };
    learn_turns turns = {};
    turns.pairs = args.pairs + in.part * (n / 2);
    turns.n = (int)(n / 2);
    turns.n_buckets = (int)args.spans[transform].n_buckets;
    turns.edge = args.spans[transform].edges;
    learn_set_small(&space, small);
    learn_solve(&sums, &turns, args.center_span, args.head_dim, &space, (int)n,
                args.triangles + at * LEARN_TRIANGLE(n), center, start,
                reinterpret_cast<double *>(room_at(call, call.room.balance)) + 2 * at);
    TEAM_EACH(i, 0, (int)n)
    {
        const size_t channel =
            in.kv_head * args.head_dim + learn_channel(&args, in.part, (uint32_t)i);
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
                  call.args.triangles + at * LEARN_TRIANGLE(call.args.part));
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
                   tiles = args->part > TILE ? 3 : 1;
    kvant_status status =
        launch((const void *)phase_kernel, dim3((entries + PHASE_THREADS - 1) / PHASE_THREADS),
               PHASE_THREADS, call, at);
    if (status == KVANT_OK)
        status = launch((const void *)choose_kernel, dim3(subs), TEAM_THREADS, call, at);
    if (status == KVANT_OK)
        status = launch((const void *)sum_kernel, dim3(tiles, subs, args->n_tokens > 0 ? 2 : 1),
                        SUM_THREADS, call, at);
    if (status == KVANT_OK && args->n_tokens == 0)
        status = launch((const void *)assume_kernel, dim3(subs), SUM_THREADS, call, at);
    if (status == KVANT_OK)
        status = launch_solve(call, subs, at);
    if (status == KVANT_OK && args->head_dim > args->part)
        status = launch((const void *)balance_kernel, dim3(args->n_kv_heads, args->n_transforms),
                        TEAM_THREADS, call, at);
    return status;
}
