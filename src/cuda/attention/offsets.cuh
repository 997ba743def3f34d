/* offsets.cuh - what a page's own centre adds to the page's scores: <query, centre>, a number for
 * each page and column (cuda.h, kvant_cuda_page_offsets).
 *
 * Kernels that are not general compute these numbers themselves. A thread block computes the
 * numbers of all pages of a stretch before it works on any page. Each warp takes four pages at a
 * time. The numbers go to memory, where general kernels find the numbers of an earlier launch. */
#pragma once

#include "query.cuh"

namespace kvant
{

/* The number of a query that multiplies a page's cosine, and the one that multiplies its sine.
 * A centre is the same pair of numbers (a, b) in all blocks, rotated by each block's phase. */
struct OffsetPair {
    float cosine, sine;

    KVANT_INLINE void find(float near, float far, float a, float b)
    {
        cosine = near * a + far * b;
        sine = far * a - near * b;
    }
};

/* A step of a sum over lanes of N numbers: a lane keeps half of the numbers, and adds what the
 * lane at this distance has of them. */
template <int N> KVANT_INLINE void halve(float (&x)[N], int distance, int lane)
{
    const bool upper = lane & distance;
    unrolled_for (int i = 0; i < N / 2; i++) {
        const float kept = upper ? x[i + N / 2] : x[i], given = upper ? x[i] : x[i + N / 2];
        x[i] = kept + __shfl_xor_sync(FULL, given, distance);
    }
}

/* Sums over all lanes of 16 numbers: lane l gets the sum of number l / 2. */
KVANT_INLINE float sum_of_16(float (&x)[16], int lane)
{
    halve<16>(x, 16, lane);
    halve<8>(reinterpret_cast<float(&)[8]>(x), 8, lane);
    halve<4>(reinterpret_cast<float(&)[4]>(x), 4, lane);
    halve<2>(reinterpret_cast<float(&)[2]>(x), 2, lane);
    return x[0] + __shfl_xor_sync(FULL, x[0], 1);
}

/* Computes the offsets of pages `page`, page + step, ... below end, numbered in their sequence, for
 * all columns of a pair. Called by a whole warp. The numbers are there for the whole thread block
 * after its next barrier. */
template <int D>
KVANT_INLINE void put_offsets(const AttentionArgs &p, const Pair &pair, int page, int step, int end,
                              int lane)
{
    constexpr int N = (D / 2 + 31) / 32, PAGES = 4, COLUMNS = 4;
    const float *q = p.plain_q + pair.b * p.plain_batch_stride +
                     (pair.kv_head * p.heads_a_kv + pair.first_column) * p.plain_head_stride;
    ushort2 channels[N];
    unrolled_for (int i = 0; i < N; i++)
        channels[i] = __ldg(reinterpret_cast<const ushort2 *>(p.block_centers.pairs) +
                            min(lane + 32 * i, D / 2 - 1));
#pragma unroll 1
    for (; page < end; page += PAGES * step) {
        float cosine[PAGES][N], sine[PAGES][N];
        const int own = min(page + lane % PAGES * step, end - 1);
        const uint32_t number =
            p.block_centers.transform_ids
                ? __ldg(p.block_centers.transform_ids + pair.b * p.table_stride + own)
                : 0;
        unrolled_for (int k = 0; k < PAGES; k++) {
            const float *phase =
                p.block_centers.phases +
                (pair.b * p.table_stride + min(page + k * step, end - 1)) * (size_t)D;
            unrolled_for (int i = 0; i < N; i++) {
                const int at = lane + 32 * i;
                const bool there = D / 2 % 32 == 0 || at < D / 2;
                cosine[k][i] = there ? load_here(phase + at) : 0;
                sine[k][i] = there ? load_here(phase + D / 2 + at) : 0;
            }
        }
#pragma unroll 1
        for (int first = 0; first < pair.n_columns; first += COLUMNS) {
            float near[COLUMNS][N], far[COLUMNS][N], sums[PAGES * COLUMNS];
            unrolled_for (int c = 0; c < COLUMNS; c++)
                unrolled_for (int i = 0; i < N; i++) {
                    const float *row = q + min(first + c, pair.n_columns - 1) * p.plain_head_stride;
                    near[c][i] = load_here(row + channels[i].x);
                    far[c][i] = load_here(row + channels[i].y);
                }
                /* Most often all pages have a centre of the same number. */
#pragma unroll 1
            for (uint32_t left = (1u << PAGES) - 1; left;) {
                const uint32_t one = __shfl_sync(FULL, number, __ffs(left) - 1),
                               same = __ballot_sync(FULL, lane < PAGES && number == one);
                const float *start =
                    p.block_centers.start + ((size_t)one * p.kv_heads + pair.kv_head) * D;
                OffsetPair pairs[COLUMNS][N];
                unrolled_for (int i = 0; i < N; i++) {
                    const float a = __ldg(start + channels[i].x), b = __ldg(start + channels[i].y);
                    unrolled_for (int c = 0; c < COLUMNS; c++)
                        pairs[c][i].find(near[c][i], far[c][i], a, b);
                }
                unrolled_for (int k = 0; k < PAGES; k++)
                    unrolled_for (int c = 0; c < COLUMNS; c++) {
                        float sum = 0;
                        unrolled_for (int i = 0; i < N; i++) {
                            sum = fmaf(cosine[k][i], pairs[c][i].cosine, sum);
                            sum = fmaf(sine[k][i], pairs[c][i].sine, sum);
                        }
                        float &to = sums[k * COLUMNS + c];
                        to = same >> k & 1 ? sum : to;
                    }
                left &= ~same;
            }
            const float sum = sum_of_16(sums, lane);
            const int at = page + lane / 2 / COLUMNS * step, column = first + lane / 2 % COLUMNS;
            if (lane % 2 == 0 && at < end && column < pair.n_columns)
                p.own_offsets[offsets_at(p, pair, at) + column] = sum;
        }
    }
}

/* The offsets of a page for a lane's columns of tile t. */
struct PageOffsets {
    float x[2];

    /* Called before the page's scores are computed, which takes longer than the way to memory. */
    KVANT_INLINE void ask(const AttentionArgs &p, const Pair &pair, int page, int t, int lane)
    {
        const float *from = p.page_offsets ? offsets_of(p, pair, page) : nullptr;
        unrolled_for (int h = 0; h < 2; h++)
            x[h] = from ? page_offset(pair, from, 8 * t + 2 * (lane & 3) + h) : 0;
    }
    template <int N> KVANT_INLINE void add(const AttentionArgs &p, float (&s)[N][4]) const
    {
        unrolled_for (int i = 0; i < N; i++)
            unrolled_for (int k = 0; k < 4; k++)
                s[i][k] = fmaf(x[k % 2], p.scale_log2, s[i][k]);
    }
};

} // namespace kvant
