/* cuda_kernels.h - unstable: single kernels on an NVIDIA GPU, calls of cuda.h with all arguments.
 *
 * kvant's llama.cpp plug-in, its GPU cache and its tests use this header. Its functions and structs
 * may change or go with every release, also between patch versions. A program that uses them has to
 * be compiled with the headers of the libkvant that it loads. Engines use cuda.h, whose rules about
 * streams, threads and errors hold here, too.
 */
#ifndef KVANT_CUDA_KERNELS_H
#define KVANT_CUDA_KERNELS_H

#include <kvant/cuda.h>

struct kvant_rope; /* kvant/tensor.h */

KVANT_BEGIN_C

/* The most matrices of keys in a call. Each of them is applied to all queries, so a larger limit
 * slows attention over long contexts. */
#define KVANT_CUDA_MOST_MATRICES 24u

/* Centres that RoPE rotates with positions, as it rotates keys (kvant_rope.block_centers). A block
 * has a number n. Let (a, b) be a pair of channels of the centre start[n]. Then the same pair of
 * the block's centre is
 *
 *     (a cos - b sin, b cos + a sin)
 *
 * where every product and sum is rounded. A phase of zeros means that there is no centre.
 * kvant_rope_phase computes pairs and phases. */
typedef struct kvant_cuda_block_centers {
    /* device, aligned to 4: head_dim / 2 pairs of channels, each channel once */
    const uint16_t *pairs;
    const float *start; /* device: numbers x n_kv_heads x head_dim: centres at position 0 */
    /* device: per block the cosines of all pairs, then their sines: head_dim numbers */
    const float *phases;
    /* device: per block its number, below KVANT_CUDA_MOST_MATRICES. NULL: all numbers are 0 */
    const uint8_t *transform_ids;
} kvant_cuda_block_centers;

/* ---- the compact form of matrices ---- */

/* A learned transform has two matrices per kv head: R W for keys and R W^-T for queries, with
 * head_dim^2 floats each. Their compact form takes a fifth of that or less. It has the triangles in
 * which a cache and its records keep W, and W^-T as a triangle of 16-bit numbers. It serves codecs
 * whose rotation is a Hadamard matrix or none. This returns the bytes of the form. */
KVANT_API size_t kvant_cuda_compact_bytes(uint32_t head_dim, uint32_t n_kv_heads);

/* The triangles of a layer and their compact form, in GPU memory. */
typedef struct kvant_cuda_compact_layer {
    const uint16_t *triangles;
    void *compact;
} kvant_cuda_compact_layer;

typedef struct kvant_cuda_compact_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_compact_args) */
    uint32_t head_dim, n_kv_heads;
    const uint16_t *triangles; /* device: of all kv heads, as records hold them */
    void *compact;             /* device: kvant_cuda_compact_bytes, aligned to 16 bytes */
    /* device: n_layers layers of this shape, instead of the two members above; n_layers 0: those
     * members are the only layer */
    const kvant_cuda_compact_layer *layers;
    uint32_t n_layers;
} kvant_cuda_compact_args;

/* Makes the compact form from triangles without a zero on their diagonals. Kernels may read it
 * before the preceding kernel in the stream has ended. So the next calls that use it come in
 * another stream, after an event, or when this stream has been waited for. */
KVANT_API kvant_status kvant_cuda_compact(const kvant_cuda_compact_args *args,
                                          kvant_cuda_stream stream);

typedef struct kvant_cuda_expand_args {
    size_t size;                   /* set by the caller to sizeof(kvant_cuda_expand_args) */
    const kvant_cuda_codec *codec; /* its rotation counts */
    uint32_t n_kv_heads;
    const void *compact; /* device */
    /* device, or NULL: R W, and R W^-T, n_kv_heads x head_dim^2 each */
    float *key_transform, *inverse_key_transform;
} kvant_cuda_expand_args;

/* Makes matrices from triangles. R W has the bits of the matrix that the computer makes. */
KVANT_API kvant_status kvant_cuda_expand(const kvant_cuda_expand_args *args,
                                         kvant_cuda_stream stream);

/* A layer's learned centre c and its centre at position 0 (start), and where they go. All members
 * are in GPU memory. Centres have n_kv_heads x head_dim numbers. */
typedef struct kvant_cuda_center_layer {
    const float *center, *start;
    float *centers[2], *starts; /* copies of c, and of start; NULL: not wanted */
    const void *compact;
    float *key_center; /* R W c, from the compact form of W; NULL: not wanted */
} kvant_cuda_center_layer;

typedef struct kvant_cuda_place_centers_args {
    size_t size;                   /* set by the caller to sizeof(kvant_cuda_place_centers_args) */
    const kvant_cuda_codec *codec; /* its head_dim and rotation count */
    uint32_t n_kv_heads;
    uint32_t n_layers; /* 0: `one` is the only layer */
    kvant_cuda_center_layer one;
    const kvant_cuda_center_layer *layers; /* device: n_layers layers of this shape */
} kvant_cuda_place_centers_args;

/* Brings the centres of layers to where kernels read them, in one launch. It may come right after
 * kvant_cuda_compact in a stream. */
KVANT_API kvant_status kvant_cuda_place_centers(const kvant_cuda_place_centers_args *args,
                                                kvant_cuda_stream stream);

/* ---- queries ---- */

/* Begins as kvant_cuda_query_args does, up to `out`. */
typedef struct kvant_cuda_kernel_query_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_kernel_query_args) */
    const kvant_cuda_codec *k_codec;
    uint32_t batch, n_heads, n_kv_heads;
    kvant_cuda_type type;
    const void *q;
    size_t q_batch_stride, q_head_stride;
    const float *inverse_key_transform;
    float *out; /* (1 + n_further) x batch x n_heads x head_dim, contiguous */
    /* Further matrices, which keys of other blocks have (n_matrices of attention): the same queries
     * also go through them. */
    uint32_t n_further;
    const float *further[KVANT_CUDA_MOST_MATRICES - 1]; /* as inverse_key_transform */
    /* not 0: no call of this library that may still run in the stream writes q, or reads what out
     * holds. Then the call may begin while those calls run. It does not end before they do */
    uint32_t ready;
    /* a bit for each matrix, bit 0 for inverse_key_transform: the pointer is to a compact form */
    uint32_t compact;
} kvant_cuda_kernel_query_args;

/* As kvant_cuda_transform_queries. */
KVANT_API kvant_status kvant_cuda_kernel_transform_queries(const kvant_cuda_kernel_query_args *args,
                                                           kvant_cuda_stream stream);

/* ---- append ---- */

/* Begins as kvant_cuda_append_args does, up to `centroids`. */
typedef struct kvant_cuda_kernel_append_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_kernel_append_args) */
    kvant_cuda_rows k, v;
    kvant_cuda_type type;
    uint32_t n_tokens, n_kv_heads;
    const int64_t *slots;
    uint32_t *refused;
    float *exact[2];
    uint32_t transformed;
    const float *k_feedback;
    const float *centroids[2];
    /* Zeros from here on: none of this. */
    uint32_t slots_ready; /* not 0: as table_ready of attention, for slots */
    /* q not NULL: queries of these tokens go through their matrix, too
     * (kvant_cuda_kernel_transform_queries), in the same launch where few rows have a matrix */
    kvant_cuda_kernel_query_args queries;
    /* device, or NULL: marks of tokens whose rows were refused, for kvant_cuda_fill_marked. Token i
     * has the number mark_ids[i] (on the device), or its slot if that is NULL. The mark of number n
     * is bit n % 32 of word 1 + n / 32. Word 0 becomes 1. No call removes marks */
    uint32_t *marks;
    const int64_t *mark_ids;
    /* start not NULL: the centres of blocks are subtracted from the keys first, as by
     * kvant_cuda_center_rows; the keys must be floats. Token i has the centre of block
     * center_slots[i] / 64; below 0: none. If keys with a matrix are few or go to exact pages, the
     * launch that stores them subtracts the centre. Other keys go through `centered` */
    kvant_cuda_block_centers k_block_centers;
    const int64_t *center_slots; /* device; slots_ready applies to it, too */
    float *centered;             /* device: n_tokens x n_kv_heads x head_dim */
    /* not 0: an open page gets zeros in place of a row that is refused */
    uint32_t clear_refused;
    /* device: the compact form of the keys' matrices, NULL: k.key_transform has them. Keys pass
     * through W and then through R, as on the computer. For more than 64 rows, and for codes that
     * are neither uniform nor a codebook's, the call first makes W in k_matrix. This is device room
     * for n_kv_heads x head_dim^2 floats, which calls in one stream can share */
    const void *k_compact;
    float *k_matrix;
    /* host, or NULL: the compact form whose W calls in this stream left in k_matrix. If that is
     * k_compact, the call uses W as it is. A call that makes W stores k_compact here. The caller
     * stores NULL here when others write to k_matrix or to that compact form */
    const void **k_matrix_of;
    /* not 0: an append to exact pages lets the next call begin while the calls before this one
     * still run. A call with sealed_ready must not follow it if those calls write sealed pages */
    uint32_t next_early;
} kvant_cuda_kernel_append_args;

/* As kvant_cuda_append. KVANT_ERR_ARGUMENT, too, for queries or centres of keys that do not fit the
 * rows. */
KVANT_API kvant_status kvant_cuda_kernel_append(const kvant_cuda_kernel_append_args *args,
                                                kvant_cuda_stream stream);

/* ---- attention ---- */

/* Queries of attention before any matrix. They give <q, centre> of every page
 * (kvant_cuda_page_offsets). */
typedef struct kvant_cuda_plain_queries {
    const void *q; /* device; NULL: no page has its own centre */
    kvant_cuda_type type;
    size_t q_batch_stride, q_token_stride, q_head_stride; /* elements */
    /* Phases and numbers are at b * table_stride + page, like the entries of block_table. */
    kvant_cuda_block_centers block_centers;
    float *offsets; /* device: room for page_offsets */
    uint32_t ready; /* as in kvant_cuda_kernel_query_args, for q and offsets */
} kvant_cuda_plain_queries;

/* Begins as kvant_cuda_attention_args does, up to `k_center`. */
typedef struct kvant_cuda_kernel_attention_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_kernel_attention_args) */
    const kvant_cuda_codec *k_codec, *v_codec;
    kvant_cuda_pages k, v, k_open, v_open;
    const int32_t *block_table;
    size_t table_stride;
    uint32_t blocks_per_row;
    const int32_t *lengths;
    uint32_t batch, n_heads, n_kv_heads;
    kvant_cuda_type type;
    const void *q;
    size_t q_batch_stride, q_head_stride;
    void *out;
    size_t out_batch_stride, out_head_stride;
    float *lse;
    float scale;
    const float *v_center, *k_scale, *v_scale;
    void *workspace;
    size_t workspace_bytes;
    uint32_t query_tokens;
    const int32_t *query_starts;
    size_t q_token_stride, out_token_stride;
    uint32_t causal, window;
    float logit_softcap, max_bias;
    const uint16_t *mask;
    size_t mask_token_stride;
    const float *sinks;
    const float *centroids[2];
    const float *k_center; /* n_matrices x n_kv_heads x head_dim */
    /* Zeros from here on: none of this. */
    /* not 0: block_table and lengths were written before the kernel that precedes this call in its
     * stream. So the call may read them while that kernel still runs */
    uint32_t table_ready;
    /* device, or NULL. With table_ready it tells which tokens the preceding kernel still writes: of
     * sequence b only token new_cells[b] - new_first - b * new_stride. All blocks without such a
     * token may be read as early as the table */
    const int64_t *new_cells;
    int64_t new_first, new_stride;
    /* 0 or 1: all keys are alike. 2 to KVANT_CUDA_MOST_MATRICES: keys have several matrices or
     * centres. The keys of block_table's entry i have number matrices[i]. q holds queries for all
     * matrices. The queries for number n begin at q + q_ids[n] * q_matrix_stride elements, because
     * several numbers may have the same matrix */
    uint32_t n_matrices;
    /* device: numbers below n_matrices, in the order of block_table's entries; table_ready
     * applies */
    const uint8_t *matrices;
    size_t q_matrix_stride;
    uint8_t q_ids[KVANT_CUDA_MOST_MATRICES];
    /* device, or NULL: from kvant_cuda_page_offsets. The page's own centre adds this to all scores
     * of the page, before `scale`. It must be NULL with a softcap or k_center */
    const float *page_offsets;
    /* q not NULL: the call computes page_offsets. page_offsets and k_center must be NULL then, and
     * there is no softcap. */
    kvant_cuda_plain_queries plain_queries;
    /* F16 or BF16: the type of out. F32, which is 0: out has the type of q. So queries that went
     * through a matrix, which are F32, need no copy of out to the model's type */
    kvant_cuda_type out_type;
    /* not 0: the first KVANT_CUDA_COUNTER_BYTES of the workspace hold anything. The call clears
     * them if its kernels use them */
    uint32_t clear_counters;
    /* not 0: no call of this library that may still run in the stream writes sealed pages, or reads
     * the workspace. If table_ready is set, too, sealed pages are read while those calls run. An
     * append to exact pages without next_early lets the next call begin only when the calls before
     * it have ended */
    uint32_t sealed_ready;
} kvant_cuda_kernel_attention_args;

/* As kvant_cuda_attention. KVANT_ERR_ARGUMENT, too, for more than KVANT_CUDA_MOST_MATRICES
 * matrices, and for page_offsets or plain_queries together with each other, with k_center or with a
 * softcap. */
KVANT_API kvant_status kvant_cuda_kernel_attention(const kvant_cuda_kernel_attention_args *args,
                                                   kvant_cuda_stream stream);

/* The bytes of workspace that a call with this head_dim and n_matrices needs on the current device;
 * 0 on an error. Unpacked pages (kvant/cuda.h) begin behind the bytes for one matrix. So a call
 * that unpacks pages needs these bytes and its pages, or the bytes for n_matrices if they are
 * more. */
KVANT_API size_t kvant_cuda_kernel_workspace(uint32_t head_dim, uint32_t n_matrices);

/* ---- marks ---- */

/* The marks of a cache. Token i of a call has the number numbers[i] there. */
typedef struct kvant_cuda_spread {
    uint32_t *marks;
    const int64_t *numbers;
} kvant_cuda_spread;

#define KVANT_CUDA_MOST_SPREAD 8u /* caches that a graph writes to: one per kind of layer */

typedef struct kvant_cuda_marked_args {
    size_t size;           /* set by the caller to sizeof(kvant_cuda_marked_args) */
    const uint32_t *marks; /* as in append */
    int64_t first, stride; /* token t of sequence b has the number first + b * stride + t */
    /* as in attention; every sequence has query_tokens query tokens */
    const int32_t *lengths;
    uint32_t batch, query_tokens, n_heads, head_dim; /* query_tokens at least 1; head_dim of out */
    uint32_t causal;
    kvant_cuda_type type; /* of out */
    const uint16_t *mask;
    size_t mask_token_stride;
    void *out;
    size_t out_batch_stride, out_token_stride, out_head_stride;
    /* A query token that sees a marked token gets a mark in each of these caches. There query token
     * i of sequence b is token b * query_tokens + i. */
    uint32_t n_spread; /* at most KVANT_CUDA_MOST_SPREAD */
    kvant_cuda_spread spread[KVANT_CUDA_MOST_SPREAD];
} kvant_cuda_marked_args;

/* Called after attention on the same stream: if a query token sees a marked token, the outputs of
 * all its heads become NaN. Without marks the call costs one launch. */
KVANT_API kvant_status kvant_cuda_fill_marked(const kvant_cuda_marked_args *args,
                                              kvant_cuda_stream stream);

/* ---- centres of blocks ---- */

typedef struct kvant_cuda_center_rows_args {
    size_t size;      /* set by the caller to sizeof(kvant_cuda_center_rows_args) */
    const void *rows; /* device: n_tokens x n_kv_heads x head_dim */
    kvant_cuda_type type;
    size_t token_stride, head_stride;        /* elements; a row is contiguous */
    uint32_t n_tokens, n_kv_heads, head_dim; /* head_dim is even, at most 512 */
    /* device: token i is in block slots[i] / 64; below 0: its row is copied unchanged */
    const int64_t *slots;
    kvant_cuda_block_centers block_centers; /* phases and numbers by block */
    uint32_t add;                           /* 0: the centre is subtracted; 1: added */
    /* device: n_tokens x n_kv_heads x head_dim, contiguous; may be `rows` if these are such
     * floats */
    float *out;
} kvant_cuda_center_rows_args;

/* Subtracts the centres of blocks from rows, or adds them, with the CPU's bits. KVANT_ERR_ARGUMENT:
 * an array is missing, or head_dim is odd or above 512. */
KVANT_API kvant_status kvant_cuda_center_rows(const kvant_cuda_center_rows_args *args,
                                              kvant_cuda_stream stream);

typedef struct kvant_cuda_page_offsets_args {
    size_t size;   /* set by the caller to sizeof(kvant_cuda_page_offsets_args) */
    const void *q; /* device: queries before any matrix */
    kvant_cuda_type type;
    size_t q_batch_stride, q_token_stride, q_head_stride; /* elements, as in attention */
    uint32_t batch, n_heads, n_kv_heads, head_dim;        /* head_dim is even, at most 512 */
    uint32_t query_tokens;                                /* per sequence at most; 0: 1 */
    const int32_t *query_starts;                          /* as in attention */
    const int32_t *lengths;                               /* device: of each sequence */
    /* entries per sequence in phases, numbers and offsets; lengths are cut to 64 tokens per
     * entry */
    size_t table_stride;
    /* phases and numbers are at b * table_stride + page, like the entries of block_table */
    kvant_cuda_block_centers block_centers;
    /* device: batch x n_kv_heads x table_stride x query rows of a kv head. There are query_tokens x
     * heads of the kv head such rows; row = token * heads + head. Only pages below a sequence's
     * length and existing query tokens are written */
    float *offsets;
} kvant_cuda_page_offsets_args;

/* Computes offsets = <q, centre of the page> for attention, with sums in binary32.
 * KVANT_ERR_ARGUMENT: an array is missing, or head_dim is odd or above 512. */
KVANT_API kvant_status kvant_cuda_page_offsets(const kvant_cuda_page_offsets_args *args,
                                               kvant_cuda_stream stream);

/* ---- attention over rows in ggml's block formats ---- */

/* The row of (token, kv head) of a sequence; strides are in bytes. Pointer and strides are
 * multiples of the largest power of two that divides a row's bytes, but of no more than 16. */
typedef struct kvant_cuda_block_rows {
    uint32_t type; /* kvant_block_type: q8_0 or q4_0 */
    const void *data;
    size_t token_stride, head_stride, batch_stride;
} kvant_cuda_block_rows;

typedef struct kvant_cuda_block_args {
    size_t size;                /* set by the caller to sizeof(kvant_cuda_block_args) */
    kvant_cuda_block_rows k, v; /* of one type */
    uint32_t head_dim;          /* 64, 128 or 256 */
    /* There are at most 16 query rows per kv head. */
    uint32_t n_tokens, batch, query_tokens, n_heads, n_kv_heads;
    const float *q; /* strides of q, out and mask are elements */
    size_t q_batch_stride, q_token_stride, q_head_stride;
    float *out;
    size_t out_batch_stride, out_token_stride, out_head_stride;
    float scale, logit_softcap, max_bias; /* as in kvant_cuda_attention_args */
    const uint16_t *mask;                 /* fp16, aligned to 4, even strides; or NULL */
    size_t mask_batch_stride, mask_token_stride;
    const float *sinks; /* n_heads, or NULL */
    /* device, zeros before its first use; every call leaves it ready for the next call */
    void *workspace;
    size_t workspace_bytes;
} kvant_cuda_block_args;

/* The bytes of workspace; 0 when the problem is not supported. The members workspace and
 * workspace_bytes are not read. */
KVANT_API size_t kvant_cuda_block_workspace(const kvant_cuda_block_args *args);

/* Every query token sees every token that the mask does not hide. Queries, attention weights and
 * values are rounded to fp16. KVANT_ERR_UNSUPPORTED when kvant_cuda_block_workspace returns 0. */
KVANT_API kvant_status kvant_cuda_block_attention(const kvant_cuda_block_args *args,
                                                  kvant_cuda_stream stream);

/* ---- exact blocks of an engine's pages ---- */

/* An engine's pages are sealed. Next to them a small pool of open pages holds some blocks exactly:
 * the first block of a sequence, and its newest blocks. While a block is exact, its sealed page may
 * lack rows: when the pool needs the room, the block is sealed first. So the encoder takes whole
 * blocks instead of single rows.
 *
 * All layers share one state, because they hold the same blocks. kvant_cuda_exact_step changes it
 * once before the layers of a step. Then each layer (1) appends the step's rows to its open pages
 * at `rows`, (2) calls kvant_cuda_seal_rows with the list that the step made, and (3) attends with
 * `table`. If a layer leaves that out, its rows are lost. The list belongs to one step, so steps do
 * not overlap.
 *
 * Open block i is slot i of the pool. Slots below n_first hold first blocks; n_newest slots follow,
 * then room for staged rows. A block becomes exact when its row 0 is written and a slot is free.
 * It stays exact until its room is needed, if no sequence of the step begins or ends with it. */
typedef struct kvant_cuda_exact_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_exact_args) */
    /* ---- the state: device memory, in which the caller sets owners and places to -1 and all else
     * to 0 */
    int32_t *owners;          /* n_first + n_newest: the block of each slot, or below 0 */
    uint32_t *births, *lives; /* of each slot: a step */
    int32_t *places; /* n_blocks: a block's slot, which counts only if the slot's owner agrees */
    uint32_t *clock; /* one number: steps */
    uint32_t n_first, n_newest; /* slots, at least 4 of each */
    uint32_t n_blocks;          /* of the engine's pages; other block numbers are never exact */
    /* ---- the step; device arrays, as in attention and append */
    const int32_t *lengths, *query_starts, *block_table;
    uint32_t batch, n_tokens;
    size_t table_stride;
    uint32_t blocks_per_row;
    const int64_t *slots; /* n_tokens */
    /* blocks of a sequence that stay exact, besides its first one; at least 1 */
    uint32_t newest;
    /* A step with most_staged tokens or fewer stages the rows of all other blocks: token i goes to
     * row 64 * (n_first + n_newest) + i of the pool, and from there to its page. In a larger step
     * the caller also appends all rows to sealed pages. */
    uint32_t most_staged;
    /* ---- results; device memory */
    int32_t *table;   /* batch rows of to_stride entries: block_table with -1 - slot */
    size_t to_stride; /* at least blocks_per_row */
    int64_t *rows;    /* n_tokens: a token's row in the pool, as slots of append; or -1 */
    /* The rows to seal: from[i] is a row of the pool, to[i] a slot of the pages. There is room for
     * most_staged + 64 * (n_first + n_newest) rows. *n_sealed says how many rows there are. */
    int64_t *from, *to;
    uint32_t *n_sealed;
} kvant_cuda_exact_args;

/* Decides which blocks are exact, before the layers of a step. KVANT_ERR_ARGUMENT: an array is
 * missing, or fewer than 4 slots of a kind. */
KVANT_API kvant_status kvant_cuda_exact_step(const kvant_cuda_exact_args *args,
                                             kvant_cuda_stream stream);

/* Begins as kvant_cuda_seal_args does, in another meaning of its arrays. */
typedef struct kvant_cuda_seal_rows_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_seal_rows_args) */
    kvant_cuda_seal_pages k, v;
    uint32_t most_rows, n_kv_heads;
    /* device: row i goes from row from[i] % 64 of open block from[i] / 64 to slot to[i], for i
     * below *n_rows. No slot occurs twice */
    const int64_t *from, *to;
    const uint32_t *n_rows; /* device: at most most_rows. It was written before the kernel that
                             * precedes this call in its stream */
    uint32_t *refused;      /* as in seal */
} kvant_cuda_seal_rows_args;

/* Quantises single rows of open pages. With most_rows 0 it only tells whether it can:
 * KVANT_ERR_UNSUPPORTED for codecs with groups of several tokens, feedback, centroids or a head_dim
 * without kernels of its own, and where shared memory is too small. */
KVANT_API kvant_status kvant_cuda_seal_rows(const kvant_cuda_seal_rows_args *args,
                                            kvant_cuda_stream stream);

/* ---- learning ---- */

/* Two channels of a part of a head (kvant_cuda_learn_args.part), which RoPE rotates together. */
typedef struct kvant_cuda_rope_pair {
    uint16_t first, second; /* channels of the part */
    float frequency;        /* 0: they are not rotated */
} kvant_cuda_rope_pair;

#define KVANT_CUDA_LEARN_TRANSFORMS 8u /* of a call, at most */
#define KVANT_CUDA_LEARN_BUCKETS 23u   /* position buckets of a transform, at most */
#define KVANT_CUDA_LEARN_BATCHES 4u    /* of queries */
#define KVANT_CUDA_LEARN_LEAST 16u     /* keys and queries; with fewer, matrices are the identity */

/* Position buckets that share a transform. All of them count alike, however long they are. */
typedef struct kvant_cuda_learn_span {
    uint32_t n_buckets;
    int32_t
        edges[KVANT_CUDA_LEARN_BUCKETS + 1]; /* bucket i has positions edges[i] to edges[i+1]-1 */
} kvant_cuda_learn_span;

/* The keys and queries of a layer, and where its results go. */
typedef struct kvant_cuda_learn_layer {
    const void *rows;
    const float *queries[KVANT_CUDA_LEARN_BATCHES];
    uint16_t *triangles;
    float *centers, *start;
} kvant_cuda_learn_layer;

/* The keys and queries of a layer in GPU memory, from which key transforms are learned
 * (transform=first). */
typedef struct kvant_cuda_learn_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_learn_args) */
    /* W of a head is block diagonal with head_dim / part matrices (kvant_cuda_learn_plan). group:
     * query heads of a kv head */
    uint32_t head_dim, part, n_kv_heads, group;
    kvant_cuda_type type;                    /* of keys: F32 or F16 */
    uint32_t n_rows, n_tokens, batch_tokens; /* keys; query tokens; query tokens of a full batch */
    const void *rows;
    size_t token_stride, head_stride; /* in numbers */
    const uint32_t *places;           /* device: the row of each key; NULL: row i is key i */
    const int32_t *positions;         /* device: of keys, below 0: leave it out; NULL: all are 0 */
    const float *queries[KVANT_CUDA_LEARN_BATCHES]; /* token after token */
    size_t query_stride;                            /* from token to token */
    const int32_t *query_positions;                 /* as positions */
    /* positions that share a centre, which is subtracted from keys; 0: all of them */
    uint32_t center_span;
    uint32_t n_transforms;
    kvant_cuda_learn_span spans[KVANT_CUDA_LEARN_TRANSFORMS];
    kvant_cuda_rope_pair pairs[KVANT_MAX_HEAD_DIM / 2]; /* of part 0, then of part 1 and so on */
    /* Results. triangles: by transform, kv head and part, as records hold them. centers: by
     * transform, the mean of its keys. start: the centre of a block at position 0. */
    uint16_t *triangles;
    float *centers, *start;
    void *workspace; /* device, aligned to 16: kvant_cuda_learn_bytes */
    size_t workspace_bytes;
    /* device: n_layers layers of this shape, whose keys and queries have the same places and
     * positions. Then rows, queries, triangles, centers and start above are not read. n_layers 0:
     * those members are the only layer */
    const kvant_cuda_learn_layer *layers;
    uint32_t n_layers;
} kvant_cuda_learn_args;

/* Fills part, center_span, n_transforms, the first span and pairs, on the host. rope: how RoPE
 * rotates keys; NULL: not known. Its n_positions are the positions of the first transform.
 * *knows_rope becomes 1 if the rope is used, and 0 if it rotates channels of different parts
 * together. KVANT_ERR_UNSUPPORTED: no kernel learns a matrix of this head_dim. */
KVANT_API kvant_status kvant_cuda_learn_plan(const struct kvant_rope *rope,
                                             kvant_cuda_learn_args *args, uint32_t *knows_rope);

/* Adds a transform for positions first to last. The RoPE is known. */
KVANT_API kvant_status kvant_cuda_learn_span_add(kvant_cuda_learn_args *args, int32_t first,
                                                 int32_t last);

/* The bytes of working memory; 0 for arguments without a plan. The second function returns how many
 * 16-bit numbers the triangles of one transform have. Both need no GPU. */
KVANT_API size_t kvant_cuda_learn_bytes(const kvant_cuda_learn_args *args);
KVANT_API size_t kvant_cuda_triangle_halves(uint32_t head_dim, uint32_t n_kv_heads);

/* Learns the transforms of all spans. It only enqueues work on the stream. W is the identity where
 * fewer than KVANT_CUDA_LEARN_LEAST keys or queries count, and where the sums have no factor or
 * the rounded W no good inverse: the host does not see the numbers. With n_tokens 0 all directions
 * of queries count alike. The results have the same bits on every GPU. KVANT_ERR_ARGUMENT: a shape
 * that the plan does not give, an array that is missing, or a workspace that is too small. */
KVANT_API kvant_status kvant_cuda_learn(const kvant_cuda_learn_args *args,
                                        kvant_cuda_stream stream);

/* ---- tests ---- */

/* Limits the shared memory per thread block for the whole process; 0: no limit. With 99 KB, all
 * kernels are launched as on GPUs with compute capability 8.6, 8.9 or 12.0. For tests and
 * measurements. */
KVANT_API void kvant_cuda_limit_shared_memory(size_t bytes);

KVANT_END_C

#endif /* KVANT_CUDA_KERNELS_H */
