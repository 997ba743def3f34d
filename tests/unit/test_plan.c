/* test_plan.c - properties of the plan (src/store/plan.h). A model carries out its changes. The
 * random tests write, rewrite and remove rows of several sequences. */
#include "plan_model.h"

enum { N_BLOCKS = 96, MOST_ROWS = 512 };

/* Appends n tokens to each of some sequences in one step. Returns false when no block is left. */
static bool append(model *m, const uint32_t *which, uint32_t n_which, uint32_t n)
{
    static int64_t slots[MOST_ROWS];
    static int32_t positions[MOST_ROWS];
    kvant_plan_view views[SEQUENCES];
    uint32_t rows = 0;
    for (uint32_t w = 0; w < n_which; w++) {
        sequence *s = &m->sequences[which[w]];
        const int32_t query = (int32_t)s->length + m->shift;
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
            positions[rows] = (int32_t)s->length + m->shift;
            slots[rows] = (int64_t)s->blocks[s->length / SLOTS] * SLOTS + s->length % SLOTS;
            s->length++;
        }
        views[w] = (kvant_plan_view){ s->blocks, s->n_blocks, query };
    }
    take(m, &(kvant_plan_step){ slots, positions, rows, views, n_which, false });
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

/* All first tokens, newest tokens and tokens of the step are exact. */
static void check_ends(const model *m, uint32_t which, uint32_t step)
{
    const sequence *s = &m->sequences[which];
    const uint32_t newest = step + m->params.newest;
    for (uint32_t i = 0; i < s->length; i++)
        if (i < m->params.first || s->length - i <= newest)
            if (!is_exact(m, s, i))
                fail_msg("token %u of %u is not exact", i, s->length);
}

static const kvant_plan_params usual = { N_BLOCKS, 12, 8, 64, 128, 0 };

/* 12 pages hold 192 tokens that begin anywhere in a block, and a step of 512 tokens. */
CASE(ends_and_steps_are_exact_where_there_is_room)
{
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
CASE(old_blocks_are_sealed_in_runs)
{
    model m;
    const uint32_t which = 0;
    begin(&m, usual, 1);
    for (uint32_t i = 0; i < N_BLOCKS * SLOTS; i++) {
        assert_true(append(&m, &which, 1, 1));
        check_ends(&m, 0, 1);
    }
    assert_int_equal(m.n_sealed, m.n_seals * KVANT_PLAN_RUN);
    assert_int_equal(m.n_seals, (N_BLOCKS - 12 + KVANT_PLAN_RUN - 1) / KVANT_PLAN_RUN);
    end(&m);
}

/* After prompts of different lengths, sequences decode a token each in every step. */
CASE(each_sequence_has_its_ends)
{
    enum { N = 4, FIRST = 64, NEWEST = 128, STEP = 64 };
    const uint32_t which[N] = { 0, 1, 2, 3 },
                   pages = (uint32_t)kvant_plan_pages(N * (FIRST + NEWEST), FIRST + NEWEST, STEP);
    model m;
    begin(&m, (kvant_plan_params){ N_BLOCKS, pages, STEP / SLOTS, FIRST, NEWEST, 0 }, 1);
    for (uint32_t s = 0; s < N; s++)
        for (uint32_t i = 0; i < 4; i++)
            assert_true(append(&m, &s, 1, 61 - 17 * s));
    for (uint32_t i = 0; i < 600; i++) {
        assert_true(append(&m, which, N, 1));
        for (uint32_t s = 0; s < N; s++)
            check_ends(&m, s, 1);
    }
    assert_true(m.n_sealed > 0);
    end(&m);
}

/* With too few pages, idle sequences lose their newest part before a busy one does. */
CASE(idle_sequences_give_way)
{
    model m;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 9, 2, 64, 64, 0 }, 1);
    for (uint32_t s = 0; s < SEQUENCES; s++)
        for (uint32_t i = 0; i < 20; i++) {
            assert_true(append(&m, &s, 1, 30));
            check_ends(&m, s, 30);
        }
    for (uint32_t s = 0; s < SEQUENCES; s++) /* their newest parts are sealed before first parts */
        assert_true(is_exact(&m, &m.sequences[s], 0));
    assert_false(is_exact(&m, &m.sequences[0], 599));
    assert_true(is_exact(&m, &m.sequences[SEQUENCES - 1], 599));
    assert_true(append(&m, &(uint32_t){ 0 }, 1, 1)); /* its last block becomes exact again */
    assert_true(is_exact(&m, &m.sequences[0], 600));
    assert_true(is_exact(&m, &m.sequences[0], 0));
    end(&m);
}

/* The first blocks of idle sequences fill the pool. A sequence whose tokens come one by one still
 * keeps its newest tokens exact, and the first blocks of idle sequences are sealed. */
CASE(busy_sequences_keep_their_newest_tokens)
{
    model m;
    begin(&m, (kvant_plan_params){ BLOCKS, SEQUENCES, SEQUENCES, 64, 128, 0 }, 1);
    for (uint32_t s = 0; s < SEQUENCES; s++)
        assert_true(append(&m, &s, 1, 64));
    for (uint32_t i = 0; i < 600; i++) {
        assert_true(append(&m, &(uint32_t){ 0 }, 1, 1));
        check_ends(&m, 0, 1);
    }
    assert_true(is_exact(&m, &m.sequences[SEQUENCES - 1], 0)); /* the sequence that was seen last */
    assert_false(is_exact(&m, &m.sequences[1], 0));
    end(&m);
}

/* The first 8 pages are for a step and are needed for something else after it. The test seals old
 * blocks, as a caller does that wants no other exact rows. The ends fit in the 4 other pages. */
CASE(steps_leave_their_pages)
{
    static const uint32_t sizes[] = { 1, 3, 64, 100, 300, 512 };
    for (uint32_t seed = 1; seed < 9; seed++) {
        model m;
        begin(&m, usual, seed);
        for (const uint32_t which = 0; append(&m, &which, 1, sizes[test_random(&m.state) % 6]);) {
            sequence *s = &m.sequences[0];
            const kvant_plan_view view = { s->blocks, s->n_blocks, (int32_t)s->length };
            kvant_plan_step_rows(m.plan, &(kvant_plan_step){ .views = &view, .n_views = 1 });
            for (uint32_t i = 0; i < s->n_blocks; i++) {
                const uint32_t block = (uint32_t)s->blocks[i],
                               end = 64 * i + 64 < s->length ? 64 * i + 64 : s->length;
                const int32_t page = kvant_plan_page(m.plan, block);
                assert_int_equal(kvant_plan_age(m.plan, block), s->length - end);
                assert_int_equal(kvant_plan_is_old(m.plan, block), i > 0 && s->length - end >= 128);
                if (page < 0 || !kvant_plan_is_old(m.plan, block))
                    continue;
                memcpy(m.codes[block], m.pages[page], sizeof m.codes[0]);
                m.owner[page] = -1;
                kvant_plan_seal(m.plan, block);
            }
            vacate(&m, 8);
            check_ends(&m, 0, 0);
        }
        end(&m);
    }
}

/* First blocks alone fill the pool: rows of a step still have the pages that are kept for a
 * step. */
CASE(steps_have_pages_of_their_own)
{
    model m;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 9, 3, 128, 64, 0 }, 1);
    for (uint32_t s = 0; s < SEQUENCES; s++)
        assert_true(append(&m, &s, 1, 128));
    for (uint32_t i = 0; i < 3; i++) {
        assert_true(append(&m, &(uint32_t){ 0 }, 1, 192));
        for (uint32_t back = 1; back <= 192; back++)
            assert_true(is_exact(&m, &m.sequences[0], m.sequences[0].length - back));
    }
    end(&m);
}

/* A block that two sequences share counts as newest while it is among the newest blocks of one of
 * them. */
CASE(shared_blocks_are_as_new_as_for_the_shortest)
{
    model m;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 6, 2, 0, 64, 0 }, 1);
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
                                  rotated[] = { both[1], both[0] };
            take(&m,
                 &(kvant_plan_step){ slots, positions, SLOTS, order ? rotated : both, 2, false });
            assert_true(kvant_plan_page(m.plan, 0) >= 0);
        }
    end(&m);
}

/* A step that is longer than its pages: its last rows are exact, the first ones are encoded. */
CASE(long_steps_keep_their_last_rows)
{
    model m;
    const uint32_t which = 0;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 6, 4, 64, 64, 0 }, 1);
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

/* All first blocks are overwritten with later tokens of another sequence. They are no first blocks
 * any more, and give way to newer blocks. */
CASE(overwritten_blocks_are_no_longer_first)
{
    model m;
    int64_t slots[SLOTS];
    int32_t positions[SLOTS];
    begin(&m, (kvant_plan_params){ N_BLOCKS, 6, 1, 64, 64, 0 }, 1);
    for (int32_t block = 0; block < 30; block++) {
        for (int32_t i = 0; i < SLOTS; i++) {
            slots[i] = block % 10 * SLOTS + i;
            positions[i] = (block < 5 ? 0 : block) * SLOTS + i; /* five sequences, then one */
        }
        const int32_t blocks[] = { block % 10 };
        const kvant_plan_view view = { blocks, 1, positions[0] };
        take(&m, &(kvant_plan_step){ slots, positions, SLOTS, &view, 1, false });
        assert_int_equal(kvant_plan_holds_first(m.plan, (uint32_t)block % 10), block < 5);
    }
    for (uint32_t block = 0; block < 10; block++)
        assert_int_equal(kvant_plan_page(m.plan, block) >= 0, block >= 4);
    end(&m);
}

/* Twenty blocks get late tokens of a first sequence and then tokens of a second sequence, which has
 * lower positions. The blocks age with the second sequence's tokens. The plan seals all but 4 of 10
 * pages at once. So 20 blocks need at most 5 runs. A block that were still as new as its former
 * rows would be sealed alone. */
CASE(blocks_age_with_their_new_rows)
{
    model m;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 10, 2, 64, 64, 0 }, 1);
    m.shift = 5000;
    for (uint32_t i = 0; i < 20; i++)
        assert_true(append(&m, &(uint32_t){ 0 }, 1, 64));
    m.shift = 0;
    m.sequences[0].length = m.n_seals = 0;
    for (uint32_t i = 0; i < 20; i++)
        assert_true(append(&m, &(uint32_t){ 0 }, 1, 64));
    assert_in_range(m.n_seals, 1, 5);
    end(&m);
}

/* Sequence 0 gets 512 tokens in its last step. Sequence 1 then needs pages: sequence 0 keeps its
 * first block and its 128 newest tokens, and no other block. */
CASE(newest_tokens_of_an_idle_sequence_count_from_its_end)
{
    model m;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 16, 8, 64, 128, 0 }, 1);
    for (uint32_t i = 0; i < 3; i++)
        assert_true(append(&m, &(uint32_t){ 0 }, 1, 512));
    for (uint32_t i = 0; i < 3; i++)
        assert_true(append(&m, &(uint32_t){ 1 }, 1, 512));
    const sequence *s = &m.sequences[0];
    for (uint32_t i = 0; i < s->length; i += SLOTS)
        assert_int_equal(is_exact(&m, s, i), i == 0 || s->length - i <= 128);
    check_ends(&m, 1, 512);
    end(&m);
}

/* A sequence's tokens move to positions that are lower by 1000. Its newest tokens are the same
 * ones, and tokens that follow are newer. */
CASE(shifted_tokens_stay_as_new_as_they_are)
{
    model m;
    const uint32_t which = 0;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 6, 2, 64, 128, 0 }, 1);
    for (uint32_t i = 0; i < 20; i++)
        assert_true(append(&m, &which, 1, 64));
    for (uint32_t block = 0; block < N_BLOCKS; block++)
        kvant_plan_shift(m.plan, block, -1000);
    m.shift = -1000;
    for (uint32_t i = 0; i < 20; i++) {
        assert_true(append(&m, &which, 1, 64));
        check_ends(&m, 0, 64);
    }
    end(&m);
}

/* Tokens move as far as an int32_t allows, again and again, and keep their distances. */
CASE(shifts_end_at_the_last_position)
{
    static const int32_t by[] = { INT32_MIN, INT32_MIN, INT32_MAX, INT32_MAX, INT32_MAX, -1, 1 };
    const int64_t slot = 0;
    model m;
    begin(&m, usual, 1);
    assert_true(append(&m, &(uint32_t){ 0 }, 1, 512));
    for (uint32_t i = 0; i < COUNT(by) * 8; i++) {
        kvant_plan_shift(m.plan, i % 8, by[i / 8]);
        assert_int_equal(kvant_plan_age(m.plan, i % 8), -64 * (int64_t)(i % 8 + 1));
    }
    take(&m, &(kvant_plan_step){ &slot, &(int32_t){ INT32_MAX }, 1, NULL, 0, false });
    end(&m);
}

/* Sequence 0 is copied as a stream is, then sequence 1. Their first and newest tokens are
 * exact in the originals and in the copies, and the copies go on. */
CASE(copies_are_as_exact_as_their_originals)
{
    model m;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 20, 4, 64, 128, 0 }, 1);
    for (uint32_t s = 0; s < 2; s++)
        for (uint32_t i = 0; i < 5; i++)
            assert_true(append(&m, &s, 1, 128));
    for (uint32_t s = 0; s < 2; s++) {
        sequence *to = &m.sequences[2 + s];
        const uint32_t from = (uint32_t)m.sequences[s].blocks[0], first = 40 + 20 * s;
        *to = m.sequences[s];
        for (uint32_t i = 0; i < to->n_blocks; i++)
            to->blocks[i] = (int32_t)(first + (uint32_t)to->blocks[i] - from);
        copy(&m, from, first, to->n_blocks);
        for (uint32_t i = 0; i < 4; i++)
            if (i < 2 || i - 2 <= s)
                check_ends(&m, i, 0);
    }
    assert_true(append(&m, &(uint32_t){ 3 }, 1, 1));
    for (uint32_t i = 0; i < 4; i++)
        check_ends(&m, i, i == 3);
    end(&m);
}

/* Rewritten rows have no positions. Their blocks become exact and are as new as before. */
CASE(rewritten_blocks_are_opened)
{
    model m;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 6, 2, 64, 64, 0 }, 1);
    for (uint32_t i = 0; i < 12; i++)
        assert_true(append(&m, &(uint32_t){ 0 }, 1, 64));
    const int64_t slots[] = { 3 * SLOTS, 0, 4 * SLOTS };
    take(&m, &(kvant_plan_step){ slots, NULL, 3, NULL, 0, false });
    for (uint32_t i = 0; i < 3; i++)
        assert_true(kvant_plan_page(m.plan, (uint32_t)(slots[i] / SLOTS)) >= 0);
    assert_true(kvant_plan_holds_first(m.plan, 0));
    for (uint32_t i = 0; i < 6; i++) {
        assert_true(append(&m, &(uint32_t){ 0 }, 1, 64));
        check_ends(&m, 0, 64);
    }
    for (uint32_t i = 3; i < 5; i++)
        assert_false(kvant_plan_page(m.plan, i) >= 0);
    end(&m);
}

/* Tokens that were sealed as nobody's first or newest tokens stay sealed when more tokens are to be
 * exact. All later tokens are exact. */
CASE(parameters_change_between_steps)
{
    model m;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 12, 1, 0, 0, 0 }, 1);
    for (uint32_t s = 0; s < 2; s++) {
        for (uint32_t i = 0; i < 30; i++)
            assert_true(append(&m, &s, 1, 64));
        assert_int_equal(is_exact(&m, &m.sequences[s], 0), s == 1);
        kvant_plan_set_params(m.plan, &(kvant_plan_params){ N_BLOCKS, 12, 1, 64, 64, 0 });
    }
    end(&m);
}

/* Steps of more than 16 tokens are sealed at once. Their first tokens and the newest tokens at
 * their end are exact. Shorter steps are exact as a whole. */
CASE(rows_of_long_steps_are_sealed_at_once)
{
    model m;
    const uint32_t which = 0;
    begin(&m, (kvant_plan_params){ N_BLOCKS, 8, 4, 64, 128, 16 }, 1);
    for (int i = 0; i < 4; i++) {
        assert_true(append(&m, &which, 1, 300));
        const sequence *s = &m.sequences[0];
        for (uint32_t at = s->length - 300; at < s->length; at++)
            if (at < 64 || s->length - at <= 128)
                assert_true(is_exact(&m, s, at));
            else if (s->length - at > 128 + SLOTS && s->length - at <= 300 - SLOTS)
                assert_false(is_exact(&m, s, at)); /* in no block with other rows */
        for (uint32_t n = 1; n <= 16; n++) {
            assert_true(append(&m, &which, 1, n));
            check_ends(&m, 0, n);
        }
    }
    end(&m);
}

/* Rows that come without a step, as a restored sequence does block after block: its first block and
 * its newest blocks are exact, and a released block leaves nothing behind. */
CASE(rows_without_a_step)
{
    model m;
    int64_t slots[SLOTS];
    int32_t positions[SLOTS];
    begin(&m, (kvant_plan_params){ N_BLOCKS, 5, 2, 64, 128, 0 }, 1);
    for (int round = 0; round < 2; round++) { /* then from another position on */
        for (int32_t block = 0; block < 20; block++) {
            for (int32_t i = 0; i < SLOTS; i++) {
                positions[i] = (block + 50 * round) * SLOTS + i;
                slots[i] = block * SLOTS + i;
            }
            take(&m, &(kvant_plan_step){ slots, positions, SLOTS, NULL, 0, false });
            for (int32_t back = 0; back <= block; back++)
                if (back < 4 + round || (round == 0 && back == block))
                    assert_true(kvant_plan_page(m.plan, (uint32_t)(block - back)) >= 0);
        }
        for (int32_t block = 0; block < 20; block++)
            release(&m, block);
    }
    end(&m);
}

/* Rows of blocks first to end - 1, at positions from 0 on. */
static kvant_plan_step rows_of(int64_t first, int64_t end)
{
    static int64_t slots[MOST_ROWS];
    static int32_t positions[MOST_ROWS];
    const uint32_t n = (uint32_t)(end - first) * SLOTS;
    for (uint32_t i = 0; i < n; i++) {
        slots[i] = first * SLOTS + i;
        positions[i] = (int32_t)i;
    }
    return (kvant_plan_step){ .slots = slots, .positions = positions, .n = n };
}

/* Restored rows take free pages, first and newest tokens before the rest. The exact tokens of a
 * sequence that is there stay exact, which rows of a step may push out. */
CASE(restored_rows_push_out_no_higher_rank)
{
    for (int restores = 0; restores < 2; restores++) {
        const kvant_plan_params params = { 16, 6, 4, 64, 128, 0 };
        kvant_plan *plan;
        assert_int_equal(kvant_plan_create(&params, &plan), KVANT_OK);
        kvant_plan_step rows = rows_of(0, 2);
        kvant_plan_step_rows(plan, &rows);
        rows = rows_of(4, 10);
        const kvant_plan_changes changes =
            restores ? kvant_plan_restore_rows(plan, &rows) : kvant_plan_step_rows(plan, &rows);
        assert_int_equal(changes.n_seal > 0, !restores);
        for (uint32_t block = 0; block < 10 && restores; block++)
            assert_int_equal(kvant_plan_page(plan, block) >= 0,
                             block < 2 || block == 4 || block > 6);
        kvant_plan_free(&plan);
    }
}

/* Random steps, cuts, ends of sequences and rewritten rows. Slots of one block may belong to
 * several sequences and come in any order. */
static void random_step(model *m)
{
    const uint32_t a = (uint32_t)(test_random(&m->state) % SEQUENCES);
    uint32_t all[SEQUENCES], n_all = 0;
    int64_t slots[40];
    int32_t positions[40];
    const uint32_t half = m->params.n_blocks / 2;
    switch (test_random(&m->state) % 10) {
    case 8:
        copy(m, half * (a % 2), half * !(a % 2), 1 + (uint32_t)(test_random(&m->state) % half));
        return;
    case 0: cut(m, a, (uint32_t)(test_random(&m->state) % (m->sequences[a].length + 1))); return;
    case 1: cut(m, a, 0); return;
    case 2:
        for (uint32_t i = 0; i < 40; i++) { /* anywhere */
            positions[i] = (int32_t)(test_random(&m->state) % 4096);
            slots[i] = (int64_t)(test_random(&m->state) % (m->params.n_blocks * SLOTS));
            m->used[slots[i] / SLOTS] = true;
        }
        take(m, &(kvant_plan_step){ slots, a % 2 ? positions : NULL, 40, NULL, 0, false });
        return;
    case 3:
        for (uint32_t s = 0; s < SEQUENCES; s++)
            if (m->sequences[s].length)
                all[n_all++] = s;
        append(m, all, n_all, 1 + (uint32_t)(test_random(&m->state) % 20));
        return;
    case 4: vacate(m, (uint32_t)(test_random(&m->state) % (m->params.n_pages + 1))); return;
    default: append(m, &a, 1, 1 + (uint32_t)(test_random(&m->state) % 300));
    }
}

static uint64_t random_run(uint64_t seed, bool undoes)
{
    model m;
    const uint64_t r = seed * 0x9e3779b97f4a7c15u;
    const uint32_t pages = 1 + (uint32_t)(r >> 8) % 20;
    const kvant_plan_params params = { .n_blocks = 8 + (uint32_t)(r >> 16) % (N_BLOCKS - 7),
                                       .n_pages = pages,
                                       .step_pages = (uint32_t)(r >> 24) % (pages + 1),
                                       .first = 64 * ((uint32_t)(r >> 32) % 3),
                                       .newest = (uint32_t)(r >> 40) % 200,
                                       .step_rows = (uint32_t)(r >> 48) % 3 * 20 };
    begin(&m, params, seed);
    m.undoes = undoes;
    for (int step = 0; step < 300; step++)
        random_step(&m);
    const uint64_t digest = m.digest;
    end(&m);
    return digest;
}

CASE(every_row_is_in_one_place)
{
    for (uint64_t seed = 1; seed <= 60; seed++)
        random_run(seed, seed % 2);
}

CASE(replays_are_equal)
{
    for (uint64_t seed = 100; seed < 110; seed++) {
        assert_true(random_run(seed, false) == random_run(seed, false));
        assert_true(random_run(seed, false) == random_run(seed, true));
        assert_true(random_run(seed, false) != random_run(seed + 1, false));
    }
}

/* The blocks that a run of rows touches, wherever in a block it begins. */
CASE(pages_suffice_for_runs_that_begin_anywhere)
{
    for (uint32_t n = 0; n <= 4 * SLOTS; n++)
        for (uint32_t first = 0; first < SLOTS; first++) {
            const uint32_t touched = n > 0 ? (first + n - 1) / SLOTS + 1 : 0;
            assert_true(touched <= kvant_plan_pages(n, n, 0));
            if (first == 0)
                assert_int_equal(touched, kvant_plan_blocks(n));
        }
    assert_int_equal(kvant_plan_pages(10 * SLOTS, 3 * SLOTS, SLOTS + 1), 10 + 3 + 2);
}

RUN_CASES(NULL, NULL)
