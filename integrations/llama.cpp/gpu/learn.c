/* learn.c - learns centre and scale from the first rows after a cache was created or cleared.
 *
 * A batch of many tokens is enough to learn from. Shorter batches are stored without centre and
 * scale until there are enough rows, and are then encoded once more. */
#include "restored.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../host.h"
#include "../log.h"

#define LEARN_THREADS 16u /* at most; kvant takes no more threads than the process has CPUs */

/* A codec that learns the same from rows and encodes them quickly; NULL: no such codec, or no
 * memory. */
static kvant_codec *quick_codec(const kvp_gpu_cells *cells)
{
    kvant_codec_info info = { .size = sizeof(info) };
    kvant_codec *codec = NULL;
    char spec[64], err[128];

    kvant_codec_get_info(cells->sources[0], &info);
    if (info.center == KVANT_CENTER_FILE || info.norm == KVANT_NORM_FILE)
        return NULL;
    snprintf(spec, sizeof(spec), "int-8:center=%s,norm=%s",
             info.center == KVANT_CENTER_FIRST ? "first" : "none",
             info.norm == KVANT_NORM_FIRST ? "first" : "none");
    kvant_codec_create(spec, cells->head_dim, info.role, 0, &codec, err, sizeof(err));
    return codec;
}

/* A tensor in the computer's memory that has learned from these rows. codecs: one per kv head. */
static kvant_tensor *learn_tensor(const kvp_gpu_cells *cells, const kvant_codec *const *codecs,
                                  const float *rows, size_t n, void **memory)
{
    const kvant_tensor_params params = { .size = sizeof(params),
                                         .codecs = codecs,
                                         .n_kv_heads = cells->n_kv_heads,
                                         .n_sequences = 1,
                                         .n_blocks = (uint32_t)(n / KVANT_PAGE_TOKENS + 2) };
    int64_t *slots = malloc(n * sizeof(*slots));
    kvant_tensor *tensor = NULL;
    size_t bytes = 0;
    bool ok = slots != NULL && kvant_tensor_size(&params, &bytes) == KVANT_OK;

    *memory = ok ? kvant_os_alloc(KVANT_PAGE_ALIGN, (bytes + 63) / 64 * 64) : NULL;
    if (*memory != NULL)
        memset(*memory, 0, bytes);
    ok = *memory != NULL && kvant_tensor_create(&params, *memory, &tensor) == KVANT_OK;
    for (size_t i = 0; i < n && ok; i++)
        slots[i] = (int64_t)i;
    ok = ok && kvant_tensor_write(tensor, slots, n, rows, kvp_gpu_width(cells), LEARN_THREADS) ==
                   KVANT_OK;
    free(slots);
    if (!ok)
        kvant_tensor_free(&tensor);
    return tensor;
}

/* Reads centre, scale and query scale of all kv heads; members are NULL where the tensor has
 * none. */
static bool read_learned(const kvp_gpu_cells *cells, const kvant_tensor *tensor, uint32_t block,
                         float *numbers, bool *center, bool *scale)
{
    const size_t d = cells->head_dim, width = kvp_gpu_width(cells);

    *center = *scale = false;
    for (uint32_t head = 0; head < cells->n_kv_heads; head++) {
        const kvant_cuda_tables tables = kvp_gpu_tables(cells->sources[head]);
        kvant_block_info info = { .size = sizeof(info) };
        if (kvant_tensor_get_block(tensor, block, head, &info) != KVANT_OK)
            return false;
        *center = *center || info.affine.center != NULL;
        *scale = *scale || info.affine.scale != NULL;
        for (size_t j = 0; j < d; j++) {
            float *at = numbers + head * d + j;
            const float s = info.affine.scale != NULL ? info.affine.scale[j] : 1;
            at[0] = info.affine.center != NULL ? info.affine.center[j] : 0;
            at[width] = s;
            at[2 * width] =
                s * (cells->key_transform_size == d ? tables.inverse_key_transform[j] : 1);
        }
    }
    return true;
}

bool kvp_gpu_adopt_affine(kvp_gpu_cells *cells, const kvant_tensor *from, uint32_t block)
{
    const size_t width = kvp_gpu_width(cells);
    float *numbers = malloc(3 * width * sizeof(*numbers)),
          *at = kvp_gpu_affine(cells, &cells->numbers);
    bool center, scale, ok;

    ok = numbers != NULL && read_learned(cells, from, block, numbers, &center, &scale) &&
         kvp_gpu_upload(cells->gpu, at, numbers, 3 * width * sizeof(*numbers)) &&
         kvp_gpu_upload(cells->gpu, cells->key_center.at, numbers, width * sizeof(*numbers));
    if (ok) {
        cells->center = center && !cells->uncentred ? at : NULL;
        cells->scale = scale ? at + width : NULL;
        cells->query_scale =
            scale || cells->key_transform_size == cells->head_dim ? at + 2 * width : NULL;
        cells->learned = true;
        if (!cells->in_place)
            atomic_fetch_add(&cells->gpu->epoch, 1); /* captured graphs have none of these */
    }
    free(numbers);
    return ok;
}

/* Values learn once, so they learn nothing from rows that are too much alike. */
static bool rows_teach_nothing(const kvp_gpu_cells *cells, const float *rows, size_t n)
{
    const size_t width = kvp_gpu_width(cells);
    kvant_codec_info info = { .size = sizeof(info) };

    return kvant_codec_get_info(cells->sources[0], &info) == KVANT_OK &&
           info.role == KVANT_ROLE_V && kvant_learn_values_are_alike(rows, width, n, width);
}

bool kvp_gpu_learn_from(kvp_gpu_cells *cells, const float *rows, size_t n)
{
    bool ok;
    void *memory = NULL;
    kvant_codec *quick;
    const kvant_codec **codecs;
    kvant_tensor *tensor = NULL;

    if (rows_teach_nothing(cells, rows, n)) {
        cells->learned = true;
        return true;
    }
    quick = quick_codec(cells);
    codecs = malloc(cells->n_kv_heads * sizeof(*codecs));
    for (uint32_t head = 0; codecs != NULL && head < cells->n_kv_heads; head++)
        codecs[head] = quick != NULL ? quick : cells->sources[head];
    if (codecs != NULL)
        tensor = learn_tensor(cells, codecs, rows, n, &memory);
    ok = tensor != NULL && kvp_gpu_adopt_affine(cells, tensor, 0);
    kvant_tensor_free(&tensor);
    kvant_codec_free(&quick);
    free(codecs);
    kvant_os_free(memory);
    return ok;
}

/* First rows */

static bool note_first(kvp_gpu_cache *cache, const int64_t *cells, size_t n)
{
    int64_t *first = realloc(cache->first, (cache->n_first + n) * sizeof(*first));

    if (first == NULL)
        return false;
    cache->first = first;
    for (size_t i = 0, j; i < n; i++) {
        for (j = 0; j < cache->n_first && first[j] != cells[i]; j++)
            ;
        first[j] = cells[i];
        cache->n_first += j == cache->n_first;
    }
    return true;
}

bool kvp_gpu_copy_first(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n)
{
    const size_t n_first = cache->learning ? cache->n_first : 0;
    bool ok = true;

    if (cache->positions != NULL)
        memmove(cache->positions + (size_t)to * KVANT_PAGE_TOKENS,
                cache->positions + (size_t)first * KVANT_PAGE_TOKENS,
                (size_t)n * KVANT_PAGE_TOKENS * sizeof(*cache->positions));
    for (size_t i = 0; i < n_first && ok; i++) {
        const int64_t block = cache->first[i] / KVANT_PAGE_TOKENS,
                      cell = cache->first[i] + ((int64_t)to - first) * KVANT_PAGE_TOKENS;
        ok = block < first || block >= (int64_t)first + n || note_first(cache, &cell, 1);
    }
    return ok;
}

/* Fetches the first rows. The caller frees them; NULL with a message. */
static float *fetch_first(const kvp_gpu_cells *cells)
{
    const kvp_gpu_cache *cache = cells->cache;
    const size_t width = kvp_gpu_width(cells);
    int64_t held = -1;
    float *const rows = malloc((cache->n_first + KVANT_PAGE_TOKENS) * width * sizeof(*rows));
    float *const page = rows != NULL ? rows + cache->n_first * width : NULL;
    bool ok = page != NULL;

    for (size_t i = 0; i < cache->n_first && ok; i++) {
        const int64_t block = cache->first[i] / KVANT_PAGE_TOKENS,
                      open = kvp_gpu_page_of(cache, cache->first[i]);
        if (block != held)
            ok = kvp_gpu_fetch_block(cells, open >= 0, (size_t)(open >= 0 ? open : block), page);
        held = block;
        memcpy(rows + i * width, page + (size_t)(cache->first[i] % KVANT_PAGE_TOKENS) * width,
               width * sizeof(*rows));
    }
    if (ok)
        return rows;
    free(rows);
    return NULL;
}

static bool store_first(const kvp_kv *kv, const float *rows)
{
    const kvp_gpu_cells *cells = kv->cells;
    const kvp_gpu_cache *cache = cells->cache;
    const size_t n = cache->n_first, width = kvp_gpu_width(cells);
    int64_t *room_slots = NULL, *slots = malloc(n * sizeof(*slots));
    float *room = kvp_gpu_batch_room(cells->gpu, n, width, &room_slots);
    bool ok = slots != NULL && room != NULL &&
              kvp_gpu_upload(cells->gpu, room, rows, n * width * sizeof(*rows));

    if (ok && cells->group > 1)
        ok = kvp_gpu_stage_rows(kv, cache->first, n, room, NULL) == KVANT_OK;
    for (int open = cells->group > 1; open < (cells->open_pages.base != NULL ? 2 : 1) && ok;
         open++) {
        for (size_t i = 0; i < n; i++) {
            const int64_t page = kvp_gpu_page_of(cache, cache->first[i]),
                          at = cache->first[i] % KVANT_PAGE_TOKENS;
            slots[i] = !open ? cache->first[i] : page >= 0 ? page * KVANT_PAGE_TOKENS + at : -1;
        }
        ok = kvp_gpu_upload(cells->gpu, room_slots, slots, n * sizeof(*slots)) &&
             kvp_gpu_append(cells, kv->shape.role, open ? &cells->open_pages : NULL, room,
                            (kvp_gpu_run){ 0, n, 0 }, room_slots,
                            cells->gpu->unsealed) == KVANT_OK &&
             kvp_cu_finish(cells->gpu->stream, "storing rows");
    }
    free(slots);
    return ok;
}

/* Learns from n rows, or from the noted first rows if n is 0. If there is a centre or a scale then,
 * the noted rows are stored again. */
static bool learn_now(const kvp_kv *kv, const float *rows, size_t n)
{
    kvp_gpu_cells *cells = kv->cells;
    const bool single_position = kvp_gpu_learns_alone(cells);
    const size_t n_first = single_position ? cells->cache->n_first : 0;
    float *first = n_first > 0 ? fetch_first(cells) : NULL;
    bool ok;

    if (single_position)
        ok = (n_first == 0 || first != NULL) &&
             kvp_gpu_learn_from(cells, n > 0 ? rows : first, n > 0 ? n : n_first) &&
             (n_first == 0 || (cells->center == NULL && cells->scale == NULL) ||
              store_first(kv, first));
    else
        ok = kvp_gpu_first_affine(cells, rows, n);
    if (!ok)
        kvp_error("%s: no centre could be learned from the first rows", kv->name);
    free(first);
    return ok;
}

bool kvp_gpu_learn(kvp_kv *kv, const float *rows, size_t stride, size_t n, cu_stream stream)
{
    kvp_gpu_cells *cells = kv->cells;
    const size_t width = kvp_gpu_width(cells);
    const size_t piece = stride == width ? n : 1; /* 1: rows are not contiguous */
    float *host = malloc(n * width * sizeof(*host));
    bool ok = host != NULL;

    for (size_t i = 0; i < n && ok; i += piece)
        ok = kvp_cu_ok(kvp_cu.copy_out(host + i * width, (cu_address)(uintptr_t)(rows + i * stride),
                                       piece * width * sizeof(*host), stream),
                       "copying");
    pthread_mutex_lock(&cells->gpu->lock);
    ok = ok && kvp_cu_finish(stream, "copying") && learn_now(kv, host, n);
    pthread_mutex_unlock(&cells->gpu->lock);
    free(host);
    return ok;
}

bool kvp_gpu_learn_before(kvp_gpu_cache *cache, const int64_t *batch, size_t n, cu_stream stream)
{
    /* with -sm tensor a batch is several graphs, and later layers do not have its rows yet */
    const bool again =
        cache->n_first > 0 && n > 0 && cache->first[cache->n_first - 1] == batch[n - 1];
    const bool enough = cache->n_first >= KVANT_LEARN_ROWS && !again;
    bool ok = !enough || kvp_cu_finish(stream, "storing rows");

    cache->learning = false;
    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        const kvp_gpu_cells *cells = cache->tensors[i]->cells;
        ok = !enough || !kvp_gpu_learns_alone(cells) || learn_now(cache->tensors[i], NULL, 0);
        cache->learning = cache->learning || kvp_gpu_learns_alone(cells);
    }
    if (!cache->learning)
        cache->n_first = 0;
    return ok && (!cache->learning || n >= KVANT_LEARN_ROWS || note_first(cache, batch, n));
}

bool kvp_gpu_learn_written(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows)
{
    kvp_gpu_cells *own = kv->cells;

    if (!kvp_gpu_is_learning(own))
        return true;
    if (n >= KVANT_LEARN_ROWS)
        return learn_now(kv, rows, n);
    if (kvp_gpu_learns_alone(own))
        return note_first(own->cache, cells, n);
    own->learned = true; /* these rows are sealed without a centre */
    return true;
}
