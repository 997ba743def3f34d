/* index_fixture.h - indexes of random rows, and searches that keep their results, for the tests of
 * indexes. */
#ifndef KVANT_TESTS_INDEX_FIXTURE_H
#define KVANT_TESTS_INDEX_FIXTURE_H

#include <kvant/index.h>

#include "../../src/index/index_internal.h"
#include "testing.h"

static inline float *random_rows(size_t n, uint32_t dim, uint64_t seed)
{
    float *rows = malloc(n * dim * sizeof *rows);
    assert_non_null(rows);
    fill_normal(rows, n * dim, &seed);
    return rows;
}

static inline kvant_index *empty(const char *spec, uint32_t dim, kvant_metric metric)
{
    kvant_index_params params = {
        .size = sizeof params, .dim = dim, .metric = metric, .spec = spec
    };
    kvant_index *index = NULL;
    char err[256];
    const kvant_status status = kvant_index_create(&params, &index, err, sizeof err);
    if (status != KVANT_OK)
        fail_msg("%s: %s", spec, err);
    return index;
}

static inline kvant_index *filled(const char *spec, uint32_t dim, kvant_metric metric,
                                  const float *rows, size_t n)
{
    kvant_index *index = empty(spec, dim, metric);
    if (strchr(spec, ':'))
        assert_int_equal(kvant_index_train(index, rows, dim, n < 500 ? n : 500), KVANT_OK);
    assert_int_equal(kvant_index_add(index, rows, dim, n, NULL, 2), KVANT_OK);
    return index;
}

static inline double dot(const float *a, const float *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

typedef struct result {
    float *scores;
    uint64_t *ids;
    size_t n;
} result;

static inline result search_with(const kvant_index *index, const kvant_index_query *query)
{
    result r = { NULL, NULL, query->n * query->k };
    r.scores = malloc(r.n * sizeof *r.scores);
    r.ids = malloc(r.n * sizeof *r.ids);
    assert_int_equal(kvant_index_search(index, query, r.scores, r.ids), KVANT_OK);
    return r;
}

static inline kvant_index_query query_of(const float *rows, uint32_t dim, size_t n, uint32_t k)
{
    return (kvant_index_query){ .size = sizeof(kvant_index_query),
                                .rows = rows,
                                .stride = dim,
                                .n = n,
                                .k = k,
                                .n_threads = 1,
                                .n_probe = 100 };
}

static inline result search(const kvant_index *index, const float *rows, uint32_t dim, size_t n,
                            uint32_t k)
{
    const kvant_index_query query = query_of(rows, dim, n, k);
    return search_with(index, &query);
}

static inline void drop(result *r)
{
    free(r->scores);
    free(r->ids);
}

static inline void assert_same(const result *a, const result *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->ids, b->ids, a->n * sizeof *a->ids);
    assert_memory_equal(a->scores, b->scores, a->n * sizeof *a->scores);
}

#endif
