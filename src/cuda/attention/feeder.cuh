/* feeder.cuh - keeps a warp's ring full: page after page of the warp's share of the piece.
 *
 * Table entries are looked up 32 pages at a time, one per lane. A look-up just before its copy
 * would put two trips to memory in series. */
#pragma once

#include "attention.h"
#include "ring.cuh"
#include "schedule.cuh"

namespace kvant
{

constexpr int ASKED_AHEAD = 2; /* pages of a warp */

/* L: Lengths. MANY: keys may have several matrices. */
template <class L, bool GENERAL, bool MANY, int WARPS, int STAGES, int SLOT, int V_OFFSET,
          bool SPLIT>
struct Feeder {
    Ring<STAGES, SLOT, V_OFFSET, SPLIT> ring;
    Cursor<GENERAL> cursor; /* the lane's own */
    int next, end;          /* pages of the line: the next to fetch, the end of the piece */
    /* The lane's, of a page of the batch: the table's entry, where its pages lie. */
    int32_t entry;
    int matrix;
    const uint8_t *k, *v;
    int kv_head, in_batch, slot;
    bool keys_there;   /* SPLIT: of the next page to fetch */
    int32_t *entries;  /* shared: the table's entry of the page in each slot */
    uint8_t *matrices; /* likewise */

    KVANT_INLINE void look_up(const AttentionArgs &p, const L &lengths)
    {
        int i = next + WARPS * ring.lane;
        in_batch = 0;
        if (i >= end)
            return;
        cursor.seek(lengths, i);
        const int h = cursor.head(i);
        const int groups = lengths.groups(cursor.b);
        const size_t at = cursor.b * p.table_stride + lengths.first_page(cursor.b) +
                          (i - cursor.first - h * cursor.pages);
        entry = __ldg(p.table + at);
        if (MANY && p.matrices)
            matrix = __ldg(p.matrices + at);
        kv_head = groups == 1 ? h : quotient(h, groups);
    }

    /* Finds the addresses of the keys and values, once the table's entry is there. */
    KVANT_INLINE void find_pages(const AttentionArgs &p)
    {
        if (entry >= 0)
            locate(p.k, p.v, entry, kv_head);
        else /* pages of hidden blocks are prefetched, too: some that exist */
            locate(p.k_open, p.v_open, entry == KVANT_CUDA_NO_BLOCK ? 0 : -1 - entry, kv_head);
    }

    /* Loads the first pages into the second-level cache. A number that is written later does no
     * harm: it is written to that cache, and read from it. */
    KVANT_INLINE void ask(const AttentionArgs &p) const
    {
        if (ring.lane < ASKED_AHEAD && next + WARPS * ring.lane < end) {
            ring.ask(k, entry >= 0 ? p.k.bytes : p.k_open.bytes);
            ring.ask(v, entry >= 0 ? p.v.bytes : p.v_open.bytes);
        }
    }

    KVANT_INLINE void locate(const PageSource &of_k, const PageSource &of_v, int block, int head)
    {
        k = of_k.base + (size_t)(uint32_t)block * of_k.block_stride + head * of_k.head_stride;
        v = of_v.base + (size_t)(uint32_t)block * of_v.block_stride + head * of_v.head_stride;
    }

    KVANT_INLINE void start(const AttentionArgs &p, const L &lengths, const Piece<GENERAL> &piece,
                            int warp, int32_t *entries_, uint8_t *matrices_)
    {
        entries = entries_, matrices = matrices_;
        cursor = piece.cursor;
        next = piece.begin + warp;
        end = piece.end;
        entry = matrix = kv_head = slot = 0;
        k = v = nullptr;
        keys_there = false;
        look_up(p, lengths);
    }

    /* A lane sends its address to all lanes by sums. The compiler knows that a sum's result is the
     * same in all lanes. So the copies use it without a loop over lanes that could have different
     * addresses. */
    KVANT_INLINE const uint8_t *of_batch(const uint8_t *x) const
    {
        const uint64_t own = ring.lane == in_batch ? reinterpret_cast<uint64_t>(x) : 0;
        const uint64_t low = __reduce_add_sync(FULL, (uint32_t)own),
                       high = __reduce_add_sync(FULL, (uint32_t)(own >> 32));
        return reinterpret_cast<const uint8_t *>(high << 32 | low);
    }

    /* The next K page, while the V page before it is in use; not when `wanted` is false. */
    KVANT_INLINE void fill_keys(const AttentionArgs &p, const L &lengths, bool wanted)
    {
        if (!wanted || next >= end) {
            ring.skip();
            return;
        }
        if (in_batch == 32) {
            look_up(p, lengths);
            find_pages(p);
        }
        if (__any_sync(FULL, ring.lane == in_batch && entry < 0)) {
            ring.skip();
            return;
        }
        ring.fill_one(slot, 0, of_batch(k), p.k.bytes);
        keys_there = true;
    }

    KVANT_INLINE void fill_values(const AttentionArgs &p)
    {
        if constexpr (SPLIT)
            ring.fill_one(slot, 1, of_batch(v), p.v.bytes);
    }

    KVANT_INLINE void fill(const AttentionArgs &p, const L &lengths)
    {
        if (next >= end) {
            ring.skip();
            next += WARPS;
            return;
        }
        if (in_batch == 32) {
            look_up(p, lengths);
            find_pages(p);
        }
        if (ring.lane == in_batch) {
            entries[slot] = entry;
            if (MANY)
                matrices[slot] = (uint8_t)matrix;
        }
        __syncwarp(); /* all lanes read both, some at once; a vote alone orders no memory */
        if (__any_sync(FULL,
                       ring.lane == in_batch && entry < 0)) /* read where it lies (open.cuh) */
            ring.fill_none(slot, of_batch(k), of_batch(v), p.k_open.bytes);
        else if (SPLIT && keys_there)
            fill_values(p);
        else
            ring.fill(slot, of_batch(k), p.k.bytes, of_batch(v), p.v.bytes);
        keys_there = false;
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        next += WARPS;
        in_batch++;
    }
};

} // namespace kvant
