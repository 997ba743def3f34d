/* attention_reference.h - one row of attention in double precision, by the definition, as the
 * reference of unit and integration tests. */
#ifndef KVANT_TESTS_ATTENTION_REFERENCE_H
#define KVANT_TESTS_ATTENTION_REFERENCE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

typedef struct reference_row {
    const float *q;             /* k_dim numbers */
    const float *keys, *values; /* cell j at keys + j key_stride, values + j value_stride */
    size_t key_stride, value_stride;
    uint32_t n_cells, k_dim, v_dim;
    double scale, softcap; /* softcap 0: none */
    const double *bias;    /* added to the score of each cell, -INFINITY hides it; or NULL */
    const float *sink;     /* logit of a sink, or NULL */
} reference_row;

/* ALiBi slope of a head; 1 without ALiBi (max_bias 0). If n_heads is no power of two, slopes are
 * two geometric series. */
static inline double reference_slope(uint32_t n_heads, double max_bias, uint32_t head)
{
    if (!(max_bias > 0))
        return 1;
    double n = pow(2, floor(log2(n_heads)));
    return head < n ? pow(2, -max_bias * (head + 1) / n)
                    : pow(2, -max_bias * (2 * (head - n) + 1) / (2 * n));
}

/* Fills out[v_dim], with zeros if all cells are hidden, and weights[n_cells] with e^(score -
 * largest). Returns the sum that out was divided by. */
static inline double reference_attention(const reference_row *r, double *weights, double *out)
{
    double largest = r->sink ? *r->sink : -INFINITY, total;
    for (uint32_t j = 0; j < r->n_cells; j++) {
        double sums[4] = { 0 }; /* four sums do not depend on each other */
        for (uint32_t i = 0; i < r->k_dim; i++)
            sums[i % 4] += (double)r->q[i] * r->keys[j * r->key_stride + i];
        double score = r->scale * (sums[0] + sums[1] + sums[2] + sums[3]);
        if (r->softcap > 0)
            score = r->softcap * tanh(score / r->softcap);
        weights[j] = score + (r->bias ? r->bias[j] : 0);
        largest = fmax(largest, weights[j]);
    }
    total = r->sink ? exp(*r->sink - largest) : 0;
    for (uint32_t i = 0; i < r->v_dim; i++)
        out[i] = 0;
    for (uint32_t j = 0; j < r->n_cells; j++) {
        weights[j] = largest == -INFINITY ? 0 : exp(weights[j] - largest);
        total += weights[j];
        for (uint32_t i = 0; weights[j] > 0 && i < r->v_dim; i++)
            out[i] += weights[j] * r->values[j * r->value_stride + i];
    }
    for (uint32_t i = 0; i < r->v_dim; i++)
        out[i] = total > 0 ? out[i] / total : 0;
    return total;
}

#endif
