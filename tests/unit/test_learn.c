/* test_learn.c - the decisions of src/store/learn.h, which all kinds of caches share. */
#include "../cases.h"
#include "../../src/store/learn.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* Rows */

CASE(repeated_tokens_are_alike)
{
    double text[64], repeated[64];
    float values[64 * 4];
    for (uint32_t i = 0; i < 64; i++) {
        text[i] = 100 + i * 37 % 64;
        repeated[i] = i % 3;
    }
    assert_false(kvant_learn_lengths_are_alike(text, 64));
    assert_true(kvant_learn_lengths_are_alike(repeated, 64));
    for (uint32_t i = 0; i < KVANT_LEARN_SAMPLES; i++)
        repeated[i] = 1;
    assert_false(kvant_learn_lengths_are_alike(repeated, KVANT_LEARN_SAMPLES - 1));
    assert_true(kvant_learn_lengths_are_alike(repeated, KVANT_LEARN_SAMPLES));
    /* 12 of 64 values differ in their signs: 192 of 1024. */
    for (uint32_t n = 11; n <= 12; n++) {
        for (uint32_t i = 0; i < 64; i++)
            for (uint32_t j = 0; j < 4; j++)
                values[i * 4 + j] = i % n >> j & 1 ? -1.0f : 1.0f;
        assert_int_equal(kvant_learn_values_are_alike(values, 4, 64, 4), n < 12);
    }
}

#define WIDTH 200 /* more channels than are looked at */
#define N_VALUES 90

/* Values of one kind are equal, except for `n_signs` signs. Floats and halves say the same. */
static bool values_are_alike(size_t n_kinds, size_t n_signs)
{
    static float values[N_VALUES * WIDTH];
    static uint16_t halves[N_VALUES * WIDTH];
    for (size_t i = 0; i < N_VALUES; i++)
        for (size_t j = 0; j < WIDTH; j++) {
            const size_t bit = (i % n_kinds * 0x9e3779b1u ^ j * 0x85ebca6bu) * 0xc2b2ae35u >> 16,
                         first = i / n_kinds * n_signs;
            const bool differs = j >= first && j < first + n_signs;
            values[i * WIDTH + j] = (bit & 1) != differs ? -1.0f : 0.0f;
            halves[i * WIDTH + j] = (bit & 1) != differs ? 0xbc00 : j % 2 ? 0x8000 : 0x3c00;
        }
    const bool alike = kvant_learn_values_are_alike(values, WIDTH, N_VALUES, WIDTH);
    assert_int_equal(kvant_learn_halves_are_alike(halves, WIDTH, N_VALUES, WIDTH), alike);
    return alike;
}

/* The limit is at 16.9 of 90 values. Two values of a kind differ in at most 2 n_signs signs. They
 * may differ in 16. */
CASE(values_are_alike_if_few_signs_differ)
{
    assert_true(values_are_alike(1, 0));
    assert_true(values_are_alike(16, 0));
    assert_false(values_are_alike(17, 0));
    assert_true(values_are_alike(10, 8));
    assert_false(values_are_alike(10, 9));
}

/* The limits in the order in which they apply. */
CASE(limits_depend_on_the_estimate)
{
    static const struct {
        kvant_learn_estimate estimate;
        double most;
    } cases[] = { { { false, false, true, 0 }, 1.5 },   { { false, true, true, 0 }, 3.0 },
                  { { true, true, false, 0 }, 1.5 },    { { true, false, true, -1 }, 1.25 },
                  { { true, false, true, 511 }, 1.25 }, { { true, false, true, 512 }, 2.0 } };
    for (size_t i = 0; i < COUNT(cases); i++)
        assert_true(kvant_learn_most_error(&cases[i].estimate) == cases[i].most);
}

/* Matrices of a cache that judges */

CASE(matrices_are_due_after_four_times_the_rows)
{
    static const uint32_t due[][2] = { { 16, 256 },  { 64, 256 },  { 65, 260 },
                                       { 239, 956 }, { 240, 960 }, { 1000, 960 } };
    kvant_learn_schedule s = { 0 };
    for (size_t i = 0; i < COUNT(due); i++) {
        assert_true(kvant_learn_makes_matrix(&s, -1, due[i][0], false, 2));
        assert_int_equal(s.due, due[i][1]);
        assert_int_equal(s.done, due[i][0] >= 960);
        assert_false(kvant_learn_is_due(&s, -1, s.due - 1));
        assert_true(kvant_learn_is_due(&s, -1, s.due));
    }
    assert_false(kvant_learn_makes_matrix(&s, -1, 64, false, 1));
    assert_true(s.done);
    assert_true(kvant_learn_makes_matrix(&s, -1, 64, true, 1));
    kvant_learn_begin(&s, true);
    assert_int_equal(s.due, 256);
    kvant_learn_begin(&s, false);
    assert_int_equal(s.due, 0);
}

/* Every bucket gets exactly one run, whatever the order of positions and the transforms that are
 * left. */
CASE(buckets_are_shared_out)
{
    srand(7);
    for (uint32_t round = 0; round < 2000; round++) {
        kvant_learn_schedule s = { .n_buckets = 1 + (uint32_t)rand() % KVANT_MOST_BUCKETS,
                                   .most = (uint32_t)rand() % 4 };
        uint32_t left = s.n_buckets;
        while (left > 0) {
            const int bucket = rand() % (int)s.n_buckets;
            if (kvant_learn_was_tried(&s, bucket))
                continue;
            const kvant_bucket_span span = kvant_learn_next_span(&s, bucket, (uint32_t)rand() % 12);
            assert_true(span.end > span.first && span.end <= s.n_buckets);
            assert_true(span.first == bucket || (s.most == 1 && span.first == 0));
            kvant_learn_made_span(&s, span, s.most == 1 || rand() % 4);
            assert_true(kvant_learn_was_tried(&s, bucket) || s.most == 1);
            assert_true(kvant_learn_buckets_left(&s) < left);
            left = kvant_learn_buckets_left(&s);
        }
        assert_true(kvant_learn_spans_made(&s) >= 1);
        assert_false(kvant_learn_has_ended(&s));
        s.done = true;
        assert_int_equal(kvant_learn_has_ended(&s), s.most == 0);
    }
}

CASE(queries_of_prompts_are_of_use)
{
    kvant_learn_schedule s = { 0 };
    assert_true(kvant_learn_wants_queries(&s, true, 1));
    assert_false(kvant_learn_wants_queries(&s, false, 63));
    assert_true(kvant_learn_wants_queries(&s, false, 64));
    s.done = true;
    assert_false(kvant_learn_wants_queries(&s, true, 63));
    assert_true(kvant_learn_wants_queries(&s, true, 64));
    assert_false(kvant_learn_wants_queries(&s, false, 64));
}

/* Position buckets of a cache with lessons */

CASE(later_positions_take_later_buckets)
{
    kvant_lesson_buckets b = { .since = 5 };
    kvant_lesson_buckets_begin(&b);
    assert_true(kvant_lesson_in_first_bucket(&b));
    for (uint32_t id = 1; id < KVANT_LESSON_BUCKETS; id++) {
        const kvant_lesson_bucket bucket = kvant_lesson_bucket_at(id);
        assert_int_equal(bucket.first, kvant_lesson_bucket_at(id - 1).last + 1);
        assert_int_equal(kvant_lesson_next_bucket(&b), id);
        assert_int_equal(kvant_lesson_bucket_after(bucket.first - 1), id - 1);
        assert_int_equal(kvant_lesson_bucket_after(bucket.first), id);
        assert_true(kvant_lesson_may_request(&b, id));
        kvant_lesson_requested(&b, id, true);
        assert_false(kvant_lesson_may_request(&b, id));
        /* The answer waits for rows and for the position. */
        assert_false(kvant_lesson_takes_answer(&b, bucket.from));
        b.since = KVANT_LESSON_LATE;
        assert_false(kvant_lesson_takes_answer(&b, bucket.from - 1));
        assert_true(kvant_lesson_takes_answer(&b, bucket.from));
        kvant_lesson_answered(&b, true);
        assert_int_equal(kvant_lesson_bucket_of(&b, bucket.from - 1), id - 1);
        assert_int_equal(kvant_lesson_bucket_of(&b, bucket.from), id);
        assert_int_equal(kvant_lesson_bucket_of(&b, INT32_MAX - KVANT_LESSON_LATE), id);
    }
}

CASE(a_failed_bucket_ends_learning)
{
    kvant_lesson_buckets b;
    kvant_lesson_buckets_begin(&b);
    kvant_lesson_requested(&b, 1, true);
    kvant_lesson_answered(&b, false);
    assert_true(b.ended);
    assert_false(kvant_lesson_may_request(&b, 2));
    assert_int_equal(kvant_lesson_bucket_of(&b, 5000), 0);
    kvant_lesson_buckets_begin(&b);
    kvant_lesson_requested(&b, 1, false);
    assert_true(b.ended && b.requested == 0);
}

/* Lessons */

static kvant_lesson_step step_of(size_t n, uint32_t n_used)
{
    return (kvant_lesson_step){ .n = n, .stays_exact = true, .n_used = n_used, .n_pages = 12 };
}

CASE(a_lesson_begins_when_two_thirds_are_full)
{
    kvant_lesson l = { 0 };
    kvant_lesson_step step = step_of(1, 7), prompt = step_of(64, 8);
    assert_int_equal(kvant_lesson_next(&l, &step), KVANT_LESSON_NONE);
    step.n_used = 8;
    assert_int_equal(kvant_lesson_next(&l, &step), KVANT_LESSON_BEGIN);
    assert_int_equal(kvant_lesson_next(&l, &prompt), KVANT_LESSON_TEACH);
    l.tried = true;
    assert_int_equal(kvant_lesson_next(&l, &step), KVANT_LESSON_NONE);
    assert_int_equal(kvant_lesson_next(&l, &prompt), KVANT_LESSON_NONE);
}

CASE(single_tokens_join_when_pages_are_full)
{
    kvant_lesson l = { .begun = true, .tried = true };
    kvant_lesson_step step = step_of(1, 12), prompt = step_of(512, 12);
    for (uint32_t i = 1; i < 24; i++) {
        assert_int_equal(kvant_lesson_next(&l, &step), KVANT_LESSON_NONE);
        assert_int_equal(kvant_lesson_next(&l, &prompt), KVANT_LESSON_NONE);
    }
    step.n_used = 11;
    assert_int_equal(kvant_lesson_next(&l, &step), KVANT_LESSON_NONE);
    step.n_used = 12;
    assert_int_equal(kvant_lesson_next(&l, &step), KVANT_LESSON_JOIN);
}

CASE(rows_that_are_sealed_need_transforms)
{
    kvant_lesson none = { 0 }, begun = { .begun = true };
    kvant_lesson_step step = step_of(512, 12);
    step.seals = true;
    assert_int_equal(kvant_lesson_next(&none, &step), KVANT_LESSON_SETTLE);
    assert_int_equal(kvant_lesson_next(&begun, &step), KVANT_LESSON_SETTLE);
    step.opens_empty = true;
    assert_int_equal(kvant_lesson_next(&none, &step), KVANT_LESSON_SETTLE);
    assert_int_equal(kvant_lesson_next(&begun, &step), KVANT_LESSON_JOIN_LATE);
    step.n = 63;
    assert_int_equal(kvant_lesson_next(&begun, &step), KVANT_LESSON_SETTLE);
    step.stays_exact = false;
    assert_int_equal(kvant_lesson_next(&none, &step), KVANT_LESSON_SETTLE);
    step.brings_more = true;
    assert_int_equal(kvant_lesson_next(&none, &step), KVANT_LESSON_NONE);
}

CASE(stages_in_place_follow_the_rows)
{
    static const size_t begins[][2] = {
        { 256, 128 }, { 2048, 1024 }, { 3072, 1024 }, { 8192, 2730 }, { 32768, 10922 }
    };
    for (size_t i = 0; i < COUNT(begins); i++) {
        const size_t room = begins[i][0], at = begins[i][1];
        assert_false(kvant_lesson_in_place_begins(room, at - 1));
        assert_true(kvant_lesson_in_place_begins(room, at));
    }
    /* After a prompt, single tokens wait for 256 steps, or for the end of the room. */
    kvant_lesson_in_place l = { 0 };
    assert_false(kvant_lesson_in_place_is_due(&l, 8192, 4000, 60, false));
    assert_int_equal(l.begun, 4000);
    assert_false(kvant_lesson_in_place_is_due(&l, 8192, 6047, 60, false));
    assert_true(kvant_lesson_in_place_is_due(&l, 8192, 6048, 60, false));
    for (uint32_t i = 1; i < 256; i++)
        assert_false(kvant_lesson_in_place_is_due(&l, 8192, 6048 + i, 60, true));
    assert_true(kvant_lesson_in_place_is_due(&l, 8192, 6304, 60, true));
    l.n_short_steps = 0;
    assert_false(kvant_lesson_in_place_is_due(&l, 8192, 8071, 60, true));
    assert_true(kvant_lesson_in_place_is_due(&l, 8192, 8072, 60, true));
    l.n_ready = 1;
    assert_true(kvant_lesson_in_place_is_due(&l, 8192, 4000, 60, true));
    assert_true(kvant_lesson_in_place_goes_on(&l, 8192, 4000, true));
    l.requested_at = 5000;
    assert_false(kvant_lesson_in_place_goes_on(&l, 8192, 6023, true));
    assert_true(kvant_lesson_in_place_goes_on(&l, 8192, 6024, true));
    assert_false(kvant_lesson_in_place_goes_on(&l, 8192, 7047, false));
    assert_true(kvant_lesson_in_place_goes_on(&l, 8192, 7048, false));
}

CASE(rows_that_are_alike_are_looked_at_again)
{
    kvant_lesson_in_place l = { 0 };
    assert_true(kvant_lesson_in_place_looks(&l, 382));
    l.n_alike = 382;
    assert_false(kvant_lesson_in_place_looks(&l, 763));
    assert_true(kvant_lesson_in_place_looks(&l, 764));
    l.n_alike = KVANT_LEARN_LESSON_ROWS;
    assert_false(kvant_lesson_in_place_looks(&l, KVANT_LEARN_LESSON_ROWS));
    l = (kvant_lesson_in_place){ .n_ready = 1 };
    assert_false(kvant_lesson_in_place_looks(&l, 764));
}

RUN_CASES(NULL, NULL)
