/* encode_c.c - the loops of encoders in portable C. Every level must repeat them bit by bit. */
#include <math.h>

#include "../base/half.h"
#include "../math/sums.h"
#include "kernels.h"

KVANT_TO_HALF_FN(kvant_float_to_half_c)
{
    for (uint32_t i = 0; i < n; i++)
        half[i] = kvant_half_from_float(x[i]);
}

KVANT_DOT_FN(kvant_dot_c)
{
    return kvant_dot_ordered(a, b, n);
}

KVANT_DOT_ROWS_FN(kvant_dot_rows_c)
{
    for (uint32_t i = 0; i < n_rows; i++)
        sums[i] = kvant_dot_ordered(a, rows + (size_t)i * n, n);
}

KVANT_DOT_CODES_FN(kvant_dot_codes_c)
{
    float s[16] = { 0 };
    (void)bits;
    for (uint32_t i = 0; i < n; i++)
        s[i % 16] += a[i] * values[codes[i]];
    return kvant_sum16(s);
}

KVANT_COMBINE_ROWS_FN(kvant_combine_rows_c)
{
    for (uint32_t r = 0; r < n_y; r++, weights += k, y += n) {
        for (uint32_t i = 0; i < n; i++)
            y[i] = 0;
        for (uint32_t j = 0; j < k; j++)
            for (uint32_t i = 0; i < n; i++)
                y[i] += weights[j] * rows[(size_t)j * n + i];
    }
}

KVANT_TRIANGLE_ROW_FN(kvant_triangle_row_c)
{
    const uint8_t *codes = kvant_triangle_codes(triangle, n, i);
    const float step = kvant_half_to_float(triangle[i]);
    for (uint32_t j = 0; j < i; j++)
        row[j] = step * (float)((((codes[j / 2] >> (4 * (j % 2))) & 15) ^ 8) - 8);
    row[i] = kvant_half_to_float(triangle[n + i]);
}

KVANT_TRIANGLE_FN(kvant_solve_lower_c)
{
    float row[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < n; i++) {
        kvant_triangle_row_c(triangle, n, i, row);
        for (float *of = x; of < x + (size_t)n_x * n; of += n) {
            for (uint32_t j = 0; j < i; j++)
                of[i] -= row[j] * of[j];
            of[i] *= 1 / row[i];
        }
    }
}

KVANT_TRIANGLE_FN(kvant_multiply_upper_c)
{
    float row[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < n; i++) {
        kvant_triangle_row_c(triangle, n, i, row);
        for (float *of = x; of < x + (size_t)n_x * n; of += n) {
            for (uint32_t j = 0; j < i; j++)
                of[j] += of[i] * row[j];
            of[i] = 0 + of[i] * row[i]; /* -0 becomes 0 */
        }
    }
}

KVANT_ADD_OUTERS_FN(kvant_add_outers_c)
{
    for (uint32_t j = 0; j < n; j++)
        for (uint32_t i = j / 16 * 16; i < stride; i++, sums++)
            for (uint32_t r = 0; r < n_rows; r++)
                *sums += rows[r * stride + j] * rows[r * stride + i];
}

static void butterflies(float *x, uint32_t n, uint32_t distance)
{
    for (uint32_t i = 0; i < n; i += 2 * distance)
        for (uint32_t j = i; j < i + distance; j++) {
            float a = x[j], b = x[j + distance];
            x[j] = a + b;
            x[j + distance] = a - b;
        }
}

/* The first three levels of butterflies (distances 1, 2 and 4), unrolled by hand. As loops of one,
 * two and four steps they would take most of the time. Operations and operands are the same as in
 * the loops. */
static void butterflies_of_8(float *x)
{
    float a0 = x[0] + x[1], a1 = x[0] - x[1], a2 = x[2] + x[3], a3 = x[2] - x[3];
    float a4 = x[4] + x[5], a5 = x[4] - x[5], a6 = x[6] + x[7], a7 = x[6] - x[7];
    float b0 = a0 + a2, b1 = a1 + a3, b2 = a0 - a2, b3 = a1 - a3;
    float b4 = a4 + a6, b5 = a5 + a7, b6 = a4 - a6, b7 = a5 - a7;
    x[0] = b0 + b4, x[1] = b1 + b5, x[2] = b2 + b6, x[3] = b3 + b7;
    x[4] = b0 - b4, x[5] = b1 - b5, x[6] = b2 - b6, x[7] = b3 - b7;
}

KVANT_HADAMARD_FN(kvant_hadamard_c)
{
    for (uint32_t i = 0; block >= 8 && i < n; i += 8)
        butterflies_of_8(x + i);
    for (uint32_t distance = block >= 8 ? 8 : 1; distance < block; distance *= 2)
        butterflies(x, n, distance);
    float scale = (float)(1.0 / sqrt((double)block));
    for (uint32_t i = 0; i < n; i++)
        x[i] *= scale;
}

KVANT_RANGE_FN(kvant_range_c)
{
    float low = x[0], high = x[0];
    for (uint32_t i = 1; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    *min = low;
    *max = high;
}

KVANT_MAGNITUDE_FN(kvant_magnitude_c)
{
    uint32_t largest = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = kvant_float_bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

KVANT_UNIFORM_CODES_FN(kvant_uniform_codes_c)
{
    for (uint32_t i = 0; i < n; i++) {
        float level = rintf((x[i] - step->zero) * step->inverse);
        level = level < step->low ? step->low : level > step->high ? step->high : level;
        codes[i] = (uint8_t)(level - step->offset);
    }
}

KVANT_CODEBOOK_CODES_FN(kvant_codebook_codes_c)
{
    for (uint32_t i = 0; i < n; i++) {
        float u = x[i] * inverse;
        uint32_t code = 0;
        for (uint32_t step = 1u << (bits - 1); step; step /= 2)
            code += u > thresholds[code + step - 1] ? step : 0;
        codes[i] = (uint8_t)code;
    }
}
