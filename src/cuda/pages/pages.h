/* pages.h - the arguments of kernels that read whole pages. */
#ifndef KVANT_CUDA_PAGES_H
#define KVANT_CUDA_PAGES_H

#include "../params.h"

#include <cuda_runtime.h>

namespace kvant
{

struct DecodeArgs {
    kvant_cuda_params codec;
    const uint8_t *base;
    size_t block_stride, head_stride; /* bytes */
    const int32_t *blocks;
    kvant_cuda_type type;
    void *out;
    size_t token_stride, out_head_stride; /* elements */
    const float *center, *scale, *inverse_weights;
    const int32_t *to;
    bool transformed;
};

struct CopyArgs {
    uint8_t *base;
    size_t block_stride, head_stride, page_bytes;
    const int32_t *from, *to;
};

cudaError_t launch_decode(const DecodeArgs &args, uint32_t head_dim, uint32_t n_blocks, uint32_t n_kv_heads,
                          cudaStream_t stream);
/* The same for wide codebooks; book is on the host. */
cudaError_t launch_decode_wide(const DecodeArgs &args, const kvant_cuda_wide_book &book, uint32_t head_dim,
                               uint32_t n_blocks, uint32_t n_kv_heads, cudaStream_t stream);
/* The same for codes of several channels; book is on the host. */
cudaError_t launch_decode_chunks(const DecodeArgs &args, const kvant_cuda_book &book, uint32_t head_dim,
                                 uint32_t n_blocks, uint32_t n_kv_heads, cudaStream_t stream);
/* The same for codes of a trellis. */
cudaError_t launch_decode_trellis(const DecodeArgs &args, const kvant_cuda_trellis &trellis, uint32_t head_dim,
                                  uint32_t n_blocks, uint32_t n_kv_heads, cudaStream_t stream);
cudaError_t launch_copy(const CopyArgs &args, uint32_t n_blocks, uint32_t n_kv_heads, cudaStream_t stream);

} // namespace kvant

#endif
