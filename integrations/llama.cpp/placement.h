/* placement.h - maps the cells of llama.cpp's cache to slots of a tensor.
 *
 * With a unified cache llama.cpp gives the tokens of several sequences the next free cells. Stored
 * in this order, a page of 64 tokens mixes sequences, and the rounding of sums over a page depends
 * on the neighbours of a sequence. A placement gives each sequence its own blocks of 64 slots, in
 * the order of its tokens. So a sequence has the same results as it has alone.
 *
 * llama.cpp does not name sequences, but the mask shows them: a token follows the newest token that
 * it sees. Cells that llama.cpp frees stay placed until llama.cpp uses them again. When no block is
 * free, a row goes to any free slot, which is correct but shares a page.
 *
 * All tensors of one cache share a placement and ask it about each batch in turn. A batch with the
 * same cells as the preceding batch is the same batch, and moves nothing. Not thread-safe. */
#ifndef KVP_PLACEMENT_H
#define KVP_PLACEMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVP_BLOCK 64u

typedef struct kvp_placement kvp_placement;

/* What each token of a batch sees: fp16 numbers per token and cell, minus infinity where it does
 * not see the cell. rows NULL: all cells. */
typedef struct kvp_mask {
    const uint16_t *rows;
    size_t stride;    /* numbers from one token's row to the next */
    uint32_t n_cells; /* cells beyond are not seen */
    size_t n_tokens;
} kvp_mask;

/* A block of slots: the index-th of a sequence. generation counts how often it was started: another
 * one means that what the block held before is to be cleared. */
typedef struct kvp_block {
    uint32_t sequence, index, generation;
    uint32_t n_used;
} kvp_block;

/* Blocks that n_cells cells are placed in: as many as they fill, and some for blocks that sequences
 * fill in part. */
uint32_t kvp_placement_blocks(uint32_t n_cells);

/* NULL when out of memory. */
kvp_placement *kvp_placement_create(uint32_t n_cells);
void kvp_placement_free(kvp_placement *placement);
void kvp_placement_clear(kvp_placement *placement);

/* slots[i] = where the row of cells[i] goes. Without a mask (a restored state, rows rewritten in
 * place) cells that have a slot keep it; each other row follows the one before it, and the first
 * one the last row of the batch before, if that was the cell before. False when a cell is out of
 * range or memory is short; nothing is placed then. */
bool kvp_placement_write(kvp_placement *placement, const int64_t *cells, size_t n,
                         const kvp_mask *mask, int64_t *slots);

/* Whether these are the cells of the last batch, which has its slots. */
bool kvp_placement_is_last(const kvp_placement *placement, const int64_t *cells, size_t n);

/* How many tokens of a batch of n are of one sequence, from first on. Of a batch that the placement
 * does not know all tokens are. */
size_t kvp_placement_run(const kvp_placement *placement, size_t n, size_t first);

/* The cell's slot; -1 when it was never written. */
int64_t kvp_placement_slot(const kvp_placement *placement, uint32_t cell);

kvp_block kvp_placement_block(const kvp_placement *placement, uint32_t block);

/* The blocks that n tokens of the mask, from first on, see, in the order of their sequence; returns
 * how many. table has room for all. */
uint32_t kvp_placement_table(const kvp_placement *placement, const kvp_mask *mask, uint32_t first,
                             uint32_t n, int32_t *table);

/* One token's mask in the order of a table: n_blocks x 64 numbers. */
void kvp_placement_gather(const kvp_placement *placement, const kvp_mask *mask, uint32_t token,
                          const int32_t *table, uint32_t n_blocks, uint16_t *out);

/* Whether slot i of the table is cell i everywhere: masks are in its order then. */
bool kvp_placement_in_order(const kvp_placement *placement, const int32_t *table,
                            uint32_t n_blocks);

#endif /* KVP_PLACEMENT_H */
