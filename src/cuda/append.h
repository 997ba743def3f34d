/* append.h - arguments of the append kernel, as they travel into the launch. */
#ifndef KVANT_CUDA_APPEND_H
#define KVANT_CUDA_APPEND_H

#include "params.h"

#include <cuda_runtime.h>

namespace kvant
{

struct AppendRole {
    kvant_cuda_params codec;
    uint8_t *base;
    size_t block_stride, head_stride; /* of pages, bytes */
    const void *rows;
    size_t token_stride, row_head_stride; /* of rows, elements */
    const float *center;
    bool wide; /* rows begin at multiples of 16 bytes; set by launch_append */
};

struct AppendArgs {
    AppendRole roles[2];
    kvant_cuda_type type;
    uint32_t n_tokens, chunk; /* chunk: tokens a block of threads, set by launch_append */
    const int64_t *slots;
    uint32_t *refused;
};

cudaError_t launch_append(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                          cudaStream_t stream);

} // namespace kvant

#endif
