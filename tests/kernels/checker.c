/* checker.c - cases, calls, comparisons and faults. */
#include "checker.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define SHOWN 6u /* number of failures of a kernel at a level that are printed */

static checker *catching; /* signal handlers get no argument of the test */

void check_case(checker *check, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(check->name, sizeof check->name, format, list);
    va_end(list);
    guard_release(&check->memory);
    if (check->most_cases && check->pass_cases == check->most_cases)
        siglongjmp(check->out, 1);
    check->pass_cases++;
    check->cases++;
}

static void *take(checker *check, const char *name, size_t bytes, size_t alignment, bool constant)
{
    void *buffer = guard_take(&check->memory, name, bytes, alignment, constant);
    if (buffer)
        return buffer;
    fprintf(stderr, "check_kernels: %s asks for too many or too large buffers\n", check->kernel);
    exit(1);
}

void *check_input(checker *check, const char *name, size_t bytes, size_t alignment)
{
    return take(check, name, bytes, alignment, true);
}

void *check_output(checker *check, const char *name, size_t bytes, size_t alignment)
{
    return take(check, name, bytes, alignment, false);
}

static void report(checker *check, const char *format, va_list list)
{
    char text[sizeof check->first];
    vsnprintf(text, sizeof text, format, list);
    if (check->failures++ == 0)
        memcpy(check->first, text, sizeof text);
    if (!check->silent && check->failures <= SHOWN)
        fprintf(stderr, "FAIL %s at %s, %s, buffers %s guard pages: %s\n", check->kernel,
                check->level, check->name, check->memory.at_end ? "end at" : "begin behind", text);
}

void check_fail(checker *check, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    if (!check->faults_only)
        report(check, format, list);
    va_end(list);
}

static void fault(checker *check, const char *format, ...) KVANT_PRINTF(2, 3);
static void fault(checker *check, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    report(check, format, list);
    va_end(list);
}

bool check_compares(const checker *check)
{
    return !check->faults_only;
}

void check_near(checker *check, const char *name, size_t index, double got, double want,
                double bound)
{
    if (!(fabs(got - want) <= bound))
        check_fail(check, "%s[%zu] is %.9g, not %.9g: off by %.3g, allowed %.3g", name, index, got,
                   want, fabs(got - want), bound);
}

static void print_bytes(char *out, size_t room, const uint8_t *bytes, size_t size)
{
    for (size_t i = size; i-- > 0 && room > 2; out += 2, room -= 2) /* as a little-endian number */
        snprintf(out, room, "%02x", bytes[i]);
}

void check_same(checker *check, const char *name, const void *got, const void *want, size_t n,
                size_t size)
{
    const uint8_t *a = got, *b = want;
    if (memcmp(a, b, n * size) == 0)
        return;
    size_t i = 0;
    while (memcmp(a + i * size, b + i * size, size) == 0)
        i++;
    char a_text[40] = "", b_text[40] = "";
    print_bytes(a_text, sizeof a_text, a + i * size, size);
    print_bytes(b_text, sizeof b_text, b + i * size, size);
    check_fail(check, "%s[%zu] is 0x%s, not 0x%s", name, i, a_text, b_text);
}

void check_enter(checker *check)
{
    guard_protect(&check->memory, true);
    check->inside = true;
}

void check_leave(checker *check)
{
    check->inside = false;
    guard_protect(&check->memory, false);
    const guard_buffer *damaged = guard_damaged(&check->memory);
    if (damaged)
        fault(check, "it wrote next to `%s` (%zu bytes)", damaged->name, damaged->bytes);
}

/* A kernel's faults are synchronous: the interrupted code is the kernel and holds no lock of
 * stdio. */
static void report_fault(int number, const void *address)
{
    const guard_buffer *b = guard_owner(&catching->memory, address);
    if (number == SIGILL)
        fault(catching, "illegal instruction");
    else if (number == SIGFPE)
        fault(catching, "integer division fault");
    else if (!b)
        fault(catching, "access to %p, which is near no buffer (or a misaligned vector access)",
              address);
    else if ((const uint8_t *)address >= b->at && (const uint8_t *)address < b->at + b->bytes)
        fault(catching, "it writes to its input `%s`", b->name);
    else
        fault(catching, "access %td bytes from the start of `%s` (%zu bytes)",
              (const uint8_t *)address - b->at, b->name, b->bytes);
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    if (!catching->inside) {
        fprintf(stderr, "check_kernels: signal %d outside kernels, near %s at %s, %s\n", number,
                catching->kernel ? catching->kernel : "the filling of tables",
                catching->level ? catching->level : "no level yet", catching->name);
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    catching->inside = false;
    report_fault(number, info->si_addr);
    siglongjmp(catching->out, 1);
}

void checker_catch_faults(checker *check)
{
    static const int numbers[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE };
    struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
    catching = check;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < COUNT(numbers); i++)
        sigaction(numbers[i], &action, NULL); /* cannot fail for these signals */
}

/* After setjmp, a caller's changed variables have undefined values, so this function has none. */
static void run_pass(checker *check, check_fn *fn, const kvant_kernels *kernels, uint64_t seed)
{
    check->rng = seed;
    check->pass_cases = 0;
    if (sigsetjmp(check->out, 1) == 0)
        fn(check, kernels, kvant_kernels_get(KVANT_CPU_C));
    guard_release(&check->memory);
}

void checker_run(checker *check, check_fn *fn, const kvant_kernels *kernels, uint64_t seed)
{
    check->cases = check->failures = 0;
    check->memory.at_end = false;
    if (!check->faults_only) /* emulators are slow */
        run_pass(check, fn, kernels, seed);
    check->memory.at_end = true;
    run_pass(check, fn, kernels, seed);
}
