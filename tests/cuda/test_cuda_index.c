/* test_cuda_index.c - searches on a GPU give the CPU's results, bit for bit, for any shape. */
#include <kvant/index.h>
#include <pthread.h>

#include "cuda_support.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

typedef struct shape {
    const char *spec;
    uint32_t dim;
    kvant_metric metric;
    size_t n, n_queries;
    uint32_t k;
    bool centre;     /* learned */
    uint32_t remove; /* removes every n-th vector; 0: none */
} shape;

static float *random_rows(size_t n, uint32_t dim)
{
    float *rows = malloc((n * dim + 1) * sizeof *rows);
    assert_non_null(rows);
    for (size_t i = 0; i < n * dim; i++)
        rows[i] = random_uniform(-1, 1) + 0.25f;
    return rows;
}

static kvant_index *filled(const shape *s, const float *rows)
{
    kvant_index_params params = {
        .size = sizeof params, .dim = s->dim, .metric = s->metric, .spec = s->spec
    };
    kvant_index *index = NULL;
    char err[256];
    if (kvant_index_create(&params, &index, err, sizeof err) != KVANT_OK)
        fail_msg("%s: %s", s->spec, err);
    if (s->centre)
        assert_int_equal(kvant_index_train(index, rows, s->dim, s->n < 1000 ? s->n : 1000),
                         KVANT_OK);
    assert_int_equal(kvant_index_add(index, rows, s->dim, s->n, NULL, 8), KVANT_OK);
    for (uint64_t id = 3; s->remove && id < s->n; id += s->remove)
        assert_int_equal(kvant_index_remove(index, id), KVANT_OK);
    return index;
}

static kvant_index_gpu *on_gpu(const kvant_index *index)
{
    kvant_index_gpu *gpu = NULL;
    char err[256];
    if (kvant_index_gpu_create(index, &gpu, err, sizeof err) != KVANT_OK)
        fail_msg("%s", err);
    return gpu;
}

static void compare(const kvant_index *index, const kvant_index_gpu *gpu,
                    const kvant_index_query *query, const char *what)
{
    const size_t n = query->n * query->k;
    float *scores = malloc((n + 1) * sizeof *scores),
          *want_scores = malloc((n + 1) * sizeof *scores);
    uint64_t *ids = malloc((n + 1) * sizeof *ids), *want_ids = malloc((n + 1) * sizeof *ids);
    assert_int_equal(kvant_index_search(index, query, want_scores, want_ids), KVANT_OK);
    if (kvant_index_gpu_search(gpu, query, scores, ids) != KVANT_OK)
        fail_msg("%s: %s", what, kvant_error_message());
    for (size_t i = 0; i < n; i++)
        if (ids[i] != want_ids[i] || memcmp(&scores[i], &want_scores[i], sizeof *scores) != 0)
            fail_msg("%s: result %zu of query %zu is %llu with %.9g, the CPU's %llu with %.9g",
                     what, i % query->k, i / query->k, (unsigned long long)ids[i],
                     (double)scores[i], (unsigned long long)want_ids[i], (double)want_scores[i]);
    free(scores);
    free(want_scores);
    free(ids);
    free(want_ids);
}

static kvant_index_query query_of(const shape *s, const float *rows)
{
    return (kvant_index_query){ .size = sizeof(kvant_index_query),
                                .rows = rows,
                                .stride = s->dim,
                                .n = s->n_queries,
                                .k = s->k,
                                .n_threads = 8 };
}

static void check(const shape *s)
{
    char what[200];
    float *rows = random_rows(s->n, s->dim), *queries = random_rows(s->n_queries, s->dim);
    kvant_index *index = filled(s, rows);
    kvant_index_gpu *gpu = on_gpu(index);
    const kvant_index_query query = query_of(s, queries);
    snprintf(what, sizeof what,
             "%s, dim %u, metric %d, %zu vectors, %zu queries, k %u, centre %d, remove %u", s->spec,
             s->dim, (int)s->metric, s->n, s->n_queries, s->k, s->centre, s->remove);
    compare(index, gpu, &query, what);
    kvant_index_gpu_free(&gpu);
    assert_null(gpu);
    kvant_index_free(&index);
    free(rows);
    free(queries);
}

CASE(every_width_and_batch)
{
    static const char *const specs[] = { "turboquant-1", "turboquant-2", "turboquant-3",
                                         "turboquant-4", "turboquant-8" };
    static const size_t batches[] = { 1, 8, 9, 32, 33, 64, 65, 130 };
    static const uint32_t dims[] = { 1, 7, 33, 64, 100, 200 };
    for (size_t i = 0; i < COUNT(specs); i++)
        for (size_t j = 0; j < COUNT(batches); j++)
            for (size_t d = 0; d < COUNT(dims); d++)
                check(&(shape){ specs[i], dims[d], KVANT_METRIC_INNER_PRODUCT, 333, batches[j], 10,
                                false, 0 });
}

CASE(every_metric)
{
    for (int metric = 0; metric < 3; metric++)
        for (int centre = 0; centre < 2; centre++)
            for (uint32_t remove = 0; remove < 12; remove += 11)
                for (size_t n_queries = 3; n_queries < 100; n_queries += 67)
                    check(&(shape){ "turboquant-4", 96, (kvant_metric)metric, 700, n_queries, 20,
                                    centre, remove });
}

/* Numbers at the edges of packs, of groups of packs and of lists. */
CASE(random_shapes)
{
    static const char *const specs[] = { "turboquant-1", "turboquant-2", "turboquant-3",
                                         "turboquant-4", "turboquant-8", "turboquant-3:dims=17",
                                         "turboquant-6", "trellis-2",    "trellis-4",
                                         "rabitq-1",     "rabitq-4",     "int-4",
                                         "int-2" };
    static const size_t edges[] = { 1, 31, 32, 33, 127, 128, 129, 1000 };
    for (int i = 0; i < 100; i++) {
        shape s = { specs[random_bits() % COUNT(specs)],
                    17 + (uint32_t)(random_bits() % 120),
                    (kvant_metric)(random_bits() % 3),
                    edges[random_bits() % COUNT(edges)],
                    1 + random_bits() % 40,
                    1 + (uint32_t)(random_bits() % 150),
                    random_bits() % 2,
                    random_bits() % 3 == 0 ? 5 : 0 };
        s.centre = s.centre || strchr(s.spec, '=');
        check(&s);
    }
}

/* Several rounds, every number of queries that kernels know, and dimensions with room for fewer
 * queries. */
CASE(large)
{
    static const shape shapes[] = {
        { "turboquant-4", 384, KVANT_METRIC_INNER_PRODUCT, 60000, 1, 10, false, 0 },
        { "turboquant-4", 384, KVANT_METRIC_COSINE, 60000, 1100, 10, true, 7 },
        { "turboquant-2", 200, KVANT_METRIC_INNER_PRODUCT, 50001, 300, 100, false, 0 },
        { "turboquant-1", 200, KVANT_METRIC_L2, 50001, 100, 1, false, 0 },
        { "turboquant-3", 100, KVANT_METRIC_L2, 40000, 33, 1000, true, 0 },
        { "turboquant-8", 64, KVANT_METRIC_INNER_PRODUCT, 40000, 65, 4096, false, 0 },
        { "turboquant-4", 1536, KVANT_METRIC_COSINE, 9000, 200, 50, false, 0 },
        { "turboquant-2", 3072, KVANT_METRIC_INNER_PRODUCT, 5000, 200, 50, false, 0 },
        { "trellis-4", 768, KVANT_METRIC_INNER_PRODUCT, 20000, 129, 10, false, 0 },
        { "turboquant-4", 8192, KVANT_METRIC_L2, 2000, 70, 10, false, 0 },
    };
    for (size_t i = 0; i < COUNT(shapes) && !small_tests(); i++)
        check(&shapes[i]);
}

/* Equal keys are found by id, also if there are more of them than a list has room for. */
CASE(equal_vectors)
{
    const size_t n = small_tests() ? 600 : 50000;
    const shape s = { "turboquant-4", 16, KVANT_METRIC_INNER_PRODUCT, n, 70, 30, false, 3 };
    float *rows = random_rows(n, s.dim), *queries = random_rows(s.n_queries, s.dim);
    for (size_t i = 0; i < n * s.dim; i++)
        rows[i] = rows[i / s.dim % 7 ? i % s.dim : i % (5 * s.dim)];
    kvant_index *index = filled(&s, rows);
    kvant_index_gpu *gpu = on_gpu(index);
    kvant_index_query query = query_of(&s, queries);
    compare(index, gpu, &query, "equal vectors");
    memset(queries, 0,
           s.n_queries * s.dim * sizeof *queries); /* all products are 0, some of them -0 */
    compare(index, gpu, &query, "equal products");
    query.n = 1;
    compare(index, gpu, &query, "equal products of one query");
    kvant_index_gpu_free(&gpu);
    kvant_index_free(&index);
    free(rows);
    free(queries);
}

static int odd(void *context, uint64_t id)
{
    return id % 2 == 1;
}

CASE(filters_and_rank)
{
    const shape s = { "turboquant-2", 48, KVANT_METRIC_COSINE, 5000, 40, 25, false, 4 };
    float *rows = random_rows(s.n, s.dim), *queries = random_rows(s.n_queries, s.dim);
    kvant_index *index = filled(&s, rows);
    kvant_index_gpu *gpu = on_gpu(index);
    kvant_index_query query = query_of(&s, queries);
    const uint64_t allowed[] = { 5, 4000, 17, 17, 999999, 2, 1 };
    query.rerank = 100;
    query.originals = rows;
    query.original_stride = s.dim;
    query.n_originals = s.n;
    compare(index, gpu, &query, "rerank");
    query.rerank = 0;
    query.allow = odd;
    compare(index, gpu, &query, "allow");
    query.allow = NULL;
    query.allowed = allowed;
    query.n_allowed = COUNT(allowed);
    compare(index, gpu, &query, "allowed");
    query.n_allowed = 0;
    compare(index, gpu, &query, "nothing allowed");
    kvant_index_gpu_free(&gpu);
    kvant_index_free(&index);
    free(rows);
    free(queries);
}

CASE(what_is_wrong_is_refused)
{
    const shape s = { "turboquant-4", 8, KVANT_METRIC_INNER_PRODUCT, 5000, 2, 5, false, 0 };
    float *rows = random_rows(s.n, s.dim), scores[16];
    uint64_t ids[16];
    kvant_index *index = filled(&s, rows), *lists;
    kvant_index_gpu *gpu = on_gpu(index), *none = gpu;
    kvant_index_query query = query_of(&s, rows);
    char err[256] = "";
    rows[s.dim] = NAN;
    assert_int_equal(kvant_index_gpu_search(gpu, &query, scores, ids), KVANT_ERR_NONFINITE);
    rows[s.dim] = 1;
    query.k = 0;
    assert_int_equal(kvant_index_gpu_search(gpu, &query, scores, ids), KVANT_ERR_ARGUMENT);
    query.k = 4097;
    assert_int_equal(kvant_index_gpu_search(gpu, &query, scores, ids), KVANT_ERR_UNSUPPORTED);
    assert_non_null(strstr(kvant_error_message(), "4096"));
    query.k = 5;
    query.n = 0;
    assert_int_equal(kvant_index_gpu_search(gpu, &query, scores, ids), KVANT_OK);
    assert_int_equal(kvant_index_gpu_search(NULL, &query, scores, ids), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_index_gpu_create(NULL, &none, err, sizeof err), KVANT_ERR_ARGUMENT);
    assert_null(none);
    assert_int_equal(kvant_index_gpu_create(index, NULL, err, sizeof err), KVANT_ERR_ARGUMENT);
    query.n = 1;
    assert_int_equal(kvant_index_remove(index, 7), KVANT_OK);
    assert_int_equal(kvant_index_gpu_search(gpu, &query, scores, ids), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_index_add(index, rows, s.dim, 1, NULL, 1),
                     KVANT_OK); /* as many as were copied, but other ones */
    assert_int_equal(kvant_index_gpu_search(gpu, &query, scores, ids), KVANT_ERR_ARGUMENT);
    lists =
        filled(&(shape){ .spec = "turboquant-4:lists=4", .dim = 8, .n = 50, .centre = true }, rows);
    assert_int_equal(kvant_index_gpu_create(lists, &none, err, sizeof err), KVANT_ERR_UNSUPPORTED);
    assert_non_null(strstr(err, "lists="));
    kvant_index_gpu_free(&gpu);
    kvant_index_gpu_free(&gpu);
    kvant_index_gpu_free(NULL);
    kvant_index_free(&index);
    kvant_index_free(&lists);
    free(rows);
}

CASE(an_empty_index_finds_nothing)
{
    const shape s = { "turboquant-4", 8, KVANT_METRIC_L2, 0, 2, 5, false, 0 };
    float *rows = random_rows(2, s.dim);
    kvant_index *index = filled(&s, rows);
    kvant_index_gpu *gpu = on_gpu(index);
    const kvant_index_query query = query_of(&s, rows);
    compare(index, gpu, &query, "an empty index");
    kvant_index_gpu_free(&gpu);
    kvant_index_free(&index);
    free(rows);
}

typedef struct job {
    const kvant_index_gpu *gpu;
    kvant_index_query query;
    float scores[64 * 10];
    uint64_t ids[64 * 10];
    kvant_status status;
} job;

static void *search_again(void *argument)
{
    job *j = argument;
    for (int i = 0; i < 20 && j->status == KVANT_OK; i++)
        j->status = kvant_index_gpu_search(j->gpu, &j->query, j->scores, j->ids);
    return NULL;
}

CASE(threads_take_turns)
{
    const shape s = { "turboquant-4", 32, KVANT_METRIC_COSINE, 3000, 64, 10, false, 0 };
    static job jobs[4], want;
    float *rows = random_rows(s.n, s.dim);
    kvant_index *index = filled(&s, rows);
    kvant_index_gpu *gpu = on_gpu(index);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        jobs[i] =
            (job){ .gpu = gpu, .query = query_of(&s, rows + (size_t)i * s.n_queries * s.dim) };
        jobs[i].query.n_threads = 1;
        assert_int_equal(pthread_create(&threads[i], NULL, search_again, &jobs[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(jobs[i].status, KVANT_OK);
        assert_int_equal(kvant_index_search(index, &jobs[i].query, want.scores, want.ids),
                         KVANT_OK);
        assert_memory_equal(jobs[i].scores, want.scores, sizeof want.scores);
        assert_memory_equal(jobs[i].ids, want.ids, sizeof want.ids);
    }
    kvant_index_gpu_free(&gpu);
    kvant_index_free(&index);
    free(rows);
}

RUN_CASES_ON_GPU(NULL, NULL)
