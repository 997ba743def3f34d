/* octopus.h - the codebook of octopus codecs, and quantising one row, for octopus.c.
 * format.md, "Octahedral codes", has formulas and rounding. */
#pragma once

#include "../../page/chunks.h"
#include "../codec_internal.h"

typedef struct octopus_book {
    kvant_triplet_book triplets;
    uint32_t dim, n_triplets;
    float inverse_sqrt_dim;
    bool unbiased, zero_padding;
} octopus_book;

void kvant_octopus_book_init(octopus_book *book, uint32_t dim, uint32_t direction_bits,
                             uint32_t norm_bits);

/* Codes of a row of dim floats, one per triplet; returns the scale to store, not yet rounded. */
float kvant_octopus_quantize(const octopus_book *book, const kvant_kernels *kernels, const float *y,
                             uint32_t *codes);

/* Whether that scale fits fp16. */
bool kvant_octopus_fits(const octopus_book *book, const kvant_kernels *kernels, const float *y);

void kvant_octopus_dequantize(const octopus_book *book, const uint32_t *codes, float scale,
                              float *y);
