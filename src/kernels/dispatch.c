/* dispatch.c - fills one table of kernels per CPU level and chooses the table in use.
 *
 * This file is compiled with baseline flags: a dispatcher compiled for AVX would crash on machines
 * without AVX. */
#include <stdatomic.h>
#include <pthread.h>
#include <string.h>

#include "../base/attributes.h"
#include "../base/cpu.h"
#include "kernels.h"

#if defined(__AVX__) && !defined(KVANT_NATIVE_BASELINE)
#error "dispatch.c must be compiled with the baseline instruction set"
#endif

/* Levels that this build does not have. */
#ifndef KVANT_HAVE_AVX2
#define kvant_kernels_init_avx2 NULL
#endif
#ifndef KVANT_HAVE_AVX2_VNNI
#define kvant_kernels_init_avx2_vnni NULL
#endif
#ifndef KVANT_HAVE_AVX512
#define kvant_kernels_init_avx512 NULL
#endif
#ifndef KVANT_HAVE_AVX512_VNNI
#define kvant_kernels_init_avx512_vnni NULL
#endif
#ifndef KVANT_HAVE_AVX512_VBMI
#define kvant_kernels_init_avx512_vbmi NULL
#endif
#ifndef KVANT_HAVE_NEON
#define kvant_kernels_init_neon NULL
#endif
#ifndef KVANT_HAVE_NEON_DOT
#define kvant_kernels_init_neon_dot NULL
#endif

static size_t best;          /* index in levels */
static atomic_size_t in_use; /* index in levels plus 1; 0: the best level */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const kvant_kernels reference = {
#define REFERENCE(FN, name) .name = kvant_##name##_c,
    KVANT_KERNELS(REFERENCE)
};

static void keep_reference(kvant_kernels *kernels)
{
    (void)kernels;
}

/* All levels in increasing order of preference; init is NULL where the build lacks the level. A
 * machine may have a level and lack an earlier level. */
static struct {
    kvant_cpu_level level;
    bool usable;
    const char *name;
    void (*init)(kvant_kernels *kernels);
    kvant_kernels kernels;
} levels[] = {
    { .level = KVANT_CPU_C, .name = "c", .init = keep_reference },
    { .level = KVANT_CPU_AVX2, .name = "avx2", .init = kvant_kernels_init_avx2 },
    { .level = KVANT_CPU_AVX2_VNNI, .name = "avx2vnni", .init = kvant_kernels_init_avx2_vnni },
    { .level = KVANT_CPU_AVX512, .name = "avx512", .init = kvant_kernels_init_avx512 },
    { .level = KVANT_CPU_AVX512_VNNI,
      .name = "avx512vnni",
      .init = kvant_kernels_init_avx512_vnni },
    { .level = KVANT_CPU_AVX512_VBMI,
      .name = "avx512vbmi",
      .init = kvant_kernels_init_avx512_vbmi },
    { .level = KVANT_CPU_NEON, .name = "neon", .init = kvant_kernels_init_neon },
    { .level = KVANT_CPU_NEON_DOT, .name = "neondot", .init = kvant_kernels_init_neon_dot },
};
#define N_LEVELS (sizeof levels / sizeof *levels)

static void fill(void)
{
    kvant_kernels kernels = reference;
    for (size_t i = 0; i < N_LEVELS; i++) {
        if (!levels[i].init || !kvant_cpu_has(levels[i].level))
            continue;
        levels[i].init(
            /* init is compiled for its level, and even filling the table uses the level's
             * instructions */
            &kernels);
        levels[i].kernels = kernels;
        levels[i].usable = true;
        best = i;
    }
}

/* The index of the level in use. It comes from two variables and not from the table of levels,
 * because the table's cache lines are usually evicted between two calls of a program. */
static size_t number_in_use(void)
{
    pthread_once(&once, fill);
    const size_t number = atomic_load_explicit(&in_use, memory_order_relaxed);
    return number ? number - 1 : best;
}

kvant_cpu_level kvant_get_cpu_level(void)
{
    return levels[number_in_use()].level;
}

const kvant_kernels *kvant_kernels_get(kvant_cpu_level level)
{
    if (level == KVANT_CPU_AUTO)
        return &levels[number_in_use()].kernels;
    pthread_once(&once, fill);
    for (size_t i = 0; i < N_LEVELS; i++)
        if (levels[i].level == level)
            return levels[i].usable ? &levels[i].kernels : NULL;
    return NULL;
}

kvant_status kvant_set_cpu_level(kvant_cpu_level level)
{
    size_t number = 0;
    KVANT_RETURN_IF(level != KVANT_CPU_AUTO && !kvant_kernels_get(level), KVANT_ERR_UNSUPPORTED);
    while (level != KVANT_CPU_AUTO && levels[number++].level != level)
        ;
    atomic_store_explicit(&in_use, number, memory_order_relaxed);
    return KVANT_OK;
}

const char *kvant_cpu_level_name(kvant_cpu_level level)
{
    for (size_t i = 0; i < N_LEVELS; i++)
        if (levels[i].level == level)
            return levels[i].name;
    return level == KVANT_CPU_AUTO ? "auto" : NULL;
}

kvant_status kvant_cpu_level_from_name(const char *name, kvant_cpu_level *level)
{
    KVANT_RETURN_IF(!name || !level, KVANT_ERR_ARGUMENT);
    if (strcmp(name, "auto") == 0) {
        *level = KVANT_CPU_AUTO;
        return KVANT_OK;
    }
    for (size_t i = 0; i < N_LEVELS; i++)
        if (strcmp(levels[i].name, name) == 0) {
            *level = levels[i].level;
            return KVANT_OK;
        }
    return KVANT_ERR_ARGUMENT;
}
