/* encode.h - rows to page bytes in three steps: check, transform, encode. For callers inside the
 * library.
 *
 * A caller checks all rows of a call before it changes anything, then transforms each row once,
 * then encodes the transformed rows y into sealed pages, open pages or both. The kernel table comes
 * from the caller. The transform is the codec's, or a learned one (src/cache/learn.h). Nothing here
 * allocates. */
#pragma once

#include "../base/attributes.h"
#include "codec_internal.h"

/* Whether n rows (row i at rows + i * stride) can be encoded. KVANT_ERR_NONFINITE when a row holds
 * a NaN or an infinity, KVANT_ERR_RANGE when a transformed row does not fit the codec. Costs one
 * pass over a row of ordinary size; only a row with large numbers is transformed.
 *
 * open: the rows are stored in an open page first. Their transformed numbers must then be at most
 * kvant_codec_exact_limit, so that they fit fp16 and sealing the page later cannot fail. */
kvant_status kvant_codec_check_rows(const kvant_codec *codec, const kvant_transform *transform,
                                    const kvant_kernels *kernels, const kvant_affine *affine,
                                    const float *rows, size_t stride, size_t n, bool open);

/* The largest magnitude with which a row passes both checks without a closer look. At most 0 when
 * the centre alone is too large. */
float kvant_codec_safe_input(const kvant_transform *transform, const kvant_kernels *kernels,
                             const kvant_affine *affine);

/* The largest magnitude of a transformed number that is appended to an open page. Kernels on GPUs
 * refuse the same rows (kvant_codec_view.exact_limit). Uniform codes and raw numbers hold every
 * fp16 number. Other codecs store a scale, such as the length of a row, that may be 4 times as
 * large as a number. */
float kvant_codec_exact_limit(const kvant_codec *codec);

/* Whether the codec can encode a transformed row from an open page. Also true for some rows beyond
 * kvant_codec_exact_limit, which an open page has from a sealed page. Rounds y to fp16. */
bool kvant_codec_fits_open(const kvant_codec *codec, const kvant_kernels *kernels, float *y);

/* Whether encoding one row takes so long that it pays to wake other threads for it, which takes
 * them microseconds. */
bool kvant_codec_encodes_slowly(const kvant_codec *codec);

/* Prefetches a sealed page that a row is about to enter, if the search for the row's codes takes
 * longer than memory does. Inline: see KVANT_PREFETCH. */
KVANT_INLINE void kvant_codec_fetch(const kvant_codec *codec, const uint8_t *page)
{
    for (size_t i = 0; i < codec->info.page_bytes && kvant_codec_encodes_slowly(codec); i += 64)
        KVANT_PREFETCH(page + i);
}

/* y = R W ((x - c) / s) for n rows. y: n x head_dim, contiguous; it does not overlap rows. */
void kvant_codec_transform_rows(const kvant_transform *transform, const kvant_kernels *kernels,
                                const kvant_affine *affine, const float *rows, size_t stride,
                                size_t n, float *y);

/* Encodes n transformed rows as tokens first ... first + n - 1 of a page of the codec. first and n
 * are multiples of block_tokens. Cannot fail after one of the checks, and allocates nothing.
 * Stack: below 40 KiB. */
void kvant_codec_encode_transformed(const kvant_codec *codec, const kvant_kernels *kernels,
                                    const float *y, uint32_t first, uint32_t n, void *page);

/* Decodes one token of a page into the transformed row y. The caller transforms y back. */
void kvant_codec_decode_transformed(const kvant_codec *codec, const kvant_kernels *kernels,
                                    const void *page, uint32_t token, float *y);

/* An open page holds the transformed rows y of 64 tokens as fp16, token after token. All codecs of
 * one head_dim share this layout. */
void kvant_codec_encode_open(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                             uint32_t first, uint32_t n, void *page);

/* Decodes y of tokens first ... first + n - 1. */
void kvant_codec_decode_open(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, uint32_t first, uint32_t n, float *y);

/* Unpacks an open page into the tile of kernels.h, in the order of channels that the codec's own
 * tiles have. */
void kvant_codec_unpack_open(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, float *tile);
