/* windows.h - what tests take from POSIX and from C11, for a test that is compiled for Windows.
 * prepare.sh includes it before each test. */
#pragma once
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static inline void *zeroed(size_t n, size_t size)
{
    void *memory = _aligned_malloc(n * size, 64);
    return memory ? memset(memory, 0, n * size) : NULL;
}

/* Windows frees aligned memory by another function than other memory. So all memory is aligned. */
#define malloc(n) _aligned_malloc(n, 64)
#define calloc(n, size) zeroed(n, size)
#define realloc(memory, n) _aligned_realloc(memory, n, 64)
#define aligned_alloc(alignment, n) _aligned_malloc(n, alignment)
#define free(memory) _aligned_free(memory)

/* Tests end with `rm -r FOLDER`. */
static inline int remove_tree(const char *command)
{
    char other[128];
    snprintf(other, sizeof other, "rmdir /s /q \"%s\"", command + sizeof "rm -r " - 1);
    for (char *at = other + 13; *at; at++)
        *at = *at == '/' ? '\\' : *at;
    return system(other);
}
#define system(command) remove_tree(command)

static inline int setenv(const char *name, const char *value, int replace)
{
    return replace || !getenv(name) ? _putenv_s(name, value) : 0;
}

static inline int unsetenv(const char *name)
{
    return _putenv_s(name, "");
}
