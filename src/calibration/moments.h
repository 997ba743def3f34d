/* moments.h - weighted sums of outer products in binary64, the second moment of keys under
 * attention weights, and the W that they give. Sums are lower triangles of d x d matrices,
 * row-major; results are full matrices. */
#pragma once

#include <stdint.h>

#include <kvant/calibration.h>

/* moment += weight x x^T */
void kvant_moment_add(double *moment, const float *x, double weight, uint32_t d);

/* out = sum of w (x - centre)(x - centre)^T / sum of w, computed from the sums of w x x^T, w x and
 * w. It is zeros when weight is 0. centre NULL: the moment about 0; `sum` is then not read. */
void kvant_moment_about(const double *moment, const double *sum, double weight,
                        const double *centre, uint32_t d, double *out);

/* weights[k] += p_k (1 - p_k) for every query, where p is its softmax over the keys. This tells how
 * much the probabilities change when the score of key k has an error. scores: room for n_keys
 * numbers. A query that sees no key adds nothing. */
void kvant_attention_weights(const kvant_calibrator_attention *attention, uint32_t d, float *scores,
                             double *weights);

/* Computes the W of transform=file and transform=diagonal (calibration.md, "Method").
 * queries: E[q q^T]; attended: the covariance of keys weighted by attention; keys: their plain
 * covariance, whose mean squared length W keeps. Each is d x d, symmetric and finite. Fills d
 * factors and the lower triangle of W as binary16. If the moments are zeros, W is the identity.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_make_key_transform(uint32_t d, const double *queries, const double *attended,
                                      const double *keys, float *diagonal, uint16_t *matrix);

/* Computes another W with the same errors, for attended = keys: W^T W is the square of the W above.
 * Here W^T is a lower triangle, which needs no eigendecomposition. Fills `triangle`, whose numbers
 * are rounded to 4 bits (math/triangle.h), and destroys queries, keys and room (KVANT_MEAN_ROOM
 * numbers). *gain = tr(W^2 keys) / tr(keys) before W was scaled to make both traces equal.
 * KVANT_ERR_ARGUMENT: the moments are not positive definite. */
kvant_status kvant_make_triangle(uint32_t d, double *queries, double *keys, double *room,
                                 uint16_t *triangle, double *gain);
