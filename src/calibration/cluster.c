/* cluster.c - see cluster.h.
 *
 * A distance is the sum of squared differences in binary32, not |x|^2 - 2 x c + |c|^2. Keys may lie
 * far from zero and close together; then the difference of large numbers would be noise. */
#include "cluster.h"

#include <stdbool.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/random.h"

/* k-means++ starts close: on keys and values of real models most assignments are final after about
 * ten. */
#define MAX_ITERATIONS 25

typedef struct work {
    const float *rows;
    size_t n;
    uint32_t d, k;
    float *centroids; /* k x d */
    float *columns;   /* the same, d x k, so that a row meets all centroids in loops without gathers */
    float *distances; /* of one row to the k centroids */
    uint32_t *nearest;
    float *nearest_distance;
    double *sums; /* k x d */
    uint32_t *counts;
} work;

static void release(work *w)
{
    kvant_free(w->columns);
    kvant_free(w->distances);
    kvant_free(w->nearest);
    kvant_free(w->nearest_distance);
    kvant_free(w->sums);
    kvant_free(w->counts);
}

static bool allocate(work *w)
{
    w->columns = kvant_alloc((size_t)w->k * w->d, sizeof *w->columns);
    w->distances = kvant_alloc(w->k, sizeof *w->distances);
    w->nearest = kvant_alloc(w->n, sizeof *w->nearest);
    w->nearest_distance = kvant_alloc(w->n, sizeof *w->nearest_distance);
    w->sums = kvant_alloc((size_t)w->k * w->d, sizeof *w->sums);
    w->counts = kvant_alloc(w->k, sizeof *w->counts);
    return w->columns && w->distances && w->nearest && w->nearest_distance && w->sums && w->counts;
}

static float squared_distance(const float *a, const float *b, uint32_t d)
{
    float sum = 0;
    for (uint32_t j = 0; j < d; j++)
        sum += (a[j] - b[j]) * (a[j] - b[j]);
    return sum;
}

/* The row at which the running sum of squared distances to the centroids so far passes a random
 * share of the whole. */
static size_t draw(const work *w, uint64_t *random)
{
    double total = 0, sum = 0;
    for (size_t i = 0; i < w->n; i++)
        total += w->nearest_distance[i];
    double target = (double)(kvant_splitmix64(random) >> 11) * 0x1p-53 * total;
    for (size_t i = 0; i < w->n; i++) {
        sum += w->nearest_distance[i];
        if (sum > target)
            return i;
    }
    return kvant_splitmix64(random) % w->n; /* all rows are centroids already */
}

static void seed_centroids(work *w, uint64_t seed)
{
    size_t pick = kvant_splitmix64(&seed) % w->n;
    for (uint32_t c = 0; c < w->k; c++) {
        float *centroid = w->centroids + (size_t)c * w->d;
        memcpy(centroid, w->rows + pick * w->d, w->d * sizeof *centroid);
        for (size_t i = 0; i < w->n; i++) {
            float distance = squared_distance(w->rows + i * w->d, centroid, w->d);
            if (c == 0 || distance < w->nearest_distance[i])
                w->nearest_distance[i] = distance;
        }
        pick = draw(w, &seed);
    }
}

static void add_squares(float *distances, const float *column, uint32_t k, float x)
{
    for (uint32_t c = 0; c < k; c++)
        distances[c] += (x - column[c]) * (x - column[c]);
}

static uint32_t lowest(const float *distances, uint32_t k)
{
    uint32_t best = 0;
    for (uint32_t c = 1; c < k; c++)
        best = distances[c] < distances[best] ? c : best;
    return best;
}

/* Whether any row changed its centroid. */
static bool assign(work *w)
{
    bool changed = false;
    for (uint32_t c = 0; c < w->k; c++)
        for (uint32_t j = 0; j < w->d; j++)
            w->columns[(size_t)j * w->k + c] = w->centroids[(size_t)c * w->d + j];
    for (size_t i = 0; i < w->n; i++) {
        memset(w->distances, 0, w->k * sizeof *w->distances);
        for (uint32_t j = 0; j < w->d; j++)
            add_squares(w->distances, w->columns + (size_t)j * w->k, w->k, w->rows[i * w->d + j]);
        uint32_t best = lowest(w->distances, w->k);
        changed |= best != w->nearest[i];
        w->nearest[i] = best;
        w->nearest_distance[i] = w->distances[best];
    }
    return changed;
}

/* A centroid that lost all its rows stays where it is: k-means++ makes that rare, and it may win
 * some back. */
static void update(work *w)
{
    memset(w->sums, 0, (size_t)w->k * w->d * sizeof *w->sums);
    memset(w->counts, 0, w->k * sizeof *w->counts);
    for (size_t i = 0; i < w->n; i++) {
        double *sum = w->sums + (size_t)w->nearest[i] * w->d;
        for (uint32_t j = 0; j < w->d; j++)
            sum[j] += w->rows[i * w->d + j];
        w->counts[w->nearest[i]]++;
    }
    for (uint32_t c = 0; c < w->k; c++)
        for (uint32_t j = 0; w->counts[c] && j < w->d; j++)
            w->centroids[(size_t)c * w->d + j] = (float)(w->sums[(size_t)c * w->d + j] / w->counts[c]);
}

kvant_status kvant_cluster(const float *rows, size_t n, uint32_t d, uint32_t k, uint64_t seed, float *centroids)
{
    work w = { .rows = rows, .n = n, .d = d, .k = k, .centroids = centroids };
    kvant_status status = allocate(&w) ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        seed_centroids(&w, seed);
        assign(&w);
        for (uint32_t i = 0; i < MAX_ITERATIONS; i++) {
            update(&w);
            if (!assign(&w))
                break;
        }
    }
    release(&w);
    return status;
}
