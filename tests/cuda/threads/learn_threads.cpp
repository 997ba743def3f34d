/* learn_threads.cpp - the kernels of src/cuda/learn, with every thread of a block as a context
 * (cuda_runtime.h), in place of learn_reference.c. */
#include "learn/learn.cu"

extern "C" {
#include "learn_reference.h"
}

static void call_kernel(const void *kernel, void **parameters)
{
    reinterpret_cast<void (*)(learn_call)>(reinterpret_cast<uintptr_t>(kernel))(
        *static_cast<const learn_call *>(parameters[0]));
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 threads, void **parameters, size_t,
                             cudaStream_t)
{
    run_blocks(grid, threads.x, call_kernel, kernel, parameters);
    return cudaSuccess;
}

void learn_reference(const kvant_cuda_learn_args *args)
{
    if (kvant_cuda_table_learn(args, nullptr) != KVANT_OK)
        abort();
}
