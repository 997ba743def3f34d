/* calibrator.c - gathers the statistics of calibration.h in bounded memory for texts of any length.
 * Keeps sums, ranges and second moments of all rows, and a uniform sample for k-means.
 * Reservoir sampling takes all kv heads of a token together. */
#include "gathered.h"

#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/half.h"
#include "../base/parallel.h"
#include "../base/random.h"
#include "cluster.h"
#include "moments.h"

typedef kvant_calibrator_slot slot;

static kvant_status check_config(const kvant_calibrator_config *config, const kvant_error *error)
{
    if (config->model && strlen(config->model) > KVANT_CALIBRATION_MAX_NAME)
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "the name of the model is longer than %u bytes",
                          KVANT_CALIBRATION_MAX_NAME);
    if (config->n_codebooks > KVANT_CALIBRATION_MAX_CODEBOOKS ||
        (config->n_codebooks && !config->clusters))
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "clusters is NULL, or there are more than %u sets of centroids",
                          KVANT_CALIBRATION_MAX_CODEBOOKS);
    if (!kvant_calibration_valid_clusters(config->clusters, config->n_codebooks))
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "clusters must be from 2 to %u and in increasing order",
                          KVANT_CALIBRATION_MAX_CLUSTERS);
    if (config->n_codebooks && config->sample_rows &&
        config->sample_rows < config->clusters[config->n_codebooks - 1])
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "%u clusters need a sample of at least that many rows, not of %u",
                          (unsigned)config->clusters[config->n_codebooks - 1],
                          (unsigned)config->sample_rows);
    return KVANT_OK;
}

kvant_status kvant_calibrator_create(const kvant_calibrator_config *given, kvant_calibrator **out,
                                     char *err, size_t errlen)
{
    kvant_error error = { err, errlen };
    kvant_calibrator_config taken;
    const kvant_calibrator_config *config = &taken;
    if (!out)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "the argument that receives the calibrator is NULL");
    *out = NULL;
    if (!KVANT_ACCEPT_STRUCT(kvant_calibrator_config, &taken, given, n_threads))
        return kvant_fail(
            &error, KVANT_ERR_ARGUMENT,
            "config is NULL, or its size field is not set to sizeof(kvant_calibrator_config)");
    KVANT_FORWARD(check_config(config, &error));
    kvant_calibrator *c = kvant_alloc(1, sizeof *c);
    if (!c)
        return kvant_fail(&error, KVANT_ERR_MEMORY, "out of memory for a calibrator");
    if (config->model)
        memcpy(c->model, config->model, strlen(config->model));
    c->info = (kvant_calibration_info){ .model_fingerprint = config->model_fingerprint,
                                        .seed = config->seed,
                                        .n_codebooks = config->n_codebooks };
    for (uint32_t i = 0; i < config->n_codebooks; i++)
        c->info.clusters[i] = config->clusters[i];
    if (config->n_codebooks)
        c->sample_rows = config->sample_rows ? config->sample_rows
                                             : 8 * config->clusters[config->n_codebooks - 1];
    c->n_threads = config->n_threads ? config->n_threads : 1;
    *out = c;
    return KVANT_OK;
}

void kvant_calibrator_clear(kvant_calibrator *c)
{
    for (uint32_t i = 0; i < 2 * c->n_layers; i++) {
        kvant_free(c->slots[i].block);
        kvant_free(c->slots[i].centroids);
    }
    kvant_free(c->slots);
    c->slots = NULL;
    c->n_layers = 0;
}

void kvant_calibrator_free(kvant_calibrator **calibrator)
{
    if (!calibrator || !*calibrator)
        return;
    kvant_calibrator_clear(*calibrator);
    kvant_free(*calibrator);
    *calibrator = NULL;
}

kvant_status kvant_calibrator_grow(kvant_calibrator *c, uint32_t layer)
{
    if (layer < c->n_layers)
        return KVANT_OK;
    uint32_t n = layer + 16;
    slot *slots = kvant_alloc((size_t)2 * n, sizeof *slots);
    KVANT_RETURN_IF(!slots, KVANT_ERR_MEMORY);
    if (c->slots)
        memcpy(slots, c->slots, (size_t)2 * c->n_layers * sizeof *slots);
    kvant_free(c->slots);
    c->slots = slots;
    c->n_layers = n;
    return KVANT_OK;
}

/* Returns the next array of n numbers in the block, and moves *at to its end. */
static void *place(const slot *s, size_t *at, size_t n, size_t size)
{
    void *array = s->block && n ? s->block + *at : NULL;
    *at += (n * size + 7) / 8 * 8;
    return array;
}

/* Places all arrays, in the order in which checkpoints store them, and returns their bytes. The
 * limits keep these below 2^56, so 64 bits cannot overflow. */
static size_t place_arrays(slot *s, bool keys, uint32_t sample_rows)
{
    size_t heads = s->n_kv_heads, row = heads * s->head_dim, square = keys ? row * s->head_dim : 0,
           at = 0;
    s->sum = place(s, &at, row, sizeof *s->sum);
    s->min = place(s, &at, row, sizeof *s->min);
    s->max = place(s, &at, row, sizeof *s->max);
    s->n_queries = place(s, &at, heads, sizeof *s->n_queries);
    s->moment = place(s, &at, square, sizeof *s->moment);
    s->spread = place(s, &at, square, sizeof *s->spread);
    s->attended = place(s, &at, square, sizeof *s->attended);
    s->attended_sum = place(s, &at, keys ? row : 0, sizeof *s->attended_sum);
    s->attended_weight = place(s, &at, keys ? heads : 0, sizeof *s->attended_weight);
    s->sample = place(s, &at, row * sample_rows, sizeof *s->sample);
    return at;
}

kvant_status kvant_calibrator_start_slot(const kvant_calibrator *c, uint32_t index,
                                         uint32_t n_kv_heads, uint32_t head_dim)
{
    slot s = { .n_kv_heads = n_kv_heads, .head_dim = head_dim, .random = c->info.seed + index };
    bool keys = index % 2 == KVANT_ROLE_K;
    s.bytes = place_arrays(&s, keys, c->sample_rows);
    s.block = kvant_alloc(s.bytes, 1);
    KVANT_RETURN_IF(!s.block, KVANT_ERR_MEMORY);
    place_arrays(&s, keys, c->sample_rows);
    c->slots[index] = s;
    return KVANT_OK;
}

static bool all_finite(const float *rows, size_t stride, size_t n, size_t row)
{
    bool finite = true;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < row; j++)
            finite &= rows[i * stride + j] - rows[i * stride + j] == 0;
    return finite;
}

static void add_range(slot *s, const float *x, size_t row)
{
    bool first = s->n_rows == 0;
    for (size_t j = 0; j < row; j++) {
        s->sum[j] += x[j];
        s->min[j] = first || x[j] < s->min[j] ? x[j] : s->min[j];
        s->max[j] = first || x[j] > s->max[j] ? x[j] : s->max[j];
    }
}

/* Reservoir sampling: row number n_rows gets a random place among the first n_rows + 1 places, so
 * that every row is kept with the same probability. */
static void add_sample(slot *s, uint32_t sample_rows, const float *x, size_t row)
{
    uint64_t place =
        s->n_rows < sample_rows ? s->n_rows : kvant_splitmix64(&s->random) % (s->n_rows + 1);
    if (place >= sample_rows)
        return;
    for (size_t j = 0; j < row; j++) {
        float clamped = x[j] > KVANT_HALF_MAX    ? KVANT_HALF_MAX
                        : x[j] < -KVANT_HALF_MAX ? -KVANT_HALF_MAX
                                                 : x[j];
        s->sample[place * row + j] = kvant_half_from_float(clamped);
    }
}

typedef struct spread_job {
    slot *slot;
    const float *rows;
    size_t stride, n;
} spread_job;

static void add_spread(void *context, size_t head, uint32_t worker)
{
    (void)worker;
    const spread_job *j = context;
    const size_t d = j->slot->head_dim;
    for (size_t i = 0; i < j->n; i++)
        kvant_moment_add(j->slot->spread + head * d * d, j->rows + i * j->stride + head * d, 1,
                         (uint32_t)d);
}

static kvant_status check_shape(uint32_t layer, kvant_role role, uint32_t n_kv_heads,
                                uint32_t head_dim)
{
    KVANT_RETURN_IF(layer >= KVANT_CALIBRATION_MAX_LAYERS, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(role != KVANT_ROLE_K && role != KVANT_ROLE_V, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(n_kv_heads < 1 || n_kv_heads > KVANT_CALIBRATION_MAX_KV_HEADS,
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(head_dim < 1 || head_dim > KVANT_MAX_HEAD_DIM, KVANT_ERR_ARGUMENT);
    return KVANT_OK;
}

/* Finds the slot of a layer and role. The first call fixes its shape. */
static kvant_status find_slot(kvant_calibrator *c, uint32_t layer, kvant_role role,
                              uint32_t n_kv_heads, uint32_t head_dim, slot **found)
{
    const uint32_t index = 2 * layer + (uint32_t)role;
    KVANT_FORWARD(kvant_calibrator_grow(c, layer));
    slot *s = *found = &c->slots[index];
    KVANT_RETURN_IF(s->centroids ||
                        (s->head_dim && (s->head_dim != head_dim || s->n_kv_heads != n_kv_heads)),
                    KVANT_ERR_ARGUMENT);
    return s->head_dim ? KVANT_OK : kvant_calibrator_start_slot(c, index, n_kv_heads, head_dim);
}

kvant_status kvant_calibrator_add_rows(kvant_calibrator *c, uint32_t layer, kvant_role role,
                                       uint32_t n_kv_heads, uint32_t head_dim, const float *rows,
                                       size_t stride, size_t n)
{
    slot *s;
    KVANT_RETURN_IF(!c || !rows, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(check_shape(layer, role, n_kv_heads, head_dim));
    const size_t row = (size_t)n_kv_heads * head_dim;
    KVANT_RETURN_IF(n > 1 && stride < row, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!all_finite(rows, stride, n, row), KVANT_ERR_NONFINITE);
    KVANT_FORWARD(find_slot(c, layer, role, n_kv_heads, head_dim, &s));
    spread_job job = { s, rows, stride, n };
    if (s->spread)
        kvant_parallel_for(n_kv_heads, c->n_threads, add_spread, &job);
    for (size_t i = 0; i < n; i++) {
        add_range(s, rows + i * stride, row);
        if (s->sample)
            add_sample(s, c->sample_rows, rows + i * stride, row);
        s->n_rows++;
    }
    return KVANT_OK;
}

kvant_status kvant_calibrator_add_queries(kvant_calibrator *c, uint32_t layer, uint32_t kv_head,
                                          uint32_t head_dim, const float *queries, size_t stride,
                                          size_t n)
{
    KVANT_RETURN_IF(!c || !queries || layer >= c->n_layers, KVANT_ERR_ARGUMENT);
    slot *s = &c->slots[2 * layer + KVANT_ROLE_K];
    KVANT_RETURN_IF(!s->head_dim || s->head_dim != head_dim || kv_head >= s->n_kv_heads,
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(n > 1 && stride < head_dim, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!all_finite(queries, stride, n, head_dim), KVANT_ERR_NONFINITE);
    for (size_t i = 0; i < n; i++)
        kvant_moment_add(s->moment + (size_t)kv_head * head_dim * head_dim, queries + i * stride, 1,
                         head_dim);
    s->n_queries[kv_head] += n;
    return KVANT_OK;
}

static void add_attended(slot *s, uint32_t kv_head, const kvant_calibrator_attention *a,
                         uint32_t n_exact, const double *weights)
{
    size_t d = s->head_dim;
    for (uint32_t k = n_exact; k < a->n_keys; k++) {
        const float *key = a->keys + k * a->key_stride;
        if (weights[k] == 0)
            continue;
        kvant_moment_add(s->attended + kv_head * d * d, key, weights[k], s->head_dim);
        for (size_t j = 0; j < d; j++)
            s->attended_sum[kv_head * d + j] += weights[k] * key[j];
        s->attended_weight[kv_head] += weights[k];
    }
}

kvant_status kvant_calibrator_add_attention(kvant_calibrator *c, uint32_t layer, uint32_t kv_head,
                                            uint32_t head_dim, uint32_t n_exact,
                                            const kvant_calibrator_attention *attention)
{
    kvant_calibrator_attention taken;
    const kvant_calibrator_attention *a = &taken;
    KVANT_RETURN_IF(!KVANT_ACCEPT_STRUCT(kvant_calibrator_attention, &taken, attention, scale),
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!c || layer >= c->n_layers, KVANT_ERR_ARGUMENT);
    slot *s = &c->slots[2 * layer + KVANT_ROLE_K];
    KVANT_RETURN_IF(!s->head_dim || s->head_dim != head_dim || kv_head >= s->n_kv_heads,
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!a->keys || !a->queries || !(a->scale - a->scale == 0), KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF((a->n_keys > 1 && a->key_stride < head_dim) ||
                        (a->n_queries > 1 && a->query_stride < head_dim) ||
                        (a->mask && a->n_queries > 1 && a->mask_stride < a->n_keys),
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!all_finite(a->keys, a->key_stride, a->n_keys, head_dim) ||
                        !all_finite(a->queries, a->query_stride, a->n_queries, head_dim),
                    KVANT_ERR_NONFINITE);
    float *scores = kvant_alloc(a->n_keys, sizeof *scores);
    double *weights = kvant_alloc(a->n_keys, sizeof *weights);
    kvant_status status = scores && weights ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        kvant_attention_weights(a, head_dim, scores, weights);
        /* A mask with NaNs, or scores beyond binary32, give weights that are not finite. */
        for (uint32_t k = 0; k < a->n_keys; k++)
            status = weights[k] - weights[k] == 0 ? status : KVANT_ERR_NONFINITE;
    }
    if (status == KVANT_OK)
        add_attended(s, kv_head, a, n_exact, weights);
    kvant_free(scores);
    kvant_free(weights);
    return status;
}

static bool finite_sums(const double *sums, size_t n)
{
    bool finite = true;
    for (size_t i = 0; sums && i < n; i++)
        finite &= sums[i] - sums[i] == 0;
    return finite;
}

static bool all_finite_sums(const kvant_calibrator_moments *sums)
{
    const size_t heads = sums->n_kv_heads, row = heads * sums->head_dim,
                 square = row * sums->head_dim;
    return finite_sums(sums->sum, row) && all_finite(sums->min, row, 1, row) &&
           all_finite(sums->max, row, 1, row) &&
           (!sums->rows || all_finite(sums->rows, sums->stride, sums->n_rows, row)) &&
           finite_sums(sums->spread, square) && finite_sums(sums->moment, square) &&
           finite_sums(sums->attended, square) && finite_sums(sums->attended_sum, row) &&
           finite_sums(sums->attended_weight, heads);
}

static void add(double *to, const double *from, size_t n)
{
    for (size_t i = 0; from && i < n; i++)
        to[i] += from[i];
}

static void add_triangles(double *to, const double *from, size_t heads, size_t d)
{
    for (size_t i = 0; from && i < heads * d; i++)
        add(to + i * d, from + i * d, i % d + 1);
}

static void add_key_sums(slot *s, const kvant_calibrator_moments *sums)
{
    const size_t heads = s->n_kv_heads, d = s->head_dim;
    add_triangles(s->spread, sums->spread, heads, d);
    add_triangles(s->moment, sums->moment, heads, d);
    add_triangles(s->attended, sums->attended, heads, d);
    add(s->attended_sum, sums->attended_sum, heads * d);
    add(s->attended_weight, sums->attended_weight, heads);
    for (size_t h = 0; h < heads; h++)
        s->n_queries[h] += sums->n_queries;
}

static void add_row_sums(slot *s, uint32_t sample_rows, const kvant_calibrator_moments *sums)
{
    const size_t row = (size_t)s->n_kv_heads * s->head_dim;
    add(s->sum, sums->sum, row);
    for (size_t j = 0; j < row; j++) {
        s->min[j] = !s->n_rows || sums->min[j] < s->min[j] ? sums->min[j] : s->min[j];
        s->max[j] = !s->n_rows || sums->max[j] > s->max[j] ? sums->max[j] : s->max[j];
    }
    if (!s->sample)
        s->n_rows += sums->n_rows;
    for (uint64_t i = 0; s->sample && i < sums->n_rows; i++, s->n_rows++)
        add_sample(s, sample_rows, sums->rows + i * sums->stride, row);
}

static kvant_status check_sums(const kvant_calibrator *c, kvant_role role,
                               const kvant_calibrator_moments *sums)
{
    const bool keys = role == KVANT_ROLE_K,
               attended = sums->attended || sums->attended_sum || sums->attended_weight;
    const size_t row = (size_t)sums->n_kv_heads * sums->head_dim;
    KVANT_RETURN_IF(!sums->n_rows || !sums->sum || !sums->min || !sums->max, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(c->sample_rows && (!sums->rows || (sums->n_rows > 1 && sums->stride < row)),
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(keys ? !sums->spread : sums->spread || sums->moment || attended,
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!sums->moment != !sums->n_queries, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(attended && (!sums->attended || !sums->attended_sum || !sums->attended_weight),
                    KVANT_ERR_ARGUMENT);
    return KVANT_OK;
}

kvant_status kvant_calibrator_add_moments(kvant_calibrator *c, uint32_t layer, kvant_role role,
                                          const kvant_calibrator_moments *given)
{
    slot *s;
    kvant_calibrator_moments taken;
    const kvant_calibrator_moments *sums = &taken;
    KVANT_RETURN_IF(
        !c || !KVANT_ACCEPT_STRUCT(kvant_calibrator_moments, &taken, given, attended_weight),
        KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(check_shape(layer, role, sums->n_kv_heads, sums->head_dim));
    KVANT_FORWARD(check_sums(c, role, sums));
    KVANT_RETURN_IF(!all_finite_sums(sums), KVANT_ERR_NONFINITE);
    KVANT_FORWARD(find_slot(c, layer, role, sums->n_kv_heads, sums->head_dim, &s));
    if (role == KVANT_ROLE_K)
        add_key_sums(s, sums);
    add_row_sums(s, c->sample_rows, sums);
    return KVANT_OK;
}

/* --- k-means of one layer --- */

typedef struct job {
    const kvant_calibrator *calibrator;
    slot *slot;
    uint32_t head;
    uint64_t seed;
    kvant_status status;
} job;

/* Computes all sets of centroids of one kv head. The sets share the head's rows and differ in their
 * seeds. */
static kvant_status cluster_head(job *j, float *rows, size_t n)
{
    const kvant_calibration_info *info = &j->calibrator->info;
    const slot *s = j->slot;
    size_t d = s->head_dim, set = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < d; k++)
            rows[i * d + k] = kvant_half_to_float(s->sample[(i * s->n_kv_heads + j->head) * d + k]);
    for (uint32_t b = 0; b < info->n_codebooks; b++) {
        size_t size = info->clusters[b] * d;
        KVANT_FORWARD(kvant_cluster(rows, n, s->head_dim, info->clusters[b], j->seed + b,
                                    s->centroids + set + j->head * size));
        set += size * s->n_kv_heads;
    }
    return KVANT_OK;
}

static void run_job(void *context, size_t index, uint32_t worker)
{
    (void)worker;
    job *j = &((job *)context)[index];
    size_t n =
        j->slot->n_rows < j->calibrator->sample_rows ? j->slot->n_rows : j->calibrator->sample_rows;
    float *rows = kvant_alloc(n, j->slot->head_dim * sizeof *rows);
    j->status = rows ? cluster_head(j, rows, n) : KVANT_ERR_MEMORY;
    kvant_free(rows);
}

size_t kvant_calibrator_centroids(const kvant_calibrator *c, const slot *s)
{
    size_t clusters = 0;
    for (uint32_t b = 0; b < c->info.n_codebooks; b++)
        clusters += c->info.clusters[b];
    return clusters * s->n_kv_heads * s->head_dim;
}

static kvant_status cluster_slot(kvant_calibrator *c, slot *s, uint32_t index)
{
    KVANT_RETURN_IF(s->n_rows < c->info.clusters[c->info.n_codebooks - 1], KVANT_ERR_ARGUMENT);
    job *jobs = kvant_alloc(s->n_kv_heads, sizeof *jobs);
    s->centroids = kvant_alloc(kvant_calibrator_centroids(c, s), sizeof *s->centroids);
    kvant_status status = jobs && s->centroids ? KVANT_OK : KVANT_ERR_MEMORY;
    for (uint32_t h = 0; status == KVANT_OK && h < s->n_kv_heads; h++) {
        uint64_t seed = c->info.seed ^ (((uint64_t)index << 32 | h) + 1) << 8;
        jobs[h] = (job){ .calibrator = c, .slot = s, .head = h, .seed = kvant_splitmix64(&seed) };
    }
    if (status == KVANT_OK)
        kvant_parallel_for(s->n_kv_heads, c->n_threads, run_job, jobs);
    for (uint32_t h = 0; status == KVANT_OK && h < s->n_kv_heads; h++)
        status = jobs[h].status;
    if (status != KVANT_OK) {
        kvant_free(s->centroids);
        s->centroids = NULL;
    }
    kvant_free(jobs);
    return status;
}

bool kvant_calibrator_to_cluster(const kvant_calibrator *c, const slot *s)
{
    return c->info.n_codebooks && s->n_rows && !s->centroids;
}

kvant_status kvant_calibrator_cluster(kvant_calibrator *c, uint32_t *left)
{
    KVANT_RETURN_IF(!c || !left, KVANT_ERR_ARGUMENT);
    bool done = false;
    uint32_t n = 0;
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        slot *pair = &c->slots[2 * layer];
        bool open =
            kvant_calibrator_to_cluster(c, &pair[0]) || kvant_calibrator_to_cluster(c, &pair[1]);
        for (uint32_t role = 0; open && !done && role < 2; role++)
            if (kvant_calibrator_to_cluster(c, &pair[role]))
                KVANT_FORWARD(cluster_slot(c, &pair[role], 2 * layer + role));
        n += open && done;
        done |= open;
    }
    *left = n;
    return KVANT_OK;
}
