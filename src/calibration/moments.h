/* moments.h - weighted sums of outer products in binary64, and the second moment of keys under
 * attention weights. Sums are lower triangles of d x d matrices, row-major; results are full
 * matrices. And the W that they give. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <kvant/calibration.h>

/* moment += weight x x^T */
void kvant_moment_add(double *moment, const float *x, double weight, uint32_t d);

/* out = sum of w (x - centre)(x - centre)^T / sum of w, from the sums of w x x^T, w x and w; zeros
 * when weight is 0. centre NULL: about 0, and sum is not read. */
void kvant_moment_about(const double *moment, const double *sum, double weight,
                        const double *centre, uint32_t d, double *out);

/* weights[k] += p_k (1 - p_k) for every query, p being its softmax over the keys: how far the
 * probabilities move when the score of key k is off. scores: room for n_keys numbers. Queries that
 * see nothing count for nothing. */
void kvant_attention_weights(const kvant_calibrator_attention *attention, uint32_t d, float *scores,
                             double *weights);

/* W of transform=file and transform=diagonal (calibration.md, "What is computed"). queries:
 * E[q q^T]; attended: the covariance of keys that attention weighs; keys: the plain one,
 * whose mean squared length W keeps. d x d, symmetric, finite. Fills d factors and the lower
 * triangle of W as binary16. Where nothing is known, moments of zeros, W is the identity.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_make_weights(uint32_t d, const double *queries, const double *attended,
                                const double *keys, float *diagonal, uint16_t *matrix);

/* Another W of the same errors: W^T W is the square of the W above for attended = keys, and W^T is a
 * lower triangle, which costs no eigendecomposition. Fills it; queries, keys and room (KVANT_MEAN_ROOM numbers)
 * become anything. gain: tr(W^2 keys) / tr(keys) before W was scaled to make them equal. KVANT_ERR_ARGUMENT where
 * nothing is known. */
kvant_status kvant_make_triangle(uint32_t d, double *queries, double *keys, double *room,
                                 uint16_t *triangle, double *gain);
