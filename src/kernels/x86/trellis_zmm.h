/* trellis_zmm.h - the search of trellis codes with 512-bit vectors. */
#define HALVES 32u
#define PATH_IN_PLACE "x86/trellis_in_place.h" /* for 256 states */
#define vh __m512i
#define vh_load(p) _mm512_loadu_si512(p)
#define vh_store(p, v) _mm512_storeu_si512(p, v)
#define vh_set(x) _mm512_set1_epi16(x)
#define vh_sub(a, b) _mm512_sub_epi16(a, b)
#define vh_min(a, b) _mm512_min_epu16(a, b)
#define vh_add_limited(a, b) _mm512_adds_epu16(a, b)
#define vh_repeat(p) _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(p)))
#define vh_swap_pairs(v) _mm512_shuffle_epi32(v, _MM_PERM_CDAB)
#define vh_pick(table, bytes) _mm512_shuffle_epi8(table, bytes)
#define below_mask(a, b) _mm512_cmplt_epu16_mask((a)[0], (b)[0])

KVANT_INLINE void vh_pair(__m512i a, __m512i b, __m512i out[2])
{
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    out[0] = _mm512_permutex2var_epi64(low, first, high);
    out[1] = _mm512_permutex2var_epi64(low, second, high);
}

#include "../trellis_template.h"
