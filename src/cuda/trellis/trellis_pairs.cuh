/* trellis_pairs.cuh - levels of two trellis codes at a time by one look-up in shared memory, as a
 * register of halves. For codes of 2 and 3 bits (4 bits: trellis_bytes.cuh).
 *
 * The level numbers of the two codes, 4 or 5 bits each, are the address. A product of bytes (dp4a)
 * computes it on the multiplier. With 32 copies of the table side by side no two lanes read the
 * same bank: 32 KB for codes of 2 bits. Codes of 3 bits have 8 copies. */
#pragma once

#include "../attention/attention.h"
#include "trellis.cuh"

namespace kvant
{

/* Copies of the table; fewer where there is less shared memory. */
template <class C, bool LARGE> __host__ __device__ constexpr int level_copies()
{
    if constexpr (HAS_TRELLIS<C>)
        return C::BITS == 4 ? 16 : C::BITS == 2 && LARGE ? 32 : 8;
    else
        return 0;
}

constexpr int TRELLIS_COPIES = 8; /* for kernels that unpack pages (tiles/) */

/* Bytes of the table: 256 entries of 8 bytes, or pairs of halves. */
template <class C> __host__ __device__ constexpr int level_bytes(int copies)
{
    if constexpr (HAS_TRELLIS<C>)
        return C::BITS == 4 ? 2048 * copies : (4 << (2 * C::BITS + 4)) * copies;
    else
        return 0;
}

/* A half for the number of a level: 2^-24 times the level, or times 128 + level. */
template <class C>
KVANT_INLINE uint32_t half_of_level(const uint32_t (&magnitudes)[KVANT_CUDA_TABLE_WORDS],
                                    uint32_t m)
{
    constexpr uint32_t HALF = 2u << C::BITS;
    const bool minus = m < HALF;
    const uint32_t k = minus ? HALF - 1 - m : m - HALF, low = k % 16;
    uint32_t r = magnitudes[low / 4] >> 8 * (low % 4) & 255;
    if (C::BITS == 4 && k >= 16)
        r += magnitudes[4 + low / 4] >> 8 * (low % 4) & 255;
    return C::BIASED ? minus ? 128 - r : 128 + r : r | (minus ? 0x8000u : 0);
}

/* The level numbers of the codes of entry i, in the order of addresses. With 2 bits: z0 z1 z2 i0.
 * With 3 bits, i1 of both codes comes before these. */
template <int B> KVANT_INLINE uint2 numbers_of_entry(uint32_t i)
{
    if (B == 3)
        return make_uint2(i / 4 % 16 + i % 2 * 16, i / 64 + i / 2 % 2 * 16);
    return make_uint2(i % 16, i / 16);
}

/* Fills the table. One thread writes all copies of an entry, and neighbouring threads begin with
 * different copies, so that together they write to all banks. */
template <class C, int COPIES>
KVANT_INLINE void fill_pairs(uint8_t *table, const uint32_t (&magnitudes)[KVANT_CUDA_TABLE_WORDS])
{
    constexpr uint32_t FOURS = COPIES / 4;
    rolled_for (uint32_t i = threadIdx.x; i < 16u << 2 * C::BITS; i += blockDim.x) {
        const uint2 m = numbers_of_entry<C::BITS>(i);
        const uint32_t x = half_of_level<C>(magnitudes, m.x) | half_of_level<C>(magnitudes, m.y)
                                                                   << 16;
        unrolled_for (uint32_t k = 0; k < FOURS; k++)
            reinterpret_cast<uint4 *>(table)[i * FOURS + (k + threadIdx.x * FOURS / 8) % FOURS] =
                make_uint4(x, x, x, x);
    }
}

/* The data of a lane for look-ups of levels in a table in shared memory. */
template <int COPIES_> struct LevelTable {
    static constexpr int COPIES = COPIES_;
    uint32_t own; /* address of the lane's copy */
    uint32_t shift1, shift2, shift4;
    uint32_t unit_of_half; /* for upper_half() */
    uint32_t second;       /* selects bytes of the second register for every other pair of codes */
};

template <class C, int COPIES>
KVANT_INLINE LevelTable<COPIES> level_table(const uint8_t *table, uint32_t one, int lane)
{
    return LevelTable<COPIES>{ shared_address(table) + (C::BITS == 4 ? 8u : 4u) * (lane % COPIES),
                               one << 31,
                               one << 30,
                               one << 28,
                               one << 8,
                               one * 0x44004400u };
}

/* The table's entry for the codes of byte I of a word of level numbers. The argument `more` counts
 * with 3-bit codes: it has the highest bits of both numbers in bits 5 and 6 of the byte. */
template <int B, int I, class T>
KVANT_INLINE uint32_t pair_at(uint32_t numbers, uint32_t more, const T &table)
{
    constexpr int COPIES = T::COPIES;
    static_assert(B == 2 || COPIES == 8, "a number's highest bits are eight words apart");
    const uint32_t at = __dp4a(numbers, (B == 2 ? 4u : 16u) * COPIES << 8 * I, table.own);
    return look_up_word(B == 2 ? at : __dp4a(more, 1u << 8 * I, at));
}

/* Computes operands of 32 codes with 2 or 3 bits per code. The words a and b are of the plane of 2
 * bits. Each word has two column tiles. The words third_a and third_b hold the third bits: the
 * lower byte of each half belongs to these codes or, with `upper`, the upper byte. Calls use(a or
 * b, column tile, halves). */
template <int B, class At, class T, class F>
KVANT_INLINE void pair_operands(uint32_t a, uint32_t b, uint32_t third_a, uint32_t third_b,
                                bool upper, const At &at, const T &table, F &&use)
{
    uint32_t plane[4], number[4], more[4] = {};
    subsets_of(at, plane);
    plane[3] = odd_bits(a, b, table);
    nibbles_of(plane, table, number); /* rows r of a and of b, then rows r + 8 of a and of b */
    if (B == 3) {
        const uint32_t top = interleave(prmt(third_a, third_b, upper ? 0x7351 : 0x6240), table);
        unrolled_for (int j = 0; j < 4; j++)
            more[j] = bit_select<0x20202020u>(top << (5 - j), j < 3 ? top << (2 - j)
                                                                    : shift_by(top, table.shift1)) &
                      0x60606060u;
    }
    unrolled_for (int i = 0; i < 2; i++) {
        const uint32_t first[4] = { pair_at<B, 0>(number[i], more[i], table),
                                    pair_at<B, 0>(number[i + 2], more[i + 2], table),
                                    pair_at<B, 2>(number[i], more[i], table),
                                    pair_at<B, 2>(number[i + 2], more[i + 2], table) };
        use(i, 0, first);
        const uint32_t second[4] = { pair_at<B, 1>(number[i], more[i], table),
                                     pair_at<B, 1>(number[i + 2], more[i + 2], table),
                                     pair_at<B, 3>(number[i], more[i], table),
                                     pair_at<B, 3>(number[i + 2], more[i + 2], table) };
        use(i, 1, second);
    }
}

/* Calls use(row tile, column tile, halves) for a key page. */
template <class C, int D, class T, class F>
KVANT_INLINE void for_each_trellis_key(const uint8_t *page, int lane, const T &table, F &&use)
{
    constexpr int N = D / 32;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
    KeyChain<N> chain[2];
    uint32_t w[N][4], third[4] = {};
    unrolled_for (int u = 0; u < N; u++) {
        load_words<4>(words + (32 * u + lane) * 4, w[u]);
        chain[0][TRELLIS_MEMORY + u] = even_bits(w[u][0], w[u][1]);
        chain[1][TRELLIS_MEMORY + u] = even_bits(w[u][2], w[u][3]);
    }
    close_circle<C::BITS, N>(chain[0], lane);
    close_circle<C::BITS, N>(chain[1], lane);
    unrolled_for (int u = 0; u < N; u++) {
        if (C::BITS == 3 && u % 2 == 0)
            load_words<4>(words + 128 * N + (32 * (u / 2) + lane) * 4, third);
        unrolled_for (int h = 0; h < 2; h++)
            pair_operands<C::BITS>(
                w[u][2 * h], w[u][2 * h + 1], third[2 * h], third[2 * h + 1], u % 2 == 1,
                [&](int j) { return chain[h][TRELLIS_MEMORY + u - j]; }, table,
                [&](int i, int t, const uint32_t(&a)[4]) { use(2 * h + i, 2 * u + t, a); });
    }
}

/* Calls use(row tile, column tile, halves) for a value page. */
template <class C, int D, class T, class F>
KVANT_INLINE void for_each_trellis_value2(const uint32_t *page, int lane, const T &table, F &&use)
{
    constexpr int N = (D + 63) / 64;
    uint32_t third[N][4] = {};
    if constexpr (C::BITS == 3)
        load_column<D, 1>(page + 64 * (D / 16), lane, third);
    unrolled_for (int unit = 0; unit < 2; unit++) {
        uint32_t w[N][4];
        Runs<N> runs[2];
        load_column<D, 2>(page, 32 * unit + lane, w);
        unrolled_for (int g = 0; g < N; g++) {
            runs[0].at[g + 1] = even_bits(w[g][0], w[g][1]);
            runs[1].at[g + 1] = even_bits(w[g][2], w[g][3]);
        }
        close_runs<D>(runs);
        unrolled_for (int i = 0; i < 2 * N; i++) {
            const int g = i / 2, h = i % 2;
            if (4 * g + 2 * h >= D / 16)
                continue;
            const TermsBefore terms(runs[h].at[g + 1], runs[h].at[g], lane);
            pair_operands<C::BITS>(
                w[g][2 * h], w[g][2 * h + 1], third[g][2 * h], third[g][2 * h + 1], unit == 1,
                [&](int j) { return terms.at[j]; }, table,
                [&](int k, int t, const uint32_t(&a)[4]) {
                    use(4 * g + 2 * h + k, 2 * unit + t, a);
                });
        }
    }
}

} // namespace kvant
