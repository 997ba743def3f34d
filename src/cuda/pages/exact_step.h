/* exact_step.h - decides in each step of an engine which of its blocks are exact
 * (kvant_cuda_exact_step).
 *
 * The same source is C and CUDA. In CUDA a warp plans the step, and many threads find entries and
 * rows afterwards. In C one lane does it all, so tests on a CPU run the same rules. The first
 * block of a sequence of the step never leaves its slot, and neither does its last block while it
 * waits for rows. The oldest of all other blocks leave first. A slot that a block leaves is free
 * from the next step on, because layers store the step's rows before they seal.
 *
 * While a block has a slot, all of its rows go there. So a block that another sequence uses again
 * may keep its slot: the rows of the former sequence are never read. */
#pragma once

#include <kvant/cuda_kernels.h>

#include "../../base/attributes.h"
#include "../../store/rules.h"

#if defined(__CUDACC__)
#define EXACT_HOST __host__ __device__ inline
#define EXACT_LANES 32u
#define exact_lane() (threadIdx.x & 31)
#define exact_votes(x) __ballot_sync(0xffffffffu, x)
#define exact_ones(bits) ((uint32_t)__popc(bits))
#define exact_least(x) __reduce_min_sync(0xffffffffu, x)
#define exact_lowest(bits) ((uint32_t)__ffs((int)(bits)) - 1)
#define exact_meet() __syncwarp()
#define exact_claim(n) atomicAdd(n, 1u)
#else
#define EXACT_HOST static inline
#define EXACT_LANES 1u
#define exact_lane() 0u
#define exact_votes(x) ((uint32_t)((x) != 0))
#define exact_ones(bits) (bits)
#define exact_least(x) (x)
#define exact_lowest(bits) 0u
#define exact_meet() ((void)0)
#define exact_claim(n) ((*(n))++)
#endif

enum { EXACT_FREE = -1, EXACT_LEAVES = -2 }; /* the owner of a slot; EXACT_LEAVES - block */

/* The slots of a kind. */
typedef struct exact_kind {
    uint32_t first, end;
    uint32_t used; /* slots that hold a block */
} exact_kind;

/* The sequences of a step. */
typedef struct exact_batch {
    uint32_t active; /* sequences with tokens in this step */
    uint32_t soon;   /* sequences that begin a block in the next step, if it is like this one */
} exact_batch;

KVANT_INLINE uint32_t exact_slots(const kvant_cuda_exact_args *a)
{
    return a->n_first + a->n_newest;
}

/* The slot of a block that is exact, or that leaves in this step if `leaving`; -1: none. */
KVANT_INLINE int32_t exact_slot_of(const kvant_cuda_exact_args *a, int64_t block, bool leaving)
{
    const int32_t slot = block >= 0 && block < (int64_t)a->n_blocks ? a->places[block] : -1;
    if (slot < 0 || (uint32_t)slot >= exact_slots(a))
        return -1;
    const int32_t owner = a->owners[slot];
    return owner == block || (leaving && owner == EXACT_LEAVES - block) ? slot : -1;
}

/* The sequence of a token: the last one that begins at or before it. */
KVANT_INLINE uint32_t exact_sequence(const kvant_cuda_exact_args *a, uint32_t token)
{
    uint32_t low = 0, high = a->batch;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if ((uint32_t)a->query_starts[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The kind of slot that the block of a token is to have when its row 0 is written: 0 of first
 * blocks, 1 of newest blocks, 2: none. */
KVANT_INLINE uint32_t exact_kind_of(const kvant_cuda_exact_args *a, uint32_t token)
{
    const int64_t slot = token < a->n_tokens ? a->slots[token] : -1;
    if (slot < 0 || slot % KVANT_PAGE_TOKENS != 0)
        return 2;
    const uint32_t b = exact_sequence(a, token);
    const int32_t page = KVANT_PAGE_TOKENS, length = a->lengths[b],
                  position = length - (a->query_starts[b + 1] - (int32_t)token),
                  behind = (length - 1) / page - position / page;
    if ((int32_t)token >= a->query_starts[b + 1] || position < 0 ||
        slot / KVANT_PAGE_TOKENS >= (int64_t)a->n_blocks)
        return 2;
    if (position == 0)
        return 0;
    return behind < (int32_t)a->newest ? 1 : 2;
}

/* Lists the rows of a slot, and frees it for the next step. Called for different slots by all lanes
 * whose `own` is true. */
KVANT_INLINE void exact_leave(const kvant_cuda_exact_args *a, uint32_t slot, bool own, uint32_t *n)
{
    const uint32_t leaving = exact_votes(own),
                   before = exact_ones(leaving & ((1u << exact_lane()) - 1));
    if (own) {
        const int32_t block = a->owners[slot];
        const uint32_t at = *n + KVANT_PAGE_TOKENS * before;
        for (uint32_t row = 0; row < KVANT_PAGE_TOKENS; row++) {
            a->from[at + row] = (int64_t)slot * KVANT_PAGE_TOKENS + row;
            a->to[at + row] = (int64_t)block * KVANT_PAGE_TOKENS + row;
        }
        a->owners[slot] = EXACT_LEAVES - block;
    }
    *n += KVANT_PAGE_TOKENS * exact_ones(leaving);
}

/* Whether a slot holds a block that may leave; with lanes beyond `end`. */
KVANT_INLINE bool exact_may_leave(const kvant_cuda_exact_args *a, const exact_kind *kind,
                                  uint32_t slot, uint32_t clock)
{
    return slot < kind->end && a->owners[slot] >= 0 && a->lives[slot] != clock;
}

/* Lets the `count` oldest blocks of a kind leave, or all that may leave. */
KVANT_INLINE void exact_leave_oldest(const kvant_cuda_exact_args *a, exact_kind *kind,
                                     uint32_t count, uint32_t clock, uint32_t *n)
{
    while (count > 0) {
        uint32_t oldest = 0; /* steps since then, plus 1 */
        for (uint32_t i = kind->first; i < kind->end; i += EXACT_LANES) {
            const uint32_t slot = i + exact_lane();
            if (exact_may_leave(a, kind, slot, clock) && clock - a->births[slot] + 1 > oldest)
                oldest = clock - a->births[slot] + 1;
        }
        oldest = ~exact_least(~oldest);
        if (oldest == 0)
            return;
        for (uint32_t i = kind->first; i < kind->end && count > 0; i += EXACT_LANES) {
            const uint32_t slot = i + exact_lane();
            const bool old =
                exact_may_leave(a, kind, slot, clock) && clock - a->births[slot] + 1 == oldest;
            const uint32_t votes = exact_votes(old),
                           before = exact_ones(votes & ((1u << exact_lane()) - 1));
            exact_leave(a, slot, old && before < count, n);
            const uint32_t left = exact_ones(votes) < count ? exact_ones(votes) : count;
            count -= left;
            kind->used -= left;
            exact_meet();
        }
    }
}

/* Makes room when more than `most` slots of a kind are in use, or fewer than `soon` are free:
 * `group` blocks leave at once, so that the encoder has many rows. */
KVANT_INLINE void exact_make_room(const kvant_cuda_exact_args *a, exact_kind *kind, uint32_t most,
                                  uint32_t soon, uint32_t group, uint32_t clock, uint32_t *n)
{
    const uint32_t slots = kind->end - kind->first, spare = slots / 8 > 0 ? slots / 8 : 1,
                   wanted = soon > spare ? soon : spare, free = slots - kind->used,
                   urgent = wanted > free ? wanted - free : 0;
    if (kind->used > most || urgent > 0)
        exact_leave_oldest(a, kind, urgent > group ? urgent : group, clock, n);
}

/* Gives free slots to the blocks of `wants` lanes. cursor: slots before it are not free. */
KVANT_INLINE void exact_take(const kvant_cuda_exact_args *a, exact_kind *kind, uint32_t *cursor,
                             int64_t block, bool wants, uint32_t clock)
{
    const uint32_t votes = exact_votes(wants), own = exact_ones(votes & ((1u << exact_lane()) - 1));
    uint32_t given = 0;
    const uint32_t all = exact_ones(votes);
    while (given < all && *cursor < kind->end) {
        /* the lane looks at a slot; free slots are given to wanting lanes in order */
        const uint32_t slot = *cursor + exact_lane();
        const uint32_t there = exact_votes(slot < kind->end && a->owners[slot] == EXACT_FREE);
        uint32_t rest = there, taken = 0;
        while (rest && given < all) {
            const uint32_t at = exact_lowest(rest);
            if (wants && own == given) {
                a->owners[*cursor + at] = (int32_t)block;
                a->births[*cursor + at] = clock;
                a->places[block] = (int32_t)(*cursor + at);
            }
            rest &= rest - 1;
            given++;
            taken++;
        }
        kind->used += taken;
        exact_meet();
        if (rest == 0)
            *cursor += EXACT_LANES;
    }
}

/* Marks blocks that must not leave, and counts sequences. */
KVANT_INLINE exact_batch exact_look(const kvant_cuda_exact_args *a, uint32_t clock)
{
    exact_batch found = { 0, 0 };
    for (uint32_t i = 0; i < a->batch; i += EXACT_LANES) {
        const uint32_t b = i + exact_lane();
        const int32_t page = KVANT_PAGE_TOKENS, length = b < a->batch ? a->lengths[b] : 0,
                      queries = b < a->batch ? a->query_starts[b + 1] - a->query_starts[b] : 0;
        const bool active =
            queries > 0 && length > 0 && (length - 1) / page < (int32_t)a->blocks_per_row;
        found.active += exact_ones(exact_votes(active));
        found.soon +=
            exact_ones(exact_votes(active && (length + queries - 1) / page > (length - 1) / page));
        if (!active)
            continue;
        const int32_t *row = a->block_table + b * a->table_stride;
        const int32_t first = exact_slot_of(a, row[0], false),
                      last = exact_slot_of(a, row[(length - 1) / page], false);
        if (first >= 0)
            a->lives[first] = clock;
        if (last >= 0 && length % page != 0) /* it waits for rows */
            a->lives[last] = clock;
    }
    exact_meet();
    return found;
}

/* Frees the slots that blocks left in the step before; counts the slots of a kind in use. */
KVANT_INLINE void exact_free_slots(const kvant_cuda_exact_args *a, exact_kind *kind)
{
    for (uint32_t i = kind->first; i < kind->end; i += EXACT_LANES) {
        const uint32_t slot = i + exact_lane();
        const int32_t owner = slot < kind->end ? a->owners[slot] : EXACT_FREE;
        kind->used += exact_ones(exact_votes(owner >= 0));
        if (owner <= EXACT_LEAVES)
            a->owners[slot] = EXACT_FREE;
    }
    exact_meet();
}

/* Blocks that leave at once: more of them where more sequences fill blocks. */
KVANT_INLINE uint32_t exact_group(uint32_t active)
{
    if (active < 4)
        return active > 0;
    return active < 4 * KVANT_PLAN_RUN ? active / 4 : KVANT_PLAN_RUN;
}

/* Plans a step; by one warp. */
KVANT_INLINE void exact_plan(const kvant_cuda_exact_args *a)
{
    exact_kind kinds[2] = { { 0, a->n_first, 0 }, { a->n_first, exact_slots(a), 0 } };
    uint32_t cursors[2] = { 0, a->n_first }, n = 0;
    const uint32_t clock = *a->clock + 1;
    for (int i = 0; i < 2; i++)
        exact_free_slots(a, &kinds[i]);
    for (uint32_t i = 0; i < a->n_tokens; i += EXACT_LANES) {
        const uint32_t kind = exact_kind_of(a, i + exact_lane());
        const int64_t block = kind < 2 ? a->slots[i + exact_lane()] / KVANT_PAGE_TOKENS : -1;
        const bool wants = kind < 2 && exact_slot_of(a, block, false) < 0;
        if (!exact_votes(wants))
            continue;
        for (uint32_t k = 0; k < 2; k++)
            exact_take(a, &kinds[k], &cursors[k], block, wants && kind == k, clock);
    }
    const exact_batch batch = exact_look(a, clock);
    const uint32_t group = exact_group(batch.active);
    exact_make_room(a, &kinds[0], a->n_first, 0, 1, clock, &n);
    if (batch.active > 0)
        exact_make_room(a, &kinds[1], a->newest * batch.active + group, batch.soon, group, clock,
                        &n);
    if (exact_lane() == 0) {
        *a->clock = clock;
        *a->n_sealed = n;
    }
}

/* Item i of the step after it was planned: an entry of the table, or the row of a token. */
KVANT_INLINE void exact_find(const kvant_cuda_exact_args *a, size_t i)
{
    if (i < a->n_tokens) {
        const int64_t slot = a->slots[i], block = slot >= 0 ? slot / KVANT_PAGE_TOKENS : -1;
        const int32_t place = exact_slot_of(a, block, true);
        int64_t row = -1;
        if (place >= 0)
            row = (int64_t)place * KVANT_PAGE_TOKENS + slot % KVANT_PAGE_TOKENS;
        else if (slot >= 0 && a->n_tokens <= a->most_staged) {
            const uint32_t at = exact_claim(a->n_sealed);
            row = (int64_t)exact_slots(a) * KVANT_PAGE_TOKENS + (int64_t)i;
            a->from[at] = row;
            a->to[at] = slot;
        }
        a->rows[i] = row;
        return;
    }
    const size_t entry = i - a->n_tokens, b = entry / a->blocks_per_row,
                 page = entry % a->blocks_per_row;
    if (b >= a->batch || (int64_t)(page * KVANT_PAGE_TOKENS) >= a->lengths[b])
        return;
    const int32_t block = a->block_table[b * a->table_stride + page],
                  slot = exact_slot_of(a, block, true);
    a->table[b * a->to_stride + page] = slot >= 0 ? -1 - slot : block;
}

/* The items of a step. */
EXACT_HOST size_t exact_items(const kvant_cuda_exact_args *a)
{
    return a->n_tokens + (size_t)a->batch * a->blocks_per_row;
}

/* Whether the arguments have all arrays and enough slots. */
EXACT_HOST bool exact_valid(const kvant_cuda_exact_args *a)
{
    return a->owners && a->births && a->lives && a->places && a->clock && a->n_first >= 4 &&
           a->n_newest >= 4 && a->n_first <= 1u << 20 && a->n_newest <= 1u << 20 &&
           (a->batch == 0 || (a->lengths && a->query_starts && a->block_table)) &&
           (a->n_tokens == 0 || (a->batch > 0 && a->slots)) && a->newest > 0 && a->table &&
           a->rows && a->from && a->to && a->n_sealed && a->to_stride >= a->blocks_per_row;
}
