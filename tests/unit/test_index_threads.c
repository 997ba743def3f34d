/* test_index_threads.c - several threads search one index at once, each with threads of the pool:
 * every codec's path to the products, lists, rows and filters. Results must equal the results of a
 * single thread, and the build for ThreadSanitizer (make tsan) finds races whose results are right
 * by luck. */
#include <kvant/index.h>

#include "testing.h"

#include <pthread.h>

enum { DIM = 40, N = 3000, QUERIES = 70, K = 7, SEARCHERS = 4, ROUNDS = 3 };

static const char *const specs[] = { "turboquant-4", "turboquant-6", "trellis-3",
                                     "trellis-2:lists=9,rows=int8", "int-4:asym" };

typedef struct job {
    const kvant_index *index;
    const float *queries;
    uint32_t n_threads, rerank;
    float scores[QUERIES * K];
    uint64_t ids[QUERIES * K];
    kvant_status status;
} job;

static void *run(void *context)
{
    job *j = context;
    const uint64_t allowed[] = { 1, 5, 8, 13, 600, 601, 602, 700, 2999 };
    kvant_index_query query = { .size = sizeof query,
                                .rows = j->queries,
                                .stride = DIM,
                                .n = QUERIES,
                                .k = K,
                                .n_threads = j->n_threads,
                                .allowed = allowed,
                                .n_allowed = COUNT(allowed) };
    for (int round = 0; round < ROUNDS && j->status == KVANT_OK; round++) {
        query.allowed = round % 2 ? allowed : NULL; /* the last round has no filter */
        query.n_allowed = round % 2 ? COUNT(allowed) : 0;
        query.rerank = j->rerank;
        j->status = kvant_index_search(j->index, &query, j->scores, j->ids);
    }
    return NULL;
}

CASE(searches)
{
    static float rows[N * DIM], queries[QUERIES * DIM];
    static job alone, jobs[SEARCHERS];
    uint64_t rng = 3;
    fill_normal(rows, N * DIM, &rng);
    fill_normal(queries, QUERIES * DIM, &rng);
    for (size_t s = 0; s < COUNT(specs); s++) {
        kvant_index_params params = { .size = sizeof params, .dim = DIM, .spec = specs[s] };
        kvant_index *index = NULL;
        pthread_t threads[SEARCHERS];
        assert_int_equal(kvant_index_create(&params, &index, NULL, 0), KVANT_OK);
        assert_int_equal(kvant_index_train(index, rows, DIM, 500), KVANT_OK);
        assert_int_equal(kvant_index_add(index, rows, DIM, N, NULL, 3), KVANT_OK);
        alone = (job){ .index = index,
                       .queries = queries,
                       .n_threads = 1,
                       .rerank = strstr(specs[s], "rows") ? 20 : 0 };
        run(&alone);
        assert_int_equal(alone.status, KVANT_OK);
        for (uint32_t i = 0; i < SEARCHERS; i++) {
            jobs[i] = (job){
                .index = index, .queries = queries, .n_threads = 1 + i, .rerank = alone.rerank
            };
            assert_int_equal(pthread_create(&threads[i], NULL, run, &jobs[i]), 0);
        }
        for (uint32_t i = 0; i < SEARCHERS; i++) {
            assert_int_equal(pthread_join(threads[i], NULL), 0);
            assert_int_equal(jobs[i].status, KVANT_OK);
            assert_memory_equal(jobs[i].ids, alone.ids, sizeof alone.ids);
            assert_memory_equal(jobs[i].scores, alone.scores, sizeof alone.scores);
        }
        kvant_index_free(&index);
    }
}

RUN_CASES(NULL, NULL)
