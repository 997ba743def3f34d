/* shift_rows.c - see shift.h: rows that are written next to shifted rows, and shifts of blocks that
 * are copied, exported and imported. */
#include "shift.h"

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/error.h"
#include "center.h"
#include "learning.h"
#include "transform_bytes.h"

/* Writing */

/* Writes take new shift ids below this limit only; the rest is for kvant_tensor_shift. */
#define NUMBERS_FOR_ROWS (KVANT_MOST_SHIFTS / 2)

/* Finds the shift id for a row in a block that has its own centre (center.h): the row is best
 * stored at its slot's position, near the centre. In a cache that is a ring, the tokens of a round
 * then share an id. Returns false when a new id would be one too many. */
static bool find_centered(kvant_tensor *tensor, uint32_t block, uint32_t offset, int32_t position,
                          uint32_t *used, uint8_t *id)
{
    const int64_t by = (int64_t)position - tensor->blocks[block].position - offset;
    uint32_t n_used = 0;
    *used = *used ? *used : kvant_shifts_used(tensor);
    for (uint32_t i = 0; i < KVANT_MOST_SHIFTS; i++) {
        n_used += *used >> i & 1;
        *id = (uint8_t)i;
        if (*used >> i & 1 && tensor->shifts->by[i] == by)
            return true;
    }
    return n_used < NUMBERS_FOR_ROWS && by <= KVANT_LARGEST_SHIFT && by >= -KVANT_LARGEST_SHIFT &&
           kvant_shifts_id(tensor, (int32_t)by, used, id) == KVANT_OK;
}

/* Finds the shift id for a row. In a block without its own centre the row gets the id of the slot
 * before it. Its token mostly follows that slot's token, so both will move alike. position: the
 * row's, or below 0. used: ids in use, or 0. */
static uint8_t shift_for(kvant_tensor *tensor, int64_t slot, int32_t position, uint32_t *used)
{
    const uint32_t block = (uint32_t)(slot / KVANT_PAGE_TOKENS),
                   offset = (uint32_t)(slot % KVANT_PAGE_TOKENS);
    uint8_t id;
    if (tensor->shifts->encodes)
        return 0;
    if (position >= 0 && tensor->blocks[block].written && kvant_block_centers(tensor, block) &&
        find_centered(tensor, block, offset, position, used, &id))
        return id;
    if (offset && tensor->blocks[block].written >> (offset - 1) & 1)
        return (uint8_t)kvant_slot_shift(tensor, block, offset - 1);
    return (uint8_t)kvant_shift_of_new_block(tensor, block);
}

static const int32_t *given_positions(const kvant_tensor *tensor, size_t n)
{
    const kvant_learning *l = tensor->learning;
    return l && l->n_positions == n ? l->positions : NULL;
}

static bool follows(const int64_t *slots, const int32_t *positions, size_t i)
{
    return i && slots[i] == slots[i - 1] + 1 && slots[i] % KVANT_PAGE_TOKENS &&
           (!positions || positions[i] == positions[i - 1] + 1);
}

static void unshift_row(const kvant_tensor *tensor, uint32_t id, const float *row, float *to)
{
    memcpy(to, row, kvant_tensor_width(tensor) * sizeof *to);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        kvant_shift_rotate(tensor->shifts, id, true, to + (size_t)head * tensor->head_dim);
}

/* The position at which the row is stored. Below 0: not known. */
static int32_t unshift_position(const kvant_tensor *tensor, uint32_t id, int32_t position)
{
    const int64_t at = (int64_t)position - tensor->shifts->by[id];
    return position < 0 || at < 0 || at > INT32_MAX - KVANT_PAGE_TOKENS ? -1 : (int32_t)at;
}

/* Rotates rows back, if some of them have a shift. */
static kvant_status unshift_all(const kvant_tensor *tensor, size_t n, const float *rows,
                                size_t stride, kvant_unshifted *out)
{
    const size_t width = kvant_tensor_width(tensor);
    const int32_t *positions = given_positions(tensor, n);
    out->rows = kvant_alloc(n * width, sizeof *out->rows);
    out->positions = positions ? kvant_alloc(n, sizeof *out->positions) : NULL;
    KVANT_RETURN_IF(!out->rows || (positions && !out->positions), KVANT_ERR_MEMORY);
    for (size_t i = 0; i < n; i++) {
        unshift_row(tensor, out->ids[i], rows + i * stride, out->rows + i * width);
        if (positions)
            out->positions[i] = unshift_position(tensor, out->ids[i], positions[i]);
    }
    return KVANT_OK;
}

kvant_status kvant_unshift(kvant_tensor *tensor, const int64_t *slots, size_t n, const float *rows,
                           size_t stride, kvant_unshifted *out)
{
    const int32_t *positions = given_positions(tensor, n);
    uint32_t used = 0;
    bool any = false;
    if (!tensor->shifts || !n)
        return KVANT_OK;
    out->ids = kvant_alloc(n, 1);
    KVANT_RETURN_IF(!out->ids, KVANT_ERR_MEMORY);
    for (size_t i = 0; i < n; i++) {
        out->ids[i] = follows(slots, positions, i)
                          ? out->ids[i - 1]
                          : shift_for(tensor, slots[i], positions ? positions[i] : -1, &used);
        any |= out->ids[i] != 0;
    }
    if (any)
        KVANT_FORWARD(unshift_all(tensor, n, rows, stride, out));
    if (out->positions)
        tensor->learning->positions = out->positions;
    return KVANT_OK;
}

void kvant_unshift_end(kvant_unshifted *unshifted)
{
    kvant_free(unshifted->rows);
    kvant_free(unshifted->positions);
    kvant_free(unshifted->ids);
    *unshifted = (kvant_unshifted){ 0 };
}

/* Copies, export and import */

void kvant_shifts_set_block(kvant_tensor *tensor, uint32_t block,
                            const uint8_t ids[KVANT_PAGE_TOKENS])
{
    uint32_t counts[KVANT_MOST_SHIFTS] = { 0 }, most = 0;
    const uint64_t written = tensor->blocks[block].written;
    kvant_block_shift *b = &tensor->shifts->blocks[block];
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
        if (written >> slot & 1 && ++counts[ids[slot]] > counts[most])
            most = ids[slot];
    *b = (kvant_block_shift){ .common = (uint8_t)most };
    memcpy(b->of, ids, sizeof b->of);
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
        b->others |= (uint64_t)(written >> slot & 1 && ids[slot] != most) << slot;
}

bool kvant_shifts_any(const kvant_tensor *tensor, uint32_t block, uint64_t slots)
{
    const kvant_block_shift *b = tensor->shifts ? &tensor->shifts->blocks[block] : NULL;
    const uint64_t written = tensor->blocks[block].written & slots;
    bool any = b && (written & ~b->others) && b->common;
    for (uint32_t slot = 0; b && !any && slot < KVANT_PAGE_TOKENS; slot++)
        any = (written & b->others) >> slot & 1 && b->of[slot];
    return any;
}

static kvant_status other_rope(void)
{
    return kvant_fail(
        NULL, KVANT_ERR_FULL,
        "the keys of the tensor were shifted with another RoPE than the keys of the block");
}

static kvant_status too_many(void)
{
    return kvant_fail(NULL, KVANT_ERR_FULL,
                      "the tensor already has 31 different shifts, the most that it can have");
}

/* Makes the tensor's table for a RoPE, or checks that the existing one is for the same RoPE. */
static kvant_status use_rope(kvant_tensor *tensor, const kvant_rope *rope)
{
    if (!tensor->shifts)
        return kvant_shifts_create(tensor, rope);
    if (kvant_shifts_same_rope(tensor->shifts, rope))
        return KVANT_OK;
    KVANT_RETURN_IF(kvant_shifts_used(tensor) != 1, other_rope());
    kvant_shifts_free(tensor);
    return kvant_shifts_create(tensor, rope);
}

kvant_status kvant_shifts_map(const kvant_tensor *from, uint32_t first, uint32_t n,
                              kvant_tensor *to, uint8_t *map)
{
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    uint32_t used, needed = 1;
    for (uint32_t i = 0; i < KVANT_MOST_SHIFTS; i++)
        map[i] = from == to ? (uint8_t)i : 0;
    for (uint32_t block = first; block < first + n && from != to; block++)
        for (uint32_t slot = 0;
             kvant_shifts_any(from, block, UINT64_MAX) && slot < KVANT_PAGE_TOKENS; slot++)
            needed |= 1u << kvant_slot_shift(from, block, slot);
    if (needed == 1)
        return KVANT_OK;
    const kvant_rope rope = kvant_shifts_rope(from->shifts, frequencies);
    KVANT_FORWARD(use_rope(to, &rope));
    used = kvant_shifts_used(to);
    for (uint32_t i = 1; i < KVANT_MOST_SHIFTS; i++)
        if (needed >> i & 1 && kvant_shifts_id(to, from->shifts->by[i], &used, &map[i]) != KVANT_OK)
            return too_many();
    return KVANT_OK;
}

void kvant_shifts_copy_block(const kvant_tensor *from, uint32_t block, kvant_tensor *to,
                             uint32_t target, const uint8_t *map)
{
    uint8_t ids[KVANT_PAGE_TOKENS];
    if (!to->shifts)
        return;
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
        ids[slot] = map[kvant_slot_shift(from, block, slot)];
    kvant_shifts_set_block(to, target, ids);
}

/* The shifts of a record's block (format.md): the RoPE, then the shifts of all slots. */
size_t kvant_shifts_export_bytes(const kvant_tensor *tensor)
{
    return (kvant_rope_bytes(tensor) + KVANT_PAGE_TOKENS * sizeof(int32_t) + 7) / 8 * 8;
}

void kvant_shifts_write(const kvant_tensor *tensor, const kvant_rope *rope,
                        const int32_t by[KVANT_PAGE_TOKENS], uint8_t *to)
{
    memset(to, 0, kvant_shifts_export_bytes(tensor));
    kvant_rope_export(rope, to);
    memcpy(to + kvant_rope_bytes(tensor), by, KVANT_PAGE_TOKENS * sizeof *by);
}

void kvant_shifts_export(const kvant_tensor *tensor, uint32_t block, uint64_t slots, uint8_t *to)
{
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    int32_t by[KVANT_PAGE_TOKENS] = { 0 };
    const kvant_rope rope = kvant_shifts_rope(tensor->shifts, frequencies);
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
        if ((tensor->blocks[block].written & slots) >> slot & 1)
            by[slot] = tensor->shifts->by[kvant_slot_shift(tensor, block, slot)];
    kvant_shifts_write(tensor, &rope, by, to);
}

void kvant_shifts_distances(const kvant_tensor *tensor, const uint8_t *data,
                            int32_t by[KVANT_PAGE_TOKENS])
{
    memcpy(by, data + kvant_rope_bytes(tensor), KVANT_PAGE_TOKENS * sizeof *by);
}

kvant_status kvant_shifts_read(kvant_tensor *tensor, uint64_t written, const uint8_t *data,
                               uint32_t *used, uint8_t ids[KVANT_PAGE_TOKENS])
{
    kvant_rope rope;
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    int32_t by[KVANT_PAGE_TOKENS];
    KVANT_FORWARD(kvant_rope_import(tensor, data, &rope, frequencies));
    kvant_shifts_distances(tensor, data, by);
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
        if (by[slot] > KVANT_LARGEST_SHIFT || by[slot] < -KVANT_LARGEST_SHIFT ||
            (by[slot] && !(written >> slot & 1)))
            return kvant_damaged("the shift of a slot is out of range");
    if (*used && !kvant_shifts_same_rope(tensor->shifts, &rope))
        return kvant_damaged("its blocks were shifted with different RoPEs");
    const kvant_status status = use_rope(tensor, &rope);
    if (status != KVANT_OK)
        return status == KVANT_ERR_UNSUPPORTED
                   ? kvant_damaged("its RoPE rotates a channel without a pair")
                   : status;
    *used = *used ? *used : kvant_shifts_used(tensor);
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
        if (kvant_shifts_id(tensor, by[slot], used, &ids[slot]) != KVANT_OK)
            return too_many();
    return KVANT_OK;
}
