/* unpack.h - kernels that follow the order of pages: unpacked tiles, and metadata of tokens at
 * their positions. */
#include "../unpack_job.h"
#include "look_up.h"

/* The codes of one column quad. Codes of more than 4 bits have a second nibble, which becomes their
 * upper bits. */
KVANT_INLINE code_bytes read_codes(const uint32_t *const *planes, uint32_t bits, uint32_t ct,
                                   uint32_t at)
{
    vi words = nibble_word(planes, bits, 0, ct, at);
    if (code_digits(bits) == 1)
        return split_nibbles(words);
    uint8x16_t w = vreinterpretq_u8_u32(words),
               upper = vreinterpretq_u8_u32(nibble_word(planes, bits, 1, ct, at));
    return (code_bytes){ { vsliq_n_u8(w, upper, 4), vsriq_n_u8(upper, w, 4) } };
}

/* code + offset */
KVANT_INLINE four_vectors shift_codes(uint8x16_t codes, float offset)
{
    const uint32x4_t w = vreinterpretq_u32_u8(codes), low = vdupq_n_u32(255);
    const float32x4_t zero = vdupq_n_f32(offset);
    return (four_vectors){ { vaddq_f32(vcvtq_f32_u32(vandq_u32(w, low)), zero),
                             vaddq_f32(vcvtq_f32_u32(vandq_u32(vshrq_n_u32(w, 8), low)), zero),
                             vaddq_f32(vcvtq_f32_u32(vandq_u32(vshrq_n_u32(w, 16), low)), zero),
                             vaddq_f32(vcvtq_f32_u32(vshrq_n_u32(w, 24)), zero) } };
}

/* Loads numbers one by one, for tables that do not fit the registers. */
KVANT_INLINE four_vectors gather(const float *values, uint8x16_t codes)
{
    uint8_t code[16];
    float x[16];
    four_vectors out;
    vst1q_u8(code, codes);
    for (uint32_t i = 0; i < 16; i++)
        x[4 * (i % 4) + i / 4] = values[code[i]];
    for (uint32_t k = 0; k < 4; k++)
        out.at[k] = vld1q_f32(x + 4 * k);
    return out;
}

/* tables: the values, or code + offset for codes of up to 4 bits. */
KVANT_INLINE four_vectors numbers(const unpack_job *job, uint32_t bits, bool affine,
                                  const byte_tables *tables, uint8x16_t codes)
{
    if (bits <= 4 || (bits <= 6 && !affine))
        return numbers_of_words(look_up(tables, bits, codes));
    return affine ? shift_codes(codes, job->offset) : gather(job->values, codes);
}

/* Unpacks 4 columns of one column tile. A column has 8 x 4 x 2 rows: r, row tile, half. */
KVANT_INLINE void unpack_quad(const unpack_job *job, const uint32_t *const *planes, uint32_t bits,
                              bool affine, const byte_tables *tables, uint32_t group, uint32_t ct,
                              uint32_t quad)
{
    float *out[4];
    unrolled_for (uint32_t k = 0; k < 4; k++) {
        uint32_t column = 16 * ct + 2 * quad + 8 * (k % 2) + k / 2;
        uint32_t row = job->layout->role == KVANT_ROLE_K ? column : kvant_token_position(column);
        out[k] = job->tile + row * job->stride + KVANT_PAGE_TOKENS * group;
    }
    for (uint32_t r = 0; r < 8; r++) {
        code_bytes codes = read_codes(planes, bits, ct, 16 * r + 4 * quad);
        unrolled_for (uint32_t half = 0; half < 2; half++) {
            four_vectors x = numbers(job, bits, affine, tables, codes.at[half]);
            unrolled_for (uint32_t k = 0; k < 4; k++)
                vst1q_f32(out[k] + 32 * half + 4 * r, x.at[k]);
        }
    }
}

KVANT_INLINE void unpack_bits(const unpack_job *job, uint32_t bits, bool affine)
{
    const kvant_layout *layout = job->layout;
    const uint32_t *planes[KVANT_MAX_PLANES];
    float shifted[16];
    byte_tables tables;
    for (uint32_t code = 0; bits <= 4 && affine && code < 16; code++)
        shifted[code] = (float)code + job->offset;
    if (bits <= 4 || (bits <= 6 && !affine))
        tables = load_byte_tables(affine ? shifted : job->values, bits);
    for (uint32_t group = 0; 4 * group < layout->row_tiles; group++) {
        if (kvant_layout_group_tiles(layout, group) < 4) {
            kvant_unpack_group_c(layout, job->words, job->values, job->offset, group, job->tile);
            continue;
        }
        find_planes(layout, job->words, group, NULL, planes);
        for (uint32_t ct = 0; ct < layout->column_tiles; ct++)
            for (uint32_t quad = 0; quad < 4; quad++)
                unpack_quad(job, planes, bits, affine, &tables, group, ct, quad);
    }
}

#include "../unpack_kinds.h"

/* Positions run through the 4 token tiles first: a transposition of 4 rows of 16. */
static KVANT_TOKEN_HALVES_FN(NAME(token_halves))
{
    for (uint32_t first = 0; first < 16; first += 8) {
        uint16x8_t a = vld1q_u16(half + first), b = vld1q_u16(half + first + 16),
                   c = vld1q_u16(half + first + 32), d = vld1q_u16(half + first + 48);
        uint16x8_t ac[2] = { vzip1q_u16(a, c), vzip2q_u16(a, c) },
                   bd[2] = { vzip1q_u16(b, d), vzip2q_u16(b, d) };
        unrolled_for (uint32_t i = 0; i < 2; i++) {
            float16x8_t low = vreinterpretq_f16_u16(vzip1q_u16(ac[i], bd[i])),
                        high = vreinterpretq_f16_u16(vzip2q_u16(ac[i], bd[i]));
            float *out = x + 4 * first + 16 * i;
            vst1q_f32(out, vcvt_f32_f16(vget_low_f16(low)));
            vst1q_f32(out + 4, vcvt_high_f32_f16(low));
            vst1q_f32(out + 8, vcvt_f32_f16(vget_low_f16(high)));
            vst1q_f32(out + 12, vcvt_high_f32_f16(high));
        }
    }
}
