/* trellis_zmm.h - the search of trellis codes with 512-bit vectors. */
#define HALVES 32u
#define vh __m512i
#define vh_load(p) _mm512_loadu_si512(p)
#define vh_store(p, v) _mm512_storeu_si512(p, v)
#define vh_or(a, b) _mm512_or_si512(a, b)
#define vh_odd() _mm512_set1_epi32((int32_t)0xffff0000)
#define vh_min(a, b) _mm512_min_epu16(a, b)
#define vh_add_limited(a, b) _mm512_adds_epu16(a, b)
#define vh_repeat(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p)))
#define vh_pick(table, bytes) _mm512_shuffle_epi8(table, bytes)
#define below_mask(a, b) _mm512_cmplt_epu16_mask((a)[0], (b)[0])

KVANT_INLINE __m512i vh_least(__m512i v)
{
    const __m256i half =
        _mm256_min_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    const __m128i quarter =
        _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return _mm512_broadcastw_epi16(_mm_minpos_epu16(quarter));
}

KVANT_INLINE __m512i vh_lower(__m512i v, __m512i least)
{
    const __mmask32 possible = _mm512_cmpneq_epu16_mask(v, _mm512_set1_epi16(-1));
    return _mm512_mask_sub_epi16(v, possible, v, least);
}

KVANT_INLINE void vh_pair(__m512i a, __m512i b, __m512i out[2])
{
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    out[0] = _mm512_permutex2var_epi64(low, first, high);
    out[1] = _mm512_permutex2var_epi64(low, second, high);
}

#include "../trellis_template.h"
