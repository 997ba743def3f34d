/* raw.c - the codecs f32, f16 and bf16: no codes, no transform. Open pages of all codecs are f16
 * pages of transformed rows y. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../base/half.h"
#include "encode.h"

typedef enum raw_type { RAW_F32, RAW_F16, RAW_BF16 } raw_type;

typedef struct raw_state {
    raw_type type;
} raw_state;

static raw_type type_of(const kvant_codec *codec)
{
    return ((const raw_state *)codec->state)->type;
}

static kvant_status raw_check(const kvant_codec *codec, const kvant_kernels *kernels,
                              const float *y)
{
    (void)kernels;
    const float limit[] = {
        [RAW_F32] = INFINITY, [RAW_F16] = KVANT_HALF_MAX, [RAW_BF16] = 3.3895314e38f
    };
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        KVANT_RETURN_IF(!(fabsf(y[j]) <= limit[type_of(codec)]), KVANT_ERR_RANGE);
    return KVANT_OK;
}

void kvant_codec_encode_open(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                             uint32_t first, uint32_t n, void *page)
{
    uint32_t d = codec->info.head_dim;
    kernels->float_to_half(y, (uint16_t *)page + (size_t)first * d, n * d);
}

void kvant_codec_decode_open(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, uint32_t first, uint32_t n, float *y)
{
    uint32_t d = codec->info.head_dim;
    kernels->half_to_float((const uint16_t *)page + (size_t)first * d, y, n * d);
}

static void raw_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                       uint32_t token, void *page)
{
    uint32_t d = codec->info.head_dim;
    if (type_of(codec) == RAW_F32) {
        memcpy((float *)page + (size_t)token * d, y, d * sizeof *y);
        return;
    }
    if (type_of(codec) == RAW_F16)
        kvant_codec_encode_open(codec, kernels, y, token, 1, page);
    uint16_t *out = (uint16_t *)page + (size_t)token * d;
    for (uint32_t j = 0; type_of(codec) == RAW_BF16 && j < d; j++)
        out[j] = kvant_bf16_from_float(y[j]);
}

static void raw_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                       uint32_t token, float *y)
{
    uint32_t d = codec->info.head_dim;
    if (type_of(codec) == RAW_F32) {
        memcpy(y, (const float *)page + (size_t)token * d, d * sizeof *y);
        return;
    }
    if (type_of(codec) == RAW_F16)
        kvant_codec_decode_open(codec, kernels, page, token, 1, y);
    const uint16_t *in = (const uint16_t *)page + (size_t)token * d;
    for (uint32_t j = 0; type_of(codec) == RAW_BF16 && j < d; j++)
        y[j] = kvant_bf16_to_float(in[j]);
}

/* Whether the kernel for halves can unpack the page: it takes keys, and values in whole blocks of
 * 64 channels in the order of tiles. */
static bool suits_halves(const kvant_codec *codec)
{
    return codec->info.role == KVANT_ROLE_K ||
           (codec->info.head_dim % KVANT_PAGE_TOKENS == 0 && !codec->layout.moved);
}

static void unpack_halves(const kvant_codec *codec, const kvant_kernels *kernels,
                          const uint16_t *half, float *tile)
{
    uint32_t d = codec->info.head_dim, padded = codec->layout.padded_dim;
    if (codec->info.role == KVANT_ROLE_K) {
        kernels->key_halves(half, d, tile);
        memset(tile + (size_t)d * KVANT_PAGE_TOKENS, 0,
               (size_t)(padded - d) * KVANT_PAGE_TOKENS * sizeof *tile);
        return;
    }
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        for (uint32_t j = 0; j < d;
             /* positions of 64 channels follow the same order as positions of 64 tokens */
             j += KVANT_PAGE_TOKENS)
            kernels->token_halves(half + (size_t)t * d + j,
                                  tile + (size_t)kvant_token_position(t) * padded + j);
}

void kvant_codec_unpack_open(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, float *tile)
{
    if (suits_halves(codec)) {
        unpack_halves(codec, kernels, page, tile);
        return;
    }
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        float y[KVANT_MAX_HEAD_DIM];
        kvant_codec_decode_open(codec, kernels, page, t, 1, y);
        kvant_unpack_token(codec, t, y, tile);
    }
}

static void raw_unpack(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                       float *tile)
{
    if (type_of(codec) == RAW_F16)
        kvant_codec_unpack_open(codec, kernels, page, tile);
    else
        kvant_unpack_decoded(codec, kernels, page, tile);
}

static const kvant_quantizer raw_quantizer = { raw_check, raw_encode, raw_decode, raw_unpack };

static kvant_status create_raw(kvant_codec *codec, const kvant_request *request,
                               const kvant_error *error)
{
    const kvant_spec *spec = request->spec;
    if (spec->variant)
        return kvant_fail(error, KVANT_ERR_SPEC, "%s takes no number of bits", spec->name);
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(raw_state)));
    raw_type type = spec->name[0] == 'b'             ? RAW_BF16
                    : strcmp(spec->name, "f32") == 0 ? RAW_F32
                                                     : RAW_F16;
    ((raw_state *)codec->state)->type = type;
    codec->transform.head_dim = codec->info.head_dim;
    codec->quantizer = &raw_quantizer;
    codec->view.general.kind = KVANT_GENERAL_RAW;
    codec->view.general.raw = (uint32_t)type;
    kvant_codec_set_sizes(codec, 0, 0,
                          (type == RAW_F32 ? 4u : 2u) * KVANT_PAGE_TOKENS * codec->info.head_dim);
    snprintf(codec->spec, sizeof codec->spec, "%s", spec->name);
    return KVANT_OK;
}

static const kvant_option no_options[] = { { .key = NULL } };

KVANT_FAMILY(f32, "", "-", "uncompressed binary32", no_options, NULL, create_raw)
KVANT_FAMILY(f16, "", "-", "uncompressed binary16, the usual cache", no_options, NULL, create_raw)
KVANT_FAMILY(bf16, "", "-", "uncompressed bfloat16", no_options, NULL, create_raw)
