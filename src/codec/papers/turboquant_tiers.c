/* turboquant_tiers.c - `turboquant-2.5` and `turboquant-3.5` (section 2.3): a quarter of the
 * channels, the outliers, have one bit more than all remaining channels. Each of the two tiers is a
 * turboquant with its own rotation and scale.
 *
 * The paper does not say how outliers are found. Here each page has its own outliers: the channels
 * with the largest sum of squares over its 64 tokens. So pages are encoded whole. By default the
 * codec's transform has no rotation, because a rotation would hide the outliers. format.md,
 * "Tiers", has formulas and order of operations. */
#include <math.h>
#include <string.h>

#include "../../base/half.h"
#include "../../base/random.h"
#include "../../page/chunks.h"
#include "../turboquant.h"

#define MASK_WORDS (KVANT_MAX_HEAD_DIM / 32)

typedef struct tier {
    kvant_codebook book;
    kvant_transform rotation;
    kvant_chunk_layout layout;
    uint32_t first; /* its channels are first ... first + book.dim - 1 in the page's order */
    size_t codes_offset, scales_offset; /* bytes in the page */
} tier;

typedef struct tiers {
    tier tier[2]; /* first the outliers, then all remaining channels */
    size_t mask_offset;
    float matrix[]; /* of both rotations */
} tiers;

static const tiers *tiers_of(const kvant_codec *codec)
{
    return codec->state;
}

/* Writes the order of channels: channels whose bit is set in the page's mask come first. Any bits
 * give an order, so foreign pages do no harm. */
static void channel_order(const kvant_codec *codec, const void *page, uint16_t *order)
{
    const uint32_t *mask = (const uint32_t *)((const uint8_t *)page + tiers_of(codec)->mask_offset);
    uint32_t n = 0;
    for (uint32_t wanted = 2; wanted-- > 0;)
        for (uint32_t j = 0; j < codec->info.head_dim; j++)
            if ((mask[j / 32] >> j % 32 & 1) == wanted)
                order[n++] = (uint16_t)j;
}

static void sum_squares(const kvant_codec *codec, const float *y, float *energy)
{
    uint32_t d = codec->info.head_dim;
    memset(energy, 0, d * sizeof *energy);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++, y += d)
        for (uint32_t j = 0; j < d; j++)
            energy[j] += y[j] * y[j];
}

/* The number of channels that come before channel j when channels are sorted by falling energy; of
 * equal channels the lower index is first. */
static uint32_t rank_of(const float *energy, uint32_t d, uint32_t j)
{
    uint32_t rank = 0;
    for (uint32_t k = 0; k < j; k++)
        rank += energy[k] >= energy[j];
    for (uint32_t k = j + 1; k < d; k++)
        rank += energy[k] > energy[j];
    return rank;
}

static void choose_outliers(const kvant_codec *codec, const float *y, void *page)
{
    float energy[KVANT_MAX_HEAD_DIM];
    uint32_t mask[MASK_WORDS] = { 0 }, d = codec->info.head_dim;
    sum_squares(codec, y, energy);
    for (uint32_t j = 0; j < d; j++)
        if (rank_of(energy, d, j) < tiers_of(codec)->tier[0].book.dim)
            mask[j / 32] |= 1u << j % 32;
    memcpy((uint8_t *)page + tiers_of(codec)->mask_offset, mask, (d + 31) / 32 * sizeof *mask);
}

/* Encodes one token's channels of a tier, which are in the tier's order. Only scale=unbiased can
 * give a scale beyond fp16: it is cut. */
static void encode_tier(const tier *at, const kvant_kernels *kernels, const float *channels,
                        uint32_t token, void *page)
{
    float rotated[KVANT_MAX_HEAD_DIM];
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    uint32_t wide[KVANT_MAX_HEAD_DIM];
    kvant_transform_forward(&at->rotation, kernels, NULL, channels, rotated);
    float scale = kvant_codebook_quantize(&at->book, kernels, rotated, codes);
    for (uint32_t j = 0; j < at->book.dim; j++)
        wide[j] = codes[j];
    ((uint16_t *)((uint8_t *)page + at->scales_offset))[token] =
        kvant_half_from_float(scale < KVANT_HALF_MAX ? scale : KVANT_HALF_MAX);
    kvant_chunk_layout_put(&at->layout, (uint8_t *)page + at->codes_offset, token, wide);
}

static void decode_tier(const tier *at, const kvant_kernels *kernels, const void *page,
                        uint32_t token, float *channels)
{
    float rotated[KVANT_MAX_HEAD_DIM];
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    uint32_t wide[KVANT_MAX_HEAD_DIM];
    uint16_t scale = ((const uint16_t *)((const uint8_t *)page + at->scales_offset))[token];
    kvant_chunk_layout_get(&at->layout, (const uint8_t *)page + at->codes_offset, token, wide);
    for (uint32_t j = 0; j < at->book.dim; j++)
        codes[j] = (uint8_t)wide[j];
    kvant_codebook_decode(&at->book, codes, kvant_half_to_float(scale), rotated);
    kvant_transform_inverse(&at->rotation, kernels, NULL, rotated, channels);
}

/* The outlier channels are known only once the whole page is. So a row passes when its whole norm
 * would fit in either tier. */
static kvant_status tiers_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                const float *y)
{
    float squares = kernels->dot(y, y, codec->info.head_dim);
    const tier *outliers = &tiers_of(codec)->tier[0];
    /* 0.999: a rotation's and a sum's rounding */
    return sqrtf(squares) * outliers->book.inverse_sqrt_dim <= 0.999f * KVANT_HALF_MAX
               ? KVANT_OK
               : KVANT_ERR_RANGE;
}

static void tiers_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                         uint32_t token, void *page)
{
    const tiers *s = tiers_of(codec);
    uint16_t order[KVANT_MAX_HEAD_DIM];
    float sorted[KVANT_MAX_HEAD_DIM];
    choose_outliers(codec, y, page);
    channel_order(codec, page, order);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++, y += codec->info.head_dim) {
        for (uint32_t j = 0; j < codec->info.head_dim; j++)
            sorted[j] = y[order[j]];
        for (uint32_t k = 0; k < 2; k++)
            encode_tier(&s->tier[k], kernels, sorted + s->tier[k].first, token + t, page);
    }
}

static void tiers_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                         uint32_t token, float *y)
{
    const tiers *s = tiers_of(codec);
    uint16_t order[KVANT_MAX_HEAD_DIM];
    float sorted[KVANT_MAX_HEAD_DIM];
    channel_order(codec, page, order);
    for (uint32_t k = 0; k < 2; k++)
        decode_tier(&s->tier[k], kernels, page, token, sorted + s->tier[k].first);
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        y[order[j]] = sorted[j];
}

static const kvant_quantizer tiers_quantizer = { tiers_check, tiers_encode, tiers_decode,
                                                 kvant_unpack_decoded };

/* Sizes and places of everything in the page: codes of both tiers, then their scales, then the
 * mask. */
static void set_page(tiers *s, kvant_codec *codec, const turboquant_variant *variant)
{
    uint32_t d = codec->info.head_dim;
    size_t code_bytes = 0, scale_bytes = KVANT_PAGE_TOKENS * sizeof(uint16_t);
    for (uint32_t k = 0; k < 2; k++) {
        tier *at = &s->tier[k];
        kvant_chunk_layout_init(&at->layout, codec->info.role, at->book.dim, at->book.bits);
        at->codes_offset = code_bytes;
        code_bytes += at->layout.code_bytes;
    }
    kvant_codec_set_page(codec, variant->bits, code_bytes,
                         2 * scale_bytes + (d + 31) / 32 * sizeof(uint32_t));
    s->tier[0].scales_offset = codec->info.metadata_offset;
    s->tier[1].scales_offset = codec->info.metadata_offset + scale_bytes;
    s->mask_offset = codec->info.metadata_offset + 2 * scale_bytes;
    codec->info.nominal_bits = variant->bits + 0.5;
    codec->info.block_tokens = KVANT_PAGE_TOKENS;
    kvant_layout_init(&codec->layout, codec->info.role, d,
                      variant->bits); /* the order of unpacked tiles */
}

static void set_view(kvant_codec *codec, const tiers *s, size_t bytes)
{
    kvant_general_view *view = &codec->view.general;
    kvant_codec_set_tables(codec, bytes);
    view->kind = KVANT_GENERAL_TIERS;
    view->unbiased = s->tier[0].book.unbiased;
    for (uint32_t k = 0; k < 2; k++) {
        view->books[k] = kvant_codebook_get_position(codec, &s->tier[k].book);
        view->tiers.rotations[k] = kvant_codec_rotation_position(codec, &s->tier[k].rotation);
        view->tiers.codes[k] = (uint32_t)s->tier[k].codes_offset;
        view->tiers.scales[k] = (uint32_t)s->tier[k].scales_offset;
    }
    view->tiers.mask = (uint32_t)s->mask_offset;
}

kvant_status kvant_turboquant_create_tiers(kvant_codec *codec, const turboquant_variant *variant,
                                           const kvant_error *error)
{
    uint32_t d = codec->info.head_dim, dims[2] = { d / 4, d - d / 4 };
    if (d < 16)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "turboquant-%u.5 needs head_dim 16 or more, not %u",
                          (unsigned)variant->bits, (unsigned)d);
    size_t floats[2] = { kvant_transform_matrix_floats(dims[0]),
                         kvant_transform_matrix_floats(dims[1]) };
    const size_t bytes = sizeof(tiers) + (floats[0] + floats[1]) * sizeof(float);
    KVANT_FORWARD(kvant_codec_alloc_state(codec, bytes));
    tiers *s = codec->state;
    for (uint32_t k = 0; k < 2; k++) {
        tier *at = &s->tier[k];
        at->first = k ? dims[0] : 0;
        kvant_codebook_init(&at->book, dims[k], variant->bits + 1 - k);
        at->book.unbiased = variant->unbiased;
        KVANT_FORWARD(kvant_transform_init_inner(&at->rotation, dims[k],
                                                 kvant_derived_seed(variant->seed, 2 + k),
                                                 s->matrix + (k ? floats[0] : 0)));
    }
    codec->quantizer = &tiers_quantizer;
    set_page(s, codec, variant);
    set_view(codec, s, bytes);
    return KVANT_OK;
}
