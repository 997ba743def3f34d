/* steps.c - carries out what a tensor's plan (store/plan.h) decides: gives blocks fp16 pages, and
 * seals other blocks to free pages. Tensors may share the pages for the rows of a step; this file
 * moves the rows of a tensor out of these pages when another tensor needs them. It does not encode
 * or decode rows, which fp16_pages.c does.
 *
 * The plan counts positions. A slot does not always tell the position of its row, because the cache
 * of a sliding window uses slots again. So a row's position is the sequence's length before the
 * step, plus the count of first tokens. First tokens have positions from 0 on. */
#include "../base/attributes.h"
#include "../store/plan.h"
#include "shift.h"
#include "tensor.h"

size_t kvant_steps_blocks(const kvant_step_pages *steps, size_t open_block_bytes)
{
    return steps->bytes / open_block_bytes;
}

static kvant_status create_plan(kvant_tensor *tensor, uint32_t n_pages)
{
    const kvant_plan_params params = { .n_blocks = tensor->n_blocks,
                                       .n_pages = n_pages,
                                       .step_pages = n_pages,
                                       .first = tensor->sink_blocks * KVANT_PAGE_TOKENS,
                                       .newest = tensor->newest_rows };
    return n_pages ? kvant_plan_create(&params, &tensor->plan) : KVANT_OK;
}

kvant_status kvant_steps_create(kvant_tensor *tensor)
{
    return create_plan(tensor, tensor->n_open_pages);
}

kvant_status kvant_steps_leave_out_first(kvant_tensor *tensor)
{
    kvant_plan_free(&tensor->plan);
    tensor->sink_blocks = 0;
    tensor->n_absent_pages = tensor->n_sink_pages;
    return create_plan(tensor, tensor->n_open_pages - tensor->n_sink_pages);
}

/* Pages and positions */

/* How many pages are shared. The plan gives pages with low numbers first. These are the shared
 * ones, so a step touches no other memory. */
static uint32_t n_shared(const kvant_tensor *tensor)
{
    return tensor->n_open_pages - tensor->n_own_pages;
}

static int32_t number_of(const kvant_tensor *tensor, int32_t planned)
{
    const int32_t shared = (int32_t)n_shared(tensor);
    if (planned < 0)
        return KVANT_NO_PAGE;
    return planned < shared ? (int32_t)tensor->n_own_pages + planned
                            : planned - shared + (int32_t)tensor->n_absent_pages;
}

/* The position of the row that follows `clock` rows of a sequence. */
static int32_t position_after(const kvant_tensor *tensor, uint64_t clock)
{
    const uint64_t position = (uint64_t)tensor->sink_blocks * KVANT_PAGE_TOKENS + clock;
    return position < INT32_MAX ? (int32_t)position : INT32_MAX;
}

/* The position of a block's last row, if `age` rows came after it. */
static int32_t position_of(const kvant_tensor *tensor, uint32_t block, uint64_t age)
{
    const kvant_block *b = &tensor->blocks[block];
    return kvant_is_sink(tensor, block)
               ? (int32_t)(b->index * KVANT_PAGE_TOKENS)
               : (int32_t)(position_after(tensor, tensor->clocks[b->sequence]) - 1 - (int64_t)age);
}

static void enter(kvant_tensor *tensor, uint32_t block, int32_t page)
{
    tensor->open_pages[page] = (kvant_open_page){ .block = block };
    tensor->blocks[block].open_page = page;
    tensor->blocks[block].state =
        kvant_is_sink(tensor, block) ? KVANT_BLOCK_SINK : KVANT_BLOCK_OPEN;
}

int32_t kvant_open_enter(kvant_tensor *tensor, uint32_t block, uint32_t n_threads)
{
    const int32_t page =
        tensor->plan ? number_of(tensor, kvant_plan_page(tensor->plan, block)) : KVANT_NO_PAGE;
    if (page >= (int32_t)tensor->n_own_pages)
        kvant_steps_acquire(tensor, n_threads);
    if (page >= 0)
        enter(tensor, block, page);
    return page;
}

void kvant_open_leave(kvant_tensor *tensor, uint32_t block, bool emptied)
{
    kvant_block *b = &tensor->blocks[block];
    if (b->open_page >= 0)
        tensor->open_pages[b->open_page].block = -1;
    b->open_page = KVANT_NO_PAGE;
    b->state = KVANT_BLOCK_SEALED;
    if (tensor->plan && emptied)
        kvant_plan_release(tensor->plan, block);
    else if (tensor->plan)
        kvant_plan_seal(tensor->plan, block);
}

/* Steps */

/* How many counted rows the open blocks behind a block of the same sequence hold. */
static uint64_t count_behind(const kvant_tensor *tensor, const kvant_block *block)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < tensor->n_open_pages; i++) {
        const kvant_open_page *page = &tensor->open_pages[i];
        const kvant_block *other = page->block < 0 ? block : &tensor->blocks[page->block];
        if (other->sequence == block->sequence && other->index > block->index)
            n += kvant_count_slots(page->counted);
    }
    return n;
}

/* The slots of a block whose rows the clock has counted. A write replaces the newest rows of a
 * sequence after drafts were rejected, and these rows count once. If more rows came since the block
 * was written than later blocks hold, another text has begun in its slots, and all rows count. */
static uint64_t counted(const kvant_tensor *tensor, const kvant_block *block)
{
    if (block->open_page < 0)
        return 0;
    const kvant_open_page *page = &tensor->open_pages[block->open_page];
    const uint64_t clock = tensor->clocks[block->sequence];
    return clock <= page->clock + count_behind(tensor, block) ? page->counted : 0;
}

void kvant_open_count(kvant_tensor *tensor, kvant_run *run)
{
    const kvant_block *block = &tensor->blocks[run->block];
    const bool moves = tensor->shifts && tensor->shifts->encodes;
    if (!moves) {
        const uint64_t before = counted(tensor, block);
        tensor->clocks[block->sequence] += kvant_count_slots(run->mask & ~before);
        if (block->open_page >= 0)
            tensor->open_pages[block->open_page].counted = before;
    }
    run->clock = tensor->clocks[block->sequence];
    run->position = moves ? -1 : position_of(tensor, run->block, 0);
}

void kvant_open_mark_dirty(kvant_tensor *tensor, const kvant_run *run)
{
    kvant_open_page *page = &tensor->open_pages[tensor->blocks[run->block].open_page];
    page->dirty |= run->mask;
    page->counted |= run->mask;
    page->clock = run->clock;
}

/* The blocks of a sequence that its queries see, as far as the plan needs them: open blocks, and
 * the blocks of runs. */
static kvant_plan_view view_of(const kvant_tensor *tensor, uint32_t sequence, const kvant_run *runs,
                               uint32_t n_runs, int32_t *blocks)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < tensor->n_open_pages; i++) {
        const int64_t block = tensor->open_pages[i].block;
        if (block >= 0 && tensor->blocks[block].sequence == sequence)
            blocks[n++] = (int32_t)block;
    }
    for (uint32_t i = 0; i < n_runs; i++)
        if (tensor->blocks[runs[i].block].sequence == sequence)
            blocks[n++] = (int32_t)runs[i].block;
    return (kvant_plan_view){ blocks, n, position_after(tensor, tensor->begun[sequence]) };
}

static bool is_first(const kvant_tensor *tensor, const kvant_run *runs, uint32_t i)
{
    for (uint32_t j = 0; j < i; j++)
        if (tensor->blocks[runs[j].block].sequence == tensor->blocks[runs[i].block].sequence)
            return false;
    return true;
}

static void see(kvant_tensor *tensor, uint32_t sequence)
{
    const kvant_plan_view view = view_of(tensor, sequence, NULL, 0, tensor->seen);
    kvant_plan_step_rows(tensor->plan, &(kvant_plan_step){ .views = &view, .n_views = 1 });
}

static uint32_t sequence_of(const kvant_tensor *tensor, int64_t slot)
{
    return tensor->blocks[slot / KVANT_PAGE_TOKENS].sequence;
}

static void see_all(kvant_tensor *tensor, const int64_t *slots, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (i == 0 || sequence_of(tensor, slots[i]) != sequence_of(tensor, slots[i - 1]))
            see(tensor, sequence_of(tensor, slots[i]));
}

/* A sequence that is written for weeks has more rows than there are positions. Once its clock is
 * beyond LATEST_CLOCK, the sequence goes on with KEPT_CLOCK. Everything that the clock measured
 * moves along. Rows before that are older than any window, so the plan may forget by how much. */
#define LATEST_CLOCK (UINT64_C(1) << 30)
#define KEPT_CLOCK (UINT64_C(1) << 29)

static uint64_t moved_back(uint64_t clock, uint64_t by)
{
    return clock > by ? clock - by : 0;
}

static void move_clock_back(kvant_tensor *tensor, uint32_t sequence)
{
    const uint64_t by = tensor->clocks[sequence] - KEPT_CLOCK;
    for (uint32_t i = 0; i < tensor->n_blocks; i++) {
        const kvant_block *block = &tensor->blocks[i];
        if (block->sequence != sequence)
            continue;
        kvant_plan_shift(tensor->plan, i, -(int32_t)(by < INT32_MAX ? by : INT32_MAX));
        if (block->open_page >= 0) {
            kvant_open_page *page = &tensor->open_pages[block->open_page];
            page->clock = moved_back(page->clock, by);
        }
    }
    tensor->clocks[sequence] = KEPT_CLOCK;
    tensor->begun[sequence] = moved_back(tensor->begun[sequence], by);
}

static void begin_at_clocks(kvant_tensor *tensor, const int64_t *slots, size_t n)
{
    for (size_t i = 0; i < n; i++)
        tensor->begun[sequence_of(tensor, slots[i])] =
            tensor->clocks[sequence_of(tensor, slots[i])];
}

void kvant_open_begin(kvant_tensor *tensor, const int64_t *slots, size_t n)
{
    if (!tensor->plan)
        return;
    for (size_t i = 0; i < n; i++)
        if (tensor->clocks[sequence_of(tensor, slots[i])] > LATEST_CLOCK)
            move_clock_back(tensor, sequence_of(tensor, slots[i]));
    begin_at_clocks(tensor, slots, n);
    for (size_t i = 0; tensor->step_rows && i + tensor->step_rows < n; i++)
        tensor->begun[sequence_of(tensor, slots[i])]++;
    see_all(tensor, slots, n);
}

void kvant_open_end(kvant_tensor *tensor, const int64_t *slots, size_t n)
{
    if (!tensor->plan)
        return;
    begin_at_clocks(tensor, slots, n);
    see_all(tensor, slots, n);
}

void kvant_open_acquire_runs(kvant_tensor *tensor, const kvant_run *runs, uint32_t n,
                             uint32_t n_threads)
{
    int64_t slots[KVANT_MOST_RUNS];
    int32_t positions[KVANT_MOST_RUNS], *blocks = tensor->seen;
    kvant_plan_view views[KVANT_MOST_RUNS];
    uint32_t n_views = 0;
    if (!tensor->plan || !n)
        return;
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = (int64_t)runs[i].block * KVANT_PAGE_TOKENS;
        positions[i] = runs[i].position;
        if (!is_first(tensor, runs, i))
            continue;
        views[n_views] = view_of(tensor, tensor->blocks[runs[i].block].sequence, runs, n, blocks);
        blocks += views[n_views++].n;
    }
    const kvant_plan_changes changes = kvant_plan_step_rows(
        tensor->plan, &(kvant_plan_step){ slots, positions, n, views, n_views, false });
    kvant_open_seal(tensor, changes.seal, changes.n_seal, n_threads);
}

int32_t kvant_open_acquire(kvant_tensor *tensor, uint32_t block, uint64_t age, uint32_t n_threads)
{
    const kvant_run run = { .block = block, .position = position_of(tensor, block, age) };
    tensor->begun[tensor->blocks[block].sequence] = tensor->clocks[tensor->blocks[block].sequence];
    kvant_open_acquire_runs(tensor, &run, 1, n_threads);
    return kvant_open_enter(tensor, block, n_threads);
}

void kvant_open_rewind(kvant_tensor *tensor, uint32_t sequence, uint32_t n_rows)
{
    uint64_t *clock = &tensor->clocks[sequence];
    *clock -= n_rows < *clock ? n_rows : *clock;
    tensor->begun[sequence] = *clock;
}

/* Shared pages */

static void move(kvant_tensor *tensor, uint32_t block, int32_t to)
{
    const int32_t page = tensor->blocks[block].open_page;
    memcpy(kvant_open_page_of(tensor, to, 0), kvant_open_page_of(tensor, page, 0),
           kvant_open_block_bytes(tensor));
    tensor->open_pages[to] = tensor->open_pages[page];
    tensor->open_pages[page].block = -1;
    tensor->blocks[block].open_page = to;
}

/* Ends the tensor's step: seals the rows that its next write would seal first. Rows that are
 * pending for their first transform are sealed only if there is no room for them. */
static void vacate(kvant_tensor *tensor, uint32_t n_threads)
{
    if (!kvant_transforms_pending(tensor))
        kvant_open_seal_due(&tensor, 1, false, n_threads);
    const kvant_plan_changes changes = kvant_plan_vacate(tensor->plan, n_shared(tensor));
    kvant_open_seal(tensor, changes.seal, changes.n_seal, n_threads);
    for (uint32_t i = 0; i < changes.n_open; i++)
        move(tensor, changes.open[i].block, number_of(tensor, (int32_t)changes.open[i].page));
}

void kvant_steps_acquire(kvant_tensor *tensor, uint32_t n_threads)
{
    kvant_tensor *owner = tensor->steps->owner;
    if (owner && owner != tensor)
        vacate(owner, n_threads);
    tensor->steps->owner = tensor;
}

void kvant_steps_release(kvant_tensor *tensor)
{
    if (tensor->steps && tensor->steps->owner == tensor)
        tensor->steps->owner = NULL;
}
