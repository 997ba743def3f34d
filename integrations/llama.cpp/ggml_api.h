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

/* X(member, exported name, result, parameters). Functions from `init` on serve the context shift,
 * which borrows the process's own CPU back end (ops_rope.c), and loops on its threads
 * (host_threads.c). */
#define KVP_GGML_FUNCTIONS(X)                                                                      \
    X(buffer_init, ggml_backend_buffer_init, abi_buffer *,                                         \
      (abi_buft * buft, abi_buffer_iface iface, void *context, size_t size))                       \
    X(buft_is_host, ggml_backend_buft_is_host, bool, (abi_buft * buft))                            \
    X(cpu_buffer_type, ggml_backend_cpu_buffer_type, abi_buft *, (void))                           \
    X(graph_n_nodes, ggml_graph_n_nodes, int, (abi_graph * graph))                                 \
    X(graph_node, ggml_graph_node, abi_tensor *, (abi_graph * graph, int i))                       \
    X(nbytes, ggml_nbytes, size_t, (const abi_tensor *tensor))                                     \
    X(fp16_to_fp32_row, ggml_fp16_to_fp32_row, void, (const uint16_t *x, float *y, int64_t n))     \
    X(fp32_to_fp16_row, ggml_fp32_to_fp16_row, void, (const float *x, uint16_t *y, int64_t n))     \
    X(op_name, ggml_op_name, const char *, (int32_t op))                                           \
    X(tensor_overhead, ggml_tensor_overhead, size_t, (void))                                       \
    X(init, ggml_init, abi_context *, (abi_init_params params))                                    \
    X(free, ggml_free, void, (abi_context * context))                                              \
    X(new_tensor_1d, ggml_new_tensor_1d, abi_tensor *,                                             \
      (abi_context * context, int32_t type, int64_t ne0))                                          \
    X(new_tensor_3d, ggml_new_tensor_3d, abi_tensor *,                                             \
      (abi_context * context, int32_t type, int64_t ne0, int64_t ne1, int64_t ne2))                \
    X(view_3d, ggml_view_3d, abi_tensor *,                                                         \
      (abi_context * context, abi_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb1,   \
       size_t nb2, size_t offset))                                                                 \
    X(set_name, ggml_set_name, abi_tensor *, (abi_tensor * tensor, const char *name))              \
    X(set_rows, ggml_set_rows, abi_tensor *,                                                       \
      (abi_context * context, abi_tensor * a, abi_tensor * b, abi_tensor * c))                     \
    X(rope_ext_inplace, ggml_rope_ext_inplace, abi_tensor *,                                       \
      (abi_context * context, abi_tensor * a, abi_tensor * b, abi_tensor * c, int n_dims,          \
       int mode, int n_ctx_orig, float freq_base, float freq_scale, float ext_factor,              \
       float attn_factor, float beta_fast, float beta_slow))                                       \
    X(custom_4d, ggml_custom_4d, abi_tensor *,                                                     \
      (abi_context * context, int32_t type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3,    \
       abi_tensor * *args, int n_args, abi_custom_op op, int n_tasks, void *user))                 \
    X(new_graph, ggml_new_graph, abi_graph *, (abi_context * context))                             \
    X(graph_overhead, ggml_graph_overhead, size_t, (void))                                         \
    X(build_forward_expand, ggml_build_forward_expand, void,                                       \
      (abi_graph * graph, abi_tensor * tensor))                                                    \
    X(graph_compute, ggml_backend_graph_compute, int32_t,                                          \
      (abi_backend * backend, abi_graph * graph))                                                  \
    X(backend_free, ggml_backend_free, void, (abi_backend * backend))                              \
    X(buffer_free, ggml_backend_buffer_free, void, (abi_buffer * buffer))                          \
    X(buffer_size, ggml_backend_buffer_get_size, size_t, (abi_buffer * buffer))

/* These live in the registry library, and the last one in the base library; NULL when the process
 * does not export them. */
#define KVP_GGML_FURTHER(X)                                                                        \
    X(dev_by_type, ggml_backend_dev_by_type, abi_device *, (int32_t type))                         \
    X(dev_count, ggml_backend_dev_count, size_t, (void))                                           \
    X(dev_get, ggml_backend_dev_get, abi_device *, (size_t index))                                 \
    X(dev_init, ggml_backend_dev_init, abi_backend *, (abi_device * device, const char *params))   \
    X(dev_backend_reg, ggml_backend_dev_backend_reg, abi_reg *, (abi_device * device))             \
    X(reg_get_proc_address, ggml_backend_reg_get_proc_address, void *,                             \
      (abi_reg * reg, const char *name))                                                           \
    X(reg_by_name, ggml_backend_reg_by_name, abi_reg *, (const char *name))                        \
    X(backend_load, ggml_backend_load, abi_reg *, (const char *path))                              \
    X(graph_next_uid, ggml_graph_next_uid, uint64_t, (void))

typedef struct kvp_ggml {
    int api; /* the generation of the interface: 2 or 3 */
    const char *version;
    bool newer; /* ggml is newer than the versions that were tried */
    bool gpus;  /* a GPU's back end may ask for more room than a node's output needs */
    int n_rows; /* rows that ggml_tables.c compared */

#define KVP_GGML_MEMBER(member, name, result, parameters) result(*member) parameters;
    KVP_GGML_FUNCTIONS(KVP_GGML_MEMBER)
    KVP_GGML_FURTHER(KVP_GGML_MEMBER)
#undef KVP_GGML_MEMBER

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
