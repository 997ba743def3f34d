/* tune.h - the steps of `kvant tune`: capture and measure, choose, check, save. */
#ifndef KVANT_TOOLS_TUNE_H
#define KVANT_TOOLS_TUNE_H

#include "divergence.h"
#include "reading.h"
#include "sensitivity.h"
#include "tune_tokens.h"

#include <kvant/settings.h>

typedef struct tune_options {
    engine_options engine;
    tune_texts texts; /* its n_ctx: of the contexts that are measured */
    const char *output;
    const char *resume; /* or NULL */
    uint32_t n_ctx;     /* that the budget is for */
    kvant_calibration *calibration;
    sensitivity_candidates candidates;
} tune_options;

enum { TUNE_MAX_SETTINGS = 4, TUNE_MAX_SITES = 2 * OBSERVE_MAX_LAYERS };

/* A choice for each site, and what is known of it. */
typedef struct tune_setting {
    const char *name, *k, *v;      /* k and v: of uniform ones, else NULL */
    size_t choice[TUNE_MAX_SITES]; /* of each site's choices; SIZE_MAX: f16 */
    double bytes;                  /* in the planned context */
    double predicted;              /* divergence, on the tuning text */
    double kld, kld_se;            /* measured on other tokens; NaN before */
} tune_setting;

typedef struct tune {
    const tune_options *options;
    engine engine;
    reading reading;
    capture *capture;
    char capture_path[4096], part[4096], probe[4096]; /* files beside the output */
    sensitivity sensitivity;
    divergence divergence;
    progress progress;
    double zero;            /* divergence of the plug-in's own f16 cache from llama.cpp's on the tuning tokens */
    double *kld_zero, *kld; /* token by token; kld_zero of all measured contexts */
    double numbers;         /* of the cache in the planned context */
    tune_tokens tokens;
    tune_setting settings[TUNE_MAX_SETTINGS]; /* the first is the chosen one */
    size_t n_settings;
} tune;

/* Captures, computes errors, measures every site. False after complaining or when interrupted, as
 * below. */
bool tune_prepare(tune *t, const tune_options *options);

/* One of bits (a number) and bytes is above 0. */
bool tune_choose(tune *t, double bits, double bytes);
/* Measures all settings on other tokens. */
bool tune_verify(tune *t);
bool tune_save(tune *t);

/* What a site has in a choice, as it is shown (choices.h, layer_specs): the caller's to free, NULL
 * without memory. */
char *tune_specs(const tune *t, size_t site, size_t choice);

void tune_say_how_to_go_on(const tune *t);
void tune_release(tune *t);

#endif /* KVANT_TOOLS_TUNE_H */
