/* marked_threads.cpp - the kernel of marked.cu, with every thread of a block as a
 * context (cuda_runtime.h). */
#include "cuda_runtime.h"

#include "marked.cu"

using namespace kvant;

static const bool added = add_kernels(fill_marked_kernel);
