/* book.h - the codebooks of an index: levels are small integers, so that products are exact.
 *
 * Levels come within 0.3 % of the smallest mean squared error of a normal number (Lloyd-Max): they
 * are the integers for which a search over all steps found the smallest error. */
#pragma once

#include "../kernels/kernels.h"

typedef struct kvant_book {
    kvant_pack_format format;
    float step;           /* of levels, for numbers of variance 1 */
    float thresholds[32]; /* between levels, in steps; none at 8 bits */
    float values[256];    /* levels of codes */
} kvant_book;

/* bits: 1, 2, 3, 4 or 8. */
void kvant_book_init(kvant_book *book, uint32_t bits, uint32_t dim);

/* Codes of x, n numbers, times inverse: in steps. */
void kvant_book_encode(const kvant_book *book, const kvant_kernels *kernels, const float *x, uint32_t n,
                       float inverse, uint8_t *codes);
