/* fail_malloc.c - for LD_PRELOAD: the process's allocation number FAIL_AT fails, or this one and
 * all later ones with FAIL_FROM. It counts calls of malloc, calloc, realloc and aligned_alloc. */
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

/* glibc's own names for the functions that this file replaces. */
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);

static atomic_long count;

static bool fails(void)
{
    const char *at = getenv("FAIL_AT"), *from = getenv("FAIL_FROM");
    const long n = atomic_fetch_add(&count, 1) + 1;

    if ((at == NULL || atol(at) != n) && (from == NULL || n < atol(from)))
        return false;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t bytes)
{
    return fails() ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes)
{
    return fails() ? NULL : __libc_calloc(n, bytes);
}

void *realloc(void *old, size_t bytes)
{
    return fails() ? NULL : __libc_realloc(old, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return fails() ? NULL : __libc_memalign(alignment, bytes);
}
