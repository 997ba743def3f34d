/* cuda_runtime.h - the parts of CUDA that src/cuda/encode and src/cuda/learn use, in a C++ program.
 * Every thread of a block is a context. Blocks run one after another.
 *
 * A warp runs until it waits for other warps, and a thread until it waits for its warp. The first
 * thread of a block runs first in every other block, and last in the blocks between. So a thread
 * that does not wait for a number reads a wrong one in one block or the other, and results differ
 * from the CPU's. A kernel that hangs ends the program (threads.cpp).
 *
 * launches.h has the functions of the computer, ../decoders/numbers.h the functions of numbers. */
#pragma once

#include "../decoders/numbers.h"

#define __CUDACC__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
/* The contexts of a block are in a thread of the computer, which begins with zeros here. Unlike
 * `static`, this can follow `extern`. */
#define __shared__ thread_local

struct ushort2 {
    uint16_t x, y;
};
inline ushort2 make_ushort2(uint16_t x, uint16_t y)
{
    return { x, y };
}

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz)
    {
    }
};
extern dim3 threadIdx, blockIdx, gridDim, blockDim;

/* ---- a block ---- */

/* Waits for the threads of the block that have not ended, or for all threads of the warp. */
void __syncthreads();
void __syncwarp();

/* How many threads of the block pass true. */
int __syncthreads_count(bool own);
inline bool __syncthreads_or(bool own)
{
    return __syncthreads_count(own) > 0;
}
inline bool __syncthreads_and(bool own)
{
    return __syncthreads_count(!own) == 0;
}

/* ---- a warp ---- */

constexpr int LANES = 32, MOST_EXCHANGED = 64;

/* Memory for what the lanes of the warp pass each other. It stays theirs until the exchange after
 * the next one. */
void *exchange_room();

template <class T, class F> auto exchanged(const T &own, F &&of)
{
    static_assert(sizeof own <= MOST_EXCHANGED, "room for what a lane passes");
    T *const all = static_cast<T *>(exchange_room());
    all[threadIdx.x % LANES] = own;
    __syncwarp();
    return of([all](int lane) -> const T & { return all[lane]; });
}

inline int own_lane()
{
    return (int)threadIdx.x % LANES;
}

#include "../decoders/instructions.h"
#include "kernel_numbers.h"
#include "launches.h"
