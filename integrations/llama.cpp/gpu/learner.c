/* learner.c - see learner.h.
 *
 * Lessons wait until a graph has been enqueued. Then a few streams make the transforms of all
 * layers. A layer takes few thread blocks, which stay for two milliseconds. Matrix products of a
 * model need all multiprocessors at once, so they would wait for the blocks of every layer that
 * learned while the graph runs. */
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

/* Streams that learn at the same time, with working memory each: as many as their thread blocks
 * fill a large GPU. */
static uint32_t count_streams(uint32_t head_dim, uint32_t n_kv_heads, uint32_t n_buckets)
{
    const uint32_t blocks = n_buckets * n_kv_heads * (head_dim + 127) / 128, n = 128 / blocks;

    return n < 1 ? 1 : n > KVP_LEARN_STREAMS ? KVP_LEARN_STREAMS : n;
}

/* Working memory for all rows and queries of a lesson. Models have at most 16 query heads per kv
 * head. */
size_t kvp_gpu_learning_bytes(uint32_t head_dim, uint32_t n_kv_heads, uint32_t n_buckets)
{
    kvant_cuda_learn_args args = { .size = sizeof(args),
                                   .head_dim = head_dim,
                                   .n_kv_heads = n_kv_heads,
                                   .group = 16,
                                   .n_rows = KVP_LEARN_ROWS,
                                   .n_tokens = KVP_KEPT_BATCHES * KVP_KEPT_TOKENS };
    uint32_t knows_rope;

    if (kvant_cuda_learn_plan(NULL, &args, &knows_rope) != KVANT_OK)
        return 0;
    args.n_transforms = n_buckets;
    return count_streams(head_dim, n_kv_heads, n_buckets) * kvant_cuda_learn_bytes(&args);
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
    if (l->ready != NULL)
        kvp_cu.event_free(l->ready);
    if (l->made != NULL)
        kvp_cu.event_free(l->made);
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

static bool have_events(kvp_gpu_learner *l)
{
    return (l->ready != NULL ||
            kvp_cu_ok(kvp_cu.event_new(&l->ready, CU_NO_TIMING), "creating an event")) &&
           (l->made != NULL ||
            kvp_cu_ok(kvp_cu.event_new(&l->made, CU_NO_TIMING), "creating an event"));
}

/* Lets a learning stream begin behind the work enqueued so far, for which `ready` is recorded. */
static bool have_stream(kvp_gpu *gpu, uint32_t stream, cu_event ready)
{
    return (gpu->learning[stream] != NULL ||
            kvp_cu_ok(kvp_cu.stream_new(&gpu->learning[stream], CU_NON_BLOCKING),
                      "creating a stream")) &&
           kvp_cu_ok(kvp_cu.stream_wait(gpu->learning[stream], ready, 0), "learning");
}

static bool record_ready(const kvp_gpu_cells *cells)
{
    return have_events(cells->learner) &&
           kvp_cu_ok(kvp_cu.event_record(cells->learner->ready, cells->gpu->stream), "learning");
}

static cu_stream stream_of(const kvp_gpu_cells *cells)
{
    return cells->gpu->learning[cells->learner->stream];
}

/* Matrices and centres */

static bool copy_numbers(float *to, const float *from, size_t n, cu_stream stream)
{
    return kvp_cu_move(to, from, n * sizeof(*to), stream);
}

/* Work on the learning stream, because it uses the working memory of learning. */
static bool bring(kvp_gpu_cells *cells, uint32_t bucket)
{
    const size_t width = kvp_gpu_width(cells);
    const float *start = center_of(cells, cells->n_learned), *center = center_of(cells, bucket);
    float *starts = cells->starts.at;
    cu_stream stream = stream_of(cells);

    return kvp_gpu_bring_triangles(cells, bucket, triangles_of(cells, bucket), center, stream) &&
           (bucket > 0 ||
            copy_numbers(kvp_gpu_affine(cells, &cells->numbers), center, width, stream)) &&
           copy_numbers(starts + bucket * width, start, width, stream) &&
           copy_numbers(starts + (KVP_MOST_BUCKETS + bucket) * width, center, width, stream);
}

static bool note_made(const kvp_gpu_cells *cells)
{
    return kvp_cu_ok(kvp_cu.event_record(cells->learner->made, stream_of(cells)), "learning");
}

/* Learning */

/* If no row has a centre or scale yet, nobody reads the arrays of the first transform. */
static bool bring_first(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    l->brought = cells->center == NULL && cells->scale == NULL;
    return !l->brought || bring(cells, 0);
}

/* Enqueues a lesson in its stream. */
static bool enqueue(kvp_gpu_cells *cells)
{
    kvp_gpu_learner *l = cells->learner;

    return have_events(l) &&
           kvp_cu_write(cells->results.at, l->lists, sizeof(learned_lists), stream_of(cells)) &&
           kvant_cuda_learn(&l->args, stream_of(cells)) == KVANT_OK && bring_first(cells) &&
           note_made(cells);
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

/* Working memory of all streams, and their order behind the work enqueued so far. */
static bool have_streams(kvp_gpu_cells *first, uint32_t n, size_t bytes)
{
    kvp_gpu *gpu = first->gpu;
    bool ok = kvp_gpu_grow(gpu, &gpu->learning_room, n * bytes, false) && record_ready(first);

    for (uint32_t i = 0; i < n && ok; i++)
        ok = have_stream(gpu, i, first->learner->ready);
    return ok;
}

/* The working memory of the largest lesson that waits. */
static size_t most_bytes(const kvp_gpu_cache *cache)
{
    size_t most = 0, from = 0;

    for (const kvp_gpu_cells *cells; (cells = next_waiting(cache, &from)) != NULL; from++) {
        const size_t bytes = kvant_cuda_learn_bytes(&cells->learner->args);
        most = bytes > most ? bytes : most;
    }
    return most;
}

bool kvp_gpu_learner_waits(const kvp_gpu_cache *cache)
{
    size_t from = 0;

    return next_waiting(cache, &from) != NULL;
}

void kvp_gpu_learner_flush(kvp_gpu_cache *cache)
{
    size_t from = 0, bytes;
    kvp_gpu_cells *cells = next_waiting(cache, &from);
    uint32_t stream = 0, n;
    bool ok;

    if (cells == NULL)
        return;
    bytes = most_bytes(cache);
    n = count_streams(cells->head_dim, cells->n_kv_heads, cells->n_learned);
    ok = have_streams(cells, n, bytes);
    for (; cells != NULL; from++, cells = next_waiting(cache, &from)) {
        kvp_gpu_learner *l = cells->learner;
        l->stream = stream++ % n;
        l->args.workspace = (char *)cells->gpu->learning_room.at + l->stream * bytes;
        l->args.workspace_bytes = bytes;
        end_lesson(l, ok && enqueue(cells));
    }
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
    kvp_gpu_learner *l = cells->learner;
    bool ok;

    if (l->lists != NULL)
        kvp_gpu_learner_flush(cells->cache);
    ok = !l->failed && ((bucket == 0 && l->brought) ||
                        (record_ready(cells) && have_stream(cells->gpu, l->stream, l->ready) &&
                         bring(cells, bucket) && note_made(cells)));
    return ok && kvp_cu_ok(kvp_cu.stream_wait(cells->gpu->stream, l->made, 0), "learning");
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
