/* groups.c - rows of codecs whose groups have several tokens. These codecs encode the tokens of a
 * block together, so rows are fp16 until their block is sealed.
 *
 * Rows in exact pages are sealed with their block (fp16_pages.c). Other rows, of long steps, go to
 * staging pages, which are fp16 pages that hold a block only while it is sealed. All caches of a
 * GPU share the memory of these pages, because all work on them is on one stream. size.c counts it.
 * This file owns the staging pages and the lists of what goes there. step.c decides which blocks
 * have exact pages. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

/* The blocks of a step, in the order of staging pages */

static uint64_t earlier_rows(const kvp_gpu_cache *cache, const kvp_gpu_staged_block *b)
{
    return cache->written[b->block] & ~b->rows;
}

/* Lists the block of a row without an exact page. A row in an exact page has no codes from now on.
 * at: by block, 1 + its place in the list. */
static void list_row(kvp_gpu_cache *cache, int64_t cell, kvp_gpu_staging *s, uint32_t *at)
{
    const uint32_t block = (uint32_t)(cell / KVANT_PAGE_TOKENS);
    const uint64_t bit = (uint64_t)1 << (cell % KVANT_PAGE_TOKENS);
    const int64_t page = kvp_gpu_page_of(cache, cell);

    if (page >= 0) {
        cache->pages[page].dirty |= bit;
        return;
    }
    if (at[block] == 0) {
        s->blocks[s->n_blocks] = (kvp_gpu_staged_block){ .block = block };
        at[block] = ++s->n_blocks;
    }
    s->blocks[at[block] - 1].rows |= bit;
}

/* Puts blocks with earlier rows first, so that the first pages of a pass are decoded. */
static void sort_blocks(const kvp_gpu_cache *cache, kvp_gpu_staging *s, uint32_t *at)
{
    s->n_decoded = 0;
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        const kvp_gpu_staged_block b = s->blocks[i];
        if (earlier_rows(cache, &b) == 0)
            continue;
        s->blocks[i] = s->blocks[s->n_decoded];
        s->blocks[s->n_decoded++] = b;
    }
    for (uint32_t i = 0; i < s->n_blocks; i++)
        at[s->blocks[i].block] = i + 1;
}

static uint32_t blocks_of_pass(const kvp_gpu_staging *s, uint32_t pass)
{
    return kvp_gpu_most_staged(s->n_blocks - pass * KVP_MOST_STAGED);
}

static uint32_t n_passes(const kvp_gpu_staging *s)
{
    return (s->n_blocks + KVP_MOST_STAGED - 1) / KVP_MOST_STAGED;
}

/* On the GPU: slots in staging pages, n_rows for each pass; then blocks; then how many tokens of
 * each block are written. */
static bool upload_lists(kvp_gpu_cache *cache, const int64_t *cells, kvp_gpu_staging *s,
                         const uint32_t *at, cu_stream stream)
{
    const size_t n_slots = n_passes(s) * s->n_rows;
    const size_t bytes = n_slots * sizeof(int64_t) + 2 * (size_t)s->n_blocks * sizeof(int32_t);
    int64_t *slots = malloc(bytes);
    int32_t *blocks = (int32_t *)(void *)(slots + n_slots);
    bool ok = slots != NULL;

    for (size_t i = 0; i < n_slots && ok; i++) {
        const int64_t cell = cells[i % s->n_rows];
        const uint32_t place = cell < 0 ? 0 : at[cell / KVANT_PAGE_TOKENS];
        slots[i] = place > 0 && (place - 1) / KVP_MOST_STAGED == i / s->n_rows
                       ? (int64_t)((place - 1) % KVP_MOST_STAGED) * KVANT_PAGE_TOKENS +
                             cell % KVANT_PAGE_TOKENS
                       : -1;
    }
    for (uint32_t i = 0; i < s->n_blocks && ok; i++) {
        const kvp_gpu_staged_block *b = &s->blocks[i];
        blocks[i] = (int32_t)b->block;
        blocks[s->n_blocks + i] = kvp_gpu_tokens_of(cache->written[b->block] | b->rows);
    }
    ok = ok && kvp_cu_write(s->lists.at, slots, bytes, stream);
    free(slots);
    return ok;
}

/* Bytes of the staging pages that all tensors of a GPU share. */
static size_t bytes_of_pages(const kvp_gpu *gpu)
{
    size_t most = 0;

    for (const kvp_gpu_cache *cache = gpu->caches; cache != NULL; cache = cache->next)
        for (size_t i = 0; i < cache->n_tensors; i++) {
            const kvp_gpu_cells *cells = cache->tensors[i]->cells;
            const size_t bytes =
                cells->group > 1 ? kvp_gpu_staging_bytes(&cache->tensors[i]->shape) : 0;
            most = bytes > most ? bytes : most;
        }
    return most;
}

bool kvp_gpu_have_staging(kvp_gpu_cache *cache, kvp_gpu_staging *s, size_t n_rows, size_t n_blocks)
{
    kvp_gpu *gpu = cache->gpu;
    const size_t passes = (n_blocks + KVP_MOST_STAGED - 1) / KVP_MOST_STAGED;

    if (!kvp_gpu_grow(gpu, &s->lists,
                      passes * n_rows * sizeof(int64_t) + 2 * n_blocks * sizeof(int32_t), false) ||
        !kvp_gpu_grow(gpu, &gpu->staging, bytes_of_pages(gpu), true))
        return false;
    kvp_gpu_release_former(&gpu->staging); /* kvp_gpu_grow has waited for the stream */
    return true;
}

bool kvp_gpu_stage(kvp_gpu_cache *cache, const int64_t *cells, size_t n, kvp_gpu_staging *s,
                   cu_stream stream)
{
    kvp_gpu_staged_block *blocks = realloc(s->blocks, (n + 1) * sizeof(*blocks));
    uint32_t *at = calloc(cache->n_blocks, sizeof(*at));
    bool ok = blocks != NULL && at != NULL;

    s->blocks = blocks != NULL ? blocks : s->blocks;
    s->n_rows = n;
    s->n_blocks = 0;
    if (ok) {
        for (size_t i = 0; i < n; i++)
            if (cells[i] >= 0)
                list_row(cache, cells[i], s, at);
        sort_blocks(cache, s, at);
        ok = s->n_blocks == 0 || (kvp_gpu_have_staging(cache, s, n, s->n_blocks) &&
                                  upload_lists(cache, cells, s, at, stream));
    }
    free(at);
    return ok;
}

/* Passes */

static const int64_t *slots_of_pass(const kvp_gpu_staging *s, uint32_t pass)
{
    return (const int64_t *)s->lists.at + pass * s->n_rows;
}

static const int32_t *blocks_on_gpu(const kvp_gpu_staging *s, uint32_t pass)
{
    const int64_t *slots = slots_of_pass(s, n_passes(s));

    return (const int32_t *)(const void *)slots + pass * KVP_MOST_STAGED;
}

/* The pages of a kv head follow each other, so one list of pages serves tensors with any number of
 * kv heads. */
static kvant_cuda_pages staging_pages(const kvp_gpu_cells *cells)
{
    const size_t page = kvp_gpu_open_page_bytes(cells);

    return (kvant_cuda_pages){ cells->gpu->staging.at, page,
                               kvp_gpu_most_staged(cells->cache->n_blocks) * page };
}

static bool decode_earlier(const kvp_gpu_cells *cells, const kvp_gpu_staging *s, uint32_t pass)
{
    const uint32_t before = pass * KVP_MOST_STAGED, in_pass = blocks_of_pass(s, pass);
    const uint32_t left = s->n_decoded > before ? s->n_decoded - before : 0;
    const kvant_cuda_pages pages = staging_pages(cells);
    const kvant_cuda_decode_args args = { .size = sizeof(args),
                                          .codec = cells->codec,
                                          .pages = cells->pages,
                                          .blocks = blocks_on_gpu(s, pass),
                                          .n_blocks = left < in_pass ? left : in_pass,
                                          .n_kv_heads = cells->n_kv_heads,
                                          .type = KVANT_CUDA_F16,
                                          .out = pages.base,
                                          .token_stride = cells->head_dim,
                                          .head_stride = pages.head_stride / sizeof(uint16_t),
                                          .transformed = 1 };

    return args.n_blocks == 0 || kvant_cuda_decode(&args, cells->gpu->stream) == KVANT_OK;
}

/* Seals the blocks of a pass. */
static bool seal(const kvp_kv *kv, const kvp_gpu_staging *s, uint32_t pass)
{
    const kvp_gpu_cells *cells = kv->cells;
    const int32_t *blocks = blocks_on_gpu(s, pass);
    kvant_cuda_seal_args args = { .size = sizeof(args),
                                  .n_blocks = blocks_of_pass(s, pass),
                                  .n_kv_heads = cells->n_kv_heads,
                                  .from = kvp_gpu_iota(cells->gpu),
                                  .to = blocks,
                                  .tokens = blocks + s->n_blocks,
                                  .refused = kvp_gpu_word(cells->gpu->unsealed) };

    *(kv->shape.role == KVANT_ROLE_K ? &args.k : &args.v) =
        (kvant_cuda_seal_pages){ cells->codec, staging_pages(cells), cells->pages };
    return kvant_cuda_seal(&args, cells->gpu->stream) == KVANT_OK;
}

kvant_status kvp_gpu_staged(const kvp_kv *kv, const kvp_gpu_staging *s,
                            kvp_gpu_append_staged *append, void *context)
{
    const kvp_gpu_cells *cells = kv->cells;
    const kvant_cuda_pages pages = staging_pages(cells);
    kvant_status status = KVANT_OK;

    for (uint32_t pass = 0; pass < n_passes(s) && status == KVANT_OK; pass++) {
        if (!kvp_gpu_ensure_pages(kv, cells->cache->n_pages) || !decode_earlier(cells, s, pass))
            return KVANT_ERR_CUDA;
        status = append(context, slots_of_pass(s, pass), &pages);
        if (status == KVANT_OK && !seal(kv, s, pass))
            status = KVANT_ERR_CUDA;
    }
    return status;
}

/* Rows that are stored without a graph. */
typedef struct written_rows {
    const kvp_kv *kv;
    const float *rows;
    size_t n;
    atomic_uint *refused;
} written_rows;

static kvant_status append_written(void *context, const int64_t *slots,
                                   const kvant_cuda_pages *pages)
{
    const written_rows *w = context;

    return kvp_gpu_append(w->kv->cells, w->kv->shape.role, pages, w->rows,
                          (kvp_gpu_run){ 0, w->n, 0 }, slots, w->refused);
}

kvant_status kvp_gpu_stage_rows(const kvp_kv *kv, const int64_t *cells, size_t n, const float *rows,
                                atomic_uint *refused)
{
    const kvp_gpu_cells *of = kv->cells;
    kvp_gpu_staging *s = &of->cache->row_staging;

    if (!kvp_gpu_stage(of->cache, cells, n, s, of->gpu->stream))
        return KVANT_ERR_MEMORY;
    return kvp_gpu_staged(kv, s, append_written, &(written_rows){ kv, rows, n, refused });
}

void kvp_gpu_staging_free(kvp_gpu_cache *cache)
{
    kvp_gpu_staging *const of[] = { &cache->step_staging, &cache->row_staging };

    for (size_t i = 0; i < 2; i++) {
        free(of[i]->blocks);
        kvp_gpu_release(&of[i]->lists);
    }
}
