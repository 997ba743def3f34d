/* dequant.cuh - from the words of a page's code plane to operands of mma.m16n8k16, for each kind of
 * code.
 *
 * A lane's share of a 16 x 16 tile of codes is four registers of two halves. They hold rows r and r
 * + 8, and of each row columns k and k + 1 and the columns 8 further (format.md puts the codes
 * there). A half is not the code's number but a small whole number u in its lowest bits. As fp16
 * this is the subnormal u x 2^-24, which tensor cores multiply exactly. So unpacking a uniform code
 * costs one lop3 per register, and no offset has to cancel in the sum.
 *
 * Each kind states: KIND, its name in params.h; GROUP; BITS; ROW8, the factor by which rows r + 8
 * are too large (their field is not shifted); TILES, the column tiles it unpacks at a time; ORDER,
 * below; BIASED, whether u has a constant bias (codebooks) or a zero point per token (uniform).
 * for_each_tile walks the tiles of a plane in shared memory. */
#pragma once

#include "../layout.cuh"
#include "../params.h"
#include "../ptx.cuh"

namespace kvant
{

/* Registers that unpacking needs: a codebook as bytes, four to a register, and powers of two that
 * shift. For example, shift4 is 2^28: the upper half of a product with it is a shift to the right
 * by 4. The multiplier computes it, which is idle otherwise. Shifts and all further instructions of
 * unpacking use the one pipe that limits these kernels. They come as arguments, so that the
 * compiler does not know better. */
struct Bytes {
    uint32_t t[4];
    uint32_t shift2, shift4, shift8, shift12, shift16;
    uint32_t minus1, minus256; /* a difference is a product and a sum */
};

KVANT_INLINE Bytes bytes_of(const uint32_t *codebook, uint32_t one)
{
    return Bytes{ { codebook[0], codebook[1], codebook[2], codebook[3] },
                  one << 30,
                  one << 28,
                  one << 24,
                  one << 20,
                  one << 16,
                  0u - one,
                  0u - (one << 8) };
}

KVANT_INLINE uint32_t shift_by(uint32_t x, uint32_t power)
{
    return __umulhi(x, power);
}

/* x >> 16, if unit is 256. A product of halves with bytes takes half the time of the product that
 * shift_by computes. */
KVANT_INLINE uint32_t upper_half(uint32_t x, uint32_t unit)
{
    return __dp2a_lo(x, unit, 0u);
}

/* Makes two registers, [a0 0 b0 0] and [a1 0 b1 0], from bytes in the order a0 a1 b0 b1. */
KVANT_INLINE void widen(uint32_t x, const Bytes &table, uint32_t &even, uint32_t &odd)
{
    odd = prmt(x, 0, 0x4341);
    even = odd * table.minus256 + x;
}

/* Fields of 2 bits as nibbles: even ones, odd ones. */
KVANT_INLINE void split_fields(uint32_t word, const Bytes &table, uint32_t &even, uint32_t &odd)
{
    even = word & 0x33333333u;
    odd = shift_by(even * table.minus1 + word, table.shift2);
}

/* The halves of an operand's registers may stand for any columns, if both operands agree. A
 * look-up by prmt takes four selectors from one half of a word, which are codes of one column.
 * So codebooks of 4 bits pair columns c and c + 8 in a register. Smaller codebooks pair column c of
 * two neighbouring tiles. */
enum class Order { COLUMNS, COLUMNS_AND_8, TILES };

/* Brings operands of the query or of the weights from the order COLUMNS into a kind's order. */
template <Order ORDER, int TILES> KVANT_INLINE void reorder(uint32_t (&b)[TILES][2])
{
    auto halves = [](uint32_t &x, uint32_t &y) {
        uint32_t low = prmt(x, y, 0x5410);
        y = prmt(x, y, 0x7632);
        x = low;
    };
    if constexpr (ORDER == Order::COLUMNS_AND_8)
        unrolled_for (int i = 0; i < TILES; i++)
            halves(b[i][0], b[i][1]);
    if constexpr (ORDER == Order::TILES)
        unrolled_for (int i = 0; i < TILES; i += 2) {
            halves(b[i][0], b[i + 1][0]);
            halves(b[i][1], b[i + 1][1]);
        }
}

template <kvant_cuda_kind KIND_, int BITS_, int TILES_, int ROW8_, Order ORDER_ = Order::COLUMNS,
          bool BIASED_ = false>
struct Kind {
    static constexpr kvant_cuda_kind KIND = KIND_;
    static constexpr kvant_cuda_grouping GROUP = KVANT_CUDA_GROUP_TOKEN;
    static constexpr int BITS = BITS_, TILES = TILES_;
    static constexpr float ROW8 = ROW8_;
    static constexpr bool BIASED = BIASED_;
    static constexpr Order ORDER = ORDER_;
};

/* The same codes with scales of groups, powers of two of at least group_step numbers. */
template <class C, kvant_cuda_kind KIND_, kvant_cuda_grouping GROUP_> struct Grouped : C {
    static constexpr kvant_cuda_kind KIND = KIND_;
    static constexpr kvant_cuda_grouping GROUP = GROUP_;
};

struct Uniform2 : Kind<KVANT_CUDA_UNIFORM2, 2, 2, 4> {
    __device__ static void unpack(const uint32_t (&w)[3], const Bytes &table,
                                  uint32_t (&a)[TILES][4])
    {
        const uint32_t x[4] = { w[0], shift_by(w[0], table.shift4), shift_by(w[0], table.shift8),
                                shift_by(w[0], table.shift12) };
        unrolled_for (int i = 0; i < 4; i++) {
            a[i / 2][2 * (i % 2)] = x[i] & 0x00030003u;
            a[i / 2][2 * (i % 2) + 1] = x[i] & 0x000c000cu;
        }
    }
};

struct Uniform3 : Kind<KVANT_CUDA_UNIFORM3, 3, 4, 4> {
    /* The word w[0] is the 2-bit plane of the first two column tiles, w[1] of the last two. The
     * word w[2] is the 1-bit plane of all four. */
    __device__ static void unpack(const uint32_t (&w)[3], const Bytes &table,
                                  uint32_t (&a)[TILES][4])
    {
        const uint32_t powers[4] = { 0, table.shift4, table.shift8, table.shift12 };
        unrolled_for (int i = 0; i < 8;
                      i++) { /* half a tile: bits 2 i and 2 i + 1 of the upper plane */
            const uint32_t low = i % 4 ? shift_by(w[i / 4], powers[i % 4]) : w[i / 4],
                           top = 2 * i < 2 ? w[2] << 2 : w[2] >> (2 * i - 2);
            const uint32_t row0 = bit_select<0x00030003u>(low, top),
                           row8 = bit_select<0x000c000cu>(low, top << 1);
            a[i / 2][2 * (i % 2)] = row0 & 0x00070007u;
            a[i / 2][2 * (i % 2) + 1] = row8 & 0x001c001cu;
        }
    }
};

/* Scales of 32 channels, or more, of a token: values of KIVI, keys of InnerQ. */
using Uniform2Channels32 =
    Grouped<Uniform2, KVANT_CUDA_UNIFORM2_CHANNELS32, KVANT_CUDA_GROUP_CHANNELS>;
using Uniform3Channels32 =
    Grouped<Uniform3, KVANT_CUDA_UNIFORM3_CHANNELS32, KVANT_CUDA_GROUP_CHANNELS>;

/* Scales of 32 tokens, or 64, of a channel: keys of KIVI, values of InnerQ. */
using Uniform2Tokens32 = Grouped<Uniform2, KVANT_CUDA_UNIFORM2_TOKENS32, KVANT_CUDA_GROUP_TOKENS>;
using Uniform3Tokens32 = Grouped<Uniform3, KVANT_CUDA_UNIFORM3_TOKENS32, KVANT_CUDA_GROUP_TOKENS>;

struct Uniform4 : Kind<KVANT_CUDA_UNIFORM4, 4, 1, 16> {
    __device__ static void unpack(const uint32_t (&w)[3], const Bytes &table,
                                  uint32_t (&a)[TILES][4])
    {
        uint32_t high = shift_by(w[0], table.shift8);
        a[0][0] = w[0] & 0x000f000fu;
        a[0][1] = w[0] & 0x00f000f0u;
        a[0][2] = high & 0x000f000fu;
        a[0][3] = high & 0x00f000f0u;
    }
};

/* Four bits: groups of 16 and more. */
using Uniform4Channels = Grouped<Uniform4, KVANT_CUDA_UNIFORM4_CHANNELS, KVANT_CUDA_GROUP_CHANNELS>;
using Uniform4Tokens = Grouped<Uniform4, KVANT_CUDA_UNIFORM4_TOKENS, KVANT_CUDA_GROUP_TOKENS>;

/* The least group that kernels know: operands of 16 x 16 codes share scales. Kinds that unpack
 * several tiles at a time unpack pairs of tiles. With head_dim 256 there would be too many groups
 * for an operand. */
template <class C, int D> __host__ __device__ constexpr int group_step()
{
    return C::TILES == 1 && D <= 128 ? 16 : 32;
}

struct Uniform8 : Kind<KVANT_CUDA_UNIFORM8, 8, 1, 1> {
    __device__ static void unpack(const uint32_t (&w)[3], const Bytes &table,
                                  uint32_t (&a)[TILES][4])
    {
        uint32_t rows0 = bit_select<0x0f0f0f0fu>(w[0], w[1] << 4),
                 rows8 = bit_select<0x0f0f0f0fu>(shift_by(w[0], table.shift4), w[1]);
        widen(rows0, table, a[0][0], a[0][2]);
        widen(rows8, table, a[0][1], a[0][3]);
    }
};

using Uniform8Channels = Grouped<Uniform8, KVANT_CUDA_UNIFORM8_CHANNELS, KVANT_CUDA_GROUP_CHANNELS>;

struct Codebook4 : Kind<KVANT_CUDA_CODEBOOK4, 4, 1, 1, Order::COLUMNS_AND_8, true> {
    /* A selector of prmt has 3 bits of index and a fourth that asks for the sign of the byte
     * instead. All bytes are below 128, so the answer is 0 when the fourth bit is set. One look-up
     * reads the lower half of the table. A second look-up, with the fourth bit inverted, reads the
     * upper half. Their exclusive or is a look-up among 16. */
    __device__ static void unpack(const uint32_t (&w)[3], const Bytes &table,
                                  uint32_t (&a)[TILES][4])
    {
        const uint32_t x = w[0] ^ 0x88888888u;
        const uint32_t far = shift_by(w[0], table.shift16), far_x = shift_by(x, table.shift16);
        uint32_t low0 = prmt(table.t[0], table.t[1], w[0]), low1 = prmt(table.t[2], table.t[3], x);
        uint32_t high0 = prmt(table.t[0], table.t[1], far),
                 high1 = prmt(table.t[2], table.t[3], far_x);
        widen(low0 ^ low1, table, a[0][0], a[0][1]);
        widen(high0 ^ high1, table, a[0][2], a[0][3]);
    }

    /* The bytes of columns c, c + 8, c + 1 and c + 9. One register has row r, the second has the
     * row 8 further. */
    __device__ static void look_up(uint32_t word, const Bytes &table, uint32_t &row, uint32_t &row8)
    {
        const uint32_t x = word ^ 0x88888888u;
        const uint32_t far = shift_by(word, table.shift16), far_x = shift_by(x, table.shift16);
        uint32_t low = prmt(table.t[0], table.t[1], word) ^ prmt(table.t[2], table.t[3], x);
        uint32_t high = prmt(table.t[0], table.t[1], far) ^ prmt(table.t[2], table.t[3], far_x);
        row = prmt(low, high, 0x6420);
        row8 = prmt(low, high, 0x7531);
    }
};

/* even: nibbles whose low bits are the codes of row r; odd: of row r + 8. Both have both column
 * tiles of the word */
KVANT_INLINE void look_up8(uint32_t even, uint32_t odd, const Bytes &table, uint32_t (&a0)[4],
                           uint32_t (&a1)[4])
{
    widen(prmt(table.t[0], table.t[1], even), table, a0[0], a0[2]);
    widen(prmt(table.t[0], table.t[1], shift_by(even, table.shift16)), table, a1[0], a1[2]);
    widen(prmt(table.t[0], table.t[1], odd), table, a0[1], a0[3]);
    widen(prmt(table.t[0], table.t[1], shift_by(odd, table.shift16)), table, a1[1], a1[3]);
}

/* The same as bytes, as an operand of mma_bytes. */
KVANT_INLINE void look_up_bytes(uint32_t even, uint32_t odd, const Bytes &table, uint32_t (&a)[4])
{
    a[0] = prmt(table.t[0], table.t[1], even);
    a[1] = prmt(table.t[0], table.t[1], odd);
    a[2] = prmt(table.t[0], table.t[1], shift_by(even, table.shift16));
    a[3] = prmt(table.t[0], table.t[1], shift_by(odd, table.shift16));
}

struct Codebook2 : Kind<KVANT_CUDA_CODEBOOK2, 2, 2, 1, Order::TILES, true> {
    __device__ static void unpack(const uint32_t (&w)[3], const Bytes &table,
                                  uint32_t (&a)[TILES][4])
    {
        uint32_t even, odd;
        split_fields(w[0], table, even, odd);
        look_up8(even, odd, table, a[0], a[1]);
    }

    __device__ static void unpack_bytes(uint32_t word, const Bytes &table, uint32_t (&a)[4])
    {
        uint32_t even, odd;
        split_fields(word, table, even, odd);
        look_up_bytes(even, odd, table, a);
    }
};

struct Codebook3 : Kind<KVANT_CUDA_CODEBOOK3, 3, 4, 1, Order::TILES, true> {
    /* Spreads four nibbles, b3 b2 b1 b0 -> 0 b3 0 b2 0 b1 0 b0: a 16-entry look-up as in
     * Codebook4. */
    __device__ static uint32_t spread(uint32_t nibbles)
    {
        return prmt(0x05040100u, 0x15141110u, nibbles) ^
               prmt(0x45444140u, 0x55545150u, nibbles ^ 0x8888u);
    }

    /* Even and odd fields of a pair of tiles as nibbles: their low two bits from `low`, the third
     * bit from `top`. */
    __device__ static void join(uint32_t low, uint32_t top, const Bytes &table, uint32_t &even,
                                uint32_t &odd)
    {
        even = bit_select<0x33333333u>(low, top << 2);
        odd = bit_select<0x33333333u>(shift_by(low, table.shift2), top);
    }

    /* The third bits of tiles, in the upper two bits of nibbles: of the first two tiles in top[0],
     * of the last two in top[1]. */
    __device__ static void spread_top(uint32_t word, const Bytes &table, uint32_t (&top)[2])
    {
        uint32_t low = spread(word), high = spread(shift_by(word, table.shift16));
        top[0] = prmt(low, high, 0x5410);
        top[1] = prmt(low, high, 0x7632);
    }

    /* The word w[0] is the 2-bit plane of the first two column tiles, w[1] of the last two. The
     * word w[2] is the 1-bit plane of all four. */
    __device__ static void unpack(const uint32_t (&w)[3], const Bytes &table,
                                  uint32_t (&a)[TILES][4])
    {
        uint32_t top[2], even, odd;
        spread_top(w[2], table, top);
        unrolled_for (int pair = 0; pair < 2; pair++) {
            join(w[pair], top[pair], table, even, odd);
            look_up8(even, odd, table, a[2 * pair], a[2 * pair + 1]);
        }
    }

    __device__ static void unpack_bytes(const uint32_t (&w)[3], const Bytes &table,
                                        uint32_t (&a)[2][4])
    {
        uint32_t top[2], even, odd;
        spread_top(w[2], table, top);
        unrolled_for (int pair = 0; pair < 2; pair++) {
            join(w[pair], top[pair], table, even, odd);
            look_up_bytes(even, odd, table, a[pair]);
        }
    }
};

/* The lane's words of R row tiles. */
template <int R> KVANT_INLINE void load_words(const uint32_t *from, uint32_t (&to)[R])
{
    static_assert(R == 4 || R == 2, "head_dim 64, 96, 128, 256 have row groups of 4 and 2 tiles");
    if constexpr (R == 4) {
        uint4 x = *reinterpret_cast<const uint4 *>(from);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else {
        uint2 x = *reinterpret_cast<const uint2 *>(from);
        to[0] = x.x, to[1] = x.y;
    }
}

/* Words of column step `step` for the R row tiles of group g: w[i] holds the words that unpack
 * needs for tile i. */
template <class C, int R, int COLUMN_TILES>
KVANT_INLINE void load_step(const uint32_t *plane, int g, int step, int lane, int plane_words,
                            uint32_t (&w)[R][3])
{
    constexpr int UNITS2 = (COLUMN_TILES + 1) / 2, UNITS1 = (COLUMN_TILES + 3) / 4;
    uint32_t x[R];
    auto take = [&](int units, int unit, int offset, int which) {
        load_words<R>(plane + offset + 128 * g * units + (32 * unit + lane) * R, x);
        unrolled_for (int i = 0; i < R; i++)
            w[i][which] = x[i];
    };
    if constexpr (C::BITS == 4) {
        take(COLUMN_TILES, step, 0, 0);
    } else if constexpr (C::BITS == 8) {
        take(COLUMN_TILES, step, 0, 0);
        take(COLUMN_TILES, step, plane_words, 1);
    } else if constexpr (C::BITS == 2) {
        take(UNITS2, step, 0, 0);
    } else {
        take(UNITS2, 2 * step, 0, 0);
        if (2 * step + 1 < UNITS2)
            take(UNITS2, 2 * step + 1, 0, 1);
        else
            unrolled_for (int i = 0; i < R; i++)
                w[i][1] = 0;
        take(UNITS1, step, plane_words, 2);
    }
}

template <class C, int R, int COLUMN_TILES, class F>
KVANT_INLINE void for_each_tile_of_group(const uint32_t *plane, int g, int lane, int plane_words,
                                         const Bytes &table, F &&use)
{
    constexpr int STEPS = (COLUMN_TILES + C::TILES - 1) / C::TILES;
    unrolled_for (int step = 0; step < STEPS; step++) {
        uint32_t w[R][3];
        load_step<C, R, COLUMN_TILES>(plane, g, step, lane, plane_words, w);
        unrolled_for (int i = 0; i < R; i++) {
            uint32_t a[C::TILES][4];
            C::unpack(w[i], table, a);
            unrolled_for (int t = 0; t < C::TILES; t++)
                if (step * C::TILES + t < COLUMN_TILES)
                    use(4 * g + i, step * C::TILES + t, a[t]);
        }
    }
}

/* use(row tile, pair of column tiles, registers) for a key page of codes of a codebook, as
 * bytes. */
template <class C, int COLUMN_TILES, class F>
KVANT_INLINE void for_each_key_pair(const uint8_t *page, int lane, const Bytes &table, F &&use)
{
    constexpr int FIRST = (COLUMN_TILES + 1) / 2 * 128; /* words of a plane of 2 bits */
    const uint32_t *plane = reinterpret_cast<const uint32_t *>(page);
    if constexpr (C::BITS == 3) {
        unrolled_for (int step = 0; 4 * step < COLUMN_TILES; step++) {
            uint32_t w[4][3];
            load_step<C, 4, COLUMN_TILES>(plane, 0, step, lane, FIRST, w);
            unrolled_for (int rt = 0; rt < 4; rt++) {
                uint32_t a[2][4];
                C::unpack_bytes(w[rt], table, a);
                use(rt, 2 * step, a[0]);
                if (4 * step + 2 < COLUMN_TILES)
                    use(rt, 2 * step + 1, a[1]);
            }
        }
    } else {
        unrolled_for (int pair = 0; pair < COLUMN_TILES / 2; pair++) {
            uint32_t x[4], y[4], a[4];
            if constexpr (C::BITS == 4) {
                load_words<4>(plane + (64 * pair + lane) * 4, x);
                load_words<4>(plane + (64 * pair + 32 + lane) * 4, y);
            } else
                load_words<4>(plane + (32 * pair + lane) * 4, x);
            unrolled_for (int rt = 0; rt < 4; rt++) {
                if constexpr (C::BITS == 4) {
                    C::look_up(x[rt], table, a[0], a[1]);
                    C::look_up(y[rt], table, a[2], a[3]);
                } else
                    C::unpack_bytes(x[rt], table, a);
                use(rt, pair, a);
            }
        }
    }
}

/* use(row tile, column tile, registers) for every tile of a plane of ROW_TILES x COLUMN_TILES. */
template <class C, int ROW_TILES, int COLUMN_TILES, class F>
KVANT_INLINE void for_each_tile(const uint8_t *page, int lane, const Bytes &table, F &&use)
{
    /* words of the first plane, where a second one starts */
    constexpr int FIRST =
        C::BITS == 3 ? (COLUMN_TILES + 1) / 2 * 32 * ROW_TILES : COLUMN_TILES * 32 * ROW_TILES;
    const uint32_t *plane = reinterpret_cast<const uint32_t *>(page);
    unrolled_for (int g = 0; g < ROW_TILES / 4; g++)
        for_each_tile_of_group<C, 4, COLUMN_TILES>(plane, g, lane, FIRST, table, use);
    if constexpr (ROW_TILES % 4 != 0)
        for_each_tile_of_group<C, ROW_TILES % 4, COLUMN_TILES>(plane, ROW_TILES / 4, lane, FIRST,
                                                               table, use);
}

} // namespace kvant
