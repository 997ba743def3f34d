/* test_hqmq_baselines.c - the spherical + JL and additive quantisers that HQMQ compares with: their
 * sizes in the paper's tables, and their errors against a plain search in this file. */
#include "testing.h"

enum { D = 128, PAGES = 16 };

static double relative_error(const char *spec, double *error_of_mean)
{
    static float x[64 * D], decoded[64 * D];
    kvant_codec *codec = make_codec(spec, D, KVANT_ROLE_K);
    void *page = aligned(info_of(codec).page_bytes);
    uint64_t rng = 31;
    double sum = 0, squares = 0;
    for (uint32_t p = 0; p < PAGES; p++) {
        fill_normal(x, COUNT(x), &rng);
        assert_int_equal(kvant_codec_encode(codec, NULL, x, D, 0, 64, page), KVANT_OK);
        assert_int_equal(kvant_codec_decode(codec, NULL, page, 0, 64, decoded, D), KVANT_OK);
        for (uint32_t t = 0; t < 64; t++) {
            double energy = 0;
            for (uint32_t j = 0; j < D; j++)
                energy += (double)x[t * D + j] * x[t * D + j];
            double relative = squared_distance(x + t * D, decoded + t * D, D) / energy;
            sum += relative;
            squares += relative * relative;
        }
    }
    free(page);
    kvant_codec_free(&codec);
    const double n = 64.0 * PAGES;
    *error_of_mean = sqrt((squares / n - sum / n * (sum / n)) / n);
    return sum / n;
}

/* Tables 8 and 16 do not count the 16 / d bits of the scale. */
CASE(sizes_of_the_papers_tables)
{
    static const struct {
        const char *spec;
        double paper, stored;
    } rows[] = {
        { "spherical-r4jl4", 3.15, 3.375 },
        { "addvq-k24r3", 3.04, 3.375 },
        { "addvq-k48r4", 3.79, 4.125 },
        { "addvq-k192r4", 4.79, 5.125 },
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        kvant_codec *codec = make_codec(rows[i].spec, D, KVANT_ROLE_V);
        assert_true(fabs(info_of(codec).nominal_bits - 16.0 / D - rows[i].paper) <= 0.005);
        assert_true(info_of(codec).true_bits == rows[i].stored);
        kvant_codec_free(&codec);
    }
}

/* A random point of the sphere, its nearest vertex of the 24-cell (all 24 are tried), and the
 * difference. */
static void random_remainder(uint64_t *rng, double rest[4])
{
    double u[4], norm = 0, best = -2, vertex[4] = { 0 };
    for (int i = 0; i < 4; i++) {
        u[i] = test_normal(rng);
        norm += u[i] * u[i];
    }
    for (int i = 0; i < 4; i++)
        u[i] /= sqrt(norm);
    for (int k = 0; k < 24; k++) {
        double p[4] = { 0 }, product = 0;
        for (int i = 0; i < 4; i++) {
            p[i] = k >= 16 ? (i == (k - 16) / 2) * (k % 2 ? -1.0 : 1.0) : (k >> i & 1 ? -0.5 : 0.5);
            product += p[i] * u[i];
        }
        if (product > best) {
            best = product;
            memcpy(vertex, p, sizeof p);
        }
    }
    for (int i = 0; i < 4; i++)
        rest[i] = u[i] - vertex[i];
}

/* Without signs, the error of the direction is E |rest|^2. With 4 signs along an orthonormal frame
 * and the best constant a, it is E |rest|^2 - (E sum |rest_k|)^2 / 4. The frame hardly matters: the
 * axes differ from a random frame by less than the 5 % that the test allows. The radius adds its
 * step^2 / 12, about 1e-5 at 8 bits. */
CASE(spherical_errors)
{
    enum { SAMPLES = 100000 };
    uint64_t rng = 32;
    double square = 0, frames[4] = { 0 }, largest = 0, smallest = 1;
    double rotate_by_rope[4][4][4]; /* four random orthonormal frames, by Gram and Schmidt */
    for (int f = 0; f < 4; f++)
        for (int k = 0; k < 4; k++) {
            double length = 0;
            for (int i = 0; i < 4; i++)
                rotate_by_rope[f][k][i] = test_normal(&rng);
            for (int m = 0; m < k; m++) {
                double part = 0;
                for (int i = 0; i < 4; i++)
                    part += rotate_by_rope[f][k][i] * rotate_by_rope[f][m][i];
                for (int i = 0; i < 4; i++)
                    rotate_by_rope[f][k][i] -= part * rotate_by_rope[f][m][i];
            }
            for (int i = 0; i < 4; i++)
                length += rotate_by_rope[f][k][i] * rotate_by_rope[f][k][i];
            for (int i = 0; i < 4; i++)
                rotate_by_rope[f][k][i] /= sqrt(length);
        }
    for (int s = 0; s < SAMPLES; s++) {
        double rest[4];
        random_remainder(&rng, rest);
        for (int i = 0; i < 4; i++)
            square += rest[i] * rest[i] / SAMPLES;
        for (int f = 0; f < 4; f++)
            for (int k = 0; k < 4; k++) {
                double projection = 0;
                for (int i = 0; i < 4; i++)
                    projection += rotate_by_rope[f][k][i] * rest[i];
                frames[f] += fabs(projection) / SAMPLES;
            }
    }
    for (int f = 0; f < 4; f++) {
        double error = square - frames[f] * frames[f] / 4;
        largest = error > largest ? error : largest;
        smallest = error < smallest ? error : smallest;
    }
    double error, plain = relative_error("spherical-r8jl0", &error);
    if (!(fabs(plain / square - 1) <= 0.02))
        fail_msg("no signs: %.4f, expected %.4f", plain, square);
    double signs = relative_error("spherical-r8jl4", &error);
    if (!(signs >= smallest * 0.98 && signs <= largest * 1.02))
        fail_msg("4 signs: %.4f, four frames give %.4f to %.4f", signs, smallest, largest);
}

CASE(more_signs_err_less)
{
    double before = 1, error;
    for (int signs = 0; signs <= 8; signs += 2) {
        char spec[32];
        snprintf(spec, sizeof spec, "spherical-r4jl%d", signs);
        double now = relative_error(spec, &error);
        assert_true(now < before);
        before = now;
    }
}

/* Additive books as in the paper's appendix Q, and the search, which the paper does not describe.
 *
 * A book of random sums with a joint search cannot be better than balls that fill the sphere. It
 * errs at most twice as much as a book with as many random points. Such a book errs by Gamma(5/3)
 * (3 pi / (2 K^2))^(2/3), which is E r^2 for P(angle > r) = exp(-K^2 2 r^3 / (3 pi)). */
CASE(additive_errors)
{
    double error;
    for (uint32_t k = 24; k <= 48; k *= 2) {
        char joint[48], greedy[48], product[48];
        snprintf(joint, sizeof joint, "addvq-k%ur8", k);
        snprintf(greedy, sizeof greedy, "addvq-k%ur8:search=greedy", k);
        snprintf(product, sizeof product, "hqmq-s%ur8:book=random,scale=norm", k * k / 24);
        double points = pow(3 * 3.141592653589793 / 2 / (k * k), 2 / 3.0);
        double best = relative_error(joint, &error);
        assert_true(best >= 0.6 * points && best <= 2 * 0.9027 * points);
        assert_true(relative_error(product, &error) < best);
        assert_true(relative_error(greedy, &error) > 2 * best);
    }
}

CASE(bad_specs_are_refused)
{
    static const char *const specs[] = { "spherical-r1jl4",
                                         "spherical-r4jl9",
                                         "spherical-4",
                                         "spherical-r4jl4:med3",
                                         "addvq-k1r4",
                                         "addvq-k193r4",
                                         "addvq-k24r9",
                                         "addvq-k24r4:book=random",
                                         "addvq-k24r4:search=best" };
    for (size_t i = 0; i < COUNT(specs); i++)
        expect_bad_spec(specs[i], 64, KVANT_ERR_SPEC, "");
}

RUN_CASES(NULL, NULL)
