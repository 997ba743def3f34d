/* cpu_rows.h - the rows in place of a cache in the computer's memory. This file knows their
 * positions and stores layers in pages. It reads and writes rows outside of graphs. cpu_in_place.c
 * decides before a graph which layers are in place, and fills the record of a step.
 *
 * Rows in place lie in the memory of the pages. So the pages of a tensor in place are empty and are
 * not touched, until the rows have been copied and the memory is cleared. */
#pragma once

#include "buffer_region.h"

/* values in positions: a cell without a row; a row at an unknown position */
enum { KVP_CPU_NO_ROW = -1, KVP_CPU_SOMEWHERE = -2 };

struct kvp_cpu_rows {
    size_t room;        /* cells that fit, a multiple of KVP_CELLS_PADDING */
    bool whole;         /* all cells fit, so nothing is ever compressed */
    size_t n_all;       /* layers of the cache */
    size_t n_layers;    /* of these, in place; 0: the cache is in pages */
    uint32_t sequence;  /* of the placement: the sequence in place */
    int32_t *positions; /* by cell */
    /* The last step: its cells and their positions. With `unplaced` no attention node has shown yet
     * what its tokens see. With `asks` its queries are noted. */
    int64_t *cells;
    int32_t *batch;
    size_t n_batch;
    bool unplaced, knows_batch, asks;
};

static inline kvp_region *kvp_cpu_rows_region(const kvp_kv *kv)
{
    return (kvp_region *)(uintptr_t)kv->cache;
}

/* Whether some layers are in place, or all of them. */
static inline bool kvp_cpu_rows_some(const kvp_region *region)
{
    return region->rows != NULL && region->rows->n_layers > 0;
}

static inline bool kvp_cpu_rows_all(const kvp_region *region)
{
    return region->rows != NULL && region->rows->n_layers == region->rows->n_all;
}

/* Makes the record of a cache. False without memory, or if the cache is never in place. `forget`
 * resets the record, and the cache counts as pages. */
bool kvp_cpu_rows_create(kvp_region *region);
void kvp_cpu_rows_forget(kvp_region *region);
void kvp_cpu_rows_free(kvp_region *region);

/* `empty`: whether nothing was written since the cache was created or cleared. `pending`: whether
 * some tensor is not bound, or has rows that are not stored yet. */
bool kvp_cpu_rows_empty(const kvp_region *region);
bool kvp_cpu_rows_pending(const kvp_region *region);

/* Puts all layers in place. `begin` is for an empty cache. `come_back` drops all rows and learned
 * transforms but the rows of cells [first, end), which it decodes; false without memory, and then
 * nothing has changed. */
void kvp_cpu_rows_begin(kvp_region *region);
bool kvp_cpu_rows_come_back(kvp_region *region, size_t first, size_t end);

/* Places the rows of the last step, if they are unplaced. Without a mask they continue the sequence
 * in place. False without memory. */
bool kvp_cpu_rows_place(kvp_region *region, const kvp_mask *mask);

/* Moves the next n layers to pages; `leave` moves all layers of a tensor's cache. Rows that cannot
 * be stored become invalid. On an error the rows stay in place, unchanged. */
kvant_status kvp_cpu_rows_store(kvp_region *region, size_t n, uint32_t n_threads);
kvant_status kvp_cpu_rows_leave(const kvp_kv *kv, uint32_t n_threads);

/* Reads nominal bytes of a tensor in place. */
void kvp_cpu_rows_read(const kvp_kv *kv, size_t offset, size_t size, void *out);

/* Writes nominal bytes to a cache in place, or to an empty cache. False: the bytes are no whole
 * rows or have a record (state.h), some layers are in pages, the rows do not fit, or memory is
 * short. The caller then writes all of the bytes in another way. */
bool kvp_cpu_rows_write(kvp_kv *kv, size_t offset, size_t size, const void *data);
