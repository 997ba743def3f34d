/* trellis_book.h - the tables of trellis codes, and the order of a row's channels as steps
 * (format.md, "Trellis codes"). */
#pragma once

#include "codec_internal.h"

typedef struct kvant_trellis_book {
    kvant_trellis trellis;
    float values[KVANT_TRELLIS_MAX_LEVELS]; /* levels in standard deviations */
    float unit;                             /* of a level */
    float inverse_sqrt_dim;
    bool unbiased;
} kvant_trellis_book;

static inline const kvant_trellis_book *kvant_trellis_book_of(const kvant_codec *codec)
{
    return codec->state;
}

/* Makes the book for codes of 2 to 4 bits in a layout. */
void kvant_trellis_book_init(kvant_trellis_book *book, const kvant_layout *layout);

/* Chooses the codes of n numbers y * inverse, whose variance should be about 1, and the indices of
 * their levels. Number i belongs to step steps[i] of a circle of n_steps, at most
 * KVANT_TRELLIS_MAX_STEPS. Steps without a number get code 0. */
void kvant_trellis_quantize(const kvant_trellis *trellis, const kvant_kernels *kernels,
                            const float *y, float inverse, uint32_t n, const uint16_t *steps,
                            uint32_t n_steps, uint8_t *restrict codes, uint8_t *restrict levels);
