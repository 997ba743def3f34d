/* api_threads.cpp - api.cu, which checks arguments and chooses kernels. Kernels that this library
 * does not have are refused. */
#include "cuda_runtime.h"

#include "api.cu"

static size_t most_shared_memory;

void kvant_cuda_table_limit_shared_memory(size_t bytes)
{
    most_shared_memory = bytes;
}

namespace kvant
{

size_t shared_limit()
{
    return most_shared_memory;
}

cudaError_t launch_append_any(const AppendArgs &, int, cudaStream_t)
{
    return cudaErrorNotSupported;
}

kvant_status launch_general(const AppendArgs &, int, cudaStream_t)
{
    return KVANT_ERR_UNSUPPORTED;
}

cudaError_t launch_decode(const DecodeArgs &, const kvant_cuda_codec &, uint32_t, uint32_t,
                          cudaStream_t)
{
    return cudaErrorNotSupported;
}

} // namespace kvant

kvant_status kvant_cuda_codec_with_tables(const kvant_cuda_codec *, const float *,
                                          kvant_cuda_codec *)
{
    return KVANT_ERR_UNSUPPORTED;
}
