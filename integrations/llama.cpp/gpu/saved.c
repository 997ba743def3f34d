/* saved.c - rows of a cache tensor in GPU memory as records (kvant/tensor_hooks.h), for saved
 * states. restored.c brings records back.
 *
 * Sealed pages have the bytes of a CPU's pages, and rows in exact pages are fp16 on both. A layer
 * keeps its learned transforms in the computer's memory as records hold them (`kept`). A cache in
 * place has no record: its fp16 rows are the smallest state without loss. */
#include "learner.h"
#include "saved.h"

#include <stdlib.h>
#include <string.h>

/* Transforms */

kvant_tensor *kvp_gpu_form(kvp_gpu_cells *cells)
{
    if (cells->form.tensor == NULL &&
        kvp_record_copy_create(cells->sources, cells->n_kv_heads, 1, &cells->form) != KVANT_OK)
        kvp_record_copy_free(&cells->form);
    return cells->form.tensor;
}

void kvp_gpu_keep(kvp_gpu_cells *cells, uint32_t id, void *transform)
{
    free(cells->kept[id]);
    cells->kept[id] = transform;
}

void kvp_gpu_keep_affine(kvp_gpu_cells *cells, uint32_t id, const float *center, const float *scale)
{
    const kvant_tensor *form = kvp_gpu_form(cells);
    void *transform = form != NULL ? malloc(kvant_tensor_transform_size(form)) : NULL;

    if (transform != NULL)
        kvant_tensor_affine_transform(form, center, scale, transform);
    kvp_gpu_keep(cells, id, transform);
}

void kvp_gpu_keep_none(kvp_gpu_cells *cells)
{
    for (uint32_t id = 0; id < KVP_MOST_BUCKETS; id++)
        kvp_gpu_keep(cells, id, NULL);
    cells->learned_ids = 0;
}

/* The id whose numbers serve blocks with this id: layers may lack some (kvp_gpu_matrix_of). */
static uint32_t serving_id(const kvp_gpu_cells *cells, uint32_t id)
{
    while (id > 0 && !(cells->further_made >> id & 1))
        id--;
    return id;
}

/* Reads a learned centre and scale from the GPU. */
static bool read_affine(const kvp_gpu_cells *cells, const kvant_tensor *form, void *transform)
{
    const size_t width = kvp_gpu_width(cells), bytes = width * sizeof(float);
    float *numbers = malloc(2 * bytes);
    const bool ok = numbers != NULL &&
                    (cells->center == NULL ||
                     kvp_gpu_copy_out_rows(cells->gpu, numbers, bytes, cells->center, bytes, 1)) &&
                    (cells->scale == NULL || kvp_gpu_copy_out_rows(cells->gpu, numbers + width,
                                                                   bytes, cells->scale, bytes, 1));

    if (ok)
        kvant_tensor_affine_transform(form, cells->center != NULL ? numbers : NULL,
                                      cells->scale != NULL ? numbers + width : NULL, transform);
    free(numbers);
    return ok;
}

/* Fetches a learned transform from the GPU, once. */
static const void *fetch_learned(kvp_gpu_cells *cells, const kvant_tensor *form, uint32_t id)
{
    const size_t width = kvp_gpu_width(cells),
                 halves = kvant_cuda_triangle_halves(cells->head_dim, cells->n_kv_heads);
    float *numbers = malloc(2 * width * sizeof(*numbers) + halves * sizeof(uint16_t));
    void *transform = malloc(kvant_tensor_transform_size(form));
    uint16_t *triangles = (uint16_t *)(void *)(numbers + 2 * width);
    const bool ok = numbers != NULL && transform != NULL &&
                    kvp_gpu_learner_read(cells, id, triangles, numbers, numbers + width);
    const kvant_matrix_numbers of = { cells->center != NULL ? numbers : NULL, triangles,
                                      cells->has_block_centers ? numbers + width : NULL,
                                      &cells->cache->buckets.centers.rope };

    if (ok)
        kvant_tensor_matrix_transform(form, &of, transform);
    kvp_gpu_keep(cells, id, ok ? transform : NULL);
    if (!ok)
        free(transform);
    free(numbers);
    return cells->kept[id];
}

const void *kvp_gpu_transform_of(kvp_gpu_cells *cells, uint32_t id, void *room)
{
    const kvant_tensor *form = kvp_gpu_form(cells);
    bool ok = true;

    if (form == NULL)
        return NULL;
    id = serving_id(cells, id);
    if (cells->kept[id] != NULL)
        return cells->kept[id];
    if (cells->learned_ids >> id & 1)
        return fetch_learned(cells, form, id);
    if (id > 0 || (cells->learned && cells->learns_key_transform && cells->key_transform_size > 0))
        return NULL; /* there was no memory to keep it */
    if (cells->learned)
        ok = read_affine(cells, form, room);
    else
        kvant_tensor_affine_transform(form, NULL, NULL, room);
    return ok ? room : NULL;
}

/* Blocks */

/* A record, and what its blocks and transforms point to. */
typedef struct saved {
    kvant_outer_record record;
    kvant_outer_block *blocks;
    void *transform; /* room for the one that the cells do not keep */
    const void *list[KVP_MOST_BUCKETS];
    int32_t place[KVP_MOST_BUCKETS]; /* by id: its place in the list, or -1 */
} saved;

static void saved_free(saved *s)
{
    free(s->blocks);
    free(s->transform);
}

/* The distance by which a block's keys moved since they were encoded. Keys of layers without RoPE
 * stay. */
static int32_t shift_of(const kvp_gpu_cells *cells, uint32_t id)
{
    const kvp_gpu_lineage of = cells->cache->buckets.lineages[id];
    const struct kvp_gpu_moved *moved =
        &cells->moved[id < KVP_MOST_BUCKETS ? 0 : id - KVP_MOST_BUCKETS];

    return of.by != 0 && moved->of.by == of.by && moved->of.bucket == of.bucket ? of.by : 0;
}

static void describe(const kvp_kv *kv, const kvant_block_slots *from, kvant_outer_block *b,
                     uint32_t *id)
{
    const kvp_gpu_cells *cells = kv->cells;
    const kvp_gpu_cache *cache = cells->cache;
    const bool keys = kv->shape.role == KVANT_ROLE_K;
    const int64_t page = kvp_gpu_page_of(cache, (int64_t)from->block * KVANT_PAGE_TOKENS);
    const int32_t position = cache->buckets.centers.positions[from->block];

    *b = (kvant_outer_block){ .slots = from->slots,
                              .written = cache->written[from->block],
                              .position = INT32_MIN,
                              .shift = keys ? shift_of(cells, cache->buckets.of[from->block]) : 0,
                              .exact = page >= 0 };
    if (page >= 0)
        b->dirty = cache->pages[page].dirty | (keys ? cache->pages[page].moved : 0);
    if (keys && cells->learns_key_transform && position != KVP_NO_POSITION)
        b->position = position - b->shift;
    *id = keys ? serving_id(cells, cache->buckets.lineages[cache->buckets.of[from->block]].bucket)
               : 0;
}

/* The transform's place in the list, where it is put when a block uses it first; -1: it is not
 * known. */
static int32_t place_of(kvp_gpu_cells *cells, saved *s, uint32_t id)
{
    const void *transform = s->place[id] < 0 ? kvp_gpu_transform_of(cells, id, s->transform) : NULL;

    if (transform != NULL) {
        s->place[id] = (int32_t)s->record.n_transforms;
        s->list[s->record.n_transforms++] = transform;
    }
    return s->place[id];
}

static uint32_t count_slots(uint64_t slots)
{
    uint32_t n = 0;

    for (; slots != 0; slots &= slots - 1)
        n++;
    return n;
}

/* Neighbouring cells mostly hold the rows of a sequence in their order. */
static void count_ages(saved *s)
{
    uint32_t later = 0;

    for (uint32_t i = s->record.n_blocks; i > 0; i--) {
        s->blocks[i - 1].age = later;
        later += count_slots(s->blocks[i - 1].slots);
    }
}

/* Describes the blocks of a record. False: they are fp16 rows. */
static bool saved_begin(const kvp_kv *kv, const kvant_block_slots *blocks, uint32_t n, saved *s)
{
    kvp_gpu_cells *cells = kv->cells;
    bool ok = kvp_gpu_form(cells) != NULL;

    *s = (saved){ .blocks = malloc((n + 1) * sizeof(*s->blocks)) };
    if (ok)
        s->transform = malloc(kvant_tensor_transform_size(cells->form.tensor));
    ok = ok && s->blocks != NULL && s->transform != NULL;
    memset(s->place, 0xff, sizeof(s->place));
    for (uint32_t i = 0; i < n && ok; i++) {
        uint32_t id;
        int32_t place;
        describe(kv, &blocks[i], &s->blocks[i], &id);
        place = place_of(cells, s, id);
        s->blocks[i].transform = (uint32_t)place;
        ok = place >= 0;
    }
    s->record = (kvant_outer_record){ .blocks = s->blocks,
                                      .n_blocks = n,
                                      .n_transforms = s->record.n_transforms,
                                      .transforms = s->list,
                                      .rope = &cells->rope };
    if (ok)
        count_ages(s);
    return ok;
}

/* Pages */

/* The number of blocks from the i-th on whose codes lie one after another on the GPU, and at equal
 * distances in the record. */
static uint32_t run_of(const saved *s, const kvant_block_slots *blocks, uint32_t i, ptrdiff_t pitch)
{
    uint32_t n = 1;

    while (i + n < s->record.n_blocks && s->blocks[i + n].codes != NULL &&
           blocks[i + n].block == blocks[i].block + n &&
           (char *)s->blocks[i + n].codes - (char *)s->blocks[i + n - 1].codes == pitch)
        n++;
    return n;
}

static bool copy_codes(const kvp_gpu_cells *cells, const saved *s, const kvant_block_slots *blocks)
{
    const size_t bytes = cells->pages.block_stride;
    bool ok = true;

    for (uint32_t i = 0, n = 1; i < s->record.n_blocks && ok; i += n) {
        ptrdiff_t pitch = 0;
        n = 1;
        if (s->blocks[i].codes == NULL)
            continue;
        if (i + 1 < s->record.n_blocks && s->blocks[i + 1].codes != NULL)
            pitch = (char *)s->blocks[i + 1].codes - (char *)s->blocks[i].codes;
        n = run_of(s, blocks, i, pitch);
        ok = kvp_gpu_copy_out_rows(cells->gpu, s->blocks[i].codes, (size_t)pitch,
                                   kvp_gpu_block_memory(&cells->pages, blocks[i].block), bytes, n);
    }
    return ok;
}

static bool copy_rows(const kvp_gpu_cells *cells, const saved *s, const kvant_block_slots *blocks)
{
    const size_t bytes = cells->open_pages.block_stride;
    bool ok = true;

    for (uint32_t i = 0; i < s->record.n_blocks && ok; i++) {
        const int64_t page =
            kvp_gpu_page_of(cells->cache, (int64_t)blocks[i].block * KVANT_PAGE_TOKENS);
        if (s->blocks[i].rows != NULL)
            ok = cells->open_pages.base != NULL &&
                 kvp_gpu_copy_out_rows(cells->gpu, s->blocks[i].rows, bytes,
                                       kvp_gpu_block_memory(&cells->open_pages, (size_t)page),
                                       bytes, 1);
    }
    return ok;
}

/* Calls from state.c */

const kvant_codec *const *kvp_gpu_codecs_of(const kvp_kv *kv)
{
    const kvp_gpu_cells *cells = kv->cells;

    return cells->sources;
}

kvp_block_state kvp_gpu_block_state(const kvp_kv *kv, uint32_t block)
{
    const kvp_gpu_cells *cells = kv->cells;
    const kvp_gpu_cache *cache = cells->cache;
    const int32_t position = cache->buckets.centers.positions[block];

    return (kvp_block_state){ .written = cache->written[block],
                              .index = position >= 0
                                           ? (uint32_t)position / KVANT_PAGE_TOKENS
                                           : block % (cache->n_blocks / cache->n_streams) };
}

/* Waits for the work on the cache, and holds the lock when it returns true. */
static bool enter(const kvp_kv *kv)
{
    const kvp_gpu_cells *cells = kv->cells;

    if (cells->cache == NULL || cells->group > 1 || cells->in_place || !kvp_gpu_enter(cells->gpu))
        return false;
    kvp_gpu_finish(cells->gpu, kv->layers);
    pthread_mutex_lock(&cells->gpu->lock);
    kvp_gpu_marks_notice(cells->cache, KVANT_ERR_NONFINITE);
    if (kvp_gpu_first_finish(cells->cache) && !cells->in_place)
        return true;
    pthread_mutex_unlock(&cells->gpu->lock);
    return false;
}

kvant_status kvp_gpu_record_size(const kvp_kv *kv, const kvant_block_slots *blocks, uint32_t n,
                                 size_t *bytes)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvant_status status = KVANT_ERR_UNSUPPORTED;
    size_t n_rows = 0;
    saved s;

    for (uint32_t i = 0; i < n; i++)
        n_rows += count_slots(blocks[i].slots);
    if (n_rows * kvp_kv_row_bytes(kv) <= n * cells->pages.block_stride || !enter(kv))
        return status;
    if (saved_begin(kv, blocks, n, &s))
        status = kvant_tensor_outer_size(cells->form.tensor, &s.record, bytes);
    saved_free(&s);
    pthread_mutex_unlock(&cells->gpu->lock);
    return status;
}

kvant_status kvp_gpu_export_record(const kvp_kv *kv, const kvant_block_slots *blocks, uint32_t n,
                                   void *data, size_t bytes)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvant_status status = KVANT_ERR_UNSUPPORTED;
    saved s;

    if (!enter(kv))
        return status;
    if (saved_begin(kv, blocks, n, &s))
        status = kvant_tensor_outer_begin(cells->form.tensor, &s.record, data, bytes);
    if (status == KVANT_OK && !(copy_codes(cells, &s, blocks) && copy_rows(cells, &s, blocks)))
        status = KVANT_ERR_CUDA;
    pthread_mutex_unlock(&cells->gpu->lock);
    if (status == KVANT_OK)
        status = kvant_tensor_outer_end(cells->form.tensor, &s.record, data, bytes);
    saved_free(&s);
    return status;
}
