/* memory.cu - memory of the current GPU for libkvant's own caches: allocation, copies, zeros. */
#include "checks.h"
#include "table.h"

using kvant::from_cuda;

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

kvant_status kvant_cuda_table_memory_copy(void *to, const void *from, size_t bytes)
{
    return from_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}

kvant_status kvant_cuda_table_memory_clear(void *memory, size_t bytes)
{
    return from_cuda(cudaMemset(memory, 0, bytes));
}
