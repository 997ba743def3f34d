/* restored_transforms.c - finds places for the transforms of a restored record (restored.h).
 *
 * An empty cache adopts the transforms, as if it had learned them. Other caches find equal
 * transforms, or put them at free ids, which serve no new rows except those that continue the
 * sequence. A transform without a place refuses its blocks. */
#include "restored.h"

#include <stdlib.h>
#include <string.h>

#include "../rope.h"

static bool has_matrix(const kvp_gpu_cells *cells)
{
    return cells->key_transform_size == (size_t)cells->head_dim * cells->head_dim;
}

static bool is_unset(const kvp_gpu_cells *cells, uint32_t id)
{
    if (id > 0)
        return !(cells->further_made >> id & 1);
    return cells->kept[0] == NULL && !has_matrix(cells) && cells->center == NULL &&
           cells->scale == NULL;
}

/* A transform of the record. */
typedef struct transform {
    uint32_t block; /* a block that has it */
    uint32_t id;    /* its place in the record */
    size_t bytes;
    const char *data; /* as records hold it */
    void *room;       /* for another one */
    int32_t position; /* the first one of its blocks, or below 0 */
} transform;

static bool transform_create(const kvp_gpu_incoming *in, uint32_t block, transform *t)
{
    const kvant_tensor *form = in->cells->form.tensor;

    *t = (transform){ .block = block,
                      .id = in->outer[block].transform,
                      .data = in->transforms[in->outer[block].transform],
                      .room = malloc(kvant_tensor_transform_size(form)),
                      .position = in->outer[block].position };
    t->bytes = kvant_tensor_transform_bytes(form, t->data);
    for (uint32_t i = 0; i < in->n; i++)
        if (in->outer[i].transform == t->id && in->outer[i].position < t->position)
            t->position = in->outer[i].position;
    return t->room != NULL;
}

/* The centre among the bytes, which may have any alignment, as floats; the scale follows it. The
 * caller frees them. NULL without memory, and for a transform without such numbers. */
static float *affine_of(const kvp_gpu_incoming *in, const transform *t)
{
    const size_t n = 2 * kvp_gpu_width(in->cells) * sizeof(float);
    float *numbers = t->bytes >= KVANT_TRANSFORM_HEAD + n ? malloc(n) : NULL;

    if (numbers != NULL)
        memcpy(numbers, t->data + KVANT_TRANSFORM_HEAD, n);
    return numbers;
}

static bool is_same(kvp_gpu_cells *cells, uint32_t id, const transform *t)
{
    const void *own = kvp_gpu_transform_of(cells, id, t->room);

    return own != NULL && memcmp(own, t->data, t->bytes) == 0;
}

static bool any_matrix(const kvp_gpu_incoming *in)
{
    for (uint32_t i = 0; i < in->n; i++)
        if (in->outer[i].has_matrix)
            return true;
    return false;
}

/* Whether a layer whose attention has a softcap can have the transform: it has no centre there. */
static bool is_centred_alike(const kvp_gpu_incoming *in, const float *center)
{
    bool any = false;

    for (size_t i = 0; center != NULL && i < kvp_gpu_width(in->cells); i++)
        any = any || center[i] != 0;
    return !(in->cells->uncentred && any);
}

/* Whether the centres of the blocks rotate as those of the cache. The first ones set the RoPE. */
static bool rotates_alike(const kvp_gpu_incoming *in)
{
    kvp_gpu_centers *centers = &in->cache->buckets.centers;
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_rope rope = { .size = sizeof(rope), .frequencies = frequencies };

    if (kvant_tensor_center_rope(in->cells->form.tensor, 0, &rope.n_dims, &rope.interleaved,
                                 frequencies) != KVANT_OK)
        return true;
    if (centers->rope.size != 0)
        return centers->head_dim == in->cells->head_dim && kvp_rope_is_same(&centers->rope, &rope);
    memcpy(centers->frequencies, frequencies, rope.n_dims / 2 * sizeof(*frequencies));
    centers->rope = rope;
    centers->rope.frequencies = centers->frequencies;
    centers->head_dim = in->cells->head_dim;
    return true;
}

static void learned_free(const kvp_gpu_incoming *in, kvp_gpu_learned_transform *made)
{
    kvp_gpu_free_codecs(made->codecs, in->cells->n_kv_heads);
    free(made->start);
    free(made->kept);
}

/* Makes the transform that the form's block has. */
static bool learned_create(const kvp_gpu_incoming *in, const transform *t,
                           kvp_gpu_learned_transform *made)
{
    const kvp_gpu_cells *cells = in->cells;
    const size_t d = cells->head_dim;
    kvant_block_info info = { .size = sizeof(info) };
    bool ok;

    *made = (kvp_gpu_learned_transform){ .codecs = calloc(cells->n_kv_heads, sizeof(*made->codecs)),
                                         .kept = malloc(
                                             kvant_tensor_transform_size(cells->form.tensor)) };
    ok = made->codecs != NULL && made->kept != NULL &&
         kvant_tensor_mean_codecs(cells->form.tensor, 0, cells->sources, kvant_available_cpus(),
                                  made->codecs) == KVANT_OK;
    for (uint32_t head = 0; head < cells->n_kv_heads && ok; head++) {
        ok = kvant_tensor_get_block(cells->form.tensor, 0, head, &info) == KVANT_OK;
        if (ok && info.start != NULL && made->start == NULL)
            ok = (made->start = malloc(kvp_gpu_width(cells) * sizeof(*made->start))) != NULL;
        if (ok && info.start != NULL)
            memcpy(made->start + head * d, info.start, d * sizeof(*info.start));
    }
    if (ok)
        memcpy(made->kept, t->data, t->bytes);
    return ok;
}

/* Whether a layer can put the transform at an id. The first matrix may follow a centre and a scale,
 * which rows that were f16 in place have without one. */
static bool has_place(const kvp_gpu_incoming *in, const transform *t, uint32_t id)
{
    return is_unset(in->cells, id) || (id == 0 && in->outer[t->block].has_matrix &&
                                       in->cache->adopts_keys && !has_matrix(in->cells));
}

/* Brings the transform to the GPU, at an id that the layer has not set. Without centres of blocks,
 * sealed rows without a matrix would have to have the same centre. */
static bool install_matrix(const kvp_gpu_incoming *in, const transform *t, uint32_t id,
                           const float *mean)
{
    kvp_gpu_cells *cells = in->cells;
    kvp_gpu_learned_transform made;
    bool ok = learned_create(in, t, &made) && (made.start != NULL || cells->center == NULL);

    if (ok && id == 0)
        ok = kvp_gpu_first_adopt(in, &made);
    else if (ok)
        ok = kvp_gpu_upload_bucket(cells, id, &made, mean);
    if (ok && id > 0) {
        cells->further_made |= 1u << id;
        kvp_gpu_keep(cells, id, made.kept);
        made.kept = NULL;
    }
    learned_free(in, &made);
    return ok;
}

static bool install_affine(const kvp_gpu_incoming *in, uint32_t id, const float *affine)
{
    const kvant_tensor *form = in->cells->form.tensor;
    kvant_block_info info = { .size = sizeof(info) };

    if (id != KVP_PLAIN)
        return kvp_gpu_adopt_affine(in->cells, form, 0);
    if (kvant_tensor_get_block(form, 0, 0, &info) != KVANT_OK)
        return false;
    in->cache->buckets.plain = true;
    return kvp_gpu_upload_plain(in->cells, info.affine.center != NULL ? affine : NULL,
                                info.affine.scale != NULL ? affine + kvp_gpu_width(in->cells)
                                                          : NULL);
}

static bool install(const kvp_gpu_incoming *in, const transform *t, uint32_t id)
{
    float *affine = affine_of(in, t);
    bool ok =
        (affine != NULL || t->bytes <= KVANT_TRANSFORM_HEAD) && is_centred_alike(in, affine) &&
        kvant_tensor_set_transform(in->cells->form.tensor, 0, t->data, kvant_available_cpus()) ==
            KVANT_OK;

    if (ok && in->outer[t->block].has_matrix)
        ok = rotates_alike(in) && affine != NULL && install_matrix(in, t, id, affine);
    else if (ok)
        ok = install_affine(in, id, affine);
    free(affine);
    return ok;
}

/* Frees the ids of restored transforms that no block has any more. */
void kvp_gpu_restored_free_ids(kvp_gpu_cache *cache)
{
    uint32_t used = 0;

    for (uint32_t block = 0; block < cache->n_blocks; block++)
        used |= cache->written[block] != 0 ? 1u << cache->buckets.of[block] : 0;
    for (uint32_t id = 1; id < KVP_PLAIN; id++) {
        if (!((cache->buckets.foreign & ~used) >> id & 1))
            continue;
        cache->buckets.foreign &= ~(1u << id);
        for (uint32_t block = 0; block < cache->n_blocks; block++)
            if (cache->buckets.of[block] == id)
                cache->buckets.of[block] = 0;
        for (size_t i = 0; i < cache->n_tensors; i++) {
            kvp_gpu_cells *cells = cache->tensors[i]->cells;
            cells->further_made &= ~(1u << id);
            kvp_gpu_keep(cells, id, NULL);
        }
    }
}

/* A free id for a transform with a matrix; KVP_MOST_TRANSFORMS: there is none. Transforms of an
 * empty cache serve new rows of their positions. */
static uint32_t free_id(const kvp_gpu_incoming *in, const transform *t)
{
    kvp_gpu_buckets *buckets = &in->cache->buckets;
    kvant_lesson_buckets all = { .made = (1u << KVANT_LESSON_BUCKETS) - 1 };
    const uint32_t bucket = t->position > 0 ? kvant_lesson_bucket_of(&all, t->position) : 0;
    uint32_t id = KVANT_LESSON_BUCKETS - 1;

    if (!has_matrix(in->cells))
        return in->cache->adopts_keys ? 0 : KVP_MOST_TRANSFORMS;
    if (in->cache->adopts_keys && !((buckets->lessons.made | buckets->foreign) >> bucket & 1)) {
        buckets->lessons.made |= 1u << bucket;
        return bucket;
    }
    while (id > 0 && (((buckets->lessons.made | buckets->foreign) >> id & 1) ||
                      buckets->lessons.requested == id))
        id--;
    if (id == 0)
        return KVP_MOST_TRANSFORMS;
    buckets->foreign |= 1u << id;
    buckets->foreign_bucket[id] = (uint8_t)bucket;
    return id;
}

/* The id of a transform in the first layer. */
static uint32_t find_id(const kvp_gpu_incoming *in, const transform *t)
{
    for (uint32_t id = 0; id < KVP_MOST_BUCKETS; id++)
        if ((id == 0 || !is_unset(in->cells, id)) && is_same(in->cells, id, t))
            return id;
    if (in->outer[t->block].has_matrix)
        return free_id(in, t);
    if (has_matrix(in->cells) || any_matrix(in))
        return is_unset(in->cells, KVP_PLAIN) ? KVP_PLAIN : KVP_MOST_TRANSFORMS;
    return in->cache->adopts_all && is_unset(in->cells, 0) ? 0 : KVP_MOST_TRANSFORMS;
}

/* Whether a layer may put a transform at an id that another layer chose. */
static bool may_install(const kvp_gpu_incoming *in, const transform *t, uint32_t id)
{
    const kvp_gpu_buckets *buckets = &in->cache->buckets;

    if (!has_place(in, t, id))
        return false;
    if (id == 0 || id == KVP_PLAIN)
        return id == KVP_PLAIN ||
               (in->outer[t->block].has_matrix ? in->cache->adopts_keys : in->cache->adopts_all);
    return has_matrix(in->cells) && (in->cache->adopts_keys || (buckets->foreign >> id & 1));
}

/* Gives all blocks with a transform its id, or refuses them. */
static void place_transform(const kvp_gpu_incoming *in, const transform *t)
{
    uint32_t chosen = KVP_MOST_TRANSFORMS;
    bool tried = false, ok = false;

    for (uint32_t i = 0; i < in->n; i++) {
        const uint32_t of = in->cache->buckets.of[in->blocks[i].block];
        if (in->outer[i].transform != t->id || !in->taken[i])
            continue;
        if (!tried || (!in->first && of != chosen)) {
            chosen = in->first ? find_id(in, t) : of;
            ok = chosen < KVP_MOST_BUCKETS &&
                 (is_same(in->cells, chosen, t) ||
                  ((in->first ? has_place(in, t, chosen) : may_install(in, t, chosen)) &&
                   install(in, t, chosen)));
            tried = true;
        }
        in->taken[i] = ok;
        if (ok && in->first)
            in->cache->buckets.of[in->blocks[i].block] = (uint8_t)chosen;
    }
}

bool kvp_gpu_restored_keys(const kvp_gpu_incoming *in)
{
    uint32_t done = 0;
    bool ok = true;

    for (uint32_t i = 0; i < in->n && ok; i++) {
        transform t = { 0 };
        if (done >> in->outer[i].transform & 1)
            continue;
        done |= 1u << in->outer[i].transform;
        ok = transform_create(in, i, &t);
        if (ok)
            place_transform(in, &t);
        free(t.room);
    }
    return ok;
}

/* Whether the cache has all transforms of the record already. */
bool kvp_gpu_restored_knows(const kvp_gpu_incoming *in)
{
    bool all = true;

    for (uint32_t i = 0; i < in->n && all; i++) {
        transform t = { 0 };
        uint32_t id = 0;
        if (i > 0 && in->outer[i].transform == in->outer[i - 1].transform)
            continue;
        all = transform_create(in, i, &t);
        while (all && id < KVP_MOST_BUCKETS &&
               ((id > 0 && is_unset(in->cells, id)) || !is_same(in->cells, id, &t)))
            id++;
        all = all && id < KVP_MOST_BUCKETS;
        free(t.room);
    }
    return all;
}

/* Values have one centre and one scale. Rows that wait to be learned from are stored like new
 * rows. */
void kvp_gpu_restored_values(const kvp_gpu_incoming *in)
{
    transform t = { 0 };
    bool ok = transform_create(in, 0, &t) && !any_matrix(in);

    for (uint32_t i = 1; i < in->n && ok; i++)
        ok = in->outer[i].transform == in->outer[0].transform;
    if (ok && !is_same(in->cells, 0, &t))
        ok = in->cache->adopts_all && is_unset(in->cells, 0) && install(in, &t, 0);
    ok = ok && !kvp_gpu_learns_alone(in->cells);
    for (uint32_t i = 0; i < in->n; i++)
        in->taken[i] = in->taken[i] && ok;
    free(t.room);
}
