/* machine.c - see machine.h. */
#define _GNU_SOURCE
#include "machine.h"

#include <sched.h>
#include <stdio.h>
#include <unistd.h>

uint32_t machine_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (uint32_t)CPU_COUNT(&set);
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

double machine_available_memory(void)
{
    char line[128];
    double kib = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "MemAvailable: %lf kB", &kib) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return 1024 * kib;
}
