/* direct.h - which pairs of codecs kernels of direct.cuh serve. Each family has a source file of
 * its own. */
#pragma once

#include "../attention/attention.h"

namespace kvant
{

/* kernel NULL: none. */
struct DirectKernel {
    const void *kernel; /* takes AnyAttentionArgs */
    int (*shared_bytes)(uint32_t k_bytes, uint32_t v_bytes, int warps);
};

constexpr int DIRECT_WARPS = 8, DIRECT_ROWS = 8; /* of a thread block, at most; rows of queries */

/* Of this family and head_dim, both roles' codecs. */
DirectKernel direct_sketch(const kvant_general &g);
DirectKernel direct_tiers(const kvant_general &g);
DirectKernel direct_polar(const kvant_general &g);
DirectKernel direct_rows(const kvant_general &g);

} // namespace kvant
