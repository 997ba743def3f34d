/* feedback_loops.h - rounds the numbers of a row one after another, with error feedback.
 *
 * Plain C that compilers vectorise. loops_c.c and the file of each CPU level include it. Without
 * contraction all levels round alike. The including file defines NAME. */
#include <string.h>

#include "../base/attributes.h"
#include "kernels.h"

/* The number of thresholds below x. When there are few thresholds, counting all of them has less
 * latency than a search. */
KVANT_INLINE uint32_t NAME(feedback_code)(const float *thresholds, uint32_t bits, float x)
{
    uint32_t code = 0;
    for (uint32_t step = 1u << (bits - 1); bits > 4 && step >= 16; step /= 2)
        code += x > thresholds[code + step - 1] ? step : 0;
    uint32_t first = code, n = bits < 4 ? (1u << bits) - 1 : 15;
#pragma GCC unroll 16
    for (uint32_t i = 0; i < n; i++)
        code += x > thresholds[first + i] ? 1 : 0;
    return code;
}

/* Adds an error to all later numbers. It begins at the group of 16 numbers that holds the first
 * later number; the column has zeros for earlier numbers of the group. */
KVANT_INLINE void NAME(feedback_pass_on)(const float *restrict column, uint32_t first, uint32_t end,
                                         float error, float number, float *restrict target,
                                         float *restrict a)
{
    for (uint32_t i = first / 16 * 16; i < end; i++) {
        target[i] -= column[i] * error;
        a[i] += column[i] * number;
    }
}

KVANT_INLINE kvant_feedback_sums NAME(feedback_codes_of)(const kvant_feedback *feedback,
                                                         const float *z, const float *thresholds,
                                                         const float *values, uint32_t bits,
                                                         uint8_t *codes)
{
    _Alignas(64) float target[KVANT_MAX_HEAD_DIM], a[KVANT_MAX_HEAD_DIM];
    kvant_feedback_sums sums = { 0, 0 };
    const uint32_t n = feedback->n, stride = feedback->stride;
    for (uint32_t i = 0; i < stride; i++)
        target[i] = a[i] = i < n ? z[i] : 0;
    for (uint32_t j = 0; j < n; j++) {
        codes[j] = (uint8_t)NAME(feedback_code)(thresholds, bits, target[j]);
        const float value = values[codes[j]], weighted = feedback->pivots[j] * a[j];
        sums.own += weighted * a[j];
        sums.product += weighted * (a[j] + (value - target[j]));
        NAME(feedback_pass_on)
        (feedback->columns + (size_t)stride * j, j + 1, stride, value - z[j], z[j], target, a);
    }
    return sums;
}

KVANT_LOOP KVANT_FEEDBACK_CODES_FN(NAME(feedback_codes))
{
    switch (bits) {
    case 2: *sums = NAME(feedback_codes_of)(feedback, z, thresholds, values, 2, codes); return;
    case 3: *sums = NAME(feedback_codes_of)(feedback, z, thresholds, values, 3, codes); return;
    case 4: *sums = NAME(feedback_codes_of)(feedback, z, thresholds, values, 4, codes); return;
    default: *sums = NAME(feedback_codes_of)(feedback, z, thresholds, values, bits, codes); return;
    }
}
