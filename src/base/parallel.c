/* parallel.c - a small pool of sleeping workers, shared by the process, started on first need.
 *
 * One region at a time: a second caller finds the pool busy and runs its loop alone, which is right and cannot
 * deadlock. Workers take indices from one atomic counter. They are detached and live as long as the process. */
#include "parallel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#define MAX_WORKERS 255u

static struct {
    pthread_mutex_t busy;  /* held by the caller whose region runs */
    pthread_mutex_t mutex; /* guards everything below but next */
    pthread_cond_t wake, done;
    uint64_t region; /* number of the current region; a worker that slept notices a new one */
    uint32_t n_workers;
    uint32_t wanted;  /* workers 1 .. wanted may join the region; 0 once it is closed */
    uint32_t running; /* workers that joined and are not done */
    kvant_parallel_body body;
    void *context;
    size_t n;
    atomic_size_t next;
} pool = { .busy = PTHREAD_MUTEX_INITIALIZER,
           .mutex = PTHREAD_MUTEX_INITIALIZER,
           .wake = PTHREAD_COND_INITIALIZER,
           .done = PTHREAD_COND_INITIALIZER };

static void run_indices(uint32_t worker)
{
    size_t i;
    while ((i = atomic_fetch_add_explicit(&pool.next, 1, memory_order_relaxed)) < pool.n)
        pool.body(pool.context, i, worker);
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
        pthread_mutex_unlock(&pool.mutex);
        run_indices(number);
        pthread_mutex_lock(&pool.mutex);
        if (--pool.running == 0)
            pthread_cond_signal(&pool.done);
    }
    return NULL;
}

/* A forked child has the pool's state but none of its threads. */
static void after_fork_in_child(void)
{
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.n_workers = 0;
    pool.wanted = 0;
}

static void grow(uint32_t wanted)
{
    static bool registered;
    if (!registered)
        registered = pthread_atfork(NULL, NULL, after_fork_in_child) == 0;
    while (pool.n_workers < wanted) {
        pthread_t thread;
        uintptr_t number = pool.n_workers + 1;
        if (pthread_create(&thread, NULL, worker_main, (void *)number) != 0)
            return;
        pthread_detach(thread);
        pool.n_workers++;
    }
}

static void run_alone(size_t n, kvant_parallel_body body, void *context)
{
    for (size_t i = 0; i < n; i++)
        body(context, i, 0);
}

void kvant_parallel_for(size_t n, uint32_t n_threads, kvant_parallel_body body, void *context)
{
    uint32_t helpers = n_threads > 1 ? n_threads - 1 : 0;
    if (helpers > MAX_WORKERS)
        helpers = MAX_WORKERS;
    if (n < 2)
        helpers = 0;
    else if (helpers > n - 1)
        helpers = (uint32_t)(n - 1);
    if (helpers == 0 || pthread_mutex_trylock(&pool.busy) != 0) {
        run_alone(n, body, context);
        return;
    }
    pthread_mutex_lock(&pool.mutex);
    grow(helpers);
    pool.wanted = helpers < pool.n_workers ? helpers : pool.n_workers;
    pool.body = body;
    pool.context = context;
    pool.n = n;
    atomic_store_explicit(&pool.next, 0, memory_order_relaxed);
    pool.region++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.mutex);

    run_indices(0);

    /* Every index is taken. A worker that the system has not scheduled yet must not be waited for: on a loaded machine
     * that can take longer than the work. */
    pthread_mutex_lock(&pool.mutex);
    pool.wanted = 0;
    while (pool.running > 0)
        pthread_cond_wait(&pool.done, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
    pthread_mutex_unlock(&pool.busy);
}
