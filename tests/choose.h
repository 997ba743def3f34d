/* choose.h - which cases of a cmocka program run: those whose names fit the first argument
 * (errors_*), or, with a minus in front of it (-errors_*), all others. Include it after cmocka.h. */
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
