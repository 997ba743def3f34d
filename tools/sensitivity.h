/* sensitivity.h - estimates the cost of each candidate codec to the model, per layer and role, from
 * two sources. The error in the layer's attention (layer_error.h) is known for all candidates. The
 * divergence of the model is measured with the first candidate alone in the layer.
 *
 *     cost(candidate) = measured(first) error(candidate) / error(first)
 */
#ifndef KVANT_TOOLS_SENSITIVITY_H
#define KVANT_TOOLS_SENSITIVITY_H

#include "capture.h"
#include "mixes.h"

enum { SENSITIVITY_MAX_CANDIDATES = 24 };

typedef struct sensitivity_candidates {
    const char *specs[2][SENSITIVITY_MAX_CANDIDATES]; /* by role; the first is the coarse one that is measured */
    size_t n[2];
} sensitivity_candidates;

/* Keys or values of a layer. */
typedef struct sensitivity_site {
    uint32_t layer;
    kvant_role role;
    mixes
        choices; /* what it can have; bytes of the cache in the planned context, errors of attention's output, relative */
    double numbers;               /* of the cache in that context */
    double measured, measured_se; /* divergence with the first candidate, less that without any */
    double weight;                /* divergence for each unit of error */
} sensitivity_site;

typedef struct sensitivity {
    const capture *capture;
    const sensitivity_candidates *candidates;
    sensitivity_site *sites; /* layer by layer, keys before values */
    size_t n_sites;
} sensitivity;

/* Where there is a calibration, and where there is none. */
sensitivity_candidates sensitivity_defaults(bool calibrated);

/* Errors and bytes of all candidates in all layers of a capture. n_ctx: the planned context. False
 * after complaining or when interrupted; sensitivity_free in any case. */
bool sensitivity_compute(sensitivity *s, const capture *c, const sensitivity_candidates *candidates,
                         const kvant_calibration *calibration, uint32_t n_ctx, uint32_t n_threads);
void sensitivity_free(sensitivity *s);

/* Weights from what was measured. Measurements are noisy, and weights of one role are alike: each
 * is drawn to the role's mean by as much as its own error asks for, in logarithms. */
void sensitivity_weigh(sensitivity *s);

/* Spearman's rank correlation of the first candidates' errors with what was measured; NaN for fewer
 * than 3 sites. role: one of kvant_role, or 2 for all. */
double sensitivity_agreement(const sensitivity *s, int role);

/* Of the site's choice of this number. */
static inline double sensitivity_cost(const sensitivity_site *site, size_t choice)
{
    return site->weight * site->choices.list[choice].error;
}

#endif /* KVANT_TOOLS_SENSITIVITY_H */
