/* simd_template.h - the kernels of kernels.h for any vector width. The file of each level includes
 * it once and defines
 *
 *   NAME(function)       name with the level's suffix
 *   LANES                32-bit lanes of a vector: 4, 8 or 16
 *   MATMUL_VECTORS       vectors per row of the matmul block. MATMUL_ROWS x MATMUL_VECTORS
 *                        accumulators, MATMUL_VECTORS of b and one broadcast must fit the registers
 *   MATMUL_ROWS          at most 6
 *   vf, vi               float and integer vectors
 *   vf_zero vf_set vf_load vf_store vf_add vf_sub vf_mul vf_fma(a,b,c)=ab+c vf_round vf_sum
 *   vf_scale(x,n)=x 2^n
 *   vf_keep_above(x, y, limit)   0 where y < limit, else x, also where y is NaN
 *   vf_from_codes(vi), vi_and vi_or vi_set vi_shift_right(v, const) vi_shift_left(v, const)
 *   half_load(p)         LANES halves as floats
 *   vf_load_nibbles(p)   LANES signed numbers of 4 bits as floats; the first one is in the low half
 *                        of a byte
 *
 * The file of a level also defines the kernels that look codes up or follow the order of pages:
 * unpack, code_dots, tile_sums, token_halves, dot_codes and codebook_codes. */

/* One block of c in registers: rows and vectors are constants at every call. */
KVANT_INLINE void matmul_block(uint32_t rows, uint32_t vectors, const float *a, size_t lda,
                               const float *b, size_t ldb, float *c, size_t ldc, uint32_t k)
{
    vf sum[6][MATMUL_VECTORS];
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t j = 0; j < vectors; j++)
            sum[i][j] = vf_load(c + i * ldc + j * LANES);
    for (uint32_t l = 0; l < k; l++) {
        vf column[MATMUL_VECTORS];
        unrolled_for (uint32_t j = 0; j < vectors; j++)
            column[j] = vf_load(b + l * ldb + j * LANES);
        unrolled_for (uint32_t i = 0; i < rows; i++) {
            vf factor = vf_set(a[i * lda + l]);
            unrolled_for (uint32_t j = 0; j < vectors; j++)
                sum[i][j] = vf_fma(factor, column[j], sum[i][j]);
        }
    }
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t j = 0; j < vectors; j++)
            vf_store(c + i * ldc + j * LANES, sum[i][j]);
}

KVANT_INLINE void matmul_rows(uint32_t rows, const float *a, size_t lda, const float *b, size_t ldb,
                              float *c, size_t ldc, uint32_t k, uint32_t n)
{
    uint32_t j = 0;
    for (; j + MATMUL_VECTORS * LANES <= n; j += MATMUL_VECTORS * LANES)
        matmul_block(rows, MATMUL_VECTORS, a, lda, b + j, ldb, c + j, ldc, k);
    for (; j < n; j += LANES)
        matmul_block(rows, 1, a, lda, b + j, ldb, c + j, ldc, k);
}

static KVANT_MATMUL_FN(NAME(matmul))
{
    uint32_t i = 0;
    for (; i + MATMUL_ROWS <= m; i += MATMUL_ROWS)
        matmul_rows(MATMUL_ROWS, a + i * lda, lda, b, ldb, c + i * ldc, ldc, k, n);
    a += i * lda;
    c += i * ldc;
#define LAST_ROWS(rows) matmul_rows(rows, a, lda, b, ldb, c, ldc, k, n)
    KVANT_CALL_CONSTANT(m - i, 5, LAST_ROWS)
}

/* e^x = 2^n 2^r with |r| <= 1/2. A fused operation subtracts n, so only the rounding of log2 e
 * makes the error of r grow with x. The polynomial has the smallest possible relative error of its
 * degree on [-1/2, 1/2] (Remez): 2^-23.6, and 2^-22 with rounding. */
KVANT_INLINE vf exponential(vf x)
{
    vf log2_e = vf_set(1.44269504f), n = vf_round(vf_mul(x, log2_e));
    vf r = vf_fma(x, log2_e, vf_sub(vf_zero(), n));
    vf p = vf_set(1.32764445e-3f);
    p = vf_fma(p, r, vf_set(9.6755689e-3f));
    p = vf_fma(p, r, vf_set(5.55071346e-2f));
    p = vf_fma(p, r, vf_set(2.40221187e-1f));
    p = vf_fma(p, r, vf_set(6.93146944e-1f));
    p = vf_fma(p, r, vf_set(1.00000012f));
    return vf_keep_above(vf_scale(p, n), x, -87.0f);
}

static KVANT_EXP_SUM_FN(NAME(exp_sum))
{
    vf sum = vf_zero();
    for (uint32_t i = 0; i < n; i += LANES) {
        vf e = exponential(vf_sub(vf_load(x + i), vf_set(shift)));
        vf_store(x + i, e);
        sum = vf_add(sum, e);
    }
    return vf_sum(sum);
}

KVANT_INLINE float vf_largest(vf x)
{
    float lanes[LANES];
    unrolled_for (uint32_t distance = 1; distance < LANES; distance *= 2)
        x = vf_max(x, vf_swap(x, distance));
    vf_store_unaligned(lanes, x);
    return lanes[0];
}

static KVANT_MASK_SCORES_FN(NAME(mask_scores))
{
    const float lowest_half = -65504;
    vf largest = vf_set(-INFINITY), factor = vf_set(slope);
    for (uint32_t i = 0; mask && i < KVANT_PAGE_TOKENS; i += LANES) {
        vf offset = vf_load(mask + i),
           score = vf_keep_above(vf_load(scores + i), offset, lowest_half);
        vf_store(scores + i, vf_fma(factor, offset, score));
    }
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i += LANES)
        largest = vf_max(largest, vf_load(scores + i));
    return vf_largest(largest);
}

static KVANT_HALF_FN(NAME(half_to_float))
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        vf_store_unaligned(x + i, half_load(half + i));
    kvant_half_to_float_c(half + i, x + i, n - i);
}

static KVANT_SCALE_COLUMNS_FN(NAME(scale_columns))
{
    for (uint32_t j = 0; j < n; j += LANES) {
        vf factor = vf_load(scale + j), offset = vf_load(zero + j);
        for (uint32_t i = 0; i < m; i++)
            vf_store(tile + (size_t)i * n + j,
                     vf_fma(vf_load(tile + (size_t)i * n + j), factor, offset));
    }
}

static KVANT_SCALE_ROWS_FN(NAME(scale_rows))
{
    for (uint32_t i = 0; i < m; i++) {
        vf factor = vf_set(scale[i]), offset = vf_set(zero[i]);
        for (uint32_t j = 0; j < n; j += LANES)
            vf_store(tile + (size_t)i * n + j,
                     vf_fma(vf_load(tile + (size_t)i * n + j), factor, offset));
    }
}

/* vf_at_least(a, b) gives a bit per lane. */
static KVANT_PACK_KEYS_FN(NAME(pack_keys))
{
    for (uint32_t i = 0; i < n; i++) {
        const vf scale = vf_set(scales[i]), weight = vf_set(weights[i]),
                 threshold = vf_set(thresholds[i]);
        uint32_t mask = 0;
        unrolled_for (uint32_t v = 0; v < KVANT_PACK_VECTORS; v += LANES) {
            const size_t at = (size_t)i * KVANT_PACK_VECTORS + v;
            vf key = vf_mul(vf_mul(vf_from_codes(vi_load(dots + at)), vf_load(factors + v)), scale);
            if (offsets)
                key = vf_add(key, vf_mul(vf_load(offsets + v), weight));
            vf_store(keys + at, key);
            mask |= vf_at_least(key, threshold) << v;
        }
        masks[i] = mask;
    }
}

#include "codes_template.h"
#include "encode_template.h"
#include "feedback_loops.h"
#include "mean_loops.h"
#include "octahedral_loops.h"
#include "quaternion_loops.h"
#include "triangle_template.h"
#include "triangle_loops.h"

void NAME(kvant_kernels_init)(kvant_kernels *kernels)
{
#define SET_KERNEL(FN, name) kernels->name = NAME(name);
    KVANT_KERNELS(SET_KERNEL)
}
