/* test_weighting.c - transform=file and transform=diagonal: matrices and their means, what a calibrator makes of moments, and codecs
 * behind a W. */
#include "calibrated_fixture.h"

#include <kvant/attention.h>

#include "../../src/base/alloc.h"
#include "../../src/base/half.h"
#include "../../src/calibration/format.h"
#include "../../src/calibration/moments.h"
#include "../../src/codec/codec_internal.h"
#include "../../src/math/spd.h"
#include "../../src/math/tridiagonal.h"

/* Sum of n outer products of normal vectors whose channels have sizes from 1 to spread. */
static void random_moment(double *m, uint32_t d, uint32_t n, double spread, uint64_t *rng)
{
    double x[128];
    memset(m, 0, sizeof *m * d * d);
    for (uint32_t k = 0; k < n; k++) {
        double shared = test_normal(rng);
        for (uint32_t i = 0; i < d; i++)
            x[i] = (test_normal(rng) + shared) * pow(spread, (double)(i * 7 % d) / d);
        for (uint32_t i = 0; i < d * d; i++)
            m[i] += x[i / d] * x[i % d] / n;
    }
}

static void multiply(const double *a, const double *b, uint32_t d, double *out)
{
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++) {
            double sum = 0;
            for (uint32_t k = 0; k < d; k++)
                sum += a[i * d + k] * b[k * d + j];
            out[i * d + j] = sum;
        }
}

static double norm(const double *m, uint32_t d)
{
    double sum = 0;
    for (uint32_t i = 0; i < d * d; i++)
        sum += m[i] * m[i];
    return sqrt(sum);
}

static double difference(const double *a, const double *b, uint32_t d)
{
    double sum = 0;
    for (uint32_t i = 0; i < d * d; i++)
        sum += (a[i] - b[i]) * (a[i] - b[i]);
    return sqrt(sum);
}

/* --- matrices --- */

/* Products and eigenvectors err by about d 2^-53 of the norms of their factors; condition numbers here stay below 10^6. */
static void inverses_and_roots_follow_their_definitions(void **state)
{
    static const uint32_t dims[] = { 1, 2, 7, 64 };
    (void)state;
    uint64_t rng = 31;
    for (size_t i = 0; i < COUNT(dims); i++) {
        uint32_t d = dims[i], size = d * d;
        double *m = malloc(sizeof *m * size * 5), *a = m + size, *b = a + size, *product = b + size,
               *unit = product + size;
        random_moment(m, d, 2 * d, 20, &rng);
        for (uint32_t j = 0; j < size; j++)
            unit[j] = j / d == j % d;
        assert_int_equal(kvant_spd_inverse(d, m, a), KVANT_OK);
        multiply(m, a, d, product);
        double slack = 4 * d * 0x1p-53;
        assert_true(difference(product, unit, d) <= slack * norm(m, d) * norm(a, d));
        assert_int_equal(kvant_spd_roots(d, m, a, b), KVANT_OK);
        multiply(a, a, d, product);
        assert_true(difference(product, m, d) <= slack * norm(a, d) * norm(a, d) * d);
        multiply(a, b, d, product);
        assert_true(difference(product, unit, d) <= slack * norm(a, d) * norm(b, d) * d);
        free(m);
    }
}

/* Orthonormal vectors and M v = lambda v within some n 2^-53 |M|, for matrices with equal, zero, negative and graded eigenvalues. */
static void eigenvectors_follow_their_definition(void **state)
{
    static const uint32_t dims[] = { 1, 2, 3, 16, 65, 128 };
    (void)state;
    uint64_t rng = 41;
    for (size_t i = 0; i < COUNT(dims); i++)
        for (uint32_t kind = 0; kind < 5; kind++) {
            uint32_t d = dims[i], size = d * d;
            double *m = malloc(sizeof *m * (4 * size + d)), *copy = m + size, *v = copy + size, *product = v + size;
            double *values = product + size;
            random_moment(m, d, kind == 1 ? d / 2 + 1 : 2 * d, kind == 2 ? 1e4 : 3, &rng); /* 1: of half the rank */
            for (uint32_t j = 0; j < size; j++) {
                bool on = j / d == j % d;
                m[j] = kind == 3 ? (double)on : kind == 4 ? on * ((double)(j % d) - 3) : m[j];
            }
            memcpy(copy, m, sizeof *m * size);
            assert_int_equal(kvant_tridiagonal_eigen(d, copy, values, v), KVANT_OK);
            double slack = 4 * d * 0x1p-53;
            multiply(v, m, d, product);
            for (uint32_t j = 0; j < size; j++)
                product[j] -= values[j / d] * v[j];
            assert_true(norm(product, d) <= slack * norm(m, d) * sqrt(d));
            for (uint32_t j = 0; j < size; j++) {
                double inner = 0;
                for (uint32_t k = 0; k < d; k++)
                    inner += v[j / d * d + k] * v[j % d * d + k];
                assert_true(fabs(inner - (j / d == j % d)) <= slack * sqrt(d));
            }
            free(m);
        }
    double bad[] = { NAN, 1, 1, 2 }, values[2], vectors[4];
    assert_int_equal(kvant_tridiagonal_eigen(2, bad, values, vectors), KVANT_ERR_ARGUMENT);
}

/* The square of a geometric mean, by the kernel in use. */
static void geometric_mean(const double *a, const double *b, uint32_t d, double *mean)
{
    double *room = malloc((2 * d * d + KVANT_MEAN_ROOM(d)) * sizeof *room), *w = room + d * d, *copy = memcpy(room, a, d * d * sizeof *a);
    memcpy(w, b, d * d * sizeof *b);
    assert_true(kvant_kernels_get(KVANT_CPU_AUTO)->mean_factor(d, copy, w, w + d * d) > 0);
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < i; j++)
            w[i * d + j] = 0;
    for (uint32_t i = 0; i < d; i++)
        for (uint32_t j = 0; j < d; j++) {
            mean[i * d + j] = 0;
            for (uint32_t k = 0; k < d; k++)
                mean[i * d + j] += w[k * d + i] * w[k * d + j];
        }
    free(room);
}

/* Eigenvalues of a square root within 2.7 10^-6 of themselves: products of two such within twice that of the largest. */
static void means_solve_their_equation(void **state)
{
    static const uint32_t dims[] = { 1, 2, 5, 24, 64, 128 };
    (void)state;
    uint64_t rng = 32;
    for (size_t i = 0; i < COUNT(dims); i++) {
        const uint32_t d = dims[i], size = d * d;
        double *a = malloc(sizeof *a * size * 5), *b = a + size, *mean = b + size, *product = mean + size, *back = product + size;
        random_moment(a, d, 3 * d, 5, &rng);
        random_moment(b, d, 3 * d, 5, &rng);
        geometric_mean(a, b, d, mean);
        multiply(mean, a, d, product);
        multiply(product, mean, d, back);
        assert_true(difference(back, b, d) <= 1e-5 * norm(b, d));
        free(a);
    }
}

static void what_is_not_positive_definite_is_refused(void **state)
{
    static const double indefinite[] = { 1, 2, 2, 1 }, zero[4] = { 0 }, nan_matrix[] = { NAN, 0, 0, 1 };
    static const double *const bad[] = { indefinite, zero, nan_matrix };
    double out[4];
    (void)state;
    for (size_t i = 0; i < COUNT(bad); i++) {
        assert_int_equal(kvant_spd_inverse(2, bad[i], out), KVANT_ERR_ARGUMENT);
        assert_int_equal(kvant_spd_roots(2, bad[i], out, NULL), KVANT_ERR_ARGUMENT);
    }
}

/* --- weights --- */

enum { SMALL = 16 };

typedef struct weights {
    float diagonal[SMALL];
    uint16_t triangle[SMALL * (SMALL + 1) / 2];
    double w[SMALL * SMALL], inverse[SMALL * SMALL];
} weights;

static void read_weights(weights *w)
{
    const uint16_t *half = w->triangle;
    for (uint32_t i = 0; i < SMALL; i++)
        for (uint32_t j = 0; j <= i; j++)
            w->w[i * SMALL + j] = w->w[j * SMALL + i] = kvant_half_to_float(*half++);
    assert_int_equal(kvant_spd_inverse(SMALL, w->w, w->inverse), KVANT_OK);
}

/* tr(W^-2 Q) tr(W^2 K) for symmetric W: proportional to the mean squared error of a score. */
static double expected_error(const double *w, const double *inverse, const double *q, const double *k)
{
    double squared[SMALL * SMALL], back[SMALL * SMALL], a = 0, b = 0;
    multiply(w, w, SMALL, squared);
    multiply(inverse, inverse, SMALL, back);
    for (uint32_t i = 0; i < SMALL * SMALL; i++) {
        a += back[i] * q[i];
        b += squared[i] * k[i];
    }
    return a * b;
}

static double error_of_diagonal(const float *diagonal, const double *q, const double *k)
{
    double a = 0, b = 0;
    for (uint32_t i = 0; i < SMALL; i++) {
        a += q[i * SMALL + i] / ((double)diagonal[i] * diagonal[i]);
        b += k[i * SMALL + i] * diagonal[i] * diagonal[i];
    }
    return a * b;
}

/* W is the best up to what the floors (3 10^-4 of the mean for each moment, 2^-10 |W| on W) and binary16 cost. Near the optimum an
 * error of W counts in the second order, a floor in the first: 1 % is many times both. Anything else that one could use is worse. */
static void weights_make_errors_of_scores_small(void **state)
{
    static double q[SMALL * SMALL], k[SMALL * SMALL], best[SMALL * SMALL], best_inverse[SMALL * SMALL];
    (void)state;
    uint64_t rng = 33;
    for (int round = 0; round < 5; round++) {
        weights w;
        random_moment(q, SMALL, 3 * SMALL, 4, &rng);
        random_moment(k, SMALL, 3 * SMALL, 0.2, &rng);
        assert_int_equal(kvant_make_weights(SMALL, q, k, k, w.diagonal, w.triangle), KVANT_OK);
        read_weights(&w);
        geometric_mean(k, q, SMALL, best);
        assert_int_equal(kvant_spd_roots(SMALL, best, best, best_inverse), KVANT_OK);
        double least = expected_error(best, best_inverse, q, k), ours = expected_error(w.w, w.inverse, q, k);
        double diagonal = error_of_diagonal(w.diagonal, q, k), none = 0, traces[2] = { 0 };
        for (uint32_t i = 0; i < SMALL; i++) {
            traces[0] += q[i * SMALL + i];
            traces[1] += k[i * SMALL + i];
        }
        none = traces[0] * traces[1];
        assert_true(least <= ours && ours <= 1.01 * least);
        assert_true(ours < diagonal && diagonal < none);
        /* the best diagonal has the error (sum sqrt(Q_ii K_ii))^2, by Cauchy and Schwarz */
        double sum = 0;
        for (uint32_t i = 0; i < SMALL; i++)
            sum += sqrt(q[i * SMALL + i] * k[i * SMALL + i]);
        assert_true(diagonal >= sum * sum * (1 - 1e-6) && diagonal <= sum * sum * 1.01);
    }
}

/* Lengths of keys are kept, so that scales stay where fp16 has them: tr(W^2 K) = tr K, except for the floors. */
static void weights_keep_the_length_of_keys(void **state)
{
    static double q[SMALL * SMALL], k[SMALL * SMALL], squared[SMALL * SMALL];
    (void)state;
    uint64_t rng = 34;
    weights w;
    random_moment(q, SMALL, 3 * SMALL, 10, &rng);
    random_moment(k, SMALL, 3 * SMALL, 10, &rng);
    for (uint32_t i = 0; i < SMALL * SMALL; i++)
        k[i] *= 1e4;
    assert_int_equal(kvant_make_weights(SMALL, q, k, k, w.diagonal, w.triangle), KVANT_OK);
    read_weights(&w);
    double before = 0, after = 0, by_diagonal = 0;
    multiply(w.w, w.w, SMALL, squared);
    for (uint32_t i = 0; i < SMALL * SMALL; i++)
        after += squared[i] * k[i];
    for (uint32_t i = 0; i < SMALL; i++) {
        before += k[i * SMALL + i];
        by_diagonal += k[i * SMALL + i] * w.diagonal[i] * w.diagonal[i];
    }
    assert_true(fabs(after / before - 1) < 0.02 && fabs(by_diagonal / before - 1) < 0.01);
}

static void expect_identity(const double *q, const double *k)
{
    weights w;
    assert_int_equal(kvant_make_weights(SMALL, q, k, k, w.diagonal, w.triangle), KVANT_OK);
    read_weights(&w);
    for (uint32_t i = 0; i < SMALL * SMALL; i++)
        assert_true(w.w[i] == (i / SMALL == i % SMALL));
    for (uint32_t i = 0; i < SMALL; i++)
        assert_true(w.diagonal[i] == 1);
}

/* No queries, or keys that never change: nothing to weigh by. Dead channels of either are floored, not blown up. */
static void unused_directions_stay_within_bounds(void **state)
{
    static double q[SMALL * SMALL], k[SMALL * SMALL], zero[SMALL * SMALL];
    (void)state;
    uint64_t rng = 35;
    random_moment(q, SMALL, 3 * SMALL, 1, &rng);
    random_moment(k, SMALL, 3 * SMALL, 1, &rng);
    expect_identity(zero, k);
    expect_identity(q, zero);
    for (uint32_t i = 0; i < SMALL; i++) {
        q[3 * SMALL + i] = q[i * SMALL + 3] = 0;
        k[5 * SMALL + i] = k[i * SMALL + 5] = 0;
        q[7 * SMALL + i] = q[i * SMALL + 7] = k[7 * SMALL + i] = k[i * SMALL + 7] = 0;
    }
    weights w;
    assert_int_equal(kvant_make_weights(SMALL, q, k, k, w.diagonal, w.triangle), KVANT_OK);
    read_weights(&w);
    /* moments of trace d with a floor of 3 10^-4 have conditions below 16 / 3 10^-4 + 1 = 53334, their geometric mean too, and W the
     * root of it */
    assert_true(norm(w.w, SMALL) * norm(w.inverse, SMALL) <= SMALL * sqrt(53334));
    for (uint32_t i = 0; i < SMALL; i++)
        assert_true(w.diagonal[i] > 0.01f && w.diagonal[i] < 100);
    assert_true(w.diagonal[3] < w.diagonal[0] && w.diagonal[5] > w.diagonal[0]);
}

/* Two keys with equal scores share the probability, a third is hidden, and a query that sees nothing adds nothing. */
static void attention_weights_are_those_of_softmax(void **state)
{
    static const float keys[] = { 1, 0, 1, 5, 7, 7, 1, 2 }, queries[] = { 3, 0, 1, 1 };
    static const float mask[] = { 0, 0, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY };
    kvant_calibrator_attention a = { sizeof a, keys, 2, 4, queries, 2, 2, mask, 4, 0.5f };
    float scores[4];
    double got[4] = { 0 };
    (void)state;
    kvant_attention_weights(&a, 2, scores, got);
    assert_true(fabs(got[0] - 0.25) < 1e-7 && fabs(got[1] - 0.25) < 1e-7 && got[2] == 0 && got[3] == 0);
    a.mask = NULL;
    a.n_queries = 1;
    memset(got, 0, sizeof got);
    kvant_attention_weights(&a, 2, scores, got);
    for (uint32_t i = 0; i < 4; i++) { /* scores 1.5 1.5 10.5 1.5 */
        double e = exp(i == 2 ? 0 : -9), p = e / (1 + 3 * exp(-9));
        assert_true(fabs(got[i] - p * (1 - p)) <= 1e-6 * got[i]);
    }
}

/* Keys that attention looks at have another covariance than all keys: W follows it, and the first keys count for nothing. */
static void attention_changes_the_weights(void **state)
{
    enum { N = 80, D = 4 };
    static float keys[N * D], q[D] = { 1, 0.5f, 0.25f, 0.25f };
    float means[3][D];
    (void)state;
    uint64_t rng = 36;
    fill_normal(keys, N * D, &rng);
    for (uint32_t kind = 0; kind < 3; kind++) { /* none, some, only keys that stay exact */
        kvant_calibrator_config config = { .size = sizeof config };
        kvant_calibrator *calibrator;
        kvant_calibration *c;
        kvant_calibrator_attention a = { sizeof a, keys, D, N, q, D, 1, NULL, 0, 2 };
        assert_int_equal(kvant_calibrator_create(&config, &calibrator, NULL, 0), KVANT_OK);
        assert_int_equal(kvant_calibrator_add_attention(calibrator, 0, 0, D, 0, &a),
                         KVANT_ERR_ARGUMENT); /* no keys yet */
        assert_int_equal(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 1, D, keys, D, N), KVANT_OK);
        assert_int_equal(kvant_calibrator_add_queries(calibrator, 0, 0, D, q, D, 1), KVANT_OK);
        if (kind)
            assert_int_equal(kvant_calibrator_add_attention(calibrator, 0, 0, D, kind == 1 ? 0 : N, &a), KVANT_OK);
        a.scale = NAN;
        assert_int_equal(kvant_calibrator_add_attention(calibrator, 0, 0, D, 0, &a), KVANT_ERR_ARGUMENT);
        a.scale = 3e38f; /* scores beyond binary32 */
        assert_int_equal(kvant_calibrator_add_attention(calibrator, 0, 0, D, 0, &a), KVANT_ERR_NONFINITE);
        assert_int_equal(kvant_calibrator_finish(calibrator, &c), KVANT_OK);
        kvant_calibration_entry entry = { .size = sizeof entry };
        assert_int_equal(kvant_calibration_get_entry(c, 0, 0, KVANT_ROLE_K, &entry), KVANT_OK);
        memcpy(means[kind], entry.diagonal, sizeof means[kind]);
        kvant_calibration_free(&c);
        kvant_calibrator_free(&calibrator);
    }
    assert_memory_equal(means[0], means[2], sizeof means[0]);
    assert_memory_not_equal(means[0], means[1], sizeof means[0]);
}

/* --- codecs --- */

static const char *const transforms[] = {
    "turboquant-4:transform=file",       "turboquant-4:transform=diagonal",
    "int-8:transform=file,rotate=none",  "int-8:transform=diagonal,rotate=none",
    "int-4:transform=file,rotate=dense", "int-4:transform=diagonal,rotate=dense",
    "bdr-4:transform=file,block=8",      "turboquant-4:transform=file,signs=none",
};

/* |W| |W^-1| of the codec's kv head, Frobenius norms. */
static double condition(const kvant_codec *codec, const kvant_calibration *c)
{
    kvant_calibration_entry entry = entry_of(c, 1, KVANT_ROLE_K);
    double w[DIM * DIM] = { 0 }, inverse[DIM * DIM] = { 0 };
    const uint16_t *half = entry.matrix;
    for (uint32_t i = 0; i < DIM; i++)
        for (uint32_t j = 0; j <= i; j++)
            w[i * DIM + j] = w[j * DIM + i] = kvant_half_to_float(*half++);
    if (codec->transform.diagonal) {
        memset(w, 0, sizeof w);
        for (uint32_t i = 0; i < DIM; i++)
            w[i * DIM + i] = entry.diagonal[i];
    }
    assert_int_equal(kvant_spd_inverse(DIM, w, inverse), KVANT_OK);
    return norm(w, DIM) * norm(inverse, DIM);
}

/* <R W x, R W^-1 q> = <x, q> and W^-1 R^T R W x = x. Entries of both matrices are rounded, each sum has up to DIM roundings, R up to
 * DIM more (dense) or 2 log2 DIM + 2, and twice that where it was multiplied into the matrix: 4 DIM 2^-24 in all for each of the two
 * factors, relative to |W| |W^-1| |x| |q| (Frobenius norms bound those of matrices of magnitudes). */
static void inner_products_stay(void **state)
{
    (void)state;
    kvant_calibration *c = calibrate_fixed(DIM);
    uint64_t rng = 37;
    for (size_t i = 0; i < COUNT(transforms); i++) {
        kvant_codec *codec = create(transforms[i], DIM, KVANT_ROLE_K, c);
        double slack = 8 * DIM * 0x1p-24 * condition(codec, c);
        assert_true(slack < 0.5); /* else nothing is tested */
        for (int round = 0; round < 50; round++) {
            float x[DIM], q[DIM], y[DIM], p[DIM], back[DIM];
            double before = 0, after = 0, size_x = 0, size_q = 0;
            fill_normal(x, DIM, &rng);
            fill_normal(q, DIM, &rng);
            kvant_transform_forward(&codec->transform, kvant_kernels_get(KVANT_CPU_AUTO), NULL, x, y);
            kvant_transform_inverse(&codec->transform, kvant_kernels_get(KVANT_CPU_AUTO), NULL, y, back);
            assert_int_equal(kvant_codec_transform_query(codec, NULL, q, p), KVANT_OK);
            for (uint32_t j = 0; j < DIM; j++) {
                before += (double)x[j] * q[j];
                after += (double)y[j] * p[j];
                size_x += (double)x[j] * x[j];
                size_q += (double)q[j] * q[j];
            }
            assert_true(fabs(after - before) <= slack * sqrt(size_x * size_q));
            assert_true(sqrt(squared_distance(x, back, DIM)) <= slack * sqrt(size_x));
        }
        kvant_codec_free(&codec);
    }
    kvant_calibration_free(&c);
}

/* Mean squared error of scores with queries of the second moment that W was made for: sum over tokens of e^T Q e. */
static double score_error(const char *spec, const kvant_calibration *c)
{
    kvant_codec *codec = create(spec, DIM, KVANT_ROLE_K, c);
    kvant_calibration_entry entry = entry_of(c, 1, KVANT_ROLE_K);
    kvant_affine affine = { entry.mean, NULL };
    float rows[TOKENS * DIM], decoded[TOKENS * DIM];
    uint64_t rng = 38;
    double error = 0;
    fill_rows(rows, DIM, &rng);
    void *page = aligned(info_of(codec).page_bytes);
    assert_int_equal(kvant_codec_encode(codec, &affine, rows, DIM, 0, TOKENS, page), KVANT_OK);
    assert_int_equal(kvant_codec_decode(codec, &affine, page, 0, TOKENS, decoded, DIM), KVANT_OK);
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t i = 0; i < DIM * DIM; i++)
            error += entry.query_moment[i] * ((double)decoded[t * DIM + i / DIM] - rows[t * DIM + i / DIM]) *
                     ((double)decoded[t * DIM + i % DIM] - rows[t * DIM + i % DIM]);
    free(page);
    kvant_codec_free(&codec);
    return error;
}

static void scores_err_less(void **state)
{
    (void)state;
    kvant_calibration *c = calibrate_fixed(DIM);
    double none = score_error("turboquant-4:center=file", c),
           diagonal = score_error("turboquant-4:transform=diagonal", c),
           matrix = score_error("turboquant-4:transform=file", c);
    assert_true(diagonal < 0.95 * none && matrix < diagonal);
    kvant_calibration_free(&c);
}

static void specs_say_what_they_do(void **state)
{
    static const struct {
        const char *spec, *key, *value;
    } cases[] = {
        { "turboquant-4:transform=file", ",transform=file,center=file,sink=4,seed=7", ",center=file,sink=4,seed=7" },
        { "turboquant-4:transform=diagonal,center=none", ",transform=diagonal,center=none,seed=7", "signs=seed,seed=7" },
        PAPERS({ "innerq-base:transform=file,recent=0,sink=0", ",transform=file,center=file,sink=0,recent=0",
                 ",center=file,sink=0,recent=0" }, )
        { "turboquant-4:transform=none", "signs=seed,seed=7", "signs=seed,seed=7" },
    };
    (void)state;
    kvant_calibration *c = calibrate_fixed(DIM);
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int role = 0; role < 2; role++) {
            kvant_codec *codec = create(cases[i].spec, DIM, (kvant_role)role, c);
            const char *end = role ? cases[i].value : cases[i].key, *spec = info_of(codec).spec;
            if (strlen(spec) < strlen(end) || strcmp(spec + strlen(spec) - strlen(end), end) != 0)
                fail_msg("%s became %s, expected it to end in %s", cases[i].spec, spec, end);
            assert_true((codec->transform.weights != NULL) == (role == 0 && strstr(cases[i].spec, "transform=none") == NULL));
            kvant_codec *again = create(spec, DIM, (kvant_role)role, c); /* canonical specs are their own */
            assert_string_equal(info_of(again).spec, spec);
            kvant_codec_free(&again);
            kvant_codec_free(&codec);
        }
    kvant_calibration_free(&c);
}

static void expect_refusal(const char *spec, uint32_t dim, kvant_role role, const kvant_calibration *c,
                           kvant_status expected, const char *words)
{
    kvant_codec *codec;
    char err[512] = "";
    kvant_status status = kvant_codec_create_calibrated(spec, dim, role, 0, c, 1, 1, &codec, err, sizeof err);
    if (status != expected || !strstr(err, words))
        fail_msg("%s: %s: \"%s\", expected %s with \"%s\"", spec, kvant_strerror(status), err,
                 kvant_strerror(expected), words);
    assert_null(codec);
}

static void mistakes_are_named(void **state)
{
    (void)state;
    kvant_calibration *c = calibrate_fixed(DIM);
    for (int role = 0; role < 2; role++) {
        kvant_role r = (kvant_role)role;
        expect_refusal("turboquant-4:transform=file", DIM, r, NULL, KVANT_ERR_UNSUPPORTED, "kvant calibrate");
        expect_refusal("turboquant-4:transform=file", 64, r, c, KVANT_ERR_ARGUMENT, "made for another model");
        expect_refusal("turboquant-4:transform=matrix", DIM, r, c, KVANT_ERR_SPEC, "none, diagonal, file");
        expect_refusal("int-4:transform=file,norm=first", DIM, r, c, KVANT_ERR_SPEC, "place of norm");
        PAPERS(expect_refusal("kmeans-4:c=4,transform=file", DIM, r, c, KVANT_ERR_SPEC, "no option 'transform'");)
        expect_refusal("f16:transform=file", DIM, r, c, KVANT_ERR_SPEC, "no option 'transform'");
    }
    kvant_calibration_free(&c);
}

/* A file that is whole but whose matrix no calibrator would write. */
static void matrices_without_inverse_are_refused(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind < 3; kind++) {
        kvant_calibration *c = calibrate_fixed(DIM);
        uint16_t *half = (uint16_t *)(uintptr_t)entry_of(c, 1, KVANT_ROLE_K).matrix;
        for (uint32_t i = 0; i < DIM; i++)
            for (uint32_t j = 0; j <= i; j++) /* zero; all ones; a condition of 2^17 */
                *half++ = kind == 1 || (kind == 2 && i == j) ? (i || kind == 1 ? 0x3c00 : 0x0080) : 0;
        expect_refusal("turboquant-4:transform=file", DIM, KVANT_ROLE_K, c, KVANT_ERR_FORMAT, "no good inverse");
        kvant_codec *fine = create("turboquant-4:transform=diagonal", DIM, KVANT_ROLE_K, c);
        kvant_codec_free(&fine);
        kvant_calibration_free(&c);
    }
}

static void bad_rows_are_refused(void **state)
{
    static const float bad[] = { NAN, INFINITY, 3e38f, 60000 };
    (void)state;
    kvant_calibration *c = calibrate_fixed(DIM);
    for (size_t s = 0; s < COUNT(transforms); s++) {
        kvant_codec *codec = create(transforms[s], DIM, KVANT_ROLE_K, c);
        size_t bytes = info_of(codec).page_bytes;
        uint8_t *page = aligned(bytes), *zeros = aligned(bytes);
        float rows[TOKENS * DIM] = { 0 }, decoded[TOKENS * DIM];
        for (size_t i = 0; i < COUNT(bad); i++) {
            rows[60 * DIM + 7] = bad[i];
            kvant_status status = kvant_codec_encode(codec, NULL, rows, DIM, 0, TOKENS, page);
            assert_true(i == 3 ? status == KVANT_OK || status == KVANT_ERR_RANGE
                               : status == (i == 2 ? KVANT_ERR_RANGE : KVANT_ERR_NONFINITE));
            if (status != KVANT_OK)
                assert_memory_equal(page, zeros, bytes);
            assert_int_equal(kvant_codec_decode(codec, NULL, page, 0, TOKENS, decoded, DIM), KVANT_OK);
            for (size_t j = 0; j < COUNT(decoded); j++)
                assert_true(isfinite(decoded[j]));
        }
        free(page);
        free(zeros);
        kvant_codec_free(&codec);
    }
    kvant_calibration_free(&c);
}

static void pages_do_not_tell_the_level(void **state)
{
    static const uint32_t dims[] = { 32, 64, 80 };
    (void)state;
    uint64_t rng = 39;
    for (size_t d = 0; d < COUNT(dims); d++) {
        kvant_calibration *c = calibrate_fixed(dims[d]);
        for (size_t s = 0; s < N_WEIGHTED_SPECS; s++) {
            kvant_codec *codec = create(weighted_specs[s], dims[d], KVANT_ROLE_K, c);
            size_t bytes = info_of(codec).page_bytes;
            static float rows[TOKENS * 80];
            uint8_t *page = aligned(bytes), *want = aligned(bytes);
            fill_normal(rows, TOKENS * dims[d], &rng);
            for (size_t l = 0; l < COUNT(cpu_levels); l++) { /* the first is portable C */
                if (!use_level(cpu_levels[l]))
                    continue;
                memset(page, 0, bytes);
                assert_int_equal(kvant_codec_encode(codec, NULL, rows, dims[d], 0, TOKENS, l ? page : want),
                                 KVANT_OK);
                if (l && memcmp(page, want, bytes) != 0)
                    fail_msg("%s at %u: other bytes at level %s", weighted_specs[s], (unsigned)dims[d],
                             kvant_cpu_level_name(cpu_levels[l]));
            }
            kvant_set_cpu_level(KVANT_CPU_AUTO);
            free(page);
            free(want);
            kvant_codec_free(&codec);
        }
        kvant_calibration_free(&c);
    }
}

/* Attention on a tensor is that of what the tensor reads as, sealed and open pages, codes and tiles alike. */
static void attention_undoes_the_transform(void **state)
{
    enum { N = 300 };
    static const char *const specs[] = { "turboquant-4:transform=file", "turboquant-4:transform=diagonal",
                                         PAPERS("octopus-4:transform=file,recent=70", )
                                         "int-4:axis=channel,transform=file" };
    (void)state;
    kvant_calibration *c = calibrate_fixed(DIM);
    uint64_t rng = 40;
    for (size_t s = 0; s < COUNT(specs); s++) {
        kvant_codec *codecs[2] = { create(specs[s], DIM, KVANT_ROLE_K, c), create(specs[s], DIM, KVANT_ROLE_V, c) };
        kvant_tensor *tensors[2];
        void *memory[2];
        static float rows[2][(N / 64 + 1) * 64 * DIM];
        int64_t slots[N];
        for (int64_t i = 0; i < N; i++)
            slots[i] = i;
        for (int role = 0; role < 2; role++) {
            const kvant_codec *one = codecs[role];
            const kvant_tensor_params params = { .size = sizeof params,
                                                 .codecs = &one,
                                                 .n_kv_heads = 1,
                                                 .n_sequences = 1,
                                                 .n_blocks = N / 64 + 1 };
            size_t size;
            for (uint32_t first = 0; first < N; first += TOKENS)
                fill_rows(rows[role] + (size_t)first * DIM, DIM, &rng);
            assert_int_equal(kvant_tensor_size(&params, &size), KVANT_OK);
            memory[role] = aligned(size);
            assert_int_equal(kvant_tensor_create(&params, memory[role], &tensors[role]), KVANT_OK);
            assert_int_equal(kvant_tensor_write(tensors[role], slots, N, rows[role], DIM, 1), KVANT_OK);
            assert_int_equal(kvant_tensor_read(tensors[role], 0, N, rows[role], DIM), KVANT_OK);
        }
        float q[DIM], out[DIM];
        fill_normal(q, DIM, &rng);
        const kvant_attention_problem problem = { .size = sizeof problem,
                                                  .q = q,
                                                  .q_token_stride = DIM,
                                                  .q_head_stride = DIM,
                                                  .n_queries = 1,
                                                  .n_heads = 1,
                                                  .n_tokens = N,
                                                  .scale = 0.05f,
                                                  .out = out,
                                                  .out_token_stride = DIM,
                                                  .out_head_stride = DIM,
                                                  .n_threads = 1 };
        size_t bytes;
        assert_int_equal(kvant_attention_workspace(tensors[0], tensors[1], &problem, &bytes), KVANT_OK);
        void *workspace = aligned(bytes);
        assert_int_equal(kvant_attention(tensors[0], tensors[1], &problem, workspace, bytes), KVANT_OK);
        double p[N], sum = 0, error = 0, size = 0;
        for (uint32_t t = 0; t < N; t++) {
            double score = 0;
            for (uint32_t j = 0; j < DIM; j++)
                score += (double)q[j] * rows[0][t * DIM + j];
            sum += p[t] = exp(0.05 * score);
        }
        for (uint32_t j = 0; j < DIM; j++) {
            double want = 0;
            for (uint32_t t = 0; t < N; t++)
                want += p[t] / sum * rows[1][t * DIM + j];
            error += (out[j] - want) * (out[j] - want);
            size += want * want;
        }
        /* queries are rounded to 10 bits and more, scores reach 0.05 |q| |k| = 0.05 x 6 x 60: 2 % of a probability at most, which
         * a wrong transform exceeds by far; open pages are fp16 */
        assert_true(sqrt(error) <= 0.02 * sqrt(size));
        for (int role = 0; role < 2; role++) {
            kvant_tensor_free(&tensors[role]);
            kvant_codec_free(&codecs[role]);
            free(memory[role]);
        }
        free(workspace);
    }
    kvant_calibration_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inverses_and_roots_follow_their_definitions),
        cmocka_unit_test(eigenvectors_follow_their_definition),
        cmocka_unit_test(means_solve_their_equation),
        cmocka_unit_test(what_is_not_positive_definite_is_refused),
        cmocka_unit_test(weights_make_errors_of_scores_small),
        cmocka_unit_test(weights_keep_the_length_of_keys),
        cmocka_unit_test(unused_directions_stay_within_bounds),
        cmocka_unit_test(attention_weights_are_those_of_softmax),
        cmocka_unit_test(attention_changes_the_weights),
        cmocka_unit_test(inner_products_stay),
        cmocka_unit_test(scores_err_less),
        cmocka_unit_test(specs_say_what_they_do),
        cmocka_unit_test(mistakes_are_named),
        cmocka_unit_test(matrices_without_inverse_are_refused),
        cmocka_unit_test(bad_rows_are_refused),
        cmocka_unit_test(pages_do_not_tell_the_level),
        cmocka_unit_test(attention_undoes_the_transform),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
