/* encode.c - temporary; the codec branch brings the real one. */
#include "encode.h"
#include <math.h>
#include "../base/half.h"
static kvant_status check(const kvant_codec *codec, const kvant_affine *affine, const float *rows, size_t stride, size_t n, bool open)
{
    for (size_t i = 0; i < n; i++) {
        float y[KVANT_MAX_HEAD_DIM];
        for (uint32_t j = 0; j < codec->info.head_dim; j++)
            KVANT_RETURN_IF(!isfinite(rows[i * stride + j]), KVANT_ERR_NONFINITE);
        kvant_transform_forward(&codec->transform, affine, rows + i * stride, y);
        for (uint32_t j = 0; j < codec->info.head_dim; j++)
            KVANT_RETURN_IF(!isfinite(y[j]) || (open && !(fabsf(y[j]) <= KVANT_HALF_MAX)), KVANT_ERR_RANGE);
        KVANT_FORWARD(codec->quantizer->check(codec, y));
    }
    return KVANT_OK;
}
kvant_status kvant_codec_check_rows(const kvant_codec *codec, const kvant_kernels *kernels, const kvant_affine *affine, const float *rows, size_t stride, size_t n) { (void)kernels; return check(codec, affine, rows, stride, n, false); }
kvant_status kvant_codec_check_open_rows(const kvant_codec *codec, const kvant_kernels *kernels, const kvant_affine *affine, const float *rows, size_t stride, size_t n) { (void)kernels; return check(codec, affine, rows, stride, n, true); }
void kvant_codec_transform_rows(const kvant_codec *codec, const kvant_kernels *kernels, const kvant_affine *affine, const float *rows, size_t stride, size_t n, float *y)
{
    (void)kernels;
    for (size_t i = 0; i < n; i++) kvant_transform_forward(&codec->transform, affine, rows + i * stride, y + i * codec->info.head_dim);
}
void kvant_codec_encode_transformed(const kvant_codec *codec, const kvant_kernels *kernels, const float *y, uint32_t first, uint32_t n, void *page)
{
    (void)kernels;
    kvant_rows rows = { NULL, y, codec->info.head_dim, true };
    for (uint32_t i = 0; i < n; i += codec->info.block_tokens) codec->quantizer->encode(codec, &rows, i, first + i, page);
}
bool kvant_codec_fits(const kvant_codec *codec, const float *y)
{
    for (uint32_t j = 0; j < codec->info.head_dim; j++) if (!(fabsf(y[j]) <= KVANT_HALF_MAX)) return false;
    return codec->quantizer->check(codec, y) == KVANT_OK;
}
bool kvant_codec_encodes_slowly(const kvant_codec *codec) { return codec->trellis != NULL; }
