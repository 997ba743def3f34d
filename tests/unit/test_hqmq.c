/* test_hqmq.c - HQMQ against its paper: sizes, codebooks, how well they cover the sphere, and the
 * search for codewords. */
#include "testing.h"

#include "../../src/codec/papers/direction.h"
#include "../../src/math/quaternion.h"

#define PI 3.14159265358979323846

/* --- sizes (Tables 12 and 21 of the paper) --- */

CASE(sizes_of_the_papers_table)
{
    static const struct {
        const char *spec;
        double nominal, stored; /* stored bits: (ceil(log2 24 S) + r) / 4 + 16 / 128 */
    } rows[] = {
        { "hqmq-s24r3", 3.17, 3.375 },  { "hqmq-s24r4", 3.42, 3.625 },
        { "hqmq-s48r4", 3.67, 3.875 },  { "hqmq-s96r4", 3.92, 4.125 },
        { "hqmq-s192r4", 4.17, 4.375 }, { "hqmq-s192r6", 4.67, 4.875 },
    };
    for (size_t i = 0; i < COUNT(rows); i++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *codec = make_codec(rows[i].spec, 128, (kvant_role)role);
            assert_true(fabs(info_of(codec).nominal_bits - rows[i].nominal) <= 0.005);
            assert_true(info_of(codec).true_bits == rows[i].stored);
            kvant_codec_free(&codec);
        }
}

/* --- codebooks --- */

static int compare_codewords(const void *a, const void *b)
{
    const float *x = a, *y = b;
    for (int i = 0; i < 4; i++)
        if (x[i] != y[i])
            return x[i] < y[i] ? -1 : 1;
    return 0;
}

CASE(codewords_are_distinct_units)
{
    static const char *const specs[] = {
        "hqmq-s24r4",  "hqmq-s24r4:book=random",  "hqmq-s96r4",
        "hqmq-s192r4", "hqmq-s192r4:book=random", "hqmq-s1024r4:book=random"
    };
    for (size_t i = 0; i < COUNT(specs); i++) {
        kvant_codec *codec = make_codec(specs[i], 64, KVANT_ROLE_K);
        const kvant_direction *direction = kvant_direction_of(codec);
        const uint32_t n = direction->n_codewords;
        float *sorted = malloc((size_t)n * 4 * sizeof *sorted);
        memcpy(sorted, direction->codewords, (size_t)n * 4 * sizeof *sorted);
        qsort(sorted, n, 4 * sizeof *sorted, compare_codewords);
        for (uint32_t k = 0; k < n; k++) {
            double squares = 0;
            for (uint32_t j = 0; j < 4; j++)
                squares += (double)sorted[4 * k + j] * sorted[4 * k + j];
            /* Components are rounded by at most 2^-25. This makes 2 x 2^-25 x sum |w_i|, and sum
             * |w_i| <= 2 */
            assert_true(fabs(squares - 1) <= 4 * pow(2, -25) + 1e-14);
            assert_true(k == 0 || compare_codewords(sorted + 4 * k - 4, sorted + 4 * k) < 0);
        }
        free(sorted);
        kvant_codec_free(&codec);
    }
}

/* The 24 units are a group: every product of two units is a unit. Units are at least 60 degrees
 * apart. */
CASE(units_are_a_group)
{
    for (uint32_t a = 0; a < KVANT_HURWITZ_UNITS; a++)
        for (uint32_t b = 0; b < KVANT_HURWITZ_UNITS; b++) {
            const kvant_quaternion p = kvant_hurwitz_unit(a), q = kvant_hurwitz_unit(b);
            const kvant_quaternion product = kvant_quaternion_multiply(&p, &q);
            double cosine = 0;
            uint32_t found = 0;
            for (int i = 0; i < 4; i++)
                cosine += p.c[i] * q.c[i];
            for (uint32_t c = 0; c < KVANT_HURWITZ_UNITS; c++) {
                const kvant_quaternion unit = kvant_hurwitz_unit(c);
                found += memcmp(&unit, &product, sizeof unit) == 0 ||
                         (unit.c[0] == product.c[0] && unit.c[1] == product.c[1] &&
                          unit.c[2] == product.c[2] && unit.c[3] == product.c[3]);
            }
            assert_int_equal(found, 1);
            assert_true(a == b ? cosine == 1 : cosine <= 0.5);
        }
}

/* The angle from random directions to the nearest codeword, by the closed form. */
typedef struct covering {
    double mean_square; /* of the distance, 2 - 2 cos */
    double radius;      /* largest angle that was found */
} covering;

static covering measure_covering(const kvant_quaternion *s, uint32_t n, uint32_t samples,
                                 uint64_t *rng)
{
    covering result = { 0, 0 };
    for (uint32_t k = 0; k < samples; k++) {
        kvant_quaternion u;
        double norm = 0, closest = 0;
        for (int i = 0; i < 4; i++) {
            u.c[i] = test_normal(rng);
            norm += u.c[i] * u.c[i];
        }
        for (uint32_t i = 0; i < n; i++) {
            const kvant_quaternion conjugate = { { s[i].c[0], -s[i].c[1], -s[i].c[2],
                                                   -s[i].c[3] } };
            const kvant_quaternion y = kvant_quaternion_multiply(&u, &conjugate);
            const double closeness = kvant_hurwitz_closeness(&y);
            closest = closeness > closest ? closeness : closest;
        }
        double cosine = closest / sqrt(norm);
        cosine = cosine > 1 ? 1 : cosine;
        result.mean_square += (2 - 2 * cosine) / samples;
        result.radius = acos(cosine) > result.radius ? acos(cosine) : result.radius;
    }
    return result;
}

/* Share of the 3-sphere within an angle of a point. */
static double cap(double angle)
{
    return (angle - sin(angle) * cos(angle)) / PI;
}

/* E(2 - 2 cos) for n independent random cosets. As long as the 24 caps are disjoint, P(angle > t) =
 * (1 - 24 cap(t))^n. That is up to 30 degrees. Larger angles do not count for n >= 24, because the
 * probability at 30 degrees is 5e-13. */
static double random_coset_distance(uint32_t n)
{
    enum { STEPS = 20000 };
    double sum = 0, top = PI / 6;
    for (int i = 0; i < STEPS; i++) {
        double angle = (i + 0.5) * top / STEPS;
        sum += 2 * sin(angle) * pow(1 - 24 * cap(angle), n) * top / STEPS;
    }
    return sum;
}

/* Proposition 3.1: random secondaries cover the sphere as independent cosets do, so distances fall
 * as (24 S)^(-1/3). The test takes the mean over 24 books of each size and allows three standard
 * errors. */
CASE(random_books_cover_as_the_proposition_says)
{
    static const uint32_t sizes[] = { 24, 96, 192 };
    enum { BOOKS = 24, SAMPLES = 2000 };
    uint64_t rng = 21;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        double sum = 0, squares = 0;
        for (uint64_t seed = 0; seed < BOOKS; seed++) {
            kvant_quaternion s[192];
            uint64_t stream = seed;
            for (uint32_t k = 0; k < sizes[i]; k++)
                s[k] = kvant_quaternion_random(&stream);
            double distance = measure_covering(s, sizes[i], SAMPLES, &rng).mean_square;
            sum += distance / BOOKS;
            squares += distance * distance / BOOKS;
        }
        double error = sqrt((squares - sum * sum) / (BOOKS - 1)),
               want = random_coset_distance(sizes[i]);
        if (!(fabs(sum - want) <= 3 * error))
            fail_msg("S = %u: distance %.6f +- %.6f, expected %.6f", sizes[i], sum, error, want);
    }
}

static covering book_covering(const char *spec, uint64_t *rng)
{
    kvant_codec *codec = make_codec(spec, 64, KVANT_ROLE_K);
    const kvant_direction *direction = kvant_direction_of(codec);
    const uint32_t n = direction->n_codewords / KVANT_HURWITZ_UNITS;
    kvant_quaternion s[1024];
    for (uint32_t k = 0; k < 4 * n; k++)
        s[k / 4].c[k % 4] = direction->table[k];
    covering result = measure_covering(s, n, 20000, rng);
    kvant_codec_free(&codec);
    return result;
}

/* The radius times N^(1/3) lies between two bounds.
 *
 * Lower bound: N caps cover the sphere only if N cap(r) >= 1. T = 20000 samples would not all lie
 * in caps that cover less than 0.99 of the sphere (0.99^T < 1e-87). From cap(r) < 2 r^3 / (3 pi)
 * follows 1.67.
 *
 * Upper bound: a sample is farther than r from independent cosets with probability at most exp(-N
 * cap(r)). At N cap(r) = ln T + 7 any of T samples is with probability exp(-7). The bound cap(r) >
 * 0.97 x 2 r^3 / (3 pi) holds up to r = 0.4. From it follows 4.35. */
CASE(covering_radius_falls_with_the_cube_root)
{
    static const struct {
        const char *spec;
        uint32_t secondaries;
    } specs[] = { { "hqmq-s24r4:book=random", 24 },
                  { "hqmq-s96r4:book=random", 96 },
                  { "hqmq-s192r4:book=random", 192 },
                  { "hqmq-s512r4:book=random", 512 },
                  { "hqmq-s24r4", 24 },
                  { "hqmq-s192r4", 192 } };
    uint64_t rng = 22;
    for (size_t i = 0; i < COUNT(specs); i++) {
        double scaled =
            book_covering(specs[i].spec, &rng).radius * cbrt(24.0 * specs[i].secondaries);
        if (!(scaled >= 1.67 && scaled <= 4.35))
            fail_msg("%s: covering radius %.3f (24 S)^(-1/3)", specs[i].spec, scaled);
    }
}

/* A book=spread is better than any random book by a fifth. No book of N points can be better than N
 * balls that fill the sphere: E r^2 = 3/5 R^2 with (4 pi / 3) R^3 = 2 pi^2 / N. */
CASE(spread_books_are_better_than_random_ones)
{
    static const uint32_t sizes[] = { 24, 96, 192 };
    uint64_t rng = 23;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        kvant_quaternion s[192];
        uint64_t stream = 5;
        kvant_quaternion_spread(&stream, sizes[i], s);
        double distance = measure_covering(s, sizes[i], 20000, &rng).mean_square;
        double filled = 0.6 * pow(3 * 2 * PI * PI / (4 * PI * 24.0 * sizes[i]), 2 / 3.0);
        if (!(distance <= 0.8 * random_coset_distance(sizes[i]) && distance >= filled))
            fail_msg("S = %u: distance %.6f, random %.6f, bound %.6f", sizes[i], distance,
                     random_coset_distance(sizes[i]), filled);
    }
}

/* --- encoding --- */

/* The closed form finds the same as a search through all codewords: the decoded chunk is as close
 * in angle as the best codeword. Rounding is allowed for 4 products and 3 sums in either order.
 * Each order errs by 7 x 2^-24 of sum |x_i w_i| <= |x|. */
CASE(the_search_finds_the_nearest_codeword)
{
    static const char *const specs[] = { "hqmq-s24r3", "hqmq-s96r4", "hqmq-s5r2",
                                         "hqmq-s192r6:book=random" };
    enum { D = 72 };
    static float x[64 * D], decoded[64 * D];
    uint64_t rng = 24;
    for (size_t i = 0; i < COUNT(specs); i++) {
        kvant_codec *codec = make_codec(specs[i], D, KVANT_ROLE_V);
        const kvant_direction *direction = kvant_direction_of(codec);
        fill_normal(x, COUNT(x), &rng);
        encode_decode(specs[i], D, KVANT_ROLE_V, x, decoded);
        for (uint32_t c = 0; c < 64 * D; c += 4) {
            double best = 0, got = 0, length = 0, norm = 0;
            for (uint32_t k = 0; k < direction->n_codewords; k++) {
                double product = 0;
                for (uint32_t j = 0; j < 4; j++)
                    product += (double)x[c + j] * direction->codewords[4 * k + j];
                best = product > best ? product : best;
            }
            for (uint32_t j = 0; j < 4; j++) {
                got += (double)x[c + j] * decoded[c + j];
                length += (double)decoded[c + j] * decoded[c + j];
                norm += (double)x[c + j] * x[c + j];
            }
            if (length > 0)
                assert_true(got / sqrt(length) >= best - 14 * pow(2, -24) * sqrt(norm) - 1e-7);
        }
        kvant_codec_free(&codec);
    }
}

/* Error = error of the direction + error of the radius. The first was measured above for this book,
 * the second is the error of a uniform quantiser, step^2 / 12 per chunk. The bound of 2 % is five
 * standard errors of 20000 directions; 82000 chunks vary less. */
CASE(error_is_that_of_direction_and_radius)
{
    static const struct {
        const char *spec;
        uint32_t radius_bits;
    } rows[] = { { "hqmq-s24r3:book=random,scale=norm", 3 },
                 { "hqmq-s96r4:scale=norm", 4 },
                 { "hqmq-s192r6:book=random,scale=norm", 6 } };
    enum { D = 128, PAGES = 40 };
    static float x[64 * D], decoded[64 * D];
    for (size_t i = 0; i < COUNT(rows); i++) {
        uint64_t rng = 25;
        double error = 0, energy = 0, radii = 0;
        for (uint32_t p = 0; p < PAGES; p++) {
            fill_normal(x, COUNT(x), &rng);
            encode_decode(rows[i].spec, D, KVANT_ROLE_K, x, decoded);
            error += squared_distance(x, decoded, COUNT(x));
            for (uint32_t t = 0; t < 64; t++) {
                double largest = 0;
                for (uint32_t c = 0; c < D; c += 4) {
                    double squares = 0;
                    for (uint32_t j = 0; j < 4; j++)
                        squares += (double)x[t * D + c + j] * x[t * D + c + j];
                    largest = squares > largest ? squares : largest;
                    energy += squares;
                }
                radii += largest / pow((1 << rows[i].radius_bits) - 1, 2) / 12 * (D / 4);
            }
        }
        double want = book_covering(rows[i].spec, &rng).mean_square + radii / energy;
        if (!(fabs(error / energy / want - 1) <= 0.02))
            fail_msg("%s: error %.5f, expected %.5f", rows[i].spec, error / energy, want);
    }
}

/* With scale=unbiased the coded part of a row keeps its length: <y, decoded> = |y|^2 except for the
 * rounding of the stored scale. This needs chunks whose radius is not 0, as nearly all chunks of
 * normal rows have at 4 bits. */
CASE(unbiased_scale)
{
    enum { D = 64 };
    static float x[64 * D], decoded[64 * D];
    uint64_t rng = 26;
    fill_normal(x, COUNT(x), &rng);
    for (uint32_t i = 0; i < COUNT(x); i += 4) /* no chunk near zero */
        x[i] += x[i] > 0 ? 2 : -2;
    encode_decode("hqmq-s24r4:rotate=none", D, KVANT_ROLE_K, x, decoded);
    for (uint32_t t = 0; t < 64; t++) {
        double product = 0, squares = 0;
        for (uint32_t j = 0; j < D; j++) {
            product += (double)x[t * D + j] * decoded[t * D + j];
            squares += (double)x[t * D + j] * x[t * D + j];
        }
        /* Half a unit of fp16 is 2^-11. The rounding of sums of 16 terms and their 6 operations is
         * far smaller. */
        assert_true(fabs(product / squares - 1) <= pow(2, -11) + 1e-5);
    }
}

/* --- specs --- */

CASE(bad_specs_are_refused)
{
    static const char *const specs[] = {
        "hqmq-4",
        "hqmq-s0r4",
        "hqmq-s1025r4",
        "hqmq-s96r1",
        "hqmq-s96r9",
        "hqmq-s96",
        "hqmq-s96r4x",
        "hqmq-r4s96",
        "hqmq-s96r4:slots=2",
        "hqmq-s96r4:med3,slots=17",
        "hqmq-s96r4:med",
        "hqmq-s96r4:med3=1",
        "hqmq-s96r4:med3,med=4",
        "hqmq-s96r2:med3,slots=5",
        "hqmq-s96r4:book=other",
        "hqmq-s96r4:group=4",
        "hqmq-s96r4:median=page",
        "hqmq-s96r4:med3,range=all",
        "hqmq-s96r4:med3,median=page,slots=2049",
        "hqmq-s5r2:med3,median=page,slots=33",
        "naive-8",
        "naive-2:slots=65",
    };
    for (size_t i = 0; i < COUNT(specs); i++)
        expect_bad_spec(specs[i], 128, KVANT_ERR_SPEC, "");
}

RUN_CASES(NULL, NULL)
