/* code_dots_words.h - products of codes and integers with ARMv8.0's widening multiply-add.
 *
 * Two byte look-ups give the low and high bytes of 16 values. Transposed, they are 16-bit operands,
 * two neighbouring columns per row. The two columns have separate sums until the end. */
#include "words.h"

/* Rows that are multiplied together. Their 16 sums, the operands, two vectors of x, the tables, a
 * mask and the words fill the 32 registers. */
#define DOT_ROWS 4u

/* Neighbouring columns 2 k and 2 k + 1 of a tile, for each of the four row tiles. */
typedef struct dot_operand {
    int16x8_t at[KVANT_MAX_PADDED_DIM / KVANT_TILE][KVANT_TILE / 2];
} dot_operand;

/* Bytes of the values of both digits. */
typedef struct dot_tables {
    uint8x16_t low[2], high[2];
} dot_tables;

KVANT_INLINE dot_tables load_tables(const int16_t *values)
{
    dot_tables tables;
    for (uint32_t digit = 0; digit < 2; digit++) {
        uint8x16_t a = vreinterpretq_u8_s16(vld1q_s16(values + 16 * digit)),
                   b = vreinterpretq_u8_s16(vld1q_s16(values + 16 * digit + 8));
        tables.low[digit] = vuzp1q_u8(a, b);
        tables.high[digit] = vuzp2q_u8(a, b);
    }
    return tables;
}

/* The 8 columns of one tile. */
KVANT_INLINE void spread_pairs_of(const int16x8_t of_tile[4], bool equal, int16x8_t *out)
{
    const int32x4_t pairs[4] = { vreinterpretq_s32_s16(of_tile[0]),
                                 vreinterpretq_s32_s16(of_tile[1]),
                                 vreinterpretq_s32_s16(of_tile[2]),
                                 vreinterpretq_s32_s16(of_tile[3]) };
    four_words w = spread_words(pairs, equal);
    for (uint32_t k = 0; k < 4; k++)
        out[k] = vreinterpretq_s16_s32(w.at[k]);
}

KVANT_INLINE void spread_columns(const int16_t *const bands[4], uint32_t first, uint32_t end,
                                 dot_operand *out)
{
    bool equal = equal_bands(bands);
    for (uint32_t ct = first / 4 * 4; ct < end; ct += 4) {
        block_columns block[4];
        for (uint32_t k = 0; k < 4; k++)
            block[k] = k && equal ? block[0] : load_block(bands[k] + KVANT_TILE * ct);
        for (uint32_t t = 0; t < 4; t++) {
            int16x8_t low[4], high[4];
            for (uint32_t k = 0; k < 4; k++) {
                low[k] = block[k].tile[t].first;
                high[k] = block[k].tile[t].second;
            }
            spread_pairs_of(low, equal, out->at[ct + t]);
            spread_pairs_of(high, equal, out->at[ct + t] + 4);
        }
    }
}

/* 16-bit values of 16 codes: even and odd bytes. */
typedef struct code_values {
    int16x8_t at[2];
} code_values;

KVANT_INLINE code_values look_up_digit(const dot_tables *tables, uint32_t digit, uint8x16_t codes)
{
    uint8x16_t low = vqtbl1q_u8(tables->low[digit], codes),
               high = vqtbl1q_u8(tables->high[digit], codes);
    return (code_values){ { vreinterpretq_s16_u8(vtrn1q_u8(low, high)),
                            vreinterpretq_s16_u8(vtrn2q_u8(low, high)) } };
}

/* Sums of the first two row tiles (index 0) and of the last two row tiles (index 1). Even and odd
 * columns have separate sums. */
typedef struct row_sums {
    int32x4_t at[2][DOT_ROWS];
} row_sums;

KVANT_INLINE void add_products(code_values values, const dot_operand *x, uint32_t rows, uint32_t ct,
                               uint32_t quad, row_sums *sum)
{
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t half = 0; half < 2; half++) { /* columns c, and c + 8 */
            int16x8_t factor = x[i].at[ct][quad + 4 * half];
            sum->at[0][i] =
                vmlal_s16(sum->at[0][i], vget_low_s16(values.at[half]), vget_low_s16(factor));
            sum->at[1][i] = vmlal_high_s16(sum->at[1][i], values.at[half], factor);
        }
}

/* Multiplies rows r and r + 8 of the group's four row tiles. */
KVANT_INLINE void dot_row(const uint32_t *const *planes, uint32_t bits, const dot_tables *tables,
                          const dot_operand *x, const kvant_code_factors *columns, uint32_t rows,
                          uint32_t r, int32_t *dots, size_t stride)
{
    row_sums sum[2];
    unrolled_for (uint32_t i = 0; i < rows; i++)
        sum[0].at[0][i] = sum[0].at[1][i] = sum[1].at[0][i] = sum[1].at[1][i] = vdupq_n_s32(0);
    for (uint32_t ct = columns->first; ct < columns->end; ct++)
        unrolled_for (uint32_t quad = 0; quad < 4; quad++) {
            code_bytes codes = split_nibbles(nibble_word(planes, bits, 0, ct, 16 * r + 4 * quad)),
                       upper;
            if (code_digits(bits) > 1)
                upper = split_nibbles(nibble_word(planes, bits, 1, ct, 16 * r + 4 * quad));
            unrolled_for (uint32_t half = 0; half < 2; half++) {
                code_values values = look_up_digit(tables, 0, codes.at[half]);
                if (code_digits(bits) > 1) {
                    code_values more = look_up_digit(tables, 1, upper.at[half]);
                    values.at[0] = vaddq_s16(values.at[0], more.at[0]);
                    values.at[1] = vaddq_s16(values.at[1], more.at[1]);
                }
                add_products(values, x, rows, ct, quad, &sum[half]);
            }
        }
    unrolled_for (uint32_t i = 0; i < rows; i++) {
        vst1q_s32(dots + i * stride + 4 * r, vpaddq_s32(sum[0].at[0][i], sum[0].at[1][i]));
        vst1q_s32(dots + i * stride + 4 * r + 32, vpaddq_s32(sum[1].at[0][i], sum[1].at[1][i]));
    }
}

KVANT_INLINE void dot_group(const uint32_t *const *planes, uint32_t bits, const dot_tables *tables,
                            const dot_operand *x, const kvant_code_factors *columns, uint32_t rows,
                            int32_t *dots, size_t stride)
{
    for (uint32_t r = 0; r < 8; r++)
        dot_row(planes, bits, tables, x, columns, rows, r, dots, stride);
}

#include "../code_dots_rows.h"
