/* test_index.c - scores of vector search, against plain double computations and against closed
 * forms of the estimator's error. test_index_contents.c tests which vectors are found,
 * test_index_file.c tests files. */
#include "index_fixture.h"

static const char *const specs[] = { "turboquant-1",
                                     "turboquant-2",
                                     "turboquant-3",
                                     "turboquant-4",
                                     "turboquant-5",
                                     "turboquant-6",
                                     "turboquant-7",
                                     "turboquant-8",
                                     "int-4",
                                     "rabitq-3",
                                     "trellis-2",
                                     "trellis-3",
                                     "trellis-4",
                                     "turboquant-4:lists=5",
                                     "trellis-2:lists=5,rows=int8",
#if KVANT_PAPERS
                                     "octopus-3",
                                     "turboquant-3:qjl",
#endif
                                     "int-4:asym,lists=3" };

/* Whether codecs of codec.h support the dimension: some need at least 4 or 6. */
static bool takes(const char *spec, uint32_t dim)
{
    return dim >= 6 || !(strstr(spec, "octopus") || strstr(spec, "qjl") || strstr(spec, "asym"));
}

/* R is orthonormal and R^T is its inverse; a single number spreads over all dimensions. */
CASE(rotations)
{
    static const uint32_t dims[] = { 1, 2, 3, 7, 64, 100, 384, 511, 1000, 8192 };
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (size_t d = 0; d < COUNT(dims); d++) {
        const uint32_t n = dims[d];
        kvant_rotation rotation;
        float *x = random_rows(3, n, 5), *y = x + n, *scratch = y + n;
        assert_int_equal(kvant_rotation_create(&rotation, n, 3), KVANT_OK);
        memcpy(y, x, n * sizeof *x);
        kvant_rotation_apply(&rotation, kernels, y, scratch);
        assert_true(fabs(dot(y, y, n) / dot(x, x, n) - 1) < 1e-5);
        kvant_rotation_undo(&rotation, kernels, y, scratch);
        for (uint32_t i = 0; i < n; i++)
            assert_true(fabsf(y[i] - x[i]) < 1e-5f * sqrtf((float)n));
        memset(y, 0, n * sizeof *y);
        y[n / 3] = sqrtf((float)n);
        kvant_rotation_apply(&rotation, kernels, y, scratch);
        for (uint32_t i = 0; n >= 64 && i < n; i++) /* a normal number exceeds 8 once in 10^15 */
            assert_true(fabsf(y[i]) < 8);
        kvant_rotation_destroy(&rotation);
        free(x);
    }
}

/* The mean squared error of a normal number at the nearest level, by quadrature. It is compared
 * with the error of Lloyd and Max (Max 1960, table I; for 5 bits and more their fixed point).
 * Integer levels cost up to 0.3 %, and more where levels are dense. For 8 uniform bits the error is
 * step^2 / 12 plus the part beyond the last level. */
CASE(books)
{
    static const double most[9] = { 0,
                                    0.3634 * 1.003,
                                    0.1175 * 1.003,
                                    0.03454 * 1.003,
                                    0.009497 * 1.003,
                                    0.002499 * 1.01,
                                    0.0006442 * 1.03,
                                    0.0001635 * 1.12,
                                    0.03125 * 0.03125 / 12 * 1.1 };
    for (uint32_t bits = 1; bits <= 8; bits++) {
        kvant_book book;
        double error = 0, mass = 0;
        assert_int_equal(kvant_book_create(&book, KVANT_BOOK_TURBOQUANT, bits, 64), KVANT_OK);
        for (double x = -8; x < 8; x += 1e-3) {
            const double p = exp(-x * x / 2);
            double least = 100;
            for (uint32_t i = 0; i < 1u << bits; i++)
                least = fmin(least, fabs(x - (double)book.step * book.values[i]));
            error += p * least * least;
            mass += p;
        }
        assert_true(error / mass < most[bits]);
        kvant_book_destroy(&book);
    }
}

/* The error of <u, q> for unit vectors, times sqrt(d), has mean 0 and variance D / (1 - D), where D
 * is the error of the codebook. From 40,000 pairs one sigma of its deviation is 0.35 %, and one
 * sigma of its mean is 0.005 of the deviation. A trellis gains more than 1 dB. So it errs less than
 * 0.79 of Lloyd and Max's variance. It cannot err less than Shannon's 2^-2b. */
CASE(estimator)
{
    static const double variance[] = { 0.3634 / 0.6366,   0.1175 / 0.8825, 0.03456 / 0.96544,
                                       0.00952 / 0.99048, 0.002519,        0.000657 };
    enum { DIM = 256, N = 400, QUERIES = 100 };
    float *x = random_rows(N, DIM, 11), *q = random_rows(QUERIES, DIM, 12);
    for (uint32_t i = 0; i < 9; i++) {
        const bool trellis = i >= 6;
        const uint32_t bits = trellis ? i - 4 : i + 1;
        char spec[32];
        snprintf(spec, sizeof spec, "%s-%u", trellis ? "trellis" : "turboquant", bits);
        kvant_index *index = filled(spec, DIM, KVANT_METRIC_INNER_PRODUCT, x, N);
        result r = search(index, q, DIM, QUERIES, N);
        double sum = 0, squares = 0;
        for (size_t j = 0; j < r.n; j++) {
            const float *a = q + j / N * DIM, *b = x + r.ids[j] * DIM;
            const double error =
                (r.scores[j] - dot(a, b, DIM)) / sqrt(dot(a, a, DIM) * dot(b, b, DIM)) * sqrt(DIM);
            sum += error;
            squares += error * error;
        }
        const double found = squares / (double)r.n, rate = exp2(-2.0 * bits);
        assert_true(fabs(sum / (double)r.n) < 5 * 0.005 * sqrt(found));
        if (trellis)
            assert_true(found > rate / (1 - rate) && found < 0.79 * variance[bits - 1]);
        else
            assert_true(fabs(sqrt(found / variance[bits - 1]) - 1) <
                        0.05); /* 256 dimensions are not many */
        drop(&r);
        kvant_index_free(&index);
    }
    free(x);
    free(q);
}

/* All rows and queries share a part that is three times as long as the rest. With this part as
 * centre, only the rest causes errors: <q, x> = <q - w c, x - c> + w <c, x>. Here w leaves no part
 * of q along c. The second half of the queries is 2^40 times shorter. */
CASE(centred)
{
    enum { DIM = 256, N = 400, QUERIES = 100 };
    float *x = random_rows(N, DIM, 13), *q = random_rows(QUERIES, DIM, 14),
          *c = random_rows(1, DIM, 15);
    for (size_t j = 0; j < DIM; j++)
        c[j] *= 3;
    for (size_t i = 0; i < N * DIM; i++)
        x[i] += c[i % DIM];
    for (size_t i = 0; i < QUERIES * DIM; i++)
        q[i] = ldexpf(q[i] + c[i % DIM], i < QUERIES / 2 * DIM ? 0 : -40);
    kvant_index_params params = {
        .size = sizeof params, .dim = DIM, .spec = "turboquant-2", .center = c
    };
    kvant_index *index;
    assert_int_equal(kvant_index_create(&params, &index, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_index_add(index, x, DIM, N, NULL, 1), KVANT_OK);
    result r = search(index, q, DIM, QUERIES, N);
    double squares = 0;
    for (size_t i = 0; i < r.n; i++) {
        const float *a = q + i / N * DIM, *b = x + r.ids[i] * DIM;
        const double cc = dot(c, c, DIM), along = dot(a, c, DIM),
                     off = dot(b, b, DIM) - 2 * dot(b, c, DIM) + cc;
        const double error = (r.scores[i] - dot(a, b, DIM)) /
                             sqrt((dot(a, a, DIM) - along * along / cc) * off) * sqrt(DIM);
        squares += error * error;
    }
    assert_true(fabs(sqrt(squares / (double)r.n / (0.1175 / 0.8825)) - 1) < 0.05);
    drop(&r);
    kvant_index_free(&index);
    free(x);
    free(q);
    free(c);
}

static double exact(kvant_metric metric, const float *q, const float *x, uint32_t dim)
{
    if (metric == KVANT_METRIC_COSINE)
        return dot(q, x, dim) / sqrt(dot(q, q, dim) * dot(x, x, dim));
    return metric == KVANT_METRIC_L2 ? dot(q, q, dim) + dot(x, x, dim) - 2 * dot(q, x, dim)
                                     : dot(q, x, dim);
}

static double longest(const float *x, uint32_t dim, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++)
        most = fmax(most, sqrt(dot(x + i * dim, x + i * dim, dim)));
    return most;
}

/* The part of x along the centre, which scores contain and the reconstructed vector y does not. */
static double along_centre(const kvant_index *index, const float *q, const float *x, const float *y)
{
    const float *c = index->center;
    const double weight =
        index->metric == KVANT_METRIC_L2 ? 1 : dot(q, c, index->dim) / dot(c, c, index->dim);
    const double length = index->metric == KVANT_METRIC_COSINE ? sqrt(dot(x, x, index->dim)) : 1;
    return weight * (dot(c, x, index->dim) / length - dot(c, y, index->dim));
}

/* Scores are the scores of the reconstructed vectors, except for the rounding of queries: half a
 * step of at most |q| / 127 in each of d dimensions. With lists, the rounded vector differs from
 * the reconstructed vector by a mean of vectors. L2 uses the stored vector's own length. All
 * results come in order. */
CASE(scores)
{
    static const uint32_t dims[] = { 1, 5, 16, 100, 300 };
    enum { N = 75, QUERIES = 5 };
    for (size_t d = 0; d < COUNT(dims); d++)
        for (size_t s = 0; s < COUNT(specs); s++)
            for (int metric = 0; takes(specs[s], dims[d]) && metric < 3; metric++) {
                const uint32_t dim = dims[d];
                float *x = random_rows(N, dim, 21), *q = random_rows(QUERIES, dim, 22),
                      *y = malloc(dim * sizeof *y);
                kvant_index *index = filled(specs[s], dim, (kvant_metric)metric, x, N);
                result r = search(index, q, dim, QUERIES, N);
                const double common = strchr(specs[s], ':') ? longest(x, dim, N) : 0;
                for (size_t i = 0; i < r.n; i++) {
                    const float *a = q + i / N * dim, *b = x + r.ids[i] * dim;
                    assert_int_equal(kvant_index_reconstruct(index, r.ids[i], y), KVANT_OK);
                    const double aa = sqrt(dot(a, a, dim)), yy = sqrt(dot(y, y, dim)) + common;
                    double want = dot(a, y, dim),
                           bound = aa / 254 * sqrt(dim) * yy + 1e-5 * (1 + aa) * (1 + yy);
                    if (index->center)
                        want += along_centre(index, a, b, y);
                    if (metric == KVANT_METRIC_COSINE) {
                        want /= aa;
                        bound /= aa;
                    } else if (metric == KVANT_METRIC_L2) {
                        want = dot(a, a, dim) + dot(b, b, dim) - 2 * want;
                        want = want < 0 ? 0 : want;
                        bound = 2 * bound + 1e-5 * dot(b, b, dim);
                    }
                    assert_true(fabs(r.scores[i] - want) <= bound);
                    if (i % N)
                        assert_true(metric == KVANT_METRIC_L2 ? r.scores[i] >= r.scores[i - 1]
                                                              : r.scores[i] <= r.scores[i - 1]);
                }
                drop(&r);
                kvant_index_free(&index);
                free(x);
                free(q);
                free(y);
            }
}

/* Results are equal at every CPU level, with any number of threads, one query at a time, and in any
 * order of vectors. */
CASE(same_results)
{
    enum { DIM = 72, N = 9000, QUERIES = 70, K = 13 };
    float *x = random_rows(N, DIM, 31), *q = random_rows(QUERIES, DIM, 32),
          *reversed = malloc(sizeof(float) * N * DIM);
    uint64_t *ids = malloc(N * sizeof *ids);
    for (size_t i = 0; i < N; i++) {
        if (i % 3 == 0) /* equal vectors: ties */
            memcpy(x + i * DIM, x, DIM * sizeof *x);
    }
    for (size_t i = 0; i < N; i++) {
        memcpy(reversed + i * DIM, x + (N - 1 - i) * DIM, DIM * sizeof *x);
        ids[i] = N - 1 - i;
    }
    for (size_t s = 0; s < COUNT(specs); s++) {
        const size_t n = takes(specs[s], 1) ? N : N / 10,
                     first = N - n; /* where rows 0 to n - 1 begin in `reversed` */
        kvant_set_cpu_level(KVANT_CPU_C);
        kvant_index *index = filled(specs[s], DIM, KVANT_METRIC_L2, x, n);
        result want = search(index, q, DIM, QUERIES, K);
        for (int level = 1; level < 100; level++) {
            if (!kvant_cpu_level_name((kvant_cpu_level)level) ||
                kvant_set_cpu_level((kvant_cpu_level)level) != KVANT_OK)
                continue;
            kvant_index *other = empty(specs[s], DIM, KVANT_METRIC_L2);
            if (strchr(specs[s], ':'))
                assert_int_equal(kvant_index_train(other, x, DIM, 500), KVANT_OK);
            assert_ok(kvant_index_add(other, reversed + first * DIM, DIM, n, ids + first, 3));
            for (uint32_t threads = 1; threads <= 7; threads += 3) {
                kvant_index_query query = query_of(q, DIM, QUERIES, K);
                query.n_threads = threads;
                result got = search_with(other, &query);
                assert_same(&got, &want);
                drop(&got);
            }
            for (size_t i = 0; i < QUERIES; i += 23) {
                kvant_index_query query = query_of(q + i * DIM, DIM, 1, K);
                query.n_threads = 4;
                result got = search_with(other, &query);
                assert_memory_equal(got.ids, want.ids + i * K, K * sizeof *got.ids);
                assert_memory_equal(got.scores, want.scores + i * K, K * sizeof *got.scores);
                drop(&got);
            }
            kvant_index_free(&other);
        }
        kvant_set_cpu_level(KVANT_CPU_AUTO);
        drop(&want);
        kvant_index_free(&index);
    }
    free(x);
    free(q);
    free(reversed);
    free(ids);
}

/* Powers of two scale exactly: a query of any length finds the same vectors, and a vector of any
 * length keeps its direction. */
CASE(scaling)
{
    enum { DIM = 48, N = 200, QUERIES = 8, K = 20 };
    static const int powers[] = { -140, -60, -10, 3, 50 };
    float *x = random_rows(N, DIM, 41), *q = random_rows(QUERIES, DIM, 42),
          *scaled = malloc(sizeof(float) * N * DIM);
    for (int metric = 0; metric < 2; metric++) {
        kvant_index *index = filled("turboquant-4", DIM, (kvant_metric)metric, x, N);
        result want = search(index, q, DIM, QUERIES, K);
        for (size_t p = 0; p < COUNT(powers); p++) {
            for (size_t i = 0; i < QUERIES * DIM; i++)
                scaled[i] = powers[p] < -100 ? ldexpf(q[i] > 0 ? 1 : -1, powers[p])
                                             : ldexpf(q[i], powers[p]);
            result got = search(index, scaled, DIM, QUERIES, K);
            if (powers[p] >= -100)
                assert_memory_equal(got.ids, want.ids, got.n * sizeof *got.ids);
            for (size_t i = 0; i < got.n; i++)
                assert_true(isfinite(got.scores[i]) && got.ids[i] < N);
            drop(&got);
        }
        drop(&want);
        kvant_index_free(&index);
    }
    for (size_t i = 0; i < N * DIM; i++)
        scaled[i] = ldexpf(x[i], i / DIM % 2 ? -30 : 30);
    kvant_index *a = filled("turboquant-2", DIM, KVANT_METRIC_COSINE, x, N);
    kvant_index *b = filled("turboquant-2", DIM, KVANT_METRIC_COSINE, scaled, N);
    result ra = search(a, q, DIM, QUERIES, K), rb = search(b, q, DIM, QUERIES, K);
    assert_same(&ra, &rb);
    drop(&ra);
    drop(&rb);
    kvant_index_free(&a);
    kvant_index_free(&b);
    free(x);
    free(q);
    free(scaled);
}

static const float *original(void *context, uint64_t id)
{
    return id == 3 ? NULL : (const float *)context + id * 64;
}

/* Rows that are stored with 8 bits: a number errs by at most half a step, which is at most |x| /
 * 127. */
CASE(stored_rows)
{
    enum { DIM = 64, N = 500, K = 10 };
    float *x = random_rows(N, DIM, 63), *q = random_rows(4, DIM, 64);
    for (int lists = 0; lists < 2; lists++)
        for (int metric = 0; metric < 3; metric++) {
            kvant_index *index =
                filled(lists ? "turboquant-1:lists=4,rows=int8" : "turboquant-1:rows=int8", DIM,
                       (kvant_metric)metric, x, N);
            kvant_index_query query = query_of(q, DIM, 4, K);
            query.rerank = N;
            result r = search_with(index, &query);
            for (size_t i = 0; i < r.n; i++) {
                const float *a = q + i / K * DIM, *b = x + r.ids[i] * DIM;
                const double most = sqrt(DIM) / 2 / 127 * sqrt(dot(a, a, DIM)) *
                                    (longest(x, DIM, N) + longest(x, DIM, N));
                const double score = exact((kvant_metric)metric, a, b, DIM);
                assert_true(fabs(r.scores[i] - score) <
                            (metric == KVANT_METRIC_COSINE ? sqrt(DIM) / 127 : 2 * most));
                assert_true(i % K == 0 ||
                            (metric == KVANT_METRIC_L2 ? r.scores[i] >= r.scores[i - 1]
                                                       : r.scores[i] <= r.scores[i - 1]));
            }
            query.original = original;
            query.original_context = x;
            result better = search_with(index, &query);
            assert_true(fabs(better.scores[0] -
                             exact((kvant_metric)metric, q, x + better.ids[0] * DIM, DIM)) < 1e-4);
            drop(&r);
            drop(&better);
            kvant_index_free(&index);
        }
    free(x);
    free(q);
}

/* Ranking again gives exact scores in exact order. The vector whose original is not given keeps its
 * estimate. */
CASE(rerank)
{
    enum { DIM = 64, N = 500, K = 10 };
    float *x = random_rows(N, DIM, 61), *q = random_rows(4, DIM, 62);
    for (int metric = 0; metric < 3; metric++) {
        kvant_index *index = filled("turboquant-2", DIM, (kvant_metric)metric, x, N);
        kvant_index_query query = query_of(q, DIM, 4, K);
        query.rerank = N;
        query.original = original;
        query.original_context = x;
        result r = search_with(index, &query);
        for (size_t i = 0; i < 4; i++) {
            size_t better = 0; /* vectors that are better than the last result */
            const double last =
                exact((kvant_metric)metric, q + i * DIM, x + r.ids[i * K + K - 1] * DIM, DIM);
            for (size_t j = 0; j < N; j++) {
                const double score = exact((kvant_metric)metric, q + i * DIM, x + j * DIM, DIM);
                better += j != 3 &&
                          (metric == KVANT_METRIC_L2 ? score < last - 1e-9 : score > last + 1e-9);
            }
            assert_true(better <= K - 1);
            for (size_t j = 0; j < K; j++)
                if (r.ids[i * K + j] != 3)
                    assert_true(fabs(r.scores[i * K + j] - exact((kvant_metric)metric, q + i * DIM,
                                                                 x + r.ids[i * K + j] * DIM, DIM)) <
                                1e-4);
        }
        drop(&r);
        kvant_index_free(&index);
    }
    free(x);
    free(q);
}

/* Zeros have no direction: their scores are 0 and nothing is divided by 0. */
CASE(zeros)
{
    const float x[3][4] = { { 0 }, { 1, 0, 0, 0 }, { -1, 0, 0, 0 } };
    for (int metric = 0; metric < 3; metric++) {
        kvant_index *index = filled("turboquant-4", 4, (kvant_metric)metric, x[0], 3);
        result r = search(index, x[0], 4, 2, 3);
        for (size_t i = 0; i < r.n; i++)
            assert_true(isfinite(r.scores[i]));
        assert_int_equal(r.ids[3], 1);
        if (metric != KVANT_METRIC_L2)
            assert_true(r.ids[4] == 0 && r.scores[4] == 0 && r.scores[0] == 0);
        drop(&r);
        kvant_index_free(&index);
    }
}

RUN_CASES(NULL, NULL)
