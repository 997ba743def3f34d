/* codebook.c - see codebook.h. format.md, "Lloyd-Max codes", has formulas and rounding. */
#include "codebook.h"

#include <math.h>

#include "../base/half.h"
#include "../math/lloyd_max.h"

float kvant_codebook_quantize(const kvant_codebook *book, const kvant_kernels *kernels,
                              const float *y, uint8_t *codes)
{
    float squares = kernels->dot(y, y, book->dim);
    float scale =
        kvant_half_to_float(kvant_half_from_float(sqrtf(squares) * book->inverse_sqrt_dim));
    kernels->codebook_codes(y, book->dim, scale > 0 ? 1 / scale : 0, book->thresholds, book->bits,
                            codes);
    if (!book->unbiased || !(scale > 0))
        return scale;
    float product = kernels->dot_codes(y, codes, book->dim, book->values, book->bits);
    return product > 0 ? squares / product : 0;
}

bool kvant_codebook_fits(const kvant_codebook *book, const kvant_kernels *kernels, const float *y)
{
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    float squares = kernels->dot(y, y, book->dim);
    return sqrtf(squares) * book->inverse_sqrt_dim <= KVANT_HALF_MAX &&
           kvant_codebook_quantize(book, kernels, y, codes) <= KVANT_HALF_MAX;
}

void kvant_codebook_decode(const kvant_codebook *book, const uint8_t *codes, float scale, float *y)
{
    for (uint32_t j = 0; j < book->dim; j++)
        y[j] = scale * book->values[codes[j]];
}

void kvant_codebook_init(kvant_codebook *book, uint32_t dim, uint32_t bits)
{
    *book = (kvant_codebook){ .dim = dim,
                              .bits = bits,
                              .inverse_sqrt_dim = (float)(1 / sqrt((double)dim)) };
    kvant_lloyd_max(dim, bits, book->values);
    for (uint32_t i = 0; i + 1 < 1u << bits; i++)
        book->thresholds[i] = (book->values[i] + book->values[i + 1]) / 2;
}

kvant_codebook_position kvant_codebook_get_position(const kvant_codec *codec,
                                                    const kvant_codebook *book)
{
    return (kvant_codebook_position){ .n = book->dim,
                                      .bits = book->bits,
                                      .values = kvant_codec_table_offset(codec, book->values),
                                      .thresholds =
                                          kvant_codec_table_offset(codec, book->thresholds),
                                      .inverse_sqrt_dim = book->inverse_sqrt_dim };
}
