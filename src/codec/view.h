/* view.h - the meaning of a codec's pages as plain data, for readers outside src/codec: attention
 * on the CPU, and libkvant_cuda.
 *
 * The family fills the member of its kind at creation; codec.c completes the rest. A view never
 * changes afterwards. Its pointers are valid as long as the codec. libkvant_cuda may come from
 * another build, so libkvant compares version and size before it passes a view. This header needs
 * no code of libkvant. */
#pragma once

#include <kvant/codec.h>

/* The meaning of one code of a page: the number of one channel, or of several. */
typedef enum kvant_code_kind {
    KVANT_CODES_NONE = 0, /* raw rows, or codes that only the family's own functions read */
    KVANT_CODES_UNIFORM,  /* scale * (code + offset) + zero, a scale per group */
    KVANT_CODES_CODEBOOK, /* scale * values[code], a scale per token */
    /* scale * values[level]: code and the trellis bits of preceding codes select the level */
    KVANT_CODES_TRELLIS,
    KVANT_CODES_CHUNK /* a direction of 3 or 4 channels times a length, a scale per token */
} kvant_code_kind;

typedef struct kvant_uniform_view {
    /* each group chooses between symmetric and asymmetric: levels and offset mean nothing */
    uint32_t hybrid;
    uint32_t symmetric;   /* no zero points */
    uint32_t per_channel; /* a group is tokens of one channel, else channels of one token */
    uint32_t group, n_groups;
    uint32_t n_scales; /* of a page; zero points follow them */
    uint32_t levels;   /* the largest level */
    float offset;      /* code + offset is the level */
} kvant_uniform_view;

typedef struct kvant_codebook_view {
    const float *values;     /* 2^bits, ascending */
    const float *thresholds; /* thresholds[i] lies between values[i] and values[i + 1] */
    float inverse_sqrt_dim;
    uint32_t unbiased;
} kvant_codebook_view;

typedef struct kvant_trellis_view {
    const uint16_t *steps; /* of head_dim channels */
    const int8_t *levels;  /* 2^(bits + 2), ascending; level i is in subset i mod 8 */
    const float *values;   /* the levels in standard deviations */
    float unit;            /* values[i] = unit * levels[i] */
    float inverse_sqrt_dim;
    uint32_t unbiased;
} kvant_trellis_view;

/* The meaning of the index in a chunk code. */
typedef enum kvant_chunk_kind {
    KVANT_CHUNK_TABLE = 0, /* an entry of codewords */
    KVANT_CHUNK_TRIPLETS,  /* an octahedral direction */
    /* a Hurwitz unit times a secondary quaternion; codewords are the rounded products */
    KVANT_CHUNK_QUATERNIONS
} kvant_chunk_kind;

typedef struct kvant_chunk_view {
    kvant_chunk_kind kind;
    uint32_t n_chunks, index_bits, length_bits;
    uint32_t outliers; /* chunks per token that a page stores apart */
    /* Triplets: index_bits / 2 bits per coordinate. Tables have 256 numbers (direction) and 128
     * (length). */
    const float *direction, *length;
    /* the others */
    const float *codewords;    /* 2^index_bits x 4 */
    const double *secondaries; /* quaternions: n_secondaries x 4 */
    uint32_t n_secondaries;
} kvant_chunk_view;

/* ---- one form for the families of papers ---- */

/* The quantisers that no member of kvant_codec_view.of describes completely. Places count floats
 * from the view's tables. */
typedef enum kvant_general_kind {
    KVANT_GENERAL_NONE = 0, /* not in this form */
    KVANT_GENERAL_RAW,      /* no codes */
    KVANT_GENERAL_SKETCH,   /* a sketch alone */
    KVANT_GENERAL_UNIFORM,  /* hybrid groups, or the residual that centroids leave */
    KVANT_GENERAL_CODEBOOK,
    /* two codebooks: one of outlier channels, one of all remaining channels */
    KVANT_GENERAL_TIERS,
    KVANT_GENERAL_TRIPLETS,   /* octahedral directions */
    KVANT_GENERAL_DIRECTIONS, /* 4 channels: a codeword times a radius */
    /* 4 channels: a symmetric uniform code of index_bits each; the first one is 0 for an outlier */
    KVANT_GENERAL_FIELDS,
    KVANT_GENERAL_POLAR
} kvant_general_kind;

/* A rotation of n numbers by the matrix at `numbers`, or by signs there and a Hadamard matrix. */
typedef struct kvant_rotation_position {
    uint32_t n, dense, numbers;
    float scale; /* of the Hadamard matrix: 1 / sqrt(n) */
} kvant_rotation_position;

typedef struct kvant_codebook_position {
    uint32_t n, bits, values, thresholds; /* n: numbers of a row */
    float inverse_sqrt_dim;
} kvant_codebook_position;

typedef enum kvant_direction_search_kind {
    KVANT_SEARCH_COSETS,   /* a secondary, then a Hurwitz unit */
    KVANT_SEARCH_SIGNS,    /* a unit, then signs of projections on the rest */
    KVANT_SEARCH_PRODUCTS, /* the codeword of the largest product */
    KVANT_SEARCH_GREEDY    /* an entry of each of two books, chosen one after another */
} kvant_direction_search_kind;

typedef struct kvant_general_view {
    kvant_general_kind kind;
    uint32_t raw; /* raw_type of raw.c: 0 binary32, 1 binary16, 2 bfloat16 */
    uint32_t unbiased;
    float inverse_sqrt_dim;
    /* the sketch of the codes' residual; codes and norms are offsets in bytes of the page */
    uint32_t sketched, sketch_codes, sketch_norms;
    kvant_rotation_position projection;
    kvant_codebook_position books[2];
    struct {
        kvant_rotation_position rotations[2];
        uint32_t codes[2], scales[2], mask; /* bytes of the page */
    } tiers;
    /* Mode as in uniform.h; index_bytes per token at byte `index` of the page; clusters is 0
     * without centroids. */
    struct {
        uint32_t bits, mode, per_channel, group, n_scales;
        float sym_levels, asym_levels, bias;
        uint32_t clusters, centroids, columns, index, index_bytes;
    } uniform;
    struct {
        uint32_t n, index_bits, length_bits, rounding, zero_padding;
        uint32_t direction, direction_thresholds, norm, norm_thresholds; /* places: triplets */
        uint32_t slots, n_codewords, codewords,
            table; /* directions; table: what the search reads */
        /* Outliers: `slots` per token, or `pool` per page. A chunk is one above `multiple` medians
         * of the token, or of the page. whole_range: they count for the scale. */
        uint32_t pool, whole_range;
        float multiple;
        kvant_direction_search_kind search;
    } chunks;
    struct { /* books of a list: cosines and sines of 16 levels, then of thresholds */
        uint32_t bits, depth, books, last_books,
            stride; /* stride: from a list's books to the next one's */
        float sqrt_dim;
    } polar;
} kvant_general_view;

typedef enum kvant_rotate {
    KVANT_ROTATE_NONE = 0,
    KVANT_ROTATE_HADAMARD = 1,
    KVANT_ROTATE_DENSE = 2
} kvant_rotate;

/* y = R W ((x - c) / s), queries R W^-1 q (transform.h). */
typedef struct kvant_transform_view {
    kvant_rotate rotate;
    uint32_t block;      /* of the Hadamard matrix */
    const float *signs;  /* head_dim, +1 or -1: Hadamard */
    const float *matrix; /* R, head_dim x head_dim row-major: dense */
    /* Diagonal: head_dim numbers of W and of W^-1. Full: (R W)^T and (R W^-1)^T, instead of R.
     * NULL: W is 1. */
    const float *key_transform;
    const float *inverse_key_transform;
    uint32_t diagonal;
    const float *center, *scale; /* of a calibration: head_dim numbers or NULL */
} kvant_transform_view;

/* Error feedback of the encoder (format.md, "Feedback"); decoders need none of it. */
typedef struct kvant_feedback_view {
    const float *pivots;  /* head_dim, or NULL without feedback */
    const float *columns; /* head_dim columns of a unit lower triangle, stride numbers each */
    uint32_t stride;
} kvant_feedback_view;

typedef struct kvant_codec_view {
    uint32_t size; /* sizeof(kvant_codec_view) */
    kvant_code_kind kind;
    const kvant_codec_info *info;
    kvant_transform_view transform;
    kvant_feedback_view feedback;
    union {
        kvant_uniform_view uniform;
        kvant_codebook_view codebook;
        kvant_trellis_view trellis;
        kvant_chunk_view chunk;
    } of; /* by kind */
    kvant_general_view general;
    const void *tables; /* that general's places are in */
    size_t table_bytes;
    float exact_limit; /* see kvant_codec_exact_limit */
} kvant_codec_view;
