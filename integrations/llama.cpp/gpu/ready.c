/* ready.c - prepares a hand-over before the room is full (in_place.h).
 *
 * Threads learn key transforms from the first rows, and from queries if prompts had some. A
 * prompt's graph begins the thread of a layer as soon as the layer's keys are enqueued. Then the
 * transforms come in force, a layer per step of few tokens, and threads learn the transforms of
 * further position buckets. Each stage begins when the room holds a fixed row count, so results do
 * not depend on time. The file hand_over.c stores the rows. */
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

static bool learns(const kvp_gpu_cells *cells)
{
    return kvp_gpu_lacks_key_transform(cells) && cells->learner != NULL;
}

static bool learn(kvp_kv *kv, const abi_tensor *rows, size_t n, bool hurries)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_learner_input lesson = { .n = n,
                                     .halves = kv->memory,
                                     .hurries = hurries,
                                     .positions = malloc((n + 1) * sizeof(*lesson.positions)) };

    if (lesson.positions == NULL)
        return false;
    memcpy(lesson.positions, cells->cache->in_place_state->positions,
           n * sizeof(*lesson.positions));
    kvp_gpu_learner_set_rope(kv, rows);
    return kvp_gpu_learner_start(kv->cells, &lesson);
}

static void report_failure(const kvp_gpu_cache *cache)
{
    kvp_error("%s: no matrix could be learned from the first rows", cache->gpu->name);
}

void kvp_gpu_in_place_learn(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph,
                            size_t n, bool hurries)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    bool ok = true;

    if (in_place_state->learns || !cache->lacks_key_transform || n == 0)
        return;
    in_place_state->learns = true;
    n = n < KVP_ENOUGH_ROWS ? n : KVP_ENOUGH_ROWS;
    kvp_gpu_follow(b);
    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        const abi_tensor *rows =
            learns(cache->tensors[i]->cells) ? rows_for(cache->tensors[i], graph) : NULL;
        ok = rows == NULL || learn(cache->tensors[i], rows, n, hurries);
    }
    if (!ok)
        report_failure(cache);
}

bool kvp_gpu_in_place_waits(const kvp_gpu_cache *cache)
{
    bool any = false;

    for (size_t i = cache->in_place_state->n_ready; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        any = any || (learns(cells) && cells->learner->begun);
    }
    return any;
}

/* Learns centre and scale of a tensor from its first rows. If there are none, rows of later batches
 * must not change them, because the rows stored here would then be decoded with the new centre. */
static bool learn_affine(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;
    const size_t all = cells->cache->in_place_state->n, n = all < CENTER_ROWS ? all : CENTER_ROWS;
    int64_t numbers[CENTER_ROWS];
    float *rows;
    kvant_status status = KVANT_OK;
    bool ok;

    if (!kvp_gpu_is_learning(cells) || n == 0)
        return true;
    for (size_t i = 0; i < n; i++)
        numbers[i] = (int64_t)i;
    rows = malloc(n * kv->shape.row * sizeof(*rows));
    ok = rows != NULL && kvp_gpu_in_place_read(kv, 0, n, rows, &status) && status == KVANT_OK &&
         (n >= KVP_LEARN_ROWS ? kvp_gpu_learn_from(cells, rows, n)
                              : kvp_gpu_learn_written(kv, numbers, n, rows));
    free(rows);
    if (!ok)
        kvp_gpu_unlearn(cells);
    cells->learned = cells->learned || !ok;
    return ok;
}

/* Puts the transforms of a tensor in force. A matrix is copied to the GPU without waiting for
 * CUDA's stream, because no node reads it yet. A centre is learned from rows, which CUDA has to
 * write first. Tables of exact pages are made here, too; otherwise the first layer that is
 * compressed would wait for the tables of all layers. Without memory the hand-over tries again. */
void kvp_gpu_in_place_settle_tensor(kvp_gpu_backend *b, kvp_kv *kv)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;

    if (!kvp_gpu_first_matrix_join(kv))
        kvp_gpu_unlearn(kv->cells);
    if (b != NULL && kvp_gpu_is_learning(cells))
        kvp_gpu_follow(b);
    cache->in_place_state->n_plain += !learn_affine(kv);
    if (cache->keeps)
        kvp_gpu_ensure_pages(kv, cache->n_pages);
}

/* Afterwards cache->lacks_key_transform says whether rows of later batches may still change key
 * transforms. */
void kvp_gpu_in_place_settle(kvp_gpu_backend *b, kvp_gpu_cache *cache, size_t n)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;

    for (; n > 0 && in_place_state->n_ready < cache->n_tensors; n--)
        kvp_gpu_in_place_settle_tensor(b, cache->tensors[in_place_state->n_ready++]);
    if (in_place_state->n_ready == cache->n_tensors && cache->lacks_key_transform)
        kvp_gpu_first_matrix_end(cache);
}

/* When */

/* Learning begins when this many rows have come. Learning uses at most KVP_ENOUGH_ROWS rows. In
 * a small room it begins when half is full, because a prompt's next batch may fill the room. In a
 * large room it begins when a third is full, because shorter conversations never need a
 * transform. */
static size_t begin_of(size_t room)
{
    const size_t enough = KVP_ENOUGH_ROWS < room / 2 ? KVP_ENOUGH_ROWS : room / 2;

    return room / 3 > enough ? room / 3 : enough;
}

/* Rows between two of these stages, in which threads finish. 1024 tokens take seconds when they are
 * generated one by one. A GPU reads the batches of a prompt much faster, so then threads have 2048
 * rows. If the room ends before that, the hand-over waits for them. */
static size_t wait_of(const struct kvp_gpu_in_place *in_place_state, bool short_step)
{
    const size_t quarter = (in_place_state->room - in_place_state->begun) / 4;

    if (!short_step)
        return 2 * KVP_ENOUGH_ROWS;
    return quarter < KVP_ENOUGH_ROWS ? quarter : KVP_ENOUGH_ROWS;
}

/* Whether the threads have had enough time. A prompt is over long before its transforms are
 * learned. On an H200 with 16 cores they took 0.35 s. The 2400 tokens of a prompt took 0.2 s. So
 * the tokens after a prompt do not wait at once. They wait after as many steps as take longer than
 * learning, or when the room ends. */
static bool is_due(const kvp_gpu_cache *cache, size_t n, bool short_step)
{
    const struct kvp_gpu_in_place *in_place_state = cache->in_place_state;

    if (n < in_place_state->begun + wait_of(in_place_state, short_step))
        return false;
    return !short_step || in_place_state->n_short_steps >= ALONE_STEPS ||
           n + 2 * cache->n_tensors >= in_place_state->room;
}

void kvp_gpu_in_place_prepare_next(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph,
                                   size_t n, bool short_step)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;

    if (in_place_state->whole || in_place_state->planned || n < begin_of(in_place_state->room))
        return;
    if (cache->learns_key_transform)
        kvp_gpu_in_place_learn(b, cache, graph, n, !short_step);
    if (in_place_state->begun == 0)
        in_place_state->begun = n;
    in_place_state->n_short_steps += short_step;
    if (in_place_state->n_ready == 0 && !is_due(cache, n, short_step))
        return;
    if (in_place_state->n_ready < cache->n_tensors) {
        kvp_gpu_in_place_settle(b, cache, short_step ? 2 : cache->n_tensors);
        if (in_place_state->n_ready == cache->n_tensors)
            kvp_note("%s: all transforms are learned, %zu cells are f16 in place", cache->gpu->name,
                     n);
    }
    if (in_place_state->n_ready < cache->n_tensors || !cache->learns_key_transform ||
        (in_place_state->requested_at > 0 &&
         n < in_place_state->requested_at + wait_of(in_place_state, short_step)))
        return;
    kvp_gpu_buckets_prepare_next(cache, (int32_t)in_place_state->room, !short_step);
    in_place_state->requested_at = n;
}

/* In a prompt's graph */

/* Whether the graph has the rows of all layers that learn. With cb_eval each node is a graph. */
static bool has_all_rows(const kvp_gpu_cache *cache, const abi_graph *graph)
{
    bool all = true;

    for (size_t i = 0; i < cache->n_tensors; i++)
        all = all &&
              (!learns(cache->tensors[i]->cells) || rows_for(cache->tensors[i], graph) != NULL);
    return all;
}

void kvp_gpu_in_place_plan_teaching(kvp_gpu_cache *cache, const abi_graph *graph)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;

    in_place_state->teaches = !in_place_state->learns && cache->lacks_key_transform &&
                              in_place_state->n >= begin_of(in_place_state->room) &&
                              has_all_rows(cache, graph);
}

void kvp_gpu_in_place_teach(kvp_gpu_backend *b, const abi_tensor *node)
{
    kvp_kv *kv = kvp_kv_of(node->src[1]);
    const kvp_gpu_cells *cells = kv->cells;
    struct kvp_gpu_in_place *in_place_state = cells->cache->in_place_state;
    const size_t n = in_place_state->n < KVP_ENOUGH_ROWS ? in_place_state->n : KVP_ENOUGH_ROWS;
    const abi_tensor *rows;

    if (!in_place_state->teaches || !learns(cells) || cells->learner->begun)
        return;
    in_place_state->learns = true;
    in_place_state->begun = in_place_state->n;
    rows = rows_for(kv, b->graph);
    if (rows != NULL && !learn(kv, rows, n, true))
        report_failure(cells->cache);
}
