/* cluster.h - k-means: seeding by k-means++, then Lloyd's iterations. Works on rows of numbers and
 * knows no model. */
#pragma once

#include <kvant/kvant.h>

/* Fills centroids (k x d floats) for n rows of d floats, n >= k. The same seed gives the same bits
 * on every machine. If fewer than k rows are different, some centroids are equal.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_cluster(const float *rows, size_t n, uint32_t d, uint32_t k, uint64_t seed,
                           float *centroids);
