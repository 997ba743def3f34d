/* sensitivity.c - see sensitivity.h. */
#include "sensitivity.h"

#include "command.h"
#include "interrupt.h"
#include "layer_error.h"
#include "progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Coarse ones first. With a centre the first page is kept in 16 bits; what that is worth, and what it costs in a short context, differs from
 * layer to layer, so codecs are there with it, without it, and values without a centre. */
#define WITH_SINK(spec) spec, spec ",sink=0"

sensitivity_candidates sensitivity_defaults(bool calibrated)
{
    static const sensitivity_candidates by_file = {
        .specs = { { WITH_SINK("trellis-2:transform=file"), WITH_SINK("trellis-3:transform=file"),
                     WITH_SINK("trellis-4:transform=file"), WITH_SINK("turboquant-2:transform=file,feedback"),
                     WITH_SINK("turboquant-3:transform=file,feedback"),
                     WITH_SINK("turboquant-4:transform=file,feedback"),
                     WITH_SINK("turboquant-5:transform=file,feedback"),
                     WITH_SINK("turboquant-6:transform=file,feedback"),
                     WITH_SINK("turboquant-8:transform=file,feedback"), "trellis-2:transform=diagonal",
                     "trellis-3:transform=diagonal", "trellis-4:transform=diagonal" },
                   { WITH_SINK("trellis-2:center=file"), "trellis-2", WITH_SINK("trellis-3:center=file"),
                     "trellis-3", WITH_SINK("trellis-4:center=file"), "trellis-4",
                     WITH_SINK("turboquant-5:center=file"), "turboquant-5", "turboquant-6:center=file",
                     "turboquant-6", "turboquant-8", "trellis-2:center=file,norm=file",
                     "trellis-3:center=file,norm=file", "trellis-4:center=file,norm=file" } },
        .n = { 21, 18 },
    };
    static const sensitivity_candidates by_first_rows = {
        .specs = { { WITH_SINK("trellis-2:center=first,norm=first"), WITH_SINK("trellis-3:center=first,norm=first"),
                     "trellis-3:center=first", WITH_SINK("trellis-4:center=first,norm=first"),
                     "trellis-4:center=first", "turboquant-5:center=first,norm=first",
                     "turboquant-6:center=first,norm=first", "turboquant-8:center=first,norm=first" },
                   { "trellis-2:center=first", "trellis-2", "trellis-3:center=first", "trellis-3",
                     "trellis-4:center=first", "trellis-4", "turboquant-5:center=first", "turboquant-5",
                     "turboquant-6", "turboquant-8" } },
        .n = { 11, 10 },
    };
    return calibrated ? by_file : by_first_rows;
}

static bool out_of_memory(void)
{
    complain("tune: out of memory");
    return false;
}

/* Cells of a layer's cache in a context; llama.cpp gives layers with a sliding window room for the window and a batch. */
static uint32_t cells_of(const capture_layer *l, uint32_t n_ctx)
{
    const uint32_t ring = (l->window + ENGINE_UBATCH + 255) / 256 * 256;
    return l->window > 0 && ring < n_ctx ? ring : n_ctx;
}

/* Sealed pages, and those that windows keep in 16 bits: sinks; recent rows, and groups that are not full, besides. */
static double bytes_of(const kvant_codec_info *info, uint32_t n_cells)
{
    const uint32_t pages = (n_cells + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
    uint32_t open = (info->sink_tokens + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
    if (info->recent_tokens > 0 || info->block_tokens > 1)
        open += (info->recent_tokens + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS + 1;
    if (open > pages)
        open = pages;
    return (double)open * KVANT_PAGE_TOKENS * info->head_dim * 2 +
           (double)(pages - open) * (double)info->page_bytes;
}

static bool look_at_codec(const sensitivity_site *site, const capture_layer *l, const char *spec,
                          const kvant_calibration *calibration, kvant_codec_info *info)
{
    kvant_codec *codec = NULL;
    char err[512] = "";
    *info = (kvant_codec_info){ .size = sizeof *info };
    if (kvant_codec_create_calibrated(spec, l->head_dim[site->role], site->role, 0, calibration, site->layer, 0,
                                      &codec, err, sizeof err) != KVANT_OK ||
        kvant_codec_get_info(codec, info) != KVANT_OK) {
        complain("tune: %s: %s", spec, err);
        return false;
    }
    kvant_codec_free(&codec);
    info->spec = NULL; /* it was the codec's */
    return true;
}

/* errors: room for a number of each candidate and kv head. */
static bool compute_choices(sensitivity *s, sensitivity_site *site, const layer_rows *rows,
                            const kvant_calibration *calibration, uint32_t n_ctx, uint32_t n_threads,
                            double *errors)
{
    const capture_layer *l = &s->capture->layers[site->layer];
    const uint32_t n_cells = cells_of(l, n_ctx);
    kvant_codec_info infos[SENSITIVITY_MAX_CANDIDATES];
    double bytes[SENSITIVITY_MAX_CANDIDATES];
    char err[512] = "";
    for (size_t i = 0; i < s->candidates->n[site->role]; i++) {
        const char *spec = s->candidates->specs[site->role][i];
        if (interrupted() || !look_at_codec(site, l, spec, calibration, &infos[i]))
            return false;
        bytes[i] = bytes_of(&infos[i], n_cells);
        if (!layer_error(rows, site->role, spec, calibration, n_threads, errors + i * l->n_kv_heads, err,
                         sizeof err)) {
            complain("tune: layer %lu, %s: %s", (unsigned long)site->layer, spec, err);
            return false;
        }
    }
    site->numbers = (double)l->n_kv_heads * l->head_dim[site->role] * n_cells;
    const mixes_candidates of = { infos, bytes, errors, s->candidates->n[site->role], l->n_kv_heads };
    return mixes_make(&site->choices, &of) || out_of_memory();
}

static bool compute_site(sensitivity *s, sensitivity_site *site, const layer_rows *rows,
                         const kvant_calibration *calibration, uint32_t n_ctx, uint32_t n_threads)
{
    double *errors =
        calloc(s->candidates->n[site->role], s->capture->layers[site->layer].n_kv_heads * sizeof *errors);
    const bool ok =
        errors != NULL ? compute_choices(s, site, rows, calibration, n_ctx, n_threads, errors) : out_of_memory();
    free(errors);
    return ok;
}

static bool compute_layer(sensitivity *s, uint32_t layer, const kvant_calibration *calibration, uint32_t n_ctx,
                          uint32_t n_threads)
{
    layer_rows rows;
    char err[512] = "";
    bool ok = layer_rows_load(&rows, s->capture, layer, err, sizeof err);
    if (!ok)
        complain("tune: %s", err);
    for (int role = 0; role < 2 && ok; role++) {
        sensitivity_site *site = &s->sites[s->n_sites++];
        *site = (sensitivity_site){ .layer = layer, .role = (kvant_role)role };
        ok = compute_site(s, site, &rows, calibration, n_ctx, n_threads);
    }
    layer_rows_free(&rows);
    return ok;
}

bool sensitivity_compute(sensitivity *s, const capture *c, const sensitivity_candidates *candidates,
                         const kvant_calibration *calibration, uint32_t n_ctx, uint32_t n_threads)
{
    *s = (sensitivity){ .capture = c, .candidates = candidates };
    s->sites = calloc(2 * (size_t)c->n_layers, sizeof *s->sites);
    if (s->sites == NULL)
        return out_of_memory();
    progress p;
    bool ok = true;
    progress_start(&p, c->n_layers);
    for (uint32_t layer = 0; layer < c->n_layers && ok; layer++) {
        if (c->layers[layer].n_kv_heads > 0)
            ok = compute_layer(s, layer, calibration, n_ctx, n_threads);
        progress_add(&p, 1, "errors of the candidates, layer by layer");
    }
    progress_end(&p);
    return ok;
}

void sensitivity_free(sensitivity *s)
{
    for (size_t i = 0; s->sites != NULL && i < s->n_sites; i++)
        mixes_free(&s->sites[i].choices);
    free(s->sites);
    s->sites = NULL;
}

/* Below half of its own error a measurement says only that the site matters little. */
static double at_least(const sensitivity_site *site)
{
    const double least = 0.5 * site->measured_se;
    const double x = site->measured > least ? site->measured : least;
    return x > 1e-9 ? x : 1e-9;
}

/* An error of 0 is that of a lossless first candidate: nothing follows from it. */
static double log_weight(const sensitivity_site *site)
{
    const double error = site->choices.list[0].error;
    return log(at_least(site) / (error > 1e-12 ? error : 1e-12));
}

static double log_variance(const sensitivity_site *site)
{
    const double relative = site->measured_se / at_least(site);
    return relative * relative;
}

/* Mean of a role's logarithms, and the variance between its sites that their errors do not explain (method of moments). */
static void prior(const sensitivity *s, kvant_role role, double *mean, double *variance)
{
    double sum = 0, squares = 0, noise = 0, n = 0;
    for (size_t i = 0; i < s->n_sites; i++) {
        if (s->sites[i].role != role)
            continue;
        const double y = log_weight(&s->sites[i]);
        sum += y;
        squares += y * y;
        noise += log_variance(&s->sites[i]);
        n++;
    }
    *mean = n > 0 ? sum / n : 0;
    *variance = n > 0 ? squares / n - *mean * *mean - noise / n : 0;
    if (!(*variance > 0.01))
        *variance = 0.01;
}

void sensitivity_weigh(sensitivity *s)
{
    for (int role = 0; role < 2; role++) {
        double mean, variance;
        prior(s, (kvant_role)role, &mean, &variance);
        for (size_t i = 0; i < s->n_sites; i++) {
            sensitivity_site *site = &s->sites[i];
            const double trust = variance / (variance + log_variance(site));
            if (site->role == (kvant_role)role)
                site->weight = exp(mean + trust * (log_weight(site) - mean));
        }
    }
}

static size_t rank_of(const double *x, size_t n, size_t i)
{
    size_t below = 0;
    for (size_t j = 0; j < n; j++)
        below += x[j] < x[i] || (x[j] == x[i] && j < i);
    return below;
}

double sensitivity_agreement(const sensitivity *s, int role)
{
    double *error = malloc(2 * s->n_sites * sizeof *error), *measured = error != NULL ? error + s->n_sites : NULL;
    double squares = 0;
    size_t n = 0;
    for (size_t i = 0; i < s->n_sites && error != NULL; i++)
        if (role == 2 || s->sites[i].role == (kvant_role)role) {
            error[n] = s->sites[i].choices.list[0].error;
            measured[n++] = s->sites[i].measured;
        }
    for (size_t i = 0; i < n; i++) {
        const double d = (double)rank_of(error, n, i) - (double)rank_of(measured, n, i);
        squares += d * d;
    }
    free(error);
    return n >= 3 ? 1 - 6 * squares / ((double)n * ((double)n * (double)n - 1)) : NAN;
}
