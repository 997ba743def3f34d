/* cluster.h - k-means: k-means++ seeding, then Lloyd's iterations. Knows rows of numbers; knows no
 * model. */
#pragma once

#include <kvant/kvant.h>

/* Fills centroids (k x d floats) for n rows of d floats, n >= k. The same seed gives the same bits
 * on every machine. Rows with fewer than k different ones give equal centroids.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_cluster(const float *rows, size_t n, uint32_t d, uint32_t k, uint64_t seed,
                           float *centroids);
