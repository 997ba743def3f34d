/* kernels.h - the inner loops that exist once per CPU level, every signature declared once.
 *
 * Portable C (kernels_c.c) is the reference. A level is one translation unit with its own compiler flags; no SIMD
 * type crosses this header. The table is chosen at run time (dispatch.c).
 *
 * An unpacked tile holds a page as float, in the order of the page's words:
 *   K   tile[channel][position of token]                       padded_dim x 64
 *   V   tile[position of token][position of channel]           64 x padded_dim
 * with kvant_token_position and kvant_layout_row_position of page/layout.h. */
#ifndef KVANT_KERNELS_KERNELS_H
#define KVANT_KERNELS_KERNELS_H

#include <stddef.h>

#include "../page/layout.h"

/* tile = values[code] for all codes of a page (exact), or code + offset when values is NULL. Not scaled. */
#define KVANT_UNPACK_FN(name)                                                                                      \
    void name(const kvant_layout *layout, const void *page, const float *values, float offset, float *tile)
typedef KVANT_UNPACK_FN(kvant_unpack_fn);

/* c += a b with a m x k, b k x n, c m x n, row-major with leading dimensions; n a multiple of 16, b and c aligned to
 * 64 and ldb, ldc multiples of 16. Products are added in order of k, fused or not, to one partial sum: the
 * error of an element is at most k 2^-24 (1 + 2^-23)^k sum |a| |b|. */
#define KVANT_MATMUL_FN(name)                                                                                      \
    void name(const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc, uint32_t m,            \
              uint32_t k, uint32_t n)
typedef KVANT_MATMUL_FN(kvant_matmul_fn);

/* x[i] = e^(x[i] - shift) for n numbers (a multiple of 16, x aligned to 64), none above shift; returns their sum.
 * Relative error of each below 2^-21 + |x - shift| 2^-24 (the subtraction's rounding); where x - shift < -87 it is 0. */
#define KVANT_EXP_SUM_FN(name) float name(float *x, uint32_t n, float shift)
typedef KVANT_EXP_SUM_FN(kvant_exp_sum_fn);

/* tile[r][j] = tile[r][j] * scale[j] + zero[j] for a tile of m x n numbers; n a multiple of 16, all aligned to 64. The error of
 * an element is at most one rounding of each operation, fused or not. */
#define KVANT_SCALE_COLUMNS_FN(name)                                                                               \
    void name(float *tile, uint32_t m, uint32_t n, const float *scale, const float *zero)
typedef KVANT_SCALE_COLUMNS_FN(kvant_scale_columns_fn);

/* tile[r][j] = tile[r][j] * scale[r] + zero[r], the same otherwise. */
#define KVANT_SCALE_ROWS_FN(name)                                                                                  \
    void name(float *tile, uint32_t m, uint32_t n, const float *scale, const float *zero)
typedef KVANT_SCALE_ROWS_FN(kvant_scale_rows_fn);

/* x[i] = half[i], exact, any n. */
#define KVANT_HALF_FN(name) void name(const uint16_t *half, float *x, uint32_t n)
typedef KVANT_HALF_FN(kvant_half_fn);

typedef struct kvant_kernels {
    kvant_unpack_fn *unpack;
    kvant_matmul_fn *matmul;
    kvant_exp_sum_fn *exp_sum;
    kvant_half_fn *half_to_float;
    kvant_scale_columns_fn *scale_columns;
    kvant_scale_rows_fn *scale_rows;
} kvant_kernels;

KVANT_UNPACK_FN(kvant_unpack_c);
KVANT_MATMUL_FN(kvant_matmul_c);
KVANT_EXP_SUM_FN(kvant_exp_sum_c);
KVANT_HALF_FN(kvant_half_to_float_c);
KVANT_SCALE_COLUMNS_FN(kvant_scale_columns_c);
KVANT_SCALE_ROWS_FN(kvant_scale_rows_c);

/* One row group whose tiles are fewer than 4, for levels that vectorise full groups only. */
void kvant_unpack_group_c(const kvant_layout *layout, const void *page, const float *values, float offset,
                          uint32_t group, float *tile);

/* Overwrite the entries that the level improves. Present when the build has the level. */
void kvant_kernels_init_avx2(kvant_kernels *kernels);
void kvant_kernels_init_avx512(kvant_kernels *kernels);

/* The table of a level (KVANT_CPU_AUTO: the one in use), or NULL when machine or build lack it. */
const kvant_kernels *kvant_kernels_get(kvant_cpu_level level);

#endif
