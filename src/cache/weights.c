/* weights.c - see weights.h. */
#include "weights.h"

#include "../base/alloc.h"
#include "../base/half.h"
#include "../base/parallel.h"
#include "../math/spd.h"

/* Of a part: the product of the Frobenius norms of W and its inverse. */
#define MAX_CONDITION 65536.0

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

/* lower = W^T of a part, and W^-1, whose rows are columns of lower^-1. */
static kvant_status read_part(uint32_t n, const uint16_t *triangle, double *lower, double *inverse, double *room)
{
    const size_t d = n;
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++)
            lower[i * d + j] = kvant_half_to_float(*triangle++);
    for (size_t i = 0; i < d; i++)
        KVANT_RETURN_IF(!(lower[i * d + i] > 0), KVANT_ERR_FORMAT);
    memcpy(room, lower, d * d * sizeof *room);
    kvant_lower_inverse(n, room);
    KVANT_RETURN_IF(!(kvant_frobenius(n, lower) * kvant_frobenius(n, room) <= MAX_CONDITION), KVANT_ERR_FORMAT);
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j < d; j++)
            inverse[i * d + j] = room[j * d + i];
    return KVANT_OK;
}

typedef struct make_job {
    const kvant_tensor *tensor;
    kvant_weights *weights;
    kvant_status status[];
} make_job;

/* The head's transform: the codec's own, weighed. */
static kvant_status make_head(const make_job *job, uint32_t head)
{
    const uint32_t d = job->tensor->head_dim, n = kvant_weights_part(d);
    const size_t size = (size_t)d * n;
    kvant_transform *transform = &job->weights->transforms[head];
    const uint16_t *triangles = job->weights->triangles + head * (d / n) * kvant_triangle_size(n);
    double *w = kvant_alloc(2 * size + (size_t)n * n, sizeof *w);
    kvant_status status = w ? KVANT_OK : KVANT_ERR_MEMORY;
    *transform = job->tensor->codecs[head]->transform;
    for (uint32_t part = 0; part < d / n && status == KVANT_OK; part++)
        status = read_part(n, triangles + part * kvant_triangle_size(n), w + (size_t)part * n * n,
                           w + size + (size_t)part * n * n, w + 2 * size);
    if (status == KVANT_OK)
        status = kvant_transform_weigh_parts(transform, n, w, w + size);
    kvant_free(w);
    return status;
}

static void make_unit(void *context, size_t head, uint32_t worker)
{
    make_job *job = context;
    (void)worker;
    job->status[head] = make_head(job, (uint32_t)head);
}

kvant_status kvant_weights_create(const kvant_tensor *tensor, const uint16_t *triangles, uint32_t n_threads,
                                  kvant_weights **weights)
{
    const size_t n = kvant_weights_halves(tensor);
    make_job *job = kvant_alloc(1, sizeof *job + tensor->n_kv_heads * sizeof *job->status);
    kvant_weights *w = *weights = kvant_alloc(1, sizeof *w);
    if (w) {
        w->transforms = kvant_alloc(tensor->n_kv_heads, sizeof *w->transforms);
        w->triangles = kvant_alloc(n, sizeof *w->triangles);
    }
    kvant_status status = job && w && w->transforms && w->triangles ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        memcpy(w->triangles, triangles, n * sizeof *triangles);
        job->tensor = tensor;
        job->weights = w;
        kvant_parallel_for(tensor->n_kv_heads, n_threads, make_unit, job);
    }
    for (uint32_t head = 0; head < tensor->n_kv_heads && status == KVANT_OK; head++)
        status = job->status[head];
    if (status != KVANT_OK)
        kvant_weights_free(tensor, weights);
    kvant_free(job);
    return status;
}
