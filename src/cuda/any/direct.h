/* direct.h - the pairs of codecs that kernels of direct.cuh serve. */
#pragma once

#include "../attention/attention.h"

namespace kvant
{

/* A kernel of direct.cuh; kernel NULL: none. */
struct DirectKernel {
    const void *kernel; /* its argument is AnyAttentionArgs */
    int (*shared_bytes)(uint32_t k_bytes, uint32_t v_bytes, int warps);
};

/* the most warps and query rows of a thread block */
constexpr int DIRECT_WARPS = 8, DIRECT_ROWS = 8;

/* The kernel for the tiers and the head_dim of g, which both roles have. */
DirectKernel direct_tiers(const kvant_general &g);

} // namespace kvant
