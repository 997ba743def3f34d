/* example.h - what the examples share: a check of a status, and random numbers in the place of a
 * model's keys, values and queries. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <kvant/kvant.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void check(kvant_status status)
{
    if (status != KVANT_OK) {
        fprintf(stderr, "%s: %s\n", kvant_strerror(status), kvant_error_message());
        exit(1);
    }
}

/* n bytes of zeros, aligned as pages and workspaces want it. */
static inline void *zeroed(size_t n)
{
    const size_t rounded = (n + 63) / 64 * 64;
    void *memory = aligned_alloc(64, rounded);
    if (memory == NULL)
        exit(1);
    return memset(memory, 0, rounded);
}

static inline float *random_numbers(size_t n)
{
    float *x = zeroed(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return x;
}

#endif
