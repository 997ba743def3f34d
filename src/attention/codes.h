/* codes.h - attention on the codes of pages: scores and weighted sums as products of codes and 16-bit integers (kernels.h),
 * scales applied to scores and weights. No number of a page is ever made.
 *
 * A query is rounded once to integers of a step of its own, the weights of a page times the values' scales to those of
 * another. With d channels the first adds at most sqrt(d) / (2 limit) |q| |k| scale to a score's error, the second at most half a
 * step, largest weight of the page / limit, to each weight; limit is that of the codec's code_table. Values of a codebook are
 * within half a step, their largest / KVANT_CODE_VALUE_MAX, of the codec's own. */
#ifndef KVANT_ATTENTION_CODES_H
#define KVANT_ATTENTION_CODES_H

#include "plan.h"

typedef struct kvant_attention_codes {
    int16_t *queries;               /* n_rows x k_dim in whole blocks of 64, in the order of positions */
    kvant_fixed_point *query_steps; /* of each row */
    kvant_fixed_point *weight_steps;
    int16_t *weights; /* n_rows x 64 */
    int32_t *dots;    /* n_rows x 64 or v_dim */
} kvant_attention_codes;

/* Floats of scratch that bind needs: 0 for plans that are not on codes. */
size_t kvant_attention_codes_floats(const kvant_attention_plan *plan);
void kvant_attention_codes_bind(const kvant_attention_plan *plan, kvant_attention_codes *codes, float *scratch);

/* Rounds a unit's queries, n_rows x k_dim. */
void kvant_attention_codes_set_queries(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                       kvant_attention_codes *codes, int32_t limit, const float *queries,
                                       uint32_t n_rows);

/* scores = queries x K of the page, n_rows x 64. */
void kvant_attention_codes_score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_codes *codes, kvant_page_ref k, uint32_t n_rows, float *scores);

/* sums += weights x V of the page; weights: n_rows x 64, sums: n_rows x v_dim. */
void kvant_attention_codes_add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_codes *codes, kvant_page_ref v, uint32_t n_rows,
                               const float *weights, float *sums);

#endif
