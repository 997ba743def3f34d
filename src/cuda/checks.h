/* checks.h - argument checks shared by the functions of cuda.h, and the status of a CUDA error. */
#pragma once

#include "params.h"

#include <cuda_runtime.h>

namespace kvant
{

inline kvant_status from_cuda(cudaError_t error)
{
    if (error == cudaSuccess)
        return KVANT_OK;
    /* clears the error of a refused launch, so that the caller's own checks do not find it */
    cudaGetLastError();
    const bool unsupported = error == cudaErrorNotSupported || error == cudaErrorNoDevice ||
                             error == cudaErrorInsufficientDriver;
    return unsupported ? KVANT_ERR_UNSUPPORTED : KVANT_ERR_CUDA;
}

inline bool valid_type(kvant_cuda_type type)
{
    return type == KVANT_CUDA_F32 || type == KVANT_CUDA_F16 || type == KVANT_CUDA_BF16;
}

inline bool aligned(const void *pointer)
{
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

/* Pages are copied in pieces of 16 bytes. */
inline bool valid_pages(const kvant_cuda_pages &pages, size_t page_bytes, uint32_t n_kv_heads)
{
    return pages.base && aligned(pages.base) && pages.block_stride % 16 == 0 &&
           pages.head_stride % 16 == 0 && pages.block_stride >= page_bytes &&
           (n_kv_heads == 1 || pages.head_stride >= page_bytes);
}

/* Open pages hold 16-bit rows. */
inline size_t open_bytes(const kvant_cuda_params &codec)
{
    return (size_t)KVANT_PAGE_TOKENS * codec.head_dim * sizeof(uint16_t);
}

} // namespace kvant
