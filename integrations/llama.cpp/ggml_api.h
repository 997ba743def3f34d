/* ggml_api.h - the functions of the ggml that loads the plug-in, found at load time, and its
 * version.
 *
 * The plug-in links against no ggml. The file name and the soname of ggml differ between
 * distributions, ggml may be loaded privately (RTLD_LOCAL), and a process may hold several copies.
 * The right copy calls ggml_backend_init. So symbols are looked up in the object that contains this
 * call, and in its dependencies. The plug-in works with any version whose tables are as in abi.h,
 * which ggml_tables.c finds out. KVANT_STRICT_GGML=1 accepts only versions that all tests run with.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

typedef struct kvp_ggml {
    int api; /* the generation of the interface: 2 or 3 */
    const char *version;
    bool newer; /* ggml is newer than the versions that were tried */
    bool gpus;  /* a GPU's back end may ask for more room than a node's output needs */
    int n_rows; /* rows that ggml_tables.c compared */

    abi_buffer *(*buffer_init)(abi_buft *buft, abi_buffer_iface iface, void *context, size_t size);
    bool (*buft_is_host)(abi_buft *buft);
    abi_buft *(*cpu_buffer_type)(void);
    int (*graph_n_nodes)(abi_graph *graph);
    abi_tensor *(*graph_node)(abi_graph *graph, int i);
    size_t (*nbytes)(const abi_tensor *tensor);
    void (*fp16_to_fp32_row)(const uint16_t *x, float *y, int64_t n);
    void (*fp32_to_fp16_row)(const float *x, uint16_t *y, int64_t n);
    const char *(*op_name)(int32_t op);
    size_t (*tensor_overhead)(void);

    /* For the context shift, which borrows the process's own CPU back end (ops_rope.c), and for
     * loops on its threads (host_threads.c). */
    abi_context *(*init)(abi_init_params params);
    void (*free)(abi_context *context);
    abi_tensor *(*new_tensor_1d)(abi_context *context, int32_t type, int64_t ne0);
    abi_tensor *(*new_tensor_3d)(abi_context *context, int32_t type, int64_t ne0, int64_t ne1,
                                 int64_t ne2);
    abi_tensor *(*view_3d)(abi_context *context, abi_tensor *a, int64_t ne0, int64_t ne1,
                           int64_t ne2, size_t nb1, size_t nb2, size_t offset);
    abi_tensor *(*set_name)(abi_tensor *tensor, const char *name);
    abi_tensor *(*set_rows)(abi_context *context, abi_tensor *a, abi_tensor *b, abi_tensor *c);
    abi_tensor *(*rope_ext_inplace)(abi_context *context, abi_tensor *a, abi_tensor *b,
                                    abi_tensor *c, int n_dims, int mode, int n_ctx_orig,
                                    float freq_base, float freq_scale, float ext_factor,
                                    float attn_factor, float beta_fast, float beta_slow);
    abi_tensor *(*custom_4d)(abi_context *context, int32_t type, int64_t ne0, int64_t ne1,
                             int64_t ne2, int64_t ne3, abi_tensor **args, int n_args,
                             abi_custom_op op, int n_tasks, void *user);
    abi_graph *(*new_graph)(abi_context *context);
    size_t (*graph_overhead)(void);
    void (*build_forward_expand)(abi_graph *graph, abi_tensor *tensor);
    int32_t (*graph_compute)(abi_backend *backend, abi_graph *graph);
    void (*backend_free)(abi_backend *backend);
    void (*buffer_free)(abi_buffer *buffer);
    size_t (*buffer_size)(abi_buffer *buffer);

    /* These live in the registry library; NULL when the process does not export them. */
    abi_device *(*dev_by_type)(int32_t type);
    size_t (*dev_count)(void);
    abi_device *(*dev_get)(size_t index);
    abi_backend *(*dev_init)(abi_device *device, const char *params);
    abi_reg *(*dev_backend_reg)(abi_device *device);
    void *(*reg_get_proc_address)(abi_reg *reg, const char *name);
    abi_reg *(*reg_by_name)(const char *name);
    abi_reg *(*backend_load)(const char *path);
    uint64_t (*graph_next_uid)(void); /* from the base library */

    /* Operation numbers of this ggml. */
    struct {
        int32_t none, view, permute, reshape, transpose, set_rows, flash_attn_ext, rope, mul_mat_id;
    } op;
} kvp_ggml;

/* The ggml in use; valid after kvp_ggml_load returned true. */
extern kvp_ggml kvp_api;

/* Operations that compute nothing. */
static inline bool kvp_is_view(const abi_tensor *node)
{
    return node->op == kvp_api.op.none || node->op == kvp_api.op.view ||
           node->op == kvp_api.op.permute || node->op == kvp_api.op.reshape ||
           node->op == kvp_api.op.transpose;
}

/* Whether a node of a graph is computed. Views are not, and nodes that llama.cpp left out are
 * not. */
static inline bool kvp_is_computed(const abi_tensor *node)
{
    return (node->flags & ABI_TENSOR_FLAG_COMPUTE) != 0 && !kvp_is_view(node);
}

/* Nodes begin to end - 1 as a graph without a uid. */
static inline abi_graph kvp_graph_part(const abi_graph *graph, int begin, int end)
{
    return (abi_graph){ .size = end - begin,
                        .n_nodes = end - begin,
                        .nodes = graph->nodes + begin,
                        .use_counts = graph->use_counts,
                        .visited = graph->visited,
                        .order = graph->order };
}

/* Whether a graph has views alone, which need no back end. */
static inline bool kvp_has_only_views(const abi_graph *graph)
{
    int i = 0;

    while (i < graph->n_nodes && kvp_is_view(graph->nodes[i]))
        i++;
    return i == graph->n_nodes;
}

/* Fills kvp_api from the object that contains the address caller. On failure prints why and returns
 * false. */
bool kvp_ggml_load(const void *caller);

/* Prints a line for a version that is newer than the tried versions; with KVANT_VERBOSE=1 for any
 * version. */
void kvp_ggml_report(void);
