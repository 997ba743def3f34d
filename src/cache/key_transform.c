/* key_transform.c - see key_transform.h. */
#include "key_transform.h"

#include <kvant/tensor_hooks.h>

#include "center.h"
#include "learning.h"

#include <math.h>
#include <stdatomic.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/parallel.h"
#include "../math/compact.h"
#include "../math/sums.h"

/* The largest condition of a part's W: the Frobenius norm of W times the Frobenius norm of W^-1. */
#define MAX_CONDITION 65536.0

/* A transform frees its (R W)^T when more than this many rows were written without it. */
#define MOST_IDLE 64u

/* Early transforms of the first bucket that later ones replace: learn.c makes a transform from the
 * first rows, one from 256 rows and one from 960 rows. */
#define EARLY_VERSIONS 2u

void kvant_key_transform_free(kvant_key_transform **key_transform)
{
    if (!*key_transform)
        return;
    kvant_free((*key_transform)->expanded);
    kvant_free((*key_transform)->triangles);
    kvant_free((*key_transform)->centers);
    kvant_free(*key_transform);
    *key_transform = NULL;
}

/* Computes lower = W^T of a part and its W^-1, whose rows are the columns of lower^-1. */
static kvant_status read_part(uint32_t n, const uint16_t *triangle, double *lower, double *inverse,
                              double *room)
{
    const size_t d = n;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    float row[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < n; i++) {
        kernels->triangle_row(triangle, n, i, row);
        KVANT_RETURN_IF(!(row[i] > 0), KVANT_ERR_FORMAT);
        for (uint32_t j = 0; j <= i; j++)
            lower[i * d + j] = (double)row[j];
    }
    memcpy(room, lower, d * d * sizeof *room);
    kernels->lower_inverse(d, room, inverse);
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
    kvant_key_transform *key_transform;
    kvant_status status[];
} make_job;

/* Makes a head's transform: W, then the codec's own rotation. */
static kvant_status make_head(const make_job *job, uint32_t head)
{
    const uint32_t d = job->tensor->head_dim, n = kvant_key_transform_part(d);
    const size_t size = (size_t)n * n;
    kvant_transform *transform = &job->key_transform->transforms[head];
    double *w = kvant_alloc(3 * size, sizeof *w);
    kvant_status status = w ? KVANT_OK : KVANT_ERR_MEMORY;
    *transform = job->tensor->codecs[head]->transform;
    transform->part = n;
    transform->triangles = job->key_transform->triangles + head * (d / n) * kvant_triangle_size(n);
    for (uint32_t part = 0; part < d / n && status == KVANT_OK; part++) {
        status = read_part(n, transform->triangles + part * kvant_triangle_size(n), w, w + size,
                           w + 2 * size);
        transform->gain = fmaxf(transform->gain, kvant_transform_gain_of(w, n));
    }
    kvant_free(w);
    return status;
}

static void make_part(void *context, size_t head, uint32_t worker)
{
    make_job *job = context;
    (void)worker;
    job->status[head] = make_head(job, (uint32_t)head);
}

/* Rows are multiplied by the triangles and then rotated. A dense R takes head_dim^2 steps per row,
 * so a transform multiplies it with a W of one part, once. */

static void expand(const kvant_tensor *tensor, kvant_key_transform *key_transform, float *expanded)
{
    const size_t size = (size_t)tensor->head_dim * tensor->head_dim;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        if (expanded)
            kvant_transform_expand(&key_transform->transforms[head], expanded + head * size);
        key_transform->transforms[head].key_transform = expanded ? expanded + head * size : NULL;
    }
    kvant_free(key_transform->expanded);
    key_transform->expanded = expanded;
}

static bool keeps_expanded(const kvant_tensor *tensor)
{
    return tensor->codecs[0]->transform.rotate == KVANT_ROTATE_DENSE &&
           kvant_key_transform_part(tensor->head_dim) == tensor->head_dim;
}

static kvant_status prepare(const kvant_tensor *tensor, kvant_key_transform *key_transform)
{
    if (key_transform->expanded || !keeps_expanded(tensor))
        return KVANT_OK;
    float *expanded = kvant_alloc(kvant_tensor_width(tensor), tensor->head_dim * sizeof *expanded);
    KVANT_RETURN_IF(!expanded, KVANT_ERR_MEMORY);
    expand(tensor, key_transform, expanded);
    return KVANT_OK;
}

kvant_status kvant_key_transform_create(const kvant_tensor *tensor, const uint16_t *triangles,
                                        uint32_t n_threads, kvant_key_transform **key_transform)
{
    const size_t n = kvant_key_transform_halves(tensor);
    make_job *job = kvant_alloc(1, sizeof *job + tensor->n_kv_heads * sizeof *job->status);
    kvant_key_transform *w = *key_transform =
        kvant_alloc(1, sizeof *w + tensor->n_kv_heads * sizeof *w->transforms);
    if (w)
        w->triangles = kvant_alloc(n + KVANT_TRIANGLE_PADDING, sizeof *w->triangles);
    kvant_status status = job && w && w->triangles ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        memcpy(w->triangles, triangles, n * sizeof *triangles);
        job->tensor = tensor;
        job->key_transform = w;
        kvant_parallel_for(tensor->n_kv_heads, n_threads, make_part, job);
    }
    for (uint32_t head = 0; head < tensor->n_kv_heads && status == KVANT_OK; head++)
        status = job->status[head];
    if (status == KVANT_OK)
        status = prepare(tensor, w);
    if (status != KVANT_OK)
        kvant_key_transform_free(key_transform);
    kvant_free(job);
    return status;
}

kvant_status kvant_transforms_prepare(kvant_tensor *tensor, uint32_t transform_id)
{
    kvant_key_transform *key_transform = tensor->transforms[transform_id].key_transform;
    if (!key_transform || !keeps_expanded(tensor))
        return KVANT_OK;
    key_transform->idle = 0;
    return prepare(tensor, key_transform);
}

/* Reads no transform that cannot have such a matrix: in a step of one token, each of them comes
 * from memory. */
void kvant_transforms_age(kvant_tensor *tensor, size_t n)
{
    for (uint32_t v = 0; v <= KVANT_CANDIDATE && keeps_expanded(tensor); v++) {
        kvant_key_transform *key_transform = tensor->transforms[v].key_transform;
        if (key_transform && key_transform->expanded && key_transform->idle > MOST_IDLE)
            expand(tensor, key_transform, NULL);
        if (key_transform)
            key_transform->idle += n;
    }
}

static size_t square_bytes(const kvant_tensor *tensor)
{
    return kvant_tensor_width(tensor) * tensor->head_dim * sizeof(float);
}

static bool wants_centers(const kvant_tensor *tensor)
{
    return tensor->learning && tensor->learning->rope && tensor->learning->rope->block_centers;
}

/* A device keeps the compact form of W of each kv head. With a dense rotation it keeps R W and
 * R W^-T. */
static size_t device_bytes(const kvant_tensor *tensor)
{
    return tensor->codecs[0]->transform.rotate == KVANT_ROTATE_DENSE
               ? 2 * square_bytes(tensor)
               : kvant_compact_size(tensor->head_dim, tensor->n_kv_heads);
}

/* Bytes of a transform: its triangles, matrices, centre, scale and, if it has them, centres of
 * blocks. */
static size_t transform_bytes(const kvant_tensor *tensor, bool has_centers)
{
    const size_t halves = kvant_key_transform_halves(tensor) + KVANT_TRIANGLE_PADDING;
    const size_t center_and_scale = 2 * kvant_tensor_width(tensor) * sizeof(float);
    size_t bytes = sizeof(kvant_key_transform) + tensor->n_kv_heads * sizeof(kvant_transform);
    bytes += halves * sizeof(uint16_t) + center_and_scale;
    bytes += has_centers ? kvant_centers_bytes(tensor) : 0;
    return bytes + (tensor->device ? device_bytes(tensor) : 0);
}

size_t kvant_key_transform_bytes(const kvant_tensor *tensor)
{
    size_t bytes = tensor->device_bytes;
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++) {
        const kvant_key_transform *key_transform = tensor->transforms[v].key_transform;
        bytes += key_transform ? transform_bytes(tensor, key_transform->centers != NULL) : 0;
        bytes += key_transform && key_transform->expanded ? square_bytes(tensor) : 0;
    }
    return bytes;
}

size_t kvant_key_transform_most(const kvant_tensor *tensor)
{
    const uint64_t slots =
        KVANT_PAGE_TOKENS *
        (uint64_t)(tensor->blocks_per_sequence ? tensor->blocks_per_sequence : tensor->n_blocks);
    const kvant_rope_state *rope_state = tensor->learning ? tensor->learning->rope : NULL;
    const uint32_t n =
        (rope_state ? rope_state->n_buckets : kvant_rope_buckets(slots)) + EARLY_VERSIONS;
    const uint32_t most = kvant_transforms_at_most(tensor) - 1;
    if (!tensor->learning)
        return 0;
    return (n < most ? n : most) * transform_bytes(tensor, wants_centers(tensor)) +
           (keeps_expanded(tensor) ? 2 * square_bytes(tensor) : 0); /* while transforms change */
}

/* A transform as a codec */

/* Fills w with the matrix of all parts, and `inverse` with its inverse. Both begin as zeros. */
static kvant_status read_parts(uint32_t d, const uint16_t *triangles, double *w, double *inverse)
{
    const uint32_t n = kvant_key_transform_part(d);
    const size_t size = (size_t)n * n;
    const bool whole = n == d;
    double *room = kvant_alloc(whole ? size : 3 * size, sizeof *room), *part = room + size;
    kvant_status status = room ? KVANT_OK : KVANT_ERR_MEMORY;
    for (uint32_t p = 0; p < d / n && status == KVANT_OK; p++) {
        status = read_part(n, triangles + p * kvant_triangle_size(n), whole ? w : part,
                           whole ? inverse : part + size, room);
        for (uint32_t i = 0; i < size && status == KVANT_OK && !whole; i++) {
            const size_t at =
                kvant_part_channel(d, n, p, i / n) * d + kvant_part_channel(d, n, p, i % n);
            w[at] = part[i];
            inverse[at] = part[size + i];
        }
    }
    kvant_free(room);
    return status;
}

kvant_status kvant_transforms_set_matrix(const kvant_tensor *tensor, uint32_t transform_id,
                                         uint32_t kv_head, kvant_transform *transform)
{
    const uint32_t d = tensor->head_dim;
    const size_t size = (size_t)d * d;
    double *w = kvant_alloc(2 * size, sizeof *w);
    kvant_status status =
        w ? read_parts(
                d, tensor->transforms[transform_id].key_transform->transforms[kv_head].triangles, w,
                w + size)
          : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        status = kvant_transform_set_matrix(transform, w, w + size);
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

static kvant_status fix(kvant_codec *codec, const kvant_tensor *tensor, uint32_t transform_id,
                        int32_t position, uint32_t kv_head)
{
    float room[KVANT_MAX_HEAD_DIM];
    const kvant_affine affine = kvant_affine_at(tensor, transform_id, kv_head, position, room);
    kvant_status status = KVANT_OK;
    kvant_free(codec->file_center);
    kvant_free(codec->file_scale);
    codec->file_center = copy_of(affine.center, tensor->head_dim, &status);
    codec->file_scale = copy_of(affine.scale, tensor->head_dim, &status);
    codec->info.center = affine.center ? KVANT_CENTER_FILE : KVANT_CENTER_NONE;
    codec->info.norm = affine.scale ? KVANT_NORM_FILE : KVANT_NORM_NONE;
    codec->info.learns_transform = 0;
    if (status == KVANT_OK && tensor->transforms[transform_id].key_transform)
        status = kvant_transforms_set_matrix(tensor, transform_id, kv_head, &codec->transform);
    kvant_codec_complete_view(codec);
    return status;
}

static bool accepts(const kvant_tensor *tensor, const kvant_codec *like)
{
    return like && like->info.role == kvant_tensor_codec_info(tensor)->role &&
           like->info.head_dim == tensor->head_dim && !like->transform.key_transform;
}

static kvant_status make_codec(const kvant_tensor *tensor, uint32_t block, int32_t position,
                               uint32_t kv_head, const kvant_codec *like, kvant_codec **codec)
{
    KVANT_RETURN_IF(!codec, KVANT_ERR_ARGUMENT);
    *codec = NULL;
    KVANT_RETURN_IF(!tensor || block >= tensor->n_blocks || kv_head >= tensor->n_kv_heads,
                    KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!accepts(tensor, like), KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(kvant_codec_create(like->info.spec, like->info.head_dim, like->info.role, 0,
                                     codec, NULL, 0));
    const kvant_status status =
        fix(*codec, tensor, tensor->blocks[block].transform_id, position, kv_head);
    if (status != KVANT_OK)
        kvant_codec_free(codec);
    return status;
}

kvant_status kvant_tensor_make_codec(const kvant_tensor *tensor, uint32_t block, uint32_t kv_head,
                                     const kvant_codec *like, kvant_codec **codec)
{
    const bool known = tensor && block < tensor->n_blocks;
    return make_codec(tensor, block, known ? tensor->blocks[block].position : KVANT_NO_POSITION,
                      kv_head, like, codec);
}

static kvant_status set_unit_matrix(kvant_codec *codec)
{
    const size_t d = codec->info.head_dim;
    double *w = kvant_alloc(d, d * sizeof *w);
    KVANT_RETURN_IF(!w, KVANT_ERR_MEMORY);
    for (size_t i = 0; i < d; i++)
        w[i * d + i] = 1;
    const kvant_status status = kvant_transform_set_matrix(&codec->transform, w, w);
    kvant_free(w);
    return status;
}

kvant_status kvant_codec_unit_matrix(const kvant_codec *like, kvant_codec **codec)
{
    KVANT_RETURN_IF(!codec, KVANT_ERR_ARGUMENT);
    *codec = NULL;
    KVANT_RETURN_IF(!like || like->transform.key_transform, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(kvant_codec_create(like->info.spec, like->info.head_dim, like->info.role, 0,
                                     codec, NULL, 0));
    kvant_codec *made = *codec;
    kvant_free(made->file_center);
    kvant_free(made->file_scale);
    made->file_scale = NULL;
    made->file_center = kvant_alloc(made->info.head_dim, sizeof *made->file_center);
    made->info.center = KVANT_CENTER_FILE;
    made->info.norm = KVANT_NORM_NONE;
    made->info.learns_transform = 0;
    const kvant_status status = made->file_center ? set_unit_matrix(made) : KVANT_ERR_MEMORY;
    kvant_codec_complete_view(made);
    if (status != KVANT_OK)
        kvant_codec_free(codec);
    return status;
}

typedef struct mean_codecs {
    const kvant_tensor *tensor;
    uint32_t block;
    const kvant_codec *const *like;
    kvant_codec **made;
    atomic_int status; /* the first error */
} mean_codecs;

static void make_mean_codec(void *context, size_t kv_head, uint32_t worker)
{
    mean_codecs *m = context;
    const kvant_status status = make_codec(m->tensor, m->block, KVANT_NO_POSITION,
                                           (uint32_t)kv_head, m->like[kv_head], &m->made[kv_head]);
    int none = KVANT_OK;
    (void)worker;
    if (status != KVANT_OK)
        atomic_compare_exchange_strong(&m->status, &none, (int)status);
}

kvant_status kvant_tensor_mean_codecs(const kvant_tensor *tensor, uint32_t block,
                                      const kvant_codec *const *like, uint32_t n_threads,
                                      kvant_codec **codecs)
{
    mean_codecs m = { .tensor = tensor, .block = block, .like = like, .made = codecs };
    KVANT_RETURN_IF(!tensor || !like || !codecs, KVANT_ERR_ARGUMENT);
    atomic_init(&m.status, KVANT_OK);
    kvant_parallel_for(tensor->n_kv_heads, n_threads, make_mean_codec, &m);
    return (kvant_status)atomic_load(&m.status);
}
