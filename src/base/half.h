/* half.h - fp16 and bf16 <-> float, bit exact on every machine (IEEE 754, round to nearest even).
 *
 * Uses integer arithmetic only, so compiler flags and hardware conversions cannot change results.
 * Kernels use hardware conversions (F16C, NEON), which give the same bits. */
#pragma once

#include <stdint.h>
#include <string.h>

#define KVANT_HALF_MAX 65504.0f /* the largest finite fp16 number */

static inline uint32_t kvant_float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float kvant_float_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float kvant_half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
    if (exponent == 31)
        return kvant_float_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        /* mantissa x 2^-24 is exact in binary32 */
        float magnitude = (float)mantissa * 5.9604644775390625e-8f;
        return sign ? -magnitude : magnitude;
    }
    return kvant_float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* Overflow gives infinity, as IEEE 754 says. Encoders check the range before they convert. */
static inline uint16_t kvant_half_from_float(float x)
{
    uint32_t u = kvant_float_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a >= 0x7f800000u)
        return (uint16_t)(sign | 0x7c00u | (a > 0x7f800000u ? 0x200u : 0));
    if (a >= 0x477ff000u) /* 65520 and more round to infinity */
        return (uint16_t)(sign | 0x7c00u);
    if (a < 0x33000001u) /* 2^-25 and less round to zero */
        return (uint16_t)sign;
    uint32_t exponent = a >> 23, mantissa = (a & 0x7fffffu) | 0x800000u;
    uint32_t shift =
        exponent < 113 ? 126 - exponent : 13; /* 113: the smallest normal half, 2^-14 */
    uint32_t base = exponent < 113 ? 0 : (exponent - 113) << 10; /* kept holds the implicit bit */
    uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1),
             half = 1u << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1));
    return (uint16_t)(sign | (base + kept)); /* a carry moves into the exponent, as it should */
}

static inline float kvant_bf16_to_float(uint16_t h)
{
    return kvant_float_from_bits((uint32_t)h << 16);
}

static inline uint16_t kvant_bf16_from_float(float x)
{
    uint32_t u = kvant_float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
