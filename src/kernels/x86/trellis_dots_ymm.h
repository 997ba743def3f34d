/* trellis_dots_ymm.h - attention on trellis codes with 256-bit vectors. Included after
 * code_dots_ymm.h, with its definitions. */
/* Vectors x that are multiplied together. Their 12 sums, 2 vectors of levels and a mask fit the 16
 * registers. */
#define LEVEL_ROWS 3
#define each_operand for
#define vw_shift_left(v, n) _mm256_slli_epi32(v, (int)(n))
#define vw_shift_right(v, n) _mm256_srli_epi32(v, (int)(n))
#define vi_xor(a, b) _mm256_xor_si256(a, b)
#define vi_select(mask, a, b)                                                                      \
    _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b))
#define vi_rotate_left(v, n) _mm256_or_si256(vw_shift_left(v, n), vw_shift_right(v, 32 - (n)))
#define vi_rotate_four(v) _mm256_shuffle_epi32(v, 0x93)
#define vi_pick_bytes(v, index) _mm256_shuffle_epi8(v, index)
#define vi_odd_bytes(v) _mm256_srli_epi16(v, 8)

/* (q0 q1) (q2 q3) -> (q3 q0) (q1 q2) */
KVANT_INLINE void next_lanes(vi v[2])
{
    const vi first = v[0];
    v[0] = _mm256_permute2x128_si256(v[1], first, 0x21);
    v[1] = _mm256_permute2x128_si256(first, v[1], 0x21);
}

#include "trellis_levels.h"

KVANT_INLINE vi look_up_levels(const level_tables *tables, vi index, uint32_t bits)
{
    const vi low = vi_and(index, vi_set(0x0f0f0f0f));
    vi first = _mm256_shuffle_epi8(tables->at[0], low);
    if (bits == 2)
        return first;
    const vi fifth = vw_shift_left(index, 3);
    first = _mm256_blendv_epi8(first, _mm256_shuffle_epi8(tables->at[1], low), fifth);
    if (bits == 3)
        return first;
    const vi second = _mm256_blendv_epi8(_mm256_shuffle_epi8(tables->at[2], low),
                                         _mm256_shuffle_epi8(tables->at[3], low), fifth);
    return _mm256_blendv_epi8(first, second, vw_shift_left(index, 2));
}

KVANT_INLINE void store_lane_sums(int32_t *out, const vi sums[4])
{
    for (uint32_t r = 0; r < 4; r++) {
        const __m128i high = _mm256_extracti128_si256(sums[r], 1);
        _mm_store_si128((__m128i *)(out + 4 * r),
                        _mm_add_epi32(_mm256_castsi256_si128(sums[r]), high));
    }
}

#include "../trellis_dots_template.h"
#include "../trellis_packs_template.h"
#include "../trellis_values_template.h"
