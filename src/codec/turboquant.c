/* turboquant.c - TurboQuant (mse), Algorithm 1: random rotation, then a scalar codebook that is optimal for
 * the marginal of a rotated unit vector. Reads the options of all variants; the others are in
 * turboquant_sketched.c (prod, Algorithm 2) and turboquant_tiers.c (2.5 and 3.5 bits). Formulas and rounding:
 * docs/format.md, "Lloyd-Max codes".
 *
 * `scale=norm` is the paper's: decoded vectors are too short on average, which biases inner products. The
 * default, `scale=unbiased`, stores |y|^2 / <y, c> instead, at no cost in bits (the correction known from
 * RaBitQ and EDEN). */
#include "turboquant.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../base/half.h"
#include "../math/lloyd_max.h"
#include "feedback.h"

static kvant_status turboquant_check(const kvant_codec *codec, const kvant_kernels *kernels, const float *y)
{
    const kvant_codebook *book = kvant_codebook_of(codec);
    bool fits = codec->feedback ? kvant_feedback_fits(book, kernels, y) : kvant_codebook_fits(book, kernels, y);
    return fits ? KVANT_OK : KVANT_ERR_RANGE;
}

static void turboquant_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y, uint32_t token,
                   void *page)
{
    uint8_t codes[KVANT_MAX_HEAD_DIM] = { 0 };
    const kvant_codebook *book = kvant_codebook_of(codec);
    float scale = codec->feedback ? kvant_feedback_quantize(codec->feedback, book, kernels, y, codes)
                                  : kvant_codebook_quantize(book, kernels, y, codes);
    kvant_codec_metadata(codec, page)[token] = kvant_half_from_float(scale);
    kvant_layout_put(&codec->layout, page, token, codes);
}

static void turboquant_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page, uint32_t token,
                   float *y)
{
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    float scale = kvant_half_to_float(kvant_codec_metadata_of(codec, page)[token]);
    (void)kernels;
    kvant_layout_get(&codec->layout, page, token, codes);
    kvant_codebook_decode(kvant_codebook_of(codec), codes, scale, y);
}

static void turboquant_unpack(const kvant_codec *codec, const kvant_kernels *kernels, const void *page, float *tile)
{
    uint32_t d = codec->info.head_dim, padded = codec->layout.padded_dim;
    _Alignas(64) float scale[KVANT_PAGE_TOKENS], zero[KVANT_PAGE_TOKENS] = { 0 };
    kvant_codec_token_metadata(kernels, kvant_codec_metadata_of(codec, page), scale);
    kernels->unpack(&codec->layout, page, kvant_codebook_of(codec)->values, 0, tile);
    if (codec->info.role == KVANT_ROLE_V) {
        kernels->scale_rows(tile, KVANT_PAGE_TOKENS, padded, scale, zero);
        return;
    }
    kernels->scale_columns(tile, d, KVANT_PAGE_TOKENS, scale, zero);
    memset(tile + (size_t)d * KVANT_PAGE_TOKENS, 0, (size_t)(padded - d) * KVANT_PAGE_TOKENS * sizeof *tile);
}

static const kvant_quantizer turboquant_quantizer = { turboquant_check, turboquant_encode, turboquant_decode,
                                                      turboquant_unpack };

static void turboquant_lines(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                             kvant_code_lines *lines)
{
    kvant_codec_token_lines(codec, kernels, page, kvant_codebook_of(codec)->code_step, lines);
}

/* The outermost value is the largest integer; the others are off by half a step at most. */
static void offer_codes(kvant_codec *codec, kvant_codebook *book)
{
    uint32_t n = 1u << book->bits;
    if (n > 16) /* of two digits a codebook's values are no sums */
        return;
    book->code_step = book->values[n - 1] / KVANT_CODE_VALUE_MAX;
    for (uint32_t c = 0; c < n; c++)
        codec->product.integers.values[c] = (int16_t)lrintf(book->values[c] / book->code_step);
    kvant_codec_offer_codes(codec, false, codec->info.head_dim, turboquant_lines);
}

static kvant_status create_plain(kvant_codec *codec, const turboquant_options *options, const kvant_error *error)
{
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(kvant_codebook), error));
    kvant_codebook *book = codec->state;
    kvant_codebook_init(book, codec->info.head_dim, options->bits);
    book->unbiased = options->unbiased;
    codec->quantizer = &turboquant_quantizer;
    codec->takes_feedback = true;
    kvant_codec_set_sizes(codec, options->bits, KVANT_PAGE_TOKENS, 0);
    codec->view.kind = KVANT_CODES_CODEBOOK;
    codec->view.of.codebook =
        (kvant_codebook_view){ book->values, book->thresholds, book->inverse_sqrt_dim, book->unbiased };
    offer_codes(codec, book);
    return KVANT_OK;
}

static kvant_status read_bits(turboquant_options *options, const kvant_spec *spec, const kvant_error *error)
{
    const kvant_error quiet = { NULL, 0 };
    const char *variant = spec->variant ? spec->variant : "";
    options->tiers = strcmp(variant, "2.5") == 0 || strcmp(variant, "3.5") == 0;
    options->bits = variant[0] == '2' ? 2 : 3;
    if (options->tiers || kvant_spec_bits(spec, 1, KVANT_LLOYD_MAX_BITS, &options->bits, &quiet) == KVANT_OK)
        return KVANT_OK;
    return kvant_fail(error, KVANT_ERR_SPEC, "turboquant takes 1 to 8 bits, 2.5 or 3.5, as in turboquant-4");
}

static kvant_status read_options(turboquant_options *options, kvant_spec *spec, const kvant_error *error)
{
    static const char *const scale_names[] = { "norm", "unbiased", NULL };
    int scale = -1;
    KVANT_FORWARD(read_bits(options, spec, error));
    KVANT_FORWARD(kvant_qjl_read(spec, &options->sketch, error));
    KVANT_FORWARD(kvant_spec_choice(spec, "scale", scale_names, &scale, error));
    bool sketched = options->sketch != KVANT_SKETCH_NONE;
    if (sketched && options->tiers)
        return kvant_fail(error, KVANT_ERR_SPEC, "turboquant-%s has no qjl; whole bits have", spec->variant);
    if (sketched && scale == 1)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "scale=unbiased and qjl exclude each other: the sketch removes the bias of scale=norm");
    options->unbiased = scale == 1 || (scale < 0 && !sketched);
    return KVANT_OK;
}

static kvant_status create_variant(kvant_codec *codec, const turboquant_options *options, const kvant_error *error)
{
    if (options->tiers)
        return turboquant_create_tiers(codec, options, error);
    if (options->sketch != KVANT_SKETCH_NONE)
        return turboquant_create_sketched(codec, options, error);
    return create_plain(codec, options, error);
}

static kvant_status create_turboquant(kvant_codec *codec, kvant_spec *spec, const kvant_site *site,
                                      const kvant_error *error)
{
    uint32_t d = codec->info.head_dim;
    turboquant_options options = { .seed = site->seed };
    KVANT_FORWARD(read_options(&options, spec, error));
    if (d < 4)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED, "turboquant needs head_dim 4 or more, not %u", (unsigned)d);
    /* A Hadamard matrix of full size exists for powers of two; other head_dims get a dense rotation. Tiers
     * rotate inside. */
    kvant_transform_defaults defaults = { (d & (d - 1)) == 0 ? KVANT_ROTATE_HADAMARD : KVANT_ROTATE_DENSE,
                                          KVANT_MAX_HEAD_DIM, true };
    if (options.tiers)
        defaults.rotate = KVANT_ROTATE_NONE;
    KVANT_FORWARD(kvant_transform_create(&codec->transform, spec, &defaults, d, site->seed, error));
    snprintf(codec->spec, sizeof codec->spec, "%s-%u%s:scale=%s", spec->name, (unsigned)options.bits,
             options.tiers ? ".5" : "", options.unbiased ? "unbiased" : "norm");
    KVANT_FORWARD(create_variant(codec, &options, error));
    kvant_transform_describe(&codec->transform, codec->spec, sizeof codec->spec);
    return KVANT_OK;
}

const kvant_family kvant_family_turboquant = {
    { sizeof(kvant_codec_family), "turboquant", "1 2 2.5 3 3.5 4 5 6 7 8", "scale=norm|unbiased " KVANT_QJL_OPTIONS,
      KVANT_TRANSFORM_OPTIONS, "TurboQuant, Algorithms 1 (mse) and 2 (prod), section 2.3",
      "random rotation, then the Lloyd-Max codebook of its marginal; 2.5 and 3.5: outlier channels" },
    create_turboquant
};
