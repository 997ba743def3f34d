/* test_openmp.c - OpenMP's threads sleep at barriers while another program needs their cores (the
 * plug-in's openmp.c).
 *
 * A mock of ggml's CPU back end computes graphs on a team of libgomp's threads. The test measures
 * CPU time, which other processes do not change: threads that spin at a barrier spend it. */
#define _GNU_SOURCE
#include "testing.h"
#include "ggml_mock.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "../../integrations/llama.cpp/openmp.h"

/* A barrier that one thread reaches DELAY_NS later than its team. */
enum { N_BARRIERS = 20, DELAY_NS = 2000000, BUSY_NS = 400000000 };

kvp_ggml kvp_api;

static abi_device device;
static abi_backend backend;
static int n_asked;
static atomic_int n_computed;

static abi_device *device_of(int32_t type)
{
    return &device;
}

static abi_backend *new_backend(abi_device *of, const char *params)
{
    return &backend;
}

static void set_n_threads(abi_backend *cpu, int n)
{
    n_asked = n;
}

static int32_t compute(abi_backend *cpu, abi_graph *graph)
{
    atomic_int n = 0;
#pragma omp parallel num_threads(n_asked)
    atomic_fetch_add(&n, 1);
    atomic_store(&n_computed, n);
    return ABI_STATUS_SUCCESS;
}

static void make_mock(void)
{
    kvp_api = mock_ggml();
    kvp_api.dev_by_type = device_of;
    kvp_api.dev_init = new_backend;
    kvp_api.graph_compute = compute;
}

static void sleep_for(long ns)
{
    struct timespec t = { .tv_nsec = ns };
    nanosleep(&t, NULL);
}

static int64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* CPU milliseconds of a barrier of as many threads as there are CPUs. */
static double barrier_ms(int n_threads)
{
    int64_t start = 0;
#pragma omp parallel num_threads(n_threads)
    {
#pragma omp barrier
#pragma omp single
        start = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
        for (int i = 0; i < N_BARRIERS; i++) {
            if (omp_get_thread_num() == 0)
                sleep_for(DELAY_NS);
#pragma omp barrier
        }
    }
    return 1e-6 * (double)(clock_ns(CLOCK_PROCESS_CPUTIME_ID) - start) / N_BARRIERS;
}

static void burn(int64_t until)
{
    while (clock_ns(CLOCK_MONOTONIC) < until)
        ;
}

static void *burn_beside(void *until)
{
    burn(*(const int64_t *)until);
    return NULL;
}

/* A thread that shares its CPU with a busy one computes graphs. */
static void *compute_beside_a_busy_thread(void *unused)
{
    int64_t until;
    cpu_set_t allowed, one;
    pthread_t busy;
    size_t first = 0;

    assert_int_equal(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    while (!CPU_ISSET(first, &allowed))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    kvp_openmp_watch(set_n_threads);
    until = clock_ns(CLOCK_MONOTONIC) + BUSY_NS;
    assert_int_equal(pthread_create(&busy, NULL, burn_beside, &until), 0);
    burn(until);
    pthread_join(busy, NULL);
    kvp_openmp_watch(set_n_threads);
    return unused;
}

static void watch(void)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, compute_beside_a_busy_thread, NULL), 0);
    pthread_join(thread, NULL);
}

/* Runs first: libgomp read the environment when the program started. */
CASE(the_environment_decides)
{
    setenv("GOMP_SPINCOUNT", "300000", 1);
    assert_true(kvp_openmp_is_watched());
    watch();
    unsetenv("GOMP_SPINCOUNT");
    setenv("OMP_WAIT_POLICY", "active", 1);
    watch();
    unsetenv("OMP_WAIT_POLICY");
    sleep_for(DELAY_NS);
    assert_int_equal(atomic_load(&n_computed), 0);
}

/* A thread that spins for a millisecond or two spends that time. A thread that sleeps spends some
 * microseconds of spinning and the time of falling asleep and waking, which is less than 100 us. */
CASE(threads_sleep_on_a_shared_core)
{
    const int n = omp_get_num_procs();
    double before, after;

    before = barrier_ms(n);
    watch();
    for (int i = 0; i < 1000 && atomic_load(&n_computed) == 0; i++)
        sleep_for(10 * DELAY_NS);
    assert_int_equal(atomic_load(&n_computed), 2);
    after = barrier_ms(n);
    print_message("CPU time of a barrier: %.3f ms, with the team %.3f ms\n", before, after);
    assert_true(after < before / 4);
}

int main(void)
{
    cpu_set_t allowed;

    make_mock();
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2 ||
        !kvp_openmp_is_watched()) {
        print_message("skipped: needs two CPUs and /proc/thread-self/schedstat\n");
        return 77;
    }
    return run_cases(NULL, NULL);
}
