/* trellis.cuh - trellis codes (format.md) in attention: their kinds, and the subsets of a page's
 * codes.
 *
 * A code's subset follows from the trellis bits of preceding codes. These bits lie at the same
 * place of other words: preceding words for keys, words of neighbouring lanes for values. So the
 * trellis bits of 32 codes are packed into one word, a plane, and a few exclusive ors give the
 * subsets of all 32 codes. For keys, one shuffle per plane closes the circle; for values, one
 * shuffle fetches each term. Transposing bits makes nibbles of planes: four words with 8 codes
 * each. The next steps are in trellis_bytes.cuh and trellis_pairs.cuh. */
#pragma once

#include "../attention/dequant.cuh"
#include "../rotate.cuh"
#include "trellis_steps.cuh"

#include <type_traits>

namespace kvant
{

struct TrellisCodes {
    static constexpr kvant_cuda_grouping GROUP = KVANT_CUDA_GROUP_TOKEN;
    static constexpr float ROW8 = 1;
    static constexpr Order ORDER = Order::COLUMNS_AND_8;
};

/* BIASED: numbers are bytes 128 + level; otherwise they are levels, as halves. */
template <int B> struct Trellis : TrellisCodes {
    static constexpr kvant_cuda_kind KIND = B == 2   ? KVANT_CUDA_TRELLIS2
                                            : B == 3 ? KVANT_CUDA_TRELLIS3
                                                     : KVANT_CUDA_TRELLIS4;
    static constexpr int BITS = B;
    static constexpr bool BIASED = B == 4;
};
using Trellis2 = Trellis<2>;
using Trellis3 = Trellis<3>;
using Trellis4 = Trellis<4>;

template <class C> constexpr bool HAS_TRELLIS = std::is_base_of<TrellisCodes, C>::value;

/* These put bits of two words side by side. even_bits takes the bits at even positions of x, and
 * puts the bits of y one position higher. The function odd_bits does so for the bits at odd
 * positions. */
KVANT_INLINE uint32_t even_bits(uint32_t x, uint32_t y)
{
    return bit_select<0x55555555u>(x, y << 1);
}

template <class T> KVANT_INLINE uint32_t odd_bits(uint32_t x, uint32_t y, const T &table)
{
    return bit_select<0x55555555u>(shift_by(x, table.shift1), y);
}

/* Collects bit 0 of the nibbles of four words, as the four bits of nibbles. */
KVANT_INLINE uint32_t low_plane(const uint32_t (&w)[4])
{
    return bit_select<0x33333333u>(even_bits(w[0], w[1]), even_bits(w[2], w[3]) << 2);
}

/* Planes to nibbles: bit i of nibble n of word j is bit j of nibble n of plane i. */
template <class T>
KVANT_INLINE void nibbles_of(const uint32_t (&plane)[4], const T &table, uint32_t (&w)[4])
{
    const uint32_t a = even_bits(plane[0], plane[1]), b = even_bits(plane[2], plane[3]);
    const uint32_t c = odd_bits(plane[0], plane[1], table), d = odd_bits(plane[2], plane[3], table);
    w[0] = bit_select<0x33333333u>(a, b << 2);
    w[1] = bit_select<0x33333333u>(c, d << 2);
    w[2] = bit_select<0x33333333u>(shift_by(a, table.shift2), b);
    w[3] = bit_select<0x33333333u>(shift_by(c, table.shift2), d);
}

__host__ __device__ constexpr bool any_tap(int before)
{
    return ((trellis_tap(0) | trellis_tap(1) | trellis_tap(2)) >> before & 1) != 0;
}

/* Computes the three bits of subsets. at(j): the plane of j steps earlier. */
template <class At> KVANT_INLINE void subsets_of(const At &at, uint32_t (&z)[4])
{
    unrolled_for (int p = 0; p < 3; p++) {
        z[p] = 0;
        unrolled_for (int j = 0; j <= TRELLIS_MEMORY; j++)
            if (trellis_tap(p) >> j & 1)
                z[p] ^= at(j);
    }
}

/* Interleaves the bits of two bytes in each half of a word; bits of the lower byte go to even
 * positions. */
template <class T> KVANT_INLINE uint32_t interleave(uint32_t x, const T &table)
{
    uint32_t t = (x ^ shift_by(x, table.shift4)) & 0x00f000f0u;
    x = x ^ t ^ t << 4;
    t = (x ^ shift_by(x, table.shift2)) & 0x0c0c0c0cu;
    x = x ^ t ^ t << 2;
    t = (x ^ shift_by(x, table.shift1)) & 0x22222222u;
    return x ^ t ^ t << 1;
}

/* The plane one unit before the first plane of keys, made from the last plane. Fields move up by
 * one. The last field moves to the first field of the next lane. */
template <int B> KVANT_INLINE uint32_t key_fields_before(uint32_t plane, int lane)
{
    const uint32_t other = __shfl_sync(FULL, plane, (lane & 28) | ((lane + 3) & 3));
    return B == 4 ? prmt(plane, other, 0x2107) : __funnelshift_l(other, plane, 4);
}

/* The planes of N units of keys. Planes of units before them, which taps reach, come first. */
template <int N> using KeyChain = uint32_t[TRELLIS_MEMORY + N];

template <int B, int N> KVANT_INLINE void close_circle(KeyChain<N> &chain, int lane)
{
    unrolled_for (int i = TRELLIS_MEMORY - 1; i >= 0; i--)
        chain[i] = key_fields_before<B>(chain[i + N], lane);
}

/* Values: the lanes of one column hold a run of 8 steps. The plane of the run of row group g is
 * at [g + 1]. The plane of the run before the first run (format.md: loops l, h, g, r) precedes
 * it. */
template <int N> struct Runs {
    static_assert(TRELLIS_MEMORY < 8, "a run and the one before it");
    uint32_t at[N + 1];
};

/* The plane of `before` steps earlier. own: the plane of a run; prior: of the run before it. */
KVANT_INLINE uint32_t steps_before(uint32_t own, uint32_t prior, int before, int lane)
{
    return before == 0
               ? own
               : __shfl_sync(FULL, lane >= 32 - 4 * before ? prior : own, (lane - 4 * before) & 31);
}

struct TermsBefore {
    uint32_t at[TRELLIS_MEMORY + 1];

    KVANT_INLINE TermsBefore(uint32_t own, uint32_t prior, int lane)
    {
        unrolled_for (int j = 0; j <= TRELLIS_MEMORY; j++)
            if (any_tap(j))
                at[j] = steps_before(own, prior, j, lane);
    }
};

/* The run before the first run. Bit 4h + l of a byte becomes the bit of the preceding run. Step h =
 * 1 takes it from step 0 of the same l. Step h = 0 takes it from step 1 of the preceding l. */
KVANT_INLINE uint32_t value_fields_before(uint32_t x)
{
    return (x << 4 & 0xf0f0f0f0u) | (x >> 3 & 0x0e0e0e0eu) | (x >> 7 & 0x01010101u);
}

/* The same for bits 2 h + l mod 2 of nibbles; x has l below 2, y has the remaining l, or the
 * reverse. */
KVANT_INLINE uint32_t value_fields_before(uint32_t x, uint32_t y)
{
    return (x << 2 & 0xccccccccu) | (x >> 1 & 0x22222222u) | (y >> 3 & 0x11111111u);
}

/* Computes the run before the first run. A last group of two tiles has no runs with l = 2 and 3.
 * The run before the first group then comes from the group before the last. */
template <int D, int N> KVANT_INLINE void close_runs(Runs<N> &runs)
{
    runs.at[0] = value_fields_before(
        D % 64 == 0 ? runs.at[N] : bit_select<0x33333333u>(runs.at[N], runs.at[N - 1]));
}

template <int D, int N> KVANT_INLINE void close_runs(Runs<N> (&runs)[2])
{
    const uint32_t last[2] = { runs[0].at[N], runs[1].at[D % 64 == 0 ? N : N - 1] };
    runs[0].at[0] = value_fields_before(last[0], last[1]);
    runs[1].at[0] = value_fields_before(last[1], last[0]);
}

template <int TILES>
KVANT_INLINE void load_row_tiles(const uint32_t *group, int at, uint32_t (&w)[4])
{
    if constexpr (TILES == 4)
        load_words<4>(group + 4 * at, w);
    else {
        uint32_t x[2];
        load_words<2>(group + 2 * at, x);
        w[0] = x[0], w[1] = x[1], w[2] = w[3] = 0;
    }
}

/* Loads the words of one column unit for all row groups. at: index of unit and lane within a group
 * of 4 tiles. */
template <int D, int UNITS>
KVANT_INLINE void load_column(const uint32_t *plane, int at, uint32_t (&w)[(D + 63) / 64][4])
{
    unrolled_for (int g = 0; g < D / 64; g++)
        load_row_tiles<4>(plane + 128 * g * UNITS, at, w[g]);
    if constexpr (D % 64 != 0)
        load_row_tiles<2>(plane + 128 * (D / 64) * UNITS, at, w[D / 64]);
}

} // namespace kvant
