/* weighting.c - see weighting.h; docs/format.md, "Transform", and docs/calibration.md, which says what W is. */
#include "weighting.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"
#include "../math/spd.h"
#include "site.h"

enum { WEIGHTING_NONE, WEIGHTING_DIAGONAL, WEIGHTING_FILE };
static const char *const names[] = { "none", "diagonal", "file", NULL };

/* Calibrations keep |W| |W^-1| (Frobenius norms) below sqrt(head_dim) 2^11, which is 2^15.5 for the largest: what is beyond was not
 * written by one. */
#define MAX_CONDITION 65536.0

/* w from the lower triangle, and its inverse. */
static kvant_status invert(uint32_t n, const uint16_t *triangle, double *w, double *inverse,
                           const kvant_error *error)
{
    size_t d = n;
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++)
            w[i * d + j] = w[j * d + i] = kvant_half_to_float(*triangle++);
    kvant_status status = kvant_spd_inverse(n, w, inverse);
    if (status == KVANT_ERR_MEMORY)
        return kvant_fail(error, status, "no memory for a transform");
    if (status != KVANT_OK || !(kvant_frobenius(n, w) * kvant_frobenius(n, inverse) <= MAX_CONDITION))
        return kvant_fail(error, KVANT_ERR_FORMAT,
                          "the calibration file is damaged: its matrix has no good inverse");
    return KVANT_OK;
}

static kvant_status set_matrix(kvant_codec *codec, const uint16_t *triangle, const kvant_error *error)
{
    size_t d = codec->info.head_dim, size = d * d;
    double *exact = kvant_alloc(2 * size, sizeof *exact);
    float *rounded = kvant_alloc(2 * size, sizeof *rounded);
    kvant_status status =
        exact && rounded ? KVANT_OK : kvant_fail(error, KVANT_ERR_MEMORY, "no memory for a transform");
    if (status == KVANT_OK)
        status = invert(codec->info.head_dim, triangle, exact, exact + size, error);
    for (size_t i = 0; status == KVANT_OK && i < 2 * size; i++)
        rounded[i] = (float)exact[i];
    if (status == KVANT_OK)
        status = kvant_transform_weigh(&codec->transform, false, rounded, rounded + size);
    kvant_free(exact);
    kvant_free(rounded);
    return status;
}

static kvant_status set_diagonal(kvant_codec *codec, const float *factors)
{
    float inverse[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < codec->info.head_dim; i++)
        inverse[i] = 1 / factors[i];
    return kvant_transform_weigh(&codec->transform, true, factors, inverse);
}

kvant_status kvant_weighting_read(kvant_codec *codec, kvant_spec *spec, const kvant_site *site,
                                  const kvant_error *error)
{
    int kind = WEIGHTING_NONE;
    kvant_calibration_entry entry;
    KVANT_FORWARD(kvant_spec_choice(spec, "transform", names, &kind, error));
    if (kind == WEIGHTING_NONE)
        return KVANT_OK;
    if (kvant_spec_has(spec, "norm"))
        return kvant_fail(error, KVANT_ERR_SPEC, "transform=%s takes the place of norm: leave one of them out",
                          names[kind]);
    bool keys = codec->info.role == KVANT_ROLE_K;
    if (keys ||
        !kvant_spec_has(spec, "center")) /* a spec of values that names its centre needs no word of a preset */
        codec->info.center = KVANT_CENTER_FILE;
    codec->info.norm = KVANT_NORM_NONE;
    KVANT_FORWARD(kvant_site_entry(codec, site, codec->info.role, "transform", &entry, error));
    if (!keys)
        return KVANT_OK;
    kvant_append(codec->spec, sizeof codec->spec, ",transform=%s", names[kind]);
    return kind == WEIGHTING_DIAGONAL ? set_diagonal(codec, entry.diagonal)
                                      : set_matrix(codec, entry.matrix, error);
}
