/* centers.h - centres of blocks that turn with positions (centers.cu). */
#pragma once

#include "kvant/cuda_kernels.h"

namespace kvant
{

/* Whether nothing of centres is missing, and head_dim is one that they can have. */
bool valid_turning(const kvant_cuda_turning &turning, uint32_t head_dim);

/* Whether nothing that kvant_cuda_page_offsets needs is missing. */
bool valid_offsets(const kvant_cuda_page_offsets_args &args);

} // namespace kvant
