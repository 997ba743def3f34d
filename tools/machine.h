/* machine.h - properties of this machine: memory. kvant_available_cpus() counts CPUs. */
#ifndef KVANT_TOOLS_MACHINE_H
#define KVANT_TOOLS_MACHINE_H

/* Bytes of memory that programs may still take without swapping; 0 when the system does not say. */
double machine_available_memory(void);

#endif
