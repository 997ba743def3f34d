/* new_rows.cuh - attention that stores the newest rows itself: a launch and a trip to memory fewer
 * per layer of a decode step.
 *
 * The thread block whose piece holds the page of a row stores it, before its first warp reads that
 * page: keys and values each by one of its last warps, while the first warps prepare queries. */
#pragma once

#include "../encode/few_rows.cuh"
#include "schedule.cuh"

namespace kvant
{

/* Codes that are stored here; others are stored as fp16 alone. */
template <class C> constexpr bool STORED = !HAS_CHUNKS<C> && !HAS_TRELLIS<C> && C::GROUP == KVANT_CUDA_GROUP_TOKEN;

/* Role 0 or 1 of the row of sequence b, by a warp. rehearsed: nothing is read or stored. */
template <int D, bool OPEN, bool SEALED>
__device__ __noinline__ void store_new_row(const NewRows &rows, const NarrowBook *books, int role_at, int b, int kv_head,
                                           bool rehearsed, int lane)
{
    const FewRole &role = rows.roles[role_at];
    const int64_t slot = rehearsed ? 0 : rows.slots[b];
    RawRow<D> raw{};
    if (!rehearsed)
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
        write_open<D>(rows.refused, role, y, page, at, finite, rehearsed, lane);
    else if constexpr (SEALED)
        write_codes_of<D>(rows.refused, role, books[role_at], y, page, at, finite, rehearsed, lane);
    fence_for_copies();
}

/* Before rows are there: a role's book into shared memory, and all instructions of store_new_row into caches. */
template <int D, bool OPEN, bool SEALED>
KVANT_INLINE void rehearse_new_row(const NewRows &rows, NarrowBook *books, int role, int lane)
{
    if (lane == 0)
        prefetch_line(rows.cells, 0);
    if (lane == 1)
        prefetch_line(rows.slots, 0);
    if (SEALED)
        copy_book(books[role], rows.books[role], rows.roles[role], lane);
    __syncwarp();
    store_new_row<D, OPEN, SEALED>(rows, books, role, 0, 0, true, lane);
}

/* The rows of the block's pieces; true if the warp's first page has one. By all warps, which
 * synchronise before they read pages with such rows. */
template <int D, bool OPEN, bool SEALED, int WARPS, class L, class P>
KVANT_INLINE bool store_new_rows(const NewRows &rows, const NarrowBook *books, const L &lengths, const P &piece, int warp,
                                 int lane)
{
    auto cursor = piece.cursor;
    bool first_page = false;
    int turn = 0;
#pragma unroll 1
    for (int i = piece.begin, end; i < piece.end; i = end) {
        cursor.seek(lengths, i);
        const int head = cursor.head(i), first = cursor.first + head * cursor.pages,
                  page = first + (int)((__ldg(rows.cells + cursor.b) - rows.first - cursor.b * rows.stride) >> 6);
        end = min(piece.end, first + cursor.pages);
        if (page < i || page >= end)
            continue;
        first_page |= page == piece.begin + warp;
#pragma unroll 1
        for (int role = 0; role < 2; role++)
            if (WARPS - 1 - turn++ % WARPS == warp)
                store_new_row<D, OPEN, SEALED>(rows, books, role, cursor.b, head, false, lane);
    }
    return first_page;
}

} // namespace kvant
