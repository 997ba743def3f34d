/* trellis_dots_zmm.h - attention on trellis codes with 512-bit vectors. Needs the definitions of
 * code_dots_zmm.h. */
#include "fold_zmm.h"

#define LEVEL_ROWS 4 /* vectors x that are multiplied together: 16 sums */
#ifdef __AVX512VNNI__
#define each_operand _Pragma("GCC unroll 4") for
#else
#define each_operand for /* not unrolled: a product and its sum in separate registers would spill */
#endif
#define vw_shift_left(v, n) _mm512_slli_epi32(v, (unsigned)(n))
#define vw_shift_right(v, n) _mm512_srli_epi32(v, (unsigned)(n))
#define vi_xor(a, b) _mm512_xor_si512(a, b)
#define vi_select(mask, a, b) _mm512_ternarylogic_epi32(mask, a, b, 0xca)
#define vi_rotate_left(v, n)                                                                       \
    _mm512_rolv_epi32(v, _mm512_set1_epi32((int)(n))) /* n is constant only after inlining */
#define vi_rotate_four(v) _mm512_shuffle_epi32(v, _MM_PERM_CBAD)
#define next_lanes(v) ((v)[0] = _mm512_shuffle_i64x2((v)[0], (v)[0], 0x93))
#define vi_pick_bytes(v, index) _mm512_shuffle_epi8(v, index)
#define vi_odd_bytes(v) _mm512_srli_epi16(v, 8)

#ifdef __AVX512VBMI__    /* level avx512vbmi */
typedef vi level_tables; /* 64 bytes, fewer levels repeated */

#define load_levels(levels) vi_load(levels)

/* The bytes of a word moved up by one; the lowest byte becomes the highest byte of the word 4 lanes
 * before, around the vector. */
KVANT_INLINE vi vi_bytes_before(vi v)
{
    const vi below =
        _mm512_set_epi32(0x3e3d3c2f, 0x3a39382b, 0x36353427, 0x32313023, 0x2e2d2c1f, 0x2a29281b,
                         0x26252417, 0x22212013, 0x1e1d1c0f, 0x1a19180b, 0x16151407, 0x12111003,
                         0x0e0d0c3f, 0x0a09083b, 0x06050437, 0x02010033);
    return _mm512_permutexvar_epi8(below, v);
}
#define vi_bytes_before vi_bytes_before

KVANT_INLINE vi look_up_levels(const level_tables *tables, vi index, uint32_t bits)
{
    (void)bits;
    return _mm512_permutexvar_epi8(index, *tables);
}
#else
#include "trellis_levels.h"

KVANT_INLINE vi look_up_levels(const level_tables *tables, vi index, uint32_t bits)
{
    const vi low = vi_and(index, vi_set(0x0f0f0f0f));
    vi found = _mm512_shuffle_epi8(tables->at[0], low);
    if (bits == 2)
        return found;
    const __mmask64 fifth = _mm512_movepi8_mask(vw_shift_left(index, 3));
    found = _mm512_mask_shuffle_epi8(found, fifth, tables->at[1], low);
    if (bits == 3)
        return found;
    const __mmask64 sixth = _mm512_movepi8_mask(vw_shift_left(index, 2));
    found = _mm512_mask_shuffle_epi8(found, sixth & ~fifth, tables->at[2], low);
    return _mm512_mask_shuffle_epi8(found, sixth & fifth, tables->at[3], low);
}
#endif

KVANT_INLINE void store_lane_sums(int32_t *out, const vi sums[4])
{
    _mm512_store_si512(out, fold_quad(fold_pair(sums[0], sums[1]), fold_pair(sums[2], sums[3])));
}

#include "../trellis_dots_template.h"
#include "../trellis_packs_template.h"
#include "../trellis_values_template.h"
