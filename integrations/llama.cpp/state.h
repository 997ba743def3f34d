/* state.h - saved states whose rows are codes.
 *
 * llama.cpp saves a state by reading nominal fp16 rows of a run of cells, and restores it by
 * writing them to cells that may form other runs. With KVANT_STATES=codes the bytes of a run begin
 * with a record of its codes and transforms (kvant/tensor_hooks.h); the rest of its nominal bytes
 * are zeros, whose memory goes back to the system. A run whose record would not be smaller is
 * nominal rows. So a state holds any mix of both, and restoring needs no setting.
 *
 * This file owns the bytes of such a run (format.md, "Saved states"), the pieces of a run that has
 * not come wholly, and the blocks that restored rows go to. Nominal rows are kv_tensor.c's. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvp_kv;

/* A saved run of which a part was written so far. */
typedef struct kvp_incoming {
    uint8_t
        *bytes; /* the first n_kept nominal bytes, as far as they came; NULL: they came wholly */
    int64_t *cells;      /* NULL: no run has begun */
    const bool *fillers; /* by cell: it has no row (align.h); NULL: all have rows */
    size_t n_kept;
    size_t have, total; /* nominal bytes */
} kvp_incoming;

/* The cells from the first one to the last one that a state has restored so far. alone: all further
 * rows of their stream are of the sequence that the state replaces. */
typedef struct kvp_restored_cells {
    unsigned state; /* kvp_restoring_number(); 0: none */
    bool alone;
    size_t first, end;
} kvp_restored_cells;

/* Writes the rows of n cells of one stream, from `cell` on, as a record to `out`, which has room
 * for their nominal rows. False when they cannot be a record, or when it would be larger; `out` is
 * then unchanged or has unspecified bytes. */
bool kvp_state_read(const struct kvp_kv *kv, size_t cell, size_t n, void *out);

/* Notes that llama.cpp writes to n cells, which it may do to restore a state. */
void kvp_state_begin(struct kvp_kv *kv, size_t cell, size_t n);

/* Accepts bytes that llama.cpp writes to the cells from `cell` on, if they begin with a record or
 * continue one. Returns how many nominal bytes that were, whole rows; 0: none. Rows of a damaged or
 * foreign record make their cells invalid. `origin`: where llama.cpp has the bytes. */
size_t kvp_state_write(struct kvp_kv *kv, size_t cell, const void *data, size_t size,
                       const void *origin);

/* The number of bytes from a row that begins no record to the next row that begins one, at most
 * size. */
size_t kvp_state_before_record(const struct kvp_kv *kv, const void *data, size_t size);

/* Forgets a run that did not come wholly. Its cells stay invalid. */
void kvp_state_drop(struct kvp_kv *kv);
