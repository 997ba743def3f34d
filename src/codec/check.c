/* check.c - kvant_codec_check: whether a spec makes a codec, before the model is known. */
#include <kvant/calibration.h>

#include <stdbool.h>

#include "codec_internal.h"

/* The first layer's shape, for which a calibrated codec must exist; false when the calibration has
 * no such role. */
static bool first_site(const kvant_calibration *calibration, kvant_role role, uint32_t *layer, uint32_t *head_dim)
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

static kvant_status try(const char *spec, kvant_role role, uint32_t head_dim, const kvant_calibration *calibration,
                        uint32_t layer, char *err, size_t errlen)
{
    kvant_codec *codec;
    kvant_status status =
        kvant_codec_create_calibrated(spec, head_dim, role, 0, calibration, layer, 0, &codec, err, errlen);
    kvant_codec_free(&codec);
    return status;
}

/* The head_dims that models use. */
static const uint32_t usual[] = { 128, 64, 96, 80, 256, 512 };

kvant_status kvant_codec_check(const char *spec, kvant_role role, const kvant_calibration *calibration, char *err,
                               size_t errlen)
{
    uint32_t layer, head_dim;
    if (calibration && first_site(calibration, role, &layer, &head_dim))
        return try(spec, role, head_dim, calibration, layer, err, errlen);
    kvant_status first = try(spec, role, usual[0], calibration, 0, err, errlen);
    for (size_t i = 1; first != KVANT_OK && i < sizeof usual / sizeof usual[0]; i++)
        if (try(spec, role, usual[i], calibration, 0, NULL, 0) == KVANT_OK)
            return KVANT_OK;
    return first;
}

kvant_status kvant_codec_needs_calibration(const char *spec, kvant_role role, int *needed, char *err, size_t errlen)
{
    bool missed = false;
    const kvant_site site = { .missed = &missed };
    kvant_error error = { err, errlen };
    kvant_status first = KVANT_OK;
    if (!needed)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT, "no place for the answer");
    for (size_t i = 0; i < sizeof usual / sizeof usual[0]; i++) {
        const kvant_error quiet = { NULL, 0 };
        kvant_codec *codec;
        kvant_status status = kvant_codec_create_at(spec, usual[i], role, &site, &codec, i ? &quiet : &error);
        kvant_codec_free(&codec);
        if (status == KVANT_OK || missed) {
            *needed = missed;
            return KVANT_OK;
        }
        first = i ? first : status;
    }
    return first;
}
