/* pages.h - the arguments of kernels that read whole pages. */
#pragma once

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
    const float *center, *scale, *inverse_key_transform;
    const int32_t *to;
    bool transformed;
};

/* codec: the codec of args.codec, which may lack its transform. */
cudaError_t launch_decode(const DecodeArgs &args, const kvant_cuda_codec &codec, uint32_t n_blocks,
                          uint32_t n_kv_heads, cudaStream_t stream);

} // namespace kvant
