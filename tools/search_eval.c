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

enum { ROUNDS = 5 };

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
                       report_rows *row)
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
        report_row(row);
        report_text(row, "codec", "codec", codec);
        report_text(row, "metric", NULL, search_metric_name(info.metric));
        report_number(row, "vectors", NULL, 0, (double)base->n);
        report_number(row, "dim", NULL, 0, base->dim);
        report_number(row, "queries", NULL, 0, (double)queries->n);
        report_number(row, "batch", NULL, 0, (double)s->batch);
        report_text(row, "device", NULL, s->device);
        report_number(row, "threads", NULL, 0, s->threads);
        report_number(row, "k", NULL, 0, s->k);
        report_number(row, "probe", NULL, 0, s->probe);
        report_number(row, "rerank", NULL, 0, s->rerank);
        report_number(row, "recall", "recall", 4, search_truth_recall(t, base, queries, a->ids));
        report_number(row, "bytes_per_vector", "bytes/vector", 0, (double)info.bytes_per_vector);
        report_number(row, "ns_per_vector", "ns/vector", 2,
                      seconds * 1e9 / (double)queries->n / (double)base->n);
        report_number(row, "us_per_query", "us/query", 1, seconds * 1e6 / (double)queries->n);
        report_number(row, "build_s", "build s", 2, built);
    }
    kvant_index_gpu_free(&gpu);
    kvant_index_free(&index);
    return ok;
}

bool search_eval(const search_settings *s, const char *const *files)
{
    static const char *const usual[] = { "turboquant-4" };
    const char *const *specs = s->n_specs > 0 ? s->specs : usual;
    const size_t n = s->n_specs > 0 ? s->n_specs : 1;
    vectors base = { .rows = NULL }, queries = { .rows = NULL };
    search_truth t = { .least = NULL };
    search_answers a = { NULL, NULL };
    report_rows out = { .n_rows = 0 };
    kvant_metric metric;
    bool ok = search_find_metric(s->metric, &metric) && vectors_read(files[0], 0, &base) &&
              vectors_read(files[1], s->queries, &queries) &&
              search_same_dimensions("queries", &queries, base.dim) &&
              search_allocate_answers(&a, queries.n, s->k) &&
              search_truth_find(&t, metric, s->k, &base, &queries);
    for (size_t i = 0; ok && i < n; i++)
        ok = eval_codec(s, specs[i], &base, &queries, &t, &a, &out);
    ok = ok && report_print(&out, "search", s->json);
    report_free(&out);
    search_truth_free(&t);
    search_free_answers(&a);
    vectors_free(&base);
    vectors_free(&queries);
    return ok;
}
