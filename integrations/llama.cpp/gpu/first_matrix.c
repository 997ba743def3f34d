/* first_matrix.c - a layer's first key transform (transform=first): when it is learned, and how it
 * comes in force.
 *
 * Rows stay in exact pages until other blocks need the pages (step.c), and no row needs a key
 * transform before it is sealed. When two thirds of the pages have blocks, the GPU makes a matrix
 * per layer from the keys in these pages and from queries that prompts had (queries.c). A prompt's
 * graph begins with a layer as soon as it has enqueued the layer's keys, because the next batch may
 * have to seal rows already. The step that has to seal rows first puts the matrices in force, and
 * keys in open pages take them. A step that is too long for the pages, and has more rows than are
 * in these, makes the matrices from its own rows instead, in its graph. So results depend on no
 * clock.
 *
 * Keys that were sealed without a key transform keep the centre and the scale that they were sealed
 * with, as the transform KVP_PLAIN. These are keys of a restored state, and keys of tokens that are
 * too much alike to learn a transform for all later rows from.
 */
#include "in_place.h"
#include "learner.h"
#include "restored.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

/* Beginning */

/* Begins to learn for a layer. Without memory the layer has no key transform. */
static void begin_layer(kvp_gpu_cells *cells)
{
    kvp_gpu_learner_input lesson;

    if (!kvp_gpu_lacks_key_transform(cells) || cells->learner == NULL || cells->learner->begun ||
        !kvp_gpu_lesson_of(cells, &lesson))
        return;
    kvp_gpu_learner_start(cells, &lesson);
}

/* Begins for all layers, unless there are too few rows in exact pages or their tokens are too much
 * alike. */
static void begin(kvp_gpu_cache *cache)
{
    cache->lesson = (kvant_lesson){ .begun = kvp_gpu_lessons_begin(cache), .tried = true };
    for (size_t i = 0; i < cache->n_tensors && cache->lesson.begun; i++)
        begin_layer(cache->tensors[i]->cells);
    kvp_gpu_learner_flush(cache);
    kvp_gpu_batch_done(cache->gpu);
}

void kvp_gpu_first_teach(kvp_gpu_cells *cells)
{
    kvp_gpu_cache *cache = cells->cache;

    if (!cache->lesson.tried)
        cache->lesson = (kvant_lesson){ .begun = kvp_gpu_lessons_begin(cache), .tried = true };
    if (cache->lesson.begun)
        begin_layer(cells);
}

/* How many pages have blocks. The plan has decided for the step at hand. */
static uint32_t count_pages(const kvp_gpu_cache *cache)
{
    uint32_t n = 0;

    for (uint32_t page = 0; page < cache->n_pages; page++)
        n += kvant_plan_block(cache->plan, page) >= 0;
    return n;
}

/* In force */

static bool has_sealed_rows(const kvp_gpu_cache *cache, uint32_t block)
{
    const int64_t page = kvp_gpu_page_of(cache, (int64_t)block * KVANT_PAGE_TOKENS);

    return (cache->written[block] & ~(page >= 0 ? cache->pages[page].dirty : 0)) != 0;
}

/* Gives blocks with sealed rows the transform that these rows have. */
static void mark_plain(kvp_gpu_cache *cache)
{
    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        if (!has_sealed_rows(cache, block))
            continue;
        cache->buckets.of[block] = KVP_PLAIN;
        cache->buckets.plain = cache->buckets.changed = true;
        kvp_gpu_centers_assign(cache, block, KVP_NO_POSITION);
        kvp_gpu_centers_move(cache, block, 0);
    }
}

/* Keeps a restored transform for saved states. With a softcap keys have no centre. */
static void keep(kvp_gpu_cells *cells, kvp_gpu_learned_transform *made)
{
    if (made->kept != NULL && cells->center == NULL)
        memset((char *)made->kept + KVANT_TRANSFORM_HEAD, 0, kvp_gpu_width(cells) * sizeof(float));
    kvp_gpu_keep(cells, 0, made->kept);
    made->kept = NULL;
}

static bool has_starts(const kvp_gpu_cells *cells, const kvp_gpu_learned_transform *made)
{
    return made != NULL ? made->start != NULL : cells->learner->has_block_centers;
}

/* All that a transform needs besides its numbers, so that nothing can lack memory once it is in
 * force. */
static bool prepare(kvp_gpu_cells *cells, const kvp_gpu_learned_transform *made)
{
    kvp_gpu_centers *centers = &cells->cache->buckets.centers;

    centers->used = centers->used || (has_starts(cells, made) && !cells->uncentred);
    return kvp_gpu_have_matrix_codecs(cells) && kvp_gpu_shift_reserve(cells) &&
           kvp_gpu_buckets_upload(cells->cache, cells->gpu->stream);
}

/* Makes the transform whose numbers are on the GPU the cells' transform. made: it was restored. */
static void take(kvp_gpu_cells *cells, kvp_gpu_learned_transform *made)
{
    kvp_gpu_use_transform(cells, (const kvant_codec *const[]){ cells->made, NULL });
    cells->codec = cells->codecs[1];
    cells->open_codec = cells->open_codecs[1];
    cells->learned = true;
    cells->has_block_centers = has_starts(cells, made) && cells->center != NULL;
    cells->learned_ids = made == NULL;
    if (made != NULL)
        keep(cells, made);
    if (!cells->in_place)
        atomic_fetch_add(&cells->gpu->epoch, 1); /* captured graphs do not have it */
}

static bool copy_affine(const kvp_gpu_cells *cells, const float *from, float *to)
{
    const size_t bytes = kvp_gpu_width(cells) * sizeof(*to);

    return from == NULL || kvp_cu_read(to, from, bytes, cells->gpu->stream);
}

/* Brings the numbers of a transform to the cells' arrays. made: a restored one; NULL: the
 * learner's. They replace the centre and the scale that sealed keys have, so these become the
 * transform KVP_PLAIN first. */
static bool bring(kvp_gpu_cells *cells, const kvp_gpu_learned_transform *made)
{
    const size_t width = kvp_gpu_width(cells);
    const bool center = cells->center != NULL, scale = cells->scale != NULL;
    float *former = malloc(2 * width * sizeof(*former));
    const bool ok =
        former != NULL && copy_affine(cells, cells->center, former) &&
        copy_affine(cells, cells->scale, former + width) &&
        (!cells->cache->buckets.plain ||
         kvp_gpu_upload_plain(cells, center ? former : NULL, scale ? former + width : NULL)) &&
        (made != NULL ? kvp_gpu_upload_transform(cells, (const kvant_codec *const *)made->codecs,
                                                 made->kept, made->start, cells->gpu->stream)
                      : kvp_gpu_learner_bring(cells, 0));

    if (!ok)
        cells->further_made &= ~(1u << KVP_PLAIN);
    free(former);
    return ok;
}

/* Puts a key transform in force. Keys in exact pages are transformed, which costs them a rounding
 * to fp16. Without memory nothing changes. The matrices of moved keys come last, because they are
 * made in the memory that holds the rows. */
static bool put_in_force(kvp_gpu_cells *cells, kvp_gpu_learned_transform *made,
                         kvp_gpu_held_rows *held)
{
    bool ok;

    if (!prepare(cells, made) || !kvp_gpu_decode_held(cells, held) || !bring(cells, made))
        return false;
    take(cells, made);
    ok = kvp_gpu_store_held(cells, held);
    return kvp_gpu_shift_matrices(cells) && ok;
}

bool kvp_gpu_first_affine(kvp_gpu_cells *cells, const float *rows, size_t n)
{
    kvp_gpu_held_rows held;
    const bool ok = kvp_gpu_hold_rows(cells->cache, &held) && kvp_gpu_decode_held(cells, &held) &&
                    kvp_gpu_learn_from(cells, rows, n) && kvp_gpu_store_held(cells, &held);

    kvp_gpu_batch_done(cells->gpu);
    return ok;
}

/* Whether a transform is of use. Keys without centres per block have one common centre, and so
 * would sealed keys, which were stored with another centre or with none. */
static bool is_of_use(const kvp_gpu_cells *cells)
{
    const kvp_gpu_learner *l = cells->learner;

    return !l->failed && (l->has_block_centers || cells->uncentred || !cells->cache->buckets.plain);
}

/* Ends learning for the first position bucket. */
static void end(kvp_gpu_cells *cells)
{
    const kvp_gpu_cache *cache = cells->cache;
    const bool more =
        cache->n_blocks / cache->n_streams * KVANT_PAGE_TOKENS > KVANT_LESSON_FIRST_BUCKET;

    if (cells->key_transform_size <= cells->head_dim || !more)
        kvp_gpu_learner_free(cells);
    cells->has_key_transform = true;
    if (cache->keeps && !cells->in_place)
        cells->learned = true; /* rows are stored without a centre that came later */
}

/* Leaves the pages of restored blocks out, which get their rows later. */
static void leave_out(const kvp_gpu_incoming *in, kvp_gpu_page_list *list)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < list->n; i++) {
        const int32_t block = in->cache->pages[list->pages[i].page].block;
        uint32_t at = 0;
        while (at < in->n && in->blocks[at].block != (uint32_t)block)
            at++;
        if (at == in->n)
            list->pages[n++] = list->pages[i];
    }
    list->n = n;
}

bool kvp_gpu_first_adopt(const kvp_gpu_incoming *in, kvp_gpu_learned_transform *made)
{
    kvp_gpu_held_rows held = { .list = { 0 } };
    bool ok;

    if (in->first)
        mark_plain(in->cache);
    held.list = kvp_gpu_list_pages(in->cache);
    leave_out(in, &held.list);
    ok = (held.list.n == 0 || kvp_gpu_bring_held(in->cache, &held)) &&
         put_in_force(in->cells, made, &held);
    end(in->cells);
    return ok;
}

static bool join_tensor(kvp_kv *kv, kvp_gpu_held_rows *held)
{
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_learner *l = cells->learner;
    bool ok = true;

    if (!kvp_gpu_lacks_key_transform(cells) || l == NULL || !l->begun)
        return true;
    kvp_gpu_learner_flush(cells->cache);
    if (l->failed)
        kvp_error("%s: out of GPU memory for learning a matrix; keys are stored without one",
                  kv->name);
    if (is_of_use(cells))
        ok = put_in_force(cells, NULL, held);
    else if (kvp_gpu_is_learning(cells) && !cells->in_place)
        ok = kvp_gpu_center_held(cells, held);
    end(cells);
    if (!ok)
        kvp_error("%s: keys could not be encoded again with the learned matrix", kv->name);
    return ok;
}

bool kvp_gpu_first_matrix_join(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_held_rows held = { .list = { 0 } };
    const bool ok =
        (cells->in_place || kvp_gpu_hold_rows(cells->cache, &held)) && join_tensor(kv, &held);

    kvp_gpu_batch_done(cells->gpu);
    return ok;
}

/* Ends learning in all layers once a layer has all that it will have. Blocks have one id for all
 * layers, and KVP_PLAIN is for rows that were sealed before. */
void kvp_gpu_first_matrix_end(kvp_gpu_cache *cache)
{
    bool any = false;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        any = any || cells->has_key_transform;
    }
    cache->lacks_key_transform = cache->learns_key_transform && !any;
    for (size_t i = 0; i < cache->n_tensors && any; i++)
        if (kvp_gpu_lacks_key_transform(cache->tensors[i]->cells))
            end(cache->tensors[i]->cells);
}

/* All matrices are in force. */
static void end_join(kvp_gpu_cache *cache)
{
    kvp_gpu_first_matrix_end(cache);
    kvp_gpu_batch_done(cache->gpu);
    cache->lesson.begun = false;
}

static bool join(kvp_gpu_cache *cache)
{
    kvp_gpu_held_rows held;
    bool ok = true;

    mark_plain(cache);
    if (!kvp_gpu_hold_rows(cache, &held))
        return false;
    for (size_t i = 0; i < cache->n_tensors; i++)
        ok = join_tensor(cache->tensors[i], &held) && ok;
    end_join(cache);
    return ok;
}

/* The same layer by layer while the graph at hand is computed, before a layer's rows are stored.
 * The GPU computes the layers before meanwhile. */
static bool join_late(kvp_gpu_cache *cache)
{
    mark_plain(cache);
    if (!kvp_gpu_hold_rows(cache, &cache->late.held))
        return false;
    memset(cache->late.leaving, 0, sizeof(cache->late.leaving));
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        cells->late = true;
    }
    cache->late.any = true;
    return true;
}

bool kvp_gpu_first_seal(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;
    bool ok = true;

    if (!cache->late.any || !cells->late)
        return true;
    if (cache->late.hands_over)
        return kvp_gpu_hand_over_layer(kv);
    if (cache->late.seals)
        return kvp_gpu_seal_layer(kv);
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *of = cache->tensors[i]->cells;
        if (cache->tensors[i]->shape.layer != kv->shape.layer || !of->late)
            continue;
        of->late = false;
        ok = join_tensor(cache->tensors[i], &cache->late.held) && ok;
    }
    return kvp_gpu_encode_pages(cache, cache->late.leaving, kv, cells->gpu->stream) && ok;
}

bool kvp_gpu_first_next(kvp_gpu_cache *cache)
{
    const bool ahead = cache->late.any && (cache->late.hands_over || cache->late.seals);

    for (size_t i = 0; i < cache->n_tensors && ahead; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (cells->late)
            return kvp_gpu_first_seal(cache->tensors[i]);
    }
    return true;
}

bool kvp_gpu_first_finish(kvp_gpu_cache *cache)
{
    bool ok = true;

    if (!cache->late.any)
        return true;
    for (size_t i = 0; i < cache->n_tensors; i++)
        ok = kvp_gpu_first_seal(cache->tensors[i]) && ok;
    cache->late.any = false;
    if (cache->late.seals) {
        cache->late.seals = false;
        return ok;
    }
    end_join(cache);
    if (cache->late.hands_over)
        kvp_gpu_hand_over_finish(cache);
    return ok;
}

/* Keys that are sealed without a matrix get a centre and a scale from the rows in open pages. With
 * too few of these rows they get none. */
static bool seal_plain(kvp_gpu_cells *cells, const kvp_gpu_page_list *list, size_t n)
{
    float *rows;
    bool ok;

    if (!kvp_gpu_lacks_key_transform(cells) || !kvp_gpu_is_learning(cells) || n == 0)
        return true;
    if (n < KVANT_LEARN_ROWS) {
        cells->learned = true;
        return true;
    }
    rows = kvp_gpu_fetch_learned(cells, list, false);
    ok = rows != NULL && kvp_gpu_first_affine(cells, rows, n);
    free(rows);
    return ok;
}

static bool seal_all_plain(const kvp_gpu_cache *cache)
{
    const kvp_gpu_page_list list = kvp_gpu_list_pages(cache);
    const size_t n = kvp_gpu_count_rows(cache, &list, false);
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors && ok && cache->keeps; i++)
        ok = seal_plain(cache->tensors[i]->cells, &list, n);
    return ok;
}

/* When */

/* Whether all tensors have the same rows. Without a graph, rows come tensor by tensor. */
static bool is_even(const kvp_gpu_cache *cache)
{
    const kvp_gpu_cells *first = cache->tensors[0]->cells;
    bool even = true;

    for (size_t i = 1; i < cache->n_tensors && even; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        even = cells->n_outside == first->n_outside;
    }
    return even;
}

/* Whether graphs have shown how RoPE rotates the keys of all layers. A matrix that was learned
 * without RoPE is not used next to sealed rows, and the layer would have none. */
static bool knows_rope(const kvp_gpu_cache *cache)
{
    bool known = true;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        known = known && (!kvp_gpu_lacks_key_transform(cells) || cells->learner == NULL ||
                          cells->learner->rope_is_set);
    }
    return known;
}

/* Layers that lack rows yet would learn from whatever lies in the pages. */
bool kvp_gpu_first_matrix_settle(kvp_gpu_cache *cache)
{
    if (!kvp_gpu_first_finish(cache))
        return false;
    if (!cache->lacks_key_transform || cache->in_place || !is_even(cache))
        return true;
    kvp_gpu_first_matrix_end(cache); /* a graph may have learned the transforms since */
    if (!cache->lacks_key_transform)
        return true;
    if (!cache->lesson.begun && knows_rope(cache))
        begin(cache);
    cache->lesson.tried = false;
    return cache->lesson.begun ? join(cache) : seal_all_plain(cache);
}

/* Whether a step that is sealed at once learns the transforms in its graph, because it has more
 * rows than the pages. */
static bool makes_its_own(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    const kvp_gpu_page_list list = kvp_gpu_list_pages(cache);

    return !cache->lesson.begun && step->n > kvp_gpu_count_rows(cache, &list, false);
}

/* Whether no block that is opened has rows, which would have to be decoded first. */
static bool opens_empty(const kvp_gpu_cache *cache, const kvant_plan_changes *changes)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < changes->n_open; i++)
        n += cache->written[changes->open[i].block] != 0;
    return n == 0;
}

static kvant_lesson_step lesson_step(const kvp_gpu_cache *cache, const kvp_gpu_step *step,
                                     const kvant_plan_changes *changes, bool kept)
{
    const bool counts_step =
        step->n >= KVP_KEPT_TOKENS || cache->lesson.begun || cache->lesson.tried;

    return (kvant_lesson_step){ .n = step->n,
                                .stays_exact = kept,
                                .seals = changes->n_seal > 0,
                                .opens_empty = opens_empty(cache, changes),
                                .brings_more = !kept && makes_its_own(cache, step),
                                .n_used =
                                    counts_step ? count_pages(cache) : kvp_gpu_list_pages(cache).n,
                                .n_pages = cache->n_pages };
}

static bool carry_out(kvp_gpu_cache *cache, kvant_lesson_action action)
{
    switch (action) {
    case KVANT_LESSON_BEGIN: begin(cache); return true;
    case KVANT_LESSON_TEACH: cache->teaches = true; return true;
    case KVANT_LESSON_JOIN: return join(cache);
    case KVANT_LESSON_JOIN_LATE: return join_late(cache);
    case KVANT_LESSON_SETTLE: return kvp_gpu_first_matrix_settle(cache);
    case KVANT_LESSON_NONE: break;
    }
    return true;
}

bool kvp_gpu_first_matrix_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step,
                                  const kvant_plan_changes *changes, bool kept)
{
    kvant_lesson_step decided;
    bool ok;

    if (!cache->lacks_key_transform || cache->in_place || kvp_gpu_buckets_saw(cache, step))
        return true;
    cache->teaches = false;
    kvp_gpu_first_matrix_end(cache);
    decided = lesson_step(cache, step, changes, kept);
    ok = carry_out(cache, kvant_lesson_next(&cache->lesson, &decided));
    cache->keeps_queries =
        cache->lacks_key_transform && !cache->lesson.begun && step->n >= KVP_KEPT_TOKENS;
    return ok;
}

void kvp_gpu_first_matrix_mark(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    const bool seals = !cache->keeps || !cache->all_pending;

    if (cache->lacks_key_transform && seals && step->n >= KVANT_LEARN_ROWS &&
        !kvp_gpu_buckets_saw(cache, step))
        mark_plain(cache);
}

/* In a graph */

/* The attention node over the keys that a node writes, if its queries exist when the node is
 * computed; else NULL. llama.cpp computes queries before it stores keys. */
static const abi_tensor *attention_of(const abi_graph *graph, const abi_tensor *node)
{
    const abi_tensor *found = NULL;
    bool behind = false;

    for (int i = 0; i < graph->n_nodes && found == NULL; i++) {
        const abi_tensor *at = graph->nodes[i];
        if (at->op == kvp_api.op.flash_attn_ext && kvp_root(at->src[1]) == kvp_root(node))
            found = at;
    }
    for (int i = 0; i < graph->n_nodes && found != NULL; i++) {
        behind = behind || graph->nodes[i] == node;
        if (behind && graph->nodes[i] == kvp_root(found->src[0]))
            found = NULL;
    }
    return found;
}

/* The first rows of a batch. False without memory. */
static bool lesson_of_batch(kvp_gpu_backend *b, const abi_tensor *node,
                            kvp_gpu_learner_input *lesson)
{
    const abi_tensor *keys = node->src[0];
    const size_t all = (size_t)keys->ne[1],
                 n = all < KVANT_LEARN_LESSON_ROWS ? all : KVANT_LEARN_LESSON_ROWS;
    kvp_gpu_step step = { 0 };

    *lesson = (kvp_gpu_learner_input){
        .n = n, .rows = keys->data, .type = KVANT_CUDA_F32, .stride = keys->nb[1] / sizeof(float)
    };
    if (!kvp_gpu_find_step(b->gpu, node->src[1]->data, b->positions, all, &step) ||
        step.positions == NULL)
        return true;
    lesson->positions = malloc(n * sizeof(*lesson->positions));
    if (lesson->positions != NULL)
        memcpy(lesson->positions, step.positions, n * sizeof(*lesson->positions));
    return lesson->positions != NULL;
}

bool kvp_gpu_first_matrix_in_graph(kvp_gpu_backend *b, const abi_tensor *node,
                                   const abi_tensor *values)
{
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node);
    const abi_tensor *attention;
    kvp_gpu_learner_input lesson = { 0 };
    bool ok;

    if (node->src[0]->ne[1] < (int64_t)KVANT_LEARN_ROWS || cells->learner == NULL ||
        cells->learner->begun || !kvp_gpu_tokens_differ(b, values))
        return true;
    attention = attention_of(b->graph, node);
    ok = (attention == NULL || kvp_gpu_queries_keep(b, attention)) &&
         lesson_of_batch(b, node, &lesson);
    if (ok && kvp_gpu_learner_start(cells, &lesson))
        return kvp_gpu_first_matrix_join(kvp_kv_of(node));
    kvp_error("%s: no matrix could be learned from the first rows", kvp_root(node)->name);
    return false;
}
