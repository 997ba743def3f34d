/* tile_dots_ymm.h - tile_dots with 256-bit vectors: two neighbouring r of a word's lanes, exchanged, are 8 positions of each
 * column pair; byte shuffles look up low and high bytes of two fields at a time. Needs what code_dots_ymm.h needs, included before. */

#define TILE_LANES 8u
#define TILE_ROWS 6u /* 12 sums, 2 vectors of the tile, a broadcast and a product in 16 registers */
#define TILE_VECTORS 2u

typedef byte_table pair_table;

#define vi_store_aligned(p, v) _mm256_store_si256((__m256i *)(p), v)
#define add_pairs(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))

KVANT_INLINE vi vi_pair_columns(vi v)
{
    const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(order));
}

#define load_pair_table(values) load_byte_table(values)

/* Columns c < 8 and c + 8 of the fields in the low nibbles. */
KVANT_INLINE void store_fields(byte_table table, vi codes, int32_t *first, int32_t *second)
{
    vi low = _mm256_shuffle_epi8(table.low, codes), high = _mm256_shuffle_epi8(table.high, codes);
    vi low_bytes = _mm256_set1_epi16(0xff);
    vi_store_aligned(first, vi_or(vi_and(low, low_bytes), _mm256_slli_epi16(high, 8)));
    vi_store_aligned(second, vi_or(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(low_bytes, high)));
}

/* pairs[16 h + 4 q]: of column tile ct. */
KVANT_INLINE void make_pairs(const kvant_layout *layout, uint32_t bits, const uint32_t *words, uint32_t group,
                             uint32_t ct, const pair_table *table, int32_t (*pairs)[KVANT_PAGE_TOKENS])
{
    for (uint32_t r = 0; r < 8; r += 2)
        for (uint32_t side = 0; side < 2; side++) {
            vi a = nibble_word(layout, bits, words, group, ct, 16 * r + 8 * side);
            vi b = nibble_word(layout, bits, words, group, ct, 16 * r + 16 + 8 * side);
            vi w[2] = { _mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31) };
            for (uint32_t i = 0; i < 2; i++) {
                int32_t *first = pairs[4 * (2 * side + i)] + 4 * r,
                        *second = pairs[4 * (2 * side + i) + 16] + 4 * r;
                store_fields(*table, vi_and(w[i], vi_set(0x0f0f0f0f)), first, second);
                store_fields(*table, vi_and(vi_shift_right(w[i], 4), vi_set(0x0f0f0f0f)), first + 32, second + 32);
            }
        }
}

#include "../tile_dots_template.h"
