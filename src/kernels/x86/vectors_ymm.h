/* vectors_ymm.h - 256-bit vectors: the operations that levels avx2 and avx2vnni share. */
#include <immintrin.h>

#include "../../base/attributes.h"
#include "../kernels.h"

#define LANES 8u
#define vi_count int
#define MM(op) _mm256_##op
#define MM_WHOLE(op) _mm256_##op##_si256

typedef __m256 vf;
typedef __m256i vi;

#define vi_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define vi_repeat(quarter) _mm256_broadcastsi128_si256(quarter)
#define vi_load_repeated(p, words) vi_repeat(_mm_loadu_si128((const __m128i *)(p))) /* 4 */
#define vi_float_bits(x) _mm256_castps_si256(x)
#define vf_from_bits(v) _mm256_castsi256_ps(v)
#define vi_store_aligned(p, v) _mm256_store_si256((__m256i *)(p), v)

KVANT_INLINE vi vi_spread_quads(vi v, uint32_t j)
{
    const vi first = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return _mm256_permutevar8x32_epi32(v, _mm256_add_epi32(first, _mm256_set1_epi32((int)(2 * j))));
}

#include "vectors.h"
