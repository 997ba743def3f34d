/* memory.h - buffers that end at an unmapped page, or begin after one. */
#ifndef KVANT_TESTS_KERNELS_MEMORY_H
#define KVANT_TESTS_KERNELS_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GUARD_BUFFERS 16u
#define GUARD_BYTES ((size_t)1 << 20) /* size of one buffer */

typedef struct guard_buffer {
    const char *name;
    uint8_t *region; /* GUARD_BYTES between unmapped pages */
    uint8_t *at;
    size_t bytes;
    bool constant;
} guard_buffer;

typedef struct guard_memory {
    guard_buffer buffers[GUARD_BUFFERS];
    uint32_t n;
    size_t page;
    bool at_end;
} guard_memory;

bool guard_open(guard_memory *memory); /* Returns false if the system has no memory for it. */
void guard_release(guard_memory *memory);

/* Returns NULL if there are too many buffers, or the buffer is too large. */
void *guard_take(guard_memory *memory, const char *name, size_t bytes, size_t alignment,
                 bool constant);

/* Forbids and allows writes to constants. */
void guard_protect(guard_memory *memory, bool locked);

/* Returns a buffer next to which something was written, or NULL. */
const guard_buffer *guard_damaged(const guard_memory *memory);

/* Returns the buffer in whose region or unmapped page an address lies, or NULL. */
const guard_buffer *guard_owner(const guard_memory *memory, const void *address);

#endif
