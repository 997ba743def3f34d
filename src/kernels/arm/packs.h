/* packs.h - operations of packs_template.h for Advanced SIMD. A level defines add_fours(sum, a, b)
 * where it has an instruction that adds four products of signed bytes to each sum. */
#define PACK_BYTES 16u
#define PACK_TILE 4u
#define PACK_BIASED(bits) false
#define pack_bytes uint8x16_t
#define pack_load(p) vld1q_u8(p)
#define pack_store(p, v) vst1q_s32(p, v)
#define pack_set(n) vdupq_n_s32(n)
#define pack_table(bytes) vld1q_u8(bytes)
#define pack_sums int32x4_t
#define pack_whole(v) veorq_u8(v, vdupq_n_u8(128))
#define pack_add_whole(sums, operand, x) pack_add_four(sums, operand, x)

KVANT_INLINE uint8x16_t pack_look_up(uint8x16_t table, uint8x16_t v, uint32_t shift)
{
    return vqtbl1q_u8(table, vandq_u8(vshlq_u8(v, vdupq_n_s8(-(int8_t)shift)), vdupq_n_u8(15)));
}

/* Bit high_shift becomes bit 2. */
KVANT_INLINE uint8x16_t pack_look_up_two(uint8x16_t table, uint8x16_t low, uint32_t shift,
                                         uint8x16_t high, uint32_t high_shift)
{
    const uint8x16_t two = vandq_u8(vshlq_u8(low, vdupq_n_s8(-(int8_t)shift)), vdupq_n_u8(3));
    const uint8x16_t up = vshlq_u8(high, vdupq_n_s8((int8_t)(2 - (int)high_shift)));
    return vqtbl1q_u8(table, vorrq_u8(two, vandq_u8(up, vdupq_n_u8(4))));
}

KVANT_INLINE int8x16_t pack_query(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

#ifdef add_fours
#define pack_finish(a, b) vaddq_s32(a, b)

KVANT_INLINE int32x4_t pack_add_four(int32x4_t sums, uint8x16_t operand, const int8_t *x)
{
    return add_fours(sums, vreinterpretq_s8_u8(operand), pack_query(x));
}
#else
/* The sum of two neighbouring products is at most 2 x 128 x 127, which fits 16 bits. */
#define pack_finish(a, b) vaddq_s32(a, b)

KVANT_INLINE int32x4_t pack_add_four(int32x4_t sums, uint8x16_t operand, const int8_t *x)
{
    const int8x16_t levels = vreinterpretq_s8_u8(operand), query = pack_query(x);
    const int16x8_t low = vmull_s8(vget_low_s8(levels), vget_low_s8(query));
    return vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(levels, query)));
}
#endif

KVANT_INLINE int32x4_t pack_add(int32x4_t sums, const uint8x16_t *operands, uint32_t n,
                                uint32_t fold, const int8_t *x, size_t step)
{
    (void)fold;
    unrolled_for (uint32_t i = 0; i < n; i++)
        sums = pack_add_four(sums, operands[i], x + i * step);
    return sums;
}

#include "../packs_template.h"
