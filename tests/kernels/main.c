/* main.c - check_kernels: every function of kvant_kernels at every CPU level of this machine,
 * against portable C. It owns the options and the order of the work, and knows no kernel. It is
 * modelled on dav1d's checkasm. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "../cpu_levels.h"
#include "checker.h"

#define DECLARE(name)                                                                              \
    CHECK(name);                                                                                   \
    BENCH(name);
CHECK_KERNELS(DECLARE)

/* A kernel without a check, or twice in the list, does not compile. */
#define MEMBER(name) void (*name)(void);
_Static_assert(sizeof(struct { CHECK_KERNELS(MEMBER) }) == sizeof(kvant_kernels),
               "CHECK_KERNELS must list every kernel of kvant_kernels");

typedef void any_fn(void);

static const struct kernel {
    const char *name;
    size_t offset; /* offset of its pointer */
    check_fn *check;
    bench_fn *bench;
} kernel_list[] = {
#define ENTRY(name) { #name, offsetof(kvant_kernels, name), check_##name, bench_##name },
    CHECK_KERNELS(ENTRY)
};

#define MAX_LEVEL 100 /* above every value of kvant_cpu_level */

typedef struct options {
    const char *kernel;
    kvant_cpu_level level; /* AUTO: all levels */
    uint64_t seed, cases;  /* cases 0: all */
    bool bench, list, self_test, faults_only;
} options;

static any_fn *pointer_of(const struct kernel *kernel, const kvant_kernels *table)
{
    any_fn *pointer;
    memcpy(&pointer, (const char *)table + kernel->offset, sizeof pointer);
    return pointer;
}

static bool exists(int level)
{
    return level != KVANT_CPU_AUTO && kvant_cpu_level_name((kvant_cpu_level)level);
}

/* The lower level whose function this level shares, or AUTO. A level has only functions that
 * improve on lower levels. */
static kvant_cpu_level shared_with(const struct kernel *kernel, kvant_cpu_level level)
{
    for (int i = 1; i < (int)level; i++) {
        const kvant_kernels *table = exists(i) ? kvant_kernels_get((kvant_cpu_level)i) : NULL;
        if (table && pointer_of(kernel, table) == pointer_of(kernel, kvant_kernels_get(level)))
            return (kvant_cpu_level)i;
    }
    return KVANT_CPU_AUTO;
}

static uint64_t check_level(checker *check, const struct kernel *kernel, kvant_cpu_level level,
                            uint64_t seed)
{
    check->level = kvant_cpu_level_name(level);
    checker_run(check, kernel->check, kvant_kernels_get(level), seed);
    printf("%-18s %-12s %8llu cases", kernel->name, check->level, (unsigned long long)check->cases);
    if (check->failures)
        printf("   FAILED: %llu", (unsigned long long)check->failures);
    putchar('\n');
    fflush(stdout);
    return check->failures;
}

static void bench_level(checker *check, const struct kernel *kernel, kvant_cpu_level level)
{
    check->level = kvant_cpu_level_name(level);
    check->rng = 1;
    check->shape_index = 0;
    /* begins at a page, which is the alignment of the library's buffers */
    check->memory.at_end = false;
    kernel->bench(check, kvant_kernels_get(level));
    guard_release(&check->memory);
}

static uint64_t run_kernel(checker *check, const struct kernel *kernel, const options *o)
{
    uint64_t failures = 0;
    check->kernel = kernel->name;
    memset(check->c_ns, 0, sizeof check->c_ns);
    for (int i = 1; i < MAX_LEVEL; i++) {
        kvant_cpu_level level = (kvant_cpu_level)i;
        bool asked =
            o->level == KVANT_CPU_AUTO || o->level == level || (o->bench && level == KVANT_CPU_C);
        if (!exists(i) || !asked || !kvant_kernels_get(level))
            continue;
        kvant_cpu_level same =
            o->level == KVANT_CPU_AUTO ? shared_with(kernel, level) : KVANT_CPU_AUTO;
        if (same != KVANT_CPU_AUTO)
            printf("%-18s %-12s as %s\n", kernel->name, kvant_cpu_level_name(level),
                   kvant_cpu_level_name(same));
        else if (o->bench)
            bench_level(check, kernel, level);
        else
            failures += check_level(check, kernel, level, o->seed);
    }
    return failures;
}

static int run(checker *check, const options *o)
{
    uint64_t failures = 0;
    if (!guard_open(&check->memory)) {
        fprintf(stderr, "check_kernels: the system has no memory for guarded buffers\n");
        return 1;
    }
    if (o->self_test)
        return self_test(check);
    check->faults_only = o->faults_only;
    check->most_cases = o->cases;
    for (size_t i = 0; i < COUNT(cpu_levels) && o->level == KVANT_CPU_AUTO && !o->cases; i++)
        has_level(cpu_levels[i]); /* lists missing levels, which emulated machines (--cases) lack */
    if (o->bench)
        printf("%-18s %-32s %-12s %12s %9s\n", "kernel", "shape", "level", "ns a call", "x of c");
    for (size_t i = 0; i < COUNT(kernel_list); i++)
        if (!o->kernel || strcmp(o->kernel, kernel_list[i].name) == 0)
            failures += run_kernel(check, &kernel_list[i], o);
    if (!o->bench)
        printf("%s (seed %llu)\n", failures ? "FAILED" : "all passed", (unsigned long long)o->seed);
    return failures ? 1 : 0;
}

static void list(void)
{
    for (size_t i = 0; i < COUNT(kernel_list); i++)
        printf("%s\n", kernel_list[i].name);
    printf("levels:");
    for (int i = 1; i < MAX_LEVEL; i++)
        if (exists(i))
            printf(" %s%s", kvant_cpu_level_name((kvant_cpu_level)i),
                   kvant_kernels_get((kvant_cpu_level)i) ? "" : " (not here)");
    printf("\n");
}

static void help(FILE *to)
{
    fputs(
        "usage: check_kernels [--kernel NAME] [--level NAME] [--seed N] [--cases N] "
        "[--faults-only]\n       "
        "check_kernels "
        "--bench [--kernel NAME] [--level NAME] | --list | --self-test | --help\n"
        "\n"
        "Runs every inner loop of libkvant at every CPU level of this machine against portable C, "
        "on buffers "
        "between\n"
        "unmapped pages. Exits with 1 when one differs, faults or leaves its buffers.\n"
        "\n"
        "  --kernel NAME  only this one (--list names them)\n"
        "  --level NAME   only this CPU level, also where it shares its function with a lower one\n"
        "  --seed N       of the random numbers (1)\n"
        "  --bench        time instead: median nanoseconds of a call, hot caches, and how many "
        "times faster than "
        "c\n"
        "  --list         names kernels and levels\n"
        "  --cases N      the first N of each kernel at each level and no more, for emulators, "
        "which are slow\n"
        "  --faults-only  wrong results do not count, and buffers only end at unmapped pages: for "
        "emulators,\n"
        "                 which are slow and have errors of their own\n"
        "  --self-test    are kernels that are known to be wrong reported?\n"
        "  --help         this text\n",
        to);
}

static int usage(const char *what, const char *argument)
{
    fprintf(stderr, "check_kernels: %s: %s\n  hint: check_kernels --help, or --list for names\n",
            what, argument);
    return 2;
}

static bool is_kernel(const char *name)
{
    for (size_t i = 0; i < COUNT(kernel_list); i++)
        if (strcmp(name, kernel_list[i].name) == 0)
            return true;
    return false;
}

/* Returns 0, or the exit code for an invalid option. */
static int set_option(options *o, const char *name, const char *value)
{
    char *end = NULL;
    if (strcmp(name, "--kernel") == 0) {
        o->kernel = value;
        return is_kernel(value) ? 0 : usage("there is no kernel of this name", value);
    }
    if (strcmp(name, "--level") == 0) {
        if (kvant_cpu_level_from_name(value, &o->level) != KVANT_OK)
            return usage("there is no level of this name", value);
        if (kvant_kernels_get(o->level))
            return 0;
        fprintf(stderr, "check_kernels: this machine or this build lacks level %s\n", value);
        return 1;
    }
    *(strcmp(name, "--seed") == 0 ? &o->seed : &o->cases) = strtoull(value, &end, 10);
    return *value >= '0' && *value <= '9' && !*end ? 0 : usage("not a number", value);
}

int main(int argc, char **argv)
{
    static checker check;
    options o = { .seed = 1 };
    checker_catch_faults(&check);
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        bool with_value = !strcmp(name, "--kernel") || !strcmp(name, "--level") ||
                          !strcmp(name, "--seed") || !strcmp(name, "--cases");
        if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
            help(stdout);
            return 0;
        }
        if (with_value && i + 1 == argc)
            return usage("a value is missing", name);
        int code = with_value ? set_option(&o, name, argv[++i]) : 0;
        if (code)
            return code;
        if (!with_value && strcmp(name, "--bench") == 0)
            o.bench = true;
        else if (!with_value && strcmp(name, "--list") == 0)
            o.list = true;
        else if (!with_value && strcmp(name, "--self-test") == 0)
            o.self_test = true;
        else if (!with_value && strcmp(name, "--faults-only") == 0)
            o.faults_only = true;
        else if (!with_value)
            return usage("unknown option", name);
    }
    if (o.list) {
        list();
        return 0;
    }
    return run(&check, &o);
}
