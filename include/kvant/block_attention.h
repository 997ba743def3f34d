/* block_attention.h - attention over keys and values that somebody else keeps, in the block formats of ggml.
 *
 * llama.cpp stores its own KV cache as rows of f16, q8_0, q4_0 and the like. Here such rows are read where they lie:
 * nothing is copied, converted or written. Softmax runs online, over parts of the context whose bounds depend on the
 * problem alone, so the result is the same for every number of threads.
 *
 * Numbers of the rows and all products are binary32: queries are not rounded to 8 bits and sums not to 16, as ggml
 * does, so the error against exact arithmetic is of the order of 2^-24 times the sum of magnitudes.
 */
#ifndef KVANT_BLOCK_ATTENTION_H
#define KVANT_BLOCK_ATTENTION_H

#include <kvant/kvant.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Formats, with the values of ggml's enum ggml_type. A block of the quantised ones holds 32 neighbouring channels of a
 * token: fp16 scale d, where named fp16 minimum m, then codes c; its numbers are d c + m. */
typedef enum kvant_block_type {
    KVANT_BLOCK_F32 = 0,
    KVANT_BLOCK_F16 = 1,
    KVANT_BLOCK_Q4_0 = 2,    /* 18 bytes: d, 4-bit codes - 8 */
    KVANT_BLOCK_Q4_1 = 3,    /* 20 bytes: d, m, 4-bit codes */
    KVANT_BLOCK_Q5_0 = 6,    /* 22 bytes: d, fifth bits, 4-bit codes; codes - 16 */
    KVANT_BLOCK_Q5_1 = 7,    /* 24 bytes: d, m, fifth bits, 4-bit codes */
    KVANT_BLOCK_Q8_0 = 8,    /* 34 bytes: d, signed 8-bit codes */
    KVANT_BLOCK_IQ4_NL = 20, /* 18 bytes: d, 4-bit indices of 16 fixed numbers */
    KVANT_BLOCK_BF16 = 30
} kvant_block_type;

/* Bytes of one row of head_dim channels; 0 when the format is none of the above, when head_dim is beyond
 * KVANT_BLOCK_MAX_HEAD_DIM, or when it is no multiple of 32 (of 16 for the formats without blocks). */
KVANT_API size_t kvant_block_row_bytes(kvant_block_type type, uint32_t head_dim);
#define KVANT_BLOCK_MAX_HEAD_DIM 512u

/* Keys or values of one layer and stream, borrowed for the call. The row of (cell j, kv head h) starts at
 * data + j token_stride + h head_stride, strides in bytes; any alignment. bytes: readable from data on; rows that do not
 * lie within are refused. Cells that some query sees must hold finite numbers. */
typedef struct kvant_block_rows {
    kvant_block_type type;
    uint32_t head_dim;
    const void *data;
    size_t bytes;
    size_t token_stride, head_stride;
} kvant_block_rows;

/* What is computed, and every other field, is as in kvant_attention_args (attention.h). */
typedef struct kvant_block_attention_args {
    size_t size;           /* set by the caller to sizeof(kvant_block_attention_args) */
    kvant_block_rows k, v; /* formats and head_dim may differ */
    uint32_t n_kv_heads;
    uint32_t n_cells; /* may be 0 */
    uint32_t n_tokens;
    uint32_t n_heads; /* a multiple of n_kv_heads */
    const float *q;
    size_t q_token_stride, q_head_stride;
    const uint16_t *mask;
    size_t mask_token_stride;
    const float *sinks;
    float scale;
    float logit_softcap;
    float max_bias;
    float *out;
    size_t out_token_stride, out_head_stride;
    uint32_t n_threads;
} kvant_block_attention_args;

/* Bytes of workspace that kvant_block_attention needs for these arguments (0 when they are not valid). */
KVANT_API size_t kvant_block_attention_workspace(const kvant_block_attention_args *args);

/* Computes out. workspace: at least kvant_block_attention_workspace bytes, aligned to 64, owned by this call while it
 * runs. Calls with different workspaces and outputs may run in parallel. KVANT_ERR_ARGUMENT: arguments that are not valid;
 * nothing was written. */
KVANT_API kvant_status kvant_block_attention(const kvant_block_attention_args *args, void *workspace,
                                             size_t workspace_bytes);

#ifdef __cplusplus
}
#endif

#endif /* KVANT_BLOCK_ATTENTION_H */
