/* cmd_encode.c - `kvant bench encode`: what writing a row into the cache costs, one core, beside the f16 cache.
 *
 * Rounds go over all codecs before the next begins, so drift of the machine hits them alike; the median is given. */
#include "args.h"
#include "command.h"
#include "progress.h"
#include "report.h"
#include "stats.h"

#include <kvant/calibration.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPT_SPEC, OPT_HEAD_DIM, OPT_CALIBRATION, OPT_ROUNDS, OPT_JSON };
enum { MAX_SPECS = 64, MAX_ROUNDS = 1001, PAGES = 4, ROWS = PAGES * KVANT_PAGE_TOKENS };

static const arg_option options[] = {
    { OPT_SPEC, 'k', "codec", "SPEC", "codec to measure, may be repeated (default: a list of common ones)" },
    { OPT_HEAD_DIM, 'd', "head-dim", "N", "numbers of a row, 1 to 512 (default 128)" },
    { OPT_CALIBRATION, 0, "calibration", "FILE", "for codecs that need one: those of its layer 0, kv head 0" },
    { OPT_ROUNDS, 'r', "rounds", "N", "rounds, of which the median is given (default 31)" },
    { OPT_JSON, 0, "json", NULL, "one JSON array of flat objects" },
};

static const arg_spec spec = {
    .command = "bench encode",
    .usage = "[-k SPEC]... [--head-dim N] [--calibration FILE] [--rounds N] [--json]",
    .about = "Measures the time to encode a row (one token of one kv head) on one core, for keys\n"
             "and for values. f16, the usual cache, is always the first row and what ratios refer to.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes = "Rows are normally distributed.\n\nexample:\n"
             "  kvant bench encode -k turboquant-4 -k octopus-4 --head-dim 128",
};

static const char *const usual[] = { "int-4",        "bdr-4",      "turboquant-4",
                                     "turboquant-3", "trellis-4",  "octopus-4:round=scalar",
                                     "octopus-4",    "hqmq-s96r4", "innerq-base" };

typedef struct settings {
    const char *specs[MAX_SPECS];
    size_t n_specs;
    uint32_t head_dim, rounds;
    const char *calibration_file;
    kvant_calibration *calibration;
    bool json;
} settings;

static bool handle(void *user, int id, const char *value)
{
    settings *s = user;
    switch (id) {
    case OPT_SPEC:
        if (s->n_specs == MAX_SPECS)
            return complain("more than %d codecs", MAX_SPECS - 1);
        s->specs[s->n_specs++] = value;
        return true;
    case OPT_HEAD_DIM: return args_u32("--head-dim", value, 1, KVANT_MAX_HEAD_DIM, &s->head_dim);
    case OPT_CALIBRATION: s->calibration_file = value; return true;
    case OPT_ROUNDS: return args_u32("--rounds", value, 1, MAX_ROUNDS, &s->rounds);
    default: return s->json = true;
    }
}

/* One codec in one role, with a place to encode to. */
typedef struct subject {
    const char *spec;
    kvant_role role;
    kvant_codec *codec;
    kvant_codec_info info;
    void *pages;
    double *seconds; /* a row, one entry a round */
} subject;

static bool prepare(subject *s, const settings *set)
{
    char err[256] = "";
    const kvant_status status = kvant_codec_create_calibrated(s->spec, set->head_dim, s->role, 0, set->calibration,
                                                              0, 0, &s->codec, err, sizeof err);
    if (status != KVANT_OK) {
        complain("%s at head_dim %u: %s", s->spec, (unsigned)set->head_dim, err);
        return hint("kvant codecs lists what there is");
    }
    s->info.size = sizeof s->info;
    kvant_codec_get_info(s->codec, &s->info);
    s->pages = aligned_alloc(KVANT_PAGE_ALIGN, PAGES * s->info.page_bytes);
    s->seconds = malloc(set->rounds * sizeof *s->seconds);
    if (s->pages == NULL || s->seconds == NULL)
        return complain("out of memory");
    memset(s->pages, 0, PAGES * s->info.page_bytes);
    return true;
}

static void release(subject *s)
{
    kvant_codec_free(&s->codec);
    free(s->pages);
    free(s->seconds);
}

static bool encode_once(subject *s, const float *rows, uint32_t head_dim, size_t round)
{
    const double start = monotonic_seconds();
    for (size_t p = 0; p < PAGES; p++) {
        const kvant_status status =
            kvant_codec_encode(s->codec, NULL, rows + p * KVANT_PAGE_TOKENS * head_dim, head_dim, 0,
                               KVANT_PAGE_TOKENS, (char *)s->pages + p * s->info.page_bytes);
        if (status != KVANT_OK)
            return complain("%s: %s", s->spec, kvant_strerror(status));
    }
    s->seconds[round] = (monotonic_seconds() - start) / ROWS;
    return true;
}

static const report_column columns[] = {
    { "spec", "codec", COLUMN_TEXT, 0 },           { "role", "role", COLUMN_TEXT, 0 },
    { "head_dim", "head_dim", COLUMN_NUMBER, 0 },  { "level", "level", COLUMN_TEXT, 0 },
    { "true_bits", "bits", COLUMN_NUMBER, 2 },     { "microseconds", "us a row", COLUMN_NUMBER, 3 },
    { "ratio_to_f16", "x f16", COLUMN_NUMBER, 2 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

static bool print(const subject *subjects, size_t n, const settings *s)
{
    report_cell *cells = calloc(n * N_COLUMNS, sizeof *cells);
    if (cells == NULL)
        return false;
    for (size_t i = 0; i < n; i++) {
        const subject *x = &subjects[i];
        const double time = stats_percentile(x->seconds, s->rounds, 0.5);
        const double f16 = stats_percentile(subjects[x->role].seconds, s->rounds, 0.5);
        const report_cell row[N_COLUMNS] = { CELL_TEXT(x->spec),
                                             CELL_TEXT(x->role == KVANT_ROLE_K ? "K" : "V"),
                                             CELL_NUMBER(s->head_dim),
                                             CELL_TEXT(kvant_cpu_level_name(kvant_get_cpu_level())),
                                             CELL_NUMBER(x->info.true_bits),
                                             CELL_NUMBER(1e6 * time),
                                             CELL_NUMBER(time / f16) };
        memcpy(cells + i * N_COLUMNS, row, sizeof row);
    }
    const bool ok = report_print(columns, N_COLUMNS, cells, n, s->json);
    free(cells);
    return ok;
}

/* Sums of 12 uniform numbers: near enough to normal for a speed, and the same on every machine. */
static void fill_rows(float *rows, size_t n)
{
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        rows[i] = -6;
        for (int j = 0; j < 12; j++)
            rows[i] += (float)((state = state * 1664525u + 1013904223u) >> 8) / 16777216.0f;
    }
}

static bool measure(subject *subjects, size_t n, const settings *s)
{
    const size_t n_numbers = (size_t)ROWS * s->head_dim;
    float *rows = malloc(n_numbers * sizeof *rows);
    bool ok = rows != NULL;
    if (ok)
        fill_rows(rows, n_numbers);
    else
        complain("out of memory");
    for (size_t round = 0; ok && round < s->rounds; round++)
        for (size_t i = 0; ok && i < n; i++)
            ok = encode_once(&subjects[i], rows, s->head_dim, round);
    free(rows);
    return ok;
}

static bool load_calibration(settings *s)
{
    char err[512] = "";
    if (s->calibration_file == NULL ||
        kvant_calibration_load(s->calibration_file, &s->calibration, err, sizeof err) == KVANT_OK)
        return true;
    return complain("bench encode: %s", err);
}

int bench_encode(int argc, char **argv)
{
    settings s = { .head_dim = 128, .rounds = 31 };
    const int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (s.n_specs == 0)
        for (; s.n_specs < sizeof usual / sizeof *usual; s.n_specs++)
            s.specs[s.n_specs] = usual[s.n_specs];
    /* f16 first, keys before values: a subject's rival is at the index of its role. */
    static subject subjects[2 * (MAX_SPECS + 1)];
    const size_t n = 2 * (s.n_specs + 1);
    bool ok = load_calibration(&s);
    for (size_t i = 0; i < n; i++)
        subjects[i] = (subject){ .spec = i < 2 ? "f16" : s.specs[i / 2 - 1], .role = (kvant_role)(i % 2) };
    for (size_t i = 0; ok && i < n; i++)
        ok = prepare(&subjects[i], &s);
    ok = ok && measure(subjects, n, &s) && print(subjects, n, &s);
    for (size_t i = 0; i < n; i++)
        release(&subjects[i]);
    kvant_calibration_free(&s.calibration);
    return ok ? finish_output() : EXIT_RUNTIME;
}
