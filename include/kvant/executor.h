/* executor.h - lets a host lend its threads to kvant.
 *
 * Functions with an argument n_threads run their loops on kvant's own pool of sleeping threads. A
 * host that keeps threads waiting for work, above all threads that wait by spinning, should lend
 * them: two pools on the same cores take time from each other. Kvant expects lent threads to begin
 * within microseconds, so it also uses them for loops that are too short for sleeping threads.
 */
#ifndef KVANT_EXECUTOR_H
#define KVANT_EXECUTOR_H

#include <kvant/kvant.h>

KVANT_BEGIN_C

/* One thread's part of a loop. Each call takes indices until none is left, so any number of calls
 * completes the loop, whether they run at once or one after another. */
typedef void (*kvant_executor_work)(void *loop, uint32_t worker);

typedef struct kvant_executor {
    /* Calls work(loop, worker) for different workers below n_workers, from any threads, and returns
     * when all of these calls have returned. The executor may call fewer workers, or none: the
     * caller does the rest. It must not call kvant itself. The threads need 64 KiB of stack. */
    void (*run)(void *context, uint32_t n_workers, kvant_executor_work work, void *loop);
    void *context;
} kvant_executor;

/* Sets the executor of the calling thread and returns the previous one. NULL stands for kvant's own
 * pool, which is what every thread begins with. Restore the previous executor when you are done, so
 * that executors nest. *executor must stay valid until it is replaced. Results do not depend on the
 * executor. A child of fork has none: the threads stay in the parent. */
KVANT_API const kvant_executor *kvant_use_executor(const kvant_executor *executor);

KVANT_END_C

#endif
