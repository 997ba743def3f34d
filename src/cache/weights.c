/* weights.c - see weights.h. */
#include "weights.h"

#include "center.h"
#include "learning.h"

#include <math.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/half.h"
#include "../base/parallel.h"
#include "../math/sums.h"

/* The largest condition of a part's W: the Frobenius norm of W times the Frobenius norm of W^-1. */
#define MAX_CONDITION 65536.0

/* A transform frees its (R W)^T when more than this many rows were written without it. */
#define MOST_IDLE 64u

/* Early transforms of the first bucket that later ones replace: learn.c makes a transform from the
 * first rows, one from 256 rows and one from 960 rows. */
#define EARLY_VERSIONS 2u

void kvant_weights_free(kvant_weights **weights)
{
    if (!*weights)
        return;
    kvant_free((*weights)->expanded);
    kvant_free((*weights)->triangles);
    kvant_free((*weights)->centers);
    kvant_free(*weights);
    *weights = NULL;
}

/* Computes lower = W^T of a part and its W^-1, whose rows are the columns of lower^-1. */
static kvant_status read_part(uint32_t n, const uint16_t *triangle, double *lower, double *inverse,
                              double *room)
{
    const size_t d = n;
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++)
            lower[i * d + j] = kvant_half_to_float(*triangle++);
    for (size_t i = 0; i < d; i++)
        KVANT_RETURN_IF(!(lower[i * d + i] > 0), KVANT_ERR_FORMAT);
    memcpy(room, lower, d * d * sizeof *room);
    kvant_kernels_get(KVANT_CPU_AUTO)->lower_inverse(d, room, inverse);
    const double squares =
        kvant_dot_lanes(lower, lower, d * d) * kvant_dot_lanes(room, room, d * d);
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

/* Makes a head's transform: W, then the codec's own rotation. */
static kvant_status make_head(const make_job *job, uint32_t head)
{
    const uint32_t d = job->tensor->head_dim, n = kvant_weights_part(d);
    const size_t size = (size_t)n * n;
    kvant_transform *transform = &job->weights->transforms[head];
    double *w = kvant_alloc(3 * size, sizeof *w);
    kvant_status status = w ? KVANT_OK : KVANT_ERR_MEMORY;
    *transform = job->tensor->codecs[head]->transform;
    transform->part = n;
    transform->triangles = job->weights->triangles + head * (d / n) * kvant_triangle_size(n);
    for (uint32_t part = 0; part < d / n && status == KVANT_OK; part++) {
        status = read_part(n, transform->triangles + part * kvant_triangle_size(n), w, w + size,
                           w + 2 * size);
        transform->gain = fmaxf(transform->gain, kvant_transform_gain_of(w, n));
    }
    kvant_free(w);
    return status;
}

static void make_unit(void *context, size_t head, uint32_t worker)
{
    make_job *job = context;
    (void)worker;
    job->status[head] = make_head(job, (uint32_t)head);
}

/* Rows are multiplied by (R W)^T. A transform keeps this matrix only if R is dense, because the
 * matrix then takes head_dim^3 steps to make. Otherwise each batch makes it again. A W of several
 * parts is applied from its triangles. */

static void expand(const kvant_tensor *tensor, kvant_weights *weights, float *expanded)
{
    const size_t size = (size_t)tensor->head_dim * tensor->head_dim;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        if (expanded)
            kvant_transform_expand(&weights->transforms[head], expanded + head * size);
        weights->transforms[head].weights = expanded ? expanded + head * size : NULL;
    }
    kvant_free(weights->expanded);
    weights->expanded = expanded;
}

static bool keeps_expanded(const kvant_tensor *tensor)
{
    return tensor->codecs[0]->transform.rotate == KVANT_ROTATE_DENSE &&
           kvant_weights_part(tensor->head_dim) == tensor->head_dim;
}

static kvant_status prepare(const kvant_tensor *tensor, kvant_weights *weights)
{
    if (weights->expanded || !keeps_expanded(tensor))
        return KVANT_OK;
    float *expanded = kvant_alloc(kvant_tensor_width(tensor), tensor->head_dim * sizeof *expanded);
    KVANT_RETURN_IF(!expanded, KVANT_ERR_MEMORY);
    expand(tensor, weights, expanded);
    return KVANT_OK;
}

kvant_status kvant_weights_create(const kvant_tensor *tensor, const uint16_t *triangles,
                                  uint32_t n_threads, kvant_weights **weights)
{
    const size_t n = kvant_weights_halves(tensor);
    make_job *job = kvant_alloc(1, sizeof *job + tensor->n_kv_heads * sizeof *job->status);
    kvant_weights *w = *weights =
        kvant_alloc(1, sizeof *w + tensor->n_kv_heads * sizeof *w->transforms);
    if (w)
        w->triangles = kvant_alloc(n + KVANT_TRIANGLE_PADDING, sizeof *w->triangles);
    kvant_status status = job && w && w->triangles ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        memcpy(w->triangles, triangles, n * sizeof *triangles);
        job->tensor = tensor;
        job->weights = w;
        kvant_parallel_for(tensor->n_kv_heads, n_threads, make_unit, job);
    }
    for (uint32_t head = 0; head < tensor->n_kv_heads && status == KVANT_OK; head++)
        status = job->status[head];
    if (status == KVANT_OK)
        status = prepare(tensor, w);
    if (status != KVANT_OK)
        kvant_weights_free(weights);
    kvant_free(job);
    return status;
}

kvant_status kvant_version_prepare(kvant_tensor *tensor, uint32_t version)
{
    kvant_weights *weights = tensor->versions[version].weights;
    if (weights)
        weights->idle = 0;
    return weights ? prepare(tensor, weights) : KVANT_OK;
}

void kvant_versions_age(kvant_tensor *tensor, size_t n)
{
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++) {
        kvant_weights *weights = tensor->versions[v].weights;
        if (weights && weights->expanded && weights->idle > MOST_IDLE)
            expand(tensor, weights, NULL);
        if (weights)
            weights->idle += n;
    }
}

static size_t square_bytes(const kvant_tensor *tensor)
{
    return kvant_tensor_width(tensor) * tensor->head_dim * sizeof(float);
}

static bool wants_centers(const kvant_tensor *tensor)
{
    return tensor->learning && tensor->learning->turn && tensor->learning->turn->block_centers;
}

/* Bytes of a transform: its triangles, matrices, centre, scale and, if it has them, centres of
 * blocks. A device also keeps R W and R W^-T of each kv head. */
static size_t transform_bytes(const kvant_tensor *tensor, bool has_centers)
{
    const size_t halves = kvant_weights_halves(tensor) + KVANT_TRIANGLE_PADDING;
    const size_t center_and_scale = 2 * kvant_tensor_width(tensor) * sizeof(float);
    size_t bytes = sizeof(kvant_weights) + tensor->n_kv_heads * sizeof(kvant_transform);
    bytes += halves * sizeof(uint16_t) + center_and_scale;
    bytes += has_centers ? kvant_centers_bytes(tensor) : 0;
    return bytes + (tensor->device ? 2 * square_bytes(tensor) : 0);
}

size_t kvant_weights_bytes(const kvant_tensor *tensor)
{
    size_t bytes = tensor->device_bytes;
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++) {
        const kvant_weights *weights = tensor->versions[v].weights;
        bytes += weights ? transform_bytes(tensor, weights->centers != NULL) : 0;
        bytes += weights && weights->expanded ? square_bytes(tensor) : 0;
    }
    return bytes;
}

size_t kvant_weights_most(const kvant_tensor *tensor)
{
    const uint64_t slots =
        KVANT_PAGE_TOKENS *
        (uint64_t)(tensor->blocks_per_sequence ? tensor->blocks_per_sequence : tensor->n_blocks);
    const kvant_turn *turn = tensor->learning ? tensor->learning->turn : NULL;
    const uint32_t n = (turn ? turn->n_octaves : kvant_turn_octaves(slots)) + EARLY_VERSIONS;
    const uint32_t most = kvant_versions_at_most(tensor) - 1;
    if (!tensor->learning)
        return 0;
    return (n < most ? n : most) * transform_bytes(tensor, wants_centers(tensor)) +
           (keeps_expanded(tensor) ? 2 * square_bytes(tensor) : 0); /* while transforms change */
}

/* A transform as a codec */

/* Fills w with the matrix of all parts, and `inverse` with its inverse. Both begin as zeros. */
static kvant_status read_parts(uint32_t d, const uint16_t *triangles, double *w, double *inverse)
{
    const uint32_t n = kvant_weights_part(d);
    const size_t size = (size_t)n * n;
    double *part = kvant_alloc(3 * size, sizeof *part);
    kvant_status status = part ? KVANT_OK : KVANT_ERR_MEMORY;
    for (uint32_t p = 0; p < d / n && status == KVANT_OK; p++) {
        const bool whole = n == d;
        status = read_part(n, triangles + p * kvant_triangle_size(n), whole ? w : part,
                           whole ? inverse : part + size, part + 2 * size);
        for (uint32_t i = 0; i < size && status == KVANT_OK && !whole; i++) {
            const size_t at =
                kvant_part_channel(d, n, p, i / n) * d + kvant_part_channel(d, n, p, i % n);
            w[at] = part[i];
            inverse[at] = part[size + i];
        }
    }
    kvant_free(part);
    return status;
}

kvant_status kvant_version_weigh(const kvant_tensor *tensor, uint32_t version, uint32_t kv_head,
                                 kvant_transform *transform)
{
    const uint32_t d = tensor->head_dim;
    const size_t size = (size_t)d * d;
    double *w = kvant_alloc(2 * size, sizeof *w);
    kvant_status status =
        w ? read_parts(d, tensor->versions[version].weights->transforms[kv_head].triangles, w,
                       w + size)
          : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        status = kvant_transform_weigh(transform, w, w + size);
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

static kvant_status fix(kvant_codec *codec, const kvant_tensor *tensor, uint32_t version,
                        int32_t position, uint32_t kv_head)
{
    float room[KVANT_MAX_HEAD_DIM];
    const kvant_affine affine = kvant_affine_at(tensor, version, kv_head, position, room);
    kvant_status status = KVANT_OK;
    kvant_free(codec->file_center);
    kvant_free(codec->file_scale);
    codec->file_center = copy_of(affine.center, tensor->head_dim, &status);
    codec->file_scale = copy_of(affine.scale, tensor->head_dim, &status);
    codec->info.center = affine.center ? KVANT_CENTER_FILE : KVANT_CENTER_NONE;
    codec->info.norm = affine.scale ? KVANT_NORM_FILE : KVANT_NORM_NONE;
    codec->info.learns_transform = 0;
    if (status == KVANT_OK && tensor->versions[version].weights)
        status = kvant_version_weigh(tensor, version, kv_head, &codec->transform);
    kvant_codec_complete_view(codec);
    return status;
}

kvant_status kvant_version_codec(const kvant_tensor *tensor, uint32_t version, int32_t position,
                                 uint32_t kv_head, const kvant_codec *like, kvant_codec **codec)
{
    KVANT_FORWARD(kvant_codec_create(like->info.spec, like->info.head_dim, like->info.role, 0,
                                     codec, NULL, 0));
    const kvant_status status = fix(*codec, tensor, version, position, kv_head);
    if (status != KVANT_OK)
        kvant_codec_free(codec);
    return status;
}

bool kvant_version_takes(const kvant_tensor *tensor, const kvant_codec *like)
{
    return like && like->info.role == kvant_tensor_codec_info(tensor)->role &&
           like->info.head_dim == tensor->head_dim && !like->transform.weights;
}

kvant_status kvant_tensor_make_codec(const kvant_tensor *tensor, uint32_t block, uint32_t kv_head,
                                     const kvant_codec *like, kvant_codec **codec)
{
    KVANT_RETURN_IF(!codec, KVANT_ERR_ARGUMENT);
    *codec = NULL;
    KVANT_RETURN_IF(!tensor || block >= tensor->n_blocks || kv_head >= tensor->n_kv_heads,
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!kvant_version_takes(tensor, like), KVANT_ERR_ARGUMENT);
    return kvant_version_codec(tensor, tensor->blocks[block].version,
                               tensor->blocks[block].position, kv_head, like, codec);
}
