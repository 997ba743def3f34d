/* cuda_runtime.h - the parts of CUDA that src/cuda/learn uses, in a C++ program: every thread of a
 * block is a context, and blocks run one after another.
 *
 * A warp runs until it waits for other warps, and a thread until it waits for its warp. The first
 * thread of a block runs first in every other block, and last in the blocks between. So a thread
 * that does not wait for a number reads a wrong one in one block or the other, and results are not
 * those of the CPU. */
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#define __CUDACC__
#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned nx, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz)
    {
    }
};
struct float4 {
    float x, y, z, w;
};

enum cudaError_t {
    cudaSuccess,
    cudaErrorNotSupported,
    cudaErrorNoDevice,
    cudaErrorInsufficientDriver
};
using cudaStream_t = void *;

extern dim3 threadIdx, blockIdx, gridDim;

/* Waits for the threads of the block, or of the warp. */
void __syncthreads();
void __syncwarp();

/* The 64 bits that a lane of the warp passes. */
uint64_t exchange(uint64_t own, int lane);

template <class T> T __shfl_sync(unsigned, T own, int lane)
{
    union {
        uint64_t bits;
        T number;
    } x = {};
    x.number = own;
    x.bits = exchange(x.bits, lane);
    return x.number;
}
template <class T> T __shfl_xor_sync(unsigned mask, T own, int width)
{
    return __shfl_sync(mask, own, (int)threadIdx.x % 32 ^ width);
}
bool __all_sync(unsigned, bool own);

/* Runs a kernel for each thread of each block; `call` calls it. */
void run_blocks(dim3 grid, unsigned threads, void (*call)(const void *kernel, void **parameters),
                const void *kernel, void **parameters);

/* learn_threads.cpp, which knows the arguments of kernels. */
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 threads, void **parameters, size_t,
                             cudaStream_t);

inline cudaError_t cudaGetLastError()
{
    return cudaSuccess;
}
