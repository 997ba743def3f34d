/* test_index_contents.c - which vectors an index holds and a search may find. A plain list of
 * vectors gets the same additions and removals. Also lists, filters, training and refused calls. */
#include "index_fixture.h"

/* Random additions and removals on an index and on a plain list. The index always finds exactly the
 * vectors of the list, with equal scores. */
static void change(const char *spec, uint32_t n_probe)
{
    enum { DIM = 20, MOST = 300 };
    uint64_t rng = 77, present[MOST], n = 0, next = 5;
    float rows[MOST][DIM], scores_of[MOST];
    float *examples = random_rows(100, DIM, 8);
    kvant_index *index = empty(spec, DIM, KVANT_METRIC_L2);
    const float q[DIM] = { 1, -1, 0.5f };
    if (n_probe)
        assert_int_equal(kvant_index_train(index, examples, DIM, 100), KVANT_OK);
    for (int round = 0; round < 2000; round++) {
        if (n < MOST && test_random(&rng) % 5 < (round < 1000 ? 3 : 2)) {
            fill_normal(rows[n], DIM, &rng);
            present[n] = next;
            next += 1 + test_random(&rng) % 1000;
            assert_int_equal(kvant_index_add(index, rows[n], DIM, 1, &present[n], 1), KVANT_OK);
            kvant_index *alone = empty(spec, DIM, KVANT_METRIC_L2);
            if (n_probe)
                assert_int_equal(kvant_index_train(alone, examples, DIM, 100), KVANT_OK);
            assert_int_equal(kvant_index_add(alone, rows[n], DIM, 1, NULL, 1), KVANT_OK);
            result one = search(alone, q, DIM, 1, 1);
            scores_of[n] = one.scores[0];
            drop(&one);
            kvant_index_free(&alone);
            n++;
        } else if (n) {
            const uint64_t i = test_random(&rng) % n;
            assert_int_equal(kvant_index_remove(index, present[i]), KVANT_OK);
            assert_int_equal(kvant_index_remove(index, present[i]), KVANT_ERR_ARGUMENT);
            present[i] = present[--n];
            memcpy(rows[i], rows[n], sizeof rows[i]);
            scores_of[i] = scores_of[n];
        }
        if (round % 50)
            continue;
        result r = search(index, q, DIM, 1, MOST + 1);
        for (uint64_t i = 0; i < MOST + 1; i++)
            assert_true((r.ids[i] == KVANT_INDEX_NO_ID) == (i >= n));
        for (uint64_t i = 0; i < n; i++) {
            uint64_t at = 0;
            while (at < n && r.ids[at] != present[i])
                at++;
            assert_true(at < n);
            assert_memory_equal(&r.scores[at], &scores_of[i], sizeof(float));
        }
        drop(&r);
    }
    kvant_index_free(&index);
    free(examples);
}

CASE(changes)
{
    change("turboquant-3", 0);
    change("turboquant-3:lists=3", 3);
    change("turboquant-5", 0);
    change("trellis-2:lists=3,rows=int8", 3);
    change("int-4:asym", 0);
}

static kvant_index *given(const float *centroids, uint32_t dim, size_t n_centroids,
                          const float *rows, size_t n, bool train)
{
    kvant_index_params params = { .size = sizeof params,
                                  .dim = dim,
                                  .metric = KVANT_METRIC_L2,
                                  .spec = "trellis-4:lists=3",
                                  .centroids = centroids,
                                  .centroid_stride = dim,
                                  .n_centroids = n_centroids };
    kvant_index *index = NULL;
    assert_int_equal(kvant_index_create(&params, &index, NULL, 0), KVANT_OK);
    if (train)
        assert_int_equal(kvant_index_train(index, rows, dim, n), KVANT_OK);
    for (size_t i = 0; i < n_centroids * dim; i++) /* stored vectors are without the centre */
        assert_true(fabsf(index->centroids[i] + (train ? index->center[i % dim] : 0) -
                          centroids[i]) < 1e-4f);
    assert_int_equal(kvant_index_add(index, rows, dim, n, NULL, 1), KVANT_OK);
    return index;
}

/* A search of all lists finds the same as a flat index; a search of some lists finds only vectors
 * of these lists. A list's vectors are near its centroid: the rows are 3 distant clusters, and one
 * list is enough for each. */
CASE(lists)
{
    enum { DIM = 32, N = 1500, CLUSTERS = 3, K = 20 };
    float *x = random_rows(N, DIM, 81), *centres = random_rows(CLUSTERS, DIM, 82);
    for (size_t i = 0; i < N * DIM; i++)
        x[i] += 20 * centres[i / DIM % CLUSTERS * DIM + i % DIM];
    for (size_t i = 0; i < CLUSTERS * DIM; i++)
        centres[i] *= 20;
    for (int i = 2; i < 6;
         i++) { /* learned centroids; then given centroids, without and with a centre */
        const kvant_metric metric = i < 4 ? (kvant_metric)(i % 2 + 1) : KVANT_METRIC_L2;
        kvant_index *index = i < 4 ? filled("turboquant-8:lists=3", DIM, metric, x, N)
                                   : given(centres, DIM, CLUSTERS, x, N, i == 5);
        kvant_index_query query = query_of(x, DIM, 64, K);
        result all = search_with(index, &query);
        query.n_probe = 1;
        result one = search_with(index, &query);
        assert_same(&one, &all);
        for (size_t at = 0; at < all.n; at++)
            assert_int_equal(all.ids[at] % CLUSTERS, at / K % CLUSTERS);
        query.k = N;
        result few = search_with(index, &query);
        for (size_t at = 0; at < few.n; at++)
            assert_true((few.ids[at] == KVANT_INDEX_NO_ID) == (at % N >= N / CLUSTERS));
        drop(&all);
        drop(&one);
        drop(&few);
        kvant_index_free(&index);
    }
    free(x);
    free(centres);
}

static int odd_ids(void *context, uint64_t id)
{
    ++*(size_t *)context;
    return id % 2 == 1;
}

CASE(filters)
{
    enum { DIM = 16, N = 100 };
    const uint64_t allowed[] = { 7, 64, 7, 33, 1000000, 98, 31 };
    size_t calls = 0;
    float *x = random_rows(N, DIM, 51);
    kvant_index *index = filled("turboquant-4", DIM, KVANT_METRIC_INNER_PRODUCT, x, N);
    result all = search(index, x, DIM, 2, N);
    kvant_index_query query = query_of(x, DIM, 2, N);
    query.allowed = allowed;
    query.n_allowed = COUNT(allowed);
    for (int both = 0; both < 2; both++) {
        query.allow = both ? odd_ids : NULL;
        query.allow_context = &calls;
        result r = search_with(index, &query);
        for (size_t i = 0; i < 2; i++) {
            size_t found = 0;
            for (size_t j = 0; j < N; j++) {
                const uint64_t id = all.ids[i * N + j];
                if ((id == 7 || id == 33 || id == 31 || (!both && (id == 64 || id == 98)))) {
                    assert_int_equal(r.ids[i * N + found], id);
                    assert_memory_equal(&r.scores[i * N + found++], &all.scores[i * N + j],
                                        sizeof(float));
                }
            }
            assert_int_equal(found, both ? 3 : 5);
            assert_true(r.ids[i * N + found] == KVANT_INDEX_NO_ID &&
                        r.scores[i * N + found] == -INFINITY);
        }
        drop(&r);
    }
    assert_int_equal(calls, 5);
    drop(&all);
    kvant_index_free(&index);
    free(x);
}

/* Rows lie in a plane of 12 of 60 dimensions, far from 0. The centre and dims=12 lose nothing, so
 * the error is the error of 12 dimensions. Before training nothing can be added. */
CASE(training)
{
    enum { DIM = 60, KEPT = 12, N = 400 };
    float *basis = random_rows(KEPT + 1, DIM, 71), *z = random_rows(N, KEPT, 72),
          *x = calloc((size_t)N * DIM, sizeof *x);
    float y[DIM];
    for (size_t i = 0; i < N; i++)
        for (size_t k = 0; k <= KEPT; k++)
            for (size_t j = 0; j < DIM; j++)
                x[i * DIM + j] += (k < KEPT ? z[i * KEPT + k] : 20) * basis[k * DIM + j];
    kvant_index *index = empty("turboquant-8:dims=12", DIM, KVANT_METRIC_L2);
    assert_int_equal(kvant_index_add(index, x, DIM, N, NULL, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_index_train(index, x, DIM, N), KVANT_OK);
    assert_int_equal(kvant_index_add(index, x, DIM, N, NULL, 1), KVANT_OK);
    assert_int_equal(kvant_index_train(index, x, DIM, N), KVANT_ERR_UNSUPPORTED);
    kvant_index_info info = { .size = sizeof info };
    assert_int_equal(kvant_index_get_info(index, &info), KVANT_OK);
    assert_string_equal(info.spec, "turboquant-8:dims=12");
    assert_int_equal(info.bytes_per_vector, 12 + 8);
    for (size_t i = 0; i < N; i++) {
        double off = 0, length = 0;
        assert_int_equal(kvant_index_reconstruct(index, i, y), KVANT_OK);
        for (size_t j = 0; j < DIM; j++) {
            const double u = (double)x[i * DIM + j] - 20 * (double)basis[KEPT * DIM + j];
            off += ((double)y[j] - x[i * DIM + j]) * ((double)y[j] - x[i * DIM + j]);
            length += u * u;
        }
        /* 8 bits err by 0.0003 with a long tail; a missing direction costs 0.08 */
        assert_true(off < 0.001 * length);
    }
    kvant_index_free(&index);
    free(basis);
    free(z);
    free(x);
}

CASE(mistakes)
{
    float x[2][4] = { { 1, 2, 3, 4 }, { 5, 6, 7, 8 } };
    const uint64_t twice[2] = { 9, 9 }, none[1] = { KVANT_INDEX_NO_ID };
    char err[256];
    float score;
    uint64_t id;
    static const char *const bad[] = { "turboquant",
                                       "turboquant-9",
                                       "turboquant-0",
                                       "int-1",
                                       "trellis-5",
                                       "turboquant-4:states=256",
                                       "trellis-4:states=256",
                                       "turboquant-4:dims=5",
                                       "turboquant-4:x",
                                       "" };
    for (size_t i = 0; i < COUNT(bad); i++) {
        kvant_index_params params = { .size = sizeof params, .dim = 4, .spec = bad[i] };
        kvant_index *index = (kvant_index *)err;
        assert_int_equal(kvant_index_create(&params, &index, err, sizeof err), KVANT_ERR_SPEC);
        assert_null(index);
        assert_true(err[0] != 0);
    }
    kvant_index_params with = { .size = sizeof with,
                                .dim = 4,
                                .spec = "turboquant-4:lists=2",
                                .centroids = x[0],
                                .centroid_stride = 4 };
    for (with.n_centroids = 0; with.n_centroids < 4; with.n_centroids++) {
        kvant_index *made = NULL;
        assert_int_equal(kvant_index_create(&with, &made, err, sizeof err),
                         with.n_centroids == 2 ? KVANT_OK : KVANT_ERR_ARGUMENT);
        kvant_index_free(&made);
    }
    with.n_centroids = 2;
    const float infinite[8] = { 0, 0, 0, 0, INFINITY };
    with.centroids = infinite;
    kvant_index *no_index = NULL;
    assert_int_equal(kvant_index_create(&with, &no_index, err, sizeof err), KVANT_ERR_NONFINITE);
    kvant_index_params params = { .size = sizeof params, .dim = 8193 };
    kvant_index *index;
    assert_int_equal(kvant_index_create(&params, &index, err, sizeof err), KVANT_ERR_ARGUMENT);
    index = empty("turboquant-4", 4, KVANT_METRIC_INNER_PRODUCT);
    kvant_index_query query = query_of(x[0], 4, 1, 1);
    assert_int_equal(kvant_index_search(index, &query, &score, &id), KVANT_OK);
    assert_true(id == KVANT_INDEX_NO_ID && score == -INFINITY);
    assert_int_equal(kvant_index_add(index, x[0], 4, 2, twice, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_index_add(index, x[0], 4, 1, none, 1), KVANT_ERR_ARGUMENT);
    x[1][2] = NAN;
    assert_int_equal(kvant_index_add(index, x[0], 4, 2, NULL, 1), KVANT_ERR_NONFINITE);
    x[1][2] = 1e30f;
    assert_int_equal(kvant_index_add(index, x[0], 4, 2, NULL, 1), KVANT_ERR_RANGE);
    assert_int_equal(kvant_index_remove(index, 0), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_index_search(index, &query, &score, &id), KVANT_OK);
    assert_true(id == KVANT_INDEX_NO_ID);
    assert_int_equal(kvant_index_add(index, x[0], 4, 1, twice, 1), KVANT_OK);
    assert_int_equal(kvant_index_add(index, x[0], 4, 1, twice, 1), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_index_add(index, x[0], 4, 1, NULL, 1), KVANT_OK); /* id 10 */
    assert_int_equal(kvant_index_reconstruct(index, 10, x[0]), KVANT_OK);
    assert_int_equal(kvant_index_reconstruct(index, 0, x[0]), KVANT_ERR_ARGUMENT);
    query.k = 0;
    assert_int_equal(kvant_index_search(index, &query, &score, &id), KVANT_ERR_ARGUMENT);
    kvant_index_free(&index);
    kvant_index_free(&index);
}

/* Every vector has its own list, so a search finds as many vectors as it searches lists. */
CASE(any_number_of_lists)
{
    enum { DIM = 8, N = 2500 };
    static const uint32_t probes[] = { 0, 1, 1024, 1025, 2000, N - 1, N, N + 1, UINT32_MAX };
    float *x = random_rows(N, DIM, 83);
    const kvant_index_params params = { .size = sizeof params,
                                        .dim = DIM,
                                        .metric = KVANT_METRIC_L2,
                                        .spec = "turboquant-4:lists=2500",
                                        .centroids = x,
                                        .centroid_stride = DIM,
                                        .n_centroids = N };
    kvant_index *index = NULL;
    assert_int_equal(kvant_index_create(&params, &index, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_index_add(index, x, DIM, N, NULL, 2), KVANT_OK);
    for (size_t i = 0; i < COUNT(probes); i++)
        for (uint32_t threads = 1; threads < 4; threads += 2) {
            kvant_index_query query = query_of(x, DIM, 2, N);
            query.n_probe = probes[i];
            query.n_threads = threads;
            const uint32_t want = probes[i] == 0 ? 8 : probes[i] < N ? probes[i] : N;
            result r = search_with(index, &query);
            for (size_t j = 0; j < r.n; j++)
                assert_int_equal(r.ids[j] != KVANT_INDEX_NO_ID, j % N < want);
            drop(&r);
        }
    kvant_index_free(&index);
    free(x);
}

RUN_CASES(NULL, NULL)
