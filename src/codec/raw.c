/* raw.c - f32, f16 and bf16: no codes, no transform. f16 is also what open pages are. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../base/half.h"
#include "codec_internal.h"

typedef enum raw_type { RAW_F32, RAW_F16, RAW_BF16 } raw_type;

typedef struct raw_state {
    raw_type type;
} raw_state;

static raw_type type_of(const kvant_codec *codec)
{
    return ((const raw_state *)codec->state)->type;
}

static kvant_status raw_check(const kvant_codec *codec, const float *y)
{
    const float limit[] = { [RAW_F32] = INFINITY, [RAW_F16] = KVANT_HALF_MAX, [RAW_BF16] = 3.3895314e38f };
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        if (!(fabsf(y[j]) <= limit[type_of(codec)]))
            return KVANT_ERR_RANGE;
    return KVANT_OK;
}

static void raw_encode(const kvant_codec *codec, const kvant_rows *rows, size_t i, uint32_t token, void *page)
{
    float y[KVANT_MAX_HEAD_DIM];
    uint32_t d = codec->info.head_dim;
    kvant_codec_transform_row(codec, rows, i, y);
    if (type_of(codec) == RAW_F32) {
        memcpy((float *)page + (size_t)token * d, y, d * sizeof *y);
        return;
    }
    uint16_t *out = (uint16_t *)page + (size_t)token * d;
    if (type_of(codec) == RAW_F16)
        kvant_kernels_get(KVANT_CPU_AUTO)->float_to_half(y, out, d);
    else
        for (uint32_t j = 0; j < d; j++)
            out[j] = kvant_bf16_from_float(y[j]);
}

static void raw_decode(const kvant_codec *codec, const void *page, uint32_t token, float *y)
{
    uint32_t d = codec->info.head_dim;
    if (type_of(codec) == RAW_F32) {
        memcpy(y, (const float *)page + (size_t)token * d, d * sizeof *y);
        return;
    }
    const uint16_t *in = (const uint16_t *)page + (size_t)token * d;
    for (uint32_t j = 0; j < d; j++)
        y[j] = type_of(codec) == RAW_F16 ? kvant_half_to_float(in[j]) : kvant_bf16_to_float(in[j]);
}

/* Whether unpack_halves does a page: keys, and values whose channels are in the order of tiles, whole blocks of 64. */
static bool suits_halves(const kvant_codec *codec)
{
    return type_of(codec) == RAW_F16 && (codec->info.role == KVANT_ROLE_K ||
                                         (codec->info.head_dim % KVANT_PAGE_TOKENS == 0 && !codec->layout.moved));
}

/* What attention meets most: pages that are not sealed yet. */
static void unpack_halves(const kvant_codec *codec, const kvant_kernels *kernels, const uint16_t *half, float *tile)
{
    uint32_t d = codec->info.head_dim, padded = codec->layout.padded_dim;
    if (codec->info.role == KVANT_ROLE_K) {
        kernels->key_halves(half, d, tile);
        memset(tile + (size_t)d * KVANT_PAGE_TOKENS, 0, (size_t)(padded - d) * KVANT_PAGE_TOKENS * sizeof *tile);
        return;
    }
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        for (uint32_t j = 0; j < d;
             j += KVANT_PAGE_TOKENS) /* positions of channels are those of tokens, 64 at a time */
            kernels->token_halves(half + (size_t)t * d + j, tile + (size_t)kvant_token_position(t) * padded + j);
}

static void raw_unpack(const kvant_codec *codec, const kvant_kernels *kernels, const void *page, float *tile)
{
    uint32_t d = codec->info.head_dim, padded = codec->layout.padded_dim;
    if (suits_halves(codec)) {
        unpack_halves(codec, kernels, page, tile);
        return;
    }
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        float y[KVANT_MAX_HEAD_DIM];
        uint32_t position = kvant_token_position(t);
        if (type_of(codec) == RAW_F16)
            kernels->half_to_float((const uint16_t *)page + (size_t)t * d, y, d);
        else
            raw_decode(codec, page, t, y);
        if (codec->info.role == KVANT_ROLE_K) {
            for (uint32_t j = 0; j < padded; j++)
                tile[(size_t)j * KVANT_PAGE_TOKENS + position] = j < d ? y[j] : 0;
        } else {
            for (uint32_t j = 0; j < padded; j++)
                tile[(size_t)position * padded + kvant_layout_row_position(&codec->layout, j)] = j < d ? y[j] : 0;
        }
    }
}

static const kvant_quantizer raw_quantizer = { raw_check, raw_encode, raw_decode, raw_unpack };

static kvant_status make_raw(kvant_codec *codec, raw_type type, const char *name, const kvant_error *error)
{
    static const size_t element_bytes[] = { [RAW_F32] = 4, [RAW_F16] = 2, [RAW_BF16] = 2 };
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(raw_state), error));
    ((raw_state *)codec->state)->type = type;
    codec->quantizer = &raw_quantizer;
    codec->info.block_tokens = 1;
    kvant_codec_set_sizes(codec, 0, 0, element_bytes[type] * KVANT_PAGE_TOKENS * codec->info.head_dim);
    snprintf(codec->spec, sizeof codec->spec, "%s", name);
    return KVANT_OK;
}

kvant_status kvant_codec_make_f16(kvant_codec *codec)
{
    return make_raw(codec, RAW_F16, "f16", NULL);
}

static kvant_status create_raw(kvant_codec *codec, kvant_spec *spec, const kvant_site *site,
                               const kvant_error *error)
{
    (void)site;
    if (spec->variant)
        return kvant_fail(error, KVANT_ERR_SPEC, "%s takes no number of bits", spec->name);
    codec->transform.head_dim = codec->info.head_dim;
    raw_type type = spec->name[0] == 'b' ? RAW_BF16 : strcmp(spec->name, "f32") == 0 ? RAW_F32 : RAW_F16;
    return make_raw(codec, type, spec->name, error);
}

#define RAW_FAMILY(name, summary)                                                                                  \
    const kvant_family kvant_family_##name = { { sizeof(kvant_codec_family), #name, "", "", "", "-", summary },    \
                                               create_raw }

RAW_FAMILY(f32, "uncompressed binary32");
RAW_FAMILY(f16, "uncompressed binary16, the usual cache");
RAW_FAMILY(bf16, "uncompressed bfloat16");
