/* check.c - kvant_codec_check: whether a spec makes a codec, before the model is known. */
#include <kvant/calibration.h>

#include <stdbool.h>

#include "codec_internal.h"

/* The first layer's shape, for which a calibrated codec must exist; false when the calibration has
 * no such role. */
static bool first_location(const kvant_calibration *calibration, kvant_role role, uint32_t *layer,
                           uint32_t *head_dim)
{
    kvant_calibration_info info = { .size = sizeof info };
    kvant_calibration_entry entry = { .size = sizeof entry };
    if (kvant_calibration_get_info(calibration, &info) != KVANT_OK)
        return false;
    for (*layer = 0; *layer < info.n_layers; (*layer)++)
        if (kvant_calibration_get_entry(calibration, *layer, 0, role, &entry) == KVANT_OK) {
            *head_dim = entry.head_dim;
            return true;
        }
    return false;
}

/* The head_dims that models use. */
static const uint32_t usual[] = { 128, 64, 96, 80, 256, 512 };

/* Tries to create a codec for each of the n head_dims. Returns KVANT_OK for the first that works,
 * otherwise the status and message of the first. A codec that only lacks a calibration counts as
 * working when site asks for that. */
static kvant_status try_some(const char *spec, kvant_role role, const uint32_t *head_dims, size_t n,
                             const kvant_location *location, const kvant_error *error)
{
    const kvant_error quiet = { NULL, 0 };
    kvant_status first = KVANT_OK;
    for (size_t i = 0; i < n; i++) {
        kvant_codec *codec;
        kvant_status status =
            kvant_codec_create_at(spec, head_dims[i], role, location, &codec, i ? &quiet : error);
        kvant_codec_free(&codec);
        if (status == KVANT_OK || (location->missed && *location->missed))
            return KVANT_OK;
        first = i ? first : status;
    }
    return first;
}

#define N_USUAL (sizeof usual / sizeof usual[0])

kvant_status kvant_codec_check(const char *spec, kvant_role role,
                               const kvant_calibration *calibration, char *err, size_t errlen)
{
    kvant_location location = { .calibration = calibration };
    const kvant_error error = { err, errlen };
    uint32_t head_dim;
    if (calibration && first_location(calibration, role, &location.layer, &head_dim))
        return try_some(spec, role, &head_dim, 1, &location, &error);
    location.layer = 0;
    return try_some(spec, role, usual, N_USUAL, &location, &error);
}

kvant_status kvant_codec_needs_calibration(const char *spec, kvant_role role, int *needed,
                                           char *err, size_t errlen)
{
    bool missed = false;
    const kvant_location location = { .missed = &missed };
    const kvant_error error = { err, errlen };
    if (!needed)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "the argument that receives the answer is NULL");
    KVANT_FORWARD(try_some(spec, role, usual, N_USUAL, &location, &error));
    *needed = missed;
    return KVANT_OK;
}
