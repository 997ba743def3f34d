/* decoded.c - matrices from tokens that are decoded (transform=first), where prompts were too short for them.
 *
 * Steps of few tokens are captured graphs, which nobody watches. Their keys are read when a block is full, from its open page. Their
 * queries are copied by the graphs themselves, always to the same place; every few steps the host keeps what is there. Of a step that is
 * its first token's, so that several sequences cost no more.
 *
 * Rows behave as those of batches do (weigh.c): threads learn from the first block alone if there is nothing else, later from LEARN_ROWS,
 * and copies of the rows stay as long as rows may take another matrix. It is in force KVP_LATE_STEPS later, or when a batch comes. So
 * results depend on no clock, and not on who reads rows meanwhile.
 *
 * Some caches learn from batches alone: those without open pages or positions, and without the model's first layer, whose values tell
 * whether tokens are too much alike (the second GPU's, one of two of a model with a sliding window). Blocks that hold rows of batches,
 * are mostly sinks, or are monotonous are left out; after many monotonous ones nothing is learnt from decoded tokens any more. */
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../log.h"

#define LEARN_ROWS 256u     /* a matrix of fewer might be of a passage, and all rows would take it */
#define FLUSHED_ROWS 128u   /* before a batch so many are learnt from */
#define LEAST_DIFFERENT 4u  /* tokens: one in so many rows. Text has twice as many */
#define MOST_MONOTONOUS 64u /* blocks */
#define LEAST_ASKED (KVP_MOST_ASKED / 2)

static bool learns(const kvp_gpu_cells *cells)
{
    return cells->weighs && !cells->weighed && cells->learner != NULL;
}

/* Keys that are learnt from, with their queries; NULL: others. */
static kvp_gpu_cells *asked(const kvp_gpu_cache *cache, size_t tensor)
{
    kvp_gpu_cells *cells = cache->tensors[tensor]->cells;

    return cells->asked && learns(cells) ? cells : NULL;
}

/* No batch was long enough for a matrix. */
static bool is_first(const kvp_gpu_cache *cache)
{
    return cache->plain.n - cache->decoded.n < KVP_LEARN_ROWS;
}

/* Rows that no thread saw are like those that nobody learns from: there is no copy of them. */
static void drop_rows(kvp_gpu_cache *cache)
{
    cache->plain.n -= cache->weighing ? cache->decoded.n : 0; /* else there are none any more */
    cache->decoded.n = cache->decoded.n_different = 0;
}

/* Queries */

/* Copies that stand in captured graphs come, or go. */
static void set_asks(kvp_gpu_cache *cache, bool asks)
{
    if (cache->decoded.asks == asks)
        return;
    cache->decoded.asks = asks;
    atomic_fetch_add(&cache->gpu->epoch, 1);
    if (asks)
        return;
    drop_rows(cache);
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (cells->asked && cells->learner != NULL)
            kvp_gpu_learner_finish(cells->learner); /* threads read there */
        cells->asked = false;
    }
    kvp_gpu_release(&cache->decoded.asked); /* waits for the GPU */
}

static bool have_event(kvp_gpu_decoded *d)
{
    return d->ready != NULL || kvp_cu_ok(kvp_cu.event_new(&d->ready, CU_NO_TIMING | CU_EVENT_SLEEPS), "an event");
}

/* Memory for queries and keys of all layers. False: there is too little, which ends it, or graphs did not show yet how much it is. */
static bool have_asked(kvp_gpu_cache *cache)
{
    kvp_gpu_decoded *d = &cache->decoded;
    size_t n = 0, row = 0, width = 0;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (!learns(cells))
            continue;
        if (cells->asked_row == 0)
            return false;
        row = cells->asked_row > row ? cells->asked_row : row;
        width = kvp_gpu_width(cells) > width ? kvp_gpu_width(cells) : width;
        n++;
    }
    d->row = row;
    d->pitch = (1 + KVP_MOST_ASKED) * row + LEARN_ROWS * width * sizeof(float);
    d->ended = n == 0 || !have_event(d) || !kvp_gpu_have_copying(cache->gpu) || !kvp_gpu_are_few(cache->gpu, n * d->pitch) ||
               !kvp_gpu_grow(cache->gpu, &d->asked, n * d->pitch, true);
    if (d->ended)
        return false;
    d->n_layers = 0;
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        cells->asked = learns(cells);
        cells->asked_first = d->n_layers * d->pitch;
        d->n_layers += cells->asked;
    }
    return true;
}

/* Queries of the step before, of all layers; none while threads may still fetch others. */
static bool keep_asked(kvp_gpu_cache *cache)
{
    kvp_gpu_decoded *d = &cache->decoded;
    const uint32_t often = (is_first(cache) ? KVANT_PAGE_TOKENS : LEARN_ROWS) / KVP_MOST_ASKED;
    const cu_address at = (cu_address)(uintptr_t)d->asked.at;
    const cu_copy_2d rows = { .from_type = CU_MEMORY_DEVICE,
                              .from_device = at,
                              .from_pitch = d->pitch,
                              .to_type = CU_MEMORY_DEVICE,
                              .to_device = at + (1 + d->n_asked) * d->row,
                              .to_pitch = d->pitch,
                              .width = d->row,
                              .height = d->n_layers };

    if (d->place < 0 || d->pends || d->n_steps++ % often != 0 || d->n_asked == KVP_MOST_ASKED)
        return true;
    d->places[d->n_asked++] = d->place;
    return kvp_cu_ok(kvp_cu.copy_2d(&rows, cache->gpu->stream), "copying");
}

bool kvp_gpu_decoded_ask(const kvp_gpu *gpu, const abi_tensor *node)
{
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node->src[1]);
    const abi_tensor *q = node->src[0];
    cu_address to;

    if (!cells->weighs || cells->weighed || q->ne[1] * q->ne[3] > KVP_FEW_TOKENS || q->nb[2] != cells->head_dim * sizeof(float))
        return true;
    cells->asked_row = (size_t)q->ne[2] * q->nb[2];
    to = (cu_address)(uintptr_t)cells->cache->decoded.asked.at + cells->asked_first;
    return !cells->asked ||
           kvp_cu_ok(kvp_cu.copy_within(to, (cu_address)(uintptr_t)q->data, cells->asked_row, gpu->stream), "copying");
}

/* Rows */

void kvp_gpu_decoded_tell(const abi_tensor *node)
{
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node);

    if (node->src[0]->ne[1] <= KVP_FEW_TOKENS && cells->weighs && !cells->weighed && cells->learner != NULL && !cells->learner->told &&
        cells->cache->decoded.positions != NULL && kvp_gpu_learner_of(cells) != NULL)
        kvp_gpu_learner_tell(cells->learner, kvp_kv_of(node), node->src[0]);
}

void kvp_gpu_decoded_note(kvp_gpu_cache *cache, const kvp_gpu_step *step, const int64_t *slots)
{
    int32_t *positions = cache->decoded.positions;

    for (size_t i = 0; i < step->n && positions != NULL; i++) {
        const uint64_t bit = (uint64_t)1 << (step->cells[i] % KVANT_PAGE_TOKENS);
        kvp_open_page *page = slots[i] >= 0 ? &cache->pages[slots[i] / KVANT_PAGE_TOKENS] : NULL;
        if (page == NULL)
            continue;
        page->few = kvp_gpu_is_few(step) && step->positions != NULL ? page->few | bit : page->few & ~bit;
        if (page->few & bit)
            positions[step->cells[i]] = step->positions[i];
    }
}

/* A page whose 64 rows came in steps of few tokens, or -1. */
static int64_t full_page(const kvp_gpu_cache *cache)
{
    for (uint32_t i = 0; i < cache->n_pages; i++)
        if (cache->pages[i].block != KVP_NO_PAGE && cache->pages[i].few == ~(uint64_t)0)
            return i;
    return -1;
}

/* The values of the model's first layer: there a token's value is of the token alone, or nearly so. NULL: another cache has them. */
static const kvp_gpu_cells *first_values(const kvp_gpu_cache *cache)
{
    for (size_t i = 0; i < cache->n_tensors; i++)
        if (cache->tensors[i]->shape.role == KVANT_ROLE_V && kvp_kv_is_first(cache->tensors[i]))
            return cache->tensors[i]->cells;
    return NULL;
}

/* Whether one of the tokens before had nearly the same signs. */
static bool was_there(const kvp_gpu_decoded *d, const char *signs, size_t n)
{
    for (size_t i = 0; i < d->n_different; i++) {
        size_t differ = 0;
        for (size_t j = 0; j < n; j++)
            differ += d->signs[i * KVP_KIND_NUMBERS + j] != signs[j];
        if (differ <= n / 8)
            return true;
    }
    return false;
}

static void count_different(kvp_gpu_decoded *d, const float *rows, size_t width)
{
    const size_t n = width < KVP_KIND_NUMBERS ? width : KVP_KIND_NUMBERS;

    for (size_t i = 0; i < KVANT_PAGE_TOKENS; i++) {
        char *signs = d->signs + d->n_different * KVP_KIND_NUMBERS;
        for (size_t j = 0; j < n; j++)
            signs[j] = rows[i * width + j] < 0;
        d->n_different += !was_there(d, signs, n);
    }
}

/* Whether a block is one more of those that are learnt from. Of a text that goes round in circles each block may have enough different
 * tokens, of which later ones bring none. */
static bool is_varied(kvp_gpu_cache *cache, uint32_t page, bool *varied)
{
    kvp_gpu_decoded *d = &cache->decoded;
    const kvp_gpu_cells *values = first_values(cache);
    const size_t before = d->n_different, width = kvp_gpu_width(values);
    float *rows = malloc(KVANT_PAGE_TOKENS * width * sizeof(*rows));
    const bool ok = rows != NULL && kvp_gpu_fetch_block(values, true, page, rows);

    if (d->signs == NULL)
        d->signs = malloc((LEARN_ROWS + 1) * KVP_KIND_NUMBERS);
    if (ok && d->signs != NULL)
        count_different(d, rows, width);
    *varied = d->n_different * LEAST_DIFFERENT >= d->n + KVANT_PAGE_TOKENS;
    if (!*varied)
        d->n_different = before;
    free(rows);
    return ok;
}

static bool has_learnt_rows(const kvp_gpu_cache *cache, const int32_t *positions)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
        n += positions[i] >= (int32_t)cache->sink_tokens;
    return n >= KVANT_PAGE_TOKENS / 2;
}

/* A layer has in GPU memory, until its thread fetches them: queries of a token, of KVP_MOST_ASKED of those before, and keys of LEARN_ROWS
 * rows. */
static char *place_of(const kvp_gpu_cells *cells, size_t offset)
{
    return (char *)cells->cache->decoded.asked.at + cells->asked_first + offset;
}

static float *keys_of(const kvp_gpu_cells *cells, size_t first)
{
    return (float *)(void *)place_of(cells, (1 + KVP_MOST_ASKED) * cells->cache->decoded.row) + first * kvp_gpu_width(cells);
}

/* Copies of a block's keys. */
static bool keep_block(kvp_gpu_cache *cache, uint32_t page)
{
    const int64_t first = (int64_t)cache->pages[page].block * KVANT_PAGE_TOKENS;
    int64_t cells[KVANT_PAGE_TOKENS];
    bool ok;

    for (int64_t i = 0; i < KVANT_PAGE_TOKENS; i++)
        cells[i] = first + i;
    ok = kvp_gpu_weigh_add(cache, &(kvp_gpu_step){ cells, cache->decoded.positions + first, KVANT_PAGE_TOKENS });
    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        kvp_gpu_cells *of = asked(cache, i);
        ok = of == NULL || kvp_gpu_decode_blocks(of, true, page, 1, keys_of(of, cache->decoded.n)) == KVANT_OK;
    }
    cache->decoded.n += KVANT_PAGE_TOKENS;
    return ok;
}

static bool take_block(kvp_gpu_cache *cache, uint32_t page)
{
    kvp_gpu_decoded *d = &cache->decoded;
    bool varied;

    cache->pages[page].few = 0;
    if (!has_learnt_rows(cache, d->positions + (size_t)cache->pages[page].block * KVANT_PAGE_TOKENS))
        return true;
    if (!is_varied(cache, page, &varied))
        return false;
    if (varied)
        return keep_block(cache, page);
    d->ended = ++d->n_monotonous == MOST_MONOTONOUS;
    d->n_asked = 0; /* some of these tokens asked */
    return true;
}

/* Threads */

static bool learn(kvp_gpu_cells *cells)
{
    const kvp_gpu_decoded *d = &cells->cache->decoded;
    const size_t head = cells->head_dim * sizeof(float), row = kvp_gpu_width(cells) * sizeof(float);
    const abi_tensor keys = { .type = ABI_TYPE_F32,
                              .ne = { (int64_t)kvp_gpu_width(cells), (int64_t)d->n, 1, 1 },
                              .nb = { sizeof(float), row, d->n * row, d->n * row },
                              .data = keys_of(cells, 0) };
    const abi_tensor queries = { .type = ABI_TYPE_F32,
                                 .ne = { cells->head_dim, d->n_asked, (int64_t)(cells->asked_row / head), 1 },
                                 .nb = { sizeof(float), d->row, head, d->n_asked * d->row },
                                 .data = place_of(cells, d->row) };

    return kvp_gpu_learner_learn(cells, &keys, &queries, d->places, d->ready);
}

static bool start(kvp_gpu_cache *cache)
{
    kvp_gpu_decoded *d = &cache->decoded;
    bool ok = kvp_cu_ok(kvp_cu.event_record(d->ready, cache->gpu->stream), "copying");

    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        kvp_gpu_cells *cells = asked(cache, i);
        ok = cells == NULL || learn(cells);
    }
    d->n = d->n_different = d->n_asked = 0;
    return ok;
}

/* Before a graph */

static bool failed(const kvp_gpu_cache *cache)
{
    kvp_error("%s: no matrix can be learnt from decoded tokens", cache->gpu->name);
    return false;
}

bool kvp_gpu_decoded_end(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_decoded *d = &cache->decoded;

    if (d->positions == NULL || kvp_gpu_ranges_saw(cache, step))
        return true;
    if (d->pends && (!kvp_gpu_is_few(step) || ++d->n_late == KVP_LATE_STEPS))
        d->pends = false;
    if (kvp_gpu_is_few(step))
        return true;
    if (d->n >= FLUSHED_ROWS && d->n_asked >= LEAST_ASKED && !start(cache))
        return failed(cache);
    drop_rows(cache);
    d->place = -1; /* threads may still fetch queries from where the last ones would go */
    return true;
}

static bool is_due(const kvp_gpu_cache *cache)
{
    const size_t n = cache->decoded.n;

    return n > 0 && cache->decoded.n_asked >= LEAST_ASKED && (is_first(cache) || n >= LEARN_ROWS || cache->plain.n >= KVP_ENOUGH_ROWS);
}

/* A block, and threads if there are enough of them. */
static bool take_rows(kvp_gpu_cache *cache)
{
    const int64_t page = cache->decoded.n < LEARN_ROWS ? full_page(cache) : -1;

    if (page >= 0 && !take_block(cache, (uint32_t)page))
        return false;
    if (!is_due(cache))
        return true;
    cache->decoded.pends = true;
    cache->decoded.n_late = 0;
    return start(cache);
}

bool kvp_gpu_decoded_take(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    kvp_gpu_decoded *d = &cache->decoded;
    const bool may = cache->weighing && cache->keeps && !d->ended && first_values(cache) != NULL &&
                     !cache->in_place; /* some tensors have no pages yet */

    if (d->positions == NULL || kvp_gpu_ranges_saw(cache, step))
        return true;
    if (d->asks && !keep_asked(cache))
        return failed(cache);
    if (!may || kvp_gpu_is_few(step))
        set_asks(cache, may && (d->asks || have_asked(cache)));
    d->place = d->asks && kvp_gpu_is_few(step) && step->positions != NULL ? step->positions[0] : -1;
    if (!d->asks || !kvp_gpu_is_few(step) || cache->waiting || d->pends)
        return true;
    return take_rows(cache) || failed(cache);
}

/* Life */

void kvp_gpu_decoded_forget(kvp_gpu_cache *cache)
{
    kvp_gpu_decoded *d = &cache->decoded;

    set_asks(cache, false);
    d->n_monotonous = d->n_asked = d->n_steps = 0;
    d->place = -1;
    d->pends = d->ended = false;
}

void kvp_gpu_decoded_free(kvp_gpu_cache *cache)
{
    kvp_gpu_release(&cache->decoded.asked);
    if (cache->decoded.ready != NULL)
        kvp_cu.event_free(cache->decoded.ready);
    free(cache->decoded.positions);
    free(cache->decoded.signs);
}
