/* shift.h - keys that move to other positions (a context shift) without being encoded again.
 *
 * RoPE rotates a key that moves by s positions to R(s) k, and <q, R(s) k> = <R(-s) q, k>. So a
 * block keeps its codes or fp16 rows, and a slot keeps the id of its shift s. Attention rotates
 * queries back by s, and reading rotates rows forward. A row that is written next to shifted rows
 * is rotated back first.
 *
 * This file owns the shift ids of slots and the table of shifts. Values and tensors on a GPU have
 * none. */
#pragma once

#include "rope.h"

#define KVANT_LARGEST_SHIFT (1 << 30) /* the sum of two such shifts fits an int32_t */

/* The shift ids of a block's slots. In most blocks all slots have the same id. */
typedef struct kvant_block_shift {
    uint64_t others; /* a bit per slot: its id is not `common` */
    uint8_t common;
    uint8_t of[KVANT_PAGE_TOKENS]; /* the ids of the slots in `others` */
} kvant_block_shift;

typedef struct kvant_shifts {
    uint32_t n_dims, interleaved, head_dim;
    bool encodes;                  /* rows are being encoded again, so they get id 0 */
    int32_t by[KVANT_MOST_SHIFTS]; /* positions, by id; id 0 is no shift */
    uint64_t n_encoded; /* rows encoded again, because there were too many different shifts */
    kvant_pair *pairs;  /* head_dim / 2 */
    float *phases;      /* by id: cosines of all pairs, then sines */
    kvant_block_shift *blocks; /* per block of the tensor */
} kvant_shifts;

static inline uint32_t kvant_slot_shift(const kvant_tensor *tensor, uint32_t block, uint32_t slot)
{
    const kvant_block_shift *b = tensor->shifts ? &tensor->shifts->blocks[block] : NULL;
    return !b ? 0 : b->others >> slot & 1 ? b->of[slot] : b->common;
}

/* Whether slots of the block have different ids. */
static inline bool kvant_block_is_mixed(const kvant_tensor *tensor, uint32_t block)
{
    return tensor->shifts && tensor->shifts->blocks[block].others != 0;
}

/* Returns the slots in `among` that have the same id as its lowest slot, and sets *number
 * to this id. `among` is not empty. */
uint64_t kvant_slots_alike(const kvant_tensor *tensor, uint32_t block, uint64_t among,
                           uint32_t *id);

/* Rotates x, a row of one kv head or a query, by the shift with this id, or back. */
void kvant_shift_rotate(const kvant_shifts *shifts, uint32_t id, bool back, float *x);

/* Bytes that the shifts take in addition to the tensor. */
size_t kvant_shifts_bytes(const kvant_tensor *tensor);
void kvant_shifts_free(kvant_tensor *tensor);
void kvant_shifts_clear_block(kvant_tensor *tensor, uint32_t block);

/* The rows of a write as their slots store them. A member is NULL when nothing differs from the
 * caller's rows. */
typedef struct kvant_unshifted {
    float *rows;
    int32_t *positions;
    uint8_t *ids; /* the shift ids of the rows */
} kvant_unshifted;

/* Rotates rows, and moves the positions that the caller gave, back by the shifts that the slots
 * will have. KVANT_ERR_MEMORY. Call kvant_unshift_end afterwards, also after an error. */
kvant_status kvant_unshift(kvant_tensor *tensor, const int64_t *slots, size_t n, const float *rows,
                           size_t stride, kvant_unshifted *out);
void kvant_unshift_end(kvant_unshifted *unshifted);

/* Sets the shift id of a written slot. */
void kvant_slot_set_shift(kvant_tensor *tensor, uint32_t block, uint32_t slot, uint32_t id);

/* map[id] = the id in `to` for each shift id that n blocks of `from` use; map has KVANT_MOST_SHIFTS
 * entries. A new id in `to` counts as used only when blocks use it. KVANT_ERR_FULL: no id is free,
 * or keys of `to` were shifted by another RoPE. KVANT_ERR_MEMORY. */
kvant_status kvant_shifts_map(const kvant_tensor *from, uint32_t first, uint32_t n,
                              kvant_tensor *to, uint8_t *map);
void kvant_shifts_copy_block(const kvant_tensor *from, uint32_t block, kvant_tensor *to,
                             uint32_t target, const uint8_t *map);

/* Creates the table of shifts for a tensor that has none. KVANT_ERR_UNSUPPORTED,
 * KVANT_ERR_MEMORY. */
kvant_status kvant_shifts_create(kvant_tensor *tensor, const kvant_rope *rope);
bool kvant_shifts_same_rope(const kvant_shifts *shifts, const kvant_rope *rope);

/* *number = the id of a shift by `by` positions. If no id in `used` has this shift, takes a new id
 * and adds it to `used`. KVANT_ERR_FULL. */
kvant_status kvant_shifts_id(kvant_tensor *tensor, int32_t by, uint32_t *used, uint8_t *id);

/* The ids that slots have, a bit each. Id 0 is always among them. */
uint32_t kvant_shifts_used(const kvant_tensor *tensor);

/* The shift id for rows that begin a block. */
uint32_t kvant_shift_of_new_block(const kvant_tensor *tensor, uint32_t block);

/* The RoPE of the shifts. frequencies: gets head_dim / 2 numbers. */
kvant_rope kvant_shifts_rope(const kvant_shifts *shifts, float *frequencies);

/* The part of a record's block that holds its shifts. The first function says whether one of
 * `slots` has a shift, the second how many bytes the part has. The next two write it,
 * for a block or for the shifts of its slots, and the last two read it.
 * Reading returns the ids that the slots get, and changes no block. *used: 0, or the ids that other
 * blocks and earlier calls need; new ids are added. KVANT_ERR_FORMAT, KVANT_ERR_UNSUPPORTED (the
 * tensor can have no shifts), and errors as kvant_shifts_map. */
bool kvant_shifts_any(const kvant_tensor *tensor, uint32_t block, uint64_t slots);
size_t kvant_shifts_export_bytes(const kvant_tensor *tensor);
void kvant_shifts_export(const kvant_tensor *tensor, uint32_t block, uint64_t slots, uint8_t *to);
void kvant_shifts_write(const kvant_tensor *tensor, const kvant_rope *rope,
                        const int32_t by[KVANT_PAGE_TOKENS], uint8_t *to);
void kvant_shifts_distances(const kvant_tensor *tensor, const uint8_t *data,
                            int32_t by[KVANT_PAGE_TOKENS]);
kvant_status kvant_shifts_read(kvant_tensor *tensor, uint64_t written, const uint8_t *data,
                               uint32_t *used, uint8_t ids[KVANT_PAGE_TOKENS]);

/* Sets the ids of a block's written slots. Slots that are not written get the id that most written
 * slots have. */
void kvant_shifts_set_block(kvant_tensor *tensor, uint32_t block,
                            const uint8_t ids[KVANT_PAGE_TOKENS]);
