/* wait.c - first batches whose keys wait for the matrix that is learnt from them.
 *
 * Of an empty cache the first batch, the next ones as far as the matrix is learnt from them, and as many rows again while threads learn
 * (half of all where little memory is free). Attention sees their rows in open pages that are had for them alone; keys are kept as they
 * came, and stored when the matrix is in force: after so many graphs of a few tokens that threads have learnt it meanwhile, before
 * another batch, and when somebody else needs the rows. So results depend on no clock. Without memory for it each layer waits for its
 * matrix (weigh.c). */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#include "../ggml_api.h"

#define MOST_BATCHES 4 /* that are learnt from: each has a thread per layer */

bool kvp_gpu_are_few(const kvp_gpu *gpu, size_t bytes)
{
    size_t unused, total;

    return kvp_gpu_enter(gpu) && kvp_cu_ok(kvp_cu.memory_info(&unused, &total), "memory") && bytes < unused / 4;
}

/* Each tensor's pages behind those of the one before, then keys; false without memory. */
static bool have_waiting_pages(kvp_gpu_cache *cache, uint32_t n, size_t n_rows)
{
    const size_t slots = 2 * n_rows + (size_t)KVP_MOST_PAGES * KVANT_PAGE_TOKENS;
    int64_t *cells = realloc(cache->wait_cells, (n_rows + KVP_FEW_TOKENS) * sizeof(*cells));
    size_t bytes = 0;
    char *at;

    cache->wait_cells = cells != NULL ? cells : cache->wait_cells;
    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *of = cache->tensors[i]->cells;
        bytes += n * of->n_kv_heads * kvp_gpu_open_page_bytes(of) + (of->weighs ? n_rows * kvp_gpu_width(of) * sizeof(float) : 0);
        if (!kvp_gpu_have_pages(cache->tensors[i], cache->n_pages))
            return false;
    }
    bytes += slots * sizeof(*cache->wait_slots);
    if (cells == NULL || (n_rows > KVP_ENOUGH_ROWS && !kvp_gpu_are_few(cache->gpu, bytes)) || !kvp_gpu_grow(cache->gpu, &cache->wait, bytes, true))
        return false;
    at = cache->wait.at;
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *of = cache->tensors[i]->cells;
        of->open_pages.base = at;
        at += n * of->n_kv_heads * kvp_gpu_open_page_bytes(of);
    }
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *of = cache->tensors[i]->cells;
        of->waiting = (float *)(void *)at;
        at += of->weighs ? n_rows * kvp_gpu_width(of) * sizeof(float) : 0;
    }
    cache->wait_slots = (int64_t *)(void *)at;
    cache->most_wait = n_rows;
    cache->n_tensors_wait = cache->n_tensors;
    return true;
}

/* Of a step's blocks those that have no page. */
static uint32_t count_blocks(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    uint32_t n = 0;

    for (size_t i = 0; i < step->n; i++) {
        size_t j = 0;
        while (j < i && step->cells[j] / KVANT_PAGE_TOKENS != step->cells[i] / KVANT_PAGE_TOKENS)
            j++;
        n += j == i && cache->table[step->cells[i] / KVANT_PAGE_TOKENS] >= 0;
    }
    return n;
}

/* Cells of rows that wait from now on; another row may have been there. */
static void add_waiting(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_cells_lose(cache, cache->wait_cells, cache->n_wait, step->cells, step->n);
    memcpy(cache->wait_cells + cache->n_wait, step->cells, step->n * sizeof(*step->cells));
    cache->n_wait += step->n;
    cache->last_wait = step->n;
    cache->n_batches++;
}

/* Pages for the step's rows and for so many; false without memory. */
static bool have_room(kvp_gpu_cache *cache, const kvp_gpu_step *step, size_t rows)
{
    const uint32_t all = (uint32_t)(rows / KVANT_PAGE_TOKENS) + 1, most = cache->n_blocks < all ? cache->n_blocks : all;
    const uint32_t blocks = count_blocks(cache, step), n = blocks < most ? most : blocks;

    if (n > KVP_MOST_PAGES || !have_waiting_pages(cache, n, step->n > rows ? step->n : rows))
        return false;
    kvp_gpu_close_all(cache);
    cache->n_pages = n;
    return true;
}

static void begin_waiting(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    const bool may = cache->weighing && cache->keeps && step->n >= KVP_LEARN_ROWS &&
                     kvp_gpu_cache_is_empty(cache);

    if (!may ||
        !(have_room(cache, step, KVP_MOST_WAITING) || have_room(cache, step, KVP_ENOUGH_ROWS)))
        return;
    kvp_gpu_close_all(cache);
    cache->waiting = true;
    cache->most_learnt = step->n > KVP_ENOUGH_ROWS ? step->n : KVP_ENOUGH_ROWS;
    cache->n_wait = 0;
    cache->n_batches = 0;
    cache->n_few = 0;
    add_waiting(cache, step);
    atomic_fetch_add(&cache->gpu->epoch, 1); /* captured graphs know other pages */
}

/* -sm tensor: a step is several graphs. */
static bool is_last(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    const size_t behind = cache->n_few > 0 ? cache->last_wait : 0;

    return step->n == cache->last_wait && kvp_gpu_cells_end_with(cache->wait_cells, cache->n_wait + behind, step);
}

static bool all_wait(const kvp_gpu_cache *cache)
{
    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (cells->weighs && !cells->waits)
            return false;
    }
    return true;
}

static uint32_t count_free_pages(const kvp_gpu_cache *cache)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < cache->n_pages; i++)
        n += cache->pages[i].block == KVP_NO_PAGE;
    return n;
}

/* Pages that must be moved when the wait ends, when a step of a few tokens was there. */
static uint32_t count_fresh(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    uint32_t n = count_blocks(cache, step);

    for (uint32_t i = 0; i < cache->n_pages; i++) {
        bool fresh = cache->pages[i].fresh != 0;
        for (size_t j = 0; j < step->n && !fresh; j++)
            fresh = step->cells[j] / KVANT_PAGE_TOKENS == cache->pages[i].block;
        n += fresh;
    }
    return n;
}

/* Whether a step, which goes on, is one of those that the matrix is learnt from. */
static bool is_learnt_from(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    return cache->n_wait - (is_last(cache, step) ? cache->last_wait : 0) < KVP_ENOUGH_ROWS;
}

/* Whether the rows of a step wait with those that do, or beside them. */
static bool goes_on(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    if (!cache->waiting || cache->n_tensors != cache->n_tensors_wait)
        return false;
    if (is_last(cache, step))
        return true;
    if (!all_wait(cache) || count_blocks(cache, step) > count_free_pages(cache))
        return false;
    if (kvp_gpu_is_few(step))
        return cache->n_few < KVP_LATE_STEPS && count_fresh(cache, step) <= cache->n_own;
    if (cache->n_few > 0 || cache->n_wait + step->n > cache->most_wait)
        return false;
    return !is_learnt_from(cache, step) || (cache->n_batches < MOST_BATCHES && cache->n_wait + step->n <= cache->most_learnt);
}

/* Their rows are in no sealed page yet, and nothing is learnt from them. */
static void add_few(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_cells_lose(cache, cache->wait_cells, cache->n_wait, step->cells, step->n);
    memcpy(cache->wait_cells + cache->n_wait, step->cells, step->n * sizeof(*step->cells));
    cache->last_wait = step->n;
    cache->n_few++;
}

bool kvp_gpu_wait_keep(kvp_gpu_cells *cells, const abi_tensor *from)
{
    const size_t n = (size_t)from->ne[1], row = kvp_gpu_width(cells) * sizeof(float), piece = from->nb[1] == row ? n : 1;
    const cu_address to = (cu_address)(uintptr_t)cells->waiting + (cells->cache->n_wait - n) * row;
    bool ok = true;

    for (size_t i = 0; i < n && ok; i += piece)
        ok = kvp_cu_ok(kvp_cu.copy_within(to + i * row, (cu_address)(uintptr_t)from->data + i * from->nb[1], piece * row,
                                          cells->gpu->stream),
                       "copying");
    cells->waits = ok;
    return ok;
}

/* The pages that a cache has for good. */
static bool take_pages_back(kvp_gpu_cache *cache)
{
    bool ok = true;

    cache->waiting = false;
    kvp_gpu_close_all(cache);
    cache->n_pages = cache->n_own;
    kvp_gpu_close_all(cache);
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        cells->open_pages.base = NULL;
        ok = kvp_gpu_have_pages(cache->tensors[i], cache->n_pages) && ok;
    }
    atomic_fetch_add(&cache->gpu->epoch, 1);
    return ok;
}

/* Pages with rows that are nowhere else, then those that stay open, as many as there is room for. */
static uint32_t find_moved(const kvp_gpu_cache *cache, uint32_t from[KVP_MOST_PAGES])
{
    uint32_t n = 0;

    for (int fresh = 1; fresh >= 0; fresh--)
        for (uint32_t i = 0; i < cache->n_pages && n < cache->n_own; i++)
            if (cache->pages[i].block != KVP_NO_PAGE && (cache->pages[i].fresh != 0) == fresh &&
                (fresh || kvp_gpu_page_stays(cache, i)))
                from[n++] = i;
    return n;
}

uint32_t kvp_gpu_wait_fresh(const kvp_gpu_cache *cache)
{
    uint32_t n = 0;

    while (n < cache->n_pages && cache->pages[n].fresh != 0)
        n++;
    return n;
}

static bool move_pages(kvp_gpu_cache *cache, cu_stream stream)
{
    kvp_open_page former[KVP_MOST_PAGES];
    uint32_t from[KVP_MOST_PAGES];
    const uint32_t n = cache->n_pages, n_moved = find_moved(cache, from);
    const char *waited = cache->wait.at;
    bool ok;

    memcpy(former, cache->pages, sizeof(former));
    ok = take_pages_back(cache);
    for (uint32_t i = 0; i < n_moved; i++) {
        kvp_gpu_assign_page(cache, i, former[from[i]].block);
        cache->pages[i] = former[from[i]];
    }
    for (size_t t = 0; t < cache->n_tensors && ok; t++) {
        const kvp_gpu_cells *cells = cache->tensors[t]->cells;
        const size_t page = cells->n_kv_heads * kvp_gpu_open_page_bytes(cells);
        for (uint32_t i = 0; i < n_moved && ok; i++)
            ok = kvp_cu_ok(kvp_cu.copy_within((cu_address)(uintptr_t)cells->open_pages.base + i * page,
                                              (cu_address)(uintptr_t)(waited + from[i] * page), page, stream),
                           "copying");
        waited += n * page;
    }
    return ok;
}

/* Where keys that wait go, in sealed pages and in open ones; then all slots of pages with rows that are nowhere else. */
static bool bring_wait_slots(kvp_gpu_cache *cache)
{
    const size_t n = cache->n_wait, fresh = (size_t)kvp_gpu_wait_fresh(cache) * KVANT_PAGE_TOKENS;
    int64_t *slots = malloc((2 * n + fresh) * sizeof(*slots));
    bool ok = slots != NULL;

    for (size_t i = 0; i < n && ok; i++) {
        const int64_t cell = cache->wait_cells[i], page = cell >= 0 ? kvp_gpu_page_of(cache, cell) : -1;
        slots[i] = cell;
        slots[n + i] = page >= 0 ? page * KVANT_PAGE_TOKENS + cell % KVANT_PAGE_TOKENS : -1;
    }
    for (size_t i = 0; i < fresh && ok; i++)
        slots[2 * n + i] = (int64_t)i;
    ok = ok && kvp_gpu_upload(cache->gpu, cache->wait_slots, slots, (2 * n + fresh) * sizeof(*slots));
    free(slots);
    return ok;
}

static bool some_wait(const kvp_gpu_cache *cache)
{
    bool waits = cache->waiting;

    for (size_t i = 0; i < cache->n_tensors && !waits; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        waits = cells->waits;
    }
    return waits;
}

/* What threads learnt, and what waited for it. later: each tensor's when its next rows come, unless there are rows of few tokens. */
bool kvp_gpu_wait_end(kvp_gpu_cache *cache, bool later, cu_stream stream)
{
    bool ok = true;

    later = later && !(cache->waiting && cache->n_few > 0);
    if (cache->waiting)
        ok = move_pages(cache, stream) && bring_wait_slots(cache);
    ok = (later || kvp_gpu_weigh_settle(cache)) && ok;
    if (cache->wait.at != NULL && !some_wait(cache))
        kvp_gpu_release(&cache->wait); /* waits for the GPU */
    return ok;
}

/* What was learnt comes in force, and what is to be learnt from is noted. */
bool kvp_gpu_wait_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step, cu_stream stream)
{
    const bool on = goes_on(cache, step);

    if (!kvp_gpu_decoded_end(cache, step))
        return false;
    if (!on && !(kvp_gpu_wait_end(cache, kvp_gpu_weigh_later(cache, step), stream) &&
                 (!cache->learning || kvp_gpu_learn_before(cache, step->cells, step->n, stream))))
        return false;
    if (!kvp_gpu_decoded_take(cache, step) || !kvp_gpu_weigh_written(cache, step->cells, step->n, !on || is_learnt_from(cache, step) ? step : NULL))
        return false;
    if (!on)
        begin_waiting(cache, step);
    else if (!is_last(cache, step))
        (kvp_gpu_is_few(step) ? add_few : add_waiting)(cache, step);
    return true;
}

void kvp_gpu_wait_forget(kvp_gpu_cache *cache)
{
    if (cache->waiting)
        take_pages_back(cache);
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        cells->waits = false;
    }
    kvp_gpu_release(&cache->wait);
}
