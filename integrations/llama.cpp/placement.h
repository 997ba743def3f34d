/* placement.h - maps the cells of llama.cpp's cache to slots of a tensor.
 *
 * With a unified cache llama.cpp gives the tokens of several sequences the next free cells. Stored
 * in this order, a page of 64 tokens mixes sequences, and the rounding of sums over a page depends
 * on the neighbours of a sequence. A placement gives each sequence its own blocks of 64 slots, in
 * the order of its tokens. So a sequence gets the same results as when it runs alone.
 *
 * llama.cpp does not name sequences, but the mask shows them: a token follows the newest token that
 * it sees. Cells that llama.cpp frees stay placed until llama.cpp uses them again. When no block is
 * free, a row goes to any free slot, which is correct but shares a page.
 *
 * All tensors of one cache share a placement, and each of them asks it about each batch. A batch
 * with the same cells as the preceding batch is the same batch, and moves nothing. Not
 * thread-safe. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_BLOCK 64u /* KVANT_PAGE_TOKENS */

#define KVP_HIDDEN 0xfc00u /* minus infinity in a mask of fp16 */

typedef struct kvp_placement kvp_placement;

/* The cells that each token of a batch sees, as fp16 numbers per token and cell. The number is
 * minus infinity where the token does not see the cell. rows NULL: every token sees all cells. */
typedef struct kvp_mask {
    const uint16_t *rows;
    size_t stride;    /* numbers between the rows of two tokens */
    uint32_t n_cells; /* no token sees cells from here on */
    size_t n_tokens;
} kvp_mask;

/* A block of slots, the index-th block of a sequence. generation counts how often it was started.
 * When it changes, the earlier content of the block has to be cleared. */
typedef struct kvp_block {
    uint32_t sequence, index, generation;
    uint32_t n_used;
} kvp_block;

/* The number of blocks in which n_cells cells are placed: as many as they fill, and some more,
 * because sequences fill their last blocks only in part. */
uint32_t kvp_placement_blocks(uint32_t n_cells);

/* NULL when out of memory. */
kvp_placement *kvp_placement_create(uint32_t n_cells);
void kvp_placement_free(kvp_placement *placement);
void kvp_placement_clear(kvp_placement *placement);

/* Whether nothing was placed since the placement was created or cleared. */
bool kvp_placement_is_empty(const kvp_placement *placement);

/* The number of sequences that have cells. `kvp_placement_forget` removes all cells from `first`
 * on. */
uint32_t kvp_placement_sequences(const kvp_placement *placement);
void kvp_placement_forget(kvp_placement *placement, int64_t first);

/* slots[i] becomes the slot for the row of cells[i]. Without a mask (a restored state, or rows
 * rewritten in place), cells that have a slot keep it. Each new row then follows the row before it;
 * the first row follows the last row of the preceding batch, if that row's cell is the cell before.
 * False when a cell is out of range or memory is short; then nothing is placed. */
bool kvp_placement_write(kvp_placement *placement, const int64_t *cells, size_t n,
                         const kvp_mask *mask, int64_t *slots);

/* A row of a restored sequence: it lies in the `slot`-th slot of one of its blocks. */
typedef struct kvp_restored {
    int64_t cell;
    uint32_t block; /* counted from 0 */
    uint32_t slot;
} kvp_restored;

/* Places the rows of n_blocks blocks that were saved. Block i was the index[i]-th block of its
 * sequence. at[i] becomes the block here. The blocks are new, or they are the blocks in which
 * another tensor's call placed these rows. False when a cell is out of range, when another tensor's
 * rows lie otherwise, or when there are too few free blocks; in the last case the cells have no
 * slots any more. */
bool kvp_placement_restore(kvp_placement *placement, const kvp_restored *rows, size_t n,
                           const uint32_t *index, uint32_t n_blocks, uint32_t *at);

/* Whether these are the cells of the last batch, whose slots are known. */
bool kvp_placement_is_last(const kvp_placement *placement, const int64_t *cells, size_t n);

/* The number of tokens of a batch of n that belong to one sequence, from `first` on. When the
 * placement does not know the batch, all tokens count as one sequence. */
size_t kvp_placement_run(const kvp_placement *placement, size_t n, size_t first);

/* The cell's slot; -1 when it was never written. */
int64_t kvp_placement_slot(const kvp_placement *placement, uint32_t cell);

kvp_block kvp_placement_block(const kvp_placement *placement, uint32_t block);

/* Writes the blocks that n tokens of the mask see, from `first` on, in the order of their sequence,
 * and returns their number. table has room for all blocks. */
uint32_t kvp_placement_table(const kvp_placement *placement, const kvp_mask *mask, uint32_t first,
                             uint32_t n, int32_t *table);

/* One token's mask in the order of a table: n_blocks x 64 numbers. */
void kvp_placement_gather(const kvp_placement *placement, const kvp_mask *mask, uint32_t token,
                          const int32_t *table, uint32_t n_blocks, uint16_t *out);

/* Whether slot i of the table is cell i everywhere. Then masks are in its order already. */
bool kvp_placement_in_order(const kvp_placement *placement, const int32_t *table,
                            uint32_t n_blocks);
