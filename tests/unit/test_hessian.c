/* test_hessian.c - eigenvectors, and the query basis against its formulas, which the test computes
 * from other codecs and plain sums. */
#include "calibrated_fixture.h"

#include "../../src/codec/papers/jacobi.h"

/* --- eigenvectors --- */

CASE(eigenvectors_of_a_known_matrix)
{
    static const double matrix[] = {
        2, -9, 0, 1, 2, -9, 0, 0, 5
    }; /* the part above the diagonal is not read */
    static const float expected[] = {
        0, 0, 1, 0.70710678f, 0.70710678f, 0, 0.70710678f, -0.70710678f, 0
    };
    float vectors[9];
    assert_int_equal(kvant_eigenvectors(3, matrix, vectors), KVANT_OK);
    for (uint32_t i = 0; i < 9; i++)
        assert_true(fabsf(vectors[i] - expected[i]) <= 6e-8f);
}

/* Vectors are rounded to binary32, so |v_i v_j - delta| <= sqrt(n) 2^-24 and |M v - lambda v| <= 2
 * sqrt(n) 2^-24 |M|. */
CASE(eigenvectors_follow_their_definition)
{
    static const uint32_t sizes[] = { 1, 2, 5, 64, 80 };
    uint64_t rng = 21;
    for (size_t s = 0; s < COUNT(sizes); s++) {
        uint32_t n = sizes[s];
        double *matrix = calloc((size_t)n * n, sizeof *matrix), norm = 0, before = INFINITY;
        float *v = malloc((size_t)n * n * sizeof *v), x[80];
        for (uint32_t k = 0; k < n + 3;
             k++) { /* sums of outer products, as second moments are; sizes from 1 to 50 */
            fill_normal(x, n, &rng);
            for (uint32_t i = 0; i < n; i++)
                for (uint32_t j = 0; j < n; j++)
                    matrix[i * n + j] += (double)x[i] * x[j] * (1 + i % 50) * (1 + j % 50);
        }
        for (uint32_t i = 0; i < n * n; i++)
            norm += matrix[i] * matrix[i];
        assert_int_equal(kvant_eigenvectors(n, matrix, v), KVANT_OK);
        for (uint32_t a = 0; a < n; a++) {
            double lambda = 0, rest = 0;
            float largest = 0;
            for (uint32_t b = 0; b < n; b++) {
                double product = 0, row = 0;
                for (uint32_t j = 0; j < n; j++) {
                    product += (double)v[a * n + j] * v[b * n + j];
                    row += matrix[b * n + j] * v[a * n + j];
                }
                assert_true(fabs(product - (a == b)) <= sqrt(n) * 6e-8 * 2);
                lambda += row * v[a * n + b];
                largest = fabsf(v[a * n + b]) > fabsf(largest) ? v[a * n + b] : largest;
            }
            for (uint32_t b = 0; b < n; b++) {
                double row = -lambda * v[a * n + b];
                for (uint32_t j = 0; j < n; j++)
                    row += matrix[b * n + j] * v[a * n + j];
                rest += row * row;
            }
            assert_true(sqrt(rest) <= 2 * sqrt(n) * 6e-8 * sqrt(norm));
            assert_true(largest > 0 && lambda <= before * (1 + 1e-6));
            before = lambda;
        }
        free(matrix);
        free(v);
    }
}

/* --- hessian --- */

/* Transforms blocks of the given size in place. Entry (i, j) is (-1)^(number of common bits of i
 * and j) / sqrt(block). */
static void naive_hadamard(double *x, uint32_t n, uint32_t block)
{
    double out[DIM];
    for (uint32_t i = 0; i < n; i++) {
        out[i] = 0;
        for (uint32_t j = i / block * block; j < i / block * block + block; j++) {
            uint32_t odd = 0;
            for (uint32_t common = i % block & j % block; common; common >>= 1)
                odd ^= common & 1;
            out[i] += (odd ? -x[j] : x[j]) / sqrt(block);
        }
    }
    memcpy(x, out, n * sizeof *x);
}

static void apply_basis(const float *basis, double *x)
{
    double out[DIM] = { 0 };
    for (uint32_t i = 0; i < DIM; i++)
        for (uint32_t j = 0; j < DIM; j++)
            out[i] += (double)basis[i * DIM + j] * x[j];
    memcpy(x, out, sizeof out);
}

/* Equation 11: (q H) R, with R's columns the eigenvectors of the second moment; pool=layer sums the
 * kv heads. */
CASE(hessian_rotates_as_the_paper_says)
{
    static const struct {
        const char *spec;
        uint32_t block, eigen_first, per_layer;
    } cases[] = {
        { "hessian-4", 32, 0, 0 },
        { "hessian-4:block=8", 8, 0, 0 },
        { "hessian-4:order=eigen,block=16", 16, 1, 0 },
        { "hessian-4:rotate=none", 1, 0, 0 },
        { "hessian-4:pool=layer", 32, 0, 1 },
    };
    kvant_calibration *c = calibrate_fixed(DIM);
    uint64_t rng = 4;
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int role = 0; role < 2; role++) {
            double moment[DIM * DIM] = { 0 }, x[DIM];
            float basis[DIM * DIM], q[DIM], y[DIM];
            for (uint32_t head = cases[i].per_layer ? 0 : 1; head < 2; head++)
                for (uint32_t j = 0; j < DIM * DIM; j++)
                    moment[j] += entry_of(c, head, KVANT_ROLE_K).query_moment[j];
            assert_int_equal(kvant_eigenvectors(DIM, moment, basis), KVANT_OK);
            kvant_codec *codec = create(cases[i].spec, DIM, (kvant_role)role, c);
            fill_normal(q, DIM, &rng);
            for (uint32_t j = 0; j < DIM; j++)
                x[j] = q[j];
            if (cases[i].eigen_first)
                apply_basis(basis, x);
            naive_hadamard(x, DIM, cases[i].block);
            if (!cases[i].eigen_first)
                apply_basis(basis, x);
            assert_int_equal(kvant_codec_transform_query(codec, NULL, q, y), KVANT_OK);
            /* 32 products of numbers below 5 in binary32, with a matrix of binary32 */
            for (uint32_t j = 0; j < DIM; j++)
                assert_true(fabs(y[j] - x[j]) <= 2 * 32 * 5 * pow(2, -24));
            kvant_codec_free(&codec);
        }
    kvant_calibration_free(&c);
}

/* In the eigenbasis the queries' second moment is diagonal and descending. */
CASE(hessian_separates_the_queries_directions)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    const float *moment = entry_of(c, 1, KVANT_ROLE_K).query_moment;
    kvant_codec *codec = create("hessian-4:rotate=none", DIM, KVANT_ROLE_K, c);
    float rotated[DIM * DIM], column[DIM];
    for (uint32_t i = 0; i < DIM; i++) /* R M, row by row of M */
        assert_ok(kvant_codec_transform_query(codec, NULL, moment + i * DIM, rotated + i * DIM));
    double before = INFINITY;
    for (uint32_t i = 0; i < DIM; i++) { /* R M R^T */
        float out[DIM];
        for (uint32_t j = 0; j < DIM; j++)
            column[j] = rotated[j * DIM + i];
        assert_int_equal(kvant_codec_transform_query(codec, NULL, column, out), KVANT_OK);
        for (uint32_t j = 0; j < DIM; j++) /* entries of M reach 30 */
            assert_true(j == i || fabsf(out[j]) <= 32 * 32 * 30 * pow(2, -24));
        assert_true(out[i] <= before * (1 + 1e-5));
        before = out[i];
    }
    kvant_codec_free(&codec);
    kvant_calibration_free(&c);
}

/* After its rotation, hessian is int: equal y give equal bytes. */
CASE(hessian_quantises_as_int)
{
    kvant_calibration *c = calibrate_fixed(DIM);
    uint64_t rng = 5;
    for (int role = 0; role < 2; role++) {
        kvant_codec *hessian = create("hessian-4:group=8", DIM, (kvant_role)role, c);
        kvant_codec *plain = make_codec("int-4:group=8", DIM, (kvant_role)role);
        float rows[TOKENS * DIM], y[TOKENS * DIM];
        fill_rows(rows, DIM, &rng);
        for (uint32_t t = 0; t < TOKENS; t++)
            assert_ok(kvant_codec_transform_query(hessian, NULL, rows + t * DIM, y + t * DIM));
        void *a = encode(hessian, rows), *b = encode(plain, y);
        assert_int_equal(info_of(hessian).page_bytes, info_of(plain).page_bytes);
        assert_memory_equal(a, b, info_of(plain).page_bytes);
        free(a);
        free(b);
        kvant_codec_free(&hessian);
        kvant_codec_free(&plain);
    }
    kvant_calibration_free(&c);
}

RUN_CASES(NULL, NULL)
