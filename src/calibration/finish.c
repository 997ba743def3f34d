/* finish.c - makes a calibration from a calibrator's statistics: it writes the bytes of the file,
 * which calibration.c then parses. */
#include "gathered.h"

#include <string.h>

#include "../base/alloc.h"
#include "../base/parallel.h"
#include "moments.h"

typedef kvant_calibrator_slot slot;

static void put_header(const kvant_calibrator *c, uint8_t *bytes, size_t n, uint32_t n_locations)
{
    kvant_calibration_header *header = (kvant_calibration_header *)(void *)bytes;
    *header = (kvant_calibration_header){ .magic = KVANT_CALIBRATION_MAGIC,
                                          .version = KVANT_CALIBRATION_VERSION,
                                          .n_locations = n_locations,
                                          .bytes = n,
                                          .fingerprint = c->info.model_fingerprint,
                                          .seed = c->info.seed,
                                          .name_bytes = (uint32_t)strlen(c->model),
                                          .n_codebooks = c->info.n_codebooks };
    for (uint32_t i = 0; i < 2 * c->n_layers; i++)
        header->n_tokens =
            c->slots[i].n_rows > header->n_tokens ? c->slots[i].n_rows : header->n_tokens;
    const size_t clusters = c->info.n_codebooks * sizeof *c->info.clusters;
    memcpy(header + 1, c->info.clusters, clusters);
    memcpy(bytes + sizeof *header + clusters, c->model, header->name_bytes);
}

/* Memory for the moments of one head. */
typedef struct moments {
    double *queries, *attended, *keys, *centre;
} moments;

/* centre: the mean as in the file, because codecs subtract this one. */
static void centred_moments(const slot *s, uint32_t head, const float *centre, const moments *m)
{
    size_t d = s->head_dim, size = d * d;
    for (size_t j = 0; j < d; j++)
        m->centre[j] = centre[j];
    const double *sum = s->sum + head * d;
    kvant_moment_about(s->moment + head * size, NULL, (double)s->n_queries[head], NULL, s->head_dim,
                       m->queries);
    kvant_moment_about(s->spread + head * size, sum, (double)s->n_rows, m->centre, s->head_dim,
                       m->keys);
    if (s->attended_weight[head] > 0)
        kvant_moment_about(s->attended + head * size, s->attended_sum + head * d,
                           s->attended_weight[head], m->centre, s->head_dim, m->attended);
    else
        memcpy(m->attended, m->keys, size * sizeof *m->keys);
}

typedef struct matrix_job {
    const slot *slot;
    const kvant_calibration_location *location;
    float *out; /* the site's arrays */
    kvant_status *statuses;
} matrix_job;

static void make_matrix_of_head(void *context, size_t head, uint32_t worker)
{
    const matrix_job *w = context;
    size_t d = w->slot->head_dim, size = d * d;
    double *room = kvant_alloc(3 * size + d, sizeof *room);
    moments m = { room, room + size, room + 2 * size, room + 3 * size };
    (void)worker;
    if (!room) {
        w->statuses[head] = KVANT_ERR_MEMORY;
        return;
    }
    centred_moments(w->slot, (uint32_t)head, w->out + w->location->mean + head * d, &m);
    for (size_t i = 0; i < size; i++)
        w->out[w->location->moment + head * size + i] = (float)m.queries[i];
    uint16_t *halves = (uint16_t *)(void *)(w->out + w->location->matrix);
    w->statuses[head] = kvant_make_key_transform(w->slot->head_dim, m.queries, m.attended, m.keys,
                                                 w->out + w->location->diagonal + head * d,
                                                 halves + head * d * (d + 1) / 2);
    kvant_free(room);
}

/* Writes query moments and the matrices of transform= for all heads. */
static kvant_status put_matrices(const kvant_calibrator *c, const slot *s,
                                 const kvant_calibration_location *location, float *out)
{
    kvant_status *statuses = kvant_alloc(s->n_kv_heads, sizeof *statuses), status = KVANT_OK;
    KVANT_RETURN_IF(!statuses, KVANT_ERR_MEMORY);
    matrix_job w = { s, location, out, statuses };
    kvant_parallel_for(s->n_kv_heads, c->n_threads, make_matrix_of_head, &w);
    for (uint32_t h = 0; h < s->n_kv_heads && status == KVANT_OK; h++)
        status = statuses[h];
    kvant_free(statuses);
    return status;
}

static kvant_status put_arrays(const kvant_calibrator *c, const slot *s,
                               const kvant_calibration_location *location, float *out)
{
    size_t row = (size_t)s->n_kv_heads * s->head_dim;
    for (size_t j = 0; j < row; j++)
        out[location->mean + j] = (float)(s->sum[j] / (double)s->n_rows);
    memcpy(out + location->min, s->min, row * sizeof *out);
    memcpy(out + location->max, s->max, row * sizeof *out);
    if (s->centroids)
        memcpy(out + location->centroids[0], s->centroids,
               kvant_calibrator_centroids(c, s) * sizeof *out);
    return s->moment ? put_matrices(c, s, location, out) : KVANT_OK;
}

static kvant_calibration_location location_of(const kvant_calibrator *c, uint32_t index)
{
    kvant_calibration_location location = { .layer = index / 2,
                                            .role = index % 2,
                                            .n_kv_heads = c->slots[index].n_kv_heads,
                                            .head_dim = c->slots[index].head_dim };
    kvant_calibration_set_offsets(&location, &c->info);
    return location;
}

static kvant_status put_all(const kvant_calibrator *c, uint8_t *bytes, size_t n,
                            uint32_t n_locations, size_t arrays)
{
    put_header(c, bytes, n, n_locations);
    const size_t table =
        kvant_calibration_arrays_start(c->info.n_codebooks, (uint32_t)strlen(c->model), 0);
    kvant_calibration_line *line = (kvant_calibration_line *)(void *)(bytes + table);
    for (uint32_t i = 0; i < 2 * c->n_layers; i++) {
        if (!c->slots[i].n_rows)
            continue;
        kvant_calibration_location location = location_of(c, i);
        *line++ = (kvant_calibration_line){
            location.layer, location.role, location.n_kv_heads, location.head_dim, { 0 }
        };
        KVANT_FORWARD(put_arrays(c, &c->slots[i], &location, (float *)(void *)(bytes + arrays)));
        arrays += location.bytes;
    }
    ((kvant_calibration_header *)(void *)bytes)->checksum = kvant_calibration_checksum(bytes, n);
    return KVANT_OK;
}

kvant_status kvant_calibrator_finish(const kvant_calibrator *c, kvant_calibration **calibration)
{
    KVANT_RETURN_IF(!calibration, KVANT_ERR_ARGUMENT);
    *calibration = NULL;
    KVANT_RETURN_IF(!c, KVANT_ERR_ARGUMENT);
    uint32_t n_locations = 0;
    size_t n = 0;
    for (uint32_t i = 0; i < 2 * c->n_layers; i++) {
        if (!c->slots[i].n_rows)
            continue;
        KVANT_RETURN_IF(kvant_calibrator_to_cluster(c, &c->slots[i]), KVANT_ERR_ARGUMENT);
        n += location_of(c, i).bytes;
        n_locations++;
    }
    KVANT_RETURN_IF(n_locations == 0, KVANT_ERR_ARGUMENT);
    size_t arrays = kvant_calibration_arrays_start(c->info.n_codebooks, (uint32_t)strlen(c->model),
                                                   n_locations);
    n += arrays;
    uint8_t *bytes = kvant_alloc(n, 1);
    KVANT_RETURN_IF(!bytes, KVANT_ERR_MEMORY);
    kvant_status status = put_all(c, bytes, n, n_locations, arrays);
    if (status == KVANT_OK)
        status = kvant_calibration_parse(bytes, n, calibration, NULL);
    if (status != KVANT_OK)
        kvant_free(bytes);
    return status;
}
