/* codec.h - codecs: rows of float <-> the bytes of a page, and dot products computed on those bytes.
 *
 * A codec is a transform and a quantiser (docs/codecs.md). The transform acts on a row x before quantising,
 * y = R ((x - c) / s) with a centre c, a factor s for each channel and an orthonormal R, and on queries and outputs
 * instead of on decoded rows, x = c + s o R^T y (o multiplies channel by channel; keys with transform= in their spec have R W in place of
 * R, R W^-1 for queries and W^-1 R^T in place of R^T, with a symmetric W from a calibration):
 *
 *     keys      <q, s o R^T y + c> = <R (q o s), y> + <q, c>    the last term is the same for every key, and softmax
 *                                                               ignores it, so scores leave it out (a logit
 *                                                               softcap does not: attention adds it back there)
 *     values    sum_t p_t (s o R^T y_t + c) = s o R^T (sum_t p_t y_t) + c sum_t p_t
 *
 * so attention transforms a query once (kvant_codec_transform_query), works on quantised numbers
 * (kvant_codec_score, kvant_codec_accumulate) and its output once (kvant_codec_transform_output).
 * Centre and factors belong to the cache's state, not to the codec, and are passed where they are needed.
 *
 * A page holds KVANT_PAGE_TOKENS tokens of one layer, one kv head and one role. Its bytes are defined in
 * docs/format.md and are the same in memory, on disk, on the wire, on every CPU and on the GPU.
 *
 * Codecs are immutable: every function that takes a const kvant_codec may run in any number of threads at
 * once. Encoding into one page from two threads is a data race, also for different tokens: tokens share words.
 * Nothing but create allocates.
 */
#ifndef KVANT_CODEC_H
#define KVANT_CODEC_H

#include <stdbool.h>

#include <kvant/kvant.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVANT_PAGE_TOKENS 64u
#define KVANT_PAGE_ALIGN 64u /* page_bytes is a multiple of it; pages in memory start on it */
#define KVANT_MAX_HEAD_DIM 512u

typedef enum kvant_role { KVANT_ROLE_K = 0, KVANT_ROLE_V = 1 } kvant_role;

/* Where the cache takes the centre and the normalisation from: nowhere, the first rows written, a calibration. */
typedef enum kvant_center { KVANT_CENTER_NONE = 0, KVANT_CENTER_FIRST = 1, KVANT_CENTER_FILE = 2 } kvant_center;
typedef enum kvant_norm { KVANT_NORM_NONE = 0, KVANT_NORM_FIRST = 1, KVANT_NORM_FILE = 2 } kvant_norm;

/* Centre and factors of one kv head: what a row is shifted by and divided by before R. NULL in place of the structure
 * or of a member means no shift, no division. */
typedef struct kvant_affine {
    const float *center; /* head_dim finite numbers */
    const float *scale;  /* head_dim finite numbers above 0 */
} kvant_affine;

typedef struct kvant_codec kvant_codec;
typedef struct kvant_calibration kvant_calibration; /* calibration.h */

typedef struct kvant_codec_info {
    size_t size;        /* set by the caller to sizeof(kvant_codec_info) */
    const char *spec;   /* canonical spec: equal specs describe equal bytes; owned by the codec */
    const char *source; /* the paper and section it follows, or "-" */
    uint32_t head_dim;
    kvant_role role;
    /* What the spec asks of the cache (kvant/cache.h); encode and decode do not look at it. */
    kvant_center center;
    kvant_norm norm;
    uint32_t sink_tokens;   /* the first tokens of a stream that stay fp16 */
    uint32_t recent_tokens; /* the newest tokens that stay fp16 */
    uint32_t block_tokens;  /* encode takes whole blocks of this many tokens: 1 for per-token codecs */
    uint32_t bits;          /* bits of one code (all planes), 16 or 32 for raw codecs */
    size_t code_bytes;      /* bytes of the code plane, at offset 0 of the page */
    size_t metadata_offset;
    size_t metadata_bytes;
    size_t page_bytes;
    double true_bits;    /* 8 page_bytes / (64 head_dim): every stored byte counted, padding too */
    double nominal_bits; /* as the paper counts */
    uint64_t fingerprint; /* of the spec, role, head_dim and the numbers that came from a calibration */
} kvant_codec_info;

/* Creates a codec from `name[-bits][:key=value,...]`, e.g. "turboquant-4:scale=norm", "int-4:group=32,sym".
 * head_dim is 1 to KVANT_MAX_HEAD_DIM. seed feeds random signs and rotations; caches that exchange pages
 * must agree on it. On error *codec is NULL and err, when errlen > 0, holds one line that names the valid values.
 * KVANT_ERR_SPEC, KVANT_ERR_UNSUPPORTED, KVANT_ERR_ARGUMENT or KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_codec_create(const char *spec, uint32_t head_dim, kvant_role role, uint64_t seed,
                                          kvant_codec **codec, char *err, size_t errlen);

/* The same for one kv head of one layer, for specs that need to know it: center=file and the calibrated codecs take what
 * calibration (kvant/calibration.h; NULL: none) holds for it and copy it, so calibration may be freed afterwards.
 * Codecs of one layer that differ only in kv_head have equal page sizes. KVANT_ERR_UNSUPPORTED when the spec needs a
 * calibration and there is none, KVANT_ERR_ARGUMENT when it was made for another shape of model. */
KVANT_API kvant_status kvant_codec_create_calibrated(const char *spec, uint32_t head_dim, kvant_role role,
                                                     uint64_t seed, const kvant_calibration *calibration,
                                                     uint32_t layer, uint32_t kv_head, kvant_codec **codec,
                                                     char *err, size_t errlen);

/* Whether a spec makes a codec, for checking it before a model is known: it does when it works for one of the head_dims that
 * models use, or, with a calibration, for the first layer of that. KVANT_OK, or what create says for the first head_dim. */
KVANT_API kvant_status kvant_codec_check(const char *spec, kvant_role role, const kvant_calibration *calibration,
                                         char *err, size_t errlen);

/* Frees *codec and sets it to NULL; a NULL pointer or a pointer to NULL is fine. */
KVANT_API void kvant_codec_free(kvant_codec **codec);

/* Fills *info, whose size field must be set. */
KVANT_API kvant_status kvant_codec_get_info(const kvant_codec *codec, kvant_codec_info *info);

/* Whether kv heads of one cache (kvant/cache.h) can have codecs like these: 1 or 0. They may differ in what becomes of a row, but not
 * in role, head_dim, sink_tokens, recent_tokens and block_tokens, nor in whether centre or factors are those of first rows. */
KVANT_API int kvant_codecs_fit_together(const kvant_codec_info *a, const kvant_codec_info *b);

/* Encodes n rows of head_dim floats (row i at rows + i * stride) into tokens first .. first + n - 1 of the page;
 * other tokens keep their bytes. first and n are multiples of block_tokens, first + n <= 64. page: page_bytes bytes, aligned to 16, all zero or a page of this codec.
 * KVANT_ERR_NONFINITE and KVANT_ERR_RANGE are found before the first byte is written. */
KVANT_API kvant_status kvant_codec_encode(const kvant_codec *codec, const kvant_affine *affine, const float *rows,
                                          size_t stride, uint32_t first, uint32_t n, void *page);

/* Decodes tokens first .. first + n - 1 of the page into rows. Any bytes are a valid page: decoding cannot
 * fail on content, though foreign bytes may give any numbers, infinities and NaNs included. */
KVANT_API kvant_status kvant_codec_decode(const kvant_codec *codec, const kvant_affine *affine, const void *page,
                                          uint32_t first, uint32_t n, float *rows, size_t stride);

/* out = R (q o s): what kvant_codec_score expects. head_dim floats each; in and out may be the same. */
KVANT_API kvant_status kvant_codec_transform_query(const kvant_codec *codec, const kvant_affine *affine,
                                                   const float *q, float *out);

/* scores[i * 64 + t] = <query i, token t> for n_queries transformed queries (query i at q + i * stride) and all
 * 64 tokens of the page, without the centre's term. Tokens that were never encoded score 0. */
KVANT_API kvant_status kvant_codec_score(const kvant_codec *codec, const void *page, const float *q, size_t stride,
                                         uint32_t n_queries, float *scores);

/* acc[i * stride + j] += sum over t of weights[i * 64 + t] * y_t[j], in the transformed space, for n_queries
 * rows of weights. Tokens with weight 0 contribute nothing. */
KVANT_API kvant_status kvant_codec_accumulate(const kvant_codec *codec, const void *page, const float *weights,
                                              uint32_t n_queries, float *acc, size_t stride);

/* out = s o R^T acc + weight_sum * c: from the accumulated sum to values. In and out may be the same. */
KVANT_API kvant_status kvant_codec_transform_output(const kvant_codec *codec, const kvant_affine *affine,
                                                    float weight_sum, const float *acc, float *out);

/* Codec families, for listings and help: index 0 .. kvant_codec_family_count() - 1. Strings are constant. */
typedef struct kvant_codec_family {
    size_t size;          /* set by the caller to sizeof(kvant_codec_family) */
    const char *name;     /* "turboquant" */
    const char *variants; /* what may follow the dash, e.g. "1 2 2.5 3", the usual ones where there is no end of
                                   them ("s24r3 s96r4"); "" when nothing follows */
    const char *options;  /* the family's own, e.g. "scale=norm|unbiased qjl", or "" */
    const char *common_options; /* those that it shares with others: transform, centre, windows */
    const char *source;
    const char *summary;
} kvant_codec_family;

KVANT_API size_t kvant_codec_family_count(void);
KVANT_API kvant_status kvant_codec_family_get(size_t index, kvant_codec_family *family);

#ifdef __cplusplus
}
#endif

#endif /* KVANT_CODEC_H */
