/* encode.c - see encode.h. Also has kvant_codec_encode, which runs the same three steps. */
#include "encode.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"

/* No quantiser's scale exceeds 4 times the largest transformed number, which rounding to fp16 grows
 * by at most 2^-11 of itself. */
#define MOST_SCALE 4.01f
/* The largest fp16 number that is at most KVANT_HALF_MAX / MOST_SCALE. Numbers below it do not
 * exceed it when they are rounded to fp16. */
#define MOST_EXACT 16328.0f

/* Below this magnitude of (x - c) / s every scale and zero point fits fp16. The transform grows
 * a number by at most sqrt(head_dim) times its gain. Rounding grows it less than 1.001 times. */
static float safe_magnitude(const kvant_transform *transform)
{
    return 0.999f * MOST_EXACT /
           (sqrtf((float)transform->head_dim) * kvant_transform_gain(transform));
}

static float magnitude(const kvant_kernels *kernels, const float *x, uint32_t n)
{
    return kvant_float_from_bits(kernels->magnitude(x, n));
}

/* Computes the bound from the largest |c| and the smallest s. */
float kvant_codec_safe_input(const kvant_transform *transform, const kvant_kernels *kernels,
                             const kvant_affine *affine)
{
    uint32_t d = transform->head_dim;
    float safe = safe_magnitude(transform), least = 1, most;
    if (affine && affine->scale)
        kernels->range(affine->scale, d, &least, &most);
    safe *= least;
    return affine && affine->center ? safe - magnitude(kernels, affine->center, d) : safe;
}

float kvant_codec_exact_limit(const kvant_codec *codec)
{
    const bool stores_numbers =
        codec->view.kind == KVANT_CODES_UNIFORM || codec->view.general.kind == KVANT_GENERAL_RAW;
    return stores_numbers ? KVANT_HALF_MAX : MOST_EXACT;
}

/* The quantiser is asked only for rows with large numbers, because a trellis codec would have to
 * search to answer. */
static kvant_status check_transformed(const kvant_codec *codec, const kvant_kernels *kernels,
                                      const float *y)
{
    float largest = magnitude(kernels, y, codec->info.head_dim);
    KVANT_RETURN_IF(!(largest <= FLT_MAX), KVANT_ERR_RANGE);
    return largest <= KVANT_HALF_MAX / MOST_SCALE ? KVANT_OK
                                                  : codec->quantizer->check(codec, kernels, y);
}

/* Checks a row with large numbers. */
static kvant_status check_large(const kvant_codec *codec, const kvant_transform *transform,
                                const kvant_kernels *kernels, const kvant_affine *affine,
                                const float *x, bool open)
{
    float y[KVANT_MAX_HEAD_DIM];
    const float *z = kvant_transform_normalise(transform, affine, x, y);
    if (magnitude(kernels, z, codec->info.head_dim) <= safe_magnitude(transform))
        return KVANT_OK;
    kvant_transform_forward(transform, kernels, affine, x, y);
    if (!open)
        return check_transformed(codec, kernels, y);
    return magnitude(kernels, y, codec->info.head_dim) <= codec->view.exact_limit ? KVANT_OK
                                                                                  : KVANT_ERR_RANGE;
}

kvant_status kvant_codec_check_rows(const kvant_codec *codec, const kvant_transform *transform,
                                    const kvant_kernels *kernels, const kvant_affine *affine,
                                    const float *rows, size_t stride, size_t n, bool open)
{
    float safe = kvant_codec_safe_input(transform, kernels, affine);
    for (size_t i = 0; i < n; i++) {
        const float *x = rows + i * stride;
        float largest = magnitude(kernels, x, codec->info.head_dim);
        KVANT_RETURN_IF(!(largest <= FLT_MAX), KVANT_ERR_NONFINITE);
        if (!(largest <= safe))
            KVANT_FORWARD(check_large(codec, transform, kernels, affine, x, open));
    }
    return KVANT_OK;
}

bool kvant_codec_fits_open(const kvant_codec *codec, const kvant_kernels *kernels, float *y)
{
    uint16_t half[KVANT_MAX_HEAD_DIM];
    const uint32_t d = codec->info.head_dim;
    if (!(magnitude(kernels, y, d) <= KVANT_HALF_MAX))
        return false;
    kernels->float_to_half(y, half, d);
    kernels->half_to_float(half, y, d);
    return check_transformed(codec, kernels, y) == KVANT_OK;
}

bool kvant_codec_encodes_slowly(const kvant_codec *codec)
{
    return codec->view.kind == KVANT_CODES_TRELLIS || codec->feedback;
}

#define TOGETHER 4u /* rows that go through a full W at once */

/* At most TOGETHER rows. */
static void transform_together(const kvant_transform *transform, const kvant_kernels *kernels,
                               const kvant_affine *affine, const float *rows, size_t stride,
                               uint32_t n, float *y)
{
    const uint32_t d = transform->head_dim;
    float z[TOGETHER * KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < n; i++) {
        const float *x = rows + i * stride,
                    *source = kvant_transform_normalise(transform, affine, x, z + (size_t)i * d);
        if (source == x)
            memcpy(z + (size_t)i * d, x, d * sizeof *z);
    }
    kvant_transform_apply_rows(transform, kernels, n, z, y);
}

void kvant_codec_transform_rows(const kvant_transform *transform, const kvant_kernels *kernels,
                                const kvant_affine *affine, const float *rows, size_t stride,
                                size_t n, float *y)
{
    const size_t d = transform->head_dim;
    const bool full = kvant_transform_is_full(transform);
    for (size_t i = 0; full && i < n; i += TOGETHER)
        transform_together(transform, kernels, affine, rows + i * stride, stride,
                           n - i < TOGETHER ? (uint32_t)(n - i) : TOGETHER, y + i * d);
    for (size_t i = 0; !full && i < n; i++)
        kvant_transform_forward(transform, kernels, affine, rows + i * stride, y + i * d);
}

void kvant_codec_encode_transformed(const kvant_codec *codec, const kvant_kernels *kernels,
                                    const float *y, uint32_t first, uint32_t n, void *page)
{
    uint32_t block = codec->info.block_tokens;
    for (uint32_t i = 0; i < n; i += block)
        codec->quantizer->encode(codec, kernels, y + (size_t)i * codec->info.head_dim, first + i,
                                 page);
}

/* Rows of per-token codecs pass through one buffer; blocks of tokens need one of their size. */
static kvant_status encode_checked(const kvant_codec *codec, const kvant_kernels *kernels,
                                   const kvant_affine *affine, const float *rows, size_t stride,
                                   uint32_t first, uint32_t n, void *page)
{
    uint32_t block = codec->info.block_tokens;
    float row[KVANT_MAX_HEAD_DIM], *y = row;
    if (block > 1)
        y = kvant_alloc((size_t)block * codec->info.head_dim, sizeof *y);
    KVANT_RETURN_IF(!y, KVANT_ERR_MEMORY);
    for (uint32_t i = 0; i < n; i += block) {
        kvant_codec_transform_rows(&codec->transform, kernels, affine, rows + i * stride, stride,
                                   block, y);
        kvant_codec_encode_transformed(codec, kernels, y, first + i, block, page);
    }
    if (block > 1)
        kvant_free(y);
    return KVANT_OK;
}

kvant_status kvant_codec_encode(const kvant_codec *codec, const kvant_affine *affine,
                                const float *rows, size_t stride, uint32_t first, uint32_t n,
                                void *page)
{
    KVANT_RETURN_IF(!codec || !rows || !page, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!kvant_codec_accepts_tokens(first, n, codec->info.block_tokens),
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(n > 1 && stride < codec->info.head_dim, KVANT_ERR_ARGUMENT);
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    KVANT_FORWARD(
        kvant_codec_check_rows(codec, &codec->transform, kernels, affine, rows, stride, n, false));
    return encode_checked(codec, kernels, affine, rows, stride, first, n, page);
}
