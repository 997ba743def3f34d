/* kernels_avx2.c - the kernels at level avx2 (AVX2, FMA, F16C). */
#include <math.h>

#include "vectors_ymm.h"

#define NAME(function) function##_avx2
#define MATMUL_ROWS 6u /* 12 accumulators, 2 vectors of b and a broadcast in 16 registers */
#define MATMUL_VECTORS 2u

#define vf_round(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define vf_keep_above(x, y, limit)                                                                 \
    _mm256_and_ps(x, _mm256_cmp_ps(y, _mm256_set1_ps(limit), _CMP_NLT_UQ))
#define half_load(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define half_store(p, x)                                                                           \
    _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT))
#define vi_store(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define vf_repeat_four(p) _mm256_broadcast_ps((const __m128 *)(p))
#define add_pairs(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
#define vi_load_bytes(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define vi_add_where_above(v, a, b, n)                                                             \
    _mm256_add_epi32(v, _mm256_and_si256(_mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_GT_OQ)),     \
                                         _mm256_set1_epi32(n)))
#define vf_rsqrt(x) _mm256_rsqrt_ps(x)
#define vf_at_least(a, b) ((uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)))
#define vi_any_equal(a, b) (_mm256_movemask_epi8(_mm256_cmpeq_epi32(a, b)) != 0)

KVANT_INLINE vf vf_load_nibbles(const uint8_t *p)
{
    const vi to_top = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    uint32_t word;
    memcpy(&word, p, sizeof word);
    const vi nibbles = _mm256_sllv_epi32(_mm256_set1_epi32((int)word), to_top);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(nibbles, 28));
}

KVANT_INLINE void vf_store_first(float *p, vf x, uint32_t n)
{
    const vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane), x);
}

KVANT_INLINE vf vf_load_quads(const float *p, const uint32_t *index, uint32_t step)
{
    vf x = _mm256_castps128_ps256(_mm_load_ps(p + (size_t)4 * index[0]));
    return _mm256_insertf128_ps(x, _mm_load_ps(p + (size_t)4 * index[step]), 1);
}

KVANT_INLINE void vi_store_bytes(uint8_t *p, vi v)
{
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}

KVANT_INLINE void vi_store_words(int16_t *p, vi v)
{
    _mm_storeu_si128((__m128i *)p,
                     _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}

KVANT_INLINE void vi_store_fours(int32_t *p, vi v)
{
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storeu_si128((__m128i *)p, sum);
}

KVANT_INLINE uint32_t vi_largest(vi v)
{
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}

KVANT_INLINE vf vf_swap(vf x, uint32_t distance)
{
    switch (distance) {
    case 1: return _mm256_permute_ps(x, 0xb1);
    case 2: return _mm256_permute_ps(x, 0x4e);
    default: return _mm256_permute2f128_ps(x, x, 1);
    }
}

KVANT_INLINE vf vf_negate_odd(vf x, uint32_t distance)
{
    const float minus = -0.0f;
    __m256 signs = distance == 1   ? _mm256_setr_ps(0, minus, 0, minus, 0, minus, 0, minus)
                   : distance == 2 ? _mm256_setr_ps(0, 0, minus, minus, 0, 0, minus, minus)
                                   : _mm256_setr_ps(0, 0, 0, 0, minus, minus, minus, minus);
    return _mm256_xor_ps(x, signs);
}

KVANT_INLINE float vf_sum(vf x)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* x 2^n. n is a whole number of at least -126 wherever the result is used. */
KVANT_INLINE vf vf_scale(vf x, vf n)
{
    vi exponent =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}

KVANT_INLINE vi vi_load_lanes(const uint32_t *p)
{
    vi v = _mm256_castsi128_si256(_mm_load_si128((const __m128i *)p));
    return _mm256_inserti128_si256(v, _mm_load_si128((const __m128i *)(p + 16)), 1);
}

KVANT_INLINE vf table_look_up(const value_table *entries, const float *values, vi codes, uint32_t n)
{
    if (n <= 8)
        return _mm256_permutevar8x32_ps(entries->low, codes);
    if (n == 16) {
        vf low = _mm256_permutevar8x32_ps(entries->low, codes),
           high = _mm256_permutevar8x32_ps(entries->high, codes);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
    }
    return _mm256_i32gather_ps(values, codes, 4);
}

#include "code_dots_ymm.h"
#include "tile_sums_ymm.h"
#include "look_up_template.h"
#include "unpack_template.h"
#include "key_halves.h"
#include "../chunk_tiles_template.h"
#include "blocks_ymm.h"
#include "blocks_template.h"
#include "chunk_dots_ymm.h"
#include "trellis_ymm.h"
#include "trellis_dots_ymm.h"
#include "packs.h"
#include "../simd_template.h"
