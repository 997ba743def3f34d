/* codes.c - see codes.h. */
#include "codes.h"

#include <string.h>

#define TILE_ROWS 8u

static size_t query_stride(const kvant_attention_plan *plan)
{
    return (plan->k_dim + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;
}

static size_t dot_stride(const kvant_attention_plan *plan)
{
    return plan->v_dim > KVANT_PAGE_TOKENS ? plan->v_dim : KVANT_PAGE_TOKENS;
}

/* Codes become a tile only where enough rows share it. */
static kvant_code_dots_fn *dots_for(const kvant_kernels *kernels, uint32_t n_rows)
{
    return n_rows < TILE_ROWS ? kernels->code_dots : kernels->tile_dots;
}

/* Floats that an array takes, in whole cache lines. */
static size_t floats(size_t bytes)
{
    return (bytes + 63) / 64 * 16;
}

size_t kvant_attention_codes_floats(const kvant_attention_plan *plan)
{
    size_t rows = kvant_attention_rows(plan);
    return plan->on_codes ? floats(rows * query_stride(plan) * sizeof(int16_t)) +
                                2 * floats(rows * sizeof(kvant_fixed_point)) +
                                floats(rows * KVANT_PAGE_TOKENS * sizeof(int16_t)) +
                                floats(rows * dot_stride(plan) * sizeof(int32_t))
                          : 0;
}

void kvant_attention_codes_bind(const kvant_attention_plan *plan, kvant_attention_codes *codes, float *scratch)
{
    size_t rows = kvant_attention_rows(plan);
    codes->queries = (int16_t *)scratch;
    scratch += floats(rows * query_stride(plan) * sizeof(int16_t));
    codes->query_steps = (kvant_fixed_point *)scratch;
    scratch += floats(rows * sizeof(kvant_fixed_point));
    codes->weight_steps = (kvant_fixed_point *)scratch;
    scratch += floats(rows * sizeof(kvant_fixed_point));
    codes->weights = (int16_t *)scratch;
    scratch += floats(rows * KVANT_PAGE_TOKENS * sizeof(int16_t));
    codes->dots = (int32_t *)scratch;
}

static kvant_fixed_point round_query(const kvant_kernels *kernels, const float *q, uint32_t n, int32_t limit,
                                     int16_t *x)
{
    float inverse;
    kvant_fixed_point query = { kvant_fixed_point_step(kernels->magnitude(q, n), limit, &inverse), 0 };
    for (uint32_t i = 0; i < n; i++) {
        int16_t whole = inverse > 0 ? kvant_fixed_point_round(q[i] * inverse) : 0;
        x[i / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS + kvant_token_position(i % KVANT_PAGE_TOKENS)] = whole;
        query.sum += whole;
    }
    return query;
}

void kvant_attention_codes_set_queries(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                       kvant_attention_codes *codes, int32_t limit, const float *queries,
                                       uint32_t n_rows)
{
    memset(codes->queries, 0, n_rows * query_stride(plan) * sizeof *codes->queries);
    for (uint32_t row = 0; row < n_rows; row++)
        codes->query_steps[row] = round_query(kernels, queries + (size_t)row * plan->k_dim, plan->k_dim, limit,
                                              codes->queries + row * query_stride(plan));
}

void kvant_attention_codes_score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_codes *codes, kvant_page_ref k, uint32_t n_rows, float *scores)
{
    kvant_code_lines lines;
    k.codec->code_lines(k.codec, kernels, k.page, &lines);
    dots_for(kernels, n_rows)(&k.codec->layout, k.page, k.codec->code_table.values, codes->queries,
                              query_stride(plan), codes->dots, dot_stride(plan), n_rows);
    for (uint32_t row = 0; row < n_rows; row++)
        kernels->scale_dots(codes->dots + row * dot_stride(plan), codes->query_steps[row], lines.scale,
                            lines.has_zero ? lines.zero : NULL, scores + (size_t)row * KVANT_PAGE_TOKENS);
}

/* The part of zero points: one number for all channels. */
static float weigh_zeros(const float *weights, const float *zeros)
{
    float lanes[16] = { 0 };
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t += 16)
        for (uint32_t j = 0; j < 16; j++)
            lanes[j] += weights[t + j] * zeros[t + j];
    for (uint32_t j = 1; j < 16; j++)
        lanes[0] += lanes[j];
    return lanes[0];
}

void kvant_attention_codes_add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_codes *codes, kvant_page_ref v, uint32_t n_rows,
                               const float *weights, float *sums)
{
    kvant_code_lines lines;
    const kvant_code_table *table = &v.codec->code_table;
    v.codec->code_lines(v.codec, kernels, v.page, &lines);
    for (uint32_t row = 0; row < n_rows; row++)
        codes->weight_steps[row] =
            kernels->fixed_point(weights + (size_t)row * KVANT_PAGE_TOKENS, lines.scale, table->limit,
                                 codes->weights + (size_t)row * KVANT_PAGE_TOKENS);
    dots_for(kernels, n_rows)(&v.codec->layout, v.page, table->values, codes->weights, KVANT_PAGE_TOKENS,
                              codes->dots, dot_stride(plan), n_rows);
    for (uint32_t row = 0; row < n_rows; row++) {
        float zero = lines.has_zero ? weigh_zeros(weights + (size_t)row * KVANT_PAGE_TOKENS, lines.zero) : 0;
        kernels->add_dots(codes->dots + row * dot_stride(plan), codes->weight_steps[row].step, zero, plan->v_dim,
                          sums + (size_t)row * plan->v_dim);
    }
}
