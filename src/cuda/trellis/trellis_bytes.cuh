/* trellis_bytes.cuh - levels of 4-bit trellis codes by look-ups in shared memory, as bytes: 128 +
 * level.
 *
 * The number of a level has six bits: three of the code, three of its subset. Four of these bits
 * from each of two codes are the address of eight bytes. The remaining two bits of each code select
 * one of four bytes, by prmt. So the table has 256 entries. With 16 copies side by side, which take
 * 32 KB, no two lanes of a half warp read the same bank. A product of bytes (dp4a) computes the
 * address on the multiplier.
 *
 * Logic instructions and prmt share the pipe that limits attention. So an address has the code's
 * three bits and the lowest bit of its subset: they are a nibble of the word in which the trellis
 * bit is replaced. The upper two bits of subsets select bytes. Each takes one instruction for eight
 * codes. */
#pragma once

#include "trellis_pairs.cuh"

namespace kvant
{

/* Entry i. The address has 4 bits of the lower code, and then the same bits of the upper code. They
 * are the lowest bit of the subset and bits 1 to 3 of the code. The bytes are in the order of the
 * upper two bits of the subset. */
KVANT_INLINE uint2 byte_entry(const uint32_t (&magnitudes)[KVANT_CUDA_TABLE_WORDS], uint32_t i)
{
    uint64_t x = 0;
#pragma unroll 2
    /* hardly unrolled, because a thread makes an entry only once: see UNROLLED_TURNS */
    for (int k = 0; k < 8; k++) {
        const uint32_t code = i >> k / 4 * 4 & 15, m = code % 2 + 2 * (k % 4) + code / 2 * 8;
        x |= (uint64_t)half_of_level<Trellis4>(magnitudes, m) << 8 * k;
    }
    return make_uint2((uint32_t)x, (uint32_t)(x >> 32));
}

/* Fills the table. One thread writes all copies of an entry, and neighbouring threads begin with
 * different copies. */
template <int COPIES>
KVANT_INLINE void fill_bytes(uint8_t *table, const uint32_t (&magnitudes)[KVANT_CUDA_TABLE_WORDS])
{
    rolled_for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) {
        const uint2 x = byte_entry(magnitudes, i);
        unrolled_for (uint32_t k = 0; k < COPIES / 2; k++)
            reinterpret_cast<uint4 *>(table)[i * (COPIES / 2) + (k + i) % (COPIES / 2)] =
                make_uint4(x.x, x.y, x.x, x.y);
    }
}

template <class C, int COPIES>
KVANT_INLINE void fill_levels(uint8_t *table, const uint32_t (&magnitudes)[KVANT_CUDA_TABLE_WORDS])
{
    if constexpr (C::BITS == 4)
        fill_bytes<COPIES>(table, magnitudes);
    else
        fill_pairs<C, COPIES>(table, magnitudes);
}

/* The levels of a word of eight codes. The first register has columns c and c + 8, the second has
 * columns c + 1 and c + 9. Rows r are in the even bytes, rows r + 8 in the odd bytes. The remaining
 * bytes are undefined. */
struct WordLevels {
    uint32_t rows0[2], rows8[2];
};

/* index: each nibble has a code whose trellis bit is replaced by the lowest bit of its subset.
 * upper: each nibble has the upper two bits of the subset in its low two bits. Its other bits are
 * ignored. */
template <class T>
KVANT_INLINE WordLevels word_levels(uint32_t index, uint32_t upper, const T &table)
{
    const uint32_t which = (upper & 0x33333333u) | table.second,
                   far = upper_half(which, table.unit_of_half);
    uint2 x[4];
    unrolled_for (int n = 0; n < 4; n++)
        x[n] = look_up_two_words(__dp4a(index, 8u * T::COPIES << 8 * n, table.own));
    return WordLevels{ { prmt(x[0].x, x[1].x, which), prmt(x[2].x, x[3].x, far) },
                       { prmt(x[0].y, x[1].y, which), prmt(x[2].y, x[3].y, far) } };
}

/* Computes the levels of 32 codes in four words, for use(word, levels). at(j): the plane of j steps
 * earlier. */
template <class At, class T, class F>
KVANT_INLINE void each_word(const uint32_t (&w)[4], const At &at, const T &table, F &&use)
{
    uint32_t plane[4];
    subsets_of(at, plane);
    const uint32_t even = even_bits(plane[1], plane[2]), odd = odd_bits(plane[1], plane[2], table);
    const uint32_t lowest[4] = { plane[0], shift_by(plane[0], table.shift1),
                                 shift_by(plane[0], table.shift2), plane[0] >> 3 };
    const uint32_t upper[4] = { even, odd, shift_by(even, table.shift2),
                                shift_by(odd, table.shift2) };
    unrolled_for (int j = 0; j < 4; j++)
        use(j, word_levels(bit_select<0x11111111u>(lowest[j], w[j]), upper[j], table));
}

/* Computes operands of 32 codes as halves, with columns c and c + 8 in a register, for use(word,
 * halves). */
template <class At, class T, class F>
KVANT_INLINE void pair_operands4(const uint32_t (&w)[4], const At &at, const T &table, F &&use)
{
    each_word(w, at, table, [&](int j, const WordLevels &x) {
        const uint32_t a[4] = { x.rows0[0] & 0x00ff00ffu, prmt(x.rows8[0], 0, 0x4341),
                                x.rows0[1] & 0x00ff00ffu, prmt(x.rows8[1], 0, 0x4341) };
        use(j, a);
    });
}

/* Calls use(row tile, halves) for a column tile of a value page. */
template <class C, int D, class T, class F>
KVANT_INLINE void trellis_value4_column(const uint32_t *page, int ct, int lane, const T &table,
                                        F &&use)
{
    constexpr int N = (D + 63) / 64;
    uint32_t w[N][4];
    Runs<N> runs;
    load_column<D, 4>(page, 32 * ct + lane, w);
    unrolled_for (int g = 0; g < N; g++)
        runs.at[g + 1] = low_plane(w[g]);
    close_runs<D>(runs);
    unrolled_for (int g = 0; g < N; g++) {
        const TermsBefore terms(runs.at[g + 1], runs.at[g], lane);
        pair_operands4(
            w[g], [&](int j) { return terms.at[j]; }, table,
            [&](int l, const uint32_t(&a)[4]) {
                if (4 * g + l < D / 16)
                    use(4 * g + l, a);
            });
    }
}

/* Turns of the loops over tiles of 4-bit codes that are unrolled in kernels for one matrix without
 * masks. Others have too few registers. With all four turns a layer over 8 x 32,768 tokens takes
 * 2 % less time, but one over 1,024 tokens 9 % more, because its instructions come from memory. */
template <bool PLAIN> constexpr int UNROLLED_TURNS = PLAIN ? 2 : 1;

/* Calls use(row tile, column tile, halves) for a value page, with codes of any number of bits. With
 * 4 bits, a loop runs over column tiles, and each is passed as tile 0; next() then makes the
 * weights of the following tile the weights of tile 0. */
template <class C, int D, bool PLAIN, class T, class F, class N>
KVANT_INLINE void for_each_trellis_value(const uint8_t *page, int lane, const T &table, F &&use,
                                         N &&next)
{
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
    if constexpr (C::BITS == 4) {
        [[maybe_unused]] constexpr int UNROLLED = UNROLLED_TURNS<PLAIN>;
#pragma unroll UNROLLED
        for (int ct = 0; ct < 4; ct++) {
            trellis_value4_column<C, D>(words, ct, lane, table,
                                        [&](int rt, const uint32_t(&a)[4]) { use(rt, 0, a); });
            next();
        }
    } else
        for_each_trellis_value2<C, D>(words, lane, table, use);
}

/* The planes of all column tiles of keys. */
template <int N> KVANT_INLINE void key_planes(const uint32_t *words, int lane, KeyChain<N> &chain)
{
    unrolled_for (int u = 0; u < N; u++) {
        uint32_t w[4];
        load_words<4>(words + (32 * u + lane) * 4, w);
        chain[TRELLIS_MEMORY + u] = low_plane(w);
    }
    close_circle<4, N>(chain, lane);
}

/* Calls use(row tile, column tile, halves) for a key page. Words are read twice, because there are
 * not enough registers to keep them. */
template <class C, int D, class T, class F>
KVANT_INLINE void for_each_trellis_key4(const uint8_t *page, int lane, const T &table, F &&use)
{
    constexpr int N = D / 16;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
    KeyChain<N> chain;
    uint32_t w[4];
    key_planes<N>(words, lane, chain);
    unrolled_for (int u = 0; u < N; u++) {
        load_words<4>(words + (32 * u + lane) * 4, w);
        pair_operands4(
            w, [&](int j) { return chain[TRELLIS_MEMORY + u - j]; }, table,
            [&](int rt, const uint32_t(&a)[4]) { use(rt, u, a); });
    }
}

/* Calls use(row tile, pair of column tiles, bytes) for a key page. A loop runs over pairs, as over
 * column tiles of values. Planes move up by a pair, and next() is called. */
template <class C, int D, bool PLAIN, class T, class F, class Next>
KVANT_INLINE void for_each_trellis_byte(const uint8_t *page, int lane, const T &table, F &&use,
                                        Next &&next)
{
    constexpr int N = D / 16;
    [[maybe_unused]] constexpr int UNROLLED = UNROLLED_TURNS<PLAIN>;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page) + 4 * lane;
    KeyChain<N> chain;
    uint32_t w[4], a[4][4];
    key_planes<N>(reinterpret_cast<const uint32_t *>(page), lane, chain);
#pragma unroll UNROLLED
    for (int pair = 0; pair < N / 2; pair++, words += 256) {
        unrolled_for (int u = 0; u < 2; u++) {
            load_words<4>(words + 128 * u, w);
            each_word(
                w, [&](int j) { return chain[TRELLIS_MEMORY + u - j]; }, table,
                [&](int rt, const WordLevels &x) {
                    a[rt][2 * u] = prmt(x.rows0[0], x.rows0[1], 0x6240);
                    a[rt][2 * u + 1] = prmt(x.rows8[0], x.rows8[1], 0x7351);
                    if (u == 1)
                        use(rt, pair, a[rt]);
                });
        }
        unrolled_for (int i = 0; i < TRELLIS_MEMORY + N - 2; i++)
            chain[i] = chain[i + 2];
        next();
    }
}

} // namespace kvant
