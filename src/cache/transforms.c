/* transforms.c - centres and scales, and the choice of a transform for rows (transforms.h,
 * tensor.h). The estimates from rows are in statistics.c. */
#include "center.h"
#include "learning.h"
#include "statistics.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"

/* The smallest scale, as a part of the head's largest scale. A channel that happened to be constant
 * in the first rows must not make later rows too large. Scales are square roots, so 2^-8 allows a
 * range of 2^16 between channels. */
#define SMALLEST_SCALE 0.00390625f

#define TRANSFORMS 4u /* the most transforms of a tensor without matrices */

/* Row statistics */

/* Some rows of a large batch are added, spread evenly over it. */

kvant_status kvant_transforms_reserve(kvant_tensor *tensor)
{
    const size_t width = kvant_tensor_width(tensor);
    if (!tensor->learns || tensor->device || tensor->recent.sum)
        return KVANT_OK;
    float *memory = kvant_map(2, kvant_statistics_bytes(tensor));
    KVANT_RETURN_IF(!memory, KVANT_ERR_MEMORY);
    kvant_statistics_set_memory(&tensor->recent, width, memory);
    kvant_statistics_set_memory(&tensor->batch, width, memory + 3 * KVANT_STATISTICS_PARTS * width);
    return KVANT_OK;
}

static void close_statistics(kvant_tensor *tensor)
{
    if (tensor->device)
        return;
    kvant_unmap(tensor->recent.sum, 2, kvant_statistics_bytes(tensor));
    tensor->recent = tensor->batch = (kvant_statistics){ 0 };
}

/* How many numbers the centres and scales of all transforms have. */
static size_t centers_of_all(const kvant_tensor *tensor)
{
    return (KVANT_CANDIDATE + 1) * 2 * kvant_tensor_width(tensor);
}

size_t kvant_transforms_bytes(const kvant_tensor *tensor)
{
    const bool open = tensor->recent.sum && !tensor->device;
    return kvant_learning_bytes(tensor) + (open ? 2 * kvant_statistics_bytes(tensor) : 0);
}

size_t kvant_transforms_most(const kvant_tensor *tensor)
{
    const bool open = tensor->learns && !tensor->device;
    return kvant_learning_most(tensor) + (open ? 2 * kvant_statistics_bytes(tensor) : 0);
}

size_t kvant_statistics_bytes(const kvant_tensor *tensor)
{
    return 3 * KVANT_STATISTICS_PARTS * kvant_tensor_width(tensor) * sizeof(float);
}

void kvant_transforms_set_memory(kvant_tensor *tensor, float *memory)
{
    const size_t width = kvant_tensor_width(tensor);
    kvant_statistics_set_memory(&tensor->recent, width, memory);
    kvant_statistics_set_memory(&tensor->batch, width, memory + 3 * KVANT_STATISTICS_PARTS * width);
}

static void add_rows(const kvant_tensor *tensor, kvant_statistics *statistics, const float *rows,
                     size_t stride, size_t n)
{
    size_t taken = n < KVANT_LEARN_BATCH_ROWS ? n : KVANT_LEARN_BATCH_ROWS;
    if (tensor->device) {
        tensor->device->note(tensor, statistics, rows, stride, n, taken);
        statistics->n += (uint32_t)taken;
        return;
    }
    kvant_statistics_add(statistics, rows, stride, n, taken);
}

static void distances_of_head(const kvant_tensor *tensor, const kvant_statistics *seen,
                              uint32_t head, const kvant_tensor_transform *transform,
                              float *distances)
{
    const size_t at = (size_t)head * tensor->head_dim;
    kvant_statistics_distances(seen, at, tensor->head_dim, transform->center + at, distances);
}

/* Transforms */

static bool from_file(const kvant_codec_info *info, bool scale)
{
    return scale ? info->norm == KVANT_NORM_FILE : info->center == KVANT_CENTER_FILE;
}

/* Copies the calibration's centre or scale for each head whose codec asks for it. Other heads get
 * zeros or ones. Returns false when the calibration lacks a head. */
static bool load(const kvant_tensor *tensor, bool scale, float *out)
{
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const kvant_codec *codec = tensor->codecs[head];
        const float *source = scale ? codec->file_scale : codec->file_center;
        bool asks = from_file(&codec->info, scale);
        if (asks && !source)
            return false;
        for (uint32_t j = 0; j < tensor->head_dim; j++)
            out[(size_t)head * tensor->head_dim + j] = asks ? source[j] : scale ? 1 : 0;
    }
    return true;
}

static bool learns_from_rows(const kvant_tensor *tensor)
{
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const kvant_codec_info *info = &tensor->codecs[head]->info;
        if (info->center == KVANT_CENTER_FIRST || info->norm == KVANT_NORM_FIRST)
            return true;
    }
    return false;
}

kvant_status kvant_transforms_create(kvant_tensor *tensor)
{
    size_t width = kvant_tensor_width(tensor);
    tensor->learns = learns_from_rows(tensor);
    tensor->centers = kvant_map(centers_of_all(tensor), sizeof *tensor->centers);
    KVANT_RETURN_IF(!tensor->centers, KVANT_ERR_MEMORY);
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++) {
        tensor->transforms[v].center = tensor->centers + v * 2 * width;
        tensor->transforms[v].scale = tensor->transforms[v].center + width;
    }
    KVANT_RETURN_IF(!load(tensor, false, tensor->transforms[0].center) ||
                        !load(tensor, true, tensor->transforms[0].scale),
                    KVANT_ERR_UNSUPPORTED);
    if (tensor->learns && tensor->device)
        KVANT_FORWARD(kvant_statistics_create(&tensor->fetched, width));
    KVANT_FORWARD(kvant_learning_create(tensor));
    kvant_transforms_reset(tensor);
    return KVANT_OK;
}

void kvant_transforms_destroy(kvant_tensor *tensor)
{
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++)
        kvant_key_transform_free(&tensor->transforms[v].key_transform);
    kvant_unmap(tensor->centers, centers_of_all(tensor), sizeof *tensor->centers);
    kvant_learning_destroy(tensor);
    kvant_free(tensor->fetched.sum);
    close_statistics(tensor);
}

void kvant_transforms_reset(kvant_tensor *tensor)
{
    load(tensor, false, tensor->transforms[0].center);
    load(tensor, true, tensor->transforms[0].scale);
    tensor->transforms[0].generation = ++tensor->last_generation;
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++) {
        tensor->transforms[v].alive = v == 0;
        tensor->transforms[v].learned = false;
        tensor->transforms[v].n_blocks = 0;
        kvant_key_transform_free(&tensor->transforms[v].key_transform);
    }
    kvant_learning_reset(tensor);
    tensor->newest = 0;
    memset(tensor->sequence_transforms, 0, tensor->n_sequences);
    memset(tensor->rejected, 0, sizeof tensor->rejected);
    kvant_transforms_forget(tensor);
}

/* Attention on a GPU takes one centre and one scale of values per call, so values learn only once
 * there. When no block uses their transform any more, a new one may replace it. */
static bool learns_once(const kvant_tensor *tensor)
{
    return tensor->device && kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V;
}

/* A tensor with matrices may have one more transform, and KVANT_MAX_TRANSFORMS if RoPE is known. On
 * a GPU it may not, because the matrices of keys take about 30 times the memory of their triangles
 * there. */
uint32_t kvant_transforms_at_most(const kvant_tensor *tensor)
{
    if (learns_once(tensor))
        return 2;
    if (!tensor->learning || tensor->device)
        return TRANSFORMS;
    return tensor->learning->rope ? KVANT_MAX_TRANSFORMS : TRANSFORMS + 1;
}

/* How many transforms a tensor can have when imported blocks bring some. Values on a GPU may then
 * have several centres, which makes attention slow, but only one scale. */
static uint32_t found_at_most(const kvant_tensor *tensor)
{
    if (learns_once(tensor) && kvant_tensor_codec_info(tensor)->norm == KVANT_NORM_FIRST)
        return 2;
    return tensor->learning && !tensor->device ? KVANT_MAX_TRANSFORMS : TRANSFORMS;
}

static bool is_unused(const kvant_tensor *tensor, uint32_t transform)
{
    return !tensor->transforms[transform].alive ||
           (!tensor->transforms[transform].n_blocks &&
            (transform != tensor->newest || learns_once(tensor)));
}

/* A transform that no block uses, or NULL. */
static kvant_tensor_transform *unused(kvant_tensor *tensor, uint32_t most)
{
    for (uint32_t v = 1; v < most; v++)
        if (is_unused(tensor, v))
            return &tensor->transforms[v];
    return NULL;
}

static uint32_t count_unused(const kvant_tensor *tensor)
{
    uint32_t n = 0;
    for (uint32_t v = 1; v < kvant_transforms_at_most(tensor); v++)
        n += is_unused(tensor, v);
    return n;
}

void kvant_transforms_join(kvant_tensor *tensor, uint32_t block, uint32_t transform)
{
    tensor->blocks[block].transform_id = (uint8_t)transform;
    tensor->transforms[transform].n_blocks++;
}

void kvant_transforms_leave(kvant_tensor *tensor, uint32_t block)
{
    tensor->transforms[tensor->blocks[block].transform_id].n_blocks--;
    tensor->blocks[block].transform_id = 0;
}

/* Whether matrices and centres are the same. Triangles NULL: there are no matrices. */
static bool same_key_transform(const kvant_tensor *tensor, const kvant_key_transform *key_transform,
                               const kvant_transform_values *numbers)
{
    if (!key_transform || !numbers->triangles)
        return !key_transform && !numbers->triangles;
    return memcmp(key_transform->triangles, numbers->triangles,
                  kvant_key_transform_halves(tensor) * sizeof *numbers->triangles) == 0 &&
           kvant_centers_equal(tensor, key_transform->centers, numbers->centers);
}

static kvant_status make_key_transform(const kvant_tensor *tensor,
                                       const kvant_transform_values *numbers,
                                       kvant_key_transform **key_transform)
{
    KVANT_FORWARD(kvant_key_transform_create(
        tensor, numbers->triangles, numbers->n_threads ? numbers->n_threads : 1, key_transform));
    (*key_transform)->centers = kvant_centers_copy(tensor, numbers->centers);
    if (numbers->centers && !(*key_transform)->centers) {
        kvant_key_transform_free(key_transform);
        return KVANT_ERR_MEMORY;
    }
    return KVANT_OK;
}

kvant_status kvant_transforms_find(kvant_tensor *tensor, const kvant_transform_values *numbers,
                                   uint32_t *transform)
{
    const size_t bytes = kvant_tensor_width(tensor) * sizeof(float);
    const float *center = numbers->center ? numbers->center : tensor->transforms[0].center,
                *scale = numbers->scale ? numbers->scale : tensor->transforms[0].scale;
    kvant_key_transform *key_transform = NULL;
    for (*transform = 0; *transform < KVANT_MAX_TRANSFORMS; ++*transform) {
        const kvant_tensor_transform *v = &tensor->transforms[*transform];
        if (v->alive && v->learned == numbers->learned && memcmp(v->center, center, bytes) == 0 &&
            memcmp(v->scale, scale, bytes) == 0 &&
            same_key_transform(tensor, v->key_transform, numbers))
            return KVANT_OK;
    }
    /* A block may be imported before the caller sets its RoPE. */
    kvant_tensor_transform *found = unused(tensor, found_at_most(tensor));
    KVANT_RETURN_IF(!found, KVANT_ERR_FULL);
    if (numbers->triangles)
        KVANT_FORWARD(make_key_transform(tensor, numbers, &key_transform));
    kvant_key_transform_free(&found->key_transform);
    found->key_transform = key_transform;
    memmove(found->center, center, bytes);
    memmove(found->scale, scale, bytes);
    found->alive = true;
    found->learned = numbers->learned;
    found->generation = ++tensor->last_generation;
    found->lineage = 0;
    *transform = (uint32_t)(found - tensor->transforms);
    tensor->rejected[*transform] = false;
    return KVANT_OK;
}

/* InnerQ's factor of a channel: the square root of the largest magnitude. Here the centre was
 * subtracted before. */
static void scales_of(const float *distance, uint32_t n, float *scale)
{
    float largest = 0;
    for (uint32_t j = 0; j < n; j++) {
        scale[j] = sqrtf(distance[j]);
        largest = fmaxf(largest, scale[j]);
    }
    float floor = largest > 0 ? largest * SMALLEST_SCALE : 1;
    for (uint32_t j = 0; j < n; j++)
        scale[j] = fmaxf(scale[j], floor);
}

static void learn_head(const kvant_tensor *tensor, const kvant_statistics *seen, uint32_t head,
                       kvant_tensor_transform *transform)
{
    const kvant_codec_info *info = &tensor->codecs[head]->info;
    size_t at = (size_t)head * tensor->head_dim;
    float distance[KVANT_MAX_HEAD_DIM];
    if (info->center == KVANT_CENTER_FIRST)
        kvant_statistics_centers(seen, at, tensor->head_dim, transform->center + at);
    if (info->norm != KVANT_NORM_FIRST)
        return;
    distances_of_head(tensor, seen, head, transform, distance);
    scales_of(distance, tensor->head_dim, transform->scale + at);
}

/* The squared error of a head's rows, up to a factor. A codec's error in y = (x - c) / s is in
 * proportion to the length of y and spread over the channels. In channel j of x it is s_j times as
 * large. */
static double cost(const kvant_tensor *tensor, const kvant_statistics *seen, uint32_t head,
                   const kvant_tensor_transform *transform)
{
    size_t at = (size_t)head * tensor->head_dim;
    double scales = 0, length = 0;
    float distance[KVANT_MAX_HEAD_DIM];
    distances_of_head(tensor, seen, head, transform, distance);
    for (uint32_t j = 0; j < tensor->head_dim; j++) {
        double s = transform->scale[at + j], y = distance[j] / s;
        scales += s * s;
        length += y * y;
    }
    return scales * length;
}

/* excess[v] = the error with transform v divided by the error with a transform from the rows
 * themselves, as a mean over heads. It is infinite for transforms that do not exist or were not
 * learned. */
static void find_relative_errors(const kvant_tensor *tensor, const kvant_statistics *seen,
                                 const kvant_tensor_transform *own,
                                 double relative_errors[KVANT_MAX_TRANSFORMS])
{
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++)
        relative_errors[v] =
            tensor->transforms[v].alive && tensor->transforms[v].learned ? 0 : INFINITY;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const double best = cost(tensor, seen, head, own);
        for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++)
            if (relative_errors[v] < INFINITY)
                relative_errors[v] +=
                    (best > 0 ? cost(tensor, seen, head, &tensor->transforms[v]) / best : 1) /
                    tensor->n_kv_heads;
    }
}

/* Makes the candidate from the statistics. */
static const kvant_tensor_transform *learn(kvant_tensor *tensor, const kvant_statistics *seen)
{
    kvant_tensor_transform *own = &tensor->transforms[KVANT_CANDIDATE];
    memcpy(own->center, tensor->transforms[0].center,
           2 * kvant_tensor_width(tensor) * sizeof(float));
    kvant_key_transform_free(&own->key_transform);
    own->learned = true;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        learn_head(tensor, seen, head, own);
    return own;
}

static const kvant_statistics *fetch(kvant_tensor *tensor, const kvant_statistics *seen)
{
    if (!tensor->device)
        return seen;
    kvant_pages_read(tensor, tensor->fetched.sum, seen->sum, kvant_statistics_bytes(tensor));
    tensor->fetched.n = seen->n;
    return &tensor->fetched;
}

static double most_error(const kvant_tensor *tensor, bool sampled)
{
    const kvant_learn_estimate estimate = {
        .sampled = sampled,
        .unsampled_matrix = tensor->device && tensor->transforms[tensor->newest].key_transform,
        .knows_rope = kvant_learning_knows_rope(tensor),
        .position = tensor->learning ? kvant_sample_position(tensor->learning) : -1
    };
    return kvant_learn_most_error(&estimate);
}

/* all: the rows of the batch; NULL: the rows of several short writes. */
static kvant_choice select_transform(kvant_tensor *tensor, const kvant_statistics *pending,
                                     const kvant_new_rows *all, uint32_t n_threads)
{
    kvant_choice choice = { .selected = true, .transform_id = tensor->newest };
    const kvant_statistics *seen = fetch(tensor, pending);
    const kvant_tensor_transform *own = learn(tensor, seen);
    double relative_errors[KVANT_MAX_TRANSFORMS], least = INFINITY;
    bool bucket_added = false;
    kvant_learning_spread(tensor, n_threads);
    const bool sampled = kvant_learning_relative_errors(tensor, n_threads, relative_errors);
    if (!sampled)
        find_relative_errors(tensor, seen, own, relative_errors);
    const double most = most_error(tensor, sampled);
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++) {
        choice.rejected[v] = tensor->transforms[v].alive && !(relative_errors[v] <= most);
        if (relative_errors[v] < least) {
            least = relative_errors[v];
            choice.transform_id = (uint8_t)v;
        }
    }
    if (kvant_learning_needs_bucket(tensor, &choice, least <= most, count_unused(tensor))) {
        choice.status = kvant_learning_add_bucket(tensor, &choice, least, most,
                                                  count_unused(tensor), n_threads, &bucket_added);
        if (!bucket_added)
            learn(tensor, seen);
    }
    if (bucket_added || (!(least <= most) &&
                         count_unused(tensor) > (kvant_learning_is_monotonous(tensor) ? 1u : 0u)))
        choice.transform_id = KVANT_CANDIDATE;
    if (choice.status == KVANT_OK && !tensor->device)
        choice.status = kvant_transforms_prepare(tensor, choice.transform_id);
    if (tensor->learning && choice.status == KVANT_OK)
        choice.status = kvant_learning_add(tensor, &choice, all, count_unused(tensor), n_threads);
    return choice;
}

/* The rows of a batch that learning may read. Rows on a device are copied to the host only if
 * learning needs them; otherwise there are none. */
static kvant_new_rows rows_seen(const kvant_tensor *tensor, const kvant_new_rows *rows)
{
    kvant_new_rows seen = *rows;
    if (tensor->device)
        seen.rows = kvant_learning_wants_rows(tensor, rows)
                        ? tensor->device->look(tensor, rows->rows, rows->stride, rows->n)
                        : NULL;
    seen.n = seen.rows ? rows->n : 0;
    return seen;
}

kvant_choice kvant_transforms_select(kvant_tensor *tensor, const kvant_new_rows *rows,
                                     uint32_t n_threads)
{
    const kvant_new_rows seen = rows_seen(tensor, rows);
    tensor->batch.n = 0;
    add_rows(tensor, &tensor->batch, rows->rows, rows->stride, rows->n);
    kvant_learning_sample_rows(tensor, &seen, true);
    return select_transform(tensor, &tensor->batch, &seen, n_threads);
}

kvant_choice kvant_transforms_select_pending(kvant_tensor *tensor, uint32_t n_threads)
{
    return select_transform(tensor, &tensor->recent, NULL, n_threads);
}

/* Copies the statistics that n more rows change; on a device all of them. */
static void copy_statistics(const kvant_tensor *tensor, kvant_statistics *to,
                            const kvant_statistics *from, size_t n)
{
    if (tensor->device)
        kvant_pages_copy(tensor, to->sum, from->sum, kvant_statistics_bytes(tensor));
    else
        kvant_statistics_copy(to, from, n);
}

void kvant_transforms_note(kvant_tensor *tensor, const kvant_new_rows *rows, bool selected)
{
    const kvant_new_rows none = { .n = 0 };
    if (selected) {
        tensor->batch.n = tensor->recent.n;
        copy_statistics(tensor, &tensor->batch, &tensor->recent, rows->n);
    }
    kvant_learning_sample_rows(tensor, tensor->device ? &none : rows,
                               tensor->recent.n == 0 || tensor->device);
    add_rows(tensor, &tensor->recent, rows->rows, rows->stride, rows->n);
}

void kvant_transforms_undo_note(kvant_tensor *tensor)
{
    const uint32_t n = tensor->recent.n - tensor->batch.n;
    tensor->recent.n = tensor->batch.n;
    copy_statistics(tensor, &tensor->recent, &tensor->batch, n);
    kvant_learning_undo_sample(tensor);
}

void kvant_transforms_forget(kvant_tensor *tensor)
{
    tensor->recent.n = 0;
    close_statistics(tensor);
}

void kvant_transforms_share(const kvant_tensor *from, kvant_tensor *to)
{
    if (from == to || !kvant_transforms_pending(from) || !kvant_transforms_pending(to) ||
        to->recent.n || to->learning)
        return; /* matrices need the rows, not only their statistics */
    if (!from->recent.n)
        return;
    to->recent.n = from->recent.n;
    kvant_pages_copy(to, to->recent.sum, from->recent.sum, kvant_statistics_bytes(from));
}

bool kvant_transforms_fit(const kvant_tensor *tensor, uint32_t transform)
{
    const kvant_statistics *seen = &tensor->fetched;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        float room[KVANT_MAX_HEAD_DIM];
        const kvant_affine affine = kvant_affine_widest(tensor, transform, head, room);
        const float safe = kvant_codec_safe_input(
            kvant_tensor_head_transform(tensor, transform, head), kernels, &affine);
        for (uint32_t p = 0; p < kvant_statistics_parts(seen); p++)
            for (size_t j = (size_t)head * tensor->head_dim;
                 j < (size_t)(head + 1) * tensor->head_dim; j++)
                if (!(fmaxf(-seen->min[p * seen->width + j], seen->max[p * seen->width + j]) <=
                      safe))
                    return false;
    }
    return true;
}

/* Puts the candidate in place of an unused transform, whose arrays serve the next candidate. */
static uint8_t promote_candidate(kvant_tensor *tensor)
{
    kvant_tensor_transform *place = unused(tensor, kvant_transforms_at_most(tensor)),
                           former = *place;
    *place = tensor->transforms[KVANT_CANDIDATE];
    place->alive = true;
    place->n_blocks = 0;
    place->generation = ++tensor->last_generation;
    former.alive = false;
    tensor->transforms[KVANT_CANDIDATE] = former;
    return (uint8_t)(place - tensor->transforms);
}

static bool is_open_in(const kvant_tensor *tensor, uint32_t block, uint32_t transform)
{
    return tensor->blocks[block].open_page >= 0 && tensor->blocks[block].transform_id == transform;
}

void kvant_transforms_begin(kvant_tensor *tensor, uint32_t transform)
{
    tensor->newest = (uint8_t)transform;
    memset(tensor->sequence_transforms, (int)transform, tensor->n_sequences);
    for (uint32_t i = 0; i < tensor->n_open_pages; i++)
        if (tensor->open_pages[i].block >= 0 &&
            is_open_in(tensor, (uint32_t)tensor->open_pages[i].block, 0))
            kvant_open_reexpress(tensor, (uint32_t)tensor->open_pages[i].block, transform);
}

void kvant_choice_publish(kvant_tensor *tensor, kvant_choice *choice)
{
    if (!choice->selected)
        return;
    if (choice->transform_id == KVANT_CANDIDATE)
        choice->transform_id = promote_candidate(tensor);
    /* Frees the matrices of a candidate that was not chosen, or of the replaced transform. */
    kvant_key_transform_free(&tensor->transforms[KVANT_CANDIDATE].key_transform);
    if (kvant_transforms_pending(tensor))
        kvant_transforms_begin(tensor, choice->transform_id);
    tensor->newest = choice->transform_id;
    kvant_learning_publish(tensor, choice->transform_id);
    choice->rejected[choice->transform_id] =
        false; /* the id may have belonged to a rejected transform */
    memcpy(tensor->rejected, choice->rejected, sizeof tensor->rejected);
}
