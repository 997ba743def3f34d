/* quaternion_loops.h - the nearest of many directions for 16 chunks of 4 channels at a time (HQMQ
 * and its baselines).
 *
 * Plain loops over 16 lanes that compilers vectorise. loops_c.c and the file of each CPU level
 * include them, so all levels compile the same source. Without contraction all levels give the same
 * bits. format.md, "Direction codes", has the formulas. Choices are masks, because compilers do not
 * vectorise a conditional store. */
#include <float.h>
#include <math.h>

#include "kernels.h"

#define QUATERNION_LANES 16u

/* <x, p s> = <y, p> with y = x conj(s). Its maximum over the 24 Hurwitz units p is the largest
 * |y_i| or half the sum of all |y_i|. */
static void NAME(closest_cosets_loop)(const float *restrict x, size_t stride,
                                      const float *restrict s, uint32_t n, float *restrict best,
                                      uint32_t *restrict which)
{
    const float *x0 = x, *x1 = x + stride, *x2 = x + 2 * stride, *x3 = x + 3 * stride;
    for (uint32_t k = 0; k < n; k++) {
        const float s0 = s[4 * k], s1 = s[4 * k + 1], s2 = s[4 * k + 2], s3 = s[4 * k + 3];
        for (uint32_t j = 0; j < QUATERNION_LANES; j++) {
            const float a = fabsf(x0[j] * s0 + x1[j] * s1 + x2[j] * s2 + x3[j] * s3);
            const float b = fabsf(x1[j] * s0 - x0[j] * s1 + x3[j] * s2 - x2[j] * s3);
            const float c = fabsf(x2[j] * s0 - x3[j] * s1 - x0[j] * s2 + x1[j] * s3);
            const float d = fabsf(x3[j] * s0 + x2[j] * s1 - x1[j] * s2 - x0[j] * s3);
            const float ab = a > b ? a : b, cd = c > d ? c : d, largest = ab > cd ? ab : cd;
            const float half = ((a + b) + (c + d)) * 0.5f,
                        closeness = largest > half ? largest : half;
            const float before = best[j];
            const uint32_t closer = 0u - (uint32_t)(closeness > before);
            which[j] = (k & closer) | (which[j] & ~closer);
            best[j] = closeness > before ? closeness : before;
        }
    }
}

KVANT_LOOP KVANT_CLOSEST_COSETS_FN(NAME(closest_cosets))
{
    float best[QUATERNION_LANES] = { 0 };
    for (uint32_t j = 0; j < QUATERNION_LANES; j++)
        which[j] = 0;
    NAME(closest_cosets_loop)(x, stride, secondaries, n, best, which);
}

static void NAME(largest_products_loop)(const float *restrict x, size_t stride,
                                        const float *restrict entries, uint32_t n,
                                        float *restrict best, uint32_t *restrict which)
{
    const float *x0 = x, *x1 = x + stride, *x2 = x + 2 * stride, *x3 = x + 3 * stride;
    for (uint32_t k = 0; k < n; k++) {
        const float w0 = entries[4 * k], w1 = entries[4 * k + 1], w2 = entries[4 * k + 2],
                    w3 = entries[4 * k + 3];
        for (uint32_t j = 0; j < QUATERNION_LANES; j++) {
            const float product = (x0[j] * w0 + x1[j] * w1) + (x2[j] * w2 + x3[j] * w3),
                        before = best[j];
            const uint32_t larger = 0u - (uint32_t)(product > before);
            which[j] = (k & larger) | (which[j] & ~larger);
            best[j] = product > before ? product : before;
        }
    }
}

KVANT_LOOP KVANT_LARGEST_PRODUCTS_FN(NAME(largest_products))
{
    float best[QUATERNION_LANES];
    for (uint32_t j = 0; j < QUATERNION_LANES; j++) {
        best[j] = -FLT_MAX;
        which[j] = 0;
    }
    NAME(largest_products_loop)(x, stride, entries, n, best, which);
}
