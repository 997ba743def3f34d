/* cpu.h - the instruction set level of this machine and the level in use. */
#ifndef KVANT_BASE_CPU_H
#define KVANT_BASE_CPU_H

#include <stdbool.h>

#include <kvant/kvant.h>

/* Whether this machine has a level's features and the operating system lets programs use them. */
bool kvant_cpu_has(kvant_cpu_level level);

#endif
