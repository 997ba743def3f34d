/* test_allocate.c - allocation of choices to sites, against a search of all combinations. */
#include "testing.h"

#include "../../tools/allocate.h"

enum { SITES = 6, CHOICES = 4 };

typedef struct problem {
    allocate_choice choices[SITES][CHOICES];
    allocate_site sites[SITES];
} problem;

/* Losses that fall with bytes by about a factor for each step, as those of codecs do; some choices are worse at more bytes. */
static void make(problem *p, uint64_t *state)
{
    for (int i = 0; i < SITES; i++) {
        const double weight = exp(3 * test_uniform(state));
        for (int c = 0; c < CHOICES; c++)
            p->choices[i][c] = (allocate_choice){ 100.0 * (c + 1) + floor(20 * test_uniform(state)),
                                                  weight * pow(3.0 + test_uniform(state), -c) };
        p->sites[i] = (allocate_site){ p->choices[i], CHOICES, 0 };
    }
}

/* The least loss of all combinations within the budget; infinite when there is none. */
static double search(const problem *p, double budget)
{
    double best = INFINITY;
    for (int n = 0; n < 1 << (2 * SITES); n++) {
        double bytes = 0, loss = 0;
        for (int i = 0; i < SITES; i++) {
            bytes += p->choices[i][n >> 2 * i & 3].bytes;
            loss += p->choices[i][n >> 2 * i & 3].loss;
        }
        if (bytes <= budget && loss < best)
            best = loss;
    }
    return best;
}

static void test_close_to_the_best(void **state)
{
    (void)state;
    uint64_t seed = 11;
    double sum = 0, best_sum = 0;
    int exact = 0;
    for (int round = 0; round < 60; round++) {
        problem p;
        allocate_total total;
        make(&p, &seed);
        const double budget = 650 + 1600 * test_uniform(&seed), best = search(&p, budget);
        assert_int_equal(allocate(p.sites, SITES, budget, &total), isfinite(best));
        if (!isfinite(best))
            continue;
        assert_true(total.bytes <= budget);
        double bytes = 0, loss = 0;
        for (int i = 0; i < SITES; i++) {
            bytes += p.choices[i][p.sites[i].chosen].bytes;
            loss += p.choices[i][p.sites[i].chosen].loss;
        }
        assert_true(bytes == total.bytes && loss == total.loss);
        assert_true(total.loss >= best * (1 - 1e-12));
        /* No exchange of two sites helps; one of three could, so not every round is exact. */
        exact += total.loss <= best * (1 + 1e-12);
        sum += total.loss;
        best_sum += best;
    }
    assert_true(exact >= 45);
    assert_true(sum <= 1.02 * best_sum);
}

static void test_no_exchange_of_two_helps(void **state)
{
    (void)state;
    uint64_t seed = 5;
    for (int round = 0; round < 20; round++) {
        problem p;
        allocate_total total;
        make(&p, &seed);
        const double budget = 900 + 1000 * test_uniform(&seed);
        assert_true(allocate(p.sites, SITES, budget, &total));
        for (int n = 0; n < SITES * SITES * CHOICES * CHOICES; n++) {
            const int i = n % SITES, j = n / SITES % SITES, c = n / (SITES * SITES) % CHOICES,
                      d = n / (SITES * SITES * CHOICES);
            const allocate_choice *a = &p.choices[i][p.sites[i].chosen], *b = &p.choices[j][p.sites[j].chosen];
            if (i == j)
                continue;
            const double bytes = total.bytes + p.choices[i][c].bytes - a->bytes + p.choices[j][d].bytes - b->bytes;
            const double loss = total.loss + p.choices[i][c].loss - a->loss + p.choices[j][d].loss - b->loss;
            assert_true(bytes > budget || loss >= total.loss * (1 - 1e-9));
        }
    }
}

static void test_a_budget_that_is_too_small(void **state)
{
    (void)state;
    const allocate_choice choices[] = { { 20, 0 }, { 10, 5 }, { 10, 3 } };
    allocate_site sites[2] = { { choices, 3, 0 }, { choices, 3, 0 } };
    allocate_total total;
    assert_false(allocate(sites, 2, 19, &total));
    assert_true(total.bytes == 20 && total.loss == 6);
    assert_true(allocate(sites, 2, 20, &total));
    assert_true(total.bytes == 20 && total.loss == 6);
    assert_true(allocate(sites, 2, 30, &total));
    assert_int_equal(sites[0].chosen, 0); /* ties go to the earlier site */
    assert_int_equal(sites[1].chosen, 2);
    assert_true(allocate(sites, 2, 1000, &total));
    assert_true(total.bytes == 40 && total.loss == 0);
}

static void test_more_bytes_are_no_reason(void **state)
{
    (void)state;
    const allocate_choice choices[] = { { 10, 1 }, { 20, 1 }, { 30, 2 } };
    allocate_site site = { choices, 3, 0 };
    allocate_total total;
    assert_true(allocate(&site, 1, 100, &total));
    assert_int_equal(site.chosen, 0);
    assert_true(allocate(NULL, 0, 0, &total));
    assert_true(total.bytes == 0 && total.loss == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_close_to_the_best),
        cmocka_unit_test(test_no_exchange_of_two_helps),
        cmocka_unit_test(test_a_budget_that_is_too_small),
        cmocka_unit_test(test_more_bytes_are_no_reason),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
