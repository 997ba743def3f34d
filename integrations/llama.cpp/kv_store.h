/* kv_store.h - stores rows at their slots, whether a codec takes them or not.
 *
 * The cell of a row that a codec refuses becomes invalid (invalid.h). The remaining rows are stored
 * as if the refused rows were not in the batch, and kvant learns nothing from the refused rows. */
#pragma once

#include "kv_tensor.h"

/* The rows of one tensor, or of a layer's keys and values, which have the same cells and slots. */
typedef struct kvp_batch {
    kvp_rows rows[2];
    size_t n_tensors;
    const int64_t *cells;
    const int64_t *slots; /* ignored with a remote, where cells are slots */
    size_t n;
    uint32_t n_threads;
    bool by_graph; /* for the log: a node of a graph writes the rows */
} kvp_batch;

/* Returns KVANT_OK when each row is stored or its cell is invalid. On an error, such as
 * KVANT_ERR_MEMORY, all cells of the batch are invalid. */
kvant_status kvp_kv_store(const kvp_batch *batch);

/* Stores a held row in a separate call. Or an attention call stores it: kvp_kv_begin_step gives the
 * row to the call, and kvp_kv_end_step comes after it if the row was stored. */
struct kvant_attention_step;
kvant_status kvp_kv_store_held(kvp_held_row *held, uint32_t n_threads);
kvant_status kvp_kv_begin_step(const kvp_held_row *held, struct kvant_attention_step *step);
void kvp_kv_end_step(kvp_held_row *held);

/* Makes the cells invalid for a reason that no row has. */
void kvp_kv_lose(const kvp_batch *batch, kvant_status why);
