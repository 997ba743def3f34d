/* cmd_search.c - `kvant search`: builds indexes of vectors, searches them, and measures how many of
 * the nearest vectors a codec finds. */
#include "args.h"
#include "command.h"
#include "interrupt.h"
#include "progress.h"
#include "report.h"
#include "search_truth.h"
#include "text.h"
#include "vectors.h"

#include <errno.h>
#include <kvant/index.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_SPECS = 16,
    MAX_FILES = 3,
    STEP = 8192,
    BATCH = 100,
    MOST_QUERIES = 100000,
    TRAIN = 10000
};

typedef struct settings {
    const char *metric, *device, *allow;
    const char *specs[MAX_SPECS];
    size_t n_specs;
    uint32_t k, threads, rerank, probe, train, batch, queries;
    const char *centroids;
    bool json, verify;
} settings;
#define AT(member) offsetof(settings, member)

static bool take_spec(void *part, const char *value)
{
    settings *s = part;
    if (s->n_specs == MAX_SPECS)
        return complain("search: at most %d codecs", MAX_SPECS);
    s->specs[s->n_specs++] = value;
    return true;
}

static const arg_option options[] = {
    ARG_CALL('c', "codec", "SPEC", take_spec, metric /* the first member: the settings */,
             "turboquant-B with B = 1 to 8 bits per dimension (default turboquant-4), trellis-B "
             "with 2 to 4:\n"
             "smaller errors, longer to build; int-B, rabitq-B. NAME:dims=N keeps the N principal "
             "dimensions,\n"
             "lists=N makes N inverted lists, rows=int8 adds 8 bits per number for --rerank. "
             "Repeat it\nfor eval"),
    ARG_TEXT('m', "metric", "NAME", metric,
             "build, eval: ip (inner product, default), cosine or l2"),
    ARG_TEXT(0, "device", "NAME", device,
             "query, eval: cpu (default) or cuda, an NVIDIA GPU: the same results"),
    ARG_TEXT(0, "allow", "FILE", allow,
             "query: find only vectors whose ids FILE has, one per line; - is stdin"),
    ARG_U32('k', "neighbors", "K", 1, 10000, k, "query, eval: neighbours per query (default 10)"),
    ARG_U32(0, "probe", "N", 1, 65536, probe,
            "query, eval: inverted lists per query, at most all (default 8)"),
    ARG_TEXT(0, "centroids", "FILE", centroids,
             "build, eval: centroids of lists= (default: k-means)"),
    ARG_U32(0, "rerank", "N", 1, 1000000, rerank,
            "query, eval: rank the N best again by rows=int8, or without it by the original "
            "vectors (eval)"),
    ARG_U32(0, "train", "N", 1, 10000000, train,
            "build, eval: learn the centre, and the tables of dims= and lists=, from the first N "
            "vectors\n"
            "(default 10000 with these, else none)"),
    ARG_U32(0, "batch", "N", 1, MOST_QUERIES, batch, "eval: queries per search (default 100)"),
    ARG_U32('n', "queries", "N", 1, MOST_QUERIES, queries,
            "query, eval: at most N queries (default 1000)"),
    ARG_U32('t', "threads", "N", 1, 256, threads, "threads (default: every CPU; eval: 1)"),
    ARG_SWITCH(
        0, "verify", verify,
        "query, info: read the whole file first and compare its checksum; query does so with\n"
        "files of up to 256 MiB"),
    ARG_CALL(0, "json", NULL, progress_use_json, json, "one JSON array of flat objects"),
};

static const arg_spec spec = {
    .command = "search",
    .usage = "build VECTORS INDEX [options]\n       kvant search query INDEX QUERIES [options]\n   "
             "    kvant search info INDEX [options]\n"
             "       kvant search eval VECTORS QUERIES [options]",
    .about =
        "Nearest-neighbour search on compressed vectors. `build` writes an index, `query` prints "
        "the neighbours\n"
        "of each query, `eval` measures recall against an exact search, bytes and time per vector.",
    ARG_OPTIONS(options),
    .notes = "VECTORS and QUERIES are .npy (float32 or uint8), .fvecs, .bvecs, .fbin or .u8bin "
             "files. A vector's id is\n"
             "its place in the file.\n\n"
             "examples:\n  kvant search build base.npy base.kvidx\n  kvant search query base.kvidx "
             "queries.npy -k 10\n"
             "  kvant search eval base.npy queries.npy -c turboquant-4 -c turboquant-3:dims=256",
};

static const struct {
    const char *name;
    kvant_metric metric;
} metrics[] = { { "ip", KVANT_METRIC_INNER_PRODUCT },
                { "cosine", KVANT_METRIC_COSINE },
                { "l2", KVANT_METRIC_L2 } };

static const char *metric_name(kvant_metric metric)
{
    return metrics[metric].name;
}

static bool find_metric(const char *name, kvant_metric *metric)
{
    *metric = KVANT_METRIC_INNER_PRODUCT;
    for (size_t i = 0; name != NULL && i < sizeof metrics / sizeof *metrics; i++)
        if (strcmp(name, metrics[i].name) == 0) {
            *metric = metrics[i].metric;
            return true;
        }
    return name == NULL || complain("search: --metric must be ip, cosine or l2, not '%s'", name);
}

static bool failed(const char *what)
{
    return complain("search: %s: %s", what, kvant_error_message());
}

/* ---- Making an index ---- */

static bool same_dimensions(const char *what, const vectors *v, uint32_t dim)
{
    return v->dim == dim || complain("search: %s have %u dimensions, but vectors have %u", what,
                                     (unsigned)v->dim, (unsigned)dim);
}

static bool train(kvant_index *index, const settings *s, const char *codec, const vectors *base)
{
    const size_t wanted = s->train != 0 ? s->train
                          : strstr(codec, "dims=") != NULL || strstr(codec, "lists=") != NULL
                              ? TRAIN
                              : 0;
    const size_t n = wanted < base->n ? wanted : base->n;
    return n == 0 || kvant_index_train(index, base->rows, base->dim, n) == KVANT_OK ||
           failed("training");
}

static bool add(kvant_index *index, const settings *s, const char *codec, const vectors *base)
{
    progress p;
    bool ok = true;
    progress_start(&p, (double)base->n);
    for (size_t i = 0; ok && i < base->n && !interrupted(); i += STEP) {
        const size_t n = base->n - i < STEP ? base->n - i : STEP;
        ok = kvant_index_add(index, base->rows + i * base->dim, base->dim, n, NULL, s->threads) ==
                 KVANT_OK ||
             failed("adding vectors");
        progress_add(&p, (double)n, codec);
    }
    progress_end(&p);
    return ok && !interrupted();
}

static bool make_index(const settings *s, const char *codec, const vectors *base,
                       kvant_index **index)
{
    kvant_index_params params = { .size = sizeof params, .dim = base->dim, .spec = codec };
    vectors centroids = { .rows = NULL };
    char err[256] = "";
    *index = NULL;
    if (!find_metric(s->metric, &params.metric) ||
        (s->centroids != NULL && (!vectors_read(s->centroids, 0, &centroids) ||
                                  !same_dimensions("centroids", &centroids, base->dim))))
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

static const report_column info_columns[] = {
    { "codec", "codec", COLUMN_TEXT, 0 },
    { "metric", "metric", COLUMN_TEXT, 0 },
    { "vectors", "vectors", COLUMN_NUMBER, 0 },
    { "dim", "dim", COLUMN_NUMBER, 0 },
    { "bits", NULL, COLUMN_NUMBER, 0 },
    { "bytes_per_vector", "bytes/vector", COLUMN_NUMBER, 0 },
    { "id_bytes", "id bytes", COLUMN_NUMBER, 0 },
    { "centred", NULL, COLUMN_BOOL, 0 },
    { "file_bytes", "MiB", COLUMN_MIB, 1 },
};
enum { N_INFO = sizeof info_columns / sizeof *info_columns };

static bool print_info(const kvant_index *index, bool json)
{
    kvant_index_info info = { .size = sizeof info };
    kvant_index_get_info(index, &info);
    const report_cell cells[N_INFO] = {
        CELL_TEXT(info.spec),         CELL_TEXT(metric_name(info.metric)),
        CELL_NUMBER(info.n),          CELL_NUMBER(info.dim),
        CELL_NUMBER(info.bits),       CELL_NUMBER(info.bytes_per_vector),
        CELL_NUMBER(info.id_bytes),   CELL_NUMBER(info.has_center),
        CELL_NUMBER(info.file_bytes),
    };
    return report_print(info_columns, N_INFO, cells, 1, json);
}

static bool open_index(const char *path, bool verify, kvant_index **index)
{
    char err[256] = "";
    if (kvant_index_view(path, index, err, sizeof err) != KVANT_OK)
        return strstr(err, path) != NULL ? complain("%s", err) : complain("%s: %s", path, err);
    return !verify || kvant_index_verify(*index) == KVANT_OK ||
           complain("%s: %s", path, kvant_error_message());
}

/* A third of a second for the checksum. A search with lists may read a small part of a larger
 * file. */
#define VERIFIED_MIB 256u

/* Verifies a file that is not too large, so that damage is not taken for an answer. */
static bool open_for_query(const char *path, const settings *s, kvant_index **index)
{
    kvant_index_info info = { .size = sizeof info };
    if (!open_index(path, s->verify, index) || kvant_index_get_info(*index, &info) != KVANT_OK)
        return false;
    if (s->verify || info.file_bytes >> 20 < VERIFIED_MIB)
        return s->verify || kvant_index_verify(*index) == KVANT_OK ||
               complain("%s: %s", path, kvant_error_message());
    fprintf(stderr,
            "kvant: search: %s is not verified, as it has more than %u MiB: --verify does it\n",
            path, VERIFIED_MIB);
    return true;
}

static bool run_info(const settings *s, const char *const *files)
{
    kvant_index *index = NULL;
    const bool ok = open_index(files[0], s->verify, &index) && print_info(index, s->json);
    kvant_index_free(&index);
    return ok;
}

/* ---- build ---- */

static bool run_build(const settings *s, const char *const *files)
{
    vectors base;
    kvant_index *index = NULL;
    char err[256] = "";
    const char *codec = s->n_specs > 0 ? s->specs[0] : "turboquant-4";
    if (s->n_specs > 1)
        return complain("search build: %zu codecs are given, but an index has one", s->n_specs);
    bool ok = vectors_read(files[0], 0, &base) && make_index(s, codec, &base, &index);
    if (ok && kvant_index_save(index, files[1], err, sizeof err) != KVANT_OK)
        ok = complain("%s", err);
    ok = ok && print_info(index, s->json);
    kvant_index_free(&index);
    vectors_free(&base);
    return ok;
}

/* ---- query ---- */

typedef struct answers {
    float *scores;
    uint64_t *ids;
} answers;

typedef struct id_list {
    uint64_t *ids; /* NULL: all vectors are allowed */
    size_t n;
} id_list;

/* A line of the list; false after complaining. */
static bool take_id(const char *path, size_t line, const char *text, id_list *list)
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

static bool read_ids(const char *path, id_list *list)
{
    size_t bytes = 0;
    char *text = path != NULL ? read_text(path, &bytes) : NULL;
    bool ok = path == NULL || text != NULL;
    if (text != NULL)
        list->ids = calloc(bytes / 2 + 1, sizeof *list->ids);
    if (text != NULL && list->ids == NULL)
        ok = complain("out of memory");
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

static bool allocate_answers(answers *a, size_t n, uint32_t k)
{
    a->scores = calloc(n, k * sizeof *a->scores);
    a->ids = calloc(n, k * sizeof *a->ids);
    return (a->scores != NULL && a->ids != NULL) || complain("out of memory");
}

static void free_answers(answers *a)
{
    free(a->scores);
    free(a->ids);
}

static bool on_gpu(const settings *s)
{
    return strcmp(s->device, "cuda") == 0;
}

/* *gpu stays NULL on the CPU. */
static bool copy_to_gpu(const settings *s, const kvant_index *index, kvant_index_gpu **gpu)
{
    char err[512] = "";
    return !on_gpu(s) || kvant_index_gpu_create(index, gpu, err, sizeof err) == KVANT_OK ||
           complain("search: %s", err);
}

static bool ask(const kvant_index *index, const kvant_index_gpu *gpu, const settings *s,
                const vectors *queries, size_t first, size_t n, const vectors *base,
                const id_list *allowed, answers *a)
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
    return status == KVANT_OK || failed("searching");
}

static const report_column query_columns[] = {
    { "query", "query", COLUMN_NUMBER, 0 },
    { "rank", "rank", COLUMN_NUMBER, 0 },
    { "id", "id", COLUMN_NUMBER, 0 },
    { "score", "score", COLUMN_NUMBER, 4 },
};
enum { N_QUERY = sizeof query_columns / sizeof *query_columns };

static bool print_answers(const answers *a, size_t n, uint32_t k, bool json)
{
    report_cell *cells = calloc(n * k, N_QUERY * sizeof *cells), *cell = cells;
    if (cells == NULL)
        return complain("out of memory");
    for (size_t i = 0; i < n * k; i++)
        if (a->ids[i] != KVANT_INDEX_NO_ID) {
            *cell++ = CELL_NUMBER(i / k);
            *cell++ = CELL_NUMBER(i % k + 1);
            *cell++ = CELL_NUMBER(a->ids[i]);
            *cell++ = CELL_NUMBER(a->scores[i]);
        }
    const bool ok =
        report_print(query_columns, N_QUERY, cells, (size_t)(cell - cells) / N_QUERY, json);
    free(cells);
    return ok;
}

static bool run_query(const settings *s, const char *const *files)
{
    vectors queries = { .rows = NULL };
    kvant_index *index = NULL;
    kvant_index_gpu *gpu = NULL;
    kvant_index_info info = { .size = sizeof info };
    answers a = { NULL, NULL };
    id_list allowed = { NULL, 0 };
    bool ok = read_ids(s->allow, &allowed) && open_for_query(files[0], s, &index) &&
              kvant_index_get_info(index, &info) == KVANT_OK &&
              vectors_read(files[1], s->queries, &queries);
    ok = ok && same_dimensions("queries", &queries, info.dim) &&
         allocate_answers(&a, queries.n, s->k) && copy_to_gpu(s, index, &gpu) &&
         ask(index, gpu, s, &queries, 0, queries.n, NULL, &allowed, &a) &&
         print_answers(&a, queries.n, s->k, s->json);
    free(allowed.ids);
    kvant_index_gpu_free(&gpu);
    free_answers(&a);
    vectors_free(&queries);
    kvant_index_free(&index);
    return ok;
}

/* ---- eval ---- */

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
static double measure(const kvant_index *index, const kvant_index_gpu *gpu, const settings *s,
                      const vectors *originals, const vectors *queries, answers *a)
{
    double sum = 0;
    for (size_t q = 0; q < queries->n && !interrupted(); q += s->batch) {
        double best = INFINITY;
        for (int round = 0; round < ROUNDS; round++) {
            const double start = monotonic_seconds();
            if (!ask(index, gpu, s, queries, q,
                     queries->n - q < s->batch ? queries->n - q : s->batch, originals, NULL, a))
                return -1;
            best = fmin(best, monotonic_seconds() - start);
        }
        sum += best;
    }
    return sum;
}

static bool eval_codec(const settings *s, const char *codec, const vectors *base,
                       const vectors *queries, const search_truth *t, answers *a,
                       report_cell *cells)
{
    kvant_index *index = NULL;
    kvant_index_gpu *gpu = NULL;
    kvant_index_info info = { .size = sizeof info };
    const double start = monotonic_seconds();
    bool ok = make_index(s, codec, base, &index) && copy_to_gpu(s, index, &gpu);
    const vectors *originals = strstr(codec, "rows=") != NULL ? NULL : base;
    const double built = monotonic_seconds() - start,
                 seconds = ok ? measure(index, gpu, s, originals, queries, a) : -1;
    ok = seconds >= 0 && !interrupted() && kvant_index_get_info(index, &info) == KVANT_OK;
    if (ok) {
        const report_cell row[N_EVAL] = {
            CELL_TEXT(codec),
            CELL_TEXT(metric_name(info.metric)),
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

static bool run_eval(const settings *s, const char *const *files)
{
    static report_cell cells[MAX_SPECS * N_EVAL];
    static const char *const usual[] = { "turboquant-4" };
    const char *const *specs = s->n_specs > 0 ? s->specs : usual;
    const size_t n = s->n_specs > 0 ? s->n_specs : 1;
    vectors base = { .rows = NULL }, queries = { .rows = NULL };
    search_truth t = { .least = NULL };
    answers a = { NULL, NULL };
    kvant_metric metric;
    bool ok = find_metric(s->metric, &metric) && vectors_read(files[0], 0, &base) &&
              vectors_read(files[1], s->queries, &queries) &&
              same_dimensions("queries", &queries, base.dim) &&
              allocate_answers(&a, queries.n, s->k) &&
              search_truth_find(&t, metric, s->k, &base, &queries);
    for (size_t i = 0; ok && i < n; i++)
        ok = eval_codec(s, specs[i], &base, &queries, &t, &a, cells + i * N_EVAL);
    ok = ok && report_print(eval_columns, N_EVAL, cells, n, s->json);
    search_truth_free(&t);
    free_answers(&a);
    vectors_free(&base);
    vectors_free(&queries);
    return ok;
}

/* ---- The command ---- */

static const struct action {
    const char *name;
    int n_files;
    bool (*run)(const settings *s, const char *const *files);
} actions[] = { { "build", 2, run_build },
                { "query", 2, run_query },
                { "info", 1, run_info },
                { "eval", 2, run_eval } };
enum { N_ACTIONS = sizeof actions / sizeof *actions };

static const struct action *find_action(const char *word)
{
    for (size_t i = 0; i < N_ACTIONS; i++)
        if (strcmp(word, actions[i].name) == 0)
            return &actions[i];
    return NULL;
}

static int unknown_action(const char *word)
{
    const char *names[N_ACTIONS];
    for (size_t i = 0; i < N_ACTIONS; i++)
        names[i] = actions[i].name;
    return args_unknown_word("action", word, names, N_ACTIONS, "kvant search --help lists them");
}

/* Which actions take an option; zeros in its member: it was not given. */
static const struct {
    const char *name;
    size_t at, size;
    const char *actions;
} uses[] = {
#define USE(name, member, actions) { name, AT(member), sizeof((settings *)NULL)->member, actions }
    USE("--codec", n_specs, "build, eval"),
    USE("--metric", metric, "build, eval"),
    USE("--train", train, "build, eval"),
    USE("--device", device, "query, eval"),
    USE("--neighbors", k, "query, eval"),
    USE("--probe", probe, "query, eval"),
    USE("--rerank", rerank, "query, eval"),
    USE("--queries", queries, "query, eval"),
    USE("--batch", batch, "eval"),
    USE("--allow", allow, "query"),
    USE("--centroids", centroids, "build, eval"),
    USE("--threads", threads, "build, query, eval"),
    USE("--verify", verify, "query, info"),
#undef USE
};

static bool takes_options(const char *action, const settings *s)
{
    static const char zeros[sizeof(void *)];
    for (size_t i = 0; i < sizeof uses / sizeof *uses; i++)
        if (memcmp((const char *)s + uses[i].at, zeros, uses[i].size) != 0 &&
            strstr(uses[i].actions, action) == NULL)
            return complain("search %s takes no %s, which is for %s", action, uses[i].name,
                            uses[i].actions);
    return true;
}

static void set_defaults(settings *s, bool measures)
{
    s->device = s->device != NULL ? s->device : "cpu";
    s->k = s->k != 0 ? s->k : 10;
    s->batch = s->batch != 0 ? s->batch : BATCH;
    s->queries = s->queries != 0 ? s->queries : 1000;
    s->threads = s->threads != 0 ? s->threads : measures ? 1 : kvant_available_cpus();
}

/* Options stand before, between or behind the words. argv[0] is a word each time. */
static int read_words(int argc, char **argv, settings *s, const char **words, int *n)
{
    while (argc > 0) {
        int rest = 0;
        const int code = args_parse(&spec, argc, argv, s, &rest);
        if (code >= 0)
            return code;
        argc -= rest;
        argv += rest;
        if (argc > 0 && *n == MAX_FILES) {
            complain("search: '%s' is one word too many", argv[0]);
            return EXIT_USAGE;
        }
        if (argc > 0)
            words[(*n)++] = argv[0];
    }
    return -1;
}

int command_search(int argc, char **argv)
{
    static settings s;
    const char *words[MAX_FILES];
    int n = 0;
    const int code = read_words(argc, argv, &s, words, &n);
    if (code >= 0)
        return code;
    if (n == 0) {
        complain("search: the first word must be build, query, info or eval");
        hint("kvant search --help describes them");
        return EXIT_USAGE;
    }
    const struct action *action = find_action(words[0]);
    if (action == NULL)
        return unknown_action(words[0]);
    if (n != 1 + action->n_files) {
        complain("search %s takes %d file%s, not %d", action->name, action->n_files,
                 action->n_files > 1 ? "s" : "", n - 1);
        hint("kvant search --help shows which");
        return EXIT_USAGE;
    }
    if (!takes_options(action->name, &s))
        return EXIT_USAGE;
    set_defaults(&s, action->run == run_eval);
    if (strcmp(s.device, "cpu") != 0 && !on_gpu(&s)) {
        complain("search: --device must be cpu or cuda, not '%s'", s.device);
        return EXIT_USAGE;
    }
    interrupt_catch();
    const bool ok = action->run(&s, words + 1);
    return ok ? finish_output() : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
}
