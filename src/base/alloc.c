/* alloc.c - see alloc.h. */
#include "alloc.h"

#include <stdint.h>
#include <string.h>

#include "os.h"

#define ALIGNMENT 64u /* bytes of a cache line and of an AVX-512 register */

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
    void *memory = kvant_os_alloc(ALIGNMENT, bytes ? bytes : ALIGNMENT);
    if (memory)
        memset(memory, 0, bytes ? bytes : ALIGNMENT);
    return memory;
}

void kvant_free(void *memory)
{
    kvant_os_free(memory);
}

void *kvant_arrays_new(kvant_arrays *arrays, size_t count, size_t size)
{
    void *memory = arrays->n < KVANT_MOST_ARRAYS ? kvant_alloc(count, size) : NULL;
    if (memory)
        arrays->at[arrays->n++] = memory;
    arrays->failed |= !memory;
    return memory;
}

void kvant_arrays_free(kvant_arrays *arrays)
{
    while (arrays->n > 0)
        kvant_free(arrays->at[--arrays->n]);
}

/* AddressSanitizer detects accesses beyond the memory that its allocator returned, but not beyond a
 * mapping. */
#if defined(__SANITIZE_ADDRESS__)

void *kvant_map(size_t count, size_t size)
{
    return kvant_alloc(count, size);
}

void kvant_unmap(void *memory, size_t count, size_t size)
{
    (void)count;
    (void)size;
    kvant_free(memory);
}

#else

void *kvant_map(size_t count, size_t size)
{
    size_t bytes;
    if (!kvant_mul_size(count, size, &bytes) || !bytes)
        return NULL;
    return kvant_os_map_memory(bytes);
}

void kvant_unmap(void *memory, size_t count, size_t size)
{
    if (memory)
        kvant_os_unmap(memory, count * size);
}

#endif
