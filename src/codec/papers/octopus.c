/* octopus.c - OCTOPUS: a random rotation, then triplets of channels as direction and norm. The
 * octahedral map takes directions to a square. The coordinates in the square and the norm have
 * Lloyd-Max codebooks.
 *
 * This file reads the options and places codes in pages; octopus_book.c quantises rows.
 *
 * `octopus-b` spends b + 1 bits on each of the two coordinates and b - 1 bits on the norm (the
 * paper's split). That is 3b + 1 bits per three channels: 1/3 bit per channel more than the name
 * says. */
#include "octopus.h"

#include <string.h>

#include "../../base/half.h"
#include "../../kernels/chunk_tiles.h"
#include "../../math/octahedral.h"
#include "qjl.h"

#define MAX_BITS 5u /* a code then has 3 x 5 + 1 = KVANT_NUMBER_MAX_BITS bits */

typedef struct octopus {
    octopus_book book;
    kvant_chunk_layout layout;
    kvant_qjl qjl;  /* sketch is KVANT_SKETCH_NONE when the codec has no sketch */
    float matrix[]; /* the sketch's projection */
} octopus;

typedef struct octopus_options {
    int32_t direction_bits, norm_bits; /* split=D.N */
    int32_t round, pad, scale, qjl, sketch;
} octopus_options;

/* kvant_triplet_rounding */
static const char *const rounding_names[] = { "full", "scalar", "2x2", "3x3", "next", NULL };
static const char *const pad_names[] = { "best", "zero", NULL };

static const kvant_option table[] = {
    { "split", KVANT_OPTION_PAIR, NULL, KVANT_OCTAHEDRAL_BITS, KVANT_TRIPLET_NORM_BITS,
      KVANT_OPTION_ABSENT, offsetof(octopus_options, direction_bits),
      "bits of each coordinate of a direction, and of a norm" },
    KVANT_CHOICE(octopus_options, round, rounding_names, KVANT_ROUND_3X3,
                 "levels that the encoder tries"),
    KVANT_CHOICE(octopus_options, pad, pad_names, 0,
                 "what completes the last triplet for the encoder"),
    KVANT_SCALE_OPTION(octopus_options, KVANT_OPTION_ABSENT),
    KVANT_QJL_OPTIONS(octopus_options),
    { .key = NULL },
};

/* The residual of the codes as the decoder will see them, with the scale rounded to fp16. */
static void residual_of(const octopus *o, const float *y, const uint32_t *codes, float scale,
                        float *residual)
{
    float decoded[KVANT_MAX_HEAD_DIM];
    kvant_octopus_dequantize(&o->book, codes, kvant_half_to_float(kvant_half_from_float(scale)),
                             decoded);
    for (uint32_t j = 0; j < o->book.dim; j++)
        residual[j] = y[j] - decoded[j];
}

static kvant_status octopus_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                  const float *y)
{
    const octopus *o = codec->state;
    KVANT_RETURN_IF(!kvant_octopus_fits(&o->book, kernels, y), KVANT_ERR_RANGE);
    if (o->qjl.sketch == KVANT_SKETCH_NONE)
        return KVANT_OK;
    uint32_t codes[KVANT_MAX_TRIPLETS];
    float residual[KVANT_MAX_HEAD_DIM], scale = kvant_octopus_quantize(&o->book, kernels, y, codes);
    residual_of(o, y, codes, scale, residual);
    return kvant_qjl_fits(&o->qjl, residual) ? KVANT_OK : KVANT_ERR_RANGE;
}

static void octopus_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                           uint32_t token, void *page)
{
    const octopus *o = codec->state;
    float residual[KVANT_MAX_HEAD_DIM];
    uint32_t codes[KVANT_MAX_TRIPLETS];
    float scale = kvant_octopus_quantize(&o->book, kernels, y, codes);
    kvant_codec_metadata(codec, page)[token] = kvant_half_from_float(scale);
    kvant_chunk_layout_put(&o->layout, page, token, codes);
    if (o->qjl.sketch == KVANT_SKETCH_NONE)
        return;
    residual_of(o, y, codes, scale, residual);
    kvant_qjl_encode(&o->qjl, kernels, residual, token, page);
}

static void octopus_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                           uint32_t token, float *y)
{
    const octopus *o = codec->state;
    uint32_t codes[KVANT_MAX_TRIPLETS];
    uint16_t scale = kvant_codec_metadata_of(codec, page)[token];
    kvant_chunk_layout_get(&o->layout, page, token, codes);
    kvant_octopus_dequantize(&o->book, codes, kvant_half_to_float(scale), y);
    if (o->qjl.sketch != KVANT_SKETCH_NONE)
        kvant_qjl_add(&o->qjl, kernels, page, token, y);
}

static void octopus_unpack(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                           float *tile)
{
    const octopus *o = codec->state;
    _Alignas(64) float scale[KVANT_PAGE_TOKENS];
    if (o->qjl.sketch != KVANT_SKETCH_NONE) {
        kvant_unpack_decoded(codec, kernels, page, tile);
        return;
    }
    kernels->token_halves(kvant_codec_metadata_of(codec, page), scale);
    kernels->unpack_triplets(&o->book.triplets, &o->layout, page, scale, o->book.dim, tile);
}

static const kvant_quantizer octopus_quantizer = { octopus_check, octopus_encode, octopus_decode,
                                                   octopus_unpack };

/* Triplets of values lie component by component (kernels/chunk_tiles.h). */
static void place_values(kvant_codec *codec)
{
    const kvant_triplet_positions places = kvant_triplet_positions_of(codec->info.head_dim);
    for (uint32_t j = 0; j < codec->layout.padded_dim; j++)
        kvant_layout_move_row(&codec->layout, j,
                              j < codec->info.head_dim ? places.first[j % 3] + j / 3 : j);
}

/* split=D.N: D bits for each coordinate of a direction, N for a norm. D + N is 2b as in the paper's
 * sweep, or 2b + 1, so that the number in the name stays true. */
static kvant_status resolve_split(octopus_options *o, uint32_t bits, const kvant_error *error)
{
    if (o->direction_bits == KVANT_OPTION_ABSENT) {
        o->direction_bits = (int32_t)bits + 1;
        o->norm_bits = (int32_t)bits - 1;
    }
    int d = (int)o->direction_bits, n = (int)o->norm_bits;
    if (d < 1)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "split=%d.%d is not valid: a coordinate of a direction has 1 to %d bits",
                          d, n, KVANT_OCTAHEDRAL_BITS);
    if ((d + n) / 2 != (int)bits)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "split=%d.%d does not fit octopus-%u: its sum must be 2 x %u or one "
                          "more, as in split=%u.%u",
                          d, n, (unsigned)bits, (unsigned)bits, (unsigned)bits + 1,
                          (unsigned)bits - 1);
    return KVANT_OK;
}

static void set_view(kvant_codec *codec, size_t bytes)
{
    const octopus *o = codec->state;
    const kvant_triplet_book *t = &o->book.triplets;
    kvant_general_view *view = &codec->view.general;
    kvant_codec_set_tables(codec, bytes);
    view->kind = KVANT_GENERAL_TRIPLETS;
    view->unbiased = o->book.unbiased;
    view->inverse_sqrt_dim = o->book.inverse_sqrt_dim;
    view->chunks.n = o->book.n_triplets;
    view->chunks.index_bits = 2 * t->direction_bits;
    view->chunks.length_bits = t->norm_bits;
    view->chunks.rounding = (uint32_t)t->rounding;
    view->chunks.zero_padding = o->book.zero_padding;
    view->chunks.direction = kvant_codec_table_offset(codec, t->direction);
    view->chunks.direction_thresholds = kvant_codec_table_offset(codec, t->direction_thresholds);
    view->chunks.norm = kvant_codec_table_offset(codec, t->norm);
    view->chunks.norm_thresholds = kvant_codec_table_offset(codec, t->norm_thresholds);
    if (o->qjl.sketch != KVANT_SKETCH_NONE)
        kvant_qjl_set_view(&o->qjl, codec);
}

static kvant_status build(kvant_codec *codec, const octopus_options *options, kvant_sketch sketch,
                          uint32_t name_bits, uint64_t seed)
{
    uint32_t d = codec->info.head_dim,
             bits = 2 * (uint32_t)options->direction_bits + (uint32_t)options->norm_bits;
    size_t matrix = kvant_qjl_matrix_floats(sketch, d) * sizeof(float);
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(octopus) + matrix));
    octopus *o = codec->state;
    kvant_octopus_book_init(&o->book, d, (uint32_t)options->direction_bits,
                            (uint32_t)options->norm_bits);
    o->book.triplets.rounding = (kvant_triplet_rounding)options->round;
    o->book.zero_padding = options->pad == 1;
    o->book.unbiased = options->scale == KVANT_SCALE_UNBIASED;
    codec->quantizer = &octopus_quantizer;
    kvant_layout_init(&codec->layout, codec->info.role, d,
                      1); /* only gives unpacked tiles their order */
    if (codec->info.role == KVANT_ROLE_V)
        place_values(codec);
    kvant_chunk_layout_init(&o->layout, codec->info.role, o->book.n_triplets, bits);
    size_t scales = KVANT_PAGE_TOKENS * sizeof(uint16_t);
    if (sketch == KVANT_SKETCH_NONE) {
        kvant_codec_set_page(codec, bits, o->layout.code_bytes, scales);
    } else {
        KVANT_FORWARD(kvant_qjl_init(&o->qjl, sketch, d, seed, o->matrix));
        kvant_qjl_set_page(&o->qjl, codec, bits, o->layout.code_bytes, scales);
    }
    codec->info.nominal_bits = name_bits + (sketch != KVANT_SKETCH_NONE); /* the paper's Table 6 */
    set_view(codec, sizeof(octopus) + matrix);
    return KVANT_OK;
}

static kvant_status offer_codes(kvant_codec *codec)
{
    const octopus *o = codec->state;
    const octopus_book *book = &o->book;
    const kvant_triplet_book *t = &book->triplets;
    codec->view.kind = KVANT_CODES_CHUNK;
    codec->view.of.chunk = (kvant_chunk_view){ .kind = KVANT_CHUNK_TRIPLETS,
                                               .n_chunks = book->n_triplets,
                                               .index_bits = 2 * t->direction_bits,
                                               .length_bits = t->norm_bits,
                                               .direction = t->direction,
                                               .length = t->norm };
    return kvant_codec_offer_triplets(codec, &o->layout, t->direction_bits, t->direction, t->norm);
}

static kvant_status create_octopus(kvant_codec *codec, const kvant_request *request,
                                   const kvant_error *error)
{
    const uint32_t d = codec->info.head_dim;
    const uint64_t seed = request->location->seed;
    octopus_options o = *(const octopus_options *)request->options;
    kvant_sketch sketch;
    uint32_t bits;
    KVANT_FORWARD(kvant_spec_bits(request->spec, 1, MAX_BITS, &bits, error));
    KVANT_FORWARD(resolve_split(&o, bits, error));
    KVANT_FORWARD(kvant_qjl_resolve(o.qjl, &o.sketch, &o.scale, &sketch, error));
    if (d < 6)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED, "octopus needs head_dim 6 or more, not %u",
                          (unsigned)d);
    KVANT_FORWARD(kvant_codec_set_transform(codec, request, kvant_transform_random(d), error));
    kvant_codec_describe(codec, table, &o, "octopus-%u", (unsigned)bits);
    KVANT_FORWARD(build(codec, &o, sketch, bits, seed));
    codec->accepts_seed = sketch != KVANT_SKETCH_NONE;
    return sketch == KVANT_SKETCH_NONE ? offer_codes(codec)
                                       : KVANT_OK; /* codecs with a sketch have no view of codes */
}

KVANT_FAMILY(octopus, "1 2 3 4 5", "OCTOPUS, sections 3.1-3.6",
             "random rotation, then triplets as octahedral direction and norm", table,
             kvant_common_options, create_octopus)
