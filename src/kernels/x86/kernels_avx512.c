/* kernels_avx512.c - the kernels at level avx512 (F, BW, DQ, VL). */
#include <math.h>

#include "vectors_zmm.h"

#define NAME(function) function##_avx512
#define MATMUL_ROWS 6u /* 24 accumulators, 4 vectors of b and a broadcast in 32 registers */
#define MATMUL_VECTORS 4u

#define vf_round(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define vf_sum(x) _mm512_reduce_add_ps(x)
#define vf_scale(x, n) _mm512_scalef_ps(x, n)
#define vf_keep_above(x, y, limit)                                                                 \
    _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, _mm512_set1_ps(limit), _CMP_NLT_UQ), x)
#define half_load(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define half_store(p, x)                                                                           \
    _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT))
#define vi_largest(v) _mm512_reduce_max_epu32(v)
#define vi_store(p, v) _mm512_storeu_si512(p, v)
#define vi_store_words(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi32_epi16(v))
#define vf_repeat_four(p) _mm512_broadcast_f32x4(_mm_load_ps(p))
#define add_pairs(sum, a, b) _mm512_add_epi32(sum, _mm512_madd_epi16(a, b))
#define vi_load_bytes(p) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define vi_store_bytes(p, v) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8(v))
#define vi_add_where_above(v, a, b, n)                                                             \
    _mm512_mask_add_epi32(v, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), v, _mm512_set1_epi32(n))
#define vf_rsqrt(x) _mm512_rsqrt14_ps(x)
#define vf_store_first(p, x, n) _mm512_mask_storeu_ps(p, (__mmask16)((1u << (n)) - 1), x)
#define vf_at_least(a, b) ((uint32_t)_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ))
#define vi_any_equal(a, b) (_mm512_cmpeq_epi32_mask(a, b) != 0)

KVANT_INLINE vf vf_load_nibbles(const uint8_t *p)
{
    const vi to_top = _mm512_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    uint32_t words[2];
    memcpy(words, p, sizeof words);
    const vi both = _mm512_mask_set1_epi32(_mm512_set1_epi32((int)words[0]), 0xff00, (int)words[1]);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_sllv_epi32(both, to_top), 28));
}

KVANT_INLINE vf vf_load_quads(const float *p, const uint32_t *index, uint32_t step)
{
    vf x = _mm512_castps128_ps512(_mm_load_ps(p + (size_t)4 * index[0]));
    x = _mm512_insertf32x4(x, _mm_load_ps(p + (size_t)4 * index[step]), 1);
    x = _mm512_insertf32x4(x, _mm_load_ps(p + (size_t)4 * index[2 * step]), 2);
    return _mm512_insertf32x4(x, _mm_load_ps(p + (size_t)4 * index[3 * step]), 3);
}

KVANT_INLINE vf vf_swap(vf x, uint32_t distance)
{
    switch (distance) {
    case 1: return _mm512_permute_ps(x, 0xb1);
    case 2: return _mm512_permute_ps(x, 0x4e);
    case 4: return _mm512_shuffle_f32x4(x, x, 0xb1);
    default: return _mm512_shuffle_f32x4(x, x, 0x4e);
    }
}

KVANT_INLINE vf vf_negate_odd(vf x, uint32_t distance)
{
    __mmask16 odd = distance == 1   ? 0xaaaa
                    : distance == 2 ? 0xcccc
                    : distance == 4 ? 0xf0f0
                                    : 0xff00;
    return _mm512_mask_xor_ps(x, odd, x, _mm512_set1_ps(-0.0f));
}

KVANT_INLINE void vi_store_fours(int32_t *p, vi v)
{
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_si128((__m128i *)p, sum);
}

KVANT_INLINE vi vi_load_lanes(const uint32_t *p)
{
    vi v = _mm512_castsi128_si512(_mm_load_si128((const __m128i *)p));
    v = _mm512_inserti32x4(v, _mm_load_si128((const __m128i *)(p + 16)), 1);
    v = _mm512_inserti32x4(v, _mm_load_si128((const __m128i *)(p + 32)), 2);
    return _mm512_inserti32x4(v, _mm_load_si128((const __m128i *)(p + 48)), 3);
}

KVANT_INLINE vf table_look_up(const value_table *entries, const float *values, vi codes, uint32_t n)
{
    if (n <= 16)
        return _mm512_permutexvar_ps(codes, entries->low);
    if (n == 32)
        return _mm512_permutex2var_ps(entries->low, codes, entries->high);
    return _mm512_i32gather_ps(codes, values, 4);
}

#include "code_dots_zmm.h"
#include "tile_sums_zmm.h"
#include "look_up_template.h"
#include "unpack_template.h"
#include "key_halves.h"
#include "../chunk_tiles_template.h"
#include "blocks_zmm.h"
#include "blocks_template.h"
#include "chunk_dots_zmm.h"
#include "trellis_zmm.h"
#include "trellis_dots_zmm.h"
#include "packs.h"
#include "../simd_template.h"
