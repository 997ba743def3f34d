/* memory.cu - what only libkvant's own caches need of the current GPU: allocation, copies, zeros,
 * the largest of many numbers, what centres and
 * scales are learnt from, and attention made whole of parts. */
#include "checks.h"
#include "launch.h"
#include "ptx.cuh"
#include "rotate.cuh"
#include "table.h"

#include <algorithm>
#include <cstring>

using kvant::from_cuda;

namespace
{

constexpr uint32_t THREADS = 256, BLOCKS = 64;

/* Magnitudes as bits are in the order of whole numbers; a NaN is above all of them. */
__global__ void __launch_bounds__(THREADS) largest_kernel(const __grid_constant__ kvant_cuda_numbers numbers)
{
    const float *from = numbers.at[blockIdx.y];
    uint32_t largest = 0;
    for (size_t i = blockIdx.x * THREADS + threadIdx.x; i < numbers.n[blockIdx.y]; i += (size_t)gridDim.x * THREADS)
        largest = max(largest, __float_as_uint(from[i]) & 0x7fffffffu);
    largest = __reduce_max_sync(kvant::FULL, largest);
    if (threadIdx.x % 32 == 0)
        atomicMax(&numbers.room[blockIdx.y], largest);
}

/* A thread takes a channel of one part: its rows one after another, as on the host. */
__global__ void __launch_bounds__(THREADS) note_kernel(const __grid_constant__ kvant_cuda_note_args args)
{
    const size_t channel = (size_t)blockIdx.x * THREADS + threadIdx.x, at = blockIdx.y * args.width + channel;
    if (channel >= args.width)
        return;
    float sum = args.sum[at], least = args.min[at], most = args.max[at];
    for (uint32_t i = (blockIdx.y + args.parts - args.seen % args.parts) % args.parts; i < args.taken; i += args.parts) {
        const float read = args.rows[(size_t)i * args.n / args.taken * args.stride + channel],
                    x = fabsf(read) <= 3.4028234e38f ? read : 0;
        const bool first = args.seen + i < args.parts;
        sum = first ? x : sum + x;
        least = first || x < least ? x : least;
        most = first || x > most ? x : most;
    }
    args.sum[at] = sum, args.min[at] = least, args.max[at] = most;
}

/* The natural logarithm of a part's sum, <q, c> added. By a warp. */
__device__ float lse_of(const kvant_cuda_merge_args &args, uint32_t part, uint32_t query, uint32_t head, int lane)
{
    const float lse = args.lses[((size_t)part * args.n_queries + query) * args.n_heads + head];
    if (!args.centers[part])
        return lse;
    const float *q = args.q + query * args.q_token_stride + head * args.q_head_stride,
                *c = args.centers[part] + (size_t)(head / (args.n_heads / args.n_kv_heads)) * args.head_dim;
    float sum = 0;
    for (uint32_t j = lane; j < args.head_dim; j += 32)
        sum = fmaf(q[j], c[j], sum);
    for (int k = 16; k > 0; k /= 2)
        sum += __shfl_xor_sync(kvant::FULL, sum, k);
    return lse + args.scale * sum;
}

/* A warp takes a query token of a head. A query that sees nothing gives zeros. */
__global__ void __launch_bounds__(THREADS) merge_kernel(const __grid_constant__ kvant_cuda_merge_args args)
{
    const uint32_t at = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, query = at / args.n_heads,
                   head = at % args.n_heads;
    const int lane = threadIdx.x % 32;
    kvant::begin_next();
    kvant::wait_for_former();
    if (query >= args.n_queries)
        return;
    float weights[KVANT_CUDA_MOST_PARTS], top = args.sinks ? args.sinks[head] : -INFINITY, sum = 0;
    for (uint32_t part = 0; part < args.n_parts; part++) {
        weights[part] = lse_of(args, part, query, head, lane);
        top = fmaxf(top, weights[part]);
    }
    const bool any = top > -INFINITY;
    if (any && args.sinks)
        sum = expf(args.sinks[head] - top);
    for (uint32_t part = 0; part < args.n_parts; part++) {
        weights[part] = any ? expf(weights[part] - top) : 0;
        sum += weights[part];
    }
    const float inverse = any ? 1 / sum : 0;
    for (uint32_t j = lane; j < args.head_dim; j += 32) {
        float x = 0;
        for (uint32_t part = 0; part < args.n_parts; part++)
            if (weights[part] != 0) /* else nothing of the sequence was seen, and what stands there is no number */
                x = fmaf(weights[part],
                         args.outs[(((size_t)part * args.n_queries + query) * args.n_heads + head) * args.head_dim + j],
                         x);
        args.out[query * args.out_token_stride + head * args.out_head_stride + j] = x * inverse;
    }
    if (args.lse && lane == 0)
        args.lse[(size_t)query * args.n_heads + head] = any ? top + logf(sum) : -INFINITY;
}

cudaStream_t stream_of(kvant_cuda_stream stream)
{
    return static_cast<cudaStream_t>(stream);
}

} // namespace

kvant_status kvant_cuda_table_device_current(int *device)
{
    return from_cuda(cudaGetDevice(device));
}

kvant_status kvant_cuda_table_memory_new(void **memory, size_t bytes)
{
    *memory = NULL;
    cudaError_t error = cudaMalloc(memory, bytes);
    if (error == cudaSuccess) {
        error = cudaMemset(*memory, 0, bytes);
        if (error == cudaSuccess) /* streams that do not wait for the default stream find zeros too */
            error = cudaStreamSynchronize(cudaStreamLegacy);
        if (error == cudaSuccess)
            return KVANT_OK;
        cudaFree(*memory);
    }
    *memory = NULL;
    const kvant_status status = from_cuda(error);
    return error == cudaErrorMemoryAllocation ? KVANT_ERR_MEMORY : status;
}

void kvant_cuda_table_memory_free(void *memory)
{
    cudaFree(memory);
}

kvant_status kvant_cuda_table_host_new(void **memory, size_t bytes)
{
    *memory = NULL;
    const kvant_status status = from_cuda(cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
    if (status == KVANT_OK)
        std::memset(*memory, 0, bytes);
    return status;
}

void kvant_cuda_table_host_free(void *memory)
{
    cudaFreeHost(memory);
}

kvant_status kvant_cuda_table_memory_copy(void *to, const void *from, size_t bytes, kvant_cuda_stream stream)
{
    return from_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
}

kvant_status kvant_cuda_table_memory_read(void *to, const void *from, size_t bytes, kvant_cuda_stream stream)
{
    const kvant_status status =
        from_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(stream)));
    return status == KVANT_OK ? from_cuda(cudaStreamSynchronize(stream_of(stream))) : status;
}

kvant_status kvant_cuda_table_memory_clear(void *memory, size_t bytes, kvant_cuda_stream stream)
{
    return from_cuda(cudaMemsetAsync(memory, 0, bytes, stream_of(stream)));
}

kvant_status kvant_cuda_table_largest(const kvant_cuda_numbers *numbers, float *largest, kvant_cuda_stream stream)
{
    const size_t most = std::max(numbers->n[0], numbers->n[1]);
    const uint32_t blocks = (uint32_t)std::min<size_t>((most + THREADS - 1) / THREADS, BLOCKS);
    largest[0] = largest[1] = 0;
    if (blocks == 0)
        return KVANT_OK;
    const kvant_status status =
        kvant_cuda_table_memory_clear(numbers->room, 2 * sizeof *numbers->room, stream);
    if (status != KVANT_OK)
        return status;
    largest_kernel<<<dim3(blocks, 2), THREADS, 0, stream_of(stream)>>>(*numbers);
    const kvant_status launched = from_cuda(cudaGetLastError());
    return launched == KVANT_OK
               ? kvant_cuda_table_memory_read(largest, numbers->room, 2 * sizeof *largest, stream)
               : launched;
}

kvant_status kvant_cuda_table_note_rows(const kvant_cuda_note_args *args, kvant_cuda_stream stream)
{
    if (args->taken == 0 || args->width == 0)
        return KVANT_OK;
    note_kernel<<<dim3((uint32_t)((args->width + THREADS - 1) / THREADS), args->parts), THREADS, 0, stream_of(stream)>>>(
        *args);
    return from_cuda(cudaGetLastError());
}

kvant_status kvant_cuda_table_merge(const kvant_cuda_merge_args *args, kvant_cuda_stream stream)
{
    const uint64_t rows = args && args->size == sizeof *args ? (uint64_t)args->n_queries * args->n_heads : 0;
    if (rows == 0 || !args->n_kv_heads || args->n_heads % args->n_kv_heads || rows > INT32_MAX || args->n_parts == 0 || args->n_parts > KVANT_CUDA_MOST_PARTS)
        return KVANT_ERR_ARGUMENT;
    kvant_cuda_merge_args p = *args;
    void *parameters[] = { &p };
    return from_cuda(kvant::launch_early((const void *)merge_kernel, dim3((uint32_t)((rows + THREADS / 32 - 1) / (THREADS / 32))), THREADS,
                                         parameters, 0, stream_of(stream)));
}
