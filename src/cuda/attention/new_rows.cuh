/* new_rows.cuh - attention that stores the newest rows itself: a launch and a trip to memory fewer
 * per layer of a decode step.
 *
 * The thread block whose piece holds the page of a row stores it: keys and values each by one of its
 * last warps, while the first warps prepare queries. A page that is on its way to shared memory
 * already gets the row there, too; others are copied when the row is there. */
#pragma once

#include "../encode/few_rows.cuh"
#include "schedule.cuh"

namespace kvant
{

/* Codes that are stored here; others are stored as fp16 alone. */
template <class C> constexpr bool STORED = !HAS_CHUNKS<C> && !HAS_TRELLIS<C> && C::GROUP == KVANT_CUDA_GROUP_TOKEN;

/* A page on its way to shared memory. */
struct PageCopy {
    uint8_t *at; /* NULL: it is not */
    uint32_t barrier;
};

/* Role 0 or 1 of the row of sequence b, by a warp. */
template <int D, bool OPEN, bool SEALED>
__device__ __noinline__ void store_new_row(const NewRows &rows, const NarrowBook *books, int role_at, int b, int kv_head,
                                           PageCopy copy, int lane)
{
    const FewRole &role = rows.roles[role_at];
    const int64_t slot = rows.slots[b];
    RawRow<D> raw;
    raw.load(role.rows, b * role.token_stride + kv_head * role.row_head_stride, rows.type, lane);
    Affine<D> affine;
    affine.load(role, role.affine, kv_head * D + lane);
    if (slot < 0)
        return;
    uint8_t *page = role.base + (size_t)page_number(slot) * role.block_stride + kv_head * role.head_stride;
    const int at = (int)(slot % PAGE_TOKENS);
    Row<D> y = raw.numbers(rows.type);
    bool finite;
    few_row<D>(y, role, affine, lane, finite);
    finite = __all_sync(FULL, finite);
    if (OPEN && (!SEALED || rows.open))
        write_open<D>(rows.refused, role, y, page, at, finite, false, lane);
    else if constexpr (SEALED) {
        uint32_t codes[Row<D>::PER_LANE];
        Quantized q;
        if (!few_codes<D>(rows.refused, role, books[role_at], y, finite, lane, codes, q))
            return;
        if (copy.at)
            wait_at_barrier(copy.barrier, 0);
#pragma unroll 1
        for (uint8_t *to = copy.at ? copy.at : page;; to = page) {
            put_codes<D>(role, codes, q, to, at, false, lane);
            if (to == page)
                break;
        }
    }
    if (copy.at || (OPEN && rows.open)) /* read by threads of this block alone */
        fence_shared();
    else
        fence_for_copies();
}

/* use(page of the line, sequence, kv head, turn) for the rows of the block's piece. */
template <class L, class P, class F> KVANT_INLINE void each_new_row(const NewRows &rows, const L &lengths, const P &piece, F &&use)
{
    auto cursor = piece.cursor;
    int turn = 0;
#pragma unroll 1
    for (int i = piece.begin, end; i < piece.end; i = end) {
        cursor.seek(lengths, i);
        const int head = cursor.head(i), first = cursor.first + head * cursor.pages,
                  page = first + (int)((__ldg(rows.cells + cursor.b) - rows.first - cursor.b * rows.stride) >> 6);
        end = min(piece.end, first + cursor.pages);
        if (page >= i && page < end)
            use(page, cursor.b, head, turn++);
    }
}

/* By all warps, which synchronise before they read pages with such rows. copy_of(page, role): its PageCopy. */
template <int D, bool OPEN, bool SEALED, int WARPS, class L, class P, class F>
KVANT_INLINE void store_new_rows(const NewRows &rows, const NarrowBook *books, const L &lengths, const P &piece, int warp,
                                 int lane, F &&copy_of)
{
    each_new_row(rows, lengths, piece, [&](int page, int b, int kv_head, int turn) {
#pragma unroll 1
        for (int role = 0; role < 2; role++)
            if (WARPS - 1 - (2 * turn + role) % WARPS == warp)
                store_new_row<D, OPEN, SEALED>(rows, books, role, b, kv_head, copy_of(page, role), lane);
    });
}

} // namespace kvant
