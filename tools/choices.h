/* choices.h - the sources of codecs besides specs: presets, settings files, and the calibration
 * file beside a model. */
#ifndef KVANT_TOOLS_CHOICES_H
#define KVANT_TOOLS_CHOICES_H

#include <kvant/calibration.h>
#include <kvant/settings.h>
#include <stdbool.h>
#include <stddef.h>

/* option names where the name came from. False after complaining. */
bool choose_preset(const char *option, const char *name, bool calibrated, kvant_preset *preset);

/* A settings file and the calibration that belongs to it. */
typedef struct settings_file {
    kvant_settings *settings;       /* NULL: none */
    kvant_calibration *calibration; /* NULL: it needs none, or has the given one */
} settings_file;

/* Loads and checks both. given (or NULL) is a calibration that the user named: it is taken where it
 * is the file's own, else that beside the file. False after complaining; *file is then empty. */
bool settings_file_load(const char *option, const char *path, const kvant_calibration *given, settings_file *file);
void settings_file_free(settings_file *file);

/* What lies behind the last slash. */
const char *file_name(const char *path);

/* Whether a codec of these specs cannot be made without a calibration; v may be NULL. */
bool needs_calibration(const char *k, const char *v);

/* What a layer has, as it is shown: its spec, or "a | b", those of its kv heads in order; the
 * caller frees it. NULL without memory. */
char *layer_specs(const kvant_settings_layer *layer);

/* True bits of a codec (made->spec), calibrated or not (NULL). False after complaining. */
bool codec_true_bits(const kvant_settings_layer *made, kvant_role role, uint32_t layer,
                     const kvant_calibration *calibration, double *bits);

/* Looks for model.kvcal beside model.gguf, says on stderr that it is used and writes its path.
 * *calibration stays NULL where there is none, or where it cannot be used, which is said, too:
 * another model's, or damaged. */
void calibration_beside(const char *model, char *path, size_t bytes, kvant_calibration **calibration);

#endif /* KVANT_TOOLS_CHOICES_H */
