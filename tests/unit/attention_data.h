/* attention_data.h - random queries, sinks and a mask for one call of attention, room for its
 * outputs, and the expected outputs in double precision. Tests of attention on tensors
 * (attention_setup.h) and on ggml's block formats use it. */
#ifndef KVANT_TESTS_ATTENTION_DATA_H
#define KVANT_TESTS_ATTENTION_DATA_H

#include "testing.h"

#include <kvant/attention.h>

#include "../../src/base/half.h"
#include "../attention_reference.h"

typedef struct attention_data {
    float *q, *out, *sinks;
    uint16_t *mask;
    uint32_t k_dim, v_dim;
} attention_data;

static inline uint16_t *random_mask(const kvant_attention_problem *p, uint64_t *rng)
{
    uint16_t *mask = malloc((size_t)p->n_queries * p->n_tokens * sizeof *mask);
    for (uint32_t t = 0; t < p->n_queries; t++)
        for (uint32_t j = 0; j < p->n_tokens; j++) {
            bool hidden = j > p->n_tokens - p->n_queries + t || (t % 3 == 1 && j < 70) ||
                          test_random(rng) % 5 == 0;
            float bias = p->max_bias > 0 ? -(float)(p->n_tokens - j) / 8 : 0;
            mask[(size_t)t * p->n_tokens + j] = hidden ? 0xfc00 : kvant_half_from_float(bias);
        }
    return mask;
}

/* Completes a problem whose numbers of tokens, queries and heads, softcap and max_bias are set. */
static inline attention_data make_data(kvant_attention_problem *p, uint32_t k_dim, uint32_t v_dim,
                                       bool mask, bool sinks, uint64_t *rng)
{
    const size_t n_rows = (size_t)p->n_queries * p->n_heads;
    attention_data d = { .q = malloc(n_rows * k_dim * sizeof *d.q),
                         .out = malloc(n_rows * v_dim * sizeof *d.out),
                         .sinks = malloc(p->n_heads * sizeof *d.sinks),
                         .k_dim = k_dim,
                         .v_dim = v_dim };
    fill_normal(d.q, n_rows * k_dim, rng);
    fill_normal(d.sinks, p->n_heads, rng);
    d.mask = mask ? random_mask(p, rng) : NULL;
    p->size = sizeof *p;
    p->q = d.q, p->q_token_stride = (size_t)p->n_heads * k_dim, p->q_head_stride = k_dim;
    p->out = d.out, p->out_token_stride = (size_t)p->n_heads * v_dim, p->out_head_stride = v_dim;
    p->mask = d.mask, p->mask_token_stride = p->n_tokens;
    p->sinks = sinks ? d.sinks : NULL;
    p->scale = 1 / sqrtf((float)k_dim);
    p->n_threads = 2;
    return d;
}

static inline void free_data(attention_data *d)
{
    free(d->q);
    free(d->out);
    free(d->sinks);
    free(d->mask);
}

/* Calls reference_attention for one output row; `cells` has the head's keys, values and strides. */
static inline double data_row(const attention_data *d, const kvant_attention_problem *p,
                              uint32_t token, uint32_t head, reference_row cells, double *weights,
                              double *out)
{
    double *bias = calloc(p->n_tokens, sizeof *bias), total;
    for (uint32_t j = 0; d->mask && j < p->n_tokens; j++)
        bias[j] = reference_slope(p->n_heads, p->max_bias, head) *
                  kvant_half_to_float(d->mask[(size_t)token * p->n_tokens + j]);
    cells.q = d->q + ((size_t)token * p->n_heads + head) * d->k_dim;
    cells.n_cells = p->n_tokens, cells.k_dim = d->k_dim, cells.v_dim = d->v_dim;
    cells.scale = p->scale, cells.softcap = p->logit_softcap;
    cells.bias = bias;
    cells.sink = p->sinks ? &p->sinks[head] : NULL;
    total = reference_attention(&cells, weights, out);
    free(bias);
    return total;
}

#endif
