/* vectors_zmm.h - 512-bit vectors: the operations that levels avx512, avx512vnni and avx512vbmi
 * share. */
#include <immintrin.h>

#include "../../base/attributes.h"
#include "../kernels.h"

#define LANES 16u
#define vi_count unsigned
#define MM(op) _mm512_##op
#define MM_WHOLE(op) _mm512_##op##_si512

typedef __m512 vf;
typedef __m512i vi;

#define vi_load(p) _mm512_loadu_si512(p)
#define vi_store_aligned(p, v) _mm512_store_si512(p, v)
#define vi_repeat(quarter) _mm512_broadcast_i32x4(quarter)
#define vi_float_bits(x) _mm512_castps_si512(x)
#define vf_from_bits(v) _mm512_castsi512_ps(v)

KVANT_INLINE vi vi_load_repeated(const uint32_t *p, uint32_t words)
{
    return words == 4 ? vi_repeat(_mm_loadu_si128((const __m128i *)p))
                      : _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
}

KVANT_INLINE vi vi_spread_quads(vi v, uint32_t j)
{
    const vi first = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_epi32(_mm512_add_epi32(first, _mm512_set1_epi32((int)(4 * j))), v);
}

#include "vectors.h"
