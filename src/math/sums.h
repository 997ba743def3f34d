/* sums.h - sums in the order that format.md fixes: 16 partial sums, then a tree. Machines with 4, 8
 * and 16 lanes can follow this order, so vectorised encoders give the same bits. */
#pragma once

#include <stddef.h>
#include <stdint.h>

static inline float kvant_sum16(float s[16])
{
    for (uint32_t width = 8; width > 0; width /= 2)
        for (uint32_t j = 0; j < width; j++)
            s[j] += s[j + width];
    return s[0];
}

/* sum of a[i] * b[i] */
static inline float kvant_dot_ordered(const float *a, const float *b, uint32_t n)
{
    float s[16] = { 0 };
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (uint32_t j = 0; j < 16; j++)
            s[j] += a[i + j] * b[i + j];
    for (uint32_t j = 0; i < n; i++, j++)
        s[j] += a[i] * b[i];
    return kvant_sum16(s);
}

/* The same in binary64: 8 partial sums, then a tree. */
static inline double kvant_dot_lanes(const double *a, const double *b, size_t n)
{
    double s[8] = { 0 };
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (size_t j = 0; j < 8; j++)
            s[j] += a[i + j] * b[i + j];
    for (size_t j = 0; i < n; i++, j++)
        s[j] += a[i] * b[i];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

/* to += factor * x. The two arrays must not overlap. */
static inline void kvant_add_multiple(double *restrict to, double factor, const double *restrict x,
                                      size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] += factor * x[i];
}

/* The same product with one sum, in the order of the numbers. */
static inline double kvant_dot_exact(const double *a, const double *b, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}
