/* schedule.cuh - which pages a block of threads works on.
 *
 * All pages of all (sequence, kv head) pairs stand in one line, sequence by sequence, head by head; every
 * block takes a piece of equal length. So ragged batches balance by themselves, a pair may be shared by
 * several blocks (split-K) and a block may serve several pairs. Lengths are read on the device: the launch
 * depends on none of them, which is what CUDA graphs need. */
#ifndef KVANT_CUDA_SCHEDULE_CUH
#define KVANT_CUDA_SCHEDULE_CUH

#include "attention.h"
#include "../layout.cuh"
#include "../rotate.cuh"

namespace kvant
{

/* a / b of numbers that are not negative, b not 0, the quotient below 2^20: an estimate, at most one off, put right. A third
 * of the instructions of a division, at a time when every one of them comes from memory. */
__device__ __forceinline__ int quotient(int a, int b)
{
    const int q = __float2int_rz(__fdividef((float)a, (float)b)), rest = a - q * b;
    return rest < 0 ? q - 1 : rest >= b ? q + 1 : q;
}

struct Lengths {
    const int32_t *tokens;
    int batch, heads, max_tokens; /* heads: kv heads, once for every group of 8 query heads that share one */

    __device__ __forceinline__ int length(int b) const
    {
        return min(max(__ldg(tokens + b), 0), max_tokens);
    }
    __device__ __forceinline__ int pages(int b) const
    {
        return b < batch ? (unsigned)(length(b) + PAGE_TOKENS - 1) / PAGE_TOKENS : 0;
    }
};

/* A place in the line: sequence b begins at `first` and has `pages` pages a head. */
struct Cursor {
    int b, first, pages;

    /* Moves on to the sequence that holds page i of the line; i is below the line's end. */
    __device__ __forceinline__ void seek(const Lengths &lengths, int i)
    {
        while (i >= first + lengths.heads * pages) {
            first += lengths.heads * pages;
            pages = lengths.pages(++b);
        }
    }
    __device__ __forceinline__ int head(int i) const
    {
        return quotient(i - first, pages);
    }
};

/* A sequence and a group of up to 8 query heads that share a kv head. */
struct Pair {
    int b, kv_head, first_head, n_heads;
};

__device__ __forceinline__ Pair find_pair(const AttentionArgs &p, int b, int head)
{
    int kv_head = p.groups == 1 ? head : quotient(head, p.groups), group = head - kv_head * p.groups,
        skipped = group * p.heads_a_group;
    return Pair{ b, kv_head, kv_head * p.heads_a_kv + skipped, min(p.heads_a_group, p.heads_a_kv - skipped) };
}

/* The piece [begin, end) of the line that block `index` of `count` takes, and where the line's sequence
 * lies. */
struct Piece {
    int size, begin, end;
    bool any_empty; /* some sequence has no tokens */
    Cursor cursor;
};

/* The length of a piece, at least `size`, of a line whose pairs all have `pages` pages: one that lets no
 * piece reach over the end of a pair, if such a one is at most a tenth longer. A block that ends one pair
 * and begins another one stops in between, and all others wait for it in the end. */
__device__ __forceinline__ int align_piece(int size, int pages)
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

/* Called by a whole warp. A piece is at least min_pages long, so that little work is not spread thin. */
__device__ __forceinline__ Piece find_piece(const Lengths &lengths, int index, int count, int min_pages, int lane)
{
    Piece piece;
    int total = 0, n = 0, longest = 0;
    piece.any_empty = false;
#pragma unroll 1
    for (int base = 0; base < lengths.batch; base += 32) {
        n = lengths.pages(base + lane);
        piece.any_empty |= __any_sync(FULL, base + lane < lengths.batch && n == 0);
        total += __reduce_add_sync(FULL, n);
        longest = max(longest, __reduce_max_sync(FULL, n));
    }
    const bool equal = total == longest * lengths.batch;
    total *= lengths.heads;
    piece.size = max((int)((unsigned)(total + count - 1) / (unsigned)count), min_pages);
    if (equal && longest > 0)
        piece.size = align_piece(piece.size, longest);
    piece.begin = min(index * piece.size, total);
    piece.end = min(piece.begin + piece.size, total);
    piece.cursor = Cursor{ 0, 0, 0 };
    int before = 0;
#pragma unroll 1
    for (int base = 0; piece.begin < piece.end; base += 32) {
        if (lengths.batch > 32)
            n = lengths.pages(base + lane);
        int scan = n;
#pragma unroll 1
        for (int k = 1; k < 32; k *= 2) {
            int left = __shfl_up_sync(FULL, scan, k);
            scan += lane >= k ? left : 0;
        }
        uint32_t beyond = __ballot_sync(FULL, lengths.heads * (before + scan) > piece.begin);
        if (beyond) {
            int at = __ffs(beyond) - 1;
            piece.cursor.b = base + at;
            piece.cursor.pages = __shfl_sync(FULL, n, at);
            piece.cursor.first = lengths.heads * (before + __shfl_sync(FULL, scan, at) - piece.cursor.pages);
            break;
        }
        before += __shfl_sync(FULL, scan, 31);
    }
    return piece;
}

} // namespace kvant

#endif
