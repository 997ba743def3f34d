/* centers.h - centres of blocks, which RoPE rotates to the blocks' positions (centers.cu). */
#pragma once

#include "kvant/cuda_kernels.h"

#include <cuda_runtime.h>

namespace kvant
{

/* Whether the arguments of centres are complete, and head_dim is one that can have centres. */
bool valid_block_centers(const kvant_cuda_block_centers &block_centers, uint32_t head_dim);

/* Whether the arguments of kvant_cuda_page_offsets are complete. */
bool valid_offsets(const kvant_cuda_page_offsets_args &args);

/* Computes the offsets of valid arguments. ready: as in kvant_cuda_plain_queries. */
kvant_status launch_page_offsets(kvant_cuda_page_offsets_args args, bool ready,
                                 cudaStream_t stream);

} // namespace kvant
