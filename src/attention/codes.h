/* codes.h - attention on the codes of pages: scores and weighted sums are products of codes and
 * 16-bit integers (kernels.h). No page is unpacked. This works for codecs that offer such products,
 * and not when the caller wants fp32.
 *
 * Both products multiply a row of numbers a (a query, or weights) with the matrix of a page.
 * Columns are channels of K or tokens of V. Lines (scale, zero point) belong to rows or to columns
 * of this matrix:
 *
 *   by row a becomes integers once: the queries of a work item, or the weights of a page
 *   by column   a times the scales of each band of rows becomes integers, for every page
 *
 * A step is the largest magnitude of the numbers divided by the product's limit. An integer is off
 * by at most half a step. If a times the scale is rounded, the error grows by (limit 2^-22) steps.
 * With d columns and codes of magnitude at most m:
 *
 *   by row      a sum is off by at most d m / 2 steps x scale of its row; each band has one scale
 *   by column   a sum is off by at most d m / 2 steps
 *
 * Roundings are independent, so the standard deviation is m sqrt(d / 12) of these steps. Zero
 * points are multiplied by the integers (by row) or by a (by column). The integers of a codebook
 * are within half a step of the codec's numbers. Here a step is the largest number /
 * KVANT_CODE_VALUE_MAX. The integers of chunks are within kvant_code_values.error steps. */
#pragma once

#include "plan.h"

/* n_rows rows of numbers a as integers. */
typedef struct kvant_attention_integers {
    int16_t *x;   /* [row][row band][column] */
    float *steps; /* [row][band] */
    /* [row][row band]: the factor of a zero point, or the sum of a times zero points */
    float *zeros;
    int32_t *sums; /* [row][column tile]: sum of the integers */
} kvant_attention_integers;

/* The queries of a work item for one view. */
typedef struct kvant_attention_query {
    float *rows; /* n_rows x columns of K, in the order of positions */
    kvant_attention_integers integers;
} kvant_attention_query;

typedef struct kvant_attention_codes {
    bool k_suits, v_suits; /* whether sealed pages of the kv head are multiplied as codes */
    /* one kvant_attention_query per view (plan.h) with its arrays, view_floats each */
    float *views;
    size_t view_floats;
    kvant_attention_integers weight;
    /* the lines of the current page, which are too large for a small stack */
    kvant_code_lines *lines;
    int32_t *dots; /* n_rows x 64 or v_dim, in whole blocks of 64 */
} kvant_attention_codes;

/* Floats of scratch that bind needs for any kv head: 0 when no codec is multiplied as codes. */
size_t kvant_attention_codes_floats(const kvant_attention_plan *plan);
void kvant_attention_codes_bind(const kvant_attention_plan *plan, uint32_t kv_head,
                                kvant_attention_codes *codes, float *scratch);

/* Prepares a work item's queries, n_rows x k_dim, for pages of a codec and one view. */
void kvant_attention_codes_set_queries(const kvant_attention_plan *plan,
                                       const kvant_kernels *kernels, const kvant_codec *codec,
                                       kvant_attention_codes *codes, uint32_t view,
                                       const float *queries, uint32_t n_rows);

/* scores = queries x K of the page, n_rows x 64. */
void kvant_attention_codes_score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_codes *codes, uint32_t view, kvant_page_ref k,
                                 uint32_t n_rows, float *scores);

/* sums += weights x V of the page; weights: n_rows x 64, sums: n_rows x v_dim. */
void kvant_attention_codes_add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_codes *codes, kvant_page_ref v, uint32_t n_rows,
                               const float *weights, float *sums);
