/* placement.c - see placement.h. */
#include "placement.h"

#include <stdlib.h>
#include <string.h>

#define NOWHERE (-1)

struct kvp_placement {
    uint32_t n_cells, n_blocks;
    uint32_t n_tried; /* blocks from here on were not used since the last clearing */
    uint32_t n_moved; /* cells whose slot has a different number */
    uint64_t now;
    uint64_t graph;   /* `now` after the last batch with a mask */
    int64_t restored; /* the last cell of a batch without a mask */
    int64_t *batch;   /* the cells of the last batch, n_batch of them */
    size_t n_batch;
    int32_t *slot_of;      /* by cell */
    int32_t *cell_of;      /* by slot */
    uint64_t *written;     /* by cell: when it was written */
    uint32_t *batch_index; /* by cell: its index in the current batch plus 1, or 0 */
    kvp_block *blocks;
    uint64_t *started; /* by block: when it was started */
    int32_t *tails;    /* by sequence: the cell that was written last */
    uint32_t *n_of;    /* by sequence: its blocks that hold cells */
};

uint32_t kvp_placement_blocks(uint32_t n_cells)
{
    uint32_t full = (n_cells - 1) / KVP_BLOCK + 1;

    return full + full / 8 + 8;
}

kvp_placement *kvp_placement_create(uint32_t n_cells)
{
    kvp_placement *p = calloc(1, sizeof(*p));

    if (p == NULL)
        return NULL;
    p->n_cells = n_cells;
    p->n_blocks = kvp_placement_blocks(n_cells);
    p->slot_of = malloc(n_cells * sizeof(*p->slot_of));
    p->cell_of = malloc((size_t)p->n_blocks * KVP_BLOCK * sizeof(*p->cell_of));
    p->written = malloc(n_cells * sizeof(*p->written));
    p->batch_index = calloc(n_cells, sizeof(*p->batch_index));
    p->blocks = calloc(p->n_blocks, sizeof(*p->blocks));
    p->started = calloc(p->n_blocks, sizeof(*p->started));
    p->tails = malloc(p->n_blocks * sizeof(*p->tails));
    p->n_of = malloc(p->n_blocks * sizeof(*p->n_of));
    if (p->slot_of == NULL || p->cell_of == NULL || p->written == NULL || p->batch_index == NULL ||
        p->blocks == NULL || p->started == NULL || p->tails == NULL || p->n_of == NULL) {
        kvp_placement_free(p);
        return NULL;
    }
    kvp_placement_clear(p);
    return p;
}

void kvp_placement_free(kvp_placement *p)
{
    if (p == NULL)
        return;
    free(p->slot_of);
    free(p->cell_of);
    free(p->written);
    free(p->batch_index);
    free(p->blocks);
    free(p->started);
    free(p->tails);
    free(p->n_of);
    free(p->batch);
    free(p);
}

void kvp_placement_clear(kvp_placement *p)
{
    for (uint32_t cell = 0; cell < p->n_cells; cell++)
        p->slot_of[cell] = NOWHERE;
    p->restored = NOWHERE;
    p->n_batch = 0;
    p->n_moved = 0;
    p->n_tried = 0;
    for (uint32_t slot = 0; slot < p->n_blocks * KVP_BLOCK; slot++)
        p->cell_of[slot] = NOWHERE;
    for (uint32_t block = 0; block < p->n_blocks; block++) {
        p->blocks[block].n_used = 0;
        p->tails[block] = NOWHERE;
        p->n_of[block] = 0;
    }
}

bool kvp_placement_is_empty(const kvp_placement *p)
{
    return p->n_tried == 0;
}

static kvp_block *block_of(const kvp_placement *p, int32_t slot)
{
    return &p->blocks[(uint32_t)slot / KVP_BLOCK];
}

static bool sees(const kvp_mask *mask, size_t token, int64_t cell)
{
    return cell >= 0 && cell < mask->n_cells &&
           (mask->rows == NULL || mask->rows[token * mask->stride + (size_t)cell] != KVP_HIDDEN);
}

/* Whether the token can follow the cell: the cell is placed, the token sees it, and it is not among
 * the remaining cells of the batch. */
static bool can_follow(const kvp_placement *p, const kvp_mask *mask, size_t token, int64_t cell)
{
    return sees(mask, token, cell) && p->slot_of[cell] >= 0 && p->batch_index[cell] <= token;
}

/* The newest cell that the token can follow. It tries the newest token of each sequence first,
 * because a sequence usually goes on there. */
static int64_t newest_seen(const kvp_placement *p, const kvp_mask *mask, size_t token)
{
    int64_t newest = NOWHERE;

    for (uint32_t sequence = 0; sequence < p->n_blocks; sequence++) {
        int64_t tail = p->n_of[sequence] > 0 ? p->tails[sequence] : NOWHERE;
        if (can_follow(p, mask, token, tail) &&
            (newest < 0 || p->written[tail] > p->written[newest]))
            newest = tail;
    }
    for (int64_t cell = 0; newest < 0 && cell < mask->n_cells; cell++)
        if (can_follow(p, mask, token, cell)) {
            newest = cell;
            for (; cell < mask->n_cells; cell++)
                if (can_follow(p, mask, token, cell) && p->written[cell] > p->written[newest])
                    newest = cell;
        }
    return newest;
}

/* The first slot of the index-th block of a sequence, if there is one. */
static int32_t block_start(const kvp_placement *p, uint32_t sequence, uint32_t index)
{
    for (uint32_t block = 0; block < p->n_blocks; block++)
        if (p->blocks[block].n_used > 0 && p->blocks[block].sequence == sequence &&
            p->blocks[block].index == index)
            return (int32_t)(block * KVP_BLOCK);
    return NOWHERE;
}

static bool is_free_for(const kvp_placement *p, int32_t slot, int64_t cell)
{
    return slot >= 0 && (p->cell_of[slot] == NOWHERE || p->cell_of[slot] == cell);
}

static int32_t start_block(kvp_placement *p, uint32_t sequence, uint32_t index)
{
    for (uint32_t block = 0; block < p->n_blocks; block++)
        if (p->blocks[block].n_used == 0) {
            p->blocks[block] = (kvp_block){ sequence, index, p->blocks[block].generation + 1, 0 };
            p->started[block] = ++p->now;
            p->n_tried = block < p->n_tried ? p->n_tried : block + 1;
            return (int32_t)(block * KVP_BLOCK);
        }
    for (uint32_t slot = 0; slot < p->n_blocks * KVP_BLOCK;
         slot++) /* there are more slots than cells */
        if (p->cell_of[slot] == NOWHERE)
            return (int32_t)slot;
    return NOWHERE;
}

static uint32_t new_sequence(const kvp_placement *p)
{
    uint32_t sequence = 0;

    while (sequence + 1 < p->n_blocks && p->n_of[sequence] > 0)
        sequence++;
    return sequence;
}

static void leave(kvp_placement *p, int64_t cell)
{
    int32_t slot = p->slot_of[cell];
    kvp_block *block;

    if (slot < 0)
        return;
    block = block_of(p, slot);
    p->n_moved -= slot != cell;
    p->slot_of[cell] = NOWHERE;
    p->cell_of[slot] = NOWHERE;
    if (--block->n_used == 0)
        p->n_of[block->sequence]--;
    if (p->tails[block->sequence] == cell)
        p->tails[block->sequence] = NOWHERE;
}

uint32_t kvp_placement_sequences(const kvp_placement *p)
{
    uint32_t n = 0;

    for (uint32_t sequence = 0; sequence < p->n_blocks; sequence++)
        n += p->n_of[sequence] > 0;
    return n;
}

void kvp_placement_forget(kvp_placement *p, int64_t first)
{
    for (int64_t cell = first; cell < p->n_cells; cell++)
        leave(p, cell);
    p->n_batch = 0;
    p->restored = NOWHERE;
}

static void enter(kvp_placement *p, int64_t cell, int32_t slot)
{
    kvp_block *block = block_of(p, slot);

    if (p->slot_of[cell] != slot) {
        leave(p, cell);
        if (block->n_used++ == 0)
            p->n_of[block->sequence]++;
        p->n_moved += slot != cell;
        p->slot_of[cell] = slot;
        p->cell_of[slot] = (int32_t)cell;
    }
    p->tails[block->sequence] = (int32_t)cell;
    p->written[cell] = ++p->now;
}

/* The slot behind the slot of the cell `before`, in its block or in the next one. When two
 * sequences continue from one token, they share that token's block, and the second sequence
 * continues in new blocks. */
static int32_t slot_behind(kvp_placement *p, int64_t cell, int64_t before)
{
    kvp_block block = *block_of(p, p->slot_of[before]);
    int32_t slot = p->slot_of[before] + 1, start;

    for (; (uint32_t)slot % KVP_BLOCK != 0; slot++)
        if (is_free_for(p, slot, cell))
            return slot;
    start = block_start(p, block.sequence, block.index + 1);
    if (is_free_for(p, start, cell))
        return start;
    return start_block(p, start < 0 ? block.sequence : new_sequence(p), block.index + 1);
}

/* A slot for the first row of a sequence. It keeps its slot if the rows behind it belong to this
 * batch, too. */
static int32_t first_slot(kvp_placement *p, int64_t cell)
{
    int32_t slot = p->slot_of[cell];

    if (slot >= 0 && (uint32_t)slot % KVP_BLOCK == 0 && block_of(p, slot)->index == 0 &&
        (p->cell_of[slot + 1] == NOWHERE || p->batch_index[p->cell_of[slot + 1]] > 0))
        return slot;
    return start_block(p, new_sequence(p), 0);
}

static void place(kvp_placement *p, const int64_t *cells, size_t i, const kvp_mask *mask)
{
    int64_t cell = cells[i], before = NOWHERE;

    if (mask == NULL && p->slot_of[cell] >= 0) {
        enter(p, cell, p->slot_of[cell]); /* the rows of another tensor are there already */
        return;
    }
    if (mask != NULL)
        before = newest_seen(p, mask, i);
    else if (i > 0)
        before = cells[i - 1];
    else if (cell > 0 && p->restored == cell - 1)
        before = p->restored;
    enter(p, cell, before < 0 ? first_slot(p, cell) : slot_behind(p, cell, before));
}

/* Whether all rows lie as they were saved, in as many blocks. at[i] becomes block i. */
static bool lie_alike(const kvp_placement *p, const kvp_restored *rows, size_t n, uint32_t *at)
{
    for (size_t i = 0; i < n; i++) {
        const int32_t slot = p->slot_of[rows[i].cell];
        const uint32_t block = (uint32_t)slot / KVP_BLOCK;
        if (slot < 0 || (uint32_t)slot % KVP_BLOCK != rows[i].slot)
            return false;
        if (at[rows[i].block] == UINT32_MAX)
            at[rows[i].block] = block;
        if (at[rows[i].block] != block)
            return false;
    }
    return true;
}

/* Whether a cell was placed since the last graph, for the rows of another tensor. */
static bool some_are_placed(const kvp_placement *p, const kvp_restored *rows, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p->slot_of[rows[i].cell] >= 0 && p->written[rows[i].cell] > p->graph)
            return true;
    return false;
}

static uint32_t count_free_blocks(const kvp_placement *p)
{
    uint32_t n = 0;

    for (uint32_t block = 0; block < p->n_blocks; block++)
        n += p->blocks[block].n_used == 0;
    return n;
}

static bool are_distinct(const uint32_t *at, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < i; j++)
            if (at[i] == at[j])
                return false;
    return true;
}

/* Whether n rows share their blocks with other rows, and could have blocks of their own. Other rows
 * are mostly tokens that llama.cpp has removed, such as an answer's. Writing them again would make
 * restored rows older, so that fewer of them stayed exact. */
static bool can_be_alone(const kvp_placement *p, size_t n, const uint32_t *at, uint32_t n_blocks)
{
    size_t used = 0;

    for (uint32_t i = 0; i < n_blocks; i++)
        used += at[i] < p->n_blocks ? p->blocks[at[i]].n_used : 0;
    /* the restored rows give up all blocks but those with others */
    return used > n && count_free_blocks(p) >= (used - n < n_blocks ? used - n : n_blocks);
}

/* Places the rows in new blocks. */
static bool place_restored(kvp_placement *p, const kvp_restored *rows, size_t n,
                           const uint32_t *index, uint32_t n_blocks, uint32_t *at)
{
    uint32_t sequence;

    if (some_are_placed(p, rows, n))
        return false;
    for (size_t i = 0; i < n; i++)
        leave(p, rows[i].cell);
    if (count_free_blocks(p) < n_blocks)
        return false;
    memset(at, 0xff, n_blocks * sizeof(*at));
    sequence = new_sequence(p);
    for (size_t i = 0; i < n; i++) {
        uint32_t *block = &at[rows[i].block];
        if (*block == UINT32_MAX)
            *block = (uint32_t)start_block(p, sequence, index[rows[i].block]) / KVP_BLOCK;
        enter(p, rows[i].cell, (int32_t)(*block * KVP_BLOCK + rows[i].slot));
    }
    return true;
}

/* Rows that lie as they were saved enter their slots once more. The token that comes next follows
 * the row that was entered last. */
bool kvp_placement_restore(kvp_placement *p, const kvp_restored *rows, size_t n,
                           const uint32_t *index, uint32_t n_blocks, uint32_t *at)
{
    for (size_t i = 0; i < n; i++)
        if (rows[i].cell < 0 || rows[i].cell >= p->n_cells || rows[i].block >= n_blocks)
            return false;
    memset(at, 0xff, n_blocks * sizeof(*at));
    if (lie_alike(p, rows, n, at) && are_distinct(at, n_blocks) &&
        (some_are_placed(p, rows, n) || !can_be_alone(p, n, at, n_blocks)))
        for (size_t i = 0; i < n; i++)
            enter(p, rows[i].cell, p->slot_of[rows[i].cell]);
    else if (!place_restored(p, rows, n, index, n_blocks, at))
        return false;
    p->n_batch = 0;
    p->restored = rows[n - 1].cell;
    return true;
}

bool kvp_placement_is_last(const kvp_placement *p, const int64_t *cells, size_t n)
{
    return n == p->n_batch && n > 0 && memcmp(cells, p->batch, n * sizeof(*cells)) == 0;
}

size_t kvp_placement_run(const kvp_placement *p, size_t n, size_t first)
{
    size_t end = first + 1;

    if (n != p->n_batch)
        return n - first;
    while (end < n && block_of(p, p->slot_of[p->batch[end]])->sequence ==
                          block_of(p, p->slot_of[p->batch[first]])->sequence)
        end++;
    return end - first;
}

static bool keep_batch(kvp_placement *p, const int64_t *cells, size_t n)
{
    int64_t *batch = realloc(p->batch, n * sizeof(*batch));

    if (batch == NULL)
        return false;
    memcpy(batch, cells, n * sizeof(*cells));
    p->batch = batch;
    p->n_batch = n;
    return true;
}

static void place_batch(kvp_placement *p, const int64_t *cells, size_t n, const kvp_mask *mask)
{
    for (size_t i = 0; i < n; i++)
        p->batch_index[cells[i]] = (uint32_t)i + 1;
    for (size_t i = 0; i < n; i++)
        place(p, cells, i, mask);
    for (size_t i = 0; i < n; i++)
        p->batch_index[cells[i]] = 0;
    p->restored = mask == NULL ? cells[n - 1] : NOWHERE;
    if (mask != NULL)
        p->graph = p->now;
}

bool kvp_placement_write(kvp_placement *p, const int64_t *cells, size_t n, const kvp_mask *mask,
                         int64_t *slots)
{
    if (n == 0)
        return true;
    for (size_t i = 0; i < n; i++)
        if (cells[i] < 0 || cells[i] >= p->n_cells)
            return false;
    if (!kvp_placement_is_last(p, cells, n)) {
        if (!keep_batch(p, cells, n))
            return false;
        place_batch(p, cells, n, mask);
    }
    for (size_t i = 0; i < n; i++)
        slots[i] = p->slot_of[cells[i]];
    return true;
}

int64_t kvp_placement_slot(const kvp_placement *p, uint32_t cell)
{
    return cell < p->n_cells ? p->slot_of[cell] : NOWHERE;
}

kvp_block kvp_placement_block(const kvp_placement *p, uint32_t block)
{
    return p->blocks[block];
}

static bool block_seen(const kvp_placement *p, const kvp_mask *mask, uint32_t first, uint32_t n,
                       uint32_t block)
{
    for (uint32_t i = 0; p->blocks[block].n_used > 0 && i < KVP_BLOCK; i++)
        for (uint32_t token = first; token < first + n; token++)
            if (sees(mask, token, p->cell_of[block * KVP_BLOCK + i]))
                return true;
    return false;
}

static bool comes_before(const kvp_placement *p, int32_t a, int32_t b)
{
    return p->blocks[a].index != p->blocks[b].index ? p->blocks[a].index < p->blocks[b].index
                                                    : p->started[a] < p->started[b];
}

uint32_t kvp_placement_table(const kvp_placement *p, const kvp_mask *mask, uint32_t first,
                             uint32_t n, int32_t *table)
{
    uint32_t n_blocks = 0;

    for (uint32_t block = 0; block < p->n_tried; block++) {
        uint32_t at = n_blocks;
        if (!block_seen(p, mask, first, n, block))
            continue;
        for (; at > 0 && comes_before(p, (int32_t)block, table[at - 1]); at--)
            table[at] = table[at - 1];
        table[at] = (int32_t)block;
        n_blocks++;
    }
    return n_blocks;
}

void kvp_placement_gather(const kvp_placement *p, const kvp_mask *mask, uint32_t token,
                          const int32_t *table, uint32_t n_blocks, uint16_t *out)
{
    const uint16_t *row = mask->rows != NULL ? mask->rows + token * mask->stride : NULL;

    for (uint32_t i = 0; i < n_blocks * KVP_BLOCK; i++) {
        int32_t cell = p->cell_of[(uint32_t)table[i / KVP_BLOCK] * KVP_BLOCK + i % KVP_BLOCK];
        out[i] = cell < 0 || (uint32_t)cell >= mask->n_cells ? KVP_HIDDEN
                 : row != NULL                               ? row[cell]
                                                             : 0;
    }
}

static bool block_in_order(const kvp_placement *p, uint32_t block, uint32_t index)
{
    for (uint32_t i = 0; i < KVP_BLOCK; i++) {
        int32_t cell = p->cell_of[block * KVP_BLOCK + i];
        if (cell >= 0 && cell != (int32_t)(index * KVP_BLOCK + i))
            return false;
    }
    return true;
}

bool kvp_placement_in_order(const kvp_placement *p, const int32_t *table, uint32_t n_blocks)
{
    for (uint32_t i = 0; i < n_blocks; i++)
        if (p->n_moved == 0 ? table[i] != (int32_t)i : !block_in_order(p, (uint32_t)table[i], i))
            return false;
    return true;
}
