/* machine_linux.c - the idle CPUs of os.h for Linux. */
#define _GNU_SOURCE /* sched_getaffinity */
#include "os.h"

#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

/* The time that a set of CPUs spent since the system's start, in ticks. */
typedef struct cpu_time {
    double idle, total;
    int n_cpus;
} cpu_time;

static cpu_time read_cpu_time(const cpu_set_t *set)
{
    cpu_time sum = { .n_cpus = 0 };
    char line[512];
    FILE *file = fopen("/proc/stat", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        unsigned cpu;
        uint64_t user, nice, system, idle, iowait, irq, softirq, steal;
        if (sscanf(line,
                   "cpu%u %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64
                   " %" SCNu64 " %" SCNu64,
                   &cpu, &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal) != 9 ||
            cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, set))
            continue;
        sum.idle += (double)(idle + iowait);
        sum.total += (double)(user + nice + system + idle + iowait + irq + softirq + steal);
        sum.n_cpus++;
    }
    if (file != NULL)
        fclose(file);
    return sum;
}

double os_idle_cpus(void)
{
    const struct timespec tenth = { .tv_nsec = 100 * 1000 * 1000 };
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return HUGE_VAL;
    const cpu_time before = read_cpu_time(&set);
    nanosleep(&tenth, NULL);
    const cpu_time after = read_cpu_time(&set);
    const double total = after.total - before.total;
    return before.n_cpus == 0 || total <= 0
               ? HUGE_VAL
               : fmax(0, after.n_cpus * (after.idle - before.idle) / total);
}
