/* codec.h - codecs: rows of float <-> the bytes of a page, and dot products computed on those
 * bytes.
 *
 * A codec is a transform and a quantiser (codecs.md). The transform acts on a row x before
 * quantising:
 *
 *     y = R ((x - c) / s)          c: centre, s: scale per channel, R: orthonormal
 *     x = c + s o R^T y            o multiplies channel by channel
 *
 * Keys with transform= in their spec have R W instead of R, with a symmetric W from a calibration.
 * With order= W is a permutation. Queries take R W^-T, and the way back is W^-1 R^T. Attention
 * never transforms rows back; it transforms queries and outputs:
 *
 *     keys      <q, s o R^T y + c> = <R (q o s), y> + <q, c>
 *     values    sum_t p_t (s o R^T y_t + c) = s o R^T (sum_t p_t y_t) + c sum_t p_t
 *
 * The term <q, c> is the same for every key. Softmax ignores it, so scores leave it out; attention
 * adds it back before a logit softcap.
 *
 * So attention transforms a query once (kvant_codec_transform_query), works on quantised numbers
 * (kvant_codec_score, kvant_codec_accumulate) and transforms its output once
 * (kvant_codec_transform_output). Centre and scale belong to the cache, not to the codec; callers
 * pass them.
 *
 * A page holds KVANT_PAGE_TOKENS tokens of one layer, one kv head and one role. format.md defines
 * its bytes. They are the same in memory, on disk, on the wire, on every CPU and on the GPU.
 *
 * Threads: a codec never changes after creation, so every function that takes a const kvant_codec
 * may run in any number of threads at once. Encoding into one page from two threads is a data race,
 * also for different tokens, because tokens share words. A child of fork may use the codecs of its
 * parent.
 *
 * Stack: every call fits 64 KiB.
 *
 * Memory: create allocates. kvant_codec_encode allocates for codecs whose block_tokens is above 1.
 * No other call allocates.
 *
 * Structs with a size field: set it to sizeof the struct. Every size from the first released struct
 * on is accepted. Functions write only that many bytes.
 */
#ifndef KVANT_CODEC_H
#define KVANT_CODEC_H

#include <stdbool.h>

#include <kvant/kvant.h>

KVANT_BEGIN_C

#define KVANT_PAGE_TOKENS 64u /* fixed by format.md; masks of a block have a bit per token */
/* page_bytes is a multiple of this number, so that pages can lie one after another. */
#define KVANT_PAGE_ALIGN 64u
#define KVANT_MAX_HEAD_DIM 512u /* a row then takes 2 KB of the stack */

typedef enum kvant_role { KVANT_ROLE_K = 0, KVANT_ROLE_V = 1 } kvant_role;

/* The source of a centre or a scale: none, the first rows that are written, or a calibration. */
typedef enum kvant_center {
    KVANT_CENTER_NONE = 0,
    KVANT_CENTER_FIRST = 1,
    KVANT_CENTER_FILE = 2
} kvant_center;
typedef enum kvant_norm {
    KVANT_NORM_NONE = 0,
    KVANT_NORM_FIRST = 1,
    KVANT_NORM_FILE = 2
} kvant_norm;

/* Centre and scale of one kv head: before R a row is shifted by the centre and divided by the
 * scale. NULL instead of the struct or of a member means no shift or no division. */
typedef struct kvant_affine {
    const float *center; /* head_dim finite numbers */
    const float *scale;  /* head_dim finite numbers above 0 */
} kvant_affine;

typedef struct kvant_codec kvant_codec;
typedef struct kvant_calibration kvant_calibration; /* calibration.h */

typedef struct kvant_codec_info {
    size_t size; /* set by the caller to sizeof(kvant_codec_info) */
    /* The canonical spec, owned by the codec. kvant_codec_create makes an equal codec from it with
     * seed 0. Codecs with equal specs, roles and head_dims write equal bytes, unless the spec takes
     * something from a calibration. In this case compare fingerprints. */
    const char *spec;
    const char *source; /* the paper and section it follows, or "-" */
    uint32_t head_dim;
    kvant_role role;
    /* The following five members tell the cache what the spec asks for (kvant/tensor.h). Encode and
     * decode do not look at them. */
    kvant_center center;
    kvant_norm norm;
    uint32_t sink_tokens;   /* the first tokens of a sequence that stay fp16 */
    uint32_t recent_tokens; /* the newest tokens that stay fp16 */
    uint32_t block_tokens;  /* encode takes whole blocks of this many tokens; 1: token by token */
    uint32_t bits;          /* bits of one code (all planes), 16 or 32 for raw codecs */
    size_t code_bytes;      /* bytes of the code plane, at offset 0 of the page */
    size_t metadata_offset;
    size_t metadata_bytes;
    size_t page_bytes;
    double true_bits;    /* 8 page_bytes / (64 head_dim): every stored byte counted, padding too */
    double nominal_bits; /* as the paper counts */
    /* Hash of spec, role, head_dim and the calibration's numbers. Equal fingerprints: equal
     * bytes. */
    uint64_t fingerprint;
    uint32_t learns_transform; /* 1: transform=first. Encode and decode do not look at it. */
} kvant_codec_info;

/* Creates a codec from `name[-bits][:key=value,...]`, e.g. "turboquant-4:scale=norm",
 * "int-4:group=32,sym". head_dim is 1 to KVANT_MAX_HEAD_DIM. seed feeds random signs and matrices;
 * the option seed=N of the spec comes before it. Caches that exchange pages must agree on it.
 * KVANT_ERR_SPEC: the spec is not understood. KVANT_ERR_UNSUPPORTED: it is understood, but this
 * head_dim, this build or a missing calibration does not allow it. KVANT_ERR_ARGUMENT,
 * KVANT_ERR_MEMORY. On an error *codec is NULL, and err, when errlen > 0, holds one line that names
 * the valid values. */
KVANT_API kvant_status kvant_codec_create(const char *spec, uint32_t head_dim, kvant_role role,
                                          uint64_t seed, kvant_codec **codec, char *err,
                                          size_t errlen);

/* The same for one kv head of one layer, for specs that take something from a calibration:
 * center=file, norm=file, transform=, and calibrated families. The codec copies the numbers, so the
 * calibration (kvant/calibration.h; NULL: none) may be freed afterwards. Codecs of one layer that
 * differ only in kv_head have equal page sizes. KVANT_ERR_UNSUPPORTED when the spec needs a
 * calibration and there is none, KVANT_ERR_ARGUMENT when the calibration was made for another shape
 * of model. */
KVANT_API kvant_status kvant_codec_create_calibrated(const char *spec, uint32_t head_dim,
                                                     kvant_role role, uint64_t seed,
                                                     const kvant_calibration *calibration,
                                                     uint32_t layer, uint32_t kv_head,
                                                     kvant_codec **codec, char *err, size_t errlen);

/* Checks a spec before a model is known. The spec must work for one of the head_dims that models
 * use or, with a calibration, for its first layer. KVANT_OK, or the status and message of create
 * for the first head_dim. A spec that passes may still be refused for the head_dim of a model. */
KVANT_API kvant_status kvant_codec_check(const char *spec, kvant_role role,
                                         const kvant_calibration *calibration, char *err,
                                         size_t errlen);

/* *needed = whether codecs of this spec and role take something from a calibration: 1 or 0.
 * KVANT_ERR_SPEC or KVANT_ERR_UNSUPPORTED with words in err when the spec makes no codec with a
 * calibration either. */
KVANT_API kvant_status kvant_codec_needs_calibration(const char *spec, kvant_role role, int *needed,
                                                     char *err, size_t errlen);

/* Frees *codec and sets it to NULL; a NULL pointer or a pointer to NULL is fine. */
KVANT_API void kvant_codec_free(kvant_codec **codec);

/* Fills *info, whose size field must be set. Strings live as long as the codec. */
KVANT_API kvant_status kvant_codec_get_info(const kvant_codec *codec, kvant_codec_info *info);

/* Encodes n rows of head_dim floats (row i at rows + i * stride) into tokens first .. first + n - 1
 * of the page. Other tokens keep their bytes. first and n are multiples of block_tokens, and first
 * + n is at most 64. The page has page_bytes bytes, is aligned to 16, and is all zero or a page of
 * this codec. Attention needs pages that are aligned to 64. KVANT_ERR_NONFINITE: a row holds a NaN
 * or an infinity. KVANT_ERR_RANGE: a row, shifted and divided, does not fit the stored scales. All
 * rows are checked before the first byte is written. KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_codec_encode(const kvant_codec *codec, const kvant_affine *affine,
                                          const float *rows, size_t stride, uint32_t first,
                                          uint32_t n, void *page);

/* Decodes tokens first .. first + n - 1 of the page into rows. Any bytes are a valid page: decoding
 * cannot fail on content, though foreign bytes may give any numbers, infinities and NaNs
 * included. */
KVANT_API kvant_status kvant_codec_decode(const kvant_codec *codec, const kvant_affine *affine,
                                          const void *page, uint32_t first, uint32_t n, float *rows,
                                          size_t stride);

/* out = R (q o s): what kvant_codec_score expects. head_dim floats each; in and out may be the
 * same. */
KVANT_API kvant_status kvant_codec_transform_query(const kvant_codec *codec,
                                                   const kvant_affine *affine, const float *q,
                                                   float *out);

/* Computes scores[i * 64 + t] = <query i, token t>, without the centre's term. There are n_queries
 * transformed queries, query i at q + i * stride, and 64 tokens in the page. Tokens that were never
 * encoded score 0. */
KVANT_API kvant_status kvant_codec_score(const kvant_codec *codec, const void *page, const float *q,
                                         size_t stride, uint32_t n_queries, float *scores);

/* acc[i * stride + j] += sum over t of weights[i * 64 + t] * y_t[j], in the transformed space, for
 * n_queries rows of weights. Tokens with weight 0 contribute nothing. */
KVANT_API kvant_status kvant_codec_accumulate(const kvant_codec *codec, const void *page,
                                              const float *weights, uint32_t n_queries, float *acc,
                                              size_t stride);

/* out = s o R^T acc + weight_sum * c: from the accumulated sum to values. In and out may be the
 * same. */
KVANT_API kvant_status kvant_codec_transform_output(const kvant_codec *codec,
                                                    const kvant_affine *affine, float weight_sum,
                                                    const float *acc, float *out);

/* Codec families, for listings and help: index 0 .. kvant_codec_family_count() - 1. Strings are
 * constant. */
typedef struct kvant_codec_family {
    size_t size;      /* set by the caller to sizeof(kvant_codec_family) */
    const char *name; /* "turboquant" */
    /* The values that may follow the dash, e.g. "1 2 2.5 3". A family with endless variants names
     * the usual ones, e.g. "s24r3 s96r4". "" when nothing follows. */
    const char *variants;
    const char *options; /* options of this family only, e.g. "scale=norm|unbiased qjl", or "" */
    /* Options that other families have, too: transform, centre, fp16 rows, seed. */
    const char *common_options;
    const char *source;
    const char *summary;
} kvant_codec_family;

KVANT_API size_t kvant_codec_family_count(void);
KVANT_API kvant_status kvant_codec_family_get(size_t index, kvant_codec_family *family);

KVANT_END_C

#endif /* KVANT_CODEC_H */
