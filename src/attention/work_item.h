/* work_item.h - one work item of attention: a tile of query tokens, the heads of one kv head, a
 * range of pages. */
#pragma once

#include "codes.h"

/* The kernel magnitude returns this when a number is infinite, and more when a number is NaN. */
#define KVANT_INFINITY_BITS 0x7f800000u

/* The lines of a page that are to be prefetched. */
typedef struct kvant_ahead {
    const uint8_t *at, *end;
} kvant_ahead;

/* The online softmax state of a work item's rows. A row is (query token, head of the group), token
 * major. There are separate sums and totals per transform of the values, because sums of different
 * transforms can only be added after each has been transformed back. */
typedef struct kvant_attention_item {
    uint32_t kv_head, first_query, n_queries, first_page, end_page;
    uint32_t n_rows;
    float *queries, *offsets, *products; /* the work item's rows in the plan's arrays, in view 0 */
    /* per view: the offsets of a chunk's pages, rows x KVANT_ATTENTION_CHUNK */
    float *centers;
    const float *phases; /* the plan's phases */
    uint32_t *chunks;    /* per view: 1 + the chunk that its `centers` belong to; 0: none yet */
    uint32_t *taken;     /* per view: whether its queries are ready */
    uint32_t *placed;    /* per view: whether its queries are ready for products with codes */
    /* per transform of the values: n_rows x v_dim, in the order of unpacked tiles */
    float *sums[KVANT_MAX_TRANSFORMS];
    float *max;                          /* per row */
    float *totals[KVANT_MAX_TRANSFORMS]; /* per transform of the values: n_rows */
    float *k_tile, *v_tile, *scores, *mask;
    float *some_scores; /* if the plan is mixed: scores of the slots with one shift, n_rows x 64 */
    /* the reader's scratch: plan->own_per_row floats for each row, rounded up to 16 rows */
    float *own;
    uint32_t k_view, v_transform; /* numbers of the current page's view and transform */
    /* Offsets of the current page, one per row, offset_stride apart. They are the offsets of its
     * view unless its block has its own centre. */
    const float *page_offsets;
    size_t offset_stride;
    kvant_attention_codes codes;
    kvant_ahead ahead[2]; /* of keys and of values */
} kvant_attention_item;

/* The functions that read pages of 64 tokens for a work item, from tensors or any other source.
 * They may be called from several threads at once. */
typedef struct kvant_attention_reader {
    bool in_order; /* scores are in the order of tokens, not at kvant_token_position */
    /* Writes the query rows of a kv head (plan.h) for n query tokens from `query` on. A row in
     * `out` has k_dim numbers, transformed for the view and multiplied by plan->score_scale.
     * `offsets` gets, per row, the term that the scores of the view's pages lack; it is the same
     * for all keys. `products` is for blocks with their own centres, and NULL if the plan has
     * none. */
    void (*queries)(const kvant_attention_plan *plan, const kvant_kernels *kernels, uint32_t view,
                    uint32_t query, uint32_t n, uint32_t kv_head, float *out, float *offsets,
                    float *products);
    /* Fills plan->phases; called when the plan is centered. */
    void (*phases)(const kvant_attention_plan *plan, float *phases);
    /* Transforms sums[v_dim] x inverse back and adds them to out, in the order of channels. weight:
     * the part of the weights that falls on values of this transform. */
    void (*output)(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                   uint32_t transform_id, uint32_t head, const float *sums, float inverse,
                   float weight, float *out);
    /* Sets the work item's view and value transform for a page. Returns false when the page is
     * hidden. NULL: there is only one view and one transform. */
    bool (*open)(const kvant_attention_plan *plan, kvant_attention_item *item, uint32_t page);
    /* Called before the work item runs, and before its queries are ready; NULL: nothing to do. */
    void (*begin)(const kvant_attention_plan *plan, kvant_attention_item *item);
    /* Called before the first page of the current view, when its queries are ready; NULL: nothing
     * to do. */
    void (*take)(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                 kvant_attention_item *item);
    /* Computes unit->scores[row][64] = queries x K of the page; scores of tokens beyond the last
     * are undefined. */
    void (*score)(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                  kvant_attention_item *item, uint32_t page);
    /* Adds weights (in unit->scores) x V of the page to the sums of the page's transform. */
    void (*add)(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                kvant_attention_item *item, uint32_t page);
    /* The same, but rows of V whose weight is 0 take no part, whatever they hold. The work item
     * runs again with this function when its sums are not finite. NULL: the reader's values are
     * always finite. */
    void (*add_weighted)(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         kvant_attention_item *item, uint32_t page);
} kvant_attention_reader;

/* Runs the work item over its pages, with buffers in scratch (plan->scratch_stride floats). */
void kvant_attention_item_run(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_item *item, float *scratch);

/* Readers call this before they score a page in the view that open sets. Afterwards the queries of
 * the current view are ready. */
void kvant_attention_accept_view(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_item *item);

/* The slots of a page that some query token sees, as a bit mask. The function may stop as soon as
 * it has found one slot of `until`. */
uint64_t kvant_attention_seen(const kvant_attention_plan *plan, uint32_t page, uint64_t until);

/* The part of a plan's array that belongs to the current view. */
static inline float *kvant_item_queries(const kvant_attention_plan *plan,
                                        const kvant_attention_item *item)
{
    return item->queries + item->k_view * plan->n_rows * plan->k_dim;
}

static inline float *kvant_item_offsets(const kvant_attention_plan *plan,
                                        const kvant_attention_item *item)
{
    return item->offsets + item->k_view * plan->n_rows;
}

static inline float *kvant_item_products(const kvant_attention_plan *plan,
                                         const kvant_attention_item *item)
{
    return item->products + item->k_view * plan->n_rows * plan->k_dim;
}

static inline float *kvant_item_centers(const kvant_attention_plan *plan,
                                        const kvant_attention_item *item)
{
    return item->centers +
           (size_t)item->k_view * kvant_attention_rows(plan) * KVANT_ATTENTION_CHUNK;
}

/* Unpacks a page of a tensor to floats, in the tile of kernels.h. */
static inline void kvant_attention_unpack(const kvant_kernels *kernels, const kvant_page_ref *ref,
                                          float *tile)
{
    if (ref->open)
        kvant_codec_unpack_open(ref->codec, kernels, ref->page, tile);
    else
        ref->codec->quantizer->unpack(ref->codec, kernels, ref->page, tile);
}

/* For readers. The first function computes unit->scores = queries x k_tile, which is k_dim x 64.
 * The second adds weights x v_tile, which is 64 x v_dim, to the sums of the page's transform. */
void kvant_attention_score_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                kvant_attention_item *item);
void kvant_attention_add_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_item *item);

/* Runs a plan whose reader is set, on plan->total floats. Returns KVANT_ERR_ARGUMENT when the
 * workspace is too small or not aligned. */
kvant_status kvant_attention_run(const kvant_attention_plan *plan, void *workspace, size_t bytes);
