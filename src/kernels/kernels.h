/* kernels.h - the inner loops that exist once per CPU level, every signature declared once.
 *
 * Portable C (kernels_c.c) is the reference. A level is one translation unit with its own compiler
 * flags. No SIMD type crosses this header. dispatch.c chooses the table at run time.
 *
 * An unpacked tile holds a page as float, in the order of the page's words:
 *   K   tile[channel][position of token]                       padded_dim x 64
 *   V   tile[position of token][position of channel]           64 x padded_dim
 * with kvant_token_position and kvant_layout_row_position of page/layout.h. */
#pragma once

#include <stddef.h>

#include "../blocks/format.h"
#include "../page/chunks.h"
#include "../page/layout.h"
#include "chunk_numbers.h"
#include "directions.h"
#include "feedback.h"
#include "fixed_point.h"
#include "packs.h"
#include "trellis.h"
#include "triplets.h"

/* tile = values[code] for all codes of a page (exact), or code + offset when values is NULL. Not
 * scaled. 2^bits values, 32 of them readable; page and tile aligned to 64. */
#define KVANT_UNPACK_FN(name)                                                                      \
    void name(const kvant_layout *layout, const void *page, const float *values, float offset,     \
              float *tile)

/* c += a b with a m x k, b k x n, c m x n, row-major with leading dimensions; n a multiple of 16, b
 * and c aligned to 64 and ldb, ldc multiples of 16. Products are added in order of k, fused or not,
 * to one partial sum: the error of an element is at most k 2^-24 (1 + 2^-23)^k sum |a| |b|, with k
 * + 1 for k and |c| in the sum where c is not 0. */
#define KVANT_MATMUL_FN(name)                                                                      \
    void name(const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc,        \
              uint32_t m, uint32_t k, uint32_t n)

/* x[i] = e^(x[i] - shift) for n numbers (a multiple of 16, x aligned to 64), none above shift;
 * returns their sum. Relative error of each below 2^-21 + |x - shift| 2^-23 (roundings of x - shift
 * and of log2 e); where x - shift < -87 it is 0. NaN stays NaN, and so does inf - inf. */
#define KVANT_EXP_SUM_FN(name) float name(float *x, uint32_t n, float shift)

/* scores[i] += slope mask[i] for the 64 tokens of a page, -inf where mask[i] is, whatever the
 * score. Returns the largest score; NaNs count for nothing or for the largest. mask may be NULL:
 * zeros. All aligned to 64; error: one rounding of each operation, fused or not. */
#define KVANT_MASK_SCORES_FN(name) float name(float *scores, const float *mask, float slope)

/* tile[r][j] = tile[r][j] * scale[j] + zero[j] for a tile of m x n numbers; n a multiple of 16, all
 * aligned to 64. The error of an element is at most one rounding of each operation, fused or
 * not. */
#define KVANT_SCALE_COLUMNS_FN(name)                                                               \
    void name(float *tile, uint32_t m, uint32_t n, const float *scale, const float *zero)

/* tile[r][j] = tile[r][j] * scale[r] + zero[r], the same otherwise. */
#define KVANT_SCALE_ROWS_FN(name)                                                                  \
    void name(float *tile, uint32_t m, uint32_t n, const float *scale, const float *zero)

/* x[i] = half[i], exact, any n. */
#define KVANT_HALF_FN(name) void name(const uint16_t *half, float *x, uint32_t n)

/* The tile of a page of chunk codes, scaled; scale: 64 numbers in the order of positions, aligned
 * to 64. Padding channels of K are zero. Numbers of values lie as chunk_tiles.h says. Triplets:
 * within 2^-20 of the decoder's number, relative to it. 64 bytes behind the codes are readable. */
#define KVANT_UNPACK_TRIPLETS_FN(name)                                                             \
    void name(const kvant_triplet_book *book, const kvant_chunk_layout *layout, const void *page,  \
              const float *scale, uint32_t dim, float *tile)

/* Chunks of 4: exactly the decoder's numbers. outliers: [slot][token][4] halves, read where the
 * book has slots. */
#define KVANT_UNPACK_DIRECTIONS_FN(name)                                                           \
    void name(const kvant_direction_book *book, const kvant_chunk_layout *layout,                  \
              const void *page, const float *scale, const uint16_t *outliers, uint32_t dim,        \
              float *tile)

/* Attention on codes. A page's codes are a matrix. Rows are tokens of K or channels of V;
 * columns are channels of K or tokens of V, and products are summed over columns. The number at
 * (row, column) is scale * value of its code + zero.
 *
 * Lines (scale, zero) belong either to a row in a band of columns, or to a column in a band of
 * rows. Lines of rows multiply sums of products (sum_dots). Lines of columns multiply the
 * numbers of the columns before these become integers (fixed_point); each band then has one step
 * and one sum of zero points. Every level gives the same integers.
 *
 * Columns lie in the order of positions: column c of a block of 64 at kvant_token_position(c),
 * the last block completed with zeros. Rows of dots and lines lie in the same order, in whole
 * groups of 64. Rows of sums lie as in unpacked tiles, at kvant_layout_row_position, which
 * differs in a last group of fewer than 4 tiles. */

/* Integers that the columns meet: n vectors, in each one for every band of rows. */
typedef struct kvant_code_factors {
    const int16_t *x;           /* of vector i, band b: x + i * stride + b * band_stride */
    size_t stride, band_stride; /* multiples of 32 */
    uint32_t band_tiles;        /* row tile rt meets band rt / band_tiles */
    uint32_t first, end;        /* column tiles that are multiplied */
} kvant_code_factors;

#define KVANT_CODE_VALUES 32 /* values of a code's low four bits, 16 more of the others */

/* dots[i * dots_stride + position of row] = sum over the columns of values[code % 16] + values[16 +
 * code / 16] times their integer, exact, for n >= 1 vectors; anything where a row is missing. Codes
 * of up to 4 bits have no second value. No value, sum of two values or integer may exceed
 * KVANT_CODE_OPERAND_MAX, and sum |values x| must stay below 2^31, of either value alone too. x and
 * dots aligned to 64, dots_stride at least 64 per row group and a multiple of 16. */
#define KVANT_CODE_DOTS_FN(name)                                                                   \
    void name(const kvant_layout *layout, const void *page, const int16_t *values,                 \
              const kvant_code_factors *factors, int32_t *dots, size_t dots_stride, uint32_t n)

/* Makes sums of dots. The sum of a row is dot * step * scale + offset * zero, with step and
 * offset of vector i and the row's band b, scale and zero of the row. Rows of sums lie as in
 * unpacked tiles; scale and zero lie as in dots. */
typedef struct kvant_code_sums {
    const float *scale, *zero;    /* of rows, in whole groups of 64; NULL: ones */
    const float *steps, *offsets; /* steps[i * n_bands + b]; offsets NULL: zeros */
    uint32_t n_bands, band_tiles; /* b = row tile / band_tiles */
    bool add;                     /* to what the sums are, else whatever they are */
    float *sums;                  /* of vector i: sums + i * stride, aligned to 64 */
    size_t stride;                /* a multiple of 16 */
} kvant_code_sums;

/* The sums of dots[i * dots_stride + position of row] for all rows of a page and n >= 1 vectors.
 * The error is at most 5 roundings of the first product, 3 of the second and 2 of the sum
 * before. */
#define KVANT_SUM_DOTS_FN(name)                                                                    \
    void name(const kvant_layout *layout, const int32_t *dots, size_t dots_stride,                 \
              const kvant_code_sums *out, uint32_t n)

/* code_dots and sum_dots at once, best for many vectors. No band begins or ends within a group of 4
 * row tiles. dots: n x dots_stride numbers for the kernel's own use. */
#define KVANT_TILE_SUMS_FN(name)                                                                   \
    void name(const kvant_layout *layout, const void *page, const int16_t *values,                 \
              const kvant_code_factors *factors, int32_t *dots, size_t dots_stride,                \
              const kvant_code_sums *out, uint32_t n)

/* The same dots for pages of chunk codes of up to KVANT_NUMBER_MAX_BITS, for n >= 1 vectors x: rows
 * are tokens at their positions (K) or channels as in unpacked tiles (V, chunk_tiles.h), padding 0.
 * Of K number j of chunk c meets x[kvant_key_place], 0 where there is no such channel; x has
 * numbers for all of an even number of chunks. Of V tokens meet x at their positions. Sums are
 * bounded as above; 64 bytes behind the codes are readable; x and dots aligned to 64, their strides
 * multiples of 16. */
#define KVANT_CHUNK_DOTS_FN(name)                                                                  \
    void name(const kvant_chunk_numbers *numbers, const kvant_chunk_layout *layout,                \
              const void *page, const int16_t *x, size_t x_stride, int32_t *dots,                  \
              size_t dots_stride, uint32_t n)

/* Rows of numbers that become integers, one after another. Arrays of rows have strides; all aligned
 * to 64. */
typedef struct kvant_fixed_rows {
    const float *w;            /* n_rows x n, n a multiple of 64 */
    const float *scale, *zero; /* n; NULL: ones, none */
    int32_t limit;             /* at most KVANT_CODE_OPERAND_MAX */
    int16_t *x;                /* row i: x + i * x_stride, a multiple of 32 */
    size_t x_stride, line_stride;
    float *steps, *zeros; /* of row i: [i * line_stride] */
    int32_t *sums;        /* n_rows x column tiles; NULL: not wanted */
} kvant_fixed_rows;

/* x[j] = round(w[j] scale[j] / step) in each row, step = the largest magnitude of w[j] scale[j] /
 * limit. The error of step x[j] is at most (1/2 + limit 2^-22) step. When the largest magnitude is
 * below 2^-110 all is zero; when it is not finite, step is NaN and x zero. sums[t] = sum of x over
 * column tile t; zeros = sum of w[j] zero[j], 0 without, its error at most n 2^-24 (1 + 2^-23)^n
 * times the sum of magnitudes. */
#define KVANT_FIXED_POINT_FN(name)                                                                 \
    void name(const kvant_fixed_rows *rows, uint32_t n, uint32_t n_rows)

/* x[kvant_token_position(t)] = half[t], exact, for the 64 tokens of a page. half aligned to 16, x
 * to 64. */
#define KVANT_TOKEN_HALVES_FN(name) void name(const uint16_t *half, float *x)

/* Attention on rows of ggml's block formats (blocks/format.h), tokens in order. x is what
 * kvant_block_decode gives; head_dim a multiple of the format's numbers, at most
 * KVANT_BLOCK_MAX_HEAD_DIM. Nothing beyond a row is read. */
typedef struct kvant_block_page {
    kvant_block_type type;
    uint32_t n_tokens, head_dim; /* 1 to 64 tokens */
    const uint8_t *rows;         /* any alignment */
    size_t stride;               /* bytes from token to token */
} kvant_block_page;

/* scores[i * 64 + t] = <q[i * q_stride ...], x[t]> for n >= 1 queries; scores beyond the last token
 * are anything. q, scores aligned to 64, q_stride a multiple of 16. Error at most head_dim 2^-24 (1
 * + 2^-23)^head_dim sum |q x|, in any order of sums, fused or not. */
#define KVANT_BLOCK_SCORES_FN(name)                                                                \
    void name(const kvant_block_page *page, const float *q, size_t q_stride, float *scores,        \
              uint32_t n)

/* sums[i * sums_stride + c] += sum over t of w[i * 64 + t] x[t][c] in order of t, w >= 0; rows
 * whose every weight is 0 do not take part, whatever they hold. sums aligned to 64, sums_stride a
 * multiple of 16. Error at most (n_tokens + 1) 2^-24 (1 + 2^-23)^65 times the sum of magnitudes. */
#define KVANT_BLOCK_SUMS_FN(name)                                                                  \
    void name(const kvant_block_page *page, const float *w, float *sums, size_t sums_stride,       \
              uint32_t n)

/* The page as floats, zeros for tokens beyond the last: tile[t][c] (block_rows_tile) or tile[c][t]
 * (block_columns_tile). tile aligned to 64. x exact, or with one rounding instead of two where a
 * minimum is added. */
#define KVANT_BLOCK_TILE_FN(name) void name(const kvant_block_page *page, float *tile)

/* tile[j * 64 + kvant_token_position(t)] = half[t * dim + j], exact, for the 64 tokens of a page
 * and any dim. tile aligned to 64. */
#define KVANT_KEY_HALVES_FN(name) void name(const uint16_t *half, uint32_t dim, float *tile)

/* The loops of encoders. Unlike those above every level gives the same bits: operations and their
 * order are those of kernels_c.c, without contraction. */

/* sum a[i] b[i] in the order of math/sums.h, any n. */
#define KVANT_DOT_FN(name) float name(const float *a, const float *b, uint32_t n)

/* sums[i] = the dot of a and the n numbers at rows + i * n, for n_rows rows. */
#define KVANT_DOT_ROWS_FN(name)                                                                    \
    void name(const float *a, const float *rows, uint32_t n, uint32_t n_rows, float *sums)

/* y[i] = sum over j = 0, 1, ... of weights[j] rows[j * n + i], in that order from 0, for n numbers
 * of k rows; n_y such y, each with weights of its own, one after another; y overlaps nothing. */
#define KVANT_COMBINE_ROWS_FN(name)                                                                \
    void name(const float *rows, const float *weights, uint32_t k, uint32_t n, uint32_t n_y,       \
              float *y)

/* A sum of outer products (add_outers) is a lower triangle of kvant_lower_floats(n) numbers, column
 * after column. A column begins at the last row at or above the diagonal that is a multiple of 16,
 * and ends before row kvant_lower_stride(n). */
static inline uint32_t kvant_lower_stride(uint32_t n)
{
    return (n + 15) / 16 * 16;
}

/* Of the number in row i, at least j / 16 * 16, of column j. */
static inline size_t kvant_lower_place(uint32_t n, uint32_t i, uint32_t j)
{
    const size_t stride = kvant_lower_stride(n),
                 first = j / 16 * 16; /* row of the column, and column of as many rows */
    return first * stride - first * (first - 16) / 2 + (j - first) * (stride - first) + i - first;
}

static inline size_t kvant_lower_floats(uint32_t n)
{
    return kvant_lower_place(n, n / 16 * 16, n);
}

/* sums += x x^T of rows x of n numbers, as a lower triangle. Rows lie `stride`, n rounded up to 16,
 * apart. Numbers behind a row, above the diagonal and below row n - 1 may be anything. */
#define KVANT_ADD_OUTERS_FN(name)                                                                  \
    void name(const float *rows, size_t stride, uint32_t n_rows, uint32_t n, float *sums)

/* b becomes W, whose lower triangle is anything, with W^T W the geometric mean of a^-1 and b, which
 * are n x n, symmetric and positive definite: (W^T W) a (W^T W) = b within 10^-5 of eigenvalues,
 * where those of ab reach over no more than 2^46. Returns the trace of a W^T W, or 0: one was not
 * positive definite. a and room (KVANT_MEAN_ROOM numbers) become anything. */
#define KVANT_MEAN_NODES 32
#define KVANT_MEAN_ROOM(n)                                                                         \
    ((size_t)(n) * ((n) + 6 + ((n) > 3 * KVANT_MEAN_NODES ? (n) : 3 * KVANT_MEAN_NODES)))
#define KVANT_MEAN_FACTOR_FN(name) double name(size_t n, double *a, double *b, double *room)

/* l, n x n, a lower triangle with zeros above a diagonal of numbers that are not 0, becomes its
 * inverse. column: n numbers. */
#define KVANT_LOWER_INVERSE_FN(name) void name(size_t n, double *l, double *column)

/* n_x vectors x of n <= KVANT_MAX_HEAD_DIM numbers become L^-T x (solve_upper), L^T x
 * (multiply_upper), L^-1 x (solve_lower). L: rows of a lower triangle in binary16, no zero in its
 * diagonal, then KVANT_TRIANGLE_PADDING readable numbers. A solution solves for a matrix within
 * (n + 3) 2^-23 of each number of L. A product is within n 2^-23 of the sum of magnitudes. */
#define KVANT_TRIANGLE_PADDING 16u
#define KVANT_TRIANGLE_FN(name)                                                                    \
    void name(const uint16_t *triangle, uint32_t n, uint32_t n_x, float *x)

/* sum a[i] values[codes[i]] in the order of dot; 2^bits values, 32 of them readable. */
#define KVANT_DOT_CODES_FN(name)                                                                   \
    float name(const float *a, const uint8_t *codes, uint32_t n, const float *values, uint32_t bits)

/* The fast Walsh-Hadamard transform in place (Sylvester order, orthonormal) on blocks of n floats.
 * block is a power of two that divides n. The transform is its own inverse. The order of operations
 * is part of the format: butterflies at distance 1, 2, 4, ..., then one product per number. */
#define KVANT_HADAMARD_FN(name) void name(float *x, uint32_t n, uint32_t block)

/* Smallest and largest of n >= 1 finite numbers; of zeros of both signs either may come out. */
#define KVANT_RANGE_FN(name) void name(const float *x, uint32_t n, float *min, float *max)

/* The largest of the numbers' magnitudes as binary32 bits: 0x7f800000 and more when one is infinite
 * or NaN. */
#define KVANT_MAGNITUDE_FN(name) uint32_t name(const float *x, uint32_t n)

/* codes[i] = clamp(round((x[i] - zero) * inverse), low, high) - offset; round half to even. */
typedef struct kvant_uniform_step {
    float zero, inverse, low, high, offset;
} kvant_uniform_step;
#define KVANT_UNIFORM_CODES_FN(name)                                                               \
    void name(const float *x, uint32_t n, const kvant_uniform_step *step, uint8_t *codes)

/* codes[i] = number of thresholds below x[i] * inverse; 2^bits - 1 increasing thresholds, 32
 * numbers readable. */
#define KVANT_CODEBOOK_CODES_FN(name)                                                              \
    void name(const float *x, uint32_t n, float inverse, const float *thresholds, uint32_t bits,   \
              uint8_t *codes)

/* Codes of the n numbers z (unaligned), each rounded after what the errors of those before ask of
 * it, and the row's sums. thresholds and values as for codebook_codes, values 2^bits. The same bits
 * at every level. */
#define KVANT_FEEDBACK_CODES_FN(name)                                                              \
    void name(const kvant_feedback *feedback, const float *z, const float *thresholds,             \
              const float *values, uint32_t bits, uint8_t *codes, kvant_feedback_sums *sums)

/* half[i] = x[i], rounded to nearest even, any n; numbers beyond fp16 become infinite. */
#define KVANT_TO_HALF_FN(name) void name(const float *x, uint16_t *half, uint32_t n)

/* Codes of n triplets, a multiple of 16 (triplets.h). */
#define KVANT_TRIPLET_CODES_FN(name)                                                               \
    void name(const kvant_triplet_book *book, uint32_t n, kvant_triplets *t)

/* For 16 chunks of 4 components, component i of chunk j at x[i * stride + j]: which[j] = the first
 * of n secondary quaternions s with the largest <chunk, p s> over the 24 Hurwitz units p; 0 for
 * chunks of zeros. Quaternions of 4 numbers one after another. */
#define KVANT_CLOSEST_COSETS_FN(name)                                                              \
    void name(const float *x, size_t stride, const float *secondaries, uint32_t n, uint32_t *which)

/* The same of n entries with the largest <chunk, entry>. */
#define KVANT_LARGEST_PRODUCTS_FN(name)                                                            \
    void name(const float *x, size_t stride, const float *entries, uint32_t n, uint32_t *which)

/* bits[t] = the code bit of step t of a path round the circle of n steps, found by the search of
 * format.md, "Trellis codes"; cells[t] is below KVANT_TRELLIS_CELLS, or
 * KVANT_TRELLIS_NO_NUMBER. n: 1 ... KVANT_TRELLIS_MAX_STEPS. With 256 states bit 6 of a window
 * changes no subset (trellis.h). */
#define KVANT_TRELLIS_PATH_FN(name)                                                                \
    void name(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n,                     \
              const kvant_trellis_work *work, uint8_t *bits)

/* dots[i * dots_stride + position of row] = sum over the columns of level * integer, for the
 * levels of a page's trellis codes, exact, for n >= 1 vectors x. Rows, columns and bounds are as
 * in code_dots, with levels instead of values. */
#define KVANT_TRELLIS_DOTS_FN(name)                                                                \
    void name(const kvant_trellis *trellis, const kvant_layout *layout, const void *page,          \
              const int16_t *x, size_t x_stride, int32_t *dots, size_t dots_stride, uint32_t n)

/* The tile of a page of values: unit times each level, rounded, times its token's scale, rounded.
 * scale: 64 numbers in the order of positions. page, scale and tile aligned to 64. */
#define KVANT_TRELLIS_VALUES_FN(name)                                                              \
    void name(const kvant_trellis *trellis, const kvant_layout *layout, const void *page,          \
              float unit, const float *scale, float *tile)

/* levels = the levels plus 128 of a pack of trellis codes of 2, 3 or 4 bits (kvant_pack_circle), as
 * a pack of 8 bits. trellis->n_steps and steps are not looked at. codes and levels aligned to
 * 64. */
#define KVANT_TRELLIS_PACK_FN(name)                                                                \
    void name(const kvant_trellis *trellis, const kvant_pack_format *format, const uint8_t *codes, \
              uint8_t *levels)

/* dots[j * 32 + v] = sum over dimensions of level * integer for vector v of a pack and query j,
 * exact, for n >= 1 queries. codes aligned to 64, dots too. At most 2048 quads, and the bias
 * at most 1, 10, 26 and 61 for 1 to 4 bits. */
#define KVANT_PACK_DOTS_FN(name)                                                                   \
    void name(const kvant_pack_format *format, const uint8_t *codes,                               \
              const kvant_pack_queries *queries, int32_t *dots)

/* keys[j * 32 + v] = (float)dots[j * 32 + v] * factors[v] * scales[j] + offsets[v] * weights[j],
 * rounded after each operation; without offsets (NULL) the first two products. Bit v of masks[j]:
 * the key is at least thresholds[j]. dots, factors, offsets and keys aligned to 64. The same bits
 * at every level. */
#define KVANT_PACK_KEYS_FN(name)                                                                   \
    void name(const int32_t *dots, const float *factors, const float *offsets,                     \
              const float *scales, const float *weights, const float *thresholds, uint32_t n,      \
              float *keys, uint32_t *masks)

/* Every kernel: X(its signature, its name). */
#define KVANT_KERNELS(X)                                                                           \
    X(UNPACK, unpack)                                                                              \
    X(MATMUL, matmul)                                                                              \
    X(EXP_SUM, exp_sum)                                                                            \
    X(MASK_SCORES, mask_scores)                                                                    \
    X(HALF, half_to_float)                                                                         \
    X(SCALE_COLUMNS, scale_columns)                                                                \
    X(SCALE_ROWS, scale_rows)                                                                      \
    X(TO_HALF, float_to_half)                                                                      \
    X(DOT, dot)                                                                                    \
    X(DOT_ROWS, dot_rows)                                                                          \
    X(DOT_CODES, dot_codes)                                                                        \
    X(COMBINE_ROWS, combine_rows)                                                                  \
    X(ADD_OUTERS, add_outers)                                                                      \
    X(MEAN_FACTOR, mean_factor)                                                                    \
    X(LOWER_INVERSE, lower_inverse)                                                                \
    X(TRIANGLE, solve_lower)                                                                       \
    X(TRIANGLE, solve_upper)                                                                       \
    X(TRIANGLE, multiply_upper)                                                                    \
    X(HADAMARD, hadamard)                                                                          \
    X(RANGE, range)                                                                                \
    X(MAGNITUDE, magnitude)                                                                        \
    X(UNIFORM_CODES, uniform_codes)                                                                \
    X(CODEBOOK_CODES, codebook_codes)                                                              \
    X(FEEDBACK_CODES, feedback_codes)                                                              \
    X(TRIPLET_CODES, triplet_codes)                                                                \
    X(CLOSEST_COSETS, closest_cosets)                                                              \
    X(LARGEST_PRODUCTS, largest_products)                                                          \
    X(TOKEN_HALVES, token_halves)                                                                  \
    X(KEY_HALVES, key_halves)                                                                      \
    X(FIXED_POINT, fixed_point)                                                                    \
    X(CODE_DOTS, code_dots)                                                                        \
    X(SUM_DOTS, sum_dots)                                                                          \
    X(TILE_SUMS, tile_sums)                                                                        \
    X(UNPACK_TRIPLETS, unpack_triplets)                                                            \
    X(UNPACK_DIRECTIONS, unpack_directions)                                                        \
    X(BLOCK_SCORES, block_scores)                                                                  \
    X(BLOCK_SUMS, block_sums)                                                                      \
    X(BLOCK_TILE, block_rows_tile)                                                                 \
    X(BLOCK_TILE, block_columns_tile)                                                              \
    X(CHUNK_DOTS, chunk_dots)                                                                      \
    X(TRELLIS_PATH, trellis_path)                                                                  \
    X(TRELLIS_DOTS, trellis_dots)                                                                  \
    X(TRELLIS_VALUES, trellis_values)                                                              \
    X(TRELLIS_PACK, trellis_pack)                                                                  \
    X(PACK_DOTS, pack_dots)                                                                        \
    X(PACK_KEYS, pack_keys)

/* kvant_<name>_fn is the type of a kernel, kvant_<name>_c the reference. */
#define KVANT_KERNEL_DECLARE(FN, name)                                                             \
    typedef KVANT_##FN##_FN(kvant_##name##_fn);                                                    \
    KVANT_##FN##_FN(kvant_##name##_c);
KVANT_KERNELS(KVANT_KERNEL_DECLARE)

typedef struct kvant_kernels {
#define KVANT_KERNEL_MEMBER(FN, name) kvant_##name##_fn *name;
    KVANT_KERNELS(KVANT_KERNEL_MEMBER)
} kvant_kernels;

/* One row group whose tiles are fewer than 4, for levels that vectorise full groups only. */
void kvant_unpack_group_c(const kvant_layout *layout, const void *page, const float *values,
                          float offset, uint32_t group, float *tile);

/* For levels that multiply only row groups of 4 tiles: extends the words of a smaller group to a
 * whole group, with zeros in the missing rows. words: KVANT_WHOLE_GROUP_WORDS. Plane i of the
 * group begins at planes[i]. For V, whose columns are tokens. */
#define KVANT_WHOLE_GROUP_WORDS (2 * 4 * 128)
void kvant_whole_group(const kvant_layout *layout, const void *page, uint32_t group,
                       uint32_t *words, const uint32_t **planes);

/* sum_dots of vector i in one row group, whose dots begin at dots. */
void kvant_sum_group_c(const kvant_layout *layout, uint32_t group, const int32_t *dots,
                       const kvant_code_sums *out, uint32_t i);

/* Overwrite the entries that the level improves on those of the level before. Present when the
 * build has the level. */
void kvant_kernels_init_avx2(kvant_kernels *kernels);
void kvant_kernels_init_avx2_vnni(kvant_kernels *kernels);
void kvant_kernels_init_avx512(kvant_kernels *kernels);
void kvant_kernels_init_avx512_vnni(kvant_kernels *kernels);
void kvant_kernels_init_avx512_vbmi(kvant_kernels *kernels);
void kvant_kernels_init_neon(kvant_kernels *kernels);
void kvant_kernels_init_neon_dot(kvant_kernels *kernels);

/* The table of a level (KVANT_CPU_AUTO: the one in use), or NULL when machine or build lack it. */
const kvant_kernels *kvant_kernels_get(kvant_cpu_level level);
