/* settings.h - which codecs to use: the settings file `model.kvant`, which gives the keys and values of every layer of one model, or
 * of every kv head, a codec, and presets for any model.
 *
 * `kvant tune` writes settings files; commands take them with --config, the llama.cpp plug-in as KVANT_CONFIG. The format is text,
 * described in docs/tuning.md: lines that one can read and compare, with a version first and a checksum last.
 *
 * A kvant_settings is immutable: any number of threads may read it.
 */
#ifndef KVANT_SETTINGS_H
#define KVANT_SETTINGS_H

#include <kvant/codec.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVANT_SETTINGS_MAX_BYTES (4u << 20) /* of a file; a larger one is refused unread */
#define KVANT_SETTINGS_MAX_LAYERS 4096u
#define KVANT_SETTINGS_MAX_KV_HEADS 4096u
#define KVANT_SETTINGS_MAX_SPECS 16384u /* of all layers: one where kv heads have the same, else one a kv head */
#define KVANT_SETTINGS_MAX_PATH 1023u   /* bytes of the calibration's name in the file */

typedef struct kvant_settings kvant_settings;

/* One layer's keys or values. */
typedef struct kvant_settings_layer {
    const char *spec; /* of all kv heads, up to 255 bytes, see kvant_codec_create; NULL where they differ */
    uint32_t n_kv_heads, head_dim;
    const char *const *heads; /* a spec for each kv head where spec is NULL, else NULL */
} kvant_settings_layer;

typedef struct kvant_settings_config {
    size_t size;                        /* set by the caller to sizeof(kvant_settings_config) */
    const char *model;                  /* up to 255 bytes of UTF-8; control characters become blanks; NULL: "" */
    uint64_t model_fingerprint;         /* as calibrations have it; 0: none */
    uint32_t n_layers;                  /* 1 to KVANT_SETTINGS_MAX_LAYERS */
    const kvant_settings_layer *layers; /* 2 n_layers: keys of layer l at 2 l, its values at 2 l + 1; copied */
    /* The calibration file that the codecs need, as the settings file names it: a path from the settings file's folder, or
     * an absolute one, without control characters. NULL: they need none, and the checksum is ignored. */
    const char *calibration;
    uint64_t calibration_checksum; /* kvant_calibration_info's */
} kvant_settings_config;

typedef struct kvant_settings_info {
    size_t size;       /* set by the caller to sizeof(kvant_settings_info) */
    const char *model; /* this and calibration are owned by the settings */
    uint64_t model_fingerprint;
    uint32_t n_layers;
    const char *calibration; /* or NULL */
    uint64_t calibration_checksum;
} kvant_settings_info;

/* Makes settings from numbers. Specs must follow the grammar; whether they make codecs is kvant_settings_check's business.
 * KVANT_ERR_ARGUMENT or KVANT_ERR_SPEC with a line in err (when errlen > 0), KVANT_ERR_MEMORY; *settings is then NULL. */
KVANT_API kvant_status kvant_settings_create(const kvant_settings_config *config, kvant_settings **settings,
                                             char *err, size_t errlen);

/* Reads a file whole. KVANT_ERR_FORMAT when it is damaged, changed by hand, of another version, or lacks a layer: err names the line;
 * KVANT_ERR_IO when it cannot be read; KVANT_ERR_MEMORY. *settings is then NULL. */
KVANT_API kvant_status kvant_settings_load(const char *path, kvant_settings **settings, char *err, size_t errlen);

/* Writes a file: a temporary one beside path, flushed to disk, then renamed, so that path never holds half of one.
 * KVANT_ERR_IO when that fails (the old file, if any, is then still there), KVANT_ERR_ARGUMENT when it would be longer than
 * KVANT_SETTINGS_MAX_BYTES, KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_settings_save(const kvant_settings *settings, const char *path, char *err,
                                           size_t errlen);

/* Frees *settings and sets it to NULL; NULL and a pointer to NULL are fine. */
KVANT_API void kvant_settings_free(kvant_settings **settings);

/* Fills *info, whose size field must be set. */
KVANT_API kvant_status kvant_settings_get_info(const kvant_settings *settings, kvant_settings_info *info);

/* Fills *entry; its specs live as long as the settings. KVANT_ERR_ARGUMENT when there is no such layer. */
KVANT_API kvant_status kvant_settings_get_layer(const kvant_settings *settings, uint32_t layer, kvant_role role,
                                                kvant_settings_layer *entry);

/* Where the settings' calibration lies: the path in the file, from the file's folder. "" when they need none. KVANT_ERR_ARGUMENT
 * when it does not fit bytes, or when the settings come from no file and the path is not absolute. */
KVANT_API kvant_status kvant_settings_calibration_path(const kvant_settings *settings, char *path, size_t bytes);

/* Loads the calibration that the settings were made with: from path or, when that is NULL, from where the settings file says,
 * beside itself. *calibration becomes NULL, with KVANT_OK, when they need none. KVANT_ERR_ARGUMENT when the file is another
 * calibration than theirs, or when path is NULL and the settings come from no file; else as kvant_calibration_load. */
KVANT_API kvant_status kvant_settings_load_calibration(const kvant_settings *settings, const char *path,
                                                       kvant_calibration **calibration, char *err, size_t errlen);

/* Whether every spec makes a codec for its layer's shape with the calibration (or NULL), and those of a layer fit together in one
 * cache (kvant_codecs_fit_together): KVANT_OK, or what kvant_codec_create_calibrated says of the first that does not, with layer
 * and role before it. Settings that need a calibration take theirs and no other: KVANT_ERR_ARGUMENT; those that need none ignore
 * it. Takes as long as creating each different codec once, and all of layers whose kv heads differ. */
KVANT_API kvant_status kvant_settings_check(const kvant_settings *settings, const kvant_calibration *calibration,
                                            char *err, size_t errlen);

/* A pair of codecs under a name, for those who do not want to choose. */
typedef struct kvant_preset {
    size_t size;      /* set by the caller to sizeof(kvant_preset) */
    const char *name; /* this and what follows is constant */
    const char *summary;
    const char *k, *v; /* specs */
} kvant_preset;

#define KVANT_PRESET_NAMES "quality, balanced or small" /* all there are, for messages */
#define KVANT_PRESET_DEFAULT "balanced"                 /* where nothing is asked for */

/* Fills *preset, whose size field must be set. calibrated: not 0 where there is a calibration, which the specs then need.
 * KVANT_ERR_ARGUMENT when there is none of this name. */
KVANT_API kvant_status kvant_preset_get(const char *name, int calibrated, kvant_preset *preset);

#ifdef __cplusplus
}
#endif

#endif /* KVANT_SETTINGS_H */
