/* step.c - which blocks have open pages, decided before a graph.
 *
 * The rows of a step of at most exact.step tokens, which are up to 512, go to open pages alone, where attention reads them as
 * they came. A block keeps its page until another block needs the page; then the rows that are not
 * encoded yet are encoded, of several blocks at a time. The first tokens and the newest tokens of a
 * sequence give up their pages last. A longer step is encoded at once; its first and its newest
 * rows go to open pages, too.
 *
 * The decision needs cell numbers and positions, which llama.cpp sends to the GPU (devices.c keeps
 * a copy). A graph reads the page table and the slots from GPU memory. So it can be replayed, and a
 * captured graph never encodes. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

/* Pages */

/* Blocks that are old give up their pages first, then those with a sequence's newest tokens. */
typedef enum rank { OLD, NEWEST, FIRST } rank;

static kvp_gpu_end *end_of(const kvp_gpu_cache *cache, int64_t block)
{
    return &cache->ends[block / (cache->n_blocks / cache->n_streams)];
}

static rank rank_of(const kvp_gpu_cache *cache, const kvp_open_page *page)
{
    if (page->block == KVP_NO_PAGE)
        return OLD;
    if (page->first != 0)
        return FIRST;
    return (int64_t)(end_of(cache, page->block)->token - page->token) < cache->exact.newest ? NEWEST
                                                                                            : OLD;
}

bool kvp_gpu_page_stays(const kvp_gpu_cache *cache, uint32_t page)
{
    return rank_of(cache, &cache->pages[page]) != OLD;
}

static bool goes_before(const kvp_gpu_cache *cache, const kvp_open_page *a, const kvp_open_page *b)
{
    const rank x = rank_of(cache, a), y = rank_of(cache, b);

    if (x != y)
        return x < y;
    return a->used != b->used ? a->used < b->used : a->token < b->token;
}

/* The block that gives up its page next, of those that the step does not use: its page, or
 * KVP_NO_PAGE if none has at most this rank. */
static int32_t choose_page(const kvp_gpu_cache *cache, rank most)
{
    int32_t best = KVP_NO_PAGE;

    for (uint32_t i = 0; i < cache->n_pages; i++) {
        const kvp_open_page *page = &cache->pages[i];
        if (page->block == KVP_NO_PAGE || page->used == cache->now || rank_of(cache, page) > most)
            continue;
        if (best == KVP_NO_PAGE || goes_before(cache, page, &cache->pages[best]))
            best = (int32_t)i;
    }
    return best;
}

/* One launch encodes 8 blocks in hardly more time than one block. With more, the step that encodes
 * them takes longer than others. */
#define BLOCKS_AT_ONCE 8

/* A free page. If there is none, several old blocks give up theirs, or else one other block does.
 * KVP_NO_PAGE: the step uses all pages. */
static int32_t have_page(kvp_gpu_cache *cache)
{
    int32_t page = KVP_NO_PAGE;

    for (uint32_t i = 0; i < cache->n_pages; i++)
        if (cache->pages[i].block == KVP_NO_PAGE)
            return (int32_t)i;
    for (int n = 0; n < BLOCKS_AT_ONCE; n++) {
        const int32_t next = choose_page(cache, n == 0 ? FIRST : OLD);
        if (next == KVP_NO_PAGE)
            break;
        kvp_gpu_assign_page(cache, (uint32_t)next, KVP_NO_PAGE);
        page = next;
    }
    return page;
}

/* Opens a block, if it is not open and a page can be had. Nobody sees what a page still holds of
 * another block, so a block without rows needs no decoding. */
static void open_block(kvp_gpu_cache *cache, uint32_t block, kvp_gpu_opening *opened)
{
    const int32_t page = cache->table[block] >= 0 ? have_page(cache) : KVP_NO_PAGE;

    if (page != KVP_NO_PAGE) {
        kvp_gpu_assign_page(cache, (uint32_t)page, (int32_t)block);
        opened->blocks[opened->n] = block;
        opened->pages[opened->n] = (uint32_t)page;
        opened->n += cache->written[block] != 0;
    }
    if (cache->table[block] < 0)
        cache->pages[-1 - cache->table[block]].used = cache->now;
}

bool kvp_gpu_open_blocks(kvp_gpu_cache *cache, const uint32_t *blocks, size_t n, cu_stream stream)
{
    kvp_open_page former[KVP_MOST_PAGES];
    kvp_gpu_opening opened = { 0 };

    memcpy(former, cache->pages, sizeof(former));
    cache->now++;
    for (size_t i = 0; i < n && cache->keeps; i++)
        open_block(cache, blocks[i], &opened);
    return kvp_gpu_exchange(cache, former, &opened, stream);
}

/* Rows */

/* How many rows of a step from the i-th on are of one sequence: their positions count up. */
static size_t rows_of_sequence(const kvp_gpu_step *step, size_t i)
{
    const int32_t *positions = step->positions;
    size_t n = 1;

    for (; i + n < step->n; n++)
        if (positions != NULL ? positions[i + n] != positions[i] + (int32_t)n
                              : step->cells[i + n] != step->cells[i] + (int64_t)n)
            break;
    return n;
}

static size_t count_sequences(const kvp_gpu_step *step)
{
    size_t n = 0;

    for (size_t i = 0; i < step->n; i += rows_of_sequence(step, i))
        n++;
    return n;
}

static bool is_first(const kvp_gpu_cache *cache, const kvp_gpu_step *step, size_t i)
{
    return step->positions != NULL && step->positions[i] < (int32_t)cache->exact.first;
}

/* Whether the rows of a step are encoded only after it. Few rows always are, because encoding them
 * takes as long as encoding a block. A batch that waits for its matrix has its values encoded at
 * once. */
static bool is_kept(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    if (step->n <= KVP_FEW_TOKENS || cache->waiting)
        return step->n <= KVP_FEW_TOKENS;
    return step->n <= cache->exact.step || (cache->learning && step->n < KVP_LEARN_ROWS);
}

/* A step that is not kept has the newest rows of each sequence in open pages. */
static size_t newest_of(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    const size_t each = cache->exact.step / count_sequences(step);

    return each > cache->exact.newest ? each : cache->exact.newest;
}

/* Opens blocks for the rows of a step. Blocks that are open come first, so that none of them gives
 * up its page. */
static void open_blocks(kvp_gpu_cache *cache, const kvp_gpu_step *step, kvp_gpu_opening *opened)
{
    const bool all = is_kept(cache, step) || cache->waiting;
    const size_t newest = newest_of(cache, step);

    for (int closed = 0; closed < 2; closed++)
        for (size_t i = 0, n; i < step->n; i += n) {
            n = rows_of_sequence(step, i);
            for (size_t j = i; j < i + n; j++) {
                const uint32_t block = (uint32_t)(step->cells[j] / KVANT_PAGE_TOKENS);
                if ((cache->table[block] >= 0) == closed &&
                    (all || i + n - j <= newest || is_first(cache, step, j)))
                    open_block(cache, block, opened);
            }
        }
}

/* How many tokens there were in a stream when the step came, n of whose rows from the i-th on are
 * of one sequence. A sequence may write its newest tokens again, as after a rejected draft: they do
 * not count twice. */
static uint64_t tokens_before(kvp_gpu_cache *cache, const kvp_gpu_step *step, size_t i, size_t n)
{
    kvp_gpu_end *end = end_of(cache, step->cells[i] / KVANT_PAGE_TOKENS);

    if (end->step != cache->now) {
        const int64_t again =
            step->positions != NULL ? (int64_t)end->position + 1 - step->positions[i] : 0;
        const bool is_again =
            again > 0 && again <= (int64_t)(n + KVANT_PAGE_TOKENS) && (uint64_t)again <= end->token;
        end->step = cache->now;
        end->token -= is_again ? (uint64_t)again : 0;
        end->before = end->token;
        end->position = step->positions != NULL ? step->positions[i + n - 1] : -1;
    }
    if (end->before + n > end->token)
        end->token = end->before + n;
    return end->before;
}

/* A row that is its stream's token of this number goes to an open page. */
static void note_row(kvp_gpu_cache *cache, int64_t slot, uint64_t token, bool first)
{
    const uint64_t bit = (uint64_t)1 << (slot % KVANT_PAGE_TOKENS);
    kvp_open_page *page = &cache->pages[slot / KVANT_PAGE_TOKENS];

    if (page->step != cache->now || token > page->token)
        page->token = token;
    page->step = cache->now;
    page->first = first ? page->first | bit : page->first & ~bit;
    page->fresh = cache->waits ? page->fresh | bit : page->fresh & ~bit;
    page->moved &= ~bit;
}

static void note_rows(kvp_gpu_cache *cache, const kvp_gpu_step *step, const int64_t *slots)
{
    for (size_t i = 0, n; i < step->n; i += n) {
        uint64_t before;
        n = rows_of_sequence(step, i);
        before = tokens_before(cache, step, i, n);
        for (size_t j = i; j < i + n; j++)
            if (slots[j] >= 0)
                note_row(cache, slots[j], before + (j - i) + 1, is_first(cache, step, j));
    }
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

/* Before a graph */

/* Finds the slots of a step's rows in open pages; a row without one has -1. */
static bool find_slots(kvp_gpu_cache *cache, const kvp_gpu_step *step, int64_t *slots,
                       cu_stream stream)
{
    kvp_open_page former[KVP_MOST_PAGES];
    kvp_gpu_opening opened = { 0 };
    size_t n_open;

    memcpy(former, cache->pages, sizeof(former));
    cache->now++;
    open_blocks(cache, step, &opened);
    if (!kvp_gpu_exchange(cache, former, &opened, stream))
        return false;
    n_open = kvp_gpu_slots_of(cache, step->cells, step->n, slots);
    cache->waits = is_kept(cache, step) && n_open == step->n;
    cache->any_open = n_open > 0;
    kvp_gpu_decoded_note(cache, step, slots);
    note_rows(cache, step, slots);
    return true;
}

/* Whether a page will have its block still when no batch waits any more. */
static bool keeps_block(const kvp_gpu_cache *cache, uint32_t page)
{
    return cache->pages[page].block != KVP_NO_PAGE &&
           (!cache->waiting || kvp_gpu_page_stays(cache, page));
}

bool kvp_gpu_opens_empty(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    uint32_t n_free = cache->n_own;

    for (uint32_t i = 0; i < cache->n_pages; i++)
        n_free -= keeps_block(cache, i);
    for (size_t i = 0; i < step->n; i++) {
        const int64_t block = step->cells[i] / KVANT_PAGE_TOKENS;
        const int64_t page = kvp_gpu_page_of(cache, step->cells[i]);
        if ((page >= 0 && keeps_block(cache, (uint32_t)page)) ||
            (i > 0 && step->cells[i - 1] / KVANT_PAGE_TOKENS == block))
            continue;
        if (cache->written[block] != 0 || n_free == 0)
            return false;
        n_free--;
    }
    return true;
}

static bool in_range(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    for (size_t i = 0; i < step->n; i++)
        if (step->cells[i] < 0 || step->cells[i] >= (int64_t)cache->n_blocks * KVANT_PAGE_TOKENS)
            return false;
    return true;
}

static bool place(kvp_gpu_cache *cache, const kvp_gpu_step *step, cu_stream stream)
{
    const size_t bytes = step->n * sizeof(int64_t);
    const void *former = cache->slots.at;
    int64_t *slots = malloc(bytes);
    bool ok = slots != NULL && kvp_gpu_grow(cache->gpu, &cache->slots, bytes, false) &&
              find_slots(cache, step, slots, stream);

    if (cache->slots.at != former)
        atomic_fetch_add(&cache->gpu->epoch, 1); /* captured graphs read the former ones */
    ok = ok && kvp_cu_ok(kvp_cu.copy_in((cu_address)(uintptr_t)kvp_gpu_open_slots(cache), slots,
                                        bytes, stream),
                         "copying");
    if (ok && cache->table_changed) {
        ok = kvp_cu_ok(kvp_cu.copy_in((cu_address)(uintptr_t)cache->device_table.at, cache->table,
                                      cache->n_blocks * sizeof(*cache->table), stream),
                       "copying");
        cache->table_changed = !ok;
    }
    free(slots);
    return ok;
}

bool kvp_gpu_cache_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step, cu_stream stream)
{
    const bool ok = in_range(cache, step) && kvp_gpu_wait_prepare(cache, step, stream) &&
                    kvp_gpu_ranges_prepare(cache, step) &&
                    (!cache->keeps || place(cache, step, stream));

    for (size_t i = 0; i < step->n && ok; i++)
        kvp_gpu_cache_holds(cache, step->cells[i]);
    cache->planner = NULL;
    return ok && kvp_gpu_ranges_bring(cache, stream);
}

/* Outside of graphs */

/* Rows are written, or blocks copied, tensor after tensor. The first one's call plans for all. */
static bool plans(kvp_gpu_cache *cache, const kvp_kv *kv)
{
    if (cache->planner == NULL)
        cache->planner = kv;
    return cache->keeps && cache->planner == kv;
}

/* Opens the block of a row that comes without a graph. Rows that come one by one do not take pages
 * from others. */
static void open_for(kvp_gpu_cache *cache, int64_t number, size_t n, kvp_gpu_opening *opened)
{
    const uint32_t block = (uint32_t)(number / KVANT_PAGE_TOKENS);

    if (n >= KVANT_PAGE_TOKENS || cache->written[block] == 0)
        open_block(cache, block, opened);
}

/* Marks rows as a sequence's first ones. */
static void note_first(kvp_gpu_cache *cache, const int64_t *slots, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (slots[i] >= 0)
            cache->pages[slots[i] / KVANT_PAGE_TOKENS].first |=
                (uint64_t)1 << (slots[i] % KVANT_PAGE_TOKENS);
}

/* A sequence that is restored comes in pieces of at most 512 rows. */
bool kvp_gpu_open_written(const kvp_kv *kv, const int64_t *numbers, size_t n, cu_stream stream)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;
    const kvp_gpu_step step = { .cells = numbers, .n = n };
    const bool begins = numbers[0] != cache->planned_last + 1 && n >= KVANT_PAGE_TOKENS;
    const size_t first = !begins ? 0 : n < cache->exact.first ? n : cache->exact.first;
    const size_t newest = n < cache->exact.newest ? n : cache->exact.newest;
    kvp_open_page former[KVP_MOST_PAGES];
    kvp_gpu_opening opened = { 0 };
    int64_t *slots;
    bool ok;

    if (!plans(cache, kv))
        return true;
    cache->planned_last = numbers[n - 1];
    memcpy(former, cache->pages, sizeof(former));
    cache->now++;
    for (size_t i = 0; i < first; i++)
        open_for(cache, numbers[i], n, &opened);
    for (size_t i = n - newest; i < n; i++)
        open_for(cache, numbers[i], n, &opened);
    slots = malloc(n * sizeof(*slots));
    ok = slots != NULL && kvp_gpu_exchange(cache, former, &opened, stream);
    if (ok) {
        kvp_gpu_slots_of(cache, numbers, n, slots);
        cache->waits = false;
        kvp_gpu_decoded_note(cache, &step, slots);
        note_rows(cache, &step, slots);
        note_first(cache, slots, first);
    }
    free(slots);
    return ok;
}

void kvp_gpu_open_copies(const kvp_kv *kv, uint32_t first, uint32_t to, uint32_t n)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;

    if (!plans(cache, kv))
        return;
    cache->now++;
    *end_of(cache, to) = *end_of(cache, first);
    for (uint32_t i = 0; i < cache->n_pages; i++) {
        kvp_open_page *page = &cache->pages[i];
        if (page->block >= (int64_t)to && page->block < (int64_t)to + n)
            kvp_gpu_assign_page(cache, i, KVP_NO_PAGE);
        else if (page->block >= (int64_t)first && page->block < (int64_t)first + n)
            page->used = cache->now;
    }
    for (uint32_t i = 0; i < cache->n_pages; i++) {
        const kvp_open_page from = cache->pages[i];
        int32_t page;
        if (from.block < (int64_t)first || from.block >= (int64_t)first + n ||
            !kvp_gpu_page_stays(cache, i) || (page = have_page(cache)) == KVP_NO_PAGE)
            continue;
        kvp_gpu_assign_page(cache, (uint32_t)page, from.block - (int32_t)first + (int32_t)to);
        cache->pages[page].first = from.first;
        cache->pages[page].token = from.token;
        cache->pages[page].used = cache->now;
    }
}

void kvp_gpu_cache_holds(kvp_gpu_cache *cache, int64_t cell)
{
    uint64_t *written = &cache->written[cell / KVANT_PAGE_TOKENS];

    cache->ranges.changed = cache->ranges.changed || *written == 0;
    *written |= (uint64_t)1 << (cell % KVANT_PAGE_TOKENS);
}

void kvp_gpu_cache_holds_copies(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n)
{
    memmove(cache->written + to, cache->written + first, n * sizeof(*cache->written));
    cache->ranges.changed = true;
}

bool kvp_gpu_cache_is_empty(const kvp_gpu_cache *cache)
{
    uint64_t any = 0;

    for (uint32_t block = 0; block < cache->n_blocks; block++)
        any |= cache->written[block];
    return any == 0;
}

const int64_t *kvp_gpu_open_slots(const kvp_gpu_cache *cache)
{
    return cache->slots.at;
}
