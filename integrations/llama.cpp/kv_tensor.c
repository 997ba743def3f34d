/* kv_tensor.c - nominal fp16 rows over a compressed tensor: reading, writing, clearing, copying
 * (see kv_tensor.h). */
#define _GNU_SOURCE /* madvise */

#include "kv_tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ggml_api.h"
#include "log.h"

/* Rows are translated in batches; a restored cache learns its centre from them (center=first), so
 * they should be as long as the batch of a prompt. */
#define BATCH_CELLS 512u

size_t kvp_kv_row_bytes(const kvp_kv *kv)
{
    return (size_t)kv->shape.row * sizeof(uint16_t);
}

size_t kvp_kv_stream_bytes(const kvp_kv *kv)
{
    return kvp_kv_row_bytes(kv) * kv->shape.n_cells;
}

static bool in_range(const kvp_kv *kv, size_t offset, size_t size)
{
    size_t total = kvp_kv_stream_bytes(kv) * kv->shape.n_streams;

    return offset <= total && size <= total - offset;
}

/* A run of cells of one stream, at most a batch, that covers the start of the nominal bytes
 * [offset, offset + size): which cells, and which of their bytes. */
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
    batch.n_cells = n < BATCH_CELLS ? n : BATCH_CELLS;
    batch.bytes = batch.n_cells * row - skip;
    if (batch.bytes > size)
        batch.bytes = size;
    return batch;
}

/* Room for one batch as floats and as fp16. */
struct scratch {
    float *rows;
    uint16_t *halves;
};

static bool scratch_create(const kvp_kv *kv, struct scratch *scratch)
{
    size_t n = (size_t)BATCH_CELLS * kv->shape.row;

    scratch->rows = malloc(n * (sizeof(float) + sizeof(uint16_t)));
    if (scratch->rows == NULL) {
        kvp_error("%s: %s", kv->name, kvant_strerror(KVANT_ERR_MEMORY));
        return false;
    }
    scratch->halves = (uint16_t *)(scratch->rows + n);
    return true;
}

/* Cells in slots that follow each other, at most n. */
static size_t run_length(const kvp_kv *kv, size_t cell, size_t n)
{
    int64_t slot = kvp_kv_slot(kv, (int64_t)cell);
    size_t length = 1;

    while (length < n && kvp_kv_slot(kv, (int64_t)(cell + length)) == (slot < 0 ? slot : slot + (int64_t)length))
        length++;
    return length;
}

static kvant_status read_cells(const kvp_kv *kv, size_t cell, size_t n, float *rows)
{
    kvant_status status = KVANT_OK;

    for (size_t done = 0, length; done < n && status == KVANT_OK; done += length) {
        int64_t slot = kvp_kv_slot(kv, (int64_t)(cell + done));
        length = run_length(kv, cell + done, n - done);
        if (slot < 0)
            memset(rows + done * kv->shape.row, 0, length * kv->shape.row * sizeof(*rows));
        else
            status = kvant_tensor_read(kv->tensor, (size_t)slot, length, rows + done * kv->shape.row, kv->shape.row);
    }
    return status;
}

static bool decode_batch(const kvp_kv *kv, const struct batch *batch, struct scratch *scratch)
{
    kvant_status status = read_cells(kv, batch->cell, batch->n_cells, scratch->rows);

    if (status != KVANT_OK) {
        kvp_error("%s: cannot read cells %zu to %zu: %s", kv->name, batch->cell, batch->cell + batch->n_cells - 1,
                  kvant_strerror(status));
        return false;
    }
    kvp_api.fp32_to_fp16_row(scratch->rows, scratch->halves, (int64_t)batch->n_cells * kv->shape.row);
    return true;
}

static bool encode_batch(kvp_kv *kv, const struct batch *batch, struct scratch *scratch)
{
    int64_t cells[BATCH_CELLS];
    kvant_status status;

    for (size_t i = 0; i < batch->n_cells; i++)
        cells[i] = (int64_t)(batch->cell + i);
    kvp_api.fp16_to_fp32_row(scratch->halves, scratch->rows, (int64_t)batch->n_cells * kv->shape.row);
    status = kvp_kv_store(kv, cells, batch->n_cells, scratch->rows, kv->shape.row, NULL, 1);
    if (status != KVANT_OK)
        kvp_error("%s: cannot store cells %zu to %zu: %s", kv->name, batch->cell, batch->cell + batch->n_cells - 1,
                  kvant_strerror(status));
    return status == KVANT_OK;
}

static bool flushed(kvp_kv *kv)
{
    kvant_status status = kvp_kv_flush(kv, NULL, 1);

    if (status != KVANT_OK)
        kvp_error("%s: cannot store new rows: %s", kv->name, kvant_strerror(status));
    return status == KVANT_OK;
}

bool kvp_kv_read(kvp_kv *kv, size_t offset, size_t size, void *out)
{
    struct scratch scratch;
    bool ok = true;

    if (!in_range(kv, offset, size)) {
        kvp_error("%s: read of %zu bytes at %zu is outside of the tensor", kv->name, size, offset);
        return false;
    }
    if (kv->tensor == NULL) {
        memset(out, 0, size); /* unbound, so never written */
        return true;
    }
    if (!flushed(kv) || !scratch_create(kv, &scratch))
        return false;
    while (ok && size > 0) {
        struct batch batch = next_batch(kv, offset, size);
        ok = decode_batch(kv, &batch, &scratch);
        if (ok)
            memcpy(out, (const char *)scratch.halves + batch.skip, batch.bytes);
        out = (char *)out + batch.bytes;
        offset += batch.bytes;
        size -= batch.bytes;
    }
    free(scratch.rows);
    return ok;
}

bool kvp_kv_write(kvp_kv *kv, size_t offset, size_t size, const void *data)
{
    struct scratch scratch;
    bool ok = true;

    if (!in_range(kv, offset, size)) {
        kvp_error("%s: write of %zu bytes at %zu is outside of the tensor", kv->name, size, offset);
        return false;
    }
    if (!kvp_kv_ready(kv)) {
        kvp_error("%s: head_dim is not known yet, nothing was stored; set KVANT_HEAD_DIM to the model's", kv->name);
        return false;
    }
    if (!flushed(kv) || !scratch_create(kv, &scratch))
        return false;
    while (ok && size > 0) {
        struct batch batch = next_batch(kv, offset, size);
        bool whole = batch.bytes == batch.n_cells * kvp_kv_row_bytes(kv);
        ok = whole || decode_batch(kv, &batch, &scratch);
        if (ok) {
            memcpy((char *)scratch.halves + batch.skip, data, batch.bytes);
            ok = encode_batch(kv, &batch, &scratch);
        }
        data = (const char *)data + batch.bytes;
        offset += batch.bytes;
        size -= batch.bytes;
    }
    free(scratch.rows);
    return ok;
}

/* Whole pages of the system inside the tensor's memory are given back, which zeroes them; the rest
 * is zeroed. */
static void release_memory(const kvp_kv *kv)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)kv->memory, last = first + kv->reserved;
    uintptr_t inner_first = (first + page - 1) / page * page, inner_last = last / page * page;

    if (inner_first >= inner_last || madvise((void *)inner_first, inner_last - inner_first, MADV_DONTNEED) != 0) {
        memset(kv->memory, 0, kv->reserved);
        return;
    }
    memset((void *)first, 0, inner_first - first);
    memset((void *)inner_last, 0, last - inner_last);
}

void kvp_kv_clear(kvp_kv *kv)
{
    char err[512] = "";

    kvp_kv_forget_waiting(kv);
    if (kv->generations != NULL)
        memset(kv->generations, 0, kvp_placement_blocks(kv->shape.n_cells) * sizeof(*kv->generations));
    if (kv->tensor == NULL)
        return;
    kvant_tensor_free(&kv->tensor);
    release_memory(kv);
    if (!kvp_kv_create_tensor(kv, kv->head_dim, err, sizeof(err))) {
        kvp_error("%s: cannot start over after clearing: %s", kv->name, err);
        kv->head_dim = 0;
    }
}

bool kvp_kv_copy_stream(const kvp_kv *from, uint32_t from_stream, kvp_kv *to, uint32_t to_stream)
{
    uint32_t n;

    if (from->placement != NULL || to->placement != NULL)
        return false;
    n = (uint32_t)(kvp_kv_slot(from, from->shape.n_cells) / KVANT_PAGE_TOKENS);
    if (from->tensor == NULL)
        return to->tensor == NULL;
    if (to->tensor == NULL && !kvp_kv_bind(to, from->head_dim))
        return false;
    return kvant_tensor_copy(from->tensor, from_stream * n, to->tensor, to_stream * n, n) == KVANT_OK;
}
