/* parallel.c - runs loops on the caller's executor, or on a pool of sleeping workers that the
 * process shares.
 *
 * The pool starts workers when a loop first needs them. They are detached and live as long as the
 * process. Workers take indices from one atomic counter. The pool runs one loop at a time: a second
 * caller finds the pool busy and runs its loop alone, which cannot deadlock. A loop gets no more
 * threads than its caller has CPUs. A forked child starts with an empty pool. */
#include "parallel.h"

#include <kvant/executor.h>

#include <pthread.h>
#include <stdatomic.h>

#include "attributes.h"
#include "os.h"

/* Bounds the memory of the pool, because each worker has a stack of WORKER_STACK bytes. A loop runs
 * on at most 256 threads with its caller. */
#define MAX_WORKERS 255u

/* Kvant's calls fit 64 KiB of stack. The rest is for thread-local storage of the process, which
 * glibc takes from a thread's stack, and for builds with sanitisers. Default stacks differ: 8 MiB
 * with glibc, 128 KiB with musl. */
#define WORKER_STACK ((size_t)512 * 1024)

/* How often a waiting body looks before it yields its core. Bodies that others wait for take some
 * microseconds, unless the system has stopped their thread. */
#define SPINS 1000u

typedef struct parallel_loop {
    kvant_parallel_body body;
    void *context;
    size_t n;
    atomic_size_t next;
} parallel_loop;

static struct {
    pthread_mutex_t busy;  /* held by the caller whose loop runs */
    pthread_mutex_t mutex; /* guards everything below */
    pthread_cond_t wake, done;
    uint64_t region; /* number of the current loop; a worker that slept notices a new one */
    uint32_t n_workers;
    uint32_t wanted;  /* workers 1 .. wanted may join the loop; 0 once it is closed */
    uint32_t running; /* workers that joined and are not done */
    parallel_loop *loop;
} pool = { .busy = PTHREAD_MUTEX_INITIALIZER,
           .mutex = PTHREAD_MUTEX_INITIALIZER,
           .wake = PTHREAD_COND_INITIALIZER,
           .done = PTHREAD_COND_INITIALIZER };

static _Thread_local const kvant_executor *executor;

/* A forked child has the pool's state but none of its threads, and none of an executor's threads.
 * Loops of the parent that ran during the fork never end in the child, so their state is reset. */
static void after_fork_in_child(void)
{
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.n_workers = pool.wanted = pool.running = 0;
    pool.loop = NULL;
    executor = NULL;
}

static void watch_forks(void)
{
    kvant_os_after_fork(after_fork_in_child);
}

static pthread_once_t forks_watched = PTHREAD_ONCE_INIT;

const kvant_executor *kvant_use_executor(const kvant_executor *wanted)
{
    const kvant_executor *previous = executor;
    pthread_once(&forks_watched, watch_forks);
    executor = wanted;
    return previous;
}

bool kvant_parallel_is_lent(void)
{
    return executor != NULL;
}

void kvant_parallel_await(atomic_uint *count, unsigned n)
{
    for (unsigned i = 1; atomic_load_explicit(count, memory_order_acquire) < n; i++)
        if (i % SPINS == 0)
            kvant_os_yield();
        else
            KVANT_RELAX();
}

void kvant_parallel_count(atomic_uint *count)
{
    atomic_fetch_add_explicit(count, 1, memory_order_release);
}

/* Copies what stays the same, because every other thread changes the line that it is in. */
static void run_indices(void *argument, uint32_t worker)
{
    parallel_loop *loop = argument;
    const kvant_parallel_body body = loop->body;
    void *context = loop->context;
    const size_t n = loop->n;
    size_t i;
    while ((i = atomic_fetch_add_explicit(&loop->next, 1, memory_order_relaxed)) < n)
        body(context, i, worker);
}

static void *worker_main(void *argument)
{
    uint32_t number = (uint32_t)(uintptr_t)argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.mutex);
    for (;;) {
        while (pool.region == seen || number > pool.wanted) {
            seen = pool.region;
            pthread_cond_wait(&pool.wake, &pool.mutex);
        }
        seen = pool.region;
        pool.running++;
        parallel_loop *loop = pool.loop;
        pthread_mutex_unlock(&pool.mutex);
        run_indices(loop, number);
        pthread_mutex_lock(&pool.mutex);
        if (--pool.running == 0)
            pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static void grow(uint32_t wanted)
{
    while (pool.n_workers < wanted) {
        uintptr_t number = pool.n_workers + 1;
        if (!kvant_os_start_thread(NULL, worker_main, (void *)number, WORKER_STACK))
            break;
        pool.n_workers++;
    }
}

/* During the loop the thread has no executor, because a body that starts a loop must not enter the
 * executor again. */
static void run_on_executor(parallel_loop *loop, uint32_t n_workers)
{
    const kvant_executor *own = executor;
    executor = NULL;
    own->run(own->context, n_workers, run_indices, loop);
    run_indices(loop, 0);
    executor = own;
}

/* Runs a loop on the pool with at most one thread per CPU. More workers would only alternate with
 * the caller: with 8 threads on one CPU, switching takes half of the time of decoding. */
static void run_on_pool(parallel_loop *loop, uint32_t helpers)
{
    uint32_t most = kvant_available_cpus() - 1;
    if (helpers > most)
        helpers = most;
    if (helpers == 0 || pthread_mutex_trylock(&pool.busy) != 0) {
        run_indices(loop, 0);
        return;
    }
    pthread_once(&forks_watched, watch_forks);
    pthread_mutex_lock(&pool.mutex);
    grow(helpers);
    pool.wanted = helpers < pool.n_workers ? helpers : pool.n_workers;
    pool.loop = loop;
    pool.region++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.mutex);

    run_indices(loop, 0);

    /* Every index is taken. A worker that the system has not scheduled yet must not be waited for:
     * on a loaded machine that can take longer than the work. */
    pthread_mutex_lock(&pool.mutex);
    pool.wanted = 0;
    while (pool.running > 0)
        pthread_cond_wait(&pool.done, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
    pthread_mutex_unlock(&pool.busy);
}

void kvant_parallel_for(size_t n, uint32_t n_threads, kvant_parallel_body body, void *context)
{
    parallel_loop loop = { .body = body, .context = context, .n = n };
    uint32_t helpers = n_threads > 1 ? n_threads - 1 : 0;
    atomic_init(&loop.next, 0);
    if (helpers > MAX_WORKERS)
        helpers = MAX_WORKERS;
    if (n < 2)
        helpers = 0;
    else if (helpers > n - 1)
        helpers = (uint32_t)(n - 1);
    if (helpers == 0)
        run_indices(&loop, 0);
    else if (executor)
        run_on_executor(&loop, helpers + 1);
    else
        run_on_pool(&loop, helpers);
}
