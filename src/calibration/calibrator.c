/* calibrator.c - gathers the statistics of calibration.h in bounded memory, whatever the length of the text: sums, ranges and
 * second moments of every row, and a uniform sample of rows for k-means (reservoir sampling, all kv heads of a token
 * together). */
#include "format.h"

#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"
#include "../base/parallel.h"
#include "../base/random.h"
#include "cluster.h"
#include "moments.h"
#include "weights.h"

/* What is gathered for one layer and role; row = n_kv_heads x head_dim. */
typedef struct slot {
    uint32_t n_kv_heads, head_dim; /* 0: nothing was added */
    uint64_t n_rows;
    double *sum;      /* row */
    float *min, *max; /* row */
    double *moment; /* of queries: n_kv_heads x head_dim x head_dim, lower triangles; keys only, as the next four */
    double *spread; /* of keys */
    double *attended, *attended_sum, *attended_weight; /* of keys as attention weighs them; row and n_kv_heads */
    uint64_t *n_queries;                               /* n_kv_heads */
    uint16_t *sample;                                  /* sample_rows x row, fp16 as the engine's cache */
    uint64_t random;
    float *centroids; /* as in the file: set by set, n_kv_heads x clusters x head_dim; NULL until clustered */
} slot;

struct kvant_calibrator {
    char model[KVANT_CALIBRATION_MAX_NAME + 1];
    kvant_calibration_info info; /* what goes into the file's head */
    uint32_t sample_rows, n_threads;
    uint32_t n_layers; /* slots has two for each */
    slot *slots;
};

static kvant_status check_config(const kvant_calibrator_config *config, const kvant_error *error)
{
    if (!config || config->size != sizeof *config)
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "no configuration, or one of another version");
    if (config->model && strlen(config->model) > KVANT_CALIBRATION_MAX_NAME)
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "the model's name is longer than %u bytes",
                          KVANT_CALIBRATION_MAX_NAME);
    if (config->n_codebooks > KVANT_CALIBRATION_MAX_CODEBOOKS || (config->n_codebooks && !config->clusters))
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "there can be %u sets of centroids",
                          KVANT_CALIBRATION_MAX_CODEBOOKS);
    for (uint32_t i = 0; i < config->n_codebooks; i++)
        if (config->clusters[i] < 2 || config->clusters[i] > KVANT_CALIBRATION_MAX_CLUSTERS ||
            (i > 0 && config->clusters[i] <= config->clusters[i - 1]))
            return kvant_fail(error, KVANT_ERR_ARGUMENT,
                              "numbers of clusters are from 2 to %u, different and in increasing order",
                              KVANT_CALIBRATION_MAX_CLUSTERS);
    if (config->n_codebooks && config->sample_rows &&
        config->sample_rows < config->clusters[config->n_codebooks - 1])
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "%u clusters need a sample of as many rows, not of %u",
                          (unsigned)config->clusters[config->n_codebooks - 1], (unsigned)config->sample_rows);
    return KVANT_OK;
}

kvant_status kvant_calibrator_create(const kvant_calibrator_config *config, kvant_calibrator **out, char *err,
                                     size_t errlen)
{
    kvant_error error = { err, errlen };
    if (!out)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT, "no place for the calibrator");
    *out = NULL;
    KVANT_FORWARD(check_config(config, &error));
    kvant_calibrator *c = kvant_alloc(1, sizeof *c);
    if (!c)
        return kvant_fail(&error, KVANT_ERR_MEMORY, "no memory for a calibrator");
    if (config->model)
        memcpy(c->model, config->model, strlen(config->model));
    c->info = (kvant_calibration_info){ .model_fingerprint = config->model_fingerprint,
                                        .seed = config->seed,
                                        .n_codebooks = config->n_codebooks };
    for (uint32_t i = 0; i < config->n_codebooks; i++)
        c->info.clusters[i] = config->clusters[i];
    if (config->n_codebooks)
        c->sample_rows = config->sample_rows ? config->sample_rows : 8 * config->clusters[config->n_codebooks - 1];
    c->n_threads = config->n_threads ? config->n_threads : 1;
    *out = c;
    return KVANT_OK;
}

static void free_slot(slot *s)
{
    kvant_free(s->sum);
    kvant_free(s->min);
    kvant_free(s->max);
    kvant_free(s->moment);
    kvant_free(s->spread);
    kvant_free(s->attended);
    kvant_free(s->attended_sum);
    kvant_free(s->attended_weight);
    kvant_free(s->n_queries);
    kvant_free(s->sample);
    kvant_free(s->centroids);
    *s = (slot){ .n_rows = 0 };
}

void kvant_calibrator_free(kvant_calibrator **calibrator)
{
    if (!calibrator || !*calibrator)
        return;
    for (uint32_t i = 0; i < 2 * (*calibrator)->n_layers; i++)
        free_slot(&(*calibrator)->slots[i]);
    kvant_free((*calibrator)->slots);
    kvant_free(*calibrator);
    *calibrator = NULL;
}

static kvant_status grow(kvant_calibrator *c, uint32_t layer)
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

static bool start_moments(slot *s, uint32_t n_kv_heads, uint32_t head_dim)
{
    size_t row = (size_t)n_kv_heads * head_dim;
    s->moment = kvant_alloc(row * head_dim, sizeof *s->moment);
    s->spread = kvant_alloc(row * head_dim, sizeof *s->spread);
    s->attended = kvant_alloc(row * head_dim, sizeof *s->attended);
    s->attended_sum = kvant_alloc(row, sizeof *s->attended_sum);
    s->attended_weight = kvant_alloc(n_kv_heads, sizeof *s->attended_weight);
    return s->moment && s->spread && s->attended && s->attended_sum && s->attended_weight;
}

static kvant_status start_slot(const kvant_calibrator *c, slot *s, uint32_t index, uint32_t n_kv_heads,
                               uint32_t head_dim)
{
    size_t row = (size_t)n_kv_heads * head_dim, sample;
    bool keys = index % 2 == KVANT_ROLE_K;
    KVANT_RETURN_IF(!kvant_mul_size(row, c->sample_rows, &sample), KVANT_ERR_MEMORY);
    s->sum = kvant_alloc(row, sizeof *s->sum);
    s->min = kvant_alloc(row, sizeof *s->min);
    s->max = kvant_alloc(row, sizeof *s->max);
    s->n_queries = kvant_alloc(n_kv_heads, sizeof *s->n_queries);
    s->sample = sample ? kvant_alloc(sample, sizeof *s->sample) : NULL;
    bool moments = !keys || start_moments(s, n_kv_heads, head_dim);
    if (!s->sum || !s->min || !s->max || !s->n_queries || !moments || (sample && !s->sample)) {
        free_slot(s);
        return KVANT_ERR_MEMORY;
    }
    s->n_kv_heads = n_kv_heads;
    s->head_dim = head_dim;
    s->random = c->info.seed + index;
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

/* Row number n_rows takes a random place among the first n_rows + 1, so that every row is kept with the same probability. */
static void add_sample(slot *s, uint32_t sample_rows, const float *x, size_t row)
{
    uint64_t place = s->n_rows < sample_rows ? s->n_rows : kvant_splitmix64(&s->random) % (s->n_rows + 1);
    if (place >= sample_rows)
        return;
    for (size_t j = 0; j < row; j++) {
        float clamped = x[j] > KVANT_HALF_MAX ? KVANT_HALF_MAX : x[j] < -KVANT_HALF_MAX ? -KVANT_HALF_MAX : x[j];
        s->sample[place * row + j] = kvant_half_from_float(clamped);
    }
}

kvant_status kvant_calibrator_add_rows(kvant_calibrator *c, uint32_t layer, kvant_role role, uint32_t n_kv_heads,
                                       uint32_t head_dim, const float *rows, size_t stride, size_t n)
{
    KVANT_RETURN_IF(!c || !rows || layer >= KVANT_CALIBRATION_MAX_LAYERS, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(role != KVANT_ROLE_K && role != KVANT_ROLE_V, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(n_kv_heads < 1 || n_kv_heads > KVANT_CALIBRATION_MAX_KV_HEADS, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(head_dim < 1 || head_dim > KVANT_MAX_HEAD_DIM, KVANT_ERR_ARGUMENT);
    size_t row = (size_t)n_kv_heads * head_dim;
    KVANT_RETURN_IF(n > 1 && stride < row, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!all_finite(rows, stride, n, row), KVANT_ERR_NONFINITE);
    KVANT_FORWARD(grow(c, layer));
    uint32_t index = 2 * layer + (uint32_t)role;
    slot *s = &c->slots[index];
    KVANT_RETURN_IF(s->centroids || (s->head_dim && (s->head_dim != head_dim || s->n_kv_heads != n_kv_heads)),
                    KVANT_ERR_ARGUMENT);
    if (!s->head_dim)
        KVANT_FORWARD(start_slot(c, s, index, n_kv_heads, head_dim));
    for (size_t i = 0; i < n; i++) {
        add_range(s, rows + i * stride, row);
        for (size_t h = 0; s->spread && h < n_kv_heads; h++)
            kvant_moment_add(s->spread + h * head_dim * head_dim, rows + i * stride + h * head_dim, 1, head_dim);
        if (s->sample)
            add_sample(s, c->sample_rows, rows + i * stride, row);
        s->n_rows++;
    }
    return KVANT_OK;
}

kvant_status kvant_calibrator_add_queries(kvant_calibrator *c, uint32_t layer, uint32_t kv_head, uint32_t head_dim,
                                          const float *queries, size_t stride, size_t n)
{
    KVANT_RETURN_IF(!c || !queries || layer >= c->n_layers, KVANT_ERR_ARGUMENT);
    slot *s = &c->slots[2 * layer + KVANT_ROLE_K];
    KVANT_RETURN_IF(!s->head_dim || s->head_dim != head_dim || kv_head >= s->n_kv_heads, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(n > 1 && stride < head_dim, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!all_finite(queries, stride, n, head_dim), KVANT_ERR_NONFINITE);
    for (size_t i = 0; i < n; i++)
        kvant_moment_add(s->moment + (size_t)kv_head * head_dim * head_dim, queries + i * stride, 1, head_dim);
    s->n_queries[kv_head] += n;
    return KVANT_OK;
}

static void add_attended(slot *s, uint32_t kv_head, const kvant_calibrator_attention *a, uint32_t n_exact,
                         const double *weights)
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
                                            const kvant_calibrator_attention *a)
{
    KVANT_RETURN_IF(!c || !a || a->size != sizeof *a || layer >= c->n_layers, KVANT_ERR_ARGUMENT);
    slot *s = &c->slots[2 * layer + KVANT_ROLE_K];
    KVANT_RETURN_IF(!s->head_dim || s->head_dim != head_dim || kv_head >= s->n_kv_heads, KVANT_ERR_ARGUMENT);
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
        for (uint32_t k = 0; k < a->n_keys; k++) /* a mask that is not one, or scores beyond binary32 */
            status = weights[k] - weights[k] == 0 ? status : KVANT_ERR_NONFINITE;
    }
    if (status == KVANT_OK)
        add_attended(s, kv_head, a, n_exact, weights);
    kvant_free(scores);
    kvant_free(weights);
    return status;
}

/* --- k-means of one layer --- */

typedef struct job {
    const kvant_calibrator *calibrator;
    slot *slot;
    uint32_t head;
    uint64_t seed;
    kvant_status status;
} job;

/* All sets of one kv head. The sets of a head share its rows and differ in their seeds. */
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
    size_t n = j->slot->n_rows < j->calibrator->sample_rows ? j->slot->n_rows : j->calibrator->sample_rows;
    float *rows = kvant_alloc(n, j->slot->head_dim * sizeof *rows);
    j->status = rows ? cluster_head(j, rows, n) : KVANT_ERR_MEMORY;
    kvant_free(rows);
}

static kvant_status cluster_slot(kvant_calibrator *c, slot *s, uint32_t index)
{
    size_t clusters = 0, row = (size_t)s->n_kv_heads * s->head_dim;
    for (uint32_t b = 0; b < c->info.n_codebooks; b++)
        clusters += c->info.clusters[b];
    KVANT_RETURN_IF(s->n_rows < c->info.clusters[c->info.n_codebooks - 1], KVANT_ERR_ARGUMENT);
    job *jobs = kvant_alloc(s->n_kv_heads, sizeof *jobs);
    s->centroids = kvant_alloc(clusters * row, sizeof *s->centroids);
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

static bool to_cluster(const kvant_calibrator *c, const slot *s)
{
    return c->info.n_codebooks && s->n_rows && !s->centroids;
}

kvant_status kvant_calibrator_cluster(kvant_calibrator *c, uint32_t *left)
{
    KVANT_RETURN_IF(!c || !left, KVANT_ERR_ARGUMENT);
    bool done = false;
    *left = 0;
    for (uint32_t layer = 0; layer < c->n_layers; layer++) {
        slot *pair = &c->slots[2 * layer];
        bool open = to_cluster(c, &pair[0]) || to_cluster(c, &pair[1]);
        for (uint32_t role = 0; open && !done && role < 2; role++)
            if (to_cluster(c, &pair[role]))
                KVANT_FORWARD(cluster_slot(c, &pair[role], 2 * layer + role));
        *left += open && done;
        done |= open;
    }
    return KVANT_OK;
}

/* --- the file --- */

static void put_header(const kvant_calibrator *c, uint8_t *bytes, size_t n, uint32_t n_sites)
{
    uint32_t name_bytes = (uint32_t)strlen(c->model);
    uint64_t n_tokens = 0;
    for (uint32_t i = 0; i < 2 * c->n_layers; i++)
        n_tokens = c->slots[i].n_rows > n_tokens ? c->slots[i].n_rows : n_tokens;
    memcpy(bytes, KVANT_CALIBRATION_MAGIC, 8);
    kvant_put_u32(bytes + KVANT_CALIBRATION_AT_VERSION, KVANT_CALIBRATION_VERSION);
    kvant_put_u32(bytes + KVANT_CALIBRATION_AT_SITES, n_sites);
    kvant_put_u64(bytes + KVANT_CALIBRATION_AT_BYTES, n);
    kvant_put_u64(bytes + KVANT_CALIBRATION_AT_FINGERPRINT, c->info.model_fingerprint);
    kvant_put_u64(bytes + KVANT_CALIBRATION_AT_TOKENS, n_tokens);
    kvant_put_u64(bytes + KVANT_CALIBRATION_AT_SEED, c->info.seed);
    kvant_put_u32(bytes + KVANT_CALIBRATION_AT_NAME_BYTES, name_bytes);
    kvant_put_u32(bytes + KVANT_CALIBRATION_AT_CODEBOOKS, c->info.n_codebooks);
    uint8_t *at = bytes + KVANT_CALIBRATION_HEADER;
    for (uint32_t i = 0; i < c->info.n_codebooks; i++, at += 4)
        kvant_put_u32(at, c->info.clusters[i]);
    memcpy(at, c->model, name_bytes);
}

/* Room for the moments of one head. */
typedef struct moments {
    double *queries, *attended, *keys, *centre;
} moments;

/* centre is the mean as the file has it, which codecs subtract. */
static void centred_moments(const slot *s, uint32_t head, const float *centre, const moments *m)
{
    size_t d = s->head_dim, size = d * d;
    for (size_t j = 0; j < d; j++)
        m->centre[j] = centre[j];
    const double *sum = s->sum + head * d;
    kvant_moment_about_zero(s->moment + head * size, (double)s->n_queries[head], s->head_dim, m->queries);
    kvant_moment_about(s->spread + head * size, sum, (double)s->n_rows, m->centre, s->head_dim, m->keys);
    if (s->attended_weight[head] > 0)
        kvant_moment_about(s->attended + head * size, s->attended_sum + head * d, s->attended_weight[head],
                           m->centre, s->head_dim, m->attended);
    else
        memcpy(m->attended, m->keys, size * sizeof *m->keys);
}

typedef struct weighing {
    const slot *slot;
    const kvant_calibration_site *site;
    float *out; /* the site's arrays */
    kvant_status *statuses;
} weighing;

static void weigh_head(void *context, size_t head, uint32_t worker)
{
    const weighing *w = context;
    size_t d = w->slot->head_dim, size = d * d;
    double *room = kvant_alloc(3 * size + d, sizeof *room);
    moments m = { room, room + size, room + 2 * size, room + 3 * size };
    (void)worker;
    if (!room) {
        w->statuses[head] = KVANT_ERR_MEMORY;
        return;
    }
    centred_moments(w->slot, (uint32_t)head, w->out + w->site->mean + head * d, &m);
    for (size_t i = 0; i < size; i++)
        w->out[w->site->moment + head * size + i] = (float)m.queries[i];
    uint16_t *halves = (uint16_t *)(void *)(w->out + w->site->matrix);
    w->statuses[head] = kvant_make_weights(w->slot->head_dim, m.queries, m.attended, m.keys,
                                           w->out + w->site->diagonal + head * d, halves + head * d * (d + 1) / 2);
    kvant_free(room);
}

/* Query moments and weights of all heads. */
static kvant_status put_weights(const kvant_calibrator *c, const slot *s, const kvant_calibration_site *site,
                                float *out)
{
    kvant_status *statuses = kvant_alloc(s->n_kv_heads, sizeof *statuses), status = KVANT_OK;
    KVANT_RETURN_IF(!statuses, KVANT_ERR_MEMORY);
    weighing w = { s, site, out, statuses };
    kvant_parallel_for(s->n_kv_heads, c->n_threads, weigh_head, &w);
    for (uint32_t h = 0; h < s->n_kv_heads && status == KVANT_OK; h++)
        status = statuses[h];
    kvant_free(statuses);
    return status;
}

static kvant_status put_arrays(const kvant_calibrator *c, const slot *s, const kvant_calibration_site *site,
                               float *out)
{
    size_t row = (size_t)s->n_kv_heads * s->head_dim, clusters = 0;
    for (size_t j = 0; j < row; j++)
        out[site->mean + j] = (float)(s->sum[j] / (double)s->n_rows);
    memcpy(out + site->min, s->min, row * sizeof *out);
    memcpy(out + site->max, s->max, row * sizeof *out);
    for (uint32_t i = 0; i < c->info.n_codebooks; i++)
        clusters += c->info.clusters[i];
    if (clusters)
        memcpy(out + site->centroids[0], s->centroids, clusters * row * sizeof *out);
    return s->moment ? put_weights(c, s, site, out) : KVANT_OK;
}

static kvant_calibration_site site_of(const kvant_calibrator *c, uint32_t index)
{
    kvant_calibration_site site = { .layer = index / 2,
                                    .role = index % 2,
                                    .n_kv_heads = c->slots[index].n_kv_heads,
                                    .head_dim = c->slots[index].head_dim };
    kvant_calibration_place(&site, &c->info);
    return site;
}

static kvant_status put_all(const kvant_calibrator *c, uint8_t *bytes, size_t n, uint32_t n_sites, size_t arrays)
{
    put_header(c, bytes, n, n_sites);
    uint8_t *line = bytes + kvant_calibration_arrays_start(c->info.n_codebooks, (uint32_t)strlen(c->model), 0);
    for (uint32_t i = 0; i < 2 * c->n_layers; i++) {
        if (!c->slots[i].n_rows)
            continue;
        kvant_calibration_site site = site_of(c, i);
        kvant_put_u32(line, site.layer);
        kvant_put_u32(line + 4, site.role);
        kvant_put_u32(line + 8, site.n_kv_heads);
        kvant_put_u32(line + 12, site.head_dim);
        KVANT_FORWARD(put_arrays(c, &c->slots[i], &site, (float *)(void *)(bytes + arrays)));
        line += KVANT_CALIBRATION_ENTRY;
        arrays += site.bytes;
    }
    kvant_put_u64(bytes + KVANT_CALIBRATION_AT_CHECKSUM, kvant_calibration_checksum(bytes, n));
    return KVANT_OK;
}

kvant_status kvant_calibrator_finish(const kvant_calibrator *c, kvant_calibration **calibration)
{
    KVANT_RETURN_IF(!calibration, KVANT_ERR_ARGUMENT);
    *calibration = NULL;
    KVANT_RETURN_IF(!c, KVANT_ERR_ARGUMENT);
    uint32_t n_sites = 0;
    size_t n = 0;
    for (uint32_t i = 0; i < 2 * c->n_layers; i++) {
        if (!c->slots[i].n_rows)
            continue;
        KVANT_RETURN_IF(to_cluster(c, &c->slots[i]), KVANT_ERR_ARGUMENT);
        n += site_of(c, i).bytes;
        n_sites++;
    }
    KVANT_RETURN_IF(n_sites == 0, KVANT_ERR_ARGUMENT);
    size_t arrays = kvant_calibration_arrays_start(c->info.n_codebooks, (uint32_t)strlen(c->model), n_sites);
    n += arrays;
    uint8_t *bytes = kvant_alloc(n, 1);
    KVANT_RETURN_IF(!bytes, KVANT_ERR_MEMORY);
    kvant_status status = put_all(c, bytes, n, n_sites, arrays);
    if (status == KVANT_OK)
        status = kvant_calibration_parse(bytes, n, calibration, NULL);
    if (status != KVANT_OK)
        kvant_free(bytes);
    return status;
}
