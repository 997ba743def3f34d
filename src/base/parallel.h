/* parallel.h - runs a loop body on several threads: the threads of the caller's executor
 * (kvant/executor.h), or a pool of sleeping workers.
 *
 * kvant does not use OpenMP: GNU OpenMP's workers spin after every region and so take cores from an
 * engine's own threads once per layer. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Called once for every index 0 .. n - 1, in any order, from up to n_threads threads, worker being
 * the number of the thread (0 .. n_threads - 1, for per-thread scratch). */
typedef void (*kvant_parallel_body)(void *context, size_t index, uint32_t worker);

/* Runs the body for all indices and returns when all are done. The caller is worker 0. Falls back
 * to fewer threads when none can be had, when the pool serves another caller, or when the caller
 * has fewer CPUs: the result must not depend on it. A loop within a body does not run on the
 * executor. */
void kvant_parallel_for(size_t n, uint32_t n_threads, kvant_parallel_body body, void *context);

/* Whether the calling thread has an executor, whose threads begin within microseconds. */
bool kvant_parallel_is_lent(void);
