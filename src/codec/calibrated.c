/* calibrated.c - see calibrated.h. format.md, "Transform", has the arithmetic of W; calibration.md
 * defines it. */
#include "calibrated.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"
#include "../math/spd.h"
#include "feedback.h"

static kvant_status wrong_shape(const kvant_codec *codec, const kvant_location *location,
                                kvant_role role, const kvant_error *error)
{
    kvant_calibration_info info = { .size = sizeof info };
    KVANT_FORWARD(kvant_calibration_get_info(location->calibration, &info));
    return kvant_fail(error, KVANT_ERR_ARGUMENT,
                      "the calibration (of %s: %u layers, %u kv heads, head_dim %u) has no %s of "
                      "layer %u, kv head %u, "
                      "head_dim %u: it was made for another model",
                      info.model[0] ? info.model : "an unnamed model", (unsigned)info.n_layers,
                      (unsigned)info.n_kv_heads, (unsigned)info.head_dim,
                      role == KVANT_ROLE_K ? "keys" : "values", (unsigned)location->layer,
                      (unsigned)location->kv_head, (unsigned)codec->info.head_dim);
}

kvant_status kvant_calibrated_entry(const kvant_codec *codec, const kvant_location *location,
                                    kvant_role role, const char *what,
                                    kvant_calibration_entry *entry, const kvant_error *error)
{
    if (!location->calibration && location->missed)
        *location->missed = true;
    if (!location->calibration)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "%s needs a calibration file and there is none: make one with "
                          "kvant calibrate -m MODEL -f TEXT -o FILE",
                          what);
    *entry = (kvant_calibration_entry){ .size = sizeof *entry };
    kvant_status status = kvant_calibration_get_entry(location->calibration, location->layer,
                                                      location->kv_head, role, entry);
    if (status != KVANT_OK || entry->head_dim != codec->info.head_dim)
        return wrong_shape(codec, location, role, error);
    return KVANT_OK;
}

static void fill_scale(const kvant_calibration_entry *entry, const float *center, float *scale)
{
    float largest = 0;
    for (uint32_t j = 0; j < entry->head_dim; j++) {
        float c = center ? center[j] : 0, low = fabsf(entry->min[j] - c),
              high = fabsf(entry->max[j] - c);
        scale[j] = sqrtf(low > high ? low : high);
        largest = scale[j] > largest ? scale[j] : largest;
    }
    for (uint32_t j = 0; j < entry->head_dim; j++)
        scale[j] = largest == 0 ? 1 : scale[j] < largest / 256 ? largest / 256 : scale[j];
}

kvant_status kvant_calibrated_fill(kvant_codec *codec, const kvant_location *location,
                                   const kvant_error *error)
{
    bool center = codec->info.center == KVANT_CENTER_FILE,
         scale = codec->info.norm == KVANT_NORM_FILE;
    kvant_calibration_entry entry;
    if (!center && !scale)
        return KVANT_OK;
    KVANT_FORWARD(kvant_calibrated_entry(codec, location, codec->info.role,
                                         center ? "center=file" : "norm=file", &entry, error));
    codec->file_center = center ? kvant_alloc(entry.head_dim, sizeof(float)) : NULL;
    codec->file_scale = scale ? kvant_alloc(entry.head_dim, sizeof(float)) : NULL;
    KVANT_RETURN_IF((center && !codec->file_center) || (scale && !codec->file_scale),
                    KVANT_ERR_MEMORY);
    const size_t bytes = entry.head_dim * sizeof(float);
    if (center) {
        memcpy(codec->file_center, entry.mean, bytes);
        kvant_codec_identify(codec, codec->file_center, bytes);
    }
    if (scale) {
        fill_scale(&entry, codec->file_center, codec->file_scale);
        kvant_codec_identify(codec, codec->file_scale, bytes);
    }
    return KVANT_OK;
}

/* transform= */

/* The largest condition of a matrix that is accepted. Calibrations keep |W| |W^-1| (Frobenius
 * norms) below sqrt(head_dim) 2^11, which is 2^15.5 for the largest head_dim. A larger condition
 * was not written by a calibration. */
#define MAX_CONDITION 65536.0

/* Fills w from the lower triangle. */
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
    if (status != KVANT_OK ||
        !(kvant_frobenius(n, w) * kvant_frobenius(n, inverse) <= MAX_CONDITION))
        return kvant_fail(
            error, KVANT_ERR_FORMAT,
            "the calibration file is damaged: the inverse of a matrix is not accurate enough");
    return KVANT_OK;
}

static kvant_status set_matrix(kvant_codec *codec, const kvant_calibration_entry *entry,
                               bool feedback, const kvant_error *error)
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
                          : kvant_transform_set_matrix(&codec->transform, w, inverse);
    kvant_free(w);
    return status;
}

static kvant_status set_diagonal(kvant_codec *codec, const float *factors)
{
    kvant_codec_identify(codec, factors, codec->info.head_dim * sizeof *factors);
    return kvant_transform_set_diagonal(&codec->transform, factors);
}

static kvant_status check_feedback(const kvant_codec *codec, bool feedback, int kind,
                                   const kvant_error *error)
{
    if (feedback && kind != KVANT_WEIGHTING_FILE)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "feedback needs transform=file: add it to the spec");
    if (feedback && codec->info.role == KVANT_ROLE_K && !codec->accepts_feedback)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "feedback is an option of turboquant with 1 to 8 bits and without qjl");
    return KVANT_OK;
}

/* With transform=first the cache learns the matrix (src/cache/key_transform.h). Until it has
 * learned one, centre and scale of the first rows take its place. */
static kvant_status set_first(kvant_codec *codec, const kvant_common *common,
                              const kvant_error *error)
{
    const bool keys = codec->info.role == KVANT_ROLE_K;
    const bool centred = keys || common->center != KVANT_OPTION_ABSENT;
    if ((common->norm != KVANT_OPTION_ABSENT && common->norm != KVANT_NORM_FIRST) ||
        (common->center != KVANT_OPTION_ABSENT && common->center != KVANT_CENTER_FIRST))
        return kvant_fail(
            error, KVANT_ERR_SPEC,
            "transform=first sets center=first and norm=first: leave center and norm out");
    codec->info.center = centred ? KVANT_CENTER_FIRST : KVANT_CENTER_NONE;
    codec->info.norm = KVANT_NORM_FIRST;
    codec->info.learns_transform = 1;
    codec->shown.transform = KVANT_WEIGHTING_FIRST;
    return KVANT_OK;
}

kvant_status kvant_calibrated_transform(kvant_codec *codec, const kvant_common *common,
                                        const kvant_location *location, const kvant_error *error)
{
    int kind = common->transform == KVANT_OPTION_ABSENT ? KVANT_WEIGHTING_NONE : common->transform;
    bool feedback = common->feedback == 1;
    kvant_calibration_entry entry;
    KVANT_FORWARD(check_feedback(codec, feedback, kind, error));
    if (kind == KVANT_WEIGHTING_NONE)
        return KVANT_OK;
    if (kind == KVANT_WEIGHTING_FIRST)
        return set_first(codec, common, error);
    if (common->norm != KVANT_OPTION_ABSENT)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "transform=%s replaces norm: leave one of them out",
                          kind == KVANT_WEIGHTING_FILE ? "file" : "diagonal");
    bool keys = codec->info.role == KVANT_ROLE_K;
    if (keys ||
        common->center ==
            KVANT_OPTION_ABSENT) /* values that name their centre need no word of a preset */
        codec->info.center = KVANT_CENTER_FILE;
    codec->info.norm = KVANT_NORM_NONE;
    KVANT_FORWARD(
        kvant_calibrated_entry(codec, location, codec->info.role, "transform", &entry, error));
    if (!keys)
        return KVANT_OK;
    codec->shown.transform = kind;
    codec->shown.feedback = feedback;
    return kind == KVANT_WEIGHTING_DIAGONAL ? set_diagonal(codec, entry.diagonal)
                                            : set_matrix(codec, &entry, feedback, error);
}
