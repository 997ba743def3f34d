/* trellis_bytes.cuh - levels of 4-bit trellis codes by look-ups in registers, as bytes. For keys.
 *
 * A level is a sign and a magnitude. For a negative sign the bits of the level's number are
 * inverted, which costs little inside the exclusive ors. Then magnitudes are a table of 32 bytes
 * below 128. prmt looks up one of 8 entries. It gives 0 when the nibble's highest bit is set and
 * the entry is below 128. So the sum of two look-ups is a look-up among 16 entries. The upper 16
 * entries take two more look-ups of differences, masked. A byte is 128 + level. */
#ifndef KVANT_CUDA_TRELLIS_BYTES_CUH
#define KVANT_CUDA_TRELLIS_BYTES_CUH

#include "trellis.cuh"

namespace kvant
{

/* t: magnitudes 0 to 15; more: what magnitudes 16 to 31 have above them. */
struct Magnitudes : Bytes {
    uint32_t more[4], shift1, one;
};

KVANT_INLINE Magnitudes magnitudes_of(const uint32_t (&table)[KVANT_CUDA_TABLE_WORDS], uint32_t one)
{
    Magnitudes m;
    static_cast<Bytes &>(m) = bytes_of(table, one);
    unrolled_for (int i = 0; i < 4; i++)
        m.more[i] = table[4 + i];
    m.shift1 = one << 31;
    m.one = one;
    return m;
}

/* With a table of pairs (trellis_pairs.cuh) AT so many bytes from the beginning of the block's
 * shared memory, or none: AT = -1. PAIRS row tiles of four are looked up there then, the others in
 * registers, because the one pipe has more to do than the other. */
template <int AT, int PAIRS, int COPIES_> struct KeyTable : Magnitudes {
    static constexpr int LOOKED_UP = AT < 0 ? 0 : PAIRS, COPIES = COPIES_;
    uint32_t own; /* the lane's copy */

    KVANT_INLINE uint32_t at(uint32_t distance) const
    {
        extern __shared__ uint8_t raw[];
        return *reinterpret_cast<const uint32_t *>(raw + AT + distance);
    }
};

template <int AT, int PAIRS, int COPIES>
KVANT_INLINE KeyTable<AT, PAIRS, COPIES> key_table(const uint32_t (&table)[KVANT_CUDA_TABLE_WORDS],
                                                         uint32_t one, int lane)
{
    KeyTable<AT, PAIRS, COPIES> t;
    static_cast<Magnitudes &>(t) = magnitudes_of(table, one);
    t.own = 4u * (lane % COPIES);
    return t;
}

/* 128 + r in each byte, or 128 - r where minus has 0x7f and not 0. Neither borrows nor carries
 * leave a byte. */
KVANT_INLINE uint32_t sign_bytes(uint32_t r, uint32_t minus, const Magnitudes &table)
{
    return (r ^ minus) * table.one + (minus * table.minus1 + 0x80808080u);
}

/* 4 bits: the levels of the codes in the lower and the upper half of word w, whose numbers' bits 0
 * to 3 are `number`. */
KVANT_INLINE void look_up32(uint32_t w, uint32_t number, const Magnitudes &table, uint32_t (&x)[2])
{
    const uint32_t other = number ^ 0x88888888u;
    unrolled_for (int i = 0; i < 2; i++) {
        const uint32_t s = i ? shift_by(number, table.shift16) : number,
                       o = i ? shift_by(other, table.shift16) : other, c = i ? shift_by(w, table.shift16) : w;
        const uint32_t low = prmt(table.t[0], table.t[1], s) * table.one + prmt(table.t[2], table.t[3], o);
        const uint32_t more = prmt(table.more[0], table.more[1], s) ^ prmt(table.more[2], table.more[3], o);
        /* Bit 4 of the number is bit 2 of the code, inverted where bit 3, the sign, is 0: a byte,
         * or its sign bit */
        const uint32_t upper = prmt(0x7f7f7f7fu, 0x80808080u, c), minus = prmt(0x7f7f7f7fu, 0x7f7f7f7fu, c);
        x[i] = sign_bytes((more & upper) * table.one + low, minus, table);
    }
}

/* The numbers of levels of 32 codes in four words, as nibbles. */
template <int M, class At, class T>
KVANT_INLINE void numbers_of_codes(const uint32_t (&w)[4], const At &at, const T &table,
                                                 uint32_t (&number)[4])
{
    uint32_t bit1, sign, plane[4];
    odd_planes(w, table, bit1, sign);
    subsets_of<M>(at, ~sign, plane);
    plane[3] = bit1 ^ ~sign;
    nibbles_of(plane, table, number);
}

/* Levels of columns c, c + 1, c + 8, c + 9 of 32 codes in four words: of rows r in x[j][0], of rows
 * r + 8 in x[j][1]. */
template <int M, class At, class T>
KVANT_INLINE void byte_levels(const uint32_t (&w)[4], const At &at, const T &table,
                                            uint32_t (&x)[4][2])
{
    uint32_t number[4];
    numbers_of_codes<M>(w, at, table, number);
    unrolled_for (int j = 0; j < 4; j++) {
        if constexpr (T::LOOKED_UP > 0)
            if (j >= 4 - T::LOOKED_UP) {
                const PairNumbers n = numbers_of(w[j], number[j], table);
                x[j][0] = high_pair(n.rows0, table) * 256 + low_pair(n.rows0, table);
                x[j][1] = high_pair(n.rows8, table) * 256 + low_pair(n.rows8, table);
                continue;
            }
        uint32_t half[2];
        look_up32(w[j], number[j], table, half);
        x[j][0] = prmt(half[0], half[1], 0x6240);
        x[j][1] = prmt(half[0], half[1], 0x7351);
    }
}

/* The same levels as halves, columns c and c + 8 in a register: use(row tile, column tile, halves).
 * Words are read twice, because there are too few registers to keep them. */
template <class C, int D, class T, class F>
KVANT_INLINE void for_each_trellis_key4(const uint8_t *page, int lane, const T &table, F &&use)
{
    static_assert(T::LOOKED_UP > 0, "a table of pairs");
    constexpr int M = C::MEMORY, N = D / 16;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
    uint32_t chain[M + N], w[4], number[4];
    unrolled_for (int u = 0; u < N; u++) {
        load_words<4>(words + (32 * u + lane) * 4, w);
        chain[M + u] = low_plane(w);
    }
    close_circle<4, M, N>(chain, lane);
    unrolled_for (int u = 0; u < N; u++) {
        load_words<4>(words + (32 * u + lane) * 4, w);
        numbers_of_codes<M>(w, [&](int j) { return chain[M + u - j]; }, table, number);
        unrolled_for (int rt = 0; rt < 4; rt++) {
            uint32_t a[4];
            if (rt >= 4 - T::LOOKED_UP) {
                const PairNumbers n = numbers_of(w[rt], number[rt], table);
                a[0] = low_pair(n.rows0, table), a[1] = low_pair(n.rows8, table);
                a[2] = high_pair(n.rows0, table), a[3] = high_pair(n.rows8, table);
            } else {
                uint32_t half[2];
                look_up32(w[rt], number[rt], table, half);
                widen(half[0], table, a[0], a[1]);
                widen(half[1], table, a[2], a[3]);
            }
            use(rt, u, a);
        }
    }
}

/* use(row tile, pair of column tiles, bytes) for a key page of codes of 4 bits. ROOMY: registers
 * can keep the page's words; otherwise words are read twice. */
template <class C, int D, bool ROOMY, class T, class F>
KVANT_INLINE void for_each_trellis_byte(const uint8_t *page, int lane, const T &table, F &&use)
{
    constexpr int M = C::MEMORY, N = D / 16;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
    constexpr bool KEEP = ROOMY && D <= 128;
    uint32_t chain[M + N], w[N][4];
    unrolled_for (int u = 0; u < N; u++) {
        load_words<4>(words + (32 * u + lane) * 4, w[u]);
        chain[M + u] = low_plane(w[u]);
    }
    close_circle<4, M, N>(chain, lane);
    unrolled_for (int pair = 0; pair < N / 2; pair++) {
        uint32_t x[2][4][2];
        unrolled_for (int e = 0; e < 2; e++) {
            const int u = 2 * pair + e;
            if (!KEEP)
                load_words<4>(words + (32 * u + lane) * 4, w[u]);
            byte_levels<M>(
                w[u], [&](int j) { return chain[M + u - j]; }, table, x[e]);
        }
        unrolled_for (int rt = 0; rt < 4; rt++) {
            const uint32_t a[4] = { x[0][rt][0], x[0][rt][1], x[1][rt][0], x[1][rt][1] };
            use(rt, pair, a);
        }
    }
}

} // namespace kvant

#endif
