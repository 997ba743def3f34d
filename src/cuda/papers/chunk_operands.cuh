/* chunk_operands.cuh - unpacks the words of a page of chunk codes (format.md, "Chunk codes") to
 * operands of mma.m16n8k16. Chunks of octopus are triplets of channels, chunks of hqmq are four
 * channels.
 *
 * A chunk's direction is looked up in shared memory: three channels as fp16 in 8 bytes, or four as
 * bytes. A norm or a radius multiplies the direction in fp16. There are several copies of the table
 * side by side, so that fewer lanes read the same bank. With entries of 8 bytes, 16 lanes at a time
 * read from 16 pairs of banks. Then no two lanes read the same pair with 16 copies, and at most two
 * with 8 copies. With entries of 4 bytes and 8 copies, the fullest bank is read by 3 lanes on
 * average. These conflicts limit the speed, so there are as many copies as the ring of pages leaves
 * room for.
 *
 * The kernel may choose which channel is which column (keys) or row (values) of the product. For
 * keys, a lane's four columns of a tile are one chunk, so a look-up gives the operand. For values,
 * a lane's rows r and r + 8 of two or three tiles are the channels of one chunk of four, or of two
 * triplets. The instruction prmt pairs the look-ups of neighbouring tokens. */
#pragma once

#include "../attention/attention.h"
#include "../attention/dequant.cuh"

#include <type_traits>

namespace kvant
{

struct ChunkCodes {
    static constexpr kvant_cuda_grouping GROUP = KVANT_CUDA_GROUP_TOKEN;
    static constexpr float ROW8 = 1;
    static constexpr bool BIASED = false;
    static constexpr Order ORDER = Order::COLUMNS;
};

template <class C> constexpr bool HAS_CHUNKS = std::is_base_of<ChunkCodes, C>::value;

/* The data of a lane for look-ups in a table in shared memory: where the lane's copy is. Levels of
 * the norm are fp16, lower bytes and upper bytes. */
template <int COPIES_> struct ChunkTable {
    static constexpr uint32_t COPIES = COPIES_;
    uint32_t copy;
    uint32_t norm_low[2], norm_high[2];
};

/* a * b of two pairs of halves */
KVANT_INLINE uint32_t multiply_halves(uint32_t a, uint32_t b)
{
    __half2 c = __hmul2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
    return *reinterpret_cast<uint32_t *>(&c);
}

/* a times the lower or the upper half of b. */
template <bool UPPER> KVANT_INLINE uint32_t multiply_by_half(uint32_t a, uint32_t b)
{
    const __half2 y = *reinterpret_cast<__half2 *>(&b),
                  c = __hmul2(*reinterpret_cast<__half2 *>(&a),
                              UPPER ? __high2half2(y) : __low2half2(y));
    return *reinterpret_cast<const uint32_t *>(&c);
}

/* x shifted left by `left` bits; to the right if negative. */
KVANT_INLINE uint32_t shifted(uint32_t x, int left)
{
    return left >= 0 ? x << left : x >> -left;
}

KVANT_INLINE uint32_t rotate_left(uint32_t x, int bits)
{
    return __funnelshift_l(x, x, bits);
}

constexpr uint32_t FIRST_AND_THIRD = 0x00ff00ffu; /* mask of two of four bytes */

/* The places where a lane finds codes. row is lane / 4, and column is lane mod 4. */
template <class C, int D> struct ChunkPlaces {
    static constexpr int CHUNKS = (D + C::CHANNELS - 1) / C::CHANNELS;
    /* steps of 8 chunks, which are two tiles */
    static constexpr int KEY_STEPS = ((CHUNKS + 1) / 2 + 3) / 4;
    static constexpr int GROUP_CHUNKS =
        C::CHANNELS == 3 ? 16 : 8; /* for values: chunks in the rows of GROUP_TILES tiles */
    static constexpr int GROUP_TILES = GROUP_CHUNKS * C::CHANNELS / 16;
    static constexpr int VALUE_GROUPS = (CHUNKS + GROUP_CHUNKS - 1) / GROUP_CHUNKS;

    /* Loads words of a plane of P bits for the 4 row tiles of a pair of chunks. In each word, the
     * codes of tokens r and r + 8 and of both chunks begin at bit LEFT (mod 32) and at every eighth
     * bit from there. This is also their order. Other bits belong to other codes. With P = 16 a
     * word has row r + 8 h only, at bits 0 and 16. */
    template <int P, int LEFT = 0>
    KVANT_INLINE static void key_words(const uint32_t *page, int pair, int row, int h,
                                       uint32_t (&w)[4])
    {
        const uint32_t *plane = page + chunk_plane_at(C::BITS, P, CHUNKS, true);
        load_words<4>(plane + 4 * P * pair + (P == 16 ? 32 * h + 4 * row : 4 * (row % P)), w);
        if constexpr (P < 8)
            unrolled_for (int i = 0; i < 4; i++)
                w[i] = rotate_left(w[i], LEFT - P * (row / P));
    }

    /* The same for one row tile. */
    template <int P, int LEFT = 0>
    KVANT_INLINE static uint32_t key_word(const uint32_t *page, int pair, int row, int h, int rt)
    {
        const uint32_t *plane = page + chunk_plane_at(C::BITS, P, CHUNKS, true);
        const uint32_t w = plane[4 * P * pair + (P == 16 ? 32 * h + 4 * row : 4 * (row % P)) + rt];
        return P < 8 ? rotate_left(w, LEFT - P * (row / P)) : w;
    }

    /* The word of a plane of P bits for a chunk and two tokens: 2 column + 8 h and the next, of
     * column tiles 2 m and 2 m + 1. The codes of both tiles, and then of the next token, begin at
     * bit LEFT and at every eighth bit from there. */
    template <int P, int LEFT = 0>
    KVANT_INLINE static uint32_t value_word(const uint32_t *page, int chunk, int column, int h,
                                            int m)
    {
        const uint32_t *plane = page + chunk_plane_at(C::BITS, P, CHUNKS, false) + chunk;
        if constexpr (P == 8)
            return plane[CHUNKS * (4 * column + 2 * h + m)];
        else {
            constexpr int FIELDS = 16 / P;
            uint32_t x = plane[CHUNKS * ((8 * column + 4 * h) / FIELDS)];
            /* this part depends on the lane only, so it is computed once for all h and m */
            if constexpr (P == 1)
                x >>= 8 * (column % 2);
            const int left = LEFT - P * (4 * h % FIELDS + 2 * m);
            return bit_select<FIRST_AND_THIRD << LEFT | (LEFT ? FIRST_AND_THIRD >> (32 - LEFT)
                                                              : 0)>(shifted(x, left),
                                                                    shifted(x, left + 8 - P));
        }
    }
};

/* Unpacks a page of codes C of constant sizes, step by step, with VALUE_PARTS steps per group of
 * values. */
template <class C, int VALUE_PARTS> struct SteppedChunks : ChunkCodes {
    /* use(row tile, column tile, registers) for a page of keys. */
    template <int D, class T, class F>
    KVANT_INLINE static void for_each_key_tile(const uint8_t *page, int lane, const T &table,
                                               F &&use)
    {
        unrolled_for (int step = 0; step < ChunkPlaces<C, D>::KEY_STEPS; step++)
            C::template key_step<D>(page, lane, table, step, [&](int rt, const uint32_t(&a)[2][4]) {
                use(rt, 2 * step, a[0]);
                use(rt, 2 * step + 1, a[1]);
            });
    }

    template <int D, class T, class F>
    KVANT_INLINE static void for_each_value_tile(const uint8_t *page, int lane, const T &table,
                                                 F &&use)
    {
        unrolled_for (int g = 0; g < ChunkPlaces<C, D>::VALUE_GROUPS; g++)
            unrolled_for (int part = 0; part < VALUE_PARTS; part++)
                C::template value_step<D>(page, lane, table, g, part, use);
    }
};

} // namespace kvant
