/* moments.c - see moments.h. */
#include "moments.h"

#include <math.h>
#include <stdbool.h>

#include "../math/sums.h"

void kvant_moment_add(double *moment, const float *x, double weight, uint32_t d)
{
    double exact[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < d; i++)
        exact[i] = x[i];
    for (uint32_t i = 0; i < d; i++) {
        double factor = weight * exact[i], *row = moment + (size_t)i * d;
        for (uint32_t j = 0; j <= i; j++)
            row[j] += factor * exact[j];
    }
}

void kvant_moment_about(const double *moment, const double *sum, double weight, const double *centre, uint32_t n,
                        double *out)
{
    size_t d = n;
    double inverse = weight > 0 ? 1 / weight : 0;
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++) {
            double about = moment[i * d + j] * inverse;
            if (centre && weight > 0) {
                double mean_i = sum[i] * inverse, mean_j = sum[j] * inverse;
                about = about - mean_i * mean_j + (mean_i - centre[i]) * (mean_j - centre[j]);
            }
            out[i * d + j] = out[j * d + i] = about;
        }
}

/* Scores less their maximum; false when no key is seen. */
static bool score(const kvant_calibrator_attention *a, uint32_t d, uint32_t query, float *scores)
{
    const float *q = a->queries + query * a->query_stride,
                *mask = a->mask ? a->mask + query * a->mask_stride : NULL;
    float largest = -INFINITY;
    for (uint32_t k = 0; k < a->n_keys; k++) {
        scores[k] = mask ? mask[k] : 0;
        if (scores[k] == -INFINITY)
            continue;
        scores[k] += a->scale * kvant_dot_ordered(q, a->keys + k * a->key_stride, d);
        largest = scores[k] > largest ? scores[k] : largest;
    }
    for (uint32_t k = 0; k < a->n_keys; k++)
        scores[k] -= largest;
    return largest > -INFINITY;
}

void kvant_attention_weights(const kvant_calibrator_attention *a, uint32_t d, float *scores, double *weights)
{
    for (uint32_t query = 0; query < a->n_queries; query++) {
        double sum = 0;
        if (!score(a, d, query, scores))
            continue;
        for (uint32_t k = 0; k < a->n_keys; k++)
            sum += scores[k] = expf(scores[k]);
        for (uint32_t k = 0; k < a->n_keys; k++) {
            double p = scores[k] / sum;
            weights[k] += p * (1 - p);
        }
    }
}
