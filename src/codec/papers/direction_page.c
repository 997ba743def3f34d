/* direction_page.c - `median=page`: chunk codes with outliers of a page (outlier_pool.h), for
 * HQMQ's Med3x as its paper has it. Pages are encoded whole. A code whose index lies behind the
 * codewords names a slot: index N + slot / 2^r, radius slot mod 2^r. */
#include <string.h>

#include "../../base/half.h"
#include "direction.h"

static uint16_t *slots_of(uint16_t *metadata)
{
    return metadata + KVANT_PAGE_TOKENS;
}

static uint32_t code_of_slot(const kvant_direction *direction, uint32_t slot)
{
    return (direction->n_codewords + (slot >> direction->radius_bits)) |
           (slot & ((1u << direction->radius_bits) - 1)) << direction->index_bits;
}

/* Encodes one row; its outliers go to slots from *slot on. */
static void encode_row(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                       uint32_t token, void *page, kvant_outlier_choice *choice, uint32_t *slot)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    uint16_t *metadata = kvant_codec_metadata(codec, page);
    uint32_t codes[KVANT_DIRECTION_MAX_CHUNKS];
    kvant_direction_row r;
    kvant_direction_split(direction, y, codec->info.head_dim, &r);
    for (uint32_t c = 0; c < direction->n_chunks; c++) {
        codes[c] = 0;
        if (!kvant_outlier_is_next(&direction->pool, choice, y, c))
            continue;
        kvant_outlier_put(&direction->pool, y, c, slots_of(metadata), *slot);
        codes[c] = code_of_slot(direction, (*slot)++);
        if (direction->range_all)
            r.largest = r.norm[c] > r.largest ? r.norm[c] : r.largest;
        r.norm[c] = r.squares[c] = 0;
    }
    const float scale = kvant_direction_quantize(direction, kernels, &r);
    metadata[token] = kvant_half_from_float(scale < KVANT_HALF_MAX ? scale : KVANT_HALF_MAX);
    for (uint32_t c = 0; c < direction->n_chunks; c++)
        if (codes[c] == 0) /* no slot has code 0 */
            codes[c] = r.index[c] | (uint32_t)r.radius[c] << direction->index_bits;
    kvant_chunk_layout_put(&direction->layout, page, token, codes);
}

static void page_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                        uint32_t token, void *page)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    kvant_outlier_choice choice = kvant_outlier_pool_choose(&direction->pool, y);
    uint32_t slot = 0;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++, y += codec->info.head_dim)
        encode_row(codec, kernels, y, token + t, page, &choice, &slot);
    memset(slots_of(kvant_codec_metadata(codec, page)) + 4 * (size_t)slot, 0,
           (direction->pool.slots - slot) * 4 * sizeof(uint16_t));
}

/* Whether a code names a slot that exists. */
static bool is_slot(const kvant_direction *direction, uint32_t code, uint32_t *slot)
{
    const uint32_t index = code & ((1u << direction->index_bits) - 1),
                   above = code >> direction->index_bits;
    if (index < direction->n_codewords)
        return false;
    *slot = (index - direction->n_codewords) << direction->radius_bits | above;
    return *slot < direction->pool.slots;
}

static void page_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                        uint32_t token, float *y)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    const uint16_t *metadata = kvant_codec_metadata_of(codec, page);
    const float scale = kvant_half_to_float(metadata[token]);
    uint32_t codes[KVANT_DIRECTION_MAX_CHUNKS], slot;
    float decoded[KVANT_MAX_HEAD_DIM + 4];
    (void)kernels;
    kvant_chunk_layout_get(&direction->layout, page, token, codes);
    for (uint32_t c = 0; c < direction->n_chunks; c++) {
        const float *w =
            direction->codewords + (size_t)4 * (codes[c] & ((1u << direction->index_bits) - 1));
        const float radius = scale * (float)(codes[c] >> direction->index_bits);
        if (is_slot(direction, codes[c], &slot))
            kvant_outlier_get(metadata + KVANT_PAGE_TOKENS, slot, decoded + (size_t)4 * c);
        else
            for (uint32_t i = 0; i < 4; i++)
                decoded[4 * c + i] = radius * w[i];
    }
    memcpy(y, decoded, codec->info.head_dim * sizeof *y);
}

/* The kernel decodes outliers to zeros times a radius; they are put in afterwards. */
static void page_unpack(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                        float *tile)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    const kvant_direction_book book = { direction->codewords, direction->n_codewords,
                                        direction->index_bits, 0 };
    const uint16_t *metadata = kvant_codec_metadata_of(codec, page);
    const bool key = codec->info.role == KVANT_ROLE_K;
    const size_t step = key ? KVANT_PAGE_TOKENS : 1;
    _Alignas(64) float scale[KVANT_PAGE_TOKENS];
    uint32_t codes[KVANT_DIRECTION_MAX_CHUNKS], slot;
    float chunk[4];
    kernels->token_halves(metadata, scale);
    kernels->unpack_directions(&book, &direction->layout, page, scale, NULL, codec->info.head_dim,
                               tile);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        const uint32_t position = kvant_token_position(t);
        float *row = key ? tile + position : tile + (size_t)position * codec->layout.padded_dim;
        kvant_chunk_layout_get(&direction->layout, page, t, codes);
        for (uint32_t c = 0; c < direction->n_chunks; c++) {
            if (!is_slot(direction, codes[c], &slot))
                continue;
            kvant_outlier_get(metadata + KVANT_PAGE_TOKENS, slot, chunk);
            for (uint32_t i = 0; i < 4 && 4 * c + i < codec->info.head_dim; i++)
                row[(4 * c + i) * step] = chunk[i];
        }
    }
}

const kvant_quantizer kvant_direction_page_quantizer = { kvant_outlier_pool_check, page_encode,
                                                         page_decode, page_unpack };
