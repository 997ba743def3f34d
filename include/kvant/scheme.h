/* scheme.h - which codec stores each (layer, kv head, role) of a model.
 *
 * A scheme comes from a preset, from specs, or from a settings file, with or without a calibration.
 * A scheme does not need the model's shape. An engine that must know sizes before head_dim is known
 * asks for the largest size that any head_dim gives (kvant_scheme_most_bytes).
 *
 * A scheme never changes for its users. Any number of caches, tensors and threads may share it. It
 * makes a codec when the codec is first requested, keeps all codecs, and must outlive everything
 * that uses them.
 */
#ifndef KVANT_SCHEME_H
#define KVANT_SCHEME_H

#include <kvant/settings.h>
#include <kvant/tensor.h>

KVANT_BEGIN_C

typedef struct kvant_scheme kvant_scheme;

/* A scheme is made from one of three: preset, k and v, or settings. Without any, the preset is
 * KVANT_PRESET_DEFAULT. Strings are copied. */
typedef struct kvant_scheme_params {
    size_t size; /* set by the caller to sizeof(kvant_scheme_params) */
    const char *preset;
    const char *k, *v;         /* codec specs; one spec alone serves both roles */
    const char *settings;      /* path of a settings file */
    const char *calibration;   /* path of a calibration, or NULL; a settings file names its own */
    const char *protect_codec; /* spec of the protected layers; NULL: f16 */
    uint32_t protect;          /* the first `protect` layers and as many last layers use it */
    uint64_t seed;             /* of random signs and rotations */
    /* The path of the model's file, or NULL. It matters when no calibration is named and a codec or
     * the preset can use one. Then the scheme uses model.kvcal in the folder of model.gguf, if that
     * calibration was made with exactly this model file. */
    const char *model;
    /* A scheme that outlives this one, or NULL. A calibration that `like` has loaded is not read
     * again. */
    const kvant_scheme *like;
} kvant_scheme_params;

/* Creates a scheme. KVANT_ERR_ARGUMENT, KVANT_ERR_SPEC, KVANT_ERR_UNSUPPORTED (a codec needs a
 * calibration), KVANT_ERR_FORMAT, KVANT_ERR_IO, KVANT_ERR_MEMORY, each with the reason in
 * kvant_error_message(). *scheme is then NULL. */
KVANT_API kvant_status kvant_scheme_create(const kvant_scheme_params *params,
                                           kvant_scheme **scheme);

/* Frees *scheme and sets it to NULL; NULL and a pointer to NULL are fine. */
KVANT_API void kvant_scheme_free(kvant_scheme **scheme);

/* The layer and role that use codecs, and the model's shape there. */
typedef struct kvant_scheme_location {
    size_t size; /* set by the caller to sizeof(kvant_scheme_location) */
    kvant_role role;
    uint32_t layer;
    uint32_t n_layers; /* of the model; 0: not known yet */
    uint32_t n_kv_heads;
    uint32_t head_dim;
    /* For models in which only some layers have a cache: how many such layers come before this
     * layer, and how many there are in all. The first and the last of them are the protected
     * layers. n_cached 0: all layers have a cache. */
    uint32_t rank, n_cached;
} kvant_scheme_location;

/* *codecs = an array of n_kv_heads codecs, which lives as long as the scheme. While n_layers is 0,
 * a protected layer gets the codecs of an ordinary layer. KVANT_ERR_ARGUMENT when a settings file
 * or a calibration belongs to a model of another shape; errors as kvant_codec_create. */
KVANT_API kvant_status kvant_scheme_codecs(kvant_scheme *scheme,
                                           const kvant_scheme_location *location,
                                           const kvant_codec *const **codecs);

/* *head_dim = the head_dim that the settings file or the calibration states for this layer and
 * role. 0: neither states one. */
KVANT_API kvant_status kvant_scheme_head_dim(const kvant_scheme *scheme, uint32_t layer,
                                             kvant_role role, uint32_t *head_dim);

/* The shape of a whole model. */
typedef struct kvant_scheme_model {
    size_t size; /* set by the caller to sizeof(kvant_scheme_model) */
    uint32_t n_layers, n_kv_heads;
    uint32_t head_dim[2]; /* by kvant_role */
} kvant_scheme_model;

/* *bits = true bits per number of the keys and values of all layers, every stored byte counted. A
 * settings file states the shape of every layer. Without a settings file all layers are assumed to
 * have the same shape. KVANT_ERR_ARGUMENT when the settings file is for another model: its number
 * of layers or kv heads differs, or no layer has this head_dim. Errors as kvant_scheme_codecs. */
KVANT_API kvant_status kvant_scheme_true_bits(kvant_scheme *scheme, const kvant_scheme_model *model,
                                              double *bits);

/* Returns the rows that a cache with this scheme keeps as fp16, for kvant_tensor_params.exact.
 *
 *   first, newest   The first 64 and the newest 128 tokens of each sequence. If max_tokens / 16 is
 *                   below 192, there are fewer newest tokens, but at least 64.
 *
 *   total           At most max_tokens / 16 tokens of all sequences together, but at least 128.
 *
 *   step            max_tokens / 8 rows of a write, but at least 64 and at most 512.
 *
 * max_tokens counts the tokens of all sequences. When the scheme was made from specs, all counts
 * are 0, so that a spec alone says which rows stay fp16. KVANT_ERR_ARGUMENT. */
KVANT_API kvant_status kvant_scheme_exact(const kvant_scheme *scheme, uint64_t max_tokens,
                                          uint32_t n_sequences, kvant_exact_part *part);

/* *bytes = the most memory that a tensor of this layer can take, for rows of row_dim = n_kv_heads x
 * head_dim numbers. If head_dim is 0, this is the maximum over every head_dim from 32 on that is a
 * multiple of 8 and divides row_dim. If n_layers is 0, it is the maximum over the codecs of
 * protected and of ordinary layers. params has the remaining parameters of the tensor. */
KVANT_API kvant_status kvant_scheme_most_bytes(kvant_scheme *scheme,
                                               const kvant_scheme_location *location,
                                               uint32_t row_dim, const kvant_tensor_params *params,
                                               size_t *bytes);

typedef struct kvant_scheme_info {
    size_t size;        /* set by the caller to sizeof(kvant_scheme_info) */
    const char *preset; /* its name, or NULL; all pointers live as long as the scheme */
    const char *k, *v;  /* specs of ordinary layers; NULL with a settings file */
    uint32_t protect;
    const kvant_settings *settings;       /* or NULL */
    const kvant_calibration *calibration; /* or NULL */
    bool needs_calibration;               /* some codec could not be made without it */
    /* The calibration that was named or found in the model's folder. NULL: there is none, or the
     * settings file names its own. */
    const char *calibration_path;
    const char *not_used; /* why a calibration in the model's folder is not used; or NULL */
} kvant_scheme_info;

KVANT_API kvant_status kvant_scheme_get_info(const kvant_scheme *scheme, kvant_scheme_info *info);

KVANT_END_C

#endif /* KVANT_SCHEME_H */
