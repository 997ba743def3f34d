/* abi.h - the binary interface of ggml back ends, as far as the plug-in uses it.
 *
 * One plug-in serves llama.cpp builds with different headers, so it includes none of them. This
 * file declares the memory layouts that both sides share. Functions are looked up at load time
 * (ggml_api.h). At that time ggml_tables.c finds out whether the layouts are the same as here. The
 * test tests/integration/test_abi_layout.c compiles this file together with the real headers of a
 * build. It compares every offset, size and constant.
 *
 * Two generations of the interface exist. They differ in the table of the buffer type only:
 *   API 2   ggml 0.10 to 0.25
 *   API 3   ggml 0.26 and 0.27     adds alloc_buffer_n and get_alloc_size_n
 * Enumerations are 4 bytes wide on every supported compiler and are declared as int32_t.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Sizes of arrays in ggml's structs. The loader compares them (ggml_tables.c). */
#define ABI_MAX_DIMS 4
#define ABI_MAX_SRC 10
#define ABI_MAX_OP_PARAMS 64
#define ABI_MAX_NAME 64

enum {
    ABI_TYPE_F32 = 0,
    ABI_TYPE_F16 = 1,
    ABI_TYPE_I32 = 26,
    ABI_TYPE_I64 = 27,
    ABI_TYPE_BF16 = 30
};
enum { ABI_STATUS_ALLOC_FAILED = -2, ABI_STATUS_FAILED = -1, ABI_STATUS_SUCCESS = 0 };
enum { ABI_DEVICE_CPU = 0, ABI_DEVICE_GPU = 1, ABI_DEVICE_IGPU = 2, ABI_DEVICE_ACCEL = 3 };
enum { ABI_TENSOR_FLAG_COMPUTE = 16, ABI_USAGE_COMPUTE = 2 };

typedef struct abi_buffer abi_buffer;
typedef struct abi_buft abi_buft;
typedef struct abi_backend abi_backend;
typedef struct abi_device abi_device;
typedef struct abi_reg abi_reg;
typedef struct abi_graph abi_graph;
typedef struct abi_context abi_context; /* opaque */

/* Created by the back end that records and awaits it. With CUDA's back end, context is a
 * cudaEvent_t. */
typedef struct abi_event {
    abi_device *device;
    void *context;
} abi_event;

typedef struct abi_tensor {
    int32_t type;
    abi_buffer *buffer;
    int64_t ne[ABI_MAX_DIMS];
    size_t nb[ABI_MAX_DIMS]; /* strides in bytes */
    int32_t op;
    int32_t op_params[ABI_MAX_OP_PARAMS / sizeof(int32_t)];
    int32_t flags;
    struct abi_tensor *src[ABI_MAX_SRC];
    struct abi_tensor *view_src; /* always the root: ggml folds views of views */
    size_t view_offs;
    void *data;
    char name[ABI_MAX_NAME];
    void *extra;
    char padding[8];
} abi_tensor;

/* Only gpu/ reads the members; all other files call ggml_graph_node. A part of a graph shares use
 * counts and hash set with the whole graph. */
struct abi_graph {
    int size, n_nodes, n_leafs;
    abi_tensor **nodes, **grads, **grad_accs, **leafs;
    int32_t *use_counts;
    struct {
        size_t size;
        uint32_t *used;
        abi_tensor **keys;
    } visited;
    int32_t order;
    uint64_t uid; /* not 0: two graphs with this number are the same */
};

/* Buffer type: the only table that differs between generations. ggml_tables.c decides once, at load
 * time, which table is in use. */

typedef struct abi_buft_iface_2 {
    const char *(*get_name)(abi_buft *buft);
    abi_buffer *(*alloc_buffer)(abi_buft *buft, size_t size);
    size_t (*get_alignment)(abi_buft *buft);
    size_t (*get_max_size)(abi_buft *buft);
    size_t (*get_alloc_size)(abi_buft *buft, const abi_tensor *tensor);
    bool (*is_host)(abi_buft *buft);
} abi_buft_iface_2;

typedef struct abi_buft_2 {
    abi_buft_iface_2 iface;
    abi_device *device;
    void *context;
} abi_buft_2;

typedef struct abi_buft_iface_3 {
    const char *(*get_name)(abi_buft *buft);
    abi_buffer *(*alloc_buffer)(abi_buft *buft, size_t size);
    abi_buffer *(*alloc_buffer_n)(abi_buft *buft, abi_tensor **tensors, int n_tensors);
    size_t (*get_alignment)(abi_buft *buft);
    size_t (*get_max_size)(abi_buft *buft);
    size_t (*get_alloc_size)(abi_buft *buft, const abi_tensor *tensor);
    size_t (*get_alloc_size_n)(abi_buft *buft, abi_tensor **tensors, int n_tensors);
    bool (*is_host)(abi_buft *buft);
} abi_buft_iface_3;

typedef struct abi_buft_3 {
    abi_buft_iface_3 iface;
    abi_device *device;
    void *context;
} abi_buft_3;

/* A buffer type of either generation; a pointer to it is an abi_buft *. */
typedef union abi_any_buft {
    abi_buft_2 v2;
    abi_buft_3 v3;
} abi_any_buft;

typedef struct abi_buffer_iface {
    void (*free_buffer)(abi_buffer *buffer);
    void *(*get_base)(abi_buffer *buffer);
    int32_t (*init_tensor)(abi_buffer *buffer, abi_tensor *tensor);
    void (*memset_tensor)(abi_buffer *buffer, abi_tensor *tensor, uint8_t value, size_t offset,
                          size_t size);
    void (*set_tensor)(abi_buffer *buffer, abi_tensor *tensor, const void *data, size_t offset,
                       size_t size);
    void (*get_tensor)(abi_buffer *buffer, const abi_tensor *tensor, void *data, size_t offset,
                       size_t size);
    /* `n` pieces of `size` bytes; the strides are from one piece to the next one */
    void (*set_tensor_2d)(abi_buffer *buffer, abi_tensor *tensor, const void *data, size_t offset,
                          size_t size, size_t n, size_t tensor_stride, size_t data_stride);
    void (*get_tensor_2d)(abi_buffer *buffer, const abi_tensor *tensor, void *data, size_t offset,
                          size_t size, size_t n, size_t tensor_stride, size_t data_stride);
    bool (*cpy_tensor)(abi_buffer *buffer, const abi_tensor *src, abi_tensor *dst);
    void (*clear)(abi_buffer *buffer, uint8_t value);
    void (*reset)(abi_buffer *buffer);
} abi_buffer_iface;

/* Created and freed by ggml (ggml_backend_buffer_init). */
struct abi_buffer {
    abi_buffer_iface iface;
    abi_buft *buft;
    void *context;
    size_t size;
    int32_t usage;
};

/* Back end: the slots that stay NULL are declared without their parameters. */
typedef struct abi_backend_iface {
    const char *(*get_name)(abi_backend *backend);
    void (*free)(abi_backend *backend);
    void (*set_tensor_async)(void);
    void (*get_tensor_async)(void);
    void (*set_tensor_2d_async)(void);
    void (*get_tensor_2d_async)(void);
    void (*cpy_tensor_async)(void);
    void (*synchronize)(abi_backend *backend);
    void (*graph_plan_create)(void);
    void (*graph_plan_free)(void);
    void (*graph_plan_update)(void);
    void (*graph_plan_compute)(void);
    int32_t (*graph_compute)(abi_backend *backend, abi_graph *graph);
    void (*event_record)(abi_backend *backend, abi_event *event);
    void (*event_wait)(abi_backend *backend, abi_event *event);
    /* newer versions of ggml pass parameters; older functions ignore them */
    void (*graph_optimize)(abi_backend *backend, abi_graph *graph, void *params);
} abi_backend_iface;

/* Created by the device, freed by iface.free. */
struct abi_backend {
    uint8_t (*guid)[16];
    abi_backend_iface iface;
    abi_device *device;
    void *context;
};

typedef struct abi_device_caps {
    bool async;
    bool host_buffer;
    bool buffer_from_host_ptr;
    bool events;
    bool mmap_support;
} abi_device_caps;

typedef struct abi_device_props {
    const char *name;
    const char *description;
    size_t memory_free;
    size_t memory_total;
    int32_t type;
    const char *device_id;
    abi_device_caps caps;
} abi_device_props;

typedef struct abi_device_iface {
    const char *(*get_name)(abi_device *device);
    const char *(*get_description)(abi_device *device);
    void (*get_memory)(abi_device *device, size_t *free, size_t *total);
    int32_t (*get_type)(abi_device *device);
    void (*get_props)(abi_device *device, abi_device_props *props);
    abi_backend *(*init_backend)(abi_device *device, const char *params);
    abi_buft *(*get_buffer_type)(abi_device *device);
    abi_buft *(*get_host_buffer_type)(abi_device *device);
    abi_buffer *(*buffer_from_host_ptr)(abi_device *device, void *ptr, size_t size,
                                        size_t max_tensor_size);
    bool (*supports_op)(abi_device *device, const abi_tensor *op);
    bool (*supports_buft)(abi_device *device, abi_buft *buft);
    bool (*offload_op)(abi_device *device, const abi_tensor *op);
    void (*event_new)(void);
    void (*event_free)(void);
    void (*event_synchronize)(void);
} abi_device_iface;

struct abi_device {
    abi_device_iface iface;
    abi_reg *reg;
    void *context;
};

typedef struct abi_reg_iface {
    const char *(*get_name)(abi_reg *reg);
    size_t (*get_device_count)(abi_reg *reg);
    abi_device *(*get_device)(abi_reg *reg, size_t index);
    void *(*_Atomic get_proc_address)(
        /* replaced while other threads may read it (host_threads.c) */
        abi_reg *reg, const char *name);
} abi_reg_iface;

struct abi_reg {
    int api_version;
    abi_reg_iface iface;
    void *context;
};

/* The CPU back end's list of features ends with a NULL name. */
typedef struct abi_feature {
    const char *name;
    const char *value;
} abi_feature;

/* The operation of ggml_custom_4d: its number of tasks, and the function that each task calls. */
enum { ABI_N_TASKS_MAX = -1 };
typedef void (*abi_custom_op)(abi_tensor *node, int thread, int n_threads, void *user);

/* ggml_init's parameters, passed by value. */
typedef struct abi_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
} abi_init_params;
