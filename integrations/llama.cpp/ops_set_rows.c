/* ops_set_rows.c - SET_ROWS on a cache tensor: new keys or values enter the cache.
 *
 * llama.cpp passes whole rows (all kv heads of a token) as f32, and the numbers of their cells,
 * counted over all streams. Without flash attention llama.cpp stores values transposed, one number
 * per row. A compressed cache cannot store these; the usual cause is a missing flag.
 */
#include "buffer.h"
#include "ggml_api.h"
#include "log.h"
#include "ops.h"

static bool transposed(const abi_tensor *node, const abi_tensor *root)
{
    return node->ne[0] == 1 && root->ne[0] != 1;
}

bool kvp_set_rows_supported(const abi_tensor *node)
{
    const abi_tensor *root = kvp_root(node), *rows = node->src[0], *index = node->src[1];

    if (!kvp_is_kv(node))
        return false;
    if (transposed(node, root)) {
        kvp_error("flash attention is off, so llama.cpp wants to store values transposed, which a compressed cache "
                  "cannot do: set -fa on (and -ctk f16 -ctv f16)");
        return false;
    }
    if (rows->type == ABI_TYPE_F32 && (index->type == ABI_TYPE_I64 || index->type == ABI_TYPE_I32) &&
        node->ne[0] == root->ne[0] && node->nb[1] == root->nb[1] && rows->ne[0] == root->ne[0] &&
        rows->nb[0] == sizeof(float) && rows->nb[1] % sizeof(float) == 0 && rows->ne[2] == 1 && rows->ne[3] == 1 &&
        node->view_offs % root->nb[1] == 0)
        return true;
    kvp_error("%s: this kind of write (SET_ROWS) is not supported", root->name);
    return false;
}

/* Cell numbers of the cache tensor as 64-bit integers; NULL when there is no memory for them. */
static const int64_t *cells_of(kvp_compute *compute, const abi_tensor *node)
{
    const abi_tensor *index = node->src[1];
    int64_t n = node->src[0]->ne[1], first = (int64_t)(node->view_offs / kvp_root(node)->nb[1]);
    int64_t *cells;

    if (index->type == ABI_TYPE_I64 && first == 0 && index->nb[0] == sizeof(int64_t))
        return index->data;
    cells = kvp_compute_workspace(compute, (size_t)n * sizeof(int64_t));
    for (int64_t i = 0; cells != NULL && i < n; i++) {
        const char *at = (const char *)index->data + (size_t)i * index->nb[0];
        cells[i] = first + (index->type == ABI_TYPE_I64 ? *(const int64_t *)at : *(const int32_t *)at);
    }
    return cells;
}

int32_t kvp_set_rows(kvp_compute *compute, abi_tensor *node)
{
    const abi_tensor *rows = node->src[0];
    kvp_kv *kv = kvp_kv_of(node);
    const int64_t *cells;
    kvant_status status;

    if (kv != NULL && kv->bind_failed)
        return ABI_STATUS_FAILED; /* said when the attention node was seen */
    if (kv == NULL || !kvp_kv_ready(kv)) {
        kvp_error("%s: written before any attention told its head_dim; set KVANT_HEAD_DIM to the model's",
                  kvp_root(node)->name);
        return ABI_STATUS_FAILED;
    }
    cells = cells_of(compute, node);
    if (cells == NULL)
        return ABI_STATUS_ALLOC_FAILED;
    status = kvp_kv_enter(kv, cells, (size_t)rows->ne[1], rows->data, rows->nb[1] / sizeof(float), compute->n_threads);
    if (status == KVANT_OK)
        return ABI_STATUS_SUCCESS;
    kvp_error("%s: cannot store new rows: %s", kv->name, kvant_strerror(status));
    return ABI_STATUS_FAILED;
}
