/* polar_blocks.c - `polar-3.9`: PolarQuant as its own paper has it. The recursion stops after four
 * levels, so 16 channels share an fp16 radius. Angles of the first level have 4 bits, all further
 * angles have 2 bits. A block of 16 channels takes 62 bits, which is 3.875 per number. format.md,
 * "Polar blocks". */
#include <string.h>

#include "../../base/half.h"
#include "../../page/chunks.h"
#include "polar.h"

#define BLOCK 16u                  /* channels, by four levels of the recursion */
#define FIRST 8u                   /* angles of the first list */
#define OTHERS (BLOCK - 1 - FIRST) /* angles of the three further lists */

typedef struct polar_blocks {
    kvant_polar polar;                /* of a block */
    kvant_chunk_layout first, others; /* every code is a chunk */
    size_t others_offset;             /* bytes of the page */
    uint32_t n_blocks;
} polar_blocks;

static kvant_status blocks_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                 const float *y)
{
    const polar_blocks *b = codec->state;
    for (uint32_t i = 0; i < b->n_blocks; i++)
        KVANT_RETURN_IF(!kvant_polar_fits(&b->polar, kernels, y + i * BLOCK), KVANT_ERR_RANGE);
    return KVANT_OK;
}

static void blocks_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                          uint32_t token, void *page)
{
    const polar_blocks *b = codec->state;
    uint16_t *radius = kvant_codec_metadata(codec, page) + token;
    uint32_t first[KVANT_MAX_HEAD_DIM], others[KVANT_MAX_HEAD_DIM];
    uint8_t codes[BLOCK];
    for (uint32_t i = 0; i < b->n_blocks; i++) {
        radius[i * KVANT_PAGE_TOKENS] =
            kvant_half_from_float(kvant_polar_quantize(&b->polar, kernels, y + i * BLOCK, codes));
        for (uint32_t j = 0; j < FIRST; j++)
            first[i * FIRST + j] = codes[j];
        for (uint32_t j = 0; j < OTHERS; j++)
            others[i * OTHERS + j] = codes[FIRST + j];
    }
    kvant_chunk_layout_put(&b->first, page, token, first);
    kvant_chunk_layout_put(&b->others, (uint8_t *)page + b->others_offset, token, others);
}

static void blocks_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                          uint32_t token, float *y)
{
    const polar_blocks *b = codec->state;
    const uint16_t *radius = kvant_codec_metadata_of(codec, page) + token;
    uint32_t first[KVANT_MAX_HEAD_DIM], others[KVANT_MAX_HEAD_DIM];
    uint8_t codes[BLOCK];
    (void)kernels;
    kvant_chunk_layout_get(&b->first, page, token, first);
    kvant_chunk_layout_get(&b->others, (const uint8_t *)page + b->others_offset, token, others);
    for (uint32_t i = 0; i < b->n_blocks; i++) {
        for (uint32_t j = 0; j < FIRST; j++)
            codes[j] = (uint8_t)first[i * FIRST + j];
        for (uint32_t j = 0; j < OTHERS; j++)
            codes[FIRST + j] = (uint8_t)others[i * OTHERS + j];
        kvant_polar_dequantize(&b->polar, codes, kvant_half_to_float(radius[i * KVANT_PAGE_TOKENS]),
                               y + i * BLOCK);
    }
}

static const kvant_quantizer blocks_quantizer = { blocks_check, blocks_encode, blocks_decode,
                                                  kvant_unpack_decoded };

kvant_status kvant_polar_create_blocks(kvant_codec *codec, bool unbiased, const kvant_error *error)
{
    const uint32_t d = codec->info.head_dim, n = d / BLOCK;
    if (d % BLOCK != 0)
        return kvant_fail(
            error, KVANT_ERR_UNSUPPORTED,
            "polar-3.9 has blocks of 16 channels, so head_dim %u must be a multiple of 16",
            (unsigned)d);
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(polar_blocks)));
    polar_blocks *b = codec->state;
    b->n_blocks = n;
    kvant_polar_init(&b->polar, BLOCK, 4, 2, unbiased);
    kvant_chunk_layout_init(&b->first, codec->info.role, n * FIRST, 4);
    kvant_chunk_layout_init(&b->others, codec->info.role, n * OTHERS, 2);
    b->others_offset = b->first.code_bytes;
    kvant_layout_init(&codec->layout, codec->info.role, d, 4); /* the order of unpacked tiles */
    kvant_codec_set_page(codec, 2, b->others_offset + b->others.code_bytes,
                         (size_t)n * KVANT_PAGE_TOKENS * sizeof(uint16_t));
    codec->info.nominal_bits = (FIRST * 4 + OTHERS * 2 + 16) / (double)BLOCK;
    codec->quantizer = &blocks_quantizer;
    return KVANT_OK;
}
