/* cuda.h - the compressed cache on an NVIDIA GPU: append, decode attention and decoding of pages.
 *
 * These functions are part of libkvant. The first one that needs a GPU opens libkvant_cuda.so. The
 * environment variable KVANT_CUDA_LIBRARY names this file. Without the variable, it is the file in
 * the folder of libkvant.so or in the loader's search path. If there is no such library, or it
 * belongs to another release, the functions return KVANT_ERR_UNSUPPORTED, and kvant_cuda_available
 * says why.
 *
 * An engine may rely on this header: it keeps the promise of kvant.h about structs and functions.
 * Single kernels, and arguments that only kvant's own plug-in and caches need, are in
 * cuda_kernels.h, which may change with every release.
 *
 * This is a plain C interface on streams and device pointers, for engines that own their memory.
 * Pages hold the same bytes as on the CPU (format.md). A block is 64 tokens of one sequence. It has
 * one K page and one V page per kv head:
 *
 *     page of block i, kv head h  =  base + i * block_stride + h * head_stride
 *
 * One table of block numbers serves K, V and every kv head, as in paged engines.
 *
 * Streams: a function that takes a stream only enqueues work on it. It does not allocate or
 * synchronise, and it may be captured into a CUDA graph. The exception is the first call with
 * tables (see below). Threads: several threads may call these functions with different workspaces.
 *
 * Errors: arguments on the host are checked before anything is enqueued. Kernels read arrays in
 * device memory (lengths, tables, slots). They stay within the sizes that the arguments state, and
 * trust the block numbers. An error of the CUDA runtime comes back as KVANT_ERR_CUDA.
 *
 * Open and sealed blocks: sealed pages hold codes. Open pages hold 64 x head_dim fp16 numbers: rows
 * as their codec transforms them (format.md). Open pages have a separate codec
 * (kvant_cuda_codec_create_open) and a separate pool. Append and decode work on both kinds;
 * attention reads both in one call; kvant_cuda_seal quantises open blocks. Recent windows, sink
 * tokens and codecs with groups of several tokens need open blocks. Rows may also be appended
 * directly to sealed pages of codecs with one scale per token.
 *
 * Codecs: all that `kvant codecs` lists, in any pair of keys and values. head_dim is a multiple of
 * 16, at most 512. The sizes 64, 96, 128 and 256 are fast. The rotation is none or Hadamard, or any
 * rotation with transform=file. A cache (kvant/cache.h) also accepts other dense rotations, such as
 * the one of hessian. Keys of turboquant may have feedback. For all other codecs the functions
 * return KVANT_ERR_UNSUPPORTED.
 *
 * Codecs of papers have tables. The first call with such a codec on a GPU copies the tables there.
 * This call allocates and waits, and cannot be captured. The tables are freed with the codec, so
 * the codec must live as long as a captured graph that uses it.
 *
 * Centres, scales and weights (`center`, `norm`, `transform`) belong to kv heads. The caller passes
 * them as arrays. kvant_cuda_codec_tables returns the arrays that a calibration gave a codec.
 * Windows (`sink`, `recent`) are blocks that the caller leaves open.
 */
#ifndef KVANT_CUDA_H
#define KVANT_CUDA_H

#include <kvant/codec.h>

KVANT_BEGIN_C

/* A cudaStream_t or CUstream; NULL is the legacy default stream. */
typedef void *kvant_cuda_stream;

typedef enum kvant_cuda_type {
    KVANT_CUDA_F32 = 0,
    KVANT_CUDA_F16 = 1,
    KVANT_CUDA_BF16 = 2
} kvant_cuda_type;

/* Bits that kernels set (atomic or) in the caller's device word when they refuse a row. A refused
 * row is not written, so its slot keeps its former content. */
#define KVANT_CUDA_ROW_NONFINITE 1u /* a NaN or an infinity */
#define KVANT_CUDA_ROW_RANGE 2u     /* a scale or zero point beyond fp16's largest number */

typedef struct kvant_cuda_codec kvant_cuda_codec;

/* Whether GPU functions can work: KVANT_OK when libkvant_cuda.so is there, fits this libkvant, and
 * finds a driver and a GPU. Otherwise KVANT_ERR_UNSUPPORTED (KVANT_ERR_CUDA when the runtime fails
 * in another way) and the reason in err, when errlen > 0. */
KVANT_API kvant_status kvant_cuda_available(char *err, size_t errlen);

/* Makes the GPU's side of a codec, with the arguments of kvant_codec_create. It works on the host
 * only: it needs no device and no driver. On an error *codec is NULL and err, when errlen > 0, says
 * which part has no kernel ("not on the GPU: ..."). */
KVANT_API kvant_status kvant_cuda_codec_create(const char *spec, uint32_t head_dim, kvant_role role,
                                               uint64_t seed, kvant_cuda_codec **codec, char *err,
                                               size_t errlen);

/* The same from a CPU codec, which need not outlive it. */
KVANT_API kvant_status kvant_cuda_codec_from(const kvant_codec *source, kvant_cuda_codec **codec,
                                             char *err, size_t errlen);

/* The numbers that a calibration gives the codec of one kv head. An engine copies them to the
 * device, kv head after kv head, for the calls below. All kv heads share one kvant_cuda_codec when
 * their specs are equal. The arrays belong to the CPU codec. NULL: the codec has none. */
typedef struct kvant_cuda_tables {
    size_t size;                 /* set by the caller to sizeof(kvant_cuda_tables) */
    const float *center, *scale; /* center=file, norm=file: head_dim numbers */
    const float
        *key_transform; /* transform=diagonal: head_dim numbers; transform=file: head_dim^2 */
    const float *inverse_key_transform; /* as many numbers as key_transform */
    size_t key_transform_size;          /* 0, head_dim or head_dim^2 */
    /* feedback: head_dim numbers; head_dim columns of head_dim numbers. */
    const float *pivots, *columns;
    const float *centroids; /* the tables of kmeans */
    size_t n_centroids;     /* how many numbers the tables have */
} kvant_cuda_tables;

/* Fills *tables on the host; needs no libkvant_cuda. KVANT_ERR_ARGUMENT: NULL or a wrong size. */
KVANT_API kvant_status kvant_cuda_codec_tables(const kvant_codec *source,
                                               kvant_cuda_tables *tables);

/* Makes the codec of open pages whose rows will be sealed with `sealed`: it has the same transform
 * and role, and 16 bits per number. `sealed` need not outlive it. KVANT_ERR_ARGUMENT or
 * KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_cuda_codec_create_open(const kvant_cuda_codec *sealed,
                                                    kvant_cuda_codec **open);

/* Frees *codec and sets it to NULL. Work that is already enqueued does not need the codec, except
 * its tables: if there are tables on GPUs, the call waits for such work. */
KVANT_API void kvant_cuda_codec_free(kvant_cuda_codec **codec);

/* Fills *info (size set by the caller); its strings belong to the codec. */
KVANT_API kvant_status kvant_cuda_codec_get_info(const kvant_cuda_codec *codec,
                                                 kvant_codec_info *info);

/* The place of pages. base and the strides are multiples of 16 bytes; head_stride is at least
 * page_bytes. */
typedef struct kvant_cuda_pages {
    void *base;          /* device memory */
    size_t block_stride; /* bytes */
    size_t head_stride;  /* bytes */
} kvant_cuda_pages;

/* ---- append ---- */

/* The keys' or the values' half of an append. codec NULL: the role is left out. */
typedef struct kvant_cuda_rows {
    const kvant_cuda_codec *codec;
    kvant_cuda_pages pages;
    const void *rows;    /* n_tokens x n_kv_heads x head_dim */
    size_t token_stride; /* elements; a token's heads are head_stride apart, a row is contiguous */
    size_t head_stride;
    /* n_kv_heads x head_dim on the device, or NULL. The centre is subtracted from rows; then rows
     * are divided by the scale, which is above 0. */
    const float *center, *scale;
    const float *
        key_transform; /* device: n_kv_heads x key_transform_size (kvant_cuda_tables); NULL: none */
} kvant_cuda_rows;

/* Queries that go through the matrices of keys (kvant_cuda_transform_queries). */
typedef struct kvant_cuda_query_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_query_args) */
    const kvant_cuda_codec *k_codec;
    uint32_t batch, n_heads, n_kv_heads;  /* as in attention */
    kvant_cuda_type type;                 /* of q */
    const void *q;                        /* batch x n_heads x head_dim */
    size_t q_batch_stride, q_head_stride; /* elements */
    const float *inverse_key_transform;   /* n_kv_heads x head_dim^2 on the device */
    float *out;                           /* batch x n_heads x head_dim, contiguous */
} kvant_cuda_query_args;

typedef struct kvant_cuda_append_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_append_args) */
    kvant_cuda_rows k, v;
    kvant_cuda_type type; /* of rows */
    uint32_t n_tokens, n_kv_heads;
    const int64_t *slots; /* device: slot of token i = 64 * block + offset; negative skips it */
    uint32_t *refused;    /* device word or NULL: gets KVANT_CUDA_ROW_* when rows are refused */
    /* From here on members may be zero or missing (a smaller size): then nothing below applies. */
    /* device, by kvant_role: pages of floats at the places of open pages, which get the rows before
     * they are rounded to fp16. NULL: not wanted */
    float *exact[2];
    /* not 0: rows are transformed already, as in `exact`; center, scale and key_transform are NULL
     * then */
    uint32_t transformed;
    /* device: for keys whose codec has feedback: per kv head the pivots, then the columns
     * (kvant_cuda_tables) */
    const float *k_feedback;
    /* device, by kvant_role: for codecs with centroids (kvant_cuda_tables): n_kv_heads x
     * n_centroids */
    const float *centroids[2];
} kvant_cuda_append_args;

/* Rotates, quantises and writes n_tokens tokens. The bytes are the ones that kvant_codec_encode
 * writes. Tokens that share a page may be in one call, in any order. A slot is undefined if two
 * tokens of one call have it, or if two streams append to its page at the same time. Pages begin as
 * zero bytes or as old pages. Codecs with groups of tokens cannot be appended to
 * (KVANT_ERR_UNSUPPORTED): append to open pages and seal these. */
KVANT_API kvant_status kvant_cuda_append(const kvant_cuda_append_args *args,
                                         kvant_cuda_stream stream);

/* ---- sealing ---- */

/* The keys' or the values' half of a seal. codec: of the sealed pages; NULL: the role is left
 * out. */
typedef struct kvant_cuda_seal_pages {
    const kvant_cuda_codec *codec;
    kvant_cuda_pages open, sealed;
} kvant_cuda_seal_pages;

typedef struct kvant_cuda_seal_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_seal_args) */
    kvant_cuda_seal_pages k, v;
    uint32_t n_blocks, n_kv_heads;
    /* device: open block from[i] becomes sealed block to[i]; below 0: block i is skipped */
    const int32_t *from, *to;
    const int32_t *tokens; /* device: the first tokens[i] of from[i] were written; NULL: all 64 */
    /* device word or NULL: gets KVANT_CUDA_ROW_RANGE when the scale of a row does not fit. The row
     * is not written then, and its block should stay open. */
    uint32_t *refused;
    const float *k_feedback; /* as in append; may be missing (a smaller size) */
    /* not 0: open pages hold floats, as `exact` of append does; only for codecs with one scale per
     * token */
    uint32_t exact;
    const float *centroids[2]; /* as in append */
} kvant_cuda_seal_args;

/* Quantises open blocks to the same bytes as the CPU's cache. In a partly written group of 32
 * tokens, each missing token counts as a copy of the first token, so it widens no range. Groups and
 * tokens that were not written keep their sealed bytes. Open pages stay unchanged. */
KVANT_API kvant_status kvant_cuda_seal(const kvant_cuda_seal_args *args, kvant_cuda_stream stream);

/* ---- decode attention ---- */

#define KVANT_CUDA_NO_BLOCK INT32_MIN

typedef struct kvant_cuda_attention_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_attention_args) */
    const kvant_cuda_codec *k_codec, *v_codec; /* a pair that kvant_cuda_attention_check accepts */
    kvant_cuda_pages k, v;                     /* sealed blocks */
    kvant_cuda_pages k_open, v_open; /* open blocks; base is NULL in both if the table has none */
    /* device: batch x blocks_per_row. An entry b >= 0 is sealed block b; b < 0 is open block -1 -
     * b. If there are open pools, KVANT_CUDA_NO_BLOCK hides 64 tokens */
    const int32_t *block_table;
    size_t table_stride;     /* elements between the rows of two sequences */
    uint32_t blocks_per_row; /* entries of a row that may be read */
    /* device: per sequence. It is cut to 64 * blocks_per_row; below 1 the sequence is empty */
    const int32_t *lengths;
    /* n_heads is a multiple of n_kv_heads, and at most 65536 */
    uint32_t batch, n_heads, n_kv_heads;
    kvant_cuda_type type;                 /* of q and out: F16 or BF16 (F32 too, for tests) */
    const void *q;                        /* batch x n_heads x head_dim */
    size_t q_batch_stride, q_head_stride; /* elements */
    void *out;
    size_t out_batch_stride, out_head_stride;
    /* query rows x n_heads: natural log-sum-exp of the scores with sinks; -inf if a row sees
     * nothing. Or NULL */
    float *lse;
    float scale;
    const float *v_center;          /* n_kv_heads x head_dim on the device, or NULL */
    const float *k_scale, *v_scale; /* n_kv_heads x head_dim on the device, or NULL */
    void *workspace;                /* device, aligned to 256 */
    size_t workspace_bytes;
    /* From here on members may be zero or missing (a smaller size). Then there is one query token
     * per sequence, which sees the whole sequence. */
    uint32_t query_tokens; /* per sequence, with query_starts the most of any; 0: 1 */
    /* device, batch + 1 numbers: query rows query_starts[b] to query_starts[b + 1] - 1 belong to
     * sequence b. NULL: rows b * query_tokens to (b + 1) * query_tokens - 1. lse and mask are in
     * the order of query rows. */
    const int32_t *query_starts;
    /* elements between two query tokens; with query_starts the batch strides are not used */
    size_t q_token_stride, out_token_stride;
    /* not 0: a query token sees no later token; the last query token is token length - 1 */
    uint32_t causal;
    uint32_t window;     /* a query token sees itself and the window - 1 tokens before it; 0: all */
    float logit_softcap; /* s = logit_softcap * tanh(s / logit_softcap); 0: none */
    /* ALiBi slopes as in kvant/attention.h. A slope multiplies the mask or, without a mask, the
     * distance (key position - query position). 0: none */
    float max_bias;
    /* device: per query row one fp16 number per token of its sequence, added to the scores; or
     * NULL */
    const uint16_t *mask;
    size_t mask_token_stride;  /* elements between two rows; 0: all query rows have the same */
    const float *sinks;        /* device: n_heads logits of tokens whose value is 0, or NULL */
    const float *centroids[2]; /* as in append */
    /* device: n_kv_heads x head_dim, or NULL: what keys lack, so that <q, k_center> is part of
     * every score; of keys with a matrix W and a centre c, W c. Not with a softcap */
    const float *k_center;
} kvant_cuda_attention_args;

/* Whether attention reads a pair of codecs, the first of keys, the second of values: any pair with
 * one head_dim. Two codecs of open pages (kvant_cuda_codec_create_open) stand for tables whose
 * blocks are all open. Most pairs in use have a special kernel for few query rows.
 *
 * KVANT_ERR_ARGUMENT when roles or head_dim do not fit together, or when only one codec is open.
 * When errlen > 0, err has the reason. Touches no device. */
KVANT_API kvant_status kvant_cuda_attention_check(const kvant_cuda_codec *k_codec,
                                                  const kvant_cuda_codec *v_codec, char *err,
                                                  size_t errlen);

/* The bytes of workspace that attention needs on the current device for any call with this
 * head_dim; 0 on an error. */
KVANT_API size_t kvant_cuda_attention_workspace(uint32_t head_dim);

/* A larger workspace makes attention up to four times as fast with more query rows per kv head than
 * SCRATCH_ROWS (query tokens x heads of a kv head). Pages are then unpacked there once for all
 * rows. Beyond kvant_cuda_attention_workspace it takes SCRATCH_PER_BLOCK bytes per block of a
 * sequence and kv head, at least for blocks_per_row blocks of one kv head. SCRATCH_BYTES are enough
 * for 32768 tokens of 8 kv heads of 128. With fewer bytes than all pages need, kv heads are
 * processed one after another. */
#define KVANT_CUDA_SCRATCH_ROWS 384
#define KVANT_CUDA_SCRATCH_PER_BLOCK(head_dim)                                                     \
    ((size_t)((head_dim) + 63) / 64 * 8192 + 128 * (size_t)(head_dim) + 16)
#define KVANT_CUDA_SCRATCH_BYTES ((size_t)129 << 20)

/* The bytes at the beginning of a workspace in which thread blocks count. A workspace that other
 * work overwrites between two calls is cleared only there. */
#define KVANT_CUDA_COUNTER_BYTES ((size_t)64 << 10)

/* out = softmax(scale * q K^T) V. Scores are changed in this order: softcap, mask or ALiBi, hiding
 * of unseen tokens. The cache holds the query tokens' keys and values already, and lengths count
 * them. A query row that sees nothing gives zeros. The same input gives the same bits on the same
 * GPU with the same workspace_bytes.
 *
 * The first COUNTER_BYTES of the workspace must be zero before its first use; every call leaves it
 * ready for the next call. Calls that share a workspace must be ordered (one stream). Queries are
 * rounded to fp16 after rotation, relative to the largest number of their head. Probabilities are
 * rounded to fp16. The error bound is in docs/internals/cuda.md. */
KVANT_API kvant_status kvant_cuda_attention(const kvant_cuda_attention_args *args,
                                            kvant_cuda_stream stream);

/* ---- queries of transform=file ---- */

/* Multiplies queries by the matrix of a codec with transform=file, like
 * kvant_codec_transform_query. Sums are in binary32 and in another order, so results differ by at
 * most head_dim roundings. Attention accepts the results as its q, with type KVANT_CUDA_F32. A
 * codec with transform=diagonal needs no such call: its inverse_key_transform are the k_scale of
 * attention. */
KVANT_API kvant_status kvant_cuda_transform_queries(const kvant_cuda_query_args *args,
                                                    kvant_cuda_stream stream);

/* ---- pages ---- */

typedef struct kvant_cuda_decode_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_decode_args) */
    const kvant_cuda_codec *codec;
    kvant_cuda_pages pages;
    const int32_t *blocks; /* device: n_blocks block numbers; below 0: skipped */
    uint32_t n_blocks, n_kv_heads;
    kvant_cuda_type type;             /* of out */
    void *out;                        /* (n_blocks x 64) x n_kv_heads x head_dim */
    size_t token_stride, head_stride; /* elements */
    const float *center, *scale;      /* n_kv_heads x head_dim on the device, or NULL */
    /* device: n_kv_heads x key_transform_size (kvant_cuda_tables); NULL: none */
    const float *inverse_key_transform;
    /* device: the rows of blocks[i] go to rows 64 to[i] and following of out; NULL: to[i] is i */
    const int32_t *to;
    /* not 0: rows stay transformed and within fp16's range, as in open pages. scale and
     * inverse_key_transform are NULL then, and center is a transformed centre or NULL */
    uint32_t transformed;
    const float *centroids; /* as in append, for the codec's role */
} kvant_cuda_decode_args;

/* Decodes whole blocks to rows: undoes the transform, multiplies by the scale and adds the
 * centre. */
KVANT_API kvant_status kvant_cuda_decode(const kvant_cuda_decode_args *args,
                                         kvant_cuda_stream stream);

KVANT_END_C

#endif /* KVANT_CUDA_H */
