/* choices.c - see choices.h. */
#define _POSIX_C_SOURCE 200809L
#include "choices.h"

#include "command.h"
#include "fingerprint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool choose_preset(const char *option, const char *name, bool calibrated, kvant_preset *preset)
{
    *preset = (kvant_preset){ .size = sizeof *preset };
    if (kvant_preset_get(name, calibrated, preset) == KVANT_OK)
        return true;
    complain("%s: there is no preset '%s'", option, name);
    hint("%s", KVANT_PRESET_NAMES);
    return false;
}

const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* What a settings file's codecs are checked with, or NULL with a reason when it cannot be had; one that is needed and was not
 * given is loaded into the file. */
static const kvant_calibration *calibration_of(settings_file *file, const kvant_calibration *given, char *err,
                                               size_t errlen)
{
    kvant_settings_info info = { .size = sizeof info };
    kvant_calibration_info own = { .size = sizeof own };
    kvant_settings_get_info(file->settings, &info);
    if (given != NULL && kvant_calibration_get_info(given, &own) == KVANT_OK &&
        own.checksum == info.calibration_checksum)
        return given;
    kvant_settings_load_calibration(file->settings, NULL, &file->calibration, err, errlen);
    return file->calibration;
}

bool settings_file_load(const char *option, const char *path, const kvant_calibration *given, settings_file *file)
{
    char err[1024] = "";
    *file = (settings_file){ .settings = NULL };
    if (kvant_settings_load(path, &file->settings, err, sizeof err) == KVANT_OK) {
        const kvant_calibration *calibration = calibration_of(file, given, err, sizeof err);
        if (err[0] == 0 && kvant_settings_check(file->settings, calibration, err, sizeof err) == KVANT_OK)
            return true;
    }
    complain("%s %s: %s", option, path, err);
    hint("kvant tune makes such files; one belongs to one model and one calibration");
    settings_file_free(file);
    return false;
}

void settings_file_free(settings_file *file)
{
    kvant_settings_free(&file->settings);
    kvant_calibration_free(&file->calibration);
}

static bool spec_needs_calibration(const char *spec, kvant_role role)
{
    int needed = 0;
    return spec != NULL && kvant_codec_needs_calibration(spec, role, &needed, NULL, 0) == KVANT_OK && needed;
}

bool needs_calibration(const char *k, const char *v)
{
    return spec_needs_calibration(k, KVANT_ROLE_K) || spec_needs_calibration(v, KVANT_ROLE_V);
}

char *layer_specs(const kvant_settings_layer *layer)
{
    const uint32_t n = layer->heads != NULL ? layer->n_kv_heads : 1;
    const char *const *specs = layer->heads != NULL ? layer->heads : &layer->spec;
    size_t room = 1, used = 0;
    for (uint32_t head = 0; head < n; head++)
        room += strlen(specs[head]) + 3;
    char *text = calloc(room, 1);
    for (uint32_t head = 0; text != NULL && head < n; head++)
        used += (size_t)snprintf(text + used, room - used, "%s%s", head > 0 ? " | " : "", specs[head]);
    return text;
}

bool codec_true_bits(const kvant_settings_layer *made, kvant_role role, uint32_t layer,
                     const kvant_calibration *calibration, double *bits)
{
    char err[512] = "";
    kvant_codec *codec = NULL;
    kvant_codec_info info = { .size = sizeof info };
    kvant_status status = kvant_codec_create_calibrated(made->spec, made->head_dim, role, 0, calibration, layer, 0,
                                                        &codec, err, sizeof err);
    if (status == KVANT_OK)
        status = kvant_codec_get_info(codec, &info);
    kvant_codec_free(&codec);
    if (status != KVANT_OK)
        complain("%s at head_dim %lu: %s", made->spec, (unsigned long)made->head_dim,
                 err[0] != 0 ? err : kvant_strerror(status));
    *bits = info.true_bits;
    return status == KVANT_OK;
}

/* model.gguf to model.kvcal; false when the name is too long. */
static bool beside(const char *model, char *path, size_t bytes)
{
    const size_t length = strlen(model), ending = sizeof ".gguf" - 1;
    const bool has_ending = length > ending && strcmp(model + length - ending, ".gguf") == 0;
    const int n = snprintf(path, bytes, "%.*s.kvcal", (int)(has_ending ? length - ending : length), model);
    return n > 0 && (size_t)n < bytes;
}

/* A calibration that was found beside a model must match the model exactly; a matching shape is
 * not enough. */
static bool is_of(const kvant_calibration *calibration, const char *model)
{
    kvant_calibration_info info = { .size = sizeof info };
    return kvant_calibration_get_info(calibration, &info) == KVANT_OK && info.model_fingerprint != 0 &&
           info.model_fingerprint == fingerprint_file(model);
}

void calibration_beside(const char *model, char *path, size_t bytes, kvant_calibration **calibration)
{
    char err[512] = "";
    *calibration = NULL;
    if (model == NULL || !beside(model, path, bytes) || access(path, F_OK) != 0)
        return;
    if (kvant_calibration_load(path, calibration, err, sizeof err) != KVANT_OK) {
        complain("%s is not used: %s", path, err);
        return;
    }
    if (is_of(*calibration, model)) {
        fprintf(stderr, "kvant: using the calibration %s\n", path);
        return;
    }
    kvant_calibration_free(calibration);
    complain("%s is not used: it was made with another file than %s", path, file_name(model));
    hint("--calibration %s takes it all the same; kvant calibrate makes it anew", path);
}
