/* site.c - see site.h. */
#include "site.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"

static kvant_status wrong_shape(const kvant_codec *codec, const kvant_site *site, kvant_role role,
                                const kvant_error *error)
{
    kvant_calibration_info info = { .size = sizeof info };
    KVANT_FORWARD(kvant_calibration_get_info(site->calibration, &info));
    return kvant_fail(
        error, KVANT_ERR_ARGUMENT,
        "the calibration (of %s: %u layers, %u kv heads, head_dim %u) has no %s of layer %u, kv head %u, "
        "head_dim %u: it was made for another model",
        info.model[0] ? info.model : "an unnamed model", (unsigned)info.n_layers, (unsigned)info.n_kv_heads,
        (unsigned)info.head_dim, role == KVANT_ROLE_K ? "keys" : "values", (unsigned)site->layer,
        (unsigned)site->kv_head, (unsigned)codec->info.head_dim);
}

kvant_status kvant_site_entry(const kvant_codec *codec, const kvant_site *site, kvant_role role, const char *what,
                              kvant_calibration_entry *entry, const kvant_error *error)
{
    if (!site->calibration && site->missed)
        *site->missed = true;
    if (!site->calibration)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "%s needs a calibration file and there is none: make one with "
                          "kvant calibrate -m MODEL -f TEXT -o FILE",
                          what);
    *entry = (kvant_calibration_entry){ .size = sizeof *entry };
    kvant_status status = kvant_calibration_get_entry(site->calibration, site->layer, site->kv_head, role, entry);
    if (status != KVANT_OK || entry->head_dim != codec->info.head_dim)
        return wrong_shape(codec, site, role, error);
    return KVANT_OK;
}

static void fill_scale(const kvant_calibration_entry *entry, const float *center, float *scale)
{
    float largest = 0;
    for (uint32_t j = 0; j < entry->head_dim; j++) {
        float c = center ? center[j] : 0, low = fabsf(entry->min[j] - c), high = fabsf(entry->max[j] - c);
        scale[j] = sqrtf(low > high ? low : high);
        largest = scale[j] > largest ? scale[j] : largest;
    }
    for (uint32_t j = 0; j < entry->head_dim; j++)
        scale[j] = largest == 0 ? 1 : scale[j] < largest / 256 ? largest / 256 : scale[j];
}

kvant_status kvant_site_fill(kvant_codec *codec, const kvant_site *site, const kvant_error *error)
{
    bool center = codec->info.center == KVANT_CENTER_FILE, scale = codec->info.norm == KVANT_NORM_FILE;
    kvant_calibration_entry entry;
    if (!center && !scale)
        return KVANT_OK;
    KVANT_FORWARD(
        kvant_site_entry(codec, site, codec->info.role, center ? "center=file" : "norm=file", &entry, error));
    codec->file_center = center ? kvant_alloc(entry.head_dim, sizeof(float)) : NULL;
    codec->file_scale = scale ? kvant_alloc(entry.head_dim, sizeof(float)) : NULL;
    KVANT_RETURN_IF((center && !codec->file_center) || (scale && !codec->file_scale), KVANT_ERR_MEMORY);
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
