/* kernels_avx2_vnni.c - the kernels that level avx2vnni adds to avx2: one instruction multiplies
 * 16-bit pairs and adds the products. */
#include <immintrin.h>
#include <stdbool.h>
#include <string.h>

#include "../../base/attributes.h"
#include "../kernels.h"

#define NAME(function) function##_avx2_vnni
#define LANES 8u

typedef __m256 vf;
typedef __m256i vi;

#define vf_set(x) _mm256_set1_ps(x)
#define vf_load(p) _mm256_load_ps(p)
#define vf_store(p, x) _mm256_store_ps(p, x)
#define vf_add(a, b) _mm256_add_ps(a, b)
#define vf_mul(a, b) _mm256_mul_ps(a, b)
#define vf_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vf_from_codes(v) _mm256_cvtepi32_ps(v)
#define vi_and(a, b) _mm256_and_si256(a, b)
#define vi_or(a, b) _mm256_or_si256(a, b)
#define vi_set(x) _mm256_set1_epi32(x)
#define vi_add(a, b) _mm256_add_epi32(a, b)
#define vi_shift_left(v, n) _mm256_slli_epi32(v, n)
#define vi_shift_right(v, n) _mm256_srli_epi32(v, n)
#define vi_shift_right_by(v, n) _mm256_srl_epi32(v, _mm_cvtsi32_si128((int)(n)))
#define vi_shift_right_each(v, n) _mm256_srlv_epi32(v, n)
#define vi_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define vi_load_repeated(p, words) _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(p))) /* 4 */
#define add_pairs(sum, a, b) _mm256_dpwssd_avx_epi32(sum, a, b)

#include "code_dots_ymm.h"
#include "tile_sums_ymm.h"
#include "chunk_dots_ymm.h"

#include "trellis_dots_ymm.h"

void kvant_kernels_init_avx2_vnni(kvant_kernels *kernels)
{
    kernels->code_dots = NAME(code_dots);
    kernels->tile_sums = NAME(tile_sums);
    kernels->chunk_dots = NAME(chunk_dots);
    kernels->trellis_dots = NAME(trellis_dots);
}
