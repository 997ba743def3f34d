/* launches.h - the functions of CUDA's runtime that launch kernels, and the properties of a device
 * of compute capability 9.0. */
#pragma once

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorNotSupported,
    cudaErrorNoDevice,
    cudaErrorInsufficientDriver
};
using cudaStream_t = void *;

inline cudaError_t cudaGetLastError()
{
    return cudaSuccess;
}
inline const char *cudaGetErrorString(cudaError_t)
{
    return "a mock of CUDA";
}
inline cudaError_t cudaGetDeviceCount(int *n)
{
    *n = 1;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

/* Few multiprocessors, so that a list of some hundred rows has several items a block. */
constexpr int MULTIPROCESSORS = 3, MOST_SHARED = 227 << 10;
/* An attribute's number is its value. */
enum cudaDeviceAttr {
    cudaDevAttrMaxSharedMemoryPerBlockOptin = MOST_SHARED,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = MOST_SHARED + 1024,
    cudaDevAttrMultiProcessorCount = MULTIPROCESSORS
};
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int)
{
    *value = (int)attribute;
    return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int,
                                                                 size_t)
{
    *blocks = 1;
    return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes {
    int ptxVersion;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *of, const void *)
{
    of->ptxVersion = 90;
    return cudaSuccess;
}
/* Allows a kernel this many bytes of dynamic shared memory; without it a launch with more than 48
 * KB fails. */
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute, int bytes);

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
/* Both run a kernel that add_kernels added. */
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 threads, void **parameters,
                             size_t shared, cudaStream_t);
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *with, const void *kernel,
                                       void **parameters)
{
    return cudaLaunchKernel(kernel, with->gridDim, with->blockDim, parameters,
                            with->dynamicSmemBytes, with->stream);
}

/* ---- kernels, whose parameters a launch passes without their types ---- */

using kernel_call = void(const void *kernel, void **parameters);
void add_kernel(const void *kernel, kernel_call *call);

template <class... P, size_t... I>
void call_with(void (*kernel)(P...), void **parameters, std::index_sequence<I...>)
{
    kernel(*static_cast<const P *>(parameters[I])...);
}

template <class... P> void add_kernel_of(void (*kernel)(P...))
{
    add_kernel(reinterpret_cast<const void *>(kernel), [](const void *called, void **parameters) {
        call_with(reinterpret_cast<void (*)(P...)>(reinterpret_cast<uintptr_t>(called)), parameters,
                  std::index_sequence_for<P...>());
    });
}

/* Adds the kernels of a file: static const bool added = add_kernels(...). */
template <class... K> bool add_kernels(K... kernels)
{
    (add_kernel_of(kernels), ...);
    return true;
}

/* Calls add for each head_dim for which kernels are compiled. */
template <class F> bool add_head_dims(F &&add)
{
    return add(std::integral_constant<int, 64>()) && add(std::integral_constant<int, 96>()) &&
           add(std::integral_constant<int, 128>()) && add(std::integral_constant<int, 256>());
}
