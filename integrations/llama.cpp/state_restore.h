/* state_restore.h - a run of a saved state that is being restored: what state.c and state_remote.c
 * share. */
#pragma once

#include <kvant/tensor_hooks.h>

#include "kv_tensor.h"
#include "record_copy.h"
#include "state_format.h"

/* The places of the rows of a run of cells. The lists have room for a block and a run per cell. */
typedef struct kvp_state_layout {
    kvant_block_slots *blocks;
    uint32_t *index; /* by block */
    kvp_state_run *runs;
    uint32_t n_blocks, n_runs, n_cells;
} kvp_state_layout;

/* A run of a state whose lists are right. Cell i of the run is cells[i] here. */
typedef struct kvp_state_restored {
    kvp_kv *kv;
    const int64_t *cells;
    kvp_restored *rows; /* by cell */
    kvp_state_layout l;
    const void *record;
    size_t bytes; /* of the record */
} kvp_state_restored;

/* state.c. Finds the blocks here of the saved blocks, if their cells' slots are fixed and begin at
 * the same places of blocks. */
bool kvp_state_find_fixed(const kvp_state_restored *r, uint32_t *at);

/* state.c. `kvp_state_import` puts the record's blocks in place of the blocks of a tensor that the
 * layout names. `kvp_state_store` decodes the rows of a copy of the record and stores them like any
 * rows. */
kvant_status kvp_state_import(const kvp_state_restored *r, kvant_tensor *tensor);
kvant_status kvp_state_store(const kvp_state_restored *r, const kvp_record_copy *c);

/* state_remote.c. Restores the run in the memory of another device. */
kvant_status kvp_state_restore_remote(kvp_state_restored *r);
