/* host_threads.h - runs the plug-in's loops on the threads of llama.cpp's own pool.
 *
 * While a back end computes, the workers of ggml's CPU pool spin until the next graph, for the
 * better part of a second at the default --poll. If there are as many workers as cores, separate
 * threads of kvant would have to share the cores with them. So the plug-in makes its work for a
 * graph one node for the CPU back end of the same llama context. The node's first thread computes,
 * and the remaining threads wait for loops of kvant in it. They spin for some microseconds, in
 * which most loops begin, then yield their core, then sleep. A node begins within some
 * microseconds.
 *
 * A process may have fewer CPUs than llama.cpp has threads, as in a container. ggml's threads then
 * wait for one another at every barrier, which takes seconds for a token. So a lender has at most
 * as many threads as there are CPUs, whatever llama.cpp sets before a graph. Even one part of a
 * graph with more threads would do harm, because OpenMP's workers spin after it and use up a CPU
 * quota.
 *
 * KVANT_HOST_THREADS=0 leaves ggml's tables alone and uses kvant's own threads. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <kvant/executor.h>

#include "abi.h"

/* Threads that sleep until another thread changes a number, because that takes long. */
typedef struct kvp_sleepers {
    atomic_uint n;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} kvp_sleepers;

/* The most threads of a loop: the caller and what libkvant asks for at most. */
#define KVP_MOST_WORKERS 256

/* Whether a thread is in a loop. Each thread has a cache line for that: threads that all change one
 * line at the beginning and the end of a loop wait for each other. */
typedef struct kvp_worker_line {
    atomic_uint inside;
    char rest[60];
} kvp_worker_line;

/* The lent threads of one back end instance. All zeros: no threads are lent. */
typedef struct kvp_host_threads {
    bool wanted;
    uint64_t lender;  /* the number of the CPU back end of the instance's context; 0: not known */
    bool waits;       /* the lender's threads wait between graphs */
    abi_backend *cpu; /* that back end, while a graph is computed */
    abi_context *context;
    abi_graph *graph; /* a graph of one node, which computes */
    kvant_executor executor;
    /* the function that the node calls, and whether it was called */
    void (*compute)(void *user);
    void *user;
    bool computed;
    uint32_t n; /* threads to compute with */
    /* The loop that runs while the phase is odd, and the threads in it. The phase does not share a
     * cache line with the loop, because waiting threads read the phase all the time. */
    kvant_executor_work work;
    void *loop;
    atomic_uint n_workers;
    kvp_worker_line workers[KVP_MOST_WORKERS];
    atomic_uint loop_phase;
    kvp_sleepers helpers, leader;
} kvp_host_threads;

/* Makes the instance borrow threads from now on. The first call in a process changes ggml's
 * registry entry, to learn which pool each context's CPU back end has. It changes nothing when the
 * process exports no CPU back end. May be called from several threads. */
void kvp_host_threads_use(kvp_host_threads *threads);

/* Notes the CPU back end to which llama.cpp has just given a pool on this thread. Before every
 * graph llama.cpp does so, and then sets the thread count of all back ends. Returns the number of
 * these n threads that kvant should use. */
uint32_t kvp_host_threads_update(kvp_host_threads *threads, uint32_t n);

/* Calls compute(user) once, on this thread or on a thread of the lender. Loops of kvant in compute
 * run on the lender's threads, unless the lender was freed. */
void kvp_host_threads_compute(kvp_host_threads *threads, void (*compute)(void *user), void *user);

/* For nodes of kvant in a graph of the CPU back end. `begin` is called before the graph. Then each
 * of the back end's threads calls `share` for node number `node`, counted from 0: the first thread
 * computes, and further threads run loops. A single thread computes without loops on others. */
void kvp_host_threads_begin(kvp_host_threads *threads);
void kvp_host_threads_share(kvp_host_threads *threads, unsigned node, uint32_t thread,
                            uint32_t n_threads, void (*compute)(void *user), void *user);

void kvp_host_threads_release(kvp_host_threads *threads);
