/* codes.h - attention on the codes of pages: scores and weighted sums as products of codes and 16-bit
 * integers (kernels.h), lines (scale, zero point) applied to sums or to what becomes integers. No number of a page is ever made.
 *
 * Both are a product of a row of numbers a, a query or weights, with a page's matrix (columns: channels of K, tokens of V). Where
 * lines are by row, a becomes integers once: of a unit's queries, of a page's weights. Where they are by column, a times the scales of
 * each band of rows does, for every page. An integer is off by half a step at most, a step being the row's largest magnitude / limit of
 * the codec's code_table, and (limit 2^-22) more where the product is rounded. So with values of magnitude at most m and d columns
 *
 *   by row      a sum is off by up to d m / 2 steps x scale of its row, each with its band's scale
 *   by column   by up to d m / 2 steps, where a step is the largest |a scale| / limit
 *
 * and, roundings being independent, by m sqrt(d / 12) of these as a standard deviation. Zero points are multiplied by the integers in the
 * first case (what is off then is a, not the page), by a in the second. Values of a codebook are within half a step, their largest
 * / KVANT_CODE_VALUE_MAX, of the codec's own; numbers of chunk codes within kvant_code_numbers.error steps of theirs. */
#ifndef KVANT_ATTENTION_CODES_H
#define KVANT_ATTENTION_CODES_H

#include "plan.h"

/* The integers of numbers, n_rows of them. */
typedef struct kvant_attention_integers {
    int16_t *x;    /* [row][band of rows][column] */
    float *steps;  /* [row][band] */
    float *zeros;  /* [row][band]: sum of a times zero points, or what these are multiplied by */
    int32_t *sums; /* [row][column tile]: of integers */
} kvant_attention_integers;

typedef struct kvant_attention_codes {
    float *queries[KVANT_MAX_VERSIONS]; /* per version of the keys: n_rows x columns of K, in the order of positions */
    kvant_attention_integers query[KVANT_MAX_VERSIONS], weight;
    int32_t *dots; /* n_rows x 64 or v_dim, in whole blocks of 64 */
} kvant_attention_codes;

/* Whether pages of a codec are multiplied as codes: not when the caller wants fp32. With many query rows those of several bands and of chunks are not: their
 * products take a pass over sums, roundings or looking codes up for every few rows, a tile of numbers one unpacking for all. */
bool kvant_attention_codes_suit(const kvant_attention_plan *plan, const kvant_codec *codec);

/* Floats of scratch that bind needs for any kv head: 0 where no codec suits. */
size_t kvant_attention_codes_floats(const kvant_attention_plan *plan);
void kvant_attention_codes_bind(const kvant_attention_plan *plan, uint32_t kv_head, kvant_attention_codes *codes,
                                float *scratch);

/* Takes a unit's queries, n_rows x k_dim, for pages of codec and of one version. */
void kvant_attention_codes_set_queries(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                       const kvant_codec *codec, kvant_attention_codes *codes, uint32_t version,
                                       const float *queries, uint32_t n_rows);

/* scores = queries x K of the page, n_rows x 64. */
void kvant_attention_codes_score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_codes *codes, uint32_t version, kvant_page_ref k, uint32_t n_rows,
                                 float *scores);

/* sums += weights x V of the page; weights: n_rows x 64, sums: n_rows x v_dim. */
void kvant_attention_codes_add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_codes *codes, kvant_page_ref v, uint32_t n_rows,
                               const float *weights, float *sums);

#endif
