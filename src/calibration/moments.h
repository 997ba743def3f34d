/* moments.h - weighted sums of outer products in binary64, and the second moment of keys under
 * attention weights. Sums are lower triangles of d x d matrices, row-major; results are full
 * matrices. */
#ifndef KVANT_CALIBRATION_MOMENTS_H
#define KVANT_CALIBRATION_MOMENTS_H

#include <stddef.h>
#include <stdint.h>

#include <kvant/calibration.h>

/* moment += weight x x^T */
void kvant_moment_add(double *moment, const float *x, double weight, uint32_t d);

/* out = sum of w (x - centre)(x - centre)^T / sum of w, from the sums of w x x^T, w x and w; zeros
 * when weight is 0. centre NULL: about 0, and sum is not read. */
void kvant_moment_about(const double *moment, const double *sum, double weight, const double *centre, uint32_t d,
                        double *out);

/* weights[k] += p_k (1 - p_k) for every query, p being its softmax over the keys: how far the
 * probabilities move when the score of key k is off. scores: room for n_keys numbers. Queries that
 * see nothing count for nothing. */
void kvant_attention_weights(const kvant_calibrator_attention *attention, uint32_t d, float *scores,
                             double *weights);

#endif
