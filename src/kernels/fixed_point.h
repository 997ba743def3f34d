/* fixed_point.h - numbers as 16-bit integers times a step: the operands of products with codes. */
#pragma once

#include <math.h>

#include "../base/half.h"

/* The largest magnitude of values and integers in code_dots. Up to here a number is 256 high + low
 * with both bytes signed, which kernels need that multiply bytes. */
#define KVANT_CODE_OPERAND_MAX 32639

/* The step for numbers whose largest magnitude has the given binary32 bits; *inverse becomes 1 /
 * step. Below 2^-110 both are 0, because 1 / step could overflow, and such small numbers do not
 * matter next to ordinary weights. When a number is not finite, the step is NaN and 1 / step is
 * 0. */
static inline float kvant_fixed_point_step(uint32_t largest, int32_t limit, float *inverse)
{
    *inverse = 0;
    if (largest >= 0x7f800000u)
        return NAN;
    if (largest < 0x08800000u)
        return 0;
    *inverse = (float)limit / kvant_float_from_bits(largest);
    return kvant_float_from_bits(largest) / (float)limit;
}

/* Rounds half to even, for |x| below 2^15. Adding 1.5 x 2^23 leaves the whole number in the low
 * bits. */
static inline int16_t kvant_fixed_point_round(float x)
{
    return (int16_t)((int32_t)kvant_float_bits(x + 12582912.0f) - 0x4b400000);
}
