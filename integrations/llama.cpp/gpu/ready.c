/* ready.c - prepares a hand-over before the room is full (in_place.h).
 *
 * Threads learn key transforms from the first rows, and from queries if prompts had some. Then the
 * transforms come in force, a layer per step of few tokens, and threads learn the transforms of
 * further position buckets. Each stage begins at a fixed number of rows, so results do not depend
 * on time. hand_over.c stores the rows. */
#include "in_place.h"
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

#define CENTER_ROWS ((size_t)512) /* Rows from which a centre and a scale are learned. */
#define ALONE_STEPS ((size_t)256) /* Steps of few tokens, after which threads are done. */

/* Learning */

static const abi_tensor *rows_for(const kvp_kv *kv, const abi_graph *graph)
{
    for (int i = 0; i < graph->n_nodes; i++)
        if (graph->nodes[i]->op == kvp_api.op.set_rows && kvp_kv_of(graph->nodes[i]) == kv)
            return graph->nodes[i]->src[0];
    return NULL;
}

static bool learn(kvp_kv *kv, const abi_tensor *rows, size_t n)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_lesson lesson = { .n = n,
                              .halves = kv->memory,
                              .positions = malloc((n + 1) * sizeof(*lesson.positions)) };

    if (lesson.positions == NULL)
        return false;
    memcpy(lesson.positions, cells->cache->place->positions, n * sizeof(*lesson.positions));
    kvp_gpu_learner_tell(kv, rows);
    return kvp_gpu_learner_learn(kv->cells, &lesson);
}

void kvp_gpu_place_learn(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph, size_t n)
{
    struct kvp_gpu_place *place = cache->place;
    bool ok = true;

    if (place->learns || !cache->weighing || n == 0)
        return;
    place->learns = true;
    n = n < KVP_ENOUGH_ROWS ? n : KVP_ENOUGH_ROWS;
    kvp_gpu_follow(b);
    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        const abi_tensor *rows = kvp_gpu_is_weighing(cells) && cells->learner != NULL
                                     ? rows_for(cache->tensors[i], graph)
                                     : NULL;
        ok = rows == NULL || learn(cache->tensors[i], rows, n);
    }
    if (!ok)
        kvp_error("%s: no matrix can be learnt from the first rows", cache->gpu->name);
}

/* Learns centre and scale of a tensor from its first rows. If there are none, rows of later batches
 * must not change them, because the rows stored here would then be decoded with the new centre. */
static bool learn_affine(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;
    const size_t all = cells->cache->place->n, n = all < CENTER_ROWS ? all : CENTER_ROWS;
    int64_t numbers[CENTER_ROWS];
    float *rows;
    kvant_status status = KVANT_OK;
    bool ok;

    if (!kvp_gpu_is_learning(cells) || n == 0)
        return true;
    for (size_t i = 0; i < n; i++)
        numbers[i] = (int64_t)i;
    rows = malloc(n * kv->shape.row * sizeof(*rows));
    ok = rows != NULL && kvp_gpu_place_read(kv, 0, n, rows, &status) && status == KVANT_OK &&
         (n >= KVP_LEARN_ROWS ? kvp_gpu_learn_from(cells, rows, n)
                              : kvp_gpu_learn_written(kv, numbers, n, rows));
    free(rows);
    if (!ok)
        kvp_gpu_unlearn(cells);
    cells->learnt = cells->learnt || !ok;
    return ok;
}

/* Puts the transforms of a tensor in force. A matrix is copied to the GPU without waiting for
 * CUDA's stream, because no node reads it yet. A centre is learned from rows, which CUDA has to
 * write first. Tables of exact pages are made here, too; otherwise the first layer that is
 * compressed would wait for the tables of all layers. Without memory the hand-over tries again. */
static void settle(kvp_gpu_backend *b, kvp_kv *kv)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;

    if (!kvp_gpu_first_join(kv))
        kvp_gpu_unlearn(kv->cells);
    if (b != NULL && kvp_gpu_is_learning(cells))
        kvp_gpu_follow(b);
    cache->place->n_plain += !learn_affine(kv);
    if (cache->keeps)
        kvp_gpu_have_pages(kv, cache->n_pages);
}

/* Afterwards cache->weighing says whether rows of later batches may still change key transforms. */
void kvp_gpu_place_settle(kvp_gpu_backend *b, kvp_gpu_cache *cache, size_t n)
{
    struct kvp_gpu_place *place = cache->place;

    for (; n > 0 && place->n_ready < cache->n_tensors; n--)
        settle(b, cache->tensors[place->n_ready++]);
    if (place->n_ready == cache->n_tensors && cache->weighing)
        kvp_gpu_first_end(cache);
}

/* When */

/* The number of rows at which learning begins. Learning uses at most KVP_ENOUGH_ROWS rows. In a
 * large room it begins later, when a third is full, because shorter conversations never need a
 * transform. */
static size_t begin_of(size_t room)
{
    const size_t enough = KVP_ENOUGH_ROWS < room / 4 * 3 ? KVP_ENOUGH_ROWS : room / 4 * 3;

    return room / 3 > enough ? room / 3 : enough;
}

/* Rows between two of these stages, in which threads finish. 1024 tokens take seconds when they are
 * generated one by one. A GPU reads the batches of a prompt much faster, so then threads have 2048
 * rows. If the room ends before that, the hand-over waits for them. */
static size_t wait_of(const struct kvp_gpu_place *place, bool few)
{
    const size_t quarter = (place->room - place->begun) / 4;

    if (!few)
        return 2 * KVP_ENOUGH_ROWS;
    return quarter < KVP_ENOUGH_ROWS ? quarter : KVP_ENOUGH_ROWS;
}

/* Whether the threads have had enough time. A prompt is over long before its transforms are
 * learned: on an H200 with 16 cores they took 0.35 s, and 2400 tokens of a prompt took 0.2 s. So
 * the tokens after a prompt do not wait at once. They wait after as many steps as take longer than
 * learning, or when the room ends. */
static bool is_due(const kvp_gpu_cache *cache, size_t n, bool few)
{
    const struct kvp_gpu_place *place = cache->place;

    if (n < place->begun + wait_of(place, few))
        return false;
    return !few || place->n_alone >= ALONE_STEPS || n + 2 * cache->n_tensors >= place->room;
}

void kvp_gpu_place_foresee(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph,
                           size_t n, bool few)
{
    struct kvp_gpu_place *place = cache->place;

    if (place->whole || place->planned || n < begin_of(place->room))
        return;
    if (cache->weighs)
        kvp_gpu_place_learn(b, cache, graph, n);
    if (place->begun == 0)
        place->begun = n;
    place->n_alone += few;
    if (place->n_ready == 0 && !is_due(cache, n, few))
        return;
    if (place->n_ready < cache->n_tensors) {
        kvp_gpu_place_settle(b, cache, few ? 2 : cache->n_tensors);
        if (place->n_ready == cache->n_tensors)
            kvp_note("%s: all transforms are in force, %zu cells are in place", cache->gpu->name,
                     n);
    }
    if (place->n_ready < cache->n_tensors || !cache->weighs ||
        (place->asked_at > 0 && n < place->asked_at + wait_of(place, few)))
        return;
    kvp_gpu_ranges_foresee(cache, (int32_t)place->room);
    place->asked_at = n;
}
