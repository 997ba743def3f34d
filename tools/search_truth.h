/* search_truth.h - the nearest vectors by an exact search, and how many of them an index found. */
#pragma once

#include "vectors.h"

#include <kvant/index.h>

typedef struct search_truth {
    kvant_metric metric;
    uint32_t k;
    float *least;   /* per query: closeness of the k-th */
    float *squared; /* per vector: |x|^2 */
} search_truth;

/* False after complaining, or when interrupted. search_truth_free in any case. */
bool search_truth_find(search_truth *truth, kvant_metric metric, uint32_t k, const vectors *base,
                       const vectors *queries);
void search_truth_free(search_truth *truth);

/* The part of the k nearest that ids has, k of each query. */
double search_truth_recall(const search_truth *truth, const vectors *base, const vectors *queries,
                           const uint64_t *ids);
