/* test_mixes.c - mixes of candidates over kv heads, against all there are. */
#include "testing.h"

#include "../../tools/mixes.h"

enum { HEADS = 3, CANDIDATES = 6, ALL = CANDIDATES * CANDIDATES * CANDIDATES };

typedef struct problem {
    kvant_codec_info infos[CANDIDATES];
    double bytes[CANDIDATES], errors[CANDIDATES * HEADS];
    mixes_candidates of;
} problem;

/* Two kinds of candidates, one of which keeps a page in fp16; errors fall by about a factor for each step of bytes. */
static void make(problem *p, uint32_t n_kv_heads, uint64_t *state)
{
    for (uint32_t c = 0; c < CANDIDATES; c++) {
        p->infos[c] = (kvant_codec_info){ .head_dim = 64, .block_tokens = 1, .sink_tokens = c % 2 ? 4 : 0 };
        p->bytes[c] = 100.0 * (c / 2 + 1) + (c % 2 ? 30 : 0);
    }
    for (uint32_t head = 0; head < n_kv_heads; head++) {
        const double weight = exp(4 * test_uniform(state));
        for (uint32_t c = 0; c < CANDIDATES; c++)
            p->errors[c * n_kv_heads + head] = weight * pow(2 + 3 * test_uniform(state), -(double)(c / 2));
    }
    p->of = (mixes_candidates){ p->infos, p->bytes, p->errors, CANDIDATES, n_kv_heads };
}

static double error_of(const problem *p, const uint8_t *heads)
{
    double sum = 0;
    for (uint32_t head = 0; head < HEADS; head++)
        sum += p->errors[heads[head] * HEADS + head];
    return sum;
}

static double bytes_of(const problem *p, const uint8_t *heads)
{
    double sum = 0;
    for (uint32_t head = 0; head < HEADS; head++)
        sum += p->bytes[heads[head]];
    return sum;
}

static bool fit(const uint8_t *heads)
{
    return heads[0] % 2 == heads[1] % 2 && heads[0] % 2 == heads[2] % 2;
}

/* The least error of one kind's combinations within so many bytes. */
static double least_error(const problem *p, double bytes, uint8_t kind)
{
    double least = INFINITY;
    for (int n = 0; n < ALL; n++) {
        const uint8_t heads[HEADS] = { (uint8_t)(n % CANDIDATES), (uint8_t)(n / CANDIDATES % CANDIDATES),
                                       (uint8_t)(n / CANDIDATES / CANDIDATES) };
        if (fit(heads) && heads[0] % 2 == kind % 2 && bytes_of(p, heads) <= bytes)
            least = fmin(least, error_of(p, heads));
    }
    return least;
}

static void first_comes_one_candidate_for_all(void **state)
{
    uint64_t rng = 3;
    problem p;
    mixes m;
    (void)state;
    make(&p, HEADS, &rng);
    assert_true(mixes_make(&m, &p.of));
    assert_true(m.n > CANDIDATES);
    for (uint8_t c = 0; c < CANDIDATES; c++) {
        const uint8_t heads[HEADS] = { c, c, c };
        assert_memory_equal(m.list[c].heads, heads, HEADS);
        assert_true(m.list[c].bytes == bytes_of(&p, heads));
        assert_true(m.list[c].error == error_of(&p, heads));
    }
    mixes_free(&m);
    assert_null(m.list);
}

/* A path of best steps is best at each of its points: nothing of the same kind has less error in as many bytes. */
static void every_mix_is_the_best_of_its_bytes(void **state)
{
    uint64_t rng = 4;
    (void)state;
    for (int round = 0; round < 200; round++) {
        problem p;
        mixes m;
        make(&p, HEADS, &rng);
        assert_true(mixes_make(&m, &p.of));
        for (size_t i = CANDIDATES; i < m.n; i++) {
            const uint8_t *heads = m.list[i].heads;
            assert_true(fit(heads));
            assert_false(heads[0] == heads[1] && heads[0] == heads[2]);
            assert_true(m.list[i].bytes == bytes_of(&p, heads));
            assert_true(fabs(m.list[i].error - error_of(&p, heads)) < 1e-9);
            assert_true(m.list[i].error <= least_error(&p, m.list[i].bytes, heads[0]) * (1 + 1e-12));
        }
        mixes_free(&m);
    }
}

static void one_kv_head_has_nothing_to_mix(void **state)
{
    uint64_t rng = 5;
    problem p;
    mixes m;
    (void)state;
    make(&p, 1, &rng);
    assert_true(mixes_make(&m, &p.of));
    assert_int_equal(m.n, CANDIDATES);
    mixes_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(first_comes_one_candidate_for_all),
        cmocka_unit_test(every_mix_is_the_best_of_its_bytes),
        cmocka_unit_test(one_kv_head_has_nothing_to_mix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
