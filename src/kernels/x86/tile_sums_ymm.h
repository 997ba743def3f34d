/* tile_sums_ymm.h - tile_sums with 256-bit vectors.
 *
 * Exchanging two neighbouring r of a word's lanes gives 8 positions of each column pair. Byte
 * shuffles look up low and high bytes of two fields at a time. Included after code_dots_ymm.h, with
 * its definitions. */

/* Vectors x that are multiplied together. Their 12 sums, 2 vectors of the tile, a broadcast and a
 * product fit the 16 registers. */
#define TILE_ROWS 6u
#define TILE_VECTORS 2u

/* The fields in the low nibbles: columns c below 8 have index 0, columns c + 8 have index 1. */
typedef struct field_pairs {
    vi at[2];
} field_pairs;

KVANT_INLINE field_pairs look_up_fields(const dot_tables *tables, uint32_t digit, vi codes)
{
    vi low = _mm256_shuffle_epi8(tables->low[digit], codes),
       high = _mm256_shuffle_epi8(tables->high[digit], codes);
    vi low_bytes = _mm256_set1_epi16(0xff);
    return (
        field_pairs){ { vi_or(vi_and(low, low_bytes), _mm256_slli_epi16(high, 8)),
                        vi_or(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(low_bytes, high)) } };
}

/* The value of a code is the sum of its digits' values. */
KVANT_INLINE void store_fields(const dot_tables *tables, uint32_t bits, const vi codes[2],
                               uint32_t shift, int32_t *first, int32_t *second)
{
    field_pairs f =
        look_up_fields(tables, 0, vi_and(vi_shift_right(codes[0], shift), vi_set(0x0f0f0f0f)));
    if (code_digits(bits) > 1) {
        field_pairs g =
            look_up_fields(tables, 1, vi_and(vi_shift_right(codes[1], shift), vi_set(0x0f0f0f0f)));
        for (uint32_t i = 0; i < 2; i++)
            f.at[i] = _mm256_add_epi16(f.at[i], g.at[i]);
    }
    vi_store_aligned(first, f.at[0]);
    vi_store_aligned(second, f.at[1]);
}

/* Writes pairs[16 h + 4 q] of column tile ct. */
KVANT_INLINE void make_pairs(const uint32_t *const *planes, uint32_t bits, uint32_t ct,
                             const dot_tables *tables, int32_t (*pairs)[KVANT_PAGE_TOKENS])
{
    for (uint32_t r = 0; r < 8; r += 2)
        for (uint32_t side = 0; side < 2; side++) {
            vi w[2][2];
            for (uint32_t digit = 0; digit < code_digits(bits); digit++) {
                vi a = nibble_word(planes, bits, digit, ct, 16 * r + 8 * side);
                vi b = nibble_word(planes, bits, digit, ct, 16 * r + 16 + 8 * side);
                w[0][digit] = _mm256_permute2x128_si256(a, b, 0x20);
                w[1][digit] = _mm256_permute2x128_si256(a, b, 0x31);
            }
            for (uint32_t i = 0; i < 2; i++) {
                int32_t *first = pairs[4 * (2 * side + i)] + 4 * r,
                        *second = pairs[4 * (2 * side + i) + 16] + 4 * r;
                store_fields(tables, bits, w[i], 0, first, second);
                store_fields(tables, bits, w[i], 4, first + 32, second + 32);
            }
        }
}

#include "../tile_sums_template.h"
