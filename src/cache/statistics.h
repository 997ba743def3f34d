/* statistics.h - sums and ranges of rows per channel, dealt into parts, and the estimates of centres
 * and distances that they give (kvant_statistics, tensor.h). Which transform rows get is said by
 * versions.c. */
#pragma once

#include "tensor.h"

/* Statistics of no rows in memory for 3 * KVANT_STATISTICS_PARTS * width floats. */
void kvant_statistics_place(kvant_statistics *statistics, size_t width, float *memory);

/* The same in memory of their own, which begins at `sum`. KVANT_ERR_MEMORY. */
kvant_status kvant_statistics_create(kvant_statistics *statistics, size_t width);

/* Adds some of n rows, spread over them. */
void kvant_statistics_add(kvant_statistics *statistics, const float *rows, size_t stride, size_t n,
                          size_t taken);

/* Copies the parts that the next n rows of `to` would join. */
void kvant_statistics_copy(kvant_statistics *to, const kvant_statistics *from, size_t n);

/* How many parts have rows. */
uint32_t kvant_statistics_parts(const kvant_statistics *s);

/* Centres of n channels from channel `at` on; their largest distances from such centres that are
 * not an outlier's. */
void kvant_statistics_centers(const kvant_statistics *s, size_t at, uint32_t n, float *centers);
void kvant_statistics_distances(const kvant_statistics *s, size_t at, uint32_t n,
                                const float *centers, float *distances);
