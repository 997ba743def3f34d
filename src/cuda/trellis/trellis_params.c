/* trellis_params.c - the part of params.c for trellis codes: levels, and the magnitudes that
 * attention looks up. */
#include <math.h>
#include <string.h>

#include "../params.h"

static void set_byte(uint32_t *words, uint32_t at, uint32_t byte)
{
    words[at / 4] |= byte << 8 * (at % 4);
}

/* Fills magnitudes of levels as bytes below 128 (trellis.cuh): the first 16, and the differences of
 * the next 16 to them. */
static void fill_magnitudes(kvant_cuda_params *params, const int8_t *levels)
{
    const uint32_t half = 2u << params->bits;
    const int8_t *positive = levels + half;
    for (uint32_t i = 0; i < half; i++)
        set_byte(params->bytes, i, (uint32_t)(positive[i] - (i < 16 ? 0 : positive[i - 16])));
}

static kvant_cuda_kind kind_of(uint32_t bits)
{
    return bits == 2 ? KVANT_CUDA_TRELLIS2 : bits == 3 ? KVANT_CUDA_TRELLIS3 : KVANT_CUDA_TRELLIS4;
}

void kvant_cuda_trellis_init(kvant_cuda_codec *codec, const kvant_codec_view *view)
{
    const kvant_trellis_view *trellis = &view->of.trellis;
    kvant_cuda_params *params = &codec->params;
    kvant_cuda_trellis *out = &codec->trellis;
    params->codes = KVANT_CUDA_CODES_TRELLIS;
    params->kind = kind_of(params->bits);
    params->unbiased = trellis->unbiased;
    params->inverse_sqrt_dim = trellis->inverse_sqrt_dim;
    params->step = trellis->unit;
    params->bias = 128;
    fill_magnitudes(params, trellis->levels);
    out->bits = params->bits;
    out->n_levels = 4u << params->bits;
    out->per_deviation = (int32_t)lrint(1 / (double)trellis->unit);
    memcpy(out->levels, trellis->levels, out->n_levels);
    memcpy(out->values, trellis->values, out->n_levels * sizeof *out->values);
    memcpy(codec->any.steps, trellis->steps, params->head_dim * sizeof *codec->any.steps);
}
