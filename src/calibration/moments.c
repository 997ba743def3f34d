/* moments.c - see moments.h.
 *
 * Noise of equal size in all directions of W k gives a score <q, k> an error with the variance
 * |W^-1 q|^2 |W k|^2, times a constant. The mean of this variance is tr(W^-2 Q) tr(W^2 K). The W^2
 * with the smallest product is the geometric mean of K^-1 and Q. The best diagonal matrix is
 * sqrt(Q_ii / K_ii). */
#include "moments.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/half.h"
#include "../kernels/kernels.h"
#include "../math/spd.h"
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

void kvant_moment_about(const double *moment, const double *sum, double weight,
                        const double *centre, uint32_t n, double *out)
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

/* Computes scores minus their maximum. Returns false when the query sees no key. */
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

void kvant_attention_weights(const kvant_calibrator_attention *a, uint32_t d, float *scores,
                             double *weights)
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

/* W */

/* This part of the mean is added to every direction, so that W does not enlarge a direction that
 * the text never used. Values from 1e-5 to 1e-2 were measured on two models. Errors are smallest
 * from 3e-4 down. */
#define FLOOR 3e-4

/* This part of W's Frobenius norm is added to every eigenvalue of W. Rounding to binary16 moves
 * eigenvalues by at most 2^-11 of the norm, or by numbers below 2^-24. So W stays positive
 * definite, and |W| |W^-1| stays below sqrt(d) 2^11. */
#define SMALLEST 0x1p-10

/* tr(A B) for symmetric matrices */
static double trace_of_product(const double *a, const double *b, size_t d)
{
    double sum = 0;
    for (size_t i = 0; i < d; i++)
        sum += kvant_dot_lanes(a + i * d, b + i * d, d);
    return sum;
}

static void identity(size_t d, float *diagonal, uint16_t *matrix)
{
    for (size_t i = 0; i < d; i++) {
        diagonal[i] = 1;
        for (size_t j = 0; j <= i; j++)
            *matrix++ = kvant_half_from_float(i == j ? 1.0f : 0.0f);
    }
}

/* a: attended, b: queries, both regularised; keys: regularised, too. */
static void make_diagonal(size_t d, const double *a, const double *b, const double *keys,
                          float *diagonal)
{
    double after = 0;
    for (size_t i = 0; i < d; i++)
        after += sqrt(b[i * d + i] / a[i * d + i]) * keys[i * d + i];
    double factor = sqrt(kvant_trace((uint32_t)d, keys) / after);
    for (size_t i = 0; i < d; i++)
        diagonal[i] = (float)(factor * sqrt(sqrt(b[i * d + i] / a[i * d + i])));
}

/* m = w^T w for an upper triangle w. */
static void square(size_t d, const double *w, double *m)
{
    memset(m, 0, d * d * sizeof *m);
    for (size_t i = 0; i < d; i++)
        for (size_t k = 0; k <= i; k++)
            kvant_add_multiple(m + i * d + k, w[k * d + i], w + k * d + k, i + 1 - k);
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j < i; j++)
            m[j * d + i] = m[i * d + j];
}

static kvant_status make_matrix(size_t d, double *a, double *b, const double *keys, double *room,
                                uint16_t *matrix)
{
    KVANT_RETURN_IF(!(kvant_kernels_get(KVANT_CPU_AUTO)->mean_factor(d, a, b, room) > 0),
                    KVANT_ERR_ARGUMENT);
    square(d, b, a);
    const double factor = sqrt(kvant_trace((uint32_t)d, keys) / trace_of_product(a, keys, d));
    KVANT_FORWARD(kvant_spd_roots((uint32_t)d, a, a, NULL));
    const double smallest = SMALLEST * kvant_frobenius((uint32_t)d, a);
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++)
            *matrix++ =
                kvant_half_from_float((float)(factor * (a[i * d + j] + (i == j ? smallest : 0))));
    return KVANT_OK;
}

kvant_status kvant_make_key_transform(uint32_t n, const double *queries, const double *attended,
                                      const double *keys, float *diagonal, uint16_t *matrix)
{
    size_t d = n, size = d * d;
    double *a = kvant_alloc(3 * size + KVANT_MEAN_ROOM(d), sizeof *a), *b = a + size, *k = b + size;
    kvant_status status = KVANT_ERR_ARGUMENT;
    KVANT_RETURN_IF(!a, KVANT_ERR_MEMORY);
    memcpy(a, attended, size * sizeof *a);
    memcpy(b, queries, size * sizeof *b);
    memcpy(k, keys, size * sizeof *k);
    if (kvant_spd_regularise(n, a, FLOOR) && kvant_spd_regularise(n, b, FLOOR) &&
        kvant_spd_regularise(n, k, FLOOR)) {
        make_diagonal(d, a, b, k, diagonal);
        status = make_matrix(d, a, b, k, k + size, matrix);
    }
    if (status == KVANT_ERR_ARGUMENT) /* a moment is not positive definite, so W is the identity */
        identity(d, diagonal, matrix);
    kvant_free(a);
    return status == KVANT_ERR_MEMORY ? status : KVANT_OK;
}

/* Columns that are read together, because a column of a large matrix does not stay in the
 * first-level cache. */
#define TOGETHER 8u

kvant_status kvant_make_triangle(uint32_t n, double *queries, double *keys, double *room,
                                 uint16_t *triangle, double *gain)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const size_t d = n;
    double trace = 0, after = 0;
    if (kvant_spd_regularise(n, keys, FLOOR) && kvant_spd_regularise(n, queries, FLOOR)) {
        trace = kvant_trace(n, keys);
        after = kernels->mean_factor(d, keys, queries, room);
    }
    const double factor = sqrt(trace / after);
    for (size_t first = 0; first < d && after > 0; first += TOGETHER) {
        float rows[TOGETHER][KVANT_MAX_HEAD_DIM];
        for (size_t j = 0; j < d && j < first + TOGETHER; j++)
            for (size_t i = first; i < d && i < first + TOGETHER; i++)
                rows[i - first][j] = (float)(factor * queries[j * d + i]);
        for (size_t i = first; i < d && i < first + TOGETHER; i++)
            kvant_triangle_set_row(triangle, d, i, rows[i - first]);
    }
    *gain = after / trace;
    return after > 0 ? KVANT_OK : KVANT_ERR_ARGUMENT;
}
