/* gpu.h - an NVIDIA driver, found at run time like libkvant_cuda, so that the command needs neither
 * a toolkit to be built nor a GPU to start.
 *
 * Owns loading, one device, its clock and its errors; knows no benchmark. The driver's functions are those of its
 * documented interface, declared here with the types that its binary interface has had since CUDA 11.4. One thread uses
 * it: all work runs on that thread's stream, which the driver orders with the copies of upload and download. Nothing is
 * closed, because the process ends soon, and a driver does not like to be unloaded. */
#ifndef KVANT_TOOLS_GPU_H
#define KVANT_TOOLS_GPU_H

#include <kvant/kvant.h>
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

#define GPU_STREAM ((gpu_stream)0x2) /* CU_STREAM_PER_THREAD */

/* X(result type, name, symbol, parameters) */
#define GPU_DRIVER_FUNCTIONS(X)                                                                                    \
    X(init, "cuInit", (unsigned flags))                                                                            \
    X(driver_version, "cuDriverGetVersion", (int *version))                                                        \
    X(device_count, "cuDeviceGetCount", (int *count))                                                              \
    X(device_get, "cuDeviceGet", (int *device, int ordinal))                                                       \
    X(device_name, "cuDeviceGetName", (char *name, int bytes, int device))                                         \
    X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                           \
    X(context_retain, "cuDevicePrimaryCtxRetain", (gpu_context * context, int device))                             \
    X(context_set, "cuCtxSetCurrent", (gpu_context context))                                                       \
    X(memory_info, "cuMemGetInfo_v2", (size_t * free, size_t * total))                                             \
    X(allocate, "cuMemAlloc_v2", (gpu_address * address, size_t bytes))                                            \
    X(release, "cuMemFree_v2", (gpu_address address))                                                              \
    X(upload, "cuMemcpyHtoD_v2", (gpu_address to, const void *from, size_t bytes))                                 \
    X(download, "cuMemcpyDtoH_v2", (void *to, gpu_address from, size_t bytes))                                     \
    X(copy, "cuMemcpyDtoDAsync_v2", (gpu_address to, gpu_address from, size_t bytes, gpu_stream stream))           \
    X(fill, "cuMemsetD8Async", (gpu_address to, unsigned char value, size_t bytes, gpu_stream stream))             \
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
    X(error_text, "cuGetErrorString", (gpu_result result, const char **text))

typedef struct gpu {
#define GPU_MEMBER(name, symbol, parameters) gpu_result(*name) parameters;
    GPU_DRIVER_FUNCTIONS(GPU_MEMBER)
#undef GPU_MEMBER
    char device[128]; /* its name */
    int version;      /* as CUDA numbers the driver's: 13000 is 13.0 */
    gpu_event begin, end;
    gpu_address flush; /* memory of four times the second-level cache, to empty it */
    size_t flush_bytes;
} gpu;

/* Opens libkvant_cuda (path NULL: $KVANT_CUDA_LIBRARY, beside the command, then the system's
 * places), the driver and a device. False after complaining. */
bool gpu_open(gpu *g, const char *library, uint32_t ordinal);

/* False after complaining, with what was being done. */
bool gpu_ok(const gpu *g, gpu_result result, const char *what);
bool gpu_library_ok(kvant_status status, const char *what);

/* Memory of the device, 256-byte aligned, of which nothing is known; 0 after complaining. Freed with release. */
gpu_address gpu_new(const gpu *g, size_t bytes);

/* Seconds that the GPU needs for what enqueue puts on the stream; cold: after its cache was emptied. False after
 * complaining. */
bool gpu_time(const gpu *g, bool cold, gpu_result (*enqueue)(const gpu *g, void *work), void *work, double *seconds);

/* Bytes a second that a copy reads and writes, the median of so many; 0 after complaining. */
double gpu_copy_bandwidth(const gpu *g, uint32_t rounds);

#endif /* KVANT_TOOLS_GPU_H */
