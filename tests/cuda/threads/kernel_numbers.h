/* kernel_numbers.h - functions of numbers and memory that kernels call and decoders of tiles do not
 * (../decoders/numbers.h), and the instructions of ptx.cuh that they use. */
#pragma once

#include <ctime>

/* ptx.cuh leaves its instructions to this file and to ../decoders/instructions.h. */
#define KVANT_PTX

inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
inline float __fsqrt_rn(float x)
{
    return sqrtf(x);
}
/* Rounds once: a number between two halves becomes the odd one of the floats next to it, which is
 * never in the middle of two halves. */
inline __half __double2half(double x)
{
    float y = (float)x;
    uint32_t bits = __float_as_uint(y);
    if ((double)y != x && bits % 2 == 0)
        bits += fabs((double)y) < fabs(x) ? 1u : ~0u;
    return __float2half_rn(__uint_as_float(bits));
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t x)
{
    return exchanged(x, [](auto &&lane) {
        uint32_t all = 0;
        for (int i = 0; i < LANES; i++)
            all |= lane(i);
        return all;
    });
}

inline __half __short2half_rn(int x)
{
    return __float2half_rn((float)x);
}

template <class A, class B> auto min(A a, B b) -> std::common_type_t<A, B>
{
    using Both = std::common_type_t<A, B>;
    return (Both)a < (Both)b ? (Both)a : (Both)b;
}
template <class A, class B> auto max(A a, B b) -> std::common_type_t<A, B>
{
    using Both = std::common_type_t<A, B>;
    return (Both)a > (Both)b ? (Both)a : (Both)b;
}

inline uint32_t atomicOr(uint32_t *at, uint32_t x)
{
    const uint32_t before = *at;
    *at |= x;
    return before;
}
inline uint32_t atomicXor(uint32_t *at, uint32_t x)
{
    const uint32_t before = *at;
    *at ^= x;
    return before;
}
inline uint32_t atomicAnd(uint32_t *at, uint32_t x)
{
    const uint32_t before = *at;
    *at &= x;
    return before;
}

/* Cycles; every reading takes many. */
inline long cycles()
{
    static long now;
    return now += 400;
}
#define clock cycles

namespace kvant
{

inline float tanh_approximately(float x)
{
    return tanhf(x);
}

inline float min_or_nan(float a, float b)
{
    return a != a || b != b ? NAN : fminf(a, b);
}

inline float max_or_nan(float a, float b)
{
    return a != a || b != b ? NAN : fmaxf(a, b);
}

/* Kernels run one after another, so the one before has ended. */
inline void wait_for_prior()
{
}

inline void begin_next()
{
}

inline void prefetch_line(const void *, size_t)
{
}

template <class T> void hold(T &)
{
}

} // namespace kvant
