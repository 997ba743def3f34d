/* refused.c - a library to preload: an allocation of libkvant fails when a test asks for it
 * (test_no_memory.py). */
#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define CALLER __builtin_return_address(0)

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
EXPORTED void refuse_at(long number);
EXPORTED long refused(void);
EXPORTED void *malloc(size_t bytes);
EXPORTED void *calloc(size_t n, size_t bytes);
EXPORTED void *realloc(void *old, size_t bytes);
EXPORTED void *aligned_alloc(size_t alignment, size_t bytes);

static atomic_long until, n_refused; /* allocations until one fails, 0: none; how many failed */

void refuse_at(long number)
{
    atomic_store(&n_refused, 0);
    atomic_store(&until, number);
}

long refused(void)
{
    return atomic_load(&n_refused);
}

static bool fails(void *caller)
{
    Dl_info info;
    if (atomic_load(&until) <= 0 || !dladdr(caller, &info) || !strstr(info.dli_fname, "libkvant."))
        return false;
    const bool now = atomic_fetch_sub(&until, 1) == 1;
    atomic_fetch_add(&n_refused, now);
    return now;
}

void *malloc(size_t bytes)
{
    return fails(CALLER) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    return fails(CALLER) ? NULL : __libc_calloc(n, bytes);
}

void *realloc(void *old, size_t bytes)
{
    return fails(CALLER) ? NULL : __libc_realloc(old, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return fails(CALLER) ? NULL : __libc_memalign(alignment, bytes);
}
