/* test_octopus.c - octopus against the figures of its paper (tables 1, 4 and 5, appendix E's
 * claim), and its codebooks against independent integrals. Also the cases that the paper leaves
 * open: head_dims that 3 does not divide, hopeless rows, refused options. */
#include "distortion.h"
#include "fidelity.h"

#include "../../src/codec/papers/octopus.h"
#include "../../src/math/octahedral.h"

/* --- codebooks --- */

/* Mean and mass of density over a cell, by the midpoint rule. */
typedef double density_fn(double x, double parameter);

static double centroid(density_fn *density, double parameter, double low, double high)
{
    enum { STEPS = 2000 };
    double mass = 0, moment = 0;
    for (int i = 0; i < STEPS; i++) {
        double x = low + (high - low) * (i + 0.5) / STEPS, f = density(x, parameter);
        mass += f;
        moment += x * f;
    }
    return moment / mass;
}

/* Density of |u| on the sphere, integrated over w: a point q of the octahedron has |q|^-3 per unit
 * of the square. */
static double direction_density(double u, double unused)
{
    enum { STEPS = 400 };
    double sum = 0;
    for (int i = 0; i < STEPS; i++) {
        double w = (i + 0.5) / STEPS, z = 1 - u - w;
        double x = z < 0 ? 1 - w : u, y = z < 0 ? 1 - u : w;
        sum += pow(x * x + y * y + z * z, -1.5);
    }
    return sum;
}

static double norm_density(double r, double d)
{
    return r < sqrt(d) ? r * r * pow(1 - r * r / d, (d - 5) / 2) : 0;
}

/* Every level is the centroid of its cell. Newton's method ends at 1e-15 and binary32 rounds by
 * 2^-25. The midpoint rules of this file err by less than 1e-5 of a cell's width: curvature times
 * step squared. The kink of the fold costs 1 / STEPS^2 more. */
CASE(directions_are_lloyd_max)
{
    for (uint32_t bits = 1; bits <= KVANT_OCTAHEDRAL_BITS; bits++) {
        float level[256];
        uint32_t n = 1u << bits;
        kvant_octahedral_codebook(bits, level);
        for (uint32_t k = n / 2; k < n; k += 1 + n / 16) {
            double low = k > n / 2 ? (level[k - 1] + level[k]) / 2.0 : 0;
            double high = k + 1 < n ? (level[k] + level[k + 1]) / 2.0 : 1;
            assert_true(fabs(level[k] - centroid(direction_density, 0, low, high)) <=
                        1e-5 * (high - low) + 6e-8);
            assert_true(level[n - 1 - k] == -level[k]);
        }
    }
}

CASE(norms_are_lloyd_max)
{
    static const uint32_t dims[] = { 7, 16, 64, 80, 128, 512 };
    for (size_t i = 0; i < COUNT(dims); i++) {
        double d = dims[i];
        float level[128];
        kvant_triplet_norm_codebook(dims[i], 0, level);
        double mean = sqrt(d) * exp(lgamma(2) - lgamma(1.5) + lgamma(d / 2) - lgamma((d + 1) / 2));
        assert_true(fabs(level[0] / mean - 1) <= 1.2e-7);
        for (uint32_t bits = 1; bits <= KVANT_TRIPLET_NORM_BITS; bits++) {
            uint32_t n = 1u << bits;
            kvant_triplet_norm_codebook(dims[i], bits, level);
            for (uint32_t k = 0; k < n; k++) {
                double low = k ? (level[k - 1] + level[k]) / 2.0 : 0;
                /* Beyond 12 the density of chi with 3 degrees of freedom is e^-72, so the rest is
                 * negligible. */
                double high = k + 1 < n ? (level[k] + level[k + 1]) / 2.0 : fmin(12, sqrt(d));
                assert_true(fabs(level[k] - centroid(norm_density, d, low, high)) <=
                            1e-4 * (high - low) + 3e-7);
            }
        }
    }
}

/* --- the octahedral map --- */

/* Equations 5 and 6 of the paper, written as it writes them. */
CASE(the_map_is_the_papers)
{
    uint64_t rng = 3;
    for (int i = 0; i < 10000; i++) {
        double n[3], length = 0, xi, eta, back = 0, cosine = 0;
        float p[3];
        for (int j = 0; j < 3; j++) {
            n[j] = test_normal(&rng);
            length += fabs(n[j]);
        }
        double x = n[0] / length, y = n[1] / length, z = n[2] / length;
        xi = z >= 0 ? x : (x < 0 ? -1 : 1) * (1 - fabs(y));
        eta = z >= 0 ? y : (y < 0 ? -1 : 1) * (1 - fabs(x));
        kvant_octahedral_point((float)xi, (float)eta, &p[0], &p[1], &p[2]);
        /* xi and eta are rounded to 2^-25, and the map's sums add twice as much */
        for (int j = 0; j < 3; j++)
            assert_true(fabs(p[j] - n[j] / length) <= 4 * pow(2, -25));
        for (int j = 0; j < 3; j++) {
            back += (double)p[j] * p[j];
            cosine += n[j] * p[j];
        }
        assert_true(cosine > 0 && back > 0.33);
    }
}

/* --- the paper's figures, at head_dim 128 --- */

static void expect_near(const char *what, const char *spec, double got, double want,
                        double tolerance)
{
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%s: %s %.5f, the paper has %.5f +- %.5f", spec, what, got, want, tolerance);
}

/* Table 1: scalar rounding. The test allows 2 % and half a unit of the last printed digit. Its own
 * sampling error is smaller. An mse of 4096 rows errs by sqrt(2 / 128 / 4096). This is 0.2 %. A
 * mean product error of 1024 queries, whose length varies by 1 / sqrt(256), errs by as much. */
CASE(table_1)
{
    static const struct {
        const char *spec;
        double cosine, mse, product;
    } rows[] = {
        { "octopus-2:round=scalar,scale=norm", 0.9547, 0.0897, 2.682 },
        { "octopus-3:round=scalar,scale=norm", 0.9871, 0.0260, 1.444 },
        { "octopus-4:round=scalar,scale=norm", 0.9965, 0.0071, 0.753 },
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        fidelity q = measure_fidelity(rows[i].spec, 128, 64, 2024);
        expect_near("cosine", rows[i].spec, q.cosine, rows[i].cosine,
                    0.02 * (1 - rows[i].cosine) + 0.00005);
        expect_near("mse", rows[i].spec, q.mse, rows[i].mse, 0.02 * rows[i].mse + 0.00005);
        expect_near("product", rows[i].spec, q.product, rows[i].product,
                    0.02 * rows[i].product + 0.0005);
    }
}

/* Table 1, OCTOPUS-QJL: cosine and mse are printed for the codes without the sketch, products for
 * the codes with it. */
CASE(table_1_sketched)
{
    static const double product[] = { 2.015, 1.084, 0.565 };
    for (uint32_t bits = 2; bits <= 4; bits++) {
        char spec[64];
        snprintf(spec, sizeof spec, "octopus-%u:round=scalar,qjl", bits);
        fidelity q = measure_fidelity(spec, 128, 64, 2024);
        expect_near("product", spec, q.product, product[bits - 2],
                    0.02 * product[bits - 2] + 0.0005);
    }
}

/* Joint rounding chooses how the last triplet is padded. So 2 of 128 channels may lose all their
 * error, and no more. */
static void expect_joint(const char *spec, double mse, double want)
{
    double least = want * 126 / 128, tolerance = 0.02 * want + 0.00005;
    if (!(mse >= least - tolerance && mse <= want + tolerance))
        fail_msg("%s: mse %.5f, the paper has %.5f - %.5f +- %.5f", spec, mse, want, want - least,
                 tolerance);
}

/* Table 5. Its b = 1 spends a bit on each of the three numbers (split=1.1), because b - 1 bits had
 * no codebook there. Its 2x2 is round=next, and it pads with zeros. A 2x2 search with the two
 * levels around the number is as good as 3x3. */
CASE(table_5)
{
    static const double scalar[] = { 0.6022, 0.0897, 0.0261, 0.0071 },
                        full[] = { 0.5172, 0.0832, 0.0243, 0.0067 },
                        next[] = { 0.5172, 0.0858, 0.0250, 0.0068 };
    static const char *const joint[] = { "2x2", "3x3", "full" };
    for (uint32_t bits = 1; bits <= 4; bits++) {
        char spec[64];
        const char *split = bits == 1 ? ",split=1.1" : "";
        snprintf(spec, sizeof spec, "octopus-%u:round=scalar,scale=norm%s", bits, split);
        double want = scalar[bits - 1];
        expect_near("mse", spec, measure_fidelity(spec, 128, 64, 2024).mse, want,
                    0.02 * want + 0.00005);
        for (size_t i = 0; i < COUNT(joint); i++) {
            snprintf(spec, sizeof spec, "octopus-%u:round=%s,scale=norm%s", bits, joint[i], split);
            expect_joint(spec, measure_fidelity(spec, 128, i == 2 ? 16 : 64, 2024).mse,
                         full[bits - 1]);
        }
        for (int i = 0; i < 2; i++) {
            snprintf(spec, sizeof spec, "octopus-%u:round=%s,pad=zero,scale=norm%s", bits,
                     i ? "3x3" : "next", split);
            want = i ? full[bits - 1] : next[bits - 1];
            expect_near("mse", spec, measure_fidelity(spec, 128, 64, 2024).mse, want,
                        0.02 * want + 0.00005);
        }
    }
}

/* Table 4: the mse of (b + delta, b - delta). Only delta = 1 is better than 0. */
CASE(table_4)
{
    static const struct {
        const char *spec;
        double mse;
        int change; /* sign of the change against the uniform split */
    } rows[] = {
        { "octopus-2:split=2.2", 0.1409, 0 },  { "octopus-2:split=1.3", 0.4555, 1 },
        { "octopus-2:split=3.1", 0.0831, -1 }, { "octopus-3:split=3.3", 0.0374, 0 },
        { "octopus-3:split=1.5", 0.4501, 1 },  { "octopus-3:split=2.4", 0.1273, 1 },
        { "octopus-3:split=4.2", 0.0243, -1 }, { "octopus-3:split=5.1", 0.0537, 1 },
        { "octopus-4:split=4.4", 0.0096, 0 },  { "octopus-4:split=2.6", 0.1262, 1 },
        { "octopus-4:split=3.5", 0.0332, 1 },  { "octopus-4:split=5.3", 0.0067, -1 },
        { "octopus-4:split=6.2", 0.0166, 1 },
    };
    double uniform = 0;
    for (size_t i = 0; i < COUNT(rows); i++) {
        char spec[64];
        snprintf(spec, sizeof spec, "%s,scale=norm", rows[i].spec);
        double mse = measure_fidelity(spec, 128, 64, 2024).mse;
        expect_joint(spec, mse, rows[i].mse);
        if (rows[i].change == 0)
            uniform = mse;
        assert_true(rows[i].change == 0 || (mse > uniform) == (rows[i].change > 0));
    }
}

/* --- rounding --- */

static void codes_of(const octopus_book *book, kvant_triplet_rounding rounding,
                     kvant_cpu_level level, const kvant_triplets *in, kvant_triplets *out)
{
    kvant_triplet_book b = book->triplets;
    b.rounding = rounding;
    *out = *in;
    kvant_kernels_get(level)->triplet_codes(&b, KVANT_MAX_TRIPLETS, out);
}

static void fill_triplets(kvant_triplets *t, uint64_t *rng)
{
    memset(t, 0, sizeof *t);
    fill_normal(t->x, KVANT_MAX_TRIPLETS, rng);
    fill_normal(t->y, KVANT_MAX_TRIPLETS, rng);
    fill_normal(t->z, KVANT_MAX_TRIPLETS, rng);
}

/* Appendix E: a 3x3 search finds the same codes as a search of all codes. So does a 2x2 search of
 * the levels around the number. */
CASE(local_search_finds_the_best)
{
    uint64_t rng = 17;
    for (uint32_t bits = 2; bits <= 5; bits++) {
        static octopus_book book;
        kvant_octopus_book_init(&book, 128, bits, bits - 1);
        for (uint32_t n = 0; n < 20000; n += KVANT_MAX_TRIPLETS) {
            static kvant_triplets t, two, three, full;
            fill_triplets(&t, &rng);
            codes_of(&book, KVANT_ROUND_2X2, KVANT_CPU_AUTO, &t, &two);
            codes_of(&book, KVANT_ROUND_3X3, KVANT_CPU_AUTO, &t, &three);
            codes_of(&book, KVANT_ROUND_FULL, KVANT_CPU_AUTO, &t, &full);
            assert_memory_equal(three.code, full.code, sizeof full.code);
            assert_memory_equal(two.code, full.code, sizeof full.code);
        }
    }
}

/* Tries all codes with the decoder, in double precision. No code is closer than the chosen code. */
CASE(codes_minimise_the_error)
{
    uint64_t rng = 18;
    static octopus_book book;
    kvant_octopus_book_init(&book, 6, 3, 2);
    book.triplets.rounding = KVANT_ROUND_3X3;
    for (int i = 0; i < 200; i++) {
        float y[6], decoded[6];
        uint32_t codes[2];
        fill_normal(y, 6, &rng);
        float scale = kvant_octopus_quantize(&book, kvant_kernels_get(KVANT_CPU_AUTO), y, codes);
        kvant_octopus_dequantize(&book, codes, scale, decoded);
        double chosen = squared_distance(y, decoded, 3), least = chosen;
        for (uint32_t code = 0; code < 1u << 8; code++) {
            codes[0] = code;
            kvant_octopus_dequantize(&book, codes, scale, decoded);
            least = fmin(least, squared_distance(y, decoded, 3));
        }
        /* ties are decided by roundings of binary32 on numbers of at most 3 scale */
        assert_true(chosen <= least + 1e-5 * scale * scale);
    }
}

CASE(levels_agree)
{
    uint64_t rng = 19;
    for (size_t l = 0; l < COUNT(cpu_levels); l++) {
        if (!has_level(cpu_levels[l]))
            continue;
        for (uint32_t bits = 1; bits <= KVANT_OCTAHEDRAL_BITS; bits++)
            for (int rounding = bits <= 5 ? KVANT_ROUND_FULL : KVANT_ROUND_SCALAR;
                 rounding <= KVANT_ROUND_3X3; rounding++) {
                static octopus_book book;
                static kvant_triplets t, portable, vector;
                kvant_octopus_book_init(&book, 128, bits, bits - 1);
                fill_triplets(&t, &rng);
                t.x[3] = t.y[3] = t.z[3] = 0;
                t.y[4] = -0.0f;
                t.x[5] = t.y[5] = t.z[5] = 1e-45f;
                codes_of(&book, (kvant_triplet_rounding)rounding, KVANT_CPU_C, &t, &portable);
                codes_of(&book, (kvant_triplet_rounding)rounding, cpu_levels[l], &t, &vector);
                assert_memory_equal(&portable, &vector, sizeof vector);
            }
    }
}

/* --- beyond the paper --- */

/* The stored scale is the one with <y, y'> = |y|^2, so the slope is 1 where scale=norm has 1 - mse.
 * The test allows three standard errors, as test_turboquant.c does. */
CASE(unbiased_scale)
{
    for (uint32_t bits = 1; bits <= 4; bits++) {
        char norm[64], unbiased[64];
        snprintf(norm, sizeof norm, "octopus-%u:scale=norm", bits);
        snprintf(unbiased, sizeof unbiased, "octopus-%u", bits);
        distortion a = measure(norm, 128, 100), b = measure(unbiased, 128, 100);
        double slope_error = 3 * sqrt(a.mse / (1 - a.mse) / (64.0 * 100));
        assert_true(fabs(b.slope - 1) <= slope_error);
        assert_true(b.product < sqrt(a.mse / (1 - a.mse)) * 1.05);
    }
}

/* The last triplet's missing channels may decode to any number. With one or two channels in use,
 * the triplet must err per channel at most as much as whole triplets do. Padding with zeros errs
 * several times as much. */
CASE(last_triplet)
{
    static const uint32_t dims[] = { 64, 80, 128 };
    for (size_t i = 0; i < COUNT(dims); i++)
        for (uint32_t bits = 2; bits <= 4; bits++)
            for (int joint = 0; joint < 2; joint++) {
                uint64_t rng = 4;
                static octopus_book book;
                double last = 0, others = 0;
                uint32_t d = dims[i], left = d % 3;
                kvant_octopus_book_init(&book, d, bits + 1, bits - 1);
                book.triplets.rounding = joint ? KVANT_ROUND_3X3 : KVANT_ROUND_SCALAR;
                for (int row = 0; row < 2000; row++) {
                    float y[KVANT_MAX_HEAD_DIM], decoded[KVANT_MAX_HEAD_DIM];
                    uint32_t codes[KVANT_MAX_TRIPLETS];
                    fill_normal(y, d, &rng);
                    kvant_octopus_dequantize(
                        &book, codes,
                        kvant_octopus_quantize(&book, kvant_kernels_get(KVANT_CPU_AUTO), y, codes),
                        decoded);
                    others += squared_distance(y, decoded, d - left) / (d - left);
                    last += squared_distance(y + d - left, decoded + d - left, left) / left;
                }
                assert_true(joint ? last <= 1.3 * others : last > 1.1 * others);
            }
}

/* Rows that are near no direction keep a finite scale: one bit per coordinate has no direction near
 * (0, 0, 1). */
CASE(hopeless_rows)
{
    kvant_codec *codec = make_codec("octopus-1:split=1.1,rotate=none", 126, KVANT_ROLE_K);
    void *page = aligned(info_of(codec).page_bytes);
    static float x[64 * 126], decoded[64 * 126];
    for (uint32_t i = 0; i < COUNT(x); i++)
        x[i] = i % 3 == 2 ? 900 : i % 3 == 1 ? 1e-4f * (float)(i % 126) : 0;
    assert_int_equal(kvant_codec_encode(codec, NULL, x, 126, 0, 64, page), KVANT_OK);
    assert_int_equal(kvant_codec_decode(codec, NULL, page, 0, 64, decoded, 126), KVANT_OK);
    /* |y'| is at most 4 s times the largest norm level, and s is 900 / sqrt(3) */
    for (uint32_t i = 0; i < COUNT(x); i++)
        assert_true(fabsf(decoded[i]) <= 4 * 900 * 2.3);
    free(page);
    kvant_codec_free(&codec);
}

CASE(options)
{
    expect_bad_spec("octopus-6", 128, KVANT_ERR_SPEC, "1 to 5 bits");
    expect_bad_spec("octopus-4", 5, KVANT_ERR_UNSUPPORTED, "head_dim 6");
    expect_bad_spec("octopus-4:split=5", 128, KVANT_ERR_SPEC, "split=5.3");
    expect_bad_spec("octopus-4:split=9.0", 128, KVANT_ERR_SPEC, "up to 8 and 7");
    expect_bad_spec("octopus-4:split=5.2", 128, KVANT_ERR_SPEC, "as in split=5.3");
    expect_bad_spec("octopus-2:split=0.4", 128, KVANT_ERR_SPEC, "1 to 8 bits");
    expect_bad_spec("octopus-4:round=4x4", 128, KVANT_ERR_SPEC, "full, scalar, 2x2, 3x3");
    expect_bad_spec("octopus-4:qjl,scale=unbiased", 128, KVANT_ERR_SPEC, "exclude each other");
    kvant_codec *codec = make_codec("octopus-4", 128, KVANT_ROLE_V);
    kvant_codec_info info = info_of(codec);
    assert_true(info.bits == 13 && info.nominal_bits == 4);
    assert_true(info.code_bytes ==
                (size_t)43 * 13 * 8 + 16 -
                    43 * 13 * 8 % 16); /* with 64 tokens, a plane ends within 16 bytes */
    kvant_codec_free(&codec);
}

RUN_CASES(NULL, NULL)
