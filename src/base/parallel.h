/* parallel.h - runs a loop body on several threads: the threads of the caller's executor
 * (kvant/executor.h), or a pool of sleeping workers.
 *
 * kvant does not use OpenMP: GNU OpenMP's workers spin after every region and so take cores from an
 * engine's own threads once per layer. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Called once for every index below n, from up to n_threads threads. Calls begin in the order of
 * the indices. The argument worker is the thread's number, below n_threads, for example to choose
 * its scratch memory. */
typedef void (*kvant_parallel_body)(void *context, size_t index, uint32_t worker);

/* Runs the body for all indices and returns when all are done. The caller is worker 0. Fewer
 * threads are used when no more can be started, when the pool serves another caller, or when the
 * caller has fewer CPUs. So the result must not depend on the number of threads. A loop within a
 * body does not run on the executor. */
void kvant_parallel_for(size_t n, uint32_t n_threads, kvant_parallel_body body, void *context);

/* Waits within a body until other bodies of the loop have counted to n. All that they wrote before
 * they counted can then be read. Only bodies with smaller indices may count, because bodies with
 * larger ones may not have begun. kvant_parallel_count counts by one. */
void kvant_parallel_await(atomic_uint *count, unsigned n);
void kvant_parallel_count(atomic_uint *count);

/* Whether the calling thread has an executor, whose threads begin within microseconds. */
bool kvant_parallel_is_lent(void);
