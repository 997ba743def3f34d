/* kv_store.h - stores rows at their slots, whether a codec takes them or not.
 *
 * Rows that a codec refuses become invalid (invalid.h), and the other rows of the batch are stored as
 * if these had not been there: nothing is learned from them. */
#ifndef KVP_KV_STORE_H
#define KVP_KV_STORE_H

#include "kv_tensor.h"

/* Rows of one tensor, or of the keys and the values of a layer, which have equal cells and slots. */
typedef struct kvp_batch {
    kvp_rows rows[2];
    size_t n_tensors;
    const int64_t *cells;
    const int64_t *slots; /* not looked at where cells are slots: with a remote */
    size_t n;
    uint32_t n_threads;
    bool by_graph; /* for the log: a node of a graph writes them */
} kvp_batch;

/* KVANT_OK: each row is stored, or its cell is invalid. Else, as without memory, all cells of the
 * batch are invalid. */
kvant_status kvp_kv_store(const kvp_batch *batch);

/* The cells become invalid for a reason that no row has. */
void kvp_kv_lose(const kvp_batch *batch, kvant_status why);

#endif /* KVP_KV_STORE_H */
