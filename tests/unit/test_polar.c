/* test_polar.c - polar against OCTOPUS's figures for PolarQuant, and its codebooks against angles
 * from the C library. */
#include "distortion.h"
#include "fidelity.h"

#include "../../src/math/polar_angles.h"
#include "../../src/math/trig.h"

CASE(sine_and_cosine)
{
    for (int i = 0; i <= 1000; i++) {
        double s, c, x = KVANT_HALF_PI * i / 1000;
        kvant_sin_cos(x, &s, &c);
        assert_true(fabs(s - sin(x)) < 1e-15 && fabs(c - cos(x)) < 1e-15);
    }
}

/* With 6400 keys and 102400 products, the standard errors of mse and products are below 0.3 %. The
 * table has few queries for each seed, which allows 2 %. The table prints 1 - cosine with four
 * digits; half a digit is 0.7 % of it at 4 bits. */
CASE(figures_of_octopus_table_1)
{
    static const fidelity paper[] = { { 0.8902, 0.2197, 4.200 },
                                      { 0.9715, 0.0571, 2.142 },
                                      { 0.9928, 0.0145, 1.079 } };
    for (uint32_t bits = 2; bits <= 4; bits++) {
        char spec[32];
        snprintf(spec, sizeof spec, "polar-%u:scale=norm", bits);
        fidelity want = paper[bits - 2], got = measure_fidelity(spec, 128, 100, 77);
        if (!(fabs((1 - got.cosine) / (1 - want.cosine) - 1) <= 0.02 &&
              fabs(got.mse / want.mse - 1) <= 0.02 && fabs(got.product / want.product - 1) <= 0.02))
            fail_msg("%s: cosine %.4f (%.4f), mse %.4f (%.4f), inner product %.3f (%.3f)", spec,
                     got.cosine, want.cosine, got.mse, want.mse, got.product, want.product);
    }
}

/* Each level is the centroid of its cell, and each threshold lies halfway between two levels. Both
 * are computed by 2e5 trapezoids on at most pi / 2 with the C library's functions. Their error is
 * the error of the cells' ends, 1e-5 of a cell, times a centroid's slope below 1. Levels and
 * thresholds are binary32 vectors, which adds 2^-24 each way. */
CASE(angle_books_are_optimal)
{
    static const uint32_t sizes[][2] = { { 2, 2 },     { 4, 4 },   { 16, 16 }, { 64, 64 },
                                         { 256, 256 }, { 64, 16 }, { 32, 2 },  { 256, 254 } };
    enum { STEPS = 200000 };
    for (size_t k = 0; k < COUNT(sizes); k++)
        for (uint32_t bits = 2; bits <= 4; bits++) {
            kvant_polar_book book;
            kvant_polar_angle_book(sizes[k][0], sizes[k][1], bits, &book);
            uint32_t n = 1u << bits, cell = 0;
            double mass = 0, moment = 0;
            for (int i = 0; i <= STEPS; i++) {
                double psi = KVANT_HALF_PI * i / STEPS;
                double next =
                    cell + 1 < n ? atan2(book.sin_threshold[cell], book.cos_threshold[cell]) : 2;
                double level = atan2(book.sin_level[cell], book.cos_level[cell]);
                if (psi > next || i == STEPS) {
                    assert_true(fabs(level - moment / mass) < 1.6e-5);
                    if (cell + 1 < n) {
                        double other = atan2(book.sin_level[cell + 1], book.cos_level[cell + 1]);
                        assert_true(other > level && fabs(next - (level + other) / 2) < 2e-7);
                        cell++;
                    }
                    mass = moment = 0;
                }
                double f = pow(1.41421356 * cos(psi), sizes[k][0] - 1.0) *
                           pow(1.41421356 * sin(psi), sizes[k][1] - 1.0);
                mass += f;
                moment += f * psi;
            }
            assert_int_equal(cell, n - 1);
        }
}

typedef struct part {
    double radius;
    uint32_t size, first; /* numbers of the part in the row */
} part;

static double nearest(const float *sines, const float *cosines, uint32_t n, double angle)
{
    double best = 0, distance = 10;
    for (uint32_t i = 0; i < n; i++) {
        double level = atan2(sines[i], cosines[i]),
               rotate_by_rope = fabs(remainder(angle - level, 4 * KVANT_HALF_PI));
        if (rotate_by_rope < distance) {
            distance = rotate_by_rope;
            best = level;
        }
    }
    return best;
}

/* The definition in other words: parts with arc tangents. Every number of the second part is
 * multiplied by the sine, every number of the first part by the cosine. */
static void reference(const float *x, uint32_t d, uint32_t bits, double *direction)
{
    static part parts[512];
    uint32_t n = d;
    for (uint32_t i = 0; i < d; i++) {
        parts[i] = (part){ x[i], 1, i };
        direction[i] = 1;
    }
    while (n > 1) {
        uint32_t pairs = n / 2;
        for (uint32_t i = 0; i < pairs; i++) {
            part a = parts[2 * i], b = parts[2 * i + 1];
            kvant_polar_book book;
            if (a.size == 1)
                kvant_polar_circle_book(bits, &book);
            else
                kvant_polar_angle_book(a.size, b.size, bits, &book);
            double angle =
                nearest(book.sin_level, book.cos_level, 1u << bits, atan2(b.radius, a.radius));
            for (uint32_t j = 0; j < a.size; j++)
                direction[a.first + j] *= cos(angle);
            for (uint32_t j = 0; j < b.size; j++)
                direction[b.first + j] *= sin(angle);
            parts[i] =
                (part){ sqrt(a.radius * a.radius + b.radius * b.radius), a.size + b.size, a.first };
        }
        if (n % 2)
            parts[pairs] = parts[n - 1];
        n = pairs + n % 2;
    }
}

/* Decoded rows differ from the reference by the fp16 norm, at most 2^-11 of each number, and by the
 * rounding of up to 9 products. */
CASE(rows_follow_the_definition)
{
    static const uint32_t dims[] = { 2, 4, 6, 10, 64, 80, 96, 112, 128, 192, 250, 256, 512 };
    uint64_t rng = 3;
    for (size_t k = 0; k < COUNT(dims); k++)
        for (uint32_t bits = 2; bits <= 4; bits++) {
            uint32_t d = dims[k];
            char spec[64];
            snprintf(spec, sizeof spec, "polar-%u:scale=norm,rotate=none", bits);
            kvant_codec *codec = make_codec(spec, d, KVANT_ROLE_V);
            void *page = aligned(info_of(codec).page_bytes);
            static float x[512], decoded[512];
            static double direction[512];
            for (uint32_t token = 0; token < 2; token++) {
                double norm = 0;
                fill_normal(x, d, &rng);
                for (uint32_t j = 0; j < d; j++)
                    norm += (double)x[j] * x[j];
                reference(x, d, bits, direction);
                assert_int_equal(kvant_codec_encode(codec, NULL, x, d, token, 1, page), KVANT_OK);
                assert_ok(kvant_codec_decode(codec, NULL, page, token, 1, decoded, d));
                for (uint32_t j = 0; j < d; j++) {
                    double want = sqrt(norm) * direction[j];
                    if (!(fabs(decoded[j] - want) <= fabs(want) * (pow(2, -11) + 40 * pow(2, -24))))
                        fail_msg("%s at %u: number %u is %g, not %g", spec, d, j, decoded[j], want);
                }
            }
            free(page);
            kvant_codec_free(&codec);
        }
}

/* With the unbiased scale, <y, decoded y> = |y|^2 up to fp16's rounding of the scale and d
 * roundings of the sums. */
CASE(unbiased_scale)
{
    uint64_t rng = 4;
    kvant_codec *codec = make_codec("polar-2", 96, KVANT_ROLE_K);
    void *page = aligned(info_of(codec).page_bytes);
    float x[96], decoded[96];
    for (int i = 0; i < 100; i++) {
        double squares = 0, product = 0;
        fill_normal(x, 96, &rng);
        assert_int_equal(kvant_codec_encode(codec, NULL, x, 96, 5, 1, page), KVANT_OK);
        assert_int_equal(kvant_codec_decode(codec, NULL, page, 5, 1, decoded, 96), KVANT_OK);
        for (uint32_t j = 0; j < 96; j++) {
            squares += (double)x[j] * x[j];
            product += (double)x[j] * decoded[j];
        }
        assert_true(fabs(product / squares - 1) <= pow(2, -11) + 400 * pow(2, -24));
    }
    free(page);
    kvant_codec_free(&codec);
}

/* A number at the end of an axis, on a diagonal or at zero is a tie, and the lower code wins. */
CASE(ties)
{
    static const struct {
        float x, y;
        double level; /* in sectors of pi / 4, from the middle of the lowest */
    } rows[] = { { 1, 0, 0 },  { 1, 1, 0 },   { 0, 1, 1 },  { -1, 1, 2 },
                 { -1, 0, 3 }, { -1, -1, 4 }, { 0, -1, 5 }, { 1, -1, 6 } };
    kvant_codec *codec = make_codec("polar-3:scale=norm,rotate=none", 2, KVANT_ROLE_K);
    void *page = aligned(info_of(codec).page_bytes);
    for (size_t i = 0; i < COUNT(rows); i++) {
        float x[2] = { rows[i].x, rows[i].y }, decoded[2];
        assert_int_equal(kvant_codec_encode(codec, NULL, x, 2, 0, 1, page), KVANT_OK);
        assert_int_equal(kvant_codec_decode(codec, NULL, page, 0, 1, decoded, 2), KVANT_OK);
        double angle = atan2(decoded[1], decoded[0]),
               want = KVANT_HALF_PI / 2 * (rows[i].level + 0.5);
        assert_true(fabs(remainder(angle - want, 4 * KVANT_HALF_PI)) < 1e-6);
    }
    free(page);
    kvant_codec_free(&codec);
}

CASE(odd_head_dims_are_refused)
{
    expect_bad_spec("polar-3", 63, KVANT_ERR_UNSUPPORTED, "63");
    expect_bad_spec("polar-5", 64, KVANT_ERR_SPEC, "2 to 4");
    expect_bad_spec("polar", 64, KVANT_ERR_SPEC, "");
    expect_bad_spec("polar-3.9", 72, KVANT_ERR_UNSUPPORTED, "");
}

RUN_CASES(NULL, NULL)
