/* device_cuda.c - a cache in the memory of a GPU: the pages of a layer side by side, block after
 * block. All work is on the legacy default stream, one thing after the other. */
#include <stddef.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "cuda_layers.h"
#include "tensor.h"

#define MOST_QUERIES 32767u /* per call of the kernels */

static cuda_layer *layer_of(const kvant_cache *cache, uint32_t layer)
{
    return &((cuda_memory *)cache->memory)->layers[layer];
}

/* Rows */

static kvant_cuda_pages pages_of(const cuda_layer *layer, kvant_role role)
{
    const cuda_part *part = &layer->parts[role];
    return (kvant_cuda_pages){ layer->pages + part->offset, layer->block_bytes, part->page_bytes };
}

static kvant_cuda_rows rows_of(const cuda_layer *layer, kvant_role role, const float *rows, uint32_t n_kv_heads)
{
    const cuda_part *part = &layer->parts[role];
    const size_t d = part->codecs[0]->info.head_dim;
    return (kvant_cuda_rows){ .codec = part->codec,
                              .pages = pages_of(layer, role),
                              .rows = rows,
                              .token_stride = n_kv_heads * d,
                              .head_stride = d,
                              .center = part->center,
                              .factors = part->factors,
                              .weights = part->weights };
}

static void mark_written(kvant_cache *cache, cuda_layer *layer, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (int role = 0; role < 2; role++)
            layer->parts[role].written[cache->slots[i] / KVANT_PAGE_TOKENS] |=
                (uint64_t)1 << cache->slots[i] % KVANT_PAGE_TOKENS;
}

static kvant_status append(kvant_cache *cache, uint32_t layer, const float *k, const float *v, uint32_t n)
{
    cuda_memory *memory = cache->memory;
    cuda_layer *l = layer_of(cache, layer);
    cuda_arguments *device = memory->arguments;
    const uint32_t heads = cache->params.n_kv_heads;
    uint32_t refused = 0;
    kvant_cuda_append_args args = { .size = sizeof args,
                                    .k = rows_of(l, KVANT_ROLE_K, k, heads),
                                    .v = rows_of(l, KVANT_ROLE_V, v, heads),
                                    .type = KVANT_CUDA_F32,
                                    .n_tokens = n,
                                    .n_kv_heads = heads,
                                    .slots = device->slots,
                                    .refused = &device->refused };
    KVANT_FORWARD(
        kvant_cuda_said(kvant_cuda_memory_copy(device->slots, cache->slots, n * sizeof *cache->slots), "append"));
    KVANT_FORWARD(kvant_cuda_said(kvant_cuda_append(&args, NULL), "append"));
    KVANT_FORWARD(kvant_cuda_said(kvant_cuda_memory_copy(&refused, &device->refused, sizeof refused), "append"));
    if (refused) {
        KVANT_FORWARD(kvant_cuda_said(kvant_cuda_memory_clear(&device->refused, sizeof refused), "append"));
        return refused & KVANT_CUDA_ROW_NONFINITE ? KVANT_ERR_NONFINITE : KVANT_ERR_RANGE;
    }
    mark_written(cache, l, n);
    return KVANT_OK;
}

/* Attention */

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "attention: %s", what);
}

static kvant_status check_problem(const kvant_cache *cache, const cuda_part *keys, const kvant_attention_problem *p)
{
    const char *lacks = NULL;
    if (!p->q || !p->out || !p->n_queries)
        return invalid("q, out and n_queries must be set");
    if (p->n_heads % cache->params.n_kv_heads ||
        p->n_heads / cache->params.n_kv_heads > KVANT_CUDA_MOST_HEADS_PER_KV_HEAD)
        return invalid("n_heads is not a multiple of the kv heads, or more than 64 of them");
    if (p->causal && p->n_queries > p->n_tokens)
        return invalid("causal with more query tokens than tokens");
    if (p->n_queries > MOST_QUERIES)
        lacks = "more than 32767 query tokens per call";
    if (p->exact)
        lacks = "exact";
    if (keys->center && (p->lse || p->sinks || p->logit_softcap > 0)) /* the kernels leave <q, c> out of scores */
        lacks = "lse, sinks or softcap with keys that have a centre";
    return lacks ? kvant_fail(NULL, KVANT_ERR_UNSUPPORTED, "cache on cuda: attention has no %s", lacks) : KVANT_OK;
}

static kvant_status grow_queries(cuda_memory *memory, size_t bytes)
{
    void *queries;
    if (bytes <= memory->queries_bytes)
        return KVANT_OK;
    kvant_cuda_memory_free(memory->queries);
    kvant_status status = kvant_cuda_memory_new(&queries, bytes);
    memory->queries = status == KVANT_OK ? queries : NULL;
    memory->queries_bytes = status == KVANT_OK ? bytes : 0;
    return kvant_cuda_said(status, "memory for queries");
}

/* Queries through the matrix of transform=file. */
static kvant_status transform_queries(kvant_cache *cache, const cuda_part *keys, kvant_cuda_attention_args *args)
{
    cuda_memory *memory = cache->memory;
    const size_t d = cache->params.head_dim, width = args->n_heads * d;
    KVANT_FORWARD(grow_queries(memory, args->query_tokens * width * sizeof(float)));
    kvant_cuda_query_args queries = { .size = sizeof queries,
                                      .k_codec = keys->codec,
                                      .batch = args->query_tokens,
                                      .n_heads = args->n_heads,
                                      .n_kv_heads = args->n_kv_heads,
                                      .type = KVANT_CUDA_F32,
                                      .q = args->q,
                                      .q_batch_stride = args->q_token_stride,
                                      .q_head_stride = args->q_head_stride,
                                      .inverse_weights = keys->inverse_weights,
                                      .out = memory->queries };
    args->q = memory->queries;
    args->q_token_stride = width;
    args->q_head_stride = d;
    return kvant_cuda_said(kvant_cuda_transform_queries(&queries, NULL), "queries");
}

/* Blocks that were dropped are the first ones of a sequence: the rest is a shorter sequence with
 * the same distances. Returns how many tokens were dropped. */
static uint32_t stage_table(cuda_memory *memory, const kvant_attention_problem *p, uint32_t *n_blocks)
{
    uint32_t n = (p->n_tokens + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS, first = 0;
    while (first < n && p->block_table[first] < 0)
        first++;
    cuda_arguments *staging = memory->staging;
    uint32_t dropped = first * KVANT_PAGE_TOKENS < p->n_tokens ? first * KVANT_PAGE_TOKENS : p->n_tokens;
    staging->length = (int32_t)(p->n_tokens - dropped);
    memcpy(staging->table, p->block_table + first, (n - first) * sizeof *staging->table);
    *n_blocks = n - first;
    return dropped;
}

static kvant_status attend(kvant_cache *cache, uint32_t layer, const kvant_attention_problem *p)
{
    cuda_memory *memory = cache->memory;
    const cuda_layer *l = layer_of(cache, layer);
    const cuda_part *k = &l->parts[KVANT_ROLE_K], *v = &l->parts[KVANT_ROLE_V];
    uint32_t n_blocks;
    KVANT_FORWARD(check_problem(cache, k, p));
    const uint32_t dropped = stage_table(memory, p, &n_blocks);
    kvant_cuda_attention_args args = { .size = sizeof args,
                                       .k_codec = k->codec,
                                       .v_codec = v->codec,
                                       .k = pages_of(l, KVANT_ROLE_K),
                                       .v = pages_of(l, KVANT_ROLE_V),
                                       .block_table = memory->arguments->table,
                                       .table_stride = n_blocks,
                                       .blocks_per_row = n_blocks ? n_blocks : 1,
                                       .lengths = &memory->arguments->length,
                                       .batch = 1,
                                       .n_heads = p->n_heads,
                                       .n_kv_heads = cache->params.n_kv_heads,
                                       .type = KVANT_CUDA_F32,
                                       .q = p->q,
                                       .q_head_stride = p->q_head_stride,
                                       .out = p->out,
                                       .out_head_stride = p->out_head_stride,
                                       .lse = p->lse,
                                       .scale = p->scale,
                                       .v_center = v->center,
                                       .k_factors = k->attention_factors,
                                       .v_factors = v->attention_factors,
                                       .workspace = memory->workspace,
                                       .workspace_bytes = memory->workspace_bytes,
                                       .query_tokens = p->n_queries,
                                       .q_token_stride = p->q_token_stride,
                                       .out_token_stride = p->out_token_stride,
                                       .causal = p->causal,
                                       .window = p->window,
                                       .logit_softcap = p->logit_softcap > 0 ? p->logit_softcap : 0,
                                       .max_bias = p->max_bias > 0 ? p->max_bias : 0,
                                       .mask = p->mask ? p->mask + dropped : NULL,
                                       .mask_token_stride = p->mask_token_stride,
                                       .sinks = p->sinks };
    const size_t bytes =
        offsetof(cuda_arguments, table) - offsetof(cuda_arguments, length) + n_blocks * sizeof(int32_t);
    KVANT_FORWARD(kvant_cuda_said(
        kvant_cuda_memory_copy(&memory->arguments->length, &memory->staging->length, bytes), "table"));
    if (k->n_weights > cache->params.head_dim)
        KVANT_FORWARD(transform_queries(cache, k, &args));
    return kvant_cuda_said(kvant_cuda_attention(&args, NULL), "attention");
}

/* Blocks */

static kvant_status assign(kvant_cache *cache, uint32_t block, uint32_t sequence, uint32_t index)
{
    (void)cache, (void)block, (void)sequence, (void)index; /* no block is treated in another way */
    return KVANT_OK;
}

/* An error of the GPU comes back from the next call. */
static void clear(kvant_cache *cache, uint32_t block)
{
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++) {
        cuda_layer *l = layer_of(cache, layer);
        kvant_cuda_memory_clear(l->pages + block * l->block_bytes, l->block_bytes);
        l->parts[0].written[block] = l->parts[1].written[block] = 0;
    }
}

static kvant_status copy(kvant_cache *cache, uint32_t from, uint32_t to)
{
    cuda_memory *memory = cache->memory;
    cuda_arguments *device = memory->arguments;
    const int32_t numbers[2] = { (int32_t)from, (int32_t)to };
    KVANT_FORWARD(kvant_cuda_said(kvant_cuda_memory_copy(&device->from, numbers, sizeof numbers), "copy"));
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++) {
        cuda_layer *l = layer_of(cache, layer);
        const kvant_cuda_pages pages = { l->pages, l->block_bytes, l->block_bytes };
        KVANT_FORWARD(kvant_cuda_said(
            kvant_cuda_copy_blocks(&pages, l->block_bytes, 1, &device->from, &device->to, 1, NULL), "copy"));
        for (int role = 0; role < 2; role++)
            l->parts[role].written[to] = l->parts[role].written[from];
    }
    return KVANT_OK;
}

/* Export and import: through a tensor of one block on the host. */

static kvant_status create_block(const kvant_cache *cache, const cuda_part *part, kvant_tensor **tensor,
                                 void **memory)
{
    const kvant_tensor_params params = { .size = sizeof params,
                                         .codecs = part->codecs,
                                         .n_kv_heads = cache->params.n_kv_heads,
                                         .n_sequences = 1,
                                         .n_blocks = 1 };
    size_t bytes;
    *tensor = NULL, *memory = NULL;
    KVANT_FORWARD(kvant_tensor_size(&params, &bytes));
    *memory = kvant_alloc(1, bytes);
    KVANT_RETURN_IF(!*memory, kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no memory for a block"));
    return kvant_tensor_create(&params, *memory, tensor);
}

static void free_block(kvant_tensor **tensor, void *memory)
{
    kvant_tensor_free(tensor);
    kvant_free(memory);
}

static uint8_t *block_at(const cuda_layer *layer, kvant_role role, uint32_t block)
{
    return layer->pages + block * layer->block_bytes + layer->parts[role].offset;
}

static size_t export_size(const kvant_cache *cache, uint32_t layer, kvant_role role)
{
    kvant_tensor *tensor;
    void *memory;
    size_t bytes = 0;
    if (create_block(cache, &layer_of(cache, layer)->parts[role], &tensor, &memory) == KVANT_OK)
        bytes = kvant_tensor_export_size(tensor);
    free_block(&tensor, memory);
    return bytes;
}

static kvant_status export_block(const kvant_cache *cache, uint32_t layer, kvant_role role, uint32_t block,
                                 void *data, size_t bytes, size_t *used)
{
    const cuda_layer *l = layer_of(cache, layer);
    kvant_tensor *tensor;
    void *memory;
    kvant_status status = create_block(cache, &l->parts[role], &tensor, &memory);
    if (status == KVANT_OK)
        status = kvant_cuda_said(kvant_cuda_memory_copy(kvant_sealed_page(tensor, 0, 0), block_at(l, role, block),
                                               tensor->block_bytes),
                        "export");
    if (status == KVANT_OK) {
        tensor->blocks[0].written = l->parts[role].written[block];
        tensor->blocks[0].state = KVANT_BLOCK_SEALED;
        status = kvant_tensor_export(tensor, 0, data, bytes, used);
    }
    free_block(&tensor, memory);
    return status;
}

static kvant_status import_block(kvant_cache *cache, uint32_t layer, kvant_role role, uint32_t block,
                                 const void *data, size_t bytes)
{
    cuda_layer *l = layer_of(cache, layer);
    kvant_tensor *tensor;
    void *memory;
    kvant_status status = create_block(cache, &l->parts[role], &tensor, &memory);
    if (status == KVANT_OK)
        status = kvant_tensor_import(tensor, 0, data, bytes);
    if (status == KVANT_OK && tensor->blocks[0].version)
        status = kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                            "cache on cuda: the exported block has a centre or scale of its own");
    if (status == KVANT_OK)
        status = kvant_cuda_said(kvant_cuda_memory_copy(block_at(l, role, block), kvant_sealed_page(tensor, 0, 0),
                                               tensor->block_bytes),
                        "import");
    if (status == KVANT_OK)
        l->parts[role].written[block] = tensor->blocks[0].written;
    free_block(&tensor, memory);
    return status;
}

static uint64_t written(const kvant_cache *cache, uint32_t layer, kvant_role role, uint32_t block)
{
    return layer_of(cache, layer)->parts[role].written[block];
}

static void get_info(const kvant_cache *cache, uint32_t layer, kvant_role role, kvant_device_info *info)
{
    const cuda_part *part = &layer_of(cache, layer)->parts[role];
    *info = (kvant_device_info){ .sealed_bytes = part->page_bytes * cache->params.n_kv_heads };
    for (uint32_t block = 0; block < cache->n_blocks; block++)
        info->written_blocks += part->written[block] != 0;
    info->bytes = info->written_blocks * info->sealed_bytes;
}

const kvant_device kvant_device_cuda = { .create = kvant_cuda_layers_create,
                                         .destroy = kvant_cuda_layers_destroy,
                                         .assign = assign,
                                         .append = append,
                                         .attend = attend,
                                         .clear = clear,
                                         .copy = copy,
                                         .export_size = export_size,
                                         .export = export_block,
                                         .import = import_block,
                                         .written = written,
                                         .get_info = get_info };
