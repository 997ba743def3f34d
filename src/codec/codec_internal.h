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

/* The largest magnitude of a code's integer in attention on codes. Sums are 32 bits wide. So the
 * query or weight that it multiplies keeps 13 bits with 64 columns. With 512 columns it keeps 10
 * bits. A larger value would take bits from that factor. */
#define KVANT_CODE_VALUE_MAX 4095

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
typedef struct kvant_code_values {
    kvant_chunk_values chunk;
    const kvant_chunk_layout *layout;
    kvant_octahedral_integers octahedral; /* that chunk points to, or unused */
    float step;  /* The decoder's number is the integer times this step times the token's scale. */
    float error; /* The largest error of an integer, in steps. */
    int16_t entries[];
} kvant_code_values;

/* How attention multiplies a page by its codes instead of unpacking it (kernels.h, "Attention on
 * codes"). The kind of the view selects the member of `integers`. */
typedef struct kvant_code_product {
    kvant_code_lines_fn *lines; /* NULL: attention unpacks the pages of this codec */
    /* the largest magnitude of the integer that a code multiplies, so that no sum over a page's
     * columns reaches 2^31 */
    int32_t limit;
    /* true: a line belongs to one row and a band of columns; false: to one column and a band of row
     * tiles */
    bool by_row;
    bool has_zero;    /* lines have zero points */
    uint32_t n_bands; /* a band is band_tiles row or column tiles; the last band may have fewer */
    uint32_t band_tiles;
    uint32_t n_columns; /* in whole blocks of 64 */
    uint32_t stride;    /* numbers between the first lines of two neighbouring bands */
    union {
        /* uniform, codebook: sums of magnitude at most KVANT_CODE_VALUE_MAX */
        int16_t values[KVANT_CODE_VALUES];
        const kvant_trellis *trellis; /* lies in the codec's state */
        kvant_code_values *chunk;     /* freed with the codec */
    } integers;
} kvant_code_product;

struct kvant_codec {
    kvant_codec_info info;
    char spec[KVANT_SPEC_MAX_LENGTH + 129]; /* canonical */
    kvant_transform transform;
    kvant_common shown; /* the common options that the canonical spec names */
    kvant_layout layout;
    const kvant_quantizer *quantizer;
    kvant_codec_view view; /* the family sets kind and the member of that kind */
    kvant_code_product product;
    bool accepts_seed; /* the family's tables depend on the seed, not only the transform */
    /* hash of the calibration's numbers that the codec's bytes depend on */
    uint64_t identity;
    bool accepts_feedback;    /* set by families that round with error feedback */
    kvant_feedback *feedback; /* or NULL; freed with the codec */
    float *file_center,
        /* The centre and the scale that center=file and norm=file name: head_dim floats each, or
         * NULL. Freed with the codec. */
        *file_scale;
    /* The family's tables and options, in one block. Never changes after creation; freed with the
     * codec. */
    void *state;
};

/* The layer and kv head that a codec is made for, and the calibration it may read. */
typedef struct kvant_location {
    uint64_t seed;
    /* or NULL; families that need a calibration refuse to be created without one */
    const kvant_calibration *calibration;
    uint32_t layer, kv_head; /* whose entries of the calibration are read */
    bool *missed;            /* NULL, or set when a codec wants a calibration and there is none */
} kvant_location;

/* A spec whose options have been read. */
typedef struct kvant_request {
    const kvant_spec *spec; /* name and variant */
    const void *options;    /* the family's struct */
    const kvant_common *common;
    const kvant_location *location;
} kvant_request;

/* `kvant_codec_set_tables` says that the `bytes` bytes of the family's state are the tables of the
 * view's general form. The two functions after it say where in these tables `numbers`, or the
 * numbers of a rotation, begin. */
void kvant_codec_set_tables(kvant_codec *codec, size_t bytes);
uint32_t kvant_codec_table_offset(const kvant_codec *codec, const float *numbers);
kvant_rotation_position kvant_codec_rotation_position(const kvant_codec *codec,
                                                      const kvant_transform *rotation);

/* Adds numbers of a calibration that the codec's bytes depend on to its fingerprint. */
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
bool kvant_codec_accepts_tokens(uint32_t first, uint32_t n, uint32_t block);

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

/* Lets attention work on codes. Call it after the sizes, the view, and the product's integers and
 * has_zero are set. With per_channel a line belongs to one channel in a group of tokens, otherwise
 * to one token in a group of channels. A `group` is a multiple of 16, or all tokens or channels. */
void kvant_codec_offer_codes(kvant_codec *codec, bool per_channel, uint32_t group,
                             kvant_code_lines_fn *lines);

/* The same for chunk codes, whose codes stand for a direction times a length. When codes are too
 * wide, or tables too large to pay, nothing is offered, and that is no error. layout must live as
 * long as the codec.
 *
 * `kvant_codec_offer_directions` is for chunks of four channels. Its table of directions has
 * 2^index_bits times 4 numbers, and the remaining bits of a code are the length.
 * `kvant_codec_offer_triplets` is for an octahedral codebook of 2^bits levels and a table of
 * lengths. */
kvant_status kvant_codec_offer_directions(kvant_codec *codec, const kvant_chunk_layout *layout,
                                          uint32_t index_bits, const float *directions);
kvant_status kvant_codec_offer_triplets(kvant_codec *codec, const kvant_chunk_layout *layout,
                                        uint32_t bits, const float *levels, const float *lengths);

/* places[i] = the index of query channel i among the numbers that attention on codes multiplies. */
void kvant_codec_query_positions(const kvant_codec *codec, uint32_t n, uint32_t *places);

/* Lines of codes whose metadata begin with one fp16 scale per token. A line is scale * step;
 * step is the unit of the codes. */
void kvant_codec_token_lines(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, float step, kvant_code_lines *lines);

/* the most int32_t that the struct of a family's options may have */
#define KVANT_FAMILY_OPTIONS 16u

/* Fills the view's transform, centre, scale and feedback from the codec. */
void kvant_codec_complete_view(kvant_codec *codec);

/* `kvant_codec_create_calibrated` for any layer and kv head. */
kvant_status kvant_codec_create_at(const char *text, uint32_t head_dim, kvant_role role,
                                   const kvant_location *location, kvant_codec **out,
                                   const kvant_error *error);

typedef struct kvant_family {
    const char *name, *variants, *source, *summary; /* as in kvant_codec_family */
    const kvant_option *options;                    /* the options that only this family has */
    /* the common options (common.h) that it takes; NULL: a raw family */
    const kvant_option *common;
    /* Fills codec, whose info has head_dim and role. It may preset info.center, norm, sink_tokens
     * and recent_tokens: their options are applied afterwards, for every family. KVANT_ERR_MEMORY
     * needs no words. */
    kvant_status (*create)(kvant_codec *codec, const kvant_request *request,
                           const kvant_error *error);
} kvant_family;

/* Defines a family from the values of its members, in order. */
#define KVANT_FAMILY(name, ...) const kvant_family kvant_family_##name = { #name, __VA_ARGS__ };

/* The family called name, or NULL. */
const kvant_family *kvant_family_find(const char *name);

/* Begins the canonical spec: name and variant by format, then the family's options with the values
 * that the codec uses. Common options follow later. */
void kvant_codec_describe(kvant_codec *codec, const kvant_option *table, const void *values,
                          const char *format, ...) KVANT_PRINTF(4, 5);

/* Whether two codecs can serve kv heads of one tensor (kvant/tensor.h): 1 or 0. The codecs must
 * agree in role, head_dim, sink_tokens, recent_tokens and block_tokens, in whether center is first,
 * and in whether norm is first. */
int kvant_codecs_fit_together(const kvant_codec_info *a, const kvant_codec_info *b);

/* The meaning of the codec's pages as plain data; valid as long as the codec. */
const kvant_codec_view *kvant_codec_get_view(const kvant_codec *codec);
