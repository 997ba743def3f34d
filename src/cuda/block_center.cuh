/* block_center.cuh - a pair of channels of a block's centre (kvant_cuda_block_centers). It is
 * loaded before the row, and subtracted from the row or added to it in the CPU's arithmetic. */
#pragma once

#include "kvant/cuda_kernels.h"
#include "params.h"

namespace kvant
{

KVANT_INLINE uint32_t number_at(const kvant_cuda_block_centers &block_centers, size_t block)
{
    /* __ldg, so that the load may pass stores */
    return block_centers.transform_ids ? __ldg(block_centers.transform_ids + block) : 0;
}

KVANT_INLINE ushort2 pair_at(const kvant_cuda_block_centers &block_centers, uint32_t i)
{
    return reinterpret_cast<const ushort2 *>(block_centers.pairs)[i];
}

/* Pair i of a kv head's centre for the block of a slot. It is zero for a slot below 0. */
struct CenterPair {
    ushort2 channels;
    float a, b, cosine, sine;

    KVANT_INLINE void load(const kvant_cuda_block_centers &block_centers, int64_t slot, uint32_t i,
                           uint32_t kv_head, uint32_t n_kv_heads, uint32_t head_dim)
    {
        channels = pair_at(block_centers, i);
        a = b = cosine = sine = 0;
        if (slot < 0)
            return;
        const size_t block = (size_t)slot / KVANT_PAGE_TOKENS;
        const float *phase = block_centers.phases + block * head_dim + i;
        const float *start =
            block_centers.start +
            ((size_t)number_at(block_centers, block) * n_kv_heads + kv_head) * head_dim;
        cosine = phase[0], sine = phase[head_dim / 2];
        a = start[channels.x], b = start[channels.y];
    }

    KVANT_INLINE float2 center() const
    {
        return make_float2(__fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine)),
                           __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine)));
    }
};

} // namespace kvant
