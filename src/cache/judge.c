/* judge.c - by which version a sample of rows and queries errs least (judge.h, learn.h). */
#include "learning.h"

#include <math.h>
#include <stdlib.h>

#include "../base/parallel.h"

/* Squared lengths of rows of ordinary text, in order, differ by this part of themselves, in the middle. */
#define FEWEST_GAP 5e-4

static uint32_t sampled_queries(const kvant_learning *l, uint32_t head)
{
    return l->n_queries[head] < SAMPLE_QUERIES ? l->n_queries[head] : SAMPLE_QUERIES;
}

static double squares(const float *x, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sum;
}

typedef struct cost_job {
    const kvant_tensor *tensor;
    double *costs;
    uint32_t version;
} cost_job;

static void cost_unit(void *context, size_t head, uint32_t worker)
{
    const cost_job *job = context;
    const kvant_tensor *tensor = job->tensor;
    const kvant_learning *l = tensor->learning;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const kvant_affine affine = kvant_version_affine(tensor, job->version, (uint32_t)head);
    const kvant_transform *transform = kvant_version_transform(tensor, job->version, (uint32_t)head);
    const uint32_t d = tensor->head_dim;
    float y[KVANT_MAX_HEAD_DIM], scaled[KVANT_MAX_HEAD_DIM];
    double keys = 0, queries = 0;
    (void)worker;
    for (uint32_t i = 0; i < l->n_rows; i++) {
        kvant_transform_forward(transform, kernels, &affine,
                                l->rows + i * kvant_tensor_width(tensor) + head * d, y);
        keys += squares(y, d);
    }
    for (uint32_t i = 0; i < sampled_queries(l, (uint32_t)head); i++) {
        const float *q = l->queries + (head * SAMPLE_QUERIES + i) * d;
        for (uint32_t j = 0; j < d; j++)
            scaled[j] = affine.scale ? q[j] * affine.scale[j] : q[j];
        kvant_transform_dual(transform, kernels, scaled, y);
        queries += squares(y, d);
    }
    job->costs[head] = keys * queries;
}

void kvant_sample_costs(const kvant_tensor *tensor, uint32_t version, uint32_t n_threads, double *costs)
{
    cost_job job = { tensor, costs, version };
    kvant_parallel_for(tensor->n_kv_heads, n_threads, cost_unit, &job);
}

/* The least cost that factors of channels can have, about the candidate's centre. */
static double least_cost(const kvant_tensor *tensor, uint32_t head)
{
    const kvant_learning *l = tensor->learning;
    const size_t at = (size_t)head * tensor->head_dim;
    const float *centre = tensor->versions[KVANT_CANDIDATE].center + at;
    double sum = 0, keys[KVANT_MAX_HEAD_DIM] = { 0 }, queries[KVANT_MAX_HEAD_DIM] = { 0 };
    const bool centred = kvant_learns_center(tensor);
    for (uint32_t i = 0; i < l->n_rows; i++)
        for (uint32_t j = 0; j < tensor->head_dim; j++) {
            const double x = l->rows[i * kvant_tensor_width(tensor) + at + j] - (centred ? centre[j] : 0);
            keys[j] += x * x;
        }
    for (uint32_t i = 0; i < sampled_queries(l, head); i++)
        for (uint32_t j = 0; j < tensor->head_dim; j++) {
            const double x = l->queries[(head * SAMPLE_QUERIES + i) * tensor->head_dim + j];
            queries[j] += x * x;
        }
    for (uint32_t j = 0; j < tensor->head_dim; j++)
        sum += sqrt(keys[j] * queries[j]);
    return sum * sum;
}

bool kvant_sample_suffices(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        if (sampled_queries(l, head) < FEWEST_ROWS)
            return false;
    return l->n_rows >= FEWEST_ROWS;
}

bool kvant_learning_excess(const kvant_tensor *tensor, uint32_t n_threads, double excess[KVANT_MAX_VERSIONS])
{
    if (!tensor->learning || !kvant_sample_suffices(tensor))
        return false;
    double *costs = tensor->learning->costs, *best = costs + tensor->n_kv_heads;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        best[head] = least_cost(tensor, head);
    for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++) {
        const bool there = tensor->versions[v].alive && tensor->versions[v].learnt;
        excess[v] = there ? 0 : INFINITY;
        if (there)
            kvant_sample_costs(tensor, v, n_threads, costs);
        for (uint32_t head = 0; there && head < tensor->n_kv_heads; head++)
            excess[v] += (best[head] > 0 ? costs[head] / best[head] : 1) / tensor->n_kv_heads;
    }
    return true;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A token's key turns with its position, and keeps its length. */
bool kvant_learning_is_monotonous(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    double lengths[SAMPLE_ROWS], gaps[SAMPLE_ROWS];
    if (!l || l->n_rows < FEWEST_ROWS)
        return false;
    const uint32_t width = (uint32_t)kvant_tensor_width(tensor), n = l->n_rows;
    for (uint32_t i = 0; i < n; i++)
        lengths[i] = squares(l->rows + (size_t)i * width, width);
    qsort(lengths, n, sizeof *lengths, compare);
    for (uint32_t i = 0; i + 1 < n; i++)
        gaps[i] = lengths[i + 1] - lengths[i];
    qsort(gaps, n - 1, sizeof *gaps, compare);
    return gaps[n / 2] < FEWEST_GAP * lengths[n / 2];
}
