/* weights.h - computes the W of transform=file and transform=diagonal from second moments
 * (calibration.md, "What is computed"). */
#ifndef KVANT_CALIBRATION_WEIGHTS_H
#define KVANT_CALIBRATION_WEIGHTS_H

#include <stdint.h>

#include <kvant/kvant.h>

/* queries: E[q q^T]; attended: the covariance of keys that attention weighs; keys: the plain one,
 * whose mean squared length W keeps. d x d, symmetric, finite. Fills d factors and the lower
 * triangle of W as binary16. Where nothing is known, moments of zeros, W is the identity.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_make_weights(uint32_t d, const double *queries, const double *attended, const double *keys,
                                float *diagonal, uint16_t *matrix);

#endif
