/* scheme.h - which codec stores each (layer, kv head, role) of a model.
 *
 * A scheme comes from a preset, from specs, or from a settings file, with or without a calibration.
 * A scheme does not need the model's shape. An engine that must know sizes before head_dim is known
 * asks for the largest size that any head_dim gives (kvant_scheme_most_bytes).
 *
 * A scheme is immutable outwardly and may be shared by any number of caches, tensors and threads.
 * It makes codecs when they are first asked for, keeps them, and must outlive everything that uses
 * them.
 */
#ifndef KVANT_SCHEME_H
#define KVANT_SCHEME_H

#include <kvant/settings.h>
#include <kvant/tensor.h>

KVANT_BEGIN_C

typedef struct kvant_scheme kvant_scheme;

/* One of preset, k and v, or settings; with none of them the preset is KVANT_PRESET_DEFAULT.
 * Strings are copied. */
typedef struct kvant_scheme_params {
    size_t size; /* set by the caller to sizeof(kvant_scheme_params) */
    const char *preset;
    const char *k, *v;         /* codec specs; one alone is that of both roles */
    const char *settings;      /* path of a settings file */
    const char *calibration;   /* path of a calibration, or NULL; a settings file names its own */
    const char *protect_codec; /* spec of the protected layers; NULL: f16 */
    uint32_t protect;          /* that many first and last layers use protect_codec */
    uint64_t seed;             /* of random signs and rotations */
    /* Path of the model's file, or NULL. Where no calibration is named and a codec or the preset
     * takes one, model.kvcal beside model.gguf is used, if it was made with this very file. */
    const char *model;
    /* A scheme that outlives this one, or NULL: a calibration that it has is not read again. */
    const kvant_scheme *like;
} kvant_scheme_params;

/* KVANT_ERR_ARGUMENT, KVANT_ERR_SPEC, KVANT_ERR_UNSUPPORTED (a codec needs a calibration),
 * KVANT_ERR_FORMAT, KVANT_ERR_IO, KVANT_ERR_MEMORY, each with the reason in kvant_error_message().
 * *scheme is then NULL. */
KVANT_API kvant_status kvant_scheme_create(const kvant_scheme_params *params,
                                           kvant_scheme **scheme);

/* Frees *scheme and sets it to NULL; NULL and a pointer to NULL are fine. */
KVANT_API void kvant_scheme_free(kvant_scheme **scheme);

/* Where codecs are used. */
typedef struct kvant_scheme_place {
    size_t size; /* set by the caller to sizeof(kvant_scheme_place) */
    kvant_role role;
    uint32_t layer;
    uint32_t n_layers; /* of the model; 0: not known yet */
    uint32_t n_kv_heads;
    uint32_t head_dim;
    /* Where only some layers have a cache: how many layers with one come before this layer, and how
     * many have one in all. Protected layers are the first and last ones of these. n_cached 0: all
     * layers have one. */
    uint32_t rank, n_cached;
} kvant_scheme_place;

/* *codecs = an array of n_kv_heads codecs, which lives as long as the scheme. With n_layers 0,
 * protected layers are taken for ordinary ones. KVANT_ERR_ARGUMENT when a settings file or
 * calibration is of another model's shape; errors as kvant_codec_create. */
KVANT_API kvant_status kvant_scheme_codecs(kvant_scheme *scheme, const kvant_scheme_place *place,
                                           const kvant_codec *const **codecs);

/* *head_dim = the head_dim that the settings file or the calibration states for this layer and role;
 * 0: none stated. */
KVANT_API kvant_status kvant_scheme_head_dim(const kvant_scheme *scheme, uint32_t layer,
                                             kvant_role role, uint32_t *head_dim);

/* What is known of a model as a whole. */
typedef struct kvant_scheme_model {
    size_t size; /* set by the caller to sizeof(kvant_scheme_model) */
    uint32_t n_layers, n_kv_heads;
    uint32_t head_dim[2]; /* by kvant_role */
} kvant_scheme_model;

/* *bits = true bits per number of the keys and values of all layers, every stored byte counted. A
 * settings file states the shape of every layer; elsewhere all are taken to be alike.
 * KVANT_ERR_ARGUMENT when the settings file is for another model: another number of layers or kv
 * heads, or no layer with such a head_dim. Errors as kvant_scheme_codecs. */
KVANT_API kvant_status kvant_scheme_true_bits(kvant_scheme *scheme, const kvant_scheme_model *model,
                                              double *bits);

/* What a cache with this scheme keeps as fp16, for kvant_tensor_params.exact: the first 64 and the
 * newest 128 tokens of each sequence, of all sequences together at most max_tokens / 16, but never
 * less than 64 and 64; and of a write max_tokens / 8 rows, from 64 to 512. Codecs that were chosen by specs get zeros, so
 * that a spec alone says what stays fp16. max_tokens: of all sequences. KVANT_ERR_ARGUMENT. */
KVANT_API kvant_status kvant_scheme_exact(const kvant_scheme *scheme, uint64_t max_tokens,
                                          uint32_t n_sequences, kvant_exact_part *part);

/* *bytes = the most memory that a tensor of this layer can take, for rows of row_dim = n_kv_heads x
 * head_dim numbers: over every head_dim that is a multiple of 8 from 32 on and divides row_dim, or
 * head_dim alone when it is not 0, and over protected and ordinary codecs while n_layers is 0. The
 * other arguments are kvant_tensor_params'. */
KVANT_API kvant_status kvant_scheme_most_bytes(kvant_scheme *scheme,
                                               const kvant_scheme_place *place, uint32_t row_dim,
                                               const kvant_tensor_params *params, size_t *bytes);

typedef struct kvant_scheme_info {
    size_t size;        /* set by the caller to sizeof(kvant_scheme_info) */
    const char *preset; /* its name, or NULL; this and what follows live as long as the scheme */
    const char *k, *v;  /* specs of ordinary layers; NULL with a settings file */
    uint32_t protect;
    const kvant_settings *settings;       /* or NULL */
    const kvant_calibration *calibration; /* or NULL */
    bool needs_calibration;               /* some codec could not be made without it */
    const char
        *calibration_path; /* named or beside the model; NULL: none, or the settings file's own */
    const char *not_used;  /* of a calibration beside the model, why it is not used; or NULL */
} kvant_scheme_info;

KVANT_API kvant_status kvant_scheme_get_info(const kvant_scheme *scheme, kvant_scheme_info *info);

KVANT_END_C

#endif /* KVANT_SCHEME_H */
