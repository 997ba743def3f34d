/* test_affine.c - centre and factors of a cache: from the first rows, from a file, frozen early or late, saved. */
#include "cells_fixture.h"

#include "../../src/base/alloc.h"

/* The centre of docs and header, computed here. */
static void mean_of(const float *rows, uint32_t n, uint32_t width, float *mean)
{
    for (uint32_t j = 0; j < width; j++) {
        double sum = 0;
        for (uint32_t i = 0; i < n; i++)
            sum += rows[(size_t)i * width + j];
        mean[j] = (float)(sum / n);
    }
}

static void shift_rows(float *rows, uint32_t n, uint32_t width, uint64_t *rng)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < width; j++)
            rows[(size_t)i * width + j] = (float)(j % 7 * 20) + test_normal(rng) * (j % 5 == 0 ? 10 : 1);
}

static void write_rows(fixture *f, uint32_t first, uint32_t n, const float *rows)
{
    for (uint32_t i = 0; i < n; i++) {
        int64_t index = first + i;
        assert_int_equal(kvant_cells_write(f->cells, &index, 1, rows + (size_t)i * f->width, f->width, 1),
                         KVANT_OK);
    }
}

static void centre_of_the_first_call(void **state)
{
    (void)state;
    uint64_t rng = 38;
    fixture f = make("turboquant-4:center=first", 1, 500, 0);
    float rows[300 * 64], center[64], got[64];
    int64_t index[300];
    for (int i = 0; i < 300; i++)
        index[i] = i;
    shift_rows(rows, 300, 64, &rng);
    mean_of(rows, 300, 64, center);
    assert_null(kvant_cells_affine(f.cells).center);
    assert_int_equal(kvant_cells_write(f.cells, index, 300, rows, 64, 2), KVANT_OK);
    assert_memory_equal(kvant_cells_affine(f.cells).center, center, sizeof center);
    assert_null(kvant_cells_affine(f.cells).scale);
    for (uint32_t page = 0; page < 5; page++)
        assert_int_equal(is_open(&f, 0, page), page == 0); /* the sink page */
    /* Sealed rows are the codec's under that centre, byte for byte. */
    void *page = aligned(info_of(f.codec).page_bytes);
    const kvant_affine affine = { .center = center };
    assert_int_equal(kvant_codec_encode(f.codec, &affine, rows + 64 * 64, 64, 0, 64, page), KVANT_OK);
    assert_memory_equal(page, kvant_cells_page(f.cells, 0, 1, 0).page, info_of(f.codec).page_bytes);
    free(page);
    /* It stays, until the cache is cleared. */
    for (size_t j = 0; j < COUNT(rows); j++)
        rows[j] += 5;
    assert_int_equal(kvant_cells_write(f.cells, index, 300, rows, 64, 2), KVANT_OK);
    assert_memory_equal(kvant_cells_affine(f.cells).center, center, sizeof center);
    assert_int_equal(kvant_cells_set_affine(f.cells, &affine), KVANT_ERR_ARGUMENT);
    kvant_cells_clear(f.cells);
    assert_null(kvant_cells_affine(f.cells).center);
    assert_int_equal(kvant_cells_write(f.cells, index, 300, rows, 64, 2), KVANT_OK);
    mean_of(rows, 300, 64, got);
    assert_memory_equal(kvant_cells_affine(f.cells).center, got, sizeof center);
    drop(&f);
}

/* Rows come one at a time: the 64th freezes, and what was written before reads the same as before. */
static void centre_and_factors_frozen_late(void **state)
{
    static const char *const specs[] = { "turboquant-4:center=first,norm=first", "int-4:axis=channel,norm=first",
                                         "bdr-4:center=first,recent=70" };
    (void)state;
    for (size_t s = 0; s < COUNT(specs); s++) {
        uint64_t rng = 39;
        fixture f = make(specs[s], 2, 400, 0);
        kvant_codec_info info = info_of(f.codec);
        float rows[400 * 64], got[64], center[64] = { 0 };
        shift_rows(rows, 400, 64, &rng);
        write_rows(&f, 430, 63, rows); /* not aligned to a page, in the second stream */
        assert_null(kvant_cells_affine(f.cells).center);
        assert_null(kvant_cells_affine(f.cells).scale);
        write_rows(&f, 493, 1, rows + 63 * 64);
        kvant_affine affine = kvant_cells_affine(f.cells);
        if (info.center)
            mean_of(rows, 64, 64, center);
        assert_int_equal(affine.center != NULL, info.center != KVANT_CENTER_NONE);
        assert_int_equal(affine.scale != NULL, info.norm != KVANT_NORM_NONE);
        if (affine.center)
            assert_memory_equal(affine.center, center, sizeof center);
        for (uint32_t j = 0; affine.scale && j < 64; j++) {
            float largest = 0;
            for (uint32_t i = 0; i < 64; i++)
                largest = fmaxf(largest, fabsf(rows[i * 64 + j] - center[j]));
            assert_true(affine.scale[j] == sqrtf(largest)); /* no channel here is 2^-16 of another */
        }
        write_rows(&f, 494, 306, rows + 64 * 64);
        double error = 0;
        for (uint32_t i = 0; i < 370; i++) {
            read_cell(&f, 430 + i, got);
            error += squared_distance(got, rows + i * 64, 64) / (370 * 64);
        }
        /* Variance 1 and, in a fifth of the channels, 100, quantised to 4 bits; without a centre the numbers'
         * mean square is above 5000. The worst of these codecs has one scale a token: 4 bits over +-4 sigma
         * of the wide channels, a step of 80 / 15, is 2.4. With factors of sqrt(max) the wide channels count
         * sqrt(10) instead. */
        assert_true(error < 2.4);
        drop(&f);
    }
}

/* A constant channel must not make later rows explode. */
static void factors_have_a_floor(void **state)
{
    (void)state;
    fixture f = make("turboquant-4:norm=first", 1, 128, 0);
    float rows[64 * 64] = { 0 };
    int64_t index[64];
    for (uint32_t i = 0; i < 64; i++) {
        index[i] = i;
        rows[i * 64 + 3] = i % 2 ? 16 : -16;
        rows[i * 64 + 9] = 1e-30f;
    }
    assert_int_equal(kvant_cells_write(f.cells, index, 64, rows, 64, 1), KVANT_OK);
    const float *scale = kvant_cells_affine(f.cells).scale;
    assert_true(scale[3] == 4 && scale[9] == 4 / 256.0f && scale[0] == 4 / 256.0f);
    for (uint32_t j = 32; j < 64; j++)
        assert_true(scale[j] == 1); /* a head of zeros */
    drop(&f);
}

static void pool_of_one_freezes_early(void **state)
{
    (void)state;
    uint64_t rng = 40;
    fixture f = make("turboquant-4:center=first", 1, 640, 1);
    float rows[5 * 64], center[64], got[64];
    static const int64_t cells[5] = { 70, 71, 200, 300, 2 };
    shift_rows(rows, 5, 64, &rng);
    for (int i = 0; i < 5; i++)
        assert_int_equal(kvant_cells_write(f.cells, cells + i, 1, rows + i * 64, 64, 1), KVANT_OK);
    mean_of(rows, 3, 64, center); /* the third row is seen, then finds no page */
    assert_memory_equal(kvant_cells_affine(f.cells).center, center, sizeof center);
    for (int i = 0; i < 5; i++) {
        read_cell(&f, (uint32_t)cells[i], got);
        for (int j = 0; j < 64; j++)
            assert_true(fabsf(got[j] - rows[i * 64 + j]) < 15); /* variance 100 in the wide channels, 4 bits */
    }
    drop(&f);
}

/* An engine saves rows, centre and factors, and restores them elsewhere: codes are found again. */
static void state_with_centre(void **state)
{
    (void)state;
    uint64_t rng = 41;
    fixture f = make("int-4:center=first,norm=first,recent=40", 1, 500, 0),
            g = make("int-4:center=first,norm=first,recent=40", 1, 500, 0);
    float rows[400 * 64], saved[400 * 64], restored[400 * 64];
    int64_t index[400];
    for (int i = 0; i < 400; i++)
        index[i] = i;
    shift_rows(rows, 400, 64, &rng);
    assert_int_equal(kvant_cells_write(f.cells, index, 400, rows, 64, 1), KVANT_OK);
    assert_int_equal(kvant_cells_read(f.cells, 0, 400, saved, 64), KVANT_OK);
    kvant_affine affine = kvant_cells_affine(f.cells);
    assert_int_equal(kvant_cells_set_affine(g.cells, &affine), KVANT_OK);
    for (int i = 0; i < 400; i += 50)
        assert_int_equal(kvant_cells_write(g.cells, index + i, 50, saved + i * 64, 64, 1), KVANT_OK);
    assert_memory_equal(kvant_cells_affine(g.cells).center, affine.center, 64 * sizeof(float));
    assert_int_equal(kvant_cells_read(g.cells, 0, 400, restored, 64), KVANT_OK);
    /* A row's zero point and scale are its own again, unless binary32's rounding of c + s z moves an fp16
     * scale over a tie: then by 2^-11 of 15 steps at most. Numbers are at most 120 + 50; open pages add
     * fp16's 2^-11. */
    for (size_t j = 0; j < COUNT(saved); j++)
        assert_true(fabsf(saved[j] - restored[j]) <= 170 / 1024.0f);
    drop(&f);
    drop(&g);
}

/* A calibrated centre is there from the start and again after clearing, each head with its own. */
static void calibrated_centre_and_factors(void **state)
{
    (void)state;
    uint64_t rng = 42;
    kvant_codec *codecs[2];
    float rows[100 * 64], got[64];
    int64_t index[100];
    shift_rows(rows, 100, 64, &rng);
    for (uint32_t h = 0; h < 2; h++) { /* what kvant_codec_create_calibrated does with a calibration */
        codecs[h] = make_codec("turboquant-4", 32, KVANT_ROLE_K);
        codecs[h]->file_center = kvant_alloc(32, sizeof(float));
        codecs[h]->file_scale = kvant_alloc(32, sizeof(float));
        for (uint32_t j = 0; j < 32; j++) {
            codecs[h]->file_center[j] = (float)((32 * h + j) % 7 * 20);
            codecs[h]->file_scale[j] = (32 * h + j) % 5 == 0 ? 10 : 1;
        }
    }
    const kvant_codec *array[2] = { codecs[0], codecs[1] };
    kvant_cells_config config = {
        .size = sizeof config, .codecs = array, .n_kv_heads = 2, .n_streams = 1, .n_cells = 100
    };
    void *memory = aligned(kvant_cells_bytes(&config));
    kvant_cells *cells;
    codecs[0]->info.center = codecs[1]->info.center = KVANT_CENTER_FILE;
    codecs[0]->info.norm = codecs[1]->info.norm = KVANT_NORM_FILE;
    assert_int_equal(kvant_cells_create(&config, memory, &cells), KVANT_OK);
    for (int lap = 0; lap < 2; lap++) {
        double error = 0;
        for (uint32_t h = 0; h < 2; h++) {
            assert_memory_equal(kvant_cells_affine(cells).center + 32 * h, codecs[h]->file_center,
                                32 * sizeof(float));
            assert_memory_equal(kvant_cells_affine(cells).scale + 32 * h, codecs[h]->file_scale,
                                32 * sizeof(float));
        }
        for (int i = 0; i < 100; i++)
            index[i] = i;
        assert_int_equal(kvant_cells_write(cells, index, 100, rows, 64, 1), KVANT_OK);
        for (uint32_t i = 0; i < 100; i++) {
            assert_int_equal(kvant_cells_read(cells, i, 1, got, 64), KVANT_OK);
            for (uint32_t j = 0; j < 64; j++)
                error += pow((got[j] - rows[i * 64 + j]) / (j % 5 == 0 ? 10 : 1), 2) / 6400;
        }
        assert_true(error < 0.05); /* the codec sees variance 1 */
        kvant_cells_clear(cells);
    }
    kvant_cells_free(&cells);
    kvant_free(codecs[1]->file_scale);
    codecs[1]->file_scale = NULL;
    assert_int_equal(kvant_cells_create(&config, memory, &cells), KVANT_ERR_UNSUPPORTED);
    assert_null(cells);
    kvant_codec_free(&codecs[0]);
    kvant_codec_free(&codecs[1]);
    free(memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(centre_of_the_first_call), cmocka_unit_test(centre_and_factors_frozen_late),
        cmocka_unit_test(factors_have_a_floor),     cmocka_unit_test(pool_of_one_freezes_early),
        cmocka_unit_test(state_with_centre),        cmocka_unit_test(calibrated_centre_and_factors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
