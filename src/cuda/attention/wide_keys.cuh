/* wide_keys.cuh - keys with a codebook of 64 levels: from the words of a page's two code planes to
 * operands of mma.m16n8k16.
 *
 * 64 levels do not fit into registers, as the 16 levels of a codebook of 4 bits do (dequant.cuh). A
 * table in shared memory holds them instead. Every lane has its own copy in its own bank, so the 32
 * look-ups of a warp take one cycle whatever the codes are. The table holds levels as fp16. Bytes
 * would take half as many look-ups (trellis_bytes.cuh), but would enlarge the squared error of 6
 * bits by 7 %. */
#pragma once

#include "dequant.cuh"

#include <type_traits>

namespace kvant
{

/* No values: no pair has values of more than 4 bits next to keys with a codebook. */
struct Codebook6 : Kind<KVANT_CUDA_CODEBOOK6, 6, 2, 1> {
    static constexpr int LEVELS = 1 << BITS;
};

template <class C> constexpr bool HAS_WIDE_BOOK = std::is_same<C, Codebook6>::value;

constexpr int WIDE_COPIES = 32; /* one for each lane, and for each bank */

template <class C> __host__ __device__ constexpr int wide_book_bytes()
{
    if constexpr (HAS_WIDE_BOOK<C>)
        return C::LEVELS * WIDE_COPIES * (int)sizeof(uint32_t);
    else
        return 0;
}

/* Fills the table of a thread block, by all its threads; the caller synchronises. A warp takes one
 * level at a time, so it reads one argument and writes all banks. */
template <class C>
KVANT_INLINE void fill_wide_book(uint8_t *table, const float (&levels)[C::LEVELS])
{
    const unsigned lane = threadIdx.x % WIDE_COPIES;
#pragma unroll 4
    for (unsigned i = threadIdx.x / WIDE_COPIES; i < C::LEVELS; i += blockDim.x / WIDE_COPIES)
        reinterpret_cast<uint32_t *>(table)[i * WIDE_COPIES + lane] = pack_half2(levels[i], 0);
}

/* The lane's copy of the table, and powers of two that shift (struct Bytes in dequant.cuh says why
 * they are not constants). */
struct WideTable {
    uint32_t own;
    uint32_t shift2, shift4;
};

KVANT_INLINE WideTable wide_table(const uint8_t *table, uint32_t one, int lane)
{
    return WideTable{ shared_address(table) + 4u * (uint32_t)lane, one << 30, one << 28 };
}

/* Makes two registers of an operand from four codes, one in each byte. The lower bytes are columns
 * c and c + 8 of a row. The upper bytes are columns c + 1 and c + 9. A product of bytes (dp4a)
 * makes an address on the multiplier. */
KVANT_INLINE void look_up_wide(uint32_t codes, const WideTable &table, uint32_t &near,
                               uint32_t &far)
{
    constexpr uint32_t ENTRY = WIDE_COPIES * sizeof(uint32_t);
    uint32_t level[4];
    unrolled_for (int i = 0; i < 4; i++)
        level[i] = look_up_word(__dp4a(codes, ENTRY << 8 * i, table.own));
    near = prmt(level[0], level[2], 0x5410);
    far = prmt(level[1], level[3], 0x5410);
}

/* The operands of two neighbouring column tiles. low: their words of the plane of 4 bits. top: the
 * word of the plane of 2 bits. Its even bytes belong to the first tile. */
KVANT_INLINE void unpack_wide(const uint32_t (&low)[2], uint32_t top, const WideTable &table,
                              uint32_t (&a)[2][4])
{
    /* A byte of top holds the two upper bits of four codes, fields 0 to 3. A shift brings a field
     * to bits 4 and 5, above the nibble of its code. Row r has the even fields, row r + 8 the odd
     * ones. */
    const uint32_t up4 = top << 4, up2 = top << 2, down2 = shift_by(top, table.shift2);
    unrolled_for (int t = 0; t < 2; t++) {
        const uint32_t bytes = t == 0 ? 0x6240 : 0x7351;
        const uint32_t nibbles8 = shift_by(low[t], table.shift4),
                       row = bit_select<0x0f0f0f0fu>(low[t], prmt(up4, top, bytes)),
                       row8 = bit_select<0x0f0f0f0fu>(nibbles8, prmt(up2, down2, bytes));
        look_up_wide(row & 0x3f3f3f3fu, table, a[t][0], a[t][2]);
        look_up_wide(row8 & 0x3f3f3f3fu, table, a[t][1], a[t][3]);
    }
}

/* use(row tile, column tile, halves) for a key page. */
template <class C, int D, class F>
KVANT_INLINE void for_each_wide_key(const uint8_t *page, int lane, const WideTable &table, F &&use)
{
    constexpr int COLUMN_TILES = D / 16;
    constexpr int FIRST = 128 * COLUMN_TILES; /* words of the plane of 4 bits */
    static_assert(C::BITS == 6 && COLUMN_TILES % 2 == 0,
                  "words of the plane of 2 bits have two tiles");
    const uint32_t *plane = reinterpret_cast<const uint32_t *>(page);
    unrolled_for (int pair = 0; pair < COLUMN_TILES / 2; pair++) {
        uint32_t low[2][4], top[4];
        load_words<4>(plane + (64 * pair + lane) * 4, low[0]);
        load_words<4>(plane + (64 * pair + 32 + lane) * 4, low[1]);
        load_words<4>(plane + FIRST + (32 * pair + lane) * 4, top);
        unrolled_for (int rt = 0; rt < 4; rt++) {
            const uint32_t words[2] = { low[0][rt], low[1][rt] };
            uint32_t a[2][4];
            unpack_wide(words, top[rt], table, a);
            unrolled_for (int t = 0; t < 2; t++)
                use(rt, 2 * pair + t, a[t]);
        }
    }
}

} // namespace kvant
