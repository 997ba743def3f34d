/* solve.c - makes the matrices of a transform from second moments (learning.h).
 *
 * n keys or queries of d channels say little about how two channels depend on each other. So the
 * moments off the diagonal are multiplied by n / (n + d DAMPING). */
#include "center.h"
#include "learning.h"

#include <math.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/parallel.h"
#include "../calibration/moments.h"
#include "../math/spd.h"

/* These values gave the least error on Python's help texts (learning.md). Queries are damped more,
 * because a matrix is made for the keys that it was learned from, while its queries are still to
 * come. */
#define KEYS_DAMPING 0.25
#define QUERIES_DAMPING 1.0

/* Rows that are copied together, because a column of a large matrix does not stay in the
 * first-level cache. */
#define TOGETHER 8u

/* Makes a full matrix of mean outer products from sums. mean: the mean to subtract; NULL: for
 * queries, whose mean is not subtracted. */
static void unpack(const float *sums, uint32_t n, const double *mean, uint32_t d, double *out)
{
    for (uint32_t j = 0; j < d; j++) {
        const float *column = sums + kvant_lower_position(d, j, j);
        double *row = out + (size_t)j * d;
        for (uint32_t i = j; i < d; i++)
            row[i] = column[i - j] / (double)n - (mean ? mean[i] * mean[j] : 0);
    }
    for (uint32_t group = 0; group < d; group += TOGETHER)
        for (uint32_t j = 0; j < d; j++)
            for (uint32_t i = group > j ? group : j + 1; i < d && i < group + TOGETHER; i++)
                out[(size_t)i * d + j] = out[(size_t)j * d + i];
}

/* Multiplies moments off the diagonal, which come from n keys or queries. */
static void damp(const kvant_tensor *tensor, double n, double damping, double *moment)
{
    const size_t d = tensor->learning->part;
    const double factor = n / (n + damping * tensor->head_dim);
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j < d; j++)
            moment[i * d + j] *= i == j ? 1 : factor;
}

static void add_product(double factor, const double *mean, size_t n, double *moment)
{
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++)
            moment[i * n + j] += factor * (mean[i] * mean[j]);
}

/* Numbers in a thread's working memory: the moments of keys and queries, and room to find the
 * matrix. */
#define ROOM(n) (2 * (size_t)(n) * (n) + KVANT_MEAN_ROOM(n))

typedef struct solve_job {
    kvant_tensor *tensor;
    kvant_bucket_span span; /* the position buckets for which the matrices are made */
    uint32_t center_span;   /* how many positions of a bucket share a centre; 0: all */
    uint16_t *triangles;    /* per sub-head */
    float *center;          /* width */
    float *start;           /* width: the centre of a block at position 0 (center.h) */
    /* Two numbers per sub-head: the length of keys, and the factor that balances it with the length
     * of queries. */
    double *balance;
    double *room;             /* per thread, ROOM numbers */
    kvant_rope_means **means; /* make_means; NULL: RoPE is not known */
    kvant_status status[];
} solve_job;

/* How many mean rotations a part has: for the whole span, and for each of its buckets if these
 * have centres. */
static size_t means_of_part(const solve_job *job)
{
    return job->center_span ? 1 + (size_t)(job->span.end - job->span.first) : 1;
}

/* The positions of a bucket share a centre if it is not longer than center_span. */
static uint32_t step_of(const solve_job *job, uint8_t bucket)
{
    int32_t edges[2];
    kvant_rope_bucket_edges(job->tensor->learning->rope, bucket, edges);
    const uint32_t length = (uint32_t)(edges[1] - edges[0]);
    return length < job->center_span ? length : job->center_span;
}

static size_t n_means(const solve_job *job)
{
    return job->tensor->head_dim / job->tensor->learning->part * means_of_part(job);
}

/* Makes the mean rotations of all parts, which the kv heads share. */
static kvant_status make_means(solve_job *job)
{
    const kvant_rope_state *t = job->tensor->learning->rope;
    job->means = t ? kvant_alloc(n_means(job), sizeof *job->means) : NULL;
    KVANT_RETURN_IF(t && !job->means, KVANT_ERR_MEMORY);
    for (size_t i = 0; t && i < n_means(job); i++) {
        const uint32_t part = (uint32_t)(i / means_of_part(job)),
                       at = (uint32_t)(i % means_of_part(job));
        const uint8_t bucket = (uint8_t)(job->span.first + at - 1);
        KVANT_FORWARD(
            at ? kvant_rope_means_new(t, part, (kvant_bucket_span){ bucket, (uint8_t)(bucket + 1) },
                                      step_of(job, bucket), &job->means[i])
               : kvant_rope_means_new(t, part, job->span, 1, &job->means[i]));
    }
    return KVANT_OK;
}

static void free_means(solve_job *job)
{
    for (size_t i = 0; job->means && i < n_means(job); i++)
        kvant_rope_means_free(job->means[i]);
    kvant_free(job->means);
}

/* Subtracts from the moments of keys the part that is due to the centres of stretches. The centre
 * of a stretch is the mean of the first stretch, rotated to the stretch's position. A bucket that
 * is not longer than a stretch is one stretch. */
static kvant_status subtract_centers(const solve_job *job, uint32_t part, uint8_t bucket,
                                     const double *mean, double *moments, double *keys)
{
    const kvant_rope_state *t = job->tensor->learning->rope;
    const size_t d = t->part;
    double own[KVANT_MAX_HEAD_DIM];
    memcpy(own, mean, d * sizeof *own);
    memset(moments, 0, d * d * sizeof *moments);
    KVANT_FORWARD(kvant_rope_mean(t, part, 0, (int32_t)step_of(job, bucket) - 1, own));
    add_product(1, own, d, moments);
    kvant_rope_means_apply(
        job->means[part * means_of_part(job) + 1 + (uint32_t)(bucket - job->span.first)], NULL,
        moments);
    for (size_t i = 0; i < d * d; i++)
        keys[i] -= moments[i] / (job->span.end - job->span.first);
    return KVANT_OK;
}

static void put_center(const kvant_tensor *tensor, size_t sub_head, const double *mean, float *to)
{
    float center[KVANT_MAX_HEAD_DIM];
    for (uint32_t j = 0; j < tensor->learning->part; j++)
        center[j] = (float)mean[j];
    kvant_sub_head_scatter(tensor, sub_head, center, to);
}

/* Takes the moments of keys about 0 and of queries, and the mean of keys, from position 0 to the
 * job's range of positions. room: d x d. */
static kvant_status rotate_moments(const solve_job *job, size_t sub_head, double *mean,
                                   double *keys, double *queries, double *room)
{
    const kvant_rope_state *t = job->tensor->learning->rope;
    const uint32_t part = kvant_sub_head_part(job->tensor, sub_head);
    double first[KVANT_MAX_HEAD_DIM];
    if (!t)
        return KVANT_OK;
    const kvant_rope_means *means = job->means[part * means_of_part(job)];
    memcpy(first, mean, t->part * sizeof *first);
    add_product(1, mean, t->part, keys);
    kvant_rope_means_apply(means, mean, keys);
    for (uint8_t bucket = job->span.first; job->center_span && bucket < job->span.end; bucket++)
        KVANT_FORWARD(subtract_centers(job, part, bucket, first, room, keys));
    if (!job->center_span)
        add_product(-1, mean, t->part, keys);
    KVANT_FORWARD(kvant_rope_mean(t, part, 0, KVANT_PAGE_TOKENS - 1, first));
    put_center(job->tensor, sub_head, first, job->start);
    kvant_rope_means_apply(means, NULL, queries);
    return KVANT_OK;
}

/* The mean of keys minus the origin; if RoPE is known, at position 0. */
static void find_mean(const kvant_tensor *tensor, size_t sub_head, double *mean)
{
    const sub_head_moments *u = &tensor->learning->sub_heads[sub_head];
    for (uint32_t j = 0; j < tensor->learning->part; j++)
        mean[j] = u->key[j] / (double)u->n_keys;
}

static void add_origin(const kvant_tensor *tensor, size_t sub_head, double *mean)
{
    float origin[KVANT_MAX_HEAD_DIM];
    kvant_sub_head_gather(tensor, sub_head, tensor->learning->origin, true, origin);
    for (uint32_t j = 0; j < tensor->learning->part; j++)
        mean[j] += origin[j];
}

/* keys: the moments about the mean; for tensors that learn no centre about zero. */
static kvant_status find_moments(const solve_job *job, size_t sub_head, double *keys,
                                 double *queries, double *room)
{
    const kvant_tensor *tensor = job->tensor;
    const sub_head_moments *u = &tensor->learning->sub_heads[sub_head];
    const uint32_t n = tensor->learning->part;
    double mean[KVANT_MAX_HEAD_DIM];
    find_mean(tensor, sub_head, mean);
    unpack(u->keys, u->n_keys, mean, n, keys);
    unpack(u->queries, u->n_queries, NULL, n, queries);
    add_origin(tensor, sub_head, mean);
    KVANT_FORWARD(rotate_moments(job, sub_head, mean, keys, queries, room));
    put_center(tensor, sub_head, mean, job->center);
    damp(tensor, u->n_keys, KEYS_DAMPING, keys);
    damp(tensor, u->n_queries, QUERIES_DAMPING, queries);
    if (!kvant_learns_center(tensor))
        add_product(1, mean, n, keys);
    return KVANT_OK;
}

static void solve_sub_head(void *context, size_t sub_head, uint32_t worker)
{
    solve_job *job = context;
    const uint32_t n = job->tensor->learning->part;
    double *keys = job->room + worker * ROOM(n), *queries = keys + (size_t)n * n,
           *room = queries + (size_t)n * n;
    double *balance = job->balance + 2 * sub_head, gain = 1;
    job->status[sub_head] = find_moments(job, sub_head, keys, queries, room);
    if (job->status[sub_head] == KVANT_OK) {
        balance[0] = kvant_trace(n, keys);
        balance[1] = sqrt(kvant_trace(n, queries) / balance[0]);
        job->status[sub_head] = kvant_make_triangle(
            n, queries, keys, room, job->triangles + sub_head * kvant_triangle_size(n), &gain);
        balance[1] *= gain;
    }
}

/* Scales a triangle by its n steps and numbers on the diagonal. */
static void scale(float factor, size_t n, uint16_t *halves)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    float x[KVANT_MAX_HEAD_DIM];
    for (size_t i = 0; i < n; i += KVANT_MAX_HEAD_DIM) {
        const uint32_t some = n - i < KVANT_MAX_HEAD_DIM ? (uint32_t)(n - i) : KVANT_MAX_HEAD_DIM;
        kernels->half_to_float(halves + i, x, some);
        for (uint32_t j = 0; j < some; j++)
            x[j] *= factor;
        kernels->float_to_half(x, halves + i, some);
    }
}

/* Scales the parts of a head, which share the scale of a row. Afterwards every part has the same
 * ratio of the length of keys to the length of queries. */
static void balance_parts(const solve_job *job, uint32_t head)
{
    const uint32_t n = job->tensor->learning->part, parts = job->tensor->head_dim / n;
    const double *balance = job->balance + 2 * (size_t)head * parts;
    const size_t size = kvant_triangle_size(n);
    uint16_t *triangle = job->triangles + head * parts * size;
    double before = 0, after = 0;
    for (uint32_t p = 0; p < parts; p++) {
        before += balance[2 * p];
        after += balance[2 * p] * balance[2 * p + 1];
    }
    for (uint32_t p = 0; p < parts && parts > 1; p++)
        scale((float)sqrt(balance[2 * p + 1] * before / after), 2 * n, triangle + p * size);
}

static kvant_status center_blocks(const solve_job *job, kvant_key_transform *key_transform)
{
    const kvant_rope_state *t = job->tensor->learning->rope;
    if (!job->center_span)
        return KVANT_OK;
    const kvant_rope rope = { .n_dims = t->n_dims,
                              .interleaved = t->interleaved,
                              .frequencies = t->frequencies };
    KVANT_FORWARD(kvant_centers_create(job->tensor, &rope, &key_transform->centers));
    memcpy(key_transform->centers->start, job->start,
           kvant_tensor_width(job->tensor) * sizeof *job->start);
    return KVANT_OK;
}

static kvant_status solve(solve_job *job, uint32_t n_threads)
{
    kvant_tensor *tensor = job->tensor;
    kvant_tensor_transform *candidate = &tensor->transforms[KVANT_CANDIDATE];
    kvant_key_transform *key_transform;
    kvant_parallel_for(tensor->learning->n_sub_heads, n_threads, solve_sub_head, job);
    for (uint32_t sub_head = 0; sub_head < tensor->learning->n_sub_heads; sub_head++)
        KVANT_FORWARD(job->status[sub_head]);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        balance_parts(job, head);
    KVANT_FORWARD(kvant_key_transform_create(tensor, job->triangles, n_threads, &key_transform));
    if (center_blocks(job, key_transform) != KVANT_OK) {
        kvant_key_transform_free(&key_transform);
        return KVANT_ERR_MEMORY;
    }
    memcpy(candidate->center, job->center, kvant_tensor_width(tensor) * sizeof *job->center);
    kvant_key_transform_free(&candidate->key_transform);
    candidate->key_transform = key_transform;
    return KVANT_OK;
}

/* Puts the job's arrays one after another into mapped memory. They take a megabyte or more, which
 * goes back to the system afterwards. */
static kvant_status solve_in(solve_job *job, uint32_t n_workers)
{
    const size_t n_sub_heads = job->tensor->learning->n_sub_heads,
                 width = kvant_tensor_width(job->tensor);
    const size_t doubles = n_workers * ROOM(job->tensor->learning->part) + 2 * n_sub_heads;
    const size_t bytes = doubles * sizeof(double) + 2 * width * sizeof(float) +
                         kvant_key_transform_halves(job->tensor) * sizeof *job->triangles;
    job->room = kvant_map(1, bytes);
    KVANT_RETURN_IF(!job->room, KVANT_ERR_MEMORY);
    job->balance = job->room + doubles - 2 * n_sub_heads;
    job->center = (float *)(job->room + doubles);
    job->start = job->center + width;
    job->triangles = (uint16_t *)(job->start + width);
    const kvant_status status = solve(job, n_workers);
    kvant_unmap(job->room, 1, bytes);
    return status;
}

kvant_status kvant_solve(kvant_tensor *tensor, kvant_bucket_span span, uint32_t n_threads)
{
    const kvant_rope_state *t = tensor->learning->rope;
    const uint32_t n_sub_heads = tensor->learning->n_sub_heads,
                   n_workers = n_threads < 2             ? 1
                               : n_threads < n_sub_heads ? n_threads
                                                         : n_sub_heads;
    solve_job *job = kvant_alloc(1, sizeof *job + n_sub_heads * sizeof *job->status);
    KVANT_RETURN_IF(!job, KVANT_ERR_MEMORY);
    job->tensor = tensor;
    job->span = span;
    job->center_span = t && t->block_centers ? KVANT_PAGE_TOKENS : 0;
    kvant_status status = make_means(job);
    if (status == KVANT_OK)
        status = solve_in(job, n_workers);
    free_means(job);
    kvant_free(job);
    return status;
}
