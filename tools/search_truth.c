/* search_truth.c - see search_truth.h. */
#include "search_truth.h"

#include "command.h"
#include "interrupt.h"
#include "progress.h"

#include <math.h>
#include <stdlib.h>

/* 16 sums: compilers make vectors of them. */
static float product(const float *a, const float *b, uint32_t n)
{
    float sums[16] = { 0 }, sum = 0;
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (uint32_t j = 0; j < 16; j++)
            sums[j] += a[i + j] * b[i + j];
    for (; i < n; i++)
        sum += a[i] * b[i];
    for (uint32_t j = 0; j < 16; j++)
        sum += sums[j];
    return sum;
}

/* Larger is nearer, for one query: inner products, cosines times |q|, or -|x|^2 / 2 + <q, x>. */
static float closeness(kvant_metric metric, float product, float squared)
{
    if (metric == KVANT_METRIC_COSINE)
        return squared > 0 ? product / sqrtf(squared) : 0;
    return metric == KVANT_METRIC_L2 ? product - squared / 2 : product;
}

/* The closeness of the k-th nearest vector. Every vector that is at least as close counts as found,
 * ties too. */
static float kth_largest(const float *all, size_t n, uint32_t k, float *top)
{
    uint32_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        if (kept == k && all[i] <= top[k - 1])
            continue;
        uint32_t at = kept < k ? kept++ : k - 1;
        for (; at > 0 && top[at - 1] < all[i]; at--)
            top[at] = top[at - 1];
        top[at] = all[i];
    }
    return top[kept - 1];
}

bool search_truth_find(search_truth *t, kvant_metric metric, uint32_t k, const vectors *base,
                       const vectors *queries)
{
    progress p;
    float *all = calloc(base->n, sizeof *all), *top = calloc(k, sizeof *top);
    *t = (search_truth){ .metric = metric, .k = k };
    t->least = calloc(queries->n, sizeof *t->least);
    t->squared = calloc(base->n, sizeof *t->squared);
    const bool ok = (all != NULL && top != NULL && t->least != NULL && t->squared != NULL) ||
                    complain("search: out of memory");
    for (size_t i = 0; ok && i < base->n; i++)
        t->squared[i] = product(base->rows + i * base->dim, base->rows + i * base->dim, base->dim);
    progress_start(&p, (double)queries->n);
    for (size_t q = 0; ok && q < queries->n && !interrupted(); q++) {
        for (size_t i = 0; i < base->n; i++)
            all[i] = closeness(
                metric,
                product(queries->rows + q * base->dim, base->rows + i * base->dim, base->dim),
                t->squared[i]);
        t->least[q] = kth_largest(all, base->n, k, top);
        progress_add(&p, 1, "exact search");
    }
    progress_end(&p);
    free(all);
    free(top);
    return ok && !interrupted();
}

void search_truth_free(search_truth *t)
{
    free(t->least);
    free(t->squared);
}

double search_truth_recall(const search_truth *t, const vectors *base, const vectors *queries,
                           const uint64_t *ids)
{
    size_t hits = 0;
    const size_t k = t->k < base->n ? t->k : base->n;
    for (size_t q = 0; q < queries->n; q++)
        for (uint32_t j = 0; j < t->k; j++) {
            const uint64_t id = ids[q * t->k + j];
            if (id != KVANT_INDEX_NO_ID)
                hits += closeness(t->metric,
                                  product(queries->rows + q * base->dim,
                                          base->rows + id * base->dim, base->dim),
                                  t->squared[id]) >= t->least[q];
        }
    return (double)hits / (double)(queries->n * k);
}
