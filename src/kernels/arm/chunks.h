/* chunks.h - definitions for chunk_tiles_template.h and chunk_dots_template.h with four lanes.
 * Included after the definitions of simd_template.h. */

#define vf_and(a, b)                                                                               \
    vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b)))
#define vf_xor(a, b)                                                                               \
    vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b)))
#define vf_absolute(x) vabsq_f32(x)
#define vf_fnma(a, b, c) vfmsq_f32(c, a, b)
#define vf_unpack_low(a, b) vzip1q_f32(a, b)
#define vf_unpack_high(a, b) vzip2q_f32(a, b)
#define vf_low_halves(a, b) vcombine_f32(vget_low_f32(a), vget_low_f32(b))
#define vf_high_halves(a, b) vcombine_f32(vget_high_f32(a), vget_high_f32(b))

#define vi_shift_right_each(v, n) vshlq_u32(v, vnegq_s32(vreinterpretq_s32_u32(n)))
#define vi_shift_left_each(v, n) vshlq_u32(v, vreinterpretq_s32_u32(n))
#define vi_shift_left_by(v, n) vshlq_u32(v, vdupq_n_s32((int32_t)(n)))
#define vi_any_equal(a, b) (vmaxvq_u32(vceqq_u32(a, b)) != 0)
#define vi_load_repeated(p, words) vi_load(p) /* 4 */
#define vi_store_aligned(p, v) vi_store(p, v)

/* 1 / sqrt(x) to a relative error of 2^-15: the instruction's estimate has 8 bits, and a step of
 * Newton's method doubles them. */
KVANT_INLINE vf vf_rsqrt(vf x)
{
    vf r = vrsqrteq_f32(x);
    return vmulq_f32(r, vrsqrtsq_f32(vmulq_f32(x, r), r));
}

KVANT_INLINE void vf_store_first(float *p, vf x, uint32_t n)
{
    float lanes[LANES];
    vst1q_f32(lanes, x);
    memcpy(p, lanes, n * sizeof *p);
}

KVANT_INLINE vf vf_load_quads(const float *p, const uint32_t *index, uint32_t step)
{
    (void)step;
    return vld1q_f32(p + (size_t)4 * index[0]);
}

/* Spreads the numbers of lane j. The instruction takes the lane only as a literal. */
KVANT_INLINE vi vi_spread_quads(vi v, uint32_t j)
{
    switch (j) {
    case 0: return vdupq_laneq_u32(v, 0);
    case 1: return vdupq_laneq_u32(v, 1);
    case 2: return vdupq_laneq_u32(v, 2);
    default: return vdupq_laneq_u32(v, 3);
    }
}
#define vf_spread_quads(x, j) vreinterpretq_f32_u32(vi_spread_quads(vreinterpretq_u32_f32(x), j))

/* The bytes of up to 32 floats, as tables for look-ups. */
typedef struct value_table {
    uint8x16x4_t low, high;
} value_table;

/* Reads 16 numbers even when the table has fewer. */
KVANT_INLINE value_table table_load(const float *values, uint32_t n)
{
    value_table t;
    t.low = vld1q_u8_x4((const uint8_t *)values);
    t.high = n == 32 ? vld1q_u8_x4((const uint8_t *)(values + 16)) : t.low;
    return t;
}

KVANT_INLINE vf table_look_up(const value_table *entries, const float *values, vi codes, uint32_t n)
{
    uint32_t lanes[LANES];
    uint8x16_t bytes =
        vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100), codes, 0x04040404));
    if (n <= 16)
        return vreinterpretq_f32_u8(vqtbl4q_u8(entries->low, bytes));
    if (n == 32)
        return vreinterpretq_f32_u8(vqtbx4q_u8(vqtbl4q_u8(entries->low, bytes), entries->high,
                                               vsubq_u8(bytes, vdupq_n_u8(64))));
    vst1q_u32(lanes, codes);
    const float x[LANES] = { values[lanes[0]], values[lanes[1]], values[lanes[2]],
                             values[lanes[3]] };
    return vld1q_f32(x);
}

#define CHUNK_ROWS 6u
/* 12 sums, 2 vectors of the tile, a factor and the halves of a product fit the 32 registers; more
 * would spill. */
#define CHUNK_VECTORS 2u

#define as_words(v) vreinterpretq_s16_u32(v)
#define vi_shift_right_words(v, n)                                                                 \
    vreinterpretq_u32_u16(                                                                         \
        vshlq_u16(vreinterpretq_u16_u32(v), vdupq_n_s16((int16_t)(-(int32_t)(n)))))
#define vi_multiply_words(a, b) vreinterpretq_u32_s16(vmulq_s16(as_words(a), as_words(b)))
#define vi_scale_words(a, b) vreinterpretq_u32_s16(vqrdmulhq_s16(as_words(a), as_words(b)))

/* Adds products of 16-bit pairs to 32-bit sums. */
KVANT_INLINE vi add_pairs(vi sum, vi a, vi b)
{
    int32x4_t low = vmull_s16(vget_low_s16(as_words(a)), vget_low_s16(as_words(b)));
    int32x4_t high = vmull_high_s16(as_words(a), as_words(b));
    return vaddq_u32(sum, vreinterpretq_u32_s32(vpaddq_s32(low, high)));
}

KVANT_INLINE vi vi_double_words(vi v, uint32_t odd)
{
    return vreinterpretq_u32_s16(odd ? vtrn2q_s16(as_words(v), as_words(v))
                                     : vtrn1q_s16(as_words(v), as_words(v)));
}

KVANT_INLINE vi vi_pair_words(vi v)
{
    return vreinterpretq_u32_s16(vzip1q_s16(as_words(v), vextq_s16(as_words(v), as_words(v), 4)));
}

/* Low and high bytes of 16 lengths. */
typedef struct length_table {
    uint8x16_t low, high;
} length_table;

KVANT_INLINE length_table load_lengths(const int16_t *lengths)
{
    uint8x16_t a = vreinterpretq_u8_s16(vld1q_s16(lengths)),
               b = vreinterpretq_u8_s16(vld1q_s16(lengths + 8));
    return (length_table){ vuzp1q_u8(a, b), vuzp2q_u8(a, b) };
}

/* An index beyond the table gives zero. */
KVANT_INLINE vi look_up_lengths(length_table lengths, vi v)
{
    uint16x8_t index = vreinterpretq_u16_u32(v);
    uint8x16_t low =
        vqtbl1q_u8(lengths.low, vreinterpretq_u8_u16(vorrq_u16(index, vdupq_n_u16(0xff00))));
    uint8x16_t high = vqtbl1q_u8(
        lengths.high, vreinterpretq_u8_u16(vorrq_u16(vshlq_n_u16(index, 8), vdupq_n_u16(0x00ff))));
    return vreinterpretq_u32_u8(vorrq_u8(low, high));
}

KVANT_INLINE int16x4_t entry_of(const int16_t *entries, uint32_t index)
{
    return vld1_s16(entries + (size_t)4 * index);
}

KVANT_INLINE void fetch_rows(const int16_t *entries, vi words, uint32_t odd, vi rows[2])
{
    uint16_t index[8];
    vst1q_u16(index, vreinterpretq_u16_u32(words));
    vi a = vreinterpretq_u32_s16(
        vcombine_s16(entry_of(entries, index[odd]), entry_of(entries, index[2 + odd])));
    vi b = vreinterpretq_u32_s16(
        vcombine_s16(entry_of(entries, index[4 + odd]), entry_of(entries, index[6 + odd])));
    rows[0] = vuzp1q_u32(a, b);
    rows[1] = vuzp2q_u32(a, b);
}

/* Loads the entries of the two codes of one word. */
KVANT_INLINE vi fetch_pair(const int16_t *entries, const uint16_t *index)
{
    int16x4_t first = entry_of(entries, index[0]), second = entry_of(entries, index[1]);
    return vreinterpretq_u32_s16(vcombine_s16(vzip1_s16(first, second), vzip2_s16(first, second)));
}

KVANT_INLINE void fetch_pairs(const int16_t *entries, vi words, uint32_t half, vi pairs[2])
{
    uint16_t index[8];
    vst1q_u16(index, vreinterpretq_u16_u32(words));
    pairs[0] = fetch_pair(entries, index + 4 * half);
    pairs[1] = fetch_pair(entries, index + 4 * half + 2);
}

KVANT_INLINE void fetch_quads(const int16_t *entries, vi words, vi quads[4])
{
    fetch_pairs(entries, words, 0, quads);
    fetch_pairs(entries, words, 1, quads + 2);
}

KVANT_INLINE void vi_store_some(int32_t *p, vi v, uint32_t n)
{
    uint32_t lanes[LANES];
    vi_store(lanes, v);
    memcpy(p, lanes, (n < LANES ? n : LANES) * sizeof *p);
}

#define vi_low_dwords(a, b) vzip1q_u32(a, b)
#define vi_high_dwords(a, b) vzip2q_u32(a, b)
#define vi_low_qwords(a, b) vcombine_u32(vget_low_u32(a), vget_low_u32(b))
#define vi_high_qwords(a, b) vcombine_u32(vget_high_u32(a), vget_high_u32(b))

/* Entries are loaded from memory. */
#include "../octahedral_from_memory.h"

#include "../chunk_tiles_template.h"
#include "../chunk_dots_template.h"
