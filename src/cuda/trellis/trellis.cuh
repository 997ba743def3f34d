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

#include <type_traits>

namespace kvant
{

/* The taps of trellises with 2^memory states: bit j of parity p selects the trellis bit of j steps
 * earlier. */
__host__ __device__ constexpr uint32_t trellis_tap(int memory, int p)
{
    constexpr uint32_t taps[3][3] = { { 030, 0441, 0202 },
                                      { 0160, 02101, 0442 },
                                      { 01210, 010201, 03002 } };
    return taps[(memory - 8) / 2][p];
}

struct TrellisCodes {
    static constexpr kvant_cuda_grouping GROUP = KVANT_CUDA_GROUP_TOKEN;
    static constexpr float ROW8 = 1;
    static constexpr Order ORDER = Order::COLUMNS_AND_8;
};

/* BIASED: numbers are bytes 128 + level; otherwise they are levels, as halves. */
template <int B, int M> struct Trellis : TrellisCodes {
    static constexpr kvant_cuda_kind KIND = B == 2   ? KVANT_CUDA_TRELLIS2
                                            : B == 3 ? KVANT_CUDA_TRELLIS3
                                                     : KVANT_CUDA_TRELLIS4;
    static constexpr int BITS = B, MEMORY = M;
    static constexpr bool BIASED = B == 4;
};
using Trellis2 = Trellis<2, 8>;
using Trellis3 = Trellis<3, 8>;
using Trellis4 = Trellis<4, 8>;
using Trellis2S1024 = Trellis<2, 10>;
using Trellis3S1024 = Trellis<3, 10>;
using Trellis4S1024 = Trellis<4, 10>;
using Trellis2S4096 = Trellis<2, 12>;
using Trellis3S4096 = Trellis<3, 12>;
using Trellis4S4096 = Trellis<4, 12>;

template <class C> constexpr bool HAS_TRELLIS = std::is_base_of<TrellisCodes, C>::value;

/* Bits of a state, 0 without a trellis. */
template <class C> constexpr uint32_t memory_of()
{
    if constexpr (HAS_TRELLIS<C>)
        return C::MEMORY;
    else
        return 0;
}

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

template <int M> __host__ __device__ constexpr bool any_tap(int before)
{
    return ((trellis_tap(M, 0) | trellis_tap(M, 1) | trellis_tap(M, 2)) >> before & 1) != 0;
}

/* Computes the three bits of subsets. at(j): the plane of j steps earlier. */
template <int M, class At> KVANT_INLINE void subsets_of(const At &at, uint32_t (&z)[4])
{
    unrolled_for (int p = 0; p < 3; p++) {
        z[p] = 0;
        unrolled_for (int j = 0; j <= M; j++)
            if (trellis_tap(M, p) >> j & 1)
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

template <int B, int M, int N> KVANT_INLINE void close_circle(uint32_t (&chain)[M + N], int lane)
{
    unrolled_for (int i = M - 1; i >= 0; i--)
        chain[i] = key_fields_before<B>(chain[i + N], lane);
}

/* Values: the lanes of one column hold a run of 8 steps. The plane of the run of row group g is
 * at [g + 2]. The planes of the two runs before the first run (format.md: loops l, h, g, r)
 * precede it. */
template <int N> struct Runs {
    uint32_t at[N + 2];
};

/* The plane of `before` steps before run g. */
template <int N>
KVANT_INLINE uint32_t steps_before(const Runs<N> &runs, int g, int before, int lane)
{
    const int run = g + 2 - before / 8, left = before % 8;
    if (left == 0)
        return runs.at[run];
    const uint32_t x = lane >= 32 - 4 * left ? runs.at[run - 1] : runs.at[run];
    return __shfl_sync(FULL, x, (lane - 4 * left) & 31);
}

template <int M> struct TermsBefore {
    uint32_t at[M + 1];
};

template <int M, int N>
KVANT_INLINE TermsBefore<M> terms_before(const Runs<N> &runs, int g, int lane)
{
    static_assert(M < 16, "a run and the two before it");
    TermsBefore<M> terms;
    unrolled_for (int j = 0; j <= M; j++)
        if (any_tap<M>(j))
            terms.at[j] = steps_before<N>(runs, g, j, lane);
    return terms;
}

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

/* Computes the runs before the first run. A last group of two tiles has no runs with l = 2 and 3.
 * The runs before the first group then come from the group before the last. */
template <int D, int N> KVANT_INLINE void close_runs(Runs<N> &runs)
{
    constexpr bool WHOLE = D % 64 == 0;
    runs.at[1] = value_fields_before(WHOLE ? runs.at[N + 1]
                                           : bit_select<0x33333333u>(runs.at[N + 1], runs.at[N]));
    runs.at[0] = value_fields_before(WHOLE ? runs.at[N]
                                           : bit_select<0x33333333u>(runs.at[N], runs.at[N - 1]));
}

template <int D, int N> KVANT_INLINE void close_runs(Runs<N> (&runs)[2])
{
    constexpr int LESS = D % 64 == 0 ? 0 : 1;
    const uint32_t last[2] = { runs[0].at[N + 1], runs[1].at[N + 1 - LESS] };
    runs[0].at[1] = value_fields_before(last[0], last[1]);
    runs[1].at[1] = value_fields_before(last[1], last[0]);
    const uint32_t before[2] = { runs[0].at[N], runs[1].at[N - LESS] };
    runs[0].at[0] = value_fields_before(before[0], before[1]);
    runs[1].at[0] = value_fields_before(before[1], before[0]);
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
