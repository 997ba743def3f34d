/* cmd_report.c - `kvant report`: measures a model's caches with the other commands and makes a page of it.
 *
 * What a step printed is kept in a JSON file beside the page as soon as it is there, and the page is written after every step; so an
 * interrupted report is a valid one, and the same command goes on. The evaluation, which takes longest, goes on within its step.
 */
#define _POSIX_C_SOURCE 200809L
#include "command.h"
#include "engine.h"
#include "fingerprint.h"
#include "interrupt.h"
#include "machine.h"
#include "progress.h"
#include "reading.h"
#include "report_child.h"
#include "report_file.h"
#include "report_model.h"
#include "report_page.h"
#include "report_plan.h"
#include "text.h"

#include <kvant/kvant.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OPT_FILE, OPT_OUTPUT, OPT_FROM, OPT_CTX, OPT_CHUNKS, OPT_LONGEST, OPT_SENSITIVITY, OPT_QUICK, OPT_JSON };

static const arg_option options[] = {
    ENGINE_OPTIONS,
    { OPT_FILE, 'f', "file", "FILE",
      "text to measure on; not the one that a calibration saw (default:\n" MANUAL_TEXT ", a frozen copy of kvant's manual)" },
    { OPT_OUTPUT, 'o', "output", "FILE", "page, for example report.html; results go beside it, report.json" },
    { OPT_FROM, 0, "from", "FILE", "make the page of such results, measuring nothing" },
    { OPT_CTX, 'c', "ctx", "N", "tokens of a chunk of the evaluation (default 2048; 512 with --quick)" },
    { OPT_CHUNKS, 0, "chunks", "N", "chunks of it (default 2; 1 with --quick)" },
    { OPT_LONGEST, 0, "longest", "N", "longest context of needles and speed (default 4096; 1024 with --quick)" },
    { OPT_SENSITIVITY, 0, "sensitivity", "FILE", "rows of kvant tune --json, for the section on layers" },
    { OPT_QUICK, 0, "quick", NULL, "few configurations, short contexts" },
    { OPT_JSON, 0, "json", NULL, "print the results; progress as JSON lines on stderr" },
};

static const arg_spec spec = {
    .command = "report",
    .usage = "-m MODEL -o PAGE.html [-f TEXT] [--quick] [--config FILE]... [-k SPEC [-v SPEC]]...\n"
             "                    [--stock TYPE]... [--preset NAME]...",
    .about = "Measures quality, memory, speed and retrieval of a model with many KV caches and\n"
             "makes one HTML page of it that needs no network. Without -k, --stock or\n"
             "--preset: a list of all codecs and llama.cpp's types; --config adds to either.",
    .options = options,
    .n_options = sizeof options / sizeof *options,
    .notes =
        "Shows first how long it will take. Ctrl-C leaves a page of what is complete; the same command goes on.\n\n"
        "example:\n  kvant report -m model.gguf -f text.txt -o report.html",
};

typedef struct settings {
    engine_options engine;
    const char *text, *output, *from, *sensitivity;
    uint32_t n_ctx, n_chunks, longest;
    bool quick, json;
    plan_words configs, files, common; /* files: settings files */
    bool in_files;                     /* the last configuration is one of them, and what follows is its */
} settings;

/* The steps are given the words that this command was given. */
static bool pass_on(plan_words *to, int id, const char *value)
{
    static char names[sizeof options / sizeof *options][32];
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        if (options[i].id != id)
            continue;
        snprintf(names[i], sizeof names[i], "--%s", options[i].name);
        return plan_words_add(to, names[i]) && (value == NULL || plan_words_add(to, value));
    }
    return true;
}

static bool handle_engine(settings *s, int id, const char *value)
{
    bool known = false;
    if (!engine_option(&s->engine, id, value, &known))
        return false;
    if (id == OPT_MODEL)
        return true;
    const bool common = id == OPT_THREADS || id == OPT_RUNTIME || id == OPT_VERBOSE || id == OPT_CALIBRATION;
    if (id == OPT_CONFIG || id == OPT_CODEC_K || id == OPT_STOCK || id == OPT_PRESET)
        s->in_files = id == OPT_CONFIG;
    return pass_on(common ? &s->common : s->in_files ? &s->files : &s->configs, id, value);
}

static bool handle(void *user, int id, const char *value)
{
    settings *s = user;
    switch (id) {
    case OPT_FILE: s->text = value; return true;
    case OPT_OUTPUT: s->output = value; return true;
    case OPT_FROM: s->from = value; return true;
    case OPT_CTX: return args_u32("--ctx", value, 8, 1 << 24, &s->n_ctx);
    case OPT_CHUNKS: return args_u32("--chunks", value, 1, 1 << 20, &s->n_chunks);
    case OPT_LONGEST: return args_u32("--longest", value, 512, 1 << 24, &s->longest);
    case OPT_SENSITIVITY: s->sensitivity = value; return true;
    case OPT_QUICK: return s->quick = true;
    case OPT_JSON: return s->json = progress_use_json();
    default: return handle_engine(s, id, value);
    }
}

typedef struct run {
    const settings *settings;
    model_facts facts;
    plan plan;
    cJSON *results;
    char json[PATH_MAX], state[PATH_MAX], needles[PATH_MAX]; /* beside the page */
    progress progress;
} run;

/* "report.html" and ".json" are "report.json". */
static bool beside(const char *page, const char *suffix, char *path, size_t room)
{
    const char *slash = strrchr(page, '/'), *dot = strrchr(page, '.');
    const size_t n = dot != NULL && (slash == NULL || dot > slash + 1) ? (size_t)(dot - page) : strlen(page);
    if (snprintf(path, room, "%.*s%s", (int)n, page, suffix) >= (int)room || strcmp(path, page) == 0) {
        complain("report: -o %s: choose a name that ends with .html", page);
        return false;
    }
    return true;
}

static bool about_text(cJSON *about, const char *key, const char *text)
{
    return text == NULL || cJSON_AddStringToObject(about, key, text) != NULL;
}

static bool about_fingerprint(cJSON *about, const char *key, uint64_t fingerprint)
{
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)fingerprint);
    return about_text(about, key, text);
}

/* First line of /proc/cpuinfo that begins so. */
static void cpu_name(char *name, size_t room)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(name, room, "unknown CPU");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        const char *colon = strncmp(line, "model name", 10) == 0 ? strchr(line, ':') : NULL;
        if (colon == NULL)
            continue;
        snprintf(name, room, "%.*s", (int)strcspn(colon + 1, "\n") - 1, colon + 2);
        break;
    }
    if (file != NULL)
        fclose(file);
}

static bool describe(run *r)
{
    const settings *s = r->settings;
    char machine[300], cpu[256], date[32], kvant[64];
    const time_t now = time(NULL);
    struct tm utc;
    cpu_name(cpu, sizeof cpu);
    snprintf(machine, sizeof machine, "%s, %lu threads", cpu, (unsigned long)machine_cpus());
    snprintf(kvant, sizeof kvant, "%s, CPU level %s", kvant_version(), kvant_cpu_level_name(kvant_get_cpu_level()));
    strftime(date, sizeof date, "%Y-%m-%d", gmtime_r(&now, &utc));
    cJSON *about = cJSON_GetObjectItemCaseSensitive(r->results, "about");
    return about_text(about, "kvant", kvant) && about_text(about, "runtime", r->facts.runtime) &&
           about_text(about, "machine", machine) &&
           cJSON_AddNumberToObject(about, "threads",
                                   s->engine.n_threads > 0 ? s->engine.n_threads : machine_cpus()) != NULL &&
           about_text(about, "model", r->facts.name[0] != 0 ? r->facts.name : file_name(s->engine.model)) &&
           about_text(about, "model_file", file_name(s->engine.model)) &&
           about_fingerprint(about, "model_fingerprint", kvant_model_fingerprint(s->engine.model)) &&
           cJSON_AddNumberToObject(about, "n_ctx_train", r->facts.n_ctx_train) != NULL &&
           about_text(about, "text", file_name(s->text)) &&
           about_fingerprint(about, "text_fingerprint", r->facts.text_fingerprint) &&
           cJSON_AddNumberToObject(about, "ctx", s->n_ctx) != NULL &&
           about_text(about, "calibration",
                      s->engine.configs.calibration != NULL ? file_name(s->engine.configs.calibration) : NULL) &&
           about_text(about, "date", date);
}

/* Results of another model, text or version of kvant are not mixed with new ones. */
static bool suits(const run *r, const cJSON *old)
{
    static const char *const keys[] = { "model_fingerprint", "text_fingerprint", "kvant", "runtime", "machine" };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strcmp(report_file_about(old, keys[i]), report_file_about(r->results, keys[i])) != 0) {
            complain("report: %s has results of another %s", r->json, keys[i]);
            hint("choose another -o, or remove that file");
            return false;
        }
    return true;
}

/* Takes over the steps of an earlier run. */
static bool take_over(run *r)
{
    if (access(r->json, F_OK) != 0)
        return true;
    cJSON *old = report_file_load(r->json);
    if (old == NULL)
        hint("choose another -o, or remove that file");
    const bool ok = old != NULL && suits(r, old);
    if (ok)
        cJSON_ReplaceItemInObjectCaseSensitive(r->results, "steps",
                                               cJSON_Duplicate(cJSON_GetObjectItemCaseSensitive(old, "steps"), 1));
    cJSON_Delete(old);
    return ok;
}

static bool add_sensitivity(run *r)
{
    const char *path = r->settings->sensitivity;
    size_t bytes = 0;
    char *text = path != NULL ? read_text(path, &bytes) : NULL;
    if (path == NULL || text == NULL)
        return path == NULL;
    cJSON *rows = cJSON_Parse(text);
    free(text);
    if (!cJSON_IsArray(rows) || !cJSON_IsObject(cJSON_GetArrayItem(rows, 0))) {
        complain("report: --sensitivity %s is no array of rows", path);
        hint("kvant tune --json prints them");
        cJSON_Delete(rows);
        return false;
    }
    return report_file_set_step(r->results, "sensitivity", "kvant tune", "complete", 0, rows);
}

/* Steps that this command line does not have would be in the page without being in the plan. */
static void drop_other_steps(run *r)
{
    cJSON *steps = cJSON_GetObjectItemCaseSensitive(r->results, "steps"),
          *step = steps != NULL ? steps->child : NULL;
    while (step != NULL) {
        cJSON *next = step->next;
        const char *name = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(step, "name"));
        bool planned = strcmp(name, "sensitivity") == 0;
        for (size_t i = 0; i < r->plan.n_steps; i++)
            planned = planned || strcmp(r->plan.steps[i].name, name) == 0;
        if (!planned)
            cJSON_Delete(cJSON_DetachItemViaPointer(steps, step));
        step = next;
    }
}

static bool make_plan(run *r)
{
    const settings *s = r->settings;
    const plan_request request = { .model = s->engine.model,
                                   .text = s->text,
                                   .state = r->state,
                                   .needles = r->needles,
                                   .common = &s->common,
                                   .configs = &s->configs,
                                   .settings = &s->files,
                                   .calibrated = s->engine.configs.calibration != NULL,
                                   .quick = s->quick,
                                   .n_ctx = s->n_ctx,
                                   .n_chunks = s->n_chunks,
                                   .longest = s->longest,
                                   .n_ctx_train = r->facts.n_ctx_train,
                                   .prefill_tps = r->facts.prefill_tps,
                                   .decode_tps = r->facts.decode_tps };
    if (s->n_ctx > r->facts.n_ctx_train) {
        complain("report: a context of %lu tokens is beyond the model's %lu", (unsigned long)s->n_ctx,
                 (unsigned long)r->facts.n_ctx_train);
        return false;
    }
    if (r->facts.n_text_tokens / 2 < s->n_ctx) {
        complain("report: %s has %zu tokens, contexts of %lu need at least %lu", s->text, r->facts.n_text_tokens,
                 (unsigned long)s->n_ctx, 2 * (unsigned long)s->n_ctx);
        hint("a longer text, or a smaller -c");
        return false;
    }
    return plan_make(&r->plan, &request);
}

static bool keep(run *r, bool complete)
{
    cJSON_ReplaceItemInObjectCaseSensitive(r->results, "complete", cJSON_CreateBool(complete));
    return report_file_save(r->json, r->results) && report_page_write(r->settings->output, r->results);
}

/* A step that fails is in the page as such; the others are measured all the same. */
static bool run_step(run *r, const plan_step *step, bool *failed)
{
    char line[8192];
    child_result result;
    plan_command_line(step, line, sizeof line);
    if (report_file_has(r->results, step->name, line))
        return true;
    if (!child_run(step->command.words, &r->progress, step->seconds, step->name, &result))
        return false;
    const bool ok = result.code == EXIT_OK && result.rows != NULL;
    const char *state = ok ? "complete" : result.code == EXIT_INTERRUPTED ? "partial" : "failed";
    *failed = *failed || (!ok && result.code != EXIT_INTERRUPTED);
    if (!ok && result.code != EXIT_INTERRUPTED)
        complain("report: step %s failed (exit code %d): %s", step->name, result.code, line);
    return report_file_set_step(r->results, step->name, line, state, result.seconds, result.rows) && keep(r, false);
}

static double seconds_ahead(const run *r)
{
    double seconds = 0;
    char line[8192];
    for (size_t i = 0; i < r->plan.n_steps; i++) {
        plan_command_line(&r->plan.steps[i], line, sizeof line);
        if (!report_file_has(r->results, r->plan.steps[i].name, line))
            seconds += r->plan.steps[i].seconds;
    }
    return seconds;
}

static int run_all(run *r)
{
    const double seconds = seconds_ahead(r);
    bool ok = true, failed = false;
    if (!r->settings->json)
        fprintf(stderr, "kvant: report: %zu steps, about %.0f minutes; Ctrl-C leaves a page of what is complete\n",
                r->plan.n_steps, seconds / 60 + 0.5);
    progress_start(&r->progress, seconds);
    for (size_t i = 0; i < r->plan.n_steps && ok && !interrupted(); i++)
        ok = run_step(r, &r->plan.steps[i], &failed);
    progress_end(&r->progress);
    ok = ok && keep(r, !interrupted() && !failed);
    return interrupted() ? EXIT_INTERRUPTED : ok && !failed ? EXIT_OK : EXIT_RUNTIME;
}

static bool prepare(run *r)
{
    r->results = report_file_new();
    if (r->results == NULL || !beside(r->settings->output, ".json", r->json, sizeof r->json) ||
        !beside(r->settings->output, ".state", r->state, sizeof r->state) ||
        !beside(r->settings->output, ".needles", r->needles, sizeof r->needles))
        return false;
    return model_facts_get(&r->settings->engine, r->settings->text, &r->facts) && describe(r) && make_plan(r) &&
           take_over(r) && add_sensitivity(r);
}

static int finish(const settings *s, cJSON *results, int code)
{
    char *text = s->json && results != NULL ? cJSON_Print(results) : NULL;
    if (text != NULL)
        puts(text);
    cJSON_free(text);
    if (!s->json && code != EXIT_RUNTIME)
        printf("%s\n", s->output);
    if (!report_page_has_figures() && code != EXIT_RUNTIME)
        hint("this build has no plotting library, so the page has tables only: make fetches it (scripts/fetch.py "
             "plot)");
    return finish_output() == EXIT_OK ? code : EXIT_RUNTIME;
}

static int measure(const settings *s)
{
    run *r = calloc(1, sizeof *r);
    if (r == NULL)
        return EXIT_RUNTIME;
    r->settings = s;
    interrupt_catch();
    int code = EXIT_RUNTIME;
    if (prepare(r)) {
        drop_other_steps(r);
        code = finish(s, r->results, run_all(r));
    } else if (interrupted()) {
        code = EXIT_INTERRUPTED;
    }
    cJSON_Delete(r->results);
    free(r);
    return code;
}

static int render(const settings *s)
{
    cJSON *results = report_file_load(s->from);
    const int code = results != NULL && report_page_write(s->output, results) ? EXIT_OK : EXIT_RUNTIME;
    const int result = code == EXIT_OK ? finish(s, results, code) : code;
    cJSON_Delete(results);
    return result;
}

int command_report(int argc, char **argv)
{
    static settings s;
    const int code = args_parse_all(&spec, argc, argv, handle, &s);
    if (code >= 0)
        return code;
    if (s.output == NULL) {
        complain("report: no output given");
        hint("-o report.html");
        return EXIT_USAGE;
    }
    if (s.from != NULL)
        return can_write_beside("report", s.output) ? render(&s) : EXIT_RUNTIME;
    if (s.text == NULL)
        s.text = MANUAL_TEXT;
    if (strcmp(s.text, "-") == 0) {
        complain("report: every step reads the text again, so it cannot be standard input");
        hint("-f text.txt");
        return EXIT_USAGE;
    }
    if (s.n_ctx == 0)
        s.n_ctx = s.quick ? 512 : 2048;
    if (s.n_chunks == 0)
        s.n_chunks = s.quick ? 1 : 2;
    if (s.longest == 0)
        s.longest = s.quick ? 1024 : 4096;
    /* The default list has presets, so it wants the calibration beside the model. */
    if (s.configs.n == 0 && !configs_add_preset(&s.engine.configs, KVANT_PRESET_DEFAULT))
        return EXIT_USAGE;
    if (!engine_options_finish(&s.engine, "report"))
        return EXIT_USAGE;
    return can_write_beside("report", s.output) ? measure(&s) : EXIT_RUNTIME;
}
