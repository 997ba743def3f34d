/* codebook.h - Lloyd-Max codebooks with one scale per row: the quantiser of the turboquant
 * variants. */
#pragma once

#include "codec_internal.h"

typedef struct kvant_codebook {
    float values[256]; /* increasing; entries beyond 2^bits are zero, kernels read 32 at least */
    float thresholds[256]; /* thresholds[i] = (values[i] + values[i+1]) / 2 */
    float inverse_sqrt_dim;
    bool unbiased;
    uint32_t dim, bits;
    float code_step; /* the step of the 16-bit integers that stand for the values in attention */
} kvant_codebook;

/* First member of the state of turboquant codecs without tiers. */
static inline const kvant_codebook *kvant_codebook_of(const kvant_codec *codec)
{
    return codec->state;
}

/* The codebook for rows of dim numbers (4 or more), bits 1 .. 8; scale=norm. */
void kvant_codebook_init(kvant_codebook *book, uint32_t dim, uint32_t bits);

/* Codes of a row of dim numbers; returns the scale to store, before it is rounded to fp16. */
float kvant_codebook_quantize(const kvant_codebook *book, const kvant_kernels *kernels,
                              const float *y, uint8_t *codes);

/* Whether the row has a code: both scales that quantize computes fit fp16. */
bool kvant_codebook_fits(const kvant_codebook *book, const kvant_kernels *kernels, const float *y);

/* Says where the codebook's arrays lie in the codec's state, for the view. */
kvant_codebook_position kvant_codebook_get_position(const kvant_codec *codec,
                                                    const kvant_codebook *book);

/* y[j] = scale * values[codes[j]] */
void kvant_codebook_decode(const kvant_codebook *book, const uint8_t *codes, float scale, float *y);
