/* cuda_exact.c - exact rows of a cache on a GPU: fp16 pages that attention reads, of blocks that
 * their tensors have sealed. The plan (store/plan.h) decides which blocks have such a page. This
 * file carries the decisions out, for all layers at once.
 *
 * A cache with an exact part (kvant_scheme_exact) has pages for it. Other caches have one page per
 * sequence and one more, and only for codecs with a trellis search, chunks or feedback. These take
 * as long for one token as for 64. These caches also keep the rows as floats, so that the codes are
 * the same as without exact pages.
 *
 * Keys and values have the same page numbers. A page's codes are computed when the block gives its
 * page up, or when a caller needs the block's sealed bytes. Then only rows that are newer than
 * their codes are encoded. */
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "cuda_layers.h"

#define ALL_SLOTS UINT64_MAX
#define TOGETHER KVANT_CUDA_SEAL_TOGETHER

/* Sizes */

static bool searches(const kvant_codec *codec)
{
    const kvant_codec_view *view = kvant_codec_get_view(codec);
    return codec->info.block_tokens == 1 && codec->info.recent_tokens == 0 &&
           (view->kind == KVANT_CODES_TRELLIS || view->kind == KVANT_CODES_CHUNK ||
            view->feedback.pivots);
}

/* Counts the open pages of a part's tensor, without pages for first tokens that the plan keeps
 * exact. */
static kvant_status count_open_pages(const kvant_cache *cache, const kvant_tensor_params *params,
                                     cuda_part *part)
{
    const cuda_memory *memory = cache->memory;
    const kvant_codec_info *info = &params->codecs[0]->info;
    const size_t block = (size_t)params->n_kv_heads * info->page_bytes,
                 open = (size_t)params->n_kv_heads * KVANT_PAGE_TOKENS * info->head_dim *
                        sizeof(uint16_t);
    const size_t sinks = kvant_plan_blocks(info->sink_tokens);
    size_t bytes;
    KVANT_FORWARD(kvant_tensor_size(params, &bytes));
    part->stores_fp16 = block >= open;
    part->n_open = (uint32_t)((bytes - params->n_blocks * block) / open);
    if (info->block_tokens == 1 && info->sink_tokens <= memory->n_first)
        part->n_unused =
            params->n_sequences * (sinks < params->n_blocks ? (uint32_t)sinks : params->n_blocks);
    return KVANT_OK;
}

/* Numbers a layer's exact pages after the open pages of both roles. */
static kvant_status place_pages(kvant_cache *cache, uint32_t layer, bool *any_searches)
{
    cuda_layer *l = kvant_cuda_layer(cache, layer);
    for (int role = 0; role < 2; role++) {
        cuda_part *part = &l->parts[role];
        kvant_tensor_params params;
        KVANT_FORWARD(kvant_layers_params(cache, layer, (kvant_role)role, &params));
        KVANT_FORWARD(count_open_pages(cache, &params, part));
        l->has_exact |= searches(params.codecs[0]);
        l->first_exact = part->n_open > l->first_exact ? part->n_open : l->first_exact;
    }
    *any_searches |= l->has_exact;
    l->has_exact |= !((cuda_memory *)cache->memory)->keeps_floats;
    return KVANT_OK;
}

/* If there are more sequences than pages of the exact part, codecs with a trellis search, chunks or
 * feedback get a page for each sequence. */
static kvant_plan_params plan_params(const kvant_cache *cache, const kvant_exact_part *part,
                                     bool any_searches)
{
    const uint32_t n = any_searches ? cache->params.max_sequences + 1 : 0,
                   step = (uint32_t)kvant_plan_blocks(part->step),
                   all = step ? (uint32_t)kvant_plan_pages(part->total, part->first + part->newest,
                                                           part->step)
                              : 0,
                   pages = all > n ? all : n;
    return (kvant_plan_params){ .n_blocks = cache->n_blocks,
                                .n_pages = pages < cache->n_blocks ? pages : cache->n_blocks,
                                .step_pages = part->step ? step : pages,
                                .first = part->first,
                                .newest = part->newest };
}

static kvant_status create_layer(cuda_memory *memory, cuda_layer *l)
{
    for (int role = 0; role < 2 && l->has_exact; role++) {
        l->exact[role] = kvant_alloc(memory->n_exact, sizeof *l->exact[role]);
        KVANT_RETURN_IF(!l->exact[role], KVANT_ERR_MEMORY);
    }
    return KVANT_OK;
}

static kvant_status create_plan(kvant_cache *cache, const kvant_plan_params *params)
{
    cuda_memory *memory = cache->memory;
    memory->n_exact = params->n_pages;
    memory->views = kvant_alloc(cache->params.max_sequences, sizeof *memory->views);
    KVANT_RETURN_IF(!memory->views, KVANT_ERR_MEMORY);
    for (uint32_t i = 0; i < memory->n_layers; i++)
        KVANT_FORWARD(create_layer(memory, &memory->layers[i]));
    return kvant_plan_create(params, &memory->plan);
}

kvant_status kvant_cuda_exact_create(kvant_cache *cache)
{
    cuda_memory *memory = cache->memory;
    kvant_exact_part part = { .size = sizeof part };
    bool any_searches = false;
    KVANT_FORWARD(kvant_scheme_exact(cache->scheme, cache->params.max_tokens,
                                     cache->params.max_sequences, &part));
    memory->keeps_floats = part.step == 0;
    memory->n_first = part.first;
    for (uint32_t i = 0; i < memory->n_layers; i++)
        KVANT_FORWARD(place_pages(cache, i, &any_searches));
    const kvant_plan_params params = plan_params(cache, &part, any_searches);
    if (params.n_pages && create_plan(cache, &params) != KVANT_OK)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: out of memory for its tables");
    return KVANT_OK;
}

void kvant_cuda_exact_destroy(cuda_memory *memory)
{
    for (uint32_t i = 0; memory->layers && i < memory->n_layers; i++) {
        kvant_free(memory->layers[i].exact[KVANT_ROLE_K]);
        kvant_free(memory->layers[i].exact[KVANT_ROLE_V]);
    }
    kvant_plan_free(&memory->plan);
    kvant_free(memory->views);
}

/* Pages */

void *kvant_cuda_exact_at(const cuda_part *part, int32_t page)
{
    const kvant_cuda_pages pages = kvant_cuda_exact_pages(part);
    return (uint8_t *)pages.base + (size_t)page * pages.block_stride;
}

kvant_cuda_pages kvant_cuda_exact_pages(const cuda_part *part)
{
    kvant_cuda_pages pages = kvant_cuda_pages_of(part, true);
    pages.base = (uint8_t *)pages.base + part->layer->first_exact * pages.block_stride;
    return pages;
}

/* The page that the plan gives a block of a layer, or KVANT_NO_PAGE. */
static int32_t planned(const cuda_part *part, uint32_t block)
{
    return kvant_cuda_has_exact(part) ? kvant_plan_page(part->memory->plan, block) : KVANT_NO_PAGE;
}

static cuda_exact *exact_of(const cuda_part *part, int32_t page)
{
    return &part->layer->exact[part->role][page];
}

int32_t kvant_cuda_exact_page(const cuda_part *part, uint32_t block)
{
    const int32_t page = planned(part, block);
    return page >= 0 && exact_of(part, page)->there ? page : KVANT_NO_PAGE;
}

int32_t kvant_cuda_page_of(const cuda_part *part, uint32_t block)
{
    const int32_t open = part->tensor->blocks[block].open_page,
                  page = open >= 0 ? KVANT_NO_PAGE : kvant_cuda_exact_page(part, block);
    return page >= 0 ? (int32_t)part->layer->first_exact + page : open;
}

void kvant_cuda_exact_drop(cuda_part *part, uint32_t block)
{
    const int32_t page = planned(part, block);
    if (page >= 0)
        *exact_of(part, page) = (cuda_exact){ 0 };
}

/* Encoding */

/* Returns the rows of a page in the form that append accepts: floats if the cache keeps floats. */
static kvant_cuda_rows stored_rows(const cuda_part *part, int32_t page)
{
    const size_t d = part->tensor->head_dim, rows = KVANT_PAGE_TOKENS * d;
    return (kvant_cuda_rows){ .codec = part->codec,
                              .pages = kvant_cuda_pages_of(part, false),
                              .rows = part->floats
                                          ? (void *)(part->floats +
                                                     (size_t)page * part->tensor->n_kv_heads * rows)
                                          : kvant_cuda_exact_at(part, page),
                              .token_stride = d,
                              .head_stride = rows };
}

/* Encodes rows of a page for the roles that roles[] names. */
static void encode_rows(cuda_layer *layer, const bool roles[2], kvant_plan_change of, uint64_t rows)
{
    cuda_memory *memory = layer->parts[0].memory;
    int64_t slots[KVANT_PAGE_TOKENS];
    kvant_cuda_append_args args = { .size = sizeof args,
                                    .type = memory->keeps_floats ? KVANT_CUDA_F32 : KVANT_CUDA_F16,
                                    .n_tokens = KVANT_PAGE_TOKENS,
                                    .n_kv_heads = layer->parts[0].tensor->n_kv_heads,
                                    .slots = memory->arguments->pending_slots,
                                    .refused = memory->refused,
                                    .transformed = 1 };
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
        slots[i] = rows >> i & 1 ? (int64_t)of.block * KVANT_PAGE_TOKENS + i : -1;
    for (int role = 0; role < 2; role++) {
        const cuda_part *part = &layer->parts[role];
        if (!roles[role])
            continue;
        *(role == KVANT_ROLE_K ? &args.k : &args.v) = stored_rows(part, (int32_t)of.page);
        args.centroids[role] = part->centroids;
        args.k_feedback = role == KVANT_ROLE_K ? part->feedback : args.k_feedback;
    }
    kvant_cuda_record_error(memory,
                            kvant_cuda_memory_copy(memory->arguments->pending_slots, slots,
                                                   sizeof slots, memory->stream),
                            "append");
    kvant_cuda_record_error(memory, kvant_cuda_append(&args, memory->stream), "append");
}

/* The slots of a page whose rows are newer than their codes, a bit each. */
static uint64_t dirty_rows(const cuda_part *part, kvant_plan_change of)
{
    const cuda_exact *e = exact_of(part, (int32_t)of.page);
    return e->there ? e->dirty & part->tensor->blocks[of.block].written : 0;
}

static void encode_dirty(cuda_part *part, kvant_plan_change of)
{
    const bool roles[2] = { part->role == KVANT_ROLE_K, part->role == KVANT_ROLE_V };
    const uint64_t dirty = dirty_rows(part, of);
    if (dirty)
        encode_rows(part->layer, roles, of, dirty);
    exact_of(part, (int32_t)of.page)->dirty = 0;
}

void kvant_cuda_exact_encode(cuda_part *part, uint32_t block)
{
    const int32_t page = kvant_cuda_exact_page(part, block);
    if (page >= 0)
        encode_dirty(part, (kvant_plan_change){ .block = block, .page = (uint32_t)page });
}

static kvant_cuda_seal_pages stored_pages(const cuda_part *part)
{
    const size_t page = (size_t)KVANT_PAGE_TOKENS * part->tensor->head_dim * sizeof(float);
    const kvant_cuda_pages floats = { part->floats, part->tensor->n_kv_heads * page, page };
    return (kvant_cuda_seal_pages){ .codec = part->codec,
                                    .open = part->floats ? floats : kvant_cuda_exact_pages(part),
                                    .sealed = kvant_cuda_pages_of(part, false) };
}

/* Encodes whole blocks of keys and values, in one launch. */
static void encode_blocks(cuda_layer *layer, int32_t lists[2][TOGETHER], uint32_t n)
{
    const cuda_part *k = &layer->parts[KVANT_ROLE_K], *v = &layer->parts[KVANT_ROLE_V];
    cuda_memory *memory = k->memory;
    const kvant_cuda_seal_args args = { .size = sizeof args,
                                        .k = stored_pages(k),
                                        .v = stored_pages(v),
                                        .n_blocks = n,
                                        .n_kv_heads = k->tensor->n_kv_heads,
                                        .from = memory->arguments->full[0],
                                        .to = memory->arguments->full[1],
                                        .refused = memory->refused,
                                        .k_feedback = k->feedback,
                                        .exact = memory->keeps_floats,
                                        .centroids = { k->centroids, v->centroids } };
    if (!n)
        return;
    kvant_cuda_record_error(memory,
                            kvant_cuda_memory_copy(memory->arguments->full, lists,
                                                   sizeof memory->arguments->full, memory->stream),
                            "append");
    kvant_cuda_record_error(memory, kvant_cuda_seal(&args, memory->stream), "append");
}

static void seal(cuda_layer *layer, const kvant_plan_change *list, uint32_t n)
{
    cuda_part *k = &layer->parts[KVANT_ROLE_K], *v = &layer->parts[KVANT_ROLE_V];
    int32_t lists[2][TOGETHER]; /* pages, blocks */
    uint32_t n_whole = 0;
    for (uint32_t i = 0; i < n; i++) {
        const bool whole =
            dirty_rows(k, list[i]) == ALL_SLOTS && dirty_rows(v, list[i]) == ALL_SLOTS;
        if (whole) {
            lists[0][n_whole] = (int32_t)list[i].page;
            lists[1][n_whole++] = (int32_t)list[i].block;
        } else {
            encode_dirty(k, list[i]);
            encode_dirty(v, list[i]);
        }
        if (n_whole == TOGETHER || i + 1 == n) {
            encode_blocks(layer, lists, n_whole);
            n_whole = 0;
        }
    }
}

/* Plans */

static void carry_out(cuda_memory *memory, const kvant_plan_changes *changes)
{
    for (cuda_layer *l = memory->layers; l < memory->layers + memory->n_layers; l++) {
        if (!l->has_exact)
            continue;
        seal(l, changes->seal, changes->n_seal);
        for (uint32_t i = 0; i < changes->n_seal; i++)
            l->exact[0][changes->seal[i].page] = l->exact[1][changes->seal[i].page] =
                (cuda_exact){ 0 };
        for (uint32_t i = 0; i < changes->n_open; i++)
            l->exact[0][changes->open[i].page] = l->exact[1][changes->open[i].page] =
                (cuda_exact){ 0 };
    }
}

/* Finds the position and the sequence of each row. */
static uint32_t find_views(const kvant_cache *cache, uint32_t layer, uint32_t n, int32_t *positions)
{
    const kvant_block *blocks = cache->tensors[2 * layer]->blocks, *last = NULL;
    kvant_plan_view *views = ((cuda_memory *)cache->memory)->views;
    uint32_t n_views = 0;
    for (uint32_t i = 0; i < n; i++) {
        const kvant_block *b = &blocks[cache->slots[i] / KVANT_PAGE_TOKENS];
        const kvant_sequence *s = &cache->sequences[b->sequence];
        positions[i] = (int32_t)(b->index * KVANT_PAGE_TOKENS +
                                 (uint32_t)(cache->slots[i] % KVANT_PAGE_TOKENS));
        if (!last || last->sequence != b->sequence)
            views[n_views++] = (kvant_plan_view){ s->table, s->n_blocks, positions[i] };
        last = b;
    }
    return n_views;
}

/* All layers of a step have the same rows, so the call for the first layer plans for all of
 * them. */
void kvant_cuda_exact_plan(kvant_cache *cache, uint32_t layer, uint32_t n)
{
    cuda_memory *memory = cache->memory;
    int32_t positions[KVANT_CACHE_BATCH];
    const size_t bytes = n * sizeof *cache->slots;
    if (!memory->plan ||
        (memory->planned.n == n && memcmp(memory->planned.slots, cache->slots, bytes) == 0))
        return;
    memcpy(memory->planned.slots, cache->slots, bytes);
    memory->planned.n = n;
    const uint32_t n_views = find_views(cache, layer, n, positions);
    const kvant_plan_changes changes =
        kvant_plan_step_rows(memory->plan, &(kvant_plan_step){ cache->slots, positions, n,
                                                               memory->views, n_views, false });
    carry_out(memory, &changes);
}

void kvant_cuda_exact_plan_block(cuda_part *part, uint32_t block)
{
    cuda_memory *memory = part->memory;
    const kvant_block *b = &part->tensor->blocks[block];
    int64_t slots[KVANT_PAGE_TOKENS];
    int32_t positions[KVANT_PAGE_TOKENS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
        if (b->written >> i & 1) {
            slots[n] = (int64_t)block * KVANT_PAGE_TOKENS + i;
            positions[n++] = (int32_t)(b->index * KVANT_PAGE_TOKENS + i);
        }
    memory->planned.n = 0;
    const kvant_plan_changes changes = kvant_plan_step_rows(
        memory->plan, &(kvant_plan_step){ .slots = slots, .positions = positions, .n = n });
    carry_out(memory, &changes);
}

void kvant_cuda_exact_release(kvant_cache *cache, uint32_t block)
{
    cuda_memory *memory = cache->memory;
    memory->planned.n = 0;
    if (memory->plan)
        kvant_plan_release(memory->plan, block);
}

/* Writing rows to a page */

/* Decodes the old rows of a block into its page. */
static void decode_block(cuda_part *part, uint32_t block, int32_t page)
{
    cuda_memory *memory = part->memory;
    const kvant_cuda_pages pages = kvant_cuda_exact_pages(part);
    const int32_t lists[2] = { (int32_t)block, page * (int32_t)part->tensor->n_kv_heads };
    int32_t *on_device = memory->arguments->full[0];
    const kvant_cuda_decode_args args = { .size = sizeof args,
                                          .codec = part->codec,
                                          .pages = kvant_cuda_pages_of(part, false),
                                          .blocks = on_device,
                                          .n_blocks = 1,
                                          .n_kv_heads = part->tensor->n_kv_heads,
                                          .type = KVANT_CUDA_F16,
                                          .out = pages.base,
                                          .token_stride = part->tensor->head_dim,
                                          .head_stride = pages.head_stride / sizeof(uint16_t),
                                          .centroids = part->centroids,
                                          .to = on_device + 1,
                                          .transformed = 1 };
    kvant_cuda_record_error(
        memory, kvant_cuda_memory_copy(on_device, lists, sizeof lists, memory->stream), "append");
    kvant_cuda_record_error(memory, kvant_cuda_decode(&args, memory->stream), "append");
}

int32_t kvant_cuda_exact_page_for(cuda_part *part, uint32_t block, uint64_t slots)
{
    const int32_t page = planned(part, block);
    cuda_exact *e = page >= 0 ? exact_of(part, page) : NULL;
    if (!e)
        return KVANT_NO_PAGE;
    if (!e->there && part->tensor->blocks[block].written & ~slots)
        decode_block(part, block, page);
    e->dirty = e->there ? e->dirty | slots : slots;
    e->there = true;
    return page;
}

bool kvant_cuda_exact_store(cuda_part *part, uint32_t block, uint64_t dirty, const void *rows)
{
    const uint64_t written = part->tensor->blocks[block].written;
    const int32_t page = kvant_cuda_exact_page_for(part, block, written);
    if (page < 0)
        return false;
    exact_of(part, page)->dirty = dirty;
    if (rows != kvant_cuda_exact_at(part, page))
        kvant_cuda_record_error(part->memory,
                                kvant_cuda_memory_copy(kvant_cuda_exact_at(part, page), rows,
                                                       kvant_open_block_bytes(part->tensor),
                                                       part->memory->stream),
                                "copying pages");
    return true;
}
