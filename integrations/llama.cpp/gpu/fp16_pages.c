/* fp16_pages.c - exact pages: blocks whose rows are fp16, next to the sealed pages of all blocks.
 *
 * Owns the caches, their tensors' exact pages, and their decoding. seal.c encodes them.
 * All tensors of a cache have exact pages for the same blocks, which the plan decides
 * (src/store/plan.h). */
#include "gpu.h"
#include "in_place.h"

#include <stdlib.h>
#include <string.h>

/* The cache's tensors */

static kvp_gpu_cache *find_cache(kvp_gpu *gpu, const kvp_kv *kv)
{
    kvp_gpu_cache *cache = gpu->caches;

    while (cache != NULL && cache->id != kv->cache)
        cache = cache->next;
    if (cache != NULL)
        return cache;
    cache = calloc(1, sizeof(*cache));
    if (cache == NULL)
        return NULL;
    cache->n_blocks = kvp_kv_blocks(&kv->shape);
    cache->n_streams = kv->shape.n_streams;
    cache->written = calloc(cache->n_blocks, sizeof(*cache->written));
    cache->held = calloc(cache->n_blocks, sizeof(*cache->held));
    cache->buckets.of = calloc(cache->n_blocks, sizeof(*cache->buckets.of));
    cache->buckets.host = calloc(cache->n_blocks, 2 * sizeof(*cache->buckets.host));
    cache->buckets.centers.positions =
        calloc(cache->n_blocks, sizeof(*cache->buckets.centers.positions));
    if (cache->written == NULL || cache->held == NULL || cache->buckets.of == NULL ||
        cache->buckets.host == NULL || cache->buckets.centers.positions == NULL) {
        free(cache->written);
        free(cache->held);
        free(cache->buckets.of);
        free(cache->buckets.host);
        free(cache->buckets.centers.positions);
        free(cache);
        return NULL;
    }
    kvp_gpu_buckets_forget(cache);
    cache->id = kv->cache;
    cache->gpu = gpu;
    cache->exact = kvp_kv_exact(&kv->shape, kv->settings, kv->shape.n_streams);
    cache->n_pages = kvp_kv_open_pages(&kv->shape, kv->settings);
    cache->next = gpu->caches;
    gpu->caches = cache;
    return cache;
}

/* Takes the pages from all blocks. */
static void close_all(kvp_gpu_cache *cache)
{
    for (uint32_t i = 0; i < cache->n_blocks && cache->table != NULL; i++)
        cache->table[i] = (int32_t)i;
    for (uint32_t i = 0; i < cache->n_blocks && cache->plan != NULL; i++)
        kvant_plan_release(cache->plan, i);
    for (uint32_t i = 0; i < cache->n_pages; i++)
        cache->pages[i] = (kvp_open_page){ .block = KVP_NO_PAGE };
    cache->table_changed = true;
}

/* Without an exact part (KVANT_CODEC with sink=, recent= or a trellis), only a few rows are pending
 * in pages, because encoding them takes as long as encoding a block. They may use all pages except
 * the pages for one sequence's first and newest tokens, which may begin anywhere in a block. */
static kvant_plan_params plan_params(const kvp_gpu_cache *cache)
{
    const kvant_exact_part *part = &cache->exact;
    const uint32_t ends = (uint32_t)(kvant_plan_blocks(part->first) +
                                     kvant_plan_blocks(part->newest) + (part->newest != 0));
    const uint32_t rest = cache->n_pages > ends ? cache->n_pages - ends : 1;

    return (kvant_plan_params){ .n_blocks = cache->n_blocks,
                                .n_pages = cache->n_pages,
                                .step_pages = part->step != 0
                                                  ? (uint32_t)kvant_plan_blocks(part->step)
                                                  : rest,
                                .first = part->first,
                                .newest = part->newest,
                                .step_rows = part->step != 0 ? 0 : KVP_SHORT_STEP_TOKENS };
}

/* Creates the plan and the table. A tensor that joins later may have more first and newest
 * tokens. */
static bool make_room(kvp_gpu_cache *cache)
{
    const kvant_plan_params params = plan_params(cache);

    if (cache->table != NULL) {
        kvant_plan_set_params(cache->plan, &params);
        return true;
    }
    if (kvant_plan_create(&params, &cache->plan) != KVANT_OK)
        return false;
    cache->table = malloc(cache->n_blocks * sizeof(*cache->table));
    close_all(cache);
    return cache->table != NULL && kvp_gpu_grow(cache->gpu, &cache->device_table,
                                                cache->n_blocks * sizeof(*cache->table), false);
}

size_t kvp_gpu_open_page_bytes(const kvp_gpu_cells *cells)
{
    return (size_t)KVANT_PAGE_TOKENS * cells->head_dim * sizeof(uint16_t);
}

/* Creates the exact pages of a tensor, when the first is needed, in the memory reserved for
 * them. */
bool kvp_gpu_ensure_pages(const kvp_kv *kv, uint32_t n)
{
    kvp_gpu_cells *cells = kv->cells;
    const size_t page = kvp_gpu_open_page_bytes(cells), bytes = n * cells->n_kv_heads * page;
    const size_t reserved = kvp_kv_open_bytes(&kv->shape, kv->settings);

    if (cells->open_pages.base != NULL)
        return true;
    if (reserved < bytes && !kvp_gpu_grow(cells->gpu, &cells->open, bytes, true))
        return false;
    for (int matrix = 0; matrix < 2; matrix++)
        if (cells->codecs[matrix] != NULL && cells->open_codecs[matrix] == NULL &&
            kvant_cuda_codec_create_open(cells->codecs[matrix], &cells->open_codecs[matrix]) !=
                KVANT_OK)
            return false;
    cells->open_codec = cells->open_codecs[cells->codec == cells->codecs[1]];
    cells->open_pages =
        (kvant_cuda_pages){ reserved < bytes ? cells->open.at
                                             : (char *)kv->memory + kv->reserved - reserved,
                            cells->n_kv_heads * page, page };
    return true;
}

/* Whether a codec family takes as long to encode one row as 64. */
static bool needs_trellis_search(const char *spec)
{
    return strncmp(spec, "trellis", 7) == 0 || strncmp(spec, "octopus", 7) == 0 ||
           strncmp(spec, "hqmq", 4) == 0;
}

bool kvp_gpu_cache_join(kvp_kv *kv, const kvant_codec_info *info)
{
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = find_cache(cells->gpu, kv);
    kvp_kv **tensors =
        cache != NULL ? realloc(cache->tensors, (cache->n_tensors + 1) * sizeof(kvp_kv *)) : NULL;

    if (tensors == NULL)
        return false;
    cache->tensors = tensors;
    cache->tensors[cache->n_tensors++] = kv;
    cells->cache = cache;
    cells->in_place = cache->in_place;
    cells->n_shifts = cache->shift.n;
    if (info->sink_tokens > cache->exact.first)
        cache->exact.first = info->sink_tokens;
    if (info->recent_tokens > cache->exact.newest)
        cache->exact.newest = info->recent_tokens;
    if (cells->group > 1) {
        cache->has_groups = true;
        if (cache->exact.newest == 0)
            cache->exact.newest = 1; /* the block that a sequence's next token goes to stays fp16 */
    }
    cache->keeps = cache->keeps || needs_trellis_search(info->spec) || cache->exact.first > 0 ||
                   cache->exact.newest > 0;
    cache->learns = cache->learning = cache->learns || cells->learns;
    cache->learns_key_transform = cache->lacks_key_transform =
        cache->learns_key_transform || cells->learns_key_transform;
    if (info->sink_tokens > cache->sink_tokens)
        cache->sink_tokens = info->sink_tokens;
    if (!kvp_gpu_marks_create(cache) || (cache->keeps && !make_room(cache)))
        return false;
    if (cells->learns_key_transform && cache->positions == NULL &&
        (cache->positions = malloc((size_t)cache->n_blocks * KVANT_PAGE_TOKENS *
                                   sizeof(*cache->positions))) == NULL)
        return false;
    for (uint32_t i = 0; i < cache->n_pages; i++)
        if (cache->table != NULL && cache->pages[i].block != KVP_NO_PAGE)
            return kvp_gpu_ensure_pages(
                /* blocks got exact pages before this tensor knew its head_dim */
                kv, cache->n_pages);
    return true;
}

void kvp_gpu_cache_leave(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache, **at;

    if (cache == NULL)
        return;
    for (size_t i = 0; i < cache->n_tensors; i++)
        if (cache->tensors[i] == kv)
            cache->tensors[i] = cache->tensors[--cache->n_tensors];
    if (cache->n_tensors > 0)
        return;
    for (at = &cells->gpu->caches; *at != NULL && *at != cache; at = &(*at)->next)
        ;
    if (*at != NULL)
        *at = cache->next;
    kvp_gpu_marks_free(cache);
    kvp_gpu_release(&cache->device_table);
    kvp_gpu_release(&cache->slots);
    kvp_gpu_release(&cache->moved);
    kvp_gpu_release(&cache->expanded);
    kvp_gpu_release(&cache->late.arrays);
    kvp_gpu_release(&cache->sealing.lists);
    kvp_gpu_staging_free(cache);
    kvp_gpu_buckets_free(cache);
    kvp_gpu_in_place_free(cache);
    kvp_gpu_queries_free(cache);
    free(cache->shift.mixed);
    free(cache->shift.all);
    free(cache->table);
    free(cache->written);
    free(cache->held);
    kvant_plan_free(&cache->plan);
    free(cache->first);
    free(cache->positions);
    free(cache->tensors);
    free(cache);
}

/* Work on pages */

/* Counts the blocks with rows among the blocks that get pages. A block without rows needs no
 * decoding: no token sees the rows of another block that its page still holds. */
static uint32_t count_rows(const kvp_gpu_cache *cache, const kvant_plan_changes *changes)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < changes->n_open; i++)
        n += cache->written[changes->open[i].block] != 0;
    return n;
}

/* Copies the numbers of the n blocks to the GPU, and behind them the places for their rows. Places
 * are in units of 64 rows: a page has 64 rows per kv head (seal.c). */
static bool upload_blocks(kvp_gpu_cache *cache, const kvant_plan_changes *changes, uint32_t n,
                          uint32_t n_kv_heads, cu_stream stream)
{
    int32_t numbers[2 * KVP_MOST_PAGES];
    uint32_t at = 0;

    for (uint32_t i = 0; i < changes->n_open; i++) {
        if (cache->written[changes->open[i].block] == 0)
            continue;
        numbers[at] = (int32_t)changes->open[i].block;
        numbers[n + at++] = (int32_t)(changes->open[i].page * n_kv_heads);
    }
    return kvp_gpu_grow(cache->gpu, &cache->moved, sizeof(numbers), false) &&
           kvp_cu_write(cache->moved.at, numbers, 2 * n * sizeof(*numbers), stream);
}

/* Decodes sealed rows into exact pages. */
static bool decode(kvp_gpu_cache *cache, const kvant_plan_changes *changes, cu_stream stream)
{
    const uint32_t n = count_rows(cache, changes);
    uint32_t heads = 0;
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors && ok && n > 0; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (cells->in_place)
            continue;
        ok = heads == cells->n_kv_heads ||
             upload_blocks(cache, changes, n, cells->n_kv_heads, stream);
        heads = cells->n_kv_heads;
        const kvant_cuda_decode_args args = { .size = sizeof(args),
                                              .codec = cells->codec,
                                              .pages = cells->pages,
                                              .blocks = cache->moved.at,
                                              .n_blocks = n,
                                              .n_kv_heads = cells->n_kv_heads,
                                              .type = KVANT_CUDA_F16,
                                              .out = cells->open_pages.base,
                                              .token_stride = cells->head_dim,
                                              .head_stride =
                                                  cells->open_pages.head_stride / sizeof(uint16_t),
                                              .to = (const int32_t *)cache->moved.at + n,
                                              .transformed = 1 };
        ok = ok && kvant_cuda_decode(&args, stream) == KVANT_OK;
    }
    return ok;
}

void kvp_gpu_put_page(kvp_gpu_cache *cache, uint32_t page, int32_t block)
{
    if (cache->pages[page].block != KVP_NO_PAGE)
        cache->table[cache->pages[page].block] = cache->pages[page].block;
    cache->pages[page] = (kvp_open_page){ .block = block };
    if (block != KVP_NO_PAGE)
        cache->table[block] = -1 - (int32_t)page;
    cache->table_changed = true;
}

bool kvp_gpu_carry_out(kvp_gpu_cache *cache, const kvant_plan_changes *changes, bool in_prompt,
                       cu_stream stream)
{
    kvp_open_page leaving[KVP_MOST_PAGES] = { 0 };
    const bool joins_late = cache->late.any && !cache->late.hands_over;
    bool ok = true;

    if (changes->n_seal + changes->n_open == 0)
        return true;
    for (uint32_t i = 0; i < changes->n_seal; i++)
        leaving[changes->seal[i].page] = cache->pages[changes->seal[i].page];
    if (joins_late)
        memcpy(cache->late.leaving, leaving, sizeof(leaving));
    else if (in_prompt && count_rows(cache, changes) == 0 && kvp_gpu_may_seal_ahead(cache, leaving))
        ok = kvp_gpu_seal_ahead(cache, leaving, stream);
    else
        ok = kvp_gpu_encode_pages(cache, leaving, NULL, stream);
    for (size_t i = 0; i < cache->n_tensors && ok; i++)
        ok = kvp_gpu_ensure_pages(cache->tensors[i], cache->n_pages);
    ok = ok && decode(cache, changes, stream);
    if (!ok)
        kvant_plan_undo(cache->plan);
    for (uint32_t i = 0; i < changes->n_seal && ok; i++)
        kvp_gpu_put_page(cache, changes->seal[i].page, KVP_NO_PAGE);
    for (uint32_t i = 0; i < changes->n_open && ok; i++)
        kvp_gpu_put_page(cache, changes->open[i].page, (int32_t)changes->open[i].block);
    return ok;
}

/* Outside of graphs */

bool kvp_gpu_cache_settle(kvp_gpu_cache *cache, cu_stream stream)
{
    const bool ok =
        kvp_gpu_first_matrix_settle(cache) &&
        (cache->table == NULL || kvp_gpu_encode_pages(cache, cache->pages, NULL, stream));

    for (uint32_t i = 0; i < cache->n_pages && ok; i++)
        cache->pages[i].dirty = cache->pages[i].moved = 0;
    return ok;
}

void kvp_gpu_cache_forget(kvp_gpu_cache *cache)
{
    if (cache->table != NULL)
        close_all(cache);
    memset(cache->written, 0, cache->n_blocks * sizeof(*cache->written));
    cache->planner = NULL;
    cache->learning = cache->learns;
    cache->n_first = 0;
    kvp_gpu_buckets_forget(cache);
    cache->lacks_key_transform = cache->learns_key_transform;
    cache->lesson = (kvant_lesson){ 0 };
    cache->keeps_queries = cache->teaches = cache->late.any = cache->late.seals = false;
    cache->shift.failed = cache->shift.due = false;
    kvp_gpu_queries_forget(cache);
}

int64_t kvp_gpu_page_of(const kvp_gpu_cache *cache, int64_t cell)
{
    const int32_t at = cache->table != NULL ? cache->table[cell / KVANT_PAGE_TOKENS] : 0;

    return at < 0 ? -1 - at : -1;
}

void kvp_gpu_cache_mark_written(kvp_gpu_cache *cache, int64_t cell)
{
    uint64_t *written = &cache->written[cell / KVANT_PAGE_TOKENS];

    cache->buckets.changed = cache->buckets.changed || *written == 0;
    *written |= (uint64_t)1 << (cell % KVANT_PAGE_TOKENS);
}

void kvp_gpu_cache_mark_copied(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n)
{
    memmove(cache->written + to, cache->written + first, n * sizeof(*cache->written));
    cache->buckets.changed = true;
}

bool kvp_gpu_cache_is_empty(const kvp_gpu_cache *cache)
{
    uint64_t any = 0;

    for (uint32_t block = 0; block < cache->n_blocks; block++)
        any |= cache->written[block];
    return any == 0;
}
