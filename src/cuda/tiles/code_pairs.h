/* code_pairs.h - the pairs (kind of K codes, kind of V codes) that have kernels of codes.cuh, for
 * head_dim 64 and 128. CMake reads this file as well, like attention/attention_pairs.h. */
#pragma once

/* clang-format off */
#if KVANT_PAPERS
#define KVANT_CUDA_PAPER_CODE_PAIRS(X) \
    X(Octopus4, Octopus4) \
    X(HqmqS96R4, HqmqS96R4)
#else
#define KVANT_CUDA_PAPER_CODE_PAIRS(X)
#endif

#define KVANT_CUDA_CODE_PAIRS(X) \
    KVANT_CUDA_PAPER_CODE_PAIRS(X) \
    X(Uniform4, Uniform4) \
    X(Codebook4, Codebook4) \
    X(Trellis4, Trellis4)
/* clang-format on */
