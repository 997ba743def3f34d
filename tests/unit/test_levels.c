/* test_levels.c - whole pages have the same bytes at every CPU level (tests/kernels tests the loops
 * one by one). */
#include "testing.h"

/* A CPU level may choose the sign of the zero at the end of a range. Pages must not depend on
 * it. */
CASE(zeros_of_both_signs_leave_no_trace)
{
    static const char *const specs[] = { "int-4", "int-4:sym",    "int-4:group=16",
                                         "bdr-4", "turboquant-4", "int-3:group=32,hybrid" };
    uint64_t rng = 3;
    for (size_t i = 0; i < COUNT(specs); i++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *codec = make_codec(specs[i], 64, (kvant_role)role);
            kvant_codec_info info = info_of(codec);
            float rows[64 * 64];
            for (uint32_t j = 0; j < 64 * 64; j++)
                rows[j] = test_random(&rng) >> 63 ? -0.0f : 0.0f;
            uint8_t *page = aligned(info.page_bytes), *want = aligned(info.page_bytes);
            assert_int_equal(kvant_set_cpu_level(KVANT_CPU_C), KVANT_OK);
            assert_int_equal(kvant_codec_encode(codec, NULL, rows, 64, 0, 64, want), KVANT_OK);
            assert_int_equal(kvant_set_cpu_level(KVANT_CPU_AUTO), KVANT_OK);
            assert_int_equal(kvant_codec_encode(codec, NULL, rows, 64, 0, 64, page), KVANT_OK);
            assert_memory_equal(page, want, info.page_bytes);
            free(page);
            free(want);
            kvant_codec_free(&codec);
        }
}

/* Every codec writes the same pages at every level that the machine has. */
CASE(pages_do_not_tell_the_level)
{
    static const uint32_t dims[] = { 40, 64, 80, 128 };
    uint64_t rng = 5;
    for (size_t s = 0; s < COUNT(all_specs); s++)
        for (size_t d = 0; d < 2 * COUNT(dims); d++) {
            kvant_codec *codec;
            uint32_t dim = dims[d / 2];
            if (kvant_codec_create(all_specs[s], dim, (kvant_role)(d % 2), TEST_SEED, &codec, NULL,
                                   0) != KVANT_OK)
                continue; /* a spec that does not support this head_dim, or needs a calibration */
            kvant_codec_info info = info_of(codec);
            float *rows = malloc((size_t)64 * dim * sizeof *rows);
            uint8_t *page = aligned(info.page_bytes), *want = aligned(info.page_bytes);
            fill_normal(rows, (size_t)64 * dim, &rng);
            assert_int_equal(kvant_set_cpu_level(KVANT_CPU_C), KVANT_OK);
            assert_int_equal(kvant_codec_encode(codec, NULL, rows, dim, 0, 64, want), KVANT_OK);
            for (size_t l = 0; l < COUNT(cpu_levels); l++) {
                if (!use_level(cpu_levels[l]))
                    continue;
                memset(page, 0, info.page_bytes);
                assert_int_equal(kvant_codec_encode(codec, NULL, rows, dim, 0, 64, page), KVANT_OK);
                if (memcmp(page, want, info.page_bytes) != 0)
                    fail_msg("%s at %u: other bytes at level %s", all_specs[s], (unsigned)dim,
                             kvant_cpu_level_name(cpu_levels[l]));
            }
            kvant_set_cpu_level(KVANT_CPU_AUTO);
            free(rows);
            free(page);
            free(want);
            kvant_codec_free(&codec);
        }
}

RUN_CASES(NULL, NULL)
