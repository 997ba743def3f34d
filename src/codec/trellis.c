/* trellis.c - trellis-coded quantisation (Marcellin and Fischer 1990) behind a random rotation.
 *
 * There are 2^(b+2) levels in 8 interleaved subsets. A b-bit code picks a level within a subset;
 * one bit of each of the preceding codes selects the subset. So the codes of a row depend on each
 * other, and a Viterbi search chooses them together. The row is a circle: the last numbers precede
 * the first number, and no bit is spent on a start state. Pages have the layout of `turboquant`
 * with the same bits. format.md, "Trellis codes", has formulas and rounding. */
#include <math.h>
#include <string.h>

#include "../base/half.h"
#include "trellis_book.h"

#define MIN_HEAD_DIM 4u /* with fewer, less than a quarter of the 16 steps has a number */

/* Finds the cells of y * inverse. Adding `whole` rounds to whole numbers. Then a number's bits are
 * its cell, less those of the first cell; numbers that are too large or too small have larger or
 * smaller bits. So compilers vectorise the limits, which they do not for floats. */
static void find_cells(const float *y, float inverse, uint32_t n, uint16_t *cells)
{
    const float whole = 0x1.8p23f;
    const int32_t least = (int32_t)kvant_float_bits(whole - (float)KVANT_TRELLIS_CELLS / 2),
                  most = least + (int32_t)KVANT_TRELLIS_CELLS - 1; /* bits of both ends */
    for (uint32_t j = 0; j < n; j++) {
        const float x = y[j] * inverse * (KVANT_TRELLIS_CELLS / 8) + whole;
        int32_t cell = (int32_t)kvant_float_bits(x);
        cell = cell < least ? least : cell;
        cell = cell > most ? most : cell;
        cells[j] = (uint16_t)(cell - least);
    }
}

void kvant_trellis_quantize(const kvant_trellis *trellis, const kvant_kernels *kernels,
                            const float *y, float inverse, uint32_t n, const uint16_t *steps,
                            uint32_t n_steps, uint8_t *restrict codes, uint8_t *restrict levels)
{
    uint16_t cells[KVANT_TRELLIS_MAX_STEPS], in_order[KVANT_TRELLIS_MAX_STEPS];
    uint8_t bits[KVANT_TRELLIS_MAX_STEPS], subsets[KVANT_TRELLIS_MAX_STEPS];
    for (uint32_t step = 0; step < n_steps; step++)
        cells[step] = KVANT_TRELLIS_NO_NUMBER;
    find_cells(y, inverse, n, in_order);
    for (uint32_t j = 0; j < n; j++)
        cells[steps[j]] = in_order[j];
    kernels->trellis_path(trellis, cells, n_steps, bits);
    kvant_trellis_subsets(bits, n_steps, subsets);
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t nearest = trellis->nearest[in_order[j]][subsets[steps[j]]];
        codes[j] = (uint8_t)(2 * nearest + bits[steps[j]]);
        levels[j] = (uint8_t)(KVANT_TRELLIS_SUBSETS * nearest + subsets[steps[j]]);
    }
}

/* Chooses the codes and the levels' indices of a row; returns the scale to store, before it is
 * rounded to fp16. */
static float quantize(const kvant_trellis_book *book, const kvant_kernels *kernels, uint32_t dim,
                      const float *y, uint8_t *restrict codes, uint8_t *restrict levels)
{
    const kvant_trellis *trellis = &book->trellis;
    const float squares = kernels->dot(y, y, dim);
    const float scale =
        kvant_half_to_float(kvant_half_from_float(sqrtf(squares) * book->inverse_sqrt_dim));
    kvant_trellis_quantize(trellis, kernels, y, scale > 0 ? 1 / scale : 0, dim, trellis->steps,
                           trellis->n_steps, codes, levels);
    if (!book->unbiased || !(scale > 0))
        return scale;
    const float product = kernels->dot_codes(y, levels, dim, book->values, trellis->bits + 2);
    return product > 0 ? squares / product : 0;
}

static kvant_status trellis_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                  const float *y)
{
    const kvant_trellis_book *book = kvant_trellis_book_of(codec);
    const uint32_t dim = codec->info.head_dim;
    uint8_t codes[KVANT_MAX_HEAD_DIM], levels[KVANT_MAX_HEAD_DIM];
    const float squares = kernels->dot(y, y, dim);
    bool fits = sqrtf(squares) * book->inverse_sqrt_dim <= KVANT_HALF_MAX &&
                quantize(book, kernels, dim, y, codes, levels) <= KVANT_HALF_MAX;
    return fits ? KVANT_OK : KVANT_ERR_RANGE;
}

static void trellis_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                           uint32_t token, void *page)
{
    const kvant_trellis_book *book = kvant_trellis_book_of(codec);
    uint8_t codes[KVANT_MAX_HEAD_DIM] = { 0 }, levels[KVANT_MAX_HEAD_DIM];
    kvant_codec_metadata(codec, page)[token] =
        kvant_half_from_float(quantize(book, kernels, codec->info.head_dim, y, codes, levels));
    kvant_layout_put(&codec->layout, page, token, codes);
}

static void trellis_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                           uint32_t token, float *y)
{
    const kvant_trellis_book *book = kvant_trellis_book_of(codec);
    uint8_t codes[KVANT_MAX_HEAD_DIM], bits[KVANT_TRELLIS_MAX_STEPS] = { 0 },
                                       subsets[KVANT_TRELLIS_MAX_STEPS];
    const float scale = kvant_half_to_float(kvant_codec_metadata_of(codec, page)[token]);
    (void)kernels;
    kvant_layout_get(&codec->layout, page, token, codes);
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        bits[book->trellis.steps[j]] = codes[j] & 1;
    kvant_trellis_subsets(bits, book->trellis.n_steps, subsets);
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        y[j] =
            scale *
            book->values[KVANT_TRELLIS_SUBSETS * (codes[j] / 2u) + subsets[book->trellis.steps[j]]];
}

/* Attention multiplies keys by their codes, so keys are seldom unpacked. */
static void trellis_unpack(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                           float *tile)
{
    const kvant_trellis_book *book = kvant_trellis_book_of(codec);
    _Alignas(64) float scale[KVANT_PAGE_TOKENS];
    if (codec->info.role == KVANT_ROLE_K) {
        kvant_unpack_decoded(codec, kernels, page, tile);
        return;
    }
    kernels->token_halves(kvant_codec_metadata_of(codec, page), scale);
    kernels->trellis_values(&book->trellis, &codec->layout, page, book->unit, scale, tile);
}

static const kvant_quantizer trellis_quantizer = { trellis_check, trellis_encode, trellis_decode,
                                                   trellis_unpack };

static void trellis_lines(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                          kvant_code_lines *lines)
{
    kvant_codec_token_lines(codec, kernels, page, kvant_trellis_book_of(codec)->unit, lines);
}

typedef struct trellis_options {
    int32_t scale;
} trellis_options;

static const kvant_option table[] = {
    KVANT_SCALE_OPTION(trellis_options, KVANT_SCALE_UNBIASED),
    { .key = NULL },
};

static void set_view(kvant_codec *codec, const kvant_trellis_book *book)
{
    const kvant_trellis *trellis = &book->trellis;
    codec->view.kind = KVANT_CODES_TRELLIS;
    codec->view.of.trellis = (kvant_trellis_view){ .steps = trellis->steps,
                                                   .levels = trellis->levels,
                                                   .values = book->values,
                                                   .unit = book->unit,
                                                   .inverse_sqrt_dim = book->inverse_sqrt_dim,
                                                   .unbiased = book->unbiased };
}

static kvant_status create_trellis(kvant_codec *codec, const kvant_request *request,
                                   const kvant_error *error)
{
    const uint32_t d = codec->info.head_dim;
    const trellis_options *o = request->options;
    const kvant_error quiet = { NULL, 0 };
    uint32_t bits;
    if (kvant_spec_bits(request->spec, 2, 4, &bits, &quiet) != KVANT_OK)
        return kvant_fail(error, KVANT_ERR_SPEC, "trellis takes 2, 3 or 4 bits, as in trellis-4");
    if (d < MIN_HEAD_DIM)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED, "trellis needs head_dim %u or more, not %u",
                          MIN_HEAD_DIM, (unsigned)d);
    KVANT_FORWARD(kvant_codec_set_transform(codec, request, kvant_transform_random(d), error));
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(kvant_trellis_book)));
    kvant_codec_describe(codec, table, o, "trellis-%u", (unsigned)bits);
    codec->quantizer = &trellis_quantizer;
    kvant_codec_set_sizes(codec, bits, KVANT_PAGE_TOKENS, 0);
    kvant_trellis_book *book = codec->state;
    kvant_trellis_book_init(book, &codec->layout);
    book->unbiased = o->scale == KVANT_SCALE_UNBIASED;
    set_view(codec, book);
    codec->product.integers.trellis = &book->trellis;
    kvant_codec_offer_codes(codec, false, d, trellis_lines);
    return KVANT_OK;
}

KVANT_FAMILY(
    trellis, "2 3 4", "Marcellin and Fischer 1990; tail-biting, on a grid of its own",
    "random rotation, then trellis-coded quantisation: levels of a whole row chosen together",
    table, kvant_common_options, create_trellis)
