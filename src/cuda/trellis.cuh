/* trellis.cuh - from the words of a page of trellis codes (docs/format.md, "Trellis codes") to operands.
 *
 * A code's subset follows from the trellis bits of codes before it, which lie at the same place of other words (keys: of the
 * words before; values: of neighbouring lanes). So the trellis bits of 32 codes are packed into one word, a plane, and
 * subsets of all 32 are a few exclusive ors. Keys close their circle by one shuffle a plane, values fetch each term by one.
 *
 * A level is a sign and a magnitude, and with the bits of the level's number inverted where the sign is minus, which costs
 * nothing inside the exclusive ors, magnitudes are a table of 8, 16 or 32 bytes below 128. Planes become nibbles of four
 * words, 8 codes each, by transposing bits, and nibbles are what prmt takes: 8 entries a look-up, none where the nibble's
 * highest bit is set and an entry is below 128, so the sum of two look-ups is one among 16; the upper 16 of 32 are a
 * third and a fourth look-up of differences, masked. A byte is 128 + level. */
#ifndef KVANT_CUDA_TRELLIS_CUH
#define KVANT_CUDA_TRELLIS_CUH

#include "dequant.cuh"
#include "rotate.cuh"

#include <type_traits>

namespace kvant
{

/* Of trellises of 2^memory states: bit j of parity p counts the trellis bit of j steps before. */
__host__ __device__ constexpr uint32_t trellis_tap(int memory, int p)
{
    constexpr uint32_t taps[3][3] = { { 030, 0441, 0202 }, { 0160, 02101, 0442 }, { 01210, 010201, 03002 } };
    return taps[(memory - 8) / 2][p];
}

struct TrellisCodes {
    static constexpr kvant_cuda_grouping GROUP = KVANT_CUDA_GROUP_TOKEN;
    static constexpr float ROW8 = 1;
    static constexpr bool BIASED = true;
};

template <int B, int M> struct Trellis : TrellisCodes {
    static constexpr kvant_cuda_kind KIND = (kvant_cuda_kind)(KVANT_CUDA_TRELLIS2 + B - 2);
    static constexpr int BITS = B, MEMORY = M, TILES = B == 4 ? 1 : 2;
    static constexpr Order ORDER = B == 4 ? Order::COLUMNS_AND_8 : Order::TILES;
};
using Trellis2 = Trellis<2, 8>;
using Trellis3 = Trellis<3, 8>;
using Trellis4 = Trellis<4, 8>;

template <class C> constexpr bool HAS_TRELLIS = std::is_base_of<TrellisCodes, C>::value;

/* Bits of a state, 0 without a trellis. */
template <class C> constexpr uint32_t memory_of()
{
    if constexpr (HAS_TRELLIS<C>)
        return C::MEMORY;
    else
        return 0;
}

/* t: magnitudes 0 to 15; more: what magnitudes 16 to 31 have above them. */
struct Magnitudes : Bytes {
    uint32_t more[4], shift1, one;
};

__device__ __forceinline__ Magnitudes magnitudes_of(const uint32_t (&table)[KVANT_CUDA_TABLE_WORDS], uint32_t one)
{
    Magnitudes m;
    static_cast<Bytes &>(m) = bytes_of(table, one);
#pragma unroll
    for (int i = 0; i < 4; i++)
        m.more[i] = table[4 + i];
    m.shift1 = one << 31;
    m.one = one;
    return m;
}

/* Bits of two words side by side: those at even places of x, and of y one place higher; and those at odd places. */
__device__ __forceinline__ uint32_t even_bits(uint32_t x, uint32_t y)
{
    return bit_select<0x55555555u>(x, y << 1);
}

__device__ __forceinline__ uint32_t odd_bits(uint32_t x, uint32_t y, const Magnitudes &table)
{
    return bit_select<0x55555555u>(shift_by(x, table.shift1), y);
}

/* Bit 0 of the nibbles of four words as the four bits of nibbles. */
__device__ __forceinline__ uint32_t low_plane(const uint32_t (&w)[4])
{
    return bit_select<0x33333333u>(even_bits(w[0], w[1]), even_bits(w[2], w[3]) << 2);
}

/* Bits 1 and 3 of them. */
__device__ __forceinline__ void odd_planes(const uint32_t (&w)[4], const Magnitudes &table, uint32_t &bit1,
                                           uint32_t &bit3)
{
    const uint32_t a = odd_bits(w[0], w[1], table), b = odd_bits(w[2], w[3], table);
    bit1 = bit_select<0x33333333u>(a, b << 2);
    bit3 = bit_select<0x33333333u>(shift_by(a, table.shift2), b);
}

/* Planes to nibbles: bit i of nibble n of word j is bit j of nibble n of plane i. */
__device__ __forceinline__ void nibbles_of(const uint32_t (&plane)[4], const Magnitudes &table, uint32_t (&w)[4])
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

/* The three bits of subsets, inverted where `minus` is set; at[-j]: the plane of j steps before. */
template <int M, class At>
__device__ __forceinline__ void subsets_of(const At &at, uint32_t minus, uint32_t (&z)[4])
{
#pragma unroll
    for (int p = 0; p < 3; p++) {
        z[p] = minus;
#pragma unroll
        for (int j = 0; j <= M; j++)
            if (trellis_tap(M, p) >> j & 1)
                z[p] ^= at(j);
    }
}

/* 128 + or - r in each byte, by what pos and neg have: 0x7f where it is minus. Neither borrows nor carries leave a byte. */
__device__ __forceinline__ uint32_t sign_bytes(uint32_t r, uint32_t minus, const Magnitudes &table)
{
    return (r ^ minus) * table.one + (minus * table.minus1 + 0x80808080u);
}

/* 4 bits: the levels of the codes in the lower and the upper half of word w, whose numbers' bits 0 to 3 are `number`. */
__device__ __forceinline__ void look_up32(uint32_t w, uint32_t number, const Magnitudes &table, uint32_t (&x)[2])
{
    const uint32_t other = number ^ 0x88888888u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t s = i ? shift_by(number, table.shift16) : number,
                       o = i ? shift_by(other, table.shift16) : other, c = i ? shift_by(w, table.shift16) : w;
        const uint32_t low = prmt(table.t[0], table.t[1], s) * table.one + prmt(table.t[2], table.t[3], o);
        const uint32_t more = prmt(table.more[0], table.more[1], s) ^ prmt(table.more[2], table.more[3], o);
        /* Bit 4 of the number is bit 2 of the code, inverted where bit 3, the sign, is 0: a byte, or its sign bit */
        const uint32_t upper = prmt(0x7f7f7f7fu, 0x80808080u, c), minus = prmt(0x7f7f7f7fu, 0x7f7f7f7fu, c);
        x[i] = sign_bytes((more & upper) * table.one + low, minus, table);
    }
}

/* 2 and 3 bits: of words of nibbles that are numbers; minus: 1 in a nibble, or 0. */
template <int B>
__device__ __forceinline__ void look_up16(uint32_t number, uint32_t minus, const Magnitudes &table,
                                          uint32_t (&x)[2])
{
    const uint32_t other = number ^ 0x88888888u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t s = i ? shift_by(number, table.shift16) : number,
                       o = i ? shift_by(other, table.shift16) : other,
                       m = i ? shift_by(minus, table.shift16) : minus;
        uint32_t r = prmt(table.t[0], table.t[1], s);
        if (B == 3)
            r = r * table.one + prmt(table.t[2], table.t[3], o);
        x[i] = sign_bytes(r, prmt(0x00007f00u, 0, m), table);
    }
}

/* Levels of 32 codes of 4 bits in four words; x[j]: bytes of word j's lower and upper half. */
template <int M, class At>
__device__ __forceinline__ void levels4(const uint32_t (&w)[4], const At &at, const Magnitudes &table,
                                        uint32_t (&x)[4][2])
{
    uint32_t bit1, sign, plane[4], number[4];
    odd_planes(w, table, bit1, sign);
    subsets_of<M>(at, ~sign, plane);
    plane[3] = bit1 ^ ~sign;
    nibbles_of(plane, table, number);
#pragma unroll
    for (int j = 0; j < 4; j++)
        look_up32(w[j], number[j], table, x[j]);
}

/* Bits of two bytes in turn in each half of a word: those of the lower byte at even places. */
__device__ __forceinline__ uint32_t interleave(uint32_t x, const Magnitudes &table)
{
    uint32_t t = (x ^ shift_by(x, table.shift4)) & 0x00f000f0u;
    x = x ^ t ^ t << 4;
    t = (x ^ shift_by(x, table.shift2)) & 0x0c0c0c0cu;
    x = x ^ t ^ t << 2;
    t = (x ^ shift_by(x, table.shift1)) & 0x22222222u;
    return x ^ t ^ t << 1;
}

/* Levels of 32 codes of 2 or 3 bits in words a and b of the plane of 2 bits; third: the words of the third bits, of which
 * these codes have the lower byte of each half, or the upper one. x[j]: rows r of a, of b, rows r + 8 of a, of b. */
template <int B, int M, class At>
__device__ __forceinline__ void levels2(uint32_t a, uint32_t b, uint32_t third_a, uint32_t third_b, bool upper,
                                        const At &at, const Magnitudes &table, uint32_t (&x)[4][2])
{
    const uint32_t bit1 = odd_bits(a, b, table);
    const uint32_t sign = B == 3 ? interleave(prmt(third_a, third_b, upper ? 0x7351 : 0x6240), table) : bit1;
    uint32_t plane[4], number[4];
    subsets_of<M>(at, ~sign, plane);
    plane[3] = B == 3 ? bit1 ^ ~sign : 0;
    nibbles_of(plane, table, number);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t pair = j < 2 ? ~sign : shift_by(~sign, table.shift2);
        const uint32_t minus = (j % 2 ? shift_by(pair, table.shift1) : pair) & 0x11111111u;
        look_up16<B>(number[j], minus, table, x[j]);
    }
}

/* What comes before the first of n planes of keys: fields move up by one, the last one to the first of the next lane. */
template <int B> __device__ __forceinline__ uint32_t key_fields_before(uint32_t plane, int lane)
{
    const uint32_t other = __shfl_sync(FULL, plane, (lane & 28) | ((lane + 3) & 3));
    return B == 4 ? prmt(plane, other, 0x2107) : __funnelshift_l(other, plane, 4);
}

template <int B, int M, int N> __device__ __forceinline__ void close_circle(uint32_t (&chain)[M + N], int lane)
{
#pragma unroll
    for (int i = M - 1; i >= 0; i--)
        chain[i] = key_fields_before<B>(chain[i + N], lane);
}

/* use(row tile, pair of column tiles, bytes) for a key page of codes of 4 bits. */
template <class C, int D, class F>
__device__ __forceinline__ void for_each_trellis_key4(const uint32_t *page, int lane, const Magnitudes &table,
                                                      F &&use)
{
    constexpr int M = C::MEMORY, N = D / 16;
    constexpr bool KEEP = D <= 128; /* beyond, words are read twice */
    uint32_t chain[M + N], w[N][4];
#pragma unroll
    for (int u = 0; u < N; u++) {
        load_words<4>(page + (32 * u + lane) * 4, w[u]);
        chain[M + u] = low_plane(w[u]);
    }
    close_circle<4, M, N>(chain, lane);
#pragma unroll
    for (int pair = 0; pair < N / 2; pair++) {
        uint32_t x[2][4][2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int u = 2 * pair + e;
            if (!KEEP)
                load_words<4>(page + (32 * u + lane) * 4, w[u]);
            levels4<M>(
                w[u], [&](int j) { return chain[M + u - j]; }, table, x[e]);
        }
#pragma unroll
        for (int rt = 0; rt < 4; rt++) {
            const uint32_t a[4] = { prmt(x[0][rt][0], x[0][rt][1], 0x6420), prmt(x[0][rt][0], x[0][rt][1], 0x7531),
                                    prmt(x[1][rt][0], x[1][rt][1], 0x6420),
                                    prmt(x[1][rt][0], x[1][rt][1], 0x7531) };
            use(rt, pair, a);
        }
    }
}

/* The same of 2 and 3 bits, whose words have two column tiles. */
template <class C, int D, class F>
__device__ __forceinline__ void for_each_trellis_key2(const uint32_t *page, int lane, const Magnitudes &table,
                                                      F &&use)
{
    constexpr int M = C::MEMORY, N = D / 32;
    uint32_t chain[2][M + N], w[N][4], third[4] = {};
#pragma unroll
    for (int u = 0; u < N; u++) {
        load_words<4>(page + (32 * u + lane) * 4, w[u]);
        chain[0][M + u] = even_bits(w[u][0], w[u][1]);
        chain[1][M + u] = even_bits(w[u][2], w[u][3]);
    }
    close_circle<C::BITS, M, N>(chain[0], lane);
    close_circle<C::BITS, M, N>(chain[1], lane);
#pragma unroll
    for (int u = 0; u < N; u++) {
        if (C::BITS == 3 && u % 2 == 0)
            load_words<4>(page + 128 * N + (32 * (u / 2) + lane) * 4, third);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t x[4][2];
            levels2<C::BITS, M>(
                w[u][2 * h], w[u][2 * h + 1], third[2 * h], third[2 * h + 1], u % 2 == 1,
                [&](int j) { return chain[h][M + u - j]; }, table, x);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t a[4] = { x[i][0], x[i + 2][0], x[i][1], x[i + 2][1] };
                use(2 * h + i, u, a);
            }
        }
    }
}

template <class C, int D, class F>
__device__ __forceinline__ void for_each_trellis_key_pair(const uint8_t *page, int lane, const Magnitudes &table,
                                                          F &&use)
{
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
    if constexpr (C::BITS == 4)
        for_each_trellis_key4<C, D>(words, lane, table, use);
    else
        for_each_trellis_key2<C, D>(words, lane, table, use);
}

/* Values: a run of 8 steps is in the lanes of one column. The planes of the runs of all row groups g, and behind them in
 * time (docs/format.md: loops l, h, g, r) those of the run before the first, at [0]. */
template <int N> struct Runs {
    uint32_t at[N + 1];
};

/* The plane of `before` steps before those of run g, whose own place is g + 1. */
template <int N> __device__ __forceinline__ uint32_t steps_before(const Runs<N> &runs, int g, int before, int lane)
{
    if (before == 0)
        return runs.at[g + 1];
    if (before == 8)
        return runs.at[g];
    const uint32_t x = lane >= 32 - 4 * before ? runs.at[g] : runs.at[g + 1];
    return __shfl_sync(FULL, x, (lane - 4 * before) & 31);
}

template <int M> struct TermsBefore {
    uint32_t at[M + 1];
};

template <int M, int N> __device__ __forceinline__ TermsBefore<M> terms_before(const Runs<N> &runs, int g, int lane)
{
    static_assert(M <= 8, "a run and the one before it");
    TermsBefore<M> terms;
#pragma unroll
    for (int j = 0; j <= M; j++)
        if (any_tap<M>(j))
            terms.at[j] = steps_before<N>(runs, g, j, lane);
    return terms;
}

/* Bit 4 h + l of a byte becomes that of the step h = 1 of l, or h = 0 of l + 1. */
__device__ __forceinline__ uint32_t value_fields_before(uint32_t x)
{
    return (x << 4 & 0xf0f0f0f0u) | (x >> 3 & 0x0e0e0e0eu) | (x >> 7 & 0x01010101u);
}

/* The same of bits 2 h + l mod 2 of nibbles of l below 2 (x) and of those from there on (y), in either order. */
__device__ __forceinline__ uint32_t value_fields_before(uint32_t x, uint32_t y)
{
    return (x << 2 & 0xccccccccu) | (x >> 1 & 0x22222222u) | (y >> 3 & 0x11111111u);
}

template <int TILES> __device__ __forceinline__ void load_row_tiles(const uint32_t *group, int at, uint32_t (&w)[4])
{
    if constexpr (TILES == 4)
        load_words<4>(group + 4 * at, w);
    else {
        uint32_t x[2];
        load_words<2>(group + 2 * at, x);
        w[0] = x[0], w[1] = x[1], w[2] = w[3] = 0;
    }
}

/* Words of one column unit of all row groups; at: of the unit and lane within a group of 4 tiles. */
template <int D, int UNITS>
__device__ __forceinline__ void load_column(const uint32_t *plane, int at, uint32_t (&w)[(D + 63) / 64][4])
{
#pragma unroll
    for (int g = 0; g < D / 64; g++)
        load_row_tiles<4>(plane + 128 * g * UNITS, at, w[g]);
    if constexpr (D % 64 != 0)
        load_row_tiles<2>(plane + 128 * (D / 64) * UNITS, at, w[D / 64]);
}

/* use(row tile, column tile, halves) for a value page of codes of 4 bits. */
template <class C, int D, class F>
__device__ __forceinline__ void for_each_trellis_value4(const uint32_t *page, int lane, const Magnitudes &table,
                                                        F &&use)
{
    constexpr int N = (D + 63) / 64;
#pragma unroll
    for (int ct = 0; ct < 4; ct++) {
        uint32_t w[N][4];
        Runs<N> runs;
        load_column<D, 4>(page, 32 * ct + lane, w);
#pragma unroll
        for (int g = 0; g < N; g++)
            runs.at[g + 1] = low_plane(w[g]);
        /* a last group of two tiles has no run of the others */
        runs.at[0] = value_fields_before(D % 64 ? bit_select<0x33333333u>(runs.at[N], runs.at[N - 1]) : runs.at[N]);
#pragma unroll
        for (int g = 0; g < N; g++) {
            const TermsBefore<C::MEMORY> terms = terms_before<C::MEMORY, N>(runs, g, lane);
            uint32_t x[4][2];
            levels4<C::MEMORY>(
                w[g], [&](int j) { return terms.at[j]; }, table, x);
#pragma unroll
            for (int l = 0; l < 4; l++)
                if (4 * g + l < D / 16) {
                    uint32_t a[4];
                    widen(x[l][0], table, a[0], a[1]);
                    widen(x[l][1], table, a[2], a[3]);
                    use(4 * g + l, ct, a);
                }
        }
    }
}

/* The same of 2 and 3 bits. */
template <class C, int D, class F>
__device__ __forceinline__ void for_each_trellis_value2(const uint32_t *page, int lane, const Magnitudes &table,
                                                        F &&use)
{
    constexpr int N = (D + 63) / 64, LAST = D % 64 ? N - 1 : N;
    uint32_t third[N][4] = {};
    if constexpr (C::BITS == 3)
        load_column<D, 1>(page + 64 * (D / 16), lane, third);
#pragma unroll
    for (int unit = 0; unit < 2; unit++) {
        uint32_t w[N][4];
        Runs<N> runs[2];
        load_column<D, 2>(page, 32 * unit + lane, w);
#pragma unroll
        for (int g = 0; g < N; g++) {
            runs[0].at[g + 1] = even_bits(w[g][0], w[g][1]);
            runs[1].at[g + 1] = even_bits(w[g][2], w[g][3]);
        }
        runs[0].at[0] = value_fields_before(runs[0].at[N], runs[1].at[LAST]);
        runs[1].at[0] = value_fields_before(runs[1].at[LAST], runs[0].at[N]);
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            const int g = i / 2, h = i % 2;
            if (4 * g + 2 * h >= D / 16)
                continue;
            const TermsBefore<C::MEMORY> terms = terms_before<C::MEMORY, N>(runs[h], g, lane);
            uint32_t x[4][2];
            levels2<C::BITS, C::MEMORY>(
                w[g][2 * h], w[g][2 * h + 1], third[g][2 * h], third[g][2 * h + 1], unit == 1,
                [&](int j) { return terms.at[j]; }, table, x);
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    uint32_t a[4];
                    widen(x[k][t], table, a[0], a[2]);
                    widen(x[k + 2][t], table, a[1], a[3]);
                    use(4 * g + 2 * h + k, 2 * unit + t, a);
                }
        }
    }
}

template <class C, int D, class F>
__device__ __forceinline__ void for_each_trellis_value(const uint8_t *page, int lane, const Magnitudes &table,
                                                       F &&use)
{
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
    if constexpr (C::BITS == 4)
        for_each_trellis_value4<C, D>(words, lane, table, use);
    else
        for_each_trellis_value2<C, D>(words, lane, table, use);
}

} // namespace kvant

#endif
