/* clock.c - measures the time of a call: the median of samples, each with enough calls for the
 * clock's resolution. */
#include "checker.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* 200 us: most samples contain no scheduler tick, and 15 samples take 3 ms */
#define SAMPLE_NS 200e3

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void check_bench_start(checker *check, const char *shape, ...)
{
    va_list list;
    va_start(list, shape);
    vsnprintf(check->shape, sizeof check->shape, shape, list);
    va_end(list);
    check->calls = 1;
    check->n_samples = 0;
    check->started = 0;
}

uint64_t check_bench_calls(const checker *check)
{
    return check->calls;
}

static void report(checker *check)
{
    qsort(check->samples, COUNT(check->samples), sizeof *check->samples, ascending);
    double ns = check->samples[COUNT(check->samples) / 2];
    if (check->shape_index >= MAX_SHAPES) {
        fprintf(stderr, "check_kernels: %s has more than %u shapes\n", check->kernel, MAX_SHAPES);
        exit(1);
    }
    double *c_ns = &check->c_ns[check->shape_index++];
    if (strcmp(check->level, kvant_cpu_level_name(KVANT_CPU_C)) == 0)
        *c_ns = ns;
    printf("%-18s %-32s %-12s %12.1f", check->kernel, check->shape, check->level, ns);
    if (*c_ns > 0)
        printf(" %9.2f", *c_ns / ns);
    putchar('\n');
    fflush(stdout);
}

/* The first runs only find out how many calls a sample needs. */
bool check_bench_more(checker *check)
{
    double now = now_ns(), taken = now - check->started;
    if (check->started > 0 && taken < SAMPLE_NS / 2 && check->n_samples == 0) {
        double factor = taken > SAMPLE_NS / 64 ? 1.1 * SAMPLE_NS / taken : 8;
        check->calls = (uint64_t)((double)check->calls * factor) + 1;
    } else if (check->started > 0) {
        check->samples[check->n_samples++] = taken / (double)check->calls;
    }
    if (check->n_samples == COUNT(check->samples)) {
        report(check);
        return false;
    }
    check->started = now_ns();
    return true;
}
