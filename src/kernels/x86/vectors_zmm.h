/* vectors_zmm.h - 512-bit vectors: the operations that levels avx512, avx512vnni and avx512vbmi
 * share. */
#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

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

KVANT_INLINE vi vi_load_repeated(const uint32_t *p, uint32_t words)
{
    return words == 4 ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p))
                      : _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
}

#include "vectors.h"
