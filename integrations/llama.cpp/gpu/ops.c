/* ops.c - the operations on cache tensors as launches of libkvant_cuda.
 *
 * The same nodes and shapes are supported as in ../ops_*.c, for the cache in the computer's memory.
 * Kernels read cell numbers, masks and queries from ggml-cuda's buffers. */
#include "learner.h"

#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

#define MOST_HEADS_PER_KV_HEAD 64 /* limit of kvant_cuda_attention */

/* Which nodes are ours */

static bool is_here(const kvp_gpu *gpu, const abi_tensor *tensor)
{
    const abi_buft *buft = kvp_root(tensor)->buffer->buft;

    return buft == (const abi_buft *)&gpu->buft || buft == (const abi_buft *)&gpu->kv_buft;
}

/* With a softcap, attention needs <q, c>, which the scores of keys with a centre lack. So these
 * keys get no centre. Nothing is stored yet. */
static void leave_out_center(const abi_tensor *node, kvp_gpu_cells *k)
{
    float softcap;

    memcpy(&softcap, (const char *)node->op_params + 2 * sizeof(float), sizeof(softcap));
    if (softcap <= 0 || k->uncentred)
        return;
    if (k->learns || k->center != NULL)
        kvp_note("%s: scores have a softcap, so keys have no centre", kvp_root(node->src[1])->name);
    k->uncentred = true;
    k->center = NULL;
}

static bool attention_supported(const abi_tensor *node)
{
    kvp_gpu_cells *k = kvp_gpu_cells_of(node->src[1]), *v = kvp_gpu_cells_of(node->src[2]);
    const abi_tensor *q = node->src[0];
    const char *name = kvp_root(node->src[1])->name;
    char err[512] = "";

    if (k == NULL || v == NULL)
        return true; /* llama.cpp only estimates sizes */
    leave_out_center(node, k);
    if (k->head_dim != v->head_dim || q->ne[2] / node->src[1]->ne[2] > MOST_HEADS_PER_KV_HEAD)
        kvp_error("%s: keys and values differ in head_dim, or there are more than 64 query heads "
                  "per kv head; set KVANT_GPU=0",
                  name);
    else if (kvant_cuda_attention_check(k->codec, v->codec, err, sizeof(err)) != KVANT_OK)
        kvp_error("%s: %s", name, err);
    else {
        kvp_gpu_load_kernels(k, v, (uint32_t)q->ne[2]);
        return true;
    }
    return false;
}

bool kvp_gpu_supports(kvp_gpu *gpu, const abi_tensor *node)
{
    if (kvp_is_kv(node) && !is_here(gpu, node))
        return false;
    for (int i = 0; i < ABI_MAX_SRC; i++)
        if (node->src[i] != NULL && kvp_is_kv(node->src[i]) && !is_here(gpu, node->src[i]))
            return false; /* another GPU's cache */
    if (kvp_plans_keys_only(node))
        return gpu->inner->iface.supports_op(gpu->inner, node);
    if (node->op == kvp_api.op.set_rows)
        return kvp_set_rows_supported(node);
    if (node->op == kvp_api.op.flash_attn_ext)
        return kvp_attention_supported(node) && attention_supported(node);
    if (node->op == kvp_api.op.rope)
        return kvp_rope_supported(node);
    return kvp_is_cache_view(node) || kvp_is_unserved(node);
}

/* SET_ROWS */

bool kvp_gpu_capturable(const abi_tensor *node)
{
    return node->op != kvp_api.op.rope;
}

static kvant_cuda_rows rows_of(const abi_tensor *node, kvp_gpu_run run)
{
    const abi_tensor *rows = node->src[0];

    return kvp_gpu_rows(kvp_gpu_cells_of(node), rows->data, rows->nb[1] / sizeof(float), run);
}

/* Makes room for keys minus their blocks' centres, if the append needs it. */
static bool have_centered(kvp_gpu_backend *b, const abi_tensor *node)
{
    const kvp_gpu_cells *cells = kvp_gpu_cells_of(node);
    const size_t n = (size_t)node->src[0]->ne[1];

    return !cells->has_block_centers ||
           kvp_gpu_grow(b->gpu, &b->centered, n * kvp_gpu_width(cells) * sizeof(float), false);
}

/* Subtracts their blocks' centres from keys that are being stored. */
static void center(const kvp_gpu_backend *b, const kvp_gpu_cells *keys,
                   kvant_cuda_kernel_append_args *args)
{
    args->k_block_centers = kvp_gpu_block_centers_of(keys, 0);
    args->center_slots = args->mark_ids;
    args->centered = b->centered.at;
}

static bool accepts_cells(const abi_tensor *node)
{
    const kvp_kv *kv = kvp_kv_of(node);

    if (kv == NULL || kv->bind_failed)
        return false;
    if (!kvp_kv_ready(kvp_kv_of(node))) {
        kvp_error("%s: rows are written before attention shows their head_dim; set KVANT_HEAD_DIM "
                  "to the head_dim of the model",
                  kv->name);
        return false;
    }
    if (node->view_offs == 0 && node->src[1]->type == ABI_TYPE_I64 &&
        node->src[1]->nb[0] == sizeof(int64_t))
        return true;
    kvp_error("%s: the ids of the cells are not 64-bit integers that count from the beginning "
              "of the cache; set KVANT_GPU=0, and report the model",
              kv->name);
    return false;
}

bool kvp_gpu_pairs(const abi_tensor *a, const abi_tensor *b)
{
    const kvp_kv *k = kvp_kv_of(a), *v = kvp_kv_of(b);

    return b->op == kvp_api.op.set_rows && k != NULL && v != NULL &&
           k->shape.role == KVANT_ROLE_K && v->shape.role == KVANT_ROLE_V &&
           k->shape.layer == v->shape.layer && k->shape.n_cells == v->shape.n_cells &&
           k->shape.row == v->shape.row && k->head_dim == v->head_dim &&
           a->src[0]->ne[1] == b->src[0]->ne[1] && strstr(a->src[1]->name, "inp_k_idxs") != NULL &&
           strstr(b->src[1]->name, "inp_v_idxs") != NULL;
}

/* Centre and scale, or a matrix, from a batch of many tokens. Keys that are sealed without a matrix
 * have no other centre later. */
static bool learn_first(kvp_gpu_backend *b, const abi_tensor *node, const abi_tensor *values)
{
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node);
    const abi_tensor *rows = node->src[0];
    const bool seals = !cells->cache->keeps || !cells->cache->all_pending;

    if (kvp_gpu_lacks_key_transform(cells))
        kvp_gpu_learner_set_rope(kvp_kv_of(node), rows);
    if (kvp_gpu_lacks_key_transform(cells) && seals &&
        !kvp_gpu_first_matrix_in_graph(b, node, values))
        return false;
    if (seals ? !kvp_gpu_is_learning(cells) : !kvp_gpu_learns_alone(cells))
        return true;
    if (rows->ne[1] >= KVANT_LEARN_ROWS)
        return kvp_gpu_learn(kvp_kv_of(node), rows->data, rows->nb[1] / sizeof(float),
                             (size_t)rows->ne[1], b->gpu->stream);
    cells->learned = cells->learned || !kvp_gpu_learns_alone(cells);
    return true;
}

/* The rows of nodes go to sealed pages, to exact pages (open), or to staging pages. */
typedef struct destination {
    const int64_t *slots;
    bool open;
    const kvant_cuda_pages *staging; /* NULL: none */
} destination;

static kvant_status append_run(kvp_gpu_backend *b, abi_tensor *const *nodes, int n, destination to,
                               kvp_gpu_run run, const kvant_cuda_kernel_query_args *queries)
{
    const kvp_gpu_cells *first = kvp_gpu_cells_of(nodes[0]);
    kvant_cuda_kernel_append_args args = { .size = sizeof(args),
                                           .type = KVANT_CUDA_F32,
                                           .n_tokens = (uint32_t)run.n,
                                           .n_kv_heads = first->n_kv_heads,
                                           .slots = to.slots + run.first,
                                           .refused = kvp_gpu_word(b->refused),
                                           .slots_ready = 1,
                                           /* no call reads sealed pages early (kept_exact) */
                                           .next_early = to.open && !first->cache->all_pending,
                                           .marks = first->cache->marks.memory.at,
                                           .mark_ids = (const int64_t *)nodes[0]->src[1]->data +
                                                       run.first };

    for (int i = 0; i < n; i++) {
        const kvp_gpu_cells *cells = kvp_gpu_cells_of(nodes[i]);
        kvant_cuda_rows rows = rows_of(nodes[i], run);
        if (to.open || to.staging != NULL) {
            rows.codec = cells->open_codec;
            rows.pages = to.open ? cells->open_pages : *to.staging;
        }
        *(kvp_kv_of(nodes[i])->shape.role == KVANT_ROLE_K ? &args.k : &args.v) = rows;
        if (kvp_kv_of(nodes[i])->shape.role == KVANT_ROLE_K)
            kvp_gpu_use_matrices(cells, run, &args);
        if (cells->has_block_centers)
            center(b, cells, &args);
    }
    if (queries != NULL)
        args.queries = *queries;
    return kvant_cuda_kernel_append(&args, b->gpu->stream);
}

/* open: appends to exact pages. queries: the queries of the same tokens, or NULL; they need one run
 * for all tokens. */
static kvant_status append(kvp_gpu_backend *b, abi_tensor *const *nodes, int n, bool open,
                           const kvant_cuda_kernel_query_args *queries)
{
    const kvp_gpu_cells *first = kvp_gpu_cells_of(nodes[0]);
    const destination to = { open ? kvp_gpu_open_slots(first->cache) : nodes[0]->src[1]->data, open,
                             NULL };
    const kvp_gpu_buckets *buckets = &first->cache->buckets;
    const kvp_gpu_run whole = { 0, (size_t)nodes[0]->src[0]->ne[1], 0 };
    const size_t n_runs = kvp_gpu_runs(first);
    kvant_status status = KVANT_OK;

    for (size_t i = 0; i < n_runs && status == KVANT_OK; i++)
        status =
            append_run(b, nodes, n, to, kvp_gpu_has_transforms(first) ? buckets->runs[i] : whole,
                       n_runs == 1 ? queries : NULL);
    return status;
}

/* A node's rows that go to staging pages. */
typedef struct staged_node {
    kvp_gpu_backend *b;
    abi_tensor *node;
    size_t n_rows;
} staged_node;

static kvant_status append_staged(void *context, const int64_t *slots,
                                  const kvant_cuda_pages *pages)
{
    const staged_node *of = context;
    const destination to = { slots, false, pages };

    return append_run(of->b, &of->node, 1, to, (kvp_gpu_run){ 0, of->n_rows, 0 }, NULL);
}

/* Seals the rows of a node whose codec has groups of several tokens, except rows with exact
 * pages. */
static kvant_status stage(kvp_gpu_backend *b, abi_tensor *node)
{
    const kvp_kv *kv = kvp_kv_of(node);
    const kvp_gpu_cells *cells = kv->cells;
    const kvp_gpu_staging *s = &cells->cache->step_staging;

    return kvp_gpu_staged(kv, s, append_staged, &(staged_node){ b, node, s->n_rows });
}

/* Encodes all rows of the nodes at once, as far as their codecs can. */
static kvant_status seal(kvp_gpu_backend *b, abi_tensor *const *nodes, int n,
                         const kvant_cuda_kernel_query_args *queries)
{
    abi_tensor *single[2];
    int n_single = 0;
    kvant_status status = KVANT_OK;

    for (int i = 0; i < n && status == KVANT_OK; i++) {
        const kvp_gpu_cells *cells = kvp_gpu_cells_of(nodes[i]);
        if (cells->group > 1)
            status = stage(b, nodes[i]);
        else
            single[n_single++] = nodes[i];
    }
    return status == KVANT_OK && n_single > 0 ? append(b, single, n_single, false, queries)
                                              : status;
}

/* values: the node with the values of the same tokens, or NULL; llama.cpp writes both to the same
 * cells. attending: the following attention node of the same layer, or NULL. */
static int32_t set_rows(kvp_gpu_backend *b, abi_tensor *node, abi_tensor *values,
                        abi_tensor *attending)
{
    abi_tensor *nodes[2] = { node, values };
    const int n = values != NULL ? 2 : 1;
    const kvp_gpu_cache *cache;
    kvant_cuda_kernel_query_args queries = { 0 };
    kvant_status status = KVANT_OK;
    bool open;
    bool seals;

    for (int i = 0; i < n; i++)
        if (!accepts_cells(nodes[i]) || !kvp_gpu_first_seal(kvp_kv_of(nodes[i])) ||
            !learn_first(b, nodes[i], values))
            return ABI_STATUS_FAILED;
    if (!have_centered(b, node) ||
        (attending != NULL && !kvp_gpu_queries_of_pair(b, attending, &queries)))
        return ABI_STATUS_ALLOC_FAILED;
    cache = kvp_gpu_cells_of(node)->cache;
    open = cache->keeps && cache->any_open;
    seals = !cache->keeps || !cache->all_pending;
    if (seals)
        status = seal(b, nodes, n, open ? NULL : &queries);
    if (open && status == KVANT_OK)
        status = append(b, nodes, n, true, &queries);
    b->kept_exact = open && !seals && values != NULL ? kvp_gpu_cells_of(node) : NULL;
    if (status != KVANT_OK)
        kvp_error("%s: cannot store new rows: %s", kvp_root(node)->name, kvant_strerror(status));
    else if (attending != NULL)
        return kvp_gpu_attention(b, attending,
                                 /* sealing changes older rows of a block, too */
                                 seals && cache->has_groups ? NULL : node->src[1]->data,
                                 queries.q != NULL);
    return status == KVANT_OK ? ABI_STATUS_SUCCESS : ABI_STATUS_FAILED;
}

/* Whether attention sees the rows of a pair, one per stream. All other rows are older than the
 * graph. */
bool kvp_gpu_attends(const abi_tensor *keys, const abi_tensor *values, const abi_tensor *attending)
{
    return attending->op == kvp_api.op.flash_attn_ext &&
           kvp_root(attending->src[1]) == kvp_root(keys) &&
           kvp_root(attending->src[2]) == kvp_root(values) && attending->src[0]->ne[1] == 1 &&
           attending->src[0]->ne[3] == keys->src[0]->ne[1];
}

kvp_gpu_cache *kvp_gpu_prepared(const abi_tensor *node)
{
    const kvp_gpu_cells *cells = node->op == kvp_api.op.set_rows ? kvp_gpu_cells_of(node) : NULL;

    return cells != NULL && strstr(node->src[1]->name, "k_idxs") != NULL ? cells->cache : NULL;
}

/* ROPE: the context shift (shift.c), or else by the CPU on decoded rows (../ops_rope.c) */

static int32_t rope(kvp_gpu_backend *b, abi_tensor *node)
{
    abi_tensor positions = { 0 }, factors = { 0 }, copy = *node;
    int32_t status;

    if (kvp_gpu_shift(b, node, &status))
        return status;
    status = ABI_STATUS_ALLOC_FAILED;
    copy.src[1] = &positions;
    if (node->src[2] != NULL)
        copy.src[2] = &factors;
    if (kvp_gpu_fetch(b, KVP_FETCHED_KEYS, node->src[1], &positions) &&
        (node->src[2] == NULL || kvp_gpu_fetch(b, KVP_FETCHED_VALUES, node->src[2], &factors)))
        status = kvp_rope(&b->compute, &copy);
    return status;
}

int32_t kvp_gpu_compute(kvp_gpu_backend *b, abi_tensor *node, abi_tensor *values,
                        abi_tensor *attending)
{
    if (kvp_cache_tensor_of(node) == NULL)
        return kvp_gpu_accelerate(b, node);
    if (kvp_is_refused(node))
        return ABI_STATUS_FAILED;
    if (node->op == kvp_api.op.set_rows)
        return set_rows(b, node, values, attending);
    if (node->op == kvp_api.op.flash_attn_ext)
        return kvp_gpu_attention(b, node, NULL, false);
    if (node->op == kvp_api.op.rope)
        return rope(b, node);
    kvp_error("%s: operation %s on a compressed cache is not supported; leave out --device KVANT, "
              "and report the model",
              node->name, kvp_api.op_name(node->op));
    return ABI_STATUS_FAILED;
}
