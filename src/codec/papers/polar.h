/* polar.h - angles of recursive polar coordinates, shared by `polar-b` (polar.c: a whole row down
 * to one radius) and `polar-3.9` (polar_blocks.c: blocks of 16 channels with a radius each). */
#pragma once

#include "../../math/polar_angles.h"
#include "../codec_internal.h"

#define KVANT_POLAR_MAX_DEPTH 9 /* 2^9 = KVANT_MAX_HEAD_DIM */

/* Nodes 2 i and 2 i + 1 of a list become node i of the next; a last node without a partner moves on
 * as it is. */
typedef struct kvant_polar_level {
    uint32_t n_pairs;
    bool carry;            /* whether such a last node exists */
    kvant_polar_book book; /* of all pairs but the last */
    kvant_polar_book last; /* the last pair may join parts of different sizes */
} kvant_polar_level;

typedef struct kvant_polar {
    uint32_t dim; /* channels that share one radius */
    /* bits of an angle of the first list; bits of an angle of all further lists; number of lists */
    uint32_t first_bits, bits, depth;
    bool unbiased;
    float sqrt_dim, inverse_sqrt_dim;
    kvant_polar_level
        levels[KVANT_POLAR_MAX_DEPTH]; /* levels[0] joins pairs of numbers: the circle's books */
} kvant_polar;

void kvant_polar_init(kvant_polar *p, uint32_t dim, uint32_t first_bits, uint32_t bits,
                      bool unbiased);

/* dim - 1 codes of dim numbers, list after list; returns the scale to store. */
float kvant_polar_quantize(const kvant_polar *p, const kvant_kernels *kernels, const float *y,
                           uint8_t *codes);

/* Whether that scale, and the norm before, fit fp16. */
bool kvant_polar_fits(const kvant_polar *p, const kvant_kernels *kernels, const float *y);

void kvant_polar_dequantize(const kvant_polar *p, const uint8_t *codes, float scale, float *y);

kvant_status kvant_polar_create_blocks(kvant_codec *codec, bool unbiased, const kvant_error *error);
