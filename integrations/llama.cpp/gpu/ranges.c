/* ranges.c - a key transform for each position bucket (transform=first).
 *
 * RoPE rotates keys further with each position, so one transform does not suit all. The first
 * transform (first.c) is for the first bucket; if learning begins at later positions, it is a
 * compromise for all positions (learner.c). Later buckets get their own transforms from the same
 * second moments (kvant_tensor_make_range_codecs). Threads learn a transform when its bucket is
 * reached. It comes in force 1024 rows later, when they are done, so results do not depend on time.
 * A block has the transform and the centre (centers.c) of its first row's position for all of its
 * rows, and keeps them until all of these rows are overwritten.
 *
 * Attention gets queries transformed by each key transform, and the number of each block's
 * bucket. */
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../log.h"

/* Rows of a position bucket that are stored before its transform is in force. Threads need this
 * time; with more, more rows have the transform of the bucket before. */
#define LATE 1024

/* The first position of each bucket. Every further bucket costs memory and another transform of the
 * queries. Below 8192 a bucket spans more than a doubling of the position. */
static const int32_t begins[KVP_PLAIN + 1] = { 0,     KVP_FIRST_RANGE, 8192,   16384,
                                               32768, 65536,           131072, 262144 };
_Static_assert(2 * KVP_MOST_RANGES <= KVANT_CUDA_MOST_MATRICES,
               "attention takes all of them, centres are twice as many");

kvp_gpu_range kvp_gpu_range_at(uint32_t number)
{
    return (kvp_gpu_range){ .number = number,
                            .first = begins[number],
                            .last = begins[number + 1] - 1,
                            .from = number > 0 ? begins[number] + LATE : 0 };
}

/* The position bucket whose transform a row gets. */
static uint32_t range_of(int32_t position)
{
    uint32_t range = 0;

    while (range + 1 < KVP_PLAIN && position >= begins[range + 1] + LATE)
        range++;
    return range;
}

/* The same, or the last bucket before it that has a transform. */
static uint32_t made_range_of(const kvp_gpu_ranges *ranges, int32_t position)
{
    uint32_t number = range_of(position);

    while (!(ranges->made >> number & 1))
        number--;
    return number;
}

static int32_t last_position(const kvp_gpu_step *step)
{
    int32_t last = -1;

    for (size_t i = 0; i < step->n && step->positions != NULL; i++)
        last = step->positions[i] > last ? step->positions[i] : last;
    return last;
}

/* Matrices */

/* Lets threads learn the transform of a bucket, unless the first transform is still being
 * learned. */
static void ask(kvp_gpu_cache *cache, uint32_t number)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    const kvp_gpu_range range = kvp_gpu_range_at(number);
    bool any = false;

    if (ranges->asked > 0 || ranges->ended || cache->weighing || (ranges->made >> range.number & 1))
        return;
    for (size_t i = 0; i < cache->n_tensors; i++)
        any = kvp_gpu_learner_ask(cache->tensors[i]->cells, &range) || any;
    ranges->asked = any ? range.number : 0;
    ranges->ended = !any;
    ranges->since = 0;
}

/* Puts the transforms that threads learned in force, in all layers or in none. */
static void take_asked(kvp_gpu_cache *cache)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    bool all = true;

    for (size_t i = 0; i < cache->n_tensors; i++)
        all = kvp_gpu_learner_answer(cache->tensors[i]->cells) && all;
    if (all)
        ranges->made |= 1u << ranges->asked;
    else
        kvp_note("%s: keys at position %d and later share the matrices of those before",
                 cache->gpu->name, begins[ranges->asked]);
    ranges->ended = !(ranges->made >> ranges->asked & 1);
    ranges->asked = 0;
}

void kvp_gpu_ranges_foresee(kvp_gpu_cache *cache, int32_t last)
{
    uint32_t next = 0;

    if (cache->ranges.asked > 0)
        take_asked(cache);
    while (cache->ranges.made >> next & 1)
        next++;
    if (next <= range_of(last + LATE))
        ask(cache, next);
}

/* Blocks */

bool kvp_gpu_ranges_saw(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    const kvp_gpu_ranges *ranges = &cache->ranges;

    return ranges->n_last == step->n &&
           memcmp(ranges->last, step->cells, step->n * sizeof(*step->cells)) == 0;
}

static bool note_last(kvp_gpu_ranges *ranges, const kvp_gpu_step *step)
{
    if (step->n > ranges->most_last) {
        int64_t *last = realloc(ranges->last, step->n * sizeof(*last));
        kvp_gpu_run *runs = last != NULL ? realloc(ranges->runs, step->n * sizeof(*runs)) : NULL;
        ranges->last = last != NULL ? last : ranges->last;
        if (runs == NULL)
            return false;
        ranges->runs = runs;
        ranges->most_last = step->n;
    }
    memcpy(ranges->last, step->cells, step->n * sizeof(*step->cells));
    ranges->n_last = step->n;
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

    for (size_t i = first; i < first + a_stream && cache->ranges.moved; i++) {
        const int32_t by = cache->ranges.lineages[cache->ranges.of[i]].by;
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

/* The transform of a block that begins with a row at this position. */
static uint32_t transform_of_new_block(const kvp_gpu_cache *cache, size_t block, int32_t position)
{
    const kvp_gpu_ranges *ranges = &cache->ranges;
    const int32_t by = shift_of_new_blocks(cache, block);
    const uint32_t range = made_range_of(ranges, position - by);

    for (uint32_t id = KVP_MOST_RANGES; id < KVP_MOST_TRANSFORMS && by != 0; id++)
        if (ranges->lineages[id].by == by && ranges->lineages[id].range == range)
            return id;
    return made_range_of(ranges, position);
}

/* Gives the transform and the centre of a row's position to blocks that had no rows, or whose rows
 * are all overwritten. */
static void assign(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_ranges *ranges = &cache->ranges;

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
        if (ranges->of[block] != transform)
            kvp_gpu_centers_move(cache, block, 0);
        ranges->changed = ranges->changed || ranges->of[block] != transform;
        ranges->of[block] = (uint8_t)transform;
    }
}

/* Lists the runs of a batch. Captured graphs contain the runs, so a change makes them invalid. */
static void list_runs(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    size_t n_runs = 0;
    bool other = false;
    kvp_gpu_run run;

    for (size_t i = 0; i < step->n; i += run.n) {
        const kvp_gpu_run *former = &ranges->runs[n_runs];
        run = kvp_gpu_run_of_cells(cache, step->cells, i, step->n);
        other = other || n_runs >= ranges->n_runs || former->first != i ||
                former->transform != run.transform;
        ranges->runs[n_runs++] = run;
    }
    if (other || n_runs != ranges->n_runs)
        atomic_fetch_add(&cache->gpu->epoch, 1);
    ranges->n_runs = n_runs;
}

bool kvp_gpu_ranges_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    int32_t last;

    if ((!cache->weighs && !ranges->moved) || kvp_gpu_ranges_saw(cache, step))
        return true; /* keys that learn nothing have one transform, or none, until they move */
    last = ranges->position = last_position(step);
    if (ranges->asked > 0 && ranges->since >= LATE && range_of(last) >= ranges->asked)
        take_asked(cache);
    ask(cache, last >= 0 ? range_of(last + LATE) : 0);
    if (!note_last(ranges, step))
        return false;
    ranges->since += step->n;
    assign(cache, step);
    list_runs(cache, step);
    return true;
}

bool kvp_gpu_in_first_range(const kvp_gpu_cache *cache)
{
    return range_of(cache->ranges.position) == 0;
}

/* Attention */

/* Finds the ids of blocks with rows, in ascending order: ranges->used and n. False: they have not
 * changed. */
static bool find_used(kvp_gpu_cache *cache)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    uint8_t used[KVP_MOST_TRANSFORMS] = { 0 };
    uint32_t ids = 0, n = 0;
    bool changed;

    for (uint32_t block = 0; block < cache->n_blocks; block++)
        ids |= cache->written[block] != 0 ? 1u << ranges->of[block] : 0;
    for (uint32_t id = 0; id < KVP_MOST_TRANSFORMS; id++)
        if (ids >> id & 1)
            used[n++] = (uint8_t)id;
    n += n == 0;
    changed = n != ranges->n || memcmp(used, ranges->used, n) != 0;
    ranges->n = n;
    memcpy(ranges->used, used, sizeof(used));
    return changed;
}

static uint8_t place_of(const kvp_gpu_ranges *ranges, uint32_t id)
{
    uint8_t place = 0;

    while (ranges->used[place] != id)
        place++;
    return place;
}

/* Fills the numbers of transforms and of centres (cache.h: starts) by block. Blocks without rows
 * get the numbers of the block before, so that attention does not change transforms for them. */
static void fill_numbers(const kvp_gpu_cache *cache, uint8_t *matrices, uint8_t *centers)
{
    const kvp_gpu_ranges *ranges = &cache->ranges;
    uint8_t matrix = 0, center = 0;

    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        if (block % (cache->n_blocks / cache->n_streams) == 0)
            matrix = center = 0;
        if (cache->written[block] != 0) {
            matrix = place_of(ranges, ranges->of[block]);
            center =
                (uint8_t)(ranges->lineages[ranges->of[block]].range +
                          (ranges->centers.positions[block] == KVP_NO_POSITION ? KVP_MOST_RANGES
                                                                               : 0));
        }
        matrices[block] = matrix;
        centers[block] = center;
    }
}

bool kvp_gpu_ranges_bring(kvp_gpu_cache *cache, cu_stream stream)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    const size_t bytes = 2 * (size_t)cache->n_blocks;
    uint8_t *numbers = ranges->host;
    bool ok;

    if (ranges->made == 1 && !ranges->centers.used && !ranges->moved && !ranges->plain)
        return true;
    if (ranges->centers.used && !kvp_gpu_centers_bring(cache, stream))
        return false;
    if (!ranges->changed)
        return true;
    ok = kvp_gpu_grow(cache->gpu, &ranges->numbers, bytes, false);
    if (ok && find_used(cache))
        atomic_fetch_add(&cache->gpu->epoch, 1); /* captured graphs contain the former ids */
    if (ok)
        fill_numbers(cache, numbers, numbers + cache->n_blocks);
    ok = ok && kvp_cu_ok(kvp_cu.copy_in((cu_address)(uintptr_t)ranges->numbers.at, numbers, bytes,
                                        stream),
                         "copying");
    ranges->changed = !ok;
    return ok;
}

bool kvp_gpu_has_transforms(const kvp_gpu_cells *keys)
{
    return keys->further_made != 0 || (keys->rope.size != 0 && keys->cache->ranges.moved);
}

size_t kvp_gpu_runs(const kvp_gpu_cells *keys)
{
    return kvp_gpu_has_transforms(keys) ? keys->cache->ranges.n_runs : 1;
}

uint32_t kvp_gpu_matrices(const kvp_gpu_cells *keys)
{
    return kvp_gpu_has_transforms(keys) ? keys->cache->ranges.n : 1;
}

uint32_t kvp_gpu_transform_at(const kvp_gpu_cells *keys, uint32_t number)
{
    return kvp_gpu_has_transforms(keys) ? keys->cache->ranges.used[number] : 0;
}

/* Runs */

int64_t kvp_gpu_block_at(const kvp_gpu_cache *cache, bool open, size_t number)
{
    return open ? cache->pages[number].block : (int64_t)number;
}

static uint32_t transform_of_block(const kvp_gpu_cells *cells, bool open, size_t block)
{
    const int64_t at = kvp_gpu_block_at(cells->cache, open, block);

    return at >= 0 ? cells->cache->ranges.of[at] : 0;
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
    const uint8_t *of = cache->ranges.of;
    /* a row without a cell (-1) fits any run */
    kvp_gpu_run run = { first, 1, of[numbers[first] / KVANT_PAGE_TOKENS] };

    while (first + run.n < n && of[numbers[first + run.n] / KVANT_PAGE_TOKENS] == run.transform)
        run.n++;
    return run;
}

void kvp_gpu_ranges_copy(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n)
{
    memmove(cache->ranges.of + to, cache->ranges.of + first, n);
    for (uint32_t i = 0; i < n; i++) /* blocks of two streams do not overlap */
        kvp_gpu_centers_copy(cache, first + i, to + i);
    cache->ranges.changed = true;
}

/* Life */

void kvp_gpu_ranges_forget(kvp_gpu_cache *cache)
{
    kvp_gpu_ranges *ranges = &cache->ranges;

    memset(ranges->of, 0, cache->n_blocks);
    for (uint32_t id = 0; id < KVP_MOST_TRANSFORMS; id++)
        ranges->lineages[id] = (kvp_gpu_lineage){ id < KVP_MOST_RANGES ? id : 0, 0 };
    ranges->moved = ranges->plain = false;
    ranges->made = 1;
    ranges->position = -1;
    ranges->asked = 0;
    ranges->ended = false;
    ranges->n = 1;
    ranges->used[0] = 0;
    kvp_gpu_centers_forget(cache);
    ranges->n_last = 0;
    ranges->changed = true;
}

void kvp_gpu_ranges_free(kvp_gpu_cache *cache)
{
    kvp_gpu_release(&cache->ranges.numbers);
    kvp_gpu_centers_free(cache);
    free(cache->ranges.of);
    free(cache->ranges.host);
    free(cache->ranges.runs);
    free(cache->ranges.last);
}
