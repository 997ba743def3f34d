/* centers.h - centres of blocks that turn with positions (centers.cu). */
#pragma once

#include "kvant/cuda.h"

namespace kvant
{

/* Whether nothing that kvant_cuda_page_offsets needs is missing. */
bool valid_offsets(const kvant_cuda_page_offsets_args &args);

} // namespace kvant
