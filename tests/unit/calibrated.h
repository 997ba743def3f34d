/* calibrated.h - a calibration of fixed numbers for codecs that need a calibration, and the specs
 * to try with it. The numbers are exact in binary32, so the calibration has the same bits on every
 * machine. */
#ifndef KVANT_TESTS_CALIBRATED_H
#define KVANT_TESTS_CALIBRATED_H

#include <kvant/calibration.h>

#include "specs.h"

#include <stdlib.h>

static const char *const calibrated_specs[] = {
#if KVANT_PAPERS
    "kmeans-4:c=1",
    "kmeans-4:c=4",
    "kmeans-4:c=257",
    "kmeans-4:c=4,block=8",
    "kmeans-3:c=4,group=8",
    "kmeans-8:c=4,rotate=dense",
    "hessian-4",
    "hessian-4:block=8",
    "hessian-3:order=eigen",
    "hessian-4:pool=layer",
    "hessian-4:rotate=none,group=8",
#else
    "turboquant-4:transform=file", /* an array must not be empty */
#endif
};
enum { N_CALIBRATED_SPECS = sizeof calibrated_specs / sizeof calibrated_specs[0] };

/* transform=file before every kind of quantiser and rotation. */
static const char *const weighted_specs[] = {
    "turboquant-4:transform=file",
    "turboquant-3:transform=diagonal",
    "turboquant-2:transform=file,rotate=dense",
    "int-4:transform=file",
    "int-4:transform=diagonal,rotate=dense",
    "int-4:transform=file,axis=channel",
    "bdr-4:transform=diagonal",
#if KVANT_PAPERS
    "octopus-3:transform=file",
    "polar-4:transform=file",
    "hqmq-s96r4:transform=diagonal",
    "turboquant-2.5:transform=file",
    "innerq-base:transform=file",
#endif
    "turboquant-4:transform=file,feedback",
    "turboquant-3:transform=file,feedback,scale=norm",
};
enum { N_WEIGHTED_SPECS = sizeof weighted_specs / sizeof weighted_specs[0] };

static inline float calibrated_number(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return ((float)(int32_t)(*state >> 40 & 0xffff) - 32768.0f) / 16384.0f;
}

/* Two layers of two kv heads with `dim` channels, 600 tokens around 5 centres; NULL if there is no
 * memory. */
static inline kvant_calibration *calibrate_fixed(uint32_t dim)
{
    static const uint32_t clusters[] = { 4, 257 };
    kvant_calibrator_config config = { .size = sizeof config,
                                       .model = "fixed",
                                       .seed = 9,
                                       .clusters = clusters,
                                       .n_codebooks = 2,
                                       .sample_rows = 300 };
    kvant_calibrator *calibrator = NULL;
    kvant_calibration *calibration = NULL;
    float *row = malloc((size_t)2 * dim * sizeof *row);
    uint64_t state = 88172645463325252u;
    int failed = !row || kvant_calibrator_create(&config, &calibrator, NULL, 0) != KVANT_OK;
    for (uint32_t i = 0; !failed && i < 600 * 4; i++) {
        uint32_t layer = i % 4 / 2, role = i % 2;
        for (uint32_t j = 0; j < 2 * dim; j++)
            row[j] = calibrated_number(&state) + (float)((i / 4 % 5 * 7 + j) % 11) -
                     (j % dim == 3 ? 40.0f : 0.0f);
        failed = kvant_calibrator_add_rows(calibrator, layer, (kvant_role)role, 2, dim, row,
                                           2 * dim, 1) != KVANT_OK;
        for (uint32_t j = 0; j < 2 * dim; j++) /* channels of unequal size that are correlated */
            row[j] =
                calibrated_number(&state) * (float)(1 + j % 5) + (j % 3 == 0 ? row[0] / 16 : 0);
        for (uint32_t h = 0; !failed && role == 0 && h < 2; h++)
            failed = kvant_calibrator_add_queries(calibrator, layer, h, dim, row + h * dim, dim,
                                                  1) != KVANT_OK;
    }
    for (uint32_t left = 1; !failed && left;)
        failed = kvant_calibrator_cluster(calibrator, &left) != KVANT_OK;
    if (!failed)
        kvant_calibrator_finish(calibrator, &calibration);
    kvant_calibrator_free(&calibrator);
    free(row);
    return calibration;
}

#endif
