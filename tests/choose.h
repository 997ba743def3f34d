/* choose.h - chooses the cases of a cmocka program that run. They are the cases whose names match
 * the first argument (errors_*), or after a minus (-errors_*) the cases that do not match. Include
 * it after cmocka.h. */
#ifndef KVANT_TESTS_CHOOSE_H
#define KVANT_TESTS_CHOOSE_H

static inline void choose_cases(int argc, char **argv)
{
    if (argc < 2)
        return;
    if (argv[1][0] == '-')
        cmocka_set_skip_filter(argv[1] + 1);
    else
        cmocka_set_test_filter(argv[1]);
}

#endif /* KVANT_TESTS_CHOOSE_H */
