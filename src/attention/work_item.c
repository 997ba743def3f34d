/* work_item.c - see work_item.h.
 *
 * Masks are read once per (token, page) for all heads. A page that is masked for every token of the
 * tile is not unpacked, which makes causal prefill and sliding windows cheap. */
#include "work_item.h"

#include <math.h>
#include <string.h>

#include "../base/attributes.h"

#define HALF_MINUS_INF 0xfc00u /* minus infinity as fp16 */

typedef enum visibility { ALL_VISIBLE, ALL_HIDDEN, MIXED } visibility;

/* Lays out the work item's buffers in scratch. */
static void bind(const kvant_attention_plan *plan, kvant_attention_item *item, float *scratch)
{
    size_t rows = kvant_attention_rows(plan), padded_rows = (rows + 15) / 16 * 16;
    item->k_tile = scratch;
    item->v_tile = item->k_tile + (size_t)KVANT_PAGE_TOKENS * plan->k_dim;
    item->scores = item->v_tile + (size_t)KVANT_PAGE_TOKENS * plan->v_dim;
    scratch = item->scores + rows * KVANT_PAGE_TOKENS;
    for (uint32_t v = 0; v < plan->v_transforms.n; v++, scratch += rows * plan->v_dim)
        item->sums[v] = scratch;
    item->mask = scratch;
    item->max = item->mask + (size_t)plan->tile_queries * KVANT_PAGE_TOKENS;
    scratch = item->max + padded_rows;
    for (uint32_t v = 0; v < plan->v_transforms.n; v++, scratch += padded_rows)
        item->totals[v] = scratch;
    item->centers = scratch;
    scratch += plan->centered ? plan->k_views.n * rows * KVANT_ATTENTION_CHUNK : 0;
    item->some_scores = scratch;
    scratch += plan->mixed ? rows * KVANT_PAGE_TOKENS : 0;
    item->chunks = (uint32_t *)(void *)scratch;
    item->taken = item->chunks + plan->k_views.n;
    item->placed = item->taken + plan->k_views.n;
    memset(item->chunks, 0, kvant_attention_ready_floats(plan) * sizeof *item->chunks);
    scratch += kvant_attention_ready_floats(plan);
    item->own = scratch;
    scratch += padded_rows * plan->own_per_row;
    kvant_attention_codes_bind(plan, item->kv_head, &item->codes, scratch);
}

static float slope_of(const kvant_attention_problem *p, uint32_t head)
{
    if (!(p->max_bias > 0))
        return 1;
    uint32_t n = 1;
    while (2 * n <= p->n_heads)
        n *= 2;
    double exponent = head < n ? (head + 1.0) / n : (2.0 * (head - n) + 1) / (2.0 * n);
    return (float)exp2(-(double)p->max_bias * exponent);
}

/* Finds out whether n halves of a mask are all zero or all -inf, the two cases that need no
 * conversion. Inline, so that n is a constant for whole pages, and with 16-bit numbers, so that
 * compilers process 8 at a time. */
KVANT_INLINE visibility look_at(const uint16_t *half, uint32_t n)
{
    uint16_t some = 0, other = 0;
    for (uint32_t t = 0; t < n; t++)
        some |= half[t];
    if (some == 0)
        return ALL_VISIBLE;
    for (uint32_t t = 0; t < n; t++)
        other |= (uint16_t)(half[t] ^ HALF_MINUS_INF);
    return other == 0 ? ALL_HIDDEN : MIXED;
}

/* The tokens first .. end - 1 of a page that causality, window and length let a query token see. */
typedef struct span {
    uint32_t first, end;
} span;

static span visible_span(const kvant_attention_problem *p, uint32_t query, uint32_t page)
{
    uint64_t first = 0, end = p->n_tokens, at = (uint64_t)page * KVANT_PAGE_TOKENS;
    uint64_t seen = (uint64_t)p->n_tokens + query + 1; /* position + 1 + n_queries */
    if (p->causal)
        end = seen - p->n_queries;
    if (p->window && seen > (uint64_t)p->n_queries + p->window)
        first = seen - p->n_queries - p->window;
    first = first > at ? first - at : 0;
    end = end > at ? end - at : 0;
    end = end < KVANT_PAGE_TOKENS ? end : KVANT_PAGE_TOKENS;
    return (span){ (uint32_t)(first < end ? first : end), (uint32_t)end };
}

/* Fills the mask for ALiBi without the caller's mask: minus the distance from the query token. */
static void fill_distances(const kvant_attention_plan *plan, uint32_t query, uint32_t page,
                           span seen, float *mask)
{
    const kvant_attention_problem *p = &plan->problem;
    double position = (double)p->n_tokens - p->n_queries + query;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        double token = (double)page * KVANT_PAGE_TOKENS + t;
        mask[plan->reader->in_order ? t : kvant_token_position(t)] =
            t >= seen.first && t < seen.end ? (float)(token - position) : -INFINITY;
    }
}

/* Reads one query token's mask for a page, in tile order. */
static visibility read_mask(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                            uint32_t query, uint32_t page, float *mask)
{
    static const uint16_t no_mask[KVANT_PAGE_TOKENS];
    const kvant_attention_problem *p = &plan->problem;
    _Alignas(16) uint16_t half[KVANT_PAGE_TOKENS];
    span seen = visible_span(p, query, page);
    uint32_t n = seen.end - seen.first;
    if (n == 0)
        return ALL_HIDDEN;
    if (!p->mask && p->max_bias > 0) {
        fill_distances(plan, query, page, seen, mask);
        return MIXED;
    }
    const uint16_t *row =
        p->mask ? p->mask + query * p->mask_token_stride + (size_t)page * KVANT_PAGE_TOKENS
                : no_mask;
    visibility v =
        n < KVANT_PAGE_TOKENS ? look_at(row + seen.first, n) : look_at(row, KVANT_PAGE_TOKENS);
    if (p->mask) { /* the mask's rows lie too far apart for the hardware to prefetch */
        KVANT_PREFETCH(row + KVANT_PAGE_TOKENS);
        KVANT_PREFETCH(row + 3 * KVANT_PAGE_TOKENS / 2);
        KVANT_PREFETCH(row + 2 * KVANT_PAGE_TOKENS - 1);
    }
    if (v == ALL_HIDDEN || (v == ALL_VISIBLE && n == KVANT_PAGE_TOKENS))
        return v;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        half[t] = HALF_MINUS_INF;
    memcpy(half + seen.first, row + seen.first, n * sizeof *half);
    if (plan->reader->in_order)
        kernels->half_to_float(half, mask, KVANT_PAGE_TOKENS);
    else
        kernels->token_halves(half, mask);
    return MIXED;
}

uint64_t kvant_attention_seen(const kvant_attention_plan *plan, uint32_t page, uint64_t until)
{
    const kvant_attention_problem *p = &plan->problem;
    uint64_t seen = 0;
    /* the last query token sees most */
    for (uint32_t query = p->n_queries; query-- && !(seen & until);) {
        const span some = visible_span(p, query, page);
        const uint16_t *row =
            p->mask ? p->mask + query * p->mask_token_stride + (size_t)page * KVANT_PAGE_TOKENS
                    : NULL;
        if (row && look_at(row + some.first, some.end - some.first) == ALL_HIDDEN)
            continue;
        for (uint32_t t = some.first; t < some.end; t++)
            seen |= (uint64_t)(!row || row[t] != HALF_MINUS_INF) << t;
    }
    return seen;
}

static void apply_softcap(float *scores, float softcap, float shift)
{
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        scores[t] = softcap * tanhf(scores[t] + shift);
}

/* Scales a row's sums and totals to a larger maximum. */
static void raise_max(const kvant_attention_plan *plan, kvant_attention_item *item, uint32_t row,
                      float max)
{
    float factor = expf(item->max[row] - max);
    for (uint32_t v = 0; v < plan->v_transforms.n; v++) {
        float *sums = item->sums[v] + (size_t)row * plan->v_dim;
        for (uint32_t j = 0; j < plan->v_dim; j++)
            sums[j] *= factor;
        item->totals[v][row] *= factor;
    }
    item->max[row] = max;
}

/* Replaces a row's scores, the largest of which is page_max, by weights e^(s + offset - max). Some
 * token is visible, so the maximum is finite unless visible scores are not. In that case the row's
 * total becomes NaN, and so does its output (attention.c). */
static void soften_row(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                       kvant_attention_item *item, uint32_t row, float page_max, float offset,
                       float *scores)
{
    if (!isfinite(page_max)) {
        memset(scores, 0, KVANT_PAGE_TOKENS * sizeof *scores);
        item->totals[item->v_transform][row] = NAN;
        return;
    }
    if (page_max + offset > item->max[row])
        raise_max(plan, item, row, page_max + offset);
    item->totals[item->v_transform][row] +=
        kernels->exp_sum(scores, KVANT_PAGE_TOKENS, item->max[row] - offset);
}

static void soften_query(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         kvant_attention_item *item, uint32_t query, visibility seen)
{
    const kvant_attention_problem *p = &plan->problem;
    const float *mask = seen == MIXED ? item->mask + (size_t)query * KVANT_PAGE_TOKENS : NULL;
    for (uint32_t g = 0; g < plan->group_heads; g++) {
        uint32_t row = query * plan->group_heads + g, head = item->kv_head * plan->group_heads + g;
        float *scores = item->scores + (size_t)row * KVANT_PAGE_TOKENS;
        float offset = item->page_offsets ? item->page_offsets[row * item->offset_stride]
                                          : kvant_item_offsets(plan, item)[row];
        if (seen == ALL_HIDDEN) {
            memset(scores, 0, KVANT_PAGE_TOKENS * sizeof *scores);
            continue;
        }
        if (p->logit_softcap > 0) {
            apply_softcap(scores, p->logit_softcap, offset);
            offset = 0;
        }
        soften_row(plan, kernels, item, row, kernels->mask_scores(scores, mask, slope_of(p, head)),
                   offset, scores);
    }
}

void kvant_attention_score_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                kvant_attention_item *item)
{
    memset(item->scores, 0, (size_t)item->n_rows * KVANT_PAGE_TOKENS * sizeof(float));
    kernels->matmul(kvant_item_queries(plan, item), plan->k_dim, item->k_tile, KVANT_PAGE_TOKENS,
                    item->scores, KVANT_PAGE_TOKENS, item->n_rows, plan->k_dim, KVANT_PAGE_TOKENS);
}

void kvant_attention_add_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_item *item)
{
    kernels->matmul(item->scores, KVANT_PAGE_TOKENS, item->v_tile, plan->v_dim,
                    item->sums[item->v_transform], plan->v_dim, item->n_rows, KVANT_PAGE_TOKENS,
                    plan->v_dim);
}

/* A work item that has all pages of its query tokens prepares their queries itself. Otherwise
 * kvant_attention_run has prepared them, because several work items share them. */
void kvant_attention_accept_view(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_item *item)
{
    if (item->taken[item->k_view])
        return;
    item->taken[item->k_view] = 1;
    if (plan->n_splits == 1)
        plan->reader->queries(plan, kernels, item->k_view, item->first_query, item->n_queries,
                              item->kv_head, kvant_item_queries(plan, item),
                              kvant_item_offsets(plan, item),
                              plan->centered ? kvant_item_products(plan, item) : NULL);
    if (plan->reader->take)
        plan->reader->take(plan, kernels, item);
}

static void run_page(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                     kvant_attention_item *item, uint32_t page, bool weighted)
{
    visibility seen[KVANT_ATTENTION_MAX_ROWS];
    bool any = false;
    if (plan->reader->open && !plan->reader->open(plan, item, page))
        return;
    for (uint32_t t = 0; t < item->n_queries; t++) {
        seen[t] = read_mask(plan, kernels, item->first_query + t, page,
                            item->mask + (size_t)t * KVANT_PAGE_TOKENS);
        any |= seen[t] != ALL_HIDDEN;
    }
    if (!any)
        return;
    kvant_attention_accept_view(plan, kernels, item);
    plan->reader->score(plan, kernels, item, page);
    for (uint32_t t = 0; t < item->n_queries; t++)
        soften_query(plan, kernels, item, t, seen[t]);
    (weighted ? plan->reader->add_weighted : plan->reader->add)(plan, kernels, item, page);
}

static void run_pages(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                      kvant_attention_item *item, bool weighted)
{
    for (uint32_t v = 0; v < plan->v_transforms.n; v++) {
        memset(item->sums[v], 0, (size_t)item->n_rows * plan->v_dim * sizeof(float));
        memset(item->totals[v], 0, item->n_rows * sizeof(float));
    }
    for (uint32_t row = 0; row < item->n_rows; row++)
        item->max[row] = -INFINITY;
    for (uint32_t page = item->first_page; page < item->end_page; page++)
        run_page(plan, kernels, item, page, weighted);
}

static bool has_finite_sums(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                            const kvant_attention_item *item)
{
    bool finite = true;
    for (uint32_t v = 0; v < plan->v_transforms.n; v++)
        finite &=
            kernels->magnitude(item->sums[v], item->n_rows * plan->v_dim) < KVANT_INFINITY_BITS;
    return finite;
}

/* Weight 0 times NaN is NaN. So a value that one query row sees can make the sums of another row
 * NaN that does not see it. If sums are not finite, the work item runs again and leaves such values
 * out. The check costs nearly nothing. */
void kvant_attention_item_run(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_item *item, float *scratch)
{
    bind(plan, item, scratch);
    run_pages(plan, kernels, item, false);
    if (plan->reader->add_weighted && !has_finite_sums(plan, kernels, item))
        run_pages(plan, kernels, item, true);
}
