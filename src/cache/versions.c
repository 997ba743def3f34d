/* versions.c - centres and scales, and the choice of a transform for rows (versions.h, tensor.h).
 * The estimates from rows are in statistics.c. */
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

/* Rows get a new transform when the squared error of an old one is more than this many times the
 * squared error of a new one. */
#define MOST_EXCESS 1.5f
/* Statistics alone do not know W, which is worth more than factors per channel. So the limit for
 * transforms with W is this many times higher when the sample cannot decide. */
#define MATRIX_EXCESS 2
/* The limit below position NEAR_POSITIONS, if RoPE is known. There a transform from another text
 * errs 0.8 to 1.1 times as much. */
#define NEAR_POSITIONS 512
#define NEAR_EXCESS 1.25
/* The limit from that position on. A transform that was rotated there is not as good for a few rows
 * as a transform made from these rows. */
#define RANGE_EXCESS 2.0
#define VERSIONS 4u /* the most transforms of a tensor without matrices */

/* At most this many rows of a batch are added to the statistics, spread evenly over it. */
#define MOST_ROWS 512u

/* Row statistics */

kvant_status kvant_versions_open(kvant_tensor *tensor)
{
    const size_t width = kvant_tensor_width(tensor);
    if (!tensor->learns || tensor->device || tensor->recent.sum)
        return KVANT_OK;
    float *memory = kvant_map(2, kvant_statistics_bytes(tensor));
    KVANT_RETURN_IF(!memory, KVANT_ERR_MEMORY);
    kvant_statistics_place(&tensor->recent, width, memory);
    kvant_statistics_place(&tensor->batch, width, memory + 3 * KVANT_STATISTICS_PARTS * width);
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

size_t kvant_versions_bytes(const kvant_tensor *tensor)
{
    const bool open = tensor->recent.sum && !tensor->device;
    return kvant_learning_bytes(tensor) + (open ? 2 * kvant_statistics_bytes(tensor) : 0);
}

size_t kvant_versions_most(const kvant_tensor *tensor)
{
    const bool open = tensor->learns && !tensor->device;
    return kvant_learning_most(tensor) + (open ? 2 * kvant_statistics_bytes(tensor) : 0);
}

size_t kvant_statistics_bytes(const kvant_tensor *tensor)
{
    return 3 * KVANT_STATISTICS_PARTS * kvant_tensor_width(tensor) * sizeof(float);
}

void kvant_versions_place(kvant_tensor *tensor, float *memory)
{
    const size_t width = kvant_tensor_width(tensor);
    kvant_statistics_place(&tensor->recent, width, memory);
    kvant_statistics_place(&tensor->batch, width, memory + 3 * KVANT_STATISTICS_PARTS * width);
}

static void add_rows(const kvant_tensor *tensor, kvant_statistics *statistics, const float *rows,
                     size_t stride, size_t n)
{
    size_t taken = n < MOST_ROWS ? n : MOST_ROWS;
    if (tensor->device) {
        tensor->device->note(tensor, statistics, rows, stride, n, taken);
        statistics->n += (uint32_t)taken;
        return;
    }
    kvant_statistics_add(statistics, rows, stride, n, taken);
}

static void distances_of_head(const kvant_tensor *tensor, const kvant_statistics *seen,
                              uint32_t head, const kvant_tensor_version *version, float *distances)
{
    const size_t at = (size_t)head * tensor->head_dim;
    kvant_statistics_distances(seen, at, tensor->head_dim, version->center + at, distances);
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

kvant_status kvant_versions_create(kvant_tensor *tensor)
{
    size_t width = kvant_tensor_width(tensor);
    tensor->learns = learns_from_rows(tensor);
    tensor->centers = kvant_map(centers_of_all(tensor), sizeof *tensor->centers);
    KVANT_RETURN_IF(!tensor->centers, KVANT_ERR_MEMORY);
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++) {
        tensor->versions[v].center = tensor->centers + v * 2 * width;
        tensor->versions[v].scale = tensor->versions[v].center + width;
    }
    KVANT_RETURN_IF(!load(tensor, false, tensor->versions[0].center) ||
                        !load(tensor, true, tensor->versions[0].scale),
                    KVANT_ERR_UNSUPPORTED);
    if (tensor->learns && tensor->device)
        KVANT_FORWARD(kvant_statistics_create(&tensor->fetched, width));
    KVANT_FORWARD(kvant_learning_create(tensor));
    kvant_versions_reset(tensor);
    return KVANT_OK;
}

void kvant_versions_destroy(kvant_tensor *tensor)
{
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++)
        kvant_weights_free(&tensor->versions[v].weights);
    kvant_unmap(tensor->centers, centers_of_all(tensor), sizeof *tensor->centers);
    kvant_learning_destroy(tensor);
    kvant_free(tensor->fetched.sum);
    close_statistics(tensor);
}

void kvant_versions_reset(kvant_tensor *tensor)
{
    load(tensor, false, tensor->versions[0].center);
    load(tensor, true, tensor->versions[0].scale);
    tensor->versions[0].stamp = ++tensor->last_stamp;
    for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++) {
        tensor->versions[v].alive = v == 0;
        tensor->versions[v].learnt = false;
        tensor->versions[v].n_blocks = 0;
        kvant_weights_free(&tensor->versions[v].weights);
    }
    kvant_learning_reset(tensor);
    tensor->newest = 0;
    memset(tensor->sequence_versions, 0, tensor->n_sequences);
    memset(tensor->unfit, 0, sizeof tensor->unfit);
    kvant_versions_forget(tensor);
}

/* Attention on a GPU takes one centre and one scale of values per call, so values learn only once
 * there. When no block uses their transform any more, a new one may replace it. */
static bool learns_once(const kvant_tensor *tensor)
{
    return tensor->device && kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V;
}

/* A tensor with matrices may have one more transform, and KVANT_MAX_VERSIONS if RoPE is known. On a
 * GPU it may not, because the matrices of keys take eight times the memory of their triangles
 * there. */
uint32_t kvant_versions_at_most(const kvant_tensor *tensor)
{
    if (learns_once(tensor))
        return 2;
    if (!tensor->learning || tensor->device)
        return VERSIONS;
    return tensor->learning->turn ? KVANT_MAX_VERSIONS : VERSIONS + 1;
}

/* How many transforms a tensor can have when imported blocks bring some. Values on a GPU may then
 * have several centres, which makes attention slow, but only one scale. */
static uint32_t found_at_most(const kvant_tensor *tensor)
{
    if (learns_once(tensor) && kvant_tensor_codec_info(tensor)->norm == KVANT_NORM_FIRST)
        return 2;
    return tensor->learning && !tensor->device ? KVANT_MAX_VERSIONS : VERSIONS;
}

static bool is_unused(const kvant_tensor *tensor, uint32_t version)
{
    return !tensor->versions[version].alive || (!tensor->versions[version].n_blocks &&
                                                (version != tensor->newest || learns_once(tensor)));
}

/* A transform that no block uses, or NULL. */
static kvant_tensor_version *unused(kvant_tensor *tensor, uint32_t most)
{
    for (uint32_t v = 1; v < most; v++)
        if (is_unused(tensor, v))
            return &tensor->versions[v];
    return NULL;
}

static uint32_t count_unused(const kvant_tensor *tensor)
{
    uint32_t n = 0;
    for (uint32_t v = 1; v < kvant_versions_at_most(tensor); v++)
        n += is_unused(tensor, v);
    return n;
}

void kvant_version_join(kvant_tensor *tensor, uint32_t block, uint32_t version)
{
    tensor->blocks[block].version = (uint8_t)version;
    tensor->versions[version].n_blocks++;
}

void kvant_version_leave(kvant_tensor *tensor, uint32_t block)
{
    tensor->versions[tensor->blocks[block].version].n_blocks--;
    tensor->blocks[block].version = 0;
}

/* Whether matrices and centres are the same. Triangles NULL: there are no matrices. */
static bool same_weights(const kvant_tensor *tensor, const kvant_weights *weights,
                         const kvant_version_numbers *numbers)
{
    if (!weights || !numbers->triangles)
        return !weights && !numbers->triangles;
    return memcmp(weights->triangles, numbers->triangles,
                  kvant_weights_halves(tensor) * sizeof *numbers->triangles) == 0 &&
           kvant_centers_equal(tensor, weights->centers, numbers->centers);
}

static kvant_status make_weights(const kvant_tensor *tensor, const kvant_version_numbers *numbers,
                                 kvant_weights **weights)
{
    KVANT_FORWARD(kvant_weights_create(tensor, numbers->triangles, 1, weights));
    (*weights)->centers = kvant_centers_copy(tensor, numbers->centers);
    if (numbers->centers && !(*weights)->centers) {
        kvant_weights_free(weights);
        return KVANT_ERR_MEMORY;
    }
    return KVANT_OK;
}

kvant_status kvant_version_find(kvant_tensor *tensor, const kvant_version_numbers *numbers,
                                uint32_t *version)
{
    const size_t bytes = kvant_tensor_width(tensor) * sizeof(float);
    const float *center = numbers->center ? numbers->center : tensor->versions[0].center,
                *scale = numbers->scale ? numbers->scale : tensor->versions[0].scale;
    kvant_weights *weights = NULL;
    for (*version = 0; *version < KVANT_MAX_VERSIONS; ++*version) {
        const kvant_tensor_version *v = &tensor->versions[*version];
        if (v->alive && v->learnt == numbers->learnt && memcmp(v->center, center, bytes) == 0 &&
            memcmp(v->scale, scale, bytes) == 0 && same_weights(tensor, v->weights, numbers))
            return KVANT_OK;
    }
    /* A block may be imported before the caller sets its RoPE. */
    kvant_tensor_version *found = unused(tensor, found_at_most(tensor));
    KVANT_RETURN_IF(!found, KVANT_ERR_FULL);
    if (numbers->triangles)
        KVANT_FORWARD(make_weights(tensor, numbers, &weights));
    kvant_weights_free(&found->weights);
    found->weights = weights;
    memmove(found->center, center, bytes);
    memmove(found->scale, scale, bytes);
    found->alive = true;
    found->learnt = numbers->learnt;
    found->stamp = ++tensor->last_stamp;
    found->kin = 0;
    *version = (uint32_t)(found - tensor->versions);
    tensor->unfit[*version] = false;
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
                       kvant_tensor_version *version)
{
    const kvant_codec_info *info = &tensor->codecs[head]->info;
    size_t at = (size_t)head * tensor->head_dim;
    float distance[KVANT_MAX_HEAD_DIM];
    if (info->center == KVANT_CENTER_FIRST)
        kvant_statistics_centers(seen, at, tensor->head_dim, version->center + at);
    if (info->norm != KVANT_NORM_FIRST)
        return;
    distances_of_head(tensor, seen, head, version, distance);
    scales_of(distance, tensor->head_dim, version->scale + at);
}

/* The squared error of a head's rows, up to a factor. A codec's error in y = (x - c) / s is in
 * proportion to the length of y and spread over the channels. In channel j of x it is s_j times as
 * large. */
static double cost(const kvant_tensor *tensor, const kvant_statistics *seen, uint32_t head,
                   const kvant_tensor_version *version)
{
    size_t at = (size_t)head * tensor->head_dim;
    double scales = 0, length = 0;
    float distance[KVANT_MAX_HEAD_DIM];
    distances_of_head(tensor, seen, head, version, distance);
    for (uint32_t j = 0; j < tensor->head_dim; j++) {
        double s = version->scale[at + j], y = distance[j] / s;
        scales += s * s;
        length += y * y;
    }
    return scales * length;
}

/* excess[v] = the error with transform v divided by the error with a transform from the rows
 * themselves, as a mean over heads. It is infinite for transforms that do not exist or were not
 * learned. */
static void find_relative_errors(const kvant_tensor *tensor, const kvant_statistics *seen,
                                 const kvant_tensor_version *own, double excess[KVANT_MAX_VERSIONS])
{
    for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++)
        excess[v] = tensor->versions[v].alive && tensor->versions[v].learnt ? 0 : INFINITY;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const double best = cost(tensor, seen, head, own);
        for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++)
            if (excess[v] < INFINITY)
                excess[v] +=
                    (best > 0 ? cost(tensor, seen, head, &tensor->versions[v]) / best : 1) /
                    tensor->n_kv_heads;
    }
}

/* Makes the candidate from the statistics. */
static const kvant_tensor_version *learn(kvant_tensor *tensor, const kvant_statistics *seen)
{
    kvant_tensor_version *own = &tensor->versions[KVANT_CANDIDATE];
    memcpy(own->center, tensor->versions[0].center, 2 * kvant_tensor_width(tensor) * sizeof(float));
    kvant_weights_free(&own->weights);
    own->learnt = true;
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

/* all: the rows of the batch; NULL: the rows of several short writes. */
static kvant_choice judge(kvant_tensor *tensor, const kvant_statistics *noted,
                          const kvant_new_rows *all, uint32_t n_threads)
{
    kvant_choice choice = { .judged = true, .version = tensor->newest };
    const kvant_statistics *seen = fetch(tensor, noted);
    const kvant_tensor_version *own = learn(tensor, seen);
    double excess[KVANT_MAX_VERSIONS], least = INFINITY, most = MOST_EXCESS;
    bool turned = false;
    kvant_learning_spread(tensor, n_threads);
    if (!kvant_learning_excess(tensor, n_threads, excess)) {
        find_relative_errors(tensor, seen, own, excess);
        most *= tensor->versions[tensor->newest].weights && tensor->device ? MATRIX_EXCESS : 1;
    } else if (tensor->learning->turn) {
        most = kvant_sample_place(tensor->learning) < NEAR_POSITIONS ? NEAR_EXCESS : RANGE_EXCESS;
    }
    for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++) {
        choice.unfit[v] = tensor->versions[v].alive && !(excess[v] <= most);
        if (excess[v] < least) {
            least = excess[v];
            choice.version = (uint8_t)v;
        }
    }
    if (kvant_learning_turns(tensor, &choice, least <= most, count_unused(tensor))) {
        choice.status = kvant_learning_turn(tensor, &choice, least, most, count_unused(tensor),
                                            n_threads, &turned);
        if (!turned)
            learn(tensor, seen);
    }
    if (turned || (!(least <= most) &&
                   count_unused(tensor) > (kvant_learning_is_monotonous(tensor) ? 1u : 0u)))
        choice.version = KVANT_CANDIDATE;
    if (choice.status == KVANT_OK && !tensor->device)
        choice.status = kvant_version_prepare(tensor, choice.version);
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
        seen.rows = kvant_learning_looks(tensor, rows)
                        ? tensor->device->look(tensor, rows->rows, rows->stride, rows->n)
                        : NULL;
    seen.n = seen.rows ? rows->n : 0;
    return seen;
}

kvant_choice kvant_versions_judge(kvant_tensor *tensor, const kvant_new_rows *rows,
                                  uint32_t n_threads)
{
    const kvant_new_rows seen = rows_seen(tensor, rows);
    tensor->batch.n = 0;
    add_rows(tensor, &tensor->batch, rows->rows, rows->stride, rows->n);
    kvant_learning_sample(tensor, &seen, true);
    return judge(tensor, &tensor->batch, &seen, n_threads);
}

kvant_choice kvant_versions_judge_noted(kvant_tensor *tensor, uint32_t n_threads)
{
    return judge(tensor, &tensor->recent, NULL, n_threads);
}

void kvant_versions_note(kvant_tensor *tensor, const kvant_new_rows *rows, bool judged)
{
    const kvant_new_rows none = { .n = 0 };
    if (judged && tensor->learning && !tensor->device) {
        tensor->batch.n = tensor->recent.n;
        kvant_statistics_copy(&tensor->batch, &tensor->recent, rows->n);
    }
    kvant_learning_sample(tensor, tensor->device ? &none : rows,
                          tensor->recent.n == 0 || tensor->device);
    add_rows(tensor, &tensor->recent, rows->rows, rows->stride, rows->n);
}

void kvant_versions_unnote(kvant_tensor *tensor)
{
    if (!tensor->device) { /* on a device, rows that are counted twice do little harm */
        const uint32_t n = tensor->recent.n - tensor->batch.n;
        tensor->recent.n = tensor->batch.n;
        kvant_statistics_copy(&tensor->recent, &tensor->batch, n);
    }
    kvant_learning_unsample(tensor);
}

void kvant_versions_forget(kvant_tensor *tensor)
{
    tensor->recent.n = 0;
    close_statistics(tensor);
}

void kvant_versions_share(const kvant_tensor *from, kvant_tensor *to)
{
    if (from == to || !kvant_versions_wait(from) || !kvant_versions_wait(to) || to->recent.n ||
        to->learning)
        return; /* matrices need the rows, not only their statistics */
    if (!from->recent.n)
        return;
    to->recent.n = from->recent.n;
    kvant_pages_copy(to, to->recent.sum, from->recent.sum, kvant_statistics_bytes(from));
}

bool kvant_versions_fit(const kvant_tensor *tensor, uint32_t version)
{
    const kvant_statistics *seen = &tensor->fetched;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        float room[KVANT_MAX_HEAD_DIM];
        const kvant_affine affine = kvant_affine_widest(tensor, version, head, room);
        const float safe = kvant_codec_safe_input(kvant_version_transform(tensor, version, head),
                                                  kernels, &affine);
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
    kvant_tensor_version *place = unused(tensor, kvant_versions_at_most(tensor)), former = *place;
    *place = tensor->versions[KVANT_CANDIDATE];
    place->alive = true;
    place->n_blocks = 0;
    place->stamp = ++tensor->last_stamp;
    former.alive = false;
    tensor->versions[KVANT_CANDIDATE] = former;
    return (uint8_t)(place - tensor->versions);
}

static bool is_open_in(const kvant_tensor *tensor, uint32_t block, uint32_t version)
{
    return tensor->blocks[block].open_page >= 0 && tensor->blocks[block].version == version;
}

void kvant_versions_begin(kvant_tensor *tensor, uint32_t version)
{
    tensor->newest = (uint8_t)version;
    memset(tensor->sequence_versions, (int)version, tensor->n_sequences);
    for (uint32_t i = 0; i < tensor->n_open_pages; i++)
        if (tensor->open_pages[i].block >= 0 &&
            is_open_in(tensor, (uint32_t)tensor->open_pages[i].block, 0))
            kvant_open_reexpress(tensor, (uint32_t)tensor->open_pages[i].block, version);
}

void kvant_choice_publish(kvant_tensor *tensor, kvant_choice *choice)
{
    if (!choice->judged)
        return;
    if (choice->version == KVANT_CANDIDATE)
        choice->version = promote_candidate(tensor);
    /* Frees the matrices of a candidate that was not chosen, or of the replaced transform. */
    kvant_weights_free(&tensor->versions[KVANT_CANDIDATE].weights);
    if (kvant_versions_wait(tensor))
        kvant_versions_begin(tensor, choice->version);
    tensor->newest = choice->version;
    kvant_learning_publish(tensor, choice->version);
    choice->unfit[choice->version] = false; /* the id may have belonged to a rejected transform */
    memcpy(tensor->unfit, choice->unfit, sizeof tensor->unfit);
}
