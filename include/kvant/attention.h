/* attention.h - softmax(scale * Q K^T + mask) V computed on compressed pages.
 *
 * K and V are never written out as rows: a page is unpacked into a tile that fits the nearest cache and serves
 * all query rows of its kv head. Queries are rotated once, outputs un-rotated once. Softmax runs online, over
 * parts of the context whose bounds depend on the problem alone; parts are combined in order, so the result is
 * the same for every number of threads.
 */
#ifndef KVANT_ATTENTION_H
#define KVANT_ATTENTION_H

#include <stdbool.h>

#include <kvant/cache.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One layer, one stream, n_tokens query tokens. Strides are in elements.
 *
 *   s[h][t][j] = scale * <q[t][h], k[j][h / (n_heads / n_kv_heads)]>
 *   s = logit_softcap * tanh(s / logit_softcap)      when logit_softcap > 0
 *   s = s + slope(h) * mask[t][j]                    when mask is not NULL; slope is 1 unless max_bias > 0
 *   out[t][h] = sum_j e^(s_j - m) v[j] / (sum_j e^(s_j - m) + e^(sinks[h] - m)),  m = the largest exponent
 *
 * with ALiBi slopes as in Press et al. 2022: with n = 2^floor(log2 n_heads), slope(h) = 2^(-max_bias (h+1) / n)
 * for h < n and 2^(-max_bias (2 (h-n) + 1) / (2 n)) beyond. A row whose every cell is masked gives zeros. */
typedef struct kvant_attention_args {
    size_t size; /* set by the caller to sizeof(kvant_attention_args) */
    const kvant_cells *k;
    const kvant_cells *v; /* same n_kv_heads as k; head_dim may differ */
    uint32_t stream;
    uint32_t n_cells; /* cells 0 .. n_cells - 1 of the stream take part */
    uint32_t n_tokens;
    uint32_t n_heads; /* a multiple of n_kv_heads */
    const float *q;   /* n_tokens x n_heads x head_dim of k */
    size_t q_token_stride, q_head_stride;
    const uint16_t *mask; /* n_tokens x n_cells of fp16, -inf hides; NULL: every cell is visible */
    size_t mask_token_stride;
    const float *sinks; /* n_heads extra logits, or NULL */
    float scale;
    float logit_softcap; /* 0: none */
    float max_bias;      /* 0: no ALiBi */
    float *out;          /* n_tokens x n_heads x head_dim of v */
    size_t out_token_stride, out_head_stride;
    uint32_t n_threads; /* at least 1 */
    bool fp32;          /* unpack pages to fp32 and multiply in fp32 where integer products of their codes would
                         * serve: up to several times slower, without the rounding of queries and weights */
} kvant_attention_args;

/* Bytes of workspace that kvant_attention needs for these arguments (0 when they are not valid). */
KVANT_API size_t kvant_attention_workspace(const kvant_attention_args *args);

/* Computes out. workspace: at least kvant_attention_workspace bytes, aligned to 64, owned by this call while
 * it runs. Calls with different workspaces and outputs may run in parallel. */
KVANT_API kvant_status kvant_attention(const kvant_attention_args *args, void *workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif

#endif /* KVANT_ATTENTION_H */
