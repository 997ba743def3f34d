/* rows.c - reads, writes and copies rows of a cache tensor in GPU memory without a graph. llama.cpp
 * needs this for states and for copies of streams.
 *
 * Until kvp_gpu_cache_settle, rows may be only in exact pages, and reading finds them there. The
 * plan learns of written rows through step.c. */
#include "gpu.h"
#include "in_place.h"

#include <stdlib.h>
#include <string.h>

/* Reads rows of cells first .. first + n - 1 from exact pages, if they are there, instead of their
 * codes. */
static bool read_open_rows(const kvp_gpu_cells *cells, size_t first, size_t n, float *rows)
{
    const kvp_gpu_cache *cache = cells->cache;
    const size_t width = kvp_gpu_width(cells);
    float *page = malloc(KVANT_PAGE_TOKENS * width * sizeof(*page));
    bool ok = page != NULL;

    for (size_t cell = first, end; cell < first + n && ok; cell = end) {
        const size_t block = cell / KVANT_PAGE_TOKENS;
        const int64_t open = kvp_gpu_page_of(cache, (int64_t)cell);
        end = (block + 1) * KVANT_PAGE_TOKENS;
        if (open < 0)
            continue;
        ok = kvp_gpu_fetch_block(cells, true, (size_t)open, page);
        for (size_t i = cell; i < end && i < first + n && ok; i++)
            if (cache->written[block] >> (i % KVANT_PAGE_TOKENS) & 1)
                memcpy(rows + (i - first) * width, page + i % KVANT_PAGE_TOKENS * width,
                       width * sizeof(*rows));
    }
    free(page);
    return ok;
}

/* A cell of a tensor that is all zeros decodes to its centre, as on the CPU. */
kvant_status kvp_gpu_read_rows(const kvp_kv *kv, size_t cell, size_t n, float *rows)
{
    const kvp_gpu_cells *cells = kv->cells;
    const size_t width = kvp_gpu_width(cells), first = cell / KVANT_PAGE_TOKENS,
                 skip = cell % KVANT_PAGE_TOKENS;
    const size_t blocks = (skip + n + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
    kvant_status status = KVANT_ERR_MEMORY;
    int64_t *slots;
    float *room;

    if (!kvp_gpu_enter(cells->gpu))
        return KVANT_ERR_CUDA;
    kvp_gpu_finish(cells->gpu, kv->layers);
    pthread_mutex_lock(&cells->gpu->lock);
    if (kvp_gpu_in_place_read(kv, cell, n, rows, &status)) {
        pthread_mutex_unlock(&cells->gpu->lock);
        return status;
    }
    kvp_gpu_marks_notice(cells->cache, KVANT_ERR_NONFINITE);
    if (!kvp_gpu_first_finish(cells->cache)) {
        pthread_mutex_unlock(&cells->gpu->lock);
        return KVANT_ERR_CUDA;
    }
    room = kvp_gpu_batch_room(cells->gpu, blocks * KVANT_PAGE_TOKENS, width, &slots);
    if (room != NULL)
        status = kvp_gpu_decode_blocks(cells, false, first, blocks, room);
    if (status == KVANT_OK &&
        !kvp_cu_read(rows, room + skip * width, n * width * sizeof(*rows), cells->gpu->stream))
        status = KVANT_ERR_CUDA;
    if (status == KVANT_OK && !read_open_rows(cells, cell, n, rows))
        status = KVANT_ERR_MEMORY;
    kvp_gpu_batch_done(cells->gpu);
    pthread_mutex_unlock(&cells->gpu->lock);
    return status;
}

/* numbers: the same numbers as in slots, but in the computer's memory. */
static kvant_status append_runs(const kvp_kv *kv, bool open, const int64_t *numbers, size_t n,
                                const float *rows, const int64_t *slots)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvant_status status = KVANT_OK;
    kvp_gpu_run run;

    for (size_t i = 0; i < n && status == KVANT_OK; i += run.n) {
        run = kvp_gpu_run_of_cells(cells->cache, numbers, i, n);
        status = kvp_gpu_append(cells, kv->shape.role, open ? &cells->open_pages : NULL, rows, run,
                                slots, cells->gpu->refused);
    }
    return status;
}

/* Appends rows whose blocks have exact pages to these as well. slots: room on the GPU. */
static kvant_status append_open(const kvp_kv *kv, const int64_t *numbers, size_t n,
                                const float *rows, int64_t *slots)
{
    const kvp_gpu_cells *cells = kv->cells;
    int64_t *host = malloc(n * sizeof(*host));
    kvant_status status = KVANT_ERR_MEMORY;

    if (host != NULL && kvp_gpu_slots_of(cells->cache, numbers, n, host) == 0)
        status = KVANT_OK;
    else if (host != NULL && kvp_gpu_upload(cells->gpu, slots, host, n * sizeof(*slots)))
        status = append_runs(kv, true, numbers, n, rows, slots);
    free(host);
    return status;
}

static kvant_status append_all(kvp_kv *kv, const int64_t *numbers, size_t n, float *rows,
                               int64_t *slots)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvant_status status = KVANT_ERR_CUDA;

    for (size_t i = 0; i < n; i++)
        kvp_gpu_cache_mark_written(cells->cache, numbers[i]);
    if (kvp_gpu_buckets_upload(cells->cache, cells->gpu->stream))
        status = kvp_gpu_center_rows(cells, rows, kvp_gpu_width(cells), n, slots, false, rows);
    if (status == KVANT_OK)
        status = cells->group > 1 ? kvp_gpu_stage_rows(kv, numbers, n, rows, cells->gpu->refused)
                                  : append_runs(kv, false, numbers, n, rows, slots);
    return status == KVANT_OK ? append_open(kv, numbers, n, rows, slots) : status;
}

kvant_status kvp_gpu_write_rows(kvp_kv *kv, const int64_t *cell_numbers, size_t n,
                                const float *rows)
{
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu *gpu = cells->gpu;
    const size_t width = kvp_gpu_width(cells);
    kvant_status status = KVANT_ERR_MEMORY;
    int64_t *slots;
    float *room;

    if (!kvp_gpu_enter(gpu))
        return KVANT_ERR_CUDA;
    kvp_gpu_finish(gpu, kv->layers);
    pthread_mutex_lock(&gpu->lock);
    if (kvp_gpu_in_place_write(kv, cell_numbers, n, rows, &status)) {
        pthread_mutex_unlock(&gpu->lock);
        return status;
    }
    kvp_gpu_marks_notice(cells->cache, KVANT_ERR_NONFINITE);
    if (kvp_gpu_hand_over(cells->cache) && kvp_gpu_cache_settle(cells->cache, gpu->stream) &&
        kvp_gpu_open_written(kv, &(kvp_gpu_step){ .cells = cell_numbers, .n = n }, gpu->stream) &&
        kvp_gpu_learn_written(kv, cell_numbers, n, rows) &&
        (room = kvp_gpu_batch_room(gpu, n, width, &slots)) != NULL &&
        kvp_gpu_upload(gpu, room, rows, n * width * sizeof(*rows)) &&
        kvp_gpu_upload(gpu, slots, cell_numbers, n * sizeof(*slots)))
        status = append_all(kv, cell_numbers, n, room, slots);
    if (!kvp_cu_finish(gpu->stream, "storing rows"))
        status = KVANT_ERR_CUDA;
    const kvant_status refused = kvp_gpu_read_word(gpu->refused);
    status = status == KVANT_OK ? refused : status;
    cells->n_outside += n;
    kvp_gpu_batch_done(gpu);
    pthread_mutex_unlock(&gpu->lock);
    return status;
}

/* Copies the exact pages of blocks whose copies have exact pages. */
static bool copy_pages(kvp_kv *kv, uint32_t first, uint32_t to, uint32_t n)
{
    const kvp_gpu_cells *cells = kv->cells;
    bool ok = true;

    for (uint32_t i = 0; i < n && ok; i++) {
        const int64_t source =
            kvp_gpu_page_of(cells->cache, (int64_t)(first + i) * KVANT_PAGE_TOKENS);
        const int64_t target = kvp_gpu_page_of(cells->cache, (int64_t)(to + i) * KVANT_PAGE_TOKENS);
        if (source < 0 || target < 0)
            continue;
        ok = kvp_gpu_ensure_pages(kv, cells->cache->n_pages) &&
             kvp_cu_move(kvp_gpu_block_memory(&cells->open_pages, (size_t)target),
                         kvp_gpu_block_memory(&cells->open_pages, (size_t)source),
                         cells->open_pages.block_stride, cells->gpu->stream);
    }
    return ok;
}

bool kvp_gpu_copy_blocks(const kvp_kv *from, uint32_t first, kvp_kv *to, uint32_t to_first,
                         uint32_t n)
{
    const kvp_gpu_cells *source = from->cells;
    kvp_gpu_cells *target = to->cells;
    bool ok;

    if (source != target) /* centres and scales differ, so rows have to be copied */
        return false;
    if (!kvp_gpu_enter(source->gpu))
        return false;
    kvp_gpu_finish(source->gpu, from->layers);
    pthread_mutex_lock(&source->gpu->lock);
    kvp_gpu_marks_notice(source->cache, KVANT_ERR_NONFINITE);
    ok = kvp_gpu_cache_settle(source->cache, source->gpu->stream) &&
         kvp_gpu_copy_first(source->cache, first, to_first, n) &&
         kvp_gpu_open_copies(from, first, to_first, n);
    kvp_gpu_cache_mark_copied(source->cache, first, to_first, n);
    kvp_gpu_buckets_copy(source->cache, first, to_first, n);
    ok = ok && copy_pages(to, first, to_first, n);
    target->n_outside += n;
    pthread_mutex_unlock(&source->gpu->lock);
    ok = ok && kvp_cu_move(kvp_gpu_block_memory(&target->pages, to_first),
                           kvp_gpu_block_memory(&source->pages, first),
                           n * source->pages.block_stride, source->gpu->stream);
    return kvp_cu_finish(source->gpu->stream, "copying") && ok;
}
