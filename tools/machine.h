/* machine.h - properties of this machine: CPUs, caches, memory bandwidth. */
#ifndef KVANT_TOOLS_MACHINE_H
#define KVANT_TOOLS_MACHINE_H

#include <stddef.h>
#include <stdint.h>

/* CPUs that this process may use, at least 1. */
uint32_t machine_cpus(void);

/* Bytes of the last cache that the system tells of; 0 when it does not. On virtual machines it is
 * the whole host's. */
size_t machine_last_cache(void);

/* Bytes of memory that programs may still take without swapping; 0 when the system does not say. */
double machine_available_memory(void);

/* Bytes a second that n_threads read from a buffer of *bytes, each its own part, one after another:
 * the fastest of five passes. The buffer is four times the last cache, from 256 MiB to 2 GiB. 0
 * when there is no memory for it. */
double machine_read_bandwidth(uint32_t n_threads, size_t *bytes);

#endif
