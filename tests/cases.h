/* cases.h - cmocka with the headers that it and most tests need, and the cases of a test program.
 *
 *     CASE(sums_are_ordered)
 *     {
 *         assert_true(...);
 *     }
 *
 *     RUN_CASES(NULL, NULL)
 *
 * The cases of a file run in the order of the file. An argument of the program chooses among them:
 * the cases whose names match it (errors_*), or after a minus (-errors_*) those that do not. */
#ifndef KVANT_TESTS_CASES_H
#define KVANT_TESTS_CASES_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST_CASES = 64 };

static struct CMUnitTest defined_cases[MOST_CASES];
static size_t n_defined_cases;

/* Called once for each case, before main(). Linkers of some systems call it in another order than
 * that of the file. */
static inline void add_case(struct CMUnitTest added, int line)
{
    static int lines[MOST_CASES];
    size_t at = n_defined_cases++;

    if (at == MOST_CASES)
        abort();
    for (; at > 0 && lines[at - 1] > line; at--) {
        defined_cases[at] = defined_cases[at - 1];
        lines[at] = lines[at - 1];
    }
    defined_cases[at] = added;
    lines[at] = line;
}

/* Begins the definition of a case, which runs between the functions start and stop (NULL: none). */
#define CASE_BETWEEN(case_name, start, stop)                                                       \
    static void case_name(void **state);                                                           \
    __attribute__((constructor)) static void add_##case_name(void)                                 \
    {                                                                                              \
        add_case((struct CMUnitTest){ #case_name, case_name, start, stop, NULL }, __LINE__);       \
    }                                                                                              \
    static void case_name(void **state)

#define CASE(case_name) CASE_BETWEEN(case_name, NULL, NULL)

static inline void choose_cases(int argc, char **argv)
{
    if (argc < 2)
        return;
    if (argv[1][0] == '-')
        cmocka_set_skip_filter(argv[1] + 1);
    else
        cmocka_set_test_filter(argv[1]);
}

/* Runs the cases of the file that have been chosen, between the functions start and stop (NULL:
 * none). Returns the number of failures. */
static inline int run_cases(CMFixtureFunction start, CMFixtureFunction stop)
{
    return _cmocka_run_group_tests("cases", defined_cases, n_defined_cases, start, stop);
}

/* A program that does so and nothing else. */
#define RUN_CASES(start, stop)                                                                     \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        choose_cases(argc, argv);                                                                  \
        return run_cases(start, stop);                                                             \
    }

#endif /* KVANT_TESTS_CASES_H */
