/* kernels_neon.c - the kernels at level neon: Advanced SIMD of every 64-bit ARM. */
#include <arm_neon.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "../../base/attributes.h"
#include "../kernels.h"
#include "words.h"

#define NAME(function) function##_neon
#define LANES 4u
#define MATMUL_ROWS 6u /* 24 accumulators, 4 vectors of b and a factor in 32 registers */
#define MATMUL_VECTORS 4u

typedef float32x4_t vf;

#define vf_zero() vdupq_n_f32(0)
#define vf_set(x) vdupq_n_f32(x)
#define vf_load(p) vld1q_f32(p)
#define vf_store(p, x) vst1q_f32(p, x)
#define vf_load_unaligned(p) vld1q_f32(p)
#define vf_store_unaligned(p, x) vst1q_f32(p, x)
#define vf_add(a, b) vaddq_f32(a, b)
#define vf_sub(a, b) vsubq_f32(a, b)
#define vf_mul(a, b) vmulq_f32(a, b)
#define vf_fma(a, b, c) vfmaq_f32(c, a, b)
#define vf_min(a, b) vminnmq_f32(a, b)
#define vf_max(a, b) vmaxnmq_f32(a, b)
#define vf_round(x) vrndnq_f32(x)
#define vf_sum(x) vaddvq_f32(x)
#define vf_at_least(a, b) vaddvq_u32(vandq_u32(vcgeq_f32(a, b), (uint32x4_t){ 1, 2, 4, 8 }))
#define vf_keep_above(x, y, limit)                                                                 \
    vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vcltq_f32(y, vdupq_n_f32(limit))))
#define vf_from_codes(v) vcvtq_f32_s32(vreinterpretq_s32_u32(v))
#define half_load(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define half_store(p, x) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)))

#define vi_add(a, b) vaddq_u32(a, b)
#define vi_max_unsigned(a, b) vmaxq_u32(a, b)
#define vi_store(p, v) vst1q_u32((uint32_t *)(p), v)
#define vi_store_words(p, v) vst1_s16(p, vmovn_s32(vreinterpretq_s32_u32(v)))
#define vi_store_fours(p, v) vst1q_u32((uint32_t *)(p), v)
#define vi_largest(v) vmaxvq_u32(v)
#define vi_float_bits(x) vreinterpretq_u32_f32(x)
#define vf_repeat_four(p) vld1q_f32(p)
#define vi_load_float_bits(p) vreinterpretq_u32_f32(vld1q_f32(p))
#define vi_store_float_bits(p, v) vst1q_f32(p, vreinterpretq_f32_u32(v))
#define vi_from_whole(x) vreinterpretq_u32_s32(vcvtnq_s32_f32(x))

KVANT_INLINE vf vf_load_nibbles(const uint8_t *p)
{
    uint16_t word;
    memcpy(&word, p, sizeof word);
    const int32x4_t to_top = { 28, 24, 20, 16 };
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(vdupq_n_s32(word), to_top), 28));
}

KVANT_INLINE void vi_store_bytes(uint8_t *p, vi v)
{
    uint16x4_t words = vmovn_u32(v);
    uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    memcpy(p, &bytes, sizeof bytes);
}

KVANT_INLINE vf vf_swap(vf x, uint32_t distance)
{
    return distance == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
}

KVANT_INLINE vf vf_negate_odd(vf x, uint32_t distance)
{
    const uint64x2_t signs = distance == 1
                                 ? vdupq_n_u64(0x8000000000000000u)
                                 : vcombine_u64(vdup_n_u64(0), vdup_n_u64(0x8000000080000000u));
    return vreinterpretq_f32_u64(veorq_u64(vreinterpretq_u64_f32(x), signs));
}

/* x 2^n. n is a whole number of at least -126 wherever the result is used. */
KVANT_INLINE vf vf_scale(vf x, vf n)
{
    int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(x, vreinterpretq_f32_s32(exponent));
}

#include "code_dots_words.h"
#include "unpack.h"
#include "chunks.h"
#include "trellis.h"

#include "tile_sums.h"
#include "packs.h"

#include "../code_sums.h"

/* The portable function serves. */
#define key_halves_neon kvant_key_halves_c
#define block_scores_neon kvant_block_scores_c
#define block_rows_tile_neon kvant_block_rows_tile_c
#define block_columns_tile_neon kvant_block_columns_tile_c

static KVANT_MATMUL_FN(matmul_neon);

static KVANT_BLOCK_SUMS_FN(block_sums_neon)
{
    kvant_block_sums_by(matmul_neon, page, w, sums, sums_stride, n);
}

#include "../simd_template.h"
