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
        if (slot >= 0)
            load_block(block_centers, slot, i,
                       number_at(block_centers, (size_t)slot / KVANT_PAGE_TOKENS), kv_head,
                       n_kv_heads, head_dim);
    }

    /* The same for N slots, without branches. */
    template <int N>
    KVANT_INLINE static void load_all(CenterPair (&pairs)[N],
                                      const kvant_cuda_block_centers &block_centers,
                                      const int64_t (&slots)[N], uint32_t i, uint32_t kv_head,
                                      uint32_t n_kv_heads, uint32_t head_dim)
    {
        const ushort2 channels = pair_at(block_centers, i);
        uint32_t number[N];
        unrolled_for (int k = 0; k < N; k++)
            number[k] =
                number_at(block_centers, (size_t)max(slots[k], (int64_t)0) / KVANT_PAGE_TOKENS);
        unrolled_for (int k = 0; k < N; k++) {
            pairs[k].channels = channels;
            pairs[k].load_block(block_centers, max(slots[k], (int64_t)0), i, number[k], kv_head,
                                n_kv_heads, head_dim);
        }
        unrolled_for (int k = 0; k < N; k++)
            if (slots[k] < 0)
                pairs[k].a = pairs[k].b = pairs[k].cosine = pairs[k].sine = 0;
    }

    KVANT_INLINE void load_block(const kvant_cuda_block_centers &block_centers, int64_t slot,
                                 uint32_t i, uint32_t number, uint32_t kv_head, uint32_t n_kv_heads,
                                 uint32_t head_dim)
    {
        const float *phase = block_centers.phases + (size_t)slot / KVANT_PAGE_TOKENS * head_dim + i;
        const float *start =
            block_centers.start + ((size_t)number * n_kv_heads + kv_head) * head_dim;
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
