/* same_bytes.c - prints a hash of the bytes that every codec writes for fixed rows. Usage:
 * same_bytes [CPU level [head_dim]], by default the best level and all head_dims.
 *
 * tests/unit/same_bytes.sh builds this program with several compilers and optimisation levels
 * straight from the sources and compares the hashes. The program has no other dependency. */
#include <kvant/codec.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/calibration/moments.h"
#include "../../src/kernels/kernels.h"
#include "calibrated.h"
#include "specs.h"

static const uint32_t dims[] = { 40, 64, 80, 128, 192 };

/* A number with a heavy tail, exact in binary32 on every machine: an integer over a power of
 * two. */
static float number(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    float x = (float)(int32_t)(*state >> 40 & 0xffff) - 32768.0f;
    return x / (float)(1u << (8 + (*state >> 60)));
}

static uint64_t hash_page(uint64_t hash, const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u; /* FNV-1a */
    return hash;
}

static int hash_codec(const char *spec, uint32_t dim, kvant_role role,
                      const kvant_calibration *calibration, uint64_t *hash)
{
    kvant_codec *codec;
    kvant_codec_info info = { .size = sizeof info };
    if (kvant_codec_create_calibrated(spec, dim, role, 42, calibration, 1, 1, &codec, NULL, 0) !=
        KVANT_OK)
        return 1;
    kvant_codec_get_info(codec, &info);
    uint8_t *page = aligned_alloc(64, info.page_bytes);
    float *rows = malloc(sizeof *rows * 64 * dim);
    uint64_t state = 88172645463325252u;
    int failed = !page || !rows;
    for (int round = 0; round < 4 && !failed; round++) {
        memset(page, 0, info.page_bytes);
        for (uint32_t i = 0; i < 64 * dim; i++)
            rows[i] = number(&state);
        failed = kvant_codec_encode(codec, NULL, rows, dim, 0, 64, page) != KVANT_OK;
        *hash = hash_page(*hash, page, info.page_bytes);
    }
    free(page);
    free(rows);
    kvant_codec_free(&codec);
    return failed;
}

/* Prints nothing for a spec that does not support this head_dim. */
static void print_hash(const char *spec, uint32_t dim, const kvant_calibration *calibration)
{
    uint64_t hash = 0xcbf29ce484222325u;
    if (hash_codec(spec, dim, KVANT_ROLE_K, calibration, &hash) == 0 &&
        hash_codec(spec, dim, KVANT_ROLE_V, calibration, &hash) == 0)
        printf("%s %u %016" PRIx64 "\n", spec, (unsigned)dim, hash);
}

/* Prints a hash of a learned matrix: of the second moments and of the transform that is solved from
 * them. */
static void print_learnt(uint32_t dim)
{
    enum { ROWS = 300, MOST = 128 };
    static float rows[ROWS * MOST], columns[MOST * MOST], sums[MOST * (MOST + 1) / 2];
    static double moments[2][MOST * MOST], room[KVANT_MEAN_ROOM(MOST)];
    static uint16_t triangle[2 * MOST + MOST * MOST / 8];
    const uint32_t stride = (dim + 15) / 16 * 16;
    uint64_t state = 88172645463325252u, hash = 0xcbf29ce484222325u;
    double gain;
    for (int which = 0; which < 2; which++) {
        for (uint32_t i = 0; i < ROWS * stride; i++)
            rows[i] = number(&state);
        memset(columns, 0, sizeof columns);
        kvant_kernels_get(KVANT_CPU_AUTO)->add_outers(rows, stride, ROWS, dim, columns);
        for (uint32_t j = 0; j < dim; j++)
            for (uint32_t i = j; i < dim; i++) {
                const float sum = sums[i * (i + 1) / 2 + j] =
                    columns[kvant_lower_position(dim, i, j)];
                moments[which][i * dim + j] = moments[which][j * dim + i] = sum / (double)ROWS;
            }
        hash = hash_page(hash, (const uint8_t *)sums, dim * (dim + 1) / 2 * sizeof(float));
    }
    if (kvant_make_triangle(dim, moments[0], moments[1], room, triangle, &gain) == KVANT_OK)
        printf("learnt %u %016" PRIx64 "\n", (unsigned)dim,
               hash_page(hash, (const uint8_t *)triangle,
                         kvant_triangle_size(dim) * sizeof *triangle));
}

int main(int argc, char **argv)
{
    static const uint32_t calibrated_dims[] = { 64, 80 }, learnt_dims[] = { 40, 64, 80, 128 };
    uint32_t only = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0;
    kvant_cpu_level level;
    if (argc > 1 && (kvant_cpu_level_from_name(argv[1], &level) != KVANT_OK ||
                     kvant_set_cpu_level(level) != KVANT_OK)) {
        fprintf(stderr, "same_bytes: this machine or this build has no CPU level %s\n", argv[1]);
        return 2;
    }
    for (size_t s = 0; s < sizeof all_specs / sizeof all_specs[0]; s++)
        for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++)
            if (!only || dims[d] == only)
                print_hash(all_specs[s], dims[d], NULL);
    for (size_t d = 0; d < sizeof calibrated_dims / sizeof calibrated_dims[0]; d++) {
        if (only && calibrated_dims[d] != only)
            continue;
        kvant_calibration *calibration = calibrate_fixed(calibrated_dims[d]);
        for (size_t s = 0; s < N_CALIBRATED_SPECS; s++)
            print_hash(calibrated_specs[s], calibrated_dims[d], calibration);
        for (size_t s = 0; s < N_WEIGHTED_SPECS; s++)
            print_hash(weighted_specs[s], calibrated_dims[d], calibration);
        kvant_calibration_free(&calibration);
    }
    for (size_t d = 0; d < sizeof learnt_dims / sizeof learnt_dims[0]; d++)
        if (!only || learnt_dims[d] == only)
            print_learnt(learnt_dims[d]);
    return 0;
}
