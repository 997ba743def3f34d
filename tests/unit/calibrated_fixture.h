/* calibrated_fixture.h - rows, pages and calibration entries that tests of calibrated codecs
 * share. */
#ifndef KVANT_TESTS_CALIBRATED_FIXTURE_H
#define KVANT_TESTS_CALIBRATED_FIXTURE_H

#include "testing.h"

#include "calibrated.h"

#define DIM 32u
#define TOKENS KVANT_PAGE_TOKENS

static inline kvant_codec *create(const char *spec, uint32_t dim, kvant_role role,
                                  const kvant_calibration *c)
{
    kvant_codec *codec;
    char err[256] = "";
    if (kvant_codec_create_calibrated(spec, dim, role, TEST_SEED, c, 1, 1, &codec, err,
                                      sizeof err) != KVANT_OK)
        fail_msg("%s: %s", spec, err);
    return codec;
}

static inline kvant_calibration_entry entry_of(const kvant_calibration *c, uint32_t head,
                                               kvant_role role)
{
    kvant_calibration_entry entry = { .size = sizeof entry };
    assert_int_equal(kvant_calibration_get_entry(c, 1, head, role, &entry), KVANT_OK);
    return entry;
}

/* Fills rows that are distributed like the calibration's rows but are not the same rows. */
static inline void fill_rows(float *rows, uint32_t dim, uint64_t *rng)
{
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t j = 0; j < dim; j++)
            rows[t * dim + j] = test_normal(rng) * 0.6f + (float)((t % 5 * 7 + dim + j) % 11) -
                                (j == 3 ? 40.0f : 0.0f);
}

static inline void *encode(const kvant_codec *codec, const float *rows)
{
    kvant_codec_info info = info_of(codec);
    void *page = aligned(info.page_bytes);
    assert_ok(kvant_codec_encode(codec, NULL, rows, info.head_dim, 0, TOKENS, page));
    return page;
}

static inline void decode(const kvant_codec *codec, const void *page, float *rows)
{
    assert_ok(kvant_codec_decode(codec, NULL, page, 0, TOKENS, rows, info_of(codec).head_dim));
}

#endif
