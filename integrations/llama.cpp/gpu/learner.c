/* learner.c - see learner.h.
 *
 * Lessons wait until a graph has been enqueued. Then one call makes the transforms of all layers in
 * the GPU's stream. A layer takes few thread blocks, which stay for a millisecond. Matrix products
 * of a model need all multiprocessors at once, so they would wait for the blocks of every layer
 * that learned while the graph runs. A separate stream for lessons would make every later kernel of
 * the process slower (cuda_streams.csv). */
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "../log.h"
#include "../rope.h"

/* A layer's learner has lists of rows in GPU memory, and then results (cells->results). */
typedef struct learned_lists {
    int32_t positions[KVP_LEARN_ROWS], queries[KVP_KEPT_BATCHES * KVP_KEPT_TOKENS];
    uint32_t places[KVP_LEARN_ROWS];
} learned_lists;

_Static_assert(sizeof(learned_lists) % 16 == 0, "triangles are aligned");

static size_t halves_of(const kvp_gpu_cells *cells)
{
    return kvant_cuda_triangle_halves(cells->head_dim, cells->n_kv_heads);
}

static uint16_t *triangles_of(const kvp_gpu_cells *cells, uint32_t bucket)
{
    return (uint16_t *)(void *)((char *)cells->results.at + sizeof(learned_lists)) +
           bucket * halves_of(cells);
}

/* The centre of a bucket, or, for the bucket behind the last one, of a block at position 0. */
static float *center_of(const kvp_gpu_cells *cells, uint32_t bucket)
{
    const size_t halves = cells->n_learned * halves_of(cells);

    return (float *)(void *)(triangles_of(cells, 0) + (halves + 7) / 8 * 8) +
           bucket * kvp_gpu_width(cells);
}

/* How many position buckets the positions of a sequence reach, with the first one. */
static uint32_t count_buckets(const kvp_gpu_cells *cells)
{
    const kvp_gpu_cache *cache = cells->cache;
    size_t i = 0;

    while (i < cache->n_tensors && cache->tensors[i]->cells != cells)
        i++;
    return i == cache->n_tensors
               ? 1
               : 1 + (uint32_t)kvp_gpu_further_buckets(&cache->tensors[i]->shape,
                                                       kvp_kv_n_positions(cache->tensors[i]));
}

bool kvp_gpu_have_matrix_codecs(kvp_gpu_cells *cells)
{
    return cells->open_codecs[1] != NULL ||
           (kvant_codec_unit_matrix(cells->sources[0], &cells->made) == KVANT_OK &&
            kvant_cuda_codec_from(cells->made, &cells->codecs[1], NULL, 0) == KVANT_OK &&
            kvant_cuda_codec_create_open(cells->codecs[1], &cells->open_codecs[1]) == KVANT_OK);
}

/* Memory and codecs that a transform needs are there before a prompt comes. */
static bool reserve(kvp_gpu_cells *cells)
{
    const size_t width = kvp_gpu_width(cells);

    cells->n_learned = count_buckets(cells);
    if (!kvp_gpu_grow(cells->gpu, &cells->results,
                      kvp_gpu_learned_bytes(cells->head_dim, cells->n_kv_heads, cells->n_learned),
                      false) ||
        !kvp_gpu_grow(cells->gpu, &cells->starts, 2 * KVP_MOST_BUCKETS * width * sizeof(float),
                      false))
        return false;
    return kvp_gpu_have_matrix_codecs(cells);
}

size_t kvp_gpu_learned_bytes(uint32_t head_dim, uint32_t n_kv_heads, uint32_t n_buckets)
{
    const size_t halves = n_buckets * kvant_cuda_triangle_halves(head_dim, n_kv_heads);

    return sizeof(learned_lists) + (halves + 7) / 8 * 8 * sizeof(uint16_t) +
           (n_buckets + 1) * (size_t)n_kv_heads * head_dim * sizeof(float);
}

/* Layers that learn at the same time. Their lists take 10 KB. */
#define MOST_TOGETHER 64u

/* The layers of a call, in GPU memory behind the working memory. */
typedef struct layer_lists {
    kvant_cuda_learn_layer learned[MOST_TOGETHER];
    kvant_cuda_compact_layer compact[MOST_TOGETHER];
    kvant_cuda_center_layer centers[MOST_TOGETHER];
} layer_lists;

/* How many layers with the largest lesson learn at the same time: as many as fill a large GPU with
 * their thread blocks, but at most 8. A smaller lesson takes less memory, so more layers with it
 * learn at the same time. */
static uint32_t planned_layers(uint32_t head_dim, uint32_t n_kv_heads, uint32_t n_buckets)
{
    const uint32_t blocks = n_buckets * n_kv_heads * (head_dim + 127) / 128, n = 128 / blocks;

    return n < 1 ? 1 : n > 8 ? 8 : n;
}

/* Models have at most 16 query heads per kv head. */
size_t kvp_gpu_learning_bytes(uint32_t head_dim, uint32_t n_kv_heads, uint32_t n_buckets)
{
    kvant_cuda_learn_args args = { .size = sizeof(args),
                                   .head_dim = head_dim,
                                   .n_kv_heads = n_kv_heads,
                                   .group = 16,
                                   .n_rows = KVP_LEARN_ROWS,
                                   .n_tokens = KVP_KEPT_BATCHES * KVP_KEPT_TOKENS,
                                   .n_layers = planned_layers(head_dim, n_kv_heads, n_buckets) };
    uint32_t knows_rope;

    if (kvant_cuda_learn_plan(NULL, &args, &knows_rope) != KVANT_OK)
        return 0;
    args.n_transforms = n_buckets;
    return kvant_cuda_learn_bytes(&args) + sizeof(layer_lists);
}

void kvp_gpu_learner_begin(kvp_gpu_cells *cells)
{
    if (cells->learner != NULL && !cells->learner->begun)
        return; /* the learner is as good as new */
    kvp_gpu_learner_free(cells);
    if (!reserve(cells)) {
        kvp_error("%s: out of GPU memory for learning matrices; keys are stored without them",
                  cells->gpu->name);
        return;
    }
    cells->learner = calloc(1, sizeof(*cells->learner));
}

void kvp_gpu_learner_free(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    if (l == NULL)
        return;
    cells->learner = NULL;
    free(l->lists);
    free(l);
}

void kvp_gpu_learner_set_rope(const kvp_kv *kv, const abi_tensor *rows)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_learner *l = cells->learner;
    const uint32_t all = kvp_kv_n_positions(kv), first = (uint32_t)kvant_lesson_bucket_at(1).from;

    if (l == NULL || l->rope_is_set)
        return;
    l->rope_is_set = true;
    l->begins = kvant_lesson_in_first_bucket(&cells->cache->buckets.lessons);
    if (!kvp_rope_read(kv, rows, &l->rope, l->frequencies)) {
        l->rope.size = 0;
        kvp_note("%s: its RoPE is not known, so matrices are learned without it", kv->name);
        return;
    }
    l->has_block_centers = kvp_gpu_centers_set_rope(kv, rows);
    l->rope.frequencies = l->frequencies;
    l->rope.n_positions = l->begins && all > first ? first : all;
    l->rope.n_position_transforms = 1;
    l->rope.block_centers = l->has_block_centers;
}

/* The keys that are added: every second one of many, and none of the first tokens of a sequence.
 * Keys without positions count as consecutive ones. */
static uint32_t list_rows(const kvp_gpu_cells *cells, const kvp_gpu_learner_input *lesson,
                          learned_lists *lists)
{
    const size_t least = lesson->n > 128 ? 2 : 1,
                 needed = (lesson->n + KVP_LEARN_ROWS - 1) / KVP_LEARN_ROWS,
                 step = needed > least ? needed : least;
    uint32_t n = 0;

    for (size_t i = 0; i < lesson->n; i += step) {
        const int32_t position =
            lesson->positions != NULL ? lesson->positions[i] : (int32_t)(KVANT_PAGE_TOKENS + i);
        if (position >= 0 && position < (int32_t)cells->cache->sink_tokens)
            continue;
        lists->positions[n] = position;
        lists->places[n++] = lesson->places != NULL ? lesson->places[i] : (uint32_t)i;
    }
    return n;
}

static void list_queries(const kvp_gpu_learner_input *lesson, learned_lists *lists)
{
    for (uint32_t i = 0; i < lesson->n_batches * KVP_KEPT_TOKENS; i++) {
        const uint32_t first = i / KVP_KEPT_TOKENS * KVP_KEPT_TOKENS;
        lists->queries[i] =
            lesson->query_positions[first] >= 0 ? lesson->query_positions[i] : (int32_t)(i - first);
    }
}

/* The arguments without working memory. False: no kernel learns from such rows. */
static bool plan(const kvp_gpu_cells *cells, const kvp_gpu_learner_input *lesson, uint32_t n_rows)
{
    kvp_gpu_learner *l = cells->learner;
    learned_lists *at = cells->results.at;
    uint32_t knows_rope = 0;

    l->args = (kvant_cuda_learn_args){ .size = sizeof(l->args),
                                       .head_dim = cells->head_dim,
                                       .n_kv_heads = cells->n_kv_heads,
                                       .group = (uint32_t)(lesson->row / sizeof(float) /
                                                           kvp_gpu_width(cells)),
                                       .type = lesson->type,
                                       .n_rows = n_rows,
                                       .n_tokens = lesson->n_batches * KVP_KEPT_TOKENS,
                                       .batch_tokens = KVP_KEPT_TOKENS,
                                       .rows = lesson->rows,
                                       .token_stride = lesson->stride,
                                       .head_stride = cells->head_dim,
                                       .places = at->places,
                                       .positions = at->positions,
                                       .query_stride = lesson->row / sizeof(float),
                                       .query_positions = at->queries,
                                       .triangles = triangles_of(cells, 0),
                                       .centers = center_of(cells, 0),
                                       .start = center_of(cells, cells->n_learned) };
    for (uint32_t i = 0; i < lesson->n_batches; i++)
        l->args.queries[i] = (const float *)(const void *)lesson->queries[i];
    if (n_rows == 0 || kvant_cuda_learn_plan(l->rope.size != 0 ? &l->rope : NULL, &l->args,
                                             &knows_rope) != KVANT_OK)
        return false;
    l->has_block_centers = l->has_block_centers && knows_rope;
    for (uint32_t i = 1; i < cells->n_learned && knows_rope; i++) {
        const kvant_lesson_bucket bucket = kvant_lesson_bucket_at(i);
        kvant_cuda_learn_span_add(&l->args, bucket.first, bucket.last);
    }
    return true;
}

/* Matrices and centres */

static kvant_cuda_center_layer places_of(const kvp_gpu_cells *cells, uint32_t bucket)
{
    return kvp_gpu_places_of(cells, bucket, center_of(cells, bucket),
                             center_of(cells, cells->n_learned));
}

/* Centres come after matrices. Work between the compact form and kernels that read it lets these
 * begin early. */
static bool bring(kvp_gpu_cells *cells, uint32_t bucket)
{
    const kvant_cuda_center_layer places = places_of(cells, bucket);

    return kvp_gpu_bring_triangles(cells, bucket, triangles_of(cells, bucket),
                                   cells->gpu->stream) &&
           kvp_gpu_place_centers(cells, &places, 1, NULL);
}

/* Learning */

/* Layers that learn together. */
typedef struct learning_group {
    kvp_gpu_cells *of[MOST_TOGETHER];
    uint32_t n;
    layer_lists lists;
} learning_group;

static bool lists_are_alike(const kvp_gpu_learner *a, const kvp_gpu_learner *b)
{
    const learned_lists *x = a->lists, *y = b->lists;
    const size_t rows = a->args.n_rows, tokens = a->args.n_tokens;

    return memcmp(x->positions, y->positions, rows * sizeof(*x->positions)) == 0 &&
           memcmp(x->places, y->places, rows * sizeof(*x->places)) == 0 &&
           memcmp(x->queries, y->queries, tokens * sizeof(*x->queries)) == 0;
}

/* Whether two layers have lessons of one shape, so that they can learn together. */
static bool are_alike(const kvp_gpu_learner *a, const kvp_gpu_learner *b)
{
    const kvant_cuda_learn_args *x = &a->args, *y = &b->args;

    return x->head_dim == y->head_dim && x->n_kv_heads == y->n_kv_heads && x->group == y->group &&
           x->type == y->type && x->n_rows == y->n_rows && x->n_tokens == y->n_tokens &&
           x->token_stride == y->token_stride && x->query_stride == y->query_stride &&
           x->center_span == y->center_span && x->n_transforms == y->n_transforms &&
           memcmp(x->spans, y->spans, x->n_transforms * sizeof(*x->spans)) == 0 &&
           memcmp(x->pairs, y->pairs, x->head_dim / 2 * sizeof(*x->pairs)) == 0 &&
           lists_are_alike(a, b);
}

static void end_lesson(kvp_gpu_learner *l, bool ok)
{
    l->failed = !ok;
    free(l->lists);
    l->lists = NULL;
}

/* The next layer whose lesson waits, from a tensor on. */
static kvp_gpu_cells *next_waiting(const kvp_gpu_cache *cache, size_t *from)
{
    for (; *from < cache->n_tensors; ++*from) {
        kvp_gpu_cells *cells = cache->tensors[*from]->cells;
        if (cells->learner != NULL && cells->learner->lists != NULL)
            return cells;
    }
    return NULL;
}

bool kvp_gpu_learner_waits(const kvp_gpu_cache *cache)
{
    size_t from = 0;

    return next_waiting(cache, &from) != NULL;
}

/* The bytes of working memory for n layers. */
static size_t bytes_of(const kvp_gpu_cells *cells, uint32_t n)
{
    kvant_cuda_learn_args args = cells->learner->args;

    args.n_layers = n;
    return kvant_cuda_learn_bytes(&args);
}

/* Finds the next layers that learn together. Several layers take at most the planned memory. */
static void find_group(const kvp_gpu_cache *cache, learning_group *group)
{
    size_t from = 0, most = 0;

    group->n = 0;
    for (kvp_gpu_cells *cells; (cells = next_waiting(cache, &from)) != NULL; from++) {
        if (group->n == 0)
            most = kvp_gpu_learning_bytes(cells->head_dim, cells->n_kv_heads, cells->n_learned);
        else if (group->n == MOST_TOGETHER || !are_alike(group->of[0]->learner, cells->learner) ||
                 bytes_of(cells, group->n + 1) + sizeof(layer_lists) > most)
            continue;
        group->of[group->n++] = cells;
    }
}

static void list_layers(learning_group *group)
{
    for (uint32_t i = 0; i < group->n; i++) {
        const kvant_cuda_learn_args *args = &group->of[i]->learner->args;
        kvant_cuda_learn_layer *to = &group->lists.learned[i];
        *to = (kvant_cuda_learn_layer){ .rows = args->rows,
                                        .triangles = args->triangles,
                                        .centers = args->centers,
                                        .start = args->start };
        memcpy(to->queries, args->queries, sizeof(to->queries));
    }
}

/* Brings the first transforms at once where nobody reads their arrays: no row has a centre or scale
 * yet. */
static bool bring_first(learning_group *group, layer_lists *at)
{
    kvp_gpu_cells *of[MOST_TOGETHER];
    uint32_t n = 0;
    bool ok = true;

    for (uint32_t i = 0; i < group->n; i++) {
        kvp_gpu_cells *cells = group->of[i];
        cells->learner->brought = cells->center == NULL && cells->scale == NULL;
        if (!cells->learner->brought)
            continue;
        group->lists.compact[n].triangles = triangles_of(cells, 0);
        of[n++] = cells;
    }
    if (n == 0)
        return true;
    ok = kvp_gpu_bring_all_triangles(of, n, group->lists.compact, at->compact);
    for (uint32_t i = 0; i < n; i++)
        group->lists.centers[i] = places_of(of[i], 0); /* the matrices have memory from here on */
    return ok && kvp_gpu_place_centers(of[0], group->lists.centers, n, at->centers);
}

/* Enqueues the lessons of a group. The first layer's lists serve all of its layers. */
static bool enqueue(kvp_gpu_cache *cache, learning_group *group)
{
    kvp_gpu_cells *first = group->of[0];
    kvp_gpu_memory *workspace = &cache->kept_queries.workspace;
    cu_stream stream = first->gpu->stream;
    kvant_cuda_learn_args args = first->learner->args;
    const size_t bytes = bytes_of(first, group->n);
    layer_lists *at;

    if (!kvp_gpu_grow(first->gpu, workspace, bytes + sizeof(*at), false))
        return false;
    at = (layer_lists *)(void *)((char *)workspace->at + bytes);
    list_layers(group);
    args.workspace = workspace->at;
    args.workspace_bytes = bytes;
    args.layers = at->learned;
    args.n_layers = group->n;
    return kvp_cu_write(first->results.at, first->learner->lists, sizeof(learned_lists), stream) &&
           kvp_cu_write(at->learned, group->lists.learned, group->n * sizeof(*group->lists.learned),
                        stream) &&
           kvant_cuda_learn(&args, stream) == KVANT_OK && bring_first(group, at);
}

void kvp_gpu_learner_flush(kvp_gpu_cache *cache)
{
    learning_group *group;

    if (!kvp_gpu_learner_waits(cache))
        return;
    group = malloc(sizeof(*group));
    while (group != NULL && kvp_gpu_learner_waits(cache)) {
        find_group(cache, group);
        const bool ok = enqueue(cache, group);
        for (uint32_t i = 0; i < group->n; i++)
            end_lesson(group->of[i]->learner, ok);
    }
    for (size_t from = 0; group == NULL && kvp_gpu_learner_waits(cache); from++)
        end_lesson(next_waiting(cache, &from)->learner, false);
    free(group);
}

bool kvp_gpu_learner_start(kvp_gpu_cells *cells, const kvp_gpu_learner_input *lesson)
{
    kvp_gpu_learner *l = cells->learner;
    kvp_gpu_learner_input own = *lesson;
    bool ok;

    kvp_gpu_queries_find(cells, &own);
    l->begun = true;
    l->lists = malloc(sizeof(learned_lists));
    ok = l->lists != NULL;
    if (ok)
        list_queries(&own, l->lists);
    ok = ok && plan(cells, &own, list_rows(cells, &own, l->lists));
    kvp_gpu_lesson_free(lesson);
    if (!ok)
        end_lesson(l, false);
    return ok;
}

bool kvp_gpu_learner_bring(kvp_gpu_cells *cells, uint32_t bucket)
{
    const kvp_gpu_learner *l = cells->learner;

    if (l->lists != NULL)
        kvp_gpu_learner_flush(cells->cache);
    return !l->failed && ((bucket == 0 && l->brought) || bring(cells, bucket));
}

bool kvp_gpu_learner_read(const kvp_gpu_cells *cells, uint32_t bucket, uint16_t *triangles,
                          float *center, float *start)
{
    const size_t bytes = kvp_gpu_width(cells) * sizeof(float),
                 halves = halves_of(cells) * sizeof(*triangles);

    return kvp_gpu_copy_out_rows(cells->gpu, triangles, halves, triangles_of(cells, bucket), halves,
                                 1) &&
           kvp_gpu_copy_out_rows(cells->gpu, center, bytes, center_of(cells, bucket), bytes, 1) &&
           kvp_gpu_copy_out_rows(cells->gpu, start, bytes, center_of(cells, cells->n_learned),
                                 bytes, 1);
}

/* Later position buckets */

bool kvp_gpu_learner_request(kvp_gpu_cells *cells, const kvant_lesson_bucket *bucket)
{
    kvp_gpu_learner *l = cells->learner;

    if (l == NULL || !l->begun || l->failed || bucket->id >= l->args.n_transforms ||
        cells->cache->buckets.centers.uneven || cells->cache->buckets.centers.rope.size == 0)
        return false;
    l->bucket = bucket->id;
    return true;
}

bool kvp_gpu_learner_answer(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;
    const uint32_t bucket = l != NULL ? l->bucket : 0;

    if (bucket == 0)
        return true;
    l->bucket = 0;
    if (!kvp_gpu_learner_bring(cells, bucket))
        return false;
    kvp_gpu_keep(cells, bucket, NULL);
    cells->further_made |= 1u << bucket;
    cells->learned_ids |= 1u << bucket;
    return true;
}
