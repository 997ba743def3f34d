/* settings.h - settings files and presets: which codec stores the keys and values of each layer.
 *
 * A settings file `model.kvant` belongs to one model. It names a codec for every (layer, role), or
 * for every (layer, role, kv head). Presets are pairs of codecs that suit any model.
 *
 * `kvant tune` writes settings files. Commands take them with --config, the llama.cpp plug-in takes
 * them in KVANT_CONFIG. The format is text (settings.md): a version in the first line, a
 * checksum in the last.
 *
 * Threads: a kvant_settings never changes, so any number of threads may read it.
 */
#ifndef KVANT_SETTINGS_H
#define KVANT_SETTINGS_H

#include <kvant/codec.h>

KVANT_BEGIN_C

#define KVANT_SETTINGS_MAX_BYTES (4u << 20) /* of a file; a larger file is refused unread */
#define KVANT_SETTINGS_MAX_LAYERS 4096u     /* models have fewer; a larger number is refused */
#define KVANT_SETTINGS_MAX_KV_HEADS 4096u   /* the same */
/* Specs of all layers and roles together. A (layer, role) counts 1 when its kv heads share a spec,
 * and n_kv_heads otherwise. */
#define KVANT_SETTINGS_MAX_SPECS 16384u
#define KVANT_SETTINGS_MAX_PATH 1023u /* bytes of the calibration's path in the file */

typedef struct kvant_settings kvant_settings;

/* The keys or the values of one layer. */
typedef struct kvant_settings_layer {
    const char *spec; /* of all kv heads, at most 255 bytes; NULL: heads has the specs */
    uint32_t n_kv_heads, head_dim;
    const char *const *heads; /* n_kv_heads specs when spec is NULL, otherwise NULL */
} kvant_settings_layer;

typedef struct kvant_settings_config {
    size_t size; /* set by the caller to sizeof(kvant_settings_config) */
    /* at most 255 bytes of UTF-8; control characters become blanks; NULL: "" */
    const char *model;
    uint64_t model_fingerprint;         /* as in kvant_calibration_info; 0: none */
    uint32_t n_layers;                  /* 1 to KVANT_SETTINGS_MAX_LAYERS */
    const kvant_settings_layer *layers; /* 2 n_layers, copied: K of layer l at 2 l, V at 2 l + 1 */
    /* Path of the calibration that the codecs need: absolute, or relative to the folder of the
     * settings file; no control characters. NULL: the codecs need no calibration, and the checksum
     * is ignored. */
    const char *calibration;
    uint64_t calibration_checksum; /* as in kvant_calibration_info */
} kvant_settings_config;

typedef struct kvant_settings_info {
    size_t size;       /* set by the caller to sizeof(kvant_settings_info) */
    const char *model; /* the settings own model and calibration */
    uint64_t model_fingerprint;
    uint32_t n_layers;
    const char *calibration; /* path as in the file, or NULL */
    uint64_t calibration_checksum;
} kvant_settings_info;

/* Creates settings from a config. Specs must follow the grammar. kvant_settings_check tells whether
 * they make codecs.
 * KVANT_ERR_ARGUMENT or KVANT_ERR_SPEC with one line in err (when errlen > 0), KVANT_ERR_MEMORY. On
 * an error *settings is NULL. */
KVANT_API kvant_status kvant_settings_create(const kvant_settings_config *config,
                                             kvant_settings **settings, char *err, size_t errlen);

/* Reads a settings file.
 * KVANT_ERR_FORMAT: the file is damaged, was changed by hand, has another version or lacks a layer;
 * err names the line. KVANT_ERR_IO: the file cannot be read. KVANT_ERR_MEMORY. On an error
 * *settings is NULL. */
KVANT_API kvant_status kvant_settings_load(const char *path, kvant_settings **settings, char *err,
                                           size_t errlen);

/* Writes a settings file. The function writes a temporary file in the folder of path, flushes it to
 * disk and renames it to path. So path never holds half a file, and after an error it holds the old
 * file, if there was one. KVANT_ERR_IO, KVANT_ERR_MEMORY. KVANT_ERR_ARGUMENT: the file would exceed
 * KVANT_SETTINGS_MAX_BYTES. */
KVANT_API kvant_status kvant_settings_save(const kvant_settings *settings, const char *path,
                                           char *err, size_t errlen);

/* Frees *settings and sets it to NULL; NULL and a pointer to NULL are fine. */
KVANT_API void kvant_settings_free(kvant_settings **settings);

/* Fills *info, whose size field must be set. */
KVANT_API kvant_status kvant_settings_get_info(const kvant_settings *settings,
                                               kvant_settings_info *info);

/* Fills *entry. Its specs live as long as the settings. KVANT_ERR_ARGUMENT: there is no such
 * layer. */
KVANT_API kvant_status kvant_settings_get_layer(const kvant_settings *settings, uint32_t layer,
                                                kvant_role role, kvant_settings_layer *entry);

/* Loads the calibration that the settings were made with. It is read from path or, when path is
 * NULL, from the path in the settings. A relative path in the settings starts at the folder of the
 * settings file. When the settings need no calibration, *calibration is NULL and the status
 * KVANT_OK. KVANT_ERR_ARGUMENT: the file holds another calibration, or path is NULL and the
 * settings were not loaded from a file. Other errors as kvant_calibration_load. */
KVANT_API kvant_status kvant_settings_load_calibration(const kvant_settings *settings,
                                                       const char *path,
                                                       kvant_calibration **calibration, char *err,
                                                       size_t errlen);

/* Checks that every spec makes a codec for the shape of its layer with the calibration (or NULL).
 * Also checks that the codecs of a layer fit together in one cache (kvant_codecs_fit_together).
 * KVANT_OK, or the error of kvant_codec_create_calibrated for the first spec that fails; err then
 * begins with layer and role. KVANT_ERR_ARGUMENT: the settings need a calibration and this is
 * another. Settings that need none ignore the argument. Costs one creation per different codec, and
 * n_kv_heads creations per layer whose kv heads differ. */
KVANT_API kvant_status kvant_settings_check(const kvant_settings *settings,
                                            const kvant_calibration *calibration, char *err,
                                            size_t errlen);

/* A preset: a named pair of codecs, a sensible default chosen by measurement (results.md). */
typedef struct kvant_preset {
    size_t size;      /* set by the caller to sizeof(kvant_preset) */
    const char *name; /* all strings are constants */
    const char *summary;
    const char *k, *v;  /* specs */
    const char *more_k; /* spec of the keys of some layers (kvant_preset_spec); NULL: all have k */
} kvant_preset;

#define KVANT_PRESET_NAMES "quality, balanced, small or tiny" /* all presets, for messages */
#define KVANT_PRESET_DEFAULT "balanced" /* used when the caller names no codec */

/* Fills *preset, whose size field must be set. calibrated: not 0 gives the specs for a model with a
 * calibration; these specs need it. KVANT_ERR_ARGUMENT: there is no preset of this name. */
KVANT_API kvant_status kvant_preset_get(const char *name, int calibrated, kvant_preset *preset);

/* The spec of a layer. The scale of a row takes 16 bits, so it takes fewer bits per number when
 * head_dim is above 64. The preset tiny spends the bits that keys and values save this way on keys:
 * (head_dim - 64) / (2 head_dim) of the layers, spread evenly, have keys of 3 bits. So no head_dim
 * above 64 takes more bits per number than 64 does. */
KVANT_API const char *kvant_preset_spec(const kvant_preset *preset, kvant_role role, uint32_t layer,
                                        uint32_t head_dim);

KVANT_END_C

#endif /* KVANT_SETTINGS_H */
