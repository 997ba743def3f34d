/* open.c - see open.h. */
#include "open.h"

#include <stdatomic.h>
#include <string.h>

#include "../base/parallel.h"

#define ALL_CELLS UINT64_MAX

void *kvant_open_page(const kvant_cells *cells, int32_t slot, uint32_t kv_head)
{
    return cells->open + ((size_t)slot * cells->config.n_kv_heads + kv_head) * cells->open_page_bytes;
}

/* Sealing: units are (slot, kv head), since pages are independent. */

typedef struct seal_job {
    kvant_cells *cells;
    const int32_t *slots;
    atomic_int status;
} seal_job;

/* Rows of a block from an open page; cells that were never written take the numbers of one that was, so that
 * they widen no range. */
static void gather_block(const kvant_cells *cells, const void *page, uint32_t head, uint64_t written,
                         uint32_t first, float *rows)
{
    const kvant_codec_info *info = &cells->config.codec->info;
    uint32_t stand_in = first;
    while (!(written >> stand_in & 1))
        stand_in++;
    for (uint32_t i = 0; i < info->block_tokens; i++) {
        uint32_t token = written >> (first + i) & 1 ? first + i : stand_in;
        kvant_codec_decode_transformed(cells->open_codecs[head], kvant_kernels_get(KVANT_CPU_AUTO), page, token,
                                       rows + (size_t)i * info->head_dim);
    }
}

static kvant_status seal_page(kvant_cells *cells, int32_t slot, uint32_t head, float *scratch)
{
    const kvant_open_slot *from = &cells->slots[slot];
    uint32_t block = cells->config.codec->info.block_tokens;
    uint64_t written = cells->groups[from->group].written, block_mask = ALL_CELLS >> (KVANT_PAGE_TOKENS - block);
    for (uint32_t first = 0; first < KVANT_PAGE_TOKENS; first += block) {
        if (!(from->fresh >> first & block_mask))
            continue;
        gather_block(cells, kvant_open_page(cells, slot, head), head, written, first, scratch);
        KVANT_FORWARD(kvant_codec_seal(cells->codecs[head], scratch, first, block,
                                       kvant_sealed_page(cells, (size_t)from->group, head)));
    }
    return KVANT_OK;
}

static void seal_unit(void *context, size_t unit, uint32_t worker)
{
    seal_job *job = context;
    kvant_cells *cells = job->cells;
    const kvant_codec_info *info = &cells->config.codec->info;
    float *scratch = cells->scratch + (size_t)worker * info->block_tokens * info->head_dim;
    uint32_t head = (uint32_t)(unit % cells->config.n_kv_heads);
    kvant_status status = seal_page(cells, job->slots[unit / cells->config.n_kv_heads], head, scratch);
    if (status != KVANT_OK)
        atomic_store_explicit(&job->status, (int)status, memory_order_relaxed);
}

static kvant_status seal_slots(kvant_cells *cells, const int32_t *slots, size_t n, uint32_t n_threads)
{
    seal_job job = { .cells = cells, .slots = slots };
    atomic_init(&job.status, KVANT_OK);
    kvant_parallel_for(n * cells->config.n_kv_heads,
                       n_threads < KVANT_SEAL_WORKERS ? n_threads : KVANT_SEAL_WORKERS, seal_unit, &job);
    KVANT_FORWARD((kvant_status)atomic_load(&job.status));
    for (size_t i = 0; i < n; i++) {
        kvant_open_slot *slot = &cells->slots[slots[i]];
        cells->groups[slot->group].open_slot = -1;
        cells->groups[slot->group].touched = true;
        slot->group = -1;
    }
    return KVANT_OK;
}

/* Rows written to the stream after the slot's last one; the newest row has age 0. */
static uint64_t age(const kvant_cells *cells, const kvant_open_slot *slot)
{
    return cells->clocks[(size_t)slot->group / cells->n_pages] - slot->stamp;
}

static bool outside_window(const kvant_cells *cells, const kvant_open_slot *slot)
{
    return age(cells, slot) >= cells->config.codec->info.recent_tokens;
}

/* A group that was opened again is complete when all of its cells were rewritten: sealing it after every
 * rewrite would quantise the other cells of its blocks again each time. */
static bool due(const kvant_cells *cells, const kvant_open_slot *slot)
{
    return slot->fresh == ALL_CELLS && outside_window(cells, slot);
}

kvant_status kvant_open_seal_due(kvant_cells *cells, bool all, uint32_t n_threads)
{
    enum { BATCH = 64 };
    int32_t list[BATCH];
    size_t n = 0;
    for (uint32_t i = cells->n_sink_slots; i < cells->n_slots; i++) {
        const kvant_open_slot *slot = &cells->slots[i];
        if (slot->group < 0 || !(all || due(cells, slot)))
            continue;
        list[n++] = (int32_t)i;
        if (n == BATCH) {
            KVANT_FORWARD(seal_slots(cells, list, n, n_threads));
            n = 0;
        }
    }
    return n ? seal_slots(cells, list, n, n_threads) : KVANT_OK;
}

/* Taking slots */

/* The slot that group can have at once, or -1. */
static int32_t free_slot(const kvant_cells *cells, size_t group)
{
    if (kvant_is_sink(cells, group))
        return (int32_t)(group / cells->n_pages * cells->n_sink_pages + group % cells->n_pages);
    for (uint32_t i = cells->n_sink_slots; i < cells->n_slots; i++)
        if (cells->slots[i].group < 0)
            return (int32_t)i;
    return -1;
}

bool kvant_open_is_full(const kvant_cells *cells, size_t group)
{
    return free_slot(cells, group) < 0;
}

bool kvant_open_has_room(const kvant_cells *cells, size_t group)
{
    uint32_t n = 0;
    if (kvant_is_sink(cells, group))
        return true;
    for (uint32_t i = cells->n_sink_slots; i < cells->n_slots; i++) {
        const kvant_open_slot *slot = &cells->slots[i];
        n += slot->group >= 0 && (size_t)slot->group / cells->n_pages == group / cells->n_pages;
    }
    return n < cells->window_groups && free_slot(cells, group) >= 0;
}

/* What to seal when the pool is full: of the groups outside of their stream's window, or of all when there
 * are none, the one that was not written for longest. */
static int32_t victim(const kvant_cells *cells)
{
    uint32_t best = cells->n_sink_slots;
    for (uint32_t i = best + 1; i < cells->n_slots; i++) {
        const kvant_open_slot *a = &cells->slots[i], *b = &cells->slots[best];
        bool a_outside = outside_window(cells, a), b_outside = outside_window(cells, b);
        if (a_outside != b_outside ? a_outside : a->used < b->used)
            best = i;
    }
    return (int32_t)best;
}

static kvant_status evict(kvant_cells *cells, uint32_t n_threads, int32_t *slot)
{
    *slot = victim(cells);
    return seal_slots(cells, slot, 1, n_threads);
}

kvant_status kvant_open_make_room(kvant_cells *cells)
{
    int32_t slot;
    return evict(cells, 1, &slot);
}

static kvant_status take_slot(kvant_cells *cells, size_t group, uint32_t n_threads, int32_t *slot)
{
    *slot = free_slot(cells, group);
    if (*slot < 0)
        KVANT_FORWARD(evict(cells, n_threads, slot));
    uint64_t clock = cells->clocks[group / cells->n_pages];
    cells->slots[*slot] = (kvant_open_slot){ (int64_t)group, 0, clock, ++cells->used };
    cells->groups[group].open_slot = *slot;
    memset(kvant_open_page(cells, *slot, 0), 0, cells->open_page_bytes * cells->config.n_kv_heads);
    return KVANT_OK;
}

/* Opening */

typedef struct open_job {
    kvant_cells *cells;
    size_t group;
    int32_t slot;
} open_job;

static void open_unit(void *context, size_t head, uint32_t worker)
{
    const open_job *job = context;
    kvant_cells *cells = job->cells;
    const kvant_codec *open = cells->open_codecs[head];
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    uint64_t written = cells->groups[job->group].written;
    (void)worker;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        float y[KVANT_MAX_HEAD_DIM];
        if (!(written >> t & 1))
            continue;
        kvant_codec_decode_transformed(cells->codecs[head], kernels,
                                       kvant_sealed_page(cells, job->group, (uint32_t)head), t, y);
        kvant_codec_encode_open(open, kernels, y, t, 1, kvant_open_page(cells, job->slot, (uint32_t)head));
    }
}

kvant_status kvant_open_group(kvant_cells *cells, size_t group, uint32_t n_threads)
{
    open_job job = { .cells = cells, .group = group };
    KVANT_FORWARD(take_slot(cells, group, n_threads, &job.slot));
    if (cells->groups[group].written)
        kvant_parallel_for(cells->config.n_kv_heads, n_threads, open_unit, &job);
    return KVANT_OK;
}

void kvant_open_touch(kvant_cells *cells, size_t group, uint32_t token)
{
    kvant_open_slot *slot = &cells->slots[cells->groups[group].open_slot];
    slot->fresh |= (uint64_t)1 << token;
    slot->stamp = cells->clocks[group / cells->n_pages];
    slot->used = cells->used;
}

kvant_status kvant_open_copy(const kvant_cells *from, int32_t slot, kvant_cells *to, size_t target)
{
    int32_t taken;
    KVANT_FORWARD(take_slot(to, target, 1, &taken));
    to->slots[taken].fresh = from->slots[slot].fresh;
    to->slots[taken].stamp = from->slots[slot].stamp;
    memcpy(kvant_open_page(to, taken, 0), kvant_open_page(from, slot, 0),
           from->open_page_bytes * from->config.n_kv_heads);
    return KVANT_OK;
}
