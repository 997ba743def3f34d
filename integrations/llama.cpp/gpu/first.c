/* first.c - a layer's first key transform (transform=first): when it is learned, and how it comes
 * in force.
 *
 * Rows stay in exact pages until other blocks need the pages (step.c), and no row needs a key
 * transform before it is sealed. When two thirds of the pages have blocks, a thread per layer
 * begins to learn a transform from the keys in these pages and from queries of prompts (queries.c).
 * The step that has to seal rows first waits for these threads, and the keys in exact pages are
 * transformed. A step that is too long for the pages, and has more rows than they have, learns the
 * transforms from its own rows instead, in its graph. So results do not depend on time.
 *
 * Keys that were sealed without a key transform keep the centre and the scale that they were sealed
 * with, as the transform KVP_PLAIN. These are keys of a restored state, and keys of tokens that are
 * too much alike to learn a transform for all later rows from.
 */
#include "learner.h"

#include <stdlib.h>
#include <string.h>

#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

#define SIGNS 128u /* Numbers of a value whose signs tell tokens apart. */
/* Tokens of 1024 that have to differ. Text has at least twice as many different tokens. */
#define LEAST_DIFFERENT 192u

/* Open pages, in the order of their blocks */

typedef struct page_list {
    uint32_t n, pages[KVP_MOST_PAGES];
} page_list;

/* Lists pages whose keys have the first position bucket's transform, or no key transform yet. */
static page_list list_pages(const kvp_gpu_cache *cache)
{
    page_list list = { 0 };

    for (uint32_t block = 0; block < cache->n_blocks && cache->table != NULL; block++)
        if (cache->table[block] < 0 && cache->written[block] != 0 &&
            cache->ranges.of[block] != KVP_PLAIN)
            list.pages[list.n++] = (uint32_t)(-1 - cache->table[block]);
    return list;
}

static bool is_written(const kvp_gpu_cache *cache, const page_list *list, size_t row)
{
    const int32_t block = cache->pages[list->pages[row / KVANT_PAGE_TOKENS]].block;

    return cache->written[block] >> (row % KVANT_PAGE_TOKENS) & 1;
}

/* The position of a row in these pages; below 0: it is not known, or there is no row. */
static int32_t position_of(const kvp_gpu_cache *cache, const page_list *list, size_t row)
{
    const int64_t block = cache->pages[list->pages[row / KVANT_PAGE_TOKENS]].block;

    return is_written(cache, list, row)
               ? cache->positions[block * KVANT_PAGE_TOKENS + (int64_t)(row % KVANT_PAGE_TOKENS)]
               : -1;
}

/* Whether a row is learned from. known: some rows have positions, and rows without are left out. */
static bool counts(const kvp_gpu_cache *cache, const page_list *list, size_t row, bool known)
{
    return known ? position_of(cache, list, row) >= 0 : is_written(cache, list, row);
}

static size_t count_rows(const kvp_gpu_cache *cache, const page_list *list, bool known)
{
    size_t n = 0;

    for (size_t row = 0; row < (size_t)list->n * KVANT_PAGE_TOKENS; row++)
        n += counts(cache, list, row, known);
    return n;
}

/* Decodes the rows of the pages in GPU memory. */
static bool decode(const kvp_gpu_cells *cells, const page_list *list, float *room)
{
    const size_t rows = KVANT_PAGE_TOKENS * kvp_gpu_width(cells);
    kvant_status status = KVANT_OK;

    for (uint32_t i = 0; i < list->n && status == KVANT_OK; i++)
        status = kvp_gpu_decode_blocks(cells, true, list->pages[i], 1, room + i * rows);
    return status == KVANT_OK;
}

/* Copies the rows that count to the computer's memory. The caller frees them; NULL with a message,
 * or without memory. */
static float *fetch(const kvp_gpu_cells *cells, const page_list *list, bool known)
{
    const size_t width = kvp_gpu_width(cells), all = (size_t)list->n * KVANT_PAGE_TOKENS;
    int64_t *slots;
    float *room = kvp_gpu_batch_room(cells->gpu, all, width, &slots),
          *rows = malloc(all * width * sizeof(*rows));
    size_t n = 0;
    bool ok = room != NULL && rows != NULL && decode(cells, list, room) &&
              kvp_cu_ok(kvp_cu.copy_out(rows, (cu_address)(uintptr_t)room,
                                        all * width * sizeof(*rows), cells->gpu->stream),
                        "copying") &&
              kvp_cu_ok(kvp_cu.stream_finish(cells->gpu->stream), "copying");

    for (size_t row = 0; row < all && ok; row++)
        if (counts(cells->cache, list, row, known))
            memmove(rows + n++ * width, rows + row * width, width * sizeof(*rows));
    if (ok)
        return rows;
    free(rows);
    return NULL;
}

/* Tokens that are too much alike */

static int compare(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

/* Whether tokens are too much alike. The first layer computes a token's value from the token only,
 * or nearly so. So the signs of the value tell tokens apart. */
static bool are_alike(const float *rows, size_t stride, size_t n, size_t width)
{
    uint64_t *hashes = malloc((n + 1) * sizeof(*hashes));
    size_t different = 0;

    for (size_t i = 0; i < n && hashes != NULL; i++) {
        hashes[i] = 0xcbf29ce484222325u;
        for (size_t j = 0; j < width && j < SIGNS; j++)
            hashes[i] = (hashes[i] ^ (uint64_t)(rows[i * stride + j] < 0)) * 0x100000001b3u;
    }
    if (hashes != NULL)
        qsort(hashes, n, sizeof(*hashes), compare);
    for (size_t i = 0; i < n && hashes != NULL; i++)
        different += i == 0 || hashes[i] != hashes[i - 1];
    free(hashes);
    return different * 1024 < n * LEAST_DIFFERENT;
}

/* The values of the first layer, or NULL when another cache has them; then tokens are not
 * compared. */
static const kvp_gpu_cells *first_values(const kvp_gpu_cache *cache)
{
    for (size_t i = 0; i < cache->n_tensors; i++)
        if (cache->tensors[i]->shape.role == KVANT_ROLE_V && kvp_kv_is_first(cache->tensors[i]))
            return cache->tensors[i]->cells;
    return NULL;
}

static bool pages_are_alike(const kvp_gpu_cache *cache, const page_list *list, bool known, size_t n)
{
    const kvp_gpu_cells *values = first_values(cache);
    float *rows = values != NULL ? fetch(values, list, known) : NULL;
    const bool alike =
        rows != NULL && are_alike(rows, kvp_gpu_width(values), n, kvp_gpu_width(values));

    free(rows);
    return alike;
}

/* Beginning */

static int32_t *positions_of(const kvp_gpu_cache *cache, const page_list *list, size_t n)
{
    int32_t *positions = malloc((n + 1) * sizeof(*positions));
    size_t i = 0;

    for (size_t row = 0; row < (size_t)list->n * KVANT_PAGE_TOKENS && positions != NULL; row++)
        if (counts(cache, list, row, true))
            positions[i++] = position_of(cache, list, row);
    return positions;
}

/* Begins to learn for a layer. Without memory the layer has no key transform. */
static void begin_layer(kvp_gpu_cells *cells, const page_list *list, bool known, size_t n)
{
    kvp_gpu_lesson lesson = { .n = n, .rows = fetch(cells, list, known) };

    if (known && lesson.rows != NULL)
        lesson.positions = positions_of(cells->cache, list, n);
    if (lesson.rows != NULL && (lesson.positions != NULL || !known)) {
        kvp_gpu_learner_learn(cells, &lesson);
        return;
    }
    free(lesson.rows);
}

/* Lets threads begin, unless there are too few rows in exact pages or their tokens are too much
 * alike. */
static void begin(kvp_gpu_cache *cache)
{
    const page_list list = list_pages(cache);
    const bool known = count_rows(cache, &list, true) > 0;
    const size_t n = count_rows(cache, &list, known);

    cache->tried = true;
    if (n < KVP_LEARN_ROWS || pages_are_alike(cache, &list, known, n) ||
        !kvp_gpu_queries_ready(cache))
        return;
    cache->begun = true;
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        if (kvp_gpu_is_weighing(cells) && cells->learner != NULL)
            begin_layer(cells, &list, known, n);
    }
    kvp_gpu_batch_done(cache->gpu);
}

/* Whether two thirds of the pages have blocks. Threads are done before the remaining third has. */
static bool is_ripe(const kvp_gpu_cache *cache)
{
    return list_pages(cache).n * 3 >= cache->n_pages * 2;
}

/* In force */

static bool has_sealed_rows(const kvp_gpu_cache *cache, uint32_t block)
{
    const int64_t page = kvp_gpu_page_of(cache, (int64_t)block * KVANT_PAGE_TOKENS);

    return (cache->written[block] & ~(page >= 0 ? cache->pages[page].fresh : 0)) != 0;
}

/* Gives blocks with sealed rows the transform that these rows have. */
static void mark_plain(kvp_gpu_cache *cache)
{
    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        if (!has_sealed_rows(cache, block))
            continue;
        cache->ranges.of[block] = KVP_PLAIN;
        cache->ranges.plain = cache->ranges.changed = true;
        kvp_gpu_centers_assign(cache, block, KVP_NO_POSITION);
        kvp_gpu_centers_move(cache, block, 0);
    }
}

/* Creates the kernels' codecs for a codec with a key transform; they may read that codec as long as
 * they live. */
static bool have_codecs(kvp_gpu_cells *cells, kvant_codec **made)
{
    char err[512];

    if (cells->codecs[1] != NULL)
        return true;
    cells->made = *made;
    *made = NULL;
    return kvant_cuda_codec_from(cells->made, &cells->codecs[1], err, sizeof(err)) == KVANT_OK &&
           (cells->open_pages.base == NULL ||
            kvant_cuda_codec_create_open(cells->codecs[1], &cells->open_codecs[1]) == KVANT_OK);
}

/* Makes a learned transform, whose numbers are on the GPU, the cells' transform. */
static bool take(kvp_gpu_cells *cells, kvp_gpu_version *made)
{
    kvp_gpu_take_numbers(cells, (const kvant_codec *const *)made->codecs);
    if (!have_codecs(cells, &made->codecs[0]))
        return false;
    cells->codec = cells->codecs[1];
    cells->open_codec = cells->open_codecs[1];
    cells->learnt = true;
    cells->turns = made->start != NULL && cells->center != NULL;
    cells->cache->ranges.centers.used = cells->cache->ranges.centers.used || cells->turns;
    if (!cells->in_place)
        atomic_fetch_add(&cells->gpu->epoch, 1); /* captured graphs do not have it */
    return kvp_gpu_shift_matrices(cells) && kvp_gpu_ranges_bring(cells->cache, cells->gpu->stream);
}

static bool copy_affine(const kvp_gpu_cells *cells, const float *from, float *to)
{
    const size_t bytes = kvp_gpu_width(cells) * sizeof(*to);

    return from == NULL ||
           (kvp_cu_ok(kvp_cu.copy_out(to, (cu_address)(uintptr_t)from, bytes, cells->gpu->stream),
                      "copying") &&
            kvp_cu_ok(kvp_cu.stream_finish(cells->gpu->stream), "copying"));
}

/* Brings the numbers of a learned transform to the GPU. Also brings the centre and the scale that
 * sealed keys have, which these numbers replace. */
static bool bring(kvp_gpu_cells *cells, const kvp_gpu_version *made)
{
    const size_t width = kvp_gpu_width(cells);
    float *former = malloc(2 * width * sizeof(*former));
    const bool center = cells->center != NULL, scale = cells->scale != NULL;
    const bool ok =
        former != NULL && copy_affine(cells, cells->center, former) &&
        copy_affine(cells, cells->scale, former + width) &&
        kvp_gpu_bring_numbers(cells, (const kvant_codec *const *)made->codecs, made->start,
                              cells->gpu->stream) &&
        (!cells->cache->ranges.plain ||
         kvp_gpu_bring_plain(cells, center ? former : NULL, scale ? former + width : NULL));

    free(former);
    return ok;
}

static bool bring_slots(const kvp_gpu_cells *cells, const page_list *list, int64_t *to)
{
    int64_t slots[KVP_MOST_PAGES * KVANT_PAGE_TOKENS];
    const size_t n = (size_t)list->n * KVANT_PAGE_TOKENS;

    for (size_t row = 0; row < n; row++)
        slots[row] = is_written(cells->cache, list, row)
                         ? (int64_t)list->pages[row / KVANT_PAGE_TOKENS] * KVANT_PAGE_TOKENS +
                               (int64_t)(row % KVANT_PAGE_TOKENS)
                         : -1;
    return n == 0 || kvp_gpu_upload(cells->gpu, to, slots, n * sizeof(*slots));
}

/* Stores rows in the pages that they came from. */
static bool store(const kvp_gpu_cells *cells, const page_list *list, float *rows,
                  const int64_t *slots)
{
    const kvp_gpu_cache *cache = cells->cache;
    const size_t width = kvp_gpu_width(cells);
    kvant_status status = KVANT_OK;

    for (uint32_t i = 0; i < list->n && status == KVANT_OK; i++) {
        const int32_t block = cache->pages[list->pages[i]].block;
        const kvp_gpu_run run = { (size_t)i * KVANT_PAGE_TOKENS, KVANT_PAGE_TOKENS,
                                  cache->ranges.of[block] };
        status =
            kvp_gpu_center_blocks(cells, true, list->pages[i], 1, false, rows + run.first * width);
        if (status == KVANT_OK)
            status = kvp_gpu_append(cells, KVANT_ROLE_K, true, rows, run, slots, NULL);
    }
    return status == KVANT_OK &&
           kvp_cu_ok(kvp_cu.stream_finish(cells->gpu->stream), "storing rows");
}

/* Puts a key transform in force. Keys in exact pages are transformed, which costs them a rounding
 * to fp16. */
static bool put_in_force(kvp_gpu_cells *cells, kvp_gpu_version *made)
{
    const size_t width = kvp_gpu_width(cells);
    page_list list = { 0 };
    int64_t *slots;
    float *room;
    bool ok;

    if (cells->open_pages.base != NULL && !cells->in_place)
        list = list_pages(cells->cache);
    room = kvp_gpu_batch_room(cells->gpu, (size_t)list.n * KVANT_PAGE_TOKENS + 1, width, &slots);
    ok = room != NULL && decode(cells, &list, room) && bring_slots(cells, &list, slots) &&
         bring(cells, made) && take(cells, made) && store(cells, &list, room, slots);
    kvp_gpu_batch_done(cells->gpu);
    return ok;
}

/* Whether a transform is of use. Keys without centres per block have one common centre, which
 * sealed keys have as well. */
static bool is_of_use(const kvp_gpu_cells *cells)
{
    const kvp_gpu_learner *l = cells->learner;

    return !l->failed && l->made.codecs != NULL &&
           kvp_gpu_tables(l->made.codecs[0]).n_weights > cells->head_dim &&
           (l->made.start != NULL || cells->center == NULL || !cells->cache->ranges.plain);
}

/* Ends learning for the first position bucket. */
static void end(kvp_gpu_cells *cells)
{
    const kvp_gpu_cache *cache = cells->cache;
    const bool more = cache->n_blocks / cache->n_streams * KVANT_PAGE_TOKENS > KVP_FIRST_RANGE;

    if (cells->n_weights <= cells->head_dim || !more)
        kvp_gpu_learner_free(cells);
    cells->weighed = true;
}

bool kvp_gpu_first_join(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_learner *l = cells->learner;
    bool ok = true;

    if (!kvp_gpu_is_weighing(cells) || l == NULL || !l->begun)
        return true;
    kvp_gpu_learner_finish(l);
    if (l->failed)
        kvp_error("%s: no memory to learn a matrix; keys are stored without one", kv->name);
    if (is_of_use(cells))
        ok = put_in_force(cells, &l->made);
    kvp_gpu_learner_drop(cells, l);
    end(cells);
    if (!ok)
        kvp_error("%s: its matrix could not be put in force", kv->name);
    return ok;
}

/* Ends learning in all layers once a layer has all that it will have. Blocks have one id for all
 * layers, and KVP_PLAIN is for rows that were sealed before. */
void kvp_gpu_first_end(kvp_gpu_cache *cache)
{
    bool any = false;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        any = any || cells->weighed;
    }
    cache->weighing = cache->weighs && !any;
    for (size_t i = 0; i < cache->n_tensors && any; i++)
        if (kvp_gpu_is_weighing(cache->tensors[i]->cells))
            end(cache->tensors[i]->cells);
}

static bool join(kvp_gpu_cache *cache)
{
    bool ok = true;

    mark_plain(cache);
    for (size_t i = 0; i < cache->n_tensors; i++)
        ok = kvp_gpu_first_join(cache->tensors[i]) && ok;
    kvp_gpu_first_end(cache);
    cache->begun = false;
    return ok;
}

/* When */

bool kvp_gpu_first_settle(kvp_gpu_cache *cache)
{
    if (!cache->weighing || cache->in_place)
        return true;
    kvp_gpu_first_end(cache); /* a graph may have learned the transforms since */
    if (!cache->weighing)
        return true;
    if (!cache->begun)
        begin(cache);
    cache->tried = false;
    return !cache->begun || join(cache);
}

/* Whether a step that is sealed at once learns the transforms in its graph, because it has more
 * rows than the pages. */
static bool makes_its_own(const kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    const page_list list = list_pages(cache);

    return !cache->begun && step->n > count_rows(cache, &list, false);
}

bool kvp_gpu_first_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step, bool kept, bool takes)
{
    bool ok = true;

    if (!cache->weighing || cache->in_place || kvp_gpu_ranges_saw(cache, step))
        return true;
    kvp_gpu_first_end(cache);
    if (!kept || takes)
        ok = (!kept && makes_its_own(cache, step)) || kvp_gpu_first_settle(cache);
    else if (!cache->begun && !cache->tried && is_ripe(cache))
        begin(cache);
    cache->asks = cache->weighing && !cache->begun && step->n >= KVP_ASKED_TOKENS;
    return ok;
}

void kvp_gpu_first_mark(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    const bool seals = !cache->keeps || !cache->waits;

    if (cache->weighing && seals && step->n >= KVP_LEARN_ROWS && !kvp_gpu_ranges_saw(cache, step))
        mark_plain(cache);
}

/* In a graph */

/* The attention node over the keys that a node writes, if its queries exist when the node is
 * computed; else NULL. llama.cpp computes queries before it stores keys. */
static const abi_tensor *attention_of(const abi_graph *graph, const abi_tensor *node)
{
    const abi_tensor *found = NULL;
    bool behind = false;

    for (int i = 0; i < graph->n_nodes && found == NULL; i++) {
        const abi_tensor *at = graph->nodes[i];
        if (at->op == kvp_api.op.flash_attn_ext && kvp_root(at->src[1]) == kvp_root(node))
            found = at;
    }
    for (int i = 0; i < graph->n_nodes && found != NULL; i++) {
        behind = behind || graph->nodes[i] == node;
        if (behind && graph->nodes[i] == kvp_root(found->src[0]))
            found = NULL;
    }
    return found;
}

/* Copies the first rows of a batch from GPU memory. */
static bool fetch_lesson(kvp_gpu_backend *b, const abi_tensor *node, kvp_gpu_lesson *lesson)
{
    const abi_tensor *keys = node->src[0];
    const size_t all = (size_t)keys->ne[1], n = all < KVP_ENOUGH_ROWS ? all : KVP_ENOUGH_ROWS,
                 row = (size_t)keys->ne[0] * sizeof(float);
    abi_tensor copy = { 0 };
    kvp_gpu_step step = { 0 };

    *lesson = (kvp_gpu_lesson){ .n = n, .rows = malloc(n * row) };
    if (lesson->rows == NULL || !kvp_gpu_fetch(b, KVP_FETCHED_KEYS, keys, &copy))
        return false;
    for (size_t i = 0; i < n; i++)
        memcpy((char *)lesson->rows + i * row, (const char *)copy.data + i * copy.nb[1], row);
    if (!kvp_gpu_find_step(b->gpu, node->src[1]->data, b->positions, all, &step) ||
        step.positions == NULL)
        return true;
    lesson->positions = malloc(n * sizeof(*lesson->positions));
    if (lesson->positions != NULL)
        memcpy(lesson->positions, step.positions, n * sizeof(*lesson->positions));
    return lesson->positions != NULL;
}

/* Whether tokens of the batch differ enough. The first layer that asks examines them for all
 * layers. */
static bool look(kvp_gpu_backend *b, const abi_tensor *values)
{
    abi_tensor copy = { 0 };

    if (!b->looked)
        b->monotonous = values != NULL &&
                        kvp_gpu_fetch(b, KVP_FETCHED_VALUES, values->src[0], &copy) &&
                        are_alike(copy.data, copy.nb[1] / sizeof(float), (size_t)copy.ne[1],
                                  (size_t)copy.ne[0]);
    b->looked = true;
    return !b->monotonous;
}

bool kvp_gpu_first_in_graph(kvp_gpu_backend *b, const abi_tensor *node, const abi_tensor *values)
{
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node);
    const abi_tensor *attention;
    kvp_gpu_lesson lesson = { 0 };
    bool ok;

    if (node->src[0]->ne[1] < (int64_t)KVP_LEARN_ROWS || cells->learner == NULL ||
        cells->learner->begun || !look(b, values))
        return true;
    attention = attention_of(b->graph, node);
    ok = (attention == NULL || kvp_gpu_queries_keep(b, attention)) &&
         fetch_lesson(b, node, &lesson) && kvp_gpu_queries_ready(cells->cache);
    if (ok) {
        kvp_gpu_learner_learn(cells, &lesson);
        return kvp_gpu_first_join(kvp_kv_of(node));
    }
    free(lesson.rows);
    free(lesson.positions);
    kvp_error("%s: no matrix can be learnt from the first rows", kvp_root(node)->name);
    return false;
}
