/* restored.c - puts the blocks of a record into a cache in GPU memory, bit for bit (saved.h).
 *
 * All tensors of a cache share the exact pages, positions and transform ids of blocks. So the first
 * tensor of a restored run decides these for all of them. A block is refused if it holds other rows
 * too, if its keys were shifted, or if its transform has no place. Then state.c decodes the rows of
 * the block and stores them like new rows.
 *
 * restored_transforms.c finds places for transforms. */
#include "restored.h"

#include <stdlib.h>
#include <string.h>

#include "../llama_states.h"
#include "in_place.h"

/* Beginning */

/* Forgets the rows of n blocks. The transforms stay. */
static void forget_blocks(kvp_gpu_cache *cache, uint32_t first, uint32_t n)
{
    for (uint32_t block = first; block < first + n; block++) {
        const int64_t page = kvp_gpu_page_of(cache, (int64_t)block * KVANT_PAGE_TOKENS);
        if (page >= 0)
            kvp_gpu_put_page(cache, (uint32_t)page, KVP_NO_PAGE);
        if (cache->plan != NULL)
            kvant_plan_release(cache->plan, block);
        cache->written[block] = 0;
        cache->buckets.of[block] = 0;
        kvp_gpu_centers_assign(cache, block, KVP_NO_POSITION);
        kvp_gpu_centers_move(cache, block, 0);
    }
    cache->buckets.changed = true;
}

/* Forgets rows of a block. */
static void forget_slots(kvp_gpu_cache *cache, uint32_t block, uint64_t slots)
{
    const int64_t page = kvp_gpu_page_of(cache, (int64_t)block * KVANT_PAGE_TOKENS);

    if (!(cache->written[block] & slots))
        return;
    if (!(cache->written[block] & ~slots)) {
        forget_blocks(cache, block, 1);
        return;
    }
    cache->written[block] &= ~slots;
    if (page >= 0) {
        cache->pages[page].dirty &= ~slots;
        cache->pages[page].moved &= ~slots;
    }
}

/* The cache has noted cells that centres will be learned from. */
static void forget_noted(kvp_gpu_cache *cache)
{
    size_t n = 0;

    for (size_t i = 0; i < cache->n_first; i++)
        if (cache->written[cache->first[i] / KVANT_PAGE_TOKENS] >>
                cache->first[i] % KVANT_PAGE_TOKENS &
            1)
            cache->first[n++] = cache->first[i];
    cache->n_first = n;
}

/* All layers have the same cells, so the tensor that began counts. */
void kvp_gpu_hold(kvp_kv *kv, size_t cell, size_t n, bool begins)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;

    if (cache == NULL)
        return;
    if (begins) {
        memset(cache->held, 0, cache->n_blocks * sizeof(*cache->held));
        cache->holder = kv;
    }
    if (cache->holder != kv)
        return;
    for (size_t i = cell; i < cell + n && i / KVANT_PAGE_TOKENS < cache->n_blocks; i++)
        cache->held[i / KVANT_PAGE_TOKENS] |= (uint64_t)1 << i % KVANT_PAGE_TOKENS;
}

void kvp_gpu_forget_others(kvp_kv *kv)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_cache *cache = cells->cache;

    if (cache == NULL || cache->in_place || !kvp_gpu_enter(cells->gpu))
        return;
    kvp_gpu_finish(cells->gpu, kv->layers);
    pthread_mutex_lock(&cells->gpu->lock);
    for (uint32_t block = 0; block < cache->n_blocks; block++)
        forget_slots(cache, block, ~cache->held[block]);
    forget_noted(cache);
    pthread_mutex_unlock(&cells->gpu->lock);
}

/* Forgets transforms, too. */
static void clear_all(const kvp_gpu_cache *cache)
{
    for (size_t i = 0; i < cache->n_tensors; i++)
        cache->tensors[i]->remote->clear(cache->tensors[i]);
}

/* Prepares the cache for a state. Rows that no sequence has any more are forgotten, as far as this
 * is known: all rows if the other sequences of the context are empty, and all rows of the state's
 * stream. */
static bool begin_state(const kvp_gpu_incoming *in)
{
    kvp_gpu_cache *cache = in->cache;
    const uint32_t a_stream = cache->n_blocks / cache->n_streams;
    bool alone = false;
    const unsigned state = kvp_restoring_number(&alone);

    if (!in->first || (state != 0 && cache->restored == state))
        return true;
    cache->restored = state;
    if (alone && cache->in_place)
        clear_all(cache);
    else if (alone)
        forget_blocks(cache, 0, cache->n_blocks);
    else if (cache->n_streams > 1 && state != 0)
        forget_blocks(cache, in->blocks[0].block / a_stream * a_stream, a_stream);
    forget_noted(cache);
    if (!kvp_gpu_hand_over(cache))
        return false;
    cache->adopts_all = kvp_gpu_cache_is_empty(cache);
    cache->adopts_keys = cache->adopts_all || (cache->lacks_key_transform && !cache->lesson.begun);
    return cache->adopts_keys || kvp_gpu_cache_settle(cache, cache->gpu->stream);
}

/* Blocks */

/* Centres rotate to the position that the first tensor gave the block. */
static bool may_take(const kvp_gpu_incoming *in, uint32_t i)
{
    const uint32_t block = in->blocks[i].block;

    return (in->cache->written[block] & ~in->blocks[i].slots) == 0 && in->outer[i].shift == 0 &&
           (in->first || !in->outer[i].has_centers ||
            in->outer[i].position == in->cache->buckets.centers.positions[block]);
}

/* Lists the cells of the blocks that are taken, with their positions. Then only blocks that were
 * exact stay in the list. */
static kvp_gpu_step step_of(const kvp_gpu_incoming *in)
{
    kvp_gpu_step step = { .cells = in->cells_of, .positions = in->positions };
    size_t n = 0;

    for (uint32_t i = 0; i < in->n; i++)
        for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS && in->taken[i]; slot++) {
            if (!(in->blocks[i].slots >> slot & 1))
                continue;
            if (in->outer[i].position == KVP_NO_POSITION)
                step.positions = NULL;
            in->positions[step.n] = in->outer[i].position + (int32_t)slot;
            in->cells_of[step.n] = (int64_t)in->blocks[i].block * KVANT_PAGE_TOKENS + slot;
            in->exact_of[step.n++] = in->outer[i].exact != 0;
        }
    if (step.n > 0)
        kvp_gpu_count_positions(in->cache, &step, in->positions);
    for (size_t i = 0; i < step.n; i++) {
        in->cells_of[n] = in->cells_of[i];
        in->positions[n] = in->positions[i];
        n += in->exact_of[i];
    }
    return (kvp_gpu_step){ in->cells_of, in->positions, n };
}

/* A block is exact if it was exact when it was saved, and if there is a page for it. */
static void set_block(const kvp_gpu_incoming *in, uint32_t i)
{
    kvp_gpu_cache *cache = in->cache;
    const uint32_t block = in->blocks[i].block;
    const kvant_outer_block *from = &in->outer[i];
    const int64_t page = kvp_gpu_page_of(cache, (int64_t)block * KVANT_PAGE_TOKENS);

    cache->written[block] = from->slots;
    kvp_gpu_centers_assign(cache, block, from->position);
    kvp_gpu_centers_move(cache, block, 0);
    if (page >= 0 && !from->exact) {
        kvp_gpu_put_page(cache, (uint32_t)page, KVP_NO_PAGE);
        kvant_plan_seal(cache->plan, block);
    } else if (page >= 0) {
        cache->pages[page].dirty = from->dirty;
        cache->pages[page].moved = 0;
    }
}

/* Decides for the tensors of the cache. */
static bool plan_blocks(const kvp_gpu_incoming *in)
{
    const kvp_gpu_step step = step_of(in);

    for (uint32_t i = 0; i < in->n; i++)
        if (in->taken[i])
            in->cache->written[in->blocks[i].block] = 0; /* its former rows are not decoded */
    if (!kvp_gpu_open_restored(in->kv, &step, in->cache->gpu->stream))
        return false;
    for (uint32_t i = 0; i < in->n; i++)
        if (in->taken[i])
            set_block(in, i);
    in->cache->buckets.changed = true;
    in->cache->buckets.n_last = 0; /* the next step is a new one, even in the same cells */
    return true;
}

/* Pages */

/* Encodes some rows of fp16 pages into the block's sealed pages. */
static bool encode(const kvp_gpu_incoming *in, uint32_t i, uint64_t rows)
{
    const kvp_gpu_cells *cells = in->cells;
    const size_t page = kvp_gpu_open_page_bytes(cells), bytes = cells->n_kv_heads * page;
    int64_t slots[KVANT_PAGE_TOKENS], *room_slots;
    float *room =
        kvp_gpu_batch_room(cells->gpu, KVANT_PAGE_TOKENS, kvp_gpu_width(cells), &room_slots);
    kvant_cuda_append_args args = { .size = sizeof(args),
                                    .type = KVANT_CUDA_F16,
                                    .n_tokens = KVANT_PAGE_TOKENS,
                                    .n_kv_heads = cells->n_kv_heads,
                                    .slots = room_slots,
                                    .refused = kvp_gpu_word(cells->gpu->unsealed),
                                    .transformed = 1 };

    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
        slots[slot] =
            rows >> slot & 1 ? (int64_t)in->blocks[i].block * KVANT_PAGE_TOKENS + slot : -1;
    *(kvp_gpu_restored_is_keys(in) ? &args.k : &args.v) =
        (kvant_cuda_rows){ .codec = cells->codec,
                           .pages = cells->pages,
                           .rows = room,
                           .token_stride = cells->head_dim,
                           .head_stride = page / sizeof(uint16_t) };
    return room != NULL &&
           kvp_gpu_copy_in_rows(cells->gpu, room, in->outer[i].rows, bytes, bytes, 1) &&
           kvp_gpu_upload(cells->gpu, room_slots, slots, sizeof(slots)) &&
           kvant_cuda_append(&args, cells->gpu->stream) == KVANT_OK &&
           kvp_cu_finish(cells->gpu->stream, "storing rows");
}

static bool fill_exact(const kvp_gpu_incoming *in, uint32_t i)
{
    const kvp_gpu_cells *cells = in->cells;
    const kvant_outer_block *from = &in->outer[i];
    const uint32_t block = in->blocks[i].block;
    const size_t bytes = cells->open_pages.block_stride, sealed = cells->pages.block_stride;
    const int64_t page = kvp_gpu_page_of(in->cache, (int64_t)block * KVANT_PAGE_TOKENS);
    const uint64_t missing =
        from->dirty & ~(page >= 0 ? in->cache->pages[page].dirty : 0); /* slots without codes */
    char *at = kvp_gpu_block_memory(&cells->pages, block);

    if (page >= 0 &&
        !kvp_gpu_copy_in_rows(cells->gpu, kvp_gpu_block_memory(&cells->open_pages, (size_t)page),
                              from->rows, bytes, bytes, 1))
        return false;
    if (!(from->codes != NULL ? kvp_gpu_copy_in_rows(cells->gpu, at, from->codes, sealed, sealed, 1)
                              : kvp_cu_clear(at, sealed, cells->gpu->stream)))
        return false;
    return missing == 0 || encode(in, i, missing);
}

/* The number of sealed blocks from the i-th on that follow each other on both sides. */
static uint32_t run_of(const kvp_gpu_incoming *in, uint32_t i, ptrdiff_t *pitch)
{
    uint32_t n = 1;

    *pitch = (ptrdiff_t)in->cells->pages.block_stride;
    while (i + n < in->n && in->taken[i + n] && !in->outer[i + n].exact &&
           in->blocks[i + n].block == in->blocks[i].block + n) {
        const ptrdiff_t gap = (char *)in->outer[i + n].codes - (char *)in->outer[i + n - 1].codes;
        if (n == 1)
            *pitch = gap;
        if (gap != *pitch || gap < (ptrdiff_t)in->cells->pages.block_stride)
            break;
        n++;
    }
    return n;
}

static bool fill_pages(const kvp_gpu_incoming *in)
{
    const kvp_gpu_cells *cells = in->cells;
    bool ok = kvp_gpu_ensure_pages(in->kv, in->cache->n_pages);

    for (uint32_t i = 0, n = 1; i < in->n && ok; i += n) {
        ptrdiff_t pitch;
        n = 1;
        if (!in->taken[i])
            continue;
        if (in->outer[i].exact) {
            ok = fill_exact(in, i);
            continue;
        }
        n = run_of(in, i, &pitch);
        ok = kvp_gpu_copy_in_rows(cells->gpu,
                                  kvp_gpu_block_memory(&cells->pages, in->blocks[i].block),
                                  in->outer[i].codes, (size_t)pitch, cells->pages.block_stride, n);
    }
    return ok;
}

/* A block that the cache keeps exact, while this tensor has only codes, is refused. */
static void refuse_sealed(const kvp_gpu_incoming *in)
{
    for (uint32_t i = 0; i < in->n; i++)
        in->taken[i] =
            in->taken[i] &&
            (in->outer[i].exact ||
             kvp_gpu_page_of(in->cache, (int64_t)in->blocks[i].block * KVANT_PAGE_TOKENS) < 0);
}

/* The whole */

static kvant_status incoming_create(kvp_gpu_incoming *in, const void *data, size_t bytes,
                                    bool is_checked)
{
    const size_t rows = (size_t)in->n * KVANT_PAGE_TOKENS;
    kvant_tensor *form = kvp_gpu_form(in->cells);

    in->outer = malloc((in->n + 1) * sizeof(*in->outer));
    in->cells_of = malloc((rows + 1) * sizeof(*in->cells_of));
    in->positions = malloc((rows + 1) * sizeof(*in->positions));
    in->exact_of = malloc((rows + 1) * sizeof(*in->exact_of));
    if (form == NULL || in->outer == NULL || in->cells_of == NULL || in->positions == NULL ||
        in->exact_of == NULL)
        return KVANT_ERR_MEMORY;
    return kvant_tensor_read_outer(form, in->blocks, in->n, data, bytes, is_checked, in->outer,
                                   in->transforms);
}

static void incoming_free(kvp_gpu_incoming *in)
{
    free(in->outer);
    free(in->cells_of);
    free(in->positions);
    free(in->exact_of);
}

static bool restore(kvp_gpu_incoming *in)
{
    kvp_gpu_cache *cache = in->cache;
    bool ok = begin_state(in);

    if (ok && in->first && cache->adopts_all && kvp_gpu_restored_is_keys(in) &&
        !kvp_gpu_restored_knows(in))
        clear_all(cache); /* the transforms of rows that are gone */
    if (ok && in->first && !cache->adopts_all)
        kvp_gpu_restored_free_ids(cache);
    for (uint32_t i = 0; i < in->n; i++)
        in->taken[i] = ok && may_take(in, i);
    if (ok && kvp_gpu_restored_is_keys(in))
        ok = kvp_gpu_restored_keys(in);
    else if (ok)
        kvp_gpu_restored_values(in);
    ok = ok && (!in->first || plan_blocks(in));
    if (ok && !in->first)
        refuse_sealed(in);
    return ok && fill_pages(in);
}

kvant_status kvp_gpu_restore(kvp_kv *kv, const kvant_block_slots *blocks, uint32_t n,
                             const void *data, size_t bytes, bool is_checked, bool *taken)
{
    kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_incoming in = {
        .kv = kv, .cells = cells, .cache = cells->cache, .blocks = blocks, .n = n, .taken = taken
    };
    kvant_status status;

    memset(taken, 0, n * sizeof(*taken));
    status = incoming_create(&in, data, bytes, is_checked);
    if (status != KVANT_OK || cells->group > 1) {
        incoming_free(&in);
        return status;
    }
    if (!kvp_gpu_enter(cells->gpu))
        return KVANT_ERR_CUDA;
    kvp_gpu_finish(cells->gpu, kv->layers);
    pthread_mutex_lock(&cells->gpu->lock);
    kvp_gpu_marks_notice(cells->cache, KVANT_ERR_NONFINITE);
    in.first = in.cache->planner == NULL || in.cache->planner == kv;
    if (!restore(&in))
        status = KVANT_ERR_CUDA;
    kvp_gpu_batch_done(cells->gpu);
    pthread_mutex_unlock(&cells->gpu->lock);
    incoming_free(&in);
    return status;
}
