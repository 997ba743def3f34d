/* search_rank.c - makes results from candidates: merges the candidates of all ranges, reranks them
 * if the caller wants it, and sorts them. */
#include <math.h>

#include "search.h"

/* The sum of a[i] b[i], or of (a[i] - b[i])^2. Compilers vectorise the partial sums. */
static double exact_sum(const float *a, const float *b, uint32_t n, bool differences)
{
    double s[8] = { 0 };
    for (uint32_t i = 0; i < n; i += 8)
        for (uint32_t j = 0; j < 8 && i + j < n; j++) {
            const double x = a[i + j], y = b[i + j], d = x - y;
            s[j] += differences ? d * d : x * y;
        }
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

static float exact_score(const search *s, const float *q, const float *x)
{
    const uint32_t dim = s->index->dim;
    const double sum = exact_sum(q, x, dim, s->index->metric == KVANT_METRIC_L2);
    if (s->index->metric != KVANT_METRIC_COSINE)
        return (float)sum;
    const double qq = exact_sum(q, q, dim, false), xx = exact_sum(x, x, dim, false);
    return (float)(qq > 0 && xx > 0 ? sum / (sqrt(qq) * sqrt(xx)) : 0);
}

static float score_of(const search *s, size_t i, const kvant_found *found)
{
    const float score = found->key * s->steps[i] + s->constants[i];
    return s->index->metric == KVANT_METRIC_L2 && score < 0 ? 0 : score;
}

static const float *original_of(const kvant_index_query *query, uint64_t id)
{
    if (query->original)
        return query->original(query->original_context, id);
    return id < query->n_originals ? query->originals + (size_t)id * query->original_stride : NULL;
}

static bool uses_rows(const kvant_index *index, const kvant_index_query *query)
{
    return index->has_rows && !query->original && !query->originals;
}

/* The score of a stored row. query: the query with its y transformed like rows. */
static float row_score(const search *s, const kvant_index_row *query, size_t slot)
{
    const kvant_index *index = s->index;
    const bool distance = index->metric == KVANT_METRIC_L2;
    float key = s->kernels->dot_codes(query->y, index->rows + slot * index->dim, index->dim,
                                      index->row_book.values, 8);
    key = ldexpf(key * index->row_factors[slot], query->exponent);
    if (index->offsets)
        key += index->offsets[slot] * query->weight;
    const float score = distance ? query->squared - 2 * key : key;
    return distance && score < 0 ? 0 : score;
}

/* Replaces the candidates' scores by exact ones, or with rows=int8 by nearly exact ones. */
static void rank_again(const search *s, size_t i, uint32_t worker, kvant_top *top)
{
    const kvant_index *index = s->index;
    const kvant_index_query *query = s->query;
    const float *q = query->rows + i * query->stride;
    const bool distance = index->metric == KVANT_METRIC_L2, rows = uses_rows(index, query);
    kvant_index_row row = { .y = NULL };
    if (rows)
        row = kvant_index_transform_row(index, s->kernels, q, true,
                                        s->scratch + worker * kvant_index_scratch(index));
    for (uint32_t j = 0; j < top->n; j++) {
        const float *x = rows ? NULL : original_of(query, top->found[j].id);
        const float score = rows ? row_score(s, &row, top->found[j].slot)
                            : x  ? exact_score(s, q, x)
                                 : score_of(s, i, &top->found[j]);
        top->found[j].key = distance ? -score : score;
    }
    for (uint32_t j = top->n / 2; j-- > 0;)
        kvant_top_sink(top->found, top->n, j, top->found[j]);
    kvant_top_sort(top);
}

void kvant_search_finish_query(void *context, size_t i, uint32_t worker)
{
    const kvant_search_results *r = context;
    const search *s = r->search;
    const bool distance = s->index->metric == KVANT_METRIC_L2, again = s->query->rerank > 0;
    kvant_found *first = s->found + i * s->n_ranges * s->k;
    kvant_top top = { first, s->n_found[i * s->n_ranges], s->k };
    for (size_t range = 1; range < s->n_ranges; range++)
        for (uint32_t j = 0; j < s->n_found[i * s->n_ranges + range]; j++)
            kvant_top_add(&top, first[range * s->k + j]);
    if (again)
        rank_again(s, i, worker, &top);
    else
        kvant_top_sort(&top);
    for (uint32_t j = 0; j < s->query->k; j++) {
        const bool there = j < top.n;
        r->ids[i * s->query->k + j] = there ? top.found[j].id : KVANT_INDEX_NO_ID;
        r->scores[i * s->query->k + j] = !there  ? distance ? INFINITY : -INFINITY
                                         : again ? distance ? -top.found[j].key : top.found[j].key
                                                 : score_of(s, i, &top.found[j]);
    }
}
