/* checker.h - the state behind check.h: which kernel, level and case is at work, what went wrong, and the clock. */
#ifndef KVANT_TESTS_KERNELS_CHECKER_H
#define KVANT_TESTS_KERNELS_CHECKER_H

#include <setjmp.h>

#include "check.h"
#include "memory.h"

#define MAX_SHAPES 32u

struct checker {
    const char *kernel, *level;
    char name[256]; /* of the case */
    guard_memory memory;
    uint64_t rng;
    uint64_t cases, failures; /* of this kernel at this level */
    uint64_t most_cases;      /* of a pass; 0: all */
    uint64_t pass_cases;
    sigjmp_buf out;       /* where a kernel that faults ends up */
    volatile bool inside; /* a kernel */
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

/* Makes faults in kernels failures of their case; everywhere else they stay what they are. */
void checker_catch_faults(checker *check);

/* A check with all buffers' ends and then all beginnings at unmapped pages; cases and failures say how it went. */
void checker_run(checker *check, check_fn *fn, const kvant_kernels *kernels, uint64_t seed);

/* 0 when the checks report kernels that are known to be wrong. */
int self_test(checker *check);

#endif
