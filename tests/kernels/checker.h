/* checker.h - the state behind check.h: the current kernel, level and case, the failures, and the
 * clock. */
#ifndef KVANT_TESTS_KERNELS_CHECKER_H
#define KVANT_TESTS_KERNELS_CHECKER_H

#include <setjmp.h>

#include "check.h"
#include "memory.h"

#define MAX_SHAPES 32u

struct checker {
    const char *kernel, *level;
    char name[256]; /* name of the case */
    guard_memory memory;
    uint64_t rng;
    uint64_t cases, failures; /* of this kernel at this level */
    uint64_t most_cases;      /* largest number of cases in a pass; 0: all */
    uint64_t pass_cases;
    sigjmp_buf out;       /* where a kernel that faults continues */
    volatile bool inside; /* whether a kernel is running */
    bool faults_only;     /* wrong results do not count */
    bool silent;          /* nothing is printed */
    char first[256];      /* failure of this kernel at this level, without its case */

    char shape[96];
    uint32_t shape_index;
    uint64_t calls;
    double samples[15], c_ns[MAX_SHAPES];
    uint32_t n_samples;
    double started;
};

/* Makes a fault in a kernel a failure of its case. All other faults end the program as usual. */
void checker_catch_faults(checker *check);

/* Runs a check with the ends of all buffers at unmapped pages, and then with their beginnings. The
 * fields cases and failures have the result. */
void checker_run(checker *check, check_fn *fn, const kvant_kernels *kernels, uint64_t seed);

/* Returns 0 if the checks report all kernels that are known to be wrong. */
int self_test(checker *check);

#endif
