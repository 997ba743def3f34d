/* schedule.cuh - assigns pages to thread blocks.
 *
 * All pages of all (sequence, kv head) pairs stand in one line, sequence by sequence, head by head.
 * Every thread block takes a piece of equal length. So ragged batches balance, several thread
 * blocks may share a pair (split-K), and a thread block may serve several pairs. Lengths are read
 * on the device: the launch depends on no length, as CUDA graphs need. */
#pragma once

#include "attention.h"
#include "../layout.cuh"
#include "../rotate.cuh"

#include <climits>

namespace kvant
{

/* a / b of numbers that are not negative, b not 0, the quotient below 2^20: an estimate, at most
 * one off, put right. A third of the instructions of a division, at a time when every one of them
 * comes from memory. */
KVANT_INLINE int quotient(int a, int b)
{
    const int q = __float2int_rz(__fdividef((float)a, (float)b)), rest = a - q * b;
    return rest < 0 ? q - 1 : rest >= b ? q + 1 : q;
}

/* The number of a query row (the order of lse and mask), and its place in q and out. */
struct QueryRow {
    size_t row, q, out;
};

KVANT_INLINE QueryRow query_row(const AttentionArgs &p, int b, int token)
{
    if (p.query_starts) {
        const size_t row = __ldg(p.query_starts + b) + token;
        return QueryRow{ row, row * p.q_token_stride, row * p.out_token_stride };
    }
    return QueryRow{ (size_t)b * p.query_tokens + token,
                     b * p.q_batch_stride + token * p.q_token_stride,
                     b * p.out_batch_stride + token * p.out_token_stride };
}

/* Pages and query rows per sequence. A kernel that is not GENERAL assumes no window and at most one
 * query token per sequence, so every sequence has the same number of groups. A sequence without a
 * query token counts as empty there. */
template <bool GENERAL, int COLUMNS> struct Lengths {
    const AttentionArgs &p;

    KVANT_INLINE int length(int b) const
    {
        const int all = min(max(__ldg(p.lengths + b), 0), p.max_tokens);
        return GENERAL || queries(b) > 0 ? all : 0;
    }
    KVANT_INLINE int queries(int b) const
    {
        if (!p.query_starts)
            return GENERAL ? p.query_tokens : 1;
        return min(max(__ldg(p.query_starts + b + 1) - __ldg(p.query_starts + b), 0),
                   p.query_tokens);
    }
    /* Position of a sequence's first query token; below 0 when the sequence is shorter than its
     * query. */
    KVANT_INLINE int first_position(int b) const
    {
        return length(b) - queries(b);
    }
    /* No query token sees a page before this one. */
    KVANT_INLINE int first_page(int b) const
    {
        if (!GENERAL || p.window == INT_MAX)
            return 0;
        return (unsigned)max(first_position(b) - p.window + 1, 0) / PAGE_TOKENS;
    }
    /* Pages per pair. */
    KVANT_INLINE int pages(int b) const
    {
        return b < p.batch
                   ? (int)((unsigned)(length(b) + PAGE_TOKENS - 1) / PAGE_TOKENS) - first_page(b)
                   : 0;
    }
    KVANT_INLINE int groups(int b) const
    {
        return GENERAL ? (unsigned)(queries(b) * p.heads_a_kv + COLUMNS - 1) / COLUMNS : p.groups;
    }
    /* Pairs per sequence. */
    KVANT_INLINE int heads(int b) const
    {
        return p.kv_heads * (!GENERAL || b < p.batch ? groups(b) : 0);
    }
};

/* A place in the line: sequence b begins at `first` and has `pages` pages for each of its `heads`
 * pairs. */
template <bool GENERAL> struct Cursor {
    int b, first, pages, own_heads;

    KVANT_INLINE int heads(const AttentionArgs &p) const
    {
        return GENERAL ? own_heads : p.kv_heads * p.groups;
    }
    /* Moves on to the sequence that holds page i of the line; i is below the line's end. */
    template <class L> KVANT_INLINE void seek(const L &lengths, int i)
    {
        while (i >= first + heads(lengths.p) * pages) {
            first += heads(lengths.p) * pages;
            pages = lengths.pages(++b);
            own_heads = GENERAL ? lengths.heads(b) : 0;
        }
    }
    KVANT_INLINE int head(int i) const
    {
        return quotient(i - first, pages);
    }
};

/* A sequence and up to COLUMNS query rows of one kv head: one pass over the pages serves them. The
 * rows of a kv head are its query heads for the first token, then for the second token, and so on;
 * column n is row first_column + n. */
struct Pair {
    int b, kv_head, first_column, n_columns;
};

struct Column {
    int token, head;
};

template <bool GENERAL>
KVANT_INLINE Column column_of(const AttentionArgs &p, const Pair &pair, int n)
{
    const int at = pair.first_column + n,
              token = GENERAL ? (unsigned)at / (unsigned)p.heads_a_kv : 0;
    return Column{ token, pair.kv_head * p.heads_a_kv + at - token * p.heads_a_kv };
}

template <bool GENERAL, int COLUMNS>
KVANT_INLINE Pair find_pair(const AttentionArgs &p, const Lengths<GENERAL, COLUMNS> &lengths, int b,
                            int head)
{
    const int groups = lengths.groups(b), kv_head = groups == 1 ? head : quotient(head, groups),
              columns = GENERAL ? p.heads_a_kv * lengths.queries(b) : p.heads_a_kv,
              width =
                  GENERAL ? (unsigned)(columns + groups - 1) / (unsigned)groups : p.heads_a_group,
              skipped = (head - kv_head * groups) * width;
    return Pair{ b, kv_head, skipped, max(min(width, columns - skipped), 0) };
}

/* The piece [begin, end) of the line that a block takes, and where the line's sequence lies. Pieces
 * are numbered in the order of the line. If pairs are cut alike, each has `parts` pieces. Otherwise
 * parts is 0, and all pieces but the last have `size` pages. */
template <bool GENERAL> struct Piece {
    int size, parts, index, begin, end;
    bool any_empty; /* some sequence has no pages */
    Cursor<GENERAL> cursor;
};

/* The blocks that share a pair, by the numbers of their pieces. */
struct Share {
    int first_block, n_blocks;
    int own; /* the block's partial result */
    bool whole;

    /* The pair begins in its first block, which ends in the middle of it; its other blocks begin in
     * the middle of it. */
    KVANT_INLINE int partial(int i) const
    {
        return 2 * (first_block + i) + (i == 0 ? 1 : 0);
    }
};

/* The blocks that share the pair at the places [first, last) of the line. */
template <bool GENERAL>
KVANT_INLINE Share share_of(const Piece<GENERAL> &piece, int first, int last)
{
    const int own = 2 * piece.index + (piece.begin > first ? 0 : 1);
    const bool whole = first >= piece.begin && last <= piece.end;
    if (piece.parts > 0)
        return Share{ quotient(piece.index, piece.parts) * piece.parts, piece.parts, own, whole };
    const unsigned size = piece.size;
    const int first_block = (unsigned)first / size;
    return Share{ first_block, (int)((unsigned)(last - 1) / size) - first_block + 1, own, whole };
}

/* The share of a block without pages, as if it were the only block of a pair. */
KVANT_INLINE Share idle_share(int index)
{
    return Share{ index, 1, 2 * index + 1, false };
}

/* Returns the length of a piece, at least `size`, of a line whose pairs all have `pages` pages. If
 * a length at most a tenth longer lets no piece reach over the end of a pair, the function returns
 * it. A block that ends one pair and begins another one stops in between, and all others wait for
 * it in the end. */
KVANT_INLINE int align_piece(int size, int pages)
{
    if (pages < size) {
        int whole = (int)((unsigned)(size + pages - 1) / (unsigned)pages) * pages;
        return 10 * whole <= 11 * size ? whole : size;
    }
#pragma unroll 1
    for (int parts = quotient(pages, size); parts > 0; parts--) {
        const int whole = (unsigned)pages / (unsigned)parts;
        if (10 * whole > 11 * size)
            break;
        if (whole * parts == pages)
            return whole;
    }
    return size;
}

/* How pairs are cut alike into parts of `even` pages. The first n_long parts have one page more.
 * The first n_late parts and the last n_open parts have `shorter` pages less. There are 0 parts
 * where there are more pairs than thread blocks. */
struct Parts {
    int parts, even, n_long, n_late, n_open, shorter;
    bool newest_first; /* the first blocks take the last parts of all pairs, and so on */

    KVANT_INLINE int longest() const
    {
        return even + (n_long > 0 ? 1 : 0);
    }
    /* The first page of a part. */
    KVANT_INLINE int begin(int part) const
    {
        const int n_short = min(part, n_late) + max(part - (parts - n_open), 0);
        return part * even + min(part, n_long) - n_short * shorter;
    }
};

/* Pages that a thread block computes in about 2 us. The last n_late blocks begin about 2 us late,
 * because the kernel before occupies their multiprocessors until then. And the newest pages of a
 * sequence are often open, which takes a block longer. So parts for late blocks and parts with the
 * newest pages are shorter. With MANY_PAGES or more, a part takes so long that late blocks hardly
 * count: other parts, longer by a page, would take up to 2 us more. */
constexpr int SHORTER = 4, OPEN_PARTS = 2, MANY_PAGES = 16;

KVANT_INLINE Parts parts_of(int pairs, int pages, int count, int n_late)
{
    const int n = min(quotient(count, pairs), (pages + LEAST_PAGES - 1) / LEAST_PAGES);
    if (n == 0)
        return Parts{ 0, 0, 0, 0, 0, 0, false };
    const int idle = count - n * pairs, /* the last blocks */
        each = quotient(pages, n), open = each >= SHORTER && n > OPEN_PARTS ? OPEN_PARTS : 0,
              late = each < MANY_PAGES ? quotient(max(n_late - idle, 0) + pairs - 1, pairs) : 0,
              n_short = min(late, n - 1 - open), shorter = min(SHORTER, each / 2),
              all = pages + (n_short + open) * shorter, even = quotient(all, n);
    return Parts{ n, even, all - n * even, n_short, open, shorter, each < MANY_PAGES };
}

/* The piece of block `index` of pairs that are cut alike, so that each piece lies in one pair. */
template <bool GENERAL>
KVANT_INLINE Piece<GENERAL> part_of(const Parts &cut, int index, int pairs, int heads, int pages)
{
    const int a_rank = cut.newest_first ? pairs : cut.parts, rank = quotient(index, a_rank),
              in_rank = index - rank * a_rank, pair = cut.newest_first ? in_rank : rank,
              part = cut.newest_first ? cut.parts - 1 - rank : in_rank, b = quotient(pair, heads);
    Piece<GENERAL> piece{
        0, cut.parts, index, 0, 0, false, { b, b * heads * pages, pages, heads }
    };
    if (part >= 0 && pair < pairs) {
        piece.index = pair * cut.parts + part;
        piece.begin = pair * pages + cut.begin(part);
        piece.end = pair * pages + cut.begin(part + 1);
    }
    return piece;
}

/* Called by a whole warp; min_pages: one for each warp. A block that ends one pair and begins
 * another one takes twice as long as a block in the middle of one. So pairs are cut alike where
 * that makes pieces hardly longer than an even share. */
template <bool GENERAL, int COLUMNS>
KVANT_INLINE Piece<GENERAL> find_piece(const Lengths<GENERAL, COLUMNS> &lengths, int index,
                                       int count, int min_pages, int lane)
{
    const int batch = lengths.p.batch, times = GENERAL ? 1 : lengths.heads(0);
    /* a sequence's part of the line, divided by `times` */
    auto part = [&](int b) {
        return GENERAL ? lengths.pages(b) * lengths.heads(b) : lengths.pages(b);
    };
    Piece<GENERAL> piece;
    int total = 0, n = 0, longest = 0, pages = 0, least = INT_MAX;
    piece.any_empty = false;
#pragma unroll 1
    for (int base = 0; base < batch; base += 32) {
        n = part(base + lane);
        piece.any_empty |= __any_sync(FULL, base + lane < batch && n == 0);
        total += __reduce_add_sync(FULL, n);
        longest = max(longest, __reduce_max_sync(FULL, n));
        if (GENERAL) {
            const int own = lengths.pages(base + lane);
            pages = max(pages, __reduce_max_sync(FULL, own));
            least = min(least, __reduce_min_sync(FULL, base + lane < batch ? own : INT_MAX));
        }
    }
    const bool equal = total == longest * batch && longest > 0;
    total *= times;
    piece.size = (int)((unsigned)(total + count - 1) / (unsigned)count);
    if (!GENERAL)
        pages = least = longest;
    if (equal && pages == least) {
        const int heads = lengths.heads(0), pairs = batch * heads;
        const Parts cut = parts_of(pairs, pages, count, lengths.p.n_late);
        if (cut.parts > 0 && 10 * cut.longest() <= 11 * piece.size + 10 * min_pages)
            return part_of<GENERAL>(cut, index, pairs, heads, pages);
    }
    piece.size = equal ? align_piece(piece.size, pages) : max(piece.size, min_pages);
    piece.parts = 0, piece.index = index;
    piece.begin = min(index * piece.size, total);
    piece.end = min(piece.begin + piece.size, total);
    piece.cursor = Cursor<GENERAL>{ 0, 0, 0, 0 };
    int before = 0;
#pragma unroll 1
    for (int base = 0; piece.begin < piece.end; base += 32) {
        if (batch > 32)
            n = part(base + lane);
        int scan = n;
#pragma unroll 1
        for (int k = 1; k < 32; k *= 2) {
            int left = __shfl_up_sync(FULL, scan, k);
            scan += lane >= k ? left : 0;
        }
        uint32_t beyond = __ballot_sync(FULL, times * (before + scan) > piece.begin);
        if (beyond) {
            int at = __ffs(beyond) - 1;
            const int own = __shfl_sync(FULL, n, at);
            piece.cursor.b = base + at;
            piece.cursor.pages = GENERAL ? lengths.pages(base + at) : own;
            piece.cursor.own_heads = GENERAL ? lengths.heads(base + at) : 0;
            piece.cursor.first = times * (before + __shfl_sync(FULL, scan, at) - own);
            break;
        }
        before += __shfl_sync(FULL, scan, 31);
    }
    return piece;
}

} // namespace kvant
