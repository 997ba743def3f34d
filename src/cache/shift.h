/* shift.h - keys that move to other positions (a context shift) and are not encoded again.
 *
 * RoPE turns a key that moves by s positions into R(s) k, and <q, R(s) k> = <R(-s) q, k>. So the
 * block keeps its codes or fp16 rows, a slot keeps the number of its shift s, attention rotates
 * queries back by s, and reading rotates rows forward. A row that is written next to shifted
 * rows is rotated back first. This file owns the numbers of slots and the table of shifts;
 * values and tensors on a GPU have none. */
#pragma once

#include "turn.h"

#define KVANT_LARGEST_SHIFT (1 << 30) /* the sum of two is an integer, too */

/* A number for each slot of a block. Most blocks have one for all slots. */
typedef struct kvant_block_shift {
    uint64_t others; /* slots whose number is not `common` */
    uint8_t common;
    uint8_t of[KVANT_PAGE_TOKENS]; /* the number of each of the others */
} kvant_block_shift;

typedef struct kvant_shifts {
    uint32_t n_dims, interleaved, head_dim;
    bool encodes;                  /* rows are being encoded again: they get number 0 */
    int32_t by[KVANT_MOST_SHIFTS]; /* positions, by number; number 0 is no shift */
    uint64_t n_encoded; /* rows encoded again, because there were too many different shifts */
    kvant_pair *pairs;  /* head_dim / 2 */
    float *phases;      /* by number: cosines of all pairs, then sines */
    kvant_block_shift *blocks; /* of the tensor */
} kvant_shifts;

static inline uint32_t kvant_slot_shift(const kvant_tensor *tensor, uint32_t block, uint32_t slot)
{
    const kvant_block_shift *b = tensor->shifts ? &tensor->shifts->blocks[block] : NULL;
    return !b ? 0 : b->others >> slot & 1 ? b->of[slot] : b->common;
}

/* Whether some slots of the block have another number than the rest. */
static inline bool kvant_block_is_mixed(const kvant_tensor *tensor, uint32_t block)
{
    return tensor->shifts && tensor->shifts->blocks[block].others != 0;
}

/* Of the slots `among`, which are some, those with the number of the lowest one, which *number
 * becomes. */
uint64_t kvant_slots_alike(const kvant_tensor *tensor, uint32_t block, uint64_t among,
                           uint32_t *number);

/* x, a row of one kv head or a query, moves by the shift of a number, or back. */
void kvant_shift_turn(const kvant_shifts *shifts, uint32_t number, bool back, float *x);

/* All that the shifts take beside the tensor. */
size_t kvant_shifts_bytes(const kvant_tensor *tensor);
void kvant_shifts_free(kvant_tensor *tensor);
void kvant_shifts_clear_block(kvant_tensor *tensor, uint32_t block);

/* Rows of a write as their slots store them. NULL where nothing differs. */
typedef struct kvant_unshifted {
    float *rows;
    int32_t *positions;
    uint8_t *numbers; /* of the rows; freed with the rest */
} kvant_unshifted;

/* Rotates rows back by the shifts that their slots will have, and the positions that the caller
 * gave. KVANT_ERR_MEMORY. kvant_unshift_end frees what is there, on an error, too. */
kvant_status kvant_unshift(kvant_tensor *tensor, const int64_t *slots, size_t n, const float *rows,
                           size_t stride, kvant_unshifted *out);
void kvant_unshift_end(kvant_unshifted *unshifted);

/* A written slot has this number from now on. */
void kvant_slot_set_shift(kvant_tensor *tensor, uint32_t block, uint32_t slot, uint32_t number);

/* The target's numbers for those of n blocks of `from`, in map: KVANT_MOST_SHIFTS. The target
 * has none before its blocks use them. KVANT_ERR_FULL: no room, or keys of the target were
 * shifted by another RoPE. KVANT_ERR_MEMORY. */
kvant_status kvant_shifts_map(const kvant_tensor *from, uint32_t first, uint32_t n,
                              kvant_tensor *to, uint8_t *map);
void kvant_shifts_copy_block(const kvant_tensor *from, uint32_t block, kvant_tensor *to,
                             uint32_t target, const uint8_t *map);

/* Shifts of a RoPE, for a tensor that has none. KVANT_ERR_UNSUPPORTED, KVANT_ERR_MEMORY. */
kvant_status kvant_shifts_create(kvant_tensor *tensor, const kvant_rope *rope);
bool kvant_shifts_turn_alike(const kvant_shifts *shifts, const kvant_rope *rope);

/* The number of a shift of so many positions, a new one where none of `used` is; it joins these.
 * KVANT_ERR_FULL. */
kvant_status kvant_shifts_number(kvant_tensor *tensor, int32_t by, uint32_t *used, uint8_t *number);

/* Numbers that slots have, a bit each, and number 0. */
uint32_t kvant_shifts_used(const kvant_tensor *tensor);

/* The number of rows that begin a block. */
uint32_t kvant_shift_of_new_block(const kvant_tensor *tensor, uint32_t block);
void kvant_shifts_rope(const kvant_shifts *shifts, kvant_rope *rope, float *frequencies);

/* An exported block's shifts: whether one of `slots` has any, the bytes of their part, writing it, and
 * reading it: the numbers that its slots get. Reading changes no block. KVANT_ERR_FORMAT,
 * KVANT_ERR_UNSUPPORTED (a tensor that can have no shifts), and as kvant_shifts_map. */
bool kvant_shifts_any(const kvant_tensor *tensor, uint32_t block, uint64_t slots);
size_t kvant_shifts_export_bytes(const kvant_tensor *tensor);
void kvant_shifts_export(const kvant_tensor *tensor, uint32_t block, uint64_t slots, uint8_t *to);
kvant_status kvant_shifts_read(kvant_tensor *tensor, uint64_t written, const uint8_t *data,
                               uint8_t numbers[KVANT_PAGE_TOKENS]);

/* Sets the numbers of a block's written slots; others get the one that most of these have. */
void kvant_shifts_set_block(kvant_tensor *tensor, uint32_t block,
                            const uint8_t numbers[KVANT_PAGE_TOKENS]);
