/* learn_reference.h - what kvant_cuda_learn computes, in the computer's memory. The arguments are
 * those of the GPU, with arrays and working memory of the computer. */
#pragma once

#include <kvant/cuda_kernels.h>

void learn_reference(const kvant_cuda_learn_args *args);
