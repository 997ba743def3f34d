/* attention_errors.h - how far a codec's numbers may be from the numbers that kernels compute with:
 * distances of codewords, scales and roundings. attention_bound.c adds them up to the bound. */
#ifndef KVANT_TESTS_ATTENTION_ERRORS_H
#define KVANT_TESTS_ATTENTION_ERRORS_H

#include "attention_fixture.h"

#include "../../src/base/half.h"
#include "../../src/codec/codec_internal.h"
#include "../../src/cuda/any/general_decode.h"
#include "../../src/cuda/params.h"

/* A unit times a secondary has the components of the secondary, or half their sum with any signs.
 * Bytes count these in 128ths, up to 127. */
static inline double direction_error(const kvant_cuda_directions *directions)
{
    double top = 0;
    for (uint32_t i = 0; i < KVANT_CUDA_SECONDARIES; i++) {
        double sum = 0;
        for (int k = 0; k < 4; k++) {
            sum += fabs(directions->secondaries[i][k]);
            top = fmax(top, fabs(directions->secondaries[i][k]));
        }
        top = fmax(top, sum / 2);
    }
    return fmax(0x1p-8, top - 127.0 / 128) + 0x1p-20;
}

/* The codec's tables in the host's memory. */
static inline const float *tables_of(const kvant_cuda_codec *codec)
{
    return codec->tables->host;
}

static inline bool has_chunks(const kvant_cuda_codec *codec)
{
    return kvant_cuda_has_chunks(&codec->params);
}

/* The largest distance between a number and the byte that stands for it, for a scale of 1. */
static inline double step_error(const kvant_cuda_codec *codec)
{
    const kvant_cuda_params *p = &codec->params;
    double worst = p->kind == KVANT_CUDA_HQMQ_S96R4 ? direction_error(&codec->directions) : 0;
    if (worst > 0)
        return worst * ((1 << codec->general.view.chunks.length_bits) - 1);
    const bool codebook =
        p->codes == KVANT_CUDA_CODES_CODEBOOK && p->kind != KVANT_CUDA_CODEBOOK_WIDE;
    for (uint32_t i = 0; codebook && i < 1u << p->bits; i++)
        worst = fmax(worst, fabs(p->values[i] - p->step * ((p->bytes[i / 4] >> 8 * (i % 4) & 255) -
                                                           (double)p->bias)));
    return worst;
}

/* The largest scale and zero point of a token, and powers of two above the scales and zero points
 * of its page (for groups of channels). */
typedef struct sizes {
    double scale, zero, page_scale, page_zero;
} sizes;

static inline double half_at(const kvant_cuda_params *p, const uint8_t *page, uint32_t i)
{
    return fabs(kvant_half_to_float(((const uint16_t *)(page + p->metadata_offset))[i]));
}

static inline void grow(const kvant_cuda_params *p, const uint8_t *page, uint32_t i, double *scale,
                        double *zero)
{
    const bool signed_scale = ((const uint16_t *)(page + p->metadata_offset))[i] >> 15,
               zeros =
                   p->hybrid ? signed_scale : p->codes == KVANT_CUDA_CODES_UNIFORM && !p->symmetric;
    *scale = fmax(*scale, half_at(p, page, i));
    *zero = fmax(*zero,
                 zeros ? half_at(p, page, p->n_scales + i) : fabs(p->offset) * half_at(p, page, i));
}

/* valid: number of tokens that the page has. */
static inline sizes sizes_of(const kvant_cuda_codec *codec, const uint8_t *page, uint32_t token,
                             uint32_t valid)
{
    const kvant_cuda_params *p = &codec->params;
    const uint32_t group = codec->any.group;
    sizes s = { 0, 0, 0x1p-14, 0x1p-14 };
    if (p->grouping == KVANT_CUDA_GROUP_TOKEN)
        grow(p, page, token, &s.scale, &s.zero);
    for (uint32_t j = 0; p->grouping == KVANT_CUDA_GROUP_TOKENS && j < p->head_dim; j++)
        grow(p, page, token / group * p->head_dim + j, &s.scale, &s.zero);
    for (uint32_t g = 0; p->grouping == KVANT_CUDA_GROUP_CHANNELS && g * group < p->head_dim; g++) {
        grow(p, page, g * 64 + token, &s.scale, &s.zero);
        for (uint32_t t = 0; t < valid; t++)
            grow(p, page, g * 64 + t, &s.page_scale, &s.page_zero);
    }
    s.page_scale *= 2;
    s.page_zero *= 2;
    return s;
}

/* The largest code of a kind, plus the amount that a bias or a zero point takes off later. For
 * chunks, the largest number for a scale of 1. */
static inline double largest_code(const kvant_cuda_codec *codec)
{
    const kvant_cuda_params *p = &codec->params;
    const kvant_general_view *view = &codec->general.view;
    const uint32_t largest = (1u << view->chunks.length_bits) - 1;
    if (has_chunks(codec))
        return view->kind == KVANT_GENERAL_TRIPLETS ? tables_of(codec)[view->chunks.norm + largest]
                                                    : (float)largest;
    return p->codes == KVANT_CUDA_CODES_CODEBOOK || p->codes == KVANT_CUDA_CODES_TRELLIS
               ? 255 * p->step
               : p->levels * 2 + 2;
}

#endif
