/* held.c - rows of exact pages that are decoded and stored again when their transform changes.
 *
 * Owns the lists of such rows on the GPU. first_matrix.c changes the transform in between. */
#include "learner.h"

#include <stdlib.h>
#include <string.h>

/* The arrays of kvp_gpu_held_rows, as they are brought to the GPU. */
typedef struct held_arrays {
    int64_t slots[KVP_MOST_PAGES * KVANT_PAGE_TOKENS], cells[KVP_MOST_PAGES * KVANT_PAGE_TOKENS];
    int32_t pages[KVP_MOST_PAGES];
} held_arrays;

bool kvp_gpu_bring_held(kvp_gpu_cache *cache, kvp_gpu_held_rows *held)
{
    const kvp_gpu_page_list *list = &held->list;
    held_arrays *host = calloc(1, sizeof(*host));
    bool ok = host != NULL && kvp_gpu_grow(cache->gpu, &cache->late.arrays, sizeof(*host), false);

    for (size_t row = 0; row < (size_t)list->n * KVANT_PAGE_TOKENS && ok; row++) {
        const uint32_t page = list->pages[row / KVANT_PAGE_TOKENS].page;
        const int64_t cell = kvp_gpu_cell_of(cache, list, row);
        host->cells[row] = cell;
        host->slots[row] =
            cell < 0 ? -1 : (int64_t)page * KVANT_PAGE_TOKENS + (int64_t)(row % KVANT_PAGE_TOKENS);
        host->pages[row / KVANT_PAGE_TOKENS] = (int32_t)page;
    }
    ok = ok && kvp_gpu_upload(cache->gpu, cache->late.arrays.at, host, sizeof(*host));
    free(host);
    if (ok) {
        held_arrays *at = cache->late.arrays.at;
        held->slots = at->slots;
        held->cells = at->cells;
        held->pages = at->pages;
    }
    return ok;
}

/* The rows of a cache's open pages, for all of its layers. */
bool kvp_gpu_hold_rows(kvp_gpu_cache *cache, kvp_gpu_held_rows *held)
{
    *held = (kvp_gpu_held_rows){ .list = { 0 } };
    if (cache->in_place)
        return true;
    held->list = kvp_gpu_list_pages(cache);
    return held->list.n == 0 || kvp_gpu_bring_held(cache, held);
}

/* The longest run of pages from the first-th on whose keys have one transform. */
static kvp_gpu_run run_of(const kvp_gpu_page_list *list, size_t first)
{
    kvp_gpu_run run = { first, 1, list->pages[first].transform };

    while (first + run.n < list->n && list->pages[first + run.n].transform == run.transform)
        run.n++;
    return run;
}

/* No matrix is in force yet, so blocks have no centres of their own. */
static kvant_status decode_run(const kvp_gpu_cells *cells, const kvp_gpu_held_rows *held,
                               kvp_gpu_run run)
{
    const size_t width = kvp_gpu_width(cells);
    kvp_gpu_matrix matrix = kvp_gpu_matrix_of(cells, run.transform);
    const kvant_status status = kvp_gpu_expand(cells, false, &matrix);
    const kvant_cuda_decode_args args = { .size = sizeof(args),
                                          .codec = cells->open_codec,
                                          .pages = cells->open_pages,
                                          .blocks = held->pages + run.first,
                                          .n_blocks = (uint32_t)run.n,
                                          .n_kv_heads = cells->n_kv_heads,
                                          .type = KVANT_CUDA_F32,
                                          .out = held->rows + run.first * KVANT_PAGE_TOKENS * width,
                                          .token_stride = width,
                                          .head_stride = cells->head_dim,
                                          .center = cells->center,
                                          .scale = cells->scale,
                                          .inverse_key_transform = matrix.inverse_key_transform };

    return status == KVANT_OK ? kvant_cuda_decode(&args, cells->gpu->stream) : status;
}

/* Stores rows in the pages that they came from. */
static kvant_status store_run(const kvp_gpu_cells *cells, const kvp_gpu_held_rows *held,
                              kvp_gpu_run run)
{
    const size_t width = kvp_gpu_width(cells), first = run.first * KVANT_PAGE_TOKENS,
                 n = run.n * KVANT_PAGE_TOKENS;
    float *rows = held->rows + first * width;
    const kvant_status status =
        kvp_gpu_center_rows(cells, rows, width, n, held->cells + first, false, rows);

    if (status != KVANT_OK)
        return status;
    return kvp_gpu_append(cells, KVANT_ROLE_K, &cells->open_pages, held->rows,
                          (kvp_gpu_run){ first, n, run.transform }, held->slots,
                          cells->gpu->unsealed);
}

/* Without memory the rows are as they were. */
bool kvp_gpu_decode_held(const kvp_gpu_cells *cells, kvp_gpu_held_rows *held)
{
    kvant_status status = KVANT_OK;
    int64_t *unused;

    if (held->list.n == 0)
        return true;
    held->rows = kvp_gpu_batch_room(cells->gpu, (size_t)held->list.n * KVANT_PAGE_TOKENS,
                                    kvp_gpu_width(cells), &unused);
    for (kvp_gpu_run run = { 0 };
         run.first < held->list.n && held->rows != NULL && status == KVANT_OK; run.first += run.n) {
        run = run_of(&held->list, run.first);
        status = decode_run(cells, held, run);
    }
    return held->rows != NULL && status == KVANT_OK;
}

bool kvp_gpu_store_held(const kvp_gpu_cells *cells, const kvp_gpu_held_rows *held)
{
    kvant_status status = KVANT_OK;

    for (kvp_gpu_run run = { 0 }; run.first < held->list.n && status == KVANT_OK;
         run.first += run.n) {
        run = run_of(&held->list, run.first);
        status = store_run(cells, held, run);
    }
    return status == KVANT_OK;
}

/* The written rows, in the computer's memory, and how many these are. The caller frees them. NULL
 * without memory. */
static float *fetch_held(const kvp_gpu_cells *cells, const kvp_gpu_held_rows *held, size_t *n)
{
    const size_t width = kvp_gpu_width(cells), all = (size_t)held->list.n * KVANT_PAGE_TOKENS;
    float *rows = malloc((all + 1) * width * sizeof(*rows));
    const bool ok = rows != NULL &&
                    kvp_cu_read(rows, held->rows, all * width * sizeof(*rows), cells->gpu->stream);

    *n = 0;
    for (size_t row = 0; row < all && ok; row++)
        if (held->list.pages[row / KVANT_PAGE_TOKENS].written >> (row % KVANT_PAGE_TOKENS) & 1)
            memmove(rows + (*n)++ * width, rows + row * width, width * sizeof(*rows));
    if (ok)
        return rows;
    free(rows);
    return NULL;
}

bool kvp_gpu_center_held(kvp_gpu_cells *cells, kvp_gpu_held_rows *held)
{
    size_t n = 0;
    float *rows = NULL;
    bool ok = true;

    if (held->list.n > 0)
        ok = kvp_gpu_decode_held(cells, held) && (rows = fetch_held(cells, held, &n)) != NULL;
    if (ok && n >= KVANT_LEARN_ROWS)
        ok = kvp_gpu_learn_from(cells, rows, n) && kvp_gpu_store_held(cells, held);
    free(rows);
    return ok;
}
