/* vectors_zmm_vnni.h - 512-bit vectors and instructions by their template names, for levels with
 * VNNI. */
typedef __m512 vf;
typedef __m512i vi;

#define vf_set(x) _mm512_set1_ps(x)
#define vf_load(p) _mm512_load_ps(p)
#define vf_store(p, x) _mm512_store_ps(p, x)
#define vf_add(a, b) _mm512_add_ps(a, b)
#define vf_mul(a, b) _mm512_mul_ps(a, b)
#define vf_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vf_from_codes(v) _mm512_cvtepi32_ps(v)
#define vi_and(a, b) _mm512_and_si512(a, b)
#define vi_or(a, b) _mm512_or_si512(a, b)
#define vi_set(x) _mm512_set1_epi32(x)
#define vi_shift_right(v, n) _mm512_srli_epi32(v, n)
#define vi_shift_left(v, n) _mm512_slli_epi32(v, n)
#define vi_shift_right_by(v, n) _mm512_srl_epi32(v, _mm_cvtsi32_si128((int)(n)))
#define vi_store_aligned(p, v) _mm512_store_si512(p, v)
#define vi_load(p) _mm512_loadu_si512(p)
#define add_pairs(sum, a, b) _mm512_dpwssd_epi32(sum, a, b)

#define vi_shift_right_each(v, n) _mm512_srlv_epi32(v, n)

KVANT_INLINE vi vi_load_repeated(const uint32_t *p, uint32_t words)
{
    return words == 4 ? _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p))
                      : _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
}
