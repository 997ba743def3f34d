/* cuda_attention.c - attention of a cache on a GPU.
 *
 * The kernels read a table with one entry per block, for keys and values alike: a sealed block or an
 * open one. They know one centre and scale per call. What does not fit that is made to fit:
 *
 *   gathering  A block that is open for keys or values alone, or has another open page in each, is
 *              copied to a pool of open pages that both share; sealed pages are decoded for that.
 *   parts      Blocks of different versions are separate calls, each with the others hidden. Their
 *              outputs are weighed by their log-sum-exp, to which <q, c> of the part is added. One
 *              part is merged, too, where the caller wants to see the effect of <q, c>: with a
 *              log-sum-exp or sinks.
 *
 * With a softcap <q, c> cannot be added afterwards. Then all blocks are gathered, and the centre is added
 * to their keys: slow, but right. */
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "cuda_attention.h"

#define MOST_QUERIES 32767u /* per call of the kernels */
#define NO_PART 0xffu

enum { SEALED, OPEN };

/* Checks */

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "attention: %s", what);
}

static kvant_status unsupported(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED, "cache on cuda: attention has no %s", what);
}

static const kvant_sequence *sequence_of(const attention_call *c, uint32_t i)
{
    return &c->cache->sequences[c->sequences[i]];
}

static kvant_status check_problem(const attention_call *c)
{
    const kvant_cache *cache = c->cache;
    const kvant_attention_problem *p = c->p;
    if (!p->q || !p->out || !p->n_queries)
        return invalid("q, out and n_queries must be set");
    if (p->n_heads % cache->params.n_kv_heads)
        return invalid("n_heads is not a multiple of the kv heads");
    if (p->n_queries > MOST_QUERIES)
        return unsupported("more than 32767 query tokens per call");
    if (p->exact)
        return unsupported("exact");
    for (uint32_t i = 0; i < c->batch; i++)
        if (p->causal && p->n_queries > sequence_of(c, i)->lengths[c->number])
            return invalid("causal with more query tokens than tokens");
    return KVANT_OK;
}

/* Blocks */

/* Blocks that were dropped are the first ones of a sequence: the rest is a shorter sequence with
 * the same distances. */
static uint32_t n_dropped(const kvant_sequence *s, uint32_t n)
{
    uint32_t first = 0;
    while (first < n && s->table[first] < 0)
        first++;
    return first;
}

static uint32_t n_blocks_of(uint32_t tokens)
{
    return (tokens + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
}

uint32_t kvant_cuda_call_blocks(const attention_call *c)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < c->batch; i++) {
        const uint32_t n = n_blocks_of(sequence_of(c, i)->lengths[c->number]), rest = n - n_dropped(sequence_of(c, i), n);
        most = rest > most ? rest : most;
    }
    return most;
}

/* Staging grows with the batch; what was in it is not needed any more. */
static kvant_status find_room(attention_call *c)
{
    cuda_memory *memory = c->memory;
    c->n_blocks = c->batch * c->stride;
    const size_t words = kvant_cuda_staging_words(c->batch, c->n_blocks);
    if (words > memory->staging_words) {
        kvant_free(memory->staging);
        memory->staging = kvant_alloc(2 * words, sizeof *memory->staging); /* and as they were copied last */
        memory->staging_words = memory->staging ? words : 0;
        memory->n_copied = 0;
        KVANT_RETURN_IF(!memory->staging, kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no memory for tables"));
    }
    return kvant_cuda_grow(&memory->tables, memory->staging_words * sizeof(int32_t), "memory for tables");
}

/* Staging begins with lengths and blocks. */
static void find_blocks(attention_call *c)
{
    int32_t *lengths = c->memory->staging;
    c->blocks = lengths + c->batch;
    for (uint32_t i = 0; i < c->batch; i++) {
        const kvant_sequence *s = sequence_of(c, i);
        const uint32_t tokens = s->lengths[c->number], n = n_blocks_of(tokens), first = n_dropped(s, n);
        c->dropped = first * KVANT_PAGE_TOKENS < tokens ? first * KVANT_PAGE_TOKENS : tokens;
        lengths[i] = (int32_t)(tokens - c->dropped);
        for (uint32_t j = 0; j < c->stride; j++)
            c->blocks[i * c->stride + j] = first + j < n ? s->table[first + j] : KVANT_NO_BLOCK;
    }
}

static bool is_there(const attention_call *c, uint32_t i)
{
    return c->blocks[i] >= 0;
}

/* Whether entry i is the block of its sequence's next row, which steps write. */
static bool is_next(const attention_call *c, uint32_t i)
{
    const uint32_t sequence = i / c->stride;
    return c->steps && i % c->stride == (uint32_t)c->memory->staging[sequence] / KVANT_PAGE_TOKENS;
}

static const kvant_block *block_of(const attention_call *c, int role, uint32_t i)
{
    return &c->layer->parts[role].tensor->blocks[c->blocks[i]];
}

static void find_parts(attention_call *c)
{
    uint8_t parts[KVANT_MAX_VERSIONS][KVANT_MAX_VERSIONS];
    memset(parts, NO_PART, sizeof parts);
    for (uint32_t i = 0; i < c->n_blocks; i++) {
        if (!is_there(c, i))
            continue;
        const uint8_t k = block_of(c, KVANT_ROLE_K, i)->version, v = block_of(c, KVANT_ROLE_V, i)->version;
        if (parts[k][v] == NO_PART) {
            c->versions[c->n_parts][KVANT_ROLE_K] = k;
            c->versions[c->n_parts][KVANT_ROLE_V] = v;
            parts[k][v] = (uint8_t)c->n_parts++;
        }
    }
    c->n_parts = c->n_parts ? c->n_parts : 1; /* no blocks: zeros are an output, too */
}

/* Rows of steps in a new block have the versions of the block before it. */
static bool in_part(const attention_call *c, uint32_t part, uint32_t i)
{
    i -= !is_there(c, i) && is_next(c, i);
    return is_there(c, i) && block_of(c, KVANT_ROLE_K, i)->version == c->versions[part][KVANT_ROLE_K] &&
           block_of(c, KVANT_ROLE_V, i)->version == c->versions[part][KVANT_ROLE_V];
}

static int32_t page_of(const attention_call *c, int role, uint32_t i)
{
    return kvant_cuda_page_of(&c->layer->parts[role], (uint32_t)c->blocks[i]);
}

/* Whether some block's open pages cannot be read where they lie. */
static bool must_gather(const attention_call *c)
{
    if (c->steps)
        return !c->in_place;
    for (uint32_t i = 0; i < c->n_blocks; i++)
        if (is_there(c, i) && page_of(c, KVANT_ROLE_K, i) != page_of(c, KVANT_ROLE_V, i))
            return true;
    return false;
}

static void gather(attention_call *c, uint32_t i, uint32_t to)
{
    for (int role = 0; role < 2; role++) {
        const int32_t page = page_of(c, role, i);
        gather_list *list = &c->lists[role][page >= 0 ? OPEN : SEALED];
        list->from[list->n] = page >= 0 ? page : c->blocks[i];
        list->to[list->n++] = (int32_t)to;
    }
}

static void gather_version(attention_call *c, uint32_t version)
{
    for (uint32_t i = 0; i < c->n_blocks; i++)
        if (is_there(c, i) && block_of(c, KVANT_ROLE_K, i)->version == version) {
            c->tables[i] = -1 - (int32_t)c->n_gathered;
            gather(c, i, c->n_gathered++);
        }
    for (int state = 0; state < 2; state++)
        c->ends[state][version] = c->lists[KVANT_ROLE_K][state].n;
}

/* The page of a sequence's next row. */
static int32_t next_page(const attention_call *c, uint32_t sequence)
{
    return c->in_place ? (int32_t)c->layer->first_exact + c->in_place[sequence] : (int32_t)sequence;
}

/* The table as if there were one part. */
static void make_table(attention_call *c)
{
    const bool gathers = must_gather(c);
    c->any_open = c->centers_back || c->steps;
    c->n_gathered = c->steps && gathers ? c->batch : 0;
    for (uint32_t version = 0; c->centers_back && version < KVANT_MAX_VERSIONS; version++)
        gather_version(c, version);
    for (uint32_t i = 0; i < c->n_blocks; i++) {
        const bool next = is_next(c, i), there = is_there(c, i);
        if (next || !there)
            c->tables[i] = next ? -1 - next_page(c, i / c->stride)
                                : 0; /* behind a sequence's last block: not read */
        if (next && there && gathers)
            gather(c, i, i / c->stride);
        if (next || !there || c->centers_back)
            continue;
        const int32_t k = page_of(c, KVANT_ROLE_K, i), v = page_of(c, KVANT_ROLE_V, i);
        const bool open = k >= 0 || v >= 0;
        c->tables[i] = !open ? c->blocks[i] : gathers ? -1 - (int32_t)c->n_gathered : -1 - k;
        c->any_open |= open;
        if (open && gathers)
            gather(c, i, c->n_gathered++);
    }
}

static void split_table(attention_call *c)
{
    for (uint32_t part = c->n_parts; c->n_parts > 1 && part-- > 0;)
        for (uint32_t i = 0; i < c->n_blocks; i++)
            c->tables[part * c->n_blocks + i] = in_part(c, part, i) ? c->tables[i] : KVANT_CUDA_NO_BLOCK;
    c->any_open |= c->n_parts > 1;
}

/* Then 4 lists of two arrays, and tables. Layers of a step have the same ones, which are copied once. */
static kvant_status stage(attention_call *c)
{
    cuda_memory *memory = c->memory;
    int32_t *at = c->blocks + c->n_blocks, *copied = memory->staging + memory->staging_words;
    for (int i = 0; i < 4; i++, at += 2 * c->n_blocks)
        c->lists[i / 2][i % 2] = (gather_list){ at, at + c->n_blocks, 0 };
    c->tables = at;
    make_table(c);
    split_table(c);
    c->lengths = memory->tables.at;
    c->on_device = c->lengths + (at - memory->staging);
    const size_t words = (size_t)(at - memory->staging) + (size_t)c->n_parts * c->n_blocks, bytes = words * sizeof *at;
    if (words == memory->n_copied && memcmp(copied, memory->staging, bytes) == 0)
        return KVANT_OK;
    memcpy(copied, memory->staging, bytes);
    memory->n_copied = 0;
    KVANT_FORWARD(kvant_cuda_said(kvant_cuda_memory_copy(memory->tables.at, memory->staging, bytes, memory->stream), "tables"));
    memory->n_copied = words;
    return KVANT_OK;
}

/* The address on the device of something in staging. */
static const int32_t *staged(const attention_call *c, const int32_t *at)
{
    return (const int32_t *)c->memory->tables.at + (at - c->memory->staging);
}

/* Gathered pages: role after role, kv head after kv head, so that a decoded block is contiguous per
 * kv head. Where a pool must be named and nothing is gathered, there is one block of room. */
kvant_cuda_pages kvant_cuda_call_pages(const attention_call *c, int role)
{
    const size_t page = c->layer->parts[role].tensor->open_page_bytes, n = c->gathered->bytes / (2 * c->n_kv_heads * page);
    return (kvant_cuda_pages){ (uint8_t *)c->gathered->at + (size_t)role * c->n_kv_heads * n * page, page,
                               n * page };
}

/* Entries first .. end - 1 of a list; center: transformed, or NULL. */
static kvant_status decode(const attention_call *c, int role, int state, uint32_t first, uint32_t end, const float *center)
{
    const cuda_part *part = &c->layer->parts[role];
    const gather_list *list = &c->lists[role][state];
    if (first == end)
        return KVANT_OK;
    const kvant_cuda_pages to = kvant_cuda_call_pages(c, role);
    const kvant_cuda_decode_args args = { .size = sizeof args,
                                          .codec = state == OPEN ? part->open_codec : part->codec,
                                          .pages = kvant_cuda_pages_of(part, state == OPEN),
                                          .blocks = staged(c, list->from + first),
                                          .n_blocks = end - first,
                                          .n_kv_heads = c->n_kv_heads,
                                          .type = KVANT_CUDA_F16,
                                          .out = to.base,
                                          .token_stride = c->head_dim,
                                          .head_stride = to.head_stride / sizeof(uint16_t),
                                          .center = center,
                                          .centroids = state == OPEN ? NULL : part->centroids,
                                          .to = staged(c, list->to + first),
                                          .transformed = 1 };
    return kvant_cuda_said(kvant_cuda_decode(&args, c->memory->stream), "open pages");
}

static kvant_status gather_pages(attention_call *c)
{
    const size_t page = c->layer->parts[0].tensor->open_page_bytes, n = c->n_gathered ? c->n_gathered : 1;
    if (c->any_open)
        KVANT_FORWARD(kvant_cuda_grow(c->gathered, 2 * c->n_kv_heads * n * page, "memory for open pages"));
    for (int i = 0; i < 4; i++)
        if (!c->centers_back || i / 2 == KVANT_ROLE_V)
            KVANT_FORWARD(decode(c, i / 2, i % 2, 0, c->lists[i / 2][i % 2].n, NULL));
    for (uint32_t i = 0; c->centers_back && i < 2 * KVANT_MAX_VERSIONS; i++) {
        const uint32_t version = i / 2, end = c->ends[i % 2][version], first = version ? c->ends[i % 2][version - 1] : 0;
        if (first < end)
            KVANT_FORWARD(decode(c, KVANT_ROLE_K, (int)(i % 2), first, end,
                                 kvant_cuda_version(&c->layer->parts[KVANT_ROLE_K], version).turned_center));
    }
    return KVANT_OK;
}

/* Calls */

/* Queries through the matrix of a calibration or a version, or through a dense rotation. */
static kvant_status transform_queries(attention_call *c, const cuda_version *version, kvant_cuda_attention_args *args)
{
    const cuda_part *keys = &c->layer->parts[KVANT_ROLE_K];
    const size_t width = (size_t)args->n_heads * c->head_dim;
    const uint32_t n = c->batch * args->query_tokens;
    KVANT_FORWARD(kvant_cuda_grow(&c->memory->queries, n * width * sizeof(float), "memory for queries"));
    const kvant_cuda_query_args queries = { .size = sizeof queries,
                                            .k_codec = version->codec,
                                            .batch = n,
                                            .n_heads = args->n_heads,
                                            .n_kv_heads = args->n_kv_heads,
                                            .type = KVANT_CUDA_F32,
                                            .q = c->p->q,
                                            .q_batch_stride = c->p->q_token_stride,
                                            .q_head_stride = c->p->q_head_stride,
                                            .inverse_weights = version->inverse_weights,
                                            .out = c->memory->queries.at };
    kvant_cuda_turn_args turn = kvant_cuda_turn_of(keys, false);
    turn.rows = c->p->q, turn.token_stride = c->p->q_token_stride, turn.head_stride = c->p->q_head_stride;
    turn.n_tokens = n, turn.n_heads = args->n_heads, turn.before = args->k_scale;
    turn.out = c->memory->queries.at, turn.out_token_stride = width, turn.out_head_stride = c->head_dim;
    args->q = c->memory->queries.at;
    args->q_token_stride = width;
    args->q_batch_stride = args->query_tokens * width;
    args->q_head_stride = c->head_dim;
    if (!version->turns)
        return kvant_cuda_said(kvant_cuda_transform_queries(&queries, c->memory->stream), "queries");
    args->k_scale = NULL;
    return kvant_cuda_said(kvant_cuda_turn(&turn, c->memory->stream), "queries");
}

/* Outputs of values with a dense rotation: turned back, then over the channels' scale. */
static kvant_status turn_outputs(const attention_call *c, const kvant_cuda_attention_args *args, const float *scale)
{
    kvant_cuda_turn_args turn = kvant_cuda_turn_of(&c->layer->parts[KVANT_ROLE_V], true);
    turn.rows = turn.out = args->out;
    turn.token_stride = turn.out_token_stride = args->out_token_stride;
    turn.head_stride = turn.out_head_stride = args->out_head_stride;
    turn.n_tokens = c->batch * args->query_tokens, turn.n_heads = args->n_heads, turn.after = scale;
    return kvant_cuda_said(kvant_cuda_turn(&turn, c->memory->stream), "outputs");
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

/* What all parts share. */
static kvant_cuda_attention_args arguments_of(const attention_call *c)
{
    const kvant_attention_problem *p = c->p;
    const cuda_part *k = &c->layer->parts[KVANT_ROLE_K], *v = &c->layer->parts[KVANT_ROLE_V];
    return (kvant_cuda_attention_args){ .size = sizeof(kvant_cuda_attention_args),
                                        .k_codec = k->codec,
                                        .v_codec = v->codec,
                                        .k = kvant_cuda_pages_of(k, false),
                                        .v = kvant_cuda_pages_of(v, false),
                                        .k_open = open_pool(c, KVANT_ROLE_K),
                                        .v_open = open_pool(c, KVANT_ROLE_V),
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
                                        .centroids = { k->centroids, v->centroids } };
}

static kvant_status attend_part(attention_call *c, uint32_t part, kvant_cuda_attention_args args)
{
    const cuda_version k = kvant_cuda_version(&c->layer->parts[KVANT_ROLE_K], c->versions[part][KVANT_ROLE_K]),
                       v = kvant_cuda_version(&c->layer->parts[KVANT_ROLE_V], c->versions[part][KVANT_ROLE_V]);
    const size_t rows = (size_t)args.batch * args.query_tokens * args.n_heads;
    float *outs = c->memory->partial.at;
    args.block_table = c->on_device + (size_t)part * c->n_blocks;
    args.k_codec = k.codec;
    args.k_scale = k.attention_scale;
    args.v_scale = v.attention_scale;
    args.v_center = v.center;
    if (c->merged) {
        args.out = outs + part * rows * c->head_dim;
        args.out_token_stride = (size_t)args.n_heads * c->head_dim;
        args.out_batch_stride = args.query_tokens * args.out_token_stride;
        args.out_head_stride = c->head_dim;
        args.lse = outs + (c->n_parts * c->head_dim + part) * rows;
        args.sinks = NULL;
    }
    if (k.turns || k.full)
        KVANT_FORWARD(transform_queries(c, &k, &args));
    if (v.turns)
        args.v_scale = NULL, args.v_center = v.turned_center;
    KVANT_FORWARD(kvant_cuda_said(kvant_cuda_attention(&args, c->memory->stream), "attention"));
    return v.turns ? turn_outputs(c, &args, v.attention_scale) : KVANT_OK;
}

static kvant_status merge(attention_call *c)
{
    const kvant_attention_problem *p = c->p;
    const size_t rows = (size_t)c->batch * p->n_queries * p->n_heads;
    const float *outs = c->memory->partial.at;
    kvant_cuda_merge_args args = { .size = sizeof args,
                                   .n_parts = c->n_parts,
                                   .n_queries = c->batch * p->n_queries,
                                   .n_heads = p->n_heads,
                                   .n_kv_heads = c->n_kv_heads,
                                   .head_dim = c->head_dim,
                                   .outs = outs,
                                   .lses = outs + c->n_parts * rows * c->head_dim,
                                   .q = p->q,
                                   .q_token_stride = p->q_token_stride,
                                   .q_head_stride = p->q_head_stride,
                                   .scale = p->scale,
                                   .sinks = p->sinks,
                                   .out = p->out,
                                   .out_token_stride = p->out_token_stride,
                                   .out_head_stride = p->out_head_stride,
                                   .lse = p->lse };
    for (uint32_t part = 0; part < c->n_parts; part++)
        args.centers[part] =
            c->centers_back ? NULL : kvant_cuda_version(&c->layer->parts[KVANT_ROLE_K], c->versions[part][KVANT_ROLE_K]).center;
    return kvant_cuda_said(kvant_cuda_merge(&args, c->memory->stream), "attention");
}

/* A prompt gets a workspace with scratch (cuda.h), if there is memory. */
static void find_scratch(attention_call *c, kvant_cuda_attention_args *args)
{
    cuda_buffer *scratch = &c->memory->scratch;
    if (args->n_heads / args->n_kv_heads * args->query_tokens <= KVANT_CUDA_SCRATCH_ROWS)
        return;
    const size_t pages = (size_t)args->batch * args->n_kv_heads * args->blocks_per_row * KVANT_CUDA_SCRATCH_PER_BLOCK(c->head_dim) + 1024,
                 bytes = c->memory->workspace_bytes + (pages < KVANT_CUDA_SCRATCH_BYTES ? pages : KVANT_CUDA_SCRATCH_BYTES);
    if (kvant_cuda_grow(scratch, bytes, "memory for unpacked pages") != KVANT_OK)
        return;
    args->workspace = scratch->at;
    args->workspace_bytes = scratch->bytes;
}

kvant_status kvant_cuda_call_room(const attention_call *c)
{
    const size_t rows = (size_t)c->batch * c->p->n_queries * c->p->n_heads;
    return kvant_cuda_grow(&c->memory->partial, c->merged ? c->n_parts * rows * (c->head_dim + 1) * sizeof(float) : 0,
                           "memory for outputs");
}

kvant_status kvant_cuda_call_run(attention_call *c)
{
    kvant_cuda_attention_args args = arguments_of(c);
    find_scratch(c, &args);
    KVANT_FORWARD(kvant_cuda_call_room(c));
    for (uint32_t part = 0; part < c->n_parts; part++)
        KVANT_FORWARD(attend_part(c, part, args));
    return c->merged ? merge(c) : KVANT_OK;
}

bool kvant_cuda_call_centred(const attention_call *c)
{
    for (uint32_t part = 0; part < c->n_parts; part++)
        if (kvant_version_affine(c->layer->parts[KVANT_ROLE_K].tensor, c->versions[part][KVANT_ROLE_K], 0).center)
            return true;
    return false;
}

kvant_status kvant_cuda_call_stage(attention_call *c)
{
    KVANT_FORWARD(find_room(c));
    find_blocks(c);
    find_parts(c);
    const bool centred = kvant_cuda_call_centred(c);
    c->centers_back = centred && c->p->logit_softcap > 0;
    c->merged = c->n_parts > 1 || (centred && !c->centers_back && (c->p->lse || c->p->sinks));
    KVANT_FORWARD(stage(c));
    return gather_pages(c);
}

attention_call kvant_cuda_call_of(kvant_cache *cache, uint32_t layer, const int32_t *sequences, uint32_t n_sequences,
                                  const kvant_attention_problem *p)
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

kvant_status kvant_cuda_layers_attend(kvant_cache *cache, uint32_t layer, const int32_t *sequences, uint32_t n_sequences,
                                      const kvant_attention_problem *p)
{
    attention_call c = kvant_cuda_call_of(cache, layer, sequences, n_sequences, p);
    KVANT_FORWARD(kvant_cuda_refused(c.memory));
    KVANT_FORWARD(check_problem(&c));
    c.stride = kvant_cuda_call_blocks(&c);
    KVANT_FORWARD(kvant_cuda_call_stage(&c));
    KVANT_FORWARD(kvant_cuda_call_run(&c));
    return kvant_cuda_said(c.memory->status, c.memory->failed);
}
