/* ops.h - the operations that the devices compute, one file per operation.
 *
 * *_supported answers the scheduler. It looks at shapes, types and strides only, and accepts only
 * nodes that will be computed. If llama.cpp aborts after a refusal, *_supported prints the reason
 * first. An attention node shows head_dim, so kvp_attention_supported also binds the tensors that
 * it sees.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <kvant/kvant.h>

#include "abi.h"
#include "host_threads.h"
#include "kv_tensor.h"

/* The state of one back end instance (one llama context) while it computes. */
typedef struct kvp_compute {
    uint32_t n_threads;
    const abi_tensor *next; /* the node that the graph computes after the current node, or NULL */
    const abi_tensor *keys; /* a SET_ROWS node of keys that waits for the values' node, or NULL */
    kvp_held_row held;      /* waits for the attention node, which is `next` */
    bool fp32;              /* attention without integer products */
    void *workspace;        /* as large as the largest node needed; aligned to 64 */
    size_t workspace_bytes;
    uint16_t *masks; /* masks in the order of a placement's blocks, and a block table */
    int32_t *table;
    size_t n_masks, n_table;
    abi_backend *cpu; /* the process's CPU back end, created by the first context shift */
    kvp_host_threads host_threads;
    struct kvp_layers *layers; /* the layers of the context, or NULL */
    /* reads a graph's positions from another device; NULL without memory, or where there is none */
    const int32_t *(*read_positions)(void *reader, const abi_tensor *positions);
    void *reader;
} kvp_compute;

/* A workspace of at least `bytes` bytes, or NULL. Earlier contents are lost (device.c). */
void *kvp_compute_workspace(kvp_compute *compute, size_t bytes);

/* dst[index[i]] = rows[i] for whole rows of a cache tensor. */
bool kvp_set_rows_supported(const abi_tensor *node);
int32_t kvp_set_rows(kvp_compute *compute, abi_tensor *node);

/* softmax(scale q k^T + mask) v on compressed cells. */
bool kvp_attention_supported(const abi_tensor *node);
int32_t kvp_attention(kvp_compute *compute, abi_tensor *node);

/* Notes the queries of a node, which the keys that are stored next learn from. positions: of the
 * node's tokens, or NULL. */
struct kvp_kv;
kvant_status kvp_attention_note_queries(const kvp_compute *compute, const abi_tensor *node,
                                        struct kvp_kv *k, const int32_t *positions);

/* The same on rows of ggml's own formats in host memory. */
bool kvp_block_attention_supported(const abi_tensor *node);
int32_t kvp_block_attention(kvp_compute *compute, abi_tensor *node);

/* RoPE in place on cached keys: the context shift. */
bool kvp_rope_supported(const abi_tensor *node);
int32_t kvp_rope(kvp_compute *compute, abi_tensor *node);

/* Reduces a shift to the first `room` cells. */
void kvp_clip_shift(abi_tensor *node, int64_t room);

/* Whether a node is a view, which computes nothing. A view of a cache may show head_dim, and then
 * it binds the tensor. */
bool kvp_is_cache_view(const abi_tensor *node);

/* Whether a device has to accept a node of another kind, which it does not compute
 * (ops_other.c). */
bool kvp_is_unserved(const abi_tensor *node);

/* Whether a node writes to a cache of a refused context. Its shape may be one that is not
 * served. */
bool kvp_is_refused(const abi_tensor *node);

/* Whether the values of an attention node are a part of the keys (MLA), in a cache that llama.cpp
 * only plans. When the real cache is created, it gets plain memory. */
bool kvp_plans_keys_only(const abi_tensor *node);

/* Notes a node that writes to a cache of llama.cpp's own. */
void kvp_note_other_cache(const abi_tensor *node);
