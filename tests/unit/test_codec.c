/* test_codec.c - codecs through the public interface: the properties that every codec must have. */
#include "testing.h"

#include "../../src/base/half.h"

static const uint32_t odd_dims[] = { 1, 4, 5, 16, 24, 40, 63, 64, 80, 96, 112, 128, 192, 256, 512 };

typedef struct page {
    kvant_codec *codec;
    kvant_codec_info info;
    void *bytes;
} page;

static page page_of(kvant_codec *codec)
{
    page p = { .codec = codec };
    p.info = info_of(p.codec);
    p.bytes = aligned(p.info.page_bytes);
    return p;
}

static page make_page(const char *spec, uint32_t head_dim, kvant_role role)
{
    return page_of(make_codec(spec, head_dim, role));
}

/* Returns false if the codec refuses head_dim. */
static bool make_page_of_dim(const char *spec, uint32_t head_dim, kvant_role role, page *p)
{
    kvant_codec *codec;
    if (kvant_codec_create(spec, head_dim, role, TEST_SEED, &codec, NULL, 0) != KVANT_OK)
        return false;
    *p = page_of(codec);
    return true;
}

static void free_page(page *p)
{
    kvant_codec_free(&p->codec);
    free(p->bytes);
}

/* --- properties of every codec --- */

/* Bits of codes per channel, at least. A code that covers several channels has more bits than a
 * channel, and the nominal bits of some papers count metadata. */
static double channel_bits(const kvant_codec_info *info)
{
    return fmin(info->bits, info->nominal_bits);
}

CASE(round_trip_error_is_bounded)
{
    uint64_t rng = 5;
    for (size_t s = 0; s < COUNT(all_specs); s++)
        for (int role = 0; role < 2; role++) {
            page p = make_page(all_specs[s], 64, (kvant_role)role);
            float x[64 * 64], decoded[64 * 64];
            fill_normal(x, COUNT(x), &rng);
            assert_int_equal(kvant_codec_encode(p.codec, NULL, x, 64, 0, 64, p.bytes), KVANT_OK);
            assert_ok(kvant_codec_decode(p.codec, NULL, p.bytes, 0, 64, decoded, 64));
            double error = squared_distance(x, decoded, COUNT(x)) / COUNT(x);
            /* A uniform quantiser over a range r errs by at most r / (2 levels). A range of +-4.5
             * holds all 4096 normal numbers of this seed before and after a rotation (|N| > 4.5 has
             * probability 7e-6). Lloyd-Max codes err less, and raw numbers still less. */
            double levels = pow(2, fmin(channel_bits(&p.info), 16)) - 1;
            if ((strstr(all_specs[s], "sym") && !strstr(all_specs[s], "asym")) ||
                strstr(all_specs[s], "hybrid") || strstr(all_specs[s], "innerq"))
                levels -= 1;
            if (strcmp(all_specs[s], "bf16") ==
                0) /* relative rounding 2^-9, and a mean square of at most 1.1 */
                levels = 4.5 / (sqrt(1.1) * pow(2, -9));
            double worst = levels == 1 ? 0.3634 / (1 - 0.3634) * 1.1 : 4.5 / levels;
            if (!(error <= (levels == 1 ? worst : worst * worst) + 1e-6))
                fail_msg("%s: mse %g, at most %g", all_specs[s], error, worst * worst);
            free_page(&p);
        }
}

static void expect_consistent_sizes(const page *p, uint32_t dim)
{
    const kvant_codec_info *info = &p->info;
    assert_true(info->page_bytes % KVANT_PAGE_ALIGN == 0);
    assert_true(info->metadata_offset % 16 == 0 && info->metadata_offset >= info->code_bytes);
    assert_true(info->metadata_offset + info->metadata_bytes <= info->page_bytes);
    assert_true(info->page_bytes - info->metadata_offset - info->metadata_bytes < KVANT_PAGE_ALIGN);
    assert_true(info->code_bytes >= (size_t)64 * dim * (size_t)channel_bits(info) / 8);
    assert_true(fabs(info->true_bits - 8.0 * (double)info->page_bytes / (64.0 * dim)) < 1e-12);
}

/* Uses values; extreme_rows uses keys. Rotations of 512 channels take most of this program's
 * time. */
CASE(sizes_are_consistent)
{
    for (size_t s = 0; s < COUNT(all_specs); s++)
        for (size_t d = 0; d < COUNT(odd_dims); d++) {
            page p;
            if (!make_page_of_dim(all_specs[s], odd_dims[d], KVANT_ROLE_V, &p))
                continue;
            expect_consistent_sizes(&p, odd_dims[d]);
            free_page(&p);
        }
}

/* The sizes that README and FINDINGS state. */
CASE(true_bits_of_the_usual_codecs)
{
    static const struct {
        const char *spec;
        uint32_t head_dim;
        double bits;
    } rows[] = {
        { "turboquant-4", 64, 4.25 },
        { "turboquant-3", 64, 3.25 },
        { "turboquant-4", 128, 4.125 },
        { "int-4", 64, 4.5 },
        { "int-4:group=32", 64, 5.0 },
        { "int-4:sym", 64, 4.25 },
        { "bdr-4", 128, 4.25 },
        { "int-8", 64, 8.5 },
        { "f16", 64, 16 },
        { "f32", 80, 32 },
        { "int-2:axis=channel", 64, 3.0 },
    };
    for (size_t i = 0; i < COUNT(rows); i++)
        for (int role = 0; role < 2; role++) {
            page p = make_page(rows[i].spec, rows[i].head_dim, (kvant_role)role);
            assert_true(p.info.true_bits == rows[i].bits);
            free_page(&p);
        }
}

CASE(score_and_accumulate_agree_with_decode)
{
    uint64_t rng = 6;
    for (size_t s = 0; s < COUNT(all_specs); s++) {
        page p = make_page(all_specs[s], 64, KVANT_ROLE_K);
        float x[64 * 64], decoded[64 * 64], center[64], scale[64], q[64], rotated[64], scores[64],
            acc[64] = { 0 }, out[64];
        const kvant_affine affine = { center, scale };
        fill_normal(x, COUNT(x), &rng);
        fill_normal(center, 64, &rng);
        fill_normal(q, 64, &rng);
        for (uint32_t j = 0; j < 64; j++)
            scale[j] = 0.5f + (float)test_uniform(&rng);
        assert_int_equal(kvant_codec_encode(p.codec, &affine, x, 64, 0, 64, p.bytes), KVANT_OK);
        assert_ok(kvant_codec_decode(p.codec, &affine, p.bytes, 0, 64, decoded, 64));
        assert_int_equal(kvant_codec_transform_query(p.codec, &affine, q, rotated), KVANT_OK);
        assert_int_equal(kvant_codec_score(p.codec, p.bytes, rotated, 64, 1, scores), KVANT_OK);
        double weight_sum = 0;
        for (uint32_t t = 0; t < 64; t++) {
            double exact = 0, size = 0;
            for (uint32_t j = 0; j < 64; j++) {
                exact += (double)q[j] * (decoded[t * 64 + j] - center[j]);
                size += fabs((double)q[j] * (fabs(decoded[t * 64 + j]) + fabs(center[j])));
            }
            /* There are 64 products, two rotations of 6 levels and the subtraction here. They round
             * (64 + 2 x 7 + 2) times. Each rounding errs by 2^-24 of |q| |y|, which is at most
             * sqrt(64) times the largest sum of products. Factors are 0.5 to 1.5 for rows and their
             * inverse for queries, which is a factor of 3. */
            assert_true(fabs(scores[t] - exact) <= 3 * 80 * 8 * pow(2, -24) * size + 1e-6);
            scores[t] = (float)test_uniform(&rng);
            weight_sum += scores[t];
        }
        assert_int_equal(kvant_codec_accumulate(p.codec, p.bytes, scores, 1, acc, 64), KVANT_OK);
        assert_ok(kvant_codec_transform_output(p.codec, &affine, (float)weight_sum, acc, out));
        for (uint32_t j = 0; j < 64; j++) {
            double exact = 0;
            for (uint32_t t = 0; t < 64; t++)
                exact += (double)scores[t] * decoded[t * 64 + j];
            assert_true(fabs(out[j] - exact) <= 3 * 80 * 8 * pow(2, -24) * 64 * 6);
        }
        free_page(&p);
    }
}

CASE(tokens_are_independent)
{
    uint64_t rng = 8;
    for (size_t s = 0; s < COUNT(all_specs); s++)
        for (int role = 0; role < 2; role++) {
            page all = make_page(all_specs[s], 80, (kvant_role)role);
            page pieces = make_page(all_specs[s], 80, (kvant_role)role);
            float x[64 * 80];
            fill_normal(x, COUNT(x), &rng);
            assert_ok(kvant_codec_encode(all.codec, NULL, x, 80, 0, 64, all.bytes));
            uint32_t block = all.info.block_tokens;
            memset(pieces.bytes, 0, pieces.info.page_bytes);
            for (uint32_t t = 64; t > 0; t -= block) /* backwards, over other codes */
                assert_ok(kvant_codec_encode(pieces.codec, NULL, x + (64 - t) * 80, 80, 64 - t,
                                             block, pieces.bytes));
            for (uint32_t t = 0; t < 64; t += block)
                assert_ok(
                    kvant_codec_encode(pieces.codec, NULL, x + t * 80, 80, t, block, pieces.bytes));
            assert_memory_equal(all.bytes, pieces.bytes, all.info.page_bytes);
            free_page(&all);
            free_page(&pieces);
        }
}

static void expect_refused(const page *p, const float *x, kvant_status expected, const char *spec)
{
    void *before = aligned(p->info.page_bytes);
    memcpy(before, p->bytes, p->info.page_bytes);
    kvant_status status = kvant_codec_encode(p->codec, NULL, x, p->info.head_dim, 0, 64, p->bytes);
    if (status != expected)
        fail_msg("%s: %s, expected %s", spec, kvant_strerror(status), kvant_strerror(expected));
    assert_memory_equal(before, p->bytes, p->info.page_bytes);
    free(before);
}

CASE(bad_numbers_are_refused_and_nothing_is_written)
{
    uint64_t rng = 9;
    for (size_t s = 0; s < COUNT(all_specs); s++) {
        page p = make_page(all_specs[s], 64, KVANT_ROLE_V);
        float x[64 * 64];
        fill_normal(x, COUNT(x), &rng);
        assert_int_equal(kvant_codec_encode(p.codec, NULL, x, 64, 0, 64, p.bytes), KVANT_OK);
        x[63 * 64 + 17] = NAN;
        expect_refused(&p, x, KVANT_ERR_NONFINITE, all_specs[s]);
        x[63 * 64 + 17] = -INFINITY;
        expect_refused(&p, x, KVANT_ERR_NONFINITE, all_specs[s]);
        for (uint32_t j = 0; j < 64; j++)
            x[63 * 64 + j] = j % 2 ? 3e38f : -3e38f;
        if (strcmp(all_specs[s], "f32") != 0 && strcmp(all_specs[s], "bf16") != 0)
            expect_refused(&p, x, KVANT_ERR_RANGE, all_specs[s]);
        free_page(&p);
    }
}

/* Zeros, denormals and numbers up to the limit of fp16 are encoded. The decoded rows are finite and
 * zeros stay zero. */
CASE(extreme_rows)
{
    static const float magnitudes[] = { 0, 1e-45f, 1e-40f, 1e-8f, 6e-5f, 1e3f, 6e4f };
    for (size_t s = 0; s < COUNT(all_specs); s++)
        for (size_t d = 0; d < COUNT(odd_dims); d++) {
            const uint32_t dim = odd_dims[d];
            page p;
            if (!make_page_of_dim(all_specs[s], dim, KVANT_ROLE_K, &p))
                continue;
            expect_consistent_sizes(&p, dim);
            float *x = calloc((size_t)64 * dim, sizeof *x),
                  *decoded = calloc((size_t)64 * dim, sizeof *decoded);
            for (size_t m = 0; m < COUNT(magnitudes); m++) {
                for (uint32_t i = 0; i < 64 * dim; i++)
                    x[i] = i % 7 == 0 ? magnitudes[m] / sqrtf((float)dim) : 0;
                assert_ok(kvant_codec_encode(p.codec, NULL, x, dim, 0, 64, p.bytes));
                assert_ok(kvant_codec_decode(p.codec, NULL, p.bytes, 0, 64, decoded, dim));
                for (uint32_t i = 0; i < 64 * dim; i++) {
                    assert_true(isfinite(decoded[i]));
                    if (magnitudes[m] == 0)
                        assert_true(decoded[i] == 0);
                }
            }
            free(x);
            free(decoded);
            free_page(&p);
        }
}

CASE(zero_pages_decode_to_zeros)
{
    for (size_t s = 0; s < COUNT(all_specs); s++) {
        page p = make_page(all_specs[s], 96, KVANT_ROLE_V);
        float decoded[64 * 96];
        assert_int_equal(kvant_codec_decode(p.codec, NULL, p.bytes, 0, 64, decoded, 96), KVANT_OK);
        for (uint32_t i = 0; i < COUNT(decoded); i++)
            assert_true(decoded[i] == 0);
        free_page(&p);
    }
}

CASE(foreign_bytes_decode_without_harm)
{
    uint64_t rng = 10;
    for (size_t s = 0; s < COUNT(all_specs); s++) {
        page p = make_page(all_specs[s], 80, KVANT_ROLE_V);
        float decoded[64 * 80];
        for (size_t i = 0; i < p.info.page_bytes; i++)
            ((uint8_t *)p.bytes)[i] = (uint8_t)test_random(&rng);
        assert_int_equal(kvant_codec_decode(p.codec, NULL, p.bytes, 0, 64, decoded, 80), KVANT_OK);
        free_page(&p);
    }
}

CASE(bad_arguments)
{
    page p = make_page("int-4:axis=channel", 64, KVANT_ROLE_K);
    float x[64 * 64] = { 0 };
    assert_int_equal(kvant_codec_encode(p.codec, NULL, x, 64, 0, 16, p.bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_codec_encode(p.codec, NULL, x, 64, 16, 32, p.bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_codec_encode(p.codec, NULL, x, 64, 32, 64, p.bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_codec_encode(p.codec, NULL, x, 64, 0, 0, p.bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_codec_encode(p.codec, NULL, x, 63, 0, 64, p.bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_codec_encode(p.codec, NULL, NULL, 64, 0, 64, p.bytes),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_codec_encode(NULL, NULL, x, 64, 0, 64, p.bytes), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_codec_decode(p.codec, NULL, p.bytes, 60, 5, x, 64), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_codec_decode(p.codec, NULL, p.bytes, UINT32_MAX, 2, x, 64),
                     KVANT_ERR_ARGUMENT);
    kvant_codec_info info = { .size = 1 };
    assert_int_equal(kvant_codec_get_info(p.codec, &info), KVANT_ERR_ARGUMENT);
    free_page(&p);
    kvant_codec_free(NULL);
}

RUN_CASES(NULL, NULL)
