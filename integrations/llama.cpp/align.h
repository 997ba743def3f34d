/* align.h - cells of a restored state that fit the blocks of its records.
 *
 * On a GPU cells are slots. So rows keep their codes only in cells with the same place in a block.
 * llama.cpp restores a state to the next free cells. They begin anywhere in a block when other
 * sequences have tokens. The plug-in then restores the state again with filler cells, which stand
 * where llama.cpp's cells do not fit. The fillers are removed afterwards.
 *
 * align.c knows llama.cpp's form of the state of one sequence and one cache. It leaves states of
 * any other form unchanged. */
#pragma once

#include "pack.h"

/* A cell that llama.cpp chose for a row, the row's slot in its block, and whether it is the first
 * row of the block. */
typedef struct kvp_align_place {
    int64_t cell;
    uint32_t slot;
    bool begins;
} kvp_align_place;

typedef struct kvp_alignment {
    kvp_align_place *places; /* of the rows, in the order of the state */
    size_t n, room;
    bool *is_filler; /* by cell of the state with fillers; NULL: there is no plan */
    size_t n_all, room_all;
    uint32_t *first;  /* by run: its first cell */
    int32_t position; /* the fillers have the positions from here on; 0: no state has fillers */
} kvp_alignment;

/* Notes the places of n more rows. False without memory. */
bool kvp_align_note(kvp_alignment *a, const kvp_align_place *places, size_t n);

/* Finds the fillers for the rows that were noted. Each block of the state gets a block of 64 free
 * cells. False if rows have another order in their blocks, without memory, and if too many fillers
 * are needed. */
bool kvp_align_plan(kvp_alignment *a);

/* Puts the fillers into a state before its runs are read. False: it has another form, and is
 * unchanged. */
bool kvp_align_state(kvp_alignment *a, kvp_plain *plain);

/* The cells of the run that begins with these bytes of the state: which ones are fillers, and their
 * number. NULL: the state has no fillers, or no run begins there. */
const bool *kvp_align_fillers(const kvp_alignment *a, const kvp_plain *plain, const void *bytes,
                              size_t *n);

void kvp_align_free(kvp_alignment *a);
