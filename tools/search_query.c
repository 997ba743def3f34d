/* search_query.c - `kvant search query`: searches an index, on the CPU or a GPU, and prints the
 * neighbours of each query. search_eval.c searches with the same function.
 *
 * It does not make indexes: search_index.c does. */
#include "command.h"
#include "report.h"
#include "search.h"
#include "text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A third of a second for the checksum. A search with lists may read a small part of a larger
 * file. */
#define VERIFIED_MIB 256u

/* Verifies a file that is not too large, so that damage is not taken for an answer. */
static bool open_for_query(const char *path, const search_settings *s, kvant_index **index)
{
    kvant_index_info info = { .size = sizeof info };
    if (!search_open_index(path, s->verify, index) ||
        kvant_index_get_info(*index, &info) != KVANT_OK)
        return false;
    if (s->verify || info.file_bytes >> 20 < VERIFIED_MIB)
        return s->verify || kvant_index_verify(*index) == KVANT_OK ||
               complain("%s: %s", path, kvant_error_message());
    report_line(
        "kvant: ", "search: %s is not verified, as it has more than %u MiB: --verify does it", path,
        VERIFIED_MIB);
    return true;
}

/* A line of the list; false after complaining. */
static bool take_id(const char *path, size_t line, const char *text, search_id_list *list)
{
    const char *digits = text + strspn(text, " \t");
    char *end = NULL;
    errno = 0;
    list->ids[list->n] = strtoull(digits, &end, 10);
    if (*end != '\0' && end[strspn(end, " \t\r")] != '\0')
        return complain("%s, line %zu: '%.40s' is not an id", path, line, text);
    if (end == digits)
        return *digits == '\0' || *digits == '\r' ||
               complain("%s, line %zu: '%.40s' is not an id", path, line, text);
    if (errno != 0 || *digits == '-' || list->ids[list->n] == KVANT_INDEX_NO_ID)
        return complain("%s, line %zu: '%.40s' is not from 0 to 2^64 - 2", path, line, text);
    list->n++;
    return true;
}

static bool read_ids(const char *path, search_id_list *list)
{
    size_t bytes = 0;
    char *text = path != NULL ? read_text(path, &bytes) : NULL;
    bool ok = path == NULL || text != NULL;
    if (text != NULL)
        list->ids = calloc(bytes / 2 + 1, sizeof *list->ids);
    if (text != NULL && list->ids == NULL)
        ok = complain("search: out of memory");
    size_t line = 0;
    for (char *at = text; ok && at != NULL && *at != '\0';) {
        const size_t length = strcspn(at, "\n");
        const bool last = at[length] == '\0';
        at[length] = '\0';
        ok = take_id(path, ++line, at, list);
        at += last ? length : length + 1;
    }
    free(text);
    return ok;
}

bool search_allocate_answers(search_answers *a, size_t n, uint32_t k)
{
    a->scores = calloc(n, k * sizeof *a->scores);
    a->ids = calloc(n, k * sizeof *a->ids);
    return (a->scores != NULL && a->ids != NULL) || complain("search: out of memory");
}

void search_free_answers(search_answers *a)
{
    free(a->scores);
    free(a->ids);
}

bool search_on_gpu(const search_settings *s)
{
    return strcmp(s->device, "cuda") == 0;
}

bool search_copy_to_gpu(const search_settings *s, const kvant_index *index, kvant_index_gpu **gpu)
{
    char err[512] = "";
    return !search_on_gpu(s) || kvant_index_gpu_create(index, gpu, err, sizeof err) == KVANT_OK ||
           complain("search: %s", err);
}

bool search_run(const kvant_index *index, const kvant_index_gpu *gpu, const search_settings *s,
                const vectors *queries, size_t first, size_t n, const vectors *base,
                const search_id_list *allowed, search_answers *a)
{
    kvant_index_query query = { .size = sizeof query,
                                .rows = queries->rows + first * queries->dim,
                                .stride = queries->dim,
                                .n = n,
                                .k = s->k,
                                .n_threads = s->threads,
                                .n_probe = s->probe,
                                .rerank = s->rerank };
    if (allowed != NULL && allowed->ids != NULL) {
        query.allowed = allowed->ids;
        query.n_allowed = allowed->n;
    }
    if (base != NULL) {
        query.originals = base->rows;
        query.original_stride = base->dim;
        query.n_originals = base->n;
    }
    float *scores = a->scores + first * s->k;
    uint64_t *ids = a->ids + first * s->k;
    const kvant_status status = gpu != NULL ? kvant_index_gpu_search(gpu, &query, scores, ids)
                                            : kvant_index_search(index, &query, scores, ids);
    return status == KVANT_OK || search_failed("searching");
}

static void add_answer(report_rows *out, size_t query, size_t rank, uint64_t id, double score)
{
    report_row(out);
    report_number(out, "query", "query", 0, (double)query);
    report_number(out, "rank", "rank", 0, (double)rank);
    report_number(out, "id", "id", 0, (double)id);
    report_number(out, "score", "score", 4, score);
}

static bool print_answers(const search_answers *a, size_t n, uint32_t k, bool json)
{
    report_rows out = { .n_rows = 0 };
    for (size_t i = 0; i < n * k; i++)
        if (a->ids[i] != KVANT_INDEX_NO_ID)
            add_answer(&out, i / k, i % k + 1, a->ids[i], a->scores[i]);
    if (out.n_rows == 0) { /* the headings alone */
        add_answer(&out, 0, 0, 0, 0);
        out.n_rows = 0;
    }
    return report_print(&out, "search", json);
}

bool search_query(const search_settings *s, const char *const *files)
{
    vectors queries = { .rows = NULL };
    kvant_index *index = NULL;
    kvant_index_gpu *gpu = NULL;
    kvant_index_info info = { .size = sizeof info };
    search_answers a = { NULL, NULL };
    search_id_list allowed = { NULL, 0 };
    bool ok = read_ids(s->allow, &allowed) && open_for_query(files[0], s, &index) &&
              kvant_index_get_info(index, &info) == KVANT_OK &&
              vectors_read(files[1], s->queries, &queries);
    ok = ok && search_same_dimensions("queries", &queries, info.dim) &&
         search_allocate_answers(&a, queries.n, s->k) && search_copy_to_gpu(s, index, &gpu) &&
         search_run(index, gpu, s, &queries, 0, queries.n, NULL, &allowed, &a) &&
         print_answers(&a, queries.n, s->k, s->json);
    free(allowed.ids);
    kvant_index_gpu_free(&gpu);
    search_free_answers(&a);
    vectors_free(&queries);
    kvant_index_free(&index);
    return ok;
}
