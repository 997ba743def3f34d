/* trellis.h - definitions for trellis_template.h and trellis_dots_template.h with 128-bit vectors.
 * Included after chunks.h. */
#define HALVES 8u
#define vh uint16x8_t
#define vh_load(p) vld1q_u16((const uint16_t *)(const void *)(p))
#define vh_store(p, v) vst1q_u16(p, v)
#define vh_or(a, b) vorrq_u16(a, b)
#define vh_odd() vreinterpretq_u16_u32(vdupq_n_u32(0xffff0000))
#define vh_least(v) vdupq_n_u16(vminvq_u16(v))
#define vh_lower(v, least) vorrq_u16(vsubq_u16(v, least), vceqq_u16(v, vdupq_n_u16(UINT16_MAX)))
#define vh_min(a, b) vminq_u16(a, b)
#define vh_add_limited(a, b) vqaddq_u16(a, b)
#define vh_repeat(p) vld1q_u16(p)
#define vh_pick(table, bytes)                                                                      \
    vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_u16(table), vreinterpretq_u8_u16(bytes)))

KVANT_INLINE void vh_pair(uint16x8_t a, uint16x8_t b, uint16x8_t out[2])
{
    out[0] = vzip1q_u16(a, b);
    out[1] = vzip2q_u16(a, b);
}

KVANT_INLINE uint32_t below_mask(const uint16x8_t a[4], const uint16x8_t b[4])
{
    const uint16x8_t weights = { 1, 2, 4, 8, 16, 32, 64, 128 };
    uint32_t mask = 0;
#pragma GCC unroll 4
    for (uint32_t v = 0; v < 4; v++)
        mask |= (uint32_t)vaddvq_u16(vandq_u16(vcltq_u16(a[v], b[v]), weights)) << 8 * v;
    return mask;
}

#include "../trellis_template.h"

#define LEVEL_ROWS 4 /* 16 sums */
#define each_operand for
#define vw_shift_left(v, n) vshlq_u32(v, vdupq_n_s32((int32_t)(n)))
#define vw_shift_right(v, n) vshlq_u32(v, vdupq_n_s32(-(int32_t)(n)))
#define vi_xor(a, b) veorq_u32(a, b)
#define vi_select(mask, a, b) vbslq_u32(mask, a, b)
#define vi_rotate_left(v, n) vorrq_u32(vw_shift_left(v, n), vw_shift_right(v, 32 - (n)))
#define vi_rotate_four(v) vextq_u32(v, v, 3)
#define vi_odd_bytes(v) vreinterpretq_u32_u16(vshrq_n_u16(vreinterpretq_u16_u32(v), 8))
#define vi_pick_bytes(v, index)                                                                    \
    vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(v), vreinterpretq_u8_u32(index)))

KVANT_INLINE void next_lanes(vi v[4])
{
    const vi last = v[3];
    v[3] = v[2];
    v[2] = v[1];
    v[1] = v[0];
    v[0] = last;
}

#define level_tables uint8x16x4_t
#define load_levels(levels) vld1q_u8_x4(levels)

KVANT_INLINE vi look_up_levels(const level_tables *tables, vi index, uint32_t bits)
{
    (void)bits;
    return vreinterpretq_u32_u8(
        vqtbl4q_u8(*tables, vreinterpretq_u8_u32(vandq_u32(index, vdupq_n_u32(0x3f3f3f3f)))));
}

KVANT_INLINE void store_lane_sums(int32_t *out, const vi sums[4])
{
#pragma GCC unroll 4
    for (uint32_t r = 0; r < 4; r++)
        vst1q_s32(out + 4 * r, vreinterpretq_s32_u32(sums[r]));
}

#include "../trellis_dots_template.h"
#include "../trellis_packs_template.h"
#include "../trellis_values_template.h"
