/* tile_sums_zmm.h - tile_sums with 512-bit vectors.
 *
 * Transposing four neighbouring r of a word's lanes gives 16 positions of each column pair. One
 * permutation looks up both codes of a field. Included after code_dots_zmm.h, with its
 * definitions. */

/* Vectors x that are multiplied together. Their 24 sums, 4 vectors of the tile and a broadcast fit
 * the 32 registers. */
#define TILE_ROWS 6u
#define TILE_VECTORS 4u

KVANT_INLINE void transpose_lanes(vi w[4])
{
    vi a = _mm512_shuffle_i32x4(w[0], w[1], 0x44), b = _mm512_shuffle_i32x4(w[2], w[3], 0x44);
    vi c = _mm512_shuffle_i32x4(w[0], w[1], 0xee), d = _mm512_shuffle_i32x4(w[2], w[3], 0xee);
    w[0] = _mm512_shuffle_i32x4(a, b, 0x88);
    w[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
    w[2] = _mm512_shuffle_i32x4(c, d, 0x88);
    w[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

/* The value of a code is the sum of its digits' values. */
KVANT_INLINE word_fields look_up_digits(const dot_tables *tables, uint32_t bits, vi low, vi high)
{
    word_fields f = look_up(tables->at[0], low);
    if (code_digits(bits) == 1)
        return f;
    word_fields g = look_up(tables->at[1], high);
    for (uint32_t i = 0; i < 4; i++)
        f.at[i / 2][i % 2] = _mm512_add_epi16(f.at[i / 2][i % 2], g.at[i / 2][i % 2]);
    return f;
}

/* Writes pairs[16 h + 4 q] of column tile ct. */
KVANT_INLINE void make_pairs(const uint32_t *const *planes, uint32_t bits, uint32_t ct,
                             const dot_tables *tables, int32_t (*pairs)[KVANT_PAGE_TOKENS])
{
    for (uint32_t r = 0; r < 8; r += 4) {
        vi w[2][4];
        for (uint32_t digit = 0; digit < code_digits(bits); digit++) {
            unrolled_for (uint32_t i = 0; i < 4; i++)
                w[digit][i] = nibble_word(planes, bits, digit, ct, 16 * (r + i));
            transpose_lanes(w[digit]);
        }
        unrolled_for (uint32_t q = 0; q < 4; q++) {
            word_fields f = look_up_digits(tables, bits, w[0][q], w[code_digits(bits) - 1][q]);
            for (uint32_t h = 0; h < 2; h++) {
                vi_store_aligned(pairs[16 * h + 4 * q] + 4 * r, f.at[0][h]);
                vi_store_aligned(pairs[16 * h + 4 * q] + 4 * r + 32, f.at[1][h]);
            }
        }
    }
}

#include "../tile_sums_template.h"
