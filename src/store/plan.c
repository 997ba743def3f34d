/* plan.c - see plan.h. Owns a table of blocks and a table of pages, and nothing else. */
#include "plan.h"

#include "../base/alloc.h"
#include "../base/attributes.h"

#define SLOTS 64u

/* Which blocks give up their pages: old ones first, first ones last. */
typedef enum rank { OLD, NEWEST, FIRST } rank;

typedef struct plan_block {
    int32_t page;
    int32_t last;  /* the largest position of its rows */
    int32_t query; /* the position that the newest tokens count back from */
    uint64_t seen;     /* the step whose queries saw it last */
    uint64_t written;  /* the step that wrote to it last */
    bool first;        /* it holds one of the first tokens */
} plan_block;

struct kvant_plan {
    kvant_plan_params params;
    plan_block *blocks;
    int32_t *pages; /* per page: its block, or -1 */
    kvant_plan_change *seal, *open;
    uint32_t n_seal, n_open;
    uint32_t n_free;
    uint32_t n_step; /* pages of blocks that this step writes */
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

/* Notes */

/* A block that several sequences share is as new as it is to the shortest of them. */
static void note_views(kvant_plan *plan, const kvant_plan_step *step)
{
    for (const kvant_plan_view *v = step->views; v < step->views + step->n_views; v++)
        for (uint32_t i = 0; i < v->n; i++) {
            plan_block *b = v->blocks[i] >= 0 ? &plan->blocks[v->blocks[i]] : NULL;
            if (!b)
                continue;
            b->query = b->seen == plan->now && b->query < v->query ? b->query : v->query;
            b->seen = plan->now;
        }
}

static plan_block *block_of(const kvant_plan *plan, const kvant_plan_step *step, uint32_t row)
{
    return &plan->blocks[step->slots[row] / SLOTS];
}

static void note_rows(kvant_plan *plan, const kvant_plan_step *step)
{
    plan->n_step = 0;
    for (uint32_t i = 0; i < step->n; i++) {
        plan_block *b = block_of(plan, step, i);
        plan->n_step += b->written != plan->now && b->page >= 0;
        b->written = plan->now;
        b->last = b->last < step->positions[i] ? step->positions[i] : b->last;
        b->first |= (uint32_t)step->positions[i] < plan->params.first;
        if (b->seen != plan->now)
            b->query = b->last + 1;
    }
    for (uint32_t i = 0; i < step->n; i++)
        block_of(plan, step, i)->seen = plan->now;
}

/* Pages */

static rank rank_of(const kvant_plan *plan, const plan_block *b)
{
    if (b->first)
        return FIRST;
    return (int64_t)b->query - b->last <= (int64_t)plan->params.newest ? NEWEST : OLD;
}

static bool goes_before(const kvant_plan *plan, const plan_block *a, const plan_block *b)
{
    const rank of[] = { rank_of(plan, a), rank_of(plan, b) };
    if (of[0] != of[1])
        return of[0] < of[1];
    return a->seen != b->seen ? a->seen < b->seen : a->last < b->last;
}

/* The block that gives up its page next, of those that the step does not write, or -1. Blocks of a
 * higher rank than `most` keep theirs. */
static int32_t next_to_go(const kvant_plan *plan, rank most)
{
    int32_t best = -1;
    for (uint32_t page = 0; page < plan->params.n_pages; page++) {
        const int32_t at = plan->pages[page];
        if (at < 0 || plan->blocks[at].written == plan->now ||
            rank_of(plan, &plan->blocks[at]) > most)
            continue;
        if (best < 0 || goes_before(plan, &plan->blocks[at], &plan->blocks[best]))
            best = at;
    }
    return best;
}

/* A block of the step may push out blocks up to its own rank. While the step has fewer pages than
 * are kept for it, the block may push out any other block. */
static rank most_for(const kvant_plan *plan, const plan_block *b)
{
    return plan->n_step < plan->params.step_pages ? FIRST : rank_of(plan, b);
}

static bool make_room(kvant_plan *plan, rank most)
{
    for (uint32_t n = 0; n < KVANT_PLAN_RUN; n++) {
        const int32_t block = next_to_go(plan, n ? OLD : most);
        if (block < 0)
            break;
        plan->seal[plan->n_seal++] =
            (kvant_plan_change){ (uint32_t)block, (uint32_t)plan->blocks[block].page };
        leave(plan, (uint32_t)block);
    }
    return plan->n_free > 0;
}

static void open_block(kvant_plan *plan, uint32_t block)
{
    plan_block *b = &plan->blocks[block];
    if (b->page >= 0 || (!plan->n_free && !make_room(plan, most_for(plan, b))))
        return;
    uint32_t page = 0;
    while (plan->pages[page] >= 0)
        page++;
    plan->pages[page] = (int32_t)block;
    b->page = (int32_t)page;
    plan->n_free--;
    plan->n_step++;
    plan->open[plan->n_open++] = (kvant_plan_change){ block, page };
}

/* The last rows of a step are the newest, so they come first. */
kvant_plan_changes kvant_plan_step_rows(kvant_plan *plan, const kvant_plan_step *step)
{
    plan->now++;
    plan->n_seal = plan->n_open = 0;
    note_views(plan, step);
    note_rows(plan, step);
    for (int of = FIRST; of >= OLD; of--)
        for (uint32_t i = step->n; i-- > 0;)
            if (rank_of(plan, block_of(plan, step, i)) == (rank)of)
                open_block(plan, (uint32_t)(step->slots[i] / SLOTS));
    return (kvant_plan_changes){ plan->seal, plan->open, plan->n_seal, plan->n_open };
}
