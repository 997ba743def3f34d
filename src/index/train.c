/* train.c - learns from rows: their mean and, with dims=, their principal directions.
 *
 * Both are summed in binary64 in the order of the rows, so they have the same bits on every
 * machine. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/alloc.h"
#include "../math/tridiagonal.h"
#include "lists.h"
#include "../calibration/cluster.h"

typedef struct training {
    const float *rows;
    size_t stride, n;
    uint32_t dim, kept;
    float *row; /* a row as the index encodes it: of length 1 for cosine */
    double *mean, *difference, *moments, *values, *vectors;
    uint32_t *order;
} training;

static void read_row(const kvant_index *index, training *t, size_t i)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    memcpy(t->row, t->rows + i * t->stride, t->dim * sizeof *t->row);
    if (index->metric == KVANT_METRIC_COSINE)
        kvant_index_normalise(kernels, t->row, t->dim);
}

static void find_mean(const kvant_index *index, training *t, float *center)
{
    for (size_t i = 0; i < t->n; i++) {
        read_row(index, t, i);
        for (uint32_t j = 0; j < t->dim; j++)
            t->mean[j] += t->row[j];
    }
    for (uint32_t j = 0; j < t->dim; j++)
        center[j] = (float)(t->mean[j] / (double)t->n);
}

static void add_products(double *moments, const double *x, uint32_t dim)
{
    for (uint32_t i = 0; i < dim; i++)
        for (uint32_t j = 0; j <= i; j++)
            moments[(size_t)i * dim + j] += x[i] * x[j];
}

static void find_moments(const kvant_index *index, training *t, const float *center)
{
    for (size_t i = 0; i < t->n; i++) {
        read_row(index, t, i);
        for (uint32_t j = 0; j < t->dim; j++)
            t->difference[j] = (double)t->row[j] - center[j];
        add_products(t->moments, t->difference, t->dim);
    }
    for (uint32_t i = 0; i < t->dim; i++)
        for (uint32_t j = 0; j < i; j++)
            t->moments[(size_t)j * t->dim + i] = t->moments[(size_t)i * t->dim + j];
}

/* Sorts indices by eigenvalue, the largest first. Equal eigenvalues keep their order. */
static void sort_values(training *t)
{
    for (uint32_t i = 0; i < t->dim; i++) {
        uint32_t at = i;
        for (; at > 0 && t->values[t->order[at - 1]] < t->values[i]; at--)
            t->order[at] = t->order[at - 1];
        t->order[at] = i;
    }
}

static kvant_status find_projection(const kvant_index *index, training *t, const float *center,
                                    float *projection)
{
    find_moments(index, t, center);
    KVANT_FORWARD(kvant_tridiagonal_eigen(t->dim, t->moments, t->values, t->vectors));
    sort_values(t);
    for (uint32_t k = 0; k < t->kept; k++)
        for (uint32_t i = 0; i < t->dim; i++)
            projection[(size_t)i * t->kept + k] =
                (float)t->vectors[(size_t)t->order[k] * t->dim + i];
    return KVANT_OK;
}

/* Finds centroids by k-means of the centred rows, or takes the ones that the caller gave. */
static kvant_status find_lists(kvant_index *index, const training *t, const float *old_center)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    float *rows = kvant_alloc(t->n, t->dim * sizeof *rows);
    float *centroids = kvant_alloc(index->n_lists, t->dim * sizeof *centroids);
    kvant_index_row row;
    kvant_status status = rows && centroids ? KVANT_OK : KVANT_ERR_MEMORY;
    for (size_t i = 0; status == KVANT_OK && i < t->n; i++)
        kvant_index_centre(index, kernels, t->rows + i * t->stride, false, rows + i * t->dim, &row);
    double squares = 0;
    for (size_t i = 0; status == KVANT_OK && i < t->n; i++)
        squares += kernels->dot(rows + i * t->dim, rows + i * t->dim, t->dim);
    index->radius = squares > 0 ? (float)sqrt(squares / (double)t->n) : 1;
    const float *old = index->centroids;
    if (status == KVANT_OK && index->given_lists) {
        memcpy(centroids, old, (size_t)index->n_lists * t->dim * sizeof *centroids);
        kvant_lists_move(centroids, index, old_center);
    } else if (status == KVANT_OK) {
        status = kvant_cluster(rows, t->n, t->dim, index->n_lists, index->seed, centroids);
    }
    kvant_free(rows);
    if (status == KVANT_OK)
        status = kvant_lists_set(index, centroids);
    kvant_free(status == KVANT_OK ? KVANT_OWN(float, old) : centroids);
    return status;
}

static bool allocate(training *t, bool project, kvant_arrays *a)
{
    const size_t square = project ? (size_t)t->dim * t->dim : 1;
    t->row = kvant_arrays_new(a, t->dim, sizeof *t->row);
    t->mean = kvant_arrays_new(a, t->dim, sizeof *t->mean);
    t->difference = kvant_arrays_new(a, t->dim, sizeof *t->difference);
    t->values = kvant_arrays_new(a, t->dim, sizeof *t->values);
    t->order = kvant_arrays_new(a, t->dim, sizeof *t->order);
    t->moments = kvant_arrays_new(a, square, sizeof *t->moments);
    t->vectors = kvant_arrays_new(a, square, sizeof *t->vectors);
    return !a->failed;
}

static void replace(const float **array, float *by)
{
    kvant_free(KVANT_OWN(float, *array));
    *array = by;
}

kvant_status kvant_index_train(kvant_index *index, const float *rows, size_t stride, size_t n)
{
    if (!index || !rows || n < 1 || (n > 1 && stride < index->dim))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "%s",
                          n < 1 ? "n is 0: there are no rows to learn from"
                                : "index or rows is NULL, or stride is less than dim");
    if (index->mapped || index->n)
        return kvant_fail(
            NULL, KVANT_ERR_UNSUPPORTED,
            "the index has vectors or is a view of a file: train it while it is empty");
    KVANT_FORWARD(kvant_index_check_rows(index, rows, stride, n));
    const bool project = index->project;
    if (n < index->n_lists && !index->given_lists)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "%s needs at least %u rows to learn from",
                          index->spec, (unsigned)index->n_lists);
    training t = {
        .rows = rows, .stride = stride, .n = n, .dim = index->dim, .kept = index->code_dim
    };
    kvant_arrays arrays = { .n = 0 };
    float *center = kvant_alloc(index->dim, sizeof *center);
    float *projection =
        kvant_alloc(project ? (size_t)index->dim * index->code_dim : 1, sizeof *projection);
    kvant_status status =
        allocate(&t, project, &arrays) && center && projection ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        find_mean(index, &t, center);
    if (status == KVANT_OK && project)
        status = find_projection(index, &t, center, projection);
    kvant_arrays_free(&arrays);
    if (status != KVANT_OK || !project) {
        kvant_free(projection);
        projection = NULL;
    }
    if (status != KVANT_OK) {
        kvant_free(center);
        return kvant_index_report_error(status);
    }
    /* Frees arrays that removed vectors left, because with a centre there are also offsets. */
    kvant_index_forget(index);
    const float *old_center = index->center;
    index->center = center;
    replace(&index->projection, projection);
    index->needs_training = index->n_lists > 0;
    if (index->n_lists)
        status = find_lists(index, &t, old_center);
    index->needs_training = status != KVANT_OK;
    if (status != KVANT_OK)
        index->center = old_center;
    kvant_free(status == KVANT_OK ? KVANT_OWN(float, old_center) : center);
    return kvant_index_report_error(status);
}
