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

struct AnyAttentionArgs;

/* The direct kernel for a problem. These kernels know a single key transform and no centres of
 * keys. */
DirectKernel direct_for(const AnyAttentionArgs &p);

} // namespace kvant
