/* memory.cu - functions of the current GPU that only libkvant's own caches need. They allocate,
 * copy, set zeros, find the largest of many numbers, and compute the statistics from which centres
 * and scales are learned. */
#include "checks.h"
#include "rotate.cuh"
#include "table.h"

#include <algorithm>
#include <cstring>

using kvant::from_cuda;

namespace
{

constexpr uint32_t THREADS = 256, BLOCKS = 64;

/* Finds the largest magnitude. The bits of magnitudes are in the order of whole numbers, and a NaN
 * is above all of them. */
__global__ void __launch_bounds__(THREADS)
    largest_kernel(const __grid_constant__ kvant_cuda_values numbers)
{
    const float *from = numbers.at[blockIdx.y];
    uint32_t largest = 0;
    for (size_t i = blockIdx.x * THREADS + threadIdx.x; i < numbers.n[blockIdx.y];
         i += (size_t)gridDim.x * THREADS)
        largest = max(largest, __float_as_uint(from[i]) & 0x7fffffffu);
    largest = __reduce_max_sync(kvant::FULL, largest);
    if (threadIdx.x % 32 == 0)
        atomicMax(&numbers.room[blockIdx.y], largest);
}

/* A thread processes a channel of one part, row after row, as on the host. */
__global__ void __launch_bounds__(THREADS)
    note_kernel(const __grid_constant__ kvant_cuda_note_args args)
{
    const size_t channel = (size_t)blockIdx.x * THREADS + threadIdx.x,
                 at = blockIdx.y * args.width + channel;
    if (channel >= args.width)
        return;
    float sum = args.sum[at], least = args.min[at], most = args.max[at];
    for (uint32_t i = (blockIdx.y + args.parts - args.seen % args.parts) % args.parts;
         i < args.taken; i += args.parts) {
        const float read = args.rows[(size_t)i * args.n / args.taken * args.stride + channel],
                    x = fabsf(read) <= 3.4028234e38f ? read : 0;
        const bool first = args.seen + i < args.parts;
        sum = first ? x : sum + x;
        least = first || x < least ? x : least;
        most = first || x > most ? x : most;
    }
    args.sum[at] = sum, args.min[at] = least, args.max[at] = most;
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
        /* so that streams that do not wait for the default stream find zeros, too */
        if (error == cudaSuccess)
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
    const kvant_status status =
        from_cuda(cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
    if (status == KVANT_OK)
        std::memset(*memory, 0, bytes);
    return status;
}

void kvant_cuda_table_host_free(void *memory)
{
    cudaFreeHost(memory);
}

kvant_status kvant_cuda_table_memory_copy(void *to, const void *from, size_t bytes,
                                          kvant_cuda_stream stream)
{
    return from_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
}

kvant_status kvant_cuda_table_memory_read(void *to, const void *from, size_t bytes,
                                          kvant_cuda_stream stream)
{
    const kvant_status status =
        from_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(stream)));
    return status == KVANT_OK ? from_cuda(cudaStreamSynchronize(stream_of(stream))) : status;
}

kvant_status kvant_cuda_table_memory_clear(void *memory, size_t bytes, kvant_cuda_stream stream)
{
    return from_cuda(cudaMemsetAsync(memory, 0, bytes, stream_of(stream)));
}

kvant_status kvant_cuda_table_largest(const kvant_cuda_values *numbers, float *largest,
                                      kvant_cuda_stream stream)
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
    note_kernel<<<dim3((uint32_t)((args->width + THREADS - 1) / THREADS), args->parts), THREADS, 0,
                  stream_of(stream)>>>(*args);
    return from_cuda(cudaGetLastError());
}
