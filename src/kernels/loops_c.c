/* loops_c.c - the loops that every level compiles from the same source, in portable C. */
#define NAME(function) function##_c
#include "feedback_loops.h"
#include "mean_loops.h"
#include "octahedral_loops.h"
#include "quaternion_loops.h"

#define half_to_float_c kvant_half_to_float_c

static void sum_quads_c(const float *row, const float *z, uint32_t n, float *sums)
{
    float parts[32] = { 0 };
    for (uint32_t i = 0; i < 4 * n; i++)
        parts[i % 32] += row[i / 4] * z[i];
    kvant_fold_quads(parts, 32, sums);
}

static void sum_wide_c(const float *row, const float *z, uint32_t n, float *sums)
{
    float sum[8][16] = { { 0 } };
    for (uint32_t i = 0; i < 16 * n; i++)
        sum[i / 16 % 8][i % 16] += row[i / 16] * z[i];
    for (uint32_t width = 4; width; width /= 2)
        for (uint32_t i = 0; i < 16 * width; i++)
            sum[i / 16][i % 16] += sum[i / 16 + width][i % 16];
    for (uint32_t r = 0; r < 16; r++)
        sums[r] = sum[0][r];
}

#include "triangle_loops.h"

KVANT_FEEDBACK_CODES_FN(kvant_feedback_codes_c)
{
    feedback_codes_c(feedback, z, thresholds, values, bits, codes, sums);
}

KVANT_MEAN_FACTOR_FN(kvant_mean_factor_c)
{
    return mean_factor_c(n, a, b, room);
}

KVANT_LOWER_INVERSE_FN(kvant_lower_inverse_c)
{
    lower_inverse_c(n, l, column);
}

KVANT_TRIANGLE_FN(kvant_solve_lower_c)
{
    solve_lower_c(triangle, n, n_x, x);
}

KVANT_TRIANGLE_FN(kvant_solve_upper_c)
{
    solve_upper_c(triangle, n, n_x, x);
}

KVANT_TRIANGLE_FN(kvant_multiply_upper_c)
{
    multiply_upper_c(triangle, n, n_x, x);
}

KVANT_TRIPLET_CODES_FN(kvant_triplet_codes_c)
{
    triplet_codes_c(book, n, t);
}

KVANT_CLOSEST_COSETS_FN(kvant_closest_cosets_c)
{
    closest_cosets_c(x, stride, secondaries, n, which);
}

KVANT_LARGEST_PRODUCTS_FN(kvant_largest_products_c)
{
    largest_products_c(x, stride, entries, n, which);
}
