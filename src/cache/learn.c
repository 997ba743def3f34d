/* learn.c - see learn.h.
 *
 * A unit is a part of a kv head (weights.h). Per unit: sums of outer products of keys, about a centre
 * of the first of them, and of queries. The sums belong to one version: rows of another kind begin
 * new ones. n keys or queries of d channels say little of what two channels have in common, so means
 * beside the diagonal count n / (n + d DAMPING). */
#include "judge.h"

#include <math.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/half.h"
#include "../base/parallel.h"
#include "../calibration/moments.h"
#include "../math/spd.h"

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

static uint32_t part_of(const kvant_learning *l, const kvant_tensor *tensor, size_t unit)
{
    return (uint32_t)(unit % (tensor->head_dim / l->part));
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
    l->asked = kvant_alloc((size_t)SAMPLE_QUERIES * tensor->n_kv_heads, sizeof *l->asked);
    l->rows = kvant_alloc((SAMPLE_ROWS + SAMPLE_QUERIES + 1) * width, sizeof *l->rows);
    l->sums = kvant_alloc(l->n_units, sums_of_unit(l) * sizeof *l->sums);
    l->costs = kvant_alloc(2 * (size_t)tensor->n_kv_heads, sizeof *l->costs);
    KVANT_RETURN_IF(!l->n_queries || !l->asked || !l->units || !l->rows || !l->sums || !l->costs, KVANT_ERR_MEMORY);
    place(l, width);
    return KVANT_OK;
}

void kvant_learning_destroy(kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    if (!l)
        return;
    kvant_free(l->n_queries);
    kvant_free(l->asked);
    kvant_free(l->units);
    kvant_free(l->rows);
    kvant_free(l->sums);
    kvant_free(l->costs);
    kvant_free(l->turn);
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
    memset(l->ranges, 0, sizeof l->ranges);
    l->kin++;
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
    l->next = 0;
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

static size_t token_of(const query_job *job, uint32_t i)
{
    return (size_t)(i / job->group) * job->queries->n_tokens / job->n_tokens;
}

static int32_t asked_at(const query_job *job, uint32_t i)
{
    const size_t token = token_of(job, i), next = (size_t)job->tensor->learning->next + token;
    return job->queries->positions ? job->queries->positions[token] : next < INT32_MAX ? (int32_t)next : -1;
}

/* The i-th of a kv head's queries that are looked at, or NULL: its square might be infinite. */
static const float *query_of(const query_job *job, size_t head, uint32_t i)
{
    const kvant_queries *q = job->queries;
    const size_t token = token_of(job, i);
    const float *x = q->q + token * q->token_stride + (head * job->group + i % job->group) * q->head_stride;
    return job->kernels->magnitude(x, job->tensor->head_dim) < 0x5f000000u ? x : NULL; /* 2^63 */
}

static void note_unit(void *context, size_t unit, uint32_t worker)
{
    const query_job *job = context;
    kvant_learning *l = job->tensor->learning;
    unit_sums *u = &l->units[unit];
    kvant_turning turning;
    outers sums;
    (void)worker;
    begin_outers(&sums, l, u->noted);
    kvant_turning_begin(&turning, l->turn, part_of(l, job->tensor, unit));
    for (uint32_t i = 0; i < job->n_tokens * job->group; i++) {
        const float *query = query_of(job, unit * l->part / job->tensor->head_dim, i);
        const int32_t at = l->turn ? asked_at(job, i) : 0;
        if (!query || at < 0)
            continue;
        float *x = next_outer(&sums);
        gather(job->tensor, unit, query, false, x);
        kvant_turn_back(&turning, at, x);
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
            tensor->learning->asked[at] = asked_at(job, i);
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
    kvant_queries q;
    KVANT_RETURN_IF(!tensor || !KVANT_TAKE(kvant_queries, &q, queries, n_heads) || !q.q || !q.n_heads ||
                        q.n_heads % tensor->n_kv_heads || !n_threads,
                    KVANT_ERR_ARGUMENT);
    if (!kvant_tensor_wants_queries(tensor, q.n_tokens))
        return KVANT_OK;
    const uint32_t most = tensor->learning->done ? FEW_TOKENS : MOST_TOKENS;
    query_job job = { .tensor = tensor,
                      .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                      .queries = &q,
                      .n_tokens = q.n_tokens < most ? q.n_tokens : most,
                      .group = q.n_heads / tensor->n_kv_heads };
    sample_queries(&job);
    kvant_parallel_for(tensor->learning->n_units, q.n_tokens > 1 ? n_threads : 1, note_unit, &job);
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

static int32_t position_of(const kvant_tensor *tensor, const kvant_new_rows *rows, size_t i)
{
    const kvant_learning *l = tensor->learning;
    if (!rows->slots)
        return l->places[i];
    if (l->positions && l->n_positions == rows->n)
        return l->positions[i];
    const uint64_t place = (uint64_t)tensor->blocks[rows->slots[i] / KVANT_PAGE_TOKENS].index * KVANT_PAGE_TOKENS +
                           (uint64_t)rows->slots[i] % KVANT_PAGE_TOKENS;
    return place < INT32_MAX ? (int32_t)place : -1;
}

/* Whether a version of the sums was tried for a position, or cannot be. */
static bool was_tried(const kvant_learning *l, int32_t position)
{
    return !l->turn || position < 0 || l->ranges[kvant_turn_octave(l->turn, position)].end;
}

bool kvant_learning_looks(const kvant_tensor *tensor, const kvant_new_rows *rows)
{
    return tensor->learning && (!tensor->learning->done || !was_tried(tensor->learning, position_of(tensor, rows, rows->n / 2)));
}

void kvant_learning_written(kvant_tensor *tensor, const int64_t *slots, size_t n)
{
    kvant_learning *l = tensor ? tensor->learning : NULL;
    const kvant_new_rows rows = { .n = n, .slots = slots };
    if (!l)
        return;
    if (n) {
        const int32_t last = position_of(tensor, &rows, n - 1);
        l->next = last < 0 || last == INT32_MAX ? l->next : last + 1;
    }
    l->positions = NULL;
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
        if (is_kept(tensor, rows->slots[row]))
            continue;
        l->places[l->n_rows] = position_of(tensor, rows, row);
        memcpy(l->rows + l->n_rows++ * width, rows->rows + row * rows->stride, width * sizeof(float));
    }
}

void kvant_learning_unsample(kvant_tensor *tensor)
{
    tensor->learning->n_rows = tensor->learning->n_rows_before;
}

static kvant_new_rows sample_of(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    return (kvant_new_rows){ l->rows, kvant_tensor_width(tensor), l->n_rows, NULL };
}

/* Learning */

typedef struct learn_job {
    kvant_tensor *tensor;
    const kvant_new_rows *rows; /* slots NULL: the sample, none is to be left out */
    kvant_range range;          /* of positions that the matrices are for */
    float *center;              /* width: theirs, where keys turn */
    double *balance;            /* per unit: the length of keys, and what balances it with that of queries */
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

typedef struct row_reader {
    const kvant_tensor *tensor;
    size_t unit;
    float origin[KVANT_MAX_HEAD_DIM], scale[KVANT_MAX_HEAD_DIM];
    kvant_turning turning;
} row_reader;

static void begin_rows(row_reader *r, const learn_job *job, size_t unit)
{
    const kvant_learning *l = job->tensor->learning;
    r->tensor = job->tensor;
    r->unit = unit;
    gather(r->tensor, unit, l->origin, true, r->origin);
    gather(r->tensor, unit, r->tensor->versions[KVANT_CANDIDATE].scale, true, r->scale);
    kvant_turning_begin(&r->turning, l->turn, part_of(l, r->tensor, unit));
}

/* A part of the i-th row, turned back, less the origin, in z; its squared length with the candidate's scale. NaN: its
 * position is not known. */
static float take_row(row_reader *r, const kvant_new_rows *rows, size_t i, float *z)
{
    const float *origin = r->origin, *scale = r->scale;
    const kvant_tensor *tensor = r->tensor;
    const int32_t position = r->turning.n ? position_of(tensor, rows, i) : 0;
    float length = 0;
    if (position < 0)
        return NAN;
    gather(tensor, r->unit, rows->rows + i * rows->stride, true, z);
    kvant_turn_back(&r->turning, position, z);
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
    const kvant_new_rows sampled = sample_of(tensor);
    unit_sums *u = &l->units[unit];
    float lengths[SAMPLE_ROWS];
    uint32_t n_known = 0;
    row_reader r;
    outers sums;
    (void)worker;
    begin_rows(&r, job, unit);
    begin_outers(&sums, l, u->keys);
    for (uint32_t i = 0; i < l->n_rows; i++) {
        const float length = take_row(&r, &sampled, i, sums.rows);
        lengths[n_known] = length;
        n_known += !isnan(length);
    }
    const float most = n_known ? MOST_LENGTH * middle(lengths, n_known) : -1;
    for (size_t i = 0; i < job->rows->n; i++) {
        float *z = next_outer(&sums);
        if ((job->rows->slots && is_kept(tensor, job->rows->slots[i])) || !(take_row(&r, job->rows, i, z) <= most))
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

/* A full matrix of mean outer products. mean: what keys are about; NULL: they are of queries. */
static void unpack(const float *sums, uint32_t n, const double *mean, size_t d, double *out)
{
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++, sums++)
            out[i * d + j] = out[j * d + i] = *sums / (double)n - (mean ? mean[i] * mean[j] : 0);
}

/* Beside the diagonal; of n keys or queries. */
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

/* Moments of keys about their mean, which becomes center, and of queries, over the job's range of positions. */
static kvant_status turn_moments(const learn_job *job, size_t unit, double *center, double *keys, double *queries)
{
    const kvant_learning *l = job->tensor->learning;
    const uint32_t part = part_of(l, job->tensor, unit);
    float z[KVANT_MAX_HEAD_DIM];
    if (!l->turn)
        return KVANT_OK;
    add_product(1, center, l->part, keys);
    KVANT_FORWARD(kvant_turn_moments(l->turn, part, job->range, center, keys));
    KVANT_FORWARD(kvant_turn_moments(l->turn, part, job->range, NULL, queries));
    add_product(-1, center, l->part, keys);
    for (uint32_t j = 0; j < l->part; j++)
        z[j] = (float)center[j];
    kvant_part_scatter(job->tensor->head_dim, l->part, part, z, job->center + unit * l->part / job->tensor->head_dim * job->tensor->head_dim);
    return KVANT_OK;
}

/* Without a centre keys have moments about zero. */
static void solve_unit(void *context, size_t unit, uint32_t worker)
{
    learn_job *job = context;
    const kvant_tensor *tensor = job->tensor;
    const unit_sums *u = &tensor->learning->units[unit];
    const uint32_t n = tensor->learning->part;
    float origin[KVANT_MAX_HEAD_DIM];
    double mean[KVANT_MAX_HEAD_DIM], *keys = kvant_alloc(2 * (size_t)n * n, sizeof *keys), *queries = keys + (size_t)n * n;
    (void)worker;
    job->status[unit] = KVANT_ERR_MEMORY;
    if (!keys)
        return;
    for (uint32_t j = 0; j < n; j++)
        mean[j] = u->key[j] / (double)u->n_keys;
    unpack(u->keys, u->n_keys, mean, n, keys);
    unpack(u->queries, u->n_queries, NULL, n, queries);
    gather(tensor, unit, tensor->learning->origin, true, origin);
    for (uint32_t j = 0; j < n; j++)
        mean[j] += origin[j];
    job->status[unit] = turn_moments(job, unit, mean, keys, queries);
    damp(tensor, u->n_keys, KEYS_DAMPING, keys);
    damp(tensor, u->n_queries, QUERIES_DAMPING, queries);
    if (!kvant_learns_center(tensor))
        add_product(1, mean, n, keys);
    double *balance = job->balance + 2 * unit, gain = 1;
    balance[0] = kvant_trace(n, keys);
    balance[1] = sqrt(kvant_trace(n, queries) / balance[0]);
    if (job->status[unit] == KVANT_OK)
        job->status[unit] = kvant_make_triangle(n, queries, keys, job->triangles + unit * kvant_triangle_size(n), &gain);
    balance[1] *= gain;
    kvant_free(keys);
}

/* The parts of a head share a row's scale: in each the length of keys is to that of queries as in the others. */
static void balance_parts(const learn_job *job, uint32_t head)
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
    for (uint32_t p = 0; p < parts; p++) {
        const float factor = (float)sqrt(balance[2 * p + 1] * before / after);
        for (size_t i = 0; i < size; i++)
            triangle[p * size + i] = kvant_half_from_float(factor * kvant_half_to_float(triangle[p * size + i]));
    }
}

/* The candidate's centre becomes the mean of the keys in the sums. */
static void set_center(const learn_job *job)
{
    const kvant_tensor *tensor = job->tensor;
    const kvant_learning *l = tensor->learning;
    const uint32_t d = tensor->head_dim, n = l->part;
    if (l->turn)
        memcpy(tensor->versions[KVANT_CANDIDATE].center, job->center, kvant_tensor_width(tensor) * sizeof *job->center);
    for (uint32_t unit = 0; unit < l->n_units && !l->turn; unit++) {
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
    job->center = kvant_alloc(kvant_tensor_width(tensor), sizeof *job->center);
    job->balance = kvant_alloc(tensor->learning->n_units, 2 * sizeof *job->balance);
    kvant_status status = job->triangles && job->center && job->balance ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        kvant_parallel_for(tensor->learning->n_units, n_threads, solve_unit, job);
    for (uint32_t unit = 0; unit < tensor->learning->n_units && status == KVANT_OK; unit++)
        status = job->status[unit];
    for (uint32_t head = 0; head < tensor->n_kv_heads && status == KVANT_OK && tensor->learning->part < tensor->head_dim; head++)
        balance_parts(job, head);
    if (status == KVANT_OK)
        status = kvant_weights_create(tensor, job->triangles, n_threads, &weights);
    kvant_free(job->triangles);
    if (status == KVANT_OK) {
        set_center(job);
        tensor->versions[KVANT_CANDIDATE].weights = weights;
    }
    kvant_free(job->center);
    kvant_free(job->balance);
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

/* Positions */

static uint32_t count_ranges(const kvant_learning *l, bool made)
{
    uint32_t n = 0;
    for (uint32_t i = 0; l->turn && i < l->turn->n_octaves; i++)
        n += made ? l->ranges[i].end && l->ranges[i].first == i : !l->ranges[i].end;
    return n;
}

/* Where the sampled rows are. */
static int32_t place_of_sample(const kvant_learning *l)
{
    return l->n_rows ? l->places[l->n_rows / 2] : l->next;
}

/* Of the next version: octaves that have none are shared among as many as there can be, one left for rows of another kind. */
static kvant_range choose_range(const kvant_learning *l, uint32_t n_unused)
{
    const int32_t place = place_of_sample(l);
    if (!l->turn)
        return (kvant_range){ 0, 0 };
    const uint32_t first = kvant_turn_octave(l->turn, place < 0 ? 0 : place), made = count_ranges(l, true);
    uint32_t end = first, most = n_unused > 2 ? n_unused - 1 : 1;
    if (l->ranges[first].end)
        return l->ranges[first];
    while (end < l->turn->n_octaves && !l->ranges[end].end)
        end++;
    if (l->turn->n_ranges && most + made > l->turn->n_ranges)
        most = l->turn->n_ranges > made ? l->turn->n_ranges - made : 1;
    return (kvant_range){ (uint8_t)first, (uint8_t)(first + (end - first + most - 1) / most) };
}

static void mark_range(kvant_learning *l, kvant_range range)
{
    for (uint32_t i = range.first; i < range.end; i++)
        l->ranges[i] = range;
}

/* No version of it is better than others. */
static void mark_octave(kvant_learning *l, uint8_t octave)
{
    if (l->turn)
        l->ranges[octave] = (kvant_range){ octave, (uint8_t)(octave + 1) };
}

/* The candidate has matrices before rows are added. */
static bool is_turned(const kvant_tensor *tensor, const kvant_choice *choice)
{
    return choice->version == KVANT_CANDIDATE && tensor->versions[KVANT_CANDIDATE].weights;
}

/* Enough keys and queries for matrices. */
static bool suffices(const kvant_learning *l)
{
    return fewest(l, false) >= FEWEST_ROWS && fewest(l, true) >= FEWEST_ROWS;
}

/* Where rows fit a version of the sums, they are added before a version is made. */
bool kvant_learning_turns(const kvant_tensor *tensor, const kvant_choice *choice, bool fits, uint32_t n_unused)
{
    const kvant_learning *l = tensor->learning;
    if (!l || n_unused < 2 || was_tried(l, place_of_sample(l)) || !count_ranges(l, true) || !suffices(l))
        return false;
    return !fits || !l->n_rows || tensor->versions[choice->version].kin != l->kin;
}

static learn_job *make_job(kvant_tensor *tensor, const kvant_new_rows *rows)
{
    learn_job *job = kvant_alloc(1, sizeof *job + tensor->learning->n_units * sizeof *job->status);
    if (job) {
        job->tensor = tensor;
        job->rows = rows;
    }
    return job;
}

/* Without a sample the sums are believed, if the choice comes from them, too. */
static bool is_better(const kvant_tensor *tensor, const kvant_choice *choice, double least, double most, uint32_t n_threads)
{
    if (!kvant_sample_suffices(tensor))
        return tensor->versions[choice->version].kin == tensor->learning->kin;
    const double beside = cost_beside(tensor, choice->version, n_threads);
    return beside < WORTH_IT && beside * least <= most;
}

kvant_status kvant_learning_turn(kvant_tensor *tensor, const kvant_choice *choice, double least, double most,
                                 uint32_t n_unused, uint32_t n_threads, bool *turned)
{
    kvant_learning *l = tensor->learning;
    learn_job *job = make_job(tensor, NULL);
    KVANT_RETURN_IF(!job, KVANT_ERR_MEMORY);
    const kvant_range range = job->range = choose_range(l, n_unused);
    const kvant_status status = solve(job, n_threads);
    kvant_free(job);
    *turned = status == KVANT_OK && is_better(tensor, choice, least, most, n_threads);
    if (*turned)
        mark_range(l, range);
    else if (status != KVANT_ERR_MEMORY)
        mark_octave(l, range.first);
    return status == KVANT_ERR_MEMORY ? status : KVANT_OK;
}

/* One unused version is left for rows of another kind, unless the one in use has no matrices, and one for each octave without a
 * version. Rows that give no matrix go on without. */
static kvant_status improve(learn_job *job, kvant_choice *choice, uint32_t n_unused, uint32_t n_threads)
{
    kvant_learning *l = job->tensor->learning;
    const uint32_t n = fewest(l, false);
    const bool plain = choice->version == KVANT_CANDIDATE || !job->tensor->versions[choice->version].weights;
    const bool again = was_tried(l, place_of_sample(l));
    if ((n < l->due && again) || !suffices(l) || !kvant_sample_suffices(job->tensor))
        return KVANT_OK;
    job->range = choose_range(l, n_unused);
    l->due = n + n / 2 < SECOND_ROWS ? SECOND_ROWS : n + n / 2;
    l->done = n >= MOST_ROWS || n_unused < 2;
    if (n_unused < (plain ? 1u : 2u + (again ? count_ranges(l, false) : 0)))
        return KVANT_OK;
    const kvant_status status = solve(job, n_threads);
    if (status == KVANT_OK &&
        (choice->version == KVANT_CANDIDATE || cost_beside(job->tensor, choice->version, n_threads) < WORTH_IT)) {
        choice->version = KVANT_CANDIDATE;
        mark_range(l, job->range);
    } else if (!again) {
        mark_octave(l, job->range.first);
    }
    l->done |= choice->version == KVANT_CANDIDATE ? n_unused < 3 : !plain;
    return status == KVANT_ERR_MEMORY ? status : KVANT_OK;
}

/* What learning changes, for a write that fails and is tried again. */
typedef struct kept {
    kvant_learning learning;
    float *sums, *origin;
    unit_sums *units;
} kept;

static kept *keep(const kvant_learning *l, size_t width)
{
    const size_t n_sums = l->n_units * sums_of_unit(l);
    kept *k = kvant_alloc(1, sizeof *k);
    if (!k)
        return NULL;
    *k = (kept){ *l, kvant_alloc(n_sums + width, sizeof *l->sums), NULL, kvant_alloc(l->n_units, sizeof *l->units) };
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
    *l = k->learning;
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

/* The mean of sampled rows of a unit, turned back: what sums are about. */
static void find_origin(const kvant_tensor *tensor, size_t unit)
{
    kvant_learning *l = tensor->learning;
    const kvant_new_rows sampled = sample_of(tensor);
    const uint32_t n = l->part, part = part_of(l, tensor, unit);
    float sum[KVANT_MAX_HEAD_DIM] = { 0 }, x[KVANT_MAX_HEAD_DIM];
    kvant_turning turning;
    kvant_turning_begin(&turning, l->turn, part);
    for (uint32_t i = 0; i < l->n_rows; i++) {
        gather(tensor, unit, sampled.rows + i * sampled.stride, true, x);
        kvant_turn_back(&turning, l->places[i] < 0 ? 0 : l->places[i], x);
        for (uint32_t j = 0; j < n; j++)
            sum[j] += x[j] / (float)l->n_rows;
    }
    kvant_part_scatter(tensor->head_dim, n, part, sum, l->origin + unit * n / tensor->head_dim * tensor->head_dim);
}

/* Sums are about rows of one version; where keys turn, of versions for several positions. */
static void begin_anew(const kvant_tensor *tensor, const kvant_choice *choice)
{
    kvant_learning *l = tensor->learning;
    const kvant_tensor_version *version = &tensor->versions[choice->version];
    if (choice->version != KVANT_CANDIDATE && (l->turn ? version->kin == l->kin : version->stamp == l->stamp))
        return;
    begin(l);
    memcpy(l->origin, tensor->versions[KVANT_CANDIDATE].center, kvant_tensor_width(tensor) * sizeof *l->origin);
    for (uint32_t unit = 0; unit < l->n_units && l->turn; unit++)
        find_origin(tensor, unit);
    l->due = version->weights ? SECOND_ROWS : 0;
}

/* A choice that has matrices already was turned to from the sums there are. */
static kvant_status add_rows(learn_job *job, kvant_choice *choice, uint32_t n_unused, uint32_t n_threads)
{
    kvant_tensor *tensor = job->tensor;
    kvant_learning *l = tensor->learning;
    const size_t width = kvant_tensor_width(tensor);
    const bool turned = is_turned(tensor, choice);
    kept *before = keep(l, width);
    kvant_status status = before && before->sums && before->units ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK && !turned)
        begin_anew(tensor, choice);
    if (status == KVANT_OK && (!l->done || !was_tried(l, place_of_sample(l)))) {
        kvant_parallel_for(l->n_units, n_threads, add_unit, job);
        status = turned ? KVANT_OK : improve(job, choice, n_unused, n_threads);
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
    const kvant_new_rows sampled = sample_of(tensor);
    if (l->n_rows) {
        learn_job *job = make_job(tensor, all ? all : &sampled);
        KVANT_RETURN_IF(!job, KVANT_ERR_MEMORY);
        const kvant_status status = add_rows(job, choice, n_unused, n_threads);
        kvant_free(job);
        KVANT_FORWARD(status);
    } else if (tensor->device && !is_turned(tensor, choice)) {
        begin_anew(tensor, choice); /* rows that nobody looked at may be of another kind */
    }
    forget_noted(l);
    l->n_rows = 0;
    return KVANT_OK;
}

void kvant_learning_publish(kvant_tensor *tensor, uint32_t version)
{
    if (!tensor->learning)
        return;
    tensor->learning->stamp = tensor->versions[version].stamp;
    tensor->versions[version].kin = tensor->learning->kin;
}

static void face_head(const kvant_tensor *tensor, uint32_t head, int32_t place)
{
    kvant_learning *l = tensor->learning;
    const uint32_t d = tensor->head_dim, n = l->part;
    for (uint32_t part = 0; part < d / n; part++) {
        kvant_turning turning;
        kvant_turning_begin(&turning, l->turn, part);
        for (uint32_t i = 0; i < SAMPLE_QUERIES && i < l->n_queries[head]; i++) {
            const size_t at = (size_t)head * SAMPLE_QUERIES + i;
            float x[KVANT_MAX_HEAD_DIM];
            if (l->asked[at] < 0)
                continue;
            kvant_part_gather(d, n, part, l->queries + at * d, x);
            kvant_turn_back(&turning, (int64_t)l->asked[at] - place, x);
            kvant_part_scatter(d, n, part, x, l->queries + at * d);
        }
    }
}

void kvant_learning_face(kvant_tensor *tensor)
{
    kvant_learning *l = tensor->learning;
    const int32_t place = l ? place_of_sample(l) : -1;
    if (!l || !l->turn || place < 0)
        return;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        face_head(tensor, head, place);
        for (uint32_t i = 0; i < SAMPLE_QUERIES; i++)
            l->asked[head * SAMPLE_QUERIES + i] = l->asked[head * SAMPLE_QUERIES + i] < 0 ? -1 : place;
    }
}
