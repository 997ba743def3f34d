/* cuda_attention.c - attention of a cache on a GPU, in one call of its kernels.
 *
 * Queries go through the matrix of each transform in use. The term <q, centre> is added to the
 * scores if it matters: with several transforms, with sinks, or for a log-sum-exp. The table of
 * blocks that the kernels read is cuda_attention_stage.c's. */
#include <kvant/cuda_kernels.h>

#include "cuda_attention.h"

#define MOST_QUERIES 32767u /* query tokens per call of the kernels */
#define MOST_PRODUCTS                                                                              \
    65535u /* query tokens times matrices in kvant_cuda_kernel_transform_queries */

_Static_assert(KVANT_MAX_TRANSFORMS <= KVANT_CUDA_MOST_MATRICES, "a call has all transforms");

/* Checks */

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "attention: %s", what);
}

static kvant_status unsupported(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED, "cache on cuda: attention does not support %s",
                      what);
}

static kvant_status check_problem(const attention_call *c)
{
    const kvant_cache *cache = c->cache;
    const kvant_attention_problem *p = c->p;
    if (!p->q || !p->out || !p->n_queries)
        return invalid("q, out and n_queries must be set");
    if (p->n_heads % cache->params.n_kv_heads)
        return invalid("n_heads is not a multiple of the number of kv heads");
    if (p->n_queries > MOST_QUERIES)
        return unsupported("more than 32767 query tokens in a call: split them");
    if (p->exact)
        return unsupported("exact: it is for caches on the CPU");
    for (uint32_t i = 0; i < c->batch; i++)
        if (p->causal && p->n_queries > sequence_of(c, i)->lengths[c->number])
            return invalid("causal is set, but n_queries is larger than the length of a sequence");
    return KVANT_OK;
}

/* Calls */

/* Whether <q, centre> of keys changes the output, or the caller wants a log-sum-exp. */
static bool needs_center(const attention_call *c)
{
    return c->transforms.centred[KVANT_ROLE_K] && !kvant_cuda_call_centers_back(c, KVANT_ROLE_K) &&
           (has_several(c, KVANT_ROLE_K) || c->p->lse || c->p->sinks);
}

static cuda_transform first_of(const attention_call *c, int role)
{
    return kvant_cuda_transform(&c->layer->parts[role], c->transforms.first[role]);
}

static size_t width_of(const attention_call *c)
{
    return (size_t)c->p->n_heads * c->head_dim;
}

/* Passes queries through all matrices in one launch, or in one launch each if there are too
 * many. */
static kvant_status transform_queries(const attention_call *c, kvant_cuda_kernel_query_args all)
{
    const uint32_t n = 1 + all.n_further,
                   at_once = (uint64_t)all.batch * n <= MOST_PRODUCTS ? n : 1;
    kvant_cuda_kernel_query_args some = all;
    kvant_status status = KVANT_OK;
    some.n_further = at_once - 1;
    for (uint32_t i = 0; i < n && status == KVANT_OK; i += at_once) {
        some.inverse_key_transform = i ? all.further[i - 1] : all.inverse_key_transform;
        some.compact = at_once == n ? all.compact : all.compact >> i & 1;
        some.out = all.out + i * all.batch * width_of(c);
        status = kvant_cuda_kernel_transform_queries(&some, c->memory->stream);
    }
    return status;
}

/* Gives the call queries that went through the matrix of each transform of keys. */
static kvant_status use_matrix_queries(const attention_call *c,
                                       kvant_cuda_kernel_attention_args *args)
{
    cuda_part *keys = &c->layer->parts[KVANT_ROLE_K];
    kvant_cuda_kernel_query_args queries = { .size = sizeof queries,
                                             .k_codec = keys->full ? keys->full : keys->codec,
                                             .batch = c->batch * args->query_tokens,
                                             .n_heads = args->n_heads,
                                             .n_kv_heads = args->n_kv_heads,
                                             .type = KVANT_CUDA_F32,
                                             .q = c->p->q,
                                             .q_batch_stride = c->p->q_token_stride,
                                             .q_head_stride = c->p->q_head_stride,
                                             .out = c->memory->queries.at };
    uint8_t n = 0;
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++) {
        const float **matrix = n ? &queries.further[n - 1] : &queries.inverse_key_transform;
        if (!(c->transforms.used[KVANT_ROLE_K] >> v & 1))
            continue;
        bool compact;
        *matrix = kvant_cuda_query_matrix(keys, v, &compact);
        queries.compact |= (uint32_t)compact << n;
        args->q_ids[v] = n++;
    }
    queries.n_further = n - 1u;
    args->k_codec = queries.k_codec;
    args->k_scale = NULL;
    args->q = queries.out;
    args->q_token_stride = width_of(c);
    args->q_batch_stride = args->query_tokens * width_of(c);
    args->q_head_stride = c->head_dim;
    args->q_matrix_stride = c->batch * args->q_batch_stride;
    return kvant_cuda_report_error(transform_queries(c, queries), "copying queries");
}

/* Gives the call the transforms of keys. The kernels' matrix number is the transform id. */
static void set_matrices(const attention_call *c, kvant_cuda_kernel_attention_args *args)
{
    const cuda_part *keys = &c->layer->parts[KVANT_ROLE_K];
    if (needs_center(c))
        args->k_center = kvant_cuda_centers(keys, c->transforms.through);
    if (has_several(c, KVANT_ROLE_K)) {
        args->matrices = (const uint8_t *)(c->on_device + c->n_blocks);
        while (c->transforms.used[KVANT_ROLE_K] >> args->n_matrices)
            args->n_matrices++;
    } else if (needs_center(c)) {
        args->k_center += c->transforms.first[KVANT_ROLE_K] * kvant_tensor_width(keys->tensor);
    }
}

/* For values with a dense rotation: rotates outputs back, then multiplies them by the channels'
 * scale. */
static kvant_status rotate_outputs(const attention_call *c,
                                   const kvant_cuda_kernel_attention_args *args, const float *scale)
{
    kvant_cuda_rotate_rows_args rotation =
        kvant_cuda_rotation_of(&c->layer->parts[KVANT_ROLE_V], true);
    rotation.rows = rotation.out = args->out;
    rotation.token_stride = rotation.out_token_stride = args->out_token_stride;
    rotation.head_stride = rotation.out_head_stride = args->out_head_stride;
    rotation.n_tokens = c->batch * args->query_tokens, rotation.n_heads = args->n_heads,
    rotation.after = scale;
    return kvant_cuda_report_error(kvant_cuda_rotate_rows(&rotation, c->memory->stream),
                                   "copying outputs");
}

static kvant_cuda_pages open_pool(const attention_call *c, int role)
{
    const kvant_tensor *k = c->layer->parts[0].tensor, *v = c->layer->parts[1].tensor;
    const bool own =
        !c->n_gathered && (c->layer->has_exact || (k->n_open_pages && v->n_open_pages));
    return !c->any_open ? (kvant_cuda_pages){ 0 }
           : own        ? kvant_cuda_pages_of(&c->layer->parts[role], true)
                        : kvant_cuda_call_pages(c, role);
}

static kvant_cuda_kernel_attention_args arguments_of(const attention_call *c)
{
    const kvant_attention_problem *p = c->p;
    const cuda_part *k = &c->layer->parts[KVANT_ROLE_K], *v = &c->layer->parts[KVANT_ROLE_V];
    const cuda_transform keys = first_of(c, KVANT_ROLE_K), values = first_of(c, KVANT_ROLE_V);
    const bool back = kvant_cuda_call_centers_back(c, KVANT_ROLE_V);
    return (kvant_cuda_kernel_attention_args){
        .size = sizeof(kvant_cuda_kernel_attention_args),
        .k_codec = keys.codec,
        .v_codec = v->codec,
        .k = kvant_cuda_pages_of(k, false),
        .v = kvant_cuda_pages_of(v, false),
        .k_open = open_pool(c, KVANT_ROLE_K),
        .v_open = open_pool(c, KVANT_ROLE_V),
        .block_table = c->on_device,
        .table_stride = c->stride,
        .blocks_per_row = c->stride,
        .lengths = c->lengths,
        .batch = c->batch,
        .n_heads = p->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .type = c->type,
        .q = p->q,
        .q_batch_stride = p->n_queries * p->q_token_stride,
        .q_head_stride = p->q_head_stride,
        .out = p->out,
        .out_batch_stride = p->n_queries * p->out_token_stride,
        .out_head_stride = p->out_head_stride,
        .lse = p->lse,
        .scale = p->scale,
        .v_center = back             ? NULL
                    : values.rotates ? values.rotated_center
                                     : values.center,
        .k_scale = keys.attention_scale,
        .v_scale = values.rotates ? NULL : values.attention_scale,
        .workspace = c->memory->workspace,
        .workspace_bytes = c->memory->workspace_bytes,
        .query_tokens = p->n_queries,
        .q_token_stride = p->q_token_stride,
        .out_token_stride = p->out_token_stride,
        .causal = p->causal,
        .window = p->window,
        .logit_softcap = p->logit_softcap > 0 ? p->logit_softcap : 0,
        .max_bias = p->max_bias > 0 ? p->max_bias : 0,
        .mask = p->mask ? p->mask + c->dropped : NULL,
        .mask_token_stride = p->mask_token_stride,
        .sinks = p->sinks,
        .centroids = { k->centroids, v->centroids }
    };
}

/* For prompts: gives the call a workspace with scratch (cuda.h), if there is memory. */
static void find_scratch(attention_call *c, kvant_cuda_kernel_attention_args *args)
{
    cuda_buffer *scratch = &c->memory->scratch;
    if (args->n_heads / args->n_kv_heads * args->query_tokens <= KVANT_CUDA_SCRATCH_ROWS)
        return;
    const size_t pages = (size_t)args->batch * args->n_kv_heads * args->blocks_per_row *
                             KVANT_CUDA_SCRATCH_PER_BLOCK(c->head_dim) +
                         1024,
                 bytes = c->memory->workspace_bytes +
                         (pages < KVANT_CUDA_SCRATCH_BYTES ? pages : KVANT_CUDA_SCRATCH_BYTES);
    if (kvant_cuda_grow(scratch, bytes, "allocating unpacked pages") != KVANT_OK)
        return;
    args->workspace = scratch->at;
    args->workspace_bytes = scratch->bytes;
}

kvant_status kvant_cuda_call_room(const attention_call *c)
{
    const size_t rows = (size_t)c->batch * c->p->n_queries;
    uint32_t n = 0;
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS && c->transforms.through; v++)
        if (c->transforms.used[KVANT_ROLE_K] >> v & 1) {
            KVANT_FORWARD(kvant_cuda_make_query_matrix(&c->layer->parts[KVANT_ROLE_K], v));
            n++;
        }
    return kvant_cuda_grow(&c->memory->queries, n * rows * width_of(c) * sizeof(float),
                           "allocating queries");
}

kvant_status kvant_cuda_call_run(attention_call *c)
{
    kvant_cuda_kernel_attention_args args = arguments_of(c);
    const cuda_transform values = first_of(c, KVANT_ROLE_V);
    find_scratch(c, &args);
    KVANT_FORWARD(kvant_cuda_call_room(c));
    set_matrices(c, &args);
    if (c->transforms.through)
        KVANT_FORWARD(use_matrix_queries(c, &args));
    KVANT_FORWARD(kvant_cuda_report_error(kvant_cuda_kernel_attention(&args, c->memory->stream),
                                          "attention"));
    return values.rotates ? rotate_outputs(c, &args, values.attention_scale) : KVANT_OK;
}

attention_call kvant_cuda_call_of(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                                  uint32_t n_sequences, const kvant_attention_problem *p)
{
    cuda_memory *memory = cache->memory;
    return (attention_call){ .cache = cache,
                             .memory = memory,
                             .layer = kvant_cuda_layer(cache, layer),
                             .number = layer,
                             .p = p,
                             .sequences = sequences,
                             .batch = n_sequences,
                             .n_kv_heads = cache->params.n_kv_heads,
                             .head_dim = cache->params.head_dim,
                             .gathered = &memory->gathered,
                             .type = KVANT_CUDA_F32 };
}

kvant_status kvant_cuda_layers_attend(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                                      uint32_t n_sequences, const kvant_attention_problem *p)
{
    attention_call c = kvant_cuda_call_of(cache, layer, sequences, n_sequences, p);
    KVANT_FORWARD(kvant_cuda_refused(c.memory));
    KVANT_FORWARD(check_problem(&c));
    c.stride = kvant_cuda_call_blocks(&c);
    KVANT_FORWARD(kvant_cuda_call_stage(&c));
    KVANT_FORWARD(kvant_cuda_call_run(&c));
    return kvant_cuda_report_error(c.memory->status, c.memory->failed);
}
