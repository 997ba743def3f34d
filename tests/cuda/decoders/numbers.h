/* numbers.h - CUDA's attributes, types and functions of numbers in a C++ program: vectors, halves,
 * bfloat16, roundings, dot products of bytes. Halves are the halves of base/half.h. warp.h has the
 * functions of a warp. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include <algorithm>

#define __device__
#define __host__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline
#define __CUDA_ARCH__ 900

#include "base/attributes.h"
#include "base/half.h"
#include "codec/view.h"
#include "cuda/any/general_decode.h"
#include "cuda/params.h"

#undef KVANT_INLINE
#undef unrolled_for
#define KVANT_INLINE inline
#define unrolled_for for

using std::max;
using std::min;

struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct float2 {
    float x, y;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

inline float4 make_float4(float x, float y, float z, float w)
{
    return float4{ x, y, z, w };
}
struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};
struct __half_raw {
    uint16_t x;
};

inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return { x, y };
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return { x, y, z, w };
}
inline float2 make_float2(float x, float y)
{
    return { x, y };
}
inline float __half2float(__half x)
{
    return kvant_half_to_float(x.bits);
}
inline __half __float2half_rn(float x)
{
    return { kvant_half_from_float(x) };
}
inline float __half2float(__half_raw x)
{
    return kvant_half_to_float(x.x);
}
inline __half __ushort_as_half(uint16_t bits)
{
    return { bits };
}
inline float2 __half22float2(__half2 x)
{
    return { __half2float(x.x), __half2float(x.y) };
}
inline __half2 __floats2half2_rn(float x, float y)
{
    return { __float2half_rn(x), __float2half_rn(y) };
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c)
{
    const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
    return __floats2half2_rn(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));
}
inline __half2 __hmul2(__half2 a, __half2 b)
{
    return __hfma2(a, b, {});
}
inline uint16_t __half_as_ushort(__half x)
{
    return x.bits;
}
inline float __low2float(__half2 x)
{
    return __half2float(x.x);
}
inline float __high2float(__half2 x)
{
    return __half2float(x.y);
}
inline __half2 __low2half2(__half2 x)
{
    return { x.x, x.x };
}
inline __half2 __high2half2(__half2 x)
{
    return { x.y, x.y };
}
inline __half2 __float2half2_rn(float x)
{
    return __floats2half2_rn(x, x);
}
inline __half2 __hmax2_nan(__half2 a, __half2 b)
{
    return { __half2float(a.x) > __half2float(b.x) ? a.x : b.x,
             __half2float(a.y) > __half2float(b.y) ? a.y : b.y };
}
inline bool __hble2(__half2 a, __half2 b)
{
    return __half2float(a.x) <= __half2float(b.x) && __half2float(a.y) <= __half2float(b.y);
}
inline uint16_t __bfloat16_as_ushort(uint16_t x)
{
    return x;
}
inline uint16_t __float2bfloat16_rn(float x)
{
    return kvant_bf16_from_float(x);
}
inline float __uint_as_float(uint32_t x)
{
    return kvant_float_from_bits(x);
}
inline uint32_t __float_as_uint(float x)
{
    return kvant_float_bits(x);
}
inline int __float2int_rn(float x)
{
    return (int)rintf(x);
}
inline int __float2int_rz(float x)
{
    return (int)x;
}
inline float __fdividef(float a, float b)
{
    return a / b;
}
inline float __frcp_rn(float x)
{
    return 1 / x;
}
inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
inline float __fadd_rn(float a, float b)
{
    return a + b;
}
inline float __fsub_rn(float a, float b)
{
    return a - b;
}
inline float __fmul_rn(float a, float b)
{
    return a * b;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b)
{
    return (uint32_t)((uint64_t)a * b >> 32);
}
/* Multiplies the halves of a by the lower bytes of b; multiplies bytes by bytes. */
inline uint32_t __dp2a_lo(uint32_t a, uint32_t b, uint32_t c)
{
    return c + (a & 0xffffu) * (b & 255) + (a >> 16) * (b >> 8 & 255);
}
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c)
{
    for (int i = 0; i < 32; i += 8)
        c += (a >> i & 255) * (b >> i & 255);
    return c;
}
inline uint32_t __vminu2(uint32_t a, uint32_t b)
{
    return min(a & 0xffffu, b & 0xffffu) | min(a >> 16, b >> 16) << 16;
}
inline float __int_as_float(int x)
{
    return kvant_float_from_bits((uint32_t)x);
}
inline int __float_as_int(float x)
{
    return (int)kvant_float_bits(x);
}
inline int __popc(uint32_t x)
{
    return __builtin_popcount(x);
}
inline int __ffs(uint32_t x)
{
    return __builtin_ffs((int)x);
}
inline int __clz(uint32_t x)
{
    return x ? __builtin_clz(x) : 32;
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, int by)
{
    return (uint32_t)(((uint64_t)high << 32 | low) << (by & 31) >> 32);
}

/* As GPUs do, it loads numbers only from multiples of their size. */
template <class T> T __ldg(const T *from)
{
    if ((uintptr_t)from % sizeof(T) != 0) {
        printf("a load of %zu bytes at %p\n", sizeof(T), (const void *)from);
        exit(1);
    }
    return *from;
}
inline float load_here(const float *from)
{
    return __ldg(from);
}
