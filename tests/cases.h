/* cases.h - cmocka with the headers that it and most tests need, and the choice of the cases that
 * run. They are the cases whose names match the first argument of a program (errors_*), or after a
 * minus (-errors_*) the cases that do not match. */
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

static inline void choose_cases(int argc, char **argv)
{
    if (argc < 2)
        return;
    if (argv[1][0] == '-')
        cmocka_set_skip_filter(argv[1] + 1);
    else
        cmocka_set_test_filter(argv[1]);
}

#endif /* KVANT_TESTS_CASES_H */
