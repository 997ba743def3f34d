/* ready.c - prepares a hand-over before the room is full (in_place.h).
 *
 * The GPU learns key transforms from the first rows, and from queries if prompts had some. A
 * prompt's graph begins with a layer as soon as the layer's keys are enqueued. Then the transforms
 * come in force, a layer per step of few tokens, and those of further position buckets follow. Each
 * stage begins when the room holds a fixed row count, so results do not depend on time. The file
 * hand_over.c stores the rows. */
#include "in_place.h"
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

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

static bool learn(kvp_kv *kv, const abi_tensor *rows, size_t n)
{
    kvp_gpu_learner_input lesson = { .n = n,
                                     .rows = kv->memory,
                                     .type = KVANT_CUDA_F16,
                                     .stride = kv->shape.row,
                                     .positions = malloc((n + 1) * sizeof(*lesson.positions)) };
    const kvp_gpu_cells *cells = kv->cells;

    if (lesson.positions == NULL)
        return false;
    memcpy(lesson.positions, cells->cache->in_place_state->positions,
           n * sizeof(*lesson.positions));
    kvp_gpu_learner_set_rope(kv, rows);
    return kvp_gpu_learner_start(kv->cells, &lesson);
}

/* Whether to learn from the first n rows. A transform serves all later rows, so tokens that are too
 * much alike make none. Rows of pages may make one later (first_matrix.c). The stream follows the
 * work that writes the rows. */
static bool rows_will_do(kvp_gpu_cache *cache, size_t n)
{
    kvant_lesson_in_place *lesson = &cache->in_place_state->lesson;

    if (!kvant_lesson_in_place_looks(lesson, n))
        return false;
    cache->kept_queries.alike = kvp_gpu_in_place_rows_are_alike(cache, n);
    lesson->n_alike = cache->kept_queries.alike ? n : 0;
    return lesson->n_alike == 0;
}

static void report_failure(const kvp_gpu_cache *cache)
{
    kvp_error("%s: no matrix could be learned from the first rows", cache->gpu->name);
}

void kvp_gpu_in_place_learn(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph,
                            size_t n)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    bool ok = true;

    if (in_place_state->learns || !cache->lacks_key_transform || n == 0)
        return;
    n = n < KVANT_LEARN_LESSON_ROWS ? n : KVANT_LEARN_LESSON_ROWS;
    kvp_gpu_follow(b);
    in_place_state->learns = rows_will_do(cache, n);
    if (!in_place_state->learns)
        return;
    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        const abi_tensor *rows =
            learns(cache->tensors[i]->cells) ? rows_for(cache->tensors[i], graph) : NULL;
        ok = rows == NULL || learn(cache->tensors[i], rows, n);
    }
    kvp_gpu_learner_flush(cache);
    if (!ok)
        report_failure(cache);
}

bool kvp_gpu_in_place_waits(const kvp_gpu_cache *cache)
{
    bool any = false;

    for (size_t i = cache->in_place_state->lesson.n_ready; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        any = any || (learns(cells) && cells->learner->begun);
    }
    return any;
}

/* Learns centre and scale of a tensor from its first rows. Later batches must not change them, and
 * must not add them: the rows stored here would then be decoded with the new centre. */
static bool learn_affine(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;
    const size_t all = cells->cache->in_place_state->n,
                 n = all < KVANT_LEARN_BATCH_ROWS ? all : KVANT_LEARN_BATCH_ROWS;
    int64_t numbers[KVANT_LEARN_BATCH_ROWS];
    float *rows;
    kvant_status status = KVANT_OK;
    bool ok;

    if (!kvp_gpu_is_learning(cells) || n == 0)
        return true;
    for (size_t i = 0; i < n; i++)
        numbers[i] = (int64_t)i;
    rows = malloc(n * kv->shape.row * sizeof(*rows));
    ok = rows != NULL && kvp_gpu_in_place_read(kv, 0, n, rows, &status) && status == KVANT_OK &&
         (n >= KVANT_LEARN_ROWS ? kvp_gpu_learn_from(cells, rows, n)
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

    for (; n > 0 && in_place_state->lesson.n_ready < cache->n_tensors; n--)
        kvp_gpu_in_place_settle_tensor(b, cache->tensors[in_place_state->lesson.n_ready++]);
    if (in_place_state->lesson.n_ready == cache->n_tensors && cache->lacks_key_transform)
        kvp_gpu_first_matrix_end(cache);
}

/* When */

void kvp_gpu_in_place_prepare_next(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph,
                                   size_t n, bool short_step)
{
    const struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    kvant_lesson_in_place *lesson = &cache->in_place_state->lesson;
    const size_t room = in_place_state->room;

    if (in_place_state->whole || in_place_state->planned || !kvant_lesson_in_place_begins(room, n))
        return;
    if (cache->learns_key_transform)
        kvp_gpu_in_place_learn(b, cache, graph, n);
    if (!kvant_lesson_in_place_is_due(lesson, room, n, cache->n_tensors, short_step))
        return;
    if (lesson->n_ready < cache->n_tensors) {
        kvp_gpu_in_place_settle(b, cache, short_step ? 2 : cache->n_tensors);
        if (lesson->n_ready == cache->n_tensors)
            kvp_note("%s: all transforms are learned, %zu cells are f16 in place", cache->gpu->name,
                     n);
    }
    if (lesson->n_ready < cache->n_tensors || !cache->learns_key_transform ||
        !kvant_lesson_in_place_goes_on(lesson, room, n, short_step))
        return;
    kvp_gpu_buckets_prepare_next(cache, (int32_t)room);
    lesson->requested_at = n;
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

    in_place_state->teaches =
        !in_place_state->learns && cache->lacks_key_transform &&
        kvant_lesson_in_place_begins(in_place_state->room, in_place_state->n) &&
        has_all_rows(cache, graph);
}

void kvp_gpu_in_place_teach(kvp_gpu_backend *b, const abi_tensor *node)
{
    kvp_kv *kv = kvp_kv_of(node->src[1]);
    const kvp_gpu_cells *cells = kv->cells;
    struct kvp_gpu_in_place *in_place_state = cells->cache->in_place_state;
    const size_t n =
        in_place_state->n < KVANT_LEARN_LESSON_ROWS ? in_place_state->n : KVANT_LEARN_LESSON_ROWS;
    const abi_tensor *rows;

    if (!in_place_state->teaches || !learns(cells) || cells->learner->begun)
        return;
    in_place_state->learns = in_place_state->learns || rows_will_do(cells->cache, n);
    in_place_state->teaches = in_place_state->learns;
    if (!in_place_state->learns)
        return;
    in_place_state->lesson.begun = in_place_state->n;
    rows = rows_for(kv, b->graph);
    if (rows != NULL && !learn(kv, rows, n))
        report_failure(cells->cache);
}
