/* test_plan.c - properties of the plan (src/store/plan.h). A model carries a plan's changes out on
 * numbers: a page or the codes of a block hold the number of the write that each slot got last. The
 * random tests write, rewrite and remove rows of several sequences. */
#include "testing.h"

#include "../../src/store/plan.h"

enum { BLOCKS = 96, SLOTS = 64, PAGES = 20, SEQUENCES = 6, MOST_ROWS = 512 };

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
    int32_t owner[PAGES]; /* the block of a page, or -1 */
    bool used[BLOCKS];
    sequence sequences[SEQUENCES];
    uint64_t digest;            /* of all decisions */
    uint32_t n_sealed, n_seals; /* blocks; steps that sealed some */
} model;

static void begin(model *m, kvant_plan_params params, uint64_t seed)
{
    *m = (model){ .params = params, .state = seed };
    assert_true(params.n_pages <= PAGES && params.n_blocks <= BLOCKS);
    assert_int_equal(kvant_plan_create(&params, &m->plan), KVANT_OK);
    for (uint32_t i = 0; i < PAGES; i++)
        m->owner[i] = -1;
}

static void end(model *m)
{
    kvant_plan_free(&m->plan);
    assert_null(m->plan);
}

static void mix(model *m, uint64_t x)
{
    m->digest = (m->digest ^ x) * 0x100000001b3u;
}

/* Carries changes out. A page has one block at a time, and the block that leaves is its block. */
static void change(model *m, const kvant_plan_changes *c)
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

/* Every row is where the plan says, and nowhere else is a block said to be. */
static void check(const model *m)
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

/* Rows of a step: planned, planned again as another layer does, written. */
static void take(model *m, const kvant_plan_step *step)
{
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

static void release(model *m, int32_t block)
{
    const int32_t page = kvant_plan_page(m->plan, (uint32_t)block);
    if (page >= 0)
        m->owner[page] = -1;
    memset(m->want[block], 0, sizeof m->want[0]);
    m->used[block] = false;
    kvant_plan_release(m->plan, (uint32_t)block);
    assert_int_equal(kvant_plan_page(m->plan, (uint32_t)block), KVANT_PLAN_NO_PAGE);
}

/* n tokens from `from` on of each of some sequences in one step. False: no block is left. */
static bool append(model *m, const uint32_t *which, uint32_t n_which, uint32_t n)
{
    static int64_t slots[MOST_ROWS];
    static int32_t positions[MOST_ROWS];
    kvant_plan_view views[SEQUENCES];
    uint32_t rows = 0;
    for (uint32_t w = 0; w < n_which; w++) {
        sequence *s = &m->sequences[which[w]];
        const int32_t query = (int32_t)s->length;
        for (uint32_t i = 0; i < n; i++, rows++) {
            uint32_t block = 0;
            while (s->length / SLOTS == s->n_blocks && block < m->params.n_blocks && m->used[block])
                block++;
            if (block == m->params.n_blocks)
                return false;
            if (s->length / SLOTS == s->n_blocks) {
                m->used[block] = true;
                s->blocks[s->n_blocks++] = (int32_t)block;
            }
            positions[rows] = (int32_t)s->length;
            slots[rows] = (int64_t)s->blocks[s->length / SLOTS] * SLOTS + s->length % SLOTS;
            s->length++;
        }
        views[w] = (kvant_plan_view){ s->blocks, s->n_blocks, query };
    }
    take(m, &(kvant_plan_step){ slots, positions, rows, views, n_which });
    return true;
}

static void cut(model *m, uint32_t which, uint32_t length)
{
    sequence *s = &m->sequences[which];
    s->length = length;
    for (; s->n_blocks > (length + SLOTS - 1) / SLOTS; s->n_blocks--)
        release(m, s->blocks[s->n_blocks - 1]);
    for (uint32_t i = length % SLOTS; length % SLOTS && i < SLOTS; i++)
        m->want[s->blocks[s->n_blocks - 1]][i] = 0;
}

static bool is_exact(const model *m, const sequence *s, uint32_t position)
{
    return kvant_plan_page(m->plan, (uint32_t)s->blocks[position / SLOTS]) >= 0;
}

/* All first and newest tokens and all tokens of the step are exact. */
static void check_ends(const model *m, uint32_t which, uint32_t step)
{
    const sequence *s = &m->sequences[which];
    const uint32_t newest = step + m->params.newest;
    for (uint32_t i = 0; i < s->length; i++)
        if (i < m->params.first || s->length - i <= newest)
            if (!is_exact(m, s, i))
                fail_msg("token %u of %u is not exact", i, s->length);
}

static const kvant_plan_params usual = { BLOCKS, 12, 8, 64, 128 };

/* 12 pages hold 192 tokens that begin anywhere in a block, and a step of 512 tokens. */
static void ends_and_steps_are_exact_where_there_is_room(void **unused)
{
    (void)unused;
    static const uint32_t sizes[] = { 1, 3, 64, 100, 300, 512 };
    for (uint32_t seed = 1; seed < 9; seed++) {
        model m;
        begin(&m, usual, seed);
        for (;;) {
            const uint32_t n = sizes[test_random(&m.state) % 6], which = 0;
            if (!append(&m, &which, 1, n))
                break;
            check_ends(&m, 0, n);
        }
        assert_true(m.n_sealed > 50);
        end(&m);
    }
}

/* Tokens that come one by one: after the pool is full for the first time, blocks are sealed 8 at a
 * time, and no block twice. */
static void old_blocks_are_sealed_in_runs(void **unused)
{
    (void)unused;
    model m;
    const uint32_t which = 0;
    begin(&m, usual, 1);
    for (uint32_t i = 0; i < BLOCKS * SLOTS; i++) {
        assert_true(append(&m, &which, 1, 1));
        check_ends(&m, 0, 1);
    }
    assert_int_equal(m.n_sealed, m.n_seals * KVANT_PLAN_RUN);
    assert_int_equal(m.n_seals, (BLOCKS - 12 + KVANT_PLAN_RUN - 1) / KVANT_PLAN_RUN);
    end(&m);
}

/* With too few pages, idle sequences lose their newest part before a busy one does. */
static void idle_sequences_give_way(void **unused)
{
    (void)unused;
    model m;
    begin(&m, (kvant_plan_params){ BLOCKS, 9, 2, 64, 64 }, 1);
    for (uint32_t s = 0; s < SEQUENCES; s++)
        for (uint32_t i = 0; i < 20; i++) {
            assert_true(append(&m, &s, 1, 30));
            check_ends(&m, s, 30);
        }
    for (uint32_t s = 0; s < SEQUENCES; s++) /* their newest parts go before first ones */
        assert_true(is_exact(&m, &m.sequences[s], 0));
    assert_false(is_exact(&m, &m.sequences[0], 599));
    assert_true(is_exact(&m, &m.sequences[SEQUENCES - 1], 599));
    assert_true(append(&m, &(uint32_t){ 0 }, 1, 1)); /* its last block is opened again */
    assert_true(is_exact(&m, &m.sequences[0], 600));
    assert_true(is_exact(&m, &m.sequences[0], 0));
    end(&m);
}

/* First blocks alone fill the pool: rows of a step still have the pages that are kept for a
 * step. */
static void steps_have_pages_of_their_own(void **unused)
{
    (void)unused;
    model m;
    begin(&m, (kvant_plan_params){ BLOCKS, 9, 3, 128, 64 }, 1);
    for (uint32_t s = 0; s < SEQUENCES; s++)
        assert_true(append(&m, &s, 1, 128));
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(append(&m, &(uint32_t){ 0 }, 1, 192));
        for (uint32_t back = 1; back <= 192; back++)
            assert_true(is_exact(&m, &m.sequences[0], m.sequences[0].length - back));
    }
    end(&m);
}

/* A block that two sequences share is one of the newest as long as it is that to one of them. */
static void shared_blocks_are_as_new_as_for_the_shortest(void **unused)
{
    (void)unused;
    model m;
    begin(&m, (kvant_plan_params){ BLOCKS, 6, 2, 0, 64 }, 1);
    for (int order = 0; order < 2; order++)
        for (int32_t round = 0; round < 20; round++) {
            int64_t slots[SLOTS];
            int32_t positions[SLOTS], blocks[24] = { 0, 1 };
            for (int32_t i = 0; i < 24; i++)
                blocks[i] = i;
            for (int32_t i = 0; i < SLOTS; i++) {
                positions[i] = (round ? round + 1 : 0) * SLOTS + i;
                slots[i] = positions[i];
            }
            const kvant_plan_view both[] = { { blocks, 1, SLOTS },
                                             { blocks, (uint32_t)round + 2, positions[0] } },
                                  turned[] = { both[1], both[0] };
            take(&m, &(kvant_plan_step){ slots, positions, SLOTS, order ? turned : both, 2 });
            assert_true(kvant_plan_page(m.plan, 0) >= 0);
        }
    end(&m);
}

/* A step that is longer than its pages: its last rows are exact, the first ones are encoded. */
static void long_steps_keep_their_last_rows(void **unused)
{
    (void)unused;
    model m;
    const uint32_t which = 0;
    begin(&m, (kvant_plan_params){ BLOCKS, 6, 4, 64, 64 }, 1);
    for (int i = 0; i < 5; i++) {
        assert_true(append(&m, &which, 1, 512));
        const sequence *s = &m.sequences[0];
        for (uint32_t back = 1; back <= 256; back++)
            assert_true(is_exact(&m, s, s->length - back));
        assert_true(is_exact(&m, s, 0));
        assert_int_equal(is_exact(&m, s, s->length - 511), i == 0); /* the first block */
    }
    end(&m);
}

/* Rows that come without a step, as a restored sequence does block after block: its first block and
 * its newest blocks are exact, and a released block leaves nothing behind. */
static void rows_without_a_step(void **unused)
{
    (void)unused;
    model m;
    int64_t slots[SLOTS];
    int32_t positions[SLOTS];
    begin(&m, (kvant_plan_params){ BLOCKS, 5, 2, 64, 128 }, 1);
    for (int round = 0; round < 2; round++) { /* then from another position on */
        for (int32_t block = 0; block < 20; block++) {
            for (int32_t i = 0; i < SLOTS; i++) {
                positions[i] = (block + 50 * round) * SLOTS + i;
                slots[i] = block * SLOTS + i;
            }
            take(&m, &(kvant_plan_step){ slots, positions, SLOTS, NULL, 0 });
            for (int32_t back = 0; back <= block; back++)
                if (back < 4 + round || (round == 0 && back == block))
                    assert_true(kvant_plan_page(m.plan, (uint32_t)(block - back)) >= 0);
        }
        for (int32_t block = 0; block < 20; block++)
            release(&m, block);
    }
    end(&m);
}

/* Random steps, cuts, ends of sequences and rewritten rows; slots of one block may be of several
 * sequences and come in any order. */
static void random_step(model *m)
{
    const uint32_t a = (uint32_t)(test_random(&m->state) % SEQUENCES);
    uint32_t all[SEQUENCES], n_all = 0;
    int64_t slots[40];
    int32_t positions[40];
    switch (test_random(&m->state) % 8) {
    case 0: cut(m, a, (uint32_t)(test_random(&m->state) % (m->sequences[a].length + 1))); return;
    case 1: cut(m, a, 0); return;
    case 2:
        for (uint32_t i = 0; i < 40; i++) { /* anywhere */
            positions[i] = (int32_t)(test_random(&m->state) % 4096);
            slots[i] = (int64_t)(test_random(&m->state) % (m->params.n_blocks * SLOTS));
            m->used[slots[i] / SLOTS] = true;
        }
        take(m, &(kvant_plan_step){ slots, positions, 40, NULL, 0 });
        return;
    case 3:
        for (uint32_t s = 0; s < SEQUENCES; s++)
            if (m->sequences[s].length)
                all[n_all++] = s;
        append(m, all, n_all, 1 + (uint32_t)(test_random(&m->state) % 20));
        return;
    default: append(m, &a, 1, 1 + (uint32_t)(test_random(&m->state) % 300));
    }
}

static uint64_t random_run(uint64_t seed)
{
    model m;
    const uint64_t r = seed * 0x9e3779b97f4a7c15u;
    const uint32_t pages = 1 + (uint32_t)(r >> 8) % PAGES;
    const kvant_plan_params params = { .n_blocks = 8 + (uint32_t)(r >> 16) % (BLOCKS - 7),
                                       .n_pages = pages,
                                       .step_pages = (uint32_t)(r >> 24) % (pages + 1),
                                       .first = 64 * ((uint32_t)(r >> 32) % 3),
                                       .newest = (uint32_t)(r >> 40) % 200 };
    begin(&m, params, seed);
    for (int step = 0; step < 300; step++)
        random_step(&m);
    const uint64_t digest = m.digest;
    end(&m);
    return digest;
}

static void every_row_is_in_one_place(void **unused)
{
    (void)unused;
    for (uint64_t seed = 1; seed <= 60; seed++)
        random_run(seed);
}

static void replays_are_equal(void **unused)
{
    (void)unused;
    for (uint64_t seed = 100; seed < 110; seed++) {
        assert_true(random_run(seed) == random_run(seed));
        assert_true(random_run(seed) != random_run(seed + 1));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ends_and_steps_are_exact_where_there_is_room),
        cmocka_unit_test(old_blocks_are_sealed_in_runs),
        cmocka_unit_test(idle_sequences_give_way),
        cmocka_unit_test(steps_have_pages_of_their_own),
        cmocka_unit_test(shared_blocks_are_as_new_as_for_the_shortest),
        cmocka_unit_test(long_steps_keep_their_last_rows),
        cmocka_unit_test(rows_without_a_step),
        cmocka_unit_test(every_row_is_in_one_place),
        cmocka_unit_test(replays_are_equal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
