/* append_open_threads.cpp - the kernels of append_open.cu, with every thread of a block as a
 * context (cuda_runtime.h). */
#include "cuda_runtime.h"

#include "encode/append_open.cu"

using namespace kvant;

static const bool added = add_head_dims([](auto d) {
    constexpr int D = decltype(d)::value;
    return add_kernels(append_open_kernel<D>, append_open_matrix_kernel<D, ROWS_A_BLOCK>);
});
