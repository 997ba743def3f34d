/* cuda_fp16.h - halves in a C++ program are those of base/half.h. */
#pragma once

#include "../../../src/base/half.h"

struct __half {
    uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits)
{
    return { bits };
}
inline uint16_t __half_as_ushort(__half x)
{
    return x.bits;
}
inline __half __float2half_rn(float x)
{
    return { kvant_half_from_float(x) };
}
inline float __half2float(__half x)
{
    return kvant_half_to_float(x.bits);
}
