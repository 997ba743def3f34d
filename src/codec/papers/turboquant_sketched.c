/* turboquant_sketched.c - TurboQuant (prod), Algorithm 2: `turboquant-b:qjl` is b - 1 bits of mse
 * codes and a 1-bit sketch of their residual. b = 1 is the sketch alone. Inner products are
 * unbiased, at the price of one bit.
 *
 * The first stage keeps scale=norm: the sketch removes its bias, and its residual is smaller. */
#include <string.h>

#include "../../base/half.h"
#include "../turboquant.h"
#include "qjl.h"

typedef struct sketched {
    kvant_codebook book; /* bits is 0 when there is no first stage */
    kvant_qjl qjl;
    float matrix[]; /* the sketch's projection */
} sketched;

/* Computes the codes of y, the scale to store and the residual. */
static float first_stage(const sketched *s, const kvant_kernels *kernels, const float *y,
                         uint8_t *codes, float *residual)
{
    uint32_t d = s->qjl.projection.head_dim;
    memcpy(residual, y, d * sizeof *y);
    if (s->book.bits == 0)
        return 0;
    float decoded[KVANT_MAX_HEAD_DIM], scale = kvant_codebook_quantize(&s->book, kernels, y, codes);
    kvant_codebook_decode(&s->book, codes, scale, decoded);
    for (uint32_t j = 0; j < d; j++)
        residual[j] -= decoded[j];
    return scale;
}

static kvant_status sketched_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                   const float *y)
{
    const sketched *s = codec->state;
    float residual[KVANT_MAX_HEAD_DIM];
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    KVANT_RETURN_IF(s->book.bits && !kvant_codebook_fits(&s->book, kernels, y), KVANT_ERR_RANGE);
    first_stage(s, kernels, y, codes, residual);
    return kvant_qjl_fits(&s->qjl, residual) ? KVANT_OK : KVANT_ERR_RANGE;
}

static void sketched_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                            uint32_t token, void *page)
{
    const sketched *s = codec->state;
    float residual[KVANT_MAX_HEAD_DIM];
    uint8_t codes[KVANT_MAX_HEAD_DIM] = { 0 };
    float scale = first_stage(s, kernels, y, codes, residual);
    if (s->book.bits) {
        kvant_codec_metadata(codec, page)[token] = kvant_half_from_float(scale);
        kvant_layout_put(&codec->layout, page, token, codes);
    }
    kvant_qjl_encode(&s->qjl, kernels, residual, token, page);
}

static void sketched_decode(const kvant_codec *codec, const kvant_kernels *kernels,
                            const void *page, uint32_t token, float *y)
{
    const sketched *s = codec->state;
    memset(y, 0, codec->info.head_dim * sizeof *y);
    if (s->book.bits) {
        uint8_t codes[KVANT_MAX_HEAD_DIM];
        uint16_t scale = kvant_codec_metadata_of(codec, page)[token];
        kvant_layout_get(&codec->layout, page, token, codes);
        kvant_codebook_decode(&s->book, codes, kvant_half_to_float(scale), y);
    }
    kvant_qjl_add(&s->qjl, kernels, page, token, y);
}

static const kvant_quantizer sketched_quantizer = { sketched_check, sketched_encode,
                                                    sketched_decode, kvant_unpack_decoded };

kvant_status kvant_turboquant_create_sketched(kvant_codec *codec, const turboquant_variant *variant)
{
    uint32_t d = codec->info.head_dim, first = variant->bits - 1;
    size_t matrix = kvant_qjl_matrix_floats((kvant_sketch)variant->sketch, d) * sizeof(float);
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(sketched) + matrix));
    sketched *s = codec->state;
    if (first)
        kvant_codebook_init(&s->book, d, first);
    KVANT_FORWARD(
        kvant_qjl_init(&s->qjl, (kvant_sketch)variant->sketch, d, variant->seed, s->matrix));
    codec->quantizer = &sketched_quantizer;
    /* Without a first stage the layout still tells unpacked tiles their order. */
    kvant_layout_init(&codec->layout, codec->info.role, d, first ? first : 1);
    kvant_qjl_set_page(&s->qjl, codec, first, first ? codec->layout.code_bytes : 0,
                       first ? KVANT_PAGE_TOKENS * sizeof(uint16_t) : 0);
    kvant_codec_set_tables(codec, sizeof(sketched) + matrix);
    codec->view.general.kind = first ? KVANT_GENERAL_CODEBOOK : KVANT_GENERAL_SKETCH;
    codec->view.general.books[0] = kvant_codebook_get_position(codec, &s->book);
    kvant_qjl_set_view(&s->qjl, codec);
    return KVANT_OK;
}
