/* seal_threads.cpp - the kernels of seal.cu, with every thread of a block as a
 * context (cuda_runtime.h). */
#include "cuda_runtime.h"

#include "encode/seal.cu"

using namespace kvant;

static const bool added = add_head_dims([](auto d) {
    constexpr int D = decltype(d)::value;
    return add_kernels(seal_kernel<D>);
});
