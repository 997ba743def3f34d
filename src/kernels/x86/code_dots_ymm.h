/* code_dots_ymm.h - products of codes and integers with 256-bit vectors. The four low (then the four high) nibbles of a word
 * are columns c, c + 8, c + 1 and c + 9 of one row: two byte shuffles give the low and high bytes of their values, which
 * interleaved are 16-bit operands. A word's row has two partial sums, added with those of other lanes at the end. */
#include "../nibbles.h"

#define DOT_ROWS 4u /* 8 sums, 2 halves of the table and a mask in 16 registers */

/* Columns as lanes want them: [column tile][lanes of columns 0 .. 3, 4 .. 7], four numbers twice in a 128-bit lane. */
typedef struct dot_operand {
    vi at[KVANT_MAX_PADDED_DIM / KVANT_TILE][2];
} dot_operand;

/* Bytes of values, low and high. */
typedef struct byte_table {
    vi low, high;
} byte_table;

KVANT_INLINE byte_table load_byte_table(const int16_t *values)
{
    __m128i a = _mm_loadu_si128((const __m128i *)values), b = _mm_loadu_si128((const __m128i *)(values + 8));
    __m128i low_bytes = _mm_set1_epi16(0xff);
    return (byte_table){
        _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_and_si128(a, low_bytes), _mm_and_si128(b, low_bytes))),
        _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)))
    };
}

KVANT_INLINE void spread_columns(const int16_t *x, uint32_t column_tiles, dot_operand *out)
{
    for (uint32_t ct = 0; ct < column_tiles; ct++) {
        uint32_t first = 2 * (ct % 4) * 0x0101u + 0x0100u; /* bytes of number ct mod 4 of 8 */
        vi pair = vi_set((int)(first | (first + 0x0808u) << 16));
        const int16_t *block = x + KVANT_PAGE_TOKENS * (ct / 4);
        for (uint32_t side = 0; side < 2; side++)
            out->at[ct][side] = _mm256_unpacklo_epi16(_mm256_shuffle_epi8(vi_load(block + 16 * side), pair),
                                                      _mm256_shuffle_epi8(vi_load(block + 32 + 16 * side), pair));
    }
}

/* sum[0]: rows of row tiles 0 and 1, sum[1]: of 2 and 3. */
KVANT_INLINE void add_products(byte_table table, vi codes, const dot_operand *x, uint32_t rows, uint32_t ct,
                               uint32_t side, vi sum[2][DOT_ROWS])
{
    vi low = _mm256_shuffle_epi8(table.low, codes), high = _mm256_shuffle_epi8(table.high, codes);
    vi first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < rows; i++) {
        vi factor = x[i].at[ct][side];
        sum[0][i] = vi_add(sum[0][i], _mm256_madd_epi16(first, factor));
        sum[1][i] = vi_add(sum[1][i], _mm256_madd_epi16(second, factor));
    }
}

/* Row r, or r + 8 when shift is 4, of the group's four row tiles. */
KVANT_INLINE void dot_row(const kvant_layout *layout, uint32_t bits, const uint32_t *words, uint32_t group,
                          byte_table table, const dot_operand *x, uint32_t rows, uint32_t r, uint32_t shift,
                          int32_t *dots, size_t stride)
{
    vi sum[2][DOT_ROWS];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < rows; i++)
        sum[0][i] = sum[1][i] = _mm256_setzero_si256();
    for (uint32_t ct = 0; ct < layout->column_tiles; ct++)
#pragma GCC unroll 2
        for (uint32_t side = 0; side < 2; side++) {
            vi w = nibble_word(layout, bits, words, group, ct, 16 * r + 8 * side);
            add_products(table, vi_and(shift ? vi_shift_right(w, 4) : w, vi_set(0x0f0f0f0f)), x, rows, ct, side,
                         sum);
        }
#pragma GCC unroll 8
    for (uint32_t i = 0; i < rows; i++) {
        vi pairs = _mm256_hadd_epi32(sum[0][i], sum[1][i]);
        __m128i total = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_store_si128((__m128i *)(dots + i * stride + KVANT_PAGE_TOKENS * group + 8 * shift + 4 * r), total);
    }
}

KVANT_INLINE void dot_rows(const kvant_layout *layout, uint32_t bits, const void *page, const int16_t *values,
                           const int16_t *x, size_t x_stride, uint32_t rows, int32_t *dots, size_t dots_stride)
{
    dot_operand operands[DOT_ROWS];
    byte_table table = load_byte_table(values);
    for (uint32_t i = 0; i < rows; i++)
        spread_columns(x + i * x_stride, layout->column_tiles, &operands[i]);
    for (uint32_t group = 0; 4 * group < layout->row_tiles; group++)
        for (uint32_t r = 0; r < 8; r++) {
            dot_row(layout, bits, page, group, table, operands, rows, r, 0, dots, dots_stride);
            dot_row(layout, bits, page, group, table, operands, rows, r, 4, dots, dots_stride);
        }
}

#include "code_dots_rows.h"
