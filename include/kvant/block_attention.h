/* block_attention.h - attention over keys and values of the caller in ggml's block formats.
 *
 * llama.cpp stores its own KV cache as rows of f16, q8_0, q4_0 and other formats. These functions
 * read such rows in place: they copy, convert and write nothing. Softmax runs online, over parts of
 * the context whose bounds depend on the problem alone, so every number of threads gives the same
 * result.
 *
 * All arithmetic is binary32. ggml rounds queries to 8 bits and sums to 16; these functions do not.
 * The error against exact arithmetic is of the order of 2^-24 times the sum of magnitudes.
 */
#ifndef KVANT_BLOCK_ATTENTION_H
#define KVANT_BLOCK_ATTENTION_H

#include <kvant/attention.h>

KVANT_BEGIN_C

/* Formats, with the values of ggml's enum ggml_type. A block of a quantised format holds 32
 * neighbouring channels of one token: an fp16 scale d, in some formats an fp16 minimum m, then
 * codes c. It stands for the numbers d c + m. */
typedef enum kvant_block_type {
    KVANT_BLOCK_F32 = 0,
    KVANT_BLOCK_F16 = 1,
    KVANT_BLOCK_Q4_0 = 2,    /* 18 bytes: d, 4-bit codes - 8 */
    KVANT_BLOCK_Q4_1 = 3,    /* 20 bytes: d, m, 4-bit codes */
    KVANT_BLOCK_Q5_0 = 6,    /* 22 bytes: d, fifth bits, 4-bit codes; codes - 16 */
    KVANT_BLOCK_Q5_1 = 7,    /* 24 bytes: d, m, fifth bits, 4-bit codes */
    KVANT_BLOCK_Q8_0 = 8,    /* 34 bytes: d, signed 8-bit codes */
    KVANT_BLOCK_IQ4_NL = 20, /* 18 bytes: d, 4-bit indices into a table of 16 numbers */
    KVANT_BLOCK_BF16 = 30
} kvant_block_type;

/* The bytes of one row of head_dim channels. Returns 0 when the format is unknown, when head_dim is
 * above KVANT_BLOCK_MAX_HEAD_DIM, or when it is not a multiple of 32 (16 for f32, f16 and bf16). */
KVANT_API size_t kvant_block_row_bytes(kvant_block_type type, uint32_t head_dim);
#define KVANT_BLOCK_MAX_HEAD_DIM 512u /* as KVANT_MAX_HEAD_DIM */

/* Keys or values of one layer and sequence, borrowed for the call. The row of (token j, kv head h)
 * starts at data + j * token_stride + h * head_stride. Strides are in bytes; any alignment will do.
 * `bytes` bytes from data on must be readable; a problem with a row outside them is refused.
 *
 * A token that the mask hides from a query token does not change that query token's output,
 * whatever its rows hold. A NaN in a key that a query token sees makes the outputs of its query
 * heads NaN. A NaN in a value makes the outputs of its channel NaN. A value is left out when its
 * attention weight is below e^-87 of the largest weight. */
typedef struct kvant_block_rows {
    size_t size; /* set by the caller to sizeof(kvant_block_rows) */
    kvant_block_type type;
    uint32_t head_dim;
    uint32_t n_kv_heads; /* the same for k and v */
    const void *data;
    size_t bytes;
    size_t token_stride, head_stride;
} kvant_block_rows;

/* As kvant_attention_workspace and kvant_attention, threads and errors included. In the problem
 * block_table must be NULL and first_block 0. */
KVANT_API kvant_status kvant_block_attention_workspace(const kvant_block_rows *k,
                                                       const kvant_block_rows *v,
                                                       const kvant_attention_problem *problem,
                                                       size_t *bytes);
KVANT_API kvant_status kvant_block_attention(const kvant_block_rows *k, const kvant_block_rows *v,
                                             const kvant_attention_problem *problem,
                                             void *workspace, size_t workspace_bytes);

KVANT_END_C

#endif /* KVANT_BLOCK_ATTENTION_H */
