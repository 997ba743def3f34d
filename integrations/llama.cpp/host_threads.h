/* host_threads.h - runs the plug-in's loops on the threads of llama.cpp's own pool.
 *
 * While a back end computes, the workers of ggml's CPU pool spin until the next graph, for the
 * better part of a second at the default --poll. With as many threads as cores, threads of kvant's
 * own would share the cores with them. So what the plug-in computes for a graph becomes one node
 * for the CPU back end of the same llama context. Its first thread computes; the others wait for
 * the loops of kvant in it. They spin for some microseconds, in which most loops begin, then yield
 * their core to whoever wants it, then sleep. A node begins within some microseconds.
 *
 * A process may have fewer CPUs than llama.cpp has threads, as in a container. ggml's threads then
 * wait for one another at every barrier, which takes seconds for a token. So a lender's number of
 * threads is at most the number of CPUs, whatever llama.cpp sets before a graph. A part of a graph
 * with more threads would do harm, too: OpenMP's workers spin after it, and use up a CPU quota.
 *
 * KVANT_HOST_THREADS=0 leaves ggml's tables alone and uses kvant's own threads. */
#ifndef KVP_HOST_THREADS_H
#define KVP_HOST_THREADS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <kvant/executor.h>

#include "abi.h"

/* A number that threads wait for another to change, and where they sleep when that takes long. */
typedef struct kvp_awaited {
    atomic_uint value, asleep;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} kvp_awaited;

/* Of one back end instance. Zeros: nothing lent. */
typedef struct kvp_host_threads {
    bool wanted;
    uint64_t lender;  /* number of the CPU back end of the instance's context; 0: not known */
    bool waits;       /* the lender's threads wait between graphs */
    abi_backend *cpu; /* that back end, while a graph is computed */
    abi_context *context;
    abi_graph *graph; /* one node, which computes */
    kvant_executor executor;
    /* What the node computes, and whether it did. */
    void (*compute)(void *user);
    void *user;
    bool computed;
    uint32_t n; /* threads to compute with */
    /* The loop that runs while turn is odd, and how many threads are in it. */
    kvant_executor_work work;
    void *loop;
    atomic_uint n_workers;
    kvp_awaited turn, running;
} kvp_host_threads;

/* The instance borrows from now on. The first call in a process changes ggml's registry entry, to
 * learn which pool each context's CPU back end has; it changes nothing when the process exports no
 * CPU back end. May be called from several threads. */
void kvp_host_threads_use(kvp_host_threads *threads);

/* Takes note of the CPU back end that llama.cpp has just given a pool to on this thread: it does so
 * before every graph, right before it sets the number of threads of all back ends. Returns how many
 * of these n threads kvant should use. */
uint32_t kvp_host_threads_update(kvp_host_threads *threads, uint32_t n);

/* Calls compute(user) once, on this thread or on one of the lender's. Loops of kvant in it run on
 * the lender's threads, if it lives. */
void kvp_host_threads_compute(kvp_host_threads *threads, void (*compute)(void *user), void *user);

void kvp_host_threads_release(kvp_host_threads *threads);

#endif /* KVP_HOST_THREADS_H */
