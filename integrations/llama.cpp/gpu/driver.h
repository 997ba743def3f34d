/* driver.h - the functions of the CUDA driver that the GPU devices use, looked up in libcuda.so.1
 * when they are first needed.
 *
 * Memory, streams, events and graphs belong to the driver, so any CUDA runtime that llama.cpp was
 * built with will do. Kernels are libkvant_cuda's (kvant/cuda.h). */
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef unsigned long long cu_address;
typedef struct CUctx_st *cu_context;
typedef struct CUstream_st *cu_stream;
typedef struct CUevent_st *cu_event;
typedef struct CUgraph_st *cu_graph;
typedef struct CUgraphExec_st *cu_graph_exec;
typedef struct CUgraphNode_st *cu_node;

enum {
    CU_NON_BLOCKING = 1,
    CU_EVENT_SLEEPS = 1,
    CU_NO_TIMING = 2,
    CU_CAPTURE_RELAXED = 2,
    CU_HOST_PORTABLE_MAPPED = 3
};

typedef struct cu_edge_data {
    unsigned char from_port, to_port, type, reserved[5];
} cu_edge_data;

typedef struct cu_update_info {
    int result;
    void *error_node, *error_from;
} cu_update_info;

enum { CU_MEMORY_HOST = 1, CU_MEMORY_DEVICE = 2 };

typedef struct cu_copy_2d {
    size_t from_x, from_y;
    int from_type;
    const void *from_host;
    cu_address from_device;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void *to_host;
    cu_address to_device;
    void *to_array;
    /* bytes from one row of the destination to the next; bytes of a row; the row count */
    size_t to_pitch, width, height;
} cu_copy_2d;

/* X(member, exported name, parameters); all return 0 for success. The last two may be NULL: drivers
 * have them from 12.3 on. */
#define KVP_CUDA_FUNCTIONS(X)                                                                      \
    X(init, cuInit, (unsigned flags))                                                              \
    X(device_by_bus_id, cuDeviceGetByPCIBusId, (int *device, const char *id))                      \
    X(context_retain, cuDevicePrimaryCtxRetain, (cu_context * context, int device))                \
    X(context_set, cuCtxSetCurrent, (cu_context context))                                          \
    X(memory_new, cuMemAlloc_v2, (cu_address * memory, size_t bytes))                              \
    X(memory_free, cuMemFree_v2, (cu_address memory))                                              \
    X(memory_info, cuMemGetInfo_v2, (size_t * free, size_t * total))                               \
    X(host_memory_new, cuMemHostAlloc, (void **memory, size_t bytes, unsigned flags))              \
    X(host_memory_free, cuMemFreeHost, (void *memory))                                             \
    X(copy_in, cuMemcpyHtoDAsync_v2,                                                               \
      (cu_address to, const void *from, size_t bytes, cu_stream stream))                           \
    X(copy_out, cuMemcpyDtoHAsync_v2, (void *to, cu_address from, size_t bytes, cu_stream stream)) \
    X(copy_2d, cuMemcpy2DAsync_v2, (const cu_copy_2d *copy, cu_stream stream))                     \
    X(copy_within, cuMemcpyDtoDAsync_v2,                                                           \
      (cu_address to, cu_address from, size_t bytes, cu_stream stream))                            \
    X(fill, cuMemsetD8Async, (cu_address at, unsigned char value, size_t bytes, cu_stream stream)) \
    X(stream_new, cuStreamCreate, (cu_stream * stream, unsigned flags))                            \
    X(stream_free, cuStreamDestroy_v2, (cu_stream stream))                                         \
    X(stream_wait, cuStreamWaitEvent, (cu_stream stream, cu_event event, unsigned flags))          \
    X(stream_finish, cuStreamSynchronize, (cu_stream stream))                                      \
    X(capture_begin, cuStreamBeginCapture_v2, (cu_stream stream, int mode))                        \
    X(capture_end, cuStreamEndCapture, (cu_stream stream, cu_graph * graph))                       \
    X(event_new, cuEventCreate, (cu_event * event, unsigned flags))                                \
    X(event_free, cuEventDestroy_v2, (cu_event event))                                             \
    X(event_record, cuEventRecord, (cu_event event, cu_stream stream))                             \
    X(event_finish, cuEventSynchronize, (cu_event event))                                          \
    X(graph_make, cuGraphInstantiateWithFlags,                                                     \
      (cu_graph_exec * exec, cu_graph graph, unsigned long long flags))                            \
    X(graph_update, cuGraphExecUpdate_v2,                                                          \
      (cu_graph_exec exec, cu_graph graph, cu_update_info * info))                                 \
    X(graph_launch, cuGraphLaunch, (cu_graph_exec exec, cu_stream stream))                         \
    X(graph_free, cuGraphDestroy, (cu_graph graph))                                                \
    X(exec_free, cuGraphExecDestroy, (cu_graph_exec exec))                                         \
    X(error_name, cuGetErrorName, (int error, const char **name))                                  \
    X(edges, cuGraphGetEdges_v2,                                                                   \
      (cu_graph graph, cu_node * from, cu_node * to, cu_edge_data * data, size_t * n))             \
    X(edges_remove, cuGraphRemoveDependencies_v2,                                                  \
      (cu_graph graph, const cu_node *from, const cu_node *to, const cu_edge_data *data,           \
       size_t n))

typedef struct kvp_driver {
#define KVP_CUDA_MEMBER(member, name, parameters) int(*member) parameters;
    KVP_CUDA_FUNCTIONS(KVP_CUDA_MEMBER)
#undef KVP_CUDA_MEMBER
} kvp_driver;

/* Valid after kvp_driver_load returned true. */
extern kvp_driver kvp_cu;

/* False, with a line in err, without a driver or with one that is too old. */
bool kvp_driver_load(char *err, size_t errlen);

/* True for 0; otherwise says what failed. */
bool kvp_cu_ok(int result, const char *what);

/* Copy or clear memory in the order of a stream: to the GPU, from the GPU, and within it. False
 * with a message. `kvp_cu_read` waits until the bytes are there. */
bool kvp_cu_write(void *to, const void *from, size_t bytes, cu_stream stream);
bool kvp_cu_read(void *to, const void *from, size_t bytes, cu_stream stream);
bool kvp_cu_move(void *to, const void *from, size_t bytes, cu_stream stream);
bool kvp_cu_clear(void *at, size_t bytes, cu_stream stream);

/* Waits for the work of a stream. False with a message that says what it was. */
bool kvp_cu_finish(cu_stream stream, const char *what);
