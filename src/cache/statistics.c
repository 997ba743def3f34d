/* statistics.c - see statistics.h.
 *
 * An estimate is robust against a few outlier rows. A part of the rows is clipped when it differs
 * from the median of all parts by more than parts usually differ. So one part, whatever its rows,
 * moves the result by a bounded amount. With ordinary rows the result is their mean and their
 * largest distance from it. */
#include "statistics.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"

#define PARTS KVANT_STATISTICS_PARTS

/* A part's largest distance counts up to this many times the median of all parts. With 8 parts of 8
 * normally distributed rows the largest distance is 1.7 times the median, so ordinary rows are not
 * limited. One outlier at most doubles a scale, because a scale is a square root. */
#define MOST_DISTANCE 4.0f

void kvant_statistics_set_memory(kvant_statistics *statistics, size_t width, float *memory)
{
    *statistics =
        (kvant_statistics){ 0, width, memory, memory + PARTS * width, memory + 2 * PARTS * width };
}

kvant_status kvant_statistics_create(kvant_statistics *statistics, size_t width)
{
    size_t n;
    KVANT_RETURN_IF(!kvant_mul_size(width, 3 * PARTS, &n), KVANT_ERR_MEMORY);
    float *memory = kvant_alloc(n, sizeof *memory);
    KVANT_RETURN_IF(!memory, KVANT_ERR_MEMORY);
    kvant_statistics_set_memory(statistics, width, memory);
    return KVANT_OK;
}

static void add_row(kvant_statistics *s, const float *row)
{
    size_t first = s->n % PARTS * s->width;
    float *restrict sum = s->sum + first, *restrict min = s->min + first,
                    *restrict max = s->max + first;
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

void kvant_statistics_add(kvant_statistics *statistics, const float *rows, size_t stride, size_t n,
                          size_t taken)
{
    for (size_t i = 0; i < taken; i++)
        add_row(statistics, rows + i * n / taken * stride);
}

uint32_t kvant_statistics_parts(const kvant_statistics *s)
{
    return s->n < PARTS ? s->n : PARTS;
}

static uint32_t rows_of(const kvant_statistics *s, uint32_t part)
{
    return s->n / PARTS + (part < s->n % PARTS);
}

/* A number of each part for some channels. All functions below work on 64 channels at once, because
 * a judgement reads all channels several times. */
#define CHANNELS 64u
typedef float by_part[PARTS][CHANNELS];

/* Both numbers are computed before one is stored: compilers vectorise this form, and make branches
 * of others. */
static void put_in_order(float *restrict a, float *restrict b)
{
    for (uint32_t j = 0; j < CHANNELS; j++) {
        const float low = a[j] < b[j] ? a[j] : b[j], high = a[j] < b[j] ? b[j] : a[j];
        a[j] = low;
        b[j] = high;
    }
}

/* The lower median of the first n parts, for each channel. */
static void medians(by_part x, uint32_t n, float *out)
{
    by_part sorted;
    memcpy(sorted, x, sizeof sorted);
    for (uint32_t round = 0; round < n; round++)
        for (uint32_t p = round % 2; p + 1 < n; p += 2)
            put_in_order(sorted[p], sorted[p + 1]);
    memcpy(out, sorted[(n - 1) / 2], sizeof *sorted);
}

static float limited(float x, float low, float high)
{
    x = x < low ? low : x;
    return x > high ? high : x;
}

/* The centres of n <= CHANNELS channels from number `at` on. */
static void centers_of(const kvant_statistics *s, size_t at, uint32_t n, float *centers)
{
    by_part mean = { 0 }, range = { 0 };
    float middle[CHANNELS], limit[CHANNELS];
    const uint32_t parts = kvant_statistics_parts(s);
    for (uint32_t p = 0; p < parts; p++)
        for (uint32_t j = 0; j < n; j++) {
            const size_t i = p * s->width + at + j;
            mean[p][j] = s->sum[i] / (float)rows_of(s, p);
            range[p][j] = s->max[i] - s->min[i];
        }
    medians(mean, parts, middle);
    medians(range, parts, limit);
    for (uint32_t j = 0; j < n; j++) {
        /* Parts of one row have no range, so there is no limit. */
        const float most = s->n > PARTS ? limit[j] : INFINITY;
        double sum = 0;
        for (uint32_t p = 0; p < parts; p++)
            sum += (double)limited(mean[p][j], middle[j] - most, middle[j] + most) * rows_of(s, p);
        centers[j] = (float)(sum / s->n);
    }
}

/* The largest distances from the centres, for n <= CHANNELS channels. A part's distance is limited
 * as MOST_DISTANCE says. */
static void distances_of(const kvant_statistics *s, size_t at, uint32_t n, const float *centers,
                         float *distances)
{
    by_part distance = { 0 };
    float middle[CHANNELS];
    const uint32_t parts = kvant_statistics_parts(s);
    for (uint32_t p = 0; p < parts; p++)
        for (uint32_t j = 0; j < n; j++) {
            const float above = s->max[p * s->width + at + j] - centers[j];
            const float below = centers[j] - s->min[p * s->width + at + j];
            distance[p][j] = above > below ? above : below;
        }
    medians(distance, parts, middle);
    memset(distances, 0, n * sizeof *distances);
    for (uint32_t p = 0; p < parts; p++)
        for (uint32_t j = 0; j < n; j++) {
            const float limit = MOST_DISTANCE * middle[j],
                        d = distance[p][j] < limit ? distance[p][j] : limit;
            distances[j] = d > distances[j] ? d : distances[j];
        }
}

static uint32_t channels_from(uint32_t first, uint32_t n)
{
    return n - first < CHANNELS ? n - first : CHANNELS;
}

void kvant_statistics_centers(const kvant_statistics *s, size_t at, uint32_t n, float *centers)
{
    for (uint32_t j = 0; j < n; j += CHANNELS)
        centers_of(s, at + j, channels_from(j, n), centers + j);
}

void kvant_statistics_distances(const kvant_statistics *s, size_t at, uint32_t n,
                                const float *centers, float *distances)
{
    for (uint32_t j = 0; j < n; j += CHANNELS)
        distances_of(s, at + j, channels_from(j, n), centers + j, distances + j);
}

void kvant_statistics_copy(kvant_statistics *to, const kvant_statistics *from, size_t n)
{
    const size_t width = from->width, bytes = width * sizeof *from->sum;
    for (uint32_t i = 0; i < n && i < PARTS; i++) {
        const size_t at = (to->n + i) % PARTS * width;
        memcpy(to->sum + at, from->sum + at, bytes);
        memcpy(to->min + at, from->min + at, bytes);
        memcpy(to->max + at, from->max + at, bytes);
    }
}
