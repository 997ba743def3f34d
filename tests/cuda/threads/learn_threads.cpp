/* learn_threads.cpp - the kernels of src/cuda/learn, with every thread of a block as a context
 * (cuda_runtime.h), in place of learn_reference.c. */
#include "cuda_runtime.h"

#include "learn/learn.cu"

extern "C" {
#include "learn_reference.h"
}

static const bool added = add_kernels(
    kvant::phase_kernel, kvant::rule_kernel, kvant::vector_kernel, kvant::sum_kernel,
    kvant::tables_kernel, kvant::moments_kernel, kvant::solve_kernel, kvant::balance_kernel);

void learn_reference(const kvant_cuda_learn_args *args)
{
    if (kvant_cuda_table_learn(args, nullptr) != KVANT_OK)
        abort();
}
