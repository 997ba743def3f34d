/* plan.h - decides which blocks of a cache are exact (fp16 pages) and which are sealed (codes).
 *
 * A plan owns the numbers of the exact pages. It knows neither bytes nor devices: its caller seals
 * and opens the blocks that the plan names. Decisions depend on the calls and their arguments
 * alone, so the same calls give the same decisions everywhere.
 *
 * Rules, in this order:
 *   budget  At most n_pages blocks are exact.
 *
 *   step    Rows of a step are exact until the step is over, as far as step_pages last.
 *
 *   ends    The first and the newest tokens of a sequence are exact. If there is no room for all
 *           sequences, the sequence that no query saw for longest gives way. The newest tokens
 *           count back from the step's first query while the step lasts, and from the end of the
 *           sequence afterwards.
 *
 *   rest    Other blocks stay exact until another block needs their page. Then the oldest are
 *           sealed, up to KVANT_PLAN_RUN at once. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <kvant/codec.h>

#include "rules.h"

#define KVANT_PLAN_NO_PAGE (-1)

/* The blocks that rows fill from the first slot of a block on. */
static inline size_t kvant_plan_blocks(size_t n_rows)
{
    return n_rows / KVANT_PAGE_TOKENS + (n_rows % KVANT_PAGE_TOKENS != 0);
}

/* The pages for the first and newest tokens of all sequences (n_ends), of which each sequence has
 * up to n_own, and for the rows of a step. The newest tokens begin anywhere in a block, so each
 * sequence may take a page more. With fewer pages, the sequence that no query saw for longest has
 * half of its newest tokens sealed. */
static inline size_t kvant_plan_pages(size_t n_ends, size_t n_own, size_t n_step)
{
    const size_t n_sequences = n_own > 0 && n_ends > n_own ? n_ends / n_own : 1;

    return kvant_plan_blocks(n_ends) + n_sequences + kvant_plan_blocks(n_step);
}

typedef struct kvant_plan_params {
    uint32_t n_blocks;      /* blocks of 64 slots */
    uint32_t n_pages;       /* at most this many blocks are exact */
    uint32_t step_pages;    /* of these, for rows of a step that are neither first nor newest */
    uint32_t first, newest; /* tokens of each sequence that are exact */
    uint32_t step_rows;     /* A longer step seals its rows at once. Its first tokens and the newest
                         * tokens at its end stay exact. 0: no step is longer. */
} kvant_plan_params;

/* A sequence that queries of a step see. The newest tokens count back from its first query, because
 * that query's newest tokens came before the step. */
typedef struct kvant_plan_view {
    const int32_t *blocks; /* below 0: none. Blocks that have no page may be left out, unless the
                            * step writes to them. A block may stand there several times. */
    uint32_t n;
    int32_t query; /* the position of the first query */
} kvant_plan_view;

/* The rows of a step, with views; or rows that are not part of a step, such as the rows of a
 * restored block. */
typedef struct kvant_plan_step {
    const int64_t *slots;     /* 64 x block + offset, in any order */
    const int32_t *positions; /* NULL, or below 0: not known, or a row stays as new as its block */
    uint32_t n;
    const kvant_plan_view *views;
    uint32_t n_views;
    bool stays_exact; /* the step is not long, however many rows it has (step_rows) */
} kvant_plan_step;

/* A block that gives its page up, or gets one. former: the page that an opened block had before
 * (kvant_plan_vacate), or KVANT_PLAN_NO_PAGE. */
typedef struct kvant_plan_change {
    uint32_t block, page;
    int32_t former;
} kvant_plan_change;

typedef struct kvant_plan_changes {
    const kvant_plan_change *seal,
        *open; /* seal comes first: opened blocks take these pages, too */
    uint32_t n_seal, n_open;
} kvant_plan_changes;

typedef struct kvant_plan kvant_plan;

/* Creates a plan. KVANT_ERR_MEMORY: *plan is NULL. */
kvant_status kvant_plan_create(const kvant_plan_params *params, kvant_plan **plan);
void kvant_plan_free(kvant_plan **plan);

/* Decides for the rows of a step, before they are written. Rows of a block that has no page
 * afterwards are encoded at once. The same step again changes nothing. The changes are valid until
 * the next call. */
kvant_plan_changes kvant_plan_step_rows(kvant_plan *plan, const kvant_plan_step *step);

/* The same for rows of a restored state, which were exact when they were saved. They push out no
 * block of a higher rank, and the step is not long. */
kvant_plan_changes kvant_plan_restore_rows(kvant_plan *plan, const kvant_plan_step *step);

/* Blocks to .. to + n - 1 become copies of the blocks from .. from + n - 1, which they do not
 * overlap. The copies forget their former rows. Copies of first and newest tokens that are
 * exact are opened, as far as there is room. Other exact blocks of the original are sealed, so that
 * the original and its copy read the same rows. The changes are valid until the next call. */
kvant_plan_changes kvant_plan_copy(kvant_plan *plan, uint32_t from, uint32_t to, uint32_t n);

/* The last call's changes could not be carried out: the blocks that they name have the pages that
 * they had before. */
void kvant_plan_undo(kvant_plan *plan);

/* The page of a block, or KVANT_PLAN_NO_PAGE: the block is sealed. */
int32_t kvant_plan_page(const kvant_plan *plan, uint32_t block);

/* The block that has a page, or -1. */
int32_t kvant_plan_block(const kvant_plan *plan, uint32_t page);

/* Whether a block holds some of the first tokens of a sequence. */
bool kvant_plan_holds_first(const kvant_plan *plan, uint32_t block);

/* How many tokens came between a block's last one and the query that the newest tokens count back
 * from; below 0 for rows of the step. A block is old when it has none of the first and the newest
 * tokens: a caller that wants no exact rows beyond these seals it. */
int64_t kvant_plan_age(const kvant_plan *plan, uint32_t block);
bool kvant_plan_is_old(const kvant_plan *plan, uint32_t block);

/* Asks for the memory of the plan, or of what it knows of a block, before a step needs it. */
void kvant_plan_prefetch(const kvant_plan *plan);
void kvant_plan_prefetch_block(const kvant_plan *plan, uint32_t block);

/* The caller sealed the block on its own decision. */
void kvant_plan_seal(kvant_plan *plan, uint32_t block);

/* Frees pages 0 to n - 1 for the caller. Their blocks get other pages. If there are too few, the
 * blocks that would give up their pages first are sealed. An opened block's rows are in its former
 * page. */
kvant_plan_changes kvant_plan_vacate(kvant_plan *plan, uint32_t n);

/* The block holds no rows any more. */
void kvant_plan_release(kvant_plan *plan, uint32_t block);

/* The rows of a block move `by` positions further. The age of the block does not change. */
void kvant_plan_shift(kvant_plan *plan, uint32_t block, int32_t by);

/* Changes, from the next step on, which tokens are first, newest or of a step. n_blocks and n_pages
 * must not change. */
void kvant_plan_set_params(kvant_plan *plan, const kvant_plan_params *params);

/* Rows in place. A cache of one stream is f16 in the host engine's layout while the cells that its
 * attention reads fit. Its n_layers layers that are still in place go to pages one after another.
 * This is the number of layers that go before a step of n_tokens tokens, after which n_left cells
 * are free. One layer goes when no more steps of this length fit than layers are in place. So each
 * of these steps finds one layer less in place, and the last step finds none. Longer steps may come
 * in between: after each step no more layers are in place than cells are left. */
size_t kvant_plan_layers_to_go(size_t n_layers, size_t n_left, size_t n_tokens);
