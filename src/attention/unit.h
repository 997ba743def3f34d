/* unit.h - one unit of work: a tile of query tokens, the heads of one kv head, a range of pages. */
#ifndef KVANT_ATTENTION_UNIT_H
#define KVANT_ATTENTION_UNIT_H

#include "codes.h"

/* Online softmax state of a unit's rows. A row is (token, head of the group), token major. */
typedef struct kvant_attention_unit {
    uint32_t kv_head, first_token, n_tokens, first_page, end_page;
    uint32_t n_rows;
    const float *queries; /* n_rows x k_dim */
    float *sums;          /* n_rows x v_dim, in the order of unpacked tiles, not divided */
    float *max, *total;   /* of each row */
    float *k_tile, *v_tile, *scores, *mask;
    kvant_attention_codes codes;
} kvant_attention_unit;

/* What a unit reads: pages of 64 tokens, of a kvant cache (kvant_attention_cells_reader) or of anything else that can do this.
 * Functions may be called from several threads at once. */
typedef struct kvant_attention_reader {
    bool in_order; /* tokens of scores are in order, not at kvant_token_position */
    /* out[k_dim] = the query of (token, head) as score takes it, times plan->score_scale. */
    void (*query)(const kvant_attention_plan *plan, uint32_t token, uint32_t head, float *out);
    /* out = sums[v_dim] x inverse, in the order of channels; weight: the part of the weights that is on values. */
    void (*output)(const kvant_attention_plan *plan, uint32_t head, const float *sums, float inverse, float weight,
                   float *out);
    /* What the scores of (token of the unit, head) lack, which only softmax ignores; NULL: nothing. */
    float (*score_offset)(const kvant_attention_plan *plan, const kvant_attention_unit *unit, uint32_t token,
                          uint32_t head);
    /* Before the first page; NULL: nothing to do. */
    void (*begin)(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit);
    /* unit->scores[row][64] = queries x K of the page, anything for tokens beyond the last cell. */
    void (*score)(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit,
                  uint32_t page);
    /* unit->sums[row][v_dim] += weights (in unit->scores) x V of the page. */
    void (*add)(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit,
                uint32_t page);
} kvant_attention_reader;

/* Points the unit's buffers into scratch (plan->scratch_stride floats). */
void kvant_attention_unit_bind(const kvant_attention_plan *plan, kvant_attention_unit *unit, float *scratch);

/* Runs over the unit's pages. */
void kvant_attention_unit_run(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_unit *unit);

/* For readers: unit->scores = queries x k_tile, k_dim x 64; unit->sums += weights x v_tile, 64 x v_dim. */
void kvant_attention_score_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                kvant_attention_unit *unit);
void kvant_attention_add_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_unit *unit);

/* The reader's functions for cells that work on units. */
float kvant_attention_cells_offset(const kvant_attention_plan *plan, const kvant_attention_unit *unit,
                                   uint32_t token, uint32_t head);
void kvant_attention_cells_begin(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_unit *unit);
void kvant_attention_cells_score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_unit *unit, uint32_t page);
void kvant_attention_cells_add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_unit *unit, uint32_t page);

/* Runs a plan whose reader is set, on plan->total floats. */
void kvant_attention_run(const kvant_attention_plan *plan, float *workspace);

/* ALiBi slope of a query head. */
float kvant_attention_slope(const kvant_attention_args *args, uint32_t head);

#endif
