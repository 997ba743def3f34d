/* uniform.c - see uniform.h: layout of the metadata, encoding and decoding. */
#include "uniform.h"

#include <string.h>

#include "../base/attributes.h"

/* One way to quantise a group: the scale and zero point to store, and the step from numbers to
 * codes. */
typedef struct fit {
    uint16_t scale, zero;
    kvant_uniform_step step;
} fit;

static fit fit_symmetric(const kvant_uniform *u, float min, float max)
{
    float largest = fabsf(min) > fabsf(max) ? fabsf(min) : fabsf(max);
    fit f = { .scale = kvant_half_from_float(largest / u->sym_levels) };
    float scale = kvant_half_to_float(f.scale);
    f.step = (kvant_uniform_step){ 0, scale > 0 ? 1 / scale : 0, -u->sym_levels, u->sym_levels,
                                   -u->bias };
    return f;
}

static fit fit_asymmetric(const kvant_uniform *u, float min, float max)
{
    /* Adding +0 makes +0 of -0. When a group has zeros of both signs, either may be found as its
     * minimum, and the page's bytes must not depend on that. */
    fit f = { .scale = kvant_half_from_float((max - min + 0.0f) / u->asym_levels),
              .zero = kvant_half_from_float(min + 0.0f) };
    float scale = kvant_half_to_float(f.scale);
    f.step = (kvant_uniform_step){ kvant_half_to_float(f.zero), scale > 0 ? 1 / scale : 0, 0,
                                   u->asym_levels, 0 };
    return f;
}

/* The error after decoding: the sum of squared or of absolute differences. difference has room for
 * 2 n numbers. */
static float error_of(const kvant_uniform *u, const kvant_kernels *kernels, const float *x,
                      uint32_t n, const fit *f, const uint8_t *codes, float *difference)
{
    const float scale = kvant_half_to_float(f->scale);
    float *sign = difference + n, offset = f->step.offset, zero = f->step.zero;
    for (uint32_t i = 0; i < n; i++)
        difference[i] = x[i] - (scale * ((float)codes[i] + offset) + zero);
    if (u->mode == KVANT_UNIFORM_HYBRID_PAPER)
        return kernels->dot(difference, difference, n);
    for (uint32_t i = 0; i < n; i++)
        sign[i] = difference[i] < 0 ? -1.0f : 1.0f;
    return kernels->dot(difference, sign, n);
}

/* Replaces a symmetric fit where an asymmetric fit has the smaller error. A scale beyond fp16 makes
 * the error NaN, which never counts as smaller. Levels of one bit less can need such a scale. */
static void choose(const kvant_uniform *u, const kvant_kernels *kernels, const float *x, uint32_t n,
                   float min, float max, fit *f, uint8_t *codes, float *scratch)
{
    uint8_t other[KVANT_MAX_HEAD_DIM];
    fit asymmetric = fit_asymmetric(u, min, max);
    kernels->uniform_codes(x, n, &asymmetric.step, other);
    if (!(error_of(u, kernels, x, n, &asymmetric, other, scratch) <
          error_of(u, kernels, x, n, f, codes, scratch)))
        return;
    *f = asymmetric;
    f->scale |= 0x8000u;
    memcpy(codes, other, n);
}

/* Writes the codes of a group's n numbers; its scale and zero point go to meta[0] and
 * meta[zero_at]. scratch has room for 2 n numbers. */
static void encode_group(const kvant_uniform *u, const kvant_kernels *kernels, const float *x,
                         uint32_t n, uint8_t *codes, uint16_t *meta, size_t zero_at, float *scratch)
{
    float min, max;
    kernels->range(x, n, &min, &max);
    fit f =
        u->mode == KVANT_UNIFORM_ASYM ? fit_asymmetric(u, min, max) : fit_symmetric(u, min, max);
    kernels->uniform_codes(x, n, &f.step, codes);
    if (kvant_uniform_is_hybrid(u))
        choose(u, kernels, x, n, min, max, &f, codes, scratch);
    meta[0] = f.scale;
    if (u->mode != KVANT_UNIFORM_SYM)
        meta[zero_at] = f.zero;
}

static uint32_t group_end(const kvant_codec *codec, uint32_t first)
{
    uint32_t end = first + kvant_uniform_of(codec)->group;
    return end < codec->info.head_dim ? end : codec->info.head_dim;
}

static void encode_token(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                         uint32_t token, void *page)
{
    uint8_t codes[KVANT_MAX_HEAD_DIM] = { 0 };
    float scratch[2 * KVANT_MAX_HEAD_DIM];
    for (uint32_t first = 0; first < codec->info.head_dim; first = group_end(codec, first))
        encode_group(kvant_uniform_of(codec), kernels, y + first, group_end(codec, first) - first,
                     codes + first,
                     kvant_codec_metadata(codec, page) + kvant_uniform_index(codec, token, first),
                     kvant_uniform_n_scales(codec), scratch);
    kvant_layout_put(&codec->layout, page, token, codes);
}

/* Channels that are transposed at a time, one cache line of floats, so that the tokens of a channel
 * lie side by side. All codes of a block take 32 kB on the stack; more columns would not fit a
 * stack of 64 KiB. */
#define COLUMNS 16u

typedef struct columns {
    float numbers[COLUMNS][KVANT_PAGE_TOKENS];
    uint8_t codes[KVANT_PAGE_TOKENS][KVANT_MAX_HEAD_DIM];
} columns;

static void encode_columns(const kvant_codec *codec, const kvant_kernels *kernels, uint32_t first,
                           uint32_t n, uint32_t token, void *page, columns *block)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    uint16_t *meta = kvant_codec_metadata(codec, page) + kvant_uniform_index(codec, token, first);
    uint8_t codes[KVANT_PAGE_TOKENS];
    float scratch[2 * KVANT_PAGE_TOKENS];
    for (uint32_t j = 0; j < n; j++) {
        encode_group(u, kernels, block->numbers[j], u->group, codes, meta + j,
                     kvant_uniform_n_scales(codec), scratch);
        for (uint32_t t = 0; t < u->group; t++)
            block->codes[t][first + j] = codes[t];
    }
}

/* Not inlined: otherwise encode_token() would need the stack of this function, too. */
static KVANT_NOINLINE void encode_tokens(const kvant_codec *codec, const kvant_kernels *kernels,
                                         const float *y, uint32_t token, void *page)
{
    columns block;
    uint32_t d = codec->info.head_dim, group = kvant_uniform_of(codec)->group;
    for (uint32_t t = 0; t < group; t++)
        memset(block.codes[t] + d, 0, codec->layout.padded_dim - d);
    for (uint32_t first = 0; first < d; first += COLUMNS) {
        uint32_t n = d - first < COLUMNS ? d - first : COLUMNS;
        for (uint32_t t = 0; t < group; t++)
            for (uint32_t j = 0; j < n; j++)
                block.numbers[j][t] = y[(size_t)t * d + first + j];
        encode_columns(codec, kernels, first, n, token, page, &block);
    }
    for (uint32_t t = 0; t < group; t++)
        kvant_layout_put(&codec->layout, page, token + t, block.codes[t]);
}

static void uniform_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                           uint32_t token, void *page)
{
    if (kvant_uniform_of(codec)->per_channel)
        encode_tokens(codec, kernels, y, token, page);
    else
        encode_token(codec, kernels, y, token, page);
}

/* The fp16 numbers of a token's lines, one per channel or one per group, from scales or zeros. */
static void token_halves(const kvant_codec *codec, const uint16_t *stored, uint32_t token,
                         uint32_t n, uint16_t *halves)
{
    size_t stride = kvant_uniform_of(codec)->per_channel ? 1 : KVANT_PAGE_TOKENS;
    stored += kvant_uniform_index(codec, token, 0);
    for (uint32_t i = 0; i < n; i++)
        halves[i] = stored[i * stride];
}

static void uniform_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                           uint32_t token, float *y)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    const uint16_t *stored = kvant_codec_metadata_of(codec, page);
    uint32_t d = codec->info.head_dim, n = u->per_channel ? d : u->n_groups;
    uint16_t halves[KVANT_MAX_HEAD_DIM];
    float scale[KVANT_MAX_HEAD_DIM], zero[KVANT_MAX_HEAD_DIM] = { 0 };
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    if (!u->symmetric) {
        token_halves(codec, stored + kvant_uniform_n_scales(codec), token, n, halves);
        kernels->half_to_float(halves, zero, n);
    }
    token_halves(codec, stored, token, n, halves);
    kernels->half_to_float(halves, scale, n);
    kvant_layout_get(&codec->layout, page, token, codes);
    for (uint32_t i = 0; i < n; i++) {
        kvant_uniform_line line = kvant_uniform_line_of(u, halves[i], scale[i], zero[i]);
        scale[i] = line.scale;
        zero[i] = line.zero;
    }
    for (uint32_t j = 0; u->per_channel && j < d; j++)
        y[j] = scale[j] * (float)codes[j] + zero[j];
    for (uint32_t i = 0; !u->per_channel && i < n; i++)
        for (uint32_t j = i * u->group; j < (i + 1) * u->group && j < d; j++)
            y[j] = scale[i] * (float)codes[j] + zero[i];
}

/* A zero point is a number of the row. The scale of a group is at most its largest magnitude (2
 * bits, symmetric). So both fit when the row fits. The exception is a hybrid group whose
 * asymmetric scale does not fit: it stays symmetric. */
static kvant_status uniform_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                  const float *y)
{
    (void)kernels;
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        KVANT_RETURN_IF(fabsf(y[j]) > KVANT_HALF_MAX, KVANT_ERR_RANGE);
    return KVANT_OK;
}

static const kvant_quantizer uniform_quantizer = { uniform_check, uniform_encode, uniform_decode,
                                                   kvant_uniform_unpack };

/* Offers code - bias as the values of codes in every mode, because these have the smallest
 * magnitude. */
static void offer_codes(kvant_codec *codec)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    int16_t *values = codec->product.integers.values;
    if (u->n_groups > 1 && u->group % KVANT_TILE != 0)
        return; /* groups of 8, 24, ... channels do not cover whole tiles */
    int32_t bias = (int32_t)u->bias, low_bias = bias < 8 ? bias : 8;
    for (int32_t c = 0; c < 16; c++) {
        values[c] = (int16_t)(c - low_bias);
        values[16 + c] = (int16_t)(16 * c - (bias - low_bias));
    }
    codec->product.has_zero = !u->symmetric;
    kvant_codec_offer_codes(codec, u->per_channel, u->group, kvant_uniform_lines);
}

static void set_view(kvant_codec *codec)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    codec->view.kind = KVANT_CODES_UNIFORM;
    codec->view.of.uniform =
        (kvant_uniform_view){ .hybrid = kvant_uniform_is_hybrid(u),
                              .symmetric = u->symmetric,
                              .per_channel = u->per_channel,
                              .group = u->group,
                              .n_groups = u->n_groups,
                              .n_scales = (uint32_t)kvant_uniform_n_scales(codec),
                              .levels = (uint32_t)(u->symmetric ? u->sym_levels : u->asym_levels),
                              .offset = u->symmetric ? -u->bias : 0 };
    codec->view.general.kind = KVANT_GENERAL_UNIFORM;
    codec->view.general.uniform.bits = codec->info.bits;
    codec->view.general.uniform.mode = (uint32_t)u->mode;
    codec->view.general.uniform.per_channel = u->per_channel;
    codec->view.general.uniform.group = u->group;
    codec->view.general.uniform.n_scales = (uint32_t)kvant_uniform_n_scales(codec);
    codec->view.general.uniform.sym_levels = u->sym_levels;
    codec->view.general.uniform.asym_levels = u->asym_levels;
    codec->view.general.uniform.bias = u->bias;
}

static kvant_status set_group(kvant_codec *codec, uint32_t group, const kvant_error *error)
{
    kvant_uniform *u = codec->state;
    uint32_t d = codec->info.head_dim;
    if (u->per_channel)
        u->group = group ? group : 32;
    else
        u->group = group && group < d ? group : d;
    if (u->per_channel && u->group != 16 && u->group != 32 && u->group != 64)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "group=%u is not valid with axis=channel: use 16, 32 or 64 tokens",
                          (unsigned)group);
    if (!u->per_channel && u->group % 8 != 0 && u->group != d)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "group=%u is not valid: use a multiple of 8, or head_dim %u or more",
                          (unsigned)group, (unsigned)d);
    u->n_groups = u->per_channel ? KVANT_PAGE_TOKENS / u->group : (d + u->group - 1) / u->group;
    codec->info.block_tokens = u->per_channel ? u->group : 1;
    return KVANT_OK;
}

kvant_status kvant_uniform_init(kvant_codec *codec, uint32_t bits, kvant_uniform_mode mode,
                                bool per_channel, uint32_t group, const kvant_error *error)
{
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(kvant_uniform)));
    kvant_uniform *u = codec->state;
    uint32_t asym_bits = mode == KVANT_UNIFORM_HYBRID_CODE ? bits - 1 : bits;
    *u = (kvant_uniform){ .mode = mode,
                          .per_channel = per_channel,
                          .sym_levels = (float)((1u << (bits - 1)) - 1),
                          .asym_levels = (float)((1u << asym_bits) - 1),
                          .bias = (float)(1u << (bits - 1)) };
    u->symmetric = mode == KVANT_UNIFORM_SYM;
    KVANT_FORWARD(set_group(codec, group, error));
    codec->quantizer = &uniform_quantizer;
    uint32_t padded = (codec->info.head_dim + KVANT_TILE - 1) / KVANT_TILE * KVANT_TILE;
    size_t arrays = u->symmetric ? 1 : 2;
    kvant_codec_set_sizes(codec, bits,
                          arrays * u->n_groups * (per_channel ? padded : KVANT_PAGE_TOKENS), 0);
    set_view(codec);
    offer_codes(codec);
    return KVANT_OK;
}

const char *const kvant_hybrid_names[] = { "paper", "code", NULL };
const char *const kvant_tile_names[] = { "16", "32", "64", NULL };
