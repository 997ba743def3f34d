/* codec_internal.h - the parts of a codec, and the interface of codec families.
 *
 * A family (int.c, turboquant.c, ...) parses its options, fills a kvant_codec and its view, and
 * names a quantiser. codec.c checks rows, applies transforms and has the public functions. A new
 * family needs one file and one line in families.h. */
#pragma once

#include "../kernels/kernels.h"
#include "spec.h"
#include "transform.h"

/* The functions of a family. y: transformed rows, contiguous, head_dim floats each. */
typedef struct kvant_quantizer {
    /* Whether one row can be encoded: KVANT_OK or KVANT_ERR_RANGE. Called only for rows with large
     * numbers. */
    kvant_status (*check)(const kvant_codec *codec, const kvant_kernels *kernels, const float *y);
    /* Encodes block_tokens rows as tokens token ... of the page. Cannot fail. */
    void (*encode)(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                   uint32_t token, void *page);
    /* Decodes one token. */
    void (*decode)(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                   uint32_t token, float *y);
    /* Unpacks a whole page, scaled, into the tile of kernels.h, aligned to 64; padding channels of
     * K are zero. */
    void (*unpack)(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                   float *tile);
} kvant_quantizer;

#define KVANT_CODE_VALUE_MAX 4095 /* leaves 13 bits for the other factor at 64 columns, 10 at 512 */

/* A line is the scale and the zero point that a group of codes shares. The lines of a page lie band
 * after band, in the order of positions; where a column has no number (padding), both are 0. */
typedef struct kvant_code_lines {
    _Alignas(64) float scale[KVANT_MAX_HEAD_DIM / KVANT_TILE * KVANT_PAGE_TOKENS];
    _Alignas(64) float zero[KVANT_MAX_HEAD_DIM / KVANT_TILE * KVANT_PAGE_TOKENS];
} kvant_code_lines;

/* Reads scales and, with has_zero, zero points. */
typedef void kvant_code_lines_fn(const kvant_codec *codec, const kvant_kernels *kernels,
                                 const void *page, kvant_code_lines *lines);

/* The integers that chunk codes stand for; a line belongs to a token. */
typedef struct kvant_code_numbers {
    kvant_chunk_numbers chunk;
    const kvant_chunk_layout *layout;
    kvant_octahedral_integers octahedral; /* that chunk points to, or unused */
    float step;  /* a number times the token's scale and this is the decoder's */
    float error; /* by which it may be off, in steps times the scale */
    int16_t entries[];
} kvant_code_numbers;

/* How attention multiplies a page by its codes instead of unpacking it (kernels.h, "Attention on
 * codes"). The kind of the view selects the member of `integers`. */
typedef struct kvant_code_product {
    kvant_code_lines_fn *lines; /* NULL: attention unpacks the pages of this codec */
    int32_t limit; /* the largest other factor, so that no sum over a page's columns reaches 2^31 */
    bool by_row; /* lines belong to rows in bands of columns; false: to columns in bands of rows */
    bool has_zero;    /* lines have zero points */
    uint32_t n_bands; /* of band_tiles row or column tiles, the last may have fewer */
    uint32_t band_tiles;
    uint32_t n_columns; /* in whole blocks of 64 */
    uint32_t stride;    /* from the lines of a band to those of the next */
    union {
        /* uniform, codebook: sums of magnitude at most KVANT_CODE_VALUE_MAX */
        int16_t values[KVANT_CODE_VALUES];
        const kvant_trellis *trellis; /* part of the state */
        kvant_code_numbers *chunk;    /* freed with the codec */
    } integers;
} kvant_code_product;

struct kvant_codec {
    kvant_codec_info info;
    char spec[KVANT_SPEC_MAX_LENGTH + 129]; /* canonical */
    kvant_transform transform;
    kvant_common shown; /* of the common options what the canonical spec names */
    kvant_layout layout;
    const kvant_quantizer *quantizer;
    kvant_codec_view view; /* the family sets kind and the member of that kind */
    kvant_code_product product;
    bool takes_seed;          /* the family's tables depend on the seed, not only the transform */
    uint64_t identity;        /* of what came from a calibration */
    bool takes_feedback;      /* set by families that round by it */
    kvant_feedback *feedback; /* or NULL; freed with the codec */
    float *file_center,
        /* center=file and norm=file: head_dim floats each, or NULL; freed with the codec */
        *file_scale;
    /* the family's tables and options: one block, freed with the codec; never changes after
     * creation */
    void *state;
};

/* Where a codec will be used, and what it may know about that place. */
typedef struct kvant_site {
    uint64_t seed;
    const kvant_calibration
        *calibration;        /* or NULL; families that need one refuse to live without */
    uint32_t layer, kv_head; /* that calibration is looked up for */
    bool *missed;            /* NULL, or set when a codec wants a calibration and there is none */
} kvant_site;

/* A spec whose options have been read. */
typedef struct kvant_request {
    const kvant_spec *spec; /* name and variant */
    const void *options;    /* the family's struct */
    const kvant_common *common;
    const kvant_site *site;
} kvant_request;

/* The family's state, of so many bytes, as the tables of the view's general form; and the place
 * there of numbers that are part of it. */
void kvant_codec_set_tables(kvant_codec *codec, size_t bytes);
uint32_t kvant_codec_place(const kvant_codec *codec, const float *numbers);
kvant_rotation_place kvant_codec_rotation_place(const kvant_codec *codec,
                                                const kvant_transform *rotation);

/* Counts numbers of a calibration that bytes depend on into the codec's fingerprint. */
void kvant_codec_identify(kvant_codec *codec, const void *numbers, size_t bytes);

/* The transform that the spec asks for, or the family's defaults. */
kvant_status kvant_codec_set_transform(kvant_codec *codec, const kvant_request *request,
                                       kvant_transform_defaults defaults, const kvant_error *error);

/* The family's state, zeroed, of one block of size bytes. */
kvant_status kvant_codec_alloc_state(kvant_codec *codec, size_t size);

/* Completes info and layout: bits planes of codes (0: raw), metadata_halves fp16 numbers of
 * metadata, raw_bytes of code plane for raw codecs. */
void kvant_codec_set_sizes(kvant_codec *codec, uint32_t bits, size_t metadata_halves,
                           size_t raw_bytes);

/* The same for codecs with their own code plane: code_bytes of codes, then metadata_bytes. bits
 * is the bits per code in info.bits. Both functions set nominal_bits to bits; the family may
 * correct it. */
void kvant_codec_set_page(kvant_codec *codec, uint32_t bits, size_t code_bytes,
                          size_t metadata_bytes);

/* Whether tokens first ... first + n - 1 lie in a page and are whole blocks. */
bool kvant_codec_takes_tokens(uint32_t first, uint32_t n, uint32_t block);

/* Places one token's y in the tile of unpack. */
void kvant_unpack_token(const kvant_codec *codec, uint32_t token, const float *y, float *tile);

/* unpack for any codec, by its own decode, token by token: correct, not fast. Channels keep their
 * order in the tile. */
void kvant_unpack_decoded(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                          float *tile);

/* The fp16 numbers of a page's metadata. */
static inline uint16_t *kvant_codec_metadata(const kvant_codec *codec, void *page)
{
    return (uint16_t *)(void *)((uint8_t *)page + codec->info.metadata_offset);
}

static inline const uint16_t *kvant_codec_metadata_of(const kvant_codec *codec, const void *page)
{
    return (const uint16_t *)(const void *)((const uint8_t *)page + codec->info.metadata_offset);
}

/* Lets attention work on codes, after sizes, the view and the product's integers and has_zero are
 * set. per_channel: a line belongs to a channel in a group of tokens, else to a token in a group of
 * channels; group is a multiple of 16, or all there are. */
void kvant_codec_offer_codes(kvant_codec *codec, bool per_channel, uint32_t group,
                             kvant_code_lines_fn *lines);

/* The same for chunk codes. A code stands for a direction times a length. Codes too wide, or tables
 * too large to pay, are not offered, which is no error. layout must live as long as the codec.
 * Chunks of four: directions is a table of 2^index_bits times 4 numbers, the other bits are the
 * length. Triplets: an octahedral codebook of 2^bits levels, and a table of lengths. */
kvant_status kvant_codec_offer_directions(kvant_codec *codec, const kvant_chunk_layout *layout,
                                          uint32_t index_bits, const float *directions);
kvant_status kvant_codec_offer_triplets(kvant_codec *codec, const kvant_chunk_layout *layout,
                                        uint32_t bits, const float *levels, const float *lengths);

/* Where attention on codes has a query's n channels among those of its numbers. */
void kvant_codec_query_places(const kvant_codec *codec, uint32_t n, uint32_t *places);

/* Lines of codes whose metadata begin with one fp16 scale per token. A line is scale * step;
 * step is the unit of the codes. */
void kvant_codec_token_lines(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, float step, kvant_code_lines *lines);

#define KVANT_FAMILY_OPTIONS 16u /* int32_t in a family's struct, at most */

/* The view's transform, centre, scale and feedback become the codec's. */
void kvant_codec_complete_view(kvant_codec *codec);

/* kvant_codec_create_calibrated for any place. */
kvant_status kvant_codec_create_at(const char *text, uint32_t head_dim, kvant_role role,
                                   const kvant_site *site, kvant_codec **out,
                                   const kvant_error *error);

typedef struct kvant_family {
    const char *name, *variants, *source, *summary; /* as in kvant_codec_family */
    const kvant_option *options;                    /* the family's own */
    const kvant_option *common; /* those it shares, of common.h; NULL: a raw family */
    /* Fills codec, whose info has head_dim and role. It may preset info.center, norm, sink_tokens
     * and recent_tokens: their options are applied afterwards, for every family. KVANT_ERR_MEMORY
     * needs no words. */
    kvant_status (*create)(kvant_codec *codec, const kvant_request *request,
                           const kvant_error *error);
} kvant_family;

/* Defines a family from the members behind its name. */
#define KVANT_FAMILY(name, ...) const kvant_family kvant_family_##name = { #name, __VA_ARGS__ };

/* NULL when there is none of that name. */
const kvant_family *kvant_family_find(const char *name);

/* Begins the canonical form: name and variant by format, the family's options with the values as
 * they turned out. Common options follow. */
void kvant_codec_describe(kvant_codec *codec, const kvant_option *table, const void *values,
                          const char *format, ...) KVANT_PRINTF(4, 5);

/* Whether two codecs can serve kv heads of one tensor (kvant/tensor.h): 1 or 0. The codecs must
 * agree in role, head_dim, sink_tokens, recent_tokens and block_tokens, in whether center is first,
 * and in whether norm is first. */
int kvant_codecs_fit_together(const kvant_codec_info *a, const kvant_codec_info *b);

/* What the pages of a codec mean; valid as long as the codec. */
const kvant_codec_view *kvant_codec_get_view(const kvant_codec *codec);
