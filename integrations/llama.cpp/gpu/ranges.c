/* ranges.c - a matrix for each range of positions (transform=first).
 *
 * RoPE goes on turning keys. The first matrix is a compromise for all positions, and the only one of the first ones. Later ranges get
 * matrices of their own from the same sums (kvant_tensor_make_range_codecs). Threads make one when its range is reached; it is in force 1024
 * rows later, when they are done, so results depend on no clock. A block has the matrix of its first row's position for all of its rows, and
 * keeps it until all of them are written anew.
 *
 * Attention on blocks of several matrices is that on several parts, which are merged. A part's blocks are numbered from its first one on:
 * a single sequence's parts lie one behind the other, and take no longer than the whole. */
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../log.h"

#define LATE 1024 /* rows of a range that are stored before its matrix is in force */

/* Where ranges begin: each one more costs attention a part, so the first two octaves share a matrix. */
static const int32_t first_positions[KVP_MOST_RANGES + 1] = { 0, KVP_FIRST_RANGE, 8192, 16384, 32768, 65536, 131072, 262144 };

/* Whose matrix a row gets. */
static uint32_t range_of(int32_t position)
{
    uint32_t range = 0;

    while (range + 1 < KVP_MOST_RANGES && position >= first_positions[range + 1] + LATE)
        range++;
    return range;
}

static int32_t last_position(const kvp_gpu_step *step)
{
    int32_t last = -1;

    for (size_t i = 0; i < step->n && step->positions != NULL; i++)
        last = step->positions[i] > last ? step->positions[i] : last;
    return last;
}

/* Matrices */

/* Rows that take another matrix have all the first one; and little is known before enough was learnt. */
static void ask(kvp_gpu_cache *cache, int32_t last)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    const uint32_t range = last >= 0 ? range_of(last + LATE) : 0;
    bool any = false;

    if (ranges->asked > 0 || ranges->ended || cache->weighing || (ranges->made >> range & 1) || cache->n_streams > KVP_MOST_STREAMS)
        return;
    for (size_t i = 0; i < cache->n_tensors; i++)
        any = kvp_gpu_learner_ask(cache->tensors[i]->cells, range, first_positions[range], first_positions[range + 1] - 1) || any;
    ranges->asked = any ? range : 0;
    ranges->ended = !any;
    ranges->since = 0;
}

/* Attention needs open pages where parts have holes. */
static bool have_pages(const kvp_gpu_cache *cache)
{
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors && ok; i++)
        ok = kvp_gpu_have_pages(cache->tensors[i], cache->n_pages);
    return ok;
}

/* Those that threads made come in force, in all layers or in none. */
static void take_asked(kvp_gpu_cache *cache)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    bool all = true;

    for (size_t i = 0; i < cache->n_tensors; i++)
        all = kvp_gpu_learner_answer(cache->tensors[i]->cells) && all;
    if (all && have_pages(cache))
        ranges->made |= 1u << ranges->asked;
    else
        kvp_note("%s: keys at position %d and later share the matrices of those before", cache->gpu->name, first_positions[ranges->asked]);
    ranges->ended = !(ranges->made >> ranges->asked & 1);
    ranges->asked = 0;
}

/* Blocks */

/* -sm tensor: a step is several graphs. */
static bool is_last(const kvp_gpu_ranges *ranges, const kvp_gpu_step *step)
{
    return ranges->n_last == step->n && kvp_gpu_cells_end_with(ranges->last, ranges->n_last, step);
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

/* How many of a step's cells from the i-th on are in its block. */
static size_t rows_of_block(const kvp_gpu_step *step, size_t i)
{
    const int64_t block = step->cells[i] / KVANT_PAGE_TOKENS;
    size_t n = 1;

    while (i + n < step->n && step->cells[i + n] / KVANT_PAGE_TOKENS == block)
        n++;
    return n;
}

/* Blocks that had no rows, or whose rows are all written, get the matrix of a row's position, or the last one before it. */
static void assign(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_ranges *ranges = &cache->ranges;

    for (size_t i = 0, n; i < step->n; i += n) {
        const size_t block = (size_t)(step->cells[i] / KVANT_PAGE_TOKENS);
        uint32_t range = step->positions != NULL ? range_of(step->positions[i]) : 0;
        n = rows_of_block(step, i);
        while (!(ranges->made >> range & 1))
            range--;
        ranges->changed = ranges->changed || !cache->held[block];
        if ((cache->held[block] && n < KVANT_PAGE_TOKENS) || ranges->of[block] == range)
            continue;
        ranges->of[block] = (uint8_t)range;
        ranges->changed = true;
    }
}

/* Captured graphs know the runs of their batch. */
static void list_runs(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    size_t n_runs = 0;
    bool other = false;
    kvp_gpu_run run;

    for (size_t i = 0; i < step->n; i += run.n) {
        const kvp_gpu_run *former = &ranges->runs[n_runs];
        run = kvp_gpu_run_of_cells(cache, step->cells, i, step->n);
        other = other || n_runs >= ranges->n_runs || former->first != i || former->range != run.range;
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

    if (!cache->weighs || is_last(ranges, step))
        return true; /* keys that learn nothing have one matrix, or none */
    last = last_position(step);
    if (ranges->asked > 0 && ranges->since >= LATE && range_of(last) >= ranges->asked)
        take_asked(cache);
    ask(cache, last);
    if (!note_last(ranges, step))
        return false;
    ranges->since += step->n;
    assign(cache, step);
    list_runs(cache, step);
    return true;
}

/* Parts */

/* The blocks of a range that have rows; false: there are none. */
static bool find_spans(const kvp_gpu_cache *cache, uint32_t range, struct kvp_gpu_part *part)
{
    const uint32_t n_blocks = cache->n_blocks / cache->n_streams;
    bool any = false;

    *part = (struct kvp_gpu_part){ .range = range };
    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        struct kvp_gpu_span *span = &part->spans[block / n_blocks];
        const uint32_t at = block % n_blocks;
        if (!cache->held[block] || cache->ranges.of[block] != range)
            continue;
        span->first = span->end > 0 ? span->first : at;
        span->end = at + 1;
        any = true;
    }
    return any;
}

/* What captured graphs know of parts. */
static bool alike(const struct kvp_gpu_part *a, const struct kvp_gpu_part *b, uint32_t n_streams)
{
    bool same = a->range == b->range;

    for (uint32_t s = 0; s < n_streams && same; s++)
        same = a->spans[s].first == b->spans[s].first;
    return same;
}

static void find_parts(kvp_gpu_cache *cache)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    struct kvp_gpu_part former;
    uint32_t n = 0;
    bool other = false;

    for (uint32_t range = 0; range < KVP_MOST_RANGES; range++) {
        former = ranges->parts[n];
        if (!(ranges->made >> range & 1) || !find_spans(cache, range, &ranges->parts[n]))
            continue;
        other = other || n >= ranges->n_parts || !alike(&former, &ranges->parts[n], cache->n_streams);
        n++;
    }
    if (other || n != ranges->n_parts)
        atomic_fetch_add(&cache->gpu->epoch, 1);
    ranges->n_parts = n;
}

static int32_t entry_of(const kvp_gpu_cache *cache, uint32_t block, uint32_t range)
{
    if (!cache->held[block] || cache->ranges.of[block] != range)
        return KVANT_CUDA_NO_BLOCK;
    return cache->table != NULL ? cache->table[block] : (int32_t)block;
}

static void fill_tables(const kvp_gpu_cache *cache, int32_t *tables)
{
    const uint32_t n_blocks = cache->n_blocks / cache->n_streams;

    for (uint32_t i = 0; i < cache->ranges.n_parts; i++)
        for (uint32_t s = 0; s < cache->n_streams; s++)
            for (uint32_t j = 0; j < n_blocks; j++, tables++) {
                const struct kvp_gpu_part *part = &cache->ranges.parts[i];
                const uint32_t at = part->spans[s].first + j;
                *tables = at < part->spans[s].end ? entry_of(cache, s * n_blocks + at, part->range) : KVANT_CUDA_NO_BLOCK;
            }
}

bool kvp_gpu_ranges_bring(kvp_gpu_cache *cache, cu_stream stream)
{
    kvp_gpu_ranges *ranges = &cache->ranges;
    const void *former = ranges->tables.at;
    int32_t *tables;
    size_t bytes;
    bool ok;

    if (!ranges->changed || ranges->made == 1)
        return true;
    find_parts(cache);
    bytes = (size_t)ranges->n_parts * cache->n_blocks * sizeof(*tables);
    tables = malloc(bytes + 1);
    ok = tables != NULL && kvp_gpu_grow(cache->gpu, &ranges->tables, bytes, false);
    if (ranges->tables.at != former)
        atomic_fetch_add(&cache->gpu->epoch, 1); /* captured graphs read the former ones */
    if (ok)
        fill_tables(cache, tables);
    ok = ok && kvp_cu_ok(kvp_cu.copy_in((cu_address)(uintptr_t)ranges->tables.at, tables, bytes, stream), "copying");
    ranges->changed = !ok;
    free(tables);
    return ok;
}

size_t kvp_gpu_runs(const kvp_gpu_cells *keys)
{
    return keys->further_made != 0 ? keys->cache->ranges.n_runs : 1;
}

uint32_t kvp_gpu_parts(const kvp_gpu_cells *keys)
{
    const kvp_gpu_ranges *ranges = &keys->cache->ranges;

    return keys->further_made != 0 && ranges->n_parts > 1 ? ranges->n_parts : 1;
}

kvp_gpu_matrix kvp_gpu_part_matrix(const kvp_gpu_cells *keys, uint32_t part)
{
    return kvp_gpu_matrix_of(keys, keys->cache->ranges.n_parts > 0 ? keys->cache->ranges.parts[part].range : 0);
}

int32_t kvp_gpu_part_length(const kvp_gpu_cache *cache, uint32_t part, size_t stream, size_t n_cells, size_t n_rows, bool plain, bool *causal)
{
    const struct kvp_gpu_span *span = &cache->ranges.parts[part].spans[stream];
    const size_t first = (size_t)span->first * KVANT_PAGE_TOKENS, end = (size_t)span->end * KVANT_PAGE_TOKENS;
    const size_t seen_by_all = plain ? n_cells - n_rows + 1 : n_cells;

    *causal = plain && n_rows > 1 && end > seen_by_all;
    if (*causal || end > n_cells)
        return (int32_t)(n_cells > first ? n_cells - first : 0);
    return (int32_t)(end - first);
}

const int32_t *kvp_gpu_part_table(const kvp_gpu_cache *cache, uint32_t part, size_t stream)
{
    return (const int32_t *)cache->ranges.tables.at + ((size_t)part * cache->n_streams + stream) * (cache->n_blocks / cache->n_streams);
}

/* Runs */

static uint32_t range_of_block(const kvp_gpu_cells *cells, bool open, size_t block)
{
    const kvp_gpu_cache *cache = cells->cache;
    const int64_t at = open ? cache->pages[block].block : (int64_t)block;

    return at >= 0 ? cache->ranges.of[at] : 0;
}

kvp_gpu_run kvp_gpu_run_of_blocks(const kvp_gpu_cells *cells, bool open, size_t first, size_t n)
{
    kvp_gpu_run run = { first, 1, range_of_block(cells, open, first) };

    while (run.n < n && range_of_block(cells, open, first + run.n) == run.range)
        run.n++;
    return run;
}

kvp_gpu_run kvp_gpu_run_of_cells(const kvp_gpu_cache *cache, const int64_t *numbers, size_t first, size_t n)
{
    const uint8_t *of = cache->ranges.of;
    kvp_gpu_run run = { first, 1, of[numbers[first] / KVANT_PAGE_TOKENS] };

    while (first + run.n < n && of[numbers[first + run.n] / KVANT_PAGE_TOKENS] == run.range)
        run.n++;
    return run;
}

void kvp_gpu_ranges_copy(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n)
{
    memmove(cache->ranges.of + to, cache->ranges.of + first, n);
    cache->ranges.changed = true;
}

/* Life */

void kvp_gpu_ranges_forget(kvp_gpu_cache *cache)
{
    kvp_gpu_ranges *ranges = &cache->ranges;

    memset(ranges->of, 0, cache->n_blocks);
    ranges->made = 1;
    ranges->asked = 0;
    ranges->ended = false;
    ranges->n_parts = 0;
    ranges->n_last = 0;
    ranges->changed = true;
}

void kvp_gpu_ranges_free(kvp_gpu_cache *cache)
{
    kvp_gpu_release(&cache->ranges.tables);
    free(cache->ranges.of);
    free(cache->ranges.runs);
    free(cache->ranges.last);
}
