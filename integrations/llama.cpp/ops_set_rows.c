/* ops_set_rows.c - SET_ROWS on a cache tensor: new keys or values enter the cache.
 *
 * llama.cpp passes whole rows (all kv heads of a token) as f32, and the numbers of their cells,
 * counted over all streams. Without flash attention llama.cpp stores values transposed, one number
 * per row. A compressed cache cannot store these; the usual cause is a missing flag.
 *
 * A row that its codec refuses fails no graph: other clients have rows in the same batch. Its cell
 * becomes invalid (invalid.h).
 */
#include <string.h>

#include "buffer.h"
#include "ggml_api.h"
#include "log.h"
#include "ops.h"
#include "rope.h"
#include "trace.h"

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
        if (kvp_kv_of(node) != NULL)
            kvp_kv_refuse(kvp_kv_of(node),
                          "flash attention is off, so llama.cpp stores values transposed, which a "
                          "compressed cache does not support: set -fa on. If it is on, llama.cpp "
                          "turns it off for this model (Grok): leave out --device KVANT");
        return true; /* ggml aborts when nobody accepts it (ops_other.c) */
    }
    if (rows->type == ABI_TYPE_F32 &&
        (index->type == ABI_TYPE_I64 || index->type == ABI_TYPE_I32) &&
        node->ne[0] == root->ne[0] && node->nb[1] == root->nb[1] && rows->ne[0] == root->ne[0] &&
        rows->nb[0] == sizeof(float) && rows->nb[1] % sizeof(float) == 0 && rows->ne[2] == 1 &&
        rows->ne[3] == 1 && node->view_offs % root->nb[1] == 0)
        return true;
    return false;
}

/* The cell numbers of the node as 64-bit integers; NULL when there is no memory for them. */
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
        cells[i] =
            first + (index->type == ABI_TYPE_I64 ? *(const int64_t *)at : *(const int32_t *)at);
    }
    return cells;
}

static bool is_ready(const abi_tensor *node)
{
    kvp_kv *kv = kvp_kv_of(node);

    if (kv != NULL && kv->bind_failed)
        return false; /* the reason was printed when the attention node was seen */
    if (kv != NULL && kvp_kv_ready(kv))
        return true;
    kvp_error("%s: rows are written before attention shows their head_dim; set KVANT_HEAD_DIM to "
              "the head_dim of the model",
              kvp_root(node)->name);
    return false;
}

/* Whether two nodes write keys and values of the same tokens. */
static bool same_cells(const abi_tensor *a, const abi_tensor *b)
{
    const kvp_kv *k = kvp_kv_of(a), *v = kvp_kv_of(b);

    return k != NULL && v != NULL && k != v && k->placement == v->placement &&
           k->shape.n_cells == v->shape.n_cells && a->src[0]->ne[1] == b->src[0]->ne[1] &&
           a->src[1]->type == ABI_TYPE_I64 && b->src[1]->type == ABI_TYPE_I64 &&
           a->view_offs / kvp_root(a)->nb[1] == b->view_offs / kvp_root(b)->nb[1] &&
           a->src[1]->nb[0] == sizeof(int64_t) && b->src[1]->nb[0] == sizeof(int64_t) &&
           memcmp(a->src[1]->data, b->src[1]->data, (size_t)a->src[0]->ne[1] * sizeof(int64_t)) ==
               0;
}

static void trace_rows(kvp_compute *compute, const abi_tensor *node)
{
    const abi_tensor *rows = node->src[0];
    const kvp_kv *kv = kvp_kv_of(node);
    const int64_t *cells = cells_of(compute, node);

    if (cells != NULL)
        kvp_trace_rows(kv, cells, (size_t)rows->ne[1],
                       kvp_rope_read_positions(compute, rows, kv->head_dim));
}

/* Whether the next node attends to this token's keys and values. */
static bool attends_next(const kvp_compute *compute, const kvp_rows *rows, size_t n)
{
    const abi_tensor *next = compute->next;

    return next != NULL && next->op == kvp_api.op.flash_attn_ext && n == 2 && !kvp_trace_is_on &&
           next->src[0]->ne[1] == 1 && next->src[0]->ne[3] == 1 &&
           kvp_kv_of(next->src[1]) == rows[0].kv && kvp_kv_of(next->src[2]) == rows[1].kv;
}

/* When the next node writes the values of the same tokens, only notes the keys' node; the next call
 * stores both. Nothing is computed between the two nodes, so the rows of the keys still exist
 * then. */
int32_t kvp_set_rows(kvp_compute *compute, abi_tensor *node)
{
    const abi_tensor *nodes[2] = { compute->keys, node };
    const abi_tensor *next = compute->next;
    kvp_rows rows[2];
    const int64_t *cells;
    kvant_status status;
    size_t n = 0;

    if (!is_ready(node))
        return ABI_STATUS_FAILED;
    if (kvp_trace_is_on)
        trace_rows(compute, node);
    if (compute->keys == NULL && next != NULL && next->op == node->op && same_cells(node, next)) {
        compute->keys = node;
        return ABI_STATUS_SUCCESS;
    }
    compute->keys = NULL;
    for (size_t i = 0; i < 2; i++)
        if (nodes[i] != NULL)
            rows[n++] =
                (kvp_rows){ kvp_kv_of(nodes[i]), nodes[i]->src[0]->data,
                            nodes[i]->src[0]->nb[1] / sizeof(float),
                            kvp_rope_positions(compute, kvp_kv_of(nodes[i]), nodes[i]->src[0]) };
    cells = cells_of(compute, node);
    if (cells == NULL)
        return ABI_STATUS_ALLOC_FAILED;
    status = kvp_kv_enter(rows, n, cells, (size_t)node->src[0]->ne[1], compute->n_threads,
                          attends_next(compute, rows, n) ? &compute->held : NULL);
    if (status == KVANT_OK)
        return ABI_STATUS_SUCCESS;
    kvp_error("%s: cannot store new rows: %s", rows[0].kv->name, kvant_strerror(status));
    return ABI_STATUS_FAILED;
}
