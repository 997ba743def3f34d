/* unit.h - one unit of work: a tile of query tokens, the heads of one kv head, a range of pages. */
#pragma once

#include "codes.h"

/* The kernel magnitude returns at least this when a number is infinite, more when one is NaN. */
#define KVANT_INFINITY_BITS 0x7f800000u

/* Online softmax state of a unit's rows. A row is (query token, head of the group), token major.
 * Sums and totals are kept per version of the values, because values of different versions add up
 * only after each version's way back. */
typedef struct kvant_attention_unit {
    uint32_t kv_head, first_query, n_queries, first_page, end_page;
    uint32_t n_rows;
    float *queries, *offsets, *products; /* the unit's rows in the plan's arrays, in view 0 */
    float *centers;      /* per view: offsets of a chunk's pages, rows x KVANT_ATTENTION_CHUNK */
    const float *phases; /* the plan's */
    uint32_t *chunks;    /* per view: 1 + the chunk that its centers are of; 0: none yet */
    uint32_t *taken;     /* per view: whether the reader has seen its queries */
    /* per version of the values: n_rows x v_dim, in the order of unpacked tiles */
    float *sums[KVANT_MAX_VERSIONS];
    float *max;                        /* per row */
    float *totals[KVANT_MAX_VERSIONS]; /* per version of the values: n_rows */
    float *k_tile, *v_tile, *scores, *mask;
    float *some_scores; /* if the plan is mixed: of slots with one shift, n_rows x 64 */
    float *own; /* the reader's: plan->own_per_row floats for each row, rounded up to 16 rows */
    uint32_t k_view, v_version; /* numbers of those of the page at hand */
    /* Of the page at hand, unless they are its view's: a row each, offset_stride apart. */
    const float *page_offsets;
    size_t offset_stride;
    kvant_attention_codes codes;
} kvant_attention_unit;

/* What a unit reads: pages of 64 tokens, of tensors or of anything else that can do this. Functions
 * may be called from several threads at once. */
typedef struct kvant_attention_reader {
    bool in_order; /* tokens of scores are in order, not at kvant_token_position */
    /* out = the query rows of a kv head (plan.h) of n query tokens from the given one on, k_dim
     * numbers each, as score takes them for the view, times plan->score_scale. offsets: what
     * scores of the view's pages lack, a term that is equal for all of its keys. products: for
     * blocks with centres of their own, if the plan has any. */
    void (*queries)(const kvant_attention_plan *plan, const kvant_kernels *kernels, uint32_t view,
                    uint32_t query, uint32_t n, uint32_t kv_head, float *out, float *offsets,
                    float *products);
    /* Of a plan that is centered: plan->phases. */
    void (*phases)(const kvant_attention_plan *plan, float *phases);
    /* out += sums[v_dim] x inverse on its way back, in the order of channels; weight: the part of
     * the weights that is on values of the version. */
    void (*output)(const kvant_attention_plan *plan, const kvant_kernels *kernels, uint32_t version,
                   uint32_t head, const float *sums, float inverse, float weight, float *out);
    /* Sets the unit's view and version for a page; NULL: there is one. False when the page is
     * hidden. */
    bool (*open)(const kvant_attention_plan *plan, kvant_attention_unit *unit, uint32_t page);
    /* Before the first page; NULL: nothing to do. */
    void (*begin)(const kvant_attention_plan *plan, const kvant_attention_unit *unit);
    /* Before the first page of the unit's view, when its queries are there; NULL: nothing to do. */
    void (*take)(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                 kvant_attention_unit *unit);
    /* unit->scores[row][64] = queries x K of the page, anything for tokens beyond the last. */
    void (*score)(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                  kvant_attention_unit *unit, uint32_t page);
    /* The version's sums += weights (in unit->scores) x V of the page. */
    void (*add)(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                kvant_attention_unit *unit, uint32_t page);
    /* As add, but rows of V whose weight is 0 take no part, whatever they hold. The unit runs again
     * with this function when its sums are not finite. NULL: the reader's values always are. */
    void (*add_weighted)(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         kvant_attention_unit *unit, uint32_t page);
} kvant_attention_reader;

/* Runs over the unit's pages, with buffers in scratch (plan->scratch_stride floats). */
void kvant_attention_unit_run(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_unit *unit, float *scratch);

/* For readers: the queries of the unit's view are there from now on. Called before score for the
 * view that open sets. */
void kvant_attention_take_view(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_unit *unit);

/* The slots of a page that some query token sees, a bit each, of `until` at least one if it sees
 * any. */
uint64_t kvant_attention_seen(const kvant_attention_plan *plan, uint32_t page, uint64_t until);

/* The view's part of an array of the plan. */
static inline float *kvant_unit_queries(const kvant_attention_plan *plan,
                                        const kvant_attention_unit *unit)
{
    return unit->queries + unit->k_view * plan->n_rows * plan->k_dim;
}

static inline float *kvant_unit_offsets(const kvant_attention_plan *plan,
                                        const kvant_attention_unit *unit)
{
    return unit->offsets + unit->k_view * plan->n_rows;
}

static inline float *kvant_unit_products(const kvant_attention_plan *plan,
                                         const kvant_attention_unit *unit)
{
    return unit->products + unit->k_view * plan->n_rows * plan->k_dim;
}

static inline float *kvant_unit_centers(const kvant_attention_plan *plan,
                                        const kvant_attention_unit *unit)
{
    return unit->centers +
           (size_t)unit->k_view * kvant_attention_rows(plan) * KVANT_ATTENTION_CHUNK;
}

/* For readers of tensors: a page as floats, in the tile of kernels.h. */
static inline void kvant_attention_unpack(const kvant_kernels *kernels, const kvant_page_ref *ref,
                                          float *tile)
{
    if (ref->open)
        kvant_codec_unpack_open(ref->codec, kernels, ref->page, tile);
    else
        ref->codec->quantizer->unpack(ref->codec, kernels, ref->page, tile);
}

/* For readers: unit->scores = queries x k_tile, k_dim x 64; the version's sums += weights x v_tile,
 * 64 x v_dim. */
void kvant_attention_score_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                kvant_attention_unit *unit);
void kvant_attention_add_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_unit *unit);

/* Runs a plan whose reader is set, on plan->total floats. KVANT_ERR_ARGUMENT for a workspace that
 * does not do. */
kvant_status kvant_attention_run(const kvant_attention_plan *plan, void *workspace, size_t bytes);
