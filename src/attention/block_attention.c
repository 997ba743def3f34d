/* block_attention.c - the public call for rows of ggml's block formats: checks arguments and reads pages of 64 rows for
 * attention's units. */
#include <kvant/block_attention.h>

#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "unit.h"

/* Up to here rows are multiplied as they are decoded, 4 query rows at a time; beyond, decoding into a tile once is cheaper. */
#define DIRECT_ROWS 8u

static kvant_block_page page_of(const kvant_attention_plan *plan, const kvant_block_rows *rows, uint32_t kv_head,
                                uint32_t page)
{
    uint32_t first = page * KVANT_PAGE_TOKENS, left = plan->args->n_cells - first;
    return (kvant_block_page){ .type = rows->type,
                               .n_tokens = left < KVANT_PAGE_TOKENS ? left : KVANT_PAGE_TOKENS,
                               .head_dim = rows->head_dim,
                               .rows = (const uint8_t *)rows->data + first * rows->token_stride +
                                       kv_head * rows->head_stride,
                               .stride = rows->token_stride };
}

/* Rows of a kv head lie between those of the others, one or two lines at a time, which hardware does not fetch far ahead. */
static void fetch_next(const kvant_attention_plan *plan, const kvant_block_rows *rows,
                       const kvant_attention_unit *unit, uint32_t page)
{
    if (page + 1 >= unit->end_page)
        return;
    kvant_block_page next = page_of(plan, rows, unit->kv_head, page + 1);
    size_t bytes = kvant_block_row_bytes(rows->type, rows->head_dim);
    for (uint32_t t = 0; t < next.n_tokens; t++)
        for (size_t i = 0; i < bytes; i += 64)
            KVANT_PREFETCH(next.rows + t * next.stride + i);
}

static void scale_query(const kvant_attention_plan *plan, uint32_t token, uint32_t head, float *out)
{
    const kvant_attention_args *args = plan->args;
    const float *q = args->q + token * args->q_token_stride + head * args->q_head_stride;
    for (uint32_t i = 0; i < plan->k_dim; i++)
        out[i] = q[i] * plan->score_scale;
}

static void write_output(const kvant_attention_plan *plan, uint32_t head, const float *sums, float inverse,
                         float weight, float *out)
{
    (void)head;
    (void)weight;
    for (uint32_t i = 0; i < plan->v_dim; i++)
        out[i] = sums[i] * inverse;
}

static void score(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit,
                  uint32_t page)
{
    const kvant_block_attention_args *source = plan->source;
    kvant_block_page k = page_of(plan, &source->k, unit->kv_head, page);
    fetch_next(plan, &source->k, unit, page);
    if (unit->n_rows <= DIRECT_ROWS) {
        kernels->block_scores(&k, unit->queries, plan->k_dim, unit->scores, unit->n_rows);
        return;
    }
    kernels->block_columns_tile(&k, unit->k_tile);
    kvant_attention_score_tile(plan, kernels, unit);
}

static void add(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_unit *unit,
                uint32_t page)
{
    const kvant_block_attention_args *source = plan->source;
    kvant_block_page v = page_of(plan, &source->v, unit->kv_head, page);
    fetch_next(plan, &source->v, unit, page);
    if (unit->n_rows <= DIRECT_ROWS) {
        kernels->block_sums(&v, unit->scores, unit->sums, plan->v_dim, unit->n_rows);
        return;
    }
    kernels->block_rows_tile(&v, unit->v_tile);
    kvant_attention_add_tile(plan, kernels, unit);
}

static const kvant_attention_reader reader = {
    .in_order = true,
    .query = scale_query,
    .output = write_output,
    .score = score,
    .add = add,
};

/* Whether every row lies within the bytes that may be read. */
static bool rows_fit(const kvant_block_rows *rows, uint32_t n_cells, uint32_t n_kv_heads)
{
    size_t row = kvant_block_row_bytes(rows->type, rows->head_dim), tokens, heads;
    if (!row || (!rows->data && n_cells))
        return false;
    if (!n_cells)
        return true;
    return kvant_mul_size(n_cells - 1, rows->token_stride, &tokens) &&
           kvant_mul_size(n_kv_heads - 1, rows->head_stride, &heads) && row <= rows->bytes &&
           tokens <= rows->bytes - row && heads <= rows->bytes - row - tokens;
}

static bool valid(const kvant_block_attention_args *a)
{
    if (!a || a->size != sizeof *a || !a->q || !a->out || !a->n_threads || !a->n_tokens || !a->n_kv_heads)
        return false;
    if (!a->n_heads || a->n_heads % a->n_kv_heads)
        return false;
    return rows_fit(&a->k, a->n_cells, a->n_kv_heads) && rows_fit(&a->v, a->n_cells, a->n_kv_heads);
}

static kvant_attention_args common_args(const kvant_block_attention_args *a)
{
    return (kvant_attention_args){ .size = sizeof(kvant_attention_args),
                                   .n_cells = a->n_cells,
                                   .n_tokens = a->n_tokens,
                                   .n_heads = a->n_heads,
                                   .q = a->q,
                                   .q_token_stride = a->q_token_stride,
                                   .q_head_stride = a->q_head_stride,
                                   .mask = a->mask,
                                   .mask_token_stride = a->mask_token_stride,
                                   .sinks = a->sinks,
                                   .scale = a->scale,
                                   .logit_softcap = a->logit_softcap,
                                   .max_bias = a->max_bias,
                                   .out = a->out,
                                   .out_token_stride = a->out_token_stride,
                                   .out_head_stride = a->out_head_stride,
                                   .n_threads = a->n_threads };
}

static bool make_plan(const kvant_block_attention_args *a, const kvant_attention_args *args,
                      kvant_attention_plan *plan)
{
    *plan = (kvant_attention_plan){ .args = args,
                                    .reader = &reader,
                                    .source = a,
                                    .n_kv_heads = a->n_kv_heads,
                                    .k_dim = a->k.head_dim,
                                    .v_dim = a->v.head_dim };
    return kvant_attention_cut(plan);
}

size_t kvant_block_attention_workspace(const kvant_block_attention_args *a)
{
    kvant_attention_plan plan;
    if (!valid(a))
        return 0;
    kvant_attention_args args = common_args(a);
    return make_plan(a, &args, &plan) ? plan.total * sizeof(float) : 0;
}

kvant_status kvant_block_attention(const kvant_block_attention_args *a, void *workspace, size_t workspace_bytes)
{
    kvant_attention_plan plan;
    KVANT_RETURN_IF(!valid(a), KVANT_ERR_ARGUMENT);
    kvant_attention_args args = common_args(a);
    KVANT_RETURN_IF(!make_plan(a, &args, &plan), KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!workspace || (uintptr_t)workspace % 64 || workspace_bytes / sizeof(float) < plan.total,
                    KVANT_ERR_ARGUMENT);
    kvant_attention_run(&plan, workspace);
    return KVANT_OK;
}
