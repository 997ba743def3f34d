/* hand_over.c - moves rows from llama.cpp's f16 layout to compressed pages (in_place.h).
 *
 * A plan gives blocks transforms and exact pages, for all layers at once. Then layers go one by
 * one. A tensor's rows are copied to other memory, the tensor's memory is cleared, and the rows are
 * stored like the rows of a batch, with their positions. Rows of steps between two layers are in
 * the plan by then, because the layers that are compressed already have pages for them. ready.c has
 * learned the transforms.
 *
 * In a prompt's graph transforms may not be in force yet. Then a layer takes its transform while
 * CUDA computes the part of the graph before the layer's attention, and the rows of the layer,
 * which are older than the graph, are stored at the same time. */
#include "in_place.h"

#include <stdlib.h>

#include "../log.h"

/* Rows that one launch stores. Launches of 2048 rows leave a GPU idle at their ends. With them a
 * prompt of 2048 tokens takes 2 % longer. */
#define CHUNK ((size_t)512)
/* Rows of a step of the plan, whose blocks get their transforms together. */
#define STEP ((size_t)512)

/* Gives blocks transforms and centres by their rows' positions, and exact pages where rows stay
 * exact, as if these rows came in a batch. No row is stored yet. */
static bool plan_step(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    bool ok = kvp_gpu_buckets_prepare(cache, step) &&
              kvp_gpu_open_written(cache->tensors[0], step, cache->gpu->stream);

    for (size_t i = 0; i < step->n && ok; i++)
        kvp_gpu_cache_mark_written(cache, step->cells[i]);
    return ok;
}

static bool plan(kvp_gpu_cache *cache)
{
    const struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    int64_t cells[STEP];
    int32_t positions[STEP];
    bool ok = true;

    cache->planner = NULL;
    cache->planned_last = -2; /* the first row begins a sequence */
    for (size_t i = 0; i < in_place_state->n && ok;) {
        kvp_gpu_step step = { .cells = cells };
        bool known = true;
        for (; i < in_place_state->n && step.n < STEP; i++) {
            if (in_place_state->positions[i] == KVP_NO_ROW)
                continue;
            known = known && in_place_state->positions[i] >= 0;
            cells[step.n] = (int64_t)i;
            positions[step.n++] = in_place_state->positions[i];
        }
        step.positions = known ? positions : NULL;
        ok = step.n == 0 || plan_step(cache, &step);
    }
    return ok && kvp_gpu_buckets_upload(cache, cache->gpu->stream);
}

/* The memory in which rows lie while they are stored: a tensor's fp16 rows, and some of them with
 * their centres subtracted. */
typedef struct beside {
    uint16_t *halves;
    float *centered;
    /* by cell: the slot in sealed pages, which is the cell itself; the slot in exact pages, or
     * -1 */
    int64_t *slots[2];
} beside;

static void fill_args(const kvp_gpu_cells *cells, const beside *at, size_t first, size_t n,
                      kvant_cuda_kernel_append_args *args)
{
    *args = (kvant_cuda_kernel_append_args){ .size = sizeof(*args),
                                             .type = cells->has_block_centers ? KVANT_CUDA_F32
                                                                              : KVANT_CUDA_F16,
                                             .n_tokens = (uint32_t)n,
                                             .n_kv_heads = cells->n_kv_heads,
                                             .refused = kvp_gpu_word(cells->gpu->refused_later),
                                             .slots_ready = 1, /* upload_slots() */
                                             .marks = cells->cache->marks.memory.at,
                                             .mark_ids = at->slots[0] + first };
}

/* Whether some of n rows from the first-th cell on go to exact pages, too. */
static bool has_open_blocks(const kvp_gpu_cache *cache, size_t first, size_t n)
{
    for (size_t cell = first; cell < first + n; cell += KVANT_PAGE_TOKENS)
        if (kvp_gpu_page_of(cache, (int64_t)cell) >= 0)
            return true;
    return false;
}

/* Rows that go to staging pages. */
typedef struct staged_run {
    const kvp_gpu_cells *cells;
    kvant_cuda_kernel_append_args *args;
    kvant_cuda_rows *rows; /* of args */
} staged_run;

static kvant_status append_staged(void *context, const int64_t *slots,
                                  const kvant_cuda_pages *pages)
{
    const staged_run *run = context;

    run->args->slots = slots;
    run->rows->codec = run->cells->open_codec;
    run->rows->pages = *pages;
    return kvant_cuda_kernel_append(run->args, run->cells->gpu->stream);
}

/* Seals n rows from the first-th cell on whose blocks have no exact pages, of a codec whose groups
 * have several tokens. */
static bool stage_run(const kvp_kv *kv, kvant_cuda_kernel_append_args *args, kvant_cuda_rows *rows,
                      size_t first, size_t n)
{
    const kvp_gpu_cells *cells = kv->cells;
    const int32_t *positions = cells->cache->in_place_state->positions + first;
    kvp_gpu_staging *s = &cells->cache->row_staging;
    int64_t numbers[CHUNK];

    for (size_t i = 0; i < n; i++)
        numbers[i] = positions[i] != KVP_NO_ROW ? (int64_t)(first + i) : -1;
    return kvp_gpu_stage(cells->cache, numbers, n, s, cells->gpu->stream) &&
           kvp_gpu_staged(kv, s, append_staged, &(staged_run){ cells, args, rows }) == KVANT_OK;
}

static bool store_run(const kvp_kv *kv, const beside *at, size_t first, size_t n)
{
    const kvp_gpu_cells *cells = kv->cells;
    const kvp_gpu_run run = { 0, n, cells->cache->buckets.of[first / KVANT_PAGE_TOKENS] };
    const size_t width = kv->shape.row;
    kvant_cuda_kernel_append_args args;
    const kvant_cuda_center_rows_args center = { .size = sizeof(center),
                                                 .rows = at->halves + first * width,
                                                 .type = KVANT_CUDA_F16,
                                                 .token_stride = width,
                                                 .head_stride = cells->head_dim,
                                                 .n_tokens = (uint32_t)n,
                                                 .n_kv_heads = cells->n_kv_heads,
                                                 .head_dim = cells->head_dim,
                                                 .slots = at->slots[0] + first,
                                                 .block_centers =
                                                     kvp_gpu_block_centers_of(cells, 0),
                                                 .out = at->centered };
    kvant_cuda_rows *rows = kv->shape.role == KVANT_ROLE_K ? &args.k : &args.v;

    if (cells->has_block_centers && kvant_cuda_center_rows(&center, cells->gpu->stream) != KVANT_OK)
        return false;
    fill_args(cells, at, first, n, &args);
    *rows = kvp_gpu_rows(cells, at->centered, width, run);
    if (kv->shape.role == KVANT_ROLE_K)
        kvp_gpu_use_matrices(cells, run, &args);
    if (!cells->has_block_centers)
        rows->rows = at->halves + first * width;
    if (cells->group > 1 && !stage_run(kv, &args, rows, first, n))
        return false;
    for (int open = cells->group > 1; open <= has_open_blocks(cells->cache, first, n); open++) {
        args.slots = at->slots[open] + first;
        if (open)
            rows->codec = cells->open_codec;
        if (open)
            rows->pages = cells->open_pages;
        if (kvant_cuda_kernel_append(&args, cells->gpu->stream) != KVANT_OK)
            return false;
    }
    return true;
}

/* How many rows, from the first-th row on, one launch takes because they have one transform. */
static size_t run_of(const kvp_gpu_cells *cells, size_t first, size_t n)
{
    const uint8_t *of = cells->cache->buckets.of;
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
    const size_t n = cells->cache->in_place_state->n, bytes = n * kvp_kv_row_bytes(kv);
    cu_stream stream = cells->gpu->stream;
    bool ok = kvp_cu_move(at->halves, kv->memory, bytes, stream) &&
              kvp_cu_clear(kv->memory, kv->reserved, stream);

    for (size_t first = 0, run; first < n && ok; first += run) {
        run = run_of(cells, first, n);
        ok = store_run(kv, at, first, run);
    }
    return ok;
}

static size_t widest(const kvp_gpu_cache *cache)
{
    size_t width = 0;

    for (size_t i = 0; i < cache->n_tensors; i++)
        width = cache->tensors[i]->shape.row > width ? cache->tensors[i]->shape.row : width;
    return width;
}

/* Lays out the memory: fp16 rows, then fp32 rows, then slots. Each part is a multiple of 16 bytes,
 * because the room is a multiple of 256 cells. */
static beside beside_of(const kvp_gpu_cache *cache)
{
    const struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    const size_t width = widest(cache), halves = in_place_state->room * width * sizeof(uint16_t);
    char *at = in_place_state->beside.at;
    int64_t *slots = (int64_t *)(void *)(at + halves + CHUNK * width * sizeof(float));

    return (beside){ (uint16_t *)(void *)at,
                     (float *)(void *)(at + halves),
                     { slots, slots + in_place_state->n } };
}

static bool have_room(kvp_gpu_cache *cache)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    const size_t row = widest(cache) * sizeof(uint16_t) + 2 * sizeof(int64_t);

    if (cache->has_groups &&
        !kvp_gpu_have_staging(cache, &cache->row_staging, CHUNK, CHUNK / KVANT_PAGE_TOKENS))
        return false;
    return kvp_gpu_grow(cache->gpu, &in_place_state->beside,
                        in_place_state->room * row + CHUNK * widest(cache) * sizeof(float), false);
}

/* Brings slots to the GPU; slots in exact pages lie behind slots in sealed pages. */
static bool upload_slots(kvp_gpu_cache *cache)
{
    const struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    const size_t n = in_place_state->n;
    int64_t *slots = malloc((2 * n + 1) * sizeof(*slots));
    bool ok = slots != NULL;

    for (size_t i = 0; i < n && ok; i++) {
        const bool held = in_place_state->positions[i] != KVP_NO_ROW;
        const int64_t page = held ? kvp_gpu_page_of(cache, (int64_t)i) : -1;
        slots[i] = held ? (int64_t)i : -1;
        slots[n + i] = page >= 0 ? page * KVANT_PAGE_TOKENS + (int64_t)(i % KVANT_PAGE_TOKENS) : -1;
    }
    ok = ok && (n == 0 || kvp_gpu_upload(cache->gpu, beside_of(cache).slots[0], slots,
                                         2 * n * sizeof(*slots)));
    free(slots);
    return ok;
}

/* Layers */

static kvp_kv *first_in_place(const kvp_gpu_cache *cache)
{
    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (cells->in_place)
            return cache->tensors[i];
    }
    return NULL;
}

/* The tensors of a layer follow each other. */
size_t kvp_gpu_n_layers_in_place(const kvp_gpu_cache *cache)
{
    const kvp_kv *last = NULL;
    size_t n = 0;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (!cells->in_place)
            continue;
        n += last == NULL || last->shape.layer != cache->tensors[i]->shape.layer;
        last = cache->tensors[i];
    }
    return n;
}

/* Stores keys and values of a layer. They change their form together, because attention reads
 * both. */
static bool store_layer(kvp_gpu_cache *cache, uint32_t layer, const beside *at)
{
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        kvp_kv *kv = cache->tensors[i];
        kvp_gpu_cells *cells = kv->cells;
        if (!cells->in_place || kv->shape.layer != layer)
            continue;
        ok = cache->in_place_state->n == 0 || store(kv, at);
        cells->in_place = false;
    }
    kvp_note("%s: layer %u went from fp16 to compressed pages, %zu cells", cache->gpu->name, layer,
             cache->in_place_state->n);
    return ok;
}

/* Plans and allocates, so that storing a layer needs no more GPU memory afterwards. No row has
 * changed yet. An error undoes the plan and keeps the transforms. */
static bool make_ready(kvp_gpu_cache *cache)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    kvp_gpu_buckets *buckets = &cache->buckets;
    const kvp_gpu_buckets former = *buckets;

    if (!have_room(cache))
        return false;
    in_place_state->planned = plan(cache);
    if (in_place_state->planned)
        return true;
    kvp_gpu_cache_forget(cache);
    buckets->lessons = former.lessons;
    buckets->lessons.position = -1; /* no step is known */
    buckets->centers.used = former.centers.used;
    return false;
}

static void report_plain(const kvp_gpu_cache *cache)
{
    if (cache->in_place_state->n_plain > 0)
        kvp_error("%s: no centre could be learned from the first rows of %zu tensors, which are "
                  "stored without one",
                  cache->gpu->name, cache->in_place_state->n_plain);
}

/* Handles a lack of memory: rows stay in place. */
static bool refuse(kvp_gpu_cache *cache, bool must)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;

    if (!in_place_state->planned)
        kvp_gpu_release(&in_place_state->beside);
    in_place_state->short_of_memory = true;
    if (must)
        kvp_error("%s: out of GPU memory for compressing the cache: the new tokens are refused, "
                  "and earlier tokens are unchanged; free GPU memory and try again",
                  cache->gpu->name);
    return !must;
}

static void report_loss(const kvp_gpu_cache *cache)
{
    kvp_error("%s: the GPU could not compress the cache, so its rows are lost; start a new context",
              cache->gpu->name);
}

bool kvp_gpu_hand_over_layers(kvp_gpu_cache *cache, size_t n, bool must)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    const bool was_planned = in_place_state->planned;
    const kvp_kv *next;
    beside at;
    bool ok = true;

    if (in_place_state->short_of_memory && !must)
        return true;
    kvp_gpu_in_place_settle(NULL, cache, cache->n_tensors);
    if ((!in_place_state->planned && !make_ready(cache)) || !upload_slots(cache))
        return refuse(cache, must);
    if (!was_planned)
        report_plain(cache);
    at = beside_of(cache);
    cache->forms++;
    atomic_store(&cache->gpu->hands_over, true);
    for (; n > 0 && ok && (next = first_in_place(cache)) != NULL; n--)
        ok = store_layer(cache, next->shape.layer, &at);
    if (!ok)
        report_loss(cache);
    if (!ok || first_in_place(cache) == NULL)
        kvp_gpu_in_place_forget(cache);
    return ok;
}

/* In a graph. The blocks with exact pages are those after the graph's own rows were planned. */

bool kvp_gpu_hand_over_in_graph(kvp_gpu_cache *cache)
{
    if (!cache->in_place_state->planned && !make_ready(cache))
        return refuse(cache, true);
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        cells->late = cells->in_place;
    }
    cache->late.any = cache->late.hands_over = true;
    cache->late.has_slots = cache->in_place = cache->lacks_key_transform = false;
    cache->forms++;
    return true;
}

bool kvp_gpu_hand_over_layer(kvp_kv *kv)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;
    const beside at = beside_of(cache);
    bool ok = cache->late.has_slots || upload_slots(cache);

    cache->late.has_slots = ok;
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *of = cache->tensors[i]->cells;
        if (cache->tensors[i]->shape.layer != kv->shape.layer || !of->late)
            continue;
        of->late = false;
        kvp_gpu_in_place_settle_tensor(NULL, cache->tensors[i]);
        kvp_gpu_buckets_begin_layer(cache->tensors[i]);
    }
    ok = ok && store_layer(cache, kv->shape.layer, &at);
    if (!ok)
        report_loss(cache);
    return ok;
}

void kvp_gpu_hand_over_finish(kvp_gpu_cache *cache)
{
    report_plain(cache);
    kvp_gpu_in_place_forget(cache);
    kvp_gpu_buckets_begin_late(cache);
}

bool kvp_gpu_hand_over(kvp_gpu_cache *cache)
{
    bool ok;

    if (!cache->in_place)
        return true;
    ok = kvp_gpu_hand_over_layers(cache, cache->n_tensors, true);
    kvp_gpu_hand_over_end(cache);
    return ok;
}

void kvp_gpu_hand_over_end(kvp_gpu_cache *cache)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;

    if (in_place_state == NULL || in_place_state->beside.at == NULL)
        return;
    if (!in_place_state->planned)
        kvp_gpu_release(&in_place_state->beside);
    kvp_gpu_marks_notice_all(cache->gpu, kvp_gpu_read_word(cache->gpu->refused_later));
}
