/* search_index.c - `kvant search build` and `kvant search info`: makes indexes, saves and opens
 * them, and prints their facts.
 *
 * It does not search: search_query.c does. */
#include "command.h"
#include "interrupt.h"
#include "progress.h"
#include "report.h"
#include "search.h"

#include <string.h>

enum { STEP = 8192, TRAIN = 10000 };

static const struct {
    const char *name;
    kvant_metric metric;
} metrics[] = { { "ip", KVANT_METRIC_INNER_PRODUCT },
                { "cosine", KVANT_METRIC_COSINE },
                { "l2", KVANT_METRIC_L2 } };

const char *search_metric_name(kvant_metric metric)
{
    return metrics[metric].name;
}

bool search_find_metric(const char *name, kvant_metric *metric)
{
    *metric = KVANT_METRIC_INNER_PRODUCT;
    for (size_t i = 0; name != NULL && i < sizeof metrics / sizeof *metrics; i++)
        if (strcmp(name, metrics[i].name) == 0) {
            *metric = metrics[i].metric;
            return true;
        }
    return name == NULL || complain("search: --metric must be ip, cosine or l2, not '%s'", name);
}

bool search_failed(const char *what)
{
    return complain("search: %s: %s", what, kvant_error_message());
}

bool search_same_dimensions(const char *what, const vectors *v, uint32_t dim)
{
    return v->dim == dim || complain("search: %s have %u dimensions, but vectors have %u", what,
                                     (unsigned)v->dim, (unsigned)dim);
}

static bool train(kvant_index *index, const search_settings *s, const char *codec,
                  const vectors *base)
{
    const size_t wanted = s->train != 0 ? s->train
                          : strstr(codec, "dims=") != NULL || strstr(codec, "lists=") != NULL
                              ? TRAIN
                              : 0;
    const size_t n = wanted < base->n ? wanted : base->n;
    return n == 0 || kvant_index_train(index, base->rows, base->dim, n) == KVANT_OK ||
           search_failed("training");
}

static bool add(kvant_index *index, const search_settings *s, const char *codec,
                const vectors *base)
{
    progress p;
    bool ok = true;
    progress_start(&p, (double)base->n);
    for (size_t i = 0; ok && i < base->n && !interrupted(); i += STEP) {
        const size_t n = base->n - i < STEP ? base->n - i : STEP;
        ok = kvant_index_add(index, base->rows + i * base->dim, base->dim, n, NULL, s->threads) ==
                 KVANT_OK ||
             search_failed("adding vectors");
        progress_add(&p, (double)n, codec);
    }
    progress_end(&p);
    return ok && !interrupted();
}

bool search_make_index(const search_settings *s, const char *codec, const vectors *base,
                       kvant_index **index)
{
    kvant_index_params params = { .size = sizeof params, .dim = base->dim, .spec = codec };
    vectors centroids = { .rows = NULL };
    char err[256] = "";
    *index = NULL;
    if (!search_find_metric(s->metric, &params.metric) ||
        (s->centroids != NULL && (!vectors_read(s->centroids, 0, &centroids) ||
                                  !search_same_dimensions("centroids", &centroids, base->dim))))
        return false;
    params.centroids = centroids.rows;
    params.centroid_stride = centroids.dim;
    params.n_centroids = centroids.n;
    const kvant_status status = kvant_index_create(&params, index, err, sizeof err);
    vectors_free(&centroids);
    if (status != KVANT_OK)
        return complain("search: %s", err);
    return train(*index, s, codec, base) && add(*index, s, codec, base);
}

/* ---- info ---- */

static bool print_info(const kvant_index *index, bool json)
{
    kvant_index_info info = { .size = sizeof info };
    kvant_index_get_info(index, &info);
    report_rows row = { .n_rows = 0 };
    report_row(&row);
    report_text(&row, "codec", "codec", info.spec);
    report_text(&row, "metric", "metric", search_metric_name(info.metric));
    report_number(&row, "vectors", "vectors", 0, (double)info.n);
    report_number(&row, "dim", "dim", 0, info.dim);
    report_number(&row, "bits", NULL, 0, (double)info.bits);
    report_number(&row, "bytes_per_vector", "bytes/vector", 0, (double)info.bytes_per_vector);
    report_number(&row, "id_bytes", "id bytes", 0, (double)info.id_bytes);
    report_number_as(&row, COLUMN_BOOL, "centred", NULL, 0, info.has_center);
    report_number_as(&row, COLUMN_MIB, "file_bytes", "MiB", 1, (double)info.file_bytes);
    return report_print(&row, "search", json);
}

bool search_open_index(const char *path, bool verify, kvant_index **index)
{
    char err[256] = "";
    if (kvant_index_view(path, index, err, sizeof err) != KVANT_OK)
        return strstr(err, path) != NULL ? complain("%s", err) : complain("%s: %s", path, err);
    return !verify || kvant_index_verify(*index) == KVANT_OK ||
           complain("%s: %s", path, kvant_error_message());
}

bool search_info(const search_settings *s, const char *const *files)
{
    kvant_index *index = NULL;
    const bool ok = search_open_index(files[0], s->verify, &index) && print_info(index, s->json);
    kvant_index_free(&index);
    return ok;
}

/* ---- build ---- */

bool search_build(const search_settings *s, const char *const *files)
{
    vectors base;
    kvant_index *index = NULL;
    char err[256] = "";
    const char *codec = s->n_specs > 0 ? s->specs[0] : "turboquant-4";
    if (s->n_specs > 1)
        return complain("search build: %zu codecs are given, but an index has one", s->n_specs);
    if (!can_write_file("search build", files[1]))
        return false;
    bool ok = vectors_read(files[0], 0, &base) && search_make_index(s, codec, &base, &index);
    if (ok && kvant_index_save(index, files[1], err, sizeof err) != KVANT_OK)
        ok = complain("%s", err);
    ok = ok && print_info(index, s->json);
    kvant_index_free(&index);
    vectors_free(&base);
    return ok;
}
