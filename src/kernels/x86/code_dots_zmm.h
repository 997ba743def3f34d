/* code_dots_zmm.h - products of codes and integers with 512-bit vectors.
 *
 * One permutation per field makes 16-bit operands of a word's fields. The permutation reads 5 bits
 * of an index, so a table holds its 16 entries twice and no mask is needed.
 *
 * The including file defines NAME, the definitions for nibbles.h, and add_pairs(sum, a, b), which
 * adds products of 16-bit pairs to 32-bit sums. */
#include "../nibbles.h"
#include "fold_zmm.h"

/* Rows that are multiplied together. Their 16 sums, 8 fields, two vectors of x and the tables fit
 * the 32 registers. */
#define DOT_ROWS 4u

/* Column pairs in the order of a word's lanes: [column tile][field / 2]. A pair fills a 128-bit
 * lane, once for each row tile. */
typedef struct dot_operand {
    vi at[KVANT_MAX_PADDED_DIM / KVANT_TILE][2];
} dot_operand;

typedef struct dot_tables {
    vi at[2];
} dot_tables;

KVANT_INLINE dot_tables load_tables(const int16_t *values)
{
    return (dot_tables){ { _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)values)),
                           _mm512_broadcast_i64x4(
                               _mm256_loadu_si256((const __m256i *)(values + 16))) } };
}

/* All row tiles use the same numbers of x. */
KVANT_INLINE void spread_band(const int16_t *x, uint32_t first, uint32_t end, dot_operand *out)
{
    for (uint32_t ct = first; ct < end; ct++) {
        vi pair = vi_set((int)column_pairs[ct % 4]);
        const int16_t *block = x + KVANT_PAGE_TOKENS * (ct / 4);
        out->at[ct][0] = _mm512_shuffle_epi8(vi_load(block), pair);
        out->at[ct][1] = _mm512_shuffle_epi8(vi_load(block + 32), pair);
    }
}

/* Row tile k uses numbers of bands[k]. */
KVANT_INLINE void spread_bands(const int16_t *const bands[4], uint32_t first, uint32_t end,
                               dot_operand *out)
{
    for (uint32_t ct = first; ct < end; ct++)
        for (uint32_t side = 0; side < 2; side++) {
            vi x = vi_set(0), pair = vi_set((int)column_pairs[ct % 4]);
            size_t at = (size_t)KVANT_PAGE_TOKENS * (ct / 4) + 32 * side;
            unrolled_for (uint32_t k = 0; k < 4; k++)
                x = _mm512_mask_mov_epi32(x, (__mmask16)(0x1111u << k),
                                          _mm512_shuffle_epi8(vi_load(bands[k] + at), pair));
            out->at[ct][side] = x;
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

/* The fields of a tile: rows r < 8 (index 0) and r + 8 (1), for columns c < 8 (0) and c + 8 (1). */
typedef struct word_fields {
    vi at[2][2];
} word_fields;

KVANT_INLINE word_fields look_up(vi table, vi w)
{
    word_fields f = { { { _mm512_permutexvar_epi16(w, table),
                          _mm512_permutexvar_epi16(_mm512_srli_epi32(w, 8), table) },
                        { _mm512_permutexvar_epi16(_mm512_srli_epi32(w, 4), table),
                          _mm512_permutexvar_epi16(_mm512_srli_epi32(w, 12), table) } } };
    return f;
}

/* Multiplies two neighbouring rows r, and the two rows r + 8. Each 128-bit lane of sum[half][i] is
 * a partial sum of 4 rows. */
KVANT_INLINE void dot_two(const uint32_t *const *planes, uint32_t bits, const dot_tables *tables,
                          const dot_operand *x, const kvant_code_factors *columns, uint32_t rows,
                          uint32_t r, vi sum[2][DOT_ROWS])
{
    vi first[2][DOT_ROWS], second[2][DOT_ROWS];
    unrolled_for (uint32_t i = 0; i < rows; i++)
        first[0][i] = first[1][i] = second[0][i] = second[1][i] = _mm512_setzero_si512();
    for (uint32_t ct = columns->first; ct < columns->end; ct++)
        unrolled_for (uint32_t digit = 0; digit < code_digits(bits); digit++) {
            word_fields a =
                look_up(tables->at[digit], nibble_word(planes, bits, digit, ct, 16 * r));
            word_fields b =
                look_up(tables->at[digit], nibble_word(planes, bits, digit, ct, 16 * r + 16));
            unrolled_for (uint32_t i = 0; i < rows; i++)
                unrolled_for (uint32_t side = 0; side < 2; side++) {
                    vi factor = x[i].at[ct][side];
                    first[0][i] = add_pairs(first[0][i], a.at[0][side], factor);
                    first[1][i] = add_pairs(first[1][i], a.at[1][side], factor);
                    second[0][i] = add_pairs(second[0][i], b.at[0][side], factor);
                    second[1][i] = add_pairs(second[1][i], b.at[1][side], factor);
                }
        }
    unrolled_for (uint32_t i = 0; i < rows; i++) {
        sum[0][i] = fold_pair(first[0][i], second[0][i]);
        sum[1][i] = fold_pair(first[1][i], second[1][i]);
    }
}

KVANT_INLINE void dot_group(const uint32_t *const *planes, uint32_t bits, const dot_tables *tables,
                            const dot_operand *x, const kvant_code_factors *columns, uint32_t rows,
                            int32_t *dots, size_t stride)
{
    for (uint32_t quad = 0; quad < 2; quad++) {
        vi low[2][DOT_ROWS], high[2][DOT_ROWS];
        dot_two(planes, bits, tables, x, columns, rows, 4 * quad, low);
        dot_two(planes, bits, tables, x, columns, rows, 4 * quad + 2, high);
        unrolled_for (uint32_t i = 0; i < rows; i++) {
            int32_t *out = dots + i * stride + 16 * quad;
            _mm512_store_si512(out, fold_quad(low[0][i], high[0][i]));
            _mm512_store_si512(out + 32, fold_quad(low[1][i], high[1][i]));
        }
    }
}

#include "../code_dots_rows.h"
