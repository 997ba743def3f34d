/* qjl.h - a sketch of a quantiser's residual r = y - decoded y (QJL): the signs of a random
 * projection of r, 1 bit per channel. With the sketch, inner products are unbiased. Families with
 * the option `qjl` use it (turboquant, octopus).
 *
 * Owns the projection, a plane of signs and an array of residual norms in the page; knows nothing
 * of the quantiser's codes. format.md, "Residual sketch", has the formulas. */
#pragma once

#include "../codec_internal.h"

/* The options qjl and sketch of a struct that has both. */
#define KVANT_QJL_OPTIONS(type)                                                                    \
    KVANT_FLAG(type, qjl, "a sketch of one bit of what codes leave"),                              \
        KVANT_CHOICE(type, sketch, kvant_sketch_names, KVANT_OPTION_ABSENT,                        \
                     "projection of the sketch")
extern const char *const kvant_sketch_names[];

typedef enum kvant_sketch {
    KVANT_SKETCH_NONE = 0,
    KVANT_SKETCH_HADAMARD = 1,
    KVANT_SKETCH_GAUSSIAN = 2
} kvant_sketch;

typedef struct kvant_qjl {
    kvant_sketch sketch;
    kvant_transform projection; /* R', or S / sqrt(head_dim) as a dense matrix */
    kvant_layout
        signs; /* 1 bit per channel, in a code plane that starts at codes_offset of the page */
    size_t codes_offset, norms_offset;
    float inverse_sqrt_dim;
} kvant_qjl;

/* Returns the sketch that the options ask for, KVANT_SKETCH_NONE without qjl. Fills in *scale and
 * *option where they are absent: the preset with a sketch is scale=norm, because the sketch removes
 * its bias. */
kvant_status kvant_qjl_resolve(int32_t qjl, int32_t *option, int32_t *scale, kvant_sketch *sketch,
                               const kvant_error *error);

/* Floats that the projection's matrix needs; they belong to the family's state, behind its
 * struct. */
size_t kvant_qjl_matrix_floats(kvant_sketch sketch, uint32_t head_dim);

/* Builds the projection from the codec's seed. sketch is not KVANT_SKETCH_NONE. */
kvant_status kvant_qjl_init(kvant_qjl *qjl, kvant_sketch sketch, uint32_t head_dim, uint64_t seed,
                            float *matrix);

/* `kvant_codec_set_page` for codecs with a sketch. The page has code_bytes of other codes, then the
 * sketch's signs, and metadata_bytes of other metadata, then the residual norms. In the codec's
 * info, bits and nominal_bits become bits + 1. */
void kvant_qjl_set_page(kvant_qjl *qjl, kvant_codec *codec, uint32_t bits, size_t code_bytes,
                        size_t metadata_bytes);

/* Writes the sketch into the view's general form. */
void kvant_qjl_set_view(const kvant_qjl *qjl, kvant_codec *codec);

/* Whether the residual's norm fits fp16. */
bool kvant_qjl_fits(const kvant_qjl *qjl, const float *residual);

/* Stores the sketch of a residual of head_dim floats. */
void kvant_qjl_encode(const kvant_qjl *qjl, const kvant_kernels *kernels, const float *residual,
                      uint32_t token, void *page);

/* y += the residual's estimate. */
void kvant_qjl_add(const kvant_qjl *qjl, const kvant_kernels *kernels, const void *page,
                   uint32_t token, float *y);
