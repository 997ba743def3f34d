/* cpu.h - which instruction set level this machine has, and which one is in use. */
#ifndef KVANT_BASE_CPU_H
#define KVANT_BASE_CPU_H

#include <kvant/kvant.h>

/* The best level of this machine that the operating system lets programs use. */
kvant_cpu_level kvant_cpu_detect(void);

#endif
