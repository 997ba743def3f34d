/* params.h - a codec as plain numbers that travel by value into a launch.
 *
 * params.c makes them from a codec's view and refuses codecs without a kernel. Knows no kernel. C
 * and CUDA share this header. */
#pragma once

#include <stdbool.h>

#include <kvant/cuda_kernels.h>

#include "../base/attributes.h"
#include "../codec/view.h"
#include "general_view.h"

KVANT_BEGIN_C

#define KVANT_CUDA_MAX_DIM 256u  /* of kernels that know head_dim when they are compiled */
#define KVANT_CUDA_MOST_DIM 512u /* of all (any/) */
#define KVANT_CUDA_MAX_LEVELS 16u
#define KVANT_CUDA_TABLE_WORDS 8u

/* What pages hold. */
typedef enum kvant_cuda_codes {
    KVANT_CUDA_CODES_OPEN, /* fp16 rows */
    KVANT_CUDA_CODES_UNIFORM,
    KVANT_CUDA_CODES_CODEBOOK,
    KVANT_CUDA_CODES_TRELLIS,
    KVANT_CUDA_CODES_TRIPLETS,    /* chunks of 3 channels */
    KVANT_CUDA_CODES_QUATERNIONS, /* chunks of 4 */
    KVANT_CUDA_CODES_GENERAL      /* kvant_cuda_codec.general says; kernels of any/ alone */
} kvant_cuda_codes;

/* How codes become numbers in attention: the dequantiser that a kernel is built with. In no order:
 * code that asks what pages hold reads kvant_cuda_params.codes. */
typedef enum kvant_cuda_kind {
    KVANT_CUDA_NO_KIND,
    KVANT_CUDA_UNIFORM2,
    KVANT_CUDA_UNIFORM2_CHANNELS32, /* a scale for 32 channels of a token */
    KVANT_CUDA_UNIFORM2_TOKENS32,   /* a scale for 32 tokens of a channel */
    KVANT_CUDA_UNIFORM3,
    KVANT_CUDA_UNIFORM3_CHANNELS32,
    KVANT_CUDA_UNIFORM3_TOKENS32,
    KVANT_CUDA_UNIFORM4,
    KVANT_CUDA_UNIFORM4_CHANNELS, /* of decode kernels alone: groups of 16 and more */
    KVANT_CUDA_UNIFORM4_TOKENS,
    KVANT_CUDA_UNIFORM8_CHANNELS,
    KVANT_CUDA_UNIFORM5, /* without attention, as all below that say so */
    KVANT_CUDA_UNIFORM6,
    KVANT_CUDA_UNIFORM7,
    KVANT_CUDA_UNIFORM8,
    KVANT_CUDA_UNIFORM_ANY, /* other groups; kernels of any/ alone */
    KVANT_CUDA_OCTOPUS2,    /* codes of triplets of channels */
    KVANT_CUDA_OCTOPUS3,
    KVANT_CUDA_OCTOPUS4,
    KVANT_CUDA_HQMQ_S96R4, /* codes of 4 channels */
    KVANT_CUDA_HQMQ_S192R6,
    KVANT_CUDA_HQMQ_ANY,       /* other sizes; kernels of any/ alone */
    KVANT_CUDA_OCTOPUS_SPLITS, /* of decode kernels alone: any split, any sizes */
    KVANT_CUDA_HQMQ_SIZES,
    KVANT_CUDA_OPEN,    /* fp16 rows */
    KVANT_CUDA_GENERAL, /* kernels of any/ alone */
    KVANT_CUDA_CODEBOOK2,
    KVANT_CUDA_CODEBOOK3,
    KVANT_CUDA_CODEBOOK4,
    KVANT_CUDA_CODEBOOK_WIDE, /* of 1 or 5 to 8 bits; without attention */
    KVANT_CUDA_CODEBOOK6,     /* of decode kernels alone, which read keys of 6 bits */
    KVANT_CUDA_TRELLIS2,
    KVANT_CUDA_TRELLIS3,
    KVANT_CUDA_TRELLIS4
} kvant_cuda_kind;

/* What has a scale of its own: a token, a group of its channels, a group of tokens of a channel. */
typedef enum kvant_cuda_grouping {
    KVANT_CUDA_GROUP_TOKEN,
    KVANT_CUDA_GROUP_CHANNELS,
    KVANT_CUDA_GROUP_TOKENS
} kvant_cuda_grouping;

/* What stands before the rotation of keys: W of a calibration, different for every kv head. */
typedef enum kvant_cuda_weighting {
    KVANT_CUDA_WEIGHTING_NONE,
    KVANT_CUDA_WEIGHTING_DIAGONAL,
    KVANT_CUDA_WEIGHTING_FULL /* holds the rotation too: rotation.block is 0 */
} kvant_cuda_weighting;

typedef struct kvant_cuda_rotation {
    uint32_t block;                          /* Hadamard block, 0 without a rotation */
    float scale;                             /* binary32(1 / sqrt(block)) */
    uint32_t signs[KVANT_CUDA_MAX_DIM / 32]; /* bit set: minus */
} kvant_cuda_rotation;

/* The same for any head_dim. */
typedef struct kvant_cuda_wide_rotation {
    uint32_t block;
    float scale;
    uint32_t signs[KVANT_CUDA_MOST_DIM / 32];
} kvant_cuda_wide_rotation;

typedef struct kvant_cuda_params {
    kvant_cuda_codes codes;
    kvant_cuda_kind kind;
    kvant_cuda_kind
        decoder; /* another kind for decode kernels, which know more groups and sizes than others */
    kvant_cuda_grouping grouping;
    uint32_t head_dim, bits, role;
    uint32_t metadata_offset, page_bytes;
    kvant_cuda_weighting weighting;
    uint32_t dense; /* the rotation is a matrix that kernels do not know: rows come transformed */
    kvant_cuda_rotation rotation;
    /* uniform: the number of scales of a page, a multiple of 64; zero points follow them */
    uint32_t symmetric, n_scales;
    uint32_t hybrid,
        /* hybrid: a scale's sign says that it has a zero point; group_log: of decode kernels */
        group_log;
    float levels, offset; /* as in the CPU's codec: number = scale * (code + offset) + zero */
    /* codebook */
    uint32_t unbiased, feedback;
    float inverse_sqrt_dim;
    float values[KVANT_CUDA_MAX_LEVELS], thresholds[KVANT_CUDA_MAX_LEVELS];
    /* middle + gain tanh(slope u), rounded to eighths, has a whole part g with code(u) = g + (u >
     * thresholds[g]) in bits 3 to 6 of the float; see guess_curve in params.c */
    float guess_slope, guess_gain, guess_middle;
    /* codebook as bytes for attention: values[i] ~ step * (byte i - bias); see byte_codebook in
     * params.c */
    uint32_t bytes[KVANT_CUDA_TABLE_WORDS];
    float step, bias;
    /* trellis: bits of a state; bytes are magnitudes of levels then, see trellis_params.c */
    uint32_t memory;
} kvant_cuda_params;

#define KVANT_CUDA_WIDE_LEVELS 256u

/* A codebook of KVANT_CUDA_CODEBOOK_WIDE. */
typedef struct kvant_cuda_wide_book {
    float values[KVANT_CUDA_WIDE_LEVELS], thresholds[KVANT_CUDA_WIDE_LEVELS];
} kvant_cuda_wide_book;

#define KVANT_CUDA_TRELLIS_LEVELS 64u

/* Kinds of a trellis (format.md, "Trellis codes"). */
typedef struct kvant_cuda_trellis {
    uint32_t memory, bits, n_levels;
    uint32_t taps[3];
    int32_t per_deviation; /* levels a standard deviation */
    int8_t levels[KVANT_CUDA_TRELLIS_LEVELS];
    float values[KVANT_CUDA_TRELLIS_LEVELS]; /* in standard deviations */
} kvant_cuda_trellis;

#define KVANT_CUDA_MAX_SECONDARIES 192u

/* Kinds whose codes are of several channels (format.md, "Chunk codes"): what such a code
 * means. */
typedef struct kvant_cuda_book {
    uint32_t n_chunks;
    /* octopus: bits of a coordinate and of a norm; which levels are tried (kvant_triplet_rounding);
     * levels, and thresholds between them */
    uint32_t direction_bits, norm_bits, rounding;
    float direction[32], direction_thresholds[32], norm[8], norm_thresholds[8];
    /* hqmq: bits of an index and of a radius; secondary quaternions, in binary64 because directions
     * are rounded from that */
    uint32_t index_bits, radius_bits, n_secondaries;
    double secondaries[KVANT_CUDA_MAX_SECONDARIES][4];
} kvant_cuda_book;

/* Whether head_dim has kernels of its own. */
static inline uint32_t kvant_cuda_knows(uint32_t head_dim)
{
    return head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

/* Whether kernels of any/ alone serve a codec. */
static inline uint32_t kvant_cuda_needs_any(const kvant_cuda_params *params)
{
    return !kvant_cuda_knows(params->head_dim) || params->kind == KVANT_CUDA_UNIFORM_ANY ||
           params->kind == KVANT_CUDA_HQMQ_ANY || params->kind == KVANT_CUDA_GENERAL;
}

#if defined(__CUDACC__)
#define KVANT_CUDA_BOTH __host__ __device__
#else
#define KVANT_CUDA_BOTH
#endif

KVANT_CUDA_BOTH static inline uint32_t kvant_cuda_has_chunks(const kvant_cuda_params *params)
{
    return params->codes == KVANT_CUDA_CODES_TRIPLETS ||
           params->codes == KVANT_CUDA_CODES_QUATERNIONS;
}

/* Whether kernels of any/ read rows in the general form. */
KVANT_CUDA_BOTH static inline uint32_t kvant_cuda_is_general(const kvant_cuda_params *params)
{
    return params->codes == KVANT_CUDA_CODES_GENERAL || kvant_cuda_has_chunks(params);
}

/* Whether the rotations of keys in tiers lie transposed, as any/direct_tiers.cuh wants them. */
KVANT_CUDA_BOTH static inline uint32_t kvant_cuda_turns_tiers(const kvant_general *g)
{
    return g->view.kind == KVANT_GENERAL_TIERS && (g->head_dim == 64 || g->head_dim == 128);
}

/* What only kernels of any head_dim and codec read (any/). */
typedef struct kvant_cuda_any {
    kvant_cuda_wide_rotation rotation;
    uint32_t group,
        /* uniform codes: numbers that share a scale, tokens of a channel or channels of a token */
        per_channel;
    uint16_t steps[KVANT_CUDA_MOST_DIM]; /* of a trellis: a channel's place in the circle */
} kvant_cuda_any;

#define KVANT_CUDA_MOST_DEVICES 64

/* The tables of a codec in the general form. A GPU gets its copy in the first call there
 * (any/general.cu). */
typedef struct kvant_cuda_tables_of {
    void *host, *device[KVANT_CUDA_MOST_DEVICES];
    size_t bytes;
} kvant_cuda_tables_of;

struct kvant_cuda_codec {
    kvant_cuda_params params;
    kvant_general general; /* of all but a trellis; tables: set in copies for a launch */
    kvant_cuda_tables_of *tables;
    kvant_cuda_any any;
    kvant_cuda_book book;       /* of chunks */
    kvant_cuda_trellis trellis; /* of a trellis */
    kvant_cuda_wide_book wide;  /* of a wide codebook */
    kvant_codec_info info;      /* its spec lies behind this struct */
};

/* Where a refusal is explained: size bytes of text, or NULL. */
typedef struct kvant_cuda_error {
    char *text;
    size_t size;
} kvant_cuda_error;

/* Formats the message and returns status. */
kvant_status kvant_cuda_refuse(const kvant_cuda_error *error, kvant_status status,
                               const char *format, ...) KVANT_PRINTF(3, 4);

/* Fills a codec's params, book and trellis, or says why the codec of this view is not on the
 * GPU. */
kvant_status kvant_cuda_params_init(kvant_cuda_codec *codec, const kvant_codec_view *view,
                                    const kvant_cuda_error *error);

/* The part of params_init for chunks (chunk_params.c); false: kernels for chunks do not know
 * them. */
bool kvant_cuda_chunk_init(kvant_cuda_params *params, kvant_cuda_book *book,
                           const kvant_codec_view *view);
/* Fills a codec's general form; false when the view has none. No tables. */
bool kvant_cuda_general_init(kvant_cuda_codec *codec, const kvant_codec_view *view);

/* The codec with tables of the current GPU, for a launch (any/general.cu). The first call there
 * allocates and waits. centroids: as the call's arguments have them; KVANT_ERR_ARGUMENT for some
 * without need, or none. */
kvant_status kvant_cuda_codec_placed(const kvant_cuda_codec *codec, const float *centroids,
                                     kvant_cuda_codec *placed);
void kvant_cuda_tables_free(kvant_cuda_tables_of *tables); /* of GPUs; NULL is fine */

/* The part of params_init for a trellis (trellis_params.c). */
void kvant_cuda_trellis_init(kvant_cuda_codec *codec, const kvant_codec_view *view);

KVANT_END_C
