/* executor.h - on whose threads kvant computes.
 *
 * Calls with an argument n_threads run their loops on a pool of sleeping threads of the process's own. A host that has threads waiting
 * for work, and above all one whose threads wait by spinning, lends these instead: two pools on the same cores take time from
 * each other. Lent threads are expected to begin within microseconds: loops too short for threads that sleep run on them too. */
#ifndef KVANT_EXECUTOR_H
#define KVANT_EXECUTOR_H

#include "kvant.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One thread's part of a loop: takes indices until none is left, so that any number of calls, at once or one after another, does all. */
typedef void (*kvant_executor_work)(void *loop, uint32_t worker);

typedef struct kvant_executor {
    /* Calls work(loop, worker) for different workers below n_workers, from any threads, and returns when those calls have. Which and
     * how many it calls is its choice: what they leave is done by the caller. Must not call kvant itself. */
    void (*run)(void *context, uint32_t n_workers, kvant_executor_work work, void *loop);
    void *context;
} kvant_executor;

/* Loops of kvant functions that the calling thread calls run on *executor from now on, which must stay as it is until it is replaced;
 * NULL: on kvant's own threads, as at first. Results do not depend on it. Returns the executor that it replaces. */
KVANT_API const kvant_executor *kvant_use_executor(const kvant_executor *executor);

#ifdef __cplusplus
}
#endif

#endif
