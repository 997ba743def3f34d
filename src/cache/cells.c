/* cells.c - layout and life of a kvant_cells: sizes, creation, clearing, copying streams. */
#include "cells.h"

#include <string.h>

#include "../base/alloc.h"
#include "affine.h"
#include "open.h"

/* Groups of the pool beyond those that the windows of all streams need: sequences of a unified cache that
 * grow beside each other, and groups that rewrites open again. */
#define SPARE_GROUPS 2u

/* The first 64 rows, not aligned to pages. */
#define WAITING_GROUPS 2u

typedef struct sizes {
    uint32_t n_pages, n_sink_pages, n_pool;
    bool always_open;
    size_t n_groups, n_sink_slots, n_slots, group_bytes, sealed_bytes, open_bytes;
} sizes;

static const kvant_codec *codec_of(const kvant_cells_config *config, uint32_t kv_head)
{
    return config->codecs ? config->codecs[kv_head] : config->codec;
}

static bool valid_config(const kvant_cells_config *config)
{
    if (!config || config->size != sizeof *config || !config->n_kv_heads || !config->n_streams ||
        !config->n_cells || config->n_cells > UINT32_MAX - KVANT_PAGE_TOKENS || !codec_of(config, 0))
        return false;
    for (uint32_t head = 1; config->codecs && head < config->n_kv_heads; head++)
        if (!config->codecs[head] ||
            !kvant_codecs_fit_together(&config->codecs[0]->info, &config->codecs[head]->info))
            return false;
    return true;
}

/* Groups that the newest recent_tokens rows of a stream and the row in the making can lie in. */
static size_t window_groups(uint32_t recent_tokens)
{
    return ((size_t)recent_tokens + KVANT_PAGE_TOKENS - 2) / KVANT_PAGE_TOKENS + 1;
}

static bool compute_slots(const kvant_cells_config *config, const kvant_codec_info *info, sizes *s)
{
    size_t sink_pages = ((size_t)info->sink_tokens + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
    bool waits = info->center == KVANT_CENTER_FIRST || info->norm == KVANT_NORM_FIRST;
    s->n_sink_pages = sink_pages < s->n_pages ? (uint32_t)sink_pages : s->n_pages;
    s->always_open = info->block_tokens > 1 || info->recent_tokens > 0;
    size_t pool = 0;
    if (s->always_open && (!kvant_mul_size(config->n_streams, window_groups(info->recent_tokens), &pool) ||
                           pool > INT32_MAX - SPARE_GROUPS))
        return false;
    pool = s->always_open ? pool + SPARE_GROUPS : waits ? WAITING_GROUPS : 0;
    s->n_pool = pool && config->n_open_groups ? config->n_open_groups : (uint32_t)pool;
    if (!kvant_mul_size(config->n_streams, s->n_sink_pages, &s->n_sink_slots))
        return false;
    s->n_slots = s->n_sink_slots + s->n_pool;
    return s->n_slots <= INT32_MAX;
}

static bool sum_page_bytes(const kvant_cells_config *config, size_t *sum)
{
    *sum = 0;
    for (uint32_t head = 0; head < config->n_kv_heads; head++) {
        size_t bytes = codec_of(config, head)->info.page_bytes;
        if (bytes > SIZE_MAX - *sum)
            return false;
        *sum += bytes;
    }
    return true;
}

static bool compute_sizes(const kvant_cells_config *config, sizes *s)
{
    if (!valid_config(config))
        return false;
    const kvant_codec_info *info = &codec_of(config, 0)->info;
    s->n_pages = (config->n_cells + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
    size_t open_group_bytes, rows;
    if (!compute_slots(config, info, s) || !kvant_mul_size(s->n_pages, config->n_streams, &s->n_groups) ||
        !sum_page_bytes(config, &s->group_bytes) || !kvant_mul_size(config->n_kv_heads, info->head_dim, &rows) ||
        !kvant_mul_size(rows, KVANT_PAGE_TOKENS * sizeof(uint16_t), &open_group_bytes) ||
        !kvant_mul_size(s->n_groups, s->group_bytes, &s->sealed_bytes) ||
        !kvant_mul_size(s->n_slots, open_group_bytes, &s->open_bytes))
        return false;
    return s->open_bytes <= SIZE_MAX - s->sealed_bytes && s->n_groups <= INT64_MAX / 2;
}

size_t kvant_cells_bytes(const kvant_cells_config *config)
{
    sizes s;
    return compute_sizes(config, &s) ? s.sealed_bytes + s.open_bytes : 0;
}

static kvant_status create_open_codecs(kvant_cells *cells)
{
    const kvant_codec_info *info = &cells->config.codec->info;
    cells->open_codecs = kvant_alloc(cells->config.n_kv_heads, sizeof *cells->open_codecs);
    cells->slots = kvant_alloc(cells->n_slots, sizeof *cells->slots);
    cells->scratch = kvant_alloc((size_t)KVANT_SEAL_WORKERS * info->block_tokens * info->head_dim, sizeof(float));
    KVANT_RETURN_IF(!cells->open_codecs || !cells->slots || !cells->scratch, KVANT_ERR_MEMORY);
    for (uint32_t i = 0; i < cells->n_slots; i++)
        cells->slots[i].group = -1;
    for (uint32_t head = 0; head < cells->config.n_kv_heads; head++) {
        if (head > 0 && cells->codecs[head] == cells->codecs[0])
            cells->open_codecs[head] = cells->open_codecs[0];
        else
            KVANT_FORWARD(kvant_codec_create_open(cells->codecs[head], &cells->open_codecs[head]));
    }
    cells->open_page_bytes = cells->open_codecs[0]->info.page_bytes;
    return KVANT_OK;
}

static kvant_status allocate(kvant_cells *cells, const sizes *s, const kvant_cells_config *config)
{
    cells->codecs = kvant_alloc(config->n_kv_heads, sizeof *cells->codecs);
    cells->page_offsets = kvant_alloc(config->n_kv_heads, sizeof *cells->page_offsets);
    cells->groups = kvant_alloc(s->n_groups, sizeof *cells->groups);
    cells->clocks = kvant_alloc(config->n_streams, sizeof *cells->clocks);
    KVANT_RETURN_IF(!cells->codecs || !cells->page_offsets || !cells->groups || !cells->clocks, KVANT_ERR_MEMORY);
    size_t offset = 0;
    for (uint32_t head = 0; head < config->n_kv_heads; head++) {
        cells->codecs[head] = codec_of(config, head);
        cells->page_offsets[head] = offset;
        offset += cells->codecs[head]->info.page_bytes;
    }
    for (size_t i = 0; i < s->n_groups; i++)
        cells->groups[i].open_slot = -1;
    cells->config.codec = cells->codecs[0];
    cells->config.codecs = cells->codecs;
    KVANT_FORWARD(kvant_affine_create(cells));
    return s->n_slots ? create_open_codecs(cells) : KVANT_OK;
}

kvant_status kvant_cells_create(const kvant_cells_config *config, void *memory, kvant_cells **out)
{
    sizes s;
    KVANT_RETURN_IF(!out, KVANT_ERR_ARGUMENT);
    *out = NULL;
    KVANT_RETURN_IF(!compute_sizes(config, &s), KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!memory || (uintptr_t)memory % KVANT_PAGE_ALIGN, KVANT_ERR_ARGUMENT);
    kvant_cells *cells = kvant_alloc(1, sizeof *cells);
    KVANT_RETURN_IF(!cells, KVANT_ERR_MEMORY);
    cells->config = *config;
    cells->config.n_open_groups = s.n_pool;
    cells->group_bytes = s.group_bytes;
    cells->n_pages = s.n_pages;
    cells->n_sink_pages = s.n_sink_pages;
    cells->n_sink_slots = (uint32_t)s.n_sink_slots;
    cells->n_slots = (uint32_t)s.n_slots;
    cells->always_open = s.always_open;
    cells->window_groups =
        s.always_open ? (uint32_t)window_groups(codec_of(config, 0)->info.recent_tokens) : WAITING_GROUPS;
    cells->sealed = memory;
    cells->open = cells->sealed + s.sealed_bytes;
    kvant_status status = allocate(cells, &s, config);
    if (status != KVANT_OK)
        kvant_cells_free(&cells);
    *out = cells;
    return status;
}

static void free_open_codecs(kvant_cells *cells)
{
    for (uint32_t head = cells->config.n_kv_heads; cells->open_codecs && head-- > 0;)
        if (head == 0 || cells->open_codecs[head] != cells->open_codecs[0])
            kvant_codec_free(&cells->open_codecs[head]);
    kvant_free(cells->open_codecs);
}

void kvant_cells_free(kvant_cells **cells)
{
    if (!cells || !*cells)
        return;
    free_open_codecs(*cells);
    kvant_affine_destroy(*cells);
    kvant_free((*cells)->codecs);
    kvant_free((*cells)->page_offsets);
    kvant_free((*cells)->groups);
    kvant_free((*cells)->slots);
    kvant_free((*cells)->clocks);
    kvant_free((*cells)->scratch);
    kvant_free(*cells);
    *cells = NULL;
}

kvant_cells_config kvant_cells_get_config(const kvant_cells *cells)
{
    return cells->config;
}

static void clear_stream(kvant_cells *cells, uint32_t stream)
{
    for (uint32_t page = 0; page < cells->n_pages; page++) {
        size_t g = (size_t)stream * cells->n_pages + page;
        kvant_page_group *group = &cells->groups[g];
        if (group->open_slot >= 0)
            cells->slots[group->open_slot].group = -1;
        if (group->touched)
            memset(kvant_sealed_page(cells, g, 0), 0, cells->group_bytes);
        *group = (kvant_page_group){ .open_slot = -1 };
    }
    cells->clocks[stream] = 0;
}

void kvant_cells_clear(kvant_cells *cells)
{
    for (uint32_t stream = 0; stream < cells->config.n_streams; stream++)
        clear_stream(cells, stream);
    kvant_affine_reset(cells);
    cells->any_written = false;
}

static bool same_shape(const kvant_cells *a, const kvant_cells *b)
{
    return a->config.n_kv_heads == b->config.n_kv_heads && a->config.n_cells == b->config.n_cells &&
           memcmp(a->codecs, b->codecs, a->config.n_kv_heads * sizeof(*a->codecs)) == 0;
}

/* Slots of the pool that a stream's groups hold, or that are free (stream n_streams). */
static uint32_t count_slots(const kvant_cells *cells, uint32_t stream)
{
    uint32_t n = 0;
    for (uint32_t i = cells->n_sink_slots; i < cells->n_slots; i++) {
        int64_t group = cells->slots[i].group;
        n += group < 0 ? stream == cells->config.n_streams : (size_t)group / cells->n_pages == stream;
    }
    return n;
}

/* While centre or factors wait for the first rows nothing can be sealed to make room for open pages that are
 * copied. */
static kvant_status make_room(const kvant_cells *from, uint32_t from_stream, kvant_cells *to, uint32_t to_stream)
{
    if (!to->first.waiting ||
        count_slots(from, from_stream) <= count_slots(to, to->config.n_streams) + count_slots(to, to_stream))
        return KVANT_OK;
    return from == to ? kvant_affine_freeze(to) : KVANT_ERR_FULL;
}

static kvant_status copy_group(const kvant_cells *from, size_t source, kvant_cells *to, size_t target)
{
    const kvant_page_group *group = &from->groups[source];
    if (!group->written)
        return KVANT_OK;
    if (group->open_slot >= 0 && kvant_open_is_full(to, target))
        KVANT_FORWARD(kvant_open_make_room(to)); /* within one cache this may seal the source itself */
    if (group->touched)
        memcpy(kvant_sealed_page(to, target, 0), kvant_sealed_page(from, source, 0), from->group_bytes);
    to->groups[target].touched = group->touched;
    to->groups[target].written = group->written;
    to->any_written = true;
    return group->open_slot >= 0 ? kvant_open_copy(from, group->open_slot, to, target) : KVANT_OK;
}

kvant_status kvant_cells_copy_stream(const kvant_cells *from, uint32_t from_stream, kvant_cells *to,
                                     uint32_t to_stream)
{
    KVANT_RETURN_IF(!from || !to || !same_shape(from, to), KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(from_stream >= from->config.n_streams || to_stream >= to->config.n_streams, KVANT_ERR_ARGUMENT);
    if (from == to && from_stream == to_stream)
        return KVANT_OK;
    KVANT_FORWARD(kvant_affine_share(from, to));
    KVANT_FORWARD(make_room(from, from_stream, to, to_stream));
    clear_stream(to, to_stream);
    to->clocks[to_stream] = from->clocks[from_stream];
    for (uint32_t page = 0; page < from->n_pages; page++)
        KVANT_FORWARD(copy_group(from, (size_t)from_stream * from->n_pages + page, to,
                                 (size_t)to_stream * to->n_pages + page));
    return KVANT_OK;
}

kvant_page_ref kvant_cells_page(const kvant_cells *cells, uint32_t stream, uint32_t page, uint32_t kv_head)
{
    size_t g = (size_t)stream * cells->n_pages + page;
    int32_t slot = cells->groups[g].open_slot;
    if (slot >= 0)
        return (kvant_page_ref){ cells->open_codecs[kv_head], kvant_open_page(cells, slot, kv_head) };
    return (kvant_page_ref){ cells->codecs[kv_head], kvant_sealed_page(cells, g, kv_head) };
}
