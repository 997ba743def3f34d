/* code_dots_bytes.h - products of codes and integers with dot products of bytes.
 *
 * A number is 256 high + low, both signed bytes; KVANT_CODE_OPERAND_MAX follows from this. The
 * looked-up bytes of a word are four columns of one row. One instruction multiplies them by four
 * numbers of x and adds the products to the sum of the row. So no operand is rearranged and no sum
 * is folded. Sums of low low, mixed and high high products are combined at the end. Values that fit
 * a byte, such as uniform codes, need two of the sums.
 *
 * Sums may wrap: only the last sum has to fit. */
#include "words.h"

/* Rows that are multiplied together. Their 16 sums, the operands, two vectors of x, the tables, a
 * mask and the words fill the 32 registers. */
#define DOT_ROWS 4u

/* Bytes of x for each of the four row tiles, in the order in which a word has its columns: [column
 * tile][quad]. */
typedef struct dot_operand {
    int8x16_t low[KVANT_MAX_PADDED_DIM / KVANT_TILE][4], high[KVANT_MAX_PADDED_DIM / KVANT_TILE][4];
} dot_operand;

typedef struct byte_pair {
    int8x16_t low, high;
} byte_pair;

typedef struct dot_tables {
    byte_pair digit[2];
    bool narrow[2]; /* whether the values of codes with one digit, or two digits, fit a byte */
} dot_tables;

KVANT_INLINE byte_pair split_bytes(int16x8_t a, int16x8_t b)
{
    return (byte_pair){ vcombine_s8(vmovn_s16(a), vmovn_s16(b)),
                        vcombine_s8(vrshrn_n_s16(a, 8), vrshrn_n_s16(b, 8)) };
}

KVANT_INLINE dot_tables load_tables(const int16_t *values)
{
    dot_tables tables;
    int32_t smallest = 0, largest = 0;
    for (uint32_t digit = 0; digit < 2; digit++, values += 16) {
        int16x8_t a = vld1q_s16(values), b = vld1q_s16(values + 8);
        smallest += vminvq_s16(vminq_s16(a, b));
        largest += vmaxvq_s16(vmaxq_s16(a, b));
        tables.digit[digit] = split_bytes(a, b);
        tables.narrow[digit] = smallest >= INT8_MIN && largest <= INT8_MAX;
    }
    return tables;
}

KVANT_INLINE int32x4_t interleave_halves(int8x16_t v)
{
    return vreinterpretq_s32_s8(vzip1q_s8(v, vextq_s8(v, v, 8)));
}

KVANT_INLINE void spread_bytes(const int32x4_t of_tile[4], bool equal, int8x16_t *out)
{
    four_words w = spread_words(of_tile, equal);
    for (uint32_t quad = 0; quad < 4; quad++)
        out[quad] = vreinterpretq_s8_s32(w.at[quad]);
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
            int32x4_t low[4], high[4];
            for (uint32_t k = 0; k < 4; k++) {
                byte_pair bytes = split_bytes(block[k].tile[t].first, block[k].tile[t].second);
                low[k] = interleave_halves(bytes.low);
                high[k] = interleave_halves(bytes.high);
            }
            spread_bytes(low, equal, out->low[ct + t]);
            spread_bytes(high, equal, out->high[ct + t]);
        }
    }
}

/* The sums of one row in four row tiles. */
typedef struct row_sums {
    int32x4_t low[DOT_ROWS], middle[DOT_ROWS], high[DOT_ROWS];
} row_sums;

KVANT_INLINE void add_low(int8x16_t values, const dot_operand *x, uint32_t rows, uint32_t ct,
                          uint32_t quad, row_sums *sum)
{
    unrolled_for (uint32_t i = 0; i < rows; i++) {
        sum->low[i] = vdotq_s32(sum->low[i], values, x[i].low[ct][quad]);
        sum->middle[i] = vdotq_s32(sum->middle[i], values, x[i].high[ct][quad]);
    }
}

KVANT_INLINE void add_high(int8x16_t values, const dot_operand *x, uint32_t rows, uint32_t ct,
                           uint32_t quad, row_sums *sum)
{
    unrolled_for (uint32_t i = 0; i < rows; i++) {
        sum->middle[i] = vdotq_s32(sum->middle[i], values, x[i].low[ct][quad]);
        sum->high[i] = vdotq_s32(sum->high[i], values, x[i].high[ct][quad]);
    }
}

KVANT_INLINE void clear_sums(row_sums *sum, uint32_t rows)
{
    unrolled_for (uint32_t i = 0; i < rows; i++)
        sum->low[i] = sum->middle[i] = sum->high[i] = vdupq_n_s32(0);
}

KVANT_INLINE void store_sums(const row_sums *sum, bool narrow, uint32_t rows, int32_t *dots,
                             size_t stride)
{
    unrolled_for (uint32_t i = 0; i < rows; i++) {
        uint32x4_t total = vreinterpretq_u32_s32(sum->low[i]);
        total = vaddq_u32(total, vshlq_n_u32(vreinterpretq_u32_s32(sum->middle[i]), 8));
        if (!narrow)
            total = vaddq_u32(total, vshlq_n_u32(vreinterpretq_u32_s32(sum->high[i]), 16));
        vst1q_s32(dots + i * stride, vreinterpretq_s32_u32(total));
    }
}

/* Adds one half of the words of a quad. upper: the codes of the second digit, if there is one. The
 * values of two digits are multiplied as one byte if their sum fits a byte, otherwise
 * separately. */
KVANT_INLINE void add_codes(const dot_tables *tables, uint32_t bits, bool narrow, uint8x16_t codes,
                            uint8x16_t upper, const dot_operand *x, uint32_t rows, uint32_t ct,
                            uint32_t quad, row_sums *sum)
{
    int8x16_t low = vqtbl1q_s8(tables->digit[0].low, codes);
    if (narrow) {
        if (code_digits(bits) > 1)
            low = vaddq_s8(low, vqtbl1q_s8(tables->digit[1].low, upper));
        add_low(low, x, rows, ct, quad, sum);
        return;
    }
    add_low(low, x, rows, ct, quad, sum);
    add_high(vqtbl1q_s8(tables->digit[0].high, codes), x, rows, ct, quad, sum);
    if (code_digits(bits) > 1) {
        add_low(vqtbl1q_s8(tables->digit[1].low, upper), x, rows, ct, quad, sum);
        add_high(vqtbl1q_s8(tables->digit[1].high, upper), x, rows, ct, quad, sum);
    }
}

/* Multiplies rows r + 8 half, for first <= half < end, of the group's four row tiles. */
KVANT_INLINE void dot_row(const uint32_t *const *planes, uint32_t bits, const dot_tables *tables,
                          bool narrow, const dot_operand *x, const kvant_code_factors *columns,
                          uint32_t rows, uint32_t r, uint32_t first, uint32_t end, int32_t *dots,
                          size_t stride)
{
    row_sums sum[2];
    unrolled_for (uint32_t half = first; half < end; half++)
        clear_sums(&sum[half], rows);
    for (uint32_t ct = columns->first; ct < columns->end; ct++)
        unrolled_for (uint32_t quad = 0; quad < 4; quad++) {
            code_bytes codes = split_nibbles(nibble_word(planes, bits, 0, ct, 16 * r + 4 * quad)),
                       upper = codes;
            if (code_digits(bits) > 1)
                upper = split_nibbles(nibble_word(planes, bits, 1, ct, 16 * r + 4 * quad));
            unrolled_for (uint32_t half = first; half < end; half++)
                add_codes(tables, bits, narrow, codes.at[half], upper.at[half], x, rows, ct, quad,
                          &sum[half]);
        }
    unrolled_for (uint32_t half = first; half < end; half++)
        store_sums(&sum[half], narrow, rows, dots + 4 * r + 32 * half, stride);
}

/* Multiplies both halves of words at once, unless the three sums of each of several x would not fit
 * the registers. */
KVANT_INLINE void dot_group(const uint32_t *const *planes, uint32_t bits, const dot_tables *tables,
                            const dot_operand *x, const kvant_code_factors *columns, uint32_t rows,
                            int32_t *dots, size_t stride)
{
    for (uint32_t r = 0; r < 8; r++)
        if (tables->narrow[code_digits(bits) - 1]) {
            dot_row(planes, bits, tables, true, x, columns, rows, r, 0, 2, dots, stride);
        } else if (rows == 1) {
            dot_row(planes, bits, tables, false, x, columns, rows, r, 0, 2, dots, stride);
        } else {
            dot_row(planes, bits, tables, false, x, columns, rows, r, 0, 1, dots, stride);
            dot_row(planes, bits, tables, false, x, columns, rows, r, 1, 2, dots, stride);
        }
}

#include "../code_dots_rows.h"
