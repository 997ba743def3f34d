/* code_dots_ymm.h - products of codes and integers with 256-bit vectors.
 *
 * The four low (then the four high) nibbles of a word are columns c, c + 8, c + 1 and c + 9 of one
 * row. Two byte shuffles give the low and high bytes of their values; interleaved, the bytes are
 * 16-bit operands. The row of a word has two partial sums, which are added at the end, across
 * lanes.
 *
 * The including file defines NAME, the definitions for nibbles.h, and add_pairs(sum, a, b), which
 * adds products of 16-bit pairs to 32-bit sums. */
#include "../nibbles.h"

/* Rows that are multiplied together. Their 8 sums, 2 halves of a table and a mask fit the 16
 * registers. */
#define DOT_ROWS 4u

/* Columns in the order of a word's lanes: [column tile][lanes of columns 0 .. 3, 4 .. 7][row tiles
 * 0 and 1, 2 and 3]. A 128-bit lane has four numbers for each of two row tiles. */
typedef struct dot_operand {
    vi at[KVANT_MAX_PADDED_DIM / KVANT_TILE][2][2];
} dot_operand;

/* Bytes of values, low and high, of both digits. */
typedef struct dot_tables {
    vi low[2], high[2];
} dot_tables;

/* Low and high bytes of 16 values, twice each. */
KVANT_INLINE void split_bytes(const int16_t *values, vi *low, vi *high)
{
    const __m128i a = _mm_loadu_si128((const __m128i *)values),
                  b = _mm_loadu_si128((const __m128i *)(values + 8)), bytes = _mm_set1_epi16(0xff);
    *low = vi_repeat(_mm_packus_epi16(_mm_and_si128(a, bytes), _mm_and_si128(b, bytes)));
    *high = vi_repeat(_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
}

KVANT_INLINE dot_tables load_tables(const int16_t *values)
{
    dot_tables tables;
    for (uint32_t digit = 0; digit < 2; digit++)
        split_bytes(values + 16 * digit, &tables.low[digit], &tables.high[digit]);
    return tables;
}

KVANT_INLINE vi spread_four(const int16_t *x, vi pair)
{
    return _mm256_unpacklo_epi16(_mm256_shuffle_epi8(vi_load(x), pair),
                                 _mm256_shuffle_epi8(vi_load(x + 32), pair));
}

/* All row tiles use the same numbers of x. */
KVANT_INLINE void spread_band(const int16_t *x, uint32_t first, uint32_t end, dot_operand *out)
{
    for (uint32_t ct = first; ct < end; ct++) {
        vi pair = vi_set((int)column_pairs[ct % 4]);
        const int16_t *block = x + KVANT_PAGE_TOKENS * (ct / 4);
        out->at[ct][0][0] = out->at[ct][0][1] = spread_four(block, pair);
        out->at[ct][1][0] = out->at[ct][1][1] = spread_four(block + 16, pair);
    }
}

/* Row tile k uses numbers of bands[k]. */
KVANT_INLINE void spread_bands(const int16_t *const bands[4], uint32_t first, uint32_t end,
                               dot_operand *out)
{
    for (uint32_t ct = first; ct < end; ct++)
        for (uint32_t i = 0; i < 4; i++) {
            vi pair = vi_set((int)column_pairs[ct % 4]);
            const int16_t *const *two = bands + 2 * (i % 2);
            size_t at = (size_t)KVANT_PAGE_TOKENS * (ct / 4) + 16 * (i / 2);
            out->at[ct][i / 2][i % 2] = _mm256_blend_epi32(spread_four(two[0] + at, pair),
                                                           spread_four(two[1] + at, pair), 0xcc);
        }
}

KVANT_INLINE void spread_columns(const int16_t *const bands[4], uint32_t first, uint32_t end,
                                 dot_operand *out)
{
    if (bands[0] == bands[3])
        spread_band(bands[0], first, end, out);
    else
        spread_bands(bands, first, end, out);
}

/* The sums of the first two row tiles are in sum[0], the sums of the last two row tiles in
 * sum[1]. */
KVANT_INLINE void add_products(vi low_table, vi high_table, vi codes, const dot_operand *x,
                               uint32_t rows, uint32_t ct, uint32_t side, vi sum[2][DOT_ROWS])
{
    vi low = _mm256_shuffle_epi8(low_table, codes), high = _mm256_shuffle_epi8(high_table, codes);
    vi first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
    unrolled_for (uint32_t i = 0; i < rows; i++) {
        sum[0][i] = add_pairs(sum[0][i], first, x[i].at[ct][side][0]);
        sum[1][i] = add_pairs(sum[1][i], second, x[i].at[ct][side][1]);
    }
}

/* Multiplies row r (or r + 8 when shift is 4) of the group's four row tiles. */
KVANT_INLINE void dot_row(const uint32_t *const *planes, uint32_t bits, const dot_tables *tables,
                          const dot_operand *x, const kvant_code_factors *columns, uint32_t rows,
                          uint32_t r, uint32_t shift, int32_t *dots, size_t stride)
{
    vi sum[2][DOT_ROWS];
    unrolled_for (uint32_t i = 0; i < rows; i++)
        sum[0][i] = sum[1][i] = _mm256_setzero_si256();
    for (uint32_t ct = columns->first; ct < columns->end; ct++)
        unrolled_for (uint32_t side = 0; side < 2; side++)
            unrolled_for (uint32_t digit = 0; digit < code_digits(bits); digit++) {
                vi w = nibble_word(planes, bits, digit, ct, 16 * r + 8 * side);
                add_products(tables->low[digit], tables->high[digit],
                             vi_and(shift ? vi_shift_right(w, 4) : w, vi_set(0x0f0f0f0f)), x, rows,
                             ct, side, sum);
            }
    unrolled_for (uint32_t i = 0; i < rows; i++) {
        vi pairs = _mm256_hadd_epi32(sum[0][i], sum[1][i]);
        __m128i total =
            _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_store_si128((__m128i *)(dots + i * stride + 8 * shift + 4 * r), total);
    }
}

KVANT_INLINE void dot_group(const uint32_t *const *planes, uint32_t bits, const dot_tables *tables,
                            const dot_operand *x, const kvant_code_factors *columns, uint32_t rows,
                            int32_t *dots, size_t stride)
{
    for (uint32_t r = 0; r < 8; r++) {
        dot_row(planes, bits, tables, x, columns, rows, r, 0, dots, stride);
        dot_row(planes, bits, tables, x, columns, rows, r, 4, dots, stride);
    }
}

#include "../code_dots_rows.h"
