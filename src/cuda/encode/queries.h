/* queries.h - the launch that multiplies queries with the matrices of keys. */
#pragma once

#include "../params.h"

#include <cuda_runtime.h>

namespace kvant
{

struct QueryArgs {
    kvant_cuda_type type;
    const void *q;
    size_t batch_stride, head_stride; /* elements */
    float *out;                       /* for the first matrix, then for the next ones */
    uint32_t batch, n_matrices, heads_a_kv;
    /* the matrices of all kv heads, or, where `compact` has a bit, their compact form */
    const void *matrices[KVANT_CUDA_MOST_MATRICES];
    uint32_t compact;
    bool ready; /* as in cuda_kernels.h; kernels for few queries wait all the same */
    kvant_cuda_wide_rotation rotation; /* follows a compact form */
};

constexpr uint32_t QUERY_HEADS = 8; /* Query heads of one kv head that a thread block processes. */

inline uint32_t groups_of(const QueryArgs &args)
{
    return (args.heads_a_kv + QUERY_HEADS - 1) / QUERY_HEADS;
}

/* Makes the matrices W of all kv heads from their compact form, without a rotation (compact.cu). */
cudaError_t launch_expand(uint32_t head_dim, uint32_t n_kv_heads, const void *compact,
                          float *matrix, cudaStream_t stream);

cudaError_t launch_queries(const QueryArgs &args, uint32_t head_dim, uint32_t n_kv_heads,
                           cudaStream_t stream);

} // namespace kvant
