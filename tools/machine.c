/* machine.c - CPUs, caches, memory bandwidth. */
#define _GNU_SOURCE
#include "machine.h"

#include "progress.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PASSES = 5, MAX_READERS = 512 };

uint32_t machine_cpus(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (uint32_t)CPU_COUNT(&set);
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

size_t machine_last_cache(void)
{
#ifdef _SC_LEVEL3_CACHE_SIZE
    const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return bytes > 0 ? (size_t)bytes : 0;
#else
    return 0;
#endif
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

typedef struct reader {
    const uint64_t *words;
    size_t n; /* a multiple of 64 */
    uint64_t sum;
    pthread_t thread;
} reader;

/* Eight sums, so that additions do not wait for each other; loads are what is left. */
static void *read_part(void *argument)
{
    reader *r = argument;
    uint64_t sum[8] = { 0 };
    for (size_t i = 0; i < r->n; i += 8)
        for (size_t j = 0; j < 8; j++)
            sum[j] += r->words[i + j];
    for (size_t j = 0; j < 8; j++)
        r->sum += sum[j];
    return NULL;
}

/* Starting a thread takes some 20 us, a pass tens of milliseconds. */
static double read_once(reader *readers, uint32_t n)
{
    const double start = monotonic_seconds();
    uint32_t started = 1;
    while (started < n && pthread_create(&readers[started].thread, NULL, read_part, &readers[started]) == 0)
        started++;
    read_part(&readers[0]);
    for (uint32_t i = started; i < n; i++)
        read_part(&readers[i]);
    for (uint32_t i = 1; i < started; i++)
        pthread_join(readers[i].thread, NULL);
    return monotonic_seconds() - start;
}

double machine_read_bandwidth(uint32_t n_threads, size_t *bytes)
{
    static reader readers[MAX_READERS];
    const size_t least = (size_t)256 << 20, most = (size_t)2 << 30, wanted = 4 * machine_last_cache();
    const uint32_t n = n_threads < MAX_READERS ? n_threads : MAX_READERS;
    const size_t total = wanted < least ? least : wanted > most ? most : wanted;
    const size_t part = total / n / 4096 * 4096;
    *bytes = part * n;
    char *buffer = aligned_alloc(4096, *bytes);
    if (buffer == NULL)
        return 0;
    memset(buffer, 1, *bytes); /* pages that were never written are all one page of zeros */
    for (uint32_t i = 0; i < n; i++)
        readers[i] = (reader){ .words = (const uint64_t *)(buffer + i * part), .n = part / sizeof(uint64_t) };
    double best = read_once(readers, n);
    for (int i = 1; i < PASSES; i++) {
        const double seconds = read_once(readers, n);
        best = seconds < best ? seconds : best;
    }
    free(buffer);
    volatile uint64_t kept = readers[0].sum; /* so that nobody leaves the reading out */
    (void)kept;
    return (double)*bytes / best;
}
