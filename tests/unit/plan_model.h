/* plan_model.h - a model that carries out the decisions of the plan (src/store/plan.h) on numbers
 * that stand for rows. For each slot, a page or a block's codes hold the number of the last write.
 * The model checks that every row is in one place and that the plan uses no more pages than there
 * are. */
#ifndef KVANT_TESTS_PLAN_MODEL_H
#define KVANT_TESTS_PLAN_MODEL_H

#include "testing.h"

#include "../../src/store/plan.h"

enum { BLOCKS = 128, SLOTS = 64, PAGES = 24, SEQUENCES = 6 }; /* the largest value of each */

typedef struct sequence {
    int32_t blocks[BLOCKS];
    uint32_t n_blocks, length;
} sequence;

typedef struct model {
    kvant_plan_params params;
    kvant_plan *plan;
    uint64_t state, writes;
    uint64_t want[BLOCKS][SLOTS]; /* 0: no row */
    uint64_t codes[BLOCKS][SLOTS], pages[PAGES][SLOTS];
    int32_t owner[PAGES]; /* block that the page belongs to, or -1 */
    bool used[BLOCKS], undoes;
    sequence sequences[SEQUENCES];
    int32_t shift;              /* added to all positions */
    uint64_t digest;            /* hash of all decisions */
    uint32_t n_sealed, n_seals; /* sealed blocks; steps that sealed blocks */
} model;

static inline void begin(model *m, kvant_plan_params params, uint64_t seed)
{
    *m = (model){ .params = params, .state = seed };
    assert_true(params.n_pages <= PAGES && params.n_blocks <= BLOCKS);
    assert_int_equal(kvant_plan_create(&params, &m->plan), KVANT_OK);
    for (uint32_t i = 0; i < PAGES; i++)
        m->owner[i] = -1;
}

static inline void end(model *m)
{
    kvant_plan_free(&m->plan);
    assert_null(m->plan);
}

static inline void mix(model *m, uint64_t x)
{
    m->digest = (m->digest ^ x) * 0x100000001b3u;
}

/* Carries changes out. A page belongs to one block at a time, so the block that leaves a page must
 * be the page's block. */
static inline void change(model *m, const kvant_plan_changes *c)
{
    for (uint32_t i = 0; i < c->n_seal; i++) {
        const kvant_plan_change of = c->seal[i];
        assert_int_equal(m->owner[of.page], (int32_t)of.block);
        memcpy(m->codes[of.block], m->pages[of.page], sizeof m->codes[0]);
        m->owner[of.page] = -1;
        mix(m, of.block << 8 | of.page);
    }
    for (uint32_t i = 0; i < c->n_open; i++) {
        const kvant_plan_change of = c->open[i];
        assert_true(of.page < m->params.n_pages);
        assert_int_equal(m->owner[of.page], -1);
        memcpy(m->pages[of.page], m->codes[of.block], sizeof m->pages[0]);
        m->owner[of.page] = (int32_t)of.block;
        mix(m, 1 << 20 | of.block << 8 | of.page);
    }
    m->n_sealed += c->n_seal;
    m->n_seals += c->n_seal > 0;
}

/* Checks that every row is where the plan says, and that the plan names no other place. */
static inline void check(const model *m)
{
    uint32_t n_exact = 0;
    for (uint32_t b = 0; b < m->params.n_blocks; b++) {
        const int32_t page = kvant_plan_page(m->plan, b);
        n_exact += page >= 0;
        if (page >= 0)
            assert_int_equal(m->owner[page], (int32_t)b);
        for (uint32_t i = 0; i < SLOTS; i++)
            if (m->want[b][i] != 0)
                assert_int_equal(page >= 0 ? m->pages[page][i] : m->codes[b][i], m->want[b][i]);
    }
    for (uint32_t page = 0; page < m->params.n_pages; page++) {
        const int32_t block = kvant_plan_block(m->plan, page);
        assert_int_equal(block, m->owner[page]);
        if (block >= 0)
            assert_int_equal(kvant_plan_page(m->plan, (uint32_t)block), (int32_t)page);
    }
    assert_true(n_exact <= m->params.n_pages);
}

/* Plans a step and undoes it. Every page must be as before, and the same step must ask for the same
 * changes again. */
static inline void plan_and_undo(const model *m, const kvant_plan_step *step)
{
    kvant_plan_change seal[PAGES], open[PAGES];
    kvant_plan_changes c = kvant_plan_step_rows(m->plan, step);
    const uint32_t n_seal = c.n_seal, n_open = c.n_open;
    memcpy(seal, c.seal, n_seal * sizeof *seal);
    memcpy(open, c.open, n_open * sizeof *open);
    kvant_plan_undo(m->plan);
    check(m);
    c = kvant_plan_step_rows(m->plan, step);
    assert_int_equal(c.n_seal, n_seal);
    assert_int_equal(c.n_open, n_open);
    assert_memory_equal(c.seal, seal, n_seal * sizeof *seal);
    assert_memory_equal(c.open, open, n_open * sizeof *open);
    kvant_plan_undo(m->plan);
}

/* Plans the rows of a step, plans them again as another layer does, and writes them. */
static inline void take(model *m, const kvant_plan_step *step)
{
    if (m->undoes)
        plan_and_undo(m, step);
    kvant_plan_changes c = kvant_plan_step_rows(m->plan, step);
    change(m, &c);
    c = kvant_plan_step_rows(m->plan, step);
    assert_int_equal(c.n_seal + c.n_open, 0);
    for (uint32_t i = 0; i < step->n; i++) {
        const uint32_t block = (uint32_t)(step->slots[i] / SLOTS),
                       slot = (uint32_t)(step->slots[i] % SLOTS);
        const int32_t page = kvant_plan_page(m->plan, block);
        m->want[block][slot] = ++m->writes;
        *(page >= 0 ? &m->pages[page][slot] : &m->codes[block][slot]) = m->writes;
        mix(m, (uint64_t)page);
    }
    check(m);
}

static inline void release(model *m, int32_t block)
{
    const int32_t page = kvant_plan_page(m->plan, (uint32_t)block);
    if (page >= 0)
        m->owner[page] = -1;
    memset(m->want[block], 0, sizeof m->want[0]);
    m->used[block] = false;
    kvant_plan_release(m->plan, (uint32_t)block);
    assert_int_equal(kvant_plan_page(m->plan, (uint32_t)block), KVANT_PLAN_NO_PAGE);
}

/* Copies blocks. A copy that becomes exact gets the rows of the original's page. */
static inline void copy(model *m, uint32_t from, uint32_t to, uint32_t n)
{
    bool was_exact[BLOCKS];
    for (uint32_t i = 0; i < n; i++) {
        const int32_t page = kvant_plan_page(m->plan, from + i);
        was_exact[i] = page >= 0;
        if (page >= 0)
            memcpy(m->codes[from + i], m->pages[page], sizeof m->codes[0]);
        release(m, (int32_t)(to + i));
        memcpy(m->codes[to + i], m->codes[from + i], sizeof m->codes[0]);
        memcpy(m->want[to + i], m->want[from + i], sizeof m->want[0]);
        m->used[to + i] = true;
    }
    const kvant_plan_changes c = kvant_plan_copy(m->plan, from, to, n);
    change(m, &c);
    bool room = false;
    for (uint32_t page = 0; page < m->params.n_pages; page++)
        room |= m->owner[page] < 0;
    /* original and copy are both exact or both sealed, unless there is no free page */
    for (uint32_t i = 0; i < n; i++) {
        const bool original = kvant_plan_page(m->plan, from + i) >= 0,
                   copied = kvant_plan_page(m->plan, to + i) >= 0;
        assert_true(copied ? was_exact[i] && original : !original || !room);
    }
    check(m);
}

/* Moves the blocks that leave the pages below n. A block that gets another page keeps its rows. */
static inline void vacate(model *m, uint32_t n)
{
    static uint64_t former[PAGES][SLOTS];
    if (m->undoes) {
        kvant_plan_vacate(m->plan, n);
        kvant_plan_undo(m->plan);
        check(m);
    }
    const kvant_plan_changes c = kvant_plan_vacate(m->plan, n);
    memcpy(former, m->pages, sizeof former);
    change(m, &(kvant_plan_changes){ c.seal, NULL, c.n_seal, 0 });
    for (uint32_t i = 0; i < c.n_open; i++) {
        const int32_t from = c.open[i].former;
        assert_true(from >= 0 && from < (int32_t)n && c.open[i].page >= n);
        assert_int_equal(m->owner[from], (int32_t)c.open[i].block);
        assert_int_equal(m->owner[c.open[i].page], -1);
        memcpy(m->pages[c.open[i].page], former[from], sizeof former[0]);
        m->owner[c.open[i].page] = (int32_t)c.open[i].block;
        m->owner[from] = -1;
    }
    for (uint32_t page = 0; page < n; page++)
        assert_int_equal(m->owner[page], -1);
    check(m);
}

#endif
