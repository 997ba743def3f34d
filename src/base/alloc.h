/* alloc.h - all memory of libkvant: zeroed, aligned to a cache line, sizes checked for overflow. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* count x size bytes, zeroed, aligned to 64; NULL when the product overflows or memory is short. */
void *kvant_alloc(size_t count, size_t size);
void kvant_free(void *memory);

/* Arrays of a call, which are freed together; zeros at first. The largest set is the one of a
 * search; beyond the limit an array counts as one that memory is too short for. */
#define KVANT_MOST_ARRAYS 20u
typedef struct kvant_arrays {
    void *at[KVANT_MOST_ARRAYS];
    uint32_t n;
    bool failed; /* memory was short for an array */
} kvant_arrays;
void *kvant_arrays_new(kvant_arrays *arrays, size_t count, size_t size); /* as kvant_alloc */
void kvant_arrays_free(kvant_arrays *arrays);

/* Whole pages of the system, zeroed, for working memory that is needed for a while. A page is
 * resident from its first use until it is unmapped; the C library's allocator would keep it
 * instead. NULL: memory is short. */
void *kvant_map(size_t count, size_t size);
void kvant_unmap(void *memory, size_t count, size_t size); /* as mapped; NULL: nothing happens */

/* *out = a * b; false when it does not fit. */
bool kvant_mul_size(size_t a, size_t b, size_t *out);
