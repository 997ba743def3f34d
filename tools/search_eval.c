/* search_eval.c - `kvant search eval`: measures how many of the nearest vectors each codec finds,
 * and how long a search takes.
 *
 * search_truth.c finds the nearest vectors, search_query.c searches an index. */
#include "interrupt.h"
#include "progress.h"
#include "report.h"
#include "search.h"
#include "search_truth.h"

#include <math.h>
#include <string.h>

static const report_column eval_columns[] = {
    { "codec", "codec", COLUMN_TEXT, 0 },
    { "metric", NULL, COLUMN_TEXT, 0 },
    { "vectors", NULL, COLUMN_NUMBER, 0 },
    { "dim", NULL, COLUMN_NUMBER, 0 },
    { "queries", NULL, COLUMN_NUMBER, 0 },
    { "batch", NULL, COLUMN_NUMBER, 0 },
    { "device", NULL, COLUMN_TEXT, 0 },
    { "threads", NULL, COLUMN_NUMBER, 0 },
    { "k", NULL, COLUMN_NUMBER, 0 },
    { "probe", NULL, COLUMN_NUMBER, 0 },
    { "rerank", NULL, COLUMN_NUMBER, 0 },
    { "recall", "recall", COLUMN_NUMBER, 4 },
    { "bytes_per_vector", "bytes/vector", COLUMN_NUMBER, 0 },
    { "ns_per_vector", "ns/vector", COLUMN_NUMBER, 2 },
    { "us_per_query", "us/query", COLUMN_NUMBER, 1 },
    { "build_s", "build s", COLUMN_NUMBER, 2 },
};
enum { N_EVAL = sizeof eval_columns / sizeof *eval_columns, ROUNDS = 5 };

/* Returns the seconds for all queries, where each batch counts with the shortest of some rounds.
 * Negative after complaining. originals: vectors for rerank, or NULL. */
static double measure(const kvant_index *index, const kvant_index_gpu *gpu,
                      const search_settings *s, const vectors *originals, const vectors *queries,
                      search_answers *a)
{
    double sum = 0;
    for (size_t q = 0; q < queries->n && !interrupted(); q += s->batch) {
        double best = INFINITY;
        for (int round = 0; round < ROUNDS; round++) {
            const double start = monotonic_seconds();
            if (!search_run(index, gpu, s, queries, q,
                            queries->n - q < s->batch ? queries->n - q : s->batch, originals, NULL,
                            a))
                return -1;
            best = fmin(best, monotonic_seconds() - start);
        }
        sum += best;
    }
    return sum;
}

static bool eval_codec(const search_settings *s, const char *codec, const vectors *base,
                       const vectors *queries, const search_truth *t, search_answers *a,
                       report_cell *cells)
{
    kvant_index *index = NULL;
    kvant_index_gpu *gpu = NULL;
    kvant_index_info info = { .size = sizeof info };
    const double start = monotonic_seconds();
    bool ok = search_make_index(s, codec, base, &index) && search_copy_to_gpu(s, index, &gpu);
    const vectors *originals = strstr(codec, "rows=") != NULL ? NULL : base;
    const double built = monotonic_seconds() - start,
                 seconds = ok ? measure(index, gpu, s, originals, queries, a) : -1;
    ok = seconds >= 0 && !interrupted() && kvant_index_get_info(index, &info) == KVANT_OK;
    if (ok) {
        const report_cell row[N_EVAL] = {
            CELL_TEXT(codec),
            CELL_TEXT(search_metric_name(info.metric)),
            CELL_NUMBER(base->n),
            CELL_NUMBER(base->dim),
            CELL_NUMBER(queries->n),
            CELL_NUMBER(s->batch),
            CELL_TEXT(s->device),
            CELL_NUMBER(s->threads),
            CELL_NUMBER(s->k),
            CELL_NUMBER(s->probe),
            CELL_NUMBER(s->rerank),
            CELL_NUMBER(search_truth_recall(t, base, queries, a->ids)),
            CELL_NUMBER(info.bytes_per_vector),
            CELL_NUMBER(seconds * 1e9 / (double)queries->n / (double)base->n),
            CELL_NUMBER(seconds * 1e6 / (double)queries->n),
            CELL_NUMBER(built),
        };
        memcpy(cells, row, sizeof row);
    }
    kvant_index_gpu_free(&gpu);
    kvant_index_free(&index);
    return ok;
}

bool search_eval(const search_settings *s, const char *const *files)
{
    static report_cell cells[SEARCH_MAX_SPECS * N_EVAL];
    static const char *const usual[] = { "turboquant-4" };
    const char *const *specs = s->n_specs > 0 ? s->specs : usual;
    const size_t n = s->n_specs > 0 ? s->n_specs : 1;
    vectors base = { .rows = NULL }, queries = { .rows = NULL };
    search_truth t = { .least = NULL };
    search_answers a = { NULL, NULL };
    kvant_metric metric;
    bool ok = search_find_metric(s->metric, &metric) && vectors_read(files[0], 0, &base) &&
              vectors_read(files[1], s->queries, &queries) &&
              search_same_dimensions("queries", &queries, base.dim) &&
              search_allocate_answers(&a, queries.n, s->k) &&
              search_truth_find(&t, metric, s->k, &base, &queries);
    for (size_t i = 0; ok && i < n; i++)
        ok = eval_codec(s, specs[i], &base, &queries, &t, &a, cells + i * N_EVAL);
    ok = ok && report_print(eval_columns, N_EVAL, cells, n, s->json);
    search_truth_free(&t);
    search_free_answers(&a);
    vectors_free(&base);
    vectors_free(&queries);
    return ok;
}
