/* alloc.c - see alloc.h. */
#include "alloc.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ALIGNMENT 64u

bool kvant_mul_size(size_t a, size_t b, size_t *out)
{
    if (b != 0 && a > SIZE_MAX / b)
        return false;
    *out = a * b;
    return true;
}

void *kvant_alloc(size_t count, size_t size)
{
    size_t bytes;
    if (!kvant_mul_size(count, size, &bytes) || bytes > SIZE_MAX - ALIGNMENT)
        return NULL;
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, bytes ? bytes : ALIGNMENT);
    if (memory)
        memset(memory, 0, bytes ? bytes : ALIGNMENT);
    return memory;
}

void kvant_free(void *memory)
{
    free(memory);
}
