/* gpu.h - an NVIDIA driver, found at run time like libkvant_cuda, so that the command needs neither
 * a toolkit to be built nor a GPU to start.
 *
 * Owns loading, one device and its errors; knows no benchmark. The driver's functions are those of
 * its documented interface, declared here with the types that its binary interface has had since
 * CUDA 11.4. One thread uses it. */
#ifndef KVANT_TOOLS_GPU_H
#define KVANT_TOOLS_GPU_H

#include <kvant/cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int gpu_result;                 /* CUresult: 0 is success */
typedef unsigned long long gpu_address; /* CUdeviceptr */
typedef struct CUstream_st *gpu_stream;
typedef struct CUevent_st *gpu_event;
typedef struct CUgraph_st *gpu_graph;
typedef struct CUgraphExec_st *gpu_graph_exec;
typedef struct CUctx_st *gpu_context;

/* X(result type, name, symbol, parameters) */
#define GPU_DRIVER_FUNCTIONS(X)                                                                                    \
    X(init, "cuInit", (unsigned flags))                                                                            \
    X(driver_version, "cuDriverGetVersion", (int *version))                                                        \
    X(device_count, "cuDeviceGetCount", (int *count))                                                              \
    X(device_get, "cuDeviceGet", (int *device, int ordinal))                                                       \
    X(device_name, "cuDeviceGetName", (char *name, int bytes, int device))                                         \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                           \
    X(context_retain, "cuDevicePrimaryCtxRetain", (gpu_context * context, int device))                             \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (int device))                                               \
    X(context_set, "cuCtxSetCurrent", (gpu_context context))                                                       \
    X(memory_info, "cuMemGetInfo_v2", (size_t * free, size_t * total))                                             \
    X(allocate, "cuMemAlloc_v2", (gpu_address * address, size_t bytes))                                            \
    X(release, "cuMemFree_v2", (gpu_address address))                                                              \
    X(upload, "cuMemcpyHtoD_v2", (gpu_address to, const void *from, size_t bytes))                                 \
    X(download, "cuMemcpyDtoH_v2", (void *to, gpu_address from, size_t bytes))                                     \
    X(copy, "cuMemcpyDtoDAsync_v2", (gpu_address to, gpu_address from, size_t bytes, gpu_stream stream))           \
    X(fill, "cuMemsetD8Async", (gpu_address to, unsigned char value, size_t bytes, gpu_stream stream))             \
    X(stream_create, "cuStreamCreate", (gpu_stream * stream, unsigned flags))                                      \
    X(stream_destroy, "cuStreamDestroy_v2", (gpu_stream stream))                                                   \
    X(stream_wait, "cuStreamSynchronize", (gpu_stream stream))                                                     \
    X(capture_begin, "cuStreamBeginCapture_v2", (gpu_stream stream, int mode))                                     \
    X(capture_end, "cuStreamEndCapture", (gpu_stream stream, gpu_graph * graph))                                   \
    X(graph_instantiate, "cuGraphInstantiateWithFlags",                                                            \
      (gpu_graph_exec * exec, gpu_graph graph, unsigned long long flags))                                          \
    X(graph_launch, "cuGraphLaunch", (gpu_graph_exec exec, gpu_stream stream))                                     \
    X(graph_exec_destroy, "cuGraphExecDestroy", (gpu_graph_exec exec))                                             \
    X(graph_destroy, "cuGraphDestroy", (gpu_graph graph))                                                          \
    X(event_create, "cuEventCreate", (gpu_event * event, unsigned flags))                                          \
    X(event_record, "cuEventRecord", (gpu_event event, gpu_stream stream))                                         \
    X(event_wait, "cuEventSynchronize", (gpu_event event))                                                         \
    X(event_elapsed, "cuEventElapsedTime", (float *milliseconds, gpu_event from, gpu_event to))                    \
    X(event_destroy, "cuEventDestroy_v2", (gpu_event event))                                                       \
    X(error_text, "cuGetErrorString", (gpu_result result, const char **text))

typedef struct gpu_driver {
#define GPU_MEMBER(name, symbol, parameters) gpu_result(*name) parameters;
    GPU_DRIVER_FUNCTIONS(GPU_MEMBER)
#undef GPU_MEMBER
} gpu_driver;

typedef struct gpu {
    gpu_driver driver;
    gpu_stream stream;
    char name[128];
    int driver_version; /* as CUDA numbers it: 13000 is 13.0 */
    size_t l2_bytes;
    int device;
    bool context;
} gpu;

/* Opens libkvant_cuda (path NULL: $KVANT_CUDA_LIBRARY, beside the command, then the system's
 * places), the driver and a device. False after complaining; gpu_close may be called in any
 * case. */
bool gpu_open(gpu *g, const char *library, uint32_t ordinal);
void gpu_close(gpu *g);

/* False after complaining, with what was being done. */
bool gpu_ok(const gpu *g, gpu_result result, const char *what);
bool gpu_library_ok(kvant_status status, const char *what);

/* Memory of the device, 256-byte aligned, of which nothing is known; 0 after complaining. Freed
 * with driver.release. */
gpu_address gpu_new(const gpu *g, size_t bytes);
gpu_address gpu_new_copy(const gpu *g, const void *from, size_t bytes);

static inline void *gpu_pointer(gpu_address address)
{
    return (void *)(uintptr_t)address;
}

#endif /* KVANT_TOOLS_GPU_H */
