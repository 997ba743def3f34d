/* cpu_levels.h - the CPU levels of this architecture. If the machine lacks a level, a test prints a
 * line that scripts/run_tests.py lists. The test fails if the environment variable
 * KVANT_REQUIRE_LEVELS (names between commas) has the level. */
#ifndef KVANT_TESTS_CPU_LEVELS_H
#define KVANT_TESTS_CPU_LEVELS_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvant/kvant.h>

static const kvant_cpu_level cpu_levels[] = { KVANT_CPU_C,
#if defined(__x86_64__) || defined(_M_X64)
                                              KVANT_CPU_AVX2,       KVANT_CPU_AVX2_VNNI,
                                              KVANT_CPU_AVX512,     KVANT_CPU_AVX512_VNNI,
                                              KVANT_CPU_AVX512_VBMI
#else
                                              KVANT_CPU_NEON, KVANT_CPU_NEON_DOT
#endif
};

/* Whether KVANT_REQUIRE_LEVELS names the level. */
static inline bool level_is_required(const char *name)
{
    const char *list = getenv("KVANT_REQUIRE_LEVELS");
    const size_t n = strlen(name);
    for (; list && *list; list += strcspn(list, ","), list += *list == ',')
        if (strcspn(list, ",") == n && strncmp(list, name, n) == 0)
            return true;
    return false;
}

/* Computes at this level from now on. Returns false if this machine or this build lacks the level,
 * which each program reports once. A required level that is missing ends the program as failed. */
static inline bool use_level(kvant_cpu_level level)
{
    static bool said[128]; /* levels are small numbers */
    const char *name = kvant_cpu_level_name(level);
    if (kvant_set_cpu_level(level) == KVANT_OK)
        return true;
    if (level_is_required(name)) {
        fprintf(stderr, "CPU level %s is required by KVANT_REQUIRE_LEVELS and missing\n", name);
        exit(1);
    }
    if (!said[level % 128])
        printf("skipped: CPU level %s, which this machine or this build lacks\n", name);
    said[level % 128] = true;
    fflush(stdout);
    return false;
}

/* The same for a test that calls the level's kernels itself: the level in use stays AUTO. */
static inline bool has_level(kvant_cpu_level level)
{
    const bool has = use_level(level);
    kvant_set_cpu_level(KVANT_CPU_AUTO);
    return has;
}

#endif
