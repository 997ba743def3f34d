/* direction.h - the shared part of codecs with 4-channel chunks (hqmq, spherical, addvq). A chunk
 * is a radius of a few bits times an entry of a table of directions (format.md, "Direction codes").
 *
 * Owns radius scales, outliers of a token (direction.c) or of a page (direction_page.c), code
 * layout, decoding. A family fills the table and finds the index. */
#pragma once

#include "../../page/chunks.h"
#include "../codec_internal.h"
#include "outlier_pool.h"

#define KVANT_DIRECTION_MAX_CHUNKS (KVANT_MAX_HEAD_DIM / 4)
#define KVANT_DIRECTION_LANES 16u /* searches take chunks in multiples of this */

typedef struct kvant_direction kvant_direction;

/* index[c] = the direction of chunk c, whose components are x[i * KVANT_DIRECTION_MAX_CHUNKS + c],
 * for n chunks, a multiple of KVANT_DIRECTION_LANES; zeros get index 0. Components are finite and
 * their products too. */
typedef void kvant_direction_search(const kvant_direction *direction, const kvant_kernels *kernels,
                                    const float *x, uint32_t n, uint32_t *index);

struct kvant_direction {
    /* ceil(head_dim / 4), and that as a multiple of KVANT_DIRECTION_LANES; aligned for the
     * codewords, which follow the struct */
    _Alignas(16) uint32_t n_chunks;
    uint32_t padded_chunks;
    uint32_t n_codewords, index_bits, radius_bits;
    bool unbiased;
    uint32_t
        slots; /* outliers a token has room for; 0: none are looked for, or the page has the room */
    float multiple;          /* an outlier exceeds the median norm of chunks this many times */
    kvant_outlier_pool pool; /* of a page; slots is 0 without one */
    bool range_all;          /* outliers count for the radius step, as in the authors' program */
    kvant_chunk_layout layout;
    kvant_direction_search *search;
    float *codewords; /* 2^index_bits entries of 4 numbers; entries from n_codewords on are zero */
    float *table;     /* the table that the family's search reads */
};

/* The options that the families share; each table has those that its family takes. */
typedef struct kvant_direction_options {
    int32_t book, search, scale, med3, med, median, range, slots;
} kvant_direction_options;

/* The choices of a family before it fills the tables. */
typedef struct kvant_direction_shape {
    uint32_t n_codewords, radius_bits;
    double code_bits;    /* of one chunk as the paper counts, fractional */
    size_t table_floats; /* numbers in the family's own table */
    kvant_direction_search *search;
    kvant_direction_search_kind searches_by;
} kvant_direction_shape;

static inline kvant_direction *kvant_direction_of(const kvant_codec *codec)
{
    return codec->state;
}

/* Finds the Hurwitz unit p with the largest <y, p>. If one component's magnitude is at least half
 * the sum of all magnitudes, p has that component only (the first of equal ones). Otherwise p is
 * halves with the signs of y, + for zeros. */
uint32_t kvant_direction_closest_unit(const float y[4]);

/* Reads a variant such as s96r4, made of two letters or words and two numbers; without a variant *a
 * and *b keep their defaults. KVANT_ERR_SPEC unless min_a <= *a <= max_a and min_b <= *b <=
 * max_b. */
typedef struct kvant_direction_field {
    const char *name;
    uint32_t min, max;
} kvant_direction_field;
kvant_status kvant_direction_variant(const kvant_spec *spec, const kvant_direction_field fields[2],
                                     uint32_t numbers[2], const kvant_error *error);

/* Completes the options, creates the transform, allocates the state and sets sizes and
 * quantiser. */
kvant_status kvant_direction_create(kvant_codec *codec, const kvant_request *request,
                                    kvant_direction_options *options,
                                    const kvant_direction_shape *shape, const kvant_error *error);

/* A row while it is quantised: arrays of components, padded with zeros, so that searches run over
 * chunks. */
typedef struct kvant_direction_row {
    float x[4 * KVANT_DIRECTION_MAX_CHUNKS];
    float squares[KVANT_DIRECTION_MAX_CHUNKS],
        norm[KVANT_DIRECTION_MAX_CHUNKS];     /* 0 for outliers */
    float radius[KVANT_DIRECTION_MAX_CHUNKS]; /* whole numbers */
    uint32_t index[KVANT_DIRECTION_MAX_CHUNKS];
    float largest; /* the norm that the last radius stands for */
} kvant_direction_row;

void kvant_direction_split(const kvant_direction *direction, const float *y, uint32_t head_dim,
                           kvant_direction_row *r);

/* Chooses radii and indices after outliers are taken out; returns the scale to store. */
float kvant_direction_quantize(const kvant_direction *direction, const kvant_kernels *kernels,
                               kvant_direction_row *r);

/* The quantiser of codecs with outliers of a page. */
extern const kvant_quantizer kvant_direction_page_quantizer;

/* Offers attention on codes, after the family has filled its table. */
kvant_status kvant_direction_offer_codes(kvant_codec *codec);
