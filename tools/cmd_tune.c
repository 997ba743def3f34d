/* cmd_tune.c - `kvant tune`: measures how much each layer's keys and values matter to a model, gives each a codec so that the whole
 * loses least within a budget of bytes, checks the result on other tokens and writes a settings file.
 */
#include "allocate.h"
#include "command.h"
#include "interrupt.h"
#include "report.h"
#include "tune.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    OPT_FILE,
    OPT_OUTPUT,
    OPT_BITS,
    OPT_BYTES,
    OPT_CTX,
    OPT_REPORT,
    OPT_TRY_K,
    OPT_TRY_V,
    OPT_PROBE,
    OPT_PROBE_CHUNKS,
    OPT_CHUNKS,
    OPT_CALIBRATION_FILE,
    OPT_RESUME,
    OPT_JSON
};

/* An fp16 page at the beginning is an eighth of 512 tokens and a 32nd of 2048: what is measured at 512 holds less well for long
 * contexts (docs/tuning.md). */
enum { DEFAULT_PROBE = 2048, DEFAULT_PARTS = 2 };

static const arg_option options[] = {
    ENGINE_OPTION_MODEL,
    { OPT_FILE, 'f', "file", "FILE",
      "text to tune on; - reads standard input; give several, of the kinds\nthat the model will read" },
    { OPT_BITS, 0, "bits", "B",
      "bits a number that the cache may take, all of its memory\ncounted, in a context of -c tokens" },
    { OPT_BYTES, 0, "kv-bytes", "N", "or its bytes; K, M and G for KiB, MiB and GiB" },
    { OPT_CTX, 'c', "ctx", "N", "context that the budget is for (default 4096)" },
    { OPT_OUTPUT, 'o', "output", "FILE", "settings file to write (default model.kvant)" },
    { OPT_CALIBRATION_FILE, 0, "calibration", "FILE", "for better codecs; kvant calibrate makes it" },
    { OPT_REPORT, 0, "report-text", "FILE", "text to check the result on (default: what follows in -f's)" },
    { OPT_PROBE, 0, "probe-ctx", "N",
      "tokens of the contexts that are measured (default: 2048, or -c where\nthat is less); 512 takes a quarter of "
      "the time and finds less" },
    { OPT_PROBE_CHUNKS, 0, "probe-chunks", "N",
      "such contexts of each text, from its beginning to its end (default 2)" },
    { OPT_CHUNKS, 0, "chunks", "N", "such contexts for the result's check (default 2)" },
    { OPT_RESUME, 0, "resume", "FILE",
      "keep what is measured there, and take from it what was: for other\nbudgets (default: FILE.part of -o, "
      "removed at the end)" },
    { OPT_TRY_K, 0, "try-k", "SPEC",
      "candidate for keys, in place of the default ones; give it several\n"
      "times, the coarsest first: that one is measured in every layer" },
    { OPT_TRY_V, 0, "try-v", "SPEC", "the same for values" },
    { OPT_JSON, 0, "json", NULL, "one JSON array of flat objects; progress in JSON lines on stderr" },
    ENGINE_OPTIONS_RUNTIME,
};

static const arg_spec spec = {
    .command = "tune",
    .usage = "-m MODEL -f TEXT (--bits B | --kv-bytes N) [-c CTX] [-o model.kvant] [--calibration FILE]",
    .about = "Gives the keys and the values of each layer, or of each of its kv heads, a codec\n"
             "so that the model changes least within a budget of memory: measures the\n"
             "divergence of the model with one layer coarse at a time, computes what other\n"
             "codecs would do there from captured keys, values and queries, and solves for the\n"
             "budget. Checks the result, and the best uniform settings beside it, on other tokens.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes = "Ctrl-C keeps what was measured; the same command goes on from there. With --resume other\n"
             "budgets, contexts (-c) and finer candidates cost no new measurements but the check's.\n\nexamples:\n"
             "  kvant tune -m model.gguf -f code.txt -f prose.txt --bits 4 -c 8192 --calibration model.kvcal\n"
             "  kvant eval -m model.gguf -f other.txt --config model.kvant",
};

typedef struct settings {
    tune_options tune;
    sensitivity_candidates tried;
    double bits, bytes;
    bool json;
} settings;

static bool read_bytes(const char *text, double *bytes)
{
    char number[64];
    const size_t length = strlen(text);
    const char *const units = "KMG", *unit = length > 0 ? strchr(units, text[length - 1]) : NULL;
    if (length >= sizeof number || (length > 0 && unit == NULL && text[length - 1] == 0))
        return args_double("--kv-bytes", text, 1, 1e15, bytes);
    memcpy(number, text, length + 1);
    double factor = 1;
    if (unit != NULL) {
        number[length - 1] = 0;
        factor = (double)(1ull << 10 * (unit - units + 1));
    }
    if (!args_double("--kv-bytes", number, 1 / factor, 1e15 / factor, bytes))
        return false;
    *bytes *= factor;
    return true;
}

static bool add_candidate(settings *s, kvant_role role, const char *candidate)
{
    if (s->tried.n[role] == SENSITIVITY_MAX_CANDIDATES) {
        complain("tune: more than %d candidates", SENSITIVITY_MAX_CANDIDATES);
        return false;
    }
    s->tried.specs[role][s->tried.n[role]++] = candidate;
    return true;
}

static bool add_file(tune_options *t, const char *file)
{
    if (t->texts.n == TUNE_MAX_TEXTS) {
        complain("tune: more than %d texts", TUNE_MAX_TEXTS);
        return false;
    }
    t->texts.files[t->texts.n++] = file;
    return true;
}

static bool handle(void *user, int id, const char *value)
{
    settings *s = user;
    tune_options *t = &s->tune;
    bool known = false;
    switch (id) {
    case OPT_FILE: return add_file(t, value);
    case OPT_OUTPUT: t->output = value; return true;
    case OPT_BITS: return args_double("--bits", value, 0.5, 16, &s->bits);
    case OPT_BYTES: return read_bytes(value, &s->bytes);
    case OPT_CTX: return args_u32("--ctx", value, 64, 1 << 24, &t->n_ctx);
    case OPT_REPORT: t->texts.report = value; return true;
    case OPT_PROBE: return args_u32("--probe-ctx", value, 64, 1 << 20, &t->texts.n_ctx);
    case OPT_PROBE_CHUNKS: return args_u32("--probe-chunks", value, 1, 256, &t->texts.n_parts);
    case OPT_CHUNKS: return args_u32("--chunks", value, 1, 256, &t->texts.n_checks);
    case OPT_TRY_K: return add_candidate(s, KVANT_ROLE_K, value);
    case OPT_TRY_V: return add_candidate(s, KVANT_ROLE_V, value);
    case OPT_CALIBRATION_FILE: t->engine.configs.calibration = value; return true;
    case OPT_RESUME: t->resume = value; return true;
    case OPT_JSON: return s->json = progress_use_json();
    default: return engine_option(&t->engine, id, value, &known);
    }
}

static bool check_candidates(const settings *s)
{
    for (int role = 0; role < 2; role++)
        for (size_t i = 0; i < s->tune.candidates.n[role]; i++) {
            const char *candidate = s->tune.candidates.specs[role][i];
            char err[512] = "";
            if (kvant_codec_check(candidate, (kvant_role)role, s->tune.calibration, err, sizeof err) == KVANT_OK)
                continue;
            complain("%s %s: %s", role == KVANT_ROLE_K ? "--try-k" : "--try-v", candidate, err);
            hint("kvant codecs lists what there is");
            return false;
        }
    return true;
}

static bool load_calibration(const char *path, kvant_calibration **calibration)
{
    char err[512] = "";
    if (path == NULL || kvant_calibration_load(path, calibration, err, sizeof err) == KVANT_OK)
        return true;
    complain("--calibration %s: %s", path, err);
    hint("kvant calibrate -m MODEL -f TEXT -o FILE makes one");
    return false;
}

static bool complete(settings *s)
{
    tune_options *t = &s->tune;
    if (t->texts.n == 0) {
        complain("tune: no text given");
        hint("-f text.txt; scripts/fetch.py text makes one");
        return false;
    }
    if ((s->bits > 0) == (s->bytes > 0)) {
        complain(s->bits > 0 ? "tune: --bits and --kv-bytes say the same thing: give one of them"
                             : "tune: no budget given");
        hint("--bits 4, or --kv-bytes 64M, for a context of -c tokens");
        return false;
    }
    if (!engine_model_options_finish(&t->engine, "tune") ||
        !load_calibration(t->engine.configs.calibration, &t->calibration))
        return false;
    if (t->texts.n_ctx == 0)
        t->texts.n_ctx = t->n_ctx < DEFAULT_PROBE ? t->n_ctx : DEFAULT_PROBE;
    t->candidates = sensitivity_defaults(t->calibration != NULL);
    for (int role = 0; role < 2; role++)
        if (s->tried.n[role] > 0) {
            memcpy(t->candidates.specs[role], s->tried.specs[role], sizeof s->tried.specs[role]);
            t->candidates.n[role] = s->tried.n[role];
        }
    return check_candidates(s);
}

static const char *role_name(kvant_role role)
{
    return role == KVANT_ROLE_K ? "K" : "V";
}

static const report_column site_columns[] = {
    { "layer", "layer", COLUMN_NUMBER, 0 },
    { "role", "role", COLUMN_TEXT, 0 },
    { "spec", "codec", COLUMN_TEXT, 0 },
    { "bits", "bits", COLUMN_NUMBER, 2 },
    { "cost", "cost", COLUMN_NUMBER, 5 },
    { "error", "error", COLUMN_NUMBER, 5 },
    { "probe_kld", "probed", COLUMN_NUMBER, 5 },
    { "probe_se", "+-", COLUMN_NUMBER, 5 },
    { "probe_error", "its error", COLUMN_NUMBER, 5 },
};
enum { N_SITE_COLUMNS = sizeof site_columns / sizeof *site_columns };

static void fill_site(const tune *t, const tune_setting *chosen, size_t i, const char *specs, report_cell *row)
{
    const sensitivity_site *site = &t->sensitivity.sites[i];
    const size_t c = chosen->choice[i];
    const mix *list = site->choices.list;
    const report_cell filled[N_SITE_COLUMNS] = {
        CELL_NUMBER(site->layer),
        CELL_TEXT(role_name(site->role)),
        CELL_TEXT(specs),
        CELL_NUMBER(8 * list[c].bytes / site->numbers),
        CELL_NUMBER(sensitivity_cost(site, c)),
        CELL_NUMBER(list[c].error),
        CELL_NUMBER(site->measured),
        CELL_NUMBER(site->measured_se),
        CELL_NUMBER(list[0].error),
    };
    memcpy(row, filled, sizeof filled);
}

static const report_column setting_columns[] = {
    { "setting", "setting", COLUMN_TEXT, 0 },
    { "k", "K", COLUMN_TEXT, 0 },
    { "v", "V", COLUMN_TEXT, 0 },
    { "bits", "bits", COLUMN_NUMBER, 3 },
    { "kv_bytes", "KV MiB", COLUMN_MIB, 2 },
    { "predicted", "predicted", COLUMN_NUMBER, 5 },
    { "kld_mean", "KLD mean", COLUMN_NUMBER, 5 },
    { "kld_se", "+-", COLUMN_NUMBER, 5 },
    { "agreement_k", NULL, COLUMN_NUMBER, 3 },
    { "agreement_v", NULL, COLUMN_NUMBER, 3 },
};
enum { N_SETTING_COLUMNS = sizeof setting_columns / sizeof *setting_columns };

static void fill_setting(const tune *t, const tune_setting *s, report_cell *row)
{
    const report_cell filled[N_SETTING_COLUMNS] = {
        CELL_TEXT(s->name),
        CELL_TEXT(s->k),
        CELL_TEXT(s->v),
        CELL_NUMBER(8 * s->bytes / t->numbers),
        CELL_NUMBER(s->bytes),
        CELL_NUMBER(s->predicted),
        CELL_NUMBER(s->kld),
        CELL_NUMBER(s->kld_se),
        CELL_NUMBER(sensitivity_agreement(&t->sensitivity, KVANT_ROLE_K)),
        CELL_NUMBER(sensitivity_agreement(&t->sensitivity, KVANT_ROLE_V)),
    };
    memcpy(row, filled, sizeof filled);
}

static bool print_table(const tune *t, char *const *specs)
{
    const size_t n = t->sensitivity.n_sites;
    report_cell *sites = calloc(n, N_SITE_COLUMNS * sizeof *sites), settings[TUNE_MAX_SETTINGS * N_SETTING_COLUMNS];
    if (sites == NULL)
        return false;
    for (size_t i = 0; i < n; i++)
        fill_site(t, &t->settings[0], i, specs[i], sites + i * N_SITE_COLUMNS);
    for (size_t i = 0; i < t->n_settings; i++)
        fill_setting(t, &t->settings[i], settings + i * N_SETTING_COLUMNS);
    const bool ok = report_print(site_columns, N_SITE_COLUMNS, sites, n, REPORT_TABLE) && putchar('\n') != EOF &&
                    report_print(setting_columns, N_SETTING_COLUMNS, settings, t->n_settings, REPORT_TABLE);
    printf("\nrank correlation of error and measured divergence: keys %.2f, values %.2f, both %.2f\n",
           sensitivity_agreement(&t->sensitivity, KVANT_ROLE_K),
           sensitivity_agreement(&t->sensitivity, KVANT_ROLE_V), sensitivity_agreement(&t->sensitivity, 2));
    free(sites);
    return ok;
}

/* Rows of both kinds in one array: what does not apply is null. */
static bool print_json(const tune *t, char *const *specs)
{
    enum { N = N_SETTING_COLUMNS + N_SITE_COLUMNS };
    report_column columns[N];
    const size_t n_sites = t->sensitivity.n_sites, n = n_sites + t->n_settings;
    report_cell *cells = calloc(n, N * sizeof *cells);
    if (cells == NULL)
        return false;
    memcpy(columns, setting_columns, sizeof setting_columns);
    memcpy(columns + N_SETTING_COLUMNS, site_columns, sizeof site_columns);
    columns[N_SETTING_COLUMNS + 3].key = "site_bits";
    for (size_t i = 0; i < n * N; i++)
        cells[i].number = NAN;
    for (size_t i = 0; i < t->n_settings; i++)
        fill_setting(t, &t->settings[i], cells + i * N);
    for (size_t i = 0; i < n_sites; i++)
        fill_site(t, &t->settings[0], i, specs[i], cells + (t->n_settings + i) * N + N_SETTING_COLUMNS);
    const bool ok = report_print(columns, N, cells, n, REPORT_JSON);
    free(cells);
    return ok;
}

static bool print(const tune *t, bool json)
{
    char *specs[TUNE_MAX_SITES] = { NULL };
    bool ok = true;
    for (size_t i = 0; i < t->sensitivity.n_sites && ok; i++) {
        specs[i] = tune_specs(t, i, t->settings[0].choice[i]);
        ok = specs[i] != NULL;
    }
    ok = ok && (json ? print_json(t, specs) : print_table(t, specs));
    for (size_t i = 0; i < t->sensitivity.n_sites; i++)
        free(specs[i]);
    if (!ok)
        complain("tune: out of memory while printing");
    return finish_output() == EXIT_OK && ok;
}

int command_tune(int argc, char **argv)
{
    static settings s = {
        .tune = { .n_ctx = 4096, .texts = { .n_parts = DEFAULT_PARTS, .n_checks = 2 }, .output = "model.kvant" }
    };
    int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (!complete(&s)) {
        kvant_calibration_free(&s.tune.calibration);
        return EXIT_USAGE;
    }
    tune *t = calloc(1, sizeof *t);
    if (t == NULL)
        return EXIT_RUNTIME;
    interrupt_catch();
    const bool ok = tune_prepare(t, &s.tune) && tune_choose(t, s.bits, s.bytes) && tune_verify(t) && tune_save(t);
    code = ok ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if (ok && !print(t, s.json))
        code = EXIT_RUNTIME;
    if (code == EXIT_INTERRUPTED)
        tune_say_how_to_go_on(t);
    tune_release(t);
    free(t);
    kvant_calibration_free(&s.tune.calibration);
    return code;
}
