/* statistics.h - sums and ranges per channel, over rows that are dealt into parts
 * (kvant_statistics, tensor.h), and the centres and largest distances that they give. They serve
 * the choice of transforms (transforms.c). */
#pragma once

#include "tensor.h"

/* Makes empty statistics in memory for 3 * KVANT_STATISTICS_PARTS * width floats. */
void kvant_statistics_set_memory(kvant_statistics *statistics, size_t width, float *memory);

/* Makes empty statistics in new memory, which begins at `sum`. KVANT_ERR_MEMORY. */
kvant_status kvant_statistics_create(kvant_statistics *statistics, size_t width);

/* Adds `taken` of n rows, spread evenly over them. */
void kvant_statistics_add(kvant_statistics *statistics, const float *rows, size_t stride, size_t n,
                          size_t taken);

/* Copies those parts of `from` to which the next n rows of `to` would be added. */
void kvant_statistics_copy(kvant_statistics *to, const kvant_statistics *from, size_t n);

/* How many parts have rows. */
uint32_t kvant_statistics_parts(const kvant_statistics *s);

/* The centres of the n channels from channel `at` on; the largest distances from given
 * centres, with outliers limited (statistics.c). */
void kvant_statistics_centers(const kvant_statistics *s, size_t at, uint32_t n, float *centers);
void kvant_statistics_distances(const kvant_statistics *s, size_t at, uint32_t n,
                                const float *centers, float *distances);
