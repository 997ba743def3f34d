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
    for (uint32_t i = 0; i < n; i++)
        y[i] = 0;
    for (uint32_t j = 0; j < k; j++)
        for (uint32_t i = 0; i < n; i++)
            y[i] += weights[j] * rows[(size_t)j * n + i];
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
