/* statistics.h - estimates centre and scale of each channel from rows, robust against a few outlier
 * rows.
 *
 * Rows are dealt into KVANT_STATISTICS_PARTS parts. Each part keeps sum, minimum and maximum per
 * channel. A part that differs from the others more than they differ among themselves is clipped to
 * that limit. So one part, whatever its rows, moves the result by a bounded amount. With ordinary
 * rows the result is their mean and their largest distance from it. */
#ifndef KVANT_CACHE_STATISTICS_H
#define KVANT_CACHE_STATISTICS_H

#include <kvant/kvant.h>

#include <stdbool.h>

#define KVANT_STATISTICS_PARTS 8u

/* Rows from which a version is made: enough for a mean that removes nearly all of the constant part
 * of keys. */
#define KVANT_STATISTICS_ROWS 64u

/* Rows of a batch that are looked at, spread over it. */
#define KVANT_STATISTICS_MOST 512u

typedef struct kvant_statistics {
    uint32_t n;
    size_t width;           /* channels of all kv heads */
    float *sum, *min, *max; /* parts x width each, one allocation; NULL where nothing is learnt */
} kvant_statistics;

kvant_status kvant_statistics_create(kvant_statistics *statistics, size_t width);
void kvant_statistics_destroy(kvant_statistics *statistics);
void kvant_statistics_reset(kvant_statistics *statistics);

/* Adds n finite rows of width floats, row i at rows + i * stride. */
void kvant_statistics_add(kvant_statistics *statistics, const float *rows, size_t stride, size_t n);

/* center[j] for channels first .. first + n - 1. */
void kvant_statistics_center(const kvant_statistics *statistics, size_t first, uint32_t n, float *center);

/* distance[j] = the largest distance from center[j] (NULL: from 0) that is not an outlier's. */
void kvant_statistics_distance(const kvant_statistics *statistics, size_t first, uint32_t n, const float *center,
                               float *distance);

#endif
