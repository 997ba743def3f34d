/* kv_tensor.c - the rows of a cache tensor (see kv_tensor.h): entering, nominal fp16 rows,
 * clearing, copying.
 *
 * Rows of a cache with one stream go to the slots of its placement. Only the mask tells which
 * sequence a row belongs to, and llama.cpp computes the mask after it stores the rows of the first
 * layer. So rows of a batch without slots are pending in a copy. They are stored when the attention
 * node that reads them brings the mask, or when another call needs them. Keys whose transform is
 * learned from the node's queries (transform=first) are pending in the same way. */
#include "kv_tensor.h"

#include <stdlib.h>
#include <string.h>

#include "cpu_rows.h"
#include "ggml_api.h"
#include "host.h"
#include "kv_store.h"
#include "llama_states.h"
#include "log.h"
#include "pack.h"
#include "trace.h"
#include "unused_rows.h"

/* Index of a block that is not the first block of any sequence, whatever sink a codec has. */
#define NO_SINK (UINT32_MAX / 2)

/* Entering */

/* Only the first KVP_WINDOW_SEQUENCES sequences keep first and newest tokens as fp16. */
kvant_status kvp_kv_assign_block(kvp_kv *kv, uint32_t block)
{
    kvp_block place = kvp_placement_block(kv->placement, block);
    bool windows = place.sequence < KVP_WINDOW_SEQUENCES;
    kvant_status status = KVANT_OK;

    if (kv->generations[block] == place.generation)
        return KVANT_OK;
    if (kv->generations[block] != 0)
        status = kvant_tensor_clear_blocks(kv->tensor, block, 1);
    if (status == KVANT_OK)
        status = kvant_tensor_assign(kv->tensor, block, windows ? place.sequence : 0,
                                     windows ? place.index : NO_SINK);
    if (status == KVANT_OK)
        kv->generations[block] = place.generation;
    return status;
}

/* Finds the slots of the cells. False when there is no memory to place them. */
static bool find_slots(const kvp_kv *kv, const int64_t *cells, size_t n, const kvp_mask *mask,
                       int64_t *slots)
{
    if (kv->placement != NULL)
        return kvp_placement_write(kv->placement, cells, n, mask, slots);
    for (size_t i = 0; i < n; i++)
        slots[i] = kvp_kv_slot(kv, cells[i]);
    return true;
}

/* Assigns the blocks of the slots whose generation has changed. */
static kvant_status assign_blocks(kvp_kv *kv, const int64_t *slots, size_t n)
{
    kvant_status status = KVANT_OK;

    for (size_t i = 0; i < n && status == KVANT_OK && kv->placement != NULL; i++)
        status = kvp_kv_assign_block(kv, (uint32_t)(slots[i] / KVP_BLOCK));
    return status;
}

/* Finds the slots of the batch, and assigns their blocks. slots NULL: there is no memory. */
static kvant_status place(const kvp_batch *batch, const kvp_mask *mask, int64_t *slots)
{
    bool placed = slots != NULL && find_slots(batch->rows->kv, batch->cells, batch->n, mask, slots);
    kvant_status status = placed ? KVANT_OK : KVANT_ERR_MEMORY;

    for (size_t i = 0; i < batch->n_tensors && status == KVANT_OK; i++)
        status = assign_blocks(batch->rows[i].kv, slots, batch->n);
    if (status != KVANT_OK)
        kvp_kv_lose(batch, status);
    return status;
}

/* Finds the slots of the batch and stores it. */
static kvant_status store(const kvp_batch *batch, const kvp_mask *mask)
{
    int64_t *slots = malloc((batch->n + 1) * sizeof(*slots));
    kvant_status status = place(batch, mask, slots);
    kvp_batch at = *batch;

    at.slots = slots;
    if (status == KVANT_OK)
        status = kvp_kv_store(&at);
    for (size_t i = 0; i < batch->n_tensors; i++)
        kvp_kv_count(batch->rows[i].kv);
    free(slots);
    return status;
}

/* Stores the batch, or holds its row. */
static kvant_status hold(const kvp_batch *batch, kvp_held_row *held)
{
    kvant_status status;

    if (held == NULL || batch->n != 1 || batch->n_tensors != 2 || batch->rows->kv->remote != NULL)
        return store(batch, NULL);
    *held = (kvp_held_row){ .rows = { batch->rows[0], batch->rows[1] }, .cell = batch->cells[0] };
    status = place(batch, NULL, &held->slot);
    held->is_held = status == KVANT_OK;
    return status;
}

static kvant_status keep(const kvp_rows *rows, const int64_t *cells, size_t n)
{
    const size_t width = rows->kv->shape.row;
    const kvp_batch batch = {
        .rows = { *rows }, .n_tensors = 1, .cells = cells, .n = n, .by_graph = true
    };
    int64_t *copy = malloc(n * (sizeof(*cells) + width * sizeof(float) + sizeof(*rows->positions)));

    if (copy == NULL) {
        kvp_kv_lose(&batch, KVANT_ERR_MEMORY);
        return KVANT_ERR_MEMORY;
    }
    rows->kv->pending =
        (struct kvp_pending_rows){ .cells = copy, .rows = (float *)(copy + n), .n = n };
    memcpy(copy, cells, n * sizeof(*cells));
    for (size_t i = 0; i < n; i++)
        memcpy(rows->kv->pending.rows + i * width, rows->at + i * rows->stride,
               width * sizeof(float));
    if (rows->positions != NULL) {
        rows->kv->pending.positions = (int32_t *)(rows->kv->pending.rows + n * width);
        memcpy(rows->kv->pending.positions, rows->positions, n * sizeof(*rows->positions));
    }
    kvp_kv_count(rows->kv);
    return KVANT_OK;
}

kvant_status kvp_kv_enter(const kvp_rows *rows, size_t n_tensors, const int64_t *cells, size_t n,
                          uint32_t n_threads, kvp_held_row *held)
{
    const kvp_placement *placement = rows->kv->placement;
    kvp_batch batch = { .rows = { rows[0] },
                        .n_tensors = n_tensors,
                        .cells = cells,
                        .n = n,
                        .n_threads = n_threads,
                        .by_graph = true };
    kvant_status status = KVANT_OK;

    if (n_tensors > 1)
        batch.rows[1] = rows[1];
    rows->kv->single_position = -1;
    for (size_t i = 0; i < n_tensors; i++)
        kvp_state_drop(rows[i].kv);
    for (size_t i = 0; i < n_tensors && status == KVANT_OK; i++)
        status = kvp_kv_flush(rows[i].kv, NULL, n_threads);
    if (status != KVANT_OK)
        return status;
    if (placement != NULL && !kvp_placement_is_last(placement, cells, n)) {
        for (size_t i = 0; i < n_tensors && status == KVANT_OK; i++)
            status = keep(&rows[i], cells, n);
        return status;
    }
    /* Storing keys and values together keeps more threads busy. A single token's key need not wait
     * for its queries: when they come, kvant asks the tensor whether it wants them. */
    if (n == 1 && rows->positions != NULL) {
        rows->kv->single_position = rows->positions[0];
        return hold(&batch, held);
    }
    if (!kvant_tensor_wants_queries(rows->kv->tensor, n))
        return hold(&batch, held);
    batch.n_tensors = 1;
    batch.rows[0] = batch.rows[1];
    if (n_tensors > 1)
        status = store(&batch, NULL);
    return status == KVANT_OK ? keep(&rows[0], cells, n) : status;
}

void kvp_kv_drop_pending(kvp_kv *kv)
{
    free(kv->pending.cells);
    kv->pending = (struct kvp_pending_rows){ 0 };
    kv->single_position = -1;
    kvp_kv_count(kv);
}

kvant_status kvp_kv_flush(kvp_kv *kv, const kvp_mask *mask, uint32_t n_threads)
{
    const kvp_batch batch = { .rows = { { kv, kv->pending.rows, kv->shape.row,
                                          kv->pending.positions } },
                              .n_tensors = 1,
                              .cells = kv->pending.cells,
                              .n = kv->pending.n,
                              .n_threads = n_threads,
                              .by_graph = true };
    kvant_status status;

    if (kv->pending.n == 0)
        return KVANT_OK;
    if (mask != NULL && (mask->rows == NULL || mask->n_tokens < kv->pending.n))
        mask = NULL;
    status = store(&batch, mask);
    kvp_kv_drop_pending(kv);
    return status;
}

/* Nominal rows */

size_t kvp_kv_stream_bytes(const kvp_kv *kv)
{
    return kvp_kv_row_bytes(kv) * kv->shape.n_cells;
}

/* A run of cells of one stream, at most KVP_MOST_CELLS, that covers the start of the nominal bytes
 * [offset, offset + size). Says which cells they are, and which of their bytes. */
struct batch {
    size_t cell, n_cells;
    size_t skip, bytes;
};

static struct batch next_batch(const kvp_kv *kv, size_t offset, size_t size)
{
    size_t row = kvp_kv_row_bytes(kv), cell = offset / row, skip = offset % row;
    size_t left_in_stream = kv->shape.n_cells - cell % kv->shape.n_cells;
    size_t n = (skip + size + row - 1) / row;
    struct batch batch = { .cell = cell, .skip = skip };

    n = n < left_in_stream ? n : left_in_stream;
    batch.n_cells = n < KVP_MOST_CELLS ? n : KVP_MOST_CELLS;
    batch.bytes = batch.n_cells * row - skip;
    if (batch.bytes > size)
        batch.bytes = size;
    return batch;
}

/* Room for the rows of a batch, as floats and as fp16. */
struct scratch {
    float *rows;
    uint16_t *halves;
};

static bool scratch_create(const kvp_kv *kv, struct scratch *scratch)
{
    size_t n = (size_t)KVP_MOST_CELLS * kv->shape.row;

    scratch->rows = malloc(n * (sizeof(float) + sizeof(uint16_t)));
    scratch->halves = (uint16_t *)(scratch->rows + n);
    return scratch->rows != NULL;
}

/* Reads stored rows. llama.cpp's own threads wait while a state is saved or restored, so these
 * calls use all CPUs that the process may use. */
static kvant_status read_stored(const kvp_kv *kv, size_t cell, size_t n, float *rows)
{
    const size_t width = kv->shape.row;
    kvant_status status = KVANT_OK;
    int64_t slots[KVP_MOST_CELLS];

    if (kv->remote != NULL && kvp_kv_is_bound(kv))
        return kv->remote->read(kv, cell, n, rows);
    if (!kvp_kv_is_bound(kv))
        memset(rows, 0, n * width * sizeof(*rows)); /* never written */
    for (size_t done = 0, here; kvp_kv_is_bound(kv) && done < n && status == KVANT_OK;
         done += here) {
        here = n - done < KVP_MOST_CELLS ? n - done : KVP_MOST_CELLS;
        for (size_t i = 0; i < here; i++)
            slots[i] = kvp_kv_slot(kv, (int64_t)(cell + done + i));
        status = kvant_tensor_read_slots(kv->tensor, slots, here, rows + done * width, width,
                                         kvant_available_cpus());
    }
    return status;
}

kvant_status kvp_kv_read_rows(const kvp_kv *kv, size_t cell, size_t n, float *rows)
{
    const kvant_status status = read_stored(kv, cell, n, rows);

    kvp_invalid_fill(&kv->invalid, cell, n, rows, kv->shape.row);
    return status;
}

static kvant_status decode_batch(const kvp_kv *kv, const struct batch *batch,
                                 struct scratch *scratch)
{
    const kvant_status status = kvp_kv_read_rows(kv, batch->cell, batch->n_cells, scratch->rows);

    if (status == KVANT_OK)
        kvp_api.fp32_to_fp16_row(scratch->rows, scratch->halves,
                                 (int64_t)batch->n_cells * kv->shape.row);
    return status;
}

void kvp_kv_store_rows(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows)
{
    const kvp_batch batch = { .rows = { { kv, rows, kv->shape.row, NULL } },
                              .n_tensors = 1,
                              .cells = cells,
                              .n = n,
                              .n_threads = kvant_available_cpus() };

    if (kv->remote != NULL)
        kvp_kv_store(&batch);
    else
        store(&batch, NULL);
}

/* Stores rows in the cells of a batch; refused rows make their cells invalid. */
static void encode_batch(kvp_kv *kv, const struct batch *batch, struct scratch *scratch)
{
    int64_t cells[KVP_MOST_CELLS];

    for (size_t i = 0; i < batch->n_cells; i++)
        cells[i] = (int64_t)(batch->cell + i);
    kvp_api.fp16_to_fp32_row(scratch->halves, scratch->rows,
                             (int64_t)batch->n_cells * kv->shape.row);
    kvp_kv_store_rows(kv, cells, batch->n_cells, scratch->rows);
}

/* Nominal bytes that are transferred: to `out` if it is set, else from `data` if it is set, else
 * `value` repeated. */
struct bytes {
    char *out;
    const char *data;
    uint8_t value;
};

static kvant_status read_batch(const kvp_kv *kv, const struct batch *batch, struct scratch *scratch,
                               char *out)
{
    const kvant_status status = decode_batch(kv, batch, scratch);

    if (status == KVANT_OK)
        memcpy(out, (const char *)scratch->halves + batch->skip, batch->bytes);
    return status;
}

/* Writes a part of the nominal bytes of a batch. A cell that is invalid stays so if only a part of
 * its row is written, because the rest of the row is not known. */
static kvant_status write_batch(kvp_kv *kv, const struct batch *batch, struct scratch *scratch,
                                const struct bytes *bytes, size_t done)
{
    char *to = (char *)scratch->halves + batch->skip;
    kvant_status status = KVANT_OK;

    if (batch->bytes < batch->n_cells * kvp_kv_row_bytes(kv))
        status = decode_batch(kv, batch, scratch);
    if (status != KVANT_OK)
        return status;
    if (bytes->data != NULL)
        memcpy(to, bytes->data + done, batch->bytes);
    else
        memset(to, bytes->value, batch->bytes);
    encode_batch(kv, batch, scratch);
    return KVANT_OK;
}

/* Transfers nominal bytes, batch by batch. */
static kvant_status translate(kvp_kv *kv, size_t offset, size_t size, const struct bytes *bytes)
{
    kvant_status status = KVANT_OK;
    struct scratch scratch;

    kvp_kv_flush(kv, NULL, kvant_available_cpus()); /* rows that cannot be stored become invalid */
    if (!scratch_create(kv, &scratch))
        return KVANT_ERR_MEMORY;
    for (size_t done = 0; status == KVANT_OK && done < size;) {
        struct batch batch = next_batch(kv, offset + done, size - done);
        status = bytes->out != NULL ? read_batch(kv, &batch, &scratch, bytes->out + done)
                                    : write_batch(kv, &batch, &scratch, bytes, done);
        done += batch.bytes;
    }
    free(scratch.rows);
    return status;
}

static bool is_within(const kvp_kv *kv, size_t offset, size_t size)
{
    const size_t total = kvp_kv_stream_bytes(kv) * kv->shape.n_streams;

    return offset <= total && size <= total - offset;
}

static bool in_range(const kvp_kv *kv, const char *verb, size_t offset, size_t size)
{
    if (is_within(kv, offset, size))
        return true;
    kvp_error("%s: llama.cpp wants to %s %zu bytes at %zu, which is outside of the tensor; report "
              "the program",
              kv->name, verb, size, offset);
    return false;
}

/* Reads whole rows of one stream as codes, if the user wants codes. */
static bool read_codes(kvp_kv *kv, size_t offset, size_t size, void *out)
{
    const size_t row = kvp_kv_row_bytes(kv), cell = offset / row, n = size / row;

    if (!kv->settings->saves_codes || kv->in_place || !kvp_kv_is_bound(kv) || n == 0 ||
        offset % row != 0 || size % row != 0 || !is_within(kv, offset, size) ||
        cell / kv->shape.n_cells != (cell + n - 1) / kv->shape.n_cells)
        return false;
    if (kv->tensor != NULL)
        kvp_kv_flush(kv, NULL, kvant_available_cpus());
    return kvp_state_read(kv, cell, n, out);
}

bool kvp_kv_read(kvp_kv *kv, size_t offset, size_t size, void *out)
{
    return kvp_unused_asks(kv, offset, size) || read_codes(kv, offset, size, out) ||
           kvp_kv_read_nominal(kv, offset, size, out);
}

bool kvp_kv_read_nominal(kvp_kv *kv, size_t offset, size_t size, void *out)
{
    const struct bytes bytes = { .out = out };
    kvant_status status;

    if (!in_range(kv, "read", offset, size))
        return false;
    if (kvp_saving_measures())
        return true;
    if (kv->in_place) {
        kvp_cpu_rows_read(kv, offset, size, out);
        return true;
    }
    status = translate(kv, offset, size, &bytes);
    if (status != KVANT_OK)
        kvp_error("%s: cannot read %zu bytes at %zu: %s", kv->name, size, offset,
                  kvant_strerror(status));
    return status == KVANT_OK;
}

/* Makes all cells invalid that the nominal bytes belong to, even in part. */
static void lose(kvp_kv *kv, size_t offset, size_t size, const char *why)
{
    const size_t first = offset / kvp_kv_row_bytes(kv),
                 n = (offset + size - 1) / kvp_kv_row_bytes(kv) - first + 1;
    const kvp_refusal refusal = { .name = kv->name, .cell = first, .n = n, .why = why };

    kvp_invalid_set(&kv->invalid, first, n, true);
    kvp_restoring_refuse(why);
    kvp_invalid_report(&refusal);
}

static void write_bytes(kvp_kv *kv, size_t offset, size_t size, const struct bytes *bytes)
{
    const bool ready = kvp_kv_ready(kv);
    kvant_status status = KVANT_OK;

    if (!in_range(kv, "write", offset, size) || size == 0)
        return;
    if (kvp_trace_is_on)
        kvp_trace_write(kv, offset, size);
    if (ready)
        status = kvp_cpu_rows_leave(kv, kvant_available_cpus());
    if (ready && status == KVANT_OK)
        status = translate(kv, offset, size, bytes);
    if (!ready || status != KVANT_OK)
        lose(kv, offset, size,
             ready ? kvant_strerror(status)
                   : "head_dim is not known yet; set KVANT_HEAD_DIM to the head_dim of the model");
}

void kvp_kv_fill(kvp_kv *kv, size_t offset, size_t size, uint8_t value)
{
    const struct bytes bytes = { .value = value };
    const size_t row = kvp_kv_row_bytes(kv), first = (offset + row - 1) / row,
                 end = (offset + size) / row;

    kvp_state_drop(kv);
    if (value != 0 || kvp_kv_is_bound(kv))
        write_bytes(kv, offset, size, &bytes);
    /* an unbound tensor reads as zeros already, except where a row was refused */
    else if (first < end)
        kvp_invalid_set(&kv->invalid, first, end - first, false);
}

static bool all_zero(const char *data, size_t size)
{
    return size == 0 || (data[0] == 0 && memcmp(data, data + 1, size - 1) == 0);
}

/* Writes nominal bytes. When llama.cpp restores a state, it writes zeros to a tensor that no
 * attention reads (minimax-m3 has some). */
static void write_rows(kvp_kv *kv, size_t offset, size_t size, const void *data)
{
    const struct bytes bytes = { .data = data };

    if (!kvp_kv_is_bound(kv) && all_zero(data, size))
        kvp_kv_fill(kv, offset, size, 0);
    else
        write_bytes(kv, offset, size, &bytes);
}

/* Marks the cells of rows that are not restored, which the program is told. */
static void refuse_restored(kvp_kv *kv, size_t offset, size_t size)
{
    const size_t row = kvp_kv_row_bytes(kv), first = offset / row;

    kvp_invalid_set(&kv->invalid, first, (offset + size - 1) / row - first + 1, true);
    kvp_restoring_refuse(kvp_pack_damaged);
}

void kvp_kv_write(kvp_kv *kv, size_t offset, size_t size, const void *data)
{
    const size_t row = kvp_kv_row_bytes(kv), first = offset;
    const char *at;
    bool moved;
    size_t n;

    if (!in_range(kv, "write", offset, size) || size == 0 || kvp_restoring_ignores(kv))
        return;
    at = kvp_restoring_wait(data, size, offset % row == 0);
    moved = at != data;
    if (at == NULL) {
        refuse_restored(kv, offset, size);
        return;
    }
    kvp_state_begin(kv, offset / row, (size + row - 1) / row);
    if (kvp_cpu_rows_write(kv, offset, size, at))
        return;
    if (kvp_cpu_rows_leave(kv, kvant_available_cpus()) != KVANT_OK) {
        lose(kv, offset, size, kvant_strerror(KVANT_ERR_MEMORY));
        return;
    }
    if (offset % row != 0)
        write_rows(kv, offset, size, data);
    for (; offset % row == 0 && size > 0; offset += n, at += n, size -= n) {
        if (kv->tensor != NULL)
            kvp_kv_flush(kv, NULL, kvant_available_cpus());
        n = kvp_state_write(kv, offset / row, at, size, (const char *)data + (offset - first));
        if (n > 0 && kvp_trace_is_on)
            kvp_trace_write(kv, offset, n);
        if (moved && n < size) { /* a run of fewer cells; its zeros are not there */
            refuse_restored(kv, offset, size);
            return;
        }
        if (n > 0)
            continue;
        n = kvp_state_before_record(kv, at, size);
        write_rows(kv, offset, n, at);
    }
}

/* Clearing and copying */

void kvp_kv_clear(kvp_kv *kv)
{
    char err[512] = "";

    kvp_kv_drop_pending(kv);
    kvp_state_drop(kv);
    kvp_invalid_clear(&kv->invalid);
    if (kv->generations != NULL)
        memset(kv->generations, 0,
               kvp_placement_blocks(kv->shape.n_cells) * sizeof(*kv->generations));
    if (kv->cells != NULL)
        kv->remote->clear(kv);
    if (kv->tensor == NULL)
        return;
    kvant_tensor_free(&kv->tensor);
    kvp_host_clear(kv->memory, kv->reserved);
    if (!kvp_kv_create_tensor(kv, kv->head_dim, err, sizeof(err))) {
        kvp_error("%s: the cache was cleared, but no new one could be made, so start a new "
                  "context: %s",
                  kv->name, err);
        kv->head_dim = 0;
    }
    kvp_kv_count(kv);
}

static bool copy_cells(const kvp_kv *from, uint32_t from_stream, kvp_kv *to, uint32_t to_stream)
{
    kvant_status status;
    uint32_t n;

    if (from->placement != NULL || to->placement != NULL || from->remote != to->remote)
        return false;
    n = (uint32_t)(kvp_kv_slot(from, from->shape.n_cells) / KVANT_PAGE_TOKENS);
    if (!kvp_kv_is_bound(from))
        return !kvp_kv_is_bound(to);
    if (!kvp_kv_is_bound(to) && !kvp_kv_bind(to, from->head_dim))
        return false;
    if (from->remote != NULL)
        return from->remote->copy(from, from_stream * n, to, to_stream * n, n);
    status = kvant_tensor_copy(from->tensor, from_stream * n, to->tensor, to_stream * n, n);
    kvp_kv_count(to);
    return status == KVANT_OK;
}

bool kvp_kv_copy_stream(const kvp_kv *from, uint32_t from_stream, kvp_kv *to, uint32_t to_stream)
{
    const size_t n = from->shape.n_cells;

    if (!copy_cells(from, from_stream, to, to_stream))
        return false;
    if (kvp_trace_is_on)
        kvp_trace_copy(from, from_stream, to, to_stream);
    kvp_invalid_copy(&from->invalid, from_stream * n, &to->invalid, to_stream * n, n);
    return true;
}
