/* compact_threads.cpp - the kernels of compact.cu, with every thread of a block as a
 * context (cuda_runtime.h). */
#include "cuda_runtime.h"

#include "encode/compact.cu"

using namespace kvant;

static const bool added = add_kernels(compact_kernel, invert_kernel, center_kernel,
                                      expand_kernel<128>, expand_kernel<256>, expand_kernel<512>);
