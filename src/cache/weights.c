/* weights.c - see weights.h. */
#include "weights.h"

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/half.h"
#include "../base/parallel.h"
#include "../math/sums.h"

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
    kvant_kernels_get(KVANT_CPU_AUTO)->lower_inverse(d, room, inverse);
    const double squares = kvant_dot_lanes(lower, lower, d * d) * kvant_dot_lanes(room, room, d * d);
    KVANT_RETURN_IF(!(squares <= MAX_CONDITION * MAX_CONDITION), KVANT_ERR_FORMAT);
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

/* A version as a codec */

/* The matrix of all parts, and its inverse; both are zeros. */
static kvant_status read_parts(uint32_t d, const uint16_t *triangles, double *w, double *inverse)
{
    const uint32_t n = kvant_weights_part(d);
    const size_t size = (size_t)n * n;
    double *part = kvant_alloc(3 * size, sizeof *part);
    kvant_status status = part ? KVANT_OK : KVANT_ERR_MEMORY;
    for (uint32_t p = 0; p < d / n && status == KVANT_OK; p++) {
        const bool whole = n == d;
        status = read_part(n, triangles + p * kvant_triangle_size(n), whole ? w : part, whole ? inverse : part + size, part + 2 * size);
        for (uint32_t i = 0; i < size && status == KVANT_OK && !whole; i++) {
            const size_t at = kvant_part_channel(d, n, p, i / n) * d + kvant_part_channel(d, n, p, i % n);
            w[at] = part[i];
            inverse[at] = part[size + i];
        }
    }
    kvant_free(part);
    return status;
}

static kvant_status weigh(kvant_codec *codec, const uint16_t *triangles)
{
    const uint32_t d = codec->info.head_dim;
    const size_t size = (size_t)d * d;
    double *w = kvant_alloc(2 * size, sizeof *w);
    kvant_status status = w ? read_parts(d, triangles, w, w + size) : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        status = kvant_transform_weigh(&codec->transform, w, w + size);
    kvant_free(w);
    return status;
}

static float *copy_of(const float *numbers, uint32_t n, kvant_status *status)
{
    float *copy = numbers ? kvant_alloc(n, sizeof *copy) : NULL;
    if (copy)
        memcpy(copy, numbers, n * sizeof *copy);
    else if (numbers)
        *status = KVANT_ERR_MEMORY;
    return copy;
}

static kvant_status fix(kvant_codec *codec, const kvant_tensor *tensor, uint32_t version, uint32_t kv_head)
{
    const kvant_weights *weights = tensor->versions[version].weights;
    const kvant_affine affine = kvant_version_affine(tensor, version, kv_head);
    const size_t halves = kvant_weights_halves(tensor) / tensor->n_kv_heads;
    kvant_status status = KVANT_OK;
    kvant_free(codec->file_center);
    kvant_free(codec->file_scale);
    codec->file_center = copy_of(affine.center, tensor->head_dim, &status);
    codec->file_scale = copy_of(affine.scale, tensor->head_dim, &status);
    codec->info.center = affine.center ? KVANT_CENTER_FILE : KVANT_CENTER_NONE;
    codec->info.norm = affine.scale ? KVANT_NORM_FILE : KVANT_NORM_NONE;
    codec->info.learns_transform = 0;
    if (status == KVANT_OK && weights)
        status = weigh(codec, weights->triangles + kv_head * halves);
    kvant_codec_complete_view(codec);
    return status;
}

kvant_status kvant_version_codec(const kvant_tensor *tensor, uint32_t version, uint32_t kv_head, const kvant_codec *like,
                                 kvant_codec **codec)
{
    KVANT_FORWARD(kvant_codec_create(like->info.spec, like->info.head_dim, like->info.role, 0, codec, NULL, 0));
    const kvant_status status = fix(*codec, tensor, version, kv_head);
    if (status != KVANT_OK)
        kvant_codec_free(codec);
    return status;
}

kvant_status kvant_tensor_make_codec(const kvant_tensor *tensor, uint32_t block, uint32_t kv_head,
                                     const kvant_codec *like, kvant_codec **codec)
{
    KVANT_RETURN_IF(!codec, KVANT_ERR_ARGUMENT);
    *codec = NULL;
    KVANT_RETURN_IF(!tensor || !like || block >= tensor->n_blocks || kv_head >= tensor->n_kv_heads, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(like->info.role != kvant_tensor_codec_info(tensor)->role || like->info.head_dim != tensor->head_dim ||
                        like->transform.weights,
                    KVANT_ERR_ARGUMENT);
    return kvant_version_codec(tensor, tensor->blocks[block].version, kv_head, like, codec);
}
