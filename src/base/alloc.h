/* alloc.h - all memory of libkvant: zeroed, aligned to a cache line, sizes checked for overflow. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* count x size bytes, zeroed, aligned to 64; NULL when the product overflows or memory is short. */
void *kvant_alloc(size_t count, size_t size);
void kvant_free(void *memory);

/* Whole pages of the system, zeroed, for working memory that is needed for a while. A page is
 * resident from its first use until it is unmapped; the C library's allocator would keep it
 * instead. NULL: memory is short. */
void *kvant_map(size_t count, size_t size);
void kvant_unmap(void *memory, size_t count, size_t size); /* as mapped; NULL: nothing happens */

/* *out = a * b; false when it does not fit. */
bool kvant_mul_size(size_t a, size_t b, size_t *out);
