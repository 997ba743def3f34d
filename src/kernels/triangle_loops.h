/* triangle_loops.h - products and solutions with a lower triangle in binary16, whose numbers become floats a
 * row at a time.
 *
 * Plain C and quads: loops_c.c and the file of each CPU level include it. Every number is
 * a sum in an order that no vector's width changes, so without contraction all levels agree. The
 * including file defines NAME. */
#include "../base/attributes.h"
#include "kernels.h"

/* Row i, in whole vectors, as far as floats have room: what lies behind its numbers may be anything. */
KVANT_INLINE void NAME(read_row)(const uint16_t *triangle, uint32_t i, float *row)
{
    NAME(half_to_float)(triangle + (size_t)i * (i + 1) / 2, row, (i + KVANT_TRIANGLE_PADDING) / KVANT_TRIANGLE_PADDING * KVANT_TRIANGLE_PADDING);
}

/* Some vectors at once, 4 or KVANT_TRIANGLE_WIDE, lie number by number. Numbers before a block of 16 join a sum in lanes (sum_quads, sum_wide);
 * within it each needs the one before. */
KVANT_INLINE void NAME(solve_together)(const uint16_t *triangle, uint32_t n, uint32_t some, float *z)
{
    float row[KVANT_MAX_HEAD_DIM], sums[KVANT_TRIANGLE_WIDE] = { 0 };
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t done = i / KVANT_TRIANGLE_PADDING * KVANT_TRIANGLE_PADDING;
        kvant_quad sum[KVANT_TRIANGLE_WIDE / 4];
        NAME(read_row)(triangle, i, row);
        const float inverse = 1 / row[i];
        if (done && some == 4)
            NAME(sum_quads)(row, z, done, sums);
        else if (done)
            NAME(sum_wide)(row, z, done, sums);
        for (uint32_t q = 0; q < some / 4; q++)
            sum[q] = kvant_quad_load(z + some * i + 4 * q) - kvant_quad_load(sums + 4 * q);
        for (uint32_t j = done; j < i; j++)
            for (uint32_t q = 0; q < some / 4; q++)
                sum[q] -= row[j] * kvant_quad_load(z + some * j + 4 * q);
        for (uint32_t q = 0; q < some / 4; q++)
            kvant_quad_store(z + some * i + 4 * q, sum[q] * inverse);
    }
}

/* n_x of them; places beyond repeat the first. */
KVANT_INLINE void NAME(solve_some)(const uint16_t *triangle, uint32_t n, uint32_t some, uint32_t n_x, float *x, float *z)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t r = 0; r < some; r++)
            z[some * i + r] = x[(r < n_x ? r : 0) * (size_t)n + i];
    NAME(solve_together)(triangle, n, some, z);
    for (uint32_t r = 0; r < n_x; r++)
        for (uint32_t i = 0; i < n; i++)
            x[r * (size_t)n + i] = z[some * i + r];
}

static KVANT_TRIANGLE_FN(NAME(solve_lower))
{
    float z[4 * KVANT_MAX_HEAD_DIM];
    for (; n_x >= KVANT_TRIANGLE_WIDE && KVANT_TRIANGLE_WIDE * n <= sizeof z / sizeof *z; n_x -= KVANT_TRIANGLE_WIDE, x += (size_t)KVANT_TRIANGLE_WIDE * n)
        NAME(solve_some)(triangle, n, KVANT_TRIANGLE_WIDE, KVANT_TRIANGLE_WIDE, x, z);
    for (; n_x >= 4; n_x -= 4, x += (size_t)4 * n)
        NAME(solve_some)(triangle, n, 4, 4, x, z);
    if (n_x)
        NAME(solve_some)(triangle, n, 4, n_x, x, z);
}

static KVANT_TRIANGLE_FN(NAME(solve_upper))
{
    float row[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = n; i-- > 0;) {
        NAME(read_row)(triangle, i, row);
        const float inverse = 1 / row[i];
        for (uint32_t r = 0; r < n_x; r++) {
            float *restrict of = x + (size_t)r * n;
            const float factor = of[i] *= inverse;
            for (uint32_t j = 0; j < i; j++)
                of[j] -= factor * row[j];
        }
    }
}

/* Some rows at once, with zeros behind their numbers. */
#define ROWS_MULTIPLIED 4u

static KVANT_TRIANGLE_FN(NAME(multiply_upper))
{
    float rows[ROWS_MULTIPLIED][KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < n; i += ROWS_MULTIPLIED) {
        const uint32_t end = i + ROWS_MULTIPLIED < n ? i + ROWS_MULTIPLIED : n;
        for (uint32_t k = 0; k < ROWS_MULTIPLIED; k++) {
            if (i + k < n)
                NAME(read_row)(triangle, i + k, rows[k]);
            for (uint32_t j = i + k < n ? i + k + 1 : 0; j < end; j++)
                rows[k][j] = 0;
        }
        for (uint32_t r = 0; r < n_x; r++) {
            float *restrict of = x + (size_t)r * n, f[ROWS_MULTIPLIED] = { 0 };
            for (uint32_t j = i; j < end; j++) {
                f[j - i] = of[j];
                of[j] = 0;
            }
            for (uint32_t j = 0; j < end; j++)
                of[j] = (((of[j] + f[0] * rows[0][j]) + f[1] * rows[1][j]) + f[2] * rows[2][j]) + f[3] * rows[3][j];
        }
    }
}
