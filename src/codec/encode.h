/* encode.h - temporary; the codec branch brings the real one. */
#ifndef KVANT_CODEC_ENCODE_H
#define KVANT_CODEC_ENCODE_H
#include "codec_internal.h"
kvant_status kvant_codec_check_rows(const kvant_codec *codec, const kvant_kernels *kernels, const kvant_affine *affine, const float *rows, size_t stride, size_t n);
kvant_status kvant_codec_check_open_rows(const kvant_codec *codec, const kvant_kernels *kernels, const kvant_affine *affine, const float *rows, size_t stride, size_t n);
void kvant_codec_transform_rows(const kvant_codec *codec, const kvant_kernels *kernels, const kvant_affine *affine, const float *rows, size_t stride, size_t n, float *y);
void kvant_codec_encode_transformed(const kvant_codec *codec, const kvant_kernels *kernels, const float *y, uint32_t first, uint32_t n, void *page);
bool kvant_codec_fits(const kvant_codec *codec, const float *y);
bool kvant_codec_encodes_slowly(const kvant_codec *codec);
#endif
