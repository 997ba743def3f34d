/* test_index_allocation.c - uses an index with one allocation that fails, for each allocation once,
 * and then with all allocations from it on. */
#include "refused.h"

#include <kvant/index.h>

#include <unistd.h>

static float rows[60 * 20];

/* Calls every function of an index once. */
static const char *index_spec;

static kvant_status index_life(const void *path)
{
    static const uint64_t allowed[] = { 70, 71 };
    kvant_index_params params = { .size = sizeof params,
                                  .dim = 20,
                                  .metric = KVANT_METRIC_L2,
                                  .spec = index_spec,
                                  .center = rows };
    kvant_index_query query = { .size = sizeof query,
                                .rows = rows,
                                .stride = 20,
                                .n = 2,
                                .k = 3,
                                .n_threads = 2,
                                .allowed = allowed,
                                .n_allowed = 2 };
    kvant_index *index, *read = NULL;
    query.rerank = strstr(index_spec, "rows") ? 20 : 0;
    if (query.rerank) { /* the caller also gives centroids */
        params.centroids = rows;
        params.centroid_stride = 20;
        params.n_centroids = 4;
    }
    uint64_t found[6], ids[40];
    float scores[20];
    char err[256] = "";
    kvant_status status = kvant_index_create(&params, &index, err, sizeof err);
    for (uint64_t i = 0; i < 40; i++)
        ids[i] = 50 + i;
    assert_true((status == KVANT_OK) == (err[0] == 0) && (index != NULL) == (status == KVANT_OK));
    if (status == KVANT_OK)
        status = kvant_index_train(index, rows, 20, 60);
    for (size_t i = 0; status == KVANT_OK && i < 40; i += 20)
        status = kvant_index_add(index, rows + 20 * i, 20, 20, ids + i, 2);
    if (status == KVANT_OK)
        status = kvant_index_remove(index, 60);
    if (status == KVANT_OK)
        status = kvant_index_search(index, &query, scores, found);
    if (status == KVANT_OK)
        status = kvant_index_reconstruct(index, 70, scores);
    if (status == KVANT_OK)
        status = kvant_index_save(index, path, err, sizeof err);
    for (int view = 0; status == KVANT_OK && view < 2; view++) {
        kvant_index_free(&read);
        status = view ? kvant_index_view(path, &read, err, sizeof err)
                      : kvant_index_load(path, &read, err, sizeof err);
        assert_true((read != NULL) == (status == KVANT_OK));
    }
    kvant_index_free(&index);
    kvant_index_free(&read);
    return status;
}

CASE(indexes)
{
    char path[64];
    snprintf(path, sizeof path, "allocation_failure_index.%ld", (long)getpid());
    index_spec = "turboquant-3:dims=7";
    refuse_each_allocation(index_life, path, index_spec, false);
    index_spec = "turboquant-4:lists=4";
    refuse_each_allocation(index_life, path, index_spec, false);
    index_spec = "trellis-2:lists=4,rows=int8";
    refuse_each_allocation(index_life, path, index_spec, false);
    index_spec = "int-4:asym";
    refuse_each_allocation(index_life, path, index_spec, false);
    remove(path);
}

/* An addition or the first removal that meets a refused allocation leaves the index as it was. */
CASE(index_changes)
{
    const kvant_index_params params = { .size = sizeof params, .dim = 4, .spec = "turboquant-4" };
    const kvant_index_query query = {
        .size = sizeof query, .rows = rows, .stride = 4, .n = 1, .k = 100
    };
    uint64_t want[100], got[100];
    float scores[100];
    for (int removal = 0; removal < 2; removal++)
        for (long at = 1, met = 1; met; at++) {
            const uint64_t ids[2] = { 900, 0 }; /* id 0 exists already */
            kvant_index *index;
            assert_int_equal(kvant_index_create(&params, &index, NULL, 0), KVANT_OK);
            assert_int_equal(kvant_index_add(index, rows, 4, 33, NULL, 1), KVANT_OK);
            assert_int_equal(kvant_index_search(index, &query, scores, want), KVANT_OK);
            arm(at, true);
            const kvant_status status =
                removal ? kvant_index_remove(index, 5) : kvant_index_add(index, rows, 4, 2, ids, 1);
            met = refused;
            arm(0, false);
            assert_int_equal(status, met       ? KVANT_ERR_MEMORY
                                     : removal ? KVANT_OK
                                               : KVANT_ERR_ARGUMENT);
            assert_int_equal(kvant_index_search(index, &query, scores, got), KVANT_OK);
            if (met || !removal)
                assert_memory_equal(got, want, sizeof got);
            kvant_index_free(&index);
        }
}

int main(void)
{
    uint64_t rng = 31;
    fill_normal(rows, COUNT(rows), &rng);
    return run_cases(NULL, NULL);
}
