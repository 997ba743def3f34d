/* unpack.cuh - unpacks the codes of an index to the first operand of m16n8k32, without shared
 * memory.
 *
 * A pack (src/kernels/packs.h) is read in pieces of 64 dimensions: two steps of 32. Lane 4 g + t of
 * a warp reads 8 bytes at a time. They belong to vectors 2 g and 2 g + 1 in half 0 of the pack, and
 * to vectors 2 g + 16 and 2 g + 17 in half 1. A warp's 32 lanes read bytes that lie side by side.
 * Rows g and g + 8 of the operand of half h are vectors 2 g + 16 h and 2 g + 1 + 16 h.
 *
 * Sums of integers do not depend on their order, so dimensions have the order that unpacks fastest.
 * Queries are put in the same order (columns_of). */
#pragma once

#include "../../base/attributes.h"
#include "../ptx.cuh"

namespace kvant
{

constexpr int PIECE_DIMS = 64, PIECE_QUADS = PIECE_DIMS / 4, PIECE_STEPS = 2;
constexpr uint32_t PACK_VECTORS = 32;

/* The levels of codes, as bytes. With 4 bits a byte is level + bias, which is below 128. Codes
 * below 8 and codes from 8 on are looked up separately, and the sign bit of a look-up means "no".
 * Codes of 1 bit need no levels, because 2 code is level + 1. */
struct PackLevels {
    uint32_t words[4];
    int bias;
};

/* The quads of 4 dimensions from which lane t takes its bytes of a step, 4 bytes from each. The
 * lower half of the step's 8 bytes goes to the first register. MIXED: the first register has the
 * first two dimensions of both quads, the second register has the last two. */
template <int BITS> struct PackOrder {
    static constexpr bool MIXED = BITS == 2 || BITS == 3 || BITS == 4;
    static __host__ __device__ constexpr int first(int step, int t)
    {
        return BITS == 2                ? 8 * step + 2 * t
               : BITS == 1 || BITS == 3 ? 4 * t + 2 * step
                                        : 8 * step + t;
    }
    static __host__ __device__ constexpr int second(int step, int t)
    {
        return first(step, t) + (BITS == 4 || BITS == 8 ? 4 : 1);
    }
};

/* The offset of word i of a piece for lane 4 g + t, in bytes. */
template <int BITS> KVANT_INLINE uint32_t piece_place(int i, uint32_t g, uint32_t t)
{
    if (BITS == 3)
        return t * 192 + i * 64 + g * 8;
    if (BITS == 8)
        return (2 * (4 * (i / 2) + t) + i % 2) * 64 + g * 8;
    return (4 * i + t) * 64 + g * 8;
}

/* WORDS: BITS, or 4 with 8 bits, which are the words of one half (at: 64 bytes further for the
 * second half). */
template <int BITS, int WORDS>
KVANT_INLINE void load_piece(uint2 (&piece)[WORDS], const uint8_t *at, uint32_t g, uint32_t t)
{
    unrolled_for (int i = 0; i < WORDS; i++)
        piece[i] =
            __ldg(reinterpret_cast<const uint2 *>(at + piece_place<BITS>(BITS / WORDS * i, g, t)));
}

template <int BY> KVANT_INLINE uint32_t moved(uint32_t x)
{
    if constexpr (BY > 0)
        return x << BY;
    else
        return x >> -BY;
}

/* The levels of a vector in 8 dimensions, for codes of at most 3 bits in 8 nibbles. */
KVANT_INLINE void look_up(const PackLevels &levels, uint32_t codes, uint32_t &low, uint32_t &high)
{
    low = prmt(levels.words[0], levels.words[1], codes);
    high = prmt(levels.words[0], levels.words[1], codes >> 16);
}

/* The 8 numbers of a vector for a step; w: the vector's words of the piece. */
template <int BITS, int STEP, int HALF, int WORDS>
KVANT_INLINE void numbers_of(const PackLevels &levels, const uint32_t (&w)[WORDS], uint32_t &low,
                             uint32_t &high)
{
    if constexpr (BITS == 8 && WORDS == 4) {
        low = w[2 * STEP] ^ 0x80808080u;
        high = w[2 * STEP + 1] ^ 0x80808080u;
    } else if constexpr (BITS == 8) {
        low = w[4 * STEP + HALF] ^ 0x80808080u;
        high = w[4 * STEP + 2 + HALF] ^ 0x80808080u;
    } else if constexpr (BITS == 4) {
        const uint32_t a = w[2 * STEP], b = w[2 * STEP + 1],
                       codes = HALF ? bit_select<0x0f0f0f0fu>(a >> 4, b)
                                    : bit_select<0x0f0f0f0fu>(a, b << 4),
                       other = codes ^ 0x88888888u;
        low = prmt(levels.words[0], levels.words[1], codes) |
              prmt(levels.words[2], levels.words[3], other);
        high = prmt(levels.words[0], levels.words[1], codes >> 16) |
               prmt(levels.words[2], levels.words[3], other >> 16);
    } else if constexpr (BITS == 3) {
        const uint32_t top = (moved<2 - 4 * STEP - HALF>(w[2]) & 0x04040404u) |
                             (moved<4 - 4 * STEP - HALF>(w[2]) & 0x40404040u);
        look_up(levels, (moved<-2 * HALF>(w[STEP]) & 0x33333333u) | top, low, high);
    } else if constexpr (BITS == 2) {
        look_up(levels, moved<-2 * HALF>(w[STEP]) & 0x33333333u, low, high);
    } else {
        low = moved<1 - 4 * STEP - HALF>(w[0]) & 0x02020202u;
        high = moved<-1 - 4 * STEP - HALF>(w[0]) & 0x02020202u;
    }
}

/* The operand of a step: 16 vectors of one half of the pack. */
template <int BITS, int STEP, int HALF, int WORDS>
KVANT_INLINE void operand_of(const PackLevels &levels, const uint2 (&piece)[WORDS],
                             uint32_t (&a)[4])
{
    uint32_t even[WORDS], odd[WORDS];
    unrolled_for (int i = 0; i < WORDS; i++) {
        even[i] = piece[i].x;
        odd[i] = piece[i].y;
    }
    numbers_of<BITS, STEP, HALF>(levels, even, a[0], a[2]);
    numbers_of<BITS, STEP, HALF>(levels, odd, a[1], a[3]);
}

/* The same order for a query. first and second are its words of both quads. */
template <int BITS>
KVANT_INLINE void columns_of(uint32_t first, uint32_t second, uint32_t &low, uint32_t &high)
{
    low = PackOrder<BITS>::MIXED ? prmt(first, second, 0x5140) : first;
    high = PackOrder<BITS>::MIXED ? prmt(first, second, 0x7362) : second;
}

} // namespace kvant
