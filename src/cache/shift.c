/* shift.c - see shift.h: the table of shifts, the shift ids of slots, and kvant_tensor_shift.
 *
 * A block that begins after a shift could store its rows with id 0. But then each shift would need
 * one more id, and attention prepares queries for each id. So once a sequence has
 * SHIFTS_OF_A_SEQUENCE ids, its new blocks begin with the id of the nearest shift. In a
 * conversation that drops its oldest tokens again and again, blocks with old ids disappear with
 * these tokens. So the positions at which rows are stored stay below about twice the context. */
#include "shift.h"

#include <stdlib.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/error.h"

/* With more, queries of a sequence are prepared for more ids, and the KVANT_MOST_SHIFTS ids suffice
 * for fewer sequences. */
#define SHIFTS_OF_A_SEQUENCE 3u

_Static_assert(KVANT_MOST_SHIFTS <= 32, "numbers are bits of 32");

/* The table */

static uint32_t n_pairs(const kvant_shifts *shifts)
{
    return shifts->head_dim / 2;
}

static float *phase_of(const kvant_shifts *shifts, uint32_t id)
{
    return shifts->phases + (size_t)id * shifts->head_dim;
}

static void set_phase(kvant_shifts *shifts, uint32_t id)
{
    float *phase = phase_of(shifts, id);
    for (uint32_t i = 0; i < n_pairs(shifts); i++) {
        double sine, cosine;
        kvant_rope_sin_cos((double)shifts->by[id] * shifts->pairs[i].frequency, &sine, &cosine);
        phase[i] = (float)cosine;
        phase[n_pairs(shifts) + i] = (float)sine;
    }
}

size_t kvant_shifts_bytes(const kvant_tensor *tensor)
{
    if (!tensor->shifts)
        return 0;
    return sizeof(kvant_shifts) + tensor->head_dim / 2 * sizeof(kvant_pair) +
           KVANT_MOST_SHIFTS * (size_t)tensor->head_dim * sizeof(float) +
           tensor->n_blocks * sizeof(kvant_block_shift);
}

static void free_shifts(kvant_shifts *shifts)
{
    if (shifts) {
        kvant_free(shifts->pairs);
        kvant_free(shifts->phases);
        kvant_free(shifts->blocks);
    }
    kvant_free(shifts);
}

void kvant_shifts_free(kvant_tensor *tensor)
{
    free_shifts(tensor->shifts);
    tensor->shifts = NULL;
}

kvant_status kvant_shifts_create(kvant_tensor *tensor, const kvant_rope *rope)
{
    kvant_shifts *shifts = kvant_alloc(1, sizeof *shifts);
    KVANT_RETURN_IF(!shifts, KVANT_ERR_MEMORY);
    shifts->n_dims = rope->n_dims;
    shifts->interleaved = rope->interleaved != 0;
    shifts->head_dim = tensor->head_dim;
    shifts->pairs = kvant_alloc(tensor->head_dim / 2, sizeof *shifts->pairs);
    shifts->phases =
        kvant_alloc(KVANT_MOST_SHIFTS * (size_t)tensor->head_dim, sizeof *shifts->phases);
    shifts->blocks = kvant_alloc(tensor->n_blocks, sizeof *shifts->blocks);
    const bool enough = shifts->pairs && shifts->phases && shifts->blocks;
    if (!enough || tensor->head_dim % 2 ||
        !kvant_rope_pairs(rope, tensor->head_dim, shifts->pairs)) {
        free_shifts(shifts);
        return enough ? kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                                   "shift: the RoPE rotates a channel that is not part of a pair")
                      : KVANT_ERR_MEMORY;
    }
    set_phase(shifts, 0);
    tensor->shifts = shifts;
    return KVANT_OK;
}

bool kvant_shifts_same_rope(const kvant_shifts *shifts, const kvant_rope *rope)
{
    kvant_pair pairs[KVANT_MAX_HEAD_DIM / 2];
    return kvant_rope_pairs(rope, shifts->head_dim, pairs) &&
           memcmp(pairs, shifts->pairs, n_pairs(shifts) * sizeof *pairs) == 0;
}

kvant_rope kvant_shifts_rope(const kvant_shifts *shifts, float *frequencies)
{
    return kvant_rope_of_pairs(shifts->n_dims, shifts->interleaved, shifts->pairs, n_pairs(shifts),
                               frequencies);
}

uint32_t kvant_shifts_used(const kvant_tensor *tensor)
{
    uint32_t used = 1;
    for (uint32_t block = 0; block < tensor->n_blocks; block++) {
        const kvant_block_shift *b = &tensor->shifts->blocks[block];
        used |= 1u << b->common;
        for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS && b->others >> slot; slot++)
            used |= b->others >> slot & 1 ? 1u << b->of[slot] : 0;
    }
    return used;
}

kvant_status kvant_shifts_id(kvant_tensor *tensor, int32_t by, uint32_t *used, uint8_t *id)
{
    kvant_shifts *shifts = tensor->shifts;
    uint32_t found = 0;
    while (found < KVANT_MOST_SHIFTS && !(*used >> found & 1 && shifts->by[found] == by))
        found++;
    for (uint32_t i = 0; found == KVANT_MOST_SHIFTS && i < KVANT_MOST_SHIFTS; i++)
        if (!(*used >> i & 1)) {
            found = i;
            shifts->by[i] = by;
            set_phase(shifts, i);
        }
    KVANT_RETURN_IF(found == KVANT_MOST_SHIFTS, KVANT_ERR_FULL);
    *used |= 1u << found;
    *id = (uint8_t)found;
    return KVANT_OK;
}

/* Slots */

void kvant_shifts_clear_block(kvant_tensor *tensor, uint32_t block)
{
    if (tensor->shifts)
        tensor->shifts->blocks[block] = (kvant_block_shift){ 0 };
}

void kvant_slot_set_shift(kvant_tensor *tensor, uint32_t block, uint32_t slot, uint32_t id)
{
    kvant_block_shift *b = &tensor->shifts->blocks[block];
    const uint64_t bit = (uint64_t)1 << slot;
    if (!(tensor->blocks[block].written & ~bit))
        *b = (kvant_block_shift){ .common = (uint8_t)id }; /* the block's only row */
    b->of[slot] = (uint8_t)id;
    b->others = b->common == id ? b->others & ~bit : b->others | bit;
}

uint64_t kvant_slots_alike(const kvant_tensor *tensor, uint32_t block, uint64_t among, uint32_t *id)
{
    uint64_t alike = 0;
    uint32_t first = 0;
    while (!(among >> first & 1))
        first++;
    *id = kvant_slot_shift(tensor, block, first);
    for (uint32_t slot = first; slot < KVANT_PAGE_TOKENS; slot++)
        if (among >> slot & 1 && kvant_slot_shift(tensor, block, slot) == *id)
            alike |= (uint64_t)1 << slot;
    return alike;
}

void kvant_shift_rotate(const kvant_shifts *shifts, uint32_t id, bool back, float *x)
{
    const float *cosine = phase_of(shifts, id), *sine = cosine + n_pairs(shifts);
    const float sign = back ? -1 : 1;
    for (uint32_t i = 0; id && i < n_pairs(shifts); i++) {
        const kvant_pair *pair = &shifts->pairs[i];
        const float a = x[pair->first], b = x[pair->second], s = sign * sine[i];
        x[pair->first] = a * cosine[i] - b * s;
        x[pair->second] = b * cosine[i] + a * s;
    }
}

uint32_t kvant_shift_of_new_block(const kvant_tensor *tensor, uint32_t block)
{
    const kvant_shifts *shifts = tensor->shifts;
    uint32_t seen = 1, n = 0, nearest = 0;
    for (uint32_t other = 0; other < tensor->n_blocks; other++) {
        const uint32_t id = shifts->blocks[other].common;
        if (other == block || !tensor->blocks[other].written || seen >> id & 1 ||
            tensor->blocks[other].sequence != tensor->blocks[block].sequence)
            continue;
        seen |= 1u << id;
        n++;
        if (!nearest || llabs((int64_t)shifts->by[id]) < llabs((int64_t)shifts->by[nearest]))
            nearest = id;
    }
    return n < SHIFTS_OF_A_SEQUENCE ? 0 : nearest;
}

/* Moving */

/* The work of a call: the sums of old and new shifts, by their new ids. */
typedef struct moving {
    kvant_tensor *tensor;
    const int32_t *by;
    size_t n;
    int32_t sums[KVANT_MOST_SHIFTS];
    uint32_t n_sums, last; /* last: the id that find() found last */
} moving;

/* The shift of a slot after the call. KVANT_ANY_SHIFT: the slot may have any shift. */
static int32_t sum_of(const moving *m, uint32_t block, uint32_t slot)
{
    const size_t at = (size_t)block * KVANT_PAGE_TOKENS + slot;
    const int32_t by = at < m->n ? m->by[at] : 0;
    if (!(m->tensor->blocks[block].written >> slot & 1) || by == KVANT_ANY_SHIFT)
        return KVANT_ANY_SHIFT;
    return m->tensor->shifts->by[kvant_slot_shift(m->tensor, block, slot)] + by;
}

/* Sets m->last to the id of a sum. Returns false when the sum is new and no id is left. */
static bool find(moving *m, int32_t sum)
{
    if (m->sums[m->last] == sum)
        return true;
    for (m->last = 0; m->last < m->n_sums && m->sums[m->last] != sum; m->last++)
        ;
    if (m->last == KVANT_MOST_SHIFTS) {
        m->last = 0;
        return false;
    }
    m->n_sums += m->last == m->n_sums;
    m->sums[m->last] = sum;
    return true;
}

/* Collects the sums of all slots. KVANT_ERR_FULL: there are too many different sums. */
static kvant_status collect(moving *m)
{
    m->n_sums = 1; /* id 0 is no shift */
    m->sums[0] = 0;
    m->last = 0;
    for (uint32_t block = 0; block < m->tensor->n_blocks; block++)
        for (uint32_t slot = 0; m->tensor->blocks[block].written && slot < KVANT_PAGE_TOKENS;
             slot++) {
            const int32_t sum = sum_of(m, block, slot);
            if (sum == KVANT_ANY_SHIFT)
                continue;
            KVANT_RETURN_IF(sum > KVANT_LARGEST_SHIFT || sum < -KVANT_LARGEST_SHIFT,
                            KVANT_ERR_ARGUMENT);
            KVANT_RETURN_IF(!find(m, sum), KVANT_ERR_FULL);
        }
    return KVANT_OK;
}

/* Sets the new ids of a block's slots. A slot that may have any shift gets the id of most other
 * slots. */
static void change_ids(moving *m, uint32_t block)
{
    uint8_t ids[KVANT_PAGE_TOKENS];
    uint32_t counts[KVANT_MOST_SHIFTS] = { 0 }, most = 0;
    uint64_t counted = 0;
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++) {
        const int32_t sum = sum_of(m, block, slot);
        if (sum == KVANT_ANY_SHIFT)
            continue;
        find(m, sum);
        ids[slot] = (uint8_t)m->last;
        counted |= (uint64_t)1 << slot;
        most = ++counts[m->last] > counts[most] ? m->last : most;
    }
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
        ids[slot] = counted >> slot & 1 ? ids[slot] : (uint8_t)most;
    kvant_shifts_set_block(m->tensor, block, ids);
}

static void apply(moving *m)
{
    kvant_shifts *shifts = m->tensor->shifts;
    for (uint32_t block = 0; block < m->tensor->n_blocks; block++)
        change_ids(m, block);
    for (uint32_t i = 0; i < m->n_sums; i++) {
        shifts->by[i] = m->sums[i];
        set_phase(shifts, i);
    }
}

/* Encodes the shifted rows of a block again, as rows without a shift. The cache does not learn from
 * them, and their age does not change. */
static kvant_status encode_block(kvant_tensor *tensor, uint32_t block, float *rows,
                                 uint32_t n_threads)
{
    const size_t width = kvant_tensor_width(tensor);
    int64_t slots[KVANT_PAGE_TOKENS];
    int32_t positions[KVANT_PAGE_TOKENS];
    size_t n = 0;
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++) {
        if (!(tensor->blocks[block].written >> slot & 1) || !kvant_slot_shift(tensor, block, slot))
            continue;
        slots[n] = (int64_t)block * KVANT_PAGE_TOKENS + slot;
        positions[n] = -1;
        KVANT_FORWARD(kvant_tensor_read(tensor, (size_t)slots[n], 1, rows + n * width, width));
        n++;
    }
    KVANT_RETURN_IF(!n, KVANT_OK);
    KVANT_FORWARD(kvant_tensor_next_positions(tensor, positions, n));
    tensor->shifts->n_encoded += n;
    return kvant_tensor_write(tensor, slots, n, rows, width, n_threads);
}

static kvant_status encode_all(kvant_tensor *tensor, uint32_t n_threads)
{
    float *rows = kvant_alloc(KVANT_PAGE_TOKENS * kvant_tensor_width(tensor), sizeof *rows);
    kvant_status status = rows ? KVANT_OK : KVANT_ERR_MEMORY;
    tensor->shifts->encodes = true;
    for (uint32_t block = 0; block < tensor->n_blocks && status == KVANT_OK; block++)
        status = encode_block(tensor, block, rows, n_threads);
    tensor->shifts->encodes = false;
    kvant_free(rows);
    return status;
}

/* Makes the table for this RoPE, if there is none. */
static kvant_status prepare(kvant_tensor *tensor, const kvant_rope *rope, uint32_t n_threads)
{
    if (tensor->shifts && kvant_shifts_same_rope(tensor->shifts, rope))
        return KVANT_OK;
    if (tensor->shifts)
        KVANT_FORWARD(encode_all(tensor, n_threads));
    kvant_shifts_free(tensor);
    return kvant_shifts_create(tensor, rope);
}

static kvant_status check(const kvant_tensor *tensor, const kvant_rope *given, kvant_rope *rope,
                          const int32_t *by, size_t n, uint32_t n_threads)
{
    if (!tensor || !KVANT_ACCEPT_STRUCT(kvant_rope, rope, given, n_position_transforms) ||
        (n && !by) || !n_threads || n > tensor->n_blocks * (size_t)KVANT_PAGE_TOKENS ||
        kvant_tensor_codec_info(tensor)->role != KVANT_ROLE_K)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "shift: tensor or by is NULL or not of keys, the size field of rope is "
                          "not set, n_threads is 0, or there are more slots than the tensor has");
    if (tensor->device)
        return kvant_fail(
            NULL, KVANT_ERR_UNSUPPORTED,
            "shift: the tensor is on a GPU: read its keys, rotate them and write them");
    for (size_t i = 0; i < n; i++)
        if (by[i] != KVANT_ANY_SHIFT &&
            (by[i] > KVANT_LARGEST_SHIFT || by[i] < -KVANT_LARGEST_SHIFT))
            return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "shift: slot %zu moves by more than 2^30",
                              i);
    return kvant_rope_check(rope, tensor->head_dim);
}

static bool moves_nothing(const int32_t *by, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (by[i] != 0 && by[i] != KVANT_ANY_SHIFT)
            return false;
    return true;
}

kvant_status kvant_tensor_shift(kvant_tensor *tensor, const kvant_rope *rope, const int32_t *by,
                                size_t n, uint32_t n_threads)
{
    kvant_rope r;
    moving m = { .tensor = tensor, .by = by, .n = n };
    KVANT_FORWARD(check(tensor, rope, &r, by, n, n_threads));
    if (moves_nothing(by, n))
        return KVANT_OK;
    KVANT_FORWARD(prepare(tensor, &r, n_threads));
    kvant_status status = collect(&m);
    if (status == KVANT_ERR_FULL) {
        KVANT_FORWARD(encode_all(tensor, n_threads));
        status = collect(&m);
    }
    if (status != KVANT_OK)
        return kvant_fail(NULL, status,
                          status == KVANT_ERR_FULL
                              ? "shift: a call has more than 31 different shifts: split it"
                              : "shift: a key would have moved by more than 2^30 in all");
    apply(&m);
    return KVANT_OK;
}
