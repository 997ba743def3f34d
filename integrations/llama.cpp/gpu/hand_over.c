/* hand_over.c - rows go from llama.cpp's f16 layout to compressed pages (in_place.h).
 *
 * Matrices are made of these rows, and of queries that prompts had, by threads that begin before
 * there is no room left; the hand-over waits for them. Then a tensor's rows are copied beside,
 * its memory is cleared, and they are stored as rows of a batch are, with their positions. */
#include "in_place.h"
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

#define CHUNK ((size_t)2048) /* rows that are stored by one launch */
#define STEP ((size_t)512)   /* rows whose blocks get a transform at once */

/* Learning */

static bool is_learning(const kvp_gpu_cells *cells)
{
    return cells->weighs && !cells->weighed;
}

static const abi_tensor *rows_for(const kvp_kv *kv, const abi_graph *graph)
{
    for (int i = 0; i < graph->n_nodes; i++)
        if (graph->nodes[i]->op == kvp_api.op.set_rows && kvp_kv_of(graph->nodes[i]) == kv)
            return graph->nodes[i]->src[0];
    return NULL;
}

static bool learn(kvp_kv *kv, const abi_tensor *rows, size_t n)
{
    kvp_gpu_cells *cells = kv->cells;
    const struct kvp_gpu_place *place = cells->cache->place;
    kvp_gpu_learner *l = kvp_gpu_learner_of(cells);
    const size_t batches = place->n_asked < KVP_ASKED_BATCHES ? place->n_asked : KVP_ASKED_BATCHES;
    const size_t head = cells->head_dim * sizeof(float), row = kvp_kv_row_bytes(kv);
    const size_t n_asked = batches * KVP_ASKED_TOKENS;
    const abi_tensor keys = { .type = ABI_TYPE_F16,
                              .ne = { kv->shape.row, (int64_t)n, 1, 1 },
                              .nb = { sizeof(uint16_t), row, n * row, n * row },
                              .data = kv->memory };
    const abi_tensor queries = { .type = ABI_TYPE_F32,
                                 .ne = { cells->head_dim, (int64_t)n_asked,
                                         (int64_t)(place->asked_row / head), 1 },
                                 .nb = { sizeof(float), place->asked_row, head,
                                         n_asked * place->asked_row },
                                 .data = kvp_gpu_place_queries(cells) };

    if (l == NULL)
        return false;
    kvp_gpu_learner_tell(l, kv, rows);
    return kvp_gpu_learner_learn(cells, &keys, &queries, place->asked_positions, place->ready);
}

/* Of the first rows. They are in no list of rows that have copies: they are stored when there is
 * a matrix. */
static bool add_first(kvp_gpu_cache *cache, size_t n)
{
    int64_t *cells = malloc((n + 1) * sizeof(*cells));
    bool ok = cells != NULL;

    for (size_t i = 0; i < n && ok; i++)
        cells[i] = (int64_t)i;
    ok = ok && kvp_gpu_weigh_add(cache, &(kvp_gpu_step){ cells, cache->place->positions, n });
    free(cells);
    return ok;
}

void kvp_gpu_place_learn(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph, size_t n)
{
    struct kvp_gpu_place *place = cache->place;
    bool ok = place->ready != NULL ||
              kvp_cu_ok(kvp_cu.event_new(&place->ready, CU_NO_TIMING | CU_EVENT_SLEEPS),
                        "an event");

    n = n < KVP_ENOUGH_ROWS ? n : KVP_ENOUGH_ROWS;
    place->learns = true;
    if (!cache->weighing || cache->plain.n > 0)
        return;
    kvp_gpu_follow(b);
    ok = ok && kvp_gpu_have_copying(cache->gpu) && add_first(cache, n) &&
         kvp_cu_ok(kvp_cu.event_record(place->ready, cache->gpu->stream), "copying");
    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        const abi_tensor *rows = is_learning(cells) ? rows_for(cache->tensors[i], graph) : NULL;
        ok = rows == NULL || learn(cache->tensors[i], rows, n);
    }
    for (size_t i = 0; i < cache->plain.n; i++)
        cache->plain.cells[i] = -1;
    cache->plain.last = 0;
    if (!ok)
        kvp_error("%s: no matrix can be learnt from the first rows", cache->gpu->name);
}

/* Centre and scale of a tensor, from its first rows. Where there are none rows of later batches
 * bring none: these here would be decoded with it. */
static bool learn_affine(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;
    const size_t all = cells->cache->place->n, n = all < STEP ? all : STEP;
    int64_t numbers[STEP];
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

/* What cannot be learnt is left out, with a line. */
static void settle(kvp_gpu_cache *cache)
{
    size_t without = 0;

    for (size_t i = 0; i < cache->n_tensors; i++)
        if (!kvp_gpu_weigh_join(cache->tensors[i]))
            kvp_gpu_unlearn(cache->tensors[i]->cells);
    for (size_t i = 0; i < cache->n_tensors; i++)
        without += !learn_affine(cache->tensors[i]);
    if (without > 0)
        kvp_error("%s: no centre could be learnt from the first rows of %zu tensors, which are "
                  "stored without one",
                  cache->gpu->name, without);
}

/* Storing */

/* Blocks get transforms and centres by their rows' positions, and open pages where rows stay
 * exact, as if these rows came in batches. No row is stored yet. */
static bool plan_step(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    bool ok = kvp_gpu_ranges_prepare(cache, step) &&
              kvp_gpu_open_written(cache->tensors[0], step->cells, step->n, cache->gpu->stream);

    for (size_t i = 0; i < step->n && ok; i++)
        kvp_gpu_cache_holds(cache, step->cells[i]);
    return ok;
}

static bool plan(kvp_gpu_cache *cache)
{
    const struct kvp_gpu_place *place = cache->place;
    int64_t cells[STEP];
    int32_t positions[STEP];
    bool ok = true;

    cache->planner = NULL;
    cache->planned_last = -2; /* a sequence begins */
    for (size_t i = 0; i < place->n && ok;) {
        kvp_gpu_step step = { .cells = cells };
        bool known = true;
        for (; i < place->n && step.n < STEP; i++) {
            if (place->positions[i] == KVP_NO_ROW)
                continue;
            known = known && place->positions[i] >= 0;
            cells[step.n] = (int64_t)i;
            positions[step.n++] = place->positions[i];
        }
        step.positions = known ? positions : NULL;
        ok = step.n == 0 || plan_step(cache, &step);
    }
    return ok && kvp_gpu_ranges_bring(cache, cache->gpu->stream);
}

/* Where rows are while they are stored: a tensor's as they were, and some of them about their
 * centres. */
typedef struct beside {
    uint16_t *halves;
    float *centered;
    /* by cell: of sealed pages, which is the cell itself, and of open ones; or -1 */
    int64_t *slots[2];
} beside;

static void fill_args(const kvp_gpu_cells *cells, const beside *at, size_t first, size_t n,
                      kvant_cuda_append_args *args)
{
    *args = (kvant_cuda_append_args){ .size = sizeof(*args),
                                      .type = cells->turns ? KVANT_CUDA_F32 : KVANT_CUDA_F16,
                                      .n_tokens = (uint32_t)n,
                                      .n_kv_heads = cells->n_kv_heads,
                                      .refused = kvp_gpu_word(cells->gpu->refused),
                                      .marks = cells->cache->marks.memory.at,
                                      .mark_numbers = at->slots[0] + first };
}

/* Whether some of n rows from the first-th cell on go to open pages, too. */
static bool has_open_blocks(const kvp_gpu_cache *cache, size_t first, size_t n)
{
    for (size_t cell = first; cell < first + n; cell += KVANT_PAGE_TOKENS)
        if (kvp_gpu_page_of(cache, (int64_t)cell) >= 0)
            return true;
    return false;
}

static bool store_run(const kvp_kv *kv, const beside *at, size_t first, size_t n)
{
    const kvp_gpu_cells *cells = kv->cells;
    const kvp_gpu_run run = { 0, n, cells->cache->ranges.of[first / KVANT_PAGE_TOKENS] };
    const size_t width = kv->shape.row;
    kvant_cuda_append_args args;
    const kvant_cuda_center_rows_args center = { .size = sizeof(center),
                                                 .rows = at->halves + first * width,
                                                 .type = KVANT_CUDA_F16,
                                                 .token_stride = width,
                                                 .head_stride = cells->head_dim,
                                                 .n_tokens = (uint32_t)n,
                                                 .n_kv_heads = cells->n_kv_heads,
                                                 .head_dim = cells->head_dim,
                                                 .slots = at->slots[0] + first,
                                                 .turning = kvp_gpu_turning_of(cells, 0),
                                                 .out = at->centered };
    kvant_cuda_rows *rows = kv->shape.role == KVANT_ROLE_K ? &args.k : &args.v;

    if (cells->turns && kvant_cuda_center_rows(&center, cells->gpu->stream) != KVANT_OK)
        return false;
    fill_args(cells, at, first, n, &args);
    *rows = kvp_gpu_rows(cells, at->centered, width, run);
    if (!cells->turns)
        rows->rows = at->halves + first * width;
    for (int open = 0; open <= has_open_blocks(cells->cache, first, n); open++) {
        args.slots = at->slots[open] + first;
        if (open)
            rows->codec = cells->open_codec;
        if (open)
            rows->pages = cells->open_pages;
        if (kvant_cuda_append(&args, cells->gpu->stream) != KVANT_OK)
            return false;
    }
    return true;
}

/* How many rows from the first-th on one launch takes: they have one transform. */
static size_t run_of(const kvp_gpu_cells *cells, size_t first, size_t n)
{
    const uint8_t *of = cells->cache->ranges.of;
    const size_t block = first / KVANT_PAGE_TOKENS;
    size_t end = block + 1;

    while (end * KVANT_PAGE_TOKENS < n && end * KVANT_PAGE_TOKENS - first < CHUNK &&
           of[end] == of[block])
        end++;
    return (end * KVANT_PAGE_TOKENS < n ? end * KVANT_PAGE_TOKENS : n) - first;
}

static bool store(kvp_kv *kv, const beside *at)
{
    const kvp_gpu_cells *cells = kv->cells;
    const size_t n = cells->cache->place->n, bytes = n * kvp_kv_row_bytes(kv);
    const cu_address memory = (cu_address)(uintptr_t)kv->memory;
    cu_stream stream = cells->gpu->stream;
    bool ok = kvp_cu_ok(kvp_cu.copy_within((cu_address)(uintptr_t)at->halves, memory, bytes,
                                           stream),
                        "copying") &&
              kvp_cu_ok(kvp_cu.fill(memory, 0, kv->reserved, stream), "clearing");

    for (size_t first = 0, run; first < n && ok; first += run) {
        run = run_of(cells, first, n);
        ok = store_run(kv, at, first, run);
    }
    return ok;
}

/* Those of open pages behind those of sealed ones. */
static bool bring_slots(const kvp_gpu_cache *cache, int64_t *to)
{
    const struct kvp_gpu_place *place = cache->place;
    const size_t n = place->n;
    int64_t *slots = malloc((2 * n + 1) * sizeof(*slots));
    bool ok = slots != NULL;

    for (size_t i = 0; i < n && ok; i++) {
        const bool held = place->positions[i] != KVP_NO_ROW;
        const int64_t page = held ? kvp_gpu_page_of(cache, (int64_t)i) : -1;
        slots[i] = held ? (int64_t)i : -1;
        slots[n + i] = page >= 0 ? page * KVANT_PAGE_TOKENS + (int64_t)(i % KVANT_PAGE_TOKENS) : -1;
    }
    ok = ok && kvp_gpu_upload(cache->gpu, to, slots, 2 * n * sizeof(*slots));
    free(slots);
    return ok;
}

static size_t widest(const kvp_gpu_cache *cache)
{
    size_t width = 0;

    for (size_t i = 0; i < cache->n_tensors; i++)
        width = cache->tensors[i]->shape.row > width ? cache->tensors[i]->shape.row : width;
    return width;
}

/* Halves, floats, then numbers of 8 bytes: each size is a multiple of 16. */
static bool have_room(const kvp_gpu_cache *cache, kvp_gpu_memory *memory, beside *room)
{
    const size_t all = cache->place->n, n = (all + 7) / 8 * 8, width = widest(cache);
    const size_t halves = n * width * sizeof(uint16_t), floats = CHUNK * width * sizeof(float);
    char *at;
    int64_t *slots;

    if (!kvp_gpu_grow(cache->gpu, memory, halves + floats + 2 * n * sizeof(*slots), false))
        return false;
    at = memory->at;
    slots = (int64_t *)(void *)(at + halves + floats);
    *room = (beside){ (uint16_t *)(void *)at, (float *)(void *)(at + halves),
                      { slots, slots + all } };
    return true;
}

/* What stores rows has all memory that it needs, and no row has changed. */
static bool make_ready(kvp_gpu_cache *cache, kvp_gpu_memory *memory, beside *room)
{
    bool turns, ok;

    if (!have_room(cache, memory, room))
        return false;
    settle(cache);
    turns = cache->ranges.centers.used;
    ok = plan(cache) && (cache->place->n == 0 || bring_slots(cache, room->slots[0]));
    if (!ok)
        kvp_gpu_cache_forget(cache); /* the plan; what was learnt is kept */
    cache->ranges.centers.used = cache->ranges.centers.used || turns;
    return ok;
}

static bool store_all(kvp_gpu_cache *cache, const beside *room)
{
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors && ok && cache->place->n > 0; i++)
        ok = store(cache->tensors[i], room);
    return ok;
}

bool kvp_gpu_hand_over(kvp_gpu_cache *cache)
{
    kvp_gpu_memory memory = { 0 };
    kvant_status refused;
    beside room;
    bool ok;

    if (!cache->in_place)
        return true;
    if (!make_ready(cache, &memory, &room)) {
        kvp_gpu_release(&memory);
        kvp_error("%s: no memory to compress the cache: these tokens are refused, and those "
                  "before stay as they are; free GPU memory and try again",
                  cache->gpu->name);
        return false;
    }
    cache->in_place = false;
    cache->gpu->forms++;
    ok = store_all(cache, &room);
    kvp_gpu_release(&memory); /* waits for the GPU */
    refused = kvp_gpu_take_word(cache->gpu->refused);
    if (refused != KVANT_OK)
        kvp_gpu_marks_notice(cache, refused);
    kvp_note("%s: %zu cells went from fp16 to compressed pages", cache->gpu->name, cache->place->n);
    kvp_gpu_place_forget(cache);
    if (!ok)
        kvp_error("%s: the GPU could not compress the cache, its rows are lost", cache->gpu->name);
    return ok;
}
