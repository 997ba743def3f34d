/* tune.c - see tune.h. */
#define _XOPEN_SOURCE 700 /* realpath */
#include "tune.h"

#include "allocate.h"
#include "command.h"
#include "fingerprint.h"
#include "interrupt.h"
#include "settings_table.h"
#include "stats.h"

#include <kvant/calibration.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { QUERY_STEP = 8 }; /* of the queries that the errors are computed on, one in so many */
#define EXACT_SPEC "f16"

/* Settings. */

static const char *spec_of(const tune *t, size_t site, size_t choice, uint32_t kv_head)
{
    const sensitivity_site *s = &t->sensitivity.sites[site];
    return choice == SIZE_MAX ? EXACT_SPEC
                              : t->options->candidates.specs[s->role][s->choices.list[choice].heads[kv_head]];
}

/* Whether all kv heads have the same: the first choices are such. */
static bool is_uniform(const tune *t, size_t site, size_t choice)
{
    return choice == SIZE_MAX || choice < t->options->candidates.n[t->sensitivity.sites[site].role];
}

char *tune_specs(const tune *t, size_t site, size_t choice)
{
    const sensitivity_site *s = &t->sensitivity.sites[site];
    const uint32_t n = t->capture->layers[s->layer].n_kv_heads;
    const char **heads = calloc(n, sizeof *heads);
    if (heads == NULL)
        return NULL;
    for (uint32_t head = 0; head < n; head++)
        heads[head] = spec_of(t, site, choice, head);
    const bool uniform = is_uniform(t, site, choice);
    const kvant_settings_layer layer = { .spec = heads[0], .n_kv_heads = n, .heads = uniform ? NULL : heads };
    char *text = layer_specs(&layer);
    free(heads);
    return text;
}

/* Where the settings file's folder is the calibration's, its name is enough, and both can be moved together. */
static bool calibration_name(const tune *t, char *name, size_t bytes)
{
    char folder[PATH_MAX], *file = realpath(t->options->engine.configs.calibration, NULL);
    snprintf(folder, sizeof folder, "%s", t->options->output);
    char *slash = strrchr(folder, '/');
    if (slash == NULL)
        strcpy(folder, ".");
    else
        slash[slash == folder ? 1 : 0] = 0;
    char *base = realpath(folder, NULL);
    bool ok = file != NULL && base != NULL;
    if (ok) {
        const char *own = strrchr(file, '/');
        const size_t length = (size_t)(own - file);
        const bool beside = strlen(base) == length && memcmp(base, file, length) == 0;
        ok = snprintf(name, bytes, "%s", beside ? own + 1 : file) < (int)bytes;
    }
    free(file);
    free(base);
    if (!ok)
        complain("tune: the calibration's path cannot be written down");
    return ok;
}

static bool any_needs_calibration(const tune *t, const size_t *choice)
{
    for (size_t i = 0; i < t->sensitivity.n_sites; i++) {
        const sensitivity_site *s = &t->sensitivity.sites[i];
        for (uint32_t head = 0; head < t->capture->layers[s->layer].n_kv_heads; head++)
            if (kvant_codec_check(spec_of(t, i, choice[i], head), s->role, NULL, NULL, 0) == KVANT_ERR_UNSUPPORTED)
                return true;
    }
    return false;
}

/* Specs of the kv heads of all sites behind each other, and layers that point to them. */
static void list_layers(const tune *t, const size_t *choice, const char **specs, kvant_settings_layer *layers)
{
    for (size_t i = 0; i < t->sensitivity.n_sites; i++) {
        const sensitivity_site *s = &t->sensitivity.sites[i];
        const capture_layer *l = &t->capture->layers[s->layer];
        const bool uniform = is_uniform(t, i, choice[i]);
        for (uint32_t head = 0; head < l->n_kv_heads; head++)
            specs[head] = spec_of(t, i, choice[i], head);
        layers[2 * s->layer + s->role] = (kvant_settings_layer){ uniform ? specs[0] : NULL, l->n_kv_heads,
                                                                 l->head_dim[s->role], uniform ? NULL : specs };
        specs += l->n_kv_heads;
    }
}

/* NULL after complaining. */
static kvant_settings *make_settings(const tune *t, const size_t *choice)
{
    const capture *c = t->capture;
    char err[512] = "", calibration[KVANT_SETTINGS_MAX_PATH + 1];
    size_t n_specs = 0;
    for (uint32_t layer = 0; layer < c->n_layers; layer++)
        n_specs += 2 * (size_t)c->layers[layer].n_kv_heads;
    const char **specs = calloc(n_specs, sizeof *specs);
    kvant_settings_layer *layers = calloc(2 * (size_t)c->n_layers, sizeof *layers);
    kvant_calibration_info info = { .size = sizeof info };
    kvant_settings *settings = NULL;
    bool ok = layers != NULL && specs != NULL;
    if (ok)
        list_layers(t, choice, specs, layers);
    else
        complain("tune: out of memory");
    kvant_settings_config config = { .size = sizeof config,
                                     .model = safetensors_noted(&c->file, "model"),
                                     .model_fingerprint = c->model_fingerprint,
                                     .n_layers = c->n_layers,
                                     .layers = layers };
    if (ok && any_needs_calibration(t, choice)) {
        ok = calibration_name(t, calibration, sizeof calibration) &&
             kvant_calibration_get_info(t->options->calibration, &info) == KVANT_OK;
        config.calibration = calibration;
        config.calibration_checksum = info.checksum;
    }
    if (ok && kvant_settings_create(&config, &settings, err, sizeof err) != KVANT_OK)
        complain("tune: %s", err);
    free(layers);
    free(specs);
    return settings;
}

static bool save_settings(const kvant_settings *settings, const char *path)
{
    char err[512] = "";
    if (kvant_settings_save(settings, path, err, sizeof err) == KVANT_OK)
        return true;
    complain("tune: %s: %s", path, err);
    return false;
}

/* Everything that decides what is measured, but for model, runtime and tokens, which divergence.h adds. */
static uint64_t key_of(const tune *t, const size_t *choice)
{
    kvant_calibration_info info = { .size = sizeof info };
    uint64_t key = FINGERPRINT_START;
    for (size_t i = 0; i < t->sensitivity.n_sites; i++) {
        key = fingerprint_number(key, 2 * (uint64_t)t->sensitivity.sites[i].layer + t->sensitivity.sites[i].role);
        const uint32_t n =
            is_uniform(t, i, choice[i]) ? 1 : t->capture->layers[t->sensitivity.sites[i].layer].n_kv_heads;
        for (uint32_t head = 0; head < n; head++)
            key = fingerprint_string(key, spec_of(t, i, choice[i], head));
    }
    if (t->options->calibration != NULL && kvant_calibration_get_info(t->options->calibration, &info) == KVANT_OK)
        key = fingerprint_number(key, info.checksum);
    return fingerprint_number(key, plugin_fingerprint());
}

static bool measure(tune *t, const size_t *choice, const char *label, const llama_token *tokens, double *kld)
{
    kvant_settings *settings = make_settings(t, choice);
    kv_config config = { .path = t->probe, .k = label, .v = label, .type_k = GGML_TYPE_F16, .type_v = GGML_TYPE_F16 };
    const kvant_scheme_params params = { .size = sizeof params, .settings = t->probe };
    double kv_bytes;
    bool told = true;
    const bool ok = settings != NULL && save_settings(settings, t->probe) &&
                    scheme_make(&params, &config.scheme, &told) &&
                    divergence_measure(&t->divergence, &config, key_of(t, choice), label, tokens, kld, &kv_bytes);
    kvant_scheme_free(&config.scheme);
    kvant_settings_free(&settings);
    return ok;
}

/* Probes. */

static void all_exact(const tune *t, size_t *choice)
{
    for (size_t i = 0; i < t->sensitivity.n_sites; i++)
        choice[i] = SIZE_MAX;
}

static const llama_token *measured_context(const tune *t, size_t context)
{
    return t->tokens.measured + context * t->options->texts.n_ctx;
}

/* The mean over contexts, one after another. They have the same number of tokens: the mean is that of means, squares of errors add up. */
static void add_context(const tune *t, size_t context, double *mean, double *error)
{
    double one, one_error;
    stats_mean(t->kld, t->divergence.n_rows, &one, &one_error);
    const double before = context > 0 ? *mean * (double)context : 0;
    const double squares = context > 0 ? *error * *error * (double)(context * context) : 0;
    *mean = (before + one) / (double)(context + 1);
    *error = sqrt(squares + one_error * one_error) / (double)(context + 1);
}

/* Divergences are of the same tokens, so their difference is known better than either. */
static bool probe_site(tune *t, size_t context, size_t site, const double *zero, size_t *choice)
{
    sensitivity_site *s = &t->sensitivity.sites[site];
    char label[64];
    snprintf(label, sizeof label, "layer %lu, %s", (unsigned long)s->layer,
             s->role == KVANT_ROLE_K ? "keys" : "values");
    choice[site] = 0;
    const bool ok = measure(t, choice, label, measured_context(t, context), t->kld);
    choice[site] = SIZE_MAX;
    for (size_t i = 0; i < t->divergence.n_rows && ok; i++)
        t->kld[i] -= zero[i];
    add_context(t, context, &s->measured, &s->measured_se);
    return ok;
}

/* How many of the probes the file does not have. */
static size_t count_probes(tune *t, size_t *choice)
{
    size_t n = 0;
    for (size_t c = 0; c < t->tokens.n_measured; c++) {
        n += divergence_runs(&t->divergence, key_of(t, choice), measured_context(t, c));
        for (size_t i = 0; i < t->sensitivity.n_sites; i++) {
            choice[i] = 0;
            n += divergence_runs(&t->divergence, key_of(t, choice), measured_context(t, c));
            choice[i] = SIZE_MAX;
        }
    }
    return n;
}

/* Context by context, because the logits of the f16 cache, which all are compared with, are kept for one at a time. */
static bool probe_context(tune *t, size_t context, size_t *choice)
{
    double *zero = t->kld_zero + context * t->divergence.n_rows;
    bool ok = measure(t, choice, "no codec", measured_context(t, context), zero);
    for (size_t i = 0; i < t->sensitivity.n_sites && ok; i++)
        ok = probe_site(t, context, i, zero, choice);
    return ok;
}

static bool probe_all(tune *t)
{
    size_t *choice = calloc(t->sensitivity.n_sites, sizeof *choice);
    double error;
    bool ok = choice != NULL;
    if (!ok)
        return false;
    all_exact(t, choice);
    const size_t contexts = t->tokens.n_measured, n = count_probes(t, choice);
    const size_t all = contexts * (t->sensitivity.n_sites + 1),
                 check = t->tokens.n_checks * (1 + TUNE_MAX_SETTINGS);
    if (n < all)
        fprintf(stderr, "kvant: tune: going on from %s: %zu of %zu measurements are done\n", t->part, all - n, all);
    progress_start(&t->progress, (double)(n + (n > 0 ? contexts : 0) + check) * t->options->texts.n_ctx);
    for (size_t c = 0; c < contexts && ok; c++)
        ok = probe_context(t, c, choice);
    if (ok)
        stats_mean(t->kld_zero, contexts * t->divergence.n_rows, &t->zero, &error);
    free(choice);
    return ok;
}

/* Preparation. */

static bool name_files(tune *t)
{
    const char *out = t->options->output;
    const char *resume = t->options->resume;
    if (snprintf(t->part, sizeof t->part, "%s%s", resume != NULL ? resume : out, resume != NULL ? "" : ".part") <
            (int)sizeof t->part &&
        snprintf(t->probe, sizeof t->probe, "%s.probe", out) < (int)sizeof t->probe &&
        snprintf(t->capture_path, sizeof t->capture_path, "%s.capture", out) < (int)sizeof t->capture_path)
        return can_write_beside("tune", out);
    complain("tune: the path of -o is too long");
    return false;
}

static bool check_contexts(const tune *t)
{
    const int32_t limit = ll.llama_model_n_ctx_train(t->engine.cpu_model);
    if (limit <= 0 || t->options->n_ctx <= (uint32_t)limit)
        return true;
    complain("tune: a context of %lu tokens is beyond the model's own limit of %ld",
             (unsigned long)t->options->n_ctx, (long)limit);
    hint("choose a smaller -c");
    return false;
}

static bool capture_text(tune *t)
{
    const capture_plan plan = { .path = t->capture_path,
                                .text = t->options->texts.files[0],
                                .query_step = QUERY_STEP };
    char err[512] = "";
    t->capture = calloc(1, sizeof *t->capture);
    if (t->capture == NULL || !capture_write(&t->reading, &plan))
        return false;
    const bool ok = capture_open(t->capture, t->capture_path, err, sizeof err);
    unlink(t->capture_path); /* stays readable until it is closed */
    if (!ok)
        complain("tune: %s", err);
    return ok;
}

/* Settings name the codecs of all layers. */
static bool check_layers(const tune *t)
{
    for (uint32_t layer = 0; layer < t->capture->n_layers; layer++)
        if (t->capture->layers[layer].n_kv_heads == 0) {
            complain("tune: layer %lu of this model has no attention; settings files need it in all",
                     (unsigned long)layer);
            return false;
        }
    return true;
}

static bool read_texts(tune *t)
{
    const tune_texts *texts = &t->options->texts;
    const kv_config f16 = configs_f16();
    if (engine_model(&t->engine, &f16) == NULL || !check_contexts(t) ||
        !tune_tokens_load(&t->tokens, &t->engine, texts))
        return false;
    const reading_text text = { .tokens = t->tokens.measured,
                                .n_tokens = t->tokens.n_measured * texts->n_ctx,
                                .n_ctx = texts->n_ctx };
    return reading_open(&t->reading, &t->engine, "tune", &text) && capture_text(t) && check_layers(t);
}

bool tune_prepare(tune *t, const tune_options *o)
{
    t->options = o;
    if (!name_files(t) || !engine_open(&t->engine, &o->engine) || !read_texts(t) ||
        !sensitivity_compute(&t->sensitivity, t->capture, &o->candidates, o->calibration, o->n_ctx,
                             t->engine.options.n_threads) ||
        !divergence_open(&t->divergence, &t->engine, o->texts.n_ctx, t->part, &t->progress))
        return false;
    for (size_t i = 0; i < t->sensitivity.n_sites; i++)
        t->numbers += t->sensitivity.sites[i].numbers;
    t->kld = calloc(t->divergence.n_rows, sizeof *t->kld);
    t->kld_zero = calloc(t->divergence.n_rows * t->tokens.n_measured, sizeof *t->kld_zero);
    return t->kld != NULL && t->kld_zero != NULL && probe_all(t);
}

/* Choosing. */

static void add_up(const tune *t, tune_setting *s)
{
    s->bytes = 0;
    s->predicted = t->zero;
    for (size_t i = 0; i < t->sensitivity.n_sites; i++) {
        const sensitivity_site *site = &t->sensitivity.sites[i];
        s->bytes += site->choices.list[s->choice[i]].bytes;
        s->predicted += sensitivity_cost(site, s->choice[i]);
    }
    s->kld = s->kld_se = NAN;
}

static bool choose(tune *t, double budget)
{
    const size_t n = t->sensitivity.n_sites;
    size_t n_choices = 0, first = 0;
    for (size_t i = 0; i < n; i++)
        n_choices += t->sensitivity.sites[i].choices.n;
    allocate_site *sites = calloc(n, sizeof *sites);
    allocate_choice *choices = calloc(n_choices, sizeof *choices);
    allocate_total total = { 0, 0 };
    bool ok = sites != NULL && choices != NULL;
    for (size_t i = 0; i < n && ok; i++) {
        const sensitivity_site *site = &t->sensitivity.sites[i];
        sites[i] = (allocate_site){ choices + first, site->choices.n, 0 };
        for (size_t c = 0; c < site->choices.n; c++)
            choices[first + c] = (allocate_choice){ site->choices.list[c].bytes, sensitivity_cost(site, c) };
        first += site->choices.n;
    }
    if (!ok)
        complain("tune: out of memory");
    if (ok && !allocate(sites, n, budget, &total)) {
        complain("tune: %.0f bytes (%.2f bits) are fewer than the smallest candidates take: %.0f (%.2f bits)",
                 budget, 8 * budget / t->numbers, total.bytes, 8 * total.bytes / t->numbers);
        hint("a larger budget, a longer -c (windows weigh less) or coarser candidates");
        ok = false;
    }
    for (size_t i = 0; i < n && ok; i++)
        t->settings[0].choice[i] = sites[i].chosen;
    free(sites);
    free(choices);
    return ok;
}

static void make_uniform(const tune *t, size_t k, size_t v, tune_setting *s)
{
    s->k = t->options->candidates.specs[KVANT_ROLE_K][k];
    s->v = t->options->candidates.specs[KVANT_ROLE_V][v];
    for (size_t i = 0; i < t->sensitivity.n_sites; i++)
        s->choice[i] = t->sensitivity.sites[i].role == KVANT_ROLE_K ? k : v;
    add_up(t, s);
}

/* The best uniform setting of least to most bytes, or none (k NULL). */
static tune_setting best_uniform(const tune *t, double least, double most)
{
    tune_setting best = { .name = NULL }, trial = { .name = NULL };
    for (size_t k = 0; k < t->options->candidates.n[0]; k++)
        for (size_t v = 0; v < t->options->candidates.n[1]; v++) {
            make_uniform(t, k, v, &trial);
            if (trial.bytes >= least && trial.bytes <= most && (best.k == NULL || trial.predicted < best.predicted))
                best = trial;
        }
    return best;
}

/* The bytes of the smallest uniform setting of no fewer than least; infinite when there is none. */
static double next_uniform_bytes(const tune *t, double least)
{
    double bytes = INFINITY;
    tune_setting trial = { .name = NULL };
    for (size_t k = 0; k < t->options->candidates.n[0]; k++)
        for (size_t v = 0; v < t->options->candidates.n[1]; v++) {
            make_uniform(t, k, v, &trial);
            if (trial.bytes >= least && trial.bytes < bytes)
                bytes = trial.bytes;
        }
    return bytes;
}

/* What the chosen setting has to beat: of uniform settings the best that fits the budget, and the best of no fewer bytes than the
 * chosen one, up to 2 % more, or as many more as the next one has. */
static void add_uniform(tune *t, double budget)
{
    const double least = t->settings[0].bytes, next = next_uniform_bytes(t, least);
    const tune_setting fits = best_uniform(t, 0, budget);
    const tune_setting above = best_uniform(t, least, next > 1.02 * least ? next : 1.02 * least);
    t->settings[0].name = "tuned";
    t->n_settings = 1;
    if (fits.k != NULL) {
        t->settings[t->n_settings] = fits;
        t->settings[t->n_settings++].name = "uniform within the budget";
    }
    if (above.k != NULL && (fits.k != above.k || fits.v != above.v)) {
        t->settings[t->n_settings] = above;
        t->settings[t->n_settings++].name = "uniform, no fewer bytes";
    }
}

bool tune_choose(tune *t, double bits, double bytes)
{
    const double budget = bytes > 0 ? bytes : floor(bits * t->numbers / 8 + 1e-6);
    sensitivity_weigh(&t->sensitivity);
    if (!choose(t, budget))
        return false;
    add_up(t, &t->settings[0]);
    add_uniform(t, budget);
    return true;
}

bool tune_verify(tune *t)
{
    bool ok = true;
    for (size_t context = 0; context < t->tokens.n_checks && ok; context++)
        for (size_t i = 0; i < t->n_settings && ok; i++) {
            tune_setting *s = &t->settings[i];
            ok = measure(t, s->choice, s->name, t->tokens.check + context * t->options->texts.n_ctx, t->kld);
            add_context(t, context, &s->kld, &s->kld_se);
        }
    progress_end(&t->progress);
    return ok;
}

bool tune_save(tune *t)
{
    kvant_settings *settings = make_settings(t, t->settings[0].choice);
    const bool ok = settings != NULL && save_settings(settings, t->options->output);
    kvant_settings_free(&settings);
    if (ok && t->options->resume == NULL)
        unlink(t->part);
    return ok;
}

void tune_say_how_to_go_on(const tune *t)
{
    if (t->part[0] != 0 && access(t->part, F_OK) == 0)
        fprintf(stderr, "kvant: tune: the same command goes on from here (%s)\n", t->part);
}

void tune_release(tune *t)
{
    if (t->probe[0] != 0)
        unlink(t->probe);
    divergence_close(&t->divergence);
    sensitivity_free(&t->sensitivity);
    if (t->capture != NULL)
        capture_close(t->capture);
    free(t->capture);
    reading_close(&t->reading);
    tune_tokens_free(&t->tokens);
    free(t->kld);
    free(t->kld_zero);
    engine_close(&t->engine);
}
