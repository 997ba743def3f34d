/* weighting.c - see weighting.h. format.md, "Transform", has the arithmetic;
 * calibration.md defines W. */
#include "weighting.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"
#include "../math/spd.h"
#include "feedback.h"
#include "site.h"

/* Calibrations keep |W| |W^-1| (Frobenius norms) below sqrt(head_dim) 2^11, which is 2^15.5 for the
 * largest: what is beyond was not written by one. */
#define MAX_CONDITION 65536.0

/* w from the lower triangle. */
static void read_triangle(size_t d, const uint16_t *triangle, double *w)
{
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++)
            w[i * d + j] = w[j * d + i] = kvant_half_to_float(*triangle++);
}

static kvant_status invert(uint32_t n, const double *w, double *inverse, const kvant_error *error)
{
    kvant_status status = kvant_spd_inverse(n, w, inverse);
    KVANT_RETURN_IF(status == KVANT_ERR_MEMORY, status);
    if (status != KVANT_OK || !(kvant_frobenius(n, w) * kvant_frobenius(n, inverse) <= MAX_CONDITION))
        return kvant_fail(error, KVANT_ERR_FORMAT,
                          "the calibration file is damaged: its matrix has no good inverse");
    return KVANT_OK;
}

static kvant_status set_matrix(kvant_codec *codec, const kvant_calibration_entry *entry, bool feedback,
                               const kvant_error *error)
{
    uint32_t n = codec->info.head_dim;
    size_t size = (size_t)n * n;
    double *w = kvant_alloc(2 * size, sizeof *w);
    KVANT_RETURN_IF(!w, KVANT_ERR_MEMORY);
    double *inverse = w + size;
    read_triangle(n, entry->matrix, w);
    kvant_codec_identify(codec, entry->matrix, (size + n) / 2 * sizeof *entry->matrix);
    if (feedback)
        kvant_codec_identify(codec, entry->query_moment, size * sizeof *entry->query_moment);
    kvant_status status = invert(n, w, inverse, error);
    if (status == KVANT_OK)
        status = feedback ? kvant_feedback_create(codec, w, inverse, entry->query_moment, error)
                          : kvant_transform_weigh(&codec->transform, w, inverse);
    kvant_free(w);
    return status;
}

static kvant_status set_diagonal(kvant_codec *codec, const float *factors)
{
    kvant_codec_identify(codec, factors, codec->info.head_dim * sizeof *factors);
    return kvant_transform_weigh_diagonal(&codec->transform, factors);
}

static kvant_status check_feedback(const kvant_codec *codec, bool feedback, int kind, const kvant_error *error)
{
    if (feedback && kind != KVANT_WEIGHTING_FILE)
        return kvant_fail(error, KVANT_ERR_SPEC, "feedback needs transform=file beside it");
    if (feedback && codec->info.role == KVANT_ROLE_K && !codec->takes_feedback)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "feedback is there for turboquant of whole bits without qjl");
    return KVANT_OK;
}

kvant_status kvant_weighting_apply(kvant_codec *codec, const kvant_common *common, const kvant_site *site,
                                   const kvant_error *error)
{
    int kind = common->transform == KVANT_OPTION_ABSENT ? KVANT_WEIGHTING_NONE : common->transform;
    bool feedback = common->feedback == 1;
    kvant_calibration_entry entry;
    KVANT_FORWARD(check_feedback(codec, feedback, kind, error));
    if (kind == KVANT_WEIGHTING_NONE)
        return KVANT_OK;
    if (common->norm != KVANT_OPTION_ABSENT)
        return kvant_fail(error, KVANT_ERR_SPEC, "transform=%s takes the place of norm: leave one of them out",
                          kind == KVANT_WEIGHTING_FILE ? "file" : "diagonal");
    bool keys = codec->info.role == KVANT_ROLE_K;
    if (keys || common->center == KVANT_OPTION_ABSENT) /* values that name their centre need no word of a preset */
        codec->info.center = KVANT_CENTER_FILE;
    codec->info.norm = KVANT_NORM_NONE;
    KVANT_FORWARD(kvant_site_entry(codec, site, codec->info.role, "transform", &entry, error));
    if (!keys)
        return KVANT_OK;
    codec->shown.transform = kind;
    codec->shown.feedback = feedback;
    return kind == KVANT_WEIGHTING_DIAGONAL ? set_diagonal(codec, entry.diagonal)
                                            : set_matrix(codec, &entry, feedback, error);
}
