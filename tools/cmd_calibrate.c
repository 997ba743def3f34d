/* cmd_calibrate.c - `kvant calibrate`: runs a model over a text with llama.cpp's f16 cache, gathers statistics of keys, values and
 * queries on the way, and writes them to a file for the codecs that need one.
 *
 * The file is written last and at once: a run that fails or is interrupted leaves the old one as it was. What an interrupted run
 * gathered goes to a file beside it, with which the same command goes on.
 */
#include "command.h"
#include "engine.h"
#include "fingerprint.h"
#include "interrupt.h"
#include "progress.h"
#include "reading.h"
#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OPT_FILE, OPT_OUTPUT, OPT_TOKENS, OPT_CTX, OPT_CLUSTERS, OPT_SAMPLE, OPT_SEED, OPT_JSON };

static const arg_option options[] = {
    ENGINE_OPTION_MODEL,
    { OPT_FILE, 'f', "file", "FILE", "text to calibrate on; - reads standard input" },
    { OPT_OUTPUT, 'o', "output", "FILE", "calibration file to write (default: model.kvcal beside\nmodel.gguf, where all commands find it)" },
    { OPT_TOKENS, 'n', "tokens", "N", "tokens of the text to use at most (default 8192)" },
    { OPT_CTX, 'c', "ctx", "N", "tokens of a context (default 2048)" },
    { OPT_CLUSTERS, 0, "clusters", "C,...", "centroids a head for kmeans codecs, or none (default 256)" },
    { OPT_SAMPLE, 0, "sample", "N",
      "rows a layer to cluster (default: 8 for each\n"
      "cluster); 2 bytes a number of memory each" },
    { OPT_SEED, 0, "seed", "N", "seed of sampling and clustering (default 0)" },
    { OPT_JSON, 0, "json", NULL, "one JSON array with one flat object" },
    ENGINE_OPTIONS_RUNTIME,
};

static const arg_spec spec = {
    .command = "calibrate",
    .usage = "-m MODEL -f TEXT [-o FILE] [-n TOKENS] [-c CTX] [--clusters C,...]",
    .about = "Gathers the statistics that some codecs need and writes them to a file: means\n"
             "and ranges (center=file, norm=file), what keys are multiplied by\n"
             "(transform=file, transform=diagonal), centroids (kmeans), second moments of\n"
             "the queries (hessian). The model runs with llama.cpp's own f16 cache.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes = "Use a text like those that the model will see; a few thousand tokens are enough.\n"
             "Ctrl-C leaves FILE as it was and keeps what was read in FILE.part; the same\n"
             "command goes on from there.\n\nexamples:\n"
             "  kvant calibrate -m model.gguf -f text.txt\n"
             "  kvant calibrate -m model.gguf -f text.txt -o other.kvcal --clusters 16,256",
};

typedef struct settings {
    engine_options engine;
    const char *file, *output;
    char beside[4096]; /* the output that commands find by themselves */
    uint32_t n_tokens, n_ctx, sample, seed;
    uint32_t clusters[KVANT_CALIBRATION_MAX_CODEBOOKS], n_codebooks;
    bool json;
} settings;

/* Sorts as it goes: the order that people write numbers in means nothing. */
static bool add_clusters(void *user, char *text)
{
    settings *s = user;
    uint32_t n = 0;
    if (!args_u32("--clusters", text, 2, KVANT_CALIBRATION_MAX_CLUSTERS, &n))
        return false;
    uint32_t at = s->n_codebooks;
    while (at > 0 && s->clusters[at - 1] > n)
        at--;
    if (at > 0 && s->clusters[at - 1] == n)
        return true;
    if (s->n_codebooks == KVANT_CALIBRATION_MAX_CODEBOOKS)
        return complain("--clusters: at most %u numbers", KVANT_CALIBRATION_MAX_CODEBOOKS);
    memmove(s->clusters + at + 1, s->clusters + at, (s->n_codebooks - at) * sizeof *s->clusters);
    s->clusters[at] = n;
    s->n_codebooks++;
    return true;
}

static bool read_clusters(settings *s, const char *list)
{
    s->n_codebooks = 0;
    return strcmp(list, "none") == 0 || args_list("--clusters", list, add_clusters, s);
}

static bool handle(void *user, int id, const char *value)
{
    settings *s = user;
    bool known = false;
    switch (id) {
    case OPT_FILE: s->file = value; return true;
    case OPT_OUTPUT: s->output = value; return true;
    case OPT_TOKENS: return args_u32("--tokens", value, 16, 1 << 28, &s->n_tokens);
    case OPT_CTX: return args_u32("--ctx", value, 16, 1 << 24, &s->n_ctx);
    case OPT_CLUSTERS: return read_clusters(s, value);
    case OPT_SAMPLE: return args_u32("--sample", value, 2, 1 << 24, &s->sample);
    case OPT_SEED: return args_u32("--seed", value, 0, UINT32_MAX, &s->seed);
    case OPT_JSON: return s->json = progress_use_json();
    default: return engine_option(&s->engine, id, value, &known);
    }
}

typedef struct run {
    engine engine;
    const settings *settings;
    reading reading;
    kvant_calibrator *calibrator;
    size_t position; /* tokens that were gathered */
    char part[4096]; /* where an interrupted run's work is kept */
    kvant_calibration *calibration;
    progress progress;
    double started;
} run;

static bool create_calibrator(run *r)
{
    const settings *s = r->settings;
    char name[256] = "", err[256] = "";
    if (ll.llama_model_meta_val_str(r->engine.cpu_model, "general.name", name, sizeof name) <= 0)
        snprintf(name, sizeof name, "%s", file_name(s->engine.model));
    const kvant_calibrator_config config = { .size = sizeof config,
                                             .model = name,
                                             .model_fingerprint = kvant_model_fingerprint(s->engine.model),
                                             .seed = s->seed,
                                             .clusters = s->clusters,
                                             .n_codebooks = s->n_codebooks,
                                             .sample_rows = s->sample,
                                             .n_threads = r->engine.options.n_threads };
    if (kvant_calibrator_create(&config, &r->calibrator, err, sizeof err) == KVANT_OK)
        return true;
    return complain("calibrate: %s", err);
}

/* Of all that decides what is gathered and in which order. */
static uint64_t work_key(const run *r)
{
    uint64_t key = fingerprint_number(FINGERPRINT_START, r->settings->n_ctx);
    key = fingerprint_number(key, ENGINE_UBATCH);
    return fingerprint_bytes(key, r->reading.tokens, r->reading.n_tokens * sizeof *r->reading.tokens);
}

/* A checkpoint that cannot be used is no reason to stop, but one to say so. */
static void go_on(run *r)
{
    char err[512] = "";
    uint64_t position = 0;
    if (access(r->part, F_OK) != 0)
        return;
    if (kvant_calibrator_restore(r->calibrator, work_key(r), r->part, &position, err, sizeof err) != KVANT_OK) {
        fprintf(stderr, "kvant: calibrate: not going on from %s: %s\n", r->part, err);
        return;
    }
    r->position = position;
    fprintf(stderr, "kvant: calibrate: going on from %s, %zu of %zu tokens\n", r->part, r->position,
            r->reading.n_tokens);
}

static void keep(run *r)
{
    char err[512] = "";
    if (r->position == 0)
        return;
    if (kvant_calibrator_save(r->calibrator, work_key(r), r->position, r->part, err, sizeof err) == KVANT_OK)
        fprintf(stderr, "kvant: calibrate: the same command goes on from here (%s)\n", r->part);
    else
        complain("calibrate: %s", err);
}

/* Rows of a batch count for all layers or for none: the batch in which Ctrl-C came is finished. Before the position of an earlier run
 * a context is only computed again, not observed. */
static bool gather_batch(run *r, size_t chunk, size_t start, size_t n)
{
    const bool seen = chunk + start < r->position;
    r->reading.observer.calibrator = seen ? NULL : r->calibrator;
    if (!reading_decode(&r->reading, chunk, start, n))
        return false;
    if (!seen)
        r->position = chunk + start + n;
    return !interrupted();
}

/* What clustering a layer takes, in tokens read: an estimate, for progress alone. */
static double layer_work(const settings *s)
{
    const uint32_t most = s->n_codebooks > 0 ? s->clusters[s->n_codebooks - 1] : 0;
    return (s->sample > 0 && most > 0 ? s->sample : 8.0 * most) / 64;
}

static void start_progress(run *r)
{
    const size_t n_ctx = r->settings->n_ctx, n_tokens = r->reading.n_tokens;
    const size_t to_read = r->position < n_tokens ? n_tokens - r->position / n_ctx * n_ctx : 0;
    progress_start(&r->progress, (double)to_read + r->reading.observer.n_layers * layer_work(r->settings));
}

static bool gather(run *r)
{
    const size_t n_ctx = r->settings->n_ctx;
    bool ok = true;
    if (r->position == r->reading.n_tokens)
        return true;
    for (size_t chunk = r->position / n_ctx * n_ctx; chunk < r->reading.n_tokens && ok; chunk += n_ctx) {
        const size_t length = r->reading.n_tokens - chunk < n_ctx ? r->reading.n_tokens - chunk : n_ctx;
        reading_clear(&r->reading);
        for (size_t start = 0; start < length && ok; start += ENGINE_UBATCH) {
            const size_t n = length - start < ENGINE_UBATCH ? length - start : ENGINE_UBATCH;
            ok = gather_batch(r, chunk, start, n);
            progress_add(&r->progress, (double)n, "reading the text");
        }
    }
    return ok;
}

static bool cluster(run *r)
{
    uint32_t left = r->reading.observer.n_layers;
    kvant_status status = KVANT_OK;
    while (left > 0 && status == KVANT_OK && !interrupted()) {
        status = kvant_calibrator_cluster(r->calibrator, &left);
        progress_add(&r->progress, layer_work(r->settings), "clustering, layer by layer");
    }
    if (status != KVANT_OK)
        complain("calibrate: clustering failed: %s", kvant_strerror(status));
    return status == KVANT_OK && !interrupted();
}

static bool save(run *r)
{
    char err[512] = "";
    const kvant_status status = kvant_calibrator_finish(r->calibrator, &r->calibration);
    if (status != KVANT_OK)
        return complain("calibrate: cannot make the calibration: %s", kvant_strerror(status));
    if (kvant_calibration_save(r->calibration, r->settings->output, err, sizeof err) == KVANT_OK) {
        unlink(r->part);
        return true;
    }
    return complain("calibrate: %s", err);
}

static bool prepare(run *r)
{
    const settings *s = r->settings;
    const reading_text text = { .file = s->file,
                                .at_most = s->n_tokens,
                                .at_least = s->n_codebooks > 0 ? s->clusters[s->n_codebooks - 1] : 16,
                                .n_ctx = s->n_ctx };
    if (!can_write_beside("calibrate", s->output) || !engine_open(&r->engine, &s->engine) ||
        !reading_open(&r->reading, &r->engine, "calibrate", &text) || !create_calibrator(r))
        return false;
    go_on(r);
    start_progress(r);
    return true;
}

static const report_column columns[] = {
    { "file", "file", COLUMN_TEXT, 0 },           { "model", "model", COLUMN_TEXT, 0 },
    { "layers", "layers", COLUMN_NUMBER, 0 },     { "kv_heads", "kv heads", COLUMN_NUMBER, 0 },
    { "head_dim", "head dim", COLUMN_NUMBER, 0 }, { "tokens", "tokens", COLUMN_NUMBER, 0 },
    { "clusters", "clusters", COLUMN_TEXT, 0 },   { "bytes", "MiB", COLUMN_MIB, 2 },
    { "seconds", "seconds", COLUMN_NUMBER, 1 },
};
enum { N_COLUMNS = sizeof columns / sizeof *columns };

static bool print_summary(const run *r)
{
    kvant_calibration_info info = { .size = sizeof info };
    char clusters[128] = "none";
    if (kvant_calibration_get_info(r->calibration, &info) != KVANT_OK)
        return false;
    for (uint32_t i = 0, n = 0; i < info.n_codebooks; i++)
        n += (uint32_t)snprintf(clusters + n, sizeof clusters - n, "%s%lu", i > 0 ? "," : "",
                                (unsigned long)info.clusters[i]);
    const report_cell row[N_COLUMNS] = {
        CELL_TEXT(r->settings->output),
        CELL_TEXT(info.model),
        CELL_NUMBER(info.n_layers),
        CELL_NUMBER(info.n_kv_heads),
        CELL_NUMBER(info.head_dim),
        CELL_NUMBER(info.n_tokens),
        CELL_TEXT(clusters),
        CELL_NUMBER(info.bytes),
        CELL_NUMBER(monotonic_seconds() - r->started),
    };
    return report_print(columns, N_COLUMNS, row, 1, r->settings->json) && finish_output() == EXIT_OK;
}

/* Whether commands find the file by themselves, or how they do. */
static void tell_who_finds_it(const run *r)
{
    const settings *s = r->settings;
    struct stat written, beside;
    if (stat(s->output, &written) == 0 && stat(s->beside, &beside) == 0 && written.st_dev == beside.st_dev &&
        written.st_ino == beside.st_ino)
        fprintf(stderr, "kvant: calibrate: from now on all commands with -m %s use it, exec as well\n", s->engine.model);
    else
        hint("--calibration %s uses it; commands find it by themselves under the name %s", s->output, s->beside);
}

static void release(run *r)
{
    reading_close(&r->reading);
    kvant_calibrator_free(&r->calibrator);
    kvant_calibration_free(&r->calibration);
    engine_close(&r->engine);
}

static bool check_settings(settings *s)
{
    if (s->file == NULL) {
        complain("calibrate: no text given");
        return hint("-f text.txt; scripts/fetch.py text makes one");
    }
    if (s->sample > 0 && s->n_codebooks > 0 && s->sample < s->clusters[s->n_codebooks - 1])
        return complain("calibrate: --sample %lu is fewer than the %lu clusters asked for", (unsigned long)s->sample,
                 (unsigned long)s->clusters[s->n_codebooks - 1]);
    if (!engine_model_options_finish(&s->engine, "calibrate"))
        return false;
    if (!calibration_beside(s->engine.model, s->beside, sizeof s->beside))
        return complain("calibrate: the path of -m is too long");
    s->output = s->output != NULL ? s->output : s->beside;
    return true;
}

int command_calibrate(int argc, char **argv)
{
    settings s = { .n_tokens = 8192, .n_ctx = 2048, .clusters = { 256 }, .n_codebooks = 1 };
    int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (!check_settings(&s))
        return EXIT_USAGE;
    run *r = calloc(1, sizeof *r);
    if (r == NULL)
        return EXIT_RUNTIME;
    r->settings = &s;
    r->started = monotonic_seconds();
    snprintf(r->part, sizeof r->part, "%s.part", s.output);
    interrupt_catch();
    bool ok = prepare(r);
    if (ok) {
        ok = gather(r) && cluster(r);
        progress_end(&r->progress);
        ok = ok && save(r) && print_summary(r);
    }
    if (ok)
        tell_who_finds_it(r);
    code = ok ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if (code == EXIT_INTERRUPTED && r->calibrator != NULL)
        keep(r);
    release(r);
    free(r);
    return code;
}
