/* chunk_dots_ymm.h - chunk_dots with 256-bit vectors: entries are loaded one by one, 64 bits each.
 * Included after code_dots_ymm.h. The including file defines everything else that
 * chunk_dots_template.h asks for. */

#define CHUNK_ROWS 6u
#define CHUNK_VECTORS 2u

/* Low and high bytes of 16 lengths, twice each. */
typedef struct length_table {
    vi low, high;
} length_table;

KVANT_INLINE length_table load_lengths(const int16_t *lengths)
{
    length_table table;
    split_bytes(lengths, &table.low, &table.high);
    return table;
}

KVANT_INLINE void vi_store_some(int32_t *p, vi v, uint32_t n)
{
    const vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_maskstore_epi32(p, _mm256_cmpgt_epi32(vi_set((int)n), lane), v);
}

/* Bytes with their top bit set look up zeros. */
KVANT_INLINE vi look_up_lengths(length_table table, vi v)
{
    vi low = _mm256_shuffle_epi8(table.low, _mm256_or_si256(v, _mm256_set1_epi16((short)0x8000)));
    return vi_or(low, _mm256_shuffle_epi8(table.high,
                                          vi_or(_mm256_slli_epi16(v, 8), _mm256_set1_epi16(0x80))));
}

KVANT_INLINE __m128i two_entries(const int16_t *entries, uint32_t a, uint32_t b)
{
    __m128i low = _mm_loadl_epi64((const __m128i *)(entries + (size_t)4 * a));
    return _mm_unpacklo_epi64(low, _mm_loadl_epi64((const __m128i *)(entries + (size_t)4 * b)));
}

KVANT_INLINE vi four_entries(const int16_t *entries, const uint16_t *index, uint32_t a, uint32_t b,
                             uint32_t c, uint32_t d)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(two_entries(entries, index[a], index[b])),
                                   two_entries(entries, index[c], index[d]), 1);
}

KVANT_INLINE void fetch_rows(const int16_t *entries, vi words, uint32_t odd, vi rows[2])
{
    _Alignas(32) uint16_t index[16];
    _mm256_store_si256((__m256i *)index, words);
    const uint16_t *at = index + odd;
    __m256 a = _mm256_castsi256_ps(four_entries(entries, at, 0, 2, 8, 10)),
           b = _mm256_castsi256_ps(four_entries(entries, at, 4, 6, 12, 14));
    rows[0] = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    rows[1] = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
}

/* Loads the entries of four words from 4 half on. Even entries go to the first 128 bits, odd
 * entries to the second. */
KVANT_INLINE void fetch_pairs(const int16_t *entries, vi words, uint32_t half, vi pairs[2])
{
    _Alignas(32) uint16_t index[16];
    _mm256_store_si256((__m256i *)index, words);
    const uint16_t *at = index + 8 * half;
    vi a = four_entries(entries, at, 0, 4, 2, 6), b = four_entries(entries, at, 1, 5, 3, 7);
    pairs[0] = _mm256_unpacklo_epi16(a, b);
    pairs[1] = _mm256_unpackhi_epi16(a, b);
}

KVANT_INLINE void fetch_quads(const int16_t *entries, vi words, vi quads[4])
{
    _Alignas(32) uint16_t index[16];
    _mm256_store_si256((__m256i *)index, words);
    for (uint32_t half = 0; half < 2; half++) {
        const uint16_t *at = index + 4 * half;
        vi a = four_entries(entries, at, 0, 2, 8, 10), b = four_entries(entries, at, 1, 3, 9, 11);
        quads[2 * half] = _mm256_unpacklo_epi16(a, b);
        quads[2 * half + 1] = _mm256_unpackhi_epi16(a, b);
    }
}

/* Looking up 16-bit words in registers would take a dozen instructions here, so entries are loaded
 * from memory. */
#include "../octahedral_from_memory.h"

#include "../chunk_dots_template.h"
