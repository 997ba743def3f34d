/* turned.cuh - a pair of channels of a block's centre (kvant_cuda_turning). It is loaded before the
 * row, and subtracted from the row or added to it in the CPU's arithmetic. */
#pragma once

#include "kvant/cuda_kernels.h"
#include "params.h"

namespace kvant
{

KVANT_INLINE uint32_t number_at(const kvant_cuda_turning &turning, size_t block)
{
    /* __ldg, so that the load may pass stores */
    return turning.numbers ? __ldg(turning.numbers + block) : 0;
}

KVANT_INLINE ushort2 pair_at(const kvant_cuda_turning &turning, uint32_t i)
{
    return reinterpret_cast<const ushort2 *>(turning.pairs)[i];
}

/* Pair i of a kv head's centre for the block of a slot. It is zero for a slot below 0. */
struct CenterPair {
    ushort2 channels;
    float a, b, cosine, sine;

    KVANT_INLINE void load(const kvant_cuda_turning &turning, int64_t slot, uint32_t i,
                           uint32_t kv_head, uint32_t n_kv_heads, uint32_t head_dim)
    {
        channels = pair_at(turning, i);
        a = b = cosine = sine = 0;
        if (slot < 0)
            return;
        const size_t block = (size_t)slot / KVANT_PAGE_TOKENS;
        const float *phase = turning.phases + block * head_dim + i;
        const float *start =
            turning.start + ((size_t)number_at(turning, block) * n_kv_heads + kv_head) * head_dim;
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
