/* test_turboquant.c - turboquant's variants against the figures of its paper and against
 * independent computations. */
#include "distortion.h"

/* For large d the paper prints 0.36, 0.117, 0.03 and 0.009. Errors that are measured at d = 512
 * must round to these figures. */
CASE(mse_rounds_to_the_papers_figures)
{
    static const double low[] = { 0.355, 0.1165, 0.025, 0.0085 },
                        high[] = { 0.365, 0.1175, 0.035, 0.0095 };
    for (uint32_t bits = 1; bits <= 4; bits++) {
        char spec[64];
        snprintf(spec, sizeof spec, "turboquant-%u:scale=norm", bits);
        distortion d = measure(spec, 512, 40);
        if (!(d.mse >= low[bits - 1] && d.mse < high[bits - 1]))
            fail_msg("%s: mse %.5f, paper's figure is in [%g, %g)", spec, d.mse, low[bits - 1],
                     high[bits - 1]);
    }
}

/* A codebook computed here by brute force (Lloyd iterations on a fine grid) for the density (1 -
 * x^2)^((d-3)/2). */
static double brute_force_mse(uint32_t d, uint32_t bits)
{
    enum { GRID = 8000 };
    uint32_t n = 1u << bits;
    static double x[GRID], f[GRID];
    double level[16], total = 0, error = 0;
    for (int i = 0; i < GRID; i++) {
        x[i] = -1 + (2 * i + 1.0) / GRID;
        f[i] = pow(1 - x[i] * x[i], (d - 3) / 2.0);
        total += f[i];
    }
    for (uint32_t i = 0; i < n; i++)
        level[i] = (2 * (i + 0.5) / n - 1) * 2.5 / sqrt(d);
    for (int iteration = 0; iteration < 400; iteration++) {
        double mass[16] = { 0 }, moment[16] = { 0 };
        for (int i = 0; i < GRID; i++) {
            uint32_t k = 0;
            while (k + 1 < n && x[i] > (level[k] + level[k + 1]) / 2)
                k++;
            mass[k] += f[i];
            moment[k] += f[i] * x[i];
            if (iteration == 399)
                error += f[i] * (x[i] - level[k]) * (x[i] - level[k]);
        }
        for (uint32_t k = 0; k < n; k++)
            level[k] = mass[k] > 0 ? moment[k] / mass[k] : level[k];
    }
    return error / total * d;
}

/* At head_dims of real models: three standard errors around the codebook's own mse. */
CASE(mse_is_that_of_the_optimal_codebook)
{
    static const uint32_t dims[] = { 64, 128 };
    for (size_t i = 0; i < COUNT(dims); i++)
        for (uint32_t bits = 1; bits <= 4; bits++) {
            char spec[64];
            snprintf(spec, sizeof spec, "turboquant-%u:scale=norm", bits);
            distortion d = measure(spec, dims[i], 60);
            double want = brute_force_mse(dims[i], bits);
            /* 2^-11 is the relative rounding of the fp16 norm, which enters squared, at most
             * twice */
            if (!(fabs(d.mse - want) <= 3 * d.mse_error + 4.8e-7))
                fail_msg("%s at %u: mse %.6f, not %.6f +- %.6f", spec, dims[i], d.mse, want,
                         d.mse_error);
        }
}

/* D is the mse. The norm scale shrinks products by 1 - D and leaves an error of sqrt(D). The
 * unbiased scale removes the shrinkage and leaves sqrt(D / (1 - D)). There are n = 64 x 300
 * products. Three standard errors of a root mean square are 3 / sqrt(2 n) = 1.5 %. The asymptotic
 * formulas are good to 1 % at d = 128. */
CASE(inner_products)
{
    for (uint32_t bits = 1; bits <= 4; bits++) {
        char norm[64], unbiased[64];
        snprintf(norm, sizeof norm, "turboquant-%u:scale=norm", bits);
        snprintf(unbiased, sizeof unbiased, "turboquant-%u", bits);
        distortion a = measure(norm, 128, 300), b = measure(unbiased, 128, 300);
        double mse = a.mse, slope_error = 3 * sqrt(mse / (1 - mse) / (64.0 * 300));
        assert_true(fabs(a.slope - (1 - mse)) <= slope_error);
        assert_true(fabs(b.slope - 1) <= slope_error);
        assert_true(fabs(a.product / sqrt(mse) - 1) <= 0.025);
        assert_true(fabs(b.product / sqrt(mse / (1 - mse)) - 1) <= 0.025);
    }
}

/* --- prod, Algorithm 2 --- */

#if KVANT_PAPERS
/* The paper prints d x variance 1.57, 0.56, 0.18 and 0.047. They stand for pi / 2 times the mse of
 * b - 1 bits (Lemma 4; 1 for no bits): 1.571, 0.571, 0.185 and 0.054. For the mse of 3 bits, which
 * is 0.0345, the paper uses 0.03. If queries have random directions, d x variance is the mse of the
 * decoded rows. 19200 rows measure it ten times as precisely as 19200 products do.
 *
 * An orthonormal projection leaves out the variance along the residual: pi / 2 + 1 - 2 m. Here m is
 * the mean of |z| sqrt(pi / 2) for z = (P r)_i sqrt(d) / |r|. It is 1 + (2k + 6) / (24d), where k
 * is the excess kurtosis of the residual's numbers (first term of the Edgeworth series). The
 * residual's number is a normal number minus its nearest level.
 *
 * A Gaussian matrix is a random one: its d^2 squares differ from their expectation by a relative
 * standard deviation of sqrt(2) / d. */
CASE(sketch_has_the_papers_variance)
{
    static const double excess[] = { 0, 0.869, 2.310, 4.710 };
    const double half_pi = 1.5707963267948966, d = 128, n = 19200;
    for (uint32_t bits = 1; bits <= 4; bits++)
        for (int gaussian = 0; gaussian < 2; gaussian++) {
            char spec[64];
            snprintf(spec, sizeof spec, "turboquant-%u:qjl%s", bits,
                     gaussian ? ",sketch=gaussian" : "");
            distortion got = measure(spec, 128, 300);
            double first = bits > 1 ? brute_force_mse(128, bits - 1) : 1;
            double m = 1 + (2 * excess[bits - 1] + 6) / (24 * d);
            double want = (gaussian ? half_pi : half_pi + 1 - 2 * m) * first;
            double tolerance = 3 * got.mse_error + (gaussian ? 3 * sqrt(2) / d * want : 0);
            if (!(fabs(got.mse - want) <= tolerance))
                fail_msg("%s: mse %.5f, not %.5f +- %.5f", spec, got.mse, want, tolerance);
            double variance = got.product * got.product;
            if (!(fabs(variance / got.mse - 1) <= 3 * sqrt(2 / n)))
                fail_msg("%s: d x variance %.4f, not the mse %.4f", spec, variance, got.mse);
            /* Unbiased: a regression on n exact products, whose variance is 1 / d, with the m from
             * above. */
            if (!(fabs(got.slope - 1) <= 3 * sqrt(want / n) + (m - 1) * first))
                fail_msg("%s: slope %.4f, not 1 +- %.4f", spec, got.slope, 3 * sqrt(want / n));
        }
}

/* --- 2.5 and 3.5 bits --- */

/* Rows whose channels 3, 7, 11 ... are `gain` times as large as their neighbours. */
static void fill_with_outliers(float *x, uint32_t d, float gain, uint64_t *rng)
{
    fill_normal(x, (size_t)64 * d, rng);
    for (uint32_t i = 0; i < 64 * d; i++)
        x[i] *= i % d % 4 == 3 ? gain : 1;
}

/* Outliers are found, and each tier has the mse of its codebook, so the total follows from the
 * energies of the tiers. The sums are over 64 tokens. With a gain of 4, an outlier's sum of squares
 * is 16 +- 2.8. An ordinary channel's sum is 1 +- 0.18, which does not come near. */
CASE(tiers_have_the_mse_of_their_codebooks)
{
    static const uint32_t dims[] = { 64, 96, 128 };
    for (size_t k = 0; k < COUNT(dims); k++)
        for (uint32_t bits = 2; bits <= 3; bits++) {
            uint32_t d = dims[k], n = 64 * 40;
            char spec[64];
            snprintf(spec, sizeof spec, "turboquant-%u.5:scale=norm", bits);
            kvant_codec *codec = make_codec(spec, d, KVANT_ROLE_K);
            void *page = aligned(info_of(codec).page_bytes);
            static float x[64 * 128], decoded[64 * 128];
            uint64_t rng = 21;
            double sum[2] = { 0, 0 }, squares[2] = { 0, 0 };
            for (uint32_t i = 0; i < n / 64; i++) {
                fill_with_outliers(x, d, 4, &rng);
                assert_int_equal(kvant_codec_encode(codec, NULL, x, d, 0, 64, page), KVANT_OK);
                assert_ok(kvant_codec_decode(codec, NULL, page, 0, 64, decoded, d));
                for (uint32_t t = 0; t < 64; t++) {
                    double error[2] = { 0, 0 }, norm[2] = { 0, 0 };
                    for (uint32_t j = 0; j < d; j++) {
                        double a = x[t * d + j], b = decoded[t * d + j];
                        error[j % 4 != 3] += (a - b) * (a - b);
                        norm[j % 4 != 3] += a * a;
                    }
                    for (uint32_t tier = 0; tier < 2; tier++) {
                        sum[tier] += error[tier] / norm[tier];
                        squares[tier] += error[tier] / norm[tier] * (error[tier] / norm[tier]);
                    }
                }
            }
            for (uint32_t tier = 0; tier < 2; tier++) {
                double want = brute_force_mse(tier ? d - d / 4 : d / 4, bits + 1 - tier),
                       mse = sum[tier] / n;
                double error = sqrt((squares[tier] / n - mse * mse) / n);
                if (!(fabs(mse - want) <= 3 * error + 4.8e-7))
                    fail_msg("%s at %u, tier %u: mse %.6f, not %.6f +- %.6f", spec, d, tier, mse,
                             want, error);
            }
            free(page);
            kvant_codec_free(&codec);
        }
}

/* A quarter of the 128 channels has b + 1 bits, the rest has b, which makes b + 0.25 bits. Two
 * scales of 16 bits make it b + 0.5 at head_dim 128. The mask of 128 bits and the page's padding
 * add 64 bytes. */
CASE(bits_of_tiers)
{
    for (int role = 0; role < 2; role++) {
        kvant_codec *a = make_codec("turboquant-2.5", 128, (kvant_role)role);
        kvant_codec *b = make_codec("turboquant-3.5", 128, (kvant_role)role);
        assert_true(info_of(a).true_bits == 2.5625 && info_of(b).true_bits == 3.5625);
        assert_true(info_of(a).nominal_bits == 2.5 && info_of(b).nominal_bits == 3.5);
        assert_int_equal(info_of(a).block_tokens, 64);
        kvant_codec_free(&a);
        kvant_codec_free(&b);
    }
}
#endif

/* --- all variants --- */

CASE(head_dims_of_models)
{
    static const char *const specs[] = {
        "turboquant-4", "turboquant-4:rotate=dense",
        PAPERS("turboquant-5:qjl", "turboquant-3.5", ) "turboquant-4:rotate=hadamard"
    };
    static const uint32_t dims[] = { 64, 80, 96, 112, 128, 192, 256 };
    for (size_t s = 0; s < COUNT(specs); s++)
        for (size_t k = 0; k < COUNT(dims); k++) {
            distortion got = measure(specs[s], dims[k], 4);
            /* With 4 bits and the unbiased scale the mse is D / (1 - D) with D = .0095. The sketch
             * of 5:qjl makes the variance pi / 2 - 1 of the mse at 4 bits. The error of 3.5 bits is
             * at most the error of 3 bits. The margin of 10 % is ten standard errors of 256 rows.
             * It also covers Hadamard blocks of 16 (head_dim 80), whose marginal distribution is
             * not the codebook's. */
            double want = strstr(specs[s], "3.5")   ? 0.0358
                          : strstr(specs[s], "qjl") ? 0.0095 * 0.5708
                                                    : 0.0096;
            if (!(got.mse <= want * 1.1))
                fail_msg("%s at %u: mse %g, not %g", specs[s], dims[k], got.mse, want);
        }
}

CASE(errors_name_the_valid_values)
{
    expect_bad_spec("turboquant", 64, KVANT_ERR_SPEC, "1 to 8 bits, 2.5 or 3.5");
    expect_bad_spec("turboquant-9", 64, KVANT_ERR_SPEC, "1 to 8 bits, 2.5 or 3.5");
    expect_bad_spec("turboquant-2.4", 64, KVANT_ERR_SPEC, "1 to 8 bits, 2.5 or 3.5");
#if KVANT_PAPERS
    expect_bad_spec("turboquant-2.5:qjl", 64, KVANT_ERR_SPEC, "no option 'qjl'");
    expect_bad_spec("turboquant-3:qjl,scale=unbiased", 64, KVANT_ERR_SPEC, "exclude each other");
    expect_bad_spec("turboquant-3:sketch=gaussian", 64, KVANT_ERR_SPEC, "needs qjl");
    expect_bad_spec("turboquant-3:qjl,sketch=dense", 64, KVANT_ERR_SPEC, "hadamard, gaussian");
    expect_bad_spec("turboquant-2.5", 12, KVANT_ERR_UNSUPPORTED, "16 or more");
#else
    expect_bad_spec("turboquant-2.5", 64, KVANT_ERR_UNSUPPORTED, "KVANT_PAPERS=OFF");
#endif
}

/* A canonical spec describes the same codec. */
CASE(canonical_specs)
{
    static const char *const specs[] = { PAPERS("turboquant-2.5", "turboquant-3:qjl", ) PAPERS(
        "turboquant-1:qjl,sketch=gaussian", ) "turboquant-04" };
    for (size_t i = 0; i < COUNT(specs); i++) {
        kvant_codec *a = make_codec(specs[i], 64, KVANT_ROLE_K),
                    *b = make_codec(info_of(a).spec, 64, KVANT_ROLE_K);
        assert_string_equal(info_of(a).spec, info_of(b).spec);
        assert_int_equal(info_of(a).page_bytes, info_of(b).page_bytes);
        kvant_codec_free(&a);
        kvant_codec_free(&b);
    }
}

RUN_CASES(NULL, NULL)
