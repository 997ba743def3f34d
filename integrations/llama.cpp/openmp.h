/* openmp.h - makes the OpenMP threads of a process sleep at barriers while other programs want
 * their cores.
 *
 * libgomp's threads spin for some milliseconds at each barrier if libgomp counts no more threads
 * than CPUs. On idle cores nothing is faster. A thread that spins on a shared core uses up its time
 * there, while the thread that it waits for does not run, and a token can take seconds. If libgomp
 * counts more threads than CPUs, they spin for a microsecond and then sleep. The count covers all
 * teams of the process, also a team that does nothing. This file adds and removes such a team.
 *
 * The environment variables GOMP_SPINCOUNT and OMP_WAIT_POLICY switch this off, because they say
 * how long threads spin. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "abi.h"

/* The time of a clock that never jumps. */
static inline int64_t kvp_nanoseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether kvp_openmp_watch can have an effect. It has none when the environment says how long
 * threads spin. */
bool kvp_openmp_is_watched(void);

/* Called by a thread that computes graphs on a team of ggml. Finds out how long the thread had to
 * wait for a core lately, and adds or removes the team that does nothing. set_n_threads is
 * ggml_backend_cpu_set_n_threads. */
void kvp_openmp_watch(void (*set_n_threads)(abi_backend *cpu, int n));
