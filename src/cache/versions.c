/* versions.c - see versions.h and tensor.h. */
#include "versions.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"

/* The smallest scale, in parts of the head's largest: a channel that happened to be constant in the
 * rows seen must not blow up later ones. 2^-8 of the square roots stands for a range of 2^16
 * between channels. */
#define SMALLEST_SCALE 0.00390625f

/* Rows get a new version when an old one would make this many times the squared error of a new
 * one. */
#define MOST_EXCESS 1.5f

static bool from_file(const kvant_codec_info *info, bool scale)
{
    return scale ? info->norm == KVANT_NORM_FILE : info->center == KVANT_CENTER_FILE;
}

/* Copies what the calibration gives each head that asks for it, to the others what changes nothing;
 * false when it lacks a head. */
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

static bool waits(const kvant_tensor *tensor)
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
    tensor->learns = waits(tensor);
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++) {
        tensor->versions[v].center = kvant_alloc(2 * width, sizeof(float));
        KVANT_RETURN_IF(!tensor->versions[v].center, KVANT_ERR_MEMORY);
        tensor->versions[v].scale = tensor->versions[v].center + width;
    }
    KVANT_RETURN_IF(!load(tensor, false, tensor->versions[0].center) || !load(tensor, true, tensor->versions[0].scale),
                    KVANT_ERR_UNSUPPORTED);
    if (tensor->learns) {
        KVANT_FORWARD(kvant_statistics_create(&tensor->recent, width));
        KVANT_FORWARD(kvant_statistics_create(&tensor->batch, width));
    }
    kvant_versions_reset(tensor);
    return KVANT_OK;
}

void kvant_versions_destroy(kvant_tensor *tensor)
{
    for (uint32_t v = 0; v <= KVANT_CANDIDATE; v++)
        kvant_free(tensor->versions[v].center);
    kvant_statistics_destroy(&tensor->recent);
    kvant_statistics_destroy(&tensor->batch);
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
    }
    tensor->newest = 0;
    memset(tensor->sequence_versions, 0, tensor->n_sequences);
    memset(tensor->unfit, 0, sizeof tensor->unfit);
    kvant_statistics_reset(&tensor->recent);
}

/* A version that no block uses, or NULL. */
static kvant_tensor_version *unused(kvant_tensor *tensor)
{
    for (uint32_t v = 1; v < KVANT_MAX_VERSIONS; v++)
        if (!tensor->versions[v].alive || (!tensor->versions[v].n_blocks && v != tensor->newest))
            return &tensor->versions[v];
    return NULL;
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

int32_t kvant_version_find(kvant_tensor *tensor, const float *center, const float *scale, bool learnt)
{
    size_t bytes = kvant_tensor_width(tensor) * sizeof(float);
    center = center ? center : tensor->versions[0].center;
    scale = scale ? scale : tensor->versions[0].scale;
    for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++) {
        const kvant_tensor_version *version = &tensor->versions[v];
        if (version->alive && version->learnt == learnt && memcmp(version->center, center, bytes) == 0 &&
            memcmp(version->scale, scale, bytes) == 0)
            return (int32_t)v;
    }
    kvant_tensor_version *version = unused(tensor);
    if (!version)
        return -1;
    memmove(version->center, center, bytes);
    memmove(version->scale, scale, bytes);
    version->alive = true;
    version->learnt = learnt;
    version->stamp = ++tensor->last_stamp;
    tensor->unfit[version - tensor->versions] = false;
    return (int32_t)(version - tensor->versions);
}

/* InnerQ's factor of a channel, the square root of its largest magnitude, here after the centre was
 * taken away. */
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
        kvant_statistics_center(seen, at, tensor->head_dim, version->center + at);
    if (info->norm != KVANT_NORM_FIRST)
        return;
    kvant_statistics_distance(seen, at, tensor->head_dim, version->center + at, distance);
    scales_of(distance, tensor->head_dim, version->scale + at);
}

/* Squared error of the rows seen in a head, up to a factor: a codec's error in y is in proportion
 * to the length of y = (x - c) / s, spread over channels, and channel j of x then errs by s_j times
 * that. */
static double cost(const kvant_tensor *tensor, const kvant_statistics *seen, uint32_t head,
                   const kvant_tensor_version *version)
{
    size_t at = (size_t)head * tensor->head_dim;
    const float *scale = version->scale + at;
    float distance[KVANT_MAX_HEAD_DIM];
    double scales = 0, length = 0;
    kvant_statistics_distance(seen, at, tensor->head_dim, version->center + at, distance);
    for (uint32_t j = 0; j < tensor->head_dim; j++) {
        double s = scale[j], y = distance[j] / s;
        scales += s * s;
        length += y * y;
    }
    return scales * length;
}

/* By how much a version errs more than the one that the rows themselves give, as a mean over
 * heads. */
static double excess(const kvant_tensor *tensor, const kvant_statistics *seen, const kvant_tensor_version *version,
                     const kvant_tensor_version *own)
{
    double sum = 0;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        double best = cost(tensor, seen, head, own);
        sum += best > 0 ? cost(tensor, seen, head, version) / best : 1;
    }
    return sum / tensor->n_kv_heads;
}

/* The candidate becomes what the rows seen say. */
static const kvant_tensor_version *learn(kvant_tensor *tensor, const kvant_statistics *seen)
{
    kvant_tensor_version *own = &tensor->versions[KVANT_CANDIDATE];
    memcpy(own->center, tensor->versions[0].center, 2 * kvant_tensor_width(tensor) * sizeof(float));
    own->learnt = true;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        learn_head(tensor, seen, head, own);
    return own;
}

kvant_choice kvant_versions_judge(kvant_tensor *tensor, const kvant_statistics *seen)
{
    kvant_choice choice = { .judged = true, .version = tensor->newest };
    const kvant_tensor_version *own = learn(tensor, seen);
    double least = INFINITY;
    for (uint32_t v = 0; v < KVANT_MAX_VERSIONS; v++) {
        const kvant_tensor_version *version = &tensor->versions[v];
        if (!version->alive)
            continue;
        double e = version->learnt ? excess(tensor, seen, version, own) : INFINITY;
        choice.unfit[v] = !(e <= MOST_EXCESS);
        if (e < least) {
            least = e;
            choice.version = (uint8_t)v;
        }
    }
    if (!(least <= MOST_EXCESS) && unused(tensor))
        choice.version = KVANT_CANDIDATE;
    return choice;
}

/* The candidate takes the place of an unused version, whose arrays become the next candidate's. */
static uint8_t promote_candidate(kvant_tensor *tensor)
{
    kvant_tensor_version *place = unused(tensor), former = *place;
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
        if (tensor->open_pages[i].block >= 0 && is_open_in(tensor, (uint32_t)tensor->open_pages[i].block, 0))
            kvant_open_reexpress(tensor, (uint32_t)tensor->open_pages[i].block, version);
}

void kvant_choice_publish(kvant_tensor *tensor, kvant_choice *choice)
{
    if (!choice->judged)
        return;
    if (choice->version == KVANT_CANDIDATE)
        choice->version = promote_candidate(tensor);
    if (kvant_versions_wait(tensor))
        kvant_versions_begin(tensor, choice->version);
    tensor->newest = choice->version;
    choice->unfit[choice->version] = false; /* its number may have been that of another before */
    memcpy(tensor->unfit, choice->unfit, sizeof tensor->unfit);
}
