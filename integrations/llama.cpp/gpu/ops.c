/* ops.c - the operations on cache tensors as launches of libkvant_cuda.
 *
 * Which nodes these are, and their shapes, is said by ../ops_*.c, as for the cache in the computer's memory. What is
 * enqueued reads cell numbers, masks and queries where ggml-cuda left them. */
#include "gpu.h"

#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

#define MOST_HEADS_PER_KV_HEAD 64 /* of kvant_cuda_attention */
#define MOST_QUERIES 65535        /* of kvant_cuda_transform_queries */

/* Which nodes are ours */

bool kvp_gpu_touches(const abi_tensor *node)
{
    bool touches = kvp_is_kv(node);

    for (int i = 0; i < ABI_MAX_SRC && !touches; i++)
        touches = node->src[i] != NULL && kvp_is_kv(node->src[i]);
    return touches;
}

static bool is_here(const kvp_gpu *gpu, const abi_tensor *tensor)
{
    const abi_buft *buft = kvp_root(tensor)->buffer->buft;

    return buft == (const abi_buft *)&gpu->buft || buft == (const abi_buft *)&gpu->kv_buft;
}

/* A softcap sees <q, c>, which keys with a centre lack in their scores: they do without it. Nothing is stored yet. */
static void leave_out_center(const abi_tensor *node, kvp_gpu_cells *k)
{
    float softcap;

    memcpy(&softcap, (const char *)node->op_params + 2 * sizeof(float), sizeof(softcap));
    if (softcap <= 0 || k->uncentred)
        return;
    if (k->learns || k->center != NULL)
        kvp_note("%s: a softcap: keys have no centre", kvp_root(node->src[1])->name);
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
        return true; /* llama.cpp estimates sizes */
    leave_out_center(node, k);
    kvp_gpu_weigh_plan(k, q);
    if (k->head_dim != v->head_dim || q->ne[2] / node->src[1]->ne[2] > MOST_HEADS_PER_KV_HEAD)
        kvp_error("%s: keys and values of different head_dim, or more than 64 query heads per kv head", name);
    else if (kvant_cuda_attention_check(k->codec, v->codec, err, sizeof(err)) != KVANT_OK)
        kvp_error("%s: %s", name, err);
    else
        return true;
    return false;
}

bool kvp_gpu_supports(kvp_gpu *gpu, const abi_tensor *node)
{
    if (kvp_is_kv(node) && !is_here(gpu, node))
        return false;
    for (int i = 0; i < ABI_MAX_SRC; i++)
        if (node->src[i] != NULL && kvp_is_kv(node->src[i]) && !is_here(gpu, node->src[i]))
            return false; /* another GPU's cache */
    if (node->op == kvp_api.op.flash_attn_ext && kvp_root(node->src[1]) == kvp_root(node->src[2]))
        return gpu->inner->iface.supports_op(gpu->inner, node); /* keys alone, which are only planned yet */
    if (node->op == kvp_api.op.set_rows)
        return kvp_set_rows_supported(node);
    if (node->op == kvp_api.op.flash_attn_ext)
        return kvp_attention_supported(node) && attention_supported(node);
    if (node->op == kvp_api.op.rope)
        return kvp_rope_supported(node);
    return kvp_is_view(node);
}

/* SET_ROWS */

bool kvp_gpu_capturable(const abi_tensor *node)
{
    return node->op != kvp_api.op.rope;
}

static kvant_cuda_rows rows_of(const abi_tensor *node)
{
    return kvp_gpu_rows(kvp_gpu_cells_of(node), node->src[0]->data, node->src[0]->nb[1] / sizeof(float));
}

static bool takes_cells(const abi_tensor *node)
{
    const kvp_kv *kv = kvp_kv_of(node);

    if (kv == NULL || kv->bind_failed)
        return false;
    if (!kvp_kv_ready(kvp_kv_of(node))) {
        kvp_error("%s: written before any attention told its head_dim; set KVANT_HEAD_DIM to the model's", kv->name);
        return false;
    }
    if (node->view_offs == 0 && node->src[1]->type == ABI_TYPE_I64 && node->src[1]->nb[0] == sizeof(int64_t))
        return true;
    kvp_error("%s: cell numbers are not 64-bit numbers of the whole cache", kv->name);
    return false;
}

bool kvp_gpu_pairs(const abi_tensor *a, const abi_tensor *b)
{
    const kvp_kv *k = kvp_kv_of(a), *v = kvp_kv_of(b);

    return b->op == kvp_api.op.set_rows && k != NULL && v != NULL && k->shape.role == KVANT_ROLE_K &&
           v->shape.role == KVANT_ROLE_V && k->shape.layer == v->shape.layer && k->shape.n_cells == v->shape.n_cells &&
           k->shape.row == v->shape.row && k->head_dim == v->head_dim && a->src[0]->ne[1] == b->src[0]->ne[1] &&
           strstr(a->src[1]->name, "inp_k_idxs") != NULL && strstr(b->src[1]->name, "inp_v_idxs") != NULL;
}

/* Centre and scale, or a matrix, from a batch of many tokens. */
static bool learn_first(kvp_gpu_backend *b, const abi_tensor *node, const abi_tensor *values, bool decodes)
{
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node);
    const abi_tensor *rows = node->src[0];

    if (kvp_gpu_weigh_wants(b, node, values, decodes))
        return kvp_gpu_weigh_keys(node); /* their queries come with attention */
    if (cells->waits && rows->ne[1] > KVP_FEW_TOKENS)
        return kvp_gpu_wait_keep(cells, rows);
    return !kvp_gpu_is_learning(cells) || rows->ne[1] < KVP_LEARN_ROWS ||
           kvp_gpu_learn(kvp_kv_of(node), rows->data, rows->nb[1] / sizeof(float), (size_t)rows->ne[1], b->gpu->stream);
}

/* open: to open pages. queries: NULL, or those of the same tokens. */
static kvant_status append(kvp_gpu_backend *b, abi_tensor *const *nodes, int n, bool open, const kvant_cuda_query_args *queries)
{
    const kvp_gpu_cells *first = kvp_gpu_cells_of(nodes[0]);
    kvant_cuda_append_args args = { .size = sizeof(args),
                                    .type = KVANT_CUDA_F32,
                                    .n_tokens = (uint32_t)nodes[0]->src[0]->ne[1],
                                    .n_kv_heads = first->n_kv_heads,
                                    .slots = open ? kvp_gpu_open_slots(first->cache) : nodes[0]->src[1]->data,
                                    .refused = (uint32_t *)b->refused,
                                    .slots_ready = 1 };

    for (int i = 0; i < n; i++) {
        const kvp_gpu_cells *cells = kvp_gpu_cells_of(nodes[i]);
        kvant_cuda_rows rows = rows_of(nodes[i]);
        if (open) {
            rows.codec = cells->open_codec;
            rows.pages = cells->open_pages;
        }
        *(kvp_kv_of(nodes[i])->shape.role == KVANT_ROLE_K ? &args.k : &args.v) = rows;
    }
    if (queries != NULL)
        args.queries = *queries;
    return kvant_cuda_append(&args, b->gpu->stream);
}

static bool queries_of_pair(kvp_gpu_backend *b, const abi_tensor *node, kvant_cuda_query_args *queries);
static int32_t attention(kvp_gpu_backend *b, abi_tensor *node, const int64_t *new_cells, bool transformed);

/* values: NULL, or the values of the same tokens, whose cells llama.cpp gives the same numbers. attending: NULL, or
 * attention of the same layer, which comes next. */
static int32_t set_rows(kvp_gpu_backend *b, abi_tensor *node, abi_tensor *values, abi_tensor *attending)
{
    abi_tensor *nodes[2] = { node, values };
    const int n = values != NULL ? 2 : 1;
    const kvp_gpu_cache *cache;
    kvant_cuda_query_args queries = { 0 };
    kvant_status status = KVANT_OK;
    bool open;
    int sealed; /* the first of them that is sealed now */

    for (int i = 0; i < n; i++)
        if (!takes_cells(nodes[i]) || !kvp_gpu_weigh_join(kvp_kv_of(nodes[i])) || !learn_first(b, nodes[i], values, attending != NULL))
            return ABI_STATUS_FAILED;
    if (attending != NULL && !queries_of_pair(b, attending, &queries))
        return ABI_STATUS_ALLOC_FAILED;
    cache = kvp_gpu_cells_of(node)->cache;
    open = cache->keeps && cache->any_open;
    sealed = cache->keeps && cache->waits ? n : kvp_gpu_cells_of(node)->waits ? 1 : 0;
    if (sealed < n)
        status = append(b, nodes + sealed, n - sealed, false, open ? NULL : &queries);
    if (open && status == KVANT_OK)
        status = append(b, nodes, n, true, &queries);
    if (status != KVANT_OK)
        kvp_error("%s: cannot store new rows: %s", kvp_root(node)->name, kvant_strerror(status));
    else if (attending != NULL)
        return attention(b, attending, node->src[1]->data, queries.q != NULL);
    return status == KVANT_OK ? ABI_STATUS_SUCCESS : ABI_STATUS_FAILED;
}

/* Whether attention sees the rows of a pair, one per stream: all other rows are older than the graph. */
bool kvp_gpu_attends(const abi_tensor *keys, const abi_tensor *values, const abi_tensor *attending)
{
    return attending->op == kvp_api.op.flash_attn_ext && kvp_root(attending->src[1]) == kvp_root(keys) &&
           kvp_root(attending->src[2]) == kvp_root(values) && attending->src[0]->ne[1] == 1 &&
           attending->src[0]->ne[3] == keys->src[0]->ne[1];
}

/* The cache that must know of a SET_ROWS node's cells before the graph; NULL: none. */
kvp_gpu_cache *kvp_gpu_prepared(const abi_tensor *node)
{
    const kvp_gpu_cells *cells = node->op == kvp_api.op.set_rows ? kvp_gpu_cells_of(node) : NULL;

    return cells != NULL && (cells->cache->keeps || cells->cache->learns) && strstr(node->src[1]->name, "k_idxs") != NULL ? cells->cache : NULL;
}

/* FLASH_ATTN_EXT */

/* A part of a node: all of its streams, or one where their masks or queries do not stand one behind the other. */
typedef struct part {
    size_t first, n;
} part;

static const void *stream_of(const abi_tensor *tensor, size_t stream)
{
    return tensor != NULL ? (const char *)tensor->data + (tensor->ne[3] > 1 ? stream * tensor->nb[3] : 0) : NULL;
}

/* Rows of two streams stand as far apart as those of one. */
static bool in_a_row(const abi_tensor *rows, int64_t n_streams)
{
    return rows == NULL || n_streams == 1 ||
           (rows->ne[3] == n_streams && rows->nb[3] == (size_t)rows->ne[1] * rows->nb[1]);
}

static kvant_cuda_attention_args arguments_of(const kvp_gpu_backend *b, const abi_tensor *node, part streams,
                                              const int64_t *new_cells)
{
    const abi_tensor *q = node->src[0], *view = node->src[1], *mask = node->src[3], *sinks = node->src[4];
    const kvp_gpu_cells *k = kvp_gpu_cells_of(view), *v = kvp_gpu_cells_of(node->src[2]);
    const kvp_kv *kv = kvp_kv_of(view);
    const size_t first_stream = view->view_offs / kvp_root(view)->nb[2] + streams.first;
    const uint32_t n_blocks = kvp_kv_blocks(&kv->shape) / kv->shape.n_streams;
    const int attended = kvp_gpu_attended_of(b, node);
    float parameters[3]; /* scale, max_bias, logit_softcap */

    memcpy(parameters, node->op_params, sizeof(parameters));
    if (b->attended[attended].plain)
        mask = NULL;
    return (kvant_cuda_attention_args){
        .size = sizeof(kvant_cuda_attention_args),
        .k_codec = k->codec,
        .v_codec = v->codec,
        .k = k->pages,
        .v = v->pages,
        .k_open = k->open_pages,
        .v_open = v->open_pages,
        .block_table = (k->open_pages.base != NULL ? (const int32_t *)k->cache->device_table.at : kvp_gpu_numbers(k->gpu)) +
                       first_stream * n_blocks,
        .table_stride = n_blocks,
        .blocks_per_row = (uint32_t)(view->ne[1] + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS,
        .lengths = kvp_gpu_lengths(b, attended) + streams.first,
        .batch = (uint32_t)streams.n,
        .n_heads = (uint32_t)q->ne[2],
        .n_kv_heads = k->n_kv_heads,
        .type = KVANT_CUDA_F32,
        .q = stream_of(q, streams.first),
        .q_batch_stride = q->nb[3] / sizeof(float),
        .q_head_stride = q->nb[2] / sizeof(float),
        .out = (void *)(uintptr_t)stream_of(node, streams.first),
        .out_batch_stride = node->nb[3] / sizeof(float),
        .out_head_stride = node->nb[1] / sizeof(float),
        .scale = parameters[0],
        .v_center = v->center,
        .k_scale = k->query_scale,
        .v_scale = v->query_scale,
        .workspace = b->scratch.at,
        .workspace_bytes = b->scratch.bytes,
        .query_tokens = (uint32_t)q->ne[1],
        .causal = b->attended[attended].plain && q->ne[1] > 1,
        .q_token_stride = q->nb[1] / sizeof(float),
        .out_token_stride = node->nb[2] / sizeof(float),
        .logit_softcap = parameters[2],
        .max_bias = mask != NULL ? parameters[1] : 0,
        .mask = stream_of(mask, streams.first),
        .mask_token_stride = mask != NULL ? mask->nb[1] / sizeof(uint16_t) : 0,
        .sinks = sinks != NULL ? sinks->data : NULL,
        .table_ready = 1,
        .new_cells = new_cells,
        .new_first = (int64_t)(first_stream * n_blocks * KVANT_PAGE_TOKENS),
        .new_stride = (int64_t)n_blocks * KVANT_PAGE_TOKENS,
    };
}

static kvant_cuda_query_args queries_of(const kvp_gpu_backend *b, const kvp_gpu_cells *k, const kvant_cuda_attention_args *args)
{
    return (kvant_cuda_query_args){ .size = sizeof(kvant_cuda_query_args),
                                    .k_codec = k->codec,
                                    .batch = args->batch * args->query_tokens,
                                    .n_heads = args->n_heads,
                                    .n_kv_heads = args->n_kv_heads,
                                    .type = KVANT_CUDA_F32,
                                    .q = args->q,
                                    .q_batch_stride = args->q_token_stride,
                                    .q_head_stride = args->q_head_stride,
                                    .inverse_weights = k->inverse_weights,
                                    .out = b->queries.at };
}

/* Queries through the matrix of transform=file, unless they went there with the rows. */
static kvant_status transform_queries(kvp_gpu_backend *b, const kvp_gpu_cells *k, kvant_cuda_attention_args *args, bool transformed)
{
    const size_t width = (size_t)args->n_heads * k->head_dim;
    const kvant_cuda_query_args queries = queries_of(b, k, args);

    args->q = b->queries.at;
    args->q_token_stride = width;
    args->q_batch_stride = args->query_tokens * width;
    args->q_head_stride = k->head_dim;
    return transformed ? KVANT_OK : kvant_cuda_transform_queries(&queries, b->gpu->stream);
}

static bool is_full(const kvp_gpu_cells *k)
{
    return k->n_weights > k->head_dim;
}

/* Sinks weigh against scores with their <q, c>: where keys have a centre, they come in afterwards. */
static kvant_status launch_attention(kvp_gpu_backend *b, const kvp_gpu_cells *k, const kvant_cuda_attention_args *plain,
                                     kvant_cuda_attention_args args)
{
    const bool apart = args.sinks != NULL && k->center != NULL;
    const kvant_cuda_sinks_args sinks = { .size = sizeof(sinks),
                                          .n_queries = plain->batch * plain->query_tokens,
                                          .n_heads = plain->n_heads,
                                          .n_kv_heads = plain->n_kv_heads,
                                          .head_dim = k->head_dim,
                                          .q = plain->q,
                                          .q_token_stride = plain->q_token_stride,
                                          .q_head_stride = plain->q_head_stride,
                                          .scale = plain->scale,
                                          .center = k->center,
                                          .sinks = plain->sinks,
                                          .lse = b->lse.at,
                                          .out = plain->out };
    kvant_status status;

    if (apart) {
        args.sinks = NULL;
        args.lse = b->lse.at;
    }
    status = kvant_cuda_attention(&args, b->gpu->stream);
    return apart && status == KVANT_OK ? kvant_cuda_add_sinks(&sinks, b->gpu->stream) : status;
}

static kvant_status attend(kvp_gpu_backend *b, const abi_tensor *node, part streams, const int64_t *new_cells, bool transformed)
{
    const kvant_cuda_attention_args plain = arguments_of(b, node, streams, new_cells);
    kvant_cuda_attention_args args = plain;
    const kvp_gpu_cells *k = kvp_gpu_cells_of(node->src[1]);
    kvant_status status = KVANT_OK;

    if (is_full(k) && (uint64_t)args.batch * args.query_tokens > MOST_QUERIES)
        return KVANT_ERR_UNSUPPORTED;
    if (is_full(k))
        status = transform_queries(b, k, &args, transformed);
    return status == KVANT_OK ? launch_attention(b, k, &plain, args) : status;
}

/* Unpacked pages of many query rows: of the whole cache, or as many as are allowed. */
static size_t unpacked_bytes(const abi_tensor *node)
{
    const abi_tensor *q = node->src[0], *view = node->src[1], *root = kvp_root(view);
    const size_t rows = (size_t)(q->ne[1] * q->ne[2] / view->ne[2]);
    const size_t blocks = (size_t)((root->ne[1] + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * root->ne[2]);
    const size_t bytes = blocks * (size_t)view->ne[2] * KVANT_CUDA_SCRATCH_PER_BLOCK(view->ne[0]) + 1024;

    if (rows <= KVANT_CUDA_SCRATCH_ROWS)
        return 0;
    return bytes < KVANT_CUDA_SCRATCH_BYTES ? bytes : KVANT_CUDA_SCRATCH_BYTES;
}

#define ROOM_ALIGN 256u

size_t kvp_gpu_room(kvp_gpu *gpu, const abi_tensor *node)
{
    kvp_gpu_cells *k;
    size_t unpacked;

    if (node->op != kvp_api.op.flash_attn_ext || !kvp_is_kv(node->src[1]) || !kvp_is_kv(node->src[2]) || !kvp_gpu_enter(gpu))
        return 0;
    k = kvp_gpu_cells_of(node->src[1]);
    if (k != NULL)
        k->has_room = true;
    unpacked = unpacked_bytes(node);
    return unpacked > 0 ? kvant_cuda_attention_workspace((uint32_t)node->src[1]->ne[0]) + unpacked + ROOM_ALIGN : 0;
}

/* The room behind a node's output, or else memory of our own, which is asked for at its full size, as what it grows out of is kept. */
static bool have_workspace(kvp_gpu_backend *b, const abi_tensor *node, const kvp_gpu_cells *k)
{
    const size_t own = kvant_cuda_attention_workspace(k->head_dim), unpacked = unpacked_bytes(node);
    const uintptr_t behind = ((uintptr_t)node->data + kvp_api.nbytes(node) + ROOM_ALIGN - 1) / ROOM_ALIGN * ROOM_ALIGN;

    if (unpacked > 0 && k->has_room && node->buffer->usage == ABI_USAGE_COMPUTE) {
        b->scratch = (struct kvp_gpu_scratch){ (void *)behind, own + unpacked };
        return kvp_cu_ok(kvp_cu.fill((cu_address)behind, 0, own, b->gpu->stream), "memory");
    }
    if (!kvp_gpu_grow(b->gpu, &b->workspace, own + unpacked, true))
        return false;
    b->scratch = (struct kvp_gpu_scratch){ b->workspace.at, b->workspace.bytes };
    return true;
}

static size_t rows_of_queries(const abi_tensor *q)
{
    return (size_t)q->ne[1] * (size_t)q->ne[2] * (size_t)q->ne[3];
}

static bool have_queries(kvp_gpu_backend *b, const abi_tensor *node, const kvp_gpu_cells *k)
{
    return !is_full(k) || kvp_gpu_grow(b->gpu, &b->queries, rows_of_queries(node->src[0]) * k->head_dim * sizeof(float), false);
}

static bool have_memory(kvp_gpu_backend *b, const abi_tensor *node, const kvp_gpu_cells *k)
{
    return have_workspace(b, node, k) && have_queries(b, node, k) &&
           (node->src[4] == NULL || kvp_gpu_grow(b->gpu, &b->lse, rows_of_queries(node->src[0]) * sizeof(float), false));
}

/* Whether one launch takes all streams of a node. */
static bool at_once(const abi_tensor *node)
{
    return in_a_row(node->src[3], node->src[0]->ne[3]) && in_a_row(node->src[0], node->src[0]->ne[3]);
}

/* Queries that go through their matrix with the rows of their tokens; q NULL: they need none, or go by themselves, as those
 * of many tokens do, which may bring another matrix. */
static bool queries_of_pair(kvp_gpu_backend *b, const abi_tensor *node, kvant_cuda_query_args *queries)
{
    const kvp_gpu_cells *k = kvp_gpu_cells_of(node->src[1]);
    kvant_cuda_attention_args args;

    if (k == NULL || !is_full(k) || node->src[0]->ne[3] > KVP_FEW_TOKENS || !at_once(node) || !kvp_attention_supported(node))
        return true;
    if (!have_queries(b, node, k))
        return false;
    args = arguments_of(b, node, (part){ 0, (size_t)node->src[0]->ne[3] }, NULL);
    *queries = queries_of(b, k, &args);
    return true;
}

/* new_cells: NULL, or those of the newest rows, one per stream. transformed: queries went through their matrix. */
static int32_t attention(kvp_gpu_backend *b, abi_tensor *node, const int64_t *new_cells, bool transformed)
{
    const kvp_gpu_cells *k = kvp_gpu_cells_of(node->src[1]);
    const size_t n_streams = (size_t)node->src[0]->ne[3];
    kvant_status status = KVANT_OK;
    part streams = { 0, n_streams };

    if (!kvp_attention_supported(node) || k == NULL || kvp_gpu_cells_of(node->src[2]) == NULL)
        return ABI_STATUS_FAILED;
    if (!kvp_gpu_weigh_queries(b, node))
        return ABI_STATUS_FAILED;
    if (!have_memory(b, node, k))
        return ABI_STATUS_ALLOC_FAILED;
    if (!at_once(node))
        streams.n = 1;
    if (streams.n < n_streams)
        new_cells = NULL;
    for (; streams.first < n_streams && status == KVANT_OK; streams.first += streams.n)
        status = attend(b, node, streams, new_cells, transformed);
    if (status != KVANT_OK)
        kvp_error("%s: attention failed: %s", kvp_root(node->src[1])->name, kvant_strerror(status));
    return status == KVANT_OK ? ABI_STATUS_SUCCESS : ABI_STATUS_FAILED;
}

/* ROPE: the context shift, by the CPU on decoded rows (../ops_rope.c) */

static int32_t rope(kvp_gpu_backend *b, abi_tensor *node)
{
    abi_tensor positions = { 0 }, factors = { 0 }, copy = *node;
    int32_t status = ABI_STATUS_ALLOC_FAILED;

    copy.src[1] = &positions;
    if (node->src[2] != NULL)
        copy.src[2] = &factors;
    if (kvp_gpu_fetch(b, KVP_FETCHED_KEYS, node->src[1], &positions) &&
        (node->src[2] == NULL || kvp_gpu_fetch(b, KVP_FETCHED_VALUES, node->src[2], &factors)))
        status = kvp_rope(&b->compute, &copy);
    return status;
}

int32_t kvp_gpu_compute(kvp_gpu_backend *b, abi_tensor *node, abi_tensor *values, abi_tensor *attending)
{
    if (!kvp_gpu_touches(node))
        return kvp_gpu_accelerate(b, node);
    if (node->op == kvp_api.op.set_rows)
        return set_rows(b, node, values, attending);
    if (node->op == kvp_api.op.flash_attn_ext)
        return attention(b, node, NULL, false);
    if (node->op == kvp_api.op.rope)
        return rope(b, node);
    kvp_error("%s: operation %s on a compressed cache is not supported", node->name, kvp_api.op_name(node->op));
    return ABI_STATUS_FAILED;
}
