/* attention.h - attention of query tokens over compressed keys and values.
 *
 * A query is transformed once for each transform (`transform_id`, tensor.h) that the keys use.
 * Pages are unpacked in the CPU's cache or multiplied as codes. Outputs are transformed back once.
 * Softmax runs online over parts of the context. The bounds of the parts depend on the problem
 * alone, and the parts are combined in order, so results are the same for every number of threads.
 */
#ifndef KVANT_ATTENTION_H
#define KVANT_ATTENTION_H

#include <stdbool.h>

#include <kvant/tensor.h>

KVANT_BEGIN_C

/* One layer and sequence: n_queries query tokens over n_tokens tokens of the sequence. Strides are
 * in floats; the stride of the mask is in fp16 numbers. For query token t, token j and head h, with
 * position(t) = n_tokens - n_queries + t:
 *
 *   s[h][t][j] = scale * <q[t][h], k[j][h / (n_heads / n_kv_heads)]>
 *   s = logit_softcap * tanh(s / logit_softcap)   when logit_softcap > 0
 *   s = s + slope(h) * mask[t][j]                 with a mask; slope is 1 unless max_bias > 0
 *   s = s - slope(h) * (position(t) - j)          without a mask, when max_bias > 0
 *   s = -infinity                                 when causal and j > position(t)
 *   s = -infinity                                 when window > 0 and j <= position(t) - window
 *   out[t][h] = sum_j e^(s_j - m) v[j] / D        m = the largest exponent
 *   D = sum_j e^(s_j - m) + e^(sinks[h] - m)
 *   lse[t][h] = m + ln D
 *
 * The ALiBi slopes are as in Press et al. 2022. Let n = 2^floor(log2 n_heads). Then slope(h) is
 * 2^(-max_bias (h+1) / n) for h < n. For all further heads slope(h) is 2^(-max_bias (2 (h-n) + 1) /
 * (2 n)).
 *
 * A query token that sees no token gets zeros, and -infinity as lse when there is no sink. Every
 * slot that a query token sees must have been written: a slot that was never written counts with
 * the score of the centre. NaNs in q give NaNs for their heads. */
typedef struct kvant_attention_problem {
    size_t size; /* set by the caller to sizeof(kvant_attention_problem) */
    uint32_t n_queries;
    uint32_t n_tokens; /* may be 0 */
    uint32_t n_heads;  /* a multiple of n_kv_heads */
    /* The table says where tokens are: block_table[i] is the block of the sequence's tokens 64 i to
     * 64 i + 63. It has n_tokens / 64 entries, rounded up. A negative entry hides its tokens, for
     * blocks that lie before a window. NULL: tokens 64 i to 64 i + 63 are in block first_block +
     * i. */
    const int32_t *block_table;
    uint32_t first_block;
    uint32_t n_threads; /* at least 1 */
    const float *q;     /* n_queries x n_heads x head_dim of k */
    size_t q_token_stride, q_head_stride;
    float *out; /* n_queries x n_heads x head_dim of v */
    size_t out_token_stride, out_head_stride;
    float *lse;           /* n_queries x n_heads, or NULL */
    const uint16_t *mask; /* n_queries x n_tokens of fp16, -inf hides; or NULL */
    size_t mask_token_stride;
    const float *sinks; /* n_heads extra logits, or NULL */
    float scale;
    float logit_softcap; /* 0: none */
    float max_bias;      /* 0: no ALiBi */
    uint32_t window;     /* tokens that a query token sees, itself included; 0: all */
    bool causal;         /* needs n_queries <= n_tokens */
    /* Attention multiplies unpacked fp32 numbers instead of codes and 16-bit integers, so queries
     * and attention weights are not rounded. This takes up to several times as long. */
    bool exact;
} kvant_attention_problem;

/* *bytes = the workspace that kvant_attention needs. It grows with n_queries x n_heads x head_dim x
 * the number of transforms in use, and with n_threads. If keys were shifted (kvant_tensor_shift),
 * it grows with the number of pairs of transform and shift that query tokens see; the function then
 * reads the mask. KVANT_ERR_ARGUMENT with the reason in kvant_error_message(). */
KVANT_API kvant_status kvant_attention_workspace(const kvant_tensor *k, const kvant_tensor *v,
                                                 const kvant_attention_problem *problem,
                                                 size_t *bytes);

/* Computes out and lse. k and v are tensors with the same n_kv_heads and the same blocks; their
 * head_dim may differ. The workspace has as many bytes as kvant_attention_workspace returns, is
 * aligned to 64, and belongs to the call while it runs. The call allocates nothing. Calls with
 * different workspaces and outputs may run at once. KVANT_ERR_ARGUMENT, with a message: nothing was
 * written. */
KVANT_API kvant_status kvant_attention(const kvant_tensor *k, const kvant_tensor *v,
                                       const kvant_attention_problem *problem, void *workspace,
                                       size_t workspace_bytes);

/* The same for multi-head latent attention (MLA), where all query heads read one row per token. The
 * keys are whole rows and the values are the first value_dim numbers of the same rows, so a page is
 * unpacked once for both. The kv heads of `rows` are the parts of a row, in order: q has
 * n_kv_heads x head_dim numbers per query head, and out has value_dim. Parts may have different
 * codecs (latents and RoPE channels behave differently). The tensor has role KVANT_ROLE_V, a
 * head_dim that is a multiple of 16, and codecs that learn nothing from rows; value_dim is a
 * multiple of head_dim: otherwise KVANT_ERR_ARGUMENT. */
KVANT_API kvant_status kvant_latent_attention_workspace(const kvant_tensor *rows,
                                                        uint32_t value_dim,
                                                        const kvant_attention_problem *problem,
                                                        size_t *bytes);
KVANT_API kvant_status kvant_latent_attention(const kvant_tensor *rows, uint32_t value_dim,
                                              const kvant_attention_problem *problem,
                                              void *workspace, size_t workspace_bytes);

KVANT_END_C

#endif /* KVANT_ATTENTION_H */
