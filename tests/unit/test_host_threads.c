/* test_host_threads.c KIND - loops on a lender's threads (the plug-in's host_threads.c) with more
 * threads than CPUs.
 *
 * The lender is a mock of ggml's CPU back end. Its threads sleep before and after a node, so that
 * all CPU time is spent on loops, or in host_threads.c while threads wait for one another. The
 * process is bound to one CPU. The test measures CPU time, which other processes do not change: a
 * thread that spins for a second thread spends the CPU time that the second thread needs.
 *
 * KIND is one of these:
 *
 *     known   the process is bound to its CPU before the plug-in counts CPUs
 *     late    the process is bound to its CPU after that
 *     openmp  as known, and the mock says that its threads are OpenMP's
 *     enough  the process has all its CPUs
 *     shared  the process has all its CPUs, but a yield takes as long as with a busy program */
#define _GNU_SOURCE
#include "testing.h"
#include "ggml_mock.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "../../integrations/llama.cpp/host_threads.h"
#include "../../src/base/parallel.h"

/* A round is N_NODES nodes of N_LOOPS loops. A loop has N_INDICES indices of about 50 us each,
 * which is what attention on a context of some thousand tokens takes in a layer. */
enum { MOST_THREADS = 8, N_NODES = 4, N_LOOPS = 5, N_INDICES = 20, N_STEPS = 25000, N_ROUNDS = 5 };

kvp_ggml kvp_api;

/* The mock */

static struct {
    pthread_t threads[MOST_THREADS];
    pthread_barrier_t begin, end;
    int n, n_asked, n_computed;
    bool over;
} lender;

static abi_device cpu_device;
static abi_reg cpu_reg;
static abi_backend cpu;
static bool openmp;

static void *lent_thread(void *number)
{
    for (;;) {
        pthread_barrier_wait(&lender.begin);
        if (lender.over)
            return NULL;
        if ((intptr_t)number < lender.n_asked)
            mock_node.op(NULL, (int)(intptr_t)number, lender.n_asked, mock_node.user);
        pthread_barrier_wait(&lender.end);
    }
}

static void start_lender(int n)
{
    lender.n = n;
    lender.over = false;
    pthread_barrier_init(&lender.begin, NULL, (unsigned)n);
    pthread_barrier_init(&lender.end, NULL, (unsigned)n);
    for (int i = 1; i < n; i++) {
        void *number = (void *)(intptr_t)i;
        assert_int_equal(pthread_create(&lender.threads[i], NULL, lent_thread, number), 0);
    }
}

static void stop_lender(void)
{
    lender.over = true;
    pthread_barrier_wait(&lender.begin);
    for (int i = 1; i < lender.n; i++)
        pthread_join(lender.threads[i], NULL);
    pthread_barrier_destroy(&lender.begin);
    pthread_barrier_destroy(&lender.end);
}

static int32_t compute_graph(abi_backend *backend, abi_graph *graph)
{
    lender.n_computed++;
    pthread_barrier_wait(&lender.begin);
    mock_node.op(NULL, 0, lender.n_asked, mock_node.user);
    pthread_barrier_wait(&lender.end);
    return ABI_STATUS_SUCCESS;
}

static void set_threadpool(abi_backend *backend, void *pool)
{
}

static void set_n_threads(abi_backend *backend, int n)
{
    assert_ptr_equal(backend, &cpu);
    lender.n_asked = n;
}

static const abi_feature *features(abi_reg *reg)
{
    static const abi_feature list[] = { { "OPENMP", "1" }, { NULL, NULL } };
    return openmp ? list : list + 1;
}

static void *look_up(abi_reg *reg, const char *name)
{
    void (*set)(abi_backend *, void *) = set_threadpool;
    void (*set_n)(abi_backend *, int) = set_n_threads;
    const abi_feature *(*get)(abi_reg *) = features;
    void *address = NULL;
    if (strcmp(name, "ggml_backend_cpu_set_threadpool") == 0)
        memcpy(&address, &set, sizeof address);
    else if (strcmp(name, "ggml_backend_set_n_threads") == 0)
        memcpy(&address, &set_n, sizeof address);
    else if (strcmp(name, "ggml_backend_get_features") == 0)
        memcpy(&address, &get, sizeof address);
    return address;
}

static abi_device *device_of(int32_t type)
{
    return &cpu_device;
}

static abi_reg *reg_of(abi_device *device)
{
    return &cpu_reg;
}

static void free_context(abi_context *context)
{
}

static void free_backend(abi_backend *backend)
{
}

static void make_mock(void)
{
    kvp_api = mock_ggml();
    kvp_api.api = 2;
    kvp_api.dev_by_type = device_of;
    kvp_api.dev_backend_reg = reg_of;
    kvp_api.free = free_context;
    kvp_api.graph_compute = compute_graph;
    cpu_reg.api_version = 2;
    cpu_reg.iface.get_proc_address = look_up;
    cpu.iface.free = free_backend;
}

/* Does the calls of llama.cpp before a graph: it looks both functions up in the registry, where it
 * finds the plug-in's. The plug-in knows a lender from the first graph on, and limits the threads
 * of the next graph. */
static uint32_t announce(kvp_host_threads *threads, int n)
{
    void (*set)(abi_backend *, void *);
    void (*set_n)(abi_backend *, int);
    void *address = cpu_reg.iface.get_proc_address(&cpu_reg, "ggml_backend_cpu_set_threadpool");
    memcpy(&set, &address, sizeof set);
    address = cpu_reg.iface.get_proc_address(&cpu_reg, "ggml_backend_set_n_threads");
    memcpy(&set_n, &address, sizeof set_n);
    set(&cpu, &cpu_reg);
    set_n(&cpu, n);
    return kvp_host_threads_update(threads, (uint32_t)n);
}

/* Loops */

static atomic_uint results;

static void index_work(void *context, size_t index, uint32_t worker)
{
    uint32_t x = (uint32_t)index + 1;
    for (int i = 0; i < N_STEPS; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
    }
    atomic_fetch_add(&results, x != 0); /* xorshift never reaches 0 */
}

static void node_work(void *n_threads)
{
    for (int i = 0; i < N_LOOPS; i++)
        kvant_parallel_for(N_INDICES, *(uint32_t *)n_threads, index_work, NULL);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double round_seconds(kvp_host_threads *threads, int n)
{
    const double start = cpu_seconds();
    atomic_store(&results, 0);
    for (int i = 0; i < N_NODES; i++) {
        uint32_t n_threads = n > 1 ? announce(threads, n) : 1;
        if (n > 1)
            kvp_host_threads_compute(threads, node_work, &n_threads);
        else
            node_work(&n_threads);
    }
    assert_int_equal(atomic_load(&results), N_NODES * N_LOOPS * N_INDICES); /* each index once */
    return cpu_seconds() - start;
}

/* The time of the shortest of some rounds. Other processes disturb the longer rounds through the
 * caches. */
static double best_seconds(kvp_host_threads *threads, int n)
{
    double best = 1e9;
    start_lender(n);
    for (int i = 0; i < N_ROUNDS; i++) {
        double seconds = round_seconds(threads, n);
        best = seconds < best ? seconds : best;
    }
    stop_lender();
    return best;
}

static void bind_to_one_cpu(void)
{
    cpu_set_t allowed, one;
    size_t first = 0;
    assert_int_equal(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    while (!CPU_ISSET(first, &allowed))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
}

static bool late;

/* n threads that spin for one another share the CPU with the one that computes, so they take n
 * times the CPU time of one thread. A thread that gives its CPU away takes 20 us of spinning in
 * each loop, and a few microseconds each time that the system changes threads. A loop takes 1000
 * us, so seven threads add a quarter. The bound lies between 1.25 and 4. */
static void more_threads_than_cpus_cost_no_time(void **state)
{
    kvp_host_threads threads = { .wanted = false };
    if (!late)
        bind_to_one_cpu();
    const uint32_t n_cpus = kvant_available_cpus();
    kvp_host_threads_use(&threads);
    bind_to_one_cpu();
    const double one = best_seconds(&threads, 1);
    for (int n = 4; n <= MOST_THREADS; n *= 2) {
        lender.n_computed = 0;
        const double seconds = best_seconds(&threads, n);
        print_message("%d threads on one CPU: %.2f of the CPU time of 1\n", n, seconds / one);
        /* llama.cpp's own nodes, which come next, have no more threads than CPUs. */
        assert_int_equal(lender.n_asked, n < (int)n_cpus ? n : (int)n_cpus);
        assert_int_equal(lender.n_computed, n_cpus > 1 ? N_ROUNDS * N_NODES : 0);
        assert_true(seconds < 2 * one);
    }
    kvp_host_threads_release(&threads);
}

/* If there are enough CPUs, the plug-in lends all of llama.cpp's threads. */
static void as_many_threads_as_cpus_are_lent(void **state)
{
    kvp_host_threads threads = { .wanted = false };
    const int cpus = (int)kvant_available_cpus(), n = cpus < MOST_THREADS ? cpus : MOST_THREADS;
    kvp_host_threads_use(&threads);
    lender.n_computed = 0;
    start_lender(n);
    uint32_t n_threads = announce(&threads, n);
    assert_int_equal(n_threads, n);
    atomic_store(&results, 0);
    kvp_host_threads_compute(&threads, node_work, &n_threads);
    assert_int_equal(atomic_load(&results), N_LOOPS * N_INDICES);
    assert_int_equal(lender.n_computed, n > 1);
    assert_int_equal(lender.n_asked, n);
    stop_lender();
    kvp_host_threads_release(&threads);
}

/* The linker puts this function between host_threads.c and the system. With a busy program on the
 * core, a thread that yields waits for that program's time slice. */
static bool yields_take_long;
static atomic_int n_yields;

int __real_sched_yield(void);
int __wrap_sched_yield(void);

int __wrap_sched_yield(void)
{
    const struct timespec slice = { .tv_nsec = 3000000 };
    if (!yields_take_long)
        return __real_sched_yield();
    atomic_fetch_add(&n_yields, 1);
    return nanosleep(&slice, NULL);
}

/* Between loops the node's first thread is busy for 1 ms, so the second thread waits longer than it
 * spins. */
static void node_with_pauses(void *n_threads)
{
    for (int i = 0; i < N_LOOPS; i++) {
        for (size_t index = 0; index < N_INDICES; index++)
            index_work(NULL, index, 0);
        kvant_parallel_for(N_INDICES, *(uint32_t *)n_threads, index_work, NULL);
    }
}

/* The second thread waits before each of N_NODES * N_LOOPS loops, and the first one after it. Each
 * of the two yields once, and then it knows that its core is shared. */
static void threads_do_not_yield_a_shared_core(void **state)
{
    kvp_host_threads threads = { .wanted = false };
    if (kvant_available_cpus() < 2) {
        print_message("skipped: needs two CPUs\n");
        return;
    }
    kvp_host_threads_use(&threads);
    start_lender(2);
    yields_take_long = true;
    for (int i = 0; i < N_NODES; i++) {
        uint32_t n_threads = announce(&threads, 2);
        kvp_host_threads_compute(&threads, node_with_pauses, &n_threads);
    }
    stop_lender();
    print_message("%d yields\n", atomic_load(&n_yields));
    assert_true(atomic_load(&n_yields) <= 2);
    kvp_host_threads_release(&threads);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest more[] = { cmocka_unit_test(more_threads_than_cpus_cost_no_time) },
                            enough[] = { cmocka_unit_test(as_many_threads_as_cpus_are_lent) },
                            shared[] = { cmocka_unit_test(threads_do_not_yield_a_shared_core) };
    const char *kind = argc > 1 ? argv[1] : "known";
    make_mock();
    late = strcmp(kind, "late") == 0;
    openmp = strcmp(kind, "openmp") == 0;
    if (strcmp(kind, "shared") == 0)
        return cmocka_run_group_tests(shared, NULL, NULL);
    return strcmp(kind, "enough") == 0 ? cmocka_run_group_tests(enough, NULL, NULL)
                                       : cmocka_run_group_tests(more, NULL, NULL);
}
