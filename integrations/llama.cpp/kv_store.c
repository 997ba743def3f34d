/* kv_store.c - see kv_store.h.
 *
 * Rows are seldom refused, so the whole batch is tried first: a refusal leaves the tensor as it
 * was. Then rows with a NaN or an infinity are left out. When the rest is refused, too, a number of
 * some row leaves fp16's range after the codec's transform. Halves of the batch, and halves of
 * these, find that row. */
#include "kv_store.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "llama_states.h"

static size_t width_of(const kvp_batch *batch)
{
    return batch->rows->kv->shape.row;
}

static bool is_finite(const float *row, size_t width)
{
    int others = 0; /* counts in an int, because compilers vectorise that and not a sum of floats */

    for (size_t j = 0; j < width; j++)
        others |= !(fabsf(row[j]) <= FLT_MAX);
    return others == 0;
}

/* Keys and values of a token are stored together or not at all. */
static bool is_finite_at(const kvp_batch *batch, size_t i)
{
    bool finite = true;

    for (size_t t = 0; t < batch->n_tensors && finite; t++)
        finite = is_finite(batch->rows[t].at + i * batch->rows[t].stride, width_of(batch));
    return finite;
}

static size_t count_finite(const kvp_batch *batch)
{
    size_t n = 0;

    for (size_t i = 0; i < batch->n; i++)
        n += is_finite_at(batch, i);
    return n;
}

static void mark(const kvp_batch *batch, size_t i, bool invalid)
{
    for (size_t t = 0; t < batch->n_tensors; t++)
        kvp_invalid_set(&batch->rows[t].kv->invalid, (size_t)batch->cells[i], 1, invalid);
}

static void mark_all(const kvp_batch *batch, bool invalid)
{
    for (size_t i = 0; i < batch->n; i++)
        mark(batch, i, invalid);
}

/* Reports that n rows were refused, the first of them row i of the batch. */
static void report(const kvp_batch *batch, size_t i, size_t n, kvant_status why)
{
    const kvp_refusal refusal = { .name = batch->rows->kv->name,
                                  .cell = (size_t)batch->cells[i],
                                  .n = n,
                                  .why = kvant_strerror(why),
                                  .by_graph = batch->by_graph };

    kvp_invalid_report(&refusal);
}

static kvant_status attempt(const kvp_batch *batch)
{
    const kvp_rows *k = &batch->rows[0], *v = &batch->rows[1]; /* the rows of keys come first */
    kvant_status status = KVANT_OK;

    if (k->kv->remote != NULL)
        return k->kv->remote->write(k->kv, batch->cells, batch->n, k->at);
    if (k->positions != NULL)
        status = kvant_tensor_next_positions(k->kv->tensor, k->positions, batch->n);
    if (status == KVANT_OK && batch->n_tensors == 1)
        return kvant_tensor_write(k->kv->tensor, batch->slots, batch->n, k->at, k->stride,
                                  batch->n_threads);
    if (status == KVANT_OK)
        status = kvant_tensor_write_layer(k->kv->tensor, v->kv->tensor, batch->slots, batch->n,
                                          k->at, k->stride, v->at, v->stride, batch->n_threads);
    return status;
}

static bool is_refusal(kvant_status status)
{
    return status == KVANT_ERR_NONFINITE || status == KVANT_ERR_RANGE;
}

/* A state is refused when its rows could be stored at another time, and not for a row with a NaN,
 * which llama.cpp's own cache restores, too. */
void kvp_kv_lose(const kvp_batch *batch, kvant_status why)
{
    mark_all(batch, true);
    if (!is_refusal(why))
        kvp_restoring_refuse(kvant_strerror(why));
    if (batch->n > 0)
        report(batch, 0, batch->n, why);
}

/* The part of a batch with rows first to first + n - 1. */
static kvp_batch part_of(const kvp_batch *batch, size_t first, size_t n)
{
    kvp_batch part = *batch;

    for (size_t t = 0; t < batch->n_tensors; t++) {
        part.rows[t].at += first * part.rows[t].stride;
        if (part.rows[t].positions != NULL)
            part.rows[t].positions += first;
    }
    part.cells += first;
    part.slots = part.slots != NULL ? part.slots + first : NULL;
    part.n = n;
    return part;
}

/* Stores a batch that was refused with `status`, half by half. Each call halves it, so the
 * recursion is as deep as the batch's length has bits. */
static kvant_status store_halves(const kvp_batch *batch, kvant_status status)
{
    const size_t half = batch->n / 2;

    if (batch->n == 1) {
        kvp_kv_lose(batch, status);
        return KVANT_OK;
    }
    for (size_t i = 0; i < 2; i++) {
        const kvp_batch part = part_of(batch, i * half, i == 0 ? half : batch->n - half);
        status = attempt(&part);
        if (is_refusal(status))
            status = store_halves(&part, status);
        if (status != KVANT_OK)
            return status;
    }
    return KVANT_OK;
}

/* A copy of n rows of each tensor, with their positions, cells and slots. */
struct copy {
    int64_t *cells, *slots;
    float *rows[2];
    int32_t *positions;
};

static bool copy_create(struct copy *copy, const kvp_batch *batch, size_t n)
{
    const size_t floats = n * width_of(batch);

    copy->cells = malloc(n * (2 * sizeof(int64_t) + sizeof(int32_t)) +
                         batch->n_tensors * floats * sizeof(float));
    if (copy->cells == NULL)
        return false;
    copy->slots = copy->cells + n;
    copy->rows[0] = (float *)(copy->slots + n);
    copy->rows[1] = copy->rows[0] + floats;
    copy->positions = (int32_t *)(copy->rows[0] + batch->n_tensors * floats);
    return true;
}

static void copy_row(const kvp_batch *batch, size_t i, const struct copy *copy, size_t to)
{
    const size_t width = width_of(batch);

    copy->cells[to] = batch->cells[i];
    copy->slots[to] = batch->slots != NULL ? batch->slots[i] : 0;
    if (batch->rows->positions != NULL)
        copy->positions[to] = batch->rows->positions[i];
    for (size_t t = 0; t < batch->n_tensors; t++)
        memcpy(copy->rows[t] + to * width, batch->rows[t].at + i * batch->rows[t].stride,
               width * sizeof(float));
}

/* Makes a batch without the rows that are not finite, whose cells become invalid. */
static kvp_batch leave_out(const kvp_batch *batch, const struct copy *copy)
{
    kvp_batch rest = *batch;

    rest.n = 0;
    for (size_t i = 0; i < batch->n; i++)
        if (is_finite_at(batch, i))
            copy_row(batch, i, copy, rest.n++);
        else
            mark(batch, i, true);
    for (size_t t = 0; t < batch->n_tensors; t++) {
        rest.rows[t].at = copy->rows[t];
        rest.rows[t].stride = width_of(batch);
        rest.rows[t].positions = batch->rows[t].positions != NULL ? copy->positions : NULL;
    }
    rest.cells = copy->cells;
    rest.slots = copy->slots;
    return rest;
}

static kvant_status store_rest(const kvp_batch *rest)
{
    kvant_status status = rest->n > 0 ? attempt(rest) : KVANT_OK;

    mark_all(rest, false);
    if (is_refusal(status))
        status = store_halves(rest, status);
    if (status != KVANT_OK)
        mark_all(rest, true);
    return status;
}

/* Stores the rows that can be stored of a batch that was refused for the reason `why`. */
static kvant_status store_some(const kvp_batch *batch, kvant_status why)
{
    const size_t n = count_finite(batch);
    struct copy copy;
    kvant_status status = KVANT_ERR_MEMORY;

    if (copy_create(&copy, batch, n + 1)) {
        const kvp_batch rest = leave_out(batch, &copy);
        size_t first = 0;
        while (first < batch->n && is_finite_at(batch, first))
            first++;
        if (n < batch->n)
            report(batch, first, batch->n - n, why);
        status = store_rest(&rest);
        free(copy.cells);
    }
    return status;
}

kvant_status kvp_kv_store(const kvp_batch *batch)
{
    /* A GPU would learn from all rows of the batch before it refuses some of them. */
    const bool unfit = batch->rows->kv->remote != NULL && count_finite(batch) < batch->n;
    kvant_status status = unfit ? KVANT_ERR_NONFINITE : attempt(batch);

    if (status == KVANT_OK)
        mark_all(batch, false);
    if (is_refusal(status))
        status = store_some(batch, status);
    if (status != KVANT_OK)
        kvp_kv_lose(batch, status);
    return status;
}

kvant_status kvp_kv_write_rows(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows,
                               uint32_t n_threads)
{
    int64_t slots[KVP_MOST_CELLS];
    const kvp_batch batch = { .rows = { { kv, rows, kv->shape.row, NULL } },
                              .n_tensors = 1,
                              .cells = cells,
                              .slots = slots,
                              .n = n,
                              .n_threads = n_threads,
                              .by_graph = true };
    kvant_status status;

    for (size_t i = 0; i < n; i++)
        slots[i] = kvp_kv_slot(kv, cells[i]);
    status = kvp_kv_store(&batch);
    kvp_kv_count(kv);
    return status;
}

/* Held rows */

static kvp_batch batch_of(const kvp_held_row *held, uint32_t n_threads)
{
    return (kvp_batch){ .rows = { held->rows[0], held->rows[1] },
                        .n_tensors = 2,
                        .cells = &held->cell,
                        .slots = &held->slot,
                        .n = 1,
                        .n_threads = n_threads,
                        .by_graph = true };
}

static void release(kvp_held_row *held)
{
    held->is_held = false;
    for (size_t i = 0; i < 2; i++)
        kvp_kv_count(held->rows[i].kv);
}

kvant_status kvp_kv_store_held(kvp_held_row *held, uint32_t n_threads)
{
    const kvp_batch batch = batch_of(held, n_threads);
    const kvant_status status = kvp_kv_store(&batch);

    release(held);
    return status;
}

kvant_status kvp_kv_begin_step(const kvp_held_row *held, kvant_attention_step *step)
{
    const kvp_rows *k = &held->rows[0];

    step->slot = held->slot;
    step->k_row = k->at;
    step->v_row = held->rows[1].at;
    return k->positions != NULL ? kvant_tensor_next_positions(k->kv->tensor, k->positions, 1)
                                : KVANT_OK;
}

void kvp_kv_end_step(kvp_held_row *held)
{
    const kvp_batch batch = batch_of(held, 1);

    mark_all(&batch, false);
    release(held);
}
