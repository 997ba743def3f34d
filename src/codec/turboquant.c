/* turboquant.c - TurboQuant (mse), Algorithm 1: a random rotation, then a scalar codebook. The
 * codebook is optimal for one channel of a rotated unit vector. format.md, "Lloyd-Max codes", has
 * formulas and rounding.
 *
 * Reads the options of all variants. papers/turboquant_sketched.c has prod (Algorithm 2),
 * papers/turboquant_tiers.c has 2.5 and 3.5 bits.
 *
 * `scale=norm` is the paper's scale: decoded vectors are too short on average, which biases inner
 * products. The default `scale=unbiased` stores |y|^2 / <y, c> instead, at no cost in bits. This is
 * the correction of RaBitQ and EDEN. */
#include "turboquant.h"

#include <math.h>
#include <string.h>

#include "../base/half.h"
#include "../math/lloyd_max.h"
#include "families.h"
#include "feedback.h"
#if KVANT_PAPERS
#include "papers/qjl.h"
#endif

static kvant_status turboquant_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                     const float *y)
{
    const kvant_codebook *book = kvant_codebook_of(codec);
    bool fits = codec->feedback ? kvant_feedback_fits(book, kernels, y)
                                : kvant_codebook_fits(book, kernels, y);
    return fits ? KVANT_OK : KVANT_ERR_RANGE;
}

static void turboquant_encode(const kvant_codec *codec, const kvant_kernels *kernels,
                              const float *y, uint32_t token, void *page)
{
    uint8_t codes[KVANT_MAX_HEAD_DIM] = { 0 };
    const kvant_codebook *book = kvant_codebook_of(codec);
    float scale = codec->feedback
                      ? kvant_feedback_quantize(codec->feedback, book, kernels, y, codes)
                      : kvant_codebook_quantize(book, kernels, y, codes);
    kvant_codec_metadata(codec, page)[token] = kvant_half_from_float(scale);
    kvant_layout_put(&codec->layout, page, token, codes);
}

static void turboquant_decode(const kvant_codec *codec, const kvant_kernels *kernels,
                              const void *page, uint32_t token, float *y)
{
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    float scale = kvant_half_to_float(kvant_codec_metadata_of(codec, page)[token]);
    (void)kernels;
    kvant_layout_get(&codec->layout, page, token, codes);
    kvant_codebook_decode(kvant_codebook_of(codec), codes, scale, y);
}

static void turboquant_unpack(const kvant_codec *codec, const kvant_kernels *kernels,
                              const void *page, float *tile)
{
    uint32_t d = codec->info.head_dim, padded = codec->layout.padded_dim;
    _Alignas(64) float scale[KVANT_PAGE_TOKENS], zero[KVANT_PAGE_TOKENS] = { 0 };
    kernels->token_halves(kvant_codec_metadata_of(codec, page), scale);
    kernels->unpack(&codec->layout, page, kvant_codebook_of(codec)->values, 0, tile);
    if (codec->info.role == KVANT_ROLE_V) {
        kernels->scale_rows(tile, KVANT_PAGE_TOKENS, padded, scale, zero);
        return;
    }
    kernels->scale_columns(tile, d, KVANT_PAGE_TOKENS, scale, zero);
    memset(tile + (size_t)d * KVANT_PAGE_TOKENS, 0,
           (size_t)(padded - d) * KVANT_PAGE_TOKENS * sizeof *tile);
}

static const kvant_quantizer turboquant_quantizer = { turboquant_check, turboquant_encode,
                                                      turboquant_decode, turboquant_unpack };

static void turboquant_lines(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, kvant_code_lines *lines)
{
    kvant_codec_token_lines(codec, kernels, page, kvant_codebook_of(codec)->code_step, lines);
}

/* Offers the codebook's values as integers. The outermost value becomes the largest integer; all
 * further values are rounded, by half a step at most. */
static void offer_codes(kvant_codec *codec, kvant_codebook *book)
{
    uint32_t n = 1u << book->bits;
    /* a code of more than 4 bits is looked up as two digits, and a codebook's value is no sum of
     * two parts */
    if (n > 16)
        return;
    book->code_step = book->values[n - 1] / KVANT_CODE_VALUE_MAX;
    for (uint32_t c = 0; c < n; c++)
        codec->product.integers.values[c] = (int16_t)lrintf(book->values[c] / book->code_step);
    kvant_codec_offer_codes(codec, false, codec->info.head_dim, turboquant_lines);
}

static kvant_status create_plain(kvant_codec *codec, const turboquant_variant *variant)
{
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(kvant_codebook)));
    kvant_codebook *book = codec->state;
    kvant_codebook_init(book, codec->info.head_dim, variant->bits);
    book->unbiased = variant->unbiased;
    codec->quantizer = &turboquant_quantizer;
    codec->accepts_feedback = true;
    kvant_codec_set_sizes(codec, variant->bits, KVANT_PAGE_TOKENS, 0);
    codec->view.kind = KVANT_CODES_CODEBOOK;
    codec->view.of.codebook = (kvant_codebook_view){ book->values, book->thresholds,
                                                     book->inverse_sqrt_dim, book->unbiased };
    offer_codes(codec, book);
    return KVANT_OK;
}

typedef struct turboquant_options {
    int32_t scale, qjl, sketch;
} turboquant_options;

static const kvant_option table[] = {
#if KVANT_PAPERS
    KVANT_SCALE_OPTION(turboquant_options, KVANT_OPTION_ABSENT),
    KVANT_QJL_OPTIONS(turboquant_options),
#else
    KVANT_SCALE_OPTION(turboquant_options, KVANT_SCALE_UNBIASED),
#endif
    { .key = NULL },
};

static kvant_status read_variant(const kvant_spec *spec, turboquant_variant *v,
                                 const kvant_error *error)
{
    const kvant_error quiet = { NULL, 0 };
    const char *text = spec->variant ? spec->variant : "";
    v->tiers = strcmp(text, "2.5") == 0 || strcmp(text, "3.5") == 0;
    v->bits = text[0] == '2' ? 2 : 3;
    if (v->tiers || kvant_spec_bits(spec, 1, KVANT_LLOYD_MAX_BITS, &v->bits, &quiet) == KVANT_OK)
        return KVANT_OK;
    return kvant_fail(error, KVANT_ERR_SPEC,
                      "turboquant takes 1 to 8 bits, 2.5 or 3.5, as in turboquant-4");
}

#if KVANT_PAPERS
static kvant_status resolve(turboquant_options *o, turboquant_variant *v, const kvant_error *error)
{
    kvant_sketch sketch;
    if (v->tiers && o->qjl)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "turboquant-%u.5 has no option 'qjl': use whole bits", (unsigned)v->bits);
    KVANT_FORWARD(kvant_qjl_resolve(o->qjl, &o->sketch, &o->scale, &sketch, error));
    v->sketch = (int)sketch;
    return KVANT_OK;
}

static kvant_status create_variant(kvant_codec *codec, const turboquant_variant *v,
                                   const kvant_error *error)
{
    codec->accepts_seed = v->tiers || v->sketch != KVANT_SKETCH_NONE;
    if (v->tiers)
        return kvant_turboquant_create_tiers(codec, v, error);
    if (v->sketch != KVANT_SKETCH_NONE)
        return kvant_turboquant_create_sketched(codec, v);
    return create_plain(codec, v);
}
#else
static kvant_status resolve(turboquant_options *o, turboquant_variant *v, const kvant_error *error)
{
    (void)o;
    if (v->tiers)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "turboquant-%u.5 is not in this build: build with -DKVANT_PAPERS=ON",
                          (unsigned)v->bits);
    return KVANT_OK;
}

static kvant_status create_variant(kvant_codec *codec, const turboquant_variant *v,
                                   const kvant_error *error)
{
    (void)error;
    return create_plain(codec, v);
}
#endif

static kvant_status create_turboquant(kvant_codec *codec, const kvant_request *request,
                                      const kvant_error *error)
{
    const uint32_t d = codec->info.head_dim;
    kvant_transform_defaults defaults = kvant_transform_random(d);
    turboquant_options o = *(const turboquant_options *)request->options;
    turboquant_variant v = { .seed = request->location->seed };
    KVANT_FORWARD(read_variant(request->spec, &v, error));
    KVANT_FORWARD(resolve(&o, &v, error));
    if (d < 4)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "turboquant needs head_dim 4 or more, not %u", (unsigned)d);
    if (v.tiers) /* each tier rotates by itself */
        defaults.rotate = KVANT_ROTATE_NONE;
    KVANT_FORWARD(kvant_codec_set_transform(codec, request, defaults, error));
    v.unbiased = o.scale == KVANT_SCALE_UNBIASED;
    kvant_codec_describe(codec, table, &o, "turboquant-%u%s", (unsigned)v.bits,
                         v.tiers ? ".5" : "");
    return create_variant(codec, &v, error);
}

#if KVANT_PAPERS
#define VARIANTS "1 2 2.5 3 3.5 4 5 6 7 8"
#else
#define VARIANTS "1 2 3 4 5 6 7 8"
#endif

KVANT_FAMILY(
    turboquant, VARIANTS, "TurboQuant, Algorithms 1 (mse) and 2 (prod), section 2.3",
    "random rotation, then the Lloyd-Max codebook of its marginal; 2.5 and 3.5: outlier channels",
    table, kvant_common_options, create_turboquant)
