/* cache.h - the compressed key-value cache of a model: sequences of tokens, whose blocks the
 * library manages.
 *
 *     kvant_cache_params params = KVANT_CACHE_PARAMS;
 *     params.n_layers = 30, params.n_heads = 9, params.n_kv_heads = 3;
 *     params.head_dim = 64, params.max_tokens = 4096;
 *     kvant_cache *cache;
 *     if (kvant_cache_create(&params, &cache) != KVANT_OK) ...   kvant_error_message() says why
 *     int32_t sequence = kvant_sequence_create(cache);
 *     kvant_cache_append(cache, layer, sequence, k, v, n);       per layer
 *     kvant_cache_attend(cache, layer, sequence, q, out, n);     causal, over all tokens so far
 *     kvant_cache_free(&cache);
 *
 * examples/cache.c is a whole program. An engine that manages blocks itself uses tensor.h and
 * attention.h instead; a cache is made of tensors.
 *
 * A block holds 64 token positions of every layer. Sequences that were forked share blocks. When
 * one of them writes to a shared block, the cache copies the block first.
 *
 * On a GPU (device "cuda" or "cuda:0") the calls are the same, with these differences:
 *
 *   pointers   k, v, q, out, lse, mask and sinks are device memory. Exported blocks are host
 *              memory.
 *
 *   order      Work runs on params.stream of the calling thread's current GPU. Every call must have
 *              the same current GPU. Append checks its rows, so it waits for the work before it. It
 *              returns before the rows are written. With params.asynchronous append waits for
 *              nothing. Attend returns before its outputs are written.
 *
 *   memory     Creation allocates the blocks for all max_tokens and the exact part
 *              (kvant_scheme_exact). A later call allocates GPU memory only when it needs more than
 *              every call before it. A codec given as k or v has no exact part. Trellis and chunk
 *              codecs still keep rows of one block per sequence, and of one more block, both as
 *              fp16 and as floats: 6 bytes per number.
 *
 *   exact      As on the CPU, the first 64 and the newest 64 to 128 tokens of each sequence are
 *              fp16. So are the rows of an append of up to 512 tokens. Other blocks stay fp16 until
 *              another block needs their page. Then up to 8 blocks are encoded at once, in all
 *              layers.
 *
 *   codecs     The presets and the codecs that cuda.h lists, with the same bytes as on the CPU. All
 *              kv heads of a layer and role have the same spec, and v_head_dim equals head_dim. For
 *              other codecs (sketches, polar, tiers) kvant_cache_create returns
 *              KVANT_ERR_UNSUPPORTED, and the message names the codec.
 *
 *   speed      With center=first and norm=first, rows are collected until there are 64. The append
 *              that completes 64 rows waits for sums over them, from which centre and scale are
 *              learned. So does every append of 64 rows or more.
 *
 *   attention  A call has at most 32767 query tokens and `exact` is false; otherwise it returns
 *              KVANT_ERR_UNSUPPORTED. A softcap over keys with a centre is slow, because every call
 *              then decodes the keys to fp16.
 *
 * Threads: at most one call per cache runs at a time, whichever call it is. Calls on different
 * caches may run at once. Stack: 64 KiB are enough. fork: a child may use its copy of the cache.
 */
#ifndef KVANT_CACHE_H
#define KVANT_CACHE_H

#include <kvant/attention.h>
#include <kvant/scheme.h>

KVANT_BEGIN_C

typedef struct kvant_cache kvant_cache;

/* Zero means the default. */
typedef struct kvant_cache_params {
    size_t size;       /* KVANT_CACHE_PARAMS sets it */
    uint32_t n_layers; /* at most 4096 */
    uint32_t n_heads, n_kv_heads;
    uint32_t head_dim;   /* of keys and queries */
    uint32_t v_head_dim; /* of values; default head_dim */
    /* The tokens of all sequences together. On the CPU a block takes memory when it is first
     * used. */
    uint32_t max_tokens;
    uint32_t max_sequences; /* default 1; below 2^25 */
    uint32_t n_threads;     /* default: kvant_available_cpus() */
    /* "cpu" (default), "cuda" (the current GPU), or "cuda:0" (the current GPU, if it is GPU 0). */
    const char *device;
    /* The codecs: either a scheme, which must outlive the cache, or the parameters of a scheme
     * (scheme.h). Default: the preset balanced. */
    kvant_scheme *scheme;
    const char *preset, *k, *v, *settings, *calibration;
    /* Attention of every layer. kvant_cache_attention takes different numbers per call. Neither is
     * negative. */
    float scale;         /* default 1 / sqrt(head_dim) */
    float logit_softcap; /* default: none */
    /* device "cuda": a cudaStream_t for all work; default: the legacy default stream. */
    void *stream;
    /* device "cuda". Not 0: append returns before its rows are checked. A refused row is not
     * written: its slot keeps the zeros or the row that it had. The next append or attention of the
     * cache then does nothing and returns KVANT_ERR_NONFINITE or KVANT_ERR_RANGE. The call after
     * that works again. */
    uint32_t asynchronous;
    /* For a cache that holds only some layers of a model, which has n_model_layers layers. Layer i
     * of the cache is then layer layers[i] of the model, and has the codecs of that layer. NULL:
     * the cache holds all layers. The array is read at creation. */
    const uint32_t *layers;
    uint32_t n_model_layers;
} kvant_cache_params;

#define KVANT_CACHE_PARAMS { .size = sizeof(kvant_cache_params) }

/* Creates a cache. KVANT_ERR_ARGUMENT, KVANT_ERR_UNSUPPORTED (the device is not there),
 * KVANT_ERR_MEMORY, and the errors of kvant_scheme_create; kvant_error_message() has the reason.
 * *cache is then NULL. */
KVANT_API kvant_status kvant_cache_create(const kvant_cache_params *params, kvant_cache **cache);

/* Frees *cache and sets it to NULL; NULL and a pointer to NULL are fine. */
KVANT_API void kvant_cache_free(kvant_cache **cache);

/* Appends n tokens to a layer of a sequence: k is n x n_kv_heads x head_dim floats, v is n x
 * n_kv_heads x v_head_dim floats. The caller appends the same tokens to every layer, one layer
 * after another. On a CPU a cache with a preset keeps the last 512 rows of a layer fp16 until rows
 * are appended to another layer. So attend to a layer before you append to the next layer. On an
 * error the layer keeps its length and the cache goes on working: KVANT_ERR_FULL (no block is
 * left), KVANT_ERR_NONFINITE, KVANT_ERR_RANGE, KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY,
 * KVANT_ERR_CUDA. */
KVANT_API kvant_status kvant_cache_append(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                          const float *k, const float *v, uint32_t n);

/* out (n x n_heads x v_head_dim) = causal attention of the sequence's n newest tokens, whose
 * queries are q (n x n_heads x head_dim). KVANT_ERR_ARGUMENT: n is 0, or above the length of the
 * sequence in this layer. KVANT_ERR_UNSUPPORTED on a GPU (see above), KVANT_ERR_NONFINITE and
 * KVANT_ERR_RANGE with params.asynchronous. On KVANT_ERR_MEMORY out may be written already. */
KVANT_API kvant_status kvant_cache_attend(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                          const float *q, float *out, uint32_t n);

/* For transform=first: passes the queries of the tokens that are appended next (tensor.h), on the
 * cache's device. A matrix fits keys best when it is learned from the queries of the same tokens.
 * If the caller never calls this function, the queries of an attention call serve for the rows that
 * are appended after the call. kvant_cache_wants_queries works as kvant_tensor_wants_queries. On a
 * GPU it asks for queries of calls with 64 tokens or more, until the cache has learned enough. */
KVANT_API kvant_status kvant_cache_note_queries(kvant_cache *cache, uint32_t layer,
                                                const kvant_queries *queries);
KVANT_API int kvant_cache_wants_queries(const kvant_cache *cache, uint32_t layer, size_t n_tokens);

/* kvant_tensor_set_rope for the keys of a layer, with its errors. n_positions 0 means
 * max_tokens. */
KVANT_API kvant_status kvant_cache_set_rope(kvant_cache *cache, uint32_t layer,
                                            const kvant_rope *rope);

/* Append and attend for n_sequences sequences with n tokens each: first all rows of the first
 * sequence, then all rows of the next sequence. On a GPU one launch serves all sequences. After an
 * error of append no sequence is longer than before. */
KVANT_API kvant_status kvant_cache_append_batch(kvant_cache *cache, uint32_t layer,
                                                const int32_t *sequences, uint32_t n_sequences,
                                                const float *k, const float *v, uint32_t n);
KVANT_API kvant_status kvant_cache_attend_batch(kvant_cache *cache, uint32_t layer,
                                                const int32_t *sequences, uint32_t n_sequences,
                                                const float *q, float *out, uint32_t n);

/* Attend with everything that attention.h describes, and with the errors of kvant_cache_attend.
 * The cache sets n_tokens, block_table, first_block and n_threads. It sets n_heads, scale and
 * logit_softcap where they are 0. */
KVANT_API kvant_status kvant_cache_attention(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                             const kvant_attention_problem *problem);

/* Reads the rows of n tokens from `first` on, as attention sees them: k is n x n_kv_heads x
 * head_dim floats, v is n x n_kv_heads x v_head_dim floats. Tokens of dropped blocks read as zeros.
 * Attention does not need this call: it serves references, and engines that compute attention
 * themselves. */
KVANT_API kvant_status kvant_cache_read(const kvant_cache *cache, uint32_t layer, int32_t sequence,
                                        uint32_t first, uint32_t n, float *k, float *v);

/* Decode steps that a CUDA graph replays. Each step appends one token to each of n sequences. The
 * rows of these tokens are fp16. They do not belong to the cache yet, but attention sees them.
 *
 *     kvant_steps_begin(cache, sequences, n, &info)    does not wait, but takes time
 *     up to info.n_steps times:
 *         kvant_steps_next(cache)
 *         kvant_cache_step of every layer              or a graph of these calls
 *     kvant_cache_append of the same rows to every layer, then kvant_steps_begin again
 *
 * The calls of kvant_cache_step have the same arguments in every step, and only enqueue work on
 * their stream. From kvant_steps_begin to the appends no other call may change the sequences.
 * kvant_steps_next and kvant_cache_step return KVANT_ERR_UNSUPPORTED on the CPU. */
typedef struct kvant_steps_info {
    size_t size;      /* set by the caller to sizeof(kvant_steps_info) */
    uint32_t n_steps; /* steps until the first sequence fills a block */
    uint64_t graph;   /* a captured graph may be replayed while this number is the same */
    bool floats;      /* steps accept the type KVANT_CUDA_F32 only */
} kvant_steps_info;

/* Begins decode steps. KVANT_ERR_UNSUPPORTED on the CPU, and while centres and scales are not
 * learned yet (the first 64 tokens). KVANT_ERR_UNSUPPORTED also for a softcap over keys with a
 * centre, and when imported blocks brought values of several centres. KVANT_ERR_FULL,
 * KVANT_ERR_MEMORY, KVANT_ERR_CUDA. */
KVANT_API kvant_status kvant_steps_begin(kvant_cache *cache, const int32_t *sequences, uint32_t n,
                                         kvant_steps_info *info);

/* Called before the work of each step. Enqueues a copy on the cache's stream. */
KVANT_API kvant_status kvant_steps_next(kvant_cache *cache);

typedef struct kvant_step {
    size_t size; /* set by the caller to sizeof(kvant_step) */
    /* The rows of the step's tokens: sequences x heads x head_dim, contiguous, on the device. */
    const void *q, *k, *v;
    void *out; /* shaped like q */
    int type;  /* the kvant_cuda_type of q, k, v and out */
    /* window, scale, logit_softcap and sinks are as in kvant_attention_problem. 0: the cache's
     * number, or none. */
    uint32_t window;
    float scale, logit_softcap;
    void *stream; /* cudaStream_t */
    const float *sinks;
} kvant_step;

KVANT_API kvant_status kvant_cache_step(kvant_cache *cache, uint32_t layer, const kvant_step *step);

/* Sequences are numbered from 0. create and fork return -1 when max_sequences sequences exist; fork
 * also when there is no such sequence or no memory. kvant_error_message() says why. free does
 * nothing if there is no such sequence. */
KVANT_API int32_t kvant_sequence_create(kvant_cache *cache);
KVANT_API int32_t kvant_sequence_fork(kvant_cache *cache, int32_t sequence);
KVANT_API void kvant_sequence_free(kvant_cache *cache, int32_t sequence);

/* The number of tokens in a layer; 0 when the sequence or the layer does not exist. */
KVANT_API uint32_t kvant_sequence_length(const kvant_cache *cache, int32_t sequence,
                                         uint32_t layer);

/* Forgets all tokens from `length` on, in every layer. KVANT_ERR_ARGUMENT: no such sequence. */
KVANT_API kvant_status kvant_sequence_truncate(kvant_cache *cache, int32_t sequence,
                                               uint32_t length);

/* For models in which every layer has a sliding window: forgets the blocks that lie wholly in
 * the first n_tokens tokens. The cache uses their memory again. Their tokens count as masked, and
 * positions do not change. A new sequence begins after these blocks then, so that exported blocks
 * can follow them. Rows cannot be appended to a block that was dropped. KVANT_ERR_FULL: a new
 * sequence would be longer than max_tokens. KVANT_ERR_ARGUMENT: no such sequence.
 * KVANT_ERR_MEMORY. */
KVANT_API kvant_status kvant_sequence_drop(kvant_cache *cache, int32_t sequence, uint32_t n_tokens);

/* Exports n_blocks blocks of a sequence from block `first` on, in all layers, as bytes for a store.
 * Another process, machine or device can import the bytes when its scheme is the same. They hold
 * the sequence's tokens and no other row, even if the sequence was truncated or shares a block.
 * They also hold each centre, scale and matrix that the blocks use once, which the cache learned
 * from all of its sequences (format.md, "Exported sequences"). `bytes` is what
 * kvant_sequence_export_size returns. KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY, KVANT_ERR_CUDA; the
 * content of data is then not specified. */
KVANT_API kvant_status kvant_sequence_export_size(const kvant_cache *cache, int32_t sequence,
                                                  uint32_t first, uint32_t n_blocks, size_t *bytes);
KVANT_API kvant_status kvant_sequence_export(const kvant_cache *cache, int32_t sequence,
                                             uint32_t first, uint32_t n_blocks, void *data,
                                             size_t bytes);

/* Appends exported blocks to a sequence whose length is a multiple of 64 in every layer
 * (KVANT_ERR_ARGUMENT if it is not). KVANT_ERR_FORMAT: the bytes are damaged, or of another scheme.
 * KVANT_ERR_FULL. KVANT_ERR_UNSUPPORTED: the blocks have shifted keys, their own centres, or
 * matrices of values, which a cache on a GPU does not hold. After an error the sequence is
 * unchanged. Any bytes are safe to pass. */
KVANT_API kvant_status kvant_sequence_import(kvant_cache *cache, int32_t sequence, const void *data,
                                             size_t bytes);

typedef struct kvant_cache_info {
    size_t size; /* set by the caller to sizeof(kvant_cache_info) */
    uint32_t n_blocks, n_free_blocks;
    /* Bytes that the blocks in use take (codes, metadata and fp16 pages) plus the bytes of the
     * matrices of transform=first. */
    size_t bytes;
    size_t f16_bytes;  /* bytes of the same tokens as fp16 */
    double true_bits;  /* per number of a sealed block, every stored byte counted */
    bool calibrated;   /* the scheme has a calibration */
    const char *k, *v; /* specs of ordinary layers; the scheme owns them; NULL: a settings file */
    /* Bytes that learning takes in addition to `bytes`. They are freed when learning ends. */
    size_t working_bytes;
} kvant_cache_info;

KVANT_API kvant_status kvant_cache_get_info(const kvant_cache *cache, kvant_cache_info *info);

KVANT_END_C

#endif /* KVANT_CACHE_H */
