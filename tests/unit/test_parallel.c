/* test_parallel.c - loops run every index once, on any thread. Executors may run all, some or none
 * of the work that they are asked for. */
#define _POSIX_C_SOURCE 200809L /* for sigset_t */
#include "testing.h"

#include <kvant/executor.h>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../src/base/parallel.h"

#define N 1000

typedef struct counts {
    atomic_int of[N];
    atomic_uint workers; /* a bit for each worker */
} counts;

static void count(void *context, size_t index, uint32_t worker)
{
    counts *c = context;
    atomic_fetch_add(&c->of[index], 1);
    atomic_fetch_or(&c->workers, 1u << worker);
}

static void assert_once_each(size_t n, uint32_t n_threads)
{
    counts c = { .workers = 0 };
    kvant_parallel_for(n, n_threads, count, &c);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(atomic_load(&c.of[i]), i < n);
    assert_true(atomic_load(&c.workers) < 1u << n_threads);
}

static void assert_loops_run(void)
{
    for (uint32_t n_threads = 1; n_threads <= 4; n_threads++)
        for (size_t n = 0; n <= N; n = n < 4 ? n + 1 : 10 * n)
            assert_once_each(n < N ? n : N, n_threads);
}

static void pool_runs_every_index_once(void **state)
{
    assert_loops_run();
}

#define PARTS 5

/* The first PARTS bodies write a number each. All further bodies wait for these numbers and add
 * them. */
typedef struct sums {
    size_t parts[PARTS], of[N];
    atomic_uint ready;
} sums;

static void write_or_add(void *context, size_t index, uint32_t worker)
{
    sums *s = context;
    if (index < PARTS) {
        sched_yield(); /* bodies that wait begin before this one ends */
        s->parts[index] = index + 1;
        kvant_parallel_count(&s->ready);
        return;
    }
    kvant_parallel_await(&s->ready, PARTS);
    for (size_t i = 0; i < PARTS; i++)
        s->of[index] += s->parts[i];
}

static void assert_sums(void)
{
    for (uint32_t n_threads = 1; n_threads <= 4; n_threads++) {
        sums s = { .ready = 0 };
        kvant_parallel_for(N, n_threads, write_or_add, &s);
        for (size_t i = PARTS; i < N; i++)
            assert_int_equal(s.of[i], PARTS * (PARTS + 1) / 2);
    }
}

static void bodies_wait_for_earlier_bodies(void **state)
{
    for (int i = 0; i < 20; i++)
        assert_sums();
}

/* The request that a loop makes of an executor. */
typedef struct request {
    kvant_executor_work work;
    void *loop;
    uint32_t n_workers, worker;
    uint32_t calls;
} request;

static void *run_worker(void *argument)
{
    const request *r = argument;
    r->work(r->loop, r->worker);
    return NULL;
}

static void run_on_threads(void *context, uint32_t n_workers, kvant_executor_work work, void *loop)
{
    request *r = context, each[4];
    pthread_t threads[4];
    assert_in_range(n_workers, 2, 4);
    r->calls++;
    for (uint32_t i = 0; i < n_workers; i++) {
        each[i] = (request){ .work = work, .loop = loop, .worker = i };
        assert_int_equal(pthread_create(&threads[i], NULL, run_worker, &each[i]), 0);
    }
    for (uint32_t i = 0; i < n_workers; i++)
        pthread_join(threads[i], NULL);
}

static void run_last_only(void *context, uint32_t n_workers, kvant_executor_work work, void *loop)
{
    ((request *)context)->calls++;
    work(loop, n_workers - 1);
}

static void run_nothing(void *context, uint32_t n_workers, kvant_executor_work work, void *loop)
{
    ((request *)context)->calls++;
}

static void executors_run_every_index_once(void **state)
{
    void (*const runs[])(void *, uint32_t, kvant_executor_work,
                         void *) = { run_on_threads, run_last_only, run_nothing };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        request r = { .calls = 0 };
        kvant_executor executor = { runs[i], &r };
        kvant_use_executor(&executor);
        assert_loops_run();
        /* loops of 2 to 4 threads, with 2, 3, 4, 40 and 400 indices */
        assert_int_equal(r.calls, 3 * 5);
        assert_sums();
        kvant_use_executor(NULL);
    }
}

static void *run_elsewhere(void *argument)
{
    assert_once_each(N, 4);
    return NULL;
}

static void executors_are_the_threads_own(void **state)
{
    request r = { .calls = 0 };
    kvant_executor executor = { run_on_threads, &r };
    pthread_t other;
    kvant_use_executor(&executor);
    assert_int_equal(pthread_create(&other, NULL, run_elsewhere, NULL), 0);
    pthread_join(other, NULL);
    kvant_use_executor(NULL);
    assert_int_equal(r.calls, 0);
}

static void loop_within(void *context, size_t index, uint32_t worker)
{
    kvant_parallel_for(N / 2, 4, count, (counts *)context + index);
}

/* A host whose threads are busy with one loop cannot be asked for a second. */
static void loops_within_loops_stay_off_the_executor(void **state)
{
    static counts c[2];
    request r = { .calls = 0 };
    kvant_executor executor = { run_last_only, &r };
    kvant_use_executor(&executor);
    kvant_parallel_for(2, 2, loop_within, c);
    assert_int_equal(r.calls, 1);
    for (size_t i = 0; i < N; i++)
        assert_int_equal(atomic_load(&c[i % 2].of[i / 2]), 1);
    kvant_parallel_for(2, 2, loop_within, c);
    assert_int_equal(r.calls, 2); /* the executor is in use again */
    kvant_use_executor(NULL);
}

static void executors_nest(void **state)
{
    request r = { .calls = 0 };
    kvant_executor outer = { run_nothing, &r }, inner = { run_nothing, &r };
    assert_null(kvant_use_executor(&outer));
    assert_ptr_equal(kvant_use_executor(&inner), &outer);
    assert_ptr_equal(kvant_use_executor(&outer), &inner);
    assert_ptr_equal(kvant_use_executor(NULL), &outer);
}

/* A loop that lasts until the test ends it, so that workers are inside it when the process
 * forks. */
typedef struct held_loop {
    atomic_uint entered;
    atomic_bool released;
} held_loop;

static void hold(void *context, size_t index, uint32_t worker)
{
    held_loop *loop = context;
    atomic_fetch_add(&loop->entered, 1);
    while (!atomic_load(&loop->released))
        sched_yield();
}

static void *run_held_loop(void *argument)
{
    kvant_parallel_for(3, 3, hold, argument);
    return NULL;
}

/* Number of threads of a loop when the caller has enough CPUs. */
static uint32_t threads_of(uint32_t n)
{
    return n < kvant_available_cpus() ? n : kvant_available_cpus();
}

/* Returns the exit status of a child that runs a loop on 4 threads. A status of 128 or more: a
 * signal killed the child. */
static int fork_and_loop(void)
{
    pid_t child = fork();
    int status;
    if (child == 0) {
        counts c = { .workers = 0 };
        alarm(20);
        kvant_parallel_for(N, 4, count, &c);
        for (size_t i = 0; i < N; i++)
            if (atomic_load(&c.of[i]) != 1)
                _exit(1);
        _exit(0);
    }
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void children_forked_during_a_loop_run_loops(void **state)
{
    held_loop loop = { 0 };
    pthread_t other;
    assert_int_equal(pthread_create(&other, NULL, run_held_loop, &loop), 0);
    while (atomic_load(&loop.entered) < threads_of(3))
        sched_yield();
    int status = fork_and_loop();
    atomic_store(&loop.released, true);
    pthread_join(other, NULL);
    assert_int_equal(status, 0);
    assert_loops_run(); /* the parent's pool is as it was */
}

/* The executor's threads stay in the parent. */
static void children_have_no_executor(void **state)
{
    request r = { .calls = 0 };
    kvant_executor executor = { run_last_only, &r };
    kvant_use_executor(&executor);
    pid_t child = fork();
    if (child == 0)
        _exit(kvant_use_executor(NULL) == NULL ? 0 : 1);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_ptr_equal(kvant_use_executor(NULL), &executor);
}

static pthread_t main_thread;
static atomic_int handled_here, handled_elsewhere;

static void on_signal(int number)
{
    bool here = pthread_equal(pthread_self(), main_thread);
    atomic_fetch_add(here ? &handled_here : &handled_elsewhere, 1);
}

/* Returns when every thread of the loop has entered it. */
static void meet(void *entered, size_t index, uint32_t worker)
{
    atomic_fetch_add((atomic_uint *)entered, 1);
    while (atomic_load((atomic_uint *)entered) < threads_of(4))
        sched_yield();
}

/* A signal of the process goes to any thread that does not block it. Workers are started while this
 * thread blocks nothing, and are the only other threads when it does. A thread handles a signal
 * before it runs on, so each must run. */
static void handlers_never_run_on_workers(void **state)
{
    static const int signals[] = { SIGUSR1, SIGTERM, SIGALRM, SIGCHLD };
    sigset_t blocked, former, pending;
    atomic_uint entered = 0;
    main_thread = pthread_self();
    pool_runs_every_index_once(NULL);
    sigemptyset(&blocked);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        struct sigaction action = { .sa_handler = on_signal };
        sigaction(signals[i], &action, NULL);
        sigaddset(&blocked, signals[i]);
    }
    pthread_sigmask(SIG_BLOCK, &blocked, &former);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        kill(getpid(), signals[i]);
    kvant_parallel_for(threads_of(4), 4, meet, &entered);
    sigpending(&pending);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        assert_true(sigismember(&pending, signals[i]));
    pthread_sigmask(SIG_SETMASK, &former, NULL);
    assert_int_equal(atomic_load(&handled_elsewhere), 0);
    assert_int_equal(atomic_load(&handled_here), sizeof signals / sizeof *signals);
    sigset_t now;
    pthread_sigmask(SIG_BLOCK, NULL, &now);
    for (int number = 1; number < 32; number++) /* loops did not change this thread's mask */
        assert_int_equal(sigismember(&now, number), sigismember(&former, number));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* runs first, because it starts the workers */
        cmocka_unit_test(handlers_never_run_on_workers),
        cmocka_unit_test(pool_runs_every_index_once),
        cmocka_unit_test(bodies_wait_for_earlier_bodies),
        cmocka_unit_test(executors_run_every_index_once),
        cmocka_unit_test(executors_are_the_threads_own),
        cmocka_unit_test(loops_within_loops_stay_off_the_executor),
        cmocka_unit_test(executors_nest),
        cmocka_unit_test(children_forked_during_a_loop_run_loops),
        cmocka_unit_test(children_have_no_executor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
