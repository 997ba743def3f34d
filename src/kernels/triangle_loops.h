/* triangle_loops.h - products and solutions with a lower triangle in binary16, whose numbers become floats a
 * row at a time.
 *
 * Plain C that compilers vectorise: loops_c.c and the file of each CPU level include it. Every number is
 * a sum in an order that no vector's width changes, so without contraction all levels agree. The
 * including file defines NAME. */
#include "../base/attributes.h"
#include "kernels.h"

/* Row i, in whole vectors, as far as floats have room: what lies behind its numbers may be anything. */
KVANT_INLINE void NAME(read_row)(const uint16_t *triangle, uint32_t i, float *row)
{
    NAME(half_to_float)(triangle + (size_t)i * (i + 1) / 2, row, (i + KVANT_TRIANGLE_PADDING) / KVANT_TRIANGLE_PADDING * KVANT_TRIANGLE_PADDING);
}

/* Four vectors at once lie number by number. Numbers before a block of 16 join a sum in lanes (sum_quads);
 * within it each needs the one before. */
KVANT_INLINE void NAME(solve_quads)(const uint16_t *triangle, uint32_t n, float *z)
{
    float row[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t done = i / KVANT_TRIANGLE_PADDING * KVANT_TRIANGLE_PADDING;
        float sums[32] = { 0 };
        NAME(read_row)(triangle, i, row);
        const float inverse = 1 / row[i];
        if (done)
            NAME(sum_quads)(row, z, done, sums);
        for (uint32_t r = 0; r < 4; r++)
            sums[r] = z[4 * i + r] - sums[r];
        for (uint32_t j = done; j < i; j++)
            for (uint32_t r = 0; r < 4; r++)
                sums[r] -= row[j] * z[4 * j + r];
        for (uint32_t r = 0; r < 4; r++)
            z[4 * i + r] = sums[r] * inverse;
    }
}

static KVANT_TRIANGLE_FN(NAME(solve_lower))
{
    float z[4 * KVANT_MAX_HEAD_DIM];
    for (uint32_t first = 0; first < n_x; first += 4, x += (size_t)4 * n) {
        const uint32_t some = n_x - first < 4 ? n_x - first : 4;
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t r = 0; r < 4; r++)
                z[4 * i + r] = x[(r < some ? r : 0) * (size_t)n + i];
        NAME(solve_quads)(triangle, n, z);
        for (uint32_t r = 0; r < some; r++)
            for (uint32_t i = 0; i < n; i++)
                x[r * (size_t)n + i] = z[4 * i + r];
    }
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
