/* buckets.c - a key transform for each position bucket (transform=first).
 *
 * RoPE rotates keys further with each position, so one transform does not suit all. The first
 * transform (first_matrix.c) is for the first bucket; if learning begins at later positions, it is
 * a compromise for all positions (learner.c). Later buckets get their own transforms from the same
 * second moments. learner.c makes all of them at once. The one of a bucket is requested when rows
 * reach the bucket (src/store/learn.h decides when), and it comes in force 1024 rows later.
 * A block has the transform and the centre (centers.c) of its first row's position for all of its
 * rows, and keeps them until all of these rows are overwritten.
 *
 * Attention gets queries transformed by each key transform, and the number of each block's
 * bucket. */
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../log.h"

_Static_assert(2 * KVP_MOST_BUCKETS <= KVANT_CUDA_MOST_MATRICES,
               "attention takes all of them, centres are twice as many");

static int32_t last_position(const kvp_gpu_step *step)
{
    int32_t last = -1;

    for (size_t i = 0; i < step->n && step->positions != NULL; i++)
        last = step->positions[i] > last ? step->positions[i] : last;
    return last;
}

/* Matrices */

/* Whether the transform of a bucket can be learned now, and was not yet. */
static bool may_request(const kvp_gpu_cache *cache, uint32_t id)
{
    return !cache->lacks_key_transform && !(cache->buckets.foreign >> id & 1) &&
           kvant_lesson_may_request(&cache->buckets.lessons, id);
}

/* Requests the transform of a bucket, unless first transforms come in force in the graph at
 * hand. */
static void request(kvp_gpu_cache *cache, uint32_t id)
{
    const kvant_lesson_bucket bucket = kvant_lesson_bucket_at(id);
    bool any = false;

    if (!may_request(cache, id) || (cache->late.any && !cache->late.seals))
        return;
    for (size_t i = 0; i < cache->n_tensors; i++)
        any = kvp_gpu_learner_request(cache->tensors[i]->cells, &bucket) || any;
    kvant_lesson_requested(&cache->buckets.lessons, id, any);
}

/* Puts requested transforms in force, in all layers or in none. */
static void use_requested(kvp_gpu_cache *cache)
{
    kvant_lesson_buckets *lessons = &cache->buckets.lessons;
    bool all = true;

    for (size_t i = 0; i < cache->n_tensors; i++)
        all = kvp_gpu_learner_answer(cache->tensors[i]->cells) && all;
    if (!all)
        kvp_note("%s: keys from position %d on use the matrices of the keys before them",
                 cache->gpu->name, kvant_lesson_bucket_at(lessons->requested).first);
    kvant_lesson_answered(lessons, all);
}

void kvp_gpu_buckets_prepare_next(kvp_gpu_cache *cache, int32_t last)
{
    uint32_t next;

    if (cache->buckets.lessons.requested > 0)
        use_requested(cache);
    next = kvant_lesson_next_bucket(&cache->buckets.lessons);
    if (next <= kvant_lesson_bucket_after(last))
        request(cache, next);
}

void kvp_gpu_buckets_begin_layer(const kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;
    const kvant_lesson_bucket bucket =
        kvant_lesson_bucket_at(kvant_lesson_bucket_after(cells->cache->buckets.lessons.position));

    if (may_request(cells->cache, bucket.id) && kvp_gpu_learner_request(cells, &bucket))
        kvp_note("%s: layer %u learns its transform for positions from %d on", cells->gpu->name,
                 kv->shape.layer, bucket.first);
}

/* The layers had enough rows for it before, so its transform comes in force with the next rows. */
void kvp_gpu_buckets_begin_late(kvp_gpu_cache *cache)
{
    kvant_lesson_buckets *lessons = &cache->buckets.lessons;

    request(cache, kvant_lesson_bucket_after(lessons->position));
    lessons->since = KVANT_LESSON_LATE;
}

/* Blocks */

bool kvp_gpu_buckets_saw(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    const kvp_gpu_buckets *buckets = &cache->buckets;

    return buckets->n_last == step->n &&
           memcmp(buckets->last, step->cells, step->n * sizeof(*step->cells)) == 0;
}

static bool note_last(kvp_gpu_buckets *buckets, const kvp_gpu_step *step)
{
    if (step->n > buckets->most_last) {
        int64_t *last = realloc(buckets->last, step->n * sizeof(*last));
        kvp_gpu_run *runs = last != NULL ? realloc(buckets->runs, step->n * sizeof(*runs)) : NULL;
        buckets->last = last != NULL ? last : buckets->last;
        if (runs == NULL)
            return false;
        buckets->runs = runs;
        buckets->most_last = step->n;
    }
    memcpy(buckets->last, step->cells, step->n * sizeof(*step->cells));
    buckets->n_last = step->n;
    return true;
}

/* The number of a step's cells, from the i-th on, in its block. */
static size_t rows_of_block(const kvp_gpu_step *step, size_t i)
{
    const int64_t block = step->cells[i] / KVANT_PAGE_TOKENS;
    size_t n = 1;

    while (i + n < step->n && step->cells[i + n] / KVANT_PAGE_TOKENS == block)
        n++;
    return n;
}

/* The position of a block's first cell, if n rows from the i-th on have consecutive positions where
 * they have consecutive cells. */
static int32_t position_of(const kvp_gpu_step *step, size_t i, size_t n)
{
    for (size_t j = i; j < i + n; j++)
        if (step->positions[j] - step->positions[i] != step->cells[j] - step->cells[i])
            return KVP_NO_POSITION;
    return step->positions[i] - (int32_t)(step->cells[i] % KVANT_PAGE_TOKENS);
}

/* The most shifts among the blocks of a stream. A block that begins after a shift could store its
 * rows without any shift. But then each shift would add a transform, and queries are transformed by
 * each of them. So once the blocks of a stream have MOST_SHIFTS different shifts, new blocks begin
 * with the smallest of these; until then with 0. With more shifts, queries take longer. With fewer,
 * rows are stored further beyond the positions that their transform is for. */
#define MOST_SHIFTS 3u

static int32_t shift_of_new_blocks(const kvp_gpu_cache *cache, size_t block)
{
    const size_t a_stream = cache->n_blocks / cache->n_streams, first = block / a_stream * a_stream;
    int32_t seen[MOST_SHIFTS], smallest = 0;
    uint32_t n = 0;

    for (size_t i = first; i < first + a_stream && cache->buckets.moved; i++) {
        const int32_t by = cache->buckets.lineages[cache->buckets.of[i]].by;
        uint32_t at = 0;
        while (at < n && seen[at] != by)
            at++;
        if (i == block || cache->written[i] == 0 || by == 0 || at < n || n == MOST_SHIFTS)
            continue;
        seen[n++] = by;
        smallest = smallest == 0 || abs(by) < abs(smallest) ? by : smallest;
    }
    return n < MOST_SHIFTS ? 0 : smallest;
}

/* The transform of the block before, or 0. It counts if it came with a restored state, and if the
 * cache has no transform for later positions. A row at this position has to continue the block's
 * sequence. */
static uint32_t restored_transform(const kvp_gpu_cache *cache, size_t block, int32_t position)
{
    const kvp_gpu_buckets *buckets = &cache->buckets;
    const size_t a_stream = cache->n_blocks / cache->n_streams;
    uint32_t id;

    if (buckets->foreign == 0 || block % a_stream == 0 || cache->written[block - 1] == 0 ||
        buckets->centers.positions[block - 1] == KVP_NO_POSITION ||
        position / (int32_t)KVANT_PAGE_TOKENS !=
            buckets->centers.positions[block - 1] / (int32_t)KVANT_PAGE_TOKENS + 1)
        return 0;
    id = buckets->of[block - 1];
    return (buckets->foreign >> id & 1) && kvant_lesson_bucket_of(&buckets->lessons, position) <=
                                               buckets->foreign_bucket[id]
               ? id
               : 0;
}

/* The transform of a block that begins with a row at this position. */
static uint32_t transform_of_new_block(const kvp_gpu_cache *cache, size_t block, int32_t position)
{
    const kvp_gpu_buckets *buckets = &cache->buckets;
    const uint32_t restored = restored_transform(cache, block, position);
    const int32_t by = shift_of_new_blocks(cache, block);
    const uint32_t bucket = kvant_lesson_bucket_of(&buckets->lessons, position - by);

    if (restored != 0)
        return restored;
    for (uint32_t id = KVP_MOST_BUCKETS; id < KVP_MOST_TRANSFORMS && by != 0; id++)
        if (buckets->lineages[id].by == by && buckets->lineages[id].bucket == bucket)
            return id;
    return kvant_lesson_bucket_of(&buckets->lessons, position);
}

/* Gives the transform and the centre of a row's position to blocks that had no rows, or whose rows
 * are all overwritten. */
static void assign(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_buckets *buckets = &cache->buckets;

    for (size_t i = 0, n; i < step->n; i += n) {
        const size_t block = (size_t)(step->cells[i] / KVANT_PAGE_TOKENS);
        uint32_t transform;
        n = rows_of_block(step, i);
        if (cache->written[block] != 0 && n < KVANT_PAGE_TOKENS)
            continue;
        kvp_gpu_centers_assign(cache, block,
                               step->positions != NULL ? position_of(step, i, n) : KVP_NO_POSITION);
        transform =
            step->positions != NULL ? transform_of_new_block(cache, block, step->positions[i]) : 0;
        if (buckets->of[block] != transform)
            kvp_gpu_centers_move(cache, block, 0);
        buckets->changed = buckets->changed || buckets->of[block] != transform;
        buckets->of[block] = (uint8_t)transform;
    }
}

/* Lists the runs of a batch. Captured graphs contain the runs, so a change makes them invalid. */
static void list_runs(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_buckets *buckets = &cache->buckets;
    size_t n_runs = 0;
    bool other = false;
    kvp_gpu_run run;

    for (size_t i = 0; i < step->n; i += run.n) {
        const kvp_gpu_run *former = &buckets->runs[n_runs];
        run = kvp_gpu_run_of_cells(cache, step->cells, i, step->n);
        other = other || n_runs >= buckets->n_runs || former->first != i ||
                former->transform != run.transform;
        buckets->runs[n_runs++] = run;
    }
    if (other || n_runs != buckets->n_runs)
        atomic_fetch_add(&cache->gpu->epoch, 1);
    buckets->n_runs = n_runs;
}

bool kvp_gpu_buckets_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_buckets *buckets = &cache->buckets;
    int32_t last;

    if ((!cache->learns_key_transform && !buckets->moved) || kvp_gpu_buckets_saw(cache, step))
        return true; /* keys that learn nothing have one transform, or none, until they move */
    last = buckets->lessons.position = last_position(step);
    if (kvant_lesson_takes_answer(&buckets->lessons, last))
        use_requested(cache);
    request(cache, kvant_lesson_bucket_after(last));
    if (!note_last(buckets, step))
        return false;
    buckets->lessons.since += step->n;
    assign(cache, step);
    list_runs(cache, step);
    return true;
}

/* Attention */

/* Finds the ids of blocks with rows, in ascending order: ranges->used and n. False: they have not
 * changed. */
static bool find_used(kvp_gpu_cache *cache)
{
    kvp_gpu_buckets *buckets = &cache->buckets;
    uint8_t used[KVP_MOST_TRANSFORMS] = { 0 };
    uint32_t ids = 0, n = 0;
    bool changed;

    for (uint32_t block = 0; block < cache->n_blocks; block++)
        ids |= cache->written[block] != 0 ? 1u << buckets->of[block] : 0;
    for (uint32_t id = 0; id < KVP_MOST_TRANSFORMS; id++)
        if (ids >> id & 1)
            used[n++] = (uint8_t)id;
    n += n == 0;
    changed = n != buckets->n || memcmp(used, buckets->used, n) != 0;
    buckets->n = n;
    memcpy(buckets->used, used, sizeof(used));
    return changed;
}

static uint8_t place_of(const kvp_gpu_buckets *buckets, uint32_t id)
{
    uint8_t place = 0;

    while (buckets->used[place] != id)
        place++;
    return place;
}

/* Fills the numbers of transforms and of centres (cache.h: starts) by block. Blocks without rows
 * get the numbers of the block before, so that attention does not change transforms for them. */
static void fill_numbers(const kvp_gpu_cache *cache, uint8_t *matrices, uint8_t *centers)
{
    const kvp_gpu_buckets *buckets = &cache->buckets;
    uint8_t matrix = 0, center = 0;

    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        if (block % (cache->n_blocks / cache->n_streams) == 0)
            matrix = center = 0;
        if (cache->written[block] != 0) {
            matrix = place_of(buckets, buckets->of[block]);
            center =
                (uint8_t)(buckets->lineages[buckets->of[block]].bucket +
                          (buckets->centers.positions[block] == KVP_NO_POSITION ? KVP_MOST_BUCKETS
                                                                                : 0));
        }
        matrices[block] = matrix;
        centers[block] = center;
    }
}

bool kvp_gpu_buckets_upload(kvp_gpu_cache *cache, cu_stream stream)
{
    kvp_gpu_buckets *buckets = &cache->buckets;
    const size_t bytes = 2 * (size_t)cache->n_blocks;
    uint8_t *numbers = buckets->host;
    bool ok;

    if (buckets->lessons.made == 1 && !buckets->centers.used && !buckets->moved && !buckets->plain)
        return true;
    if (buckets->centers.used && !kvp_gpu_centers_upload(cache, stream))
        return false;
    if (!buckets->changed)
        return true;
    ok = kvp_gpu_grow(cache->gpu, &buckets->numbers, bytes, false);
    if (ok && find_used(cache))
        atomic_fetch_add(&cache->gpu->epoch, 1); /* captured graphs contain the former ids */
    if (ok)
        fill_numbers(cache, numbers, numbers + cache->n_blocks);
    ok = ok && kvp_cu_write(buckets->numbers.at, numbers, bytes, stream);
    buckets->changed = !ok;
    return ok;
}

bool kvp_gpu_has_transforms(const kvp_gpu_cells *keys)
{
    return keys->further_made != 0 || (keys->rope.size != 0 && keys->cache->buckets.moved);
}

size_t kvp_gpu_runs(const kvp_gpu_cells *keys)
{
    return kvp_gpu_has_transforms(keys) ? keys->cache->buckets.n_runs : 1;
}

uint32_t kvp_gpu_matrices(const kvp_gpu_cells *keys)
{
    return kvp_gpu_has_transforms(keys) ? keys->cache->buckets.n : 1;
}

uint32_t kvp_gpu_transform_at(const kvp_gpu_cells *keys, uint32_t number)
{
    return kvp_gpu_has_transforms(keys) ? keys->cache->buckets.used[number] : 0;
}

/* Runs */

int64_t kvp_gpu_block_at(const kvp_gpu_cache *cache, bool open, size_t number)
{
    return open ? cache->pages[number].block : (int64_t)number;
}

static uint32_t transform_of_block(const kvp_gpu_cells *cells, bool open, size_t block)
{
    const int64_t at = kvp_gpu_block_at(cells->cache, open, block);

    return at >= 0 ? cells->cache->buckets.of[at] : 0;
}

kvp_gpu_run kvp_gpu_run_of_blocks(const kvp_gpu_cells *cells, bool open, size_t first, size_t n)
{
    kvp_gpu_run run = { first, 1, transform_of_block(cells, open, first) };

    while (run.n < n && transform_of_block(cells, open, first + run.n) == run.transform)
        run.n++;
    return run;
}

kvp_gpu_run kvp_gpu_run_of_cells(const kvp_gpu_cache *cache, const int64_t *numbers, size_t first,
                                 size_t n)
{
    const uint8_t *of = cache->buckets.of;
    /* a row without a cell (-1) fits any run */
    kvp_gpu_run run = { first, 1, of[numbers[first] / KVANT_PAGE_TOKENS] };

    while (first + run.n < n && of[numbers[first + run.n] / KVANT_PAGE_TOKENS] == run.transform)
        run.n++;
    return run;
}

void kvp_gpu_buckets_copy(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n)
{
    memmove(cache->buckets.of + to, cache->buckets.of + first, n);
    for (uint32_t i = 0; i < n; i++) /* blocks of two streams do not overlap */
        kvp_gpu_centers_copy(cache, first + i, to + i);
    cache->buckets.changed = true;
}

/* Life */

void kvp_gpu_buckets_forget(kvp_gpu_cache *cache)
{
    kvp_gpu_buckets *buckets = &cache->buckets;

    memset(buckets->of, 0, cache->n_blocks);
    for (uint32_t id = 0; id < KVP_MOST_TRANSFORMS; id++)
        buckets->lineages[id] = (kvp_gpu_lineage){ id < KVP_MOST_BUCKETS ? id : 0, 0 };
    buckets->moved = buckets->plain = false;
    buckets->foreign = 0;
    kvant_lesson_buckets_begin(&buckets->lessons);
    buckets->n = 1;
    buckets->used[0] = 0;
    kvp_gpu_centers_forget(cache);
    buckets->n_last = 0;
    buckets->changed = true;
}

void kvp_gpu_buckets_free(kvp_gpu_cache *cache)
{
    kvp_gpu_release(&cache->buckets.numbers);
    kvp_gpu_centers_free(cache);
    free(cache->buckets.of);
    free(cache->buckets.host);
    free(cache->buckets.runs);
    free(cache->buckets.last);
}
