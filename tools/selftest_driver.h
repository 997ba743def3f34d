/* selftest_driver.h - what `kvant selftest` calls of the CUDA driver, looked up in libcuda.so.1
 * when it is first needed: GPUs, memory, a stream, times. Kernels are libkvant_cuda's
 * (kvant/cuda.h). */
#ifndef KVANT_TOOLS_SELFTEST_DRIVER_H
#define KVANT_TOOLS_SELFTEST_DRIVER_H

#include <stdbool.h>
#include <stddef.h>

typedef unsigned long long gpu_address;

enum { GPU_NON_BLOCKING = 1 };
enum {
    GPU_MULTIPROCESSORS = 16,
    GPU_L2_BYTES = 38,
    GPU_MAJOR = 75,
    GPU_MINOR = 76,
    GPU_SHARED_BYTES = 97
};

/* X(member, exported name, parameters); all return 0 for success. */
#define GPU_DRIVER_FUNCTIONS(X)                                                                    \
    X(init, cuInit, (unsigned flags))                                                              \
    X(version, cuDriverGetVersion, (int *version))                                                 \
    X(count, cuDeviceGetCount, (int *n))                                                           \
    X(device, cuDeviceGet, (int *device, int ordinal))                                             \
    X(name, cuDeviceGetName, (char *name, int bytes, int device))                                  \
    X(attribute, cuDeviceGetAttribute, (int *value, int attribute, int device))                    \
    X(context_retain, cuDevicePrimaryCtxRetain, (void **context, int device))                      \
    X(context_set, cuCtxSetCurrent, (void *context))                                               \
    X(memory_info, cuMemGetInfo_v2, (size_t * available, size_t * total))                          \
    X(memory_new, cuMemAlloc_v2, (gpu_address * memory, size_t bytes))                             \
    X(memory_free, cuMemFree_v2, (gpu_address memory))                                             \
    X(copy_in, cuMemcpyHtoDAsync_v2,                                                               \
      (gpu_address to, const void *from, size_t bytes, void *stream))                              \
    X(copy_out, cuMemcpyDtoHAsync_v2, (void *to, gpu_address from, size_t bytes, void *stream))    \
    X(copy_within, cuMemcpyDtoDAsync_v2,                                                           \
      (gpu_address to, gpu_address from, size_t bytes, void *stream))                              \
    X(fill, cuMemsetD8Async, (gpu_address at, unsigned char value, size_t bytes, void *stream))    \
    X(stream_new, cuStreamCreate, (void **stream, unsigned flags))                                 \
    X(stream_finish, cuStreamSynchronize, (void *stream))                                          \
    X(event_new, cuEventCreate, (void **event, unsigned flags))                                    \
    X(event_record, cuEventRecord, (void *event, void *stream))                                    \
    X(event_finish, cuEventSynchronize, (void *event))                                             \
    X(elapsed, cuEventElapsedTime, (float *milliseconds, void *from, void *to))                    \
    X(error_name, cuGetErrorName, (int error, const char **name))

typedef struct gpu_driver {
#define GPU_DRIVER_MEMBER(member, name, parameters) int(*member) parameters;
    GPU_DRIVER_FUNCTIONS(GPU_DRIVER_MEMBER)
#undef GPU_DRIVER_MEMBER
} gpu_driver;

/* NULL without a driver, with one that does not start (no GPU), or with one that is too old; why,
 * when it is not NULL, then has a line. */
const gpu_driver *gpu_driver_load(char *why, size_t bytes);

#endif /* KVANT_TOOLS_SELFTEST_DRIVER_H */
