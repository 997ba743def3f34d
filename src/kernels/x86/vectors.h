/* vectors.h - operations that both widths have, under the templates' names. The including
 * vectors_ymm.h and vectors_zmm.h define MM(op), an instruction of the width, and MM_WHOLE(op), an
 * instruction on all bits. They also define vi_count, the type of a constant shift count in the
 * width's instructions, vi_repeat(quarter), which repeats 128 bits, vi_float_bits(x),
 * vf_from_bits(v) and vi_spread_quads(v, j). */
#define vf_zero() MM(setzero_ps)()
#define vf_set(x) MM(set1_ps)(x)
#define vf_load(p) MM(load_ps)(p)
#define vf_load_unaligned(p) MM(loadu_ps)(p)
#define vf_store(p, x) MM(store_ps)(p, x)
#define vf_store_unaligned(p, x) MM(storeu_ps)(p, x)
#define vf_add(a, b) MM(add_ps)(a, b)
#define vf_sub(a, b) MM(sub_ps)(a, b)
#define vf_mul(a, b) MM(mul_ps)(a, b)
#define vf_fma(a, b, c) MM(fmadd_ps)(a, b, c)
#define vf_fnma(a, b, c) MM(fnmadd_ps)(a, b, c)
#define vf_min(a, b) MM(min_ps)(a, b)
#define vf_max(a, b) MM(max_ps)(a, b)
#define vf_and(a, b) MM(and_ps)(a, b)
#define vf_xor(a, b) MM(xor_ps)(a, b)
#define vf_absolute(x) MM(andnot_ps)(vf_set(-0.0f), x)
#define vf_from_codes(v) MM(cvtepi32_ps)(v)
#define vf_unpack_low(a, b) MM(unpacklo_ps)(a, b)
#define vf_unpack_high(a, b) MM(unpackhi_ps)(a, b)
#define vf_low_halves(a, b) MM(castpd_ps)(MM(unpacklo_pd)(MM(castps_pd)(a), MM(castps_pd)(b)))
#define vf_high_halves(a, b) MM(castpd_ps)(MM(unpackhi_pd)(MM(castps_pd)(a), MM(castps_pd)(b)))

#define vi_set(x) MM(set1_epi32)(x)
#define vi_and(a, b) MM_WHOLE (and)(a, b)
#define vi_or(a, b) MM_WHOLE(or)(a, b)
#define vi_add(a, b) MM(add_epi32)(a, b)
#define vi_max_unsigned(a, b) MM(max_epu32)(a, b)
#define vi_shift_left(v, n) MM(slli_epi32)(v, (vi_count)(n))
#define vi_shift_left_by(v, n) MM(sll_epi32)(v, _mm_cvtsi32_si128((int)(n)))
#define vi_shift_left_each(v, n) MM(sllv_epi32)(v, n)
#define vi_shift_right(v, n) MM(srli_epi32)(v, (vi_count)(n))
#define vi_shift_right_by(v, n) MM(srl_epi32)(v, _mm_cvtsi32_si128((int)(n)))
#define vi_shift_right_each(v, n) MM(srlv_epi32)(v, n)
#define vi_shift_right_words(v, n) MM(srl_epi16)(v, _mm_cvtsi32_si128((int)(n)))
#define vi_multiply_words(a, b) MM(mullo_epi16)(a, b)
#define vi_scale_words(a, b) MM(mulhrs_epi16)(a, b)
#define vi_low_dwords(a, b) MM(unpacklo_epi32)(a, b)
#define vi_high_dwords(a, b) MM(unpackhi_epi32)(a, b)
#define vi_low_qwords(a, b) MM(unpacklo_epi64)(a, b)
#define vi_high_qwords(a, b) MM(unpackhi_epi64)(a, b)
#define vi_from_whole(x) MM(cvtps_epi32)(x)
#define vi_load_float_bits(p) vi_float_bits(vf_load_unaligned(p))
#define vi_store_float_bits(p, v) vf_store_unaligned(p, vf_from_bits(v))
#define vf_spread_quads(x, j) vf_from_bits(vi_spread_quads(vi_float_bits(x), j))

/* Byte shuffles. Number i of four of two columns lies side by side in 128 bits. */
static const uint32_t column_pairs[4] = { 0x09080100, 0x0b0a0302, 0x0d0c0504, 0x0f0e0706 };

KVANT_INLINE vi vi_pair_words(vi v)
{
    const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return MM(shuffle_epi8)(v, vi_repeat(order));
}

KVANT_INLINE vi vi_double_words(vi v, uint32_t odd)
{
    const __m128i even = _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
    return MM(shuffle_epi8)(v, vi_repeat(odd ? _mm_add_epi8(even, _mm_set1_epi8(2)) : even));
}

/* Numbers in two registers, for table_look_up. */
typedef struct value_table {
    vf low, high;
} value_table;

/* values has at least 2 LANES readable floats, whatever n is. */
KVANT_INLINE value_table table_load(const float *values, uint32_t n)
{
    (void)n;
    return values ? (value_table){ vf_load_unaligned(values), vf_load_unaligned(values + LANES) }
                  : (value_table){ vf_zero(), vf_zero() };
}
