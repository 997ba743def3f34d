/* cmd_calibrate.c - `kvant calibrate`: runs a model over a text with llama.cpp's f16 cache and
 * gathers statistics of keys, values and queries. It writes them to a file for the codecs that need
 * one.
 *
 * The file is written last and replaced in one step, so a run that fails or is interrupted leaves
 * the old file unchanged. The statistics of an interrupted run go to a file next to it, from which
 * the same command continues. */
#include "command.h"
#include "engine.h"
#include "fingerprint.h"
#include "interrupt.h"
#include "os.h"
#include "progress.h"
#include "reading.h"
#include "report.h"
#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct settings {
    engine_options engine;
    const char *file, *output;
    char beside[4096]; /* the output that commands find by themselves */
    uint32_t n_tokens, n_ctx, n_positions, sample, seed;
    uint32_t clusters[KVANT_CALIBRATION_MAX_CODEBOOKS];
    size_t n_codebooks;
    bool json;
} settings;
#define AT(member) offsetof(settings, member)

static bool read_clusters(void *user, const char *list)
{
    settings *s = user;
    s->n_codebooks = 0;
    return strcmp(list, "none") == 0 ||
           args_u32_list("--clusters", list, 2, KVANT_CALIBRATION_MAX_CLUSTERS, s->clusters,
                         KVANT_CALIBRATION_MAX_CODEBOOKS, &s->n_codebooks);
}

static const arg_option options[] = {
    ENGINE_OPTION_MODEL(engine),
    ARG_TEXT('f', "file", "FILE", file, "text to calibrate on; - reads standard input"),
    ARG_TEXT('o', "output", "FILE", output,
             "calibration file to write (default: model.kvcal next to\nmodel.gguf, where all "
             "commands find it)"),
    ARG_U32('n', "tokens", "N", 16, 1 << 28, n_tokens,
            "tokens of the text to use at most (default 8192)"),
    ARG_U32('c', "ctx", "N", 16, 1 << 24, n_ctx, "tokens of a context (default 2048)"),
    ARG_U32(0, "positions", "N", 0, 1 << 24, n_positions,
            "spread contexts over positions 0 to N - 1, for caches\nof N tokens (default: all "
            "begin at 0)"),
    ARG_CALL(0, "clusters", "C,...", read_clusters, engine, /* the first member: the settings */
             "centroids per head for kmeans codecs, or none (default 256)"),
    ARG_U32(
        0, "sample", "N", 2, 1 << 24, sample,
        "rows per layer to cluster (default: 8 for each\ncluster); a row takes 2 bytes per number"),
    ARG_U32(0, "seed", "N", 0, UINT32_MAX, seed, "seed of sampling and clustering (default 0)"),
    ARG_CALL(0, "json", NULL, progress_use_json, json, "one JSON array with one flat object"),
    ENGINE_OPTIONS_RUNTIME(engine),
};

static const arg_spec spec = {
    .command = "calibrate",
    .usage = "-m MODEL -f TEXT [-o FILE] [-n TOKENS] [-c CTX] [--clusters C,...]",
    .about = "Gathers the statistics that some codecs need and writes them to a file: means\n"
             "and ranges (center=file, norm=file), transforms of keys\n(transform=file, "
             "transform=diagonal), centroids (kmeans), second moments of\nthe queries (hessian). "
             "The model runs with llama.cpp's own f16 cache.",
    ARG_OPTIONS(options),
    .notes = "Use a text like the texts that the model will read; a few thousand tokens "
             "are\nenough. Ctrl-C leaves FILE unchanged and keeps the statistics so far "
             "in\nFILE.part; the same command continues from there.\n\nexamples:\n"
             "  kvant calibrate -m model.gguf -f text.txt\n"
             "  kvant calibrate -m model.gguf -f text.txt -o other.kvcal --clusters 16,256",
};

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
    engine_model_name(&r->engine, r->engine.cpu_model, name, sizeof name);
    const kvant_calibrator_config config = { .size = sizeof config,
                                             .model = name,
                                             .model_fingerprint =
                                                 kvant_model_fingerprint(s->engine.model),
                                             .seed = s->seed,
                                             .clusters = s->clusters,
                                             .n_codebooks = (uint32_t)s->n_codebooks,
                                             .sample_rows = s->sample,
                                             .n_threads = r->engine.options.n_threads };
    if (kvant_calibrator_create(&config, &r->calibrator, err, sizeof err) == KVANT_OK)
        return true;
    return complain("calibrate: %s", err);
}

/* A fingerprint of everything that decides which rows are gathered and in which order. */
static uint64_t work_key(const run *r)
{
    uint64_t key = fingerprint_number(FINGERPRINT_START, r->settings->n_ctx);
    key = fingerprint_number(key, r->reading.n_positions);
    key = fingerprint_number(key, ENGINE_UBATCH);
    return kvant_fnv1a(key, r->reading.tokens, r->reading.n_tokens * sizeof *r->reading.tokens);
}

/* Continues from an earlier run's checkpoint. One that cannot be used is reported; then the run
 * begins at the first token. */
static void continue_from_checkpoint(run *r)
{
    char err[512] = "";
    uint64_t position = 0;
    if (!kvant_os_exists(r->part))
        return;
    if (kvant_calibrator_restore(r->calibrator, work_key(r), r->part, &position, err, sizeof err) !=
        KVANT_OK) {
        report_line("kvant: ", "calibrate: cannot continue from %s, so it begins again: %s",
                    r->part, err);
        return;
    }
    r->position = position;
    report_line("kvant: ", "calibrate: continues from %s, at %zu of %zu tokens", r->part,
                r->position, r->reading.n_tokens);
}

static void keep_checkpoint(run *r)
{
    char err[512] = "";
    if (r->position == 0)
        return;
    if (kvant_calibrator_save(r->calibrator, work_key(r), r->position, r->part, err, sizeof err) ==
        KVANT_OK)
        report_line("kvant: ", "calibrate: the same command continues from here (%s)", r->part);
    else
        complain("calibrate: %s", err);
}

/* Before the position of an earlier run a context is only computed again, not observed. */
static void on_batch(void *user, size_t chunk, size_t start, size_t n)
{
    run *r = user;
    (void)n;
    r->reading.observer.calibrator = chunk + start < r->position ? NULL : r->calibrator;
}

/* Estimates the time for clustering a layer, in tokens read. Only the progress depends on it. */
static double layer_work(const settings *s)
{
    const uint32_t most = s->n_codebooks > 0 ? s->clusters[s->n_codebooks - 1] : 0;
    return (s->sample > 0 && most > 0 ? s->sample : 8.0 * most) / 64;
}

static void start_progress(run *r)
{
    const size_t n_ctx = r->settings->n_ctx, n_tokens = r->reading.n_tokens;
    const size_t to_read = r->position < n_tokens ? n_tokens - r->position / n_ctx * n_ctx : 0;
    progress_start(&r->progress,
                   (double)to_read + r->reading.observer.n_layers * layer_work(r->settings));
}

static bool gather(run *r)
{
    const size_t n_ctx = r->settings->n_ctx;
    const bool ok =
        r->position == r->reading.n_tokens ||
        reading_all(&r->reading, r->position / n_ctx * n_ctx, &r->progress, on_batch, r);
    r->position = r->reading.done > r->position ? r->reading.done : r->position;
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
        kvant_os_remove(r->part);
        return true;
    }
    return complain("calibrate: %s", err);
}

static bool prepare(run *r)
{
    const settings *s = r->settings;
    const reading_text text = { .file = s->file,
                                .at_most = s->n_tokens,
                                .at_least =
                                    s->n_codebooks > 0 ? s->clusters[s->n_codebooks - 1] : 16,
                                .n_ctx = s->n_ctx };
    if (!can_write_file("calibrate", s->output) || !engine_open(&r->engine, &s->engine) ||
        !reading_open(&r->reading, &r->engine, "calibrate", &text) || !create_calibrator(r))
        return false;
    r->reading.n_positions = s->n_positions;
    continue_from_checkpoint(r);
    start_progress(r);
    return true;
}

static bool print_summary(const run *r)
{
    kvant_calibration_info info = { .size = sizeof info };
    char clusters[128] = "none";
    if (kvant_calibration_get_info(r->calibration, &info) != KVANT_OK)
        return false;
    for (uint32_t i = 0, n = 0; i < info.n_codebooks; i++)
        n += (uint32_t)snprintf(clusters + n, sizeof clusters - n, "%s%lu", i > 0 ? "," : "",
                                (unsigned long)info.clusters[i]);
    report_rows row = { .n_rows = 0 };
    report_row(&row);
    report_text(&row, "file", "file", r->settings->output);
    report_text(&row, "model", "model", info.model);
    report_number(&row, "layers", "layers", 0, info.n_layers);
    report_number(&row, "kv_heads", "kv heads", 0, info.n_kv_heads);
    report_number(&row, "head_dim", "head dim", 0, info.head_dim);
    report_number(&row, "tokens", "tokens", 0, (double)info.n_tokens);
    report_text(&row, "clusters", "clusters", clusters);
    report_number_as(&row, COLUMN_MIB, "bytes", "MiB", 2, (double)info.bytes);
    report_number(&row, "seconds", "seconds", 1, monotonic_seconds() - r->started);
    return report_print(&row, "calibrate", r->settings->json);
}

/* Whether commands find the file by themselves, or how they do. */
static void report_reader(const run *r)
{
    const settings *s = r->settings;
    if (strcmp(s->output, s->beside) == 0)
        report_line(
            "kvant: ", "calibrate: from now on all commands with -m %s use it, exec as well",
            s->engine.model);
    else
        hint("use it with --calibration %s; commands find a calibration by themselves if its name "
             "is %s",
             s->output, s->beside);
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
    if (!text_given("calibrate", s->file))
        return false;
    if (s->sample > 0 && s->n_codebooks > 0 && s->sample < s->clusters[s->n_codebooks - 1])
        return complain(
            "calibrate: --sample %lu is smaller than the largest number of --clusters, %lu",
            (unsigned long)s->sample, (unsigned long)s->clusters[s->n_codebooks - 1]);
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
    int code = args_parse_all(&spec, argc, argv, &s);
    if (code >= 0)
        return code;
    if (!check_settings(&s))
        return EXIT_USAGE;
    static run only, *r = &only;
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
        report_reader(r);
    code = ok ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if (code == EXIT_INTERRUPTED && r->calibrator != NULL)
        keep_checkpoint(r);
    release(r);
    return code;
}
