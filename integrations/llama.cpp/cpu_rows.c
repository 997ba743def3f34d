/* cpu_rows.c - see cpu_rows.h. */
#include "cpu_rows.h"

#include <stdlib.h>
#include <string.h>

#include "ggml_api.h"
#include "host.h"
#include "kv_store.h"
#include "log.h"
#include "state_format.h"
#include "trace.h"

/* Life */

void kvp_cpu_rows_forget(kvp_region *region)
{
    struct kvp_cpu_rows *rows = region->rows;

    for (size_t i = 0; i < region->n_tensors; i++)
        region->tensors[i]->in_place = false;
    if (rows == NULL)
        return;
    rows->n_layers = 0;
    rows->unplaced = rows->asks = false;
    for (size_t i = 0; i < rows->room; i++)
        rows->positions[i] = KVP_CPU_NO_ROW;
}

void kvp_cpu_rows_free(kvp_region *region)
{
    if (region->rows != NULL)
        free(region->rows->cells);
    free(region->rows);
    region->rows = NULL;
}

/* The tensors of a layer follow each other. */
static bool begins_layer(const kvp_region *region, size_t i)
{
    return i == 0 || region->tensors[i]->shape.layer != region->tensors[i - 1]->shape.layer;
}

static size_t count_layers(const kvp_region *region)
{
    size_t n = 0;

    for (size_t i = 0; i < region->n_tensors; i++)
        n += begins_layer(region, i);
    return n;
}

/* The number of cells that fit in every tensor of the cache. */
static size_t room_of(const kvp_region *region)
{
    size_t least = region->n_tensors > 0 && !kvp_trace_is_on ? SIZE_MAX : 0;

    for (size_t i = 0; i < region->n_tensors; i++) {
        const size_t cells = kvp_kv_cells_in_place(region->tensors[i]);
        least = cells < least ? cells : least;
    }
    return least;
}

/* Makes the record of a cache. False without memory, or if the cache is never in place. */
bool kvp_cpu_rows_create(kvp_region *region)
{
    const size_t room = room_of(region);
    struct kvp_cpu_rows *rows = room > 0 ? calloc(1, sizeof(*rows)) : NULL;

    if (rows != NULL)
        rows->cells = malloc(room * (sizeof(*rows->cells) + 2 * sizeof(*rows->positions)));
    if (rows == NULL || rows->cells == NULL) {
        free(rows);
        return false;
    }
    rows->positions = (int32_t *)(rows->cells + room);
    rows->batch = rows->positions + room;
    rows->room = room;
    rows->n_all = count_layers(region);
    rows->whole = room >= region->tensors[0]->shape.n_cells;
    region->rows = rows;
    kvp_cpu_rows_forget(region);
    return true;
}

/* Leaving */

/* The rows that leave: their cells and slots, in the order of slots, which is the order in which
 * sequences were written. */
struct leaving {
    size_t n;
    int64_t *cells, *slots;
    int32_t *positions;
    uint16_t *halves; /* a tensor's memory */
    float *floats;    /* KVP_MOST_CELLS rows */
};

static size_t widest(const kvp_region *region)
{
    size_t width = 0;

    for (size_t i = 0; i < region->n_tensors; i++)
        width = region->tensors[i]->shape.row > width ? region->tensors[i]->shape.row : width;
    return width;
}

static int by_slot(const void *a, const void *b)
{
    const int64_t *x = a, *y = b;

    return (x[0] > y[0]) - (x[0] < y[0]);
}

/* Lists the rows. False without memory. A cell without a slot has no token: the program
 * stopped its graph before attention (cb_eval). */
static bool list_rows(const kvp_region *region, struct leaving *leaving)
{
    const struct kvp_cpu_rows *rows = region->rows;
    const size_t room = rows->room, width = widest(region);
    int64_t(*pairs)[2];

    *leaving = (struct leaving){ .cells = malloc(room * (4 * sizeof(int64_t) + sizeof(int32_t))),
                                 .halves = malloc(room * width * sizeof(uint16_t)),
                                 .floats = malloc(KVP_MOST_CELLS * width * sizeof(float)) };
    if (leaving->cells == NULL || leaving->halves == NULL || leaving->floats == NULL)
        return false;
    leaving->slots = leaving->cells + room;
    pairs = (int64_t(*)[2])(leaving->slots + room);
    leaving->positions = (int32_t *)(leaving->slots + 3 * room);
    for (size_t i = 0; i < room; i++) {
        const int64_t slot = kvp_placement_slot(region->placement, (uint32_t)i);
        if (rows->positions[i] == KVP_CPU_NO_ROW || slot < 0)
            continue;
        pairs[leaving->n][0] = slot;
        pairs[leaving->n++][1] = (int64_t)i;
    }
    qsort(pairs, leaving->n, sizeof(*pairs), by_slot);
    for (size_t i = 0; i < leaving->n; i++) {
        leaving->slots[i] = pairs[i][0];
        leaving->cells[i] = pairs[i][1];
        leaving->positions[i] = rows->positions[pairs[i][1]];
    }
    return true;
}

static void free_list(struct leaving *leaving)
{
    free(leaving->cells);
    free(leaving->halves);
    free(leaving->floats);
}

static bool know_positions(const int32_t *positions, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (positions[i] < 0)
            return false;
    return true;
}

/* Stores n rows from the first-th on. Rows that cannot be stored become invalid. */
static void store_run(kvp_kv *kv, const struct leaving *leaving, size_t first, size_t n,
                      uint32_t n_threads)
{
    const size_t width = kv->shape.row;
    const bool known =
        kv->shape.role == KVANT_ROLE_K && know_positions(leaving->positions + first, n);
    const kvp_batch batch = { .rows = { { kv, leaving->floats, width,
                                          known ? leaving->positions + first : NULL } },
                              .n_tensors = 1,
                              .cells = leaving->cells + first,
                              .slots = leaving->slots + first,
                              .n = n,
                              .n_threads = n_threads,
                              .by_graph = true };
    kvant_status status = KVANT_OK;

    for (size_t i = 0; i < n; i++)
        kvp_api.fp16_to_fp32_row(leaving->halves + (size_t)batch.cells[i] * width,
                                 leaving->floats + i * width, (int64_t)width);
    for (size_t i = 0; i < n && status == KVANT_OK; i++)
        status = kvp_kv_assign_block(kv, (uint32_t)(batch.slots[i] / KVP_BLOCK));
    if (status == KVANT_OK)
        kvp_kv_store(&batch);
    else
        kvp_kv_lose(&batch, status);
}

static void store_tensor(kvp_kv *kv, const struct leaving *leaving, uint32_t n_threads)
{
    const size_t bytes = kvp_cpu_rows_region(kv)->rows->room * kvp_kv_row_bytes(kv);

    memcpy(leaving->halves, kv->memory, bytes);
    kvp_host_clear(kv->memory, bytes);
    kv->in_place = false;
    for (size_t first = 0, n; first < leaving->n; first += n) {
        n = leaving->n - first < KVP_MOST_CELLS ? leaving->n - first : KVP_MOST_CELLS;
        store_run(kv, leaving, first, n, n_threads);
    }
    kvp_kv_count(kv);
}

/* Moves the next layer. Its keys and values change their form together, because attention reads
 * both. */
static void store_layer(kvp_region *region, const struct leaving *leaving, uint32_t n_threads)
{
    size_t i = 0;

    while (i < region->n_tensors && !region->tensors[i]->in_place)
        i++;
    if (i < region->n_tensors)
        kvp_note("layer %u went from fp16 to compressed pages, %zu cells",
                 region->tensors[i]->shape.layer, leaving->n);
    for (bool more = i < region->n_tensors; more;
         more = ++i < region->n_tensors && !begins_layer(region, i))
        store_tensor(region->tensors[i], leaving, n_threads);
}

/* Places the rows of the last step. Without a mask they continue the sequence in place. */
bool kvp_cpu_rows_place(kvp_region *region, const kvp_mask *mask)
{
    struct kvp_cpu_rows *rows = region->rows;
    const kvp_mask all = { .n_cells = (uint32_t)rows->room, .n_tokens = rows->n_batch };
    int64_t *slots = rows->unplaced ? malloc((rows->n_batch + 1) * sizeof(*slots)) : NULL;
    const bool placed =
        !rows->unplaced ||
        (slots != NULL && kvp_placement_write(region->placement, rows->cells, rows->n_batch,
                                              mask != NULL ? mask : &all, slots));

    rows->unplaced = !placed;
    free(slots);
    return placed;
}

/* Moves the next n layers to pages. */
kvant_status kvp_cpu_rows_store(kvp_region *region, size_t n, uint32_t n_threads)
{
    struct kvp_cpu_rows *rows = region->rows;
    struct leaving leaving = { 0 };
    const bool listed = kvp_cpu_rows_place(region, NULL) && list_rows(region, &leaving);

    for (; listed && n > 0 && rows->n_layers > 0; n--, rows->n_layers--)
        store_layer(region, &leaving, n_threads);
    free_list(&leaving);
    if (listed && rows->n_layers == 0)
        kvp_cpu_rows_forget(region);
    return listed ? KVANT_OK : KVANT_ERR_MEMORY;
}

kvant_status kvp_cpu_rows_leave(const kvp_kv *kv, uint32_t n_threads)
{
    kvp_region *region = kvp_cpu_rows_region(kv);

    return kvp_cpu_rows_some(region) ? kvp_cpu_rows_store(region, region->rows->n_layers, n_threads)
                                     : KVANT_OK;
}

/* Rows outside of graphs */

void kvp_cpu_rows_read(const kvp_kv *kv, size_t offset, size_t size, void *out)
{
    const size_t held = kvp_cpu_rows_region(kv)->rows->room * kvp_kv_row_bytes(kv),
                 here = offset >= held         ? 0
                        : held - offset < size ? held - offset
                                               : size;

    memcpy(out, (const char *)kv->memory + offset, here);
    memset((char *)out + here, 0, size - here);
}

bool kvp_cpu_rows_pending(const kvp_region *region)
{
    bool pending = false;

    for (size_t i = 0; i < region->n_tensors && !pending; i++)
        pending = region->tensors[i]->pending.n > 0 || !kvp_kv_is_bound(region->tensors[i]) ||
                  region->tensors[i]->incoming.cells != NULL;
    return pending;
}

/* Whether nothing was written since the cache was created or cleared. */
bool kvp_cpu_rows_empty(const kvp_region *region)
{
    bool empty = kvp_placement_is_empty(region->placement) && !kvp_cpu_rows_pending(region);

    for (size_t i = 0; i < region->n_tensors && empty; i++)
        empty = region->tensors[i]->invalid.n == 0;
    return empty;
}

/* Puts all layers of a cache in place. */
void kvp_cpu_rows_begin(kvp_region *region)
{
    for (size_t i = 0; i < region->n_tensors; i++)
        region->tensors[i]->in_place = true;
    region->rows->n_layers = region->rows->n_all;
    kvp_note("%zu layers are in place, up to %zu cells", region->rows->n_layers,
             region->rows->room);
}

static bool write_rows(kvp_kv *kv, size_t cell, size_t n, const void *halves)
{
    kvp_region *region = kvp_cpu_rows_region(kv);
    const bool empty = region->placement != NULL && kvp_cpu_rows_empty(region);
    int64_t cells[KVP_MOST_CELLS], slots[KVP_MOST_CELLS];

    if (n == 0 || n > KVP_MOST_CELLS ||
        (empty ? region->rows == NULL && !kvp_cpu_rows_create(region)
               : !kvp_cpu_rows_all(region)) ||
        cell + n > region->rows->room || (!empty && !kvp_cpu_rows_place(region, NULL)))
        return false;
    for (size_t i = 0; i < n; i++)
        cells[i] = (int64_t)(cell + i);
    if (!kvp_placement_write(region->placement, cells, n, NULL, slots))
        return false;
    if (empty) {
        kvp_cpu_rows_begin(region);
        region->rows->sequence =
            kvp_placement_block(region->placement, (uint32_t)(slots[0] / KVP_BLOCK)).sequence;
    }
    memcpy((char *)kv->memory + cell * kvp_kv_row_bytes(kv), halves, n * kvp_kv_row_bytes(kv));
    for (size_t i = 0; i < n; i++)
        region->rows->positions[cell + i] = KVP_CPU_SOMEWHERE;
    return true;
}

/* Whether the bytes are whole rows without a record. */
static bool are_rows(const kvp_kv *kv, size_t offset, size_t size, const void *data)
{
    const size_t row = kvp_kv_row_bytes(kv);

    return kv->remote == NULL && kv->placement != NULL && kv->incoming.cells == NULL &&
           offset % row == 0 && size % row == 0 &&
           memcmp(data, KVP_STATE_MAGIC, KVP_STATE_MAGIC_BYTES) != 0 &&
           kvp_state_before_record(kv, data, size) == size;
}

bool kvp_cpu_rows_write(kvp_kv *kv, size_t offset, size_t size, const void *data)
{
    const size_t row = kvp_kv_row_bytes(kv);
    bool written = are_rows(kv, offset, size, data);

    for (size_t done = 0, n; written && done < size; done += n * row) {
        n = (size - done) / row < KVP_MOST_CELLS ? (size - done) / row : KVP_MOST_CELLS;
        written = write_rows(kv, (offset + done) / row, n, (const char *)data + done);
    }
    return written;
}

/* Coming back */

/* The row of a cell in place. */
static uint16_t *row_at(const kvp_kv *kv, size_t cell)
{
    return (uint16_t *)(void *)((char *)kv->memory + cell * kvp_kv_row_bytes(kv));
}

/* Decodes the rows of cells [first, end) of all tensors; NULL without memory. */
static float *decode(const kvp_region *region, size_t first, size_t end)
{
    const size_t stride = (end - first) * widest(region);
    float *rows = malloc((region->n_tensors * stride + 1) * sizeof(*rows));
    bool ok = rows != NULL;

    for (size_t i = 0; i < region->n_tensors && ok && end > first; i++)
        if (region->tensors[i]->in_place)
            kvp_api.fp16_to_fp32_row(row_at(region->tensors[i], first), rows + i * stride,
                                     (int64_t)((end - first) * region->tensors[i]->shape.row));
        else
            ok = kvp_kv_read_rows(region->tensors[i], first, end - first, rows + i * stride) ==
                 KVANT_OK;
    if (!ok)
        free(rows);
    return ok ? rows : NULL;
}

bool kvp_cpu_rows_come_back(kvp_region *region, size_t first, size_t end)
{
    const size_t stride = (end - first) * widest(region);
    float *rows = decode(region, first, end);

    if (rows == NULL)
        return false;
    kvp_placement_forget(region->placement, (int64_t)end);
    kvp_cpu_rows_forget(region);
    for (size_t i = 0; i < region->n_tensors; i++) {
        kvp_kv *kv = region->tensors[i];
        kvp_kv_clear(kv);
        kvp_api.fp32_to_fp16_row(rows + i * stride, row_at(kv, first),
                                 (int64_t)((end - first) * kv->shape.row));
    }
    for (size_t i = first; i < end; i++)
        if (kvp_placement_slot(region->placement, (uint32_t)i) >= 0)
            region->rows->positions[i] = KVP_CPU_SOMEWHERE;
    free(rows);
    kvp_cpu_rows_begin(region);
    return true;
}
