/* learn.c - see learn.h.
 *
 * A unit is a part of a kv head (weights.h). Per unit: sums of outer products of keys, about a centre
 * of the first of them, and of queries. The sums belong to one version: rows of another kind begin
 * new ones. n keys or queries of d channels say little of what two channels have in common, so means
 * beside the diagonal count n / (n + d DAMPING). */
#include "judge.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/parallel.h"
#include "../calibration/moments.h"

#define MOST_TOKENS 128u   /* of a call whose queries count */
#define FEW_TOKENS 64u     /* the same, once enough was learnt: in case that rows of another kind come */

/* Chosen on Python's help texts (research/calibration.md). A matrix knows the keys that it is for,
 * but of the queries only those so far. */
#define KEYS_DAMPING 0.25
#define QUERIES_DAMPING 1.0

/* A first matrix comes from whatever there is; others from half as many rows more, at least so
 * many: rows lose least with a matrix that knows them. The last one comes from MOST_ROWS, leaves one
 * version unused, or was not worth it. */
#define SECOND_ROWS 512u
#define MOST_ROWS 2048u

/* A matrix is worth a version when it lowers the squared error of the rows at hand by so much. */
#define WORTH_IT 0.95

/* Rows so many times longer than the middle one, after centre and scale, say nothing of others. */
#define MOST_LENGTH 16.0f

static size_t sums_of_unit(const kvant_learning *l)
{
    return l->part + 3 * kvant_triangle_size(l->part);
}

/* A unit's channels of a row of all kv heads, or of one head. */
static void gather(const kvant_tensor *tensor, size_t unit, const float *row, bool whole, float *out)
{
    const uint32_t d = tensor->head_dim, n = tensor->learning->part;
    kvant_part_gather(d, n, (uint32_t)(unit % (d / n)), whole ? row + unit / (d / n) * d : row, out);
}

/* Rows on their way into sums of outer products. */
typedef struct outers {
    const kvant_kernels *kernels;
    float *sums;
    uint32_t part, stride, n;
    float rows[8 * KVANT_MAX_HEAD_DIM];
} outers;

static void begin_outers(outers *o, const kvant_learning *l, float *sums)
{
    *o = (outers){ kvant_kernels_get(KVANT_CPU_AUTO), sums, l->part, (l->part + 15) / 16 * 16, 0, { 0 } };
}

static void end_outers(outers *o)
{
    o->kernels->add_outers(o->rows, o->stride, o->n, o->part, o->sums);
    o->n = 0;
}

/* A place for the next row, which counts when n does. */
static float *next_outer(outers *o)
{
    if ((o->n + 1) * o->stride > sizeof o->rows / sizeof *o->rows)
        end_outers(o);
    return o->rows + o->n * o->stride;
}

/* Life */

static bool is_of_values(const kvant_tensor *tensor)
{
    return kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V;
}

static void place(kvant_learning *l, size_t width)
{
    const size_t triangle = kvant_triangle_size(l->part);
    l->queries = l->rows + SAMPLE_ROWS * width;
    l->origin = l->queries + SAMPLE_QUERIES * width;
    for (uint32_t unit = 0; unit < l->n_units; unit++) {
        unit_sums *u = &l->units[unit];
        u->key = l->sums + unit * sums_of_unit(l);
        u->keys = u->key + l->part;
        u->queries = u->keys + triangle;
        u->noted = u->queries + triangle;
    }
}

kvant_status kvant_learning_create(kvant_tensor *tensor)
{
    const size_t width = kvant_tensor_width(tensor);
    if (!kvant_tensor_codec_info(tensor)->learns_transform || (is_of_values(tensor) && tensor->device))
        return KVANT_OK;
    kvant_learning *l = tensor->learning = kvant_alloc(1, sizeof *l);
    KVANT_RETURN_IF(!l, KVANT_ERR_MEMORY);
    l->part = kvant_weights_part(tensor->head_dim);
    l->n_units = (uint32_t)(width / l->part);
    l->n_queries = kvant_alloc(tensor->n_kv_heads, sizeof *l->n_queries);
    l->units = kvant_alloc(l->n_units, sizeof *l->units);
    l->rows = kvant_alloc((SAMPLE_ROWS + SAMPLE_QUERIES + 1) * width, sizeof *l->rows);
    l->sums = kvant_alloc(l->n_units, sums_of_unit(l) * sizeof *l->sums);
    l->costs = kvant_alloc(2 * (size_t)tensor->n_kv_heads, sizeof *l->costs);
    KVANT_RETURN_IF(!l->n_queries || !l->units || !l->rows || !l->sums || !l->costs, KVANT_ERR_MEMORY);
    place(l, width);
    return KVANT_OK;
}

void kvant_learning_destroy(kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    if (!l)
        return;
    kvant_free(l->n_queries);
    kvant_free(l->units);
    kvant_free(l->rows);
    kvant_free(l->sums);
    kvant_free(l->costs);
    kvant_free(l);
    tensor->learning = NULL;
}

static void forget_noted(kvant_learning *l)
{
    for (uint32_t unit = 0; unit < l->n_units; unit++) {
        memset(l->units[unit].noted, 0, kvant_triangle_size(l->part) * sizeof(float));
        l->units[unit].n_noted = 0;
    }
}

static void forget_queries(const kvant_learning *l, unit_sums *u)
{
    memset(u->queries, 0, kvant_triangle_size(l->part) * sizeof(float));
    u->n_queries = 0;
}

/* Sums of no rows. Where none were noted since, the queries of other rows must do. */
static void begin(kvant_learning *l)
{
    for (uint32_t unit = 0; unit < l->n_units; unit++) {
        unit_sums *u = &l->units[unit];
        memset(u->key, 0, (l->part + kvant_triangle_size(l->part)) * sizeof(float));
        u->n_keys = 0;
        if (u->n_noted)
            forget_queries(l, u);
    }
    l->due = 0;
    l->done = false;
}

/* Values have no queries. What reads sums of them is taken to be alike in all directions: random
 * signs. */
static void assume_queries(const kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    uint32_t random = 1;
    for (size_t i = 0; i < SAMPLE_QUERIES * kvant_tensor_width(tensor); i++) {
        random = 1664525 * random + 1013904223;
        l->queries[i] = random >> 31 ? -1.0f : 1.0f;
    }
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        l->n_queries[head] = SAMPLE_QUERIES;
    for (uint32_t unit = 0; unit < l->n_units; unit++) {
        float *moment = l->units[unit].queries;
        for (uint32_t i = 0; i < l->part; moment += ++i)
            moment[i] = FEWEST_ROWS;
        l->units[unit].n_queries = FEWEST_ROWS;
    }
}

void kvant_learning_reset(kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    if (!l)
        return;
    begin(l);
    forget_noted(l);
    for (uint32_t unit = 0; unit < l->n_units; unit++)
        forget_queries(l, &l->units[unit]);
    memset(l->n_queries, 0, tensor->n_kv_heads * sizeof *l->n_queries);
    l->n_rows = l->stamp = 0;
    if (is_of_values(tensor))
        assume_queries(tensor);
}

/* Queries */

typedef struct query_job {
    const kvant_tensor *tensor;
    const kvant_kernels *kernels;
    const kvant_queries *queries;
    uint32_t n_tokens, group; /* tokens looked at, heads of a kv head */
} query_job;

/* The i-th of a kv head's queries that are looked at, or NULL: its square might be infinite. */
static const float *query_of(const query_job *job, size_t head, uint32_t i)
{
    const kvant_queries *q = job->queries;
    const size_t token = (size_t)(i / job->group) * q->n_tokens / job->n_tokens;
    const float *x = q->q + token * q->token_stride + (head * job->group + i % job->group) * q->head_stride;
    return job->kernels->magnitude(x, job->tensor->head_dim) < 0x5f000000u ? x : NULL; /* 2^63 */
}

static void note_unit(void *context, size_t unit, uint32_t worker)
{
    const query_job *job = context;
    kvant_learning *l = job->tensor->learning;
    unit_sums *u = &l->units[unit];
    outers sums;
    (void)worker;
    begin_outers(&sums, l, u->noted);
    for (uint32_t i = 0; i < job->n_tokens * job->group; i++) {
        const float *query = query_of(job, unit * l->part / job->tensor->head_dim, i);
        if (!query)
            continue;
        gather(job->tensor, unit, query, false, next_outer(&sums));
        sums.n++;
        u->n_noted++;
    }
    end_outers(&sums);
}

/* Some of the queries, by which versions are judged. */
static void sample_queries(const query_job *job)
{
    const kvant_tensor *tensor = job->tensor;
    const uint32_t n = job->n_tokens * job->group, step = n > SAMPLE_QUERIES ? n / SAMPLE_QUERIES : 1;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        for (uint32_t i = 0; i < n; i += step) {
            const float *query = query_of(job, head, i);
            const size_t at = head * SAMPLE_QUERIES + tensor->learning->n_queries[head] % SAMPLE_QUERIES;
            if (!query)
                continue;
            memcpy(tensor->learning->queries + at * tensor->head_dim, query, tensor->head_dim * sizeof *query);
            tensor->learning->n_queries[head]++;
        }
}

int kvant_tensor_wants_queries(const kvant_tensor *tensor, size_t n_tokens)
{
    if (!tensor || !tensor->learning || is_of_values(tensor) || !n_tokens)
        return false;
    return tensor->device ? !tensor->learning->done && n_tokens >= KVANT_LEARN_ROWS
                          : !tensor->learning->done || n_tokens >= KVANT_LEARN_ROWS;
}

kvant_status kvant_tensor_note_queries(kvant_tensor *tensor, const kvant_queries *queries, uint32_t n_threads)
{
    KVANT_RETURN_IF(!tensor || !queries || queries->size != sizeof *queries || !queries->q || !queries->n_heads ||
                        queries->n_heads % tensor->n_kv_heads || !n_threads,
                    KVANT_ERR_ARGUMENT);
    if (!kvant_tensor_wants_queries(tensor, queries->n_tokens))
        return KVANT_OK;
    const uint32_t most = tensor->learning->done ? FEW_TOKENS : MOST_TOKENS;
    query_job job = { .tensor = tensor,
                      .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                      .queries = queries,
                      .n_tokens = queries->n_tokens < most ? queries->n_tokens : most,
                      .group = queries->n_heads / tensor->n_kv_heads };
    sample_queries(&job);
    kvant_parallel_for(tensor->learning->n_units, queries->n_tokens > 1 ? n_threads : 1, note_unit, &job);
    return KVANT_OK;
}

/* Rows */

/* One of the first tokens, which a cache keeps fp16. */
static bool is_kept(const kvant_tensor *tensor, int64_t slot)
{
    const uint32_t index = tensor->blocks[slot / KVANT_PAGE_TOKENS].index;
    return index < tensor->sink_blocks &&
           index * KVANT_PAGE_TOKENS + slot % KVANT_PAGE_TOKENS < kvant_tensor_codec_info(tensor)->sink_tokens;
}

bool kvant_learning_looks(const kvant_tensor *tensor)
{
    return tensor->learning && !tensor->learning->done;
}

void kvant_learning_sample(kvant_tensor *tensor, const kvant_new_rows *rows, bool first)
{
    const size_t width = kvant_tensor_width(tensor), taken = rows->n < SAMPLE_ROWS ? rows->n : SAMPLE_ROWS;
    kvant_learning *l = tensor->learning;
    if (!l)
        return;
    l->n_rows = first ? 0 : l->n_rows;
    l->n_rows_before = l->n_rows;
    for (size_t i = 0; i < taken && l->n_rows < SAMPLE_ROWS; i++) {
        const size_t row = i * rows->n / taken;
        if (!is_kept(tensor, rows->slots[row]))
            memcpy(l->rows + l->n_rows++ * width, rows->rows + row * rows->stride, width * sizeof(float));
    }
}

void kvant_learning_unsample(kvant_tensor *tensor)
{
    tensor->learning->n_rows = tensor->learning->n_rows_before;
}

/* Learning */

typedef struct learn_job {
    kvant_tensor *tensor;
    const kvant_new_rows *rows; /* slots NULL: none is to be left out */
    uint16_t *triangles;
    kvant_status status[];
} learn_job;

static float middle(float *x, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t j = i; j > 0 && x[j] < x[j - 1]; j--) {
            const float swap = x[j];
            x[j] = x[j - 1];
            x[j - 1] = swap;
        }
    return x[n / 2];
}

/* A part of a row less the origin, in z; its squared length with the candidate's scale. */
static float take_row(const kvant_tensor *tensor, size_t unit, const float *origin, const float *scale,
                      const float *row, float *z)
{
    float length = 0;
    gather(tensor, unit, row, true, z);
    for (uint32_t j = 0; j < tensor->learning->part; j++) {
        z[j] -= origin[j];
        length += z[j] / scale[j] * (z[j] / scale[j]);
    }
    return length;
}

static void add_unit(void *context, size_t unit, uint32_t worker)
{
    const learn_job *job = context;
    const kvant_tensor *tensor = job->tensor;
    const kvant_learning *l = tensor->learning;
    unit_sums *u = &l->units[unit];
    float lengths[SAMPLE_ROWS], origin[KVANT_MAX_HEAD_DIM], scale[KVANT_MAX_HEAD_DIM];
    outers sums;
    (void)worker;
    begin_outers(&sums, l, u->keys);
    gather(tensor, unit, l->origin, true, origin);
    gather(tensor, unit, tensor->versions[KVANT_CANDIDATE].scale, true, scale);
    for (uint32_t i = 0; i < l->n_rows; i++)
        lengths[i] = take_row(tensor, unit, origin, scale, l->rows + i * kvant_tensor_width(tensor), sums.rows);
    const float most = MOST_LENGTH * middle(lengths, l->n_rows);
    for (size_t i = 0; i < job->rows->n; i++) {
        float *z = next_outer(&sums);
        if ((job->rows->slots && is_kept(tensor, job->rows->slots[i])) ||
            !(take_row(tensor, unit, origin, scale, job->rows->rows + i * job->rows->stride, z) <= most))
            continue;
        for (uint32_t j = 0; j < l->part; j++)
            u->key[j] += z[j];
        sums.n++;
        u->n_keys++;
    }
    end_outers(&sums);
    for (size_t i = 0; i < kvant_triangle_size(l->part); i++)
        u->queries[i] += u->noted[i];
    u->n_queries += u->n_noted;
}

/* A full matrix of mean outer products, damped beside the diagonal. mean: what keys are about; NULL:
 * they are of queries. */
static void unpack(const float *sums, uint32_t n, const double *mean, const kvant_tensor *tensor, double *out)
{
    const size_t d = tensor->learning->part;
    const double damping = n / (n + (mean ? KEYS_DAMPING : QUERIES_DAMPING) * tensor->head_dim);
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++, sums++) {
            const double x = *sums / (double)n - (mean ? mean[i] * mean[j] : 0);
            out[i * d + j] = out[j * d + i] = i == j ? x : damping * x;
        }
}

/* Of a unit without a centre: moments about zero. */
static void add_mean(const kvant_tensor *tensor, size_t unit, const double *mean, double *moment)
{
    const uint32_t n = tensor->learning->part;
    float origin[KVANT_MAX_HEAD_DIM];
    gather(tensor, unit, tensor->learning->origin, true, origin);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++)
            moment[i * n + j] += (origin[i] + mean[i]) * (origin[j] + mean[j]);
}

static void solve_unit(void *context, size_t unit, uint32_t worker)
{
    learn_job *job = context;
    const unit_sums *u = &job->tensor->learning->units[unit];
    const uint32_t n = job->tensor->learning->part;
    double mean[KVANT_MAX_HEAD_DIM], *keys = kvant_alloc(2 * (size_t)n * n, sizeof *keys), *queries = keys + (size_t)n * n;
    (void)worker;
    job->status[unit] = KVANT_ERR_MEMORY;
    if (!keys)
        return;
    for (uint32_t j = 0; j < n; j++)
        mean[j] = u->key[j] / (double)u->n_keys;
    unpack(u->keys, u->n_keys, mean, job->tensor, keys);
    unpack(u->queries, u->n_queries, NULL, job->tensor, queries);
    if (!kvant_learns_center(job->tensor))
        add_mean(job->tensor, unit, mean, keys);
    job->status[unit] = kvant_make_triangle(n, queries, keys, job->triangles + unit * kvant_triangle_size(n));
    kvant_free(keys);
}

/* The candidate's centre becomes the mean of the keys in the sums. */
static void set_center(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    const uint32_t d = tensor->head_dim, n = l->part;
    for (uint32_t unit = 0; unit < l->n_units; unit++) {
        float *center = tensor->versions[KVANT_CANDIDATE].center + unit / (d / n) * d, z[KVANT_MAX_HEAD_DIM];
        gather(tensor, unit, l->origin, true, z);
        for (uint32_t j = 0; j < n; j++)
            z[j] += l->units[unit].key[j] / (float)l->units[unit].n_keys;
        kvant_part_scatter(d, n, unit % (d / n), z, center);
    }
}

/* The candidate with matrices; as it was on an error. */
static kvant_status solve(learn_job *job, uint32_t n_threads)
{
    kvant_tensor *tensor = job->tensor;
    kvant_weights *weights = NULL;
    job->triangles = kvant_alloc(kvant_weights_halves(tensor), sizeof *job->triangles);
    kvant_status status = job->triangles ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        kvant_parallel_for(tensor->learning->n_units, n_threads, solve_unit, job);
    for (uint32_t unit = 0; unit < tensor->learning->n_units && status == KVANT_OK; unit++)
        status = job->status[unit];
    if (status == KVANT_OK)
        status = kvant_weights_create(tensor, job->triangles, n_threads, &weights);
    kvant_free(job->triangles);
    if (status == KVANT_OK) {
        set_center(tensor);
        tensor->versions[KVANT_CANDIDATE].weights = weights;
    }
    return status;
}

/* Of the candidate beside another version, as a mean over heads. */
static double cost_beside(const kvant_tensor *tensor, uint32_t version, uint32_t n_threads)
{
    double sum = 0, *costs = tensor->learning->costs, *others = costs + tensor->n_kv_heads;
    kvant_sample_costs(tensor, KVANT_CANDIDATE, n_threads, costs);
    kvant_sample_costs(tensor, version, n_threads, others);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        sum += others[head] > 0 ? costs[head] / others[head] : 1;
    return sum / tensor->n_kv_heads;
}

/* What the fewest keys and queries of a unit are enough for. */
static uint32_t fewest(const kvant_learning *l, bool queries)
{
    uint32_t least = UINT32_MAX;
    for (uint32_t unit = 0; unit < l->n_units; unit++) {
        const uint32_t n = queries ? l->units[unit].n_queries : l->units[unit].n_keys;
        least = n < least ? n : least;
    }
    return least;
}

/* One unused version is left for rows of another kind, unless the one in use has no matrices. Rows
 * that give no matrix go on without. */
static kvant_status improve(learn_job *job, kvant_choice *choice, uint32_t n_unused, uint32_t n_threads)
{
    kvant_learning *l = job->tensor->learning;
    const uint32_t n = fewest(l, false);
    const bool plain = choice->version == KVANT_CANDIDATE || !job->tensor->versions[choice->version].weights;
    if (n < FEWEST_ROWS || n < l->due || fewest(l, true) < FEWEST_ROWS || !kvant_sample_suffices(job->tensor))
        return KVANT_OK;
    l->due = n + n / 2 < SECOND_ROWS ? SECOND_ROWS : n + n / 2;
    l->done = n >= MOST_ROWS || n_unused < 2;
    if (n_unused < (plain ? 1u : 2u))
        return KVANT_OK;
    const kvant_status status = solve(job, n_threads);
    if (status == KVANT_OK &&
        (choice->version == KVANT_CANDIDATE || cost_beside(job->tensor, choice->version, n_threads) < WORTH_IT))
        choice->version = KVANT_CANDIDATE;
    l->done |= choice->version == KVANT_CANDIDATE ? n_unused < 3 : !plain;
    return status == KVANT_ERR_MEMORY ? status : KVANT_OK;
}

/* What learning changes, for a write that fails and is tried again. */
typedef struct kept {
    uint32_t due;
    bool done;
    float *sums, *origin;
    unit_sums *units;
} kept;

static kept *keep(const kvant_learning *l, size_t width)
{
    const size_t n_sums = l->n_units * sums_of_unit(l);
    kept *k = kvant_alloc(1, sizeof *k);
    if (!k)
        return NULL;
    *k = (kept){ l->due, l->done, kvant_alloc(n_sums + width, sizeof *l->sums), NULL, kvant_alloc(l->n_units, sizeof *l->units) };
    k->origin = k->sums ? k->sums + n_sums : NULL;
    if (!k->sums || !k->units)
        return k;
    memcpy(k->sums, l->sums, n_sums * sizeof *l->sums);
    memcpy(k->origin, l->origin, width * sizeof *l->origin);
    memcpy(k->units, l->units, l->n_units * sizeof *l->units);
    return k;
}

static void give_back(kvant_learning *l, const kept *k, size_t width)
{
    l->due = k->due;
    l->done = k->done;
    memcpy(l->sums, k->sums, l->n_units * sums_of_unit(l) * sizeof *l->sums);
    memcpy(l->origin, k->origin, width * sizeof *l->origin);
    memcpy(l->units, k->units, l->n_units * sizeof *l->units);
}

static void drop(kept *k)
{
    if (k) {
        kvant_free(k->sums);
        kvant_free(k->units);
    }
    kvant_free(k);
}

/* Sums are about rows of one version. */
static void begin_anew(const kvant_tensor *tensor, const kvant_choice *choice)
{
    kvant_learning *l = tensor->learning;
    const kvant_tensor_version *version = &tensor->versions[choice->version];
    if (choice->version != KVANT_CANDIDATE && version->stamp == l->stamp)
        return;
    begin(l);
    memcpy(l->origin, tensor->versions[KVANT_CANDIDATE].center, kvant_tensor_width(tensor) * sizeof *l->origin);
    l->due = version->weights ? SECOND_ROWS : 0;
}

static kvant_status add_rows(learn_job *job, kvant_choice *choice, uint32_t n_unused, uint32_t n_threads)
{
    kvant_tensor *tensor = job->tensor;
    kvant_learning *l = tensor->learning;
    const size_t width = kvant_tensor_width(tensor);
    kept *before = keep(l, width);
    kvant_status status = before && before->sums && before->units ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        begin_anew(tensor, choice);
    if (status == KVANT_OK && !l->done) {
        kvant_parallel_for(l->n_units, n_threads, add_unit, job);
        status = improve(job, choice, n_unused, n_threads);
        if (status != KVANT_OK)
            give_back(l, before, width);
    }
    drop(before);
    return status;
}

kvant_status kvant_learning_add(kvant_tensor *tensor, kvant_choice *choice, const kvant_new_rows *all,
                                uint32_t n_unused, uint32_t n_threads)
{
    kvant_learning *l = tensor->learning;
    const kvant_new_rows sampled = { l->rows, kvant_tensor_width(tensor), l->n_rows, NULL };
    if (l->n_rows) {
        learn_job *job = kvant_alloc(1, sizeof *job + l->n_units * sizeof *job->status);
        KVANT_RETURN_IF(!job, KVANT_ERR_MEMORY);
        job->tensor = tensor;
        job->rows = all ? all : &sampled;
        const kvant_status status = add_rows(job, choice, n_unused, n_threads);
        kvant_free(job);
        KVANT_FORWARD(status);
    } else if (tensor->device) {
        begin_anew(tensor, choice); /* rows that nobody looked at may be of another kind */
    }
    forget_noted(l);
    l->n_rows = 0;
    return KVANT_OK;
}

void kvant_learning_publish(kvant_tensor *tensor, uint32_t version)
{
    if (tensor->learning)
        tensor->learning->stamp = tensor->versions[version].stamp;
}
