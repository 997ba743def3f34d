/* trellis_ymm.h - the search of trellis codes with 256-bit vectors. */
#define HALVES 16u
#define vh __m256i
#define vh_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define vh_store(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define vh_or(a, b) _mm256_or_si256(a, b)
#define vh_odd() _mm256_set1_epi32((int32_t)0xffff0000)
#define vh_min(a, b) _mm256_min_epu16(a, b)
#define vh_add_limited(a, b) _mm256_adds_epu16(a, b)
#define vh_repeat(p) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p)))
#define vh_pick(table, bytes) _mm256_shuffle_epi8(table, bytes)

KVANT_INLINE __m256i vh_least(__m256i v)
{
    const __m128i half = _mm_min_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return _mm256_broadcastw_epi16(_mm_minpos_epu16(half));
}

KVANT_INLINE __m256i vh_lower(__m256i v, __m256i least)
{
    return _mm256_or_si256(_mm256_sub_epi16(v, least),
                           _mm256_cmpeq_epi16(v, _mm256_set1_epi16(-1)));
}

KVANT_INLINE void vh_pair(__m256i a, __m256i b, __m256i out[2])
{
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    out[0] = _mm256_permute2x128_si256(low, high, 0x20);
    out[1] = _mm256_permute2x128_si256(low, high, 0x31);
}

KVANT_INLINE uint32_t below_mask(const __m256i a[2], const __m256i b[2])
{
    const __m256i equal =
        _mm256_packs_epi16(_mm256_cmpeq_epi16(a[0], b[0]), _mm256_cmpeq_epi16(a[1], b[1]));
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(equal, 0xd8));
}

#include "../trellis_template.h"
