/* codec_internal.h - what a codec is made of, and what a family has to provide.
 *
 * A family (int.c, turboquant.c, ...) parses its options, fills a kvant_codec and names a quantiser. codec.c does the
 * rest: checking rows, transforms, the public functions. To add a family: one file, one line in registry.c. */
#ifndef KVANT_CODEC_INTERNAL_H
#define KVANT_CODEC_INTERNAL_H

#include "../kernels/kernels.h"
#include "spec.h"
#include "transform.h"

/* The rows that encode was given; row i is token first + i. */
typedef struct kvant_rows {
    const float *center;
    const float *data;
    size_t stride;
    bool transformed; /* data holds y already: an open page is being sealed */
} kvant_rows;

/* All rows here are transformed ones, y, of head_dim floats. */
typedef struct kvant_quantizer {
    /* Whether a row can be encoded: KVANT_OK or KVANT_ERR_RANGE. Called only for rows with large numbers. */
    kvant_status (*check)(const kvant_codec *codec, const float *y);
    /* Encodes block_tokens rows, starting at row i of rows, as tokens token ... of the page. Cannot fail. */
    void (*encode)(const kvant_codec *codec, const kvant_rows *rows, size_t i, uint32_t token, void *page);
    /* Decodes one token. */
    void (*decode)(const kvant_codec *codec, const void *page, uint32_t token, float *y);
    /* Unpacks a whole page, scaled, into the tile of kernels.h; padding channels of K are zero. */
    void (*unpack)(const kvant_codec *codec, const kvant_kernels *kernels, const void *page, float *tile);
} kvant_quantizer;

typedef struct kvant_uniform {
    uint32_t group, n_groups; /* channels a group and groups a token; per channel: tokens a group, groups a page */
    uint32_t levels;          /* the largest code (asym) or the largest magnitude (sym) */
    bool symmetric, per_channel;
    float offset; /* code + offset is the number before scale and zero */
} kvant_uniform;

typedef struct kvant_codebook {
    float values[256];     /* increasing; entries beyond 2^bits are zero, kernels read 32 at least */
    float thresholds[256]; /* thresholds[i] = (values[i] + values[i+1]) / 2 */
    float inverse_sqrt_dim;
    bool unbiased;
} kvant_codebook;

typedef enum kvant_raw { KVANT_RAW_F32, KVANT_RAW_F16, KVANT_RAW_BF16 } kvant_raw;

struct kvant_codec {
    kvant_codec_info info;
    char spec[KVANT_SPEC_MAX_LENGTH + 129]; /* canonical */
    kvant_transform transform;
    bool borrows_transform;
    kvant_layout layout;
    const kvant_quantizer *quantizer;
    union {
        kvant_uniform uniform;
        kvant_codebook codebook;
        kvant_raw raw;
    } u;
};

/* Completes info and layout: bits planes of codes (0: raw), metadata_halves fp16 numbers of metadata, raw_bytes of
 * code plane for raw codecs. */
void kvant_codec_set_sizes(kvant_codec *codec, uint32_t bits, size_t metadata_halves, size_t raw_bytes);

/* y = R (x - c) for row i. */
void kvant_codec_transform_row(const kvant_codec *codec, const kvant_rows *rows, size_t i, float *y);

/* The codec of open pages: the same transform, then fp16, so that open and sealed pages share queries and sums. Borrows the
 * transform's matrix: codec must outlive it. */
kvant_status kvant_codec_create_open(const kvant_codec *codec, kvant_codec **open);

/* Seals: encodes 64 transformed rows, data contiguous with stride head_dim. Errors as kvant_codec_encode. */
kvant_status kvant_codec_seal(const kvant_codec *codec, const float *transformed, void *page);

/* Decodes a token without undoing the transform. */
void kvant_codec_decode_transformed(const kvant_codec *codec, const void *page, uint32_t token, float *y);

/* The 64 fp16 numbers of a per-token metadata array, in tile order. */
void kvant_codec_token_metadata(const kvant_kernels *kernels, const uint16_t *array, float *positioned);

/* Unpacks a page for attention (public codecs only see rows): tile of padded_dim x 64 floats, aligned to 64. */
void kvant_codec_unpack(const kvant_codec *codec, const kvant_kernels *kernels, const void *page, float *tile);

typedef struct kvant_family {
    kvant_codec_family info;
    /* Fills codec, whose info has head_dim and role. Options that it did not read are refused afterwards. */
    kvant_status (*create)(kvant_codec *codec, kvant_spec *spec, uint64_t seed, const kvant_error *error);
} kvant_family;

/* NULL when there is none of that name. */
const kvant_family *kvant_family_find(const char *name);

/* Makes codec one of f16 rows behind the transform it already has. */
void kvant_codec_make_f16(kvant_codec *codec);

kvant_status kvant_create_raw(kvant_codec *codec, kvant_spec *spec, uint64_t seed, const kvant_error *error);
kvant_status kvant_create_int(kvant_codec *codec, kvant_spec *spec, uint64_t seed, const kvant_error *error);
kvant_status kvant_create_bdr(kvant_codec *codec, kvant_spec *spec, uint64_t seed, const kvant_error *error);
kvant_status kvant_create_turboquant(kvant_codec *codec, kvant_spec *spec, uint64_t seed, const kvant_error *error);

#endif
