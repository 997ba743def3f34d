/* step.c - makes the steps of llama.cpp steps of the plan of exact pages (src/store/plan.h).
 *
 * It translates cells, positions and masks of a graph, and rows that are written without a graph.
 * fp16_pages.c carries out the plan's changes. If all rows of a step have exact pages, they go to
 * these pages only, and are encoded when their blocks give the pages up. Otherwise all rows of the
 * step are also encoded at once. If groups have several tokens, only rows without an exact page are
 * encoded at once (groups.c). Before keys have a key transform (first_matrix.c), the rows of every
 * step go to exact pages, as long as pages are free.
 *
 * llama.cpp sends cell numbers, positions and masks to the GPU, and devices.c keeps copies of them.
 * A graph reads the page table and the slots from GPU memory. So it can be replayed, and a captured
 * graph never encodes. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#include "../log.h"

static uint32_t blocks_per_stream(const kvp_gpu_cache *cache)
{
    return cache->n_blocks / cache->n_streams;
}

static uint32_t block_of(const kvp_gpu_step *step, size_t row)
{
    return (uint32_t)(step->cells[row] / KVANT_PAGE_TOKENS);
}

/* The first block of the stream that a row belongs to. */
static uint32_t stream_of(const kvp_gpu_cache *cache, const kvp_gpu_step *step, size_t row)
{
    return block_of(step, row) / blocks_per_stream(cache) * blocks_per_stream(cache);
}

/* Views: the blocks that rows of a sequence see, by the mask */

typedef struct views {
    kvant_plan_view *list;
    int32_t *blocks; /* blocks of all views */
    size_t n_blocks;
    uint32_t n;
} views;

/* How many rows of a step, from the i-th row on, belong to one sequence: their positions count
 * up. */
static size_t rows_of_sequence(const kvp_gpu_step *step, size_t i)
{
    size_t n = 1;

    while (i + n < step->n && step->positions[i + n] == step->positions[i] + (int32_t)n)
        n++;
    return n;
}

static bool sees(const kvp_gpu_mask *mask, size_t i, size_t n, uint32_t block)
{
    for (size_t row = i; row < i + n; row++)
        if (kvp_gpu_mask_sees(mask, row, block))
            return true;
    return false;
}

/* Adds a view: n rows see the blocks with exact pages, and their own blocks. The plan needs no
 * other blocks. */
static void add_view(const kvp_gpu_cache *cache, const kvp_gpu_step *step, const kvp_gpu_mask *mask,
                     size_t i, size_t n, views *to)
{
    const uint32_t first = stream_of(cache, step, i), end = first + blocks_per_stream(cache);
    int32_t *blocks = to->blocks + to->n_blocks;
    uint32_t n_seen = 0;

    for (uint32_t page = 0; page < cache->n_pages; page++) {
        const int64_t block = cache->pages[page].block;
        if (block >= first && block < end && sees(mask, i, n, (uint32_t)block - first))
            blocks[n_seen++] = (int32_t)block;
    }
    for (size_t row = i; row < i + n; row++)
        if (row == i || block_of(step, row) != block_of(step, row - 1))
            blocks[n_seen++] = (int32_t)block_of(step, row);
    to->list[to->n++] = (kvant_plan_view){ blocks, n_seen, step->positions[i] };
    to->n_blocks += n_seen;
}

/* Finds the views of a step; none if the mask is not known. False without memory. */
static bool find_views(const kvp_gpu_cache *cache, const kvp_gpu_step *step,
                       const kvp_gpu_mask *mask, views *found)
{
    size_t n_views = 0;

    *found = (views){ 0 };
    if (mask == NULL || step->positions == NULL)
        return true;
    for (size_t i = 0; i < step->n; i += rows_of_sequence(step, i))
        n_views++;
    found->list = malloc(n_views * sizeof(*found->list));
    found->blocks = malloc((n_views * cache->n_pages + step->n) * sizeof(*found->blocks));
    if (found->list == NULL || found->blocks == NULL)
        return false;
    for (size_t i = 0, n; i < step->n; i += n) {
        n = rows_of_sequence(step, i);
        add_view(cache, step, mask, i, n, found);
    }
    return true;
}

/* Releases the pages of unused blocks. No sequence has cells at or above n_kv, which is the number
 * of cells of the mask. */
static void release_unused(kvp_gpu_cache *cache, const kvp_gpu_step *step, const kvp_gpu_mask *mask)
{
    const size_t n_held = (mask->n_cells + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;

    for (size_t i = 0; i < step->n; i += mask->n_rows)
        for (size_t at = n_held; at < blocks_per_stream(cache); at++) {
            const uint32_t block = stream_of(cache, step, i) + (uint32_t)at;
            const int32_t page = kvant_plan_page(cache->plan, block);
            if (cache->written[block] == 0)
                continue;
            if (page >= 0)
                kvp_gpu_put_page(cache, (uint32_t)page, KVP_NO_PAGE);
            kvant_plan_release(cache->plan, block);
        }
}

/* Plans */

static kvant_plan_changes plan_rows(kvp_gpu_cache *cache, const kvp_gpu_step *step,
                                    const views *seen, bool stays_exact)
{
    const kvant_plan_step rows = { .slots = step->cells,
                                   .positions = step->positions,
                                   .n = (uint32_t)step->n,
                                   .stays_exact = stays_exact,
                                   .views = seen->list,
                                   .n_views = seen->n };

    return kvant_plan_step_rows(cache->plan, &rows);
}

/* Opens blocks for rows that no token sees yet. */
static bool open_rows(kvp_gpu_cache *cache, const kvp_gpu_step *step, cu_stream stream)
{
    const kvant_plan_changes changes = plan_rows(cache, step, &(views){ 0 }, false);

    return kvp_gpu_carry_out(cache, &changes, false, stream);
}

/* Whether there are free pages for all blocks of a step. */
static bool fits(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    uint32_t n_free = 0, n = 0;

    for (uint32_t page = 0; page < cache->n_pages; page++)
        n_free += kvant_plan_block(cache->plan, page) < 0;
    for (size_t i = 0; i < step->n; i++) {
        size_t before = i;
        while (before > 0 && block_of(step, before - 1) != block_of(step, i))
            before--;
        n += before == 0 && kvant_plan_page(cache->plan, block_of(step, i)) < 0;
    }
    return n <= n_free;
}

/* Whether all rows of a step stay exact. Keys that are sealed before their first key transform
 * never get one. Rows that are sealed before 64 tokens made their centre are decoded and encoded
 * again with it. */
static bool stays_exact(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    return (cache->lacks_key_transform && fits(cache, step)) ||
           (cache->learning && step->n < KVANT_LEARN_ROWS);
}

static bool has_pages(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    for (size_t i = 0; i < step->n; i++)
        if (kvant_plan_page(cache->plan, block_of(step, i)) < 0)
            return false;
    return true;
}

/* Opens blocks for a step before its graph. Keys are transformed by their first key transform
 * before rows are sealed. */
static bool open_blocks(kvp_gpu_cache *cache, const kvp_gpu_step *step, const kvp_gpu_mask *mask,
                        cu_stream stream)
{
    kvant_plan_changes changes = { 0 };
    views seen;
    bool ok;

    if (mask != NULL)
        release_unused(cache, step, mask);
    ok = find_views(cache, step, mask, &seen);
    if (ok) {
        changes = plan_rows(cache, step, &seen, stays_exact(cache, step));
        ok = kvp_gpu_first_matrix_prepare(cache, step, &changes, has_pages(cache, step));
        if (!ok)
            kvant_plan_undo(cache->plan);
    }
    ok = ok && kvp_gpu_carry_out(cache, &changes, !kvp_gpu_is_short_step(step), stream);
    free(seen.list);
    free(seen.blocks);
    return ok;
}

bool kvp_gpu_open_blocks(kvp_gpu_cache *cache, const uint32_t *blocks, uint32_t n, cu_stream stream)
{
    int64_t cells[KVP_MOST_PAGES];

    for (uint32_t i = 0; i < n; i++)
        cells[i] = (int64_t)blocks[i] * KVANT_PAGE_TOKENS;
    return !cache->keeps || open_rows(cache, &(kvp_gpu_step){ .cells = cells, .n = n }, stream);
}

/* Rows */

/* Notes the positions of keys in exact pages, because they are learned from with their
 * positions. */
static void note_positions(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    for (size_t i = 0; i < step->n && cache->positions != NULL; i++)
        cache->positions[step->cells[i]] = step->positions != NULL ? step->positions[i] : -1;
}

size_t kvp_gpu_slots_of(const kvp_gpu_cache *cache, const int64_t *cells, size_t n, int64_t *slots)
{
    size_t n_open = 0;

    for (size_t i = 0; i < n; i++) {
        const int64_t page = kvp_gpu_page_of(cache, cells[i]);
        slots[i] = page >= 0 ? page * KVANT_PAGE_TOKENS + cells[i] % KVANT_PAGE_TOKENS : -1;
        n_open += page >= 0;
    }
    return n_open;
}

/* Notes the rows in exact pages. With `dirty` they have no codes yet; otherwise they have new
 * codes. */
static void note_rows(kvp_gpu_cache *cache, const kvp_gpu_step *step, const int64_t *slots,
                      bool dirty)
{
    for (size_t i = 0; i < step->n; i++) {
        const uint64_t bit = (uint64_t)1 << (step->cells[i] % KVANT_PAGE_TOKENS);
        kvp_open_page *page = slots[i] >= 0 ? &cache->pages[slots[i] / KVANT_PAGE_TOKENS] : NULL;
        if (page == NULL)
            continue;
        page->dirty = dirty ? page->dirty | bit : page->dirty & ~bit;
        page->moved &= ~bit;
    }
}

/* Before a graph */

/* Finds the slots of a step's rows in exact pages; -1 for a row without one. */
static bool find_slots(kvp_gpu_cache *cache, const kvp_gpu_step *step, const kvp_gpu_mask *mask,
                       int64_t *slots, cu_stream stream)
{
    size_t n_open;

    if (!open_blocks(cache, step, mask, stream))
        return false;
    n_open = kvp_gpu_slots_of(cache, step->cells, step->n, slots);
    cache->all_pending = n_open == step->n;
    cache->any_open = n_open > 0;
    note_positions(cache, step);
    note_rows(cache, step, slots, cache->all_pending);
    return true;
}

static bool in_range(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    for (size_t i = 0; i < step->n; i++)
        if (step->cells[i] < 0 || step->cells[i] >= (int64_t)cache->n_blocks * KVANT_PAGE_TOKENS)
            return false;
    return true;
}

static bool place(kvp_gpu_cache *cache, const kvp_gpu_step *step, const kvp_gpu_mask *mask,
                  cu_stream stream)
{
    const size_t bytes = step->n * sizeof(int64_t);
    const void *former = cache->slots.at;
    int64_t *slots = malloc(bytes);
    bool ok = slots != NULL && kvp_gpu_grow(cache->gpu, &cache->slots, bytes, false) &&
              find_slots(cache, step, mask, slots, stream);

    if (cache->slots.at != former)
        atomic_fetch_add(&cache->gpu->epoch, 1); /* captured graphs read the former slots */
    if (ok && cache->has_groups && !cache->all_pending)
        ok = kvp_gpu_stage(cache, step->cells, step->n, &cache->step_staging, stream);
    ok = ok && kvp_cu_ok(kvp_cu.copy_in((cu_address)(uintptr_t)kvp_gpu_open_slots(cache), slots,
                                        bytes, stream),
                         "copying");
    if (ok && cache->table_changed) {
        ok = kvp_cu_write(cache->device_table.at, cache->table,
                          cache->n_blocks * sizeof(*cache->table), stream);
        cache->table_changed = !ok;
    }
    free(slots);
    return ok;
}

/* llama.cpp goes on when it could not shift the context, and tries again before the next step.
 * Before that, queries would find keys at old positions. */
static bool is_shifted(const kvp_gpu_cache *cache)
{
    if (cache->shift.due)
        kvp_error("%s: keys could not be rotated to their new positions, so the step is refused; "
                  "try again, or run with --no-context-shift",
                  cache->gpu->name);
    return !cache->shift.due;
}

/* A graph comes when all tensors have the rows that were stored without one. */
static void forget_outside(const kvp_gpu_cache *cache)
{
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        cells->n_outside = 0;
    }
}

bool kvp_gpu_cache_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step, const kvp_gpu_mask *mask,
                           cu_stream stream)
{
    bool ok;

    forget_outside(cache);
    ok = is_shifted(cache) && in_range(cache, step) &&
         (!cache->learning || kvp_gpu_learn_before(cache, step->cells, step->n, stream)) &&
         (cache->keeps
              ? place(cache, step, mask, stream)
              : kvp_gpu_first_matrix_prepare(cache, step, &(kvant_plan_changes){ 0 }, false));

    if (ok)
        kvp_gpu_first_matrix_mark(cache, step);
    ok = ok && kvp_gpu_buckets_prepare(cache, step);
    for (size_t i = 0; i < step->n && ok; i++)
        kvp_gpu_cache_mark_written(cache, step->cells[i]);
    cache->planner = NULL;
    cache->adopts_keys = cache->adopts_all = false;
    return ok && kvp_gpu_buckets_upload(cache, stream);
}

const int64_t *kvp_gpu_open_slots(const kvp_gpu_cache *cache)
{
    return cache->slots.at;
}

/* Outside of graphs */

/* Whether this call plans for all tensors. Rows are written, or blocks copied, for one tensor after
 * another, and the first call plans. */
static bool plans(kvp_gpu_cache *cache, const kvp_kv *kv)
{
    if (cache->planner == NULL) {
        cache->planner = kv;
        cache->planned_position = 0;
    }
    return cache->keeps && cache->planner == kv;
}

/* Counts positions for rows that are written without them. A restored sequence arrives in pieces of
 * up to 512 rows, or row by row if it is scattered. Positions count from its first row, because
 * llama.cpp sets them only after the rows. */
void kvp_gpu_count_positions(kvp_gpu_cache *cache, const kvp_gpu_step *step, int32_t *positions)
{
    if (step->cells[0] != cache->planned_last + 1 && step->n >= KVANT_PAGE_TOKENS)
        cache->planned_position = 0;
    for (size_t i = 0; i < step->n; i++)
        positions[i] = step->positions != NULL ? step->positions[i] : cache->planned_position++;
    cache->planned_last = step->cells[step->n - 1];
}

bool kvp_gpu_open_written(const kvp_kv *kv, const kvp_gpu_step *step, cu_stream stream)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;
    int64_t *slots;
    int32_t *positions;
    bool ok;

    if (!plans(cache, kv))
        return true;
    slots = malloc(step->n * sizeof(*slots));
    positions = malloc(step->n * sizeof(*positions));
    ok = slots != NULL && positions != NULL;
    if (ok) {
        const kvp_gpu_step rows = { step->cells, positions, step->n };
        kvp_gpu_count_positions(cache, step, positions);
        ok = open_rows(cache, &rows, stream);
        kvp_gpu_slots_of(cache, step->cells, step->n, slots);
        note_positions(cache, step);
        if (ok)
            note_rows(cache, step, slots, false);
    }
    free(slots);
    free(positions);
    return ok;
}

bool kvp_gpu_open_restored(const kvp_kv *kv, const kvp_gpu_step *step, cu_stream stream)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;
    const kvant_plan_step rows = { .slots = step->cells,
                                   .positions = step->positions,
                                   .n = (uint32_t)step->n };
    kvant_plan_changes changes;

    if (!plans(cache, kv) || step->n == 0)
        return true;
    changes = kvant_plan_restore_rows(cache->plan, &rows);
    note_positions(cache, step);
    return kvp_gpu_carry_out(cache, &changes, false, stream);
}

bool kvp_gpu_open_copies(const kvp_kv *kv, uint32_t first, uint32_t to, uint32_t n)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;
    kvant_plan_changes changes;

    if (!plans(cache, kv))
        return true;
    for (uint32_t i = 0; i < n; i++) {
        const int32_t page = kvant_plan_page(cache->plan, to + i);
        if (page >= 0)
            kvp_gpu_put_page(cache, (uint32_t)page, KVP_NO_PAGE);
        cache->written[to + i] = 0; /* the earlier contents of the copies are not decoded */
    }
    changes = kvant_plan_copy(cache->plan, first, to, n);
    return kvp_gpu_carry_out(cache, &changes, false, cells->gpu->stream);
}
