/* chunk_dots_zmm.h - chunk_dots with 512-bit vectors: entries are gathered, 8 at a time. The
 * including file defines vi_store_aligned and everything else that chunk_dots_template.h asks
 * for. */

#define CHUNK_ROWS 6u
#define CHUNK_VECTORS 4u

typedef vi length_table;

/* The index of a 16-bit permutation has 5 bits, so the 16 entries are stored twice. */
#define load_lengths(p) _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(p)))
#define look_up_lengths(table, v) _mm512_permutexvar_epi16(v, table)

#define vi_store_some(p, v, n)                                                                     \
    _mm512_mask_storeu_epi32(p, (__mmask16)((n) < 16 ? (1u << (n)) - 1 : 0xffff), v)

#define gather_entries(entries, index)                                                             \
    _mm512_i32gather_epi64(index, (const long long *)(entries), 8)

KVANT_INLINE vi index_of(vi words, uint32_t odd)
{
    return odd ? _mm512_srli_epi32(words, 16) : _mm512_and_si512(words, _mm512_set1_epi32(0xffff));
}

KVANT_INLINE void fetch_rows(const int16_t *entries, vi words, uint32_t odd, vi rows[2])
{
    vi index = index_of(words, odd);
    vi a = gather_entries(entries, _mm512_castsi512_si256(index));
    vi b = gather_entries(entries, _mm512_extracti64x4_epi64(index, 1));
    const vi even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    rows[0] = _mm512_permutex2var_epi32(a, even, b);
    rows[1] = _mm512_permutex2var_epi32(a, _mm512_or_si512(even, _mm512_set1_epi32(1)), b);
}

/* Gathers the entries of the 8 words in the order 0 4 1 5 2 6 3 7. After interleaving them with the
 * entries of the second code, the low and the high half have four words each, in order. */
KVANT_INLINE void fetch_pairs(const int16_t *entries, vi words, uint32_t half, vi pairs[2])
{
    const vi order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    vi ordered = _mm512_permutexvar_epi32(order, words);
    __m256i some = half ? _mm512_extracti64x4_epi64(ordered, 1) : _mm512_castsi512_si256(ordered);
    vi a = gather_entries(entries, _mm256_and_si256(some, _mm256_set1_epi32(0xffff)));
    vi b = gather_entries(entries, _mm256_srli_epi32(some, 16));
    pairs[0] = _mm512_unpacklo_epi16(a, b);
    pairs[1] = _mm512_unpackhi_epi16(a, b);
}

KVANT_INLINE void fetch_quads(const int16_t *entries, vi words, vi quads[4])
{
    const vi order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    vi ordered = _mm512_permutexvar_epi32(order, words);
    for (uint32_t half = 0; half < 2; half++) {
        __m256i some =
            half ? _mm512_extracti64x4_epi64(ordered, 1) : _mm512_castsi512_si256(ordered);
        vi a = gather_entries(entries, _mm256_and_si256(some, _mm256_set1_epi32(0xffff)));
        vi b = gather_entries(entries, _mm256_srli_epi32(some, 16));
        quads[2 * half] = _mm512_unpacklo_epi16(a, b);
        quads[2 * half + 1] = _mm512_unpackhi_epi16(a, b);
    }
}

/* A permutation reads 5 bits of an index and ignores the upper bits. Computing entries takes half
 * as long as gathering them. */
#define CAN_COMPUTE true

typedef struct octahedral_table {
    vi levels, base, slope;
} octahedral_table;

KVANT_INLINE octahedral_table load_octahedral(const kvant_octahedral_integers *o)
{
    return (octahedral_table){ _mm512_loadu_si512(o->levels), _mm512_loadu_si512(o->base),
                               _mm512_loadu_si512(o->slope) };
}

KVANT_INLINE vi vi_clamp_words(vi x, vi most)
{
    return _mm512_max_epi16(_mm512_min_epi16(x, most),
                            _mm512_sub_epi16(_mm512_setzero_si512(), most));
}

/* kvant_octahedral_entry, for both codes of each word. */
KVANT_INLINE void compute_triplets(const octahedral_table *table, uint32_t bits, vi codes, vi x[3])
{
    const vi unit = _mm512_set1_epi16(KVANT_OCTAHEDRAL_UNIT);
    vi u = _mm512_permutexvar_epi16(codes, table->levels);
    vi w = _mm512_permutexvar_epi16(vi_shift_right_words(codes, bits), table->levels);
    vi a = _mm512_abs_epi16(u), most = _mm512_sub_epi16(unit, _mm512_abs_epi16(w));
    x[0] = vi_clamp_words(u, most);
    x[1] = vi_clamp_words(w, _mm512_sub_epi16(unit, a));
    x[2] = _mm512_sub_epi16(most, a);
    vi squares =
        _mm512_add_epi16(_mm512_add_epi16(vi_scale_words(x[0], x[0]), vi_scale_words(x[1], x[1])),
                         vi_scale_words(x[2], x[2]));
    vi piece = _mm512_srli_epi16(squares, 10);
    vi slope = vi_scale_words(squares, _mm512_permutexvar_epi16(piece, table->slope));
    vi inverse = _mm512_add_epi16(_mm512_permutexvar_epi16(piece, table->base), slope);
    for (uint32_t j = 0; j < 3; j++)
        x[j] = vi_scale_words(x[j], inverse);
}

#include "../chunk_dots_template.h"
