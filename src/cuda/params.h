/* params.h - a codec as plain numbers that are passed by value to a launch.
 *
 * params.c makes them from a codec's view and refuses codecs without a kernel. This header knows no
 * kernel. C and CUDA share it. */
#pragma once

#include <stdbool.h>

#include <kvant/cuda_kernels.h>

#include "../base/attributes.h"
#include "../codec/view.h"
#include "general_view.h"

KVANT_BEGIN_C

/* the largest head_dim of kernels that are compiled for head_dims */
#define KVANT_CUDA_MAX_DIM 256u
#define KVANT_CUDA_MOST_DIM 512u /* the largest head_dim of all kernels (any/) */
#define KVANT_CUDA_MAX_LEVELS 16u
#define KVANT_CUDA_TABLE_WORDS 8u

/* The content of pages. */
typedef enum kvant_cuda_codes {
    KVANT_CUDA_CODES_OPEN, /* fp16 rows */
    KVANT_CUDA_CODES_UNIFORM,
    KVANT_CUDA_CODES_CODEBOOK,
    KVANT_CUDA_CODES_TRELLIS,
    KVANT_CUDA_CODES_TRIPLETS,    /* chunks of 3 channels */
    KVANT_CUDA_CODES_QUATERNIONS, /* chunks of 4 */
    /* kvant_cuda_codec.general defines the codes; only kernels of any/ serve them */
    KVANT_CUDA_CODES_GENERAL
} kvant_cuda_codes;

/* How codes become numbers in attention: the dequantiser that a kernel is compiled with. The values
 * have no order; kvant_cuda_params.codes says what pages contain. */
typedef enum kvant_cuda_kind {
    KVANT_CUDA_NO_KIND,
    KVANT_CUDA_UNIFORM2,
    KVANT_CUDA_UNIFORM2_CHANNELS32, /* a scale for 32 channels of a token */
    KVANT_CUDA_UNIFORM2_TOKENS32,   /* a scale for 32 tokens of a channel */
    KVANT_CUDA_UNIFORM3,
    KVANT_CUDA_UNIFORM3_CHANNELS32,
    KVANT_CUDA_UNIFORM3_TOKENS32,
    KVANT_CUDA_UNIFORM4,
    KVANT_CUDA_UNIFORM4_CHANNELS, /* only decode kernels: groups of 16 and more */
    KVANT_CUDA_UNIFORM4_TOKENS,
    KVANT_CUDA_UNIFORM8_CHANNELS,
    KVANT_CUDA_UNIFORM5, /* without attention, like all kinds below that say so */
    KVANT_CUDA_UNIFORM6,
    KVANT_CUDA_UNIFORM7,
    KVANT_CUDA_UNIFORM8,
    KVANT_CUDA_UNIFORM_ANY, /* other groups; only kernels of any/ */
    KVANT_CUDA_OCTOPUS2,    /* codes of triplets of channels */
    KVANT_CUDA_OCTOPUS3,
    KVANT_CUDA_OCTOPUS4,
    KVANT_CUDA_HQMQ_S96R4, /* codes of 4 channels */
    KVANT_CUDA_OPEN,       /* fp16 rows */
    KVANT_CUDA_GENERAL,    /* only kernels of any/ */
    KVANT_CUDA_CODEBOOK2,
    KVANT_CUDA_CODEBOOK3,
    KVANT_CUDA_CODEBOOK4,
    KVANT_CUDA_CODEBOOK_WIDE, /* 1 or 5 to 8 bits; without attention */
    KVANT_CUDA_CODEBOOK6,     /* only decode kernels, which read keys of 6 bits */
    KVANT_CUDA_TRELLIS2,
    KVANT_CUDA_TRELLIS3,
    KVANT_CUDA_TRELLIS4
} kvant_cuda_kind;

/* The numbers that share a scale: a token, a group of a token's channels, or a group of a channel's
 * tokens. */
typedef enum kvant_cuda_grouping {
    KVANT_CUDA_GROUP_TOKEN,
    KVANT_CUDA_GROUP_CHANNELS,
    KVANT_CUDA_GROUP_TOKENS
} kvant_cuda_grouping;

/* The step before the rotation of keys: W of a calibration, different for every kv head. */
typedef enum kvant_cuda_key_transform_kind {
    KVANT_CUDA_TRANSFORM_NONE,
    KVANT_CUDA_TRANSFORM_DIAGONAL,
    KVANT_CUDA_TRANSFORM_FULL /* includes the rotation, so rotation.block is 0 */
} kvant_cuda_key_transform_kind;

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
    /* another kind for decode kernels, which serve more groups than other kernels */
    kvant_cuda_kind decoder;
    kvant_cuda_grouping grouping;
    uint32_t head_dim, bits, role;
    uint32_t metadata_offset, page_bytes;
    kvant_cuda_key_transform_kind key_transform_kind;
    /* the rotation is a matrix that kernels do not have, so rows arrive transformed */
    uint32_t dense;
    kvant_cuda_rotation rotation;
    /* uniform: the number of scales of a page, a multiple of 64; zero points follow them */
    uint32_t symmetric, n_scales;
    uint32_t hybrid,
        /* hybrid: the sign of a scale says that it has a zero point; group_log: only for decode
         * kernels */
        group_log;
    float levels, offset; /* as in the CPU's codec: number = scale * (code + offset) + zero */
    /* codebook */
    uint32_t unbiased, feedback;
    float inverse_sqrt_dim;
    float values[KVANT_CUDA_MAX_LEVELS], thresholds[KVANT_CUDA_MAX_LEVELS];
    /* The curve middle + gain tanh(slope u) is rounded to eighths. Bits 3 to 6 of the float are its
     * whole part g. Then code(u) = g + (u > thresholds[g]); see guess_curve in params.c */
    float guess_slope, guess_gain, guess_middle;
    /* codebook as bytes for attention: values[i] ~ step * (byte i - bias); see byte_codebook in
     * params.c */
    uint32_t
        bytes[KVANT_CUDA_TABLE_WORDS]; /* trellis: magnitudes of levels, see trellis_params.c */
    float step, bias;
    float exact_limit; /* the largest magnitude of a number in an exact page (codec/encode.h) */
} kvant_cuda_params;

#define KVANT_CUDA_WIDE_LEVELS 256u

/* The levels of KVANT_CUDA_CODEBOOK_WIDE. */
typedef struct kvant_cuda_wide_book {
    float values[KVANT_CUDA_WIDE_LEVELS], thresholds[KVANT_CUDA_WIDE_LEVELS];
} kvant_cuda_wide_book;

#define KVANT_CUDA_TRELLIS_LEVELS 64u

/* Kinds of a trellis (format.md, "Trellis codes"). */
typedef struct kvant_cuda_trellis {
    uint32_t bits, n_levels;
    int32_t per_deviation; /* levels per standard deviation */
    int8_t levels[KVANT_CUDA_TRELLIS_LEVELS];
    float values[KVANT_CUDA_TRELLIS_LEVELS]; /* in standard deviations */
} kvant_cuda_trellis;

#define KVANT_CUDA_SECONDARIES 96u

/* The numbers that codes of several channels stand for (format.md, "Chunk codes"), in attention. */
typedef struct kvant_cuda_directions {
    float direction[32], norm[8];                 /* octopus: levels */
    float secondaries[KVANT_CUDA_SECONDARIES][4]; /* hqmq: secondary quaternions */
} kvant_cuda_directions;

/* Whether there are kernels that are compiled for this head_dim. */
static inline uint32_t kvant_cuda_knows(uint32_t head_dim)
{
    return head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
}

/* Whether only kernels of any/ serve a codec. */
static inline uint32_t kvant_cuda_needs_any(const kvant_cuda_params *params)
{
    return !kvant_cuda_knows(params->head_dim) || params->kind == KVANT_CUDA_UNIFORM_ANY ||
           params->kind == KVANT_CUDA_GENERAL;
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

/* Data that only kernels for any head_dim and codec read (any/). */
typedef struct kvant_cuda_any {
    kvant_cuda_wide_rotation rotation;
    uint32_t group,
        /* uniform codes: numbers that share a scale, tokens of a channel or channels of a token */
        per_channel;
    uint16_t steps[KVANT_CUDA_MOST_DIM]; /* trellis: the step of each channel in the circle */
} kvant_cuda_any;

#define KVANT_CUDA_MOST_DEVICES 64

/* The tables of a codec in the general form. A GPU gets its copy in the first call on that GPU
 * (any/general.cu). */
typedef struct kvant_cuda_tables_of {
    void *host, *device[KVANT_CUDA_MOST_DEVICES];
    size_t bytes;
} kvant_cuda_tables_of;

struct kvant_cuda_codec {
    kvant_cuda_params params;
    kvant_general general; /* for all codecs but trellises; tables: set in copies for a launch */
    kvant_cuda_tables_of *tables;
    kvant_cuda_any any;
    /* R, also where params and `any` have none because it is part of a full matrix. It follows the
     * compact form of a matrix. block 0: there is none, or it is dense */
    kvant_cuda_wide_rotation rotation;
    uint32_t has_dense_rotation;      /* so it has no compact form */
    kvant_cuda_directions directions; /* for chunks */
    kvant_cuda_trellis trellis;       /* for trellises */
    kvant_cuda_wide_book wide;        /* for wide codebooks */
    kvant_codec_info info;            /* its spec lies behind this struct */
};

/* Receives the explanation of a refusal: `size` bytes of text, or NULL. */
typedef struct kvant_cuda_error {
    char *text;
    size_t size;
} kvant_cuda_error;

/* Formats the message and returns status. */
kvant_status kvant_cuda_refuse(const kvant_cuda_error *error, kvant_status status,
                               const char *format, ...) KVANT_PRINTF(3, 4);

/* Fills a codec's params, directions and trellis from a view, or explains why the codec is not
 * served on the GPU. */
kvant_status kvant_cuda_params_init(kvant_cuda_codec *codec, const kvant_codec_view *view,
                                    const kvant_cuda_error *error);

/* The part of params_init for chunks (chunk_params.c). False when kernels for chunks do not serve
 * them. */
bool kvant_cuda_chunk_init(kvant_cuda_params *params, kvant_cuda_directions *directions,
                           const kvant_codec_view *view);
/* Fills a codec's general form without its tables; false when the view has none. */
bool kvant_cuda_general_init(kvant_cuda_codec *codec, const kvant_codec_view *view);

/* Returns the codec with tables of the current GPU, for a launch (any/general.cu). The first call
 * on a GPU allocates and waits. centroids: the centroids in the call's arguments.
 * KVANT_ERR_ARGUMENT if there are some without need, or if they are missing. */
kvant_status kvant_cuda_codec_with_tables(const kvant_cuda_codec *codec, const float *centroids,
                                          kvant_cuda_codec *placed);
/* frees the copies on all GPUs; NULL is fine */
void kvant_cuda_tables_free(kvant_cuda_tables_of *tables);

/* The part of params_init for a trellis (trellis_params.c). */
void kvant_cuda_trellis_init(kvant_cuda_codec *codec, const kvant_codec_view *view);

KVANT_END_C
