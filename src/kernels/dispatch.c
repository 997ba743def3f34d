/* dispatch.c - fills one table of kernels per CPU level and chooses the table in use.
 *
 * This file is compiled with baseline flags: a dispatcher compiled for AVX would crash on machines
 * without AVX. */
#include <stdatomic.h>
#include <pthread.h>
#include <string.h>

#include "../base/attributes.h"
#include "../base/cpu.h"
#include "../math/hadamard.h"
#include "kernels.h"

#if defined(__AVX__) && !defined(KVANT_NATIVE_BASELINE)
#error "dispatch.c must be compiled with the baseline instruction set"
#endif

#ifdef KVANT_HAVE_AVX2
#define INIT_AVX2 kvant_kernels_init_avx2
#else
#define INIT_AVX2 NULL
#endif
#ifdef KVANT_HAVE_AVX2_VNNI
#define INIT_AVX2_VNNI kvant_kernels_init_avx2_vnni
#else
#define INIT_AVX2_VNNI NULL
#endif
#ifdef KVANT_HAVE_AVX512
#define INIT_AVX512 kvant_kernels_init_avx512
#else
#define INIT_AVX512 NULL
#endif
#ifdef KVANT_HAVE_AVX512_VNNI
#define INIT_AVX512_VNNI kvant_kernels_init_avx512_vnni
#else
#define INIT_AVX512_VNNI NULL
#endif
#ifdef KVANT_HAVE_AVX512_VBMI
#define INIT_AVX512_VBMI kvant_kernels_init_avx512_vbmi
#else
#define INIT_AVX512_VBMI NULL
#endif
#ifdef KVANT_HAVE_NEON
#define INIT_NEON kvant_kernels_init_neon
#else
#define INIT_NEON NULL
#endif
#ifdef KVANT_HAVE_NEON_DOT
#define INIT_NEON_DOT kvant_kernels_init_neon_dot
#else
#define INIT_NEON_DOT NULL
#endif

static kvant_cpu_level best = KVANT_CPU_C;
static _Atomic kvant_cpu_level in_use = KVANT_CPU_AUTO;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const kvant_kernels reference = {
    .unpack = kvant_unpack_c,
    .matmul = kvant_matmul_c,
    .exp_sum = kvant_exp_sum_c,
    .mask_scores = kvant_mask_scores_c,
    .half_to_float = kvant_half_to_float_c,
    .scale_columns = kvant_scale_columns_c,
    .scale_rows = kvant_scale_rows_c,
    .float_to_half = kvant_float_to_half_c,
    .dot = kvant_dot_c,
    .dot_codes = kvant_dot_codes_c,
    .combine_rows = kvant_combine_rows_c,
    .hadamard = kvant_hadamard,
    .range = kvant_range_c,
    .magnitude = kvant_magnitude_c,
    .uniform_codes = kvant_uniform_codes_c,
    .codebook_codes = kvant_codebook_codes_c,
    .feedback_codes = kvant_feedback_codes_c,
    .triplet_codes = kvant_triplet_codes_c,
    .closest_cosets = kvant_closest_cosets_c,
    .largest_products = kvant_largest_products_c,
    .token_halves = kvant_token_halves_c,
    .key_halves = kvant_key_halves_c,
    .fixed_point = kvant_fixed_point_c,
    .code_dots = kvant_code_dots_c,
    .sum_dots = kvant_sum_dots_c,
    .tile_sums = kvant_tile_sums_c,
    .unpack_triplets = kvant_unpack_triplets_c,
    .unpack_directions = kvant_unpack_directions_c,
    .block_scores = kvant_block_scores_c,
    .block_sums = kvant_block_sums_c,
    .block_rows_tile = kvant_block_rows_tile_c,
    .block_columns_tile = kvant_block_columns_tile_c,
    .chunk_dots = kvant_chunk_dots_c,
    .trellis_path = kvant_trellis_path_c,
    .trellis_dots = kvant_trellis_dots_c,
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
    { .level = KVANT_CPU_AVX2, .name = "avx2", .init = INIT_AVX2 },
    { .level = KVANT_CPU_AVX2_VNNI, .name = "avx2vnni", .init = INIT_AVX2_VNNI },
    { .level = KVANT_CPU_AVX512, .name = "avx512", .init = INIT_AVX512 },
    { .level = KVANT_CPU_AVX512_VNNI, .name = "avx512vnni", .init = INIT_AVX512_VNNI },
    { .level = KVANT_CPU_AVX512_VBMI, .name = "avx512vbmi", .init = INIT_AVX512_VBMI },
    { .level = KVANT_CPU_NEON, .name = "neon", .init = INIT_NEON },
    { .level = KVANT_CPU_NEON_DOT, .name = "neondot", .init = INIT_NEON_DOT },
};
#define N_LEVELS (sizeof levels / sizeof *levels)

static void fill(void)
{
    kvant_kernels kernels = reference;
    for (size_t i = 0; i < N_LEVELS; i++) {
        if (!levels[i].init || !kvant_cpu_has(levels[i].level))
            continue;
        levels[i].init(&kernels); /* compiled for the level: filling a table already takes its instructions */
        levels[i].kernels = kernels;
        levels[i].usable = true;
        best = levels[i].level;
    }
}

kvant_cpu_level kvant_get_cpu_level(void)
{
    pthread_once(&once, fill);
    kvant_cpu_level level = atomic_load_explicit(&in_use, memory_order_relaxed);
    return level == KVANT_CPU_AUTO ? best : level;
}

const kvant_kernels *kvant_kernels_get(kvant_cpu_level level)
{
    if (level == KVANT_CPU_AUTO)
        level = kvant_get_cpu_level();
    pthread_once(&once, fill);
    for (size_t i = 0; i < N_LEVELS; i++)
        if (levels[i].level == level)
            return levels[i].usable ? &levels[i].kernels : NULL;
    return NULL;
}

kvant_status kvant_set_cpu_level(kvant_cpu_level level)
{
    if (level != KVANT_CPU_AUTO && !kvant_kernels_get(level))
        return KVANT_ERR_UNSUPPORTED;
    atomic_store_explicit(&in_use, level, memory_order_relaxed);
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
