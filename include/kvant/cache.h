/* cache.h - the compressed key-value cache of a model: sequences of tokens whose blocks the library
 * manages.
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
 * examples/cache.c is a whole program. Engines that manage blocks themselves use tensor.h and
 * attention.h, of which this is made.
 *
 * A block holds 64 token positions of every layer. Sequences that were forked share blocks until
 * one of them writes to a shared block; then that block is copied.
 *
 * On a GPU (device "cuda" or "cuda:0") the calls are the same, with these differences:
 *
 *   pointers   k, v, q, out, lse, mask and sinks are device memory. Exported blocks are host memory.
 *   order      Work runs on params.stream of the calling thread's current GPU, which must be the same one in
 *              every call. append waits for the work before it, because it checks its rows, and returns before
 *              they are written; with params.asynchronous it waits for nothing. attend returns before its
 *              outputs are there.
 *   memory     All of max_tokens and the exact part (kvant_scheme_exact) are allocated at creation. Other
 *              GPU memory is allocated when a call first needs more of it. Codecs that are given as k and v
 *              have no exact part, but trellis and chunk codecs keep rows of one block per sequence and one
 *              more as fp16 and as floats: 6 bytes per number.
 *   exact      The first 64 and the newest 64 to 128 tokens of each sequence and the rows of an append of up
 *              to 512 tokens are fp16, as on the CPU. Other blocks stay fp16 until another block needs their
 *              page; then up to 8 blocks are encoded at once, in all layers.
 *   codecs     The presets and what cuda.h lists, with the same bytes as on the CPU. All kv heads of a layer
 *              and role have the same spec, v_head_dim is equal to head_dim. kvant_cache_create refuses others
 *              with KVANT_ERR_UNSUPPORTED and the codec's name: sketches, polar, tiers.
 *   speed      With center=first and norm=first every 64th token, or a longer append, waits for sums over its
 *              rows, from which centre and scale are learnt.
 *   attention  At most 32767 query tokens per call, and no exact: the call then returns KVANT_ERR_UNSUPPORTED. A
 *              softcap over keys with a centre is slow: keys are decoded to fp16 in every call.
 *
 * Threads: one call per cache at a time, whichever it is; different caches at once. Stack: 64 KiB are enough. fork: a child may use
 * its copy.
 */
#ifndef KVANT_CACHE_H
#define KVANT_CACHE_H

#include <kvant/attention.h>
#include <kvant/scheme.h>

KVANT_BEGIN_C

typedef struct kvant_cache kvant_cache;

/* Zero means the default. */
typedef struct kvant_cache_params {
    size_t size; /* KVANT_CACHE_PARAMS sets it */
    uint32_t n_layers, n_heads, n_kv_heads;
    uint32_t head_dim;   /* of keys and queries */
    uint32_t v_head_dim; /* of values; default head_dim */
    uint32_t max_tokens; /* of all sequences together; on the CPU memory is taken when it is used */
    uint32_t max_sequences; /* default 1 */
    uint32_t n_threads;     /* default: kvant_available_cpus() */
    const char
        *device; /* "cpu" (default), "cuda" (the current GPU), "cuda:0" (the same if it is GPU 0) */
    /* What the cache is stored with: a scheme, which must outlive the cache, or what one is made of (scheme.h). Default: the preset
     * balanced. */
    kvant_scheme *scheme;
    const char *preset, *k, *v, *settings, *calibration;
    /* Attention of every layer; kvant_cache_attention takes others per call. */
    float scale;         /* default 1 / sqrt(head_dim) */
    float logit_softcap; /* default: none */
    void *
        stream; /* device "cuda": a cudaStream_t for all work; default: the legacy default stream */
    /* device "cuda": not 0: append returns before its rows are checked. A row that is refused is left out: its slot
     * keeps the zeros or the row that it had. The next append or attention of the cache fails with
     * KVANT_ERR_NONFINITE or KVANT_ERR_RANGE, does nothing else, and the one after that goes on. */
    uint32_t asynchronous;
    /* Of a cache of some layers of a model: its layer i is layer layers[i] of n_model_layers, and is stored as the scheme says of that
     * one. NULL: all layers. Read at creation. */
    const uint32_t *layers;
    uint32_t n_model_layers;
} kvant_cache_params;

#define KVANT_CACHE_PARAMS { .size = sizeof(kvant_cache_params) }

/* KVANT_ERR_ARGUMENT, KVANT_ERR_UNSUPPORTED (a device that is not there), KVANT_ERR_MEMORY, and
 * what kvant_scheme_create says; kvant_error_message() has the reason. *cache is then NULL. */
KVANT_API kvant_status kvant_cache_create(const kvant_cache_params *params, kvant_cache **cache);

/* Frees *cache and sets it to NULL; NULL and a pointer to NULL are fine. */
KVANT_API void kvant_cache_free(kvant_cache **cache);

/* Appends n tokens to a layer of a sequence: k is n x n_kv_heads x head_dim, v n x n_kv_heads x v_head_dim floats. Layers are appended
 * to one by one, each as often as the others in the end. On a CPU a preset keeps the last 512 rows
 * of a layer fp16 until rows are appended to another layer, so attend to a layer before the next
 * one. On an error the layer's length is as before and the cache goes on working:
 * KVANT_ERR_FULL (no block left), KVANT_ERR_NONFINITE, KVANT_ERR_RANGE, KVANT_ERR_ARGUMENT, KVANT_ERR_CUDA. */
KVANT_API kvant_status kvant_cache_append(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                          const float *k, const float *v, uint32_t n);

/* out (n x n_heads x v_head_dim) = causal attention of the sequence's n newest tokens, whose
 * queries are q (n x n_heads x head_dim). */
KVANT_API kvant_status kvant_cache_attend(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                          const float *q, float *out, uint32_t n);

/* For transform=first: the queries of tokens whose rows are appended next (tensor.h), on the cache's device. Keys learn best
 * from the queries of their own tokens. Where nobody calls this, the queries of attention count for the rows after them. wants_queries:
 * as kvant_tensor_wants_queries; on a GPU those of 64 tokens and more, until enough was learnt. */
KVANT_API kvant_status kvant_cache_note_queries(kvant_cache *cache, uint32_t layer,
                                                const kvant_queries *queries);
KVANT_API int kvant_cache_wants_queries(const kvant_cache *cache, uint32_t layer, size_t n_tokens);

/* The same for kvant_tensor_set_rope of a layer's keys. n_positions 0: max_tokens. */
KVANT_API kvant_status kvant_cache_set_rope(kvant_cache *cache, uint32_t layer,
                                            const kvant_rope *rope);

/* The same as append and attend for n_sequences sequences, n tokens of each: rows of the first sequence, then of the next. On a GPU one
 * launch takes them all. After an error of append no sequence is longer. */
KVANT_API kvant_status kvant_cache_append_batch(kvant_cache *cache, uint32_t layer,
                                                const int32_t *sequences, uint32_t n_sequences,
                                                const float *k, const float *v, uint32_t n);
KVANT_API kvant_status kvant_cache_attend_batch(kvant_cache *cache, uint32_t layer,
                                                const int32_t *sequences, uint32_t n_sequences,
                                                const float *q, float *out, uint32_t n);

/* The same with everything that attention.h describes. The cache sets n_tokens, block_table,
 * first_block and n_threads, and n_heads, scale and logit_softcap where they are 0. */
KVANT_API kvant_status kvant_cache_attention(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                             const kvant_attention_problem *problem);

/* The rows of n tokens from first on, as attention sees them: k is n x n_kv_heads x head_dim, v n x n_kv_heads x v_head_dim floats.
 * Tokens of dropped blocks are zeros. For reference and for engines that attend by themselves: attention does without. */
KVANT_API kvant_status kvant_cache_read(const kvant_cache *cache, uint32_t layer, int32_t sequence,
                                        uint32_t first, uint32_t n, float *k, float *v);

/* Decode steps that a CUDA graph replays: one token per step of each of n sequences. Their rows lie in fp16 beside the cache, and
 * attention sees them.
 *
 *     kvant_steps_begin(cache, sequences, n, &info)      waits for nothing, but is as slow as some steps
 *     up to info.n_steps times: kvant_steps_next(cache), then kvant_cache_step of every layer, or a graph of these calls
 *     kvant_cache_append of the same rows to every layer, and begin again
 *
 * Calls of kvant_cache_step have the same arguments in every step, and only enqueue work on their stream. Between begin and the
 * appends nothing else changes the sequences. */
typedef struct kvant_steps_info {
    size_t size;      /* set by the caller to sizeof(kvant_steps_info) */
    uint32_t n_steps; /* until the first sequence fills a block */
    uint64_t graph;   /* graphs captured while it was the same may be replayed */
    bool floats;      /* steps take KVANT_CUDA_F32 alone */
} kvant_steps_info;

/* KVANT_ERR_UNSUPPORTED on the CPU, while centres and scales are not learnt yet (64 tokens), for a
 * softcap over keys with a centre, and when imported blocks brought values of several centres;
 * KVANT_ERR_FULL, KVANT_ERR_MEMORY, KVANT_ERR_CUDA. */
KVANT_API kvant_status kvant_steps_begin(kvant_cache *cache, const int32_t *sequences, uint32_t n,
                                         kvant_steps_info *info);

/* Before the work of a step; enqueues a copy on the cache's stream. */
KVANT_API kvant_status kvant_steps_next(kvant_cache *cache);

typedef struct kvant_step {
    size_t size; /* set by the caller to sizeof(kvant_step) */
    const void *q, *k,
        *v;          /* sequences x heads x head_dim of the token, contiguous, on the device */
    void *out;       /* as q */
    int type;        /* kvant_cuda_type of all four */
    uint32_t window; /* these four as in kvant_attention_problem; 0: the cache's, or none */
    float scale, logit_softcap;
    void *stream; /* cudaStream_t */
    const float *sinks;
} kvant_step;

KVANT_API kvant_status kvant_cache_step(kvant_cache *cache, uint32_t layer, const kvant_step *step);

/* Sequences are numbered from 0. create and fork return -1 when max_sequences are in use or memory
 * is short. */
KVANT_API int32_t kvant_sequence_create(kvant_cache *cache);
KVANT_API int32_t kvant_sequence_fork(kvant_cache *cache, int32_t sequence);
KVANT_API void kvant_sequence_free(kvant_cache *cache, int32_t sequence);

/* Tokens of a layer, 0 for a sequence or layer that is not there. */
KVANT_API uint32_t kvant_sequence_length(const kvant_cache *cache, int32_t sequence,
                                         uint32_t layer);

/* Forgets all tokens from length on, in every layer. KVANT_ERR_ARGUMENT for no such sequence. */
KVANT_API kvant_status kvant_sequence_truncate(kvant_cache *cache, int32_t sequence,
                                               uint32_t length);

/* Forgets the blocks before the first token that a sliding window still sees, where every layer has
 * one: their memory is used again, their tokens count as masked, and positions do not change. */
KVANT_API kvant_status kvant_sequence_drop(kvant_cache *cache, int32_t sequence, uint32_t n_tokens);

/* The index-th block of a sequence, of all layers, as bytes for a store: another process, machine
 * or device imports them when its scheme is the same. It holds the sequence's tokens and no other
 * row, even if the sequence was truncated or shares the block. Centres, scales and matrices that
 * the cache learned from all of its sequences go with it (format.md, "Blocks"). export_size is the
 * most that one takes. KVANT_ERR_ARGUMENT, KVANT_ERR_MEMORY, KVANT_ERR_CUDA; what data holds then
 * is not specified. */
KVANT_API size_t kvant_cache_export_size(const kvant_cache *cache);
KVANT_API kvant_status kvant_sequence_export(const kvant_cache *cache, int32_t sequence,
                                             uint32_t index, void *data, size_t bytes,
                                             size_t *used);

/* Appends an exported block to a sequence whose length is a multiple of 64 in every layer.
 * KVANT_ERR_FORMAT (damaged, another scheme), KVANT_ERR_FULL; the sequence is then as before. Any
 * bytes are safe to pass. */
KVANT_API kvant_status kvant_sequence_import(kvant_cache *cache, int32_t sequence, const void *data,
                                             size_t bytes);

/* Bytes that the blocks in use take: codes, metadata, fp16 pages; and the matrices of transform=first. */
KVANT_API size_t kvant_cache_bytes(const kvant_cache *cache);

typedef struct kvant_cache_info {
    size_t size; /* set by the caller to sizeof(kvant_cache_info) */
    uint32_t n_blocks, n_free_blocks;
    size_t bytes;     /* as kvant_cache_bytes */
    size_t f16_bytes; /* size of the same tokens as fp16 */
    double true_bits; /* per number of a sealed block, every stored byte counted */
    bool calibrated;  /* the scheme has a calibration */
    const char *k,
        *v; /* specs of ordinary layers, owned by the scheme; NULL with a settings file */
    size_t working_bytes; /* of learning, next to `bytes`; goes back to the system when it ends */
} kvant_cache_info;

KVANT_API kvant_status kvant_cache_get_info(const kvant_cache *cache, kvant_cache_info *info);

KVANT_END_C

#endif /* KVANT_CACHE_H */
