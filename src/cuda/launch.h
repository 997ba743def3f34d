/* launch.h - makes a compile-time constant of a run-time head_dim, and functions about a device's
 * resources for launches. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime.h>
#include <type_traits>

namespace kvant
{

template <class F> cudaError_t with_head_dim(uint32_t head_dim, F &&launch)
{
    switch (head_dim) {
    case 64: return launch(std::integral_constant<int, 64>());
    case 96: return launch(std::integral_constant<int, 96>());
    case 128: return launch(std::integral_constant<int, 128>());
    case 256: return launch(std::integral_constant<int, 256>());
    default: return cudaErrorInvalidValue;
    }
}

/* Calls launch with the least of these head_dims into which head_dim fits. */
template <class F> auto with_room(uint32_t head_dim, F &&launch)
{
    return head_dim <= 128   ? launch(std::integral_constant<int, 128>())
           : head_dim <= 256 ? launch(std::integral_constant<int, 256>())
                             : launch(std::integral_constant<int, 512>());
}

/* The limit that kvant_cuda_limit_shared_memory set; 0: no limit (attention/launch.cu). */
size_t shared_limit();

/* An attribute of the current device. */
inline cudaError_t device_attribute(cudaDeviceAttr attribute, int &value)
{
    int device = 0;
    const cudaError_t error = cudaGetDevice(&device);
    return error == cudaSuccess ? cudaDeviceGetAttribute(&value, attribute, device) : error;
}

/* The most shared memory of a thread block. It is 227 KB with compute capability 9.0 and 163 KB
 * with 8.0. With 8.6, 8.9 and 12.0 it is 99 KB. */
inline cudaError_t most_shared(int &bytes)
{
    const cudaError_t error = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, bytes);
    const size_t limit = shared_limit();
    if (error == cudaSuccess && limit != 0 && limit < (size_t)bytes)
        bytes = (int)limit;
    return error;
}

/* Allows a kernel `bytes` of dynamic shared memory; called before a launch. cudaErrorNotSupported
 * when the device has less. */
inline cudaError_t allow_shared(const void *kernel, int bytes)
{
    int most = 0;
    const cudaError_t error = most_shared(most);
    if (error == cudaSuccess && bytes > most)
        return cudaErrorNotSupported;
    return error == cudaSuccess
               ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)
               : error;
}

/* The number of thread blocks of a kernel that run at once. */
inline cudaError_t blocks_at_once(const void *kernel, int threads, int shared, int &blocks)
{
    int multiprocessors = 0;
    cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, multiprocessors);
    if (error == cudaSuccess)
        error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared);
    blocks *= multiprocessors;
    return error;
}

/* kernel<<<grid, threads, shared, stream>>>(arguments...). In this form C++ programs run kernels,
 * too (tests/cuda/threads). */
template <class... P>
cudaError_t launch_kernel(void (*kernel)(P...), dim3 grid, unsigned threads, size_t shared,
                          cudaStream_t stream, std::common_type_t<P>... arguments)
{
    void *parameters[] = { &arguments... };
    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, dim3(threads), parameters,
                            shared, stream);
}

/* Launches a kernel that calls wait_for_prior (ptx.cuh), which only code for compute_90 and later
 * does. Its blocks start while the blocks of the preceding kernel end. CUDA graphs preserve this
 * from CUDA 12.3 on. */
inline cudaError_t launch_early(const void *kernel, dim3 grid, unsigned threads, void **parameters,
                                size_t shared, cudaStream_t stream)
{
    static const bool driver_knows = [] {
        int version = 0;
        return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12030;
    }();
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaFuncAttributes code{};
    const cudaError_t error = cudaFuncGetAttributes(&code, kernel);
    if (error != cudaSuccess)
        return error;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = driver_knows && code.ptxVersion >= 90 ? 1 : 0;
    return cudaLaunchKernelExC(&config, kernel, parameters);
}

} // namespace kvant
