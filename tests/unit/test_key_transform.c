/* test_key_transform.c - how the key transform W is made: inverses, roots, eigenvectors and means
 * of matrices, and the W that a calibrator makes from second moments. */
#include "testing.h"

#include <kvant/calibration.h>

#include "../../src/base/half.h"
#include "../../src/calibration/moments.h"
#include "../../src/kernels/kernels.h"
#include "../../src/math/spd.h"
#include "../../src/math/tridiagonal.h"

/* Sum of n outer products of normal vectors whose channels have sizes from 1 to `spread`. */
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

/* Products and eigenvectors err by about d 2^-53 of the norms of their factors. Condition numbers
 * in these tests stay below 10^6. */
CASE(inverses_and_roots_follow_their_definitions)
{
    static const uint32_t dims[] = { 1, 2, 7, 64 };
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

/* Vectors are orthonormal and M v = lambda v within some n 2^-53 |M|, for matrices with equal,
 * zero, negative and graded eigenvalues. */
CASE(eigenvectors_follow_their_definition)
{
    static const uint32_t dims[] = { 1, 2, 3, 16, 65, 128 };
    uint64_t rng = 41;
    for (size_t i = 0; i < COUNT(dims); i++)
        for (uint32_t kind = 0; kind < 5; kind++) {
            uint32_t d = dims[i], size = d * d;
            double *m = malloc(sizeof *m * (4 * size + d)), *copy = m + size, *v = copy + size,
                   *product = v + size;
            double *values = product + size;
            random_moment(m, d, kind == 1 ? d / 2 + 1 : 2 * d, kind == 2 ? 1e4 : 3,
                          &rng); /* kind 1 has half the rank */
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
    double *room = malloc((2 * d * d + KVANT_MEAN_ROOM(d)) * sizeof *room), *w = room + d * d,
           *copy = memcpy(room, a, d * d * sizeof *a);
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

/* Eigenvalues of a square root err by 2.7 10^-6 of themselves, so products of two such roots err by
 * twice as much of the largest. */
CASE(means_solve_their_equation)
{
    static const uint32_t dims[] = { 1, 2, 5, 24, 64, 128 };
    uint64_t rng = 32;
    for (size_t i = 0; i < COUNT(dims); i++) {
        const uint32_t d = dims[i], size = d * d;
        double *a = malloc(sizeof *a * size * 5), *b = a + size, *mean = b + size,
               *product = mean + size, *back = product + size;
        random_moment(a, d, 3 * d, 5, &rng);
        random_moment(b, d, 3 * d, 5, &rng);
        geometric_mean(a, b, d, mean);
        multiply(mean, a, d, product);
        multiply(product, mean, d, back);
        assert_true(difference(back, b, d) <= 1e-5 * norm(b, d));
        free(a);
    }
}

CASE(what_is_not_positive_definite_is_refused)
{
    static const double indefinite[] = { 1, 2, 2, 1 }, zero[4] = { 0 },
                        nan_matrix[] = { NAN, 0, 0, 1 };
    static const double *const bad[] = { indefinite, zero, nan_matrix };
    double out[4];
    for (size_t i = 0; i < COUNT(bad); i++) {
        assert_int_equal(kvant_spd_inverse(2, bad[i], out), KVANT_ERR_ARGUMENT);
        assert_int_equal(kvant_spd_roots(2, bad[i], out, NULL), KVANT_ERR_ARGUMENT);
    }
}

/* --- W --- */

enum { SMALL = 16 };

typedef struct weights {
    float diagonal[SMALL];
    uint16_t triangle[SMALL * (SMALL + 1) / 2];
    double w[SMALL * SMALL], inverse[SMALL * SMALL];
} weights;

static void read_matrix(weights *w)
{
    const uint16_t *half = w->triangle;
    for (uint32_t i = 0; i < SMALL; i++)
        for (uint32_t j = 0; j <= i; j++)
            w->w[i * SMALL + j] = w->w[j * SMALL + i] = kvant_half_to_float(*half++);
    assert_int_equal(kvant_spd_inverse(SMALL, w->w, w->inverse), KVANT_OK);
}

/* tr(W^-2 Q) tr(W^2 K) for symmetric W: proportional to the mean squared error of a score. */
static double expected_error(const double *w, const double *inverse, const double *q,
                             const double *k)
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

/* W is the best matrix up to the cost of the floors (3 10^-4 of the mean for each moment, 2^-10 |W|
 * on W) and of binary16. Near the optimum, an error of W counts in the second order and a floor in
 * the first. So 1 % is many times both. Any other matrix that one could use is worse. */
CASE(matrices_make_errors_of_scores_small)
{
    static double q[SMALL * SMALL], k[SMALL * SMALL], best[SMALL * SMALL],
        best_inverse[SMALL * SMALL];
    uint64_t rng = 33;
    for (int round = 0; round < 5; round++) {
        weights w;
        random_moment(q, SMALL, 3 * SMALL, 4, &rng);
        random_moment(k, SMALL, 3 * SMALL, 0.2, &rng);
        assert_ok(kvant_make_key_transform(SMALL, q, k, k, w.diagonal, w.triangle));
        read_matrix(&w);
        geometric_mean(k, q, SMALL, best);
        assert_int_equal(kvant_spd_roots(SMALL, best, best, best_inverse), KVANT_OK);
        double least = expected_error(best, best_inverse, q, k),
               ours = expected_error(w.w, w.inverse, q, k);
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

/* The lengths of keys are kept, so that scales stay in the range of fp16: tr(W^2 K) = tr K, except
 * for the floors. */
CASE(matrices_keep_the_length_of_keys)
{
    static double q[SMALL * SMALL], k[SMALL * SMALL], squared[SMALL * SMALL];
    uint64_t rng = 34;
    weights w;
    random_moment(q, SMALL, 3 * SMALL, 10, &rng);
    random_moment(k, SMALL, 3 * SMALL, 10, &rng);
    for (uint32_t i = 0; i < SMALL * SMALL; i++)
        k[i] *= 1e4;
    assert_int_equal(kvant_make_key_transform(SMALL, q, k, k, w.diagonal, w.triangle), KVANT_OK);
    read_matrix(&w);
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
    assert_int_equal(kvant_make_key_transform(SMALL, q, k, k, w.diagonal, w.triangle), KVANT_OK);
    read_matrix(&w);
    for (uint32_t i = 0; i < SMALL * SMALL; i++)
        assert_true(w.w[i] == (i / SMALL == i % SMALL));
    for (uint32_t i = 0; i < SMALL; i++)
        assert_true(w.diagonal[i] == 1);
}

/* Without queries, or with keys that never change, there is nothing to choose W by. Dead channels
 * of queries or keys get a floor and do not become infinite. */
CASE(unused_directions_stay_within_bounds)
{
    static double q[SMALL * SMALL], k[SMALL * SMALL], zero[SMALL * SMALL];
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
    assert_int_equal(kvant_make_key_transform(SMALL, q, k, k, w.diagonal, w.triangle), KVANT_OK);
    read_matrix(&w);
    /* Moments of trace d with a floor of 3e-4 have condition numbers below 16 / 3e-4 + 1 = 53334.
     * So has their geometric mean, and W has the root of it. */
    assert_true(norm(w.w, SMALL) * norm(w.inverse, SMALL) <= SMALL * sqrt(53334));
    for (uint32_t i = 0; i < SMALL; i++)
        assert_true(w.diagonal[i] > 0.01f && w.diagonal[i] < 100);
    assert_true(w.diagonal[3] < w.diagonal[0] && w.diagonal[5] > w.diagonal[0]);
}

/* Two keys with equal scores share the probability, a third is hidden, and a query that sees no key
 * adds nothing. */
CASE(attention_weights_are_those_of_softmax)
{
    static const float keys[] = { 1, 0, 1, 5, 7, 7, 1, 2 }, queries[] = { 3, 0, 1, 1 };
    static const float mask[] = { 0,         0,         -INFINITY, -INFINITY,
                                  -INFINITY, -INFINITY, -INFINITY, -INFINITY };
    kvant_calibrator_attention a = { sizeof a, keys, 2, 4, queries, 2, 2, mask, 4, 0.5f };
    float scores[4];
    double got[4] = { 0 };
    kvant_attention_weights(&a, 2, scores, got);
    assert_true(fabs(got[0] - 0.25) < 1e-7 && fabs(got[1] - 0.25) < 1e-7 && got[2] == 0 &&
                got[3] == 0);
    a.mask = NULL;
    a.n_queries = 1;
    memset(got, 0, sizeof got);
    kvant_attention_weights(&a, 2, scores, got);
    for (uint32_t i = 0; i < 4; i++) { /* the third score is 10.5, all others are 1.5 */
        double e = exp(i == 2 ? 0 : -9), p = e / (1 + 3 * exp(-9));
        assert_true(fabs(got[i] - p * (1 - p)) <= 1e-6 * got[i]);
    }
}

/* Keys that attention looks at have another covariance than all keys. W follows the former, and the
 * first keys do not count. */
CASE(attention_changes_the_matrix)
{
    enum { N = 80, D = 4 };
    static float keys[N * D], q[D] = { 1, 0.5f, 0.25f, 0.25f };
    float means[3][D];
    uint64_t rng = 36;
    fill_normal(keys, N * D, &rng);
    for (uint32_t kind = 0; kind < 3; kind++) { /* no keys, some keys, only keys that stay exact */
        kvant_calibrator_config config = { .size = sizeof config };
        kvant_calibrator *calibrator;
        kvant_calibration *c;
        kvant_calibrator_attention a = { sizeof a, keys, D, N, q, D, 1, NULL, 0, 2 };
        assert_int_equal(kvant_calibrator_create(&config, &calibrator, NULL, 0), KVANT_OK);
        assert_int_equal(kvant_calibrator_add_attention(calibrator, 0, 0, D, 0, &a),
                         KVANT_ERR_ARGUMENT); /* no keys yet */
        assert_ok(kvant_calibrator_add_rows(calibrator, 0, KVANT_ROLE_K, 1, D, keys, D, N));
        assert_int_equal(kvant_calibrator_add_queries(calibrator, 0, 0, D, q, D, 1), KVANT_OK);
        if (kind)
            assert_ok(kvant_calibrator_add_attention(calibrator, 0, 0, D, kind == 1 ? 0 : N, &a));
        a.scale = NAN;
        assert_int_equal(kvant_calibrator_add_attention(calibrator, 0, 0, D, 0, &a),
                         KVANT_ERR_ARGUMENT);
        a.scale = 3e38f; /* scores beyond binary32 */
        assert_int_equal(kvant_calibrator_add_attention(calibrator, 0, 0, D, 0, &a),
                         KVANT_ERR_NONFINITE);
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

/* The codes of a triangle are rounded as roundf() rounds, also next to a half and beyond 7. */
CASE(codes_of_triangles_round_to_nearest)
{
    for (int i = -40; i <= 40; i++)
        for (int step = -1; step <= 1; step++)
            for (int width = -2; width <= 2; width++) {
                const float middle = (float)i / 4,
                            x = step ? nextafterf(middle, (float)step * INFINITY) : middle,
                            by = ldexpf(1, width), most = KVANT_TRIANGLE_CODE;
                const int want = (int)fminf(fmaxf(roundf(x), -most), most);
                assert_int_equal(kvant_triangle_code(x * by, by), want);
            }
    assert_int_equal(kvant_triangle_code(1, 0), 0);
}

RUN_CASES(NULL, NULL)
