/* select.c - computes with which transform a sample (rows and queries) has the smallest error
 * (learn.h). */
#include "center.h"
#include "learning.h"

#include <math.h>

#include "../base/attributes.h"
#include "../base/parallel.h"

static uint32_t sampled_queries(const kvant_learning *l, uint32_t head)
{
    return l->n_queries[head] < SAMPLE_QUERIES ? l->n_queries[head] : SAMPLE_QUERIES;
}

/* Eight partial sums: with a single sum every addition would wait for the one before it. */
static double squares(const float *x, uint32_t n)
{
    double sum[8] = { 0 };
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (uint32_t j = 0; j < 8; j++)
            sum[j] += (double)x[i + j] * x[i + j];
    for (; i < n; i++)
        sum[0] += (double)x[i] * x[i];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

typedef struct spread_job {
    const kvant_tensor *tensor;
    int32_t bucket[2]; /* positions */
} spread_job;

static int32_t spread_to(const int32_t bucket[2], uint32_t n, uint32_t i)
{
    const int32_t step = (bucket[1] - bucket[0]) / (int32_t)n;
    return bucket[0] + (int32_t)i * step + step / 2;
}

#define SPREAD_TOGETHER 16u /* vectors: neighbours often move by the same number of positions */

static void spread_vector(const spread_job *job, kvant_rope_rotation *rotation, uint32_t part,
                          uint32_t head, uint32_t i, bool is_row)
{
    const kvant_tensor *tensor = job->tensor;
    const kvant_learning *l = tensor->learning;
    const uint32_t d = tensor->head_dim, n = is_row ? l->n_rows : sampled_queries(l, head);
    const size_t query = (size_t)head * SAMPLE_QUERIES + i;
    const int32_t position = i >= n ? -1 : is_row ? l->row_positions[i] : l->query_positions[query];
    float *at = is_row ? l->rows + i * kvant_tensor_width(tensor) + (size_t)head * d
                       : l->queries + query * d;
    float x[KVANT_MAX_HEAD_DIM];
    if (position < 0)
        return;
    kvant_part_gather(d, l->part, part, at, x);
    kvant_rope_rotate_back(rotation, (int64_t)position - spread_to(job->bucket, n, i), x);
    kvant_part_scatter(d, l->part, part, x, at);
}

/* Rotates some rows, or queries, from their positions to positions that are spread evenly over a
 * bucket. All heads are rotated alike. */
static void spread_head(void *context, size_t sub_head, uint32_t worker)
{
    const spread_job *job = context;
    const kvant_tensor *tensor = job->tensor;
    const kvant_learning *l = tensor->learning;
    const uint32_t at = (uint32_t)sub_head * SPREAD_TOGETHER,
                   first = at < SAMPLE_ROWS ? at : at - SAMPLE_ROWS;
    kvant_rope_rotation rotation;
    (void)worker;
    for (uint32_t part = 0; part < tensor->head_dim / l->part; part++) {
        kvant_rope_rotation_begin(&rotation, l->rope, part);
        for (uint32_t i = first; i < first + SPREAD_TOGETHER; i++)
            for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
                spread_vector(job, &rotation, part, head, i, at < SAMPLE_ROWS);
    }
}

/* The centres of the sampled rows' blocks, as if blocks began at multiples of 64. */
typedef struct row_centers {
    const kvant_centers *of; /* NULL: all rows have the transform's centre */
    const float *start;
    kvant_rope_rotation rotation;
    float center[KVANT_MAX_HEAD_DIM];
} row_centers;

static void begin_centers(row_centers *centers, const kvant_tensor *tensor, uint32_t transform_id,
                          uint32_t head)
{
    centers->of = kvant_tensor_transform_centers(tensor, transform_id);
    if (!centers->of)
        return;
    centers->start = centers->of->start + (size_t)head * tensor->head_dim;
    kvant_rope_rotation_over(&centers->rotation, centers->of->pairs, centers->of->n);
}

/* The centre of a row at a position. `otherwise` if the position is not known (below 0) or blocks
 * have no centres of their own. */
static const float *center_at(row_centers *centers, uint32_t d, int32_t position,
                              const float *otherwise)
{
    if (!centers->of || !otherwise || position < 0)
        return otherwise;
    memcpy(centers->center, centers->start, d * sizeof(float));
    kvant_rope_rotate_back(&centers->rotation,
                           -(int64_t)(position - position % (int32_t)KVANT_PAGE_TOKENS),
                           centers->center);
    return centers->center;
}

/* Applies the centre and scale of a transform to a key, or to a query, but not W. */
static void normalise_vector(const kvant_transform *transform, const kvant_affine *affine,
                             bool is_query, const float *x, float *z)
{
    const uint32_t d = transform->head_dim;
    for (uint32_t j = 0; j < d && is_query; j++)
        z[j] = affine->scale ? x[j] * affine->scale[j] : x[j];
    if (!is_query && kvant_transform_normalise(transform, affine, x, z) == x)
        memcpy(z, x, d * sizeof *z);
}

/* The sum of the squared lengths of a head's sampled rows, or queries, with a transform. The
 * rotation R is left out, because it changes no length. */
static double length_of(const kvant_tensor *tensor, uint32_t transform_id, uint32_t head,
                        bool queries)
{
    const kvant_learning *l = tensor->learning;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const kvant_affine shared = kvant_tensor_transform_affine(tensor, transform_id, head);
    const kvant_transform *transform = kvant_tensor_head_transform(tensor, transform_id, head);
    const uint32_t d = tensor->head_dim, most = KVANT_TRANSFORM_TOGETHER / d,
                   all = queries ? sampled_queries(l, head) : l->n_rows;
    const float *x =
        queries ? l->queries + (size_t)head * SAMPLE_QUERIES * d : l->rows + (size_t)head * d;
    const size_t stride = queries ? d : kvant_tensor_width(tensor);
    float z[KVANT_TRANSFORM_TOGETHER];
    double sum = 0;
    row_centers centers;
    begin_centers(&centers, tensor, transform_id, head);
    for (uint32_t i = 0; i < all; i += most) {
        const uint32_t n = all - i < most ? all - i : most;
        for (uint32_t j = 0; j < n; j++) {
            const kvant_affine affine = {
                queries ? NULL : center_at(&centers, d, l->row_positions[i + j], shared.center),
                shared.scale
            };
            normalise_vector(transform, &affine, queries, x + (i + j) * stride, z + j * d);
        }
        if (transform->triangles)
            kvant_transform_apply_matrix(transform, kernels, queries, n, z, z);
        sum += squares(z, n * d);
    }
    return sum;
}

static double cost_of(const kvant_tensor *tensor, uint32_t transform_id, uint32_t head)
{
    return length_of(tensor, transform_id, head, false) *
           length_of(tensor, transform_id, head, true);
}

typedef struct cost_job {
    const kvant_tensor *tensor;
    double *costs;
    uint32_t transform_id;
} cost_job;

static void cost_of_head(void *context, size_t head, uint32_t worker)
{
    const cost_job *job = context;
    (void)worker;
    job->costs[head] = cost_of(job->tensor, job->transform_id, (uint32_t)head);
}

void kvant_sample_costs(const kvant_tensor *tensor, uint32_t transform_id, uint32_t n_threads,
                        double *costs)
{
    cost_job job = { tensor, costs, transform_id };
    kvant_parallel_for(tensor->n_kv_heads, n_threads, cost_of_head, &job);
}

static void mark_spread(int32_t *positions, uint32_t n, const int32_t bucket[2])
{
    for (uint32_t i = 0; i < n; i++)
        positions[i] = positions[i] < 0 ? -1 : spread_to(bucket, n, i);
}

void kvant_learning_spread(kvant_tensor *tensor, uint32_t n_threads)
{
    kvant_learning *l = tensor->learning;
    if (!l || !l->rope || kvant_sample_position(l) < 0)
        return;
    spread_job job = { tensor, { 0, 0 } };
    kvant_rope_bucket_edges(l->rope, kvant_rope_bucket(l->rope, kvant_sample_position(l)),
                            job.bucket);
    kvant_parallel_for((SAMPLE_ROWS + SAMPLE_QUERIES) / SPREAD_TOGETHER, n_threads, spread_head,
                       &job);
    mark_spread(l->row_positions, l->n_rows, job.bucket);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        mark_spread(l->query_positions + head * SAMPLE_QUERIES, sampled_queries(l, head),
                    job.bucket);
}

/* The candidate's centre; if RoPE is known, the mean of the sample, whose positions were spread.
 * Zeros if the tensor learns no centre. */
static void find_centre(const kvant_tensor *tensor, size_t at, double *centre)
{
    const kvant_learning *l = tensor->learning;
    const float *own = tensor->transforms[KVANT_CANDIDATE].center + at;
    for (uint32_t j = 0; j < tensor->head_dim && kvant_learns_center(tensor); j++)
        for (uint32_t i = 0; i < l->n_rows; i++)
            centre[j] += (l->rope ? l->rows[i * kvant_tensor_width(tensor) + at + j] : own[j]) /
                         (double)l->n_rows;
}

/* The least error that any factors per channel can give, about the centre. Not inlined, because its
 * memory and its caller's together could exceed a small stack. */
static KVANT_NOINLINE double least_cost(const kvant_tensor *tensor, uint32_t head)
{
    const kvant_learning *l = tensor->learning;
    const size_t at = (size_t)head * tensor->head_dim;
    double sum = 0, centre[KVANT_MAX_HEAD_DIM] = { 0 }, keys[KVANT_MAX_HEAD_DIM] = { 0 },
           queries[KVANT_MAX_HEAD_DIM] = { 0 };
    find_centre(tensor, at, centre);
    for (uint32_t i = 0; i < l->n_rows; i++)
        for (uint32_t j = 0; j < tensor->head_dim; j++) {
            const double x = l->rows[i * kvant_tensor_width(tensor) + at + j] - centre[j];
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

bool kvant_sample_has_enough(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        if (sampled_queries(l, head) < KVANT_LEARN_SAMPLES)
            return false;
    return l->n_rows >= KVANT_LEARN_SAMPLES;
}

static bool is_there(const kvant_tensor *tensor, uint32_t transform_id)
{
    return tensor->transforms[transform_id].alive && tensor->transforms[transform_id].learned;
}

/* A work item is a transform and a head. The last n_kv_heads items find the least error of each
 * head. */
static void error_unit(void *context, size_t sub_head, uint32_t worker)
{
    const kvant_tensor *tensor = context;
    const uint32_t transform_id = (uint32_t)(sub_head / tensor->n_kv_heads),
                   head = (uint32_t)(sub_head % tensor->n_kv_heads);
    (void)worker;
    if (transform_id == KVANT_MAX_TRANSFORMS)
        tensor->learning->costs[sub_head] = least_cost(tensor, head);
    else if (is_there(tensor, transform_id))
        tensor->learning->costs[sub_head] = cost_of(tensor, transform_id, head);
}

bool kvant_learning_relative_errors(kvant_tensor *tensor, uint32_t n_threads,
                                    double relative_errors[KVANT_MAX_TRANSFORMS])
{
    if (!tensor->learning || !kvant_sample_has_enough(tensor))
        return false;
    const uint32_t n = tensor->n_kv_heads;
    const double *costs = tensor->learning->costs, *best = costs + (size_t)KVANT_MAX_TRANSFORMS * n;
    kvant_parallel_for((KVANT_MAX_TRANSFORMS + 1) * (size_t)n, n_threads, error_unit, tensor);
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++, costs += n) {
        relative_errors[v] = is_there(tensor, v) ? 0 : INFINITY;
        for (uint32_t head = 0; is_there(tensor, v) && head < n; head++)
            relative_errors[v] += (best[head] > 0 ? costs[head] / best[head] : 1) / n;
    }
    return true;
}

bool kvant_learning_is_monotonous(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    double lengths[SAMPLE_ROWS];
    if (!l)
        return false;
    const uint32_t width = (uint32_t)kvant_tensor_width(tensor), n = l->n_rows;
    for (uint32_t i = 0; i < n; i++)
        lengths[i] = squares(l->rows + (size_t)i * width, width);
    return kvant_learn_lengths_are_alike(lengths, n);
}
