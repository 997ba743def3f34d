/* cluster.c - see cluster.h.
 *
 * Let m be the mean of all rows. The nearest centroid c of a row x has the largest <x - m, c - m> -
 * |c - m|^2 / 2. Keys may be far from zero and close together. Without m the products would be
 * large numbers whose differences are mostly rounding errors. Every CPU level sums products in the
 * same order. */
#include "cluster.h"

#include <stdbool.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/random.h"
#include "../kernels/kernels.h"

/* k-means++ starts close to the result: with keys and values of real models most assignments are
 * final after about ten iterations. */
#define MAX_ITERATIONS 25

typedef struct work {
    const kvant_kernels *kernels;
    const float *rows;
    size_t n;
    uint32_t d, k;
    float *centroids;    /* k x d */
    float *mean, *point; /* d, d + 1 */
    float *moved;        /* n x d: rows minus their mean */
    float *columns;      /* (d + 1) x k: centroids minus the mean, then -|c - m|^2 / 2 of each */
    float *products;     /* n, of which assign uses k */
    float *squares;      /* n: |x - m|^2 */
    uint32_t *nearest;
    float *nearest_distance;
    double *sums; /* k x d */
    uint32_t *counts;
} work;

static void release(work *w)
{
    void *all[] = { w->mean,     w->point,   w->moved,   w->columns,
                    w->products, w->squares, w->nearest, w->nearest_distance,
                    w->sums,     w->counts };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        kvant_free(all[i]);
}

static bool allocate(work *w)
{
    w->mean = kvant_alloc(w->d, sizeof *w->mean);
    w->point = kvant_alloc(w->d + 1, sizeof *w->point);
    w->moved = kvant_alloc(w->n, w->d * sizeof *w->moved);
    w->columns = kvant_alloc((size_t)w->k * (w->d + 1), sizeof *w->columns);
    w->products = kvant_alloc(w->n, sizeof *w->products);
    w->squares = kvant_alloc(w->n, sizeof *w->squares);
    w->nearest = kvant_alloc(w->n, sizeof *w->nearest);
    w->nearest_distance = kvant_alloc(w->n, sizeof *w->nearest_distance);
    w->sums = kvant_alloc((size_t)w->k * w->d, sizeof *w->sums);
    w->counts = kvant_alloc(w->k, sizeof *w->counts);
    return w->mean && w->point && w->moved && w->columns && w->products && w->squares &&
           w->nearest && w->nearest_distance && w->sums && w->counts;
}

static void move_rows(work *w)
{
    for (uint32_t j = 0; j < w->d; j++) {
        double sum = 0;
        for (size_t i = 0; i < w->n; i++)
            sum += w->rows[i * w->d + j];
        w->mean[j] = (float)(sum / (double)w->n);
    }
    for (size_t i = 0; i < w->n; i++)
        for (uint32_t j = 0; j < w->d; j++)
            w->moved[i * w->d + j] = w->rows[i * w->d + j] - w->mean[j];
}

/* Draws a row with a probability in proportion to its squared distance from the nearest centroid.
 * It takes the row at which the running sum of the distances passes a random share of the total. */
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
    return kvant_splitmix64(random) % w->n; /* every row equals a centroid already */
}

/* Seeds by k-means++. Equal rows have a distance of exactly 0, because the three sums are the
 * same. */
static void seed_centroids(work *w, uint64_t seed)
{
    const uint32_t d = w->d;
    size_t pick = kvant_splitmix64(&seed) % w->n;
    for (size_t i = 0; i < w->n; i++)
        w->squares[i] = w->kernels->dot(w->moved + i * d, w->moved + i * d, d);
    for (uint32_t c = 0; c < w->k; c++) {
        memcpy(w->centroids + (size_t)c * d, w->rows + pick * d, d * sizeof *w->centroids);
        w->kernels->dot_rows(w->moved + pick * d, w->moved, d, (uint32_t)w->n, w->products);
        for (size_t i = 0; i < w->n; i++) {
            float distance = w->squares[i] + w->squares[pick] - 2 * w->products[i];
            distance = distance > 0 ? distance : 0;
            if (c == 0 || distance < w->nearest_distance[i])
                w->nearest_distance[i] = distance;
        }
        pick = draw(w, &seed);
    }
}

static void place_columns(work *w)
{
    for (uint32_t c = 0; c < w->k; c++) {
        for (uint32_t j = 0; j < w->d; j++) {
            w->point[j] = w->centroids[(size_t)c * w->d + j] - w->mean[j];
            w->columns[(size_t)j * w->k + c] = w->point[j];
        }
        w->columns[(size_t)w->d * w->k + c] = w->kernels->dot(w->point, w->point, w->d) / -2;
    }
}

/* Assigns every row to its nearest centroid. Returns whether any row changed its centroid. */
static bool assign(work *w)
{
    bool changed = false;
    place_columns(w);
    w->point[w->d] = 1;
    for (size_t i = 0; i < w->n; i++) {
        float least, most;
        uint32_t best = 0;
        memcpy(w->point, w->moved + i * w->d, w->d * sizeof *w->point);
        w->kernels->combine_rows(w->columns, w->point, w->d + 1, w->k, 1, w->products);
        w->kernels->range(w->products, w->k, &least, &most);
        while (best + 1 < w->k && w->products[best] != most)
            best++;
        changed |= best != w->nearest[i];
        w->nearest[i] = best;
    }
    return changed;
}

/* Moves each centroid to the mean of its rows. A centroid without rows keeps its place, because
 * k-means++ makes this rare and the centroid may get rows again. */
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
            w->centroids[(size_t)c * w->d + j] =
                (float)(w->sums[(size_t)c * w->d + j] / w->counts[c]);
}

kvant_status kvant_cluster(const float *rows, size_t n, uint32_t d, uint32_t k, uint64_t seed,
                           float *centroids)
{
    work w = { .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
               .rows = rows,
               .n = n,
               .d = d,
               .k = k,
               .centroids = centroids };
    kvant_status status = allocate(&w) ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        move_rows(&w);
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
