/* blocks_c.c - attention on rows of ggml's block formats in portable C, the reference for every
 * level. */
#include <string.h>

#include "kernels.h"

KVANT_BLOCK_SCORES_FN(kvant_block_scores_c)
{
    float x[KVANT_BLOCK_MAX_HEAD_DIM];
    for (uint32_t t = 0; t < page->n_tokens; t++) {
        kvant_block_decode(page->type, page->rows + t * page->stride, page->head_dim, x);
        for (uint32_t i = 0; i < n; i++) {
            float sum = 0;
            for (uint32_t c = 0; c < page->head_dim; c++)
                sum += q[i * q_stride + c] * x[c];
            scores[i * KVANT_PAGE_TOKENS + t] = sum;
        }
    }
}

void kvant_block_sums_by(KVANT_MATMUL_FN((*matmul)), const kvant_block_page *page, const float *w,
                         float *sums, size_t sums_stride, uint32_t n)
{
    _Alignas(64) float x[KVANT_BLOCK_MAX_HEAD_DIM];
    for (uint32_t t = 0; t < page->n_tokens; t++) {
        float any = 0;
        for (uint32_t i = 0; i < n; i++)
            any += w[i * KVANT_PAGE_TOKENS + t];
        if (any == 0)
            continue;
        kvant_block_decode(page->type, page->rows + t * page->stride, page->head_dim, x);
        matmul(w + t, KVANT_PAGE_TOKENS, x, page->head_dim, sums, sums_stride, n, 1,
               page->head_dim);
    }
}

KVANT_BLOCK_SUMS_FN(kvant_block_sums_c)
{
    kvant_block_sums_by(kvant_matmul_c, page, w, sums, sums_stride, n);
}

KVANT_BLOCK_TILE_FN(kvant_block_rows_tile_c)
{
    for (uint32_t t = 0; t < page->n_tokens; t++)
        kvant_block_decode(page->type, page->rows + t * page->stride, page->head_dim,
                           tile + t * page->head_dim);
    memset(tile + page->n_tokens * page->head_dim, 0,
           (KVANT_PAGE_TOKENS - page->n_tokens) * page->head_dim * sizeof *tile);
}

KVANT_BLOCK_TILE_FN(kvant_block_columns_tile_c)
{
    float x[KVANT_BLOCK_MAX_HEAD_DIM];
    memset(x, 0, sizeof x);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        if (t < page->n_tokens)
            kvant_block_decode(page->type, page->rows + t * page->stride, page->head_dim, x);
        for (uint32_t c = 0; c < page->head_dim; c++)
            tile[(size_t)c * KVANT_PAGE_TOKENS + t] = t < page->n_tokens ? x[c] : 0;
    }
}
