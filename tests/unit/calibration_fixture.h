/* calibration_fixture.h - random rows and queries, and calibrations of them, that tests of
 * calibrators share. */
#ifndef KVANT_TESTS_CALIBRATION_FIXTURE_H
#define KVANT_TESTS_CALIBRATION_FIXTURE_H

#include <kvant/calibration.h>

#include "testing.h"

#define LAYERS 3u
#define HEADS 2u
#define DIM 32u
#define ROWS 200u
#define QUERY_HEADS 4u

static const uint32_t few_clusters[] = { 4, 16 };

/* Rows around a few centres, some far from zero, as keys are. */
static inline void fill_rows(float *rows, size_t n, uint64_t *rng)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t kind = test_random(rng) % 5;
        for (uint32_t j = 0; j < HEADS * DIM; j++)
            rows[i * HEADS * DIM + j] =
                test_normal(rng) * 0.2f + (float)((kind * 7 + j) % 11) - (j == 3 ? 40 : 0);
    }
}

static inline kvant_calibrator *make_calibrator(const uint32_t *clusters, uint32_t n,
                                                uint32_t n_threads)
{
    kvant_calibrator_config config = { .size = sizeof config,
                                       .model = "a model",
                                       .model_fingerprint = 0x0123456789abcdefu,
                                       .seed = 5,
                                       .clusters = clusters,
                                       .n_codebooks = n,
                                       .n_threads = n_threads };
    kvant_calibrator *calibrator;
    char err[256] = "";
    if (kvant_calibrator_create(&config, &calibrator, err, sizeof err) != KVANT_OK)
        fail_msg("%s", err);
    return calibrator;
}

typedef struct data {
    float rows[LAYERS][2][ROWS * HEADS * DIM];
    float queries[LAYERS][QUERY_HEADS][ROWS * DIM];
} data;

static inline data *make_data(void)
{
    data *all = malloc(sizeof *all);
    uint64_t rng = 3;
    assert_non_null(all);
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t role = 0; role < 2; role++)
            fill_rows(all->rows[l][role], ROWS, &rng);
        for (uint32_t h = 0; h < QUERY_HEADS; h++)
            fill_normal(all->queries[l][h], COUNT(all->queries[l][h]), &rng);
    }
    return all;
}

/* Adds the rows in two calls, as a caller does for two batches. */
static inline void add_all(kvant_calibrator *calibrator, const data *all)
{
    const size_t row = HEADS * DIM, cut = 77;
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t role = 0; role < 2; role++) {
            const float *rows = all->rows[l][role];
            assert_ok(kvant_calibrator_add_rows(calibrator, l, (kvant_role)role, HEADS, DIM, rows,
                                                row, cut));
            assert_ok(kvant_calibrator_add_rows(calibrator, l, (kvant_role)role, HEADS, DIM,
                                                rows + cut * row, row, ROWS - cut));
        }
        for (uint32_t h = 0; h < QUERY_HEADS; h++)
            assert_ok(kvant_calibrator_add_queries(calibrator, l, h / (QUERY_HEADS / HEADS), DIM,
                                                   all->queries[l][h], DIM, ROWS));
    }
}

static inline kvant_calibration *finish(kvant_calibrator *calibrator)
{
    uint32_t left = 1, steps = 0;
    kvant_calibration *calibration;
    for (; left; steps++)
        assert_int_equal(kvant_calibrator_cluster(calibrator, &left), KVANT_OK);
    assert_true(steps <= LAYERS);
    assert_int_equal(kvant_calibrator_finish(calibrator, &calibration), KVANT_OK);
    kvant_calibrator_free(&calibrator);
    assert_null(calibrator);
    return calibration;
}

static inline kvant_calibration *make_calibration(uint32_t n_codebooks, uint32_t n_threads)
{
    data *all = make_data();
    kvant_calibrator *calibrator = make_calibrator(few_clusters, n_codebooks, n_threads);
    add_all(calibrator, all);
    free(all);
    return finish(calibrator);
}

static inline kvant_calibration_entry entry_of(const kvant_calibration *c, uint32_t layer,
                                               uint32_t head, kvant_role role)
{
    kvant_calibration_entry entry = { .size = sizeof entry };
    assert_int_equal(kvant_calibration_get_entry(c, layer, head, role, &entry), KVANT_OK);
    return entry;
}

#endif
