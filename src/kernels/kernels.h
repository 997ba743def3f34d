/* kernels.h - the inner loops that exist once per CPU level. It declares every signature once.
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
#include "../math/triangle.h"
#include "../page/chunks.h"
#include "../page/layout.h"
#include "chunk_values.h"
#include "constants.h"
#include "directions.h"
#include "feedback.h"
#include "fixed_point.h"
#include "packs.h"
#include "trellis.h"
#include "triplets.h"

/* tile = values[code] for all codes of a page (exact), or code + offset when values is NULL. The
 * tile is not scaled. There are 2^bits values, and 32 must be readable. page and tile are aligned
 * to 64. */
#define KVANT_UNPACK_FN(name)                                                                      \
    void name(const kvant_layout *layout, const void *page, const float *values, float offset,     \
              float *tile)

/* c += a b, where a is m x k, b is k x n and c is m x n, row-major with leading dimensions. The
 * caller makes n, ldb and ldc multiples of 16, and aligns b and c to 64. Products are added in
 * order of k, fused or not, to one partial sum. The error of an element is at most k 2^-24 (1 +
 * 2^-23)^k sum |a| |b|. If c is not 0 on entry, read k + 1 for k and include |c| in the sum. */
#define KVANT_MATMUL_FN(name)                                                                      \
    void name(const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc,        \
              uint32_t m, uint32_t k, uint32_t n)

/* x[i] = e^(x[i] - shift) for n numbers, none above shift; returns their sum. n is a multiple of 16
 * and x is aligned to 64. The relative error of each is below 2^-21 + |x - shift| 2^-23, from the
 * roundings of x - shift and of log2 e. The result is 0 where x - shift < -87. NaN stays NaN, and
 * inf - inf gives NaN. */
#define KVANT_EXP_SUM_FN(name) float name(float *x, uint32_t n, float shift)

/* scores[i] += slope mask[i] for the 64 tokens of a page. The score becomes -inf where mask[i] is
 * -inf, whatever it was. Returns the largest score; a NaN is either ignored or counts as the
 * largest. mask may be NULL, which means zeros. All arrays are aligned to 64. The error is one
 * rounding per operation, fused or not. */
#define KVANT_MASK_SCORES_FN(name) float name(float *scores, const float *mask, float slope)

/* tile[r][j] = tile[r][j] * scale[j] + zero[j] for a tile of m x n numbers; n a multiple of 16, all
 * aligned to 64. The error of an element is at most one rounding of each operation, fused or
 * not. */
#define KVANT_SCALE_COLUMNS_FN(name)                                                               \
    void name(float *tile, uint32_t m, uint32_t n, const float *scale, const float *zero)

/* tile[r][j] = tile[r][j] * scale[r] + zero[r], with the same sizes, alignment and error. */
#define KVANT_SCALE_ROWS_FN(name)                                                                  \
    void name(float *tile, uint32_t m, uint32_t n, const float *scale, const float *zero)

/* x[i] = half[i], exact, for any n. */
#define KVANT_HALF_FN(name) void name(const uint16_t *half, float *x, uint32_t n)

/* Unpacks and scales a page of chunk codes of triplets. scale: 64 numbers in the order of
 * positions, aligned to 64. Padding channels of K are zero. chunk_tiles.h has the order of channels
 * for V. A number is within 2^-20 of the decoder's, relative to it. 64 bytes behind the codes must
 * be readable. */
#define KVANT_UNPACK_TRIPLETS_FN(name)                                                             \
    void name(const kvant_triplet_book *book, const kvant_chunk_layout *layout, const void *page,  \
              const float *scale, uint32_t dim, float *tile)

/* The same for chunks of 4, with exactly the decoder's numbers. outliers: [slot][token][4] halves;
 * read only when the book has slots. */
#define KVANT_UNPACK_DIRECTIONS_FN(name)                                                           \
    void name(const kvant_direction_book *book, const kvant_chunk_layout *layout,                  \
              const void *page, const float *scale, const uint16_t *outliers, uint32_t dim,        \
              float *tile)

/* Attention on codes. A page's codes are a matrix. For K its rows are tokens and its columns are
 * channels; for V its rows are channels and its columns are tokens. Products are summed over
 * columns. The number at (row, column) is scale * value of its code + zero.
 *
 * A line is a pair (scale, zero). A line belongs either to a row in a band of columns, or to a
 * column in a band of rows. A row's line multiplies the row's sum of products (sum_dots). A
 * column's line multiplies the number that meets the column, before this number becomes an integer
 * (fixed_point). Each band then has one step and one sum of zero points. Every level gives the same
 * integers.
 *
 * Columns lie in the order of positions: column c of a block of 64 lies at kvant_token_position(c),
 * and zeros complete the last block. The rows of dots and of lines lie in the same order, in whole
 * groups of 64. The rows of sums lie as in unpacked tiles, at kvant_layout_row_position. This
 * differs in a last group of fewer than 4 tiles. */

/* The integers that codes are multiplied by. There are n vectors, and each has an array of integers
 * per row band. */
typedef struct kvant_code_factors {
    const int16_t *x;           /* vector i, band b: x + i * stride + b * band_stride */
    size_t stride, band_stride; /* multiples of 32 */
    uint32_t band_tiles;        /* row tile rt is multiplied by band rt / band_tiles */
    uint32_t first, end;        /* column tiles that are multiplied */
} kvant_code_factors;

/* 16 values for a code's low four bits, then 16 values for its high bits */
#define KVANT_CODE_VALUES 32

/* dots[i * dots_stride + position of row] = the sum over columns of (values[code % 16] + values[16
 * + code / 16]) times the column's integer. This is exact, for n >= 1 vectors. The dots of missing
 * rows are undefined. Codes of up to 4 bits have no second value.
 *
 * No value, no sum of two values and no integer may exceed KVANT_CODE_OPERAND_MAX. The sum of
 * |values x| must stay below 2^31, with both values and with either value alone. The arrays x and
 * dots are aligned to 64. The stride of dots is a multiple of 16 and at least 64 per row group. */
#define KVANT_CODE_DOTS_FN(name)                                                                   \
    void name(const kvant_layout *layout, const void *page, const int16_t *values,                 \
              const kvant_code_factors *factors, int32_t *dots, size_t dots_stride, uint32_t n)

/* How sums are made from dots. The sum of a row is dot * step * scale + offset * zero. The step and
 * the offset belong to vector i and the row's band b; scale and zero belong to the row. Rows of
 * sums lie as in unpacked tiles; scale and zero lie in the order of dots. */
typedef struct kvant_code_sums {
    const float *scale, *zero;    /* one number per row, in whole groups of 64; NULL: ones */
    const float *steps, *offsets; /* steps[i * n_bands + b]; offsets NULL: zeros */
    uint32_t n_bands, band_tiles; /* b = row tile / band_tiles */
    bool add;                     /* true: adds to sums; false: overwrites them */
    float *sums;                  /* vector i: sums + i * stride, aligned to 64 */
    size_t stride;                /* a multiple of 16 */
} kvant_code_sums;

/* Computes the sums from dots[i * dots_stride + position of row] for all rows of a page and n >= 1
 * vectors. The error is at most 5 roundings of the first product, 3 roundings of the second product
 * and 2 roundings of the earlier sum. */
#define KVANT_SUM_DOTS_FN(name)                                                                    \
    void name(const kvant_layout *layout, const int32_t *dots, size_t dots_stride,                 \
              const kvant_code_sums *out, uint32_t n)

/* code_dots and sum_dots in one call, which is fastest for many vectors. No band may begin or end
 * within a group of 4 row tiles. dots: n x dots_stride numbers of room for the kernel. */
#define KVANT_TILE_SUMS_FN(name)                                                                   \
    void name(const kvant_layout *layout, const void *page, const int16_t *values,                 \
              const kvant_code_factors *factors, int32_t *dots, size_t dots_stride,                \
              const kvant_code_sums *out, uint32_t n)

/* The same dots for pages of chunk codes of up to KVANT_NUMBER_MAX_BITS, for n >= 1 vectors x. Rows
 * are tokens at their positions (K), or channels as in unpacked tiles (V, chunk_tiles.h); rows of
 * padding are 0.
 *
 * For K, number j of chunk c is multiplied by x[kvant_key_position], which must be 0 where no such
 * channel exists. The number of chunks in x is rounded up to an even number. For V, x has the
 * tokens at their positions. Sums are bounded as for code_dots. 64 bytes behind the codes must be
 * readable. x and dots are aligned to 64, and their strides are multiples of 16. */
#define KVANT_CHUNK_DOTS_FN(name)                                                                  \
    void name(const kvant_chunk_values *numbers, const kvant_chunk_layout *layout,                 \
              const void *page, const int16_t *x, size_t x_stride, int32_t *dots,                  \
              size_t dots_stride, uint32_t n)

/* Several rows of numbers w that become integers x. The arrays have strides, and all are aligned to
 * 64. */
typedef struct kvant_fixed_rows {
    const float *w;            /* n_rows x n, n a multiple of 64 */
    const float *scale, *zero; /* n numbers each; NULL: ones, and no zeros */
    int32_t limit;             /* at most KVANT_CODE_OPERAND_MAX */
    int16_t *x;                /* row i: x + i * x_stride, a multiple of 32 */
    size_t x_stride, line_stride;
    float *steps, *zeros; /* row i: [i * line_stride] */
    int32_t *sums;        /* n_rows x column tiles; NULL: not computed */
} kvant_fixed_rows;

/* For each row, step = the largest magnitude of w[j] scale[j], divided by limit, and x[j] =
 * round(w[j] scale[j] / step). The error of step x[j] is at most (1/2 + limit 2^-22) step. When the
 * largest magnitude is below 2^-110, step and x are zero. When it is not finite, step is NaN and x
 * is zero.
 *
 * sums[t] is the sum of x over column tile t. zeros is the sum of w[j] zero[j], or 0 without zero.
 * Its error is at most n 2^-24 (1 + 2^-23)^n times the sum of magnitudes. */
#define KVANT_FIXED_POINT_FN(name)                                                                 \
    void name(const kvant_fixed_rows *rows, uint32_t n, uint32_t n_rows)

/* x[kvant_token_position(t)] = half[t], exact, for the 64 tokens of a page. half is aligned to 16,
 * x to 64. */
#define KVANT_TOKEN_HALVES_FN(name) void name(const uint16_t *half, float *x)

/* A page in one of ggml's block formats (blocks/format.h): a row per token, with tokens in order.
 * In the kernels below, x is the decoded page, as kvant_block_decode gives it. head_dim is a
 * multiple of the numbers in a block of the format, at most KVANT_BLOCK_MAX_HEAD_DIM. Kernels read
 * nothing beyond a row. */
typedef struct kvant_block_page {
    kvant_block_type type;
    uint32_t n_tokens, head_dim; /* 1 to 64 tokens */
    const uint8_t *rows;         /* any alignment */
    size_t stride;               /* bytes from token to token */
} kvant_block_page;

/* scores[i * 64 + t] = <q[i * q_stride ...], x[t]> for n >= 1 queries. Scores beyond the last token
 * are undefined. q and scores are aligned to 64, and q_stride is a multiple of 16. The error is at
 * most head_dim 2^-24 (1 + 2^-23)^head_dim sum |q x|, in any order of sums, fused or not. */
#define KVANT_BLOCK_SCORES_FN(name)                                                                \
    void name(const kvant_block_page *page, const float *q, size_t q_stride, float *scores,        \
              uint32_t n)

/* sums[i * sums_stride + c] += the sum over t of w[i * 64 + t] x[t][c], in order of t, for w >= 0.
 * A row of x takes no part when all its weights are 0, whatever it holds. Products are fused if the
 * level's matmul fuses them, so both find the same bits. sums is aligned to 64, and sums_stride is
 * a multiple of 16. The error is at most (n_tokens + 1) 2^-24 (1 + 2^-23)^65 times the sum of
 * magnitudes. */
#define KVANT_BLOCK_SUMS_FN(name)                                                                  \
    void name(const kvant_block_page *page, const float *w, float *sums, size_t sums_stride,       \
              uint32_t n)

/* block_sums by a matmul, row after row of x. */
void kvant_block_sums_by(KVANT_MATMUL_FN((*matmul)), const kvant_block_page *page, const float *w,
                         float *sums, size_t sums_stride, uint32_t n);

/* Writes the page as floats, with zeros for tokens beyond the last: tile[t][c] (block_rows_tile) or
 * tile[c][t] (block_columns_tile). tile is aligned to 64. Numbers are exact, or have one rounding
 * instead of two in formats that add a minimum. */
#define KVANT_BLOCK_TILE_FN(name) void name(const kvant_block_page *page, float *tile)

/* tile[j * 64 + kvant_token_position(t)] = half[t * dim + j], exact, for the 64 tokens of a page
 * and any dim. tile is aligned to 64. */
#define KVANT_KEY_HALVES_FN(name) void name(const uint16_t *half, uint32_t dim, float *tile)

/* The loops of encoders. Here every level gives the same bits: operations have the order of
 * kernels_c.c, without contraction. */

/* Returns the sum of a[i] b[i] in the order of math/sums.h, for any n. */
#define KVANT_DOT_FN(name) float name(const float *a, const float *b, uint32_t n)

/* sums[i] = the dot product of a and the n numbers at rows + i * n, for n_rows rows. */
#define KVANT_DOT_ROWS_FN(name)                                                                    \
    void name(const float *a, const float *rows, uint32_t n, uint32_t n_rows, float *sums)

/* y[i] = the sum over j = 0, 1, ... of weights[j] rows[j * n + i], in that order and starting from
 * 0, for k rows of n numbers. Computes n_y such y, one after another in memory, each from its own k
 * weights. y overlaps nothing. */
#define KVANT_COMBINE_ROWS_FN(name)                                                                \
    void name(const float *rows, const float *weights, uint32_t k, uint32_t n, uint32_t n_y,       \
              float *y)

/* The height of a triangle, rounded up to 16. A sum of outer products (add_outers) is a lower
 * triangle of kvant_lower_floats(n) numbers, column after column. A column begins at the last row
 * at or above the diagonal that is a multiple of 16, and ends before row kvant_lower_stride(n). */
static inline uint32_t kvant_lower_stride(uint32_t n)
{
    return (n + 15) / 16 * 16;
}

/* The index of the number in row i and column j, for i of at least j / 16 * 16. */
static inline size_t kvant_lower_position(uint32_t n, uint32_t i, uint32_t j)
{
    /* A column begins at row `first`, and the columns before `first` are complete groups of 16. */
    const size_t stride = kvant_lower_stride(n), first = j / 16 * 16;
    return first * stride - first * (first - 16) / 2 + (j - first) * (stride - first) + i - first;
}

static inline size_t kvant_lower_floats(uint32_t n)
{
    return kvant_lower_position(n, n / 16 * 16, n);
}

/* sums += x x^T for the rows x of n numbers, as a lower triangle. Rows lie `stride` apart, which is
 * n rounded up to 16. Numbers behind a row, above the diagonal and below row n - 1 are
 * undefined. */
#define KVANT_ADD_OUTERS_FN(name)                                                                  \
    void name(const float *rows, size_t stride, uint32_t n_rows, uint32_t n, float *sums)

/* Computes a factor W of the geometric mean of a^-1 and b: W^T W is the mean, and (W^T W) a (W^T W)
 * = b. Both matrices are n x n, symmetric and positive definite. W replaces b; its lower triangle
 * is undefined. The result is within 10^-5 of eigenvalues if the eigenvalues of ab span at most a
 * factor of 2^46. Returns the trace of a W^T W, or 0 when a matrix was not positive definite. a and
 * room (KVANT_MEAN_ROOM numbers) are overwritten. */
#define KVANT_MEAN_NODES 32
#define KVANT_MEAN_ROOM(n)                                                                         \
    ((size_t)(n) * ((n) + 6 + ((n) > 3 * KVANT_MEAN_NODES ? (n) : 3 * KVANT_MEAN_NODES)))
#define KVANT_MEAN_FACTOR_FN(name) double name(size_t n, double *a, double *b, double *room)

/* Replaces l by its inverse. l is n x n, a lower triangle with zeros above the diagonal and no zero
 * on it. column: n numbers of room. */
#define KVANT_LOWER_INVERSE_FN(name) void name(size_t n, double *l, double *column)

/* Replaces n_x vectors x of n <= KVANT_MAX_HEAD_DIM numbers by L^-T x (solve_upper), L^T x
 * (multiply_upper) or L^-1 x (solve_lower). L is a lower triangle (math/triangle.h) without a zero
 * on its diagonal, then KVANT_TRIANGLE_PADDING readable halves. A solution is exact for a matrix
 * within (n + 3) 2^-23 of each number of L. A product is within n 2^-23 of the sum of magnitudes.
 * It is summed from 0 in the order of the rows of L, so a matrix with zeros above the diagonal of L
 * gives the same bits. */
#define KVANT_TRIANGLE_PADDING 16u
#define KVANT_TRIANGLE_FN(name)                                                                    \
    void name(const uint16_t *triangle, uint32_t n, uint32_t n_x, float *x)

/* Reads numbers 0 .. i of row i of such a triangle. Numbers behind them are undefined, as far as
 * the next multiple of 16. */
#define KVANT_TRIANGLE_ROW_FN(name)                                                                \
    void name(const uint16_t *triangle, uint32_t n, uint32_t i, float *row)

/* Returns the sum of a[i] values[codes[i]] in the order of dot. There are 2^bits values, and 32
 * must be readable. */
#define KVANT_DOT_CODES_FN(name)                                                                   \
    float name(const float *a, const uint8_t *codes, uint32_t n, const float *values, uint32_t bits)

/* The fast Walsh-Hadamard transform in place (Sylvester order, orthonormal) on blocks of n floats.
 * block is a power of two that divides n. The transform is its own inverse. The order of operations
 * is part of the format: butterflies at distance 1, 2, 4, ..., then one product per number. */
#define KVANT_HADAMARD_FN(name) void name(float *x, uint32_t n, uint32_t block)

/* The smallest and the largest of n >= 1 finite numbers. When zeros of both signs are the smallest
 * or largest, either sign is returned. */
#define KVANT_RANGE_FN(name) void name(const float *x, uint32_t n, float *min, float *max)

/* The largest magnitude of the numbers, as binary32 bits: at least 0x7f800000 when a number is
 * infinite or NaN. */
#define KVANT_MAGNITUDE_FN(name) uint32_t name(const float *x, uint32_t n)

/* codes[i] = clamp(round((x[i] - zero) * inverse), low, high) - offset; round half to even. */
typedef struct kvant_uniform_step {
    float zero, inverse, low, high, offset;
} kvant_uniform_step;
#define KVANT_UNIFORM_CODES_FN(name)                                                               \
    void name(const float *x, uint32_t n, const kvant_uniform_step *step, uint8_t *codes)

/* codes[i] = the number of thresholds below x[i] * inverse. There are 2^bits - 1 increasing
 * thresholds, and 32 numbers must be readable. */
#define KVANT_CODEBOOK_CODES_FN(name)                                                              \
    void name(const float *x, uint32_t n, float inverse, const float *thresholds, uint32_t bits,   \
              uint8_t *codes)

/* Codes the n numbers z (unaligned) one after another. Each number is rounded so that its error
 * makes up for the errors of the numbers before it. Also returns the row's sums. thresholds and
 * values are as for codebook_codes, with 2^bits values. */
#define KVANT_FEEDBACK_CODES_FN(name)                                                              \
    void name(const kvant_feedback *feedback, const float *z, const float *thresholds,             \
              const float *values, uint32_t bits, uint8_t *codes, kvant_feedback_sums *sums)

/* half[i] = x[i], rounded to nearest even, any n; numbers beyond fp16 become infinite. */
#define KVANT_TO_HALF_FN(name) void name(const float *x, uint16_t *half, uint32_t n)

/* Codes of n triplets, a multiple of 16 (triplets.h). */
#define KVANT_TRIPLET_CODES_FN(name)                                                               \
    void name(const kvant_triplet_book *book, uint32_t n, kvant_triplets *t)

/* Finds the nearest secondary quaternion of 16 chunks of 4 components. Component i of chunk j is
 * x[i * stride + j]. For chunk j, `which` becomes the index of the first of n quaternions s with
 * the largest <chunk, p s> over the 24 Hurwitz units p. It is 0 for a chunk of zeros. A quaternion
 * is 4 consecutive numbers. */
#define KVANT_CLOSEST_COSETS_FN(name)                                                              \
    void name(const float *x, size_t stride, const float *secondaries, uint32_t n, uint32_t *which)

/* The same for the first of n entries with the largest <chunk, entry>. */
#define KVANT_LARGEST_PRODUCTS_FN(name)                                                            \
    void name(const float *x, size_t stride, const float *entries, uint32_t n, uint32_t *which)

/* bits[t] = the code bit of step t of a path round a circle of n steps, found by the search of
 * format.md, "Trellis codes". A cell is below KVANT_TRELLIS_CELLS, or is KVANT_TRELLIS_NO_NUMBER.
 * There are 1 to KVANT_TRELLIS_MAX_STEPS steps. No cost exceeds KVANT_TRELLIS_MAX_COST. */
#define KVANT_TRELLIS_PATH_FN(name)                                                                \
    void name(const kvant_trellis *trellis, const uint16_t *cells, uint32_t n, uint8_t *bits)

/* dots[i * dots_stride + position of row] = the sum over columns of level * integer for the levels
 * of a page's trellis codes. This is exact, for n >= 1 vectors x. Rows, columns and bounds are as
 * in code_dots, with levels instead of values. */
#define KVANT_TRELLIS_DOTS_FN(name)                                                                \
    void name(const kvant_trellis *trellis, const kvant_layout *layout, const void *page,          \
              const int16_t *x, size_t x_stride, int32_t *dots, size_t dots_stride, uint32_t n)

/* Unpacks a page of values. A number is unit times the level, rounded, times its token's scale,
 * rounded. scale: 64 numbers in the order of positions. page, scale and tile are aligned to 64. */
#define KVANT_TRELLIS_VALUES_FN(name)                                                              \
    void name(const kvant_trellis *trellis, const kvant_layout *layout, const void *page,          \
              float unit, const float *scale, float *tile)

/* Writes the levels plus 128 of a pack of trellis codes (kvant_pack_circle) as a pack of 8 bits.
 * The codes have 2, 3 or 4 bits. Ignores trellis->n_steps and steps. codes and levels are aligned
 * to 64. */
#define KVANT_TRELLIS_PACK_FN(name)                                                                \
    void name(const kvant_trellis *trellis, const kvant_pack_format *format, const uint8_t *codes, \
              uint8_t *levels)

/* dots[j * 32 + v] = the sum over dimensions of level * integer for vector v of a pack and query j.
 * This is exact, for n >= 1 queries. Both codes and dots are aligned to 64. A pack has at most 2048
 * quads. The bias is at most 1, 10, 26 and 61 for 1 to 4 bits. */
#define KVANT_PACK_DOTS_FN(name)                                                                   \
    void name(const kvant_pack_format *format, const uint8_t *codes,                               \
              const kvant_pack_queries *queries, int32_t *dots)

/* keys[j * 32 + v] = (float)dots[j * 32 + v] * factors[v] * scales[j] + offsets[v] * weights[j],
 * rounded after each operation. Without offsets (NULL), it is the first two products. Bit v of
 * masks[j] says whether the key is at least thresholds[j]. dots, factors, offsets and keys are
 * aligned to 64. Every level gives the same bits. */
#define KVANT_PACK_KEYS_FN(name)                                                                   \
    void name(const int32_t *dots, const float *factors, const float *offsets,                     \
              const float *scales, const float *weights, const float *thresholds, uint32_t n,      \
              float *keys, uint32_t *masks)

/* Every kernel, as X(its signature, its name). */
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
    X(TRIANGLE_ROW, triangle_row)                                                                  \
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

/* The linkage of kernels that all levels compile from the same loops (loops_c.c). */
#ifndef KVANT_LOOP
#define KVANT_LOOP static
#endif

/* kvant_<name>_fn is the type of a kernel; kvant_<name>_c is the reference. */
#define KVANT_KERNEL_DECLARE(FN, name)                                                             \
    typedef KVANT_##FN##_FN(kvant_##name##_fn);                                                    \
    KVANT_##FN##_FN(kvant_##name##_c);
KVANT_KERNELS(KVANT_KERNEL_DECLARE)

typedef struct kvant_kernels {
#define KVANT_KERNEL_MEMBER(FN, name) kvant_##name##_fn *name;
    KVANT_KERNELS(KVANT_KERNEL_MEMBER)
} kvant_kernels;

/* Unpacks one row group. Levels that vectorise full groups only call it for a group of fewer than 4
 * tiles. */
void kvant_unpack_group_c(const kvant_layout *layout, const void *page, const float *values,
                          float offset, uint32_t group, float *tile);

/* Copies the words of a row group of fewer than 4 tiles to `words`, as a group of 4 tiles with
 * zeros in the missing rows. Levels that multiply only full groups use it. Plane i of the group
 * begins at planes[i]. Serves V, whose columns are tokens. words: KVANT_WHOLE_GROUP_WORDS
 * numbers. */
#define KVANT_WHOLE_GROUP_WORDS (2 * 4 * 128)
void kvant_whole_group(const kvant_layout *layout, const void *page, uint32_t group,
                       uint32_t *words, const uint32_t **planes);

/* sum_dots for vector i and one row group, whose dots begin at dots. */
void kvant_sum_group_c(const kvant_layout *layout, uint32_t group, const int32_t *dots,
                       const kvant_code_sums *out, uint32_t i);

/* Each function replaces the entries for which its level is faster than the level before. It exists
 * when the build has the level. */
void kvant_kernels_init_avx2(kvant_kernels *kernels);
void kvant_kernels_init_avx2_vnni(kvant_kernels *kernels);
void kvant_kernels_init_avx512(kvant_kernels *kernels);
void kvant_kernels_init_avx512_vnni(kvant_kernels *kernels);
void kvant_kernels_init_avx512_vbmi(kvant_kernels *kernels);
void kvant_kernels_init_neon(kvant_kernels *kernels);
void kvant_kernels_init_neon_dot(kvant_kernels *kernels);

/* The table of a level (KVANT_CPU_AUTO: the level in use), or NULL when the machine or the build
 * lacks it. */
const kvant_kernels *kvant_kernels_get(kvant_cpu_level level);
