/* trellis_params.c - the part of params.c for codecs of a trellis: their levels, and the magnitudes that
 * attention looks up. */
#include <math.h>
#include <string.h>

#include "../../codec/trellis_book.h"
#include "../params.h"

static void set_byte(uint32_t *words, uint32_t at, uint32_t byte)
{
    words[at / 4] |= byte << 8 * (at % 4);
}

/* Magnitudes of levels as bytes below 128 (trellis.cuh): those of the first 16, and what the next 16 have
 * more. */
static void fill_magnitudes(kvant_cuda_params *params, const kvant_trellis *trellis)
{
    const uint32_t half = 2u << trellis->bits;
    const int8_t *positive = trellis->levels + half;
    for (uint32_t i = 0; i < half; i++)
        set_byte(params->bytes, i, (uint32_t)(positive[i] - (i < 16 ? 0 : positive[i - 16])));
}

void kvant_cuda_trellis_init(kvant_cuda_params *params, kvant_cuda_trellis *out, const kvant_codec *codec)
{
    const kvant_trellis_book *book = kvant_trellis_book_of(codec);
    const kvant_trellis *trellis = &book->trellis;
    params->kind = (kvant_cuda_kind)(KVANT_CUDA_TRELLIS2 + trellis->bits - 2);
    params->memory = trellis->memory;
    params->unbiased = book->unbiased;
    params->inverse_sqrt_dim = book->inverse_sqrt_dim;
    params->step = book->unit;
    params->bias = 128;
    fill_magnitudes(params, trellis);
    out->memory = trellis->memory;
    out->bits = trellis->bits;
    out->n_levels = 4u << trellis->bits;
    out->per_deviation = (int32_t)lrint(1 / (double)book->unit);
    for (uint32_t i = 0; i < 3; i++)
        out->taps[i] = trellis->taps[i];
    memcpy(out->levels, trellis->levels, out->n_levels);
    memcpy(out->values, book->values, out->n_levels * sizeof *out->values);
}
