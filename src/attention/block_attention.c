/* block_attention.c - the public call for rows of ggml's block formats: checks arguments and reads
 * pages of 64 rows for the work items of attention. */
#include <kvant/block_attention.h>

#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/error.h"
#include "../base/attributes.h"
#include "work_item.h"

/* Up to this many query rows, rows are multiplied while they are decoded, 4 query rows at a time.
 * With more query rows it is cheaper to decode once into a tile. */
#define DIRECT_ROWS 8u

typedef struct block_source {
    kvant_block_rows k, v;
} block_source;

static kvant_block_page page_of(const kvant_attention_plan *plan, const kvant_block_rows *rows,
                                uint32_t kv_head, uint32_t page)
{
    uint32_t first = page * KVANT_PAGE_TOKENS, left = plan->problem.n_tokens - first;
    return (kvant_block_page){ .type = rows->type,
                               .n_tokens = left < KVANT_PAGE_TOKENS ? left : KVANT_PAGE_TOKENS,
                               .head_dim = rows->head_dim,
                               .rows = (const uint8_t *)rows->data + first * rows->token_stride +
                                       kv_head * rows->head_stride,
                               .stride = rows->token_stride };
}

/* Prefetches the next page. The rows of a kv head are one or two cache lines long. The rows of all
 * other kv heads lie between them, so the hardware does not prefetch far ahead. */
static void fetch_next(const kvant_attention_plan *plan, const kvant_block_rows *rows,
                       const kvant_attention_item *item, uint32_t page)
{
    if (page + 1 >= item->end_page)
        return;
    kvant_block_page next = page_of(plan, rows, item->kv_head, page + 1);
    size_t bytes = kvant_block_row_bytes(rows->type, rows->head_dim);
    for (uint32_t t = 0; t < next.n_tokens; t++)
        for (size_t i = 0; i < bytes; i += 64)
            KVANT_PREFETCH(next.rows + t * next.stride + i);
}

static void scale_queries(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                          uint32_t transform_id, uint32_t query, uint32_t n, uint32_t kv_head,
                          float *out, float *offsets, float *products)
{
    const kvant_attention_problem *p = &plan->problem;
    const uint32_t group = plan->group_heads;
    (void)kernels;
    (void)transform_id;
    (void)products;
    for (uint32_t row = 0; row < n * group; row++, out += plan->k_dim) {
        const float *q = p->q + (query + row / group) * p->q_token_stride +
                         (kv_head * group + row % group) * p->q_head_stride;
        for (uint32_t i = 0; i < plan->k_dim; i++)
            out[i] = q[i] * plan->score_scale;
        *offsets++ = 0;
    }
}

static void write_output(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         uint32_t transform_id, uint32_t head, const float *sums, float inverse,
                         float weight, float *out)
{
    (void)kernels;
    (void)transform_id;
    (void)head;
    (void)weight;
    for (uint32_t i = 0; i < plan->v_dim; i++)
        out[i] += sums[i] * inverse;
}

static void score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                  kvant_attention_item *item, uint32_t page)
{
    const block_source *source = plan->source;
    kvant_block_page k = page_of(plan, &source->k, item->kv_head, page);
    fetch_next(plan, &source->k, item, page);
    if (item->n_rows <= DIRECT_ROWS) {
        kernels->block_scores(&k, item->queries, plan->k_dim, item->scores, item->n_rows);
        return;
    }
    kernels->block_columns_tile(&k, item->k_tile);
    kvant_attention_score_tile(plan, kernels, item);
}

static void add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                kvant_attention_item *item, uint32_t page)
{
    const block_source *source = plan->source;
    kvant_block_page v = page_of(plan, &source->v, item->kv_head, page);
    fetch_next(plan, &source->v, item, page);
    if (item->n_rows <= DIRECT_ROWS) {
        kernels->block_sums(&v, item->scores, item->sums[0], plan->v_dim, item->n_rows);
        return;
    }
    kernels->block_rows_tile(&v, item->v_tile);
    kvant_attention_add_tile(plan, kernels, item);
}

/* Adds a page some of whose values may not be finite. In that case it calls block_sums for each
 * query row, because for a single row block_sums leaves out tokens of weight 0. Products are added
 * in the same order as for many rows. */
static void add_weighted(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         kvant_attention_item *item, uint32_t page)
{
    const block_source *source = plan->source;
    const kvant_block_page v = page_of(plan, &source->v, item->kv_head, page);
    kernels->block_rows_tile(&v, item->v_tile);
    if (kernels->magnitude(item->v_tile, v.n_tokens * plan->v_dim) < KVANT_INFINITY_BITS) {
        add(plan, kernels, item, page);
        return;
    }
    for (uint32_t row = 0; row < item->n_rows; row++)
        kernels->block_sums(&v, item->scores + (size_t)row * KVANT_PAGE_TOKENS,
                            item->sums[0] + (size_t)row * plan->v_dim, plan->v_dim, 1);
}

static const kvant_attention_reader reader = {
    .in_order = true,
    .queries = scale_queries,
    .output = write_output,
    .score = score,
    .add = add,
    .add_weighted = add_weighted,
};

/* Whether every row lies within the bytes that may be read. */
static bool rows_fit(const kvant_block_rows *rows, uint32_t n_tokens)
{
    size_t row = kvant_block_row_bytes(rows->type, rows->head_dim), tokens, heads;
    if (!row || (!rows->data && n_tokens))
        return false;
    if (!n_tokens)
        return true;
    return kvant_mul_size(n_tokens - 1, rows->token_stride, &tokens) &&
           kvant_mul_size(rows->n_kv_heads - 1, rows->head_stride, &heads) && row <= rows->bytes &&
           tokens <= rows->bytes - row && heads <= rows->bytes - row - tokens;
}

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "block attention: %s", what);
}

static kvant_status make_plan(const kvant_block_rows *k, const kvant_block_rows *v,
                              const kvant_attention_problem *problem, block_source *source,
                              kvant_attention_plan *plan)
{
    if (!KVANT_ACCEPT_STRUCT(kvant_block_rows, &source->k, k, head_stride) ||
        !KVANT_ACCEPT_STRUCT(kvant_block_rows, &source->v, v, head_stride))
        return invalid("k or v is NULL, or its size field is not set to sizeof(kvant_block_rows)");
    if (!source->k.n_kv_heads || source->k.n_kv_heads != source->v.n_kv_heads)
        return invalid("k and v differ in n_kv_heads, or n_kv_heads is 0");
    *plan = (kvant_attention_plan){ .reader = &reader,
                                    .source = source,
                                    .k_views.n = 1,
                                    .v_transforms.n = 1,
                                    .k_dim = source->k.head_dim,
                                    .v_dim = source->v.head_dim };
    KVANT_FORWARD(kvant_attention_accept_problem(plan, problem, source->k.n_kv_heads));
    if (plan->problem.block_table || plan->problem.first_block)
        return invalid("rows have no blocks: block_table must be NULL and first_block 0");
    if (!rows_fit(&source->k, plan->problem.n_tokens) ||
        !rows_fit(&source->v, plan->problem.n_tokens))
        return invalid("the format or head_dim of k or v is not supported, or its rows end after "
                       "its readable bytes");
    return kvant_attention_cut(plan) ? KVANT_OK
                                     : invalid("the workspace would be larger than memory can be: "
                                               "choose fewer tokens or threads");
}

kvant_status kvant_block_attention_workspace(const kvant_block_rows *k, const kvant_block_rows *v,
                                             const kvant_attention_problem *problem, size_t *bytes)
{
    kvant_attention_plan plan;
    block_source source;
    KVANT_RETURN_IF(!bytes, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(make_plan(k, v, problem, &source, &plan));
    *bytes = plan.total * sizeof(float);
    return KVANT_OK;
}

kvant_status kvant_block_attention(const kvant_block_rows *k, const kvant_block_rows *v,
                                   const kvant_attention_problem *problem, void *workspace,
                                   size_t workspace_bytes)
{
    kvant_attention_plan plan;
    block_source source;
    KVANT_FORWARD(make_plan(k, v, problem, &source, &plan));
    return kvant_attention_run(&plan, workspace, workspace_bytes);
}
