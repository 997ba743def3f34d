/* memory.c - see memory.h. An alignment can leave some bytes between a buffer and the unmapped
 * page. These bytes, and some at the buffer's opposite end, hold a pattern that is checked after
 * the call. */
#include "memory.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PATTERN 0xa5
#define MARGIN 256u

bool guard_open(guard_memory *memory)
{
    memory->page = (size_t)sysconf(_SC_PAGESIZE);
    memory->n = 0;
    for (uint32_t i = 0; i < GUARD_BUFFERS; i++) {
        uint8_t *all = mmap(NULL, GUARD_BYTES + 2 * memory->page, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED)
            return false;
        memory->buffers[i].region = all + memory->page;
        if (mprotect(memory->buffers[i].region, GUARD_BYTES, PROT_READ | PROT_WRITE) != 0)
            return false;
    }
    return true;
}

/* The position of the pattern: up to MARGIN bytes before and after the buffer. */
static uint8_t *margin_start(const guard_buffer *b)
{
    return (size_t)(b->at - b->region) > MARGIN ? b->at - MARGIN : b->region;
}

static uint8_t *margin_end(const guard_buffer *b)
{
    size_t left = (size_t)(b->region + GUARD_BYTES - (b->at + b->bytes));
    return b->at + b->bytes + (left > MARGIN ? MARGIN : left);
}

void *guard_take(guard_memory *memory, const char *name, size_t bytes, size_t alignment,
                 bool constant)
{
    if (memory->n == GUARD_BUFFERS || bytes > GUARD_BYTES)
        return NULL;
    guard_buffer *b = &memory->buffers[memory->n++];
    b->name = name;
    b->bytes = bytes;
    b->constant = constant;
    b->at = b->region;
    if (memory->at_end)
        b->at += (GUARD_BYTES - bytes) / alignment * alignment;
    memset(margin_start(b), PATTERN, (size_t)(b->at - margin_start(b)));
    memset(b->at, 0x55, bytes);
    memset(b->at + bytes, PATTERN, (size_t)(margin_end(b) - (b->at + bytes)));
    return b->at;
}

void guard_protect(guard_memory *memory, bool locked)
{
    for (uint32_t i = 0; i < memory->n; i++) {
        guard_buffer *b = &memory->buffers[i];
        if (!b->constant)
            continue;
        uint8_t *first = b->region + (size_t)(b->at - b->region) / memory->page * memory->page;
        size_t length =
            ((size_t)(b->at + b->bytes - first) + memory->page - 1) / memory->page * memory->page;
        mprotect(first, length, locked ? PROT_READ : PROT_READ | PROT_WRITE);
    }
}

void guard_release(guard_memory *memory)
{
    guard_protect(memory, false);
    memory->n = 0;
}

const guard_buffer *guard_damaged(const guard_memory *memory)
{
    for (uint32_t i = 0; i < memory->n; i++) {
        const guard_buffer *b = &memory->buffers[i];
        for (const uint8_t *p = margin_start(b); p < margin_end(b); p++) {
            if (p == b->at)
                p += b->bytes;
            if (p < margin_end(b) && *p != PATTERN)
                return b;
        }
    }
    return NULL;
}

const guard_buffer *guard_owner(const guard_memory *memory, const void *address)
{
    uintptr_t at = (uintptr_t)address;
    for (uint32_t i = 0; i < memory->n; i++) {
        uintptr_t first = (uintptr_t)memory->buffers[i].region - memory->page;
        if (at >= first && at < first + GUARD_BYTES + 2 * memory->page)
            return &memory->buffers[i];
    }
    return NULL;
}
