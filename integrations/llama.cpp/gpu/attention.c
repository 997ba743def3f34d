/* attention.c - FLASH_ATTN_EXT nodes on cache tensors as launches of libkvant_cuda.
 *
 * Queries are transformed by the key transform, or by each of several key transforms
 * (buckets.c). */
#include "gpu.h"

#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

#define MOST_QUERIES 65535 /* the most queries of a call of kvant_cuda_transform_queries */

/* The streams of a node that one launch computes: all of them, or a single one when masks or
 * queries of different streams are not equally spaced. */
typedef struct streams_at_once {
    size_t first, n;
} streams_at_once;

static const void *stream_of(const abi_tensor *tensor, size_t stream)
{
    return tensor != NULL
               ? (const char *)tensor->data + (tensor->ne[3] > 1 ? stream * tensor->nb[3] : 0)
               : NULL;
}

/* Whether the rows of all streams are equally spaced, so that they can be taken as the rows of one
 * stream. */
static bool in_a_row(const abi_tensor *rows, int64_t n_streams)
{
    return rows == NULL || n_streams == 1 ||
           (rows->ne[3] == n_streams && rows->nb[3] == (size_t)rows->ne[1] * rows->nb[1]);
}

static kvant_cuda_kernel_attention_args arguments_of(const kvp_gpu_backend *b,
                                                     const abi_tensor *node,
                                                     streams_at_once streams,
                                                     const int64_t *new_cells)
{
    const abi_tensor *q = node->src[0], *view = node->src[1], *mask = node->src[3],
                     *sinks = node->src[4];
    const kvp_gpu_cells *k = kvp_gpu_cells_of(view), *v = kvp_gpu_cells_of(node->src[2]);
    const kvp_kv *kv = kvp_kv_of(view);
    const uint32_t n_matrices = kvp_gpu_matrices(k);
    const size_t first_stream = view->view_offs / kvp_root(view)->nb[2] + streams.first;
    const uint32_t n_blocks = kvp_kv_blocks(&kv->shape) / kv->shape.n_streams;
    const int attended = kvp_gpu_attended_of(b, node);
    float parameters[3]; /* scale, max_bias, logit_softcap */

    memcpy(parameters, node->op_params, sizeof(parameters));
    if (b->attended[attended].plain)
        mask = NULL;
    return (kvant_cuda_kernel_attention_args){
        .size = sizeof(kvant_cuda_kernel_attention_args),
        .k_codec = k->codec,
        .v_codec = v->codec,
        .k = k->pages,
        .v = v->pages,
        .k_open = k->open_pages,
        .v_open = v->open_pages,
        .block_table = (k->open_pages.base != NULL && k->cache->keeps
                            ? (const int32_t *)k->cache->device_table.at
                            : kvp_gpu_iota(k->gpu)) +
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
        .clear_counters = b->scratch.used_before,
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
        .k_center = k->center != NULL && !k->has_block_centers && sinks != NULL
                        ? k->key_center.at
                        : NULL, /* without a softcap, softmax ignores the centre */
        .n_matrices = n_matrices,
        .matrices = n_matrices > 1
                        ? (const uint8_t *)k->cache->buckets.numbers.at + first_stream * n_blocks
                        : NULL,
    };
}

/* The arguments that transform queries by each key transform. */
static kvant_cuda_kernel_query_args queries_of(const kvp_gpu_backend *b, const kvp_gpu_cells *k,
                                               const kvant_cuda_kernel_attention_args *args)
{
    kvant_cuda_kernel_query_args queries = { .size = sizeof(kvant_cuda_kernel_query_args),
                                             .k_codec = k->codec,
                                             .batch = args->batch * args->query_tokens,
                                             .n_heads = args->n_heads,
                                             .n_kv_heads = args->n_kv_heads,
                                             .type = KVANT_CUDA_F32,
                                             .q = args->q,
                                             .q_batch_stride = args->q_token_stride,
                                             .q_head_stride = args->q_head_stride,
                                             .out = b->scratch.queries,
                                             .n_further = kvp_gpu_matrices(k) - 1 };

    for (uint32_t i = 0; i <= queries.n_further; i++) {
        const kvp_gpu_matrix matrix = kvp_gpu_matrix_of(k, kvp_gpu_transform_at(k, i));
        const float **at = i == 0 ? &queries.inverse_key_transform : &queries.further[i - 1];
        *at = matrix.compact != NULL ? matrix.compact : matrix.inverse_key_transform;
        queries.compact |= (uint32_t)(matrix.compact != NULL) << i;
    }
    return queries;
}

/* Makes attention read the transformed queries. */
static void keep_queries_of(const kvp_gpu_backend *b, const kvp_gpu_cells *k,
                            kvant_cuda_kernel_attention_args *args)
{
    const size_t width = (size_t)args->n_heads * k->head_dim;

    args->q = b->scratch.queries;
    args->q_token_stride = width;
    args->q_batch_stride = args->query_tokens * width;
    args->q_head_stride = k->head_dim;
    args->q_matrix_stride = args->batch * args->q_batch_stride;
    for (uint32_t i = 0; i < args->n_matrices; i++)
        args->q_ids[i] = (uint8_t)i;
}

/* The queries before any matrix, for their products with the centres of blocks. */
static kvant_cuda_plain_queries plain_queries_of(const kvp_gpu_backend *b, const kvp_gpu_cells *k,
                                                 const kvant_cuda_kernel_attention_args *args,
                                                 bool ready)
{
    return (kvant_cuda_plain_queries){ .q = args->q,
                                       .type = args->type,
                                       .q_batch_stride = args->q_batch_stride,
                                       .q_token_stride = args->q_token_stride,
                                       .q_head_stride = args->q_head_stride,
                                       .block_centers = kvp_gpu_block_centers_of(
                                           k, (size_t)args->new_first / KVANT_PAGE_TOKENS),
                                       .offsets = b->scratch.offsets,
                                       .ready = ready };
}

static bool is_full(const kvp_gpu_cells *k)
{
    return k != NULL && k->key_transform_size > k->head_dim;
}

/* Transforms queries by all key transforms in one launch, or one launch per transform if there are
 * too many queries. */
static kvant_status transform_queries(const kvp_gpu_backend *b, const kvp_gpu_cells *k,
                                      const kvant_cuda_kernel_attention_args *args, bool ready)
{
    kvant_cuda_kernel_query_args all = queries_of(b, k, args), one;
    kvant_status status = KVANT_OK;

    all.ready = ready;
    one = all;
    if (all.batch > MOST_QUERIES)
        return KVANT_ERR_UNSUPPORTED;
    if ((uint64_t)all.batch * (1 + all.n_further) <= MOST_QUERIES)
        return kvant_cuda_kernel_transform_queries(&all, b->gpu->stream);
    one.n_further = 0;
    for (uint32_t i = 0; i <= all.n_further && status == KVANT_OK; i++) {
        one.inverse_key_transform = i == 0 ? all.inverse_key_transform : all.further[i - 1];
        one.compact = all.compact >> i & 1;
        one.out = all.out + (size_t)i * all.batch * all.n_heads * k->head_dim;
        status = kvant_cuda_kernel_transform_queries(&one, b->gpu->stream);
    }
    return status;
}

/* transformed: the queries were transformed together with the rows. */
static kvant_status attend(kvp_gpu_backend *b, const abi_tensor *node, streams_at_once streams,
                           const int64_t *new_cells, bool transformed)
{
    kvant_cuda_kernel_attention_args args = arguments_of(b, node, streams, new_cells);
    const kvp_gpu_cells *k = kvp_gpu_cells_of(node->src[1]);
    /* CUDA's stream computed the queries. It also waited for earlier attention, which reads what is
     * overwritten here. */
    const bool ready = !b->attended_since;
    kvant_status status = KVANT_OK;

    b->attended_since = true;

    args.sealed_ready = ready && b->kept_exact == k;
    if (k->has_block_centers)
        args.plain_queries = plain_queries_of(b, k, &args, ready);
    if (is_full(k) && !transformed)
        status = transform_queries(b, k, &args, ready);
    if (status != KVANT_OK)
        return status;
    if (is_full(k))
        keep_queries_of(b, k, &args);
    return kvant_cuda_kernel_attention(&args, b->gpu->stream);
}

/* Whether to wait with the search for marked cells until the graph's last attention node. A graph
 * of a few tokens is captured, and each of its launches delays a token. So while no refused row is
 * known, only the last attention over a cache looks for marks in such a graph. That is enough to
 * make the answer NaN. */
static bool is_late(const kvp_gpu_backend *b, const abi_tensor *node)
{
    const kvp_gpu_cache *cache = kvp_gpu_cells_of(node->src[1])->cache;
    bool writes = false;

    for (int i = 0; i < b->n_writes; i++)
        writes = writes || b->writes[i].cache == cache;
    return writes && node->src[0]->ne[1] * node->src[0]->ne[3] <= KVP_SHORT_STEP_TOKENS &&
           !kvp_gpu_marks_any(cache);
}

static bool fills(const kvp_gpu_backend *b, const abi_tensor *node)
{
    bool last = false;

    for (int i = 0; i < b->n_writes; i++)
        last = last || b->writes[i].last == node;
    return last || !is_late(b, node);
}

/* Marks the cells of tokens that saw a refused row. In the layers before the last these tokens had
 * no NaN, so they stored rows that come from the old content of the refused cell. Their cells get
 * marks in all caches that the graph writes to. In graphs of more tokens their rows are NaN and are
 * refused like the first row. */
static void spread(const kvp_gpu_backend *b, const abi_tensor *node, size_t first_stream,
                   kvant_cuda_marked_args *args)
{
    const abi_tensor *q = node->src[0];

    for (int i = 0; is_late(b, node) && i < b->n_writes; i++)
        if (b->writes[i].cells->ne[0] == q->ne[1] * q->ne[3])
            args->spread[args->n_spread++] =
                (kvant_cuda_spread){ .marks = b->writes[i].cache->marks.memory.at,
                                     .numbers = kvp_gpu_marks_cells(b->writes[i].cache) +
                                                first_stream * (size_t)q->ne[1] };
}

static kvant_status fill_marked(const kvp_gpu_backend *b, const abi_tensor *node,
                                streams_at_once streams)
{
    const kvant_cuda_kernel_attention_args of = arguments_of(b, node, streams, NULL);
    kvant_cuda_marked_args args = { .size = sizeof(args),
                                    .marks = kvp_gpu_cells_of(node->src[1])->cache->marks.memory.at,
                                    .first = of.new_first,
                                    .stride = of.new_stride,
                                    .lengths = of.lengths,
                                    .batch = of.batch,
                                    .query_tokens = of.query_tokens,
                                    .n_heads = of.n_heads,
                                    .head_dim = (uint32_t)node->ne[0],
                                    .causal = of.causal,
                                    .type = of.type,
                                    .mask = of.mask,
                                    .mask_token_stride = of.mask_token_stride,
                                    .out = of.out,
                                    .out_batch_stride = of.out_batch_stride,
                                    .out_token_stride = of.out_token_stride,
                                    .out_head_stride = of.out_head_stride };

    spread(b, node, streams.first, &args);
    return kvant_cuda_fill_marked(&args, b->gpu->stream);
}

/* Bytes of unpacked pages for many query rows: for the whole cache, or for as many pages as are
 * allowed. llama.cpp plans a graph whose tokens are spread over all streams, but a prompt may be in
 * one stream. */
static size_t unpacked_bytes(const abi_tensor *node)
{
    const abi_tensor *q = node->src[0], *view = node->src[1], *root = kvp_root(view);
    const size_t tokens = (size_t)(q->ne[1] > 1 ? q->ne[1] * q->ne[3] : q->ne[1]),
                 rows = tokens * (size_t)(q->ne[2] / view->ne[2]);
    const size_t blocks =
        (size_t)((root->ne[1] + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * root->ne[2]);
    const size_t bytes =
        blocks * (size_t)view->ne[2] * KVANT_CUDA_SCRATCH_PER_BLOCK(view->ne[0]) + 1024;

    if (rows <= KVANT_CUDA_SCRATCH_ROWS)
        return 0;
    return bytes < KVANT_CUDA_SCRATCH_BYTES ? bytes : KVANT_CUDA_SCRATCH_BYTES;
}

static size_t rows_of_queries(const abi_tensor *q)
{
    return (size_t)q->ne[1] * (size_t)q->ne[2] * (size_t)q->ne[3];
}

/* Bytes of the products of queries with the centres of a stream's blocks. */
static size_t offset_bytes(const abi_tensor *node)
{
    const size_t blocks =
        (size_t)(kvp_root(node->src[1])->ne[1] + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;

    return blocks * rows_of_queries(node->src[0]) * sizeof(float);
}

/* Bytes of the queries after n key transforms. */
static size_t query_bytes(const abi_tensor *node, size_t n)
{
    return n * rows_of_queries(node->src[0]) * (size_t)node->src[0]->ne[0] * sizeof(float);
}

/* Whether the cache learns key transforms. A cache that is only planned (--fit) has no cells. */
static bool learns(const kvp_gpu_cells *k)
{
    const kvp_settings *settings = kvp_kv_current_settings();

    return k != NULL ? k->learns_key_transform : settings != NULL && kvp_kv_learns(settings);
}

/* The most key transforms of a cache whose keys do not move. */
static uint32_t most_matrices(const abi_tensor *node, const kvp_gpu_cells *k)
{
    const kvp_kv_shape shape = { .n_cells = (uint32_t)kvp_root(node->src[1])->ne[1] };
    const uint32_t n_positions =
        k != NULL ? kvp_kv_n_positions(kvp_kv_of(node->src[1])) : shape.n_cells;

    return learns(k) ? 2 + (uint32_t)kvp_gpu_further_buckets(&shape, n_positions) : 1;
}

#define ROOM_ALIGN 256u /* as the driver aligns memory */

static size_t align(size_t bytes)
{
    return (bytes + ROOM_ALIGN - 1) / ROOM_ALIGN * ROOM_ALIGN;
}

/* The parts of the room behind the output of a node with many query rows. */
typedef struct room {
    size_t workspace, offsets, queries;
} room;

static room room_of(const abi_tensor *node, const kvp_gpu_cells *k)
{
    const uint32_t d = (uint32_t)node->src[1]->ne[0], most = most_matrices(node, k);
    const size_t own = kvant_cuda_kernel_workspace(d, most), unpacked = unpacked_bytes(node),
                 all = unpacked > 0 ? kvant_cuda_kernel_workspace(d, 1) + unpacked : 0;

    return (room){ .workspace = align(all > own ? all : own),
                   .offsets = learns(k) ? align(offset_bytes(node)) : 0,
                   .queries = learns(k) || is_full(k) ? align(query_bytes(node, most)) : 0 };
}

/* Bytes of a layer's queries that are kept for learning, at most (queries.c). */
static size_t kept_bytes(const abi_tensor *node)
{
    return (size_t)KVP_KEPT_BATCHES * KVP_KEPT_TOKENS * node->src[0]->nb[1];
}

size_t kvp_gpu_room(kvp_gpu *gpu, const abi_tensor *node)
{
    kvp_gpu_cells *k;
    size_t bytes, own;
    room r;

    if (node->op != kvp_api.op.flash_attn_ext || !kvp_is_kv(node->src[1]) ||
        !kvp_is_kv(node->src[2]) || !kvp_gpu_enter(gpu))
        return 0;
    k = kvp_gpu_cells_of(node->src[1]);
    r = room_of(node, k);
    bytes = unpacked_bytes(node) > 0 ? ROOM_ALIGN + r.workspace + r.offsets + r.queries : 0;
    if (k == NULL)
        return bytes;
    k->has_room = true;
    own = kvant_cuda_kernel_workspace((uint32_t)node->src[1]->ne[0], most_matrices(node, k));
    kvp_kv_note_attention(kvp_kv_of(node->src[1]), bytes + own, learns(k) ? kept_bytes(node) : 0);
    return bytes;
}

/* Grows the back end's workspace. Kernels leave its counters zero. A graph that is captured clears
 * them in each launch, until it is captured again. */
static bool grow_workspace(kvp_gpu_backend *b, size_t bytes)
{
    const void *former = b->workspace.at;
    size_t counters;

    if (!kvp_gpu_grow(b->gpu, &b->workspace, bytes, false))
        return false;
    counters = b->workspace.bytes < KVANT_CUDA_COUNTER_BYTES ? b->workspace.bytes
                                                             : KVANT_CUDA_COUNTER_BYTES;
    return b->workspace.at == former ||
           kvp_cu_ok(
               kvp_cu.fill((cu_address)(uintptr_t)b->workspace.at, 0, counters, b->gpu->stream),
               "clearing memory");
}

/* Finds workspace: the room behind a node's output, or else the back end's own memory. The latter
 * is allocated at once for all key transforms, because every former size is kept, too. Keys that
 * moved may have more transforms than a room was made for. */
static bool have_workspace(kvp_gpu_backend *b, const abi_tensor *node, const kvp_gpu_cells *k)
{
    const room r = room_of(node, k);
    const bool moved = kvp_gpu_matrices(k) > most_matrices(node, k);
    const size_t own = moved ? kvant_cuda_kernel_workspace(k->head_dim, kvp_gpu_matrices(k)) : 0;
    char *behind = (char *)(uintptr_t)align((uintptr_t)node->data + kvp_api.nbytes(node));

    if (unpacked_bytes(node) > 0 && k->has_room && own <= r.workspace &&
        node->buffer->usage == ABI_USAGE_COMPUTE) {
        b->scratch = (struct kvp_gpu_scratch){ behind,
                                               r.workspace,
                                               (float *)(void *)(behind + r.workspace),
                                               (float *)(void *)(behind + r.workspace + r.offsets),
                                               r.queries,
                                               true };
        return true;
    }
    if (!grow_workspace(b, own > r.workspace ? own : r.workspace) ||
        (k->has_block_centers && !kvp_gpu_grow(b->gpu, &b->offsets, offset_bytes(node), false)))
        return false;
    b->scratch = (struct kvp_gpu_scratch){
        b->workspace.at, b->workspace.bytes, b->offsets.at, NULL, 0, false
    };
    return true;
}

/* Finds room for transformed queries: behind the node's output, or the back end's own memory. Keys
 * that moved may have more transforms than the former has room for. */
static bool have_queries(kvp_gpu_backend *b, const abi_tensor *node, const kvp_gpu_cells *k)
{
    const size_t bytes = query_bytes(node, kvp_gpu_matrices(k));

    if (!is_full(k) || (b->scratch.queries != NULL && bytes <= b->scratch.query_bytes))
        return true;
    if (!kvp_gpu_grow(b->gpu, &b->queries, bytes, false))
        return false;
    b->scratch.queries = b->queries.at;
    b->scratch.query_bytes = b->queries.bytes;
    return true;
}

/* Whether one launch computes all streams of a node. */
static bool at_once(const abi_tensor *node)
{
    return in_a_row(node->src[3], node->src[0]->ne[3]) &&
           in_a_row(node->src[0], node->src[0]->ne[3]);
}

/* Queries are transformed with the rows of their tokens only for a few tokens and one run. With
 * many tokens, learning may put another key transform in force in between. Rows of several runs
 * have several transforms. */
bool kvp_gpu_queries_of_pair(kvp_gpu_backend *b, const abi_tensor *node,
                             kvant_cuda_kernel_query_args *queries)
{
    const kvp_gpu_cells *k = kvp_gpu_cells_of(node->src[1]);
    kvant_cuda_kernel_attention_args args;

    if (k == NULL || !is_full(k) || node->src[0]->ne[3] > KVP_SHORT_STEP_TOKENS || !at_once(node) ||
        !kvp_attention_supported(node))
        return true;
    if (kvp_gpu_runs(k) > 1)
        return true;
    b->scratch.queries = NULL; /* of another node */
    if (!have_queries(b, node, k))
        return false;
    args = arguments_of(b, node, (streams_at_once){ 0, (size_t)node->src[0]->ne[3] }, NULL);
    *queries = queries_of(b, k, &args);
    return true;
}

int32_t kvp_gpu_attention(kvp_gpu_backend *b, abi_tensor *node, const int64_t *new_cells,
                          bool transformed)
{
    kvp_gpu_cells *k = kvp_gpu_cells_of(node->src[1]);
    const size_t n_streams = (size_t)node->src[0]->ne[3];
    kvant_status status = KVANT_OK;
    streams_at_once streams = { 0, n_streams };

    if (!kvp_attention_supported(node) || k == NULL || kvp_gpu_cells_of(node->src[2]) == NULL ||
        !kvp_gpu_first_seal(kvp_kv_of(node->src[1])))
        return ABI_STATUS_FAILED;
    if (k->cache->keeps_queries && kvp_gpu_lacks_key_transform(k) && !kvp_gpu_queries_keep(b, node))
        return ABI_STATUS_FAILED;
    if (k->cache->teaches)
        kvp_gpu_first_teach(k);
    if (!have_workspace(b, node, k) || !have_queries(b, node, k))
        return ABI_STATUS_ALLOC_FAILED;
    if (!at_once(node))
        streams.n = 1;
    if (streams.n < n_streams)
        new_cells = NULL;
    for (; streams.first < n_streams && status == KVANT_OK; streams.first += streams.n)
        if ((status = attend(b, node, streams, new_cells, transformed)) == KVANT_OK &&
            fills(b, node))
            status = fill_marked(b, node, streams);
    if (status != KVANT_OK)
        kvp_error("%s: the GPU could not compute attention: %s", kvp_root(node->src[1])->name,
                  kvant_strerror(status));
    return status == KVANT_OK ? ABI_STATUS_SUCCESS : ABI_STATUS_FAILED;
}
