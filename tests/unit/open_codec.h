/* open_codec.h - a codec whose pages are exact pages, for tests that compare whole codecs, and a
 * function that seals rows from exact pages.
 *
 * The library has no such codec: its caches encode and decode exact pages by functions of
 * encode.h. */
#ifndef KVANT_TESTS_OPEN_CODEC_H
#define KVANT_TESTS_OPEN_CODEC_H

#include "../../src/codec/encode.h"

/* Makes a codec that stores rows as fp16 after the transform of `codec`, in the channel order of
 * `codec`. `codec` must outlive the new codec. */
static inline kvant_status open_codec_create(const kvant_codec *codec, kvant_codec **open)
{
    kvant_status status =
        kvant_codec_create("f16", codec->info.head_dim, codec->info.role, 0, open, NULL, 0);
    if (status != KVANT_OK)
        return status;
    (*open)->transform = codec->transform;
    (*open)->view.transform = kvant_transform_get_view(&codec->transform);
    for (uint32_t j = 0; codec->layout.moved && j < codec->layout.padded_dim; j++)
        kvant_layout_move_row(&(*open)->layout, j, kvant_layout_row_position(&codec->layout, j));
    return KVANT_OK;
}

static inline void open_codec_free(kvant_codec **open)
{
    if (*open)
        (*open)->transform = (kvant_transform){ 0 }; /* `codec` keeps ownership */
    kvant_codec_free(open);
}

/* Encodes rows that are already transformed and hold fp16 numbers, after the codec's own check. */
static inline kvant_status seal_rows(const kvant_codec *codec, const float *y, uint32_t first,
                                     uint32_t n, void *page)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t i = 0; i < n; i++) {
        kvant_status status =
            codec->quantizer->check(codec, kernels, y + (size_t)i * codec->info.head_dim);
        if (status != KVANT_OK)
            return status;
    }
    kvant_codec_encode_transformed(codec, kernels, y, first, n, page);
    return KVANT_OK;
}

#endif
