/* cuda_runtime_api.h - the functions of the CUDA runtime that the tests call, in the computer's
 * memory. With the mock device (host.h) the tests run without a GPU. */
#ifndef KVANT_TESTS_CUDA_HOST_RUNTIME_H
#define KVANT_TESTS_CUDA_HOST_RUNTIME_H

#include <stdlib.h>
#include <string.h>

typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3
};

static inline cudaError_t cudaMalloc(void *to, size_t bytes)
{
    void *memory = malloc(bytes);
    memcpy(to, &memory, sizeof memory);
    return memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

static inline cudaError_t cudaFree(void *memory)
{
    free(memory);
    return cudaSuccess;
}

static inline cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    memset(memory, value, bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes,
                                     enum cudaMemcpyKind kind)
{
    memcpy(to, from, bytes);
    return cudaSuccess;
}

static inline cudaError_t cudaDeviceSynchronize(void)
{
    return cudaSuccess;
}

static inline cudaError_t cudaGetDeviceCount(int *n)
{
    *n = 1;
    return cudaSuccess;
}

static inline const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess ? "no error" : "no memory";
}

#endif
