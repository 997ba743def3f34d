/* learn.c - see learn.h.
 *
 * Per kv head: sums of outer products of keys, about a centre of the first of them, and of queries.
 * The sums belong to one version: rows of another kind begin new ones. Few rows say little of what
 * two channels have in common, so the sums' numbers beside the diagonal count n / (n + DAMPING d). */
#include "learn.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/half.h"
#include "../base/parallel.h"
#include "../calibration/moments.h"
#include "../codec/site.h"

#define SAMPLE_ROWS 64u    /* of a batch, by which versions are judged */
#define SAMPLE_QUERIES 32u /* per kv head, likewise: those noted last */
#define FEWEST_ROWS 16u    /* that are worth an estimate */
#define MOST_TOKENS 128u   /* of a call whose queries count */
#define DAMPING 0.5        /* chosen on Python's help texts (research/calibration.md) */

/* A first matrix comes from whatever there is. It is replaced when so many rows were seen, and no
 * more than twice as many are looked at: more of them are hardly better. */
#define SECOND_ROWS 512u
#define MOST_ROWS 1024u

/* A matrix is worth a version when it lowers the squared error of the rows at hand by so much. */
#define WORTH_IT 0.95

/* Rows so many times longer than the middle one, after centre and scale, say nothing of others. */
#define MOST_LENGTH 16.0f

typedef struct head_sums {
    uint32_t n_keys, n_queries, n_noted;
    uint32_t next_query; /* place in the sample */
    float *key;          /* sum of keys less the origin */
    float *keys;         /* lower triangles of sums of outer products, as the next two */
    float *queries;
    float *noted; /* queries since the last judgement */
} head_sums;

typedef struct kvant_learning {
    uint32_t n_rows;  /* in the sample */
    uint32_t stamp;   /* of the version that the sums belong to */
    uint32_t due;     /* keys that the next matrix waits for */
    bool done;        /* enough was seen */
    float *rows;      /* SAMPLE_ROWS x width */
    float *queries;   /* SAMPLE_QUERIES x head_dim per kv head */
    float *origin;    /* width */
    float *sums;      /* the heads' arrays */
    head_sums *heads;
} kvant_learning;

static size_t triangle(const kvant_tensor *tensor)
{
    return (size_t)tensor->head_dim * (tensor->head_dim + 1) / 2;
}

static size_t sums_of_head(const kvant_tensor *tensor)
{
    return tensor->head_dim + 3 * triangle(tensor);
}

/* Life */

kvant_status kvant_learning_create(kvant_tensor *tensor)
{
    const size_t width = kvant_tensor_width(tensor);
    if (!kvant_tensor_codec_info(tensor)->learns_transform || tensor->device)
        return KVANT_OK;
    kvant_learning *l = tensor->learning = kvant_alloc(1, sizeof *l);
    KVANT_RETURN_IF(!l, KVANT_ERR_MEMORY);
    l->heads = kvant_alloc(tensor->n_kv_heads, sizeof *l->heads);
    l->rows = kvant_alloc((SAMPLE_ROWS + SAMPLE_QUERIES + 1) * width, sizeof *l->rows);
    l->sums = kvant_alloc(tensor->n_kv_heads, sums_of_head(tensor) * sizeof *l->sums);
    KVANT_RETURN_IF(!l->heads || !l->rows || !l->sums, KVANT_ERR_MEMORY);
    l->queries = l->rows + SAMPLE_ROWS * width;
    l->origin = l->queries + SAMPLE_QUERIES * width;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        head_sums *h = &l->heads[head];
        h->key = l->sums + head * sums_of_head(tensor);
        h->keys = h->key + tensor->head_dim;
        h->queries = h->keys + triangle(tensor);
        h->noted = h->queries + triangle(tensor);
    }
    return KVANT_OK;
}

void kvant_learning_destroy(kvant_tensor *tensor)
{
    if (!tensor->learning)
        return;
    kvant_free(tensor->learning->heads);
    kvant_free(tensor->learning->rows);
    kvant_free(tensor->learning->sums);
    kvant_free(tensor->learning);
    tensor->learning = NULL;
}

static void forget_noted(const kvant_tensor *tensor)
{
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        memset(tensor->learning->heads[head].noted, 0, triangle(tensor) * sizeof(float));
        tensor->learning->heads[head].n_noted = 0;
    }
}

/* Sums of no rows. */
static void begin(kvant_tensor *tensor, const float *origin)
{
    kvant_learning *l = tensor->learning;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        memset(l->heads[head].key, 0, (tensor->head_dim + 2 * triangle(tensor)) * sizeof(float));
        l->heads[head].n_keys = l->heads[head].n_queries = 0;
    }
    memcpy(l->origin, origin, kvant_tensor_width(tensor) * sizeof *origin);
    l->due = 0;
    l->done = false;
}

void kvant_learning_reset(kvant_tensor *tensor)
{
    if (!tensor->learning)
        return;
    begin(tensor, tensor->learning->origin);
    forget_noted(tensor);
    tensor->learning->n_rows = tensor->learning->stamp = 0;
}

/* Matrices */

size_t kvant_weights_bytes(const kvant_tensor *tensor)
{
    return tensor->n_kv_heads * triangle(tensor) * sizeof(uint16_t);
}

void kvant_weights_free(const kvant_tensor *tensor, kvant_weights **weights)
{
    if (!*weights)
        return;
    for (uint32_t head = 0; (*weights)->transforms && head < tensor->n_kv_heads; head++)
        kvant_free((*weights)->transforms[head].weights);
    kvant_free((*weights)->transforms);
    kvant_free((*weights)->triangles);
    kvant_free(*weights);
    *weights = NULL;
}

static kvant_status allocate_weights(const kvant_tensor *tensor, kvant_weights **weights)
{
    kvant_weights *w = *weights = kvant_alloc(1, sizeof *w);
    KVANT_RETURN_IF(!w, KVANT_ERR_MEMORY);
    w->transforms = kvant_alloc(tensor->n_kv_heads, sizeof *w->transforms);
    w->triangles = kvant_alloc(1, kvant_weights_bytes(tensor));
    return w->transforms && w->triangles ? KVANT_OK : KVANT_ERR_MEMORY;
}

/* The head's transform from its triangle: the codec's own, weighed. */
static kvant_status weigh_head(const kvant_tensor *tensor, kvant_weights *weights, uint32_t head)
{
    const size_t size = (size_t)tensor->head_dim * tensor->head_dim;
    kvant_transform *transform = &weights->transforms[head];
    double *room = kvant_alloc(2 * size, sizeof *room);
    KVANT_RETURN_IF(!room, KVANT_ERR_MEMORY);
    *transform = tensor->codecs[head]->transform;
    kvant_status status = kvant_site_read_matrix(tensor->head_dim, weights->triangles + head * triangle(tensor), room,
                                                 room + size, NULL);
    if (status == KVANT_OK)
        status = kvant_transform_weigh(transform, room, room + size);
    kvant_free(room);
    return status;
}

kvant_status kvant_weights_create(const kvant_tensor *tensor, const uint16_t *triangles, kvant_weights **weights)
{
    kvant_status status = allocate_weights(tensor, weights);
    if (status == KVANT_OK)
        memcpy((*weights)->triangles, triangles, kvant_weights_bytes(tensor));
    for (uint32_t head = 0; head < tensor->n_kv_heads && status == KVANT_OK; head++)
        status = weigh_head(tensor, *weights, head);
    if (status != KVANT_OK)
        kvant_weights_free(tensor, weights);
    return status;
}

/* Queries */

/* The first n numbers of x, and their outer product. */
static void add_outer(float *restrict moment, const float *restrict x, uint32_t d)
{
    for (uint32_t i = 0; i < d; moment += ++i) {
        const float factor = x[i];
        for (uint32_t j = 0; j <= i; j++)
            moment[j] += factor * x[j];
    }
}

typedef struct query_job {
    const kvant_tensor *tensor;
    const kvant_kernels *kernels;
    const kvant_queries *queries;
    uint32_t n_tokens, group; /* tokens looked at, heads of a kv head */
} query_job;

static void note_head(void *context, size_t head, uint32_t worker)
{
    const query_job *job = context;
    const kvant_queries *q = job->queries;
    const uint32_t d = job->tensor->head_dim, n = job->n_tokens * job->group;
    const uint32_t step = n > SAMPLE_QUERIES ? n / SAMPLE_QUERIES : 1;
    head_sums *h = &job->tensor->learning->heads[head];
    float *sample = job->tensor->learning->queries + head * SAMPLE_QUERIES * d;
    (void)worker;
    for (uint32_t i = 0; i < n; i++) {
        const size_t token = (size_t)(i / job->group) * q->n_tokens / job->n_tokens;
        const float *x = q->q + token * q->token_stride + (head * job->group + i % job->group) * q->head_stride;
        if (job->kernels->magnitude(x, d) >= 0x5f000000u) /* 2^63: its square would not fit */
            continue;
        add_outer(h->noted, x, d);
        h->n_noted++;
        if (i % step == 0)
            memcpy(sample + h->next_query++ % SAMPLE_QUERIES * d, x, d * sizeof *x);
    }
}

int kvant_tensor_wants_queries(const kvant_tensor *tensor)
{
    return tensor && tensor->learning && !tensor->learning->done;
}

kvant_status kvant_tensor_note_queries(kvant_tensor *tensor, const kvant_queries *queries, uint32_t n_threads)
{
    KVANT_RETURN_IF(!tensor || !queries || queries->size != sizeof *queries || !queries->q || !queries->n_heads ||
                        queries->n_heads % tensor->n_kv_heads || !n_threads,
                    KVANT_ERR_ARGUMENT);
    query_job job = { .tensor = tensor,
                      .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                      .queries = queries,
                      .n_tokens = queries->n_tokens < MOST_TOKENS ? queries->n_tokens : MOST_TOKENS,
                      .group = queries->n_heads / tensor->n_kv_heads };
    if (kvant_tensor_wants_queries(tensor) && queries->n_tokens)
        kvant_parallel_for(tensor->n_kv_heads, queries->n_tokens > 1 ? n_threads : 1, note_head, &job);
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

void kvant_learning_sample(kvant_tensor *tensor, const kvant_new_rows *rows, bool first)
{
    const size_t width = kvant_tensor_width(tensor), taken = rows->n < SAMPLE_ROWS ? rows->n : SAMPLE_ROWS;
    kvant_learning *l = tensor->learning;
    if (!l)
        return;
    l->n_rows = first ? 0 : l->n_rows;
    for (size_t i = 0; i < taken && l->n_rows < SAMPLE_ROWS; i++) {
        const size_t row = i * rows->n / taken;
        if (!is_kept(tensor, rows->slots[row]))
            memcpy(l->rows + l->n_rows++ * width, rows->rows + row * rows->stride, width * sizeof(float));
    }
}

/* Judging */

static uint32_t sampled_queries(const kvant_learning *l, uint32_t head)
{
    return l->heads[head].next_query < SAMPLE_QUERIES ? l->heads[head].next_query : SAMPLE_QUERIES;
}

static double squares(const float *x, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sum;
}

/* Squared error of sampled scores, up to a factor: the squared length of the keys in the version's
 * terms times that of the queries. */
static double cost(const kvant_tensor *tensor, uint32_t head, uint32_t version)
{
    const kvant_learning *l = tensor->learning;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const kvant_affine affine = kvant_version_affine(tensor, version, head);
    const kvant_transform *transform = kvant_version_transform(tensor, version, head);
    const uint32_t d = tensor->head_dim;
    float y[KVANT_MAX_HEAD_DIM], scaled[KVANT_MAX_HEAD_DIM];
    double keys = 0, queries = 0;
    for (uint32_t i = 0; i < l->n_rows; i++) {
        kvant_transform_forward(transform, kernels, &affine,
                                l->rows + i * kvant_tensor_width(tensor) + (size_t)head * d, y);
        keys += squares(y, d);
    }
    for (uint32_t i = 0; i < sampled_queries(l, head); i++) {
        const float *q = l->queries + (head * SAMPLE_QUERIES + i) * d;
        for (uint32_t j = 0; j < d; j++)
            scaled[j] = affine.scale ? q[j] * affine.scale[j] : q[j];
        kvant_transform_dual(transform, kernels, scaled, y);
        queries += squares(y, d);
    }
    return keys * queries;
}

/* The least cost that factors of channels can have, about the candidate's centre. */
static double least_cost(const kvant_tensor *tensor, uint32_t head)
{
    const kvant_learning *l = tensor->learning;
    const size_t at = (size_t)head * tensor->head_dim;
    const float *centre = tensor->versions[KVANT_CANDIDATE].center + at;
    double sum = 0;
    for (uint32_t j = 0; j < tensor->head_dim; j++) {
        double keys = 0, queries = 0;
        for (uint32_t i = 0; i < l->n_rows; i++) {
            const double x = l->rows[i * kvant_tensor_width(tensor) + at + j] - centre[j];
            keys += x * x;
        }
        for (uint32_t i = 0; i < sampled_queries(l, head); i++) {
            const double x = l->queries[(head * SAMPLE_QUERIES + i) * tensor->head_dim + j];
            queries += x * x;
        }
        sum += sqrt(keys * queries);
    }
    return sum * sum;
}

static bool has_sample(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        if (sampled_queries(l, head) < FEWEST_ROWS)
            return false;
    return l->n_rows >= FEWEST_ROWS;
}

bool kvant_learning_excess(const kvant_tensor *tensor, double excess[KVANT_MAX_VERSIONS])
{
    if (!tensor->learning || !has_sample(tensor))
        return false;
    for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++)
        excess[v] = tensor->versions[v].alive && tensor->versions[v].learnt ? 0 : INFINITY;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const double best = least_cost(tensor, head);
        for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++)
            if (excess[v] < INFINITY)
                excess[v] += (best > 0 ? cost(tensor, head, v) / best : 1) / tensor->n_kv_heads;
    }
    return true;
}

/* Learning: units are kv heads. */

typedef struct learn_job {
    kvant_tensor *tensor;
    const kvant_new_rows *rows; /* slots NULL: none is to be left out */
    kvant_weights *weights;
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

/* In z, the row's head less the origin; its squared length with the candidate's scale. */
static float take_row(const kvant_tensor *tensor, size_t at, const float *row, float *z)
{
    const float *scale = tensor->versions[KVANT_CANDIDATE].scale + at, *origin = tensor->learning->origin + at;
    float length = 0;
    for (uint32_t j = 0; j < tensor->head_dim; j++) {
        z[j] = row[at + j] - origin[j];
        length += z[j] / scale[j] * (z[j] / scale[j]);
    }
    return length;
}

static void add_head(void *context, size_t head, uint32_t worker)
{
    const learn_job *job = context;
    const kvant_tensor *tensor = job->tensor;
    const kvant_learning *l = tensor->learning;
    const size_t at = head * tensor->head_dim;
    head_sums *h = &l->heads[head];
    float lengths[SAMPLE_ROWS], z[KVANT_MAX_HEAD_DIM];
    (void)worker;
    for (uint32_t i = 0; i < l->n_rows; i++)
        lengths[i] = take_row(tensor, at, l->rows + i * kvant_tensor_width(tensor), z);
    const float most = MOST_LENGTH * middle(lengths, l->n_rows);
    for (size_t i = 0; i < job->rows->n; i++) {
        if ((job->rows->slots && is_kept(tensor, job->rows->slots[i])) ||
            !(take_row(tensor, at, job->rows->rows + i * job->rows->stride, z) <= most))
            continue;
        add_outer(h->keys, z, tensor->head_dim);
        for (uint32_t j = 0; j < tensor->head_dim; j++)
            h->key[j] += z[j];
        h->n_keys++;
    }
    for (size_t i = 0; i < triangle(tensor); i++)
        h->queries[i] += h->noted[i];
    h->n_queries += h->n_noted;
}

/* Full matrices of the mean outer product, numbers beside the diagonal damped. mean: of the keys less the
 * origin, or NULL. */
static void unpack(const float *sums, uint32_t n, const double *mean, uint32_t n_keys, uint32_t head_dim, double *out)
{
    const size_t d = head_dim;
    const double damped = n_keys / (n_keys + DAMPING * (double)d);
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++, sums++) {
            const double x = *sums / (double)n - (mean ? mean[i] * mean[j] : 0);
            out[i * d + j] = out[j * d + i] = i == j ? x : damped * x;
        }
}

static void solve_head(void *context, size_t head, uint32_t worker)
{
    learn_job *job = context;
    const kvant_tensor *tensor = job->tensor;
    const head_sums *h = &tensor->learning->heads[head];
    const uint32_t d = tensor->head_dim;
    const size_t size = (size_t)d * d, at = head * d;
    double mean[KVANT_MAX_HEAD_DIM], *keys = kvant_alloc(2 * size, sizeof *keys), *queries = keys + size;
    float diagonal[KVANT_MAX_HEAD_DIM];
    (void)worker;
    job->status[head] = KVANT_ERR_MEMORY;
    if (!keys)
        return;
    for (uint32_t j = 0; j < d; j++) {
        mean[j] = h->key[j] / (double)h->n_keys;
        tensor->versions[KVANT_CANDIDATE].center[at + j] = (float)(tensor->learning->origin[at + j] + mean[j]);
    }
    unpack(h->keys, h->n_keys, mean, h->n_keys, d, keys);
    unpack(h->queries, h->n_queries, NULL, h->n_keys, d, queries);
    job->status[head] = kvant_make_weights(d, queries, keys, keys, diagonal, job->weights->triangles + head * triangle(tensor));
    if (job->status[head] == KVANT_OK)
        job->status[head] = weigh_head(tensor, job->weights, (uint32_t)head);
    kvant_free(keys);
}

static uint32_t fewest(const kvant_tensor *tensor, bool queries)
{
    uint32_t least = UINT32_MAX;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const head_sums *h = &tensor->learning->heads[head];
        const uint32_t n = queries ? h->n_queries : h->n_keys;
        least = n < least ? n : least;
    }
    return least;
}

/* The candidate with matrices; false, and as it was, when they cannot be had. */
static bool solve(learn_job *job, uint32_t n_threads)
{
    kvant_tensor *tensor = job->tensor;
    kvant_tensor_version *candidate = &tensor->versions[KVANT_CANDIDATE];
    bool ok = allocate_weights(tensor, &job->weights) == KVANT_OK;
    if (ok)
        kvant_parallel_for(tensor->n_kv_heads, n_threads, solve_head, job);
    for (uint32_t head = 0; head < tensor->n_kv_heads && ok; head++)
        ok = job->status[head] == KVANT_OK;
    if (!ok) {
        kvant_weights_free(tensor, &job->weights);
        return false;
    }
    kvant_weights_free(tensor, &candidate->weights);
    candidate->weights = job->weights;
    return true;
}

/* Of a version beside another's, as a mean over heads. */
static double cost_beside(const kvant_tensor *tensor, const double *costs, uint32_t version)
{
    double sum = 0;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        sum += costs[head] > 0 ? cost(tensor, head, version) / costs[head] : 1;
    return sum / tensor->n_kv_heads;
}

/* A matrix in the candidate, where it helps the rows at hand. */
static void improve(learn_job *job, kvant_choice *choice, uint32_t n_threads)
{
    kvant_tensor *tensor = job->tensor;
    double *costs = kvant_alloc(tensor->n_kv_heads, sizeof *costs);
    for (uint32_t head = 0; costs && head < tensor->n_kv_heads; head++)
        costs[head] = cost(tensor, head, choice->version);
    if (costs && solve(job, n_threads) &&
        (choice->version == KVANT_CANDIDATE || cost_beside(tensor, costs, KVANT_CANDIDATE) < WORTH_IT))
        choice->version = KVANT_CANDIDATE;
    kvant_free(costs);
}

void kvant_learning_add(kvant_tensor *tensor, kvant_choice *choice, const kvant_new_rows *all, uint32_t n_unused,
                        uint32_t n_threads)
{
    kvant_learning *l = tensor->learning;
    const kvant_new_rows sampled = { l->rows, kvant_tensor_width(tensor), l->n_rows, NULL };
    const kvant_tensor_version *version = &tensor->versions[choice->version];
    learn_job *job = kvant_alloc(1, sizeof *job + tensor->n_kv_heads * sizeof *job->status);
    if (choice->version == KVANT_CANDIDATE || version->stamp != l->stamp) {
        begin(tensor, tensor->versions[KVANT_CANDIDATE].center);
        l->due = version->weights ? SECOND_ROWS : 0;
        l->stamp = choice->version == KVANT_CANDIDATE ? 0 : version->stamp;
    }
    if (job && !l->done && l->n_rows) {
        *job = (learn_job){ .tensor = tensor, .rows = all ? all : &sampled };
        kvant_parallel_for(tensor->n_kv_heads, n_threads, add_head, job);
        const uint32_t n = fewest(tensor, false), n_spare = choice->version == KVANT_CANDIDATE || !version->weights ? 1 : 2;
        if (n >= FEWEST_ROWS && n >= l->due && has_sample(tensor) && fewest(tensor, true) >= FEWEST_ROWS) {
            if (n_unused >= n_spare)
                improve(job, choice, n_threads);
            l->done = n >= MOST_ROWS;
            l->due = n < SECOND_ROWS ? SECOND_ROWS : 2 * n;
        }
    }
    forget_noted(tensor);
    l->n_rows = 0;
    kvant_free(job);
}

void kvant_learning_publish(kvant_tensor *tensor, uint32_t version)
{
    if (tensor->learning)
        tensor->learning->stamp = tensor->versions[version].stamp;
}
