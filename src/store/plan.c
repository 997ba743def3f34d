/* plan.c - see plan.h. Owns a table of blocks and a table of pages, and nothing else. */
#include "plan.h"

#include "../base/alloc.h"
#include "../base/attributes.h"

#define SLOTS KVANT_PAGE_TOKENS
#define MOST_POSITION (INT32_MAX - 1) /* the position after it is an int32_t, too */

/* Old blocks give up their pages first, blocks with first tokens last. */
typedef enum rank { OLD, NEWEST, FIRST } rank;

typedef struct plan_block {
    int32_t page;
    int32_t last;       /* the largest position of the rows that the last step wrote to it */
    int32_t query, end; /* The newest tokens count back from `query` in the last step that saw the
                         * block, and from `end` after this step. */
    uint64_t first;     /* a bit per slot with one of the first tokens */
    uint64_t seen;      /* the last step whose queries saw it */
    uint64_t written;   /* the last step that wrote to it */
} plan_block;

struct kvant_plan {
    kvant_plan_params params;
    plan_block *blocks;
    int32_t *pages; /* per page: its block, or -1 */
    kvant_plan_change *seal, *open;
    uint32_t n_seal, n_open;
    uint32_t n_free;
    uint32_t n_step; /* pages of blocks that this step writes to */
    uint64_t now;
};

static const plan_block no_rows = { .page = KVANT_PLAN_NO_PAGE, .last = -1 };

kvant_status kvant_plan_create(const kvant_plan_params *params, kvant_plan **out)
{
    kvant_plan *plan = *out = kvant_alloc(1, sizeof *plan);
    KVANT_RETURN_IF(!plan, KVANT_ERR_MEMORY);
    plan->params = *params;
    plan->n_free = params->n_pages;
    plan->blocks = kvant_alloc(params->n_blocks, sizeof *plan->blocks);
    plan->pages = kvant_alloc(params->n_pages, sizeof *plan->pages);
    plan->seal = kvant_alloc(params->n_pages, sizeof *plan->seal);
    plan->open = kvant_alloc(params->n_pages, sizeof *plan->open);
    if (!plan->blocks || !plan->pages || !plan->seal || !plan->open) {
        kvant_plan_free(out);
        return KVANT_ERR_MEMORY;
    }
    for (uint32_t i = 0; i < params->n_blocks; i++)
        plan->blocks[i] = no_rows;
    for (uint32_t i = 0; i < params->n_pages; i++)
        plan->pages[i] = -1;
    return KVANT_OK;
}

void kvant_plan_free(kvant_plan **plan)
{
    if (!*plan)
        return;
    kvant_free((*plan)->blocks);
    kvant_free((*plan)->pages);
    kvant_free((*plan)->seal);
    kvant_free((*plan)->open);
    kvant_free(*plan);
    *plan = NULL;
}

int32_t kvant_plan_page(const kvant_plan *plan, uint32_t block)
{
    return plan->blocks[block].page;
}

int32_t kvant_plan_block(const kvant_plan *plan, uint32_t page)
{
    return plan->pages[page];
}

static void leave(kvant_plan *plan, uint32_t block)
{
    plan->pages[plan->blocks[block].page] = -1;
    plan->blocks[block].page = KVANT_PLAN_NO_PAGE;
    plan->n_free++;
}

void kvant_plan_release(kvant_plan *plan, uint32_t block)
{
    if (plan->blocks[block].page >= 0)
        leave(plan, block);
    plan->blocks[block] = no_rows;
}

/* The positions of a block keep their distances, and stay so far from the ends of int32_t that one
 * more position fits. */
void kvant_plan_shift(kvant_plan *plan, uint32_t block, int32_t by)
{
    plan_block *b = &plan->blocks[block];
    const int64_t low = b->query < b->end ? b->query : b->end,
                  high = b->query < b->end ? b->end : b->query,
                  most = MOST_POSITION - (high > b->last ? high : b->last),
                  least = INT32_MIN - (low < b->last ? low : b->last);
    const int64_t moved = by < least ? least : by > most ? most : by;
    b->last = (int32_t)(b->last + moved);
    b->query = (int32_t)(b->query + moved);
    b->end = (int32_t)(b->end + moved);
}

void kvant_plan_set_params(kvant_plan *plan, const kvant_plan_params *params)
{
    plan->params.step_pages = params->step_pages;
    plan->params.first = params->first;
    plan->params.newest = params->newest;
    plan->params.step_rows = params->step_rows;
}

bool kvant_plan_holds_first(const kvant_plan *plan, uint32_t block)
{
    return plan->blocks[block].first != 0;
}

/* Recording a step */

static plan_block *block_of(const kvant_plan *plan, const kvant_plan_step *step, uint32_t row)
{
    return &plan->blocks[step->slots[row] / SLOTS];
}

static bool is_long(const kvant_plan *plan, const kvant_plan_step *step)
{
    return !step->stays_exact && plan->params.step_rows != 0 && step->n > plan->params.step_rows;
}

/* Records that a query sees a block. A block that several sequences share is as new as for the
 * shortest of them. */
static void see(const kvant_plan *plan, plan_block *b, int32_t query, int32_t end)
{
    const bool again = b->seen == plan->now;
    b->query = again && b->query < query ? b->query : query;
    b->end = again && b->end < end ? b->end : end;
    b->seen = plan->now;
}

static void record_row(const kvant_plan *plan, plan_block *b, int64_t slot, int32_t position)
{
    if (position < 0)
        return;
    position = position < MOST_POSITION ? position : MOST_POSITION;
    const uint64_t bit = UINT64_C(1) << slot % SLOTS;
    b->last = b->written == plan->now && b->last > position ? b->last : position;
    b->first = (uint32_t)position < plan->params.first ? b->first | bit : b->first & ~bit;
}

/* Records written rows. Rows that no view contains are the newest of their step; afterwards their
 * age counts back from the step's last row. from_end: it does so at once. */
static void record_rows(kvant_plan *plan, const kvant_plan_step *step, bool from_end)
{
    int32_t end = 0;
    for (uint32_t i = 0; i < step->n; i++) {
        plan_block *b = block_of(plan, step, i);
        plan->n_step += b->written != plan->now && b->page >= 0;
        if (step->positions)
            record_row(plan, b, step->slots[i], step->positions[i]);
        b->written = plan->now;
        end = b->last + 1 > end ? b->last + 1 : end;
    }
    for (uint32_t i = 0; i < step->n; i++) {
        plan_block *b = block_of(plan, step, i);
        see(plan, b, from_end ? end : b->last + 1, end);
    }
}

/* The end of a sequence: the position after the last row that the step wrote for it. */
static int32_t end_of(const kvant_plan *plan, const kvant_plan_view *view)
{
    int32_t end = view->query;
    for (uint32_t i = 0; i < view->n; i++) {
        const plan_block *b = view->blocks[i] >= 0 ? &plan->blocks[view->blocks[i]] : NULL;
        if (b && b->written == plan->now && b->last >= end)
            end = b->last + 1;
    }
    return end;
}

static void record_views(kvant_plan *plan, const kvant_plan_step *step)
{
    for (const kvant_plan_view *v = step->views; v < step->views + step->n_views; v++) {
        const int32_t end = end_of(plan, v), query = is_long(plan, step) ? end : v->query;
        for (uint32_t i = 0; i < v->n; i++)
            if (v->blocks[i] >= 0)
                see(plan, &plan->blocks[v->blocks[i]], query, end);
    }
}

/* Pages */

/* How many tokens came after the block's last one, plus one. */
static int64_t distance_of(const kvant_plan *plan, const plan_block *b)
{
    return (int64_t)(b->seen == plan->now ? b->query : b->end) - b->last;
}

static rank rank_of(const kvant_plan *plan, const plan_block *b)
{
    if (b->first)
        return FIRST;
    return distance_of(plan, b) <= (int64_t)plan->params.newest ? NEWEST : OLD;
}

/* Whether block a gives up its page before block b. Old blocks go first, then blocks that no query
 * of the step sees. So a sequence that is written keeps its newest tokens as long as an idle
 * sequence has its first ones. */
static bool goes_before(const kvant_plan *plan, const plan_block *a, const plan_block *b)
{
    const rank of[] = { rank_of(plan, a), rank_of(plan, b) };
    if ((of[0] == OLD) != (of[1] == OLD))
        return of[0] == OLD;
    if ((a->seen == plan->now) != (b->seen == plan->now))
        return a->seen != plan->now;
    if (of[0] != of[1])
        return of[0] < of[1];
    return a->seen != b->seen ? a->seen < b->seen : a->last < b->last;
}

/* The block that gives up its page next, or -1. Only blocks that were not written since the step
 * `since` began are considered. Blocks of a higher rank than `most` keep their pages. */
static int32_t next_to_go(const kvant_plan *plan, rank most, uint64_t since)
{
    int32_t best = -1;
    for (uint32_t page = 0; page < plan->params.n_pages; page++) {
        const int32_t at = plan->pages[page];
        if (at < 0 || plan->blocks[at].written >= since || rank_of(plan, &plan->blocks[at]) > most)
            continue;
        if (best < 0 || goes_before(plan, &plan->blocks[at], &plan->blocks[best]))
            best = at;
    }
    return best;
}

/* The highest rank that a block of the step may push out: its own rank. While the step has fewer
 * than step_pages pages, the block may push out any other block. */
static rank most_for(const kvant_plan *plan, const plan_block *b)
{
    return plan->n_step < plan->params.step_pages ? FIRST : rank_of(plan, b);
}

static void seal_block(kvant_plan *plan, int32_t block)
{
    plan->seal[plan->n_seal++] =
        (kvant_plan_change){ (uint32_t)block, (uint32_t)plan->blocks[block].page,
                             KVANT_PLAN_NO_PAGE };
    leave(plan, (uint32_t)block);
}

static bool make_room(kvant_plan *plan, rank most)
{
    for (uint32_t n = 0; n < KVANT_PLAN_RUN; n++) {
        const int32_t block = next_to_go(plan, n ? OLD : most, plan->now);
        if (block < 0)
            break;
        seal_block(plan, block);
    }
    return plan->n_free > 0;
}

/* Gives the block the first free page from `page` on. */
static void enter(kvant_plan *plan, uint32_t block, uint32_t page)
{
    while (plan->pages[page] >= 0)
        page++;
    plan->pages[page] = (int32_t)block;
    plan->blocks[block].page = (int32_t)page;
    plan->n_free--;
    plan->open[plan->n_open++] = (kvant_plan_change){ block, page, KVANT_PLAN_NO_PAGE };
}

static void open_block(kvant_plan *plan, uint32_t block)
{
    plan_block *b = &plan->blocks[block];
    if (b->page >= 0 || (!plan->n_free && !make_room(plan, most_for(plan, b))))
        return;
    enter(plan, block, 0);
    plan->n_step++;
}

int64_t kvant_plan_age(const kvant_plan *plan, uint32_t block)
{
    return distance_of(plan, &plan->blocks[block]) - 1;
}

bool kvant_plan_is_old(const kvant_plan *plan, uint32_t block)
{
    return rank_of(plan, &plan->blocks[block]) == OLD;
}

void kvant_plan_prefetch(const kvant_plan *plan)
{
    for (size_t i = 0; i < sizeof *plan; i += 64)
        KVANT_PREFETCH((const char *)plan + i);
}

void kvant_plan_prefetch_block(const kvant_plan *plan, uint32_t block)
{
    KVANT_PREFETCH(&plan->blocks[block]);
}

void kvant_plan_seal(kvant_plan *plan, uint32_t block)
{
    if (plan->blocks[block].page >= 0)
        leave(plan, block);
}

static uint32_t count_blocks(const kvant_plan *plan)
{
    return plan->params.n_pages - plan->n_free;
}

static void clear_changes(kvant_plan *plan)
{
    plan->n_seal = plan->n_open = 0;
}

static void begin(kvant_plan *plan)
{
    plan->now++;
    clear_changes(plan);
}

static kvant_plan_changes changes_of(const kvant_plan *plan)
{
    return (kvant_plan_changes){ plan->seal, plan->open, plan->n_seal, plan->n_open };
}

kvant_plan_changes kvant_plan_vacate(kvant_plan *plan, uint32_t n)
{
    clear_changes(plan);
    while (count_blocks(plan) > plan->params.n_pages - n)
        seal_block(plan, next_to_go(plan, FIRST, UINT64_MAX));
    for (uint32_t page = 0; page < n; page++) {
        const int32_t block = plan->pages[page];
        if (block < 0)
            continue;
        leave(plan, (uint32_t)block);
        enter(plan, (uint32_t)block, n);
        plan->open[plan->n_open - 1].former = (int32_t)page;
    }
    return changes_of(plan);
}

/* Gives pages to the blocks of a step, last rows first, because they are the newest. */
static void open_rows(kvant_plan *plan, const kvant_plan_step *step, rank of)
{
    int64_t last = -1;
    for (uint32_t i = step->n; i-- > 0;) {
        const int64_t block = step->slots[i] / SLOTS;
        if (block != last && rank_of(plan, &plan->blocks[block]) == of)
            open_block(plan, (uint32_t)block);
        last = block;
    }
}

kvant_plan_changes kvant_plan_step_rows(kvant_plan *plan, const kvant_plan_step *step)
{
    begin(plan);
    plan->n_step = 0;
    record_rows(plan, step, is_long(plan, step));
    record_views(plan, step);
    for (int of = FIRST; of >= (is_long(plan, step) ? NEWEST : OLD); of--)
        open_rows(plan, step, (rank)of);
    return changes_of(plan);
}

/* Without pages of a step, a block pushes out no block of a higher rank (most_for). */
kvant_plan_changes kvant_plan_restore_rows(kvant_plan *plan, const kvant_plan_step *step)
{
    begin(plan);
    plan->n_step = plan->params.step_pages;
    record_rows(plan, step, true);
    for (int of = FIRST; of >= OLD; of--)
        open_rows(plan, step, (rank)of);
    return changes_of(plan);
}

/* Copies */

/* Copies get pages like the rows of a step of full length, so a copy pushes out no block of a
 * higher rank. */
kvant_plan_changes kvant_plan_copy(kvant_plan *plan, uint32_t from, uint32_t to, uint32_t n)
{
    begin(plan);
    plan->n_step = plan->params.step_pages;
    for (uint32_t i = 0; i < n; i++) {
        plan_block *original = &plan->blocks[from + i];
        kvant_plan_release(plan, to + i);
        if (original->page >= 0 && rank_of(plan, original) == OLD)
            seal_block(plan, (int32_t)(from + i));
        else if (original->page >= 0)
            original->written = plan->now; /* so that it keeps its page */
        plan->blocks[to + i] = *original;
        plan->blocks[to + i].page = KVANT_PLAN_NO_PAGE;
    }
    for (int of = FIRST; of >= NEWEST; of--)
        for (uint32_t i = n; i-- > 0;)
            if (plan->blocks[from + i].page >= 0 &&
                rank_of(plan, &plan->blocks[to + i]) == (rank)of)
                open_block(plan, to + i);
    return changes_of(plan);
}

static void put_back(kvant_plan *plan, uint32_t block, int32_t page)
{
    plan->pages[page] = (int32_t)block;
    plan->blocks[block].page = page;
    plan->n_free--;
}

void kvant_plan_undo(kvant_plan *plan)
{
    for (uint32_t i = 0; i < plan->n_open; i++)
        leave(plan, plan->open[i].block);
    for (uint32_t i = 0; i < plan->n_open; i++)
        if (plan->open[i].former >= 0)
            put_back(plan, plan->open[i].block, plan->open[i].former);
    for (uint32_t i = 0; i < plan->n_seal; i++)
        put_back(plan, plan->seal[i].block, (int32_t)plan->seal[i].page);
    clear_changes(plan);
}

/* Rows in place */

size_t kvant_plan_layers_to_go(size_t n_layers, size_t n_left, size_t n_tokens)
{
    if (n_layers > n_left)
        return n_layers - n_left;
    return n_layers > n_left / n_tokens ? 1 : 0;
}
