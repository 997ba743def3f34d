/* machine.h - properties of this machine: CPUs and memory. */
#ifndef KVANT_TOOLS_MACHINE_H
#define KVANT_TOOLS_MACHINE_H

#include <stddef.h>
#include <stdint.h>

/* CPUs that this process may use, at least 1. */
uint32_t machine_cpus(void);

/* Bytes of memory that programs may still take without swapping; 0 when the system does not say. */
double machine_available_memory(void);

#endif
