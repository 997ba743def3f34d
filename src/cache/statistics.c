/* statistics.c - see statistics.h. */
#include "statistics.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"

#define PARTS KVANT_STATISTICS_PARTS

/* A part's largest distance counts up to this many times the median of the parts'. Of 8 parts of 8
 * normally distributed rows the largest is 1.7 times the median, so ordinary rows are not touched;
 * one outlier at most doubles a scale, a square root. */
#define MOST_DISTANCE 4.0f

kvant_status kvant_statistics_create(kvant_statistics *statistics, size_t width)
{
    size_t n;
    KVANT_RETURN_IF(!kvant_mul_size(width, 3 * PARTS, &n), KVANT_ERR_MEMORY);
    statistics->sum = kvant_alloc(n, sizeof *statistics->sum);
    KVANT_RETURN_IF(!statistics->sum, KVANT_ERR_MEMORY);
    statistics->width = width;
    statistics->min = statistics->sum + PARTS * width;
    statistics->max = statistics->min + PARTS * width;
    return KVANT_OK;
}

void kvant_statistics_destroy(kvant_statistics *statistics)
{
    kvant_free(statistics->sum);
    *statistics = (kvant_statistics){ 0 };
}

void kvant_statistics_reset(kvant_statistics *statistics)
{
    statistics->n = 0;
}

static void add_row(kvant_statistics *s, const float *row)
{
    size_t first = s->n % PARTS * s->width;
    float *restrict sum = s->sum + first, *restrict min = s->min + first, *restrict max = s->max + first;
    if (s->n < PARTS) {
        memcpy(sum, row, s->width * sizeof *sum);
        memcpy(min, row, s->width * sizeof *min);
        memcpy(max, row, s->width * sizeof *max);
    } else {
        for (size_t j = 0; j < s->width; j++) {
            sum[j] += row[j];
            min[j] = row[j] < min[j] ? row[j] : min[j];
            max[j] = row[j] > max[j] ? row[j] : max[j];
        }
    }
    s->n++;
}

void kvant_statistics_add(kvant_statistics *statistics, const float *rows, size_t stride, size_t n)
{
    size_t taken = n < KVANT_STATISTICS_MOST ? n : KVANT_STATISTICS_MOST;
    for (size_t i = 0; i < taken; i++)
        add_row(statistics, rows + i * n / taken * stride);
}

static uint32_t parts_of(const kvant_statistics *s)
{
    return s->n < PARTS ? s->n : PARTS;
}

static uint32_t rows_of(const kvant_statistics *s, uint32_t part)
{
    return s->n / PARTS + (part < s->n % PARTS);
}

/* The lower middle one of n <= PARTS numbers. */
static float median(const float *x, uint32_t n)
{
    float sorted[PARTS];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;
        for (; at > 0 && sorted[at - 1] > x[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = x[i];
    }
    return sorted[(n - 1) / 2];
}

static float center_of(const kvant_statistics *s, size_t j)
{
    float mean[PARTS], range[PARTS];
    uint32_t parts = parts_of(s);
    for (uint32_t p = 0; p < parts; p++) {
        mean[p] = s->sum[p * s->width + j] / (float)rows_of(s, p);
        range[p] = s->max[p * s->width + j] - s->min[p * s->width + j];
    }
    /* Parts of one row have no range: then there is nothing to judge them by. */
    float middle = median(mean, parts), limit = s->n > PARTS ? median(range, parts) : INFINITY;
    double sum = 0;
    for (uint32_t p = 0; p < parts; p++)
        sum += (double)fminf(fmaxf(mean[p], middle - limit), middle + limit) * rows_of(s, p);
    return (float)(sum / s->n);
}

void kvant_statistics_center(const kvant_statistics *statistics, size_t first, uint32_t n, float *center)
{
    for (uint32_t j = 0; j < n; j++)
        center[j] = center_of(statistics, first + j);
}

static float distance_of(const kvant_statistics *s, size_t j, float center)
{
    float distance[PARTS], largest = 0;
    uint32_t parts = parts_of(s);
    for (uint32_t p = 0; p < parts; p++)
        distance[p] = fmaxf(s->max[p * s->width + j] - center, center - s->min[p * s->width + j]);
    float limit = MOST_DISTANCE * median(distance, parts);
    for (uint32_t p = 0; p < parts; p++)
        largest = fmaxf(largest, fminf(distance[p], limit));
    return largest;
}

void kvant_statistics_distance(const kvant_statistics *statistics, size_t first, uint32_t n, const float *center,
                               float *distance)
{
    for (uint32_t j = 0; j < n; j++)
        distance[j] = distance_of(statistics, first + j, center ? center[j] : 0);
}
