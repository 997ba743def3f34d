/* lesson.c - the keys that first matrices are made from: the rows in a cache's exact pages.
 *
 * Finds these rows and tells whether their tokens differ enough. Copies the rows of a layer,
 * because steps can change the pages before the lesson, which comes after the graph. first_matrix.c
 * decides when, and learner.c makes the matrices. */
#include "in_place.h"
#include "learner.h"

#include <stdlib.h>
#include <string.h>

/* Exact pages, in the order of their blocks */

kvp_gpu_page_list kvp_gpu_list_pages(const kvp_gpu_cache *cache)
{
    kvp_gpu_page_list list = { 0 };

    for (uint32_t block = 0; block < cache->n_blocks && cache->table != NULL; block++)
        if (cache->table[block] < 0 && cache->written[block] != 0 &&
            cache->buckets.of[block] != KVP_PLAIN)
            list.pages[list.n++] =
                (kvp_gpu_listed){ (uint32_t)(-1 - cache->table[block]), cache->buckets.of[block],
                                  cache->written[block] };
    return list;
}

int64_t kvp_gpu_cell_of(const kvp_gpu_cache *cache, const kvp_gpu_page_list *list, size_t row)
{
    const int64_t block = cache->pages[list->pages[row / KVANT_PAGE_TOKENS].page].block;
    const size_t in_block = row % KVANT_PAGE_TOKENS;

    return cache->written[block] >> in_block & 1 ? block * KVANT_PAGE_TOKENS + (int64_t)in_block
                                                 : -1;
}

static size_t rows_of(const kvp_gpu_page_list *list)
{
    return (size_t)list->n * KVANT_PAGE_TOKENS;
}

/* Whether a row is learned from. known: some rows have positions, and others are left out. */
static bool counts(const kvp_gpu_cache *cache, const kvp_gpu_page_list *list, size_t row,
                   bool known)
{
    const int64_t cell = kvp_gpu_cell_of(cache, list, row);

    return cell >= 0 && (!known || cache->positions[cell] >= 0);
}

size_t kvp_gpu_count_rows(const kvp_gpu_cache *cache, const kvp_gpu_page_list *list, bool known)
{
    size_t n = 0;

    for (size_t row = 0; row < rows_of(list); row++)
        n += counts(cache, list, row, known);
    return n;
}

/* Rows in the computer's memory */

/* The rows of all pages in a list. The caller frees them. NULL with a message, or without
 * memory. */
static float *fetch(const kvp_gpu_cells *cells, const kvp_gpu_page_list *list)
{
    const size_t width = kvp_gpu_width(cells), n = rows_of(list);
    kvant_status status = KVANT_OK;
    int64_t *slots;
    float *room = kvp_gpu_batch_room(cells->gpu, n, width, &slots),
          *rows = malloc(n * width * sizeof(*rows));
    bool ok = room != NULL && rows != NULL;

    for (uint32_t i = 0; i < list->n && ok && status == KVANT_OK; i++)
        status = kvp_gpu_decode_blocks(cells, true, list->pages[i].page, 1,
                                       room + i * KVANT_PAGE_TOKENS * width);
    ok = ok && status == KVANT_OK &&
         kvp_cu_read(rows, room, n * width * sizeof(*rows), cells->gpu->stream);
    if (ok)
        return rows;
    free(rows);
    return NULL;
}

float *kvp_gpu_fetch_learned(const kvp_gpu_cells *cells, const kvp_gpu_page_list *list, bool known)
{
    const size_t width = kvp_gpu_width(cells);
    float *rows = fetch(cells, list);
    size_t n = 0;

    for (size_t row = 0; row < rows_of(list) && rows != NULL; row++)
        if (counts(cells->cache, list, row, known))
            memmove(rows + n++ * width, rows + row * width, width * sizeof(*rows));
    return rows;
}

/* Tokens that are too much alike */

/* The values of a cache's first layer. NULL: no layer has values, so nobody looks. */
static const kvp_kv *first_values(const kvp_gpu_cache *cache)
{
    const kvp_kv *first = NULL;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_kv *kv = cache->tensors[i];
        if (kv->shape.role == KVANT_ROLE_V &&
            (first == NULL || kv->shape.layer < first->shape.layer))
            first = kv;
    }
    return first;
}

static bool pages_are_alike(const kvp_gpu_cache *cache, const kvp_gpu_page_list *list, bool known,
                            size_t n)
{
    const kvp_kv *values = first_values(cache);
    float *rows = values != NULL ? kvp_gpu_fetch_learned(values->cells, list, known) : NULL;
    const bool alike =
        rows != NULL && kvant_learn_values_are_alike(rows, values->shape.row, n, values->shape.row);

    free(rows);
    return alike;
}

/* Reads the first channels of the first n rows, which lie in place. False with a message. */
static bool read_channels(const kvp_kv *values, size_t n, size_t channels, uint16_t *halves)
{
    const size_t bytes = channels * sizeof(*halves);
    const kvp_gpu_cells *cells = values->cells;
    const cu_copy_2d copy = { .from_type = CU_MEMORY_DEVICE,
                              .from_device = (cu_address)(uintptr_t)values->memory,
                              .from_pitch = kvp_kv_row_bytes(values),
                              .to_type = CU_MEMORY_HOST,
                              .to_host = halves,
                              .to_pitch = bytes,
                              .width = bytes,
                              .height = n };

    return kvp_cu_ok(kvp_cu.copy_2d(&copy, cells->gpu->stream), "copying") &&
           kvp_cu_finish(cells->gpu->stream, "copying");
}

bool kvp_gpu_in_place_rows_are_alike(const kvp_gpu_cache *cache, size_t n)
{
    const kvp_kv *values = first_values(cache);
    const size_t width = values != NULL ? values->shape.row : 0,
                 channels = width < KVANT_LEARN_SIGNS ? width : KVANT_LEARN_SIGNS;
    uint16_t *halves = malloc((n * channels + 1) * sizeof(*halves));
    const bool alike = values != NULL && halves != NULL &&
                       read_channels(values, n, channels, halves) &&
                       kvant_learn_halves_are_alike(halves, channels, n, channels);

    free(halves);
    return alike;
}

bool kvp_gpu_tokens_differ(kvp_gpu_backend *b, const abi_tensor *values)
{
    abi_tensor copy = { 0 };

    if (!b->looked)
        b->monotonous = values != NULL &&
                        kvp_gpu_fetch(b, KVP_FETCHED_VALUES, values->src[0], &copy) &&
                        kvant_learn_values_are_alike(copy.data, copy.nb[1] / sizeof(float),
                                                     (size_t)copy.ne[1], (size_t)copy.ne[0]);
    b->looked = true;
    return !b->monotonous;
}

/* Copies in GPU memory */

size_t kvp_gpu_learning_layer(const kvp_gpu_cache *cache, const kvp_gpu_cells *cells)
{
    size_t n = 0;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *of = cache->tensors[i]->cells;
        if (of == cells)
            break;
        n += of->learns_key_transform;
    }
    return n;
}

/* Bytes of a layer's copy. All layers have room for the widest one. */
static size_t copy_bytes(const kvp_gpu_cache *cache, const kvp_gpu_page_list *list)
{
    size_t width = 0;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        width = cells->learns_key_transform && kvp_gpu_width(cells) > width ? kvp_gpu_width(cells)
                                                                            : width;
    }
    return rows_of(list) * width * sizeof(uint16_t);
}

/* Room for the rows of all layers, behind the numbers of the pages. Without it, no matrix is
 * learned. With -sm tensor more layers join the cache in the midst of a graph. */
#define NUMBERS_BYTES 1024u /* of KVP_MOST_PAGES, so that copies are aligned */
_Static_assert(KVP_MOST_PAGES * sizeof(int32_t) <= NUMBERS_BYTES, "numbers of all pages fit");

static void have_copies(kvp_gpu_cache *cache, const kvp_gpu_page_list *list)
{
    const size_t n_layers = kvp_gpu_learning_layer(cache, NULL),
                 bytes = NUMBERS_BYTES + n_layers * copy_bytes(cache, list);
    int32_t numbers[KVP_MOST_PAGES];
    bool ok;

    for (uint32_t i = 0; i < list->n; i++)
        numbers[i] = (int32_t)list->pages[i].page;
    ok = kvp_gpu_fits_free_memory(cache->gpu, bytes) &&
         kvp_gpu_grow(cache->gpu, &cache->kept_queries.keys, bytes, false) &&
         kvp_gpu_upload(cache->gpu, cache->kept_queries.keys.at, numbers,
                        list->n * sizeof(*numbers));
    cache->kept_queries.n_layers = ok ? n_layers : 0;
}

/* Copies a layer's rows as fp16. Returns the copy, or NULL if there is no room for it. */
static const void *copy(const kvp_gpu_cells *cells, const kvp_gpu_page_list *list)
{
    const kvp_gpu_cache *cache = cells->cache;
    const size_t layer = kvp_gpu_learning_layer(cache, cells);
    char *to =
        (char *)cache->kept_queries.keys.at + NUMBERS_BYTES + layer * copy_bytes(cache, list);
    const kvant_cuda_decode_args args = { .size = sizeof(args),
                                          .codec = cells->open_codec,
                                          .pages = cells->open_pages,
                                          .blocks = cache->kept_queries.keys.at,
                                          .n_blocks = list->n,
                                          .n_kv_heads = cells->n_kv_heads,
                                          .type = KVANT_CUDA_F16,
                                          .out = to,
                                          .token_stride = kvp_gpu_width(cells),
                                          .head_stride = cells->head_dim,
                                          .center = cells->center,
                                          .scale = cells->scale };

    return layer < cache->kept_queries.n_layers &&
                   kvant_cuda_decode(&args, cells->gpu->stream) == KVANT_OK
               ? to
               : NULL;
}

/* Lessons */

bool kvp_gpu_lessons_begin(kvp_gpu_cache *cache)
{
    const kvp_gpu_page_list list = kvp_gpu_list_pages(cache);
    const bool known = kvp_gpu_count_rows(cache, &list, true) > 0;
    const size_t n = kvp_gpu_count_rows(cache, &list, known);

    if (n < KVANT_LEARN_ROWS)
        return false;
    cache->kept_queries.alike = pages_are_alike(cache, &list, known, n);
    if (cache->kept_queries.alike)
        return false;
    have_copies(cache, &list);
    return true;
}

/* Which rows count, and their positions, if these are known. */
static bool list_rows(const kvp_gpu_cache *cache, const kvp_gpu_page_list *list,
                      kvp_gpu_learner_input *lesson)
{
    const bool known = kvp_gpu_count_rows(cache, list, true) > 0;

    lesson->n_all = rows_of(list);
    lesson->places = malloc(lesson->n_all * sizeof(*lesson->places));
    lesson->positions = known ? malloc(lesson->n_all * sizeof(*lesson->positions)) : NULL;
    if (lesson->places == NULL || (known && lesson->positions == NULL))
        return false;
    for (size_t row = 0; row < lesson->n_all; row++) {
        if (!counts(cache, list, row, known))
            continue;
        if (known)
            lesson->positions[lesson->n] = cache->positions[kvp_gpu_cell_of(cache, list, row)];
        lesson->places[lesson->n++] = (uint32_t)row;
    }
    return true;
}

bool kvp_gpu_lesson_of(const kvp_gpu_cells *cells, kvp_gpu_learner_input *lesson)
{
    const kvp_gpu_page_list list = kvp_gpu_list_pages(cells->cache);

    *lesson = (kvp_gpu_learner_input){ .type = KVANT_CUDA_F16, .stride = kvp_gpu_width(cells) };
    if (list_rows(cells->cache, &list, lesson))
        lesson->rows = copy(cells, &list);
    if (lesson->rows != NULL)
        return true;
    kvp_gpu_lesson_free(lesson);
    return false;
}

void kvp_gpu_lesson_free(const kvp_gpu_learner_input *lesson)
{
    free(lesson->places);
    free(lesson->positions);
}
