/* cuda_kernels.h - unstable: single kernels on an NVIDIA GPU, and calls of cuda.h with all arguments.
 *
 * kvant's llama.cpp plug-in, its GPU cache and its tests use this header. Its functions and structs
 * may change or go with every release, also between patch versions. A program that uses them has to
 * be compiled with the headers of the libkvant that it loads. Engines use cuda.h, whose rules about
 * streams, threads and errors hold here, too.
 */
#ifndef KVANT_CUDA_KERNELS_H
#define KVANT_CUDA_KERNELS_H

#include <kvant/cuda.h>

KVANT_BEGIN_C

#define KVANT_CUDA_MOST_MATRICES 24u

/* Centres that turn with positions, as keys do (kvant_rope.block_centers). Pair i of channels
 * (first, second) of the centre of a block with number n is, with a and b the same channels of
 * start n,
 *
 *     (a cos - b sin, b cos + a sin)
 *
 * every product and sum rounded. A phase of zeros: no centre. kvant_rope_phase computes pairs and
 * phases. */
typedef struct kvant_cuda_turning {
    /* device, aligned to 4: head_dim / 2 pairs of channels, each channel once */
    const uint16_t *pairs;
    const float *start; /* device: numbers x n_kv_heads x head_dim, centres at position 0 */
    /* device: per block the cosines of all pairs, then their sines: head_dim */
    const float *phases;
    const uint8_t *numbers; /* device: of each block, below KVANT_CUDA_MOST_MATRICES; NULL: all 0 */
} kvant_cuda_turning;

/* ---- queries ---- */

/* Members up to `out` are those of kvant_cuda_query_args. */
typedef struct kvant_cuda_kernel_query_args {
    size_t size; /* set by the caller to sizeof(kvant_cuda_kernel_query_args) */
    const kvant_cuda_codec *k_codec;
    uint32_t batch, n_heads, n_kv_heads;
    kvant_cuda_type type;
    const void *q;
    size_t q_batch_stride, q_head_stride;
    const float *inverse_weights;
    float *out; /* (1 + n_further) x batch x n_heads x head_dim, contiguous */
    /* Zeros from here on, or a smaller size: none of this. The same queries through other matrices, too, that keys of
     * other blocks have (n_matrices of attention). */
    uint32_t n_further;
    const float *further[KVANT_CUDA_MOST_MATRICES - 1]; /* as inverse_weights */
} kvant_cuda_kernel_query_args;

KVANT_API kvant_status kvant_cuda_kernel_transform_queries(const kvant_cuda_kernel_query_args *args,
                                                           kvant_cuda_stream stream);

/* ---- append ---- */

/* Members up to `centroids` are those of kvant_cuda_append_args. */
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
    /* q not NULL: queries of these tokens go through their matrix, too (kvant_cuda_kernel_transform_queries), in the same
     * launch where few rows have a matrix */
    kvant_cuda_kernel_query_args queries;
    /* device, or NULL: tokens whose rows were refused get a mark, for kvant_cuda_fill_marked. Token i
     * has the number mark_numbers[i] (on the device), or with NULL its slot. Word 0 becomes 1, and
     * bit n % 32 of word 1 + n / 32 is the mark of number n. No call takes marks away */
    uint32_t *marks;
    const int64_t *mark_numbers;
    /* start not NULL: keys, which are floats then, lose their blocks' centres first, as by
     * kvant_cuda_center_rows. Token i has that of block center_slots[i] / 64, or none below 0. Few
     * keys with a matrix lose it in the launch that stores them; others go through `centered` */
    kvant_cuda_turning k_turning;
    const int64_t *center_slots; /* device; slots_ready counts for these, too */
    float *centered;             /* device: n_tokens x n_kv_heads x head_dim */
} kvant_cuda_kernel_append_args;

KVANT_API kvant_status kvant_cuda_kernel_append(const kvant_cuda_kernel_append_args *args,
                                                kvant_cuda_stream stream);

/* ---- attention ---- */

/* Queries of attention before any matrix, for <q, centre> of every page
 * (kvant_cuda_page_offsets). */
typedef struct kvant_cuda_turned {
    const void *q; /* device; NULL: pages have no centres of their own */
    kvant_cuda_type type;
    size_t q_batch_stride, q_token_stride, q_head_stride; /* elements */
    /* phases and numbers by b * table_stride + page, as block_table's entries lie */
    kvant_cuda_turning turning;
    float *offsets; /* device: room for page_offsets, which some kernels need */
} kvant_cuda_turned;

/* Members up to `k_center` are those of kvant_cuda_attention_args. */
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
    /* not 0: block_table and lengths were written before the kernel that comes before this call in its
     * stream, and are read while that one ends */
    uint32_t table_ready;
    /* device, or NULL. Not NULL, with table_ready: the newest token of sequence b is its token new_cells[b] - new_first -
     * b * new_stride, and blocks without such a token are as ready as the table */
    const int64_t *new_cells;
    int64_t new_first, new_stride;
    /* 2 to KVANT_CUDA_MOST_MATRICES: keys of block_table's entry i have the matrix and the centre of number matrices[i], and
     * q has queries for all of these matrices: those of number n begin q_numbers[n] * q_matrix_stride elements behind q, as
     * several numbers may have the same matrix. 0 or 1: all keys are alike */
    uint32_t n_matrices;
    const uint8_t *
        matrices; /* device: numbers below n_matrices, which lie as block_table's entries do, and are as ready */
    size_t q_matrix_stride;
    uint8_t q_numbers[KVANT_CUDA_MOST_MATRICES];
    /* device, or NULL: kvant_cuda_page_offsets. What its own centre adds to all scores of a page, before `scale`. Not beside a
     * softcap or k_center */
    const float *page_offsets;
    /* q not NULL: the call computes page_offsets. page_offsets and k_center are NULL then, and
     * there is no softcap. */
    kvant_cuda_turned turned;
} kvant_cuda_kernel_attention_args;

KVANT_API kvant_status kvant_cuda_kernel_attention(const kvant_cuda_kernel_attention_args *args,
                                                   kvant_cuda_stream stream);

/* ---- marks ---- */

/* A cache whose tokens get marks: token i of a call has the number numbers[i]. */
typedef struct kvant_cuda_spread {
    uint32_t *marks;
    const int64_t *numbers;
} kvant_cuda_spread;

#define KVANT_CUDA_MOST_SPREAD 8u

typedef struct kvant_cuda_marked_args {
    size_t size;           /* set by the caller to sizeof(kvant_cuda_marked_args) */
    const uint32_t *marks; /* as in append */
    int64_t first, stride; /* token t of sequence b has the number first + b * stride + t */
    /* as in attention, with as many query tokens in each sequence */
    const int32_t *lengths;
    uint32_t batch, query_tokens, n_heads, head_dim; /* query_tokens at least 1; head_dim of out */
    uint32_t causal;
    kvant_cuda_type type; /* of out */
    const uint16_t *mask;
    size_t mask_token_stride;
    void *out;
    size_t out_batch_stride, out_token_stride, out_head_stride;
    /* A query token that sees a mark gets a mark itself in each of these caches. Query token i of
     * sequence b is token b * query_tokens + i there. */
    uint32_t n_spread; /* at most KVANT_CUDA_MOST_SPREAD */
    kvant_cuda_spread spread[KVANT_CUDA_MOST_SPREAD];
} kvant_cuda_marked_args;

/* Called after attention on the same stream: a query token that sees a token with a mark gets NaN as
 * the output of all its heads. Without marks the call costs a launch. */
KVANT_API kvant_status kvant_cuda_fill_marked(const kvant_cuda_marked_args *args,
                                              kvant_cuda_stream stream);

/* ---- centres of blocks ---- */

typedef struct kvant_cuda_center_rows_args {
    size_t size;      /* set by the caller to sizeof(kvant_cuda_center_rows_args) */
    const void *rows; /* device: n_tokens x n_kv_heads x head_dim */
    kvant_cuda_type type;
    size_t token_stride, head_stride;        /* elements; a row is contiguous */
    uint32_t n_tokens, n_kv_heads, head_dim; /* head_dim is even, at most 512 */
    const int64_t
        *slots; /* device: token i is in block slots[i] / 64; below 0: its row is copied */
    kvant_cuda_turning turning; /* phases and numbers by block */
    uint32_t add;               /* 0: the centre is subtracted; 1: added */
    float *
        out; /* device: n_tokens x n_kv_heads x head_dim, contiguous; rows themselves if these are such floats, too */
} kvant_cuda_center_rows_args;

/* Rows about their blocks' centres, or back: the CPU's bits. KVANT_ERR_ARGUMENT for missing arrays, an odd head_dim, or one
 * above 512. */
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
    size_t
        table_stride; /* places of a sequence in phases, numbers and offsets; lengths are cut to 64 of each */
    kvant_cuda_turning
        turning; /* phases and numbers by b * table_stride + page, as block_table's entries lie */
    /* device: batch x n_kv_heads x table_stride x query rows of a kv head, which are query_tokens x heads of the kv head:
     * row = token * heads + head. Written are pages below a sequence's length and query tokens that there are */
    float *offsets;
} kvant_cuda_page_offsets_args;

/* offsets = <q, centre of the page>, for attention; sums are in binary32. KVANT_ERR_ARGUMENT for missing arrays, an odd head_dim,
 * or one above 512. */
KVANT_API kvant_status kvant_cuda_page_offsets(const kvant_cuda_page_offsets_args *args,
                                               kvant_cuda_stream stream);

/* ---- attention over rows in ggml's block formats ---- */

/* The row of (token, kv head) of a sequence; strides in bytes. Pointer and strides are multiples of a row's bytes'
 * largest power of two, at most 16. */
typedef struct kvant_cuda_block_rows {
    uint32_t type; /* kvant_block_type: q8_0 or q4_0 */
    const void *data;
    size_t token_stride, head_stride, batch_stride;
} kvant_cuda_block_rows;

typedef struct kvant_cuda_block_args {
    size_t size;                /* set by the caller to sizeof(kvant_cuda_block_args) */
    kvant_cuda_block_rows k, v; /* of one type */
    uint32_t head_dim;          /* 64, 128 or 256 */
    uint32_t n_tokens, batch, query_tokens, n_heads,
        n_kv_heads; /* at most 16 query rows per kv head */
    const float *q; /* strides of q, out and mask are elements */
    size_t q_batch_stride, q_token_stride, q_head_stride;
    float *out;
    size_t out_batch_stride, out_token_stride, out_head_stride;
    float scale, logit_softcap, max_bias; /* as in kvant_cuda_attention_args */
    const uint16_t *mask;                 /* fp16, aligned to 4, even strides; or NULL */
    size_t mask_batch_stride, mask_token_stride;
    const float *sinks; /* n_heads, or NULL */
    void *
        workspace; /* device, zeros before its first use; every call leaves it ready for the next */
    size_t workspace_bytes;
} kvant_cuda_block_args;

/* Bytes of workspace; 0 when the problem is not taken (workspace and its size are not looked at). */
KVANT_API size_t kvant_cuda_block_workspace(const kvant_cuda_block_args *args);

/* Every query token sees every token that the mask leaves. Queries, weights and values are rounded to fp16.
 * KVANT_ERR_UNSUPPORTED for what is not taken. */
KVANT_API kvant_status kvant_cuda_block_attention(const kvant_cuda_block_args *args,
                                                  kvant_cuda_stream stream);

/* ---- tests ---- */

/* Limits the shared memory per thread block for the whole process; 0: no limit. With 99 KB,
 * all kernels are launched as on GPUs with compute capability 8.6, 8.9 and 12.0. For tests and
 * measurements. */
KVANT_API void kvant_cuda_limit_shared_memory(size_t bytes);

KVANT_END_C

#endif /* KVANT_CUDA_KERNELS_H */
