/* codec.c - the public functions of codec.h: creation, argument checks, decoding and products.
 *
 * Owns no quantisation: families quantise, behind kvant_quantizer. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/fnv.h"
#include "encode.h"
#include "order.h"
#include "calibrated.h"

static kvant_status unknown_family(const char *name, const kvant_error *error)
{
    char list[320] = "";
    kvant_codec_family family = { .size = sizeof family };
    for (size_t i = 0; kvant_codec_family_get(i, &family) == KVANT_OK; i++)
        kvant_append(list, sizeof list, "%s%s", i ? ", " : "", family.name);
    return kvant_fail(error, KVANT_ERR_SPEC, "there is no codec '%s'; there are %s", name, list);
}

static kvant_status read_spec(const kvant_family *family, kvant_spec *spec, int32_t *options,
                              kvant_common *common, const kvant_error *error)
{
    char valid[512] = "";
    KVANT_FORWARD(kvant_options_read(family->options, spec, options, error));
    kvant_options_list(family->options, valid, sizeof valid);
    if (family->common) {
        KVANT_FORWARD(kvant_options_read(family->common, spec, common, error));
        kvant_options_list(family->common, valid, sizeof valid);
    }
    return kvant_spec_finish(spec, valid[0] ? valid : "none", error);
}

static kvant_status build(kvant_codec *codec, kvant_spec *spec, const kvant_location *given,
                          const kvant_error *error)
{
    const kvant_family *family = kvant_family_find(spec->name);
    int32_t options[KVANT_FAMILY_OPTIONS] = { 0 };
    kvant_common common = KVANT_COMMON_NONE(given->seed);
    kvant_location location = *given;
    const kvant_request request = { spec, options, &common, &location };
    if (!family)
        return unknown_family(spec->name, error);
    KVANT_FORWARD(read_spec(family, spec, options, &common, error));
    location.seed = common.seed;
    codec->info.source = family->source;
    KVANT_FORWARD(family->create(codec, &request, error));
    if (!family->common) /* raw: nothing to centre and nothing to keep fp16 */
        return KVANT_OK;
    codec->shown.seed =
        codec->accepts_seed || kvant_transform_is_random(&codec->transform) ? common.seed : 0;
    KVANT_FORWARD(kvant_codec_set_order(codec, &common, error));
    KVANT_FORWARD(kvant_calibrated_transform(codec, &common, &location, error));
    kvant_common_apply(&common, &codec->info, &codec->shown);
    kvant_options_describe(kvant_common_options_ordered, &codec->shown, codec->spec,
                           sizeof codec->spec);
    return kvant_calibrated_fill(codec, &location, error);
}

void kvant_codec_describe(kvant_codec *codec, const kvant_option *table, const void *values,
                          const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(codec->spec, sizeof codec->spec, format, arguments);
    va_end(arguments);
    kvant_options_describe(table, values, codec->spec, sizeof codec->spec);
}

void kvant_codec_identify(kvant_codec *codec, const void *numbers, size_t bytes)
{
    codec->identity = kvant_fnv1a(codec->identity, numbers, bytes);
}

/* Hashes the fields that the canonical spec does not determine, and the spec itself. */
static uint64_t fingerprint(const kvant_codec *codec)
{
    const uint32_t shape[2] = { (uint32_t)codec->info.role, codec->info.head_dim };
    uint64_t state = kvant_fnv1a(codec->identity, codec->spec, strlen(codec->spec));
    return kvant_fnv1a(state, shape, sizeof shape);
}

void kvant_codec_complete_view(kvant_codec *codec)
{
    const kvant_feedback *feedback = codec->feedback;
    codec->view.size = sizeof codec->view;
    codec->view.info = &codec->info;
    codec->view.exact_limit = kvant_codec_exact_limit(codec);
    codec->view.transform = kvant_transform_get_view(&codec->transform);
    codec->view.transform.center = codec->file_center;
    codec->view.transform.scale = codec->file_scale;
    if (feedback)
        codec->view.feedback =
            (kvant_feedback_view){ feedback->pivots, feedback->columns, feedback->stride };
}

kvant_status kvant_codec_create_at(const char *text, uint32_t head_dim, kvant_role role,
                                   const kvant_location *location, kvant_codec **out,
                                   const kvant_error *error)
{
    if (!out)
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "the argument that receives the codec is NULL");
    *out = NULL;
    if (!text || (role != KVANT_ROLE_K && role != KVANT_ROLE_V))
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "spec is NULL, or role is neither KVANT_ROLE_K nor KVANT_ROLE_V");
    if (head_dim < 1 || head_dim > KVANT_MAX_HEAD_DIM)
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "head_dim %u is not from 1 to %u",
                          (unsigned)head_dim, KVANT_MAX_HEAD_DIM);
    kvant_spec spec;
    KVANT_FORWARD(kvant_spec_parse(text, &spec, error));
    kvant_codec *codec = kvant_alloc(1, sizeof *codec);
    if (!codec)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for a codec");
    codec->info = (kvant_codec_info){ .size = sizeof codec->info,
                                      .spec = codec->spec,
                                      .head_dim = head_dim,
                                      .role = role,
                                      .block_tokens = 1 };
    codec->shown = (kvant_common)KVANT_COMMON_NONE(0);
    codec->identity = KVANT_FNV_START;
    if (error->text && error->size)
        error->text[0] = '\0';
    kvant_status status = build(codec, &spec, location, error);
    codec->info.fingerprint = fingerprint(codec);
    if (status == KVANT_OK)
        kvant_codec_complete_view(codec);
    else
        kvant_codec_free(&codec);
    *out = codec;
    if (status == KVANT_ERR_MEMORY && error->text && error->size && !error->text[0])
        return kvant_fail(error, status, "out of memory for a codec");
    return status;
}

kvant_status kvant_codec_create(const char *spec, uint32_t head_dim, kvant_role role, uint64_t seed,
                                kvant_codec **out, char *err, size_t errlen)
{
    return kvant_codec_create_calibrated(spec, head_dim, role, seed, NULL, 0, 0, out, err, errlen);
}

kvant_status kvant_codec_create_calibrated(const char *spec, uint32_t head_dim, kvant_role role,
                                           uint64_t seed, const kvant_calibration *calibration,
                                           uint32_t layer, uint32_t kv_head, kvant_codec **out,
                                           char *err, size_t errlen)
{
    kvant_location location = { seed, calibration, layer, kv_head, NULL };
    kvant_error error = { err, errlen };
    return kvant_codec_create_at(spec, head_dim, role, &location, out, &error);
}

void kvant_codec_free(kvant_codec **codec)
{
    if (!codec || !*codec)
        return;
    kvant_transform_destroy(&(*codec)->transform);
    kvant_free((*codec)->state);
    if ((*codec)->view.kind == KVANT_CODES_CHUNK)
        kvant_free((*codec)->product.integers.chunk);
    kvant_free((*codec)->feedback);
    kvant_free((*codec)->file_center);
    kvant_free((*codec)->file_scale);
    kvant_free(*codec);
    *codec = NULL;
}

kvant_status kvant_codec_set_transform(kvant_codec *codec, const kvant_request *request,
                                       kvant_transform_defaults defaults, const kvant_error *error)
{
    kvant_transform *transform = &codec->transform;
    KVANT_FORWARD(kvant_transform_create(transform, request->common, &defaults,
                                         codec->info.head_dim, request->location->seed, error));
    codec->shown.rotate = (int32_t)transform->rotate;
    if (transform->rotate == KVANT_ROTATE_HADAMARD) {
        codec->shown.block = (int32_t)transform->block;
        codec->shown.signs = transform->random_signs;
    }
    return KVANT_OK;
}

kvant_status kvant_codec_alloc_state(kvant_codec *codec, size_t size)
{
    codec->state = kvant_alloc(1, size);
    return codec->state ? KVANT_OK : KVANT_ERR_MEMORY;
}

void kvant_codec_set_page(kvant_codec *codec, uint32_t bits, size_t code_bytes,
                          size_t metadata_bytes)
{
    kvant_codec_info *info = &codec->info;
    info->bits = bits;
    info->code_bytes = code_bytes;
    info->metadata_offset = (info->code_bytes + 15) / 16 * 16;
    info->metadata_bytes = metadata_bytes;
    size_t end = info->metadata_offset + info->metadata_bytes;
    info->page_bytes = (end + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN;
    info->true_bits = 8.0 * (double)info->page_bytes / (KVANT_PAGE_TOKENS * (double)info->head_dim);
    info->nominal_bits = info->bits;
}

void kvant_codec_set_sizes(kvant_codec *codec, uint32_t bits, size_t metadata_halves,
                           size_t raw_bytes)
{
    const kvant_codec_info *info = &codec->info;
    kvant_layout_init(&codec->layout, info->role, info->head_dim, bits);
    uint32_t raw_bits = (uint32_t)(8 * raw_bytes / ((size_t)KVANT_PAGE_TOKENS * info->head_dim));
    kvant_codec_set_page(codec, bits ? bits : raw_bits, bits ? codec->layout.code_bytes : raw_bytes,
                         metadata_halves * sizeof(uint16_t));
}

kvant_status kvant_codec_get_info(const kvant_codec *codec, kvant_codec_info *info)
{
    return codec && KVANT_RETURN_STRUCT(kvant_codec_info, info, &codec->info, nominal_bits)
               ? KVANT_OK
               : KVANT_ERR_ARGUMENT;
}

const kvant_codec_view *kvant_codec_get_view(const kvant_codec *codec)
{
    return &codec->view;
}

bool kvant_codec_accepts_tokens(uint32_t first, uint32_t n, uint32_t block)
{
    return n > 0 && first < KVANT_PAGE_TOKENS && n <= KVANT_PAGE_TOKENS - first &&
           first % block == 0 && n % block == 0;
}

kvant_status kvant_codec_decode(const kvant_codec *codec, const kvant_affine *affine,
                                const void *page, uint32_t first, uint32_t n, float *rows,
                                size_t stride)
{
    KVANT_RETURN_IF(!codec || !rows || !page, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!kvant_codec_accepts_tokens(first, n, 1), KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(n > 1 && stride < codec->info.head_dim, KVANT_ERR_ARGUMENT);
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t i = 0; i < n; i++) {
        float y[KVANT_MAX_HEAD_DIM];
        codec->quantizer->decode(codec, kernels, page, first + i, y);
        kvant_transform_inverse(&codec->transform, kernels, affine, y, rows + i * stride);
    }
    return KVANT_OK;
}

kvant_status kvant_codec_transform_query(const kvant_codec *codec, const kvant_affine *affine,
                                         const float *q, float *out)
{
    KVANT_RETURN_IF(!codec || !q || !out, KVANT_ERR_ARGUMENT);
    float scaled[KVANT_MAX_HEAD_DIM], y[KVANT_MAX_HEAD_DIM];
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        scaled[j] = affine && affine->scale ? q[j] * affine->scale[j] : q[j];
    kvant_transform_dual(&codec->transform, kvant_kernels_get(KVANT_CPU_AUTO), 1, scaled, y);
    memcpy(out, y, codec->info.head_dim * sizeof *out);
    return KVANT_OK;
}

kvant_status kvant_codec_transform_output(const kvant_codec *codec, const kvant_affine *affine,
                                          float weight_sum, const float *acc, float *out)
{
    KVANT_RETURN_IF(!codec || !acc || !out, KVANT_ERR_ARGUMENT);
    float x[KVANT_MAX_HEAD_DIM];
    kvant_affine linear = { NULL, affine ? affine->scale : NULL };
    kvant_transform_inverse(&codec->transform, kvant_kernels_get(KVANT_CPU_AUTO), &linear, acc, x);
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        out[j] = affine && affine->center ? x[j] + weight_sum * affine->center[j] : x[j];
    return KVANT_OK;
}

kvant_status kvant_codec_score(const kvant_codec *codec, const void *page, const float *q,
                               size_t stride, uint32_t n_queries, float *scores)
{
    KVANT_RETURN_IF(!codec || !page || !q || !scores, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(n_queries > 1 && stride < codec->info.head_dim, KVANT_ERR_ARGUMENT);
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        float y[KVANT_MAX_HEAD_DIM];
        codec->quantizer->decode(codec, kernels, page, t, y);
        for (uint32_t i = 0; i < n_queries; i++) {
            float sum = 0;
            for (uint32_t j = 0; j < codec->info.head_dim; j++)
                sum += q[i * stride + j] * y[j];
            scores[(size_t)i * KVANT_PAGE_TOKENS + t] = sum;
        }
    }
    return KVANT_OK;
}

kvant_status kvant_codec_accumulate(const kvant_codec *codec, const void *page,
                                    const float *weights, uint32_t n_queries, float *acc,
                                    size_t stride)
{
    KVANT_RETURN_IF(!codec || !page || !weights || !acc, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(n_queries > 1 && stride < codec->info.head_dim, KVANT_ERR_ARGUMENT);
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        float y[KVANT_MAX_HEAD_DIM];
        codec->quantizer->decode(codec, kernels, page, t, y);
        for (uint32_t i = 0; i < n_queries; i++) {
            float weight = weights[(size_t)i * KVANT_PAGE_TOKENS + t];
            for (uint32_t j = 0; weight != 0 && j < codec->info.head_dim; j++)
                acc[i * stride + j] += weight * y[j];
        }
    }
    return KVANT_OK;
}

/* A block is open or sealed for all kv heads of a tensor together, and only the whole cache can
 * wait for first rows. So kv heads must agree in these fields. */
int kvant_codecs_fit_together(const kvant_codec_info *a, const kvant_codec_info *b)
{
    return a && b && a->role == b->role && a->head_dim == b->head_dim &&
           a->block_tokens == b->block_tokens && a->sink_tokens == b->sink_tokens &&
           a->recent_tokens == b->recent_tokens &&
           (a->center == KVANT_CENTER_FIRST) == (b->center == KVANT_CENTER_FIRST) &&
           (a->norm == KVANT_NORM_FIRST) == (b->norm == KVANT_NORM_FIRST) &&
           a->learns_transform == b->learns_transform;
}

void kvant_codec_set_tables(kvant_codec *codec, size_t bytes)
{
    codec->view.tables = codec->state;
    codec->view.table_bytes = bytes;
}

uint32_t kvant_codec_table_offset(const kvant_codec *codec, const float *numbers)
{
    return (uint32_t)(numbers - (const float *)codec->state);
}

kvant_rotation_position kvant_codec_rotation_position(const kvant_codec *codec,
                                                      const kvant_transform *rotation)
{
    const bool dense = rotation->rotate == KVANT_ROTATE_DENSE;
    return (kvant_rotation_position){ .n = rotation->head_dim,
                                      .dense = dense,
                                      .numbers = kvant_codec_table_offset(
                                          codec, dense ? rotation->matrix : rotation->signs),
                                      .scale = (float)(1.0 / sqrt((double)rotation->head_dim)) };
}

void kvant_codec_decode_transformed(const kvant_codec *codec, const kvant_kernels *kernels,
                                    const void *page, uint32_t token, float *y)
{
    codec->quantizer->decode(codec, kernels, page, token, y);
}

void kvant_codec_token_lines(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, float step, kvant_code_lines *lines)
{
    kernels->token_halves(kvant_codec_metadata_of(codec, page), lines->scale);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        lines->scale[t] *= step;
}

/* The largest magnitude of a code's value. */
static int32_t largest_value(const kvant_codec *codec)
{
    const int16_t *values = codec->product.integers.values;
    int32_t largest = 1;
    if (codec->view.kind == KVANT_CODES_TRELLIS)
        return INT8_MAX;
    for (uint32_t c = 0; c < 1u << codec->layout.bits; c++) {
        int32_t value = abs(values[c % 16] + (codec->layout.bits > 4 ? values[16 + c / 16] : 0));
        largest = value > largest ? value : largest;
    }
    return largest;
}

void kvant_codec_offer_codes(kvant_codec *codec, bool per_channel, uint32_t group,
                             kvant_code_lines_fn *lines)
{
    const kvant_layout *layout = &codec->layout;
    kvant_code_product *product = &codec->product;
    uint32_t lined =
        per_channel ? KVANT_PAGE_TOKENS : layout->padded_dim; /* that share lines in groups */
    uint32_t others = per_channel ? layout->padded_dim : KVANT_PAGE_TOKENS;
    product->by_row = per_channel == (layout->role == KVANT_ROLE_V);
    product->band_tiles = (group + KVANT_TILE - 1) / KVANT_TILE;
    product->n_bands = (lined / KVANT_TILE + product->band_tiles - 1) / product->band_tiles;
    product->stride = (others + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;
    product->n_columns = (layout->column_tiles + 3) / 4 * KVANT_PAGE_TOKENS;
    int32_t limit =
        INT32_MAX / (largest_value(codec) * (int32_t)(KVANT_TILE * layout->column_tiles));
    product->limit = limit < KVANT_CODE_OPERAND_MAX ? limit : KVANT_CODE_OPERAND_MAX;
    product->lines = lines;
}

static void place_key(const kvant_codec *codec, const float *y, uint32_t position, float *tile)
{
    for (uint32_t j = 0; j < codec->layout.padded_dim; j++)
        tile[(size_t)j * KVANT_PAGE_TOKENS + position] = j < codec->info.head_dim ? y[j] : 0;
}

static void place_value(const kvant_codec *codec, const float *y, uint32_t position, float *tile)
{
    float *row = tile + (size_t)position * codec->layout.padded_dim;
    for (uint32_t j = 0; j < codec->layout.padded_dim; j++)
        row[kvant_layout_row_position(&codec->layout, j)] = j < codec->info.head_dim ? y[j] : 0;
}

void kvant_unpack_token(const kvant_codec *codec, uint32_t token, const float *y, float *tile)
{
    if (codec->info.role == KVANT_ROLE_K)
        place_key(codec, y, kvant_token_position(token), tile);
    else
        place_value(codec, y, kvant_token_position(token), tile);
}

void kvant_unpack_decoded(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                          float *tile)
{
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        float y[KVANT_MAX_HEAD_DIM];
        codec->quantizer->decode(codec, kernels, page, t, y);
        kvant_unpack_token(codec, t, y, tile);
    }
}
