/* unit.c - see unit.h. Masks are read once a (token, page) for all heads; pages that every token of the tile masks are
 * not unpacked at all, which is what makes causal prefill and sliding windows cheap. */
#include "unit.h"

#include <math.h>
#include <string.h>

#include "../base/attributes.h"
#include "../base/half.h"

#define HALF_MINUS_INF 0xfc00u

typedef enum visibility { ALL_VISIBLE, ALL_HIDDEN, MIXED } visibility;

void kvant_attention_unit_bind(const kvant_attention_plan *plan, kvant_attention_unit *unit, float *scratch)
{
    size_t rows = kvant_attention_rows(plan), padded_rows = (rows + 15) / 16 * 16;
    unit->k_tile = scratch;
    unit->v_tile = unit->k_tile + (size_t)KVANT_PAGE_TOKENS * plan->k_dim;
    unit->scores = unit->v_tile + (size_t)KVANT_PAGE_TOKENS * plan->v_dim;
    unit->sums = unit->scores + rows * KVANT_PAGE_TOKENS;
    unit->mask = unit->sums + rows * plan->v_dim;
    unit->max = unit->mask + (size_t)plan->tile_tokens * KVANT_PAGE_TOKENS;
    unit->total = unit->max + padded_rows;
    kvant_attention_codes_bind(plan, unit->kv_head, &unit->codes, unit->total + padded_rows);
}

float kvant_attention_slope(const kvant_attention_args *args, uint32_t head)
{
    if (!(args->max_bias > 0))
        return 1;
    uint32_t n = 1;
    while (2 * n <= args->n_heads)
        n *= 2;
    double exponent = head < n ? (head + 1.0) / n : (2.0 * (head - n) + 1) / (2.0 * n);
    return (float)exp2(-(double)args->max_bias * exponent);
}

/* Zero everywhere, or -inf everywhere, of n halves: the two that need no numbers. Inline, so that n is a constant for whole pages,
 * and in 16 bits, so that compilers take 8 at a time. */
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

/* One token's mask for a page, in tile order; cells beyond the end are hidden. */
static visibility read_mask(const kvant_attention_plan *plan, const kvant_kernels *kernels, uint32_t token,
                            uint32_t page, float *mask)
{
    static const uint16_t no_mask[KVANT_PAGE_TOKENS];
    const kvant_attention_args *args = plan->args;
    _Alignas(16) uint16_t half[KVANT_PAGE_TOKENS];
    uint32_t first = page * KVANT_PAGE_TOKENS, left = args->n_cells - first;
    uint32_t n = left < KVANT_PAGE_TOKENS ? left : KVANT_PAGE_TOKENS;
    const uint16_t *row = args->mask ? args->mask + token * args->mask_token_stride + first : no_mask;
    visibility seen = n < KVANT_PAGE_TOKENS ? look_at(row, n) : look_at(row, KVANT_PAGE_TOKENS);
    if (args->mask) { /* its rows lie too far apart for the hardware to see where this goes */
        KVANT_PREFETCH(row + KVANT_PAGE_TOKENS);
        KVANT_PREFETCH(row + 3 * KVANT_PAGE_TOKENS / 2);
        KVANT_PREFETCH(row + 2 * KVANT_PAGE_TOKENS - 1);
    }
    if (seen == ALL_HIDDEN || (seen == ALL_VISIBLE && n == KVANT_PAGE_TOKENS))
        return seen;
    memcpy(half, row, n * sizeof *half);
    for (uint32_t t = n; t < KVANT_PAGE_TOKENS; t++)
        half[t] = HALF_MINUS_INF;
    if (plan->reader->in_order)
        kernels->half_to_float(half, mask, KVANT_PAGE_TOKENS);
    else
        kernels->token_halves(half, mask);
    return MIXED;
}

/* <q, c> / softcap x scale: the centre's part of a score, which only softmax ignores, not tanh before it. */
float kvant_attention_cells_offset(const kvant_attention_plan *plan, const kvant_attention_unit *unit,
                                   uint32_t token, uint32_t head)
{
    const kvant_attention_args *args = plan->args;
    const float *center = kvant_cells_head_affine(args->k, unit->kv_head).center;
    if (!center)
        return 0;
    uint32_t head_dim = args->k->codecs[unit->kv_head]->info.head_dim;
    const float *q = args->q + (unit->first_token + token) * args->q_token_stride + head * args->q_head_stride;
    float sum = 0;
    for (uint32_t i = 0; i < head_dim; i++)
        sum += q[i] * center[i];
    return sum * plan->score_scale;
}

static void apply_softcap(float *scores, float softcap, float shift)
{
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        scores[t] = softcap * tanhf(scores[t] + shift);
}

/* Turns a row's scores, the largest of which is page_max, into weights e^(s - max) and carries max, total and sums over to
 * the new maximum. */
static void soften_row(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit,
                       uint32_t row, float page_max, float *scores)
{
    if (page_max == -INFINITY) {
        memset(scores, 0, KVANT_PAGE_TOKENS * sizeof *scores);
        return;
    }
    if (page_max > unit->max[row]) {
        float factor = expf(unit->max[row] - page_max), *sums = unit->sums + (size_t)row * plan->v_dim;
        for (uint32_t j = 0; j < plan->v_dim; j++)
            sums[j] *= factor;
        unit->total[row] *= factor;
        unit->max[row] = page_max;
    }
    unit->total[row] += kernels->exp_sum(scores, KVANT_PAGE_TOKENS, unit->max[row]);
}

static void soften_token(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit,
                         uint32_t token, visibility seen)
{
    const kvant_attention_args *args = plan->args;
    const float *mask = seen == MIXED ? unit->mask + (size_t)token * KVANT_PAGE_TOKENS : NULL;
    for (uint32_t g = 0; g < plan->group_heads; g++) {
        uint32_t row = token * plan->group_heads + g, head = unit->kv_head * plan->group_heads + g;
        float *scores = unit->scores + (size_t)row * KVANT_PAGE_TOKENS;
        if (seen == ALL_HIDDEN) {
            memset(scores, 0, KVANT_PAGE_TOKENS * sizeof *scores);
            continue;
        }
        if (args->logit_softcap > 0)
            apply_softcap(scores, args->logit_softcap,
                          plan->reader->score_offset ? plan->reader->score_offset(plan, unit, token, head) : 0);
        float slope = kvant_attention_slope(args, head);
        soften_row(plan, kernels, unit, row, kernels->mask_scores(scores, mask, slope), scores);
    }
}

/* Kernels take a page's lines in an order that hardware does not foresee, and the next page of a kv head lies behind those of
 * the others. */
static void fetch_next(const kvant_attention_plan *plan, const kvant_cells *cells, const kvant_attention_unit *unit,
                       uint32_t page)
{
    if (page + 1 >= unit->end_page)
        return;
    kvant_page_ref next = kvant_cells_page(cells, plan->args->stream, page + 1, unit->kv_head);
    for (size_t i = 0; i < next.codec->info.page_bytes; i += 64)
        KVANT_PREFETCH((const uint8_t *)next.page + i);
}

void kvant_attention_score_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                kvant_attention_unit *unit)
{
    memset(unit->scores, 0, (size_t)unit->n_rows * KVANT_PAGE_TOKENS * sizeof(float));
    kernels->matmul(unit->queries, plan->k_dim, unit->k_tile, KVANT_PAGE_TOKENS, unit->scores, KVANT_PAGE_TOKENS,
                    unit->n_rows, plan->k_dim, KVANT_PAGE_TOKENS);
}

void kvant_attention_add_tile(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_unit *unit)
{
    kernels->matmul(unit->scores, KVANT_PAGE_TOKENS, unit->v_tile, plan->v_dim, unit->sums, plan->v_dim,
                    unit->n_rows, KVANT_PAGE_TOKENS, plan->v_dim);
}

static void score_page(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit,
                       kvant_page_ref k)
{
    if (kvant_attention_codes_suit(plan, k.codec)) {
        kvant_attention_codes_score(plan, kernels, &unit->codes, k, unit->n_rows, unit->scores);
        return;
    }
    kvant_codec_unpack(k.codec, kernels, k.page, unit->k_tile);
    kvant_attention_score_tile(plan, kernels, unit);
}

static void add_page(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit,
                     kvant_page_ref v)
{
    if (kvant_attention_codes_suit(plan, v.codec)) {
        kvant_attention_codes_add(plan, kernels, &unit->codes, v, unit->n_rows, unit->scores, unit->sums);
        return;
    }
    kvant_codec_unpack(v.codec, kernels, v.page, unit->v_tile);
    kvant_attention_add_tile(plan, kernels, unit);
}

void kvant_attention_cells_begin(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_unit *unit)
{
    const kvant_codec *k = plan->args->k->codecs[unit->kv_head];
    if (kvant_attention_codes_suit(plan, k))
        kvant_attention_codes_set_queries(plan, kernels, k, &unit->codes, unit->queries, unit->n_rows);
}

void kvant_attention_cells_score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_unit *unit, uint32_t page)
{
    const kvant_cells *k = plan->args->k;
    fetch_next(plan, k, unit, page);
    score_page(plan, kernels, unit, kvant_cells_page(k, plan->args->stream, page, unit->kv_head));
}

void kvant_attention_cells_add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_unit *unit, uint32_t page)
{
    const kvant_cells *v = plan->args->v;
    fetch_next(plan, v, unit, page);
    add_page(plan, kernels, unit, kvant_cells_page(v, plan->args->stream, page, unit->kv_head));
}

static void run_page(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit,
                     uint32_t page)
{
    visibility seen[KVANT_ATTENTION_MAX_ROWS];
    bool any = false;
    for (uint32_t t = 0; t < unit->n_tokens; t++) {
        seen[t] = read_mask(plan, kernels, unit->first_token + t, page, unit->mask + (size_t)t * KVANT_PAGE_TOKENS);
        any |= seen[t] != ALL_HIDDEN;
    }
    if (!any)
        return;
    plan->reader->score(plan, kernels, unit, page);
    for (uint32_t t = 0; t < unit->n_tokens; t++)
        soften_token(plan, kernels, unit, t, seen[t]);
    plan->reader->add(plan, kernels, unit, page);
}

void kvant_attention_unit_run(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                              kvant_attention_unit *unit)
{
    memset(unit->sums, 0, (size_t)unit->n_rows * plan->v_dim * sizeof(float));
    for (uint32_t row = 0; row < unit->n_rows; row++) {
        unit->max[row] = -INFINITY;
        unit->total[row] = 0;
    }
    if (plan->reader->begin)
        plan->reader->begin(plan, kernels, unit);
    for (uint32_t page = unit->first_page; page < unit->end_page; page++)
        run_page(plan, kernels, unit, page);
}
