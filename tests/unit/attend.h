/* attend.h - runs attention on two tensors, and computes the same attention in double precision
 * from the rows that the tensors read back. */
#ifndef KVANT_TESTS_ATTEND_H
#define KVANT_TESTS_ATTEND_H

#include "tensor_fixture.h"

#include <kvant/attention.h>

#include "../../src/base/half.h"
#include "../attention_reference.h"

enum { GROUP_HEADS = 3, N_HEADS = N_KV_HEADS * GROUP_HEADS, MAX_QUERIES = 40 };

typedef struct attended {
    float out[MAX_QUERIES * N_HEADS * HEAD_DIM], lse[MAX_QUERIES * N_HEADS];
} attended;

/* Completes the problem with queries and outputs. Outputs that attention does not write stay
 * NaN. */
static inline kvant_status attend(const fixture *k, const fixture *v,
                                  kvant_attention_problem *problem, const float *q,
                                  attended *result)
{
    size_t bytes;
    for (size_t i = 0; i < COUNT(result->out); i++)
        result->out[i] = NAN;
    for (size_t i = 0; i < COUNT(result->lse); i++)
        result->lse[i] = NAN;
    problem->size = sizeof *problem;
    problem->n_heads = N_HEADS;
    problem->q = q;
    problem->q_token_stride = problem->out_token_stride = (size_t)N_HEADS * HEAD_DIM;
    problem->q_head_stride = problem->out_head_stride = HEAD_DIM;
    problem->out = result->out;
    problem->lse = result->lse;
    problem->n_threads = problem->n_threads ? problem->n_threads : 2;
    kvant_status status = kvant_attention_workspace(k->tensor, v->tensor, problem, &bytes);
    if (status != KVANT_OK)
        return status;
    void *workspace = aligned(bytes);
    memset(workspace, 0xff, bytes); /* NaNs show a read of memory that was not written */
    status = kvant_attention(k->tensor, v->tensor, problem, workspace, bytes);
    free(workspace);
    return status;
}

/* The rows of a sequence's tokens in order; zeros for tokens that the block table hides. */
static inline float *gather_rows(const fixture *f, const kvant_attention_problem *p)
{
    float *rows = calloc((size_t)p->n_tokens * WIDTH + 1, sizeof *rows);
    for (uint32_t j = 0; j < p->n_tokens; j++) {
        int64_t block = p->block_table ? p->block_table[j / 64] : (int64_t)p->first_block + j / 64;
        if (block >= 0)
            read_slot(f, (uint32_t)(block * 64 + j % 64), rows + (size_t)j * WIDTH);
    }
    return rows;
}

/* Computes the bias that is added to each score, as the header describes it. */
static inline void fill_bias(const kvant_attention_problem *p, uint32_t query, uint32_t head,
                             double *bias)
{
    double slope = reference_slope(p->n_heads, p->max_bias, head);
    int64_t position = (int64_t)p->n_tokens - p->n_queries + query;
    for (int64_t j = 0; j < p->n_tokens; j++) {
        bias[j] =
            p->mask ? slope * kvant_half_to_float(p->mask[query * p->mask_token_stride + (size_t)j])
            : p->max_bias > 0 ? -slope * (double)(position - j)
                              : 0;
        if ((p->causal && j > position) || (p->window && j <= position - (int64_t)p->window) ||
            (p->block_table && p->block_table[j / 64] < 0))
            bias[j] = -INFINITY;
    }
}

/* Compares attention with the reference. Errors are relative to the largest value and to 1 + |lse|,
 * and must be below `error`.
 *
 * An exact problem errs by the rounding of binary32. A score is a sum of 32 products. It errs by
 * (32 + 20) 2^-24 |q| |k| scale, and by twice as much when a transform has a centre and scales. */
static inline void check_attended(const fixture *k, const fixture *v,
                                  const kvant_attention_problem *p, const attended *got,
                                  double error)
{
    float *keys = gather_rows(k, p), *values = gather_rows(v, p);
    double *bias = malloc((p->n_tokens + 1) * sizeof *bias),
           *weights = malloc((p->n_tokens + 1) * sizeof *weights);
    double out[HEAD_DIM], largest = 0;
    for (size_t i = 0; i < (size_t)p->n_tokens * WIDTH; i++)
        largest = fmax(largest, fabsf(values[i]));
    for (uint32_t t = 0; t < p->n_queries; t++)
        for (uint32_t h = 0; h < N_HEADS; h++) {
            size_t row = (size_t)t * N_HEADS + h;
            fill_bias(p, t, h, bias);
            const reference_row r = { .q = p->q + row * HEAD_DIM,
                                      .keys = keys + h / GROUP_HEADS * HEAD_DIM,
                                      .values = values + h / GROUP_HEADS * HEAD_DIM,
                                      .key_stride = WIDTH,
                                      .value_stride = WIDTH,
                                      .n_cells = p->n_tokens,
                                      .k_dim = HEAD_DIM,
                                      .v_dim = HEAD_DIM,
                                      .scale = p->scale,
                                      .softcap = p->logit_softcap,
                                      .bias = bias,
                                      .sink = p->sinks ? &p->sinks[h] : NULL };
            double total = reference_attention(&r, weights, out),
                   most = p->sinks ? p->sinks[h] : -INFINITY;
            for (uint32_t j = 0; j < p->n_tokens; j++) { /* weights are e^(score - most) */
                double score = 0;
                for (uint32_t i = 0; i < HEAD_DIM; i++)
                    score += (double)r.q[i] * r.keys[(size_t)j * WIDTH + i];
                score *= p->scale;
                if (p->logit_softcap > 0)
                    score = p->logit_softcap * tanh(score / p->logit_softcap);
                most = fmax(most, score + bias[j]);
            }
            double lse = total > 0 ? most + log(total) : -INFINITY;
            if (isinf(lse))
                assert_true(isinf(got->lse[row]) && got->lse[row] < 0);
            else if (!(fabs(got->lse[row] - lse) <= error * (1 + fabs(lse))))
                fail_msg("query %u head %u: lse %.9g, not %.9g", t, h, got->lse[row], lse);
            for (uint32_t i = 0; i < HEAD_DIM; i++)
                if (!(fabs(got->out[row * HEAD_DIM + i] - out[i]) <= error * largest))
                    fail_msg("query %u head %u channel %u: %.9g, not %.9g", t, h, i,
                             got->out[row * HEAD_DIM + i], out[i]);
        }
    free(keys);
    free(values);
    free(bias);
    free(weights);
}

#endif
