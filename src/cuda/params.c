/* params.c - see params.h: makes a GPU codec from a codec's view. Refuses codecs without a
 * kernel. */
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"

#if KVANT_PAPERS
#include "papers/halves.h"
#endif

kvant_status kvant_cuda_refuse(const kvant_cuda_error *error, kvant_status status,
                               const char *format, ...)
{
    if (!error->text || !error->size)
        return status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->text, error->size, format, arguments);
    va_end(arguments);
    return status;
}

static void init_transform(kvant_cuda_codec *out, const kvant_codec_view *view)
{
    const kvant_transform_view *transform = &view->transform;
    kvant_cuda_params *params = &out->params;
    kvant_cuda_wide_rotation *rotation = &out->rotation;
    params->key_transform_kind = !transform->key_transform ? KVANT_CUDA_TRANSFORM_NONE
                                 : transform->diagonal     ? KVANT_CUDA_TRANSFORM_DIAGONAL
                                                           : KVANT_CUDA_TRANSFORM_FULL;
    const bool full = params->key_transform_kind == KVANT_CUDA_TRANSFORM_FULL;
    out->has_dense_rotation = transform->rotate == KVANT_ROTATE_DENSE;
    params->dense = !full && out->has_dense_rotation;
    if (transform->rotate != KVANT_ROTATE_HADAMARD)
        return;
    rotation->block = transform->block;
    rotation->scale = (float)(1.0 / sqrt((double)transform->block));
    for (uint32_t i = 0; i < view->info->head_dim; i++)
        if (transform->signs[i] < 0)
            rotation->signs[i / 32] |= 1u << i % 32;
    if (full)
        return;
    out->any.rotation = *rotation;
    params->rotation.block = rotation->block;
    params->rotation.scale = rotation->scale;
    memcpy(params->rotation.signs, rotation->signs, sizeof params->rotation.signs);
}

static kvant_cuda_kind uniform_kind(const kvant_uniform_view *u, uint32_t bits)
{
    static const kvant_cuda_kind per_token[] = { KVANT_CUDA_UNIFORM2, KVANT_CUDA_UNIFORM3,
                                                 KVANT_CUDA_UNIFORM4, KVANT_CUDA_UNIFORM5,
                                                 KVANT_CUDA_UNIFORM6, KVANT_CUDA_UNIFORM7,
                                                 KVANT_CUDA_UNIFORM8 };
    static const kvant_cuda_kind kinds[2][2] = {
        { KVANT_CUDA_UNIFORM2_CHANNELS32, KVANT_CUDA_UNIFORM2_TOKENS32 },
        { KVANT_CUDA_UNIFORM3_CHANNELS32, KVANT_CUDA_UNIFORM3_TOKENS32 },
    };
    if (!u->per_channel && u->n_groups == 1)
        return per_token[bits - 2];
    return u->group == 32 && bits <= 3 ? kinds[bits - 2][u->per_channel] : KVANT_CUDA_UNIFORM_ANY;
}

/* The kind of decode kernel. Decode kernels serve groups of a power of two of at least group_step
 * numbers (dequant.cuh). */
static kvant_cuda_kind uniform_decoder(const kvant_uniform_view *u, uint32_t bits,
                                       uint32_t head_dim)
{
    static const kvant_cuda_kind kinds[3][2] = {
        { KVANT_CUDA_UNIFORM2_CHANNELS32, KVANT_CUDA_UNIFORM2_TOKENS32 },
        { KVANT_CUDA_UNIFORM3_CHANNELS32, KVANT_CUDA_UNIFORM3_TOKENS32 },
        { KVANT_CUDA_UNIFORM4_CHANNELS, KVANT_CUDA_UNIFORM4_TOKENS },
    };
    const uint32_t least = bits >= 4 && head_dim <= 128 ? 16 : 32;
    if (u->group < least || (u->group & (u->group - 1)) != 0)
        return KVANT_CUDA_NO_KIND;
    if (bits == 8 && !u->per_channel)
        return KVANT_CUDA_UNIFORM8_CHANNELS;
    return bits <= 4 ? kinds[bits - 2][u->per_channel] : KVANT_CUDA_NO_KIND;
}

static bool init_uniform(kvant_cuda_codec *out, const kvant_codec_view *view)
{
    const kvant_uniform_view *u = &view->of.uniform;
    kvant_cuda_params *params = &out->params;
    params->kind = uniform_kind(u, view->info->bits);
    if (u->per_channel || u->n_groups > 1)
        params->decoder = uniform_decoder(u, view->info->bits, view->info->head_dim);
    for (uint32_t group = u->group; group > 1; group /= 2)
        params->group_log++;
    if (u->per_channel)
        params->grouping = KVANT_CUDA_GROUP_TOKENS;
    else if (u->n_groups > 1)
        params->grouping = KVANT_CUDA_GROUP_CHANNELS;
    out->any.group = u->group;
    out->any.per_channel = u->per_channel;
    params->codes = KVANT_CUDA_CODES_UNIFORM;
    params->n_scales = u->n_scales;
    params->symmetric = u->symmetric;
    params->levels = (float)u->levels;
    params->offset = u->hybrid ? -view->general.uniform.bias : u->offset;
    params->hybrid = u->hybrid;
    return !u->hybrid;
}

/* The probability of each level's cell under a unit normal, accurate enough for a weight. */
static double cell_weight(const float *thresholds, uint32_t n, uint32_t i)
{
    const double sqrt_half = 0.70710678118654752;
    double high = i + 1 < n ? thresholds[i] : 8, low = i ? thresholds[i - 1] : -8;
    return 0.5 * (erf(high * sqrt_half) - erf(low * sqrt_half));
}

/* Kernels look levels up as bytes: whole numbers m around a bias, value ~ step * m. With 16 levels
 * the look-up is an exclusive or of two 8-entry ones that leaves 7 bits (dequant.cuh), so m is
 * within +-63; with fewer it is within +-127. The step is searched for the least mean squared
 * error, and least squares gives the final one. */
static void byte_codebook(kvant_cuda_params *params)
{
    uint32_t n = 1u << params->bits;
    double top = n == 16 ? 63 : 127, best = INFINITY, best_step = 1;
    for (int trial = 0; trial < 4000; trial++) {
        double unit = params->values[n - 1] / (top * (0.6 + 0.4 * trial / 4000)), product = 0,
               square = 0, error = 0;
        for (uint32_t i = 0; i < n; i++) {
            double weight = cell_weight(params->thresholds, n, i),
                   m = rint(params->values[i] / unit);
            product += weight * m * params->values[i];
            square += weight * m * m;
        }
        double step = product / square;
        for (uint32_t i = 0; i < n; i++) {
            double off = params->values[i] - step * rint(params->values[i] / unit);
            error += cell_weight(params->thresholds, n, i) * off * off;
        }
        if (error >= best)
            continue;
        best = error;
        best_step = step;
        params->bias = n == 16 ? 64 : 128;
        memset(params->bytes, 0, sizeof params->bytes);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t byte = (uint32_t)(rint(params->values[i] / unit) + params->bias);
            params->bytes[i / 4] |= byte << 8 * (i % 4);
        }
    }
    params->step = (float)best_step;
}

/* Fits a curve g(u) = (n - 1) / 2 + gain tanh(slope u) that passes threshold k at about k + 1/2. As
 * long as it is within half a level there, the code of u is the whole part of g(u) or one more, and
 * one comparison decides. The kernel's tanh is exact to 2^-10. The kernel rounds g to eighths, by
 * adding 2^20, so that they are the lowest bits of the float. A margin of 0.1 of a level covers
 * both errors. Together they are at most gain x 2^-10 + 1/16. The gain keeps g between 0 and n -
 * 1. */
static bool guess_curve(kvant_cuda_params *params)
{
    uint32_t n = 1u << params->bits;
    double middle = (n - 1) / 2.0, gain = middle - 0.1, best = INFINITY;
    for (int trial = 0; trial < 1000; trial++) {
        double slope = 0.3 + 0.001 * trial, worst = 0;
        for (uint32_t k = 0; k + 1 < n; k++)
            worst =
                fmax(worst, fabs(middle + gain * tanh(slope * params->thresholds[k]) - (k + 0.5)));
        if (worst >= best)
            continue;
        best = worst;
        params->guess_slope = (float)slope;
    }
    params->guess_gain = (float)gain;
    params->guess_middle = (float)(1048576 + middle);
    return best < 0.4;
}

/* If a curve does not fit the levels, because they are too uneven, they are looked up like the
 * levels of wide codes. */
static void init_codebook(kvant_cuda_codec *out, const kvant_codec_view *view)
{
    static const kvant_cuda_kind kinds[] = { KVANT_CUDA_CODEBOOK2, KVANT_CUDA_CODEBOOK3,
                                             KVANT_CUDA_CODEBOOK4 };
    const kvant_codebook_view *book = &view->of.codebook;
    const uint32_t bits = view->info->bits;
    kvant_cuda_params *params = &out->params;
    params->codes = KVANT_CUDA_CODES_CODEBOOK;
    params->kind = KVANT_CUDA_CODEBOOK_WIDE;
    params->unbiased = book->unbiased;
    params->feedback = view->feedback.pivots != NULL;
    params->inverse_sqrt_dim = book->inverse_sqrt_dim;
    memcpy(out->wide.values, book->values, sizeof *book->values << bits);
    memcpy(out->wide.thresholds, book->thresholds, sizeof *book->thresholds * ((1u << bits) - 1));
    if (bits == 6 && view->info->role == KVANT_ROLE_K)
        params->decoder = KVANT_CUDA_CODEBOOK6;
    if (bits < 2 || bits > 4)
        return;
    memcpy(params->values, book->values, sizeof *book->values << bits);
    memcpy(params->thresholds, book->thresholds, sizeof *book->thresholds * ((1u << bits) - 1));
    byte_codebook(params);
    /* kernels for other head_dims compare with thresholds only */
    if (guess_curve(params) || !kvant_cuda_knows(params->head_dim))
        params->kind = kinds[bits - 2];
}

bool kvant_cuda_general_init(kvant_cuda_codec *out, const kvant_codec_view *view)
{
    const kvant_cuda_params *params = &out->params;
    out->general =
        (kvant_general){ .view = view->general,
                         .head_dim = params->head_dim,
                         .keys = params->role == KVANT_ROLE_K,
                         .metadata = params->metadata_offset,
                         .head_stride = view->general.uniform.clusters
                                            ? (uint32_t)(view->table_bytes / sizeof(float))
                                            : 0 };
    return view->general.kind != KVANT_GENERAL_NONE;
}

/* Whether kernels other than the general ones serve the codes. */
static bool init_codes(kvant_cuda_codec *out, const kvant_codec_view *view)
{
    switch (view->kind) {
    case KVANT_CODES_UNIFORM: return init_uniform(out, view);
    case KVANT_CODES_CODEBOOK: init_codebook(out, view); return true;
    case KVANT_CODES_TRELLIS: kvant_cuda_trellis_init(out, view); return true;
#if KVANT_PAPERS
    case KVANT_CODES_CHUNK: return kvant_cuda_chunk_init(&out->params, &out->directions, view);
#endif
    default: break;
    }
    return false;
}

/* Whether only kernels of papers/ serve the codec, and this build lacks them. libkvant may come
 * from another build, which has the families of papers. */
static bool lacks_kernels(const kvant_codec_view *view)
{
    if (KVANT_PAPERS)
        return false;
    switch (view->general.kind) {
    case KVANT_GENERAL_NONE:
    case KVANT_GENERAL_RAW: return false;
    case KVANT_GENERAL_UNIFORM: return view->general.uniform.clusters != 0;
    default: return true;
    }
}

#if KVANT_PAPERS
/* Copies the tables of codecs whose kernels of any/ read them. */
static kvant_status copy_tables(kvant_cuda_codec *out, const kvant_codec_view *view)
{
    if (!kvant_cuda_is_general(&out->params) || view->table_bytes == 0 || out->general.head_stride)
        return KVANT_OK;
    const size_t own_bytes = (view->table_bytes + 15) / 16 * 16,
                 bytes = own_bytes + kvant_cuda_halves_bytes(&out->general);
    kvant_cuda_tables_of *tables = calloc(1, sizeof *tables + bytes);
    KVANT_RETURN_IF(!tables, KVANT_ERR_MEMORY);
    out->tables = tables;
    tables->host = tables + 1;
    tables->bytes = bytes;
    memcpy(tables->host, view->tables, view->table_bytes);
    if (bytes > own_bytes) {
        out->general.halves = (uint32_t)(own_bytes / sizeof(float));
        kvant_cuda_halves(&out->general, view->tables,
                          (uint16_t *)tables->host + own_bytes / sizeof(uint16_t));
    }
    return KVANT_OK;
}
#else
/* No codec that this build serves has tables. */
static kvant_status copy_tables(kvant_cuda_codec *out, const kvant_codec_view *view)
{
    (void)out, (void)view;
    return KVANT_OK;
}
#endif

kvant_status kvant_cuda_params_init(kvant_cuda_codec *out, const kvant_codec_view *view,
                                    const kvant_cuda_error *error)
{
    const kvant_codec_info *info = view->info;
    const uint32_t d = info->head_dim;
    out->params = (kvant_cuda_params){ .head_dim = d,
                                       .bits = info->bits,
                                       .role = info->role,
                                       .metadata_offset = (uint32_t)info->metadata_offset,
                                       .page_bytes = (uint32_t)info->page_bytes,
                                       .exact_limit = view->exact_limit };
    if (d == 0 || d % 16 != 0 || d > KVANT_CUDA_MOST_DIM)
        return kvant_cuda_refuse(error, KVANT_ERR_UNSUPPORTED,
                                 "not on the GPU: head_dim %u is not a multiple of 16 up to 512",
                                 (unsigned)d);
    if (lacks_kernels(view))
        return kvant_cuda_refuse(error, KVANT_ERR_UNSUPPORTED,
                                 "not on the GPU: this libkvant_cuda has no kernels for %s; build "
                                 "it with -DKVANT_PAPERS=ON",
                                 info->spec);
    init_transform(out, view);
    const bool general = kvant_cuda_general_init(out, view);
    if (!init_codes(out, view)) {
        if (!general)
            return kvant_cuda_refuse(
                error, KVANT_ERR_UNSUPPORTED,
                "not on the GPU: %s has no kernel there: use another codec, or the CPU",
                info->spec);
        out->params.codes = KVANT_CUDA_CODES_GENERAL;
        out->params.kind = KVANT_CUDA_GENERAL;
        out->params.grouping =
            info->block_tokens > 1 ? KVANT_CUDA_GROUP_TOKENS : KVANT_CUDA_GROUP_TOKEN;
    }
    return copy_tables(out, view);
}

kvant_status kvant_cuda_table_codec_create(const kvant_codec_view *view, kvant_cuda_codec **out,
                                           char *err, size_t errlen)
{
    const kvant_cuda_error error = { err, errlen };
    const size_t spec_bytes = strlen(view->info->spec) + 1;
    *out = NULL;
    kvant_cuda_codec *codec = calloc(1, sizeof *codec + spec_bytes);
    if (!codec)
        return kvant_cuda_refuse(&error, KVANT_ERR_MEMORY, "out of memory for a codec");
    kvant_status status = kvant_cuda_params_init(codec, view, &error);
    if (status != KVANT_OK) {
        free(codec);
        return status;
    }
    codec->info = *view->info;
    codec->info.spec = memcpy(codec + 1, view->info->spec, spec_bytes);
    *out = codec;
    return KVANT_OK;
}

kvant_status kvant_cuda_table_codec_create_open(const kvant_cuda_codec *sealed,
                                                kvant_cuda_codec **open)
{
    kvant_cuda_codec *codec = calloc(1, sizeof *codec);
    *open = codec;
    KVANT_RETURN_IF(!codec, KVANT_ERR_MEMORY);
    size_t bytes = (size_t)KVANT_PAGE_TOKENS * sealed->params.head_dim * sizeof(uint16_t);
    codec->params = (kvant_cuda_params){ .codes = KVANT_CUDA_CODES_OPEN,
                                         .kind = KVANT_CUDA_OPEN,
                                         .head_dim = sealed->params.head_dim,
                                         .bits = 16,
                                         .role = sealed->params.role,
                                         .metadata_offset = (uint32_t)bytes,
                                         .page_bytes = (uint32_t)bytes,
                                         .key_transform_kind = sealed->params.key_transform_kind,
                                         .dense = sealed->params.dense,
                                         .rotation = sealed->params.rotation,
                                         .exact_limit = sealed->params.exact_limit };
    codec->any.rotation = sealed->any.rotation;
    codec->rotation = sealed->rotation;
    codec->has_dense_rotation = sealed->has_dense_rotation;
    codec->info = sealed->info;
    codec->info.spec = "f16";
    codec->info.block_tokens = 1;
    codec->info.bits = 16;
    codec->info.code_bytes = codec->info.metadata_offset = codec->info.page_bytes = bytes;
    codec->info.metadata_bytes = 0;
    codec->info.true_bits = codec->info.nominal_bits = 16;
    return KVANT_OK;
}

void kvant_cuda_table_codec_free(kvant_cuda_codec **codec)
{
    kvant_cuda_tables_free((*codec)->tables);
    free((*codec)->tables);
    free(*codec);
    *codec = NULL;
}

kvant_status kvant_cuda_table_codec_get_info(const kvant_cuda_codec *codec, kvant_codec_info *info)
{
    KVANT_RETURN_IF(!info || info->size != sizeof *info, KVANT_ERR_ARGUMENT);
    *info = codec->info;
    return KVANT_OK;
}
