/* ops.h - the operations that the devices compute, one file per operation.
 *
 * *_supported answers the scheduler. It looks at shapes, types and strides only, and accepts only
 * nodes that will be computed. Where llama.cpp aborts after a refusal, *_supported prints the
 * reason first. Attention nodes tell head_dim, so kvp_attention_supported also binds the tensors
 * that it sees.
 */
#ifndef KVP_OPS_H
#define KVP_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "abi.h"
#include "host_threads.h"

/* What one back end instance (one llama context) owns while it computes. */
typedef struct kvp_compute {
    uint32_t n_threads;
    const abi_tensor *next; /* that the graph computes after the node at hand, or NULL */
    const abi_tensor *keys; /* a SET_ROWS node that waits for the next one, or NULL */
    bool fp32;              /* attention without integer products */
    void *workspace;        /* grows to what the largest node asked for; aligned to 64 */
    size_t workspace_bytes;
    uint16_t *masks; /* in the order of a placement's blocks, and a block table */
    int32_t *table;
    size_t n_masks, n_table;
    abi_backend *cpu; /* the process's CPU back end, created by the first context shift */
    kvp_host_threads host_threads;
    struct kvp_layers *layers; /* the context's, or NULL */
} kvp_compute;

/* At least bytes of workspace, or NULL. Earlier contents are lost (device.c). */
void *kvp_compute_workspace(kvp_compute *compute, size_t bytes);

/* dst[index[i]] = rows[i] for whole rows of a cache tensor. */
bool kvp_set_rows_supported(const abi_tensor *node);
int32_t kvp_set_rows(kvp_compute *compute, abi_tensor *node);

/* softmax(scale q k^T + mask) v on compressed cells. */
bool kvp_attention_supported(const abi_tensor *node);
int32_t kvp_attention(kvp_compute *compute, abi_tensor *node);

/* The same on rows of ggml's own formats in host memory. */
bool kvp_block_attention_supported(const abi_tensor *node);
int32_t kvp_block_attention(kvp_compute *compute, abi_tensor *node);

/* RoPE in place on cached keys: the context shift. */
bool kvp_rope_supported(const abi_tensor *node);
int32_t kvp_rope(kvp_compute *compute, abi_tensor *node);

/* Whether a node computes nothing. A view of a cache may tell head_dim, which binds the tensor. */
bool kvp_is_cache_view(const abi_tensor *node);

/* Whether a device has to accept any other node, which it does not compute (ops_other.c). */
bool kvp_is_unserved(const abi_tensor *node);

/* Whether a node writes to a cache of a refused context: it may have a shape that is not served. */
bool kvp_is_refused(const abi_tensor *node);

/* Whether the values of an attention node are a part of the keys (MLA), in a cache that is only
 * planned. The real one is never ours. */
bool kvp_plans_keys_alone(const abi_tensor *node);

/* Notes a node that writes to a cache of llama.cpp's own. */
void kvp_note_other_cache(const abi_tensor *node);

#endif /* KVP_OPS_H */
