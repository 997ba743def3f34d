/* look_up.h - looks up numbers by their codes, 16 at a time: each byte of a number has its own
 * table in registers. Also the loops of encoders that use tables. */
#include "../../math/sums.h"
#include "words.h"

/* The bytes of up to 64 numbers. Byte j of numbers 16 q ... 16 q + 15 is in at[j][q]. */
typedef struct byte_tables {
    uint8x16_t at[4][4];
} byte_tables;

/* Registers for one byte of each of 2^bits numbers. */
#define TABLE_REGISTERS(bits) ((bits) <= 4 ? 1u : (bits) == 5 ? 2u : 4u)

/* bits is a constant of at most 6. Reads 16 numbers even when there are fewer. */
KVANT_INLINE byte_tables load_byte_tables(const float *values, uint32_t bits)
{
    byte_tables t;
    for (uint32_t q = 0; q < TABLE_REGISTERS(bits); q++) {
        uint8x16x4_t bytes = vld4q_u8((const uint8_t *)(values + 16 * q));
        unrolled_for (uint32_t j = 0; j < 4; j++)
            t.at[j][q] = bytes.val[j];
    }
    return t;
}

KVANT_INLINE uint8x16_t look_up_bytes(const uint8x16_t *table, uint32_t bits, uint8x16_t codes)
{
    if (bits <= 4)
        return vqtbl1q_u8(table[0], codes);
    if (bits == 5)
        return vqtbl2q_u8((uint8x16x2_t){ { table[0], table[1] } }, codes);
    return vqtbl4q_u8((uint8x16x4_t){ { table[0], table[1], table[2], table[3] } }, codes);
}

/* The four bytes of 16 numbers. */
typedef struct number_bytes {
    uint8x16_t at[4];
} number_bytes;

KVANT_INLINE number_bytes look_up(const byte_tables *t, uint32_t bits, uint8x16_t codes)
{
    return (number_bytes){
        { look_up_bytes(t->at[0], bits, codes), look_up_bytes(t->at[1], bits, codes),
          look_up_bytes(t->at[2], bits, codes), look_up_bytes(t->at[3], bits, codes) }
    };
}

typedef struct four_vectors {
    float32x4_t at[4];
} four_vectors;

/* Numbers 4 k ... 4 k + 3 in vector k. */
KVANT_INLINE four_vectors numbers_in_order(number_bytes b)
{
    uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(b.at[0], b.at[1])),
               high = vreinterpretq_u16_u8(vzip1q_u8(b.at[2], b.at[3]));
    uint16x8_t low2 = vreinterpretq_u16_u8(vzip2q_u8(b.at[0], b.at[1])),
               high2 = vreinterpretq_u16_u8(vzip2q_u8(b.at[2], b.at[3]));
    return (four_vectors){ { vreinterpretq_f32_u16(vzip1q_u16(low, high)),
                             vreinterpretq_f32_u16(vzip2q_u16(low, high)),
                             vreinterpretq_f32_u16(vzip1q_u16(low2, high2)),
                             vreinterpretq_f32_u16(vzip2q_u16(low2, high2)) } };
}

/* Numbers k, k + 4, k + 8 and k + 12 in vector k: byte k of each word was the code. */
KVANT_INLINE four_vectors numbers_of_words(number_bytes b)
{
    uint16x8_t low = vreinterpretq_u16_u8(vtrn1q_u8(b.at[0], b.at[1])),
               high = vreinterpretq_u16_u8(vtrn1q_u8(b.at[2], b.at[3]));
    uint16x8_t low2 = vreinterpretq_u16_u8(vtrn2q_u8(b.at[0], b.at[1])),
               high2 = vreinterpretq_u16_u8(vtrn2q_u8(b.at[2], b.at[3]));
    return (four_vectors){ { vreinterpretq_f32_u16(vtrn1q_u16(low, high)),
                             vreinterpretq_f32_u16(vtrn1q_u16(low2, high2)),
                             vreinterpretq_f32_u16(vtrn2q_u16(low, high)),
                             vreinterpretq_f32_u16(vtrn2q_u16(low2, high2)) } };
}

KVANT_INLINE float dot_codes_bits(const float *a, const uint8_t *codes, uint32_t n,
                                  const float *values, uint32_t bits)
{
    float s[16];
    float32x4_t sum[4] = { vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0) };
    byte_tables tables = load_byte_tables(values, bits);
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        four_vectors x = numbers_in_order(look_up(&tables, bits, vld1q_u8(codes + i)));
        unrolled_for (uint32_t k = 0; k < 4; k++)
            sum[k] = vaddq_f32(sum[k], vmulq_f32(vld1q_f32(a + i + 4 * k), x.at[k]));
    }
    for (uint32_t k = 0; k < 4; k++)
        vst1q_f32(s + 4 * k, sum[k]);
    for (uint32_t j = 0; i < n; i++, j++)
        s[j] += a[i] * values[codes[i]];
    return kvant_sum16(s);
}

/* Tables of 128 or more numbers do not fit the registers, so their numbers are loaded one by
 * one. */
static KVANT_DOT_CODES_FN(NAME(dot_codes))
{
    if (bits <= 4)
        return dot_codes_bits(a, codes, n, values, 4);
    if (bits == 5)
        return dot_codes_bits(a, codes, n, values, 5);
    if (bits == 6)
        return dot_codes_bits(a, codes, n, values, 6);
    return kvant_dot_codes_c(a, codes, n, values, bits);
}

/* For each of 16 numbers, how many of n thresholds lie below it, taking every step-th threshold
 * from the first. */
KVANT_INLINE uint8x16_t count_below(const float *x, float inverse, const float *thresholds,
                                    uint32_t n, uint32_t step)
{
    float32x4_t u[4];
    uint32x4_t count[4];
    unrolled_for (uint32_t k = 0; k < 4; k++) {
        u[k] = vmulq_n_f32(vld1q_f32(x + 4 * k), inverse);
        count[k] = vdupq_n_u32(0);
    }
    for (uint32_t i = 0; i < n; i++) {
        float32x4_t threshold = vld1q_dup_f32(thresholds + i * step);
        unrolled_for (uint32_t k = 0; k < 4; k++)
            count[k] = vsubq_u32(count[k], vcgtq_f32(u[k], threshold));
    }
    uint16x8_t low = vuzp1q_u16(vreinterpretq_u16_u32(count[0]), vreinterpretq_u16_u32(count[1])),
               high = vuzp1q_u16(vreinterpretq_u16_u32(count[2]), vreinterpretq_u16_u32(count[3]));
    return vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
}

/* Counts up to 15 thresholds directly, which is faster than a search. If there are more thresholds,
 * it counts 15 in equal steps and then searches between two of them. */
static KVANT_CODEBOOK_CODES_FN(NAME(codebook_codes))
{
    uint32_t counted = bits < 4 ? bits : 4, step = 1u << (bits - counted), i = 0;
    for (; i + 16 <= n; i += 16) {
        vst1q_u8(codes + i,
                 count_below(x + i, inverse, thresholds + step - 1, (1u << counted) - 1, step));
        for (uint32_t j = i; step > 1 && j < i + 16; j++) {
            float u = x[j] * inverse;
            uint32_t code = codes[j] * step;
            for (uint32_t half = step / 2; half; half /= 2)
                code += u > thresholds[code + half - 1] ? half : 0;
            codes[j] = (uint8_t)code;
        }
    }
    kvant_codebook_codes_c(x + i, n - i, inverse, thresholds, bits, codes + i);
}
