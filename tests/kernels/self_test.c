/* self_test.c - kernels with every kind of error that matters. The checks must report each of
 * them. */
#include <signal.h>
#include <stddef.h>
#include <stdio.h>

#include "checker.h"

static const kvant_kernels *right; /* portable C */

static KVANT_DOT_FN(reads_behind)
{
    volatile float behind = a[n];
    (void)behind;
    return right->dot(a, b, n);
}

static KVANT_DOT_FN(reads_before)
{
    volatile float before = *(b - 1);
    (void)before;
    return right->dot(a, b, n);
}

static KVANT_DOT_FN(sums_in_another_order)
{
    float sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static KVANT_TO_HALF_FN(writes_behind)
{
    for (uint32_t i = 0; i < (n + 7) / 8 * 8; i++)
        half[i] = i < n ? kvant_half_from_float(x[i]) : 0;
}

static KVANT_TO_HALF_FN(rounds_ties_away)
{
    for (uint32_t i = 0; i < n; i++)
        half[i] = kvant_half_from_float(nextafterf(x[i], copysignf(INFINITY, x[i])));
}

static KVANT_RANGE_FN(writes_to_its_input)
{
    right->range(x, n, min, max);
    *(float *)(uintptr_t)x = *min;
}

static KVANT_HADAMARD_FN(forgets_the_last)
{
    float last = x[n - 1];
    right->hadamard(x, n, block);
    x[n - 1] = last;
}

static KVANT_EXP_SUM_FN(is_too_rough)
{
    float sum = right->exp_sum(x, n, shift);
    for (uint32_t i = 0; i < n; i++)
        x[i] *= 1 + 0x1p-18f;
    return sum;
}

static KVANT_SCALE_COLUMNS_FN(does_nothing)
{
    (void)tile, (void)m, (void)n, (void)scale, (void)zero;
}

static KVANT_CODE_DOTS_FN(is_off_by_one)
{
    right->code_dots(layout, page, values, factors, dots, dots_stride, n);
    dots[(n - 1) * dots_stride + 16 * layout->row_tiles - 1]++;
}

static KVANT_MATMUL_FN(is_not_there)
{
    (void)a, (void)lda, (void)b, (void)ldb, (void)c, (void)ldc, (void)m, (void)k, (void)n;
    raise(SIGILL);
}

typedef void any_fn(void);

#define DECLARE(name) CHECK(name);
CHECK_KERNELS(DECLARE)

static const struct {
    const char *kernel, *what;
    check_fn *check;
    size_t offset;
    any_fn *wrong;
} faults[] = {
#define FAULT(kernel, wrong)                                                                       \
    { #kernel, #wrong, check_##kernel, offsetof(kvant_kernels, kernel), (any_fn *)wrong }
    FAULT(dot, reads_behind),
    FAULT(dot, reads_before),
    FAULT(dot, sums_in_another_order),
    FAULT(float_to_half, writes_behind),
    FAULT(float_to_half, rounds_ties_away),
    FAULT(range, writes_to_its_input),
    FAULT(hadamard, forgets_the_last),
    FAULT(exp_sum, is_too_rough),
    FAULT(scale_columns, does_nothing),
    FAULT(code_dots, is_off_by_one),
    FAULT(matmul, is_not_there),
};

int self_test(checker *check)
{
    int missed = 0;
    right = kvant_kernels_get(KVANT_CPU_C);
    check->silent = true;
    for (size_t i = 0; i < COUNT(faults); i++) {
        kvant_kernels table = *right;
        memcpy((char *)&table + faults[i].offset, &faults[i].wrong, sizeof faults[i].wrong);
        check->kernel = faults[i].kernel;
        check->level = "self-test";
        checker_run(check, faults[i].check, &table, 1);
        missed += check->failures == 0;
        printf("%-18s %-24s %s\n", faults[i].kernel, faults[i].what,
               check->failures ? check->first : "NOT REPORTED");
    }
    printf("%s\n", missed ? "FAILED" : "every fault was reported");
    return missed ? 1 : 0;
}
