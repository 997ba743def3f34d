/* in_place.c - decides which layers are in place (in_place.h), and holds their rows while they are.
 *
 * A cache begins in place when it is empty, and when the rows of a batch are the only ones left.
 * Only n_kv and the mask show that llama.cpp removed rows (seq_rm): a cell at or above n_kv holds
 * nothing. Cells between the batch and n_kv, which is padded to 256 cells, may hold rows of other
 * sequences, so these are decoded first. */
#include "in_place.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"

/* After the first prompt batches, the queries of every eighth are kept. The graph of such a batch
 * is cut at each attention node, which costs time. */
#define ASK_EVERY 8u

static char *row_at(const kvp_kv *kv, size_t cell)
{
    return (char *)kv->memory + cell * kvp_kv_row_bytes(kv);
}

/* The number of cells that fit in every tensor of the cache. */
static size_t room_of(const kvp_gpu_cache *cache)
{
    size_t least = SIZE_MAX;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const size_t cells = kvp_kv_cells_in_place(cache->tensors[i]);
        least = cells < least ? cells : least;
    }
    return least;
}

/* The record of a cache in place. NULL without memory, or when the cache can never be in place. */
static struct kvp_gpu_in_place *place_of(kvp_gpu_cache *cache)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;
    const size_t room = in_place_state == NULL ? room_of(cache) : in_place_state->room;

    if (in_place_state != NULL || room == 0)
        return in_place_state;
    in_place_state = calloc(1, sizeof(*in_place_state));
    if (in_place_state != NULL)
        in_place_state->positions = malloc(room * sizeof(*in_place_state->positions));
    if (in_place_state == NULL || in_place_state->positions == NULL) {
        free(in_place_state);
        return NULL;
    }
    in_place_state->room = room;
    in_place_state->whole = room >= cache->tensors[0]->shape.n_cells;
    cache->in_place_state = in_place_state;
    kvp_gpu_in_place_forget(cache);
    return in_place_state;
}

static void set_form(kvp_gpu_cache *cache, bool in_place)
{
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        cells->in_place = in_place;
    }
    cache->forms += cache->in_place != in_place;
    cache->in_place = in_place;
}

/* Whether some layers are in place and others are compressed. */
static bool is_mixed(const kvp_gpu_cache *cache)
{
    return cache->in_place && cache->in_place_state->planned;
}

/* Resets the record. kvp_gpu_hand_over_end frees its memory `beside`, when no work uses it any
 * more. */
void kvp_gpu_in_place_forget(kvp_gpu_cache *cache)
{
    struct kvp_gpu_in_place *in_place_state = cache->in_place_state;

    set_form(cache, false);
    cache->late.any = cache->late.hands_over = false;
    if (in_place_state == NULL)
        return;
    if (in_place_state->beside.at != NULL)
        atomic_store(&cache->gpu->hands_over, true);
    for (size_t i = 0; i < in_place_state->room; i++)
        in_place_state->positions[i] = KVP_NO_ROW;
    in_place_state->n = 0;
    in_place_state->n_prompts = 0;
    in_place_state->lesson = (kvant_lesson_in_place){ 0 };
    in_place_state->n_plain = 0;
    in_place_state->learns = in_place_state->teaches = in_place_state->planned =
        in_place_state->short_of_memory = false;
}

void kvp_gpu_in_place_free(kvp_gpu_cache *cache)
{
    if (cache->in_place_state == NULL)
        return;
    kvp_gpu_release(&cache->in_place_state->beside);
    free(cache->in_place_state->positions);
    free(cache->in_place_state);
    cache->in_place_state = NULL;
}

/* Rows outside of graphs */

bool kvp_gpu_in_place_read(const kvp_kv *kv, size_t cell, size_t n, float *rows,
                           kvant_status *status)
{
    const kvp_gpu_cells *cells = kv->cells;
    const size_t room = cells->in_place ? cells->cache->in_place_state->room : 0;
    const size_t known = cell < room ? (room - cell < n ? room - cell : n) : 0;
    const size_t width = kv->shape.row;
    uint16_t *halves;

    if (room == 0)
        return false;
    halves = malloc((known + 1) * kvp_kv_row_bytes(kv));
    *status = halves != NULL ? KVANT_OK : KVANT_ERR_MEMORY;
    if (halves != NULL && known > 0 &&
        !kvp_cu_read(halves, row_at(kv, cell), known * kvp_kv_row_bytes(kv), cells->gpu->stream))
        *status = KVANT_ERR_CUDA;
    if (*status == KVANT_OK) {
        kvp_api.fp16_to_fp32_row(halves, rows, (int64_t)(known * width));
        memset(rows + known * width, 0, (n - known) * width * sizeof(*rows));
    }
    free(halves);
    return true;
}

/* The number of cells from the i-th on that follow each other. */
static size_t run_of(const int64_t *cells, size_t i, size_t n)
{
    size_t run = 1;

    while (i + run < n && cells[i + run] == cells[i] + (int64_t)run)
        run++;
    return run;
}

static bool copy_rows(const kvp_kv *kv, const int64_t *numbers, size_t n, const uint16_t *halves)
{
    const kvp_gpu_cells *cells = kv->cells;
    bool ok = true;

    for (size_t i = 0, run; i < n && ok; i += run) {
        run = run_of(numbers, i, n);
        ok = kvp_cu_write(row_at(kv, (size_t)numbers[i]),
                          (const char *)halves + i * kvp_kv_row_bytes(kv),
                          run * kvp_kv_row_bytes(kv), cells->gpu->stream);
    }
    return kvp_cu_finish(cells->gpu->stream, "copying") && ok;
}

static void hold(struct kvp_gpu_in_place *in_place_state, int64_t cell, int32_t position)
{
    in_place_state->positions[cell] = position;
    if ((size_t)cell >= in_place_state->n)
        in_place_state->n = (size_t)cell + 1;
}

bool kvp_gpu_in_place_write(kvp_kv *kv, const int64_t *numbers, size_t n, const float *rows,
                            kvant_status *status)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;
    struct kvp_gpu_in_place *in_place_state = place_of(cache);
    bool fits = in_place_state != NULL && !in_place_state->planned &&
                (cache->in_place || kvp_gpu_cache_is_empty(cache));
    uint16_t *halves;

    for (size_t i = 0; i < n && fits; i++)
        fits = numbers[i] >= 0 && (size_t)numbers[i] < in_place_state->room;
    if (!fits)
        return false;
    halves = malloc((n + 1) * kvp_kv_row_bytes(kv));
    *status = halves != NULL ? KVANT_OK : KVANT_ERR_MEMORY;
    if (halves == NULL)
        return true;
    set_form(cache, true);
    kvp_api.fp32_to_fp16_row(rows, halves, (int64_t)(n * kv->shape.row));
    if (!copy_rows(kv, numbers, n, halves))
        *status = KVANT_ERR_CUDA;
    for (size_t i = 0; i < n; i++)
        hold(in_place_state, numbers[i], KVP_ROW_SOMEWHERE);
    free(halves);
    return true;
}

/* Coming back */

/* The rows of a tensor as fp16, decoded from pages; NULL without memory. */
static uint16_t *decode(const kvp_kv *kv, size_t first, size_t n)
{
    uint16_t *halves = malloc((n + 1) * kvp_kv_row_bytes(kv));
    float *rows = malloc((n + 1) * kv->shape.row * sizeof(*rows));
    const bool ok =
        halves != NULL && rows != NULL && kv->remote->read(kv, first, n, rows) == KVANT_OK;

    if (ok)
        kvp_api.fp32_to_fp16_row(rows, halves, (int64_t)(n * kv->shape.row));
    free(rows);
    if (!ok)
        free(halves);
    return ok ? halves : NULL;
}

/* Fills the memory of all tensors with zeros. Tensors that follow each other in their buffer take
 * one operation, because each operation delays the first token by about 4 us. */
static bool clear_memory(const kvp_gpu_cache *cache)
{
    bool ok = true;

    for (size_t i = 0, next; i < cache->n_tensors && ok; i = next) {
        char *memory = cache->tensors[i]->memory;
        size_t bytes = 0;
        for (next = i; next < cache->n_tensors && cache->tensors[next]->memory == memory + bytes;
             next++)
            bytes += cache->tensors[next]->reserved;
        ok = kvp_cu_clear(memory, bytes, cache->gpu->stream);
    }
    return ok;
}

static bool has_row(const kvp_gpu_cache *cache, size_t cell)
{
    return cache->written[cell / KVANT_PAGE_TOKENS] >> (cell % KVANT_PAGE_TOKENS) & 1;
}

/* Resets the cache and puts it in place. Only rows of cells [first, end) stay, because a sequence
 * may hold them. */
static bool come_back(kvp_gpu_cache *cache, size_t first, size_t end)
{
    uint16_t **halves = calloc(cache->n_tensors, sizeof(*halves));
    bool ok = halves != NULL, *held = calloc(end - first + 1, sizeof(*held));

    ok = ok && held != NULL;
    for (size_t i = first; i < end && ok; i++)
        held[i - first] = has_row(cache, i);
    for (size_t i = 0; i < cache->n_tensors && ok && end > first; i++)
        ok = (halves[i] = decode(cache->tensors[i], first, end - first)) != NULL;
    for (size_t i = 0; i < cache->n_tensors && ok; i++)
        cache->tensors[i]->remote->clear(cache->tensors[i]);
    ok = ok && clear_memory(cache);
    for (size_t i = 0; i < cache->n_tensors && ok && end > first; i++)
        ok = kvp_cu_write(row_at(cache->tensors[i], first), halves[i],
                          (end - first) * kvp_kv_row_bytes(cache->tensors[i]), cache->gpu->stream);
    ok = kvp_cu_finish(cache->gpu->stream, "clearing") && ok;
    for (size_t i = first; i < end && ok; i++)
        if (held[i - first])
            hold(cache->in_place_state, (int64_t)i, KVP_ROW_SOMEWHERE);
    for (size_t i = 0; i < cache->n_tensors && halves != NULL; i++)
        free(halves[i]);
    free(halves);
    free(held);
    return ok;
}

/* Graphs */

static kvp_gpu_use *use_of(struct kvp_gpu_uses *uses, kvp_gpu_cache *cache)
{
    for (int i = 0; i < uses->n; i++)
        if (uses->of[i].cache == cache)
            return &uses->of[i];
    if (uses->n == (int)(sizeof(uses->of) / sizeof(uses->of[0])))
        return NULL;
    uses->of[uses->n] = (kvp_gpu_use){ .cache = cache };
    return &uses->of[uses->n++];
}

static bool is_shift(const abi_tensor *node)
{
    return node->op == kvp_api.op.rope && node->view_src != NULL && node->ne[3] == 1;
}

/* The cache tensor that a computed node writes to or reads; NULL: none. */
static const kvp_gpu_cells *used_by(const abi_tensor *node)
{
    const abi_tensor *tensor = kvp_is_computed(node) ? kvp_cache_tensor_of(node) : NULL;

    return tensor != NULL ? kvp_gpu_cells_of(tensor) : NULL;
}

bool kvp_gpu_in_place_uses(const abi_tensor *node)
{
    const kvp_gpu_cells *cells = used_by(node);

    return cells != NULL && cells->in_place && !cells->late;
}

bool kvp_gpu_in_place_any(kvp_gpu *gpu)
{
    for (kvp_gpu_cache *cache = gpu->caches; cache != NULL; cache = cache->next)
        if (place_of(cache) != NULL)
            return true;
    return false;
}

static void note_node(kvp_gpu_use *u, const abi_tensor *node)
{
    const bool writes = node->op == kvp_api.op.set_rows && node->view_offs == 0;
    const bool attends = node->op == kvp_api.op.flash_attn_ext;

    if (attends && (size_t)node->src[1]->ne[1] > u->n_kv) {
        u->n_kv = (size_t)node->src[1]->ne[1];
        u->mask = node->src[3];
        u->n_query_tokens = (size_t)node->src[0]->ne[1];
    }
    if (writes && kvp_gpu_prepared(node) != NULL)
        u->cells = node->src[1];
    u->shifts = u->shifts || is_shift(node);
    u->other = u->other || !(writes || attends || is_shift(node));
}

/* Finds how a graph uses caches. A graph with the uid of the last graph is the last graph. It is
 * examined again if it shifts keys, or if some cache was not bound when it was examined. */
static void find_uses(struct kvp_gpu_uses *uses, const abi_graph *graph)
{
    bool again = false;

    if (graph->uid != 0 && graph->uid == uses->uid)
        return;
    uses->n = 0;
    for (int i = 0; i < graph->n_nodes; i++) {
        const kvp_gpu_cells *cells = used_by(graph->nodes[i]);
        kvp_gpu_use *u = cells != NULL && cells->cache != NULL ? use_of(uses, cells->cache) : NULL;
        again = again || (cells != NULL && u == NULL);
        if (u != NULL)
            note_node(u, graph->nodes[i]);
    }
    for (int i = 0; i < uses->n; i++)
        again = again || uses->of[i].shifts;
    uses->uid = again ? 0 : graph->uid;
}

/* The number of cells that the batch's queries see, if these are the first cells; 0: not known. */
static size_t seen_by(const kvp_gpu *gpu, const abi_tensor *mask)
{
    for (const kvp_gpu_mask *at = mask != NULL ? gpu->masks : NULL; at != NULL; at = at->next)
        if (at->at == mask->data && at->plain && at->n_streams == 1)
            return (size_t)at->lengths[0];
    return 0;
}

/* Whether the batch's cells are the first cells and it sees no others. Then all other rows lie
 * between them and n_kv. */
static bool is_alone(const kvp_gpu *gpu, const kvp_gpu_use *u, const kvp_gpu_step *step)
{
    for (size_t i = 0; i < step->n; i++)
        if (step->cells[i] != (int64_t)i)
            return false;
    return u->n_kv >= step->n && u->n_kv - step->n < KVP_CELLS_PADDING &&
           seen_by(gpu, u->mask) == step->n;
}

/* Puts all layers in place if the cache has no other rows than the graph's. False: the forms do not
 * change. */
static bool begin(const kvp_gpu *gpu, const kvp_gpu_use *u, const kvp_gpu_step *step)
{
    const bool empty = !u->cache->in_place && kvp_gpu_cache_is_empty(u->cache);

    if (!empty && !(is_alone(gpu, u, step) && come_back(u->cache, step->n, u->n_kv)))
        return false;
    set_form(u->cache, true);
    return true;
}

static bool step_fits(const kvp_gpu_use *u, const kvp_gpu_step *step)
{
    for (size_t i = 0; i < step->n; i++)
        if (step->cells[i] < 0 || (size_t)step->cells[i] >= u->cache->in_place_state->room)
            return false;
    return true;
}

/* Whether the graph's rows, and all rows that its attention reads, fit in place. *step: its rows; a
 * graph may have none (-sm tensor, or a shift). */
static bool fits(const kvp_gpu_backend *b, const kvp_gpu_use *u, kvp_gpu_step *step)
{
    const struct kvp_gpu_in_place *in_place_state = place_of(u->cache);

    if (in_place_state == NULL || u->other || u->n_kv > in_place_state->room)
        return false;
    return u->cells == NULL || (kvp_gpu_find_step(b->gpu, u->cells->data, b->positions,
                                                  (size_t)u->cells->ne[0], step) &&
                                step_fits(u, step));
}

/* Reduces a context shift, which covers all cells, to the cells in place; cells beyond the room do
 * not exist. The rows' positions after the shift are not known here. */
static void clip_shift(abi_tensor *node)
{
    struct kvp_gpu_in_place *in_place_state = kvp_gpu_cells_of(node)->cache->in_place_state;

    kvp_clip_shift(node, (int64_t)in_place_state->room);
    for (size_t i = 0; i < in_place_state->n; i++)
        in_place_state->positions[i] =
            in_place_state->positions[i] == KVP_NO_ROW ? KVP_NO_ROW : KVP_ROW_SOMEWHERE;
}

/* Whether the queries of this batch are kept. */
static bool keeps_queries(kvp_gpu_cache *cache, const kvp_gpu_use *u)
{
    return u->n_query_tokens >= KVP_KEPT_TOKENS && cache->learns_key_transform &&
           !cache->in_place_state->learns && !is_mixed(cache) && !cache->in_place_state->whole &&
           (cache->in_place_state->n_prompts++ < KVP_KEPT_BATCHES ||
            cache->in_place_state->n_prompts % ASK_EVERY == 0);
}

/* Compresses the next n layers. The rows of the current graph are not stored yet. */
static bool hand_over(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph, size_t n,
                      bool must)
{
    kvp_gpu_in_place_learn(b, cache, graph, cache->in_place_state->n);
    kvp_gpu_in_place_settle(b, cache, cache->n_tensors);
    kvp_gpu_follow(b);
    return kvp_gpu_hand_over_layers(cache, n, must);
}

/* Compresses all layers. A graph that writes rows of many tokens does so layer by layer if some
 * transforms are not in force yet. */
static bool hand_over_all(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph,
                          bool writes_many)
{
    kvp_gpu_in_place_learn(b, cache, graph, cache->in_place_state->n);
    if (!writes_many || !kvp_gpu_in_place_waits(cache))
        return hand_over(b, cache, graph, cache->n_tensors, true);
    kvp_gpu_follow(b);
    return kvp_gpu_hand_over_in_graph(cache);
}

/* Whether a graph stores rows of many tokens before its attention, and does nothing else. */
static bool writes_many(const kvp_gpu_use *u)
{
    return u->cells != NULL && u->n_query_tokens > KVP_SHORT_STEP_TOKENS && !u->shifts && !u->other;
}

/* Compresses layers before a step if necessary. A step of more tokens finds all layers in one form.
 * It may fill the room, because the next step of a prompt takes the layers in its graph, or its own
 * graph ends with as many layers as single tokens would be too late for (end_prompt). */
static bool let_go(kvp_gpu_backend *b, const kvp_gpu_use *u, const abi_graph *graph,
                   const kvp_gpu_step *step)
{
    kvp_gpu_cache *cache = u->cache;
    const size_t n = kvp_gpu_n_layers_in_place(cache);
    int64_t last = 0;
    size_t left, n_to_go;

    if (cache->in_place_state->whole)
        return true;
    if (!kvp_gpu_is_short_step(step))
        return !is_mixed(cache) || hand_over_all(b, cache, graph, writes_many(u));
    for (size_t i = 0; i < step->n; i++)
        last = step->cells[i] > last ? step->cells[i] : last;
    left = cache->in_place_state->room - 1 - (size_t)last;
    n_to_go = kvant_plan_layers_to_go(n, left, step->n);
    return n_to_go == 0 || hand_over(b, cache, graph, n_to_go, false);
}

static void hold_step(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    for (size_t i = 0; i < step->n && cache->in_place; i++)
        hold(cache->in_place_state, step->cells[i],
             step->positions != NULL ? step->positions[i] : KVP_ROW_SOMEWHERE);
}

static bool prepare(kvp_gpu_backend *b, const kvp_gpu_use *u, const abi_graph *graph)
{
    kvp_gpu_cache *cache = u->cache;
    kvp_gpu_step step = { 0 };

    if (!fits(b, u, &step))
        return !cache->in_place || hand_over_all(b, cache, graph, writes_many(u));
    if (u->cells == NULL)
        return !(u->shifts && is_mixed(cache)) ||
               hand_over(b, cache, graph, cache->n_tensors, true);
    if ((!cache->in_place || is_mixed(cache)) && !begin(b->gpu, u, &step) && !cache->in_place)
        return true;
    kvp_gpu_in_place_prepare_next(b, cache, graph, cache->in_place_state->n,
                                  kvp_gpu_is_short_step(&step));
    if (!let_go(b, u, graph, &step))
        return false;
    hold_step(cache, &step);
    if (b->query_cache == NULL && cache->in_place && keeps_queries(cache, u)) {
        b->query_cache = cache;
        kvp_gpu_in_place_plan_teaching(cache, graph);
    }
    return true;
}

/* Whether a prompt ends with a graph: llama.cpp asks for the results of a few tokens. */
static bool ends_prompt(const kvp_gpu_use *u, const abi_graph *graph)
{
    const abi_tensor *last = graph->nodes[graph->n_nodes - 1];

    return writes_many(u) && last->ne[1] > 0 && last->ne[1] <= KVP_SHORT_STEP_TOKENS;
}

/* Compresses the layers that tokens after a prompt have no time for, if each takes one layer. Near
 * the end of the room it puts all transforms in force, which tokens before the first layer that
 * goes would do one by one. */
static bool end_prompt(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph)
{
    const size_t left = cache->in_place_state->room - cache->in_place_state->n;
    const size_t n = kvp_gpu_n_layers_in_place(cache);

    if (n > left)
        return hand_over(b, cache, graph, n - left, false);
    if (2 * n > left) {
        kvp_gpu_in_place_learn(b, cache, graph, cache->in_place_state->n);
        kvp_gpu_in_place_settle(b, cache, cache->n_tensors);
    }
    return true;
}

bool kvp_gpu_in_place_end_graph(kvp_gpu_backend *b, const abi_graph *graph)
{
    bool ok = true;

    for (int i = 0; i < b->uses.n && ok; i++) {
        kvp_gpu_cache *cache = b->uses.of[i].cache;
        if (cache->in_place && !cache->in_place_state->whole && ends_prompt(&b->uses.of[i], graph))
            ok = end_prompt(b, cache, graph);
    }
    return ok;
}

/* Clips the shifts of keys in place. */
static void clip_shifts(const abi_graph *graph)
{
    for (int i = 0; i < graph->n_nodes; i++)
        if (is_shift(graph->nodes[i]) && kvp_gpu_in_place_uses(graph->nodes[i]))
            clip_shift(graph->nodes[i]);
}

bool kvp_gpu_in_place_prepare(kvp_gpu_backend *b, const abi_graph *graph)
{
    bool ok = true, shifts = false;

    find_uses(&b->uses, graph);
    b->forms = 0;
    for (int i = 0; i < b->uses.n && ok; i++) {
        const kvp_gpu_use *u = &b->uses.of[i];
        b->context = u->cache->tensors[0]->layers;
        ok = prepare(b, u, graph);
        b->forms += u->cache->forms;
        shifts = shifts || u->shifts;
    }
    if (ok && shifts)
        clip_shifts(graph);
    return ok;
}

/* Queries */

bool kvp_gpu_in_place_keeps_queries(const kvp_gpu_backend *b, const abi_tensor *node)
{
    const bool attends = b->query_cache != NULL && node->op == kvp_api.op.flash_attn_ext &&
                         kvp_is_computed(node) && kvp_is_kv(node->src[1]);
    const kvp_gpu_cells *cells = attends ? kvp_gpu_cells_of(node->src[1]) : NULL;

    return cells != NULL && cells->cache == b->query_cache && cells->learns_key_transform;
}
