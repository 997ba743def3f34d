/* anew.c - another matrix for keys that are stored already (transform=first): rows are decoded and stored again, those of long batches
 * from copies. Where too many blocks hold rows, what is in force stays. Rows of a first batch are stored now. */
#include "gpu.h"

#include <stdlib.h>

#define ROWS_AT_ONCE 2048u

/* Where blocks that are stored anew lie: sealed ones, and open ones by their pages. */
struct list {
    bool open;
    uint32_t n, blocks[KVP_MOST_ANEW];
};

/* False: too many. */
static bool find_blocks(const kvp_gpu_cache *cache, bool open, struct list *list)
{
    *list = (struct list){ .open = open };
    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        const int64_t page = kvp_gpu_page_of(cache, (int64_t)block * KVANT_PAGE_TOKENS);
        if (cache->written[block] == 0 || (open && page < 0))
            continue;
        if (list->n == KVP_MOST_ANEW)
            return false;
        list->blocks[list->n++] = open ? (uint32_t)page : block;
    }
    return true;
}

/* How many blocks of a list from the i-th on follow each other. */
static uint32_t run_of(const struct list *list, uint32_t i)
{
    uint32_t n = 1;

    while (i + n < list->n && list->blocks[i + n] == list->blocks[i] + n)
        n++;
    return n;
}

static bool decode(const kvp_gpu_cells *cells, const struct list *list, float *room)
{
    const size_t rows = KVANT_PAGE_TOKENS * kvp_gpu_width(cells);
    bool ok = true;

    for (uint32_t i = 0, n; i < list->n && ok; i += n) {
        n = run_of(list, i);
        ok = kvp_gpu_decode_blocks(cells, list->open, list->blocks[i], n, room + i * rows) == KVANT_OK;
    }
    return ok;
}

/* n rows on the GPU, where their slots are. numbers: their cells, in the computer's memory. */
static bool store(const kvp_gpu_cells *cells, bool open, const float *rows, const int64_t *numbers,
                  size_t n, const int64_t *slots)
{
    kvp_gpu_run run;
    bool ok = true;

    for (size_t i = 0; i < n && ok; i += run.n) {
        run = kvp_gpu_run_of_cells(cells->cache, numbers, i,
                                   n - i < ROWS_AT_ONCE ? n : i + ROWS_AT_ONCE);
        ok = kvp_gpu_append(cells, KVANT_ROLE_K, open, rows, run, slots, NULL) == KVANT_OK;
    }
    return ok;
}

/* slots: room there for those that are not. */
static bool append(const kvp_gpu_cells *cells, bool open, const float *rows, const int64_t *numbers,
                   const int64_t *host_slots, size_t n, int64_t *slots)
{
    return kvp_gpu_upload(cells->gpu, slots, host_slots, n * sizeof(*slots)) &&
           store(cells, open, rows, numbers, n, slots) &&
           kvp_cu_ok(kvp_cu.stream_finish(cells->gpu->stream), "storing rows");
}

/* Rows lose their blocks' centres. */
static bool append_blocks(const kvp_gpu_cells *cells, const struct list *list, float *rows, int64_t *slots)
{
    const size_t width = kvp_gpu_width(cells), n_rows = list->n * KVANT_PAGE_TOKENS;
    int64_t *host = malloc((2 * n_rows + 1) * sizeof(*host)), *numbers = host + n_rows;
    bool ok = host != NULL;

    for (uint32_t i = 0, n; i < list->n && ok; i += n) {
        n = run_of(list, i);
        ok = kvp_gpu_center_blocks(cells, list->open, list->blocks[i], n, false, rows + i * KVANT_PAGE_TOKENS * width) == KVANT_OK;
    }
    for (uint32_t i = 0; i < n_rows && ok; i++) {
        const uint32_t at = list->blocks[i / KVANT_PAGE_TOKENS];
        host[i] = (int64_t)at * KVANT_PAGE_TOKENS + i % KVANT_PAGE_TOKENS;
        numbers[i] = kvp_gpu_block_at(cells->cache, list->open, at) * KVANT_PAGE_TOKENS +
                     i % KVANT_PAGE_TOKENS;
    }
    ok = ok && append(cells, list->open, rows, numbers, host, n_rows, slots);
    free(host);
    return ok;
}

/* The kernels' side of a codec with a matrix; it may read the codec as long as it lives. */
static bool have_codecs(kvp_gpu_cells *cells, kvant_codec **made)
{
    char err[512];

    if (cells->codecs[1] != NULL)
        return true;
    cells->made = *made;
    *made = NULL;
    return kvant_cuda_codec_from(cells->made, &cells->codecs[1], err, sizeof(err)) == KVANT_OK &&
           (cells->open_pages.base == NULL || kvant_cuda_codec_create_open(cells->codecs[1], &cells->open_codecs[1]) == KVANT_OK);
}

/* A version whose numbers were brought. */
static bool take(kvp_gpu_cells *cells, kvp_gpu_version *made)
{
    const bool matrix = kvp_gpu_tables(made->codecs[0]).n_weights > 0;

    kvp_gpu_take_numbers(cells, (const kvant_codec *const *)made->codecs);
    if (matrix && !have_codecs(cells, &made->codecs[0]))
        return false;
    cells->codec = cells->codecs[matrix];
    cells->open_codec = cells->open_codecs[matrix];
    cells->learnt = true;
    cells->turns = made->start != NULL && cells->center != NULL;
    cells->cache->ranges.centers.used = cells->cache->ranges.centers.used || cells->turns;
    if (!cells->in_place)
        atomic_fetch_add(&cells->gpu->epoch, 1); /* captured graphs know none */
    return kvp_gpu_shift_matrices(cells) && kvp_gpu_ranges_bring(cells->cache, cells->gpu->stream);
}

/* Rows on the GPU of the first n cells of cache->plain, where these lie, lose their centres. slots: room there. */
static bool append_plain(const kvp_gpu_cells *cells, float *rows, size_t n, int64_t *slots)
{
    const kvp_gpu_cache *cache = cells->cache;
    int64_t *host = malloc((n + 1) * sizeof(*host));
    bool ok =
        host != NULL && kvp_gpu_upload(cells->gpu, slots, cache->plain.cells, n * sizeof(*slots)) &&
        kvp_gpu_center_rows(cells, rows, kvp_gpu_width(cells), n, slots, false, rows) == KVANT_OK &&
        store(cells, false, rows, cache->plain.cells, n, slots) &&
        kvp_cu_ok(kvp_cu.stream_finish(cells->gpu->stream), "storing rows");

    for (size_t i = 0; i < n && ok; i++) {
        const int64_t cell = cache->plain.cells[i], page = cell >= 0 ? kvp_gpu_page_of(cache, cell) : -1;
        host[i] = page >= 0 ? page * KVANT_PAGE_TOKENS + cell % KVANT_PAGE_TOKENS : -1;
    }
    ok = ok && (cells->open_pages.base == NULL ||
                append(cells, true, rows, cache->plain.cells, host, n, slots));
    free(host);
    return ok;
}

/* The same of rows in the computer's memory. */
static bool append_copies(const kvp_gpu_cells *cells, const float *rows, size_t n)
{
    int64_t *slots;
    float *room = kvp_gpu_batch_room(cells->gpu, n, kvp_gpu_width(cells), &slots);

    return room != NULL && kvp_gpu_upload(cells->gpu, room, rows, n * kvp_gpu_width(cells) * sizeof(*room)) &&
           append_plain(cells, room, n, slots);
}

/* All rows from the version in force to this one. */
static bool change(kvp_gpu_cells *cells, kvp_gpu_version *made, const struct list lists[2], const float *rows, size_t n_rows)
{
    const size_t width = kvp_gpu_width(cells), sealed = lists[0].n * KVANT_PAGE_TOKENS, n = sealed + lists[1].n * KVANT_PAGE_TOKENS;
    int64_t *slots;
    float *room = kvp_gpu_batch_room(cells->gpu, n + 1, width, &slots); /* n may be 0 */
    const bool open = cells->open_pages.base != NULL;
    bool ok = room != NULL && decode(cells, &lists[0], room) && (!open || decode(cells, &lists[1], room + sealed * width)) &&
              kvp_cu_ok(kvp_cu.stream_finish(cells->gpu->stream), "decoding rows") &&
              kvp_gpu_bring_numbers(cells, (const kvant_codec *const *)made->codecs, made->start, cells->gpu->stream) && take(cells, made);

    ok = ok && append_blocks(cells, &lists[0], room, slots) &&
         (!open || append_blocks(cells, &lists[1], room + sealed * width, slots)) &&
         (n_rows == 0 || append_copies(cells, rows, n_rows));
    return ok;
}

bool kvp_gpu_store_anew(kvp_gpu_cells *cells, kvp_gpu_version *made, const float *rows, size_t n, bool *done)
{
    struct list *lists = malloc(2 * sizeof(*lists));
    const kvp_gpu_cache *cache = cells->cache;
    const bool few = lists != NULL && find_blocks(cache, false, &lists[0]) && find_blocks(cache, true, &lists[1]);
    const size_t most = cells->in_place ? 0 : cache->plain.n; /* rows in place are stored later */
    const bool ok = few ? change(cells, made, lists, rows, n < most ? n : most) : lists != NULL;

    *done = few && ok;
    kvp_gpu_batch_done(cells->gpu);
    free(lists);
    return ok;
}

/* Open pages with rows of few tokens, which are nowhere else: the other rows are those that wait, or nobody's. Their slots lie behind
 * those of these. */
static bool take_fresh(kvp_gpu_cells *cells, kvp_gpu_version *made, uint32_t n_pages)
{
    const kvp_gpu_cache *cache = cells->cache;
    const size_t n = (size_t)n_pages * KVANT_PAGE_TOKENS;
    int64_t *slots;
    float *room = kvp_gpu_batch_room(cells->gpu, n, kvp_gpu_width(cells), &slots);

    return room != NULL && kvp_gpu_decode_blocks(cells, true, 0, n_pages, room) == KVANT_OK && take(cells, made) &&
           kvp_gpu_center_blocks(cells, true, 0, n_pages, false, room) == KVANT_OK &&
           kvp_gpu_append(cells, KVANT_ROLE_K, true, room, (kvp_gpu_run){ 0, n, 0 }, cache->wait_slots + 2 * cache->n_wait, NULL) == KVANT_OK;
}

bool kvp_gpu_store_waiting(kvp_gpu_cells *cells, kvp_gpu_version *made)
{
    const kvp_gpu_cache *cache = cells->cache;
    const int open = cells->open_pages.base != NULL;
    const uint32_t fresh = kvp_gpu_wait_fresh(cache);
    bool ok = made->codecs == NULL || (fresh > 0 ? take_fresh(cells, made, fresh) : take(cells, made));

    ok = ok && kvp_gpu_center_rows(cells, cells->waiting, kvp_gpu_width(cells), cache->n_wait, cache->wait_slots, false,
                                   cells->waiting) == KVANT_OK;
    for (int to = 0; to <= open && ok; to++)
        ok = store(cells, to, cells->waiting, cache->wait_cells, cache->n_wait,
                   cache->wait_slots + (size_t)to * cache->n_wait);
    cells->waits = false;
    kvp_gpu_batch_done(cells->gpu);
    return ok;
}
