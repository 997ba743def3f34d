/* ops_block_attention.c - FLASH_ATTN_EXT with keys and values in ggml's own formats, in host
 * memory.
 *
 * Shapes are as in ops_attention.c. k and v are any strided view with whole rows (the channels of a
 * token and head). Declined nodes stay with the CPU back end: other types, head dimensions that are
 * no multiple of the format's block, and a mask per head. */
#include <kvant/block_attention.h>

#include <string.h>

#include "ggml_api.h"
#include "log.h"
#include "ops.h"

/* The library states formats with ggml's numbers; this is where they meet. */
static bool rows_supported(const abi_tensor *view)
{
    return view->ne[0] > 0 && view->ne[0] <= KVANT_BLOCK_MAX_HEAD_DIM &&
           kvant_block_row_bytes((kvant_block_type)view->type, (uint32_t)view->ne[0]) != 0 &&
           view->ne[1] <= UINT32_MAX;
}

static bool floats_in_rows(const abi_tensor *tensor)
{
    return tensor->type == ABI_TYPE_F32 && tensor->nb[0] == sizeof(float) && tensor->nb[1] % sizeof(float) == 0 &&
           tensor->nb[2] % sizeof(float) == 0 && tensor->ne[1] <= UINT32_MAX && tensor->ne[2] <= UINT32_MAX;
}

bool kvp_block_attention_supported(const abi_tensor *node)
{
    const abi_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *sinks = node->src[4];

    return q != NULL && k != NULL && v != NULL && floats_in_rows(q) && floats_in_rows(node) && rows_supported(k) &&
           rows_supported(v) && q->ne[0] == k->ne[0] && k->ne[1] == v->ne[1] && k->ne[2] == v->ne[2] &&
           k->ne[2] > 0 && q->ne[2] % k->ne[2] == 0 && q->ne[3] == k->ne[3] && q->ne[3] == v->ne[3] &&
           kvp_mask_fits(node->src[3], q, k) && (sinks == NULL || sinks->type == ABI_TYPE_F32);
}

/* Stream s of a view. */
static kvant_block_rows rows_of(const abi_tensor *view, int64_t s)
{
    size_t offset = (size_t)s * view->nb[3];

    return (kvant_block_rows){ .size = sizeof(kvant_block_rows),
                               .type = (kvant_block_type)view->type,
                               .head_dim = (uint32_t)view->ne[0],
                               .n_kv_heads = (uint32_t)view->ne[2],
                               .data = (const char *)view->data + offset,
                               .bytes = kvp_api.nbytes(view) - offset,
                               .token_stride = view->nb[1],
                               .head_stride = view->nb[2] };
}

static kvant_status attend(kvp_compute *compute, const abi_tensor *node, int64_t s)
{
    kvant_block_rows k = rows_of(node->src[1], s), v = rows_of(node->src[2], s);
    kvant_attention_problem problem = kvp_attention_problem(compute, node, (size_t)s);
    size_t bytes;
    kvant_status status = kvant_block_attention_workspace(&k, &v, &problem, &bytes);

    if (status != KVANT_OK)
        return status;
    if (kvp_compute_workspace(compute, bytes) == NULL)
        return KVANT_ERR_MEMORY;
    return kvant_block_attention(&k, &v, &problem, compute->workspace, compute->workspace_bytes);
}

int32_t kvp_block_attention(kvp_compute *compute, abi_tensor *node)
{
    for (int64_t s = 0; s < node->src[0]->ne[3]; s++) {
        kvant_status status = attend(compute, node, s);
        if (status != KVANT_OK) {
            kvp_error("%s: attention failed: %s", node->name,
                      status == KVANT_ERR_MEMORY ? kvant_strerror(status) : kvant_error_message());
            return status == KVANT_ERR_MEMORY ? ABI_STATUS_ALLOC_FAILED : ABI_STATUS_FAILED;
        }
    }
    return ABI_STATUS_SUCCESS;
}
