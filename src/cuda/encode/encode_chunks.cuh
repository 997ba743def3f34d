/* encode_chunks.cuh - the code of one chunk: direction and norm of a triplet (octopus), direction
 * of four channels (hqmq). A thread has one chunk. The codes are the CPU's (format.md), so all
 * arithmetic is in single roundings and in the CPU's order. */
#pragma once

#include "../chunks/chunk_values.cuh"

namespace kvant
{

struct TripletCode {
    uint32_t code;
    /* along: the triplet's projection on its coded direction; norm: the coded norm */
    float along, norm;
};

/* The number of the n - 1 rising thresholds that lie below x; n is a power of two. */
KVANT_INLINE int count_below(const float *thresholds, int n, float x)
{
    int i = 0;
    for (int step = n / 2; step > 0; step /= 2)
        if (x > thresholds[i + step - 1])
            i += step;
    return i;
}

/* The first of the levels that are tried for a coordinate; -1 stands for level 0. */
KVANT_INLINE int first_level(const OctopusLevels &levels, int n, uint32_t rounding, float x)
{
    if (rounding == 0)
        return 0;
    const int i = count_below(levels.direction_thresholds, n, x);
    return rounding == 1 ? i : rounding == 3 || !(x > levels.direction[i]) ? i - 1 : i;
}

/* The best direction so far: the first with the highest quality, which is the squared cosine with
 * the cosine's sign, times den. */
struct BestDirection {
    float quality, den, dot;
    int u, w;

    KVANT_INLINE void take(const OctopusLevels &levels, const Point &p, int new_u, int new_w)
    {
        const Point c = octahedral_point(levels.direction[new_u], levels.direction[new_w]);
        const float new_dot = dot3(p.x, c.x, p.y, c.y, p.z, c.z),
                    new_den = dot3(c.x, c.x, c.y, c.y, c.z, c.z);
        const float new_quality = __fmul_rn(new_dot, fabsf(new_dot));
        if (__fmul_rn(new_quality, den) > __fmul_rn(quality, new_den))
            quality = new_quality, den = new_den, dot = new_dot, u = new_u, w = new_w;
    }
};

KVANT_INLINE TripletCode quantize_triplet(const OctopusLevels &levels, const kvant_cuda_book &book,
                                          float x, float y, float z)
{
    const int n = 1 << book.direction_bits;
    const float sum = __fadd_rn(__fadd_rn(fabsf(x), fabsf(y)), fabsf(z)),
                length = sum > 0 ? sum : 1;
    const Point p{ __fdiv_rn(x, length), __fdiv_rn(y, length), __fdiv_rn(z, length) };
    const float fold = p.z < 0 ? -p.z : 0;
    const int first_u = first_level(levels, n, book.rounding, __fadd_rn(p.x, copysignf(fold, p.x))),
              first_w = first_level(levels, n, book.rounding, __fadd_rn(p.y, copysignf(fold, p.y)));
    BestDirection best{ -4, 1, 0, 0, 0 };
    if (book.rounding ==
        3) { /* the usual case has no loops, so that candidates are processed in parallel */
        unrolled_for (int i = 0; i < 9; i++)
            best.take(levels, p, min(max(first_u + i / 3, 0), n - 1),
                      min(max(first_w + i % 3, 0), n - 1));
    } else {
        const int width = book.rounding ? (int)book.rounding : n;
#pragma unroll 1
        for (int i = 0; i < width * width; i++)
            best.take(levels, p, min(max(first_u + i / width, 0), n - 1),
                      min(max(first_w + i % width, 0), n - 1));
    }
    const float along = __fdiv_rn(__fmul_rn(length, best.dot), __fsqrt_rn(best.den));
    const float target = book.rounding == 1 ? __fsqrt_rn(dot3(x, x, y, y, z, z)) : along;
    const int k = count_below(levels.norm_thresholds, 1 << book.norm_bits, target);
    return TripletCode{ (uint32_t)best.u | (uint32_t)best.w << book.direction_bits |
                            (uint32_t)k << 2 * book.direction_bits,
                        along, levels.norm[k] };
}

/* Paddings of the last triplet for channels that do not exist, as multiples of the magnitudes of
 * its real channels (octopus_book.c says why). */
struct Padding {
    float y, z;
};

KVANT_INLINE Padding padding_of(int left, int trial)
{
    constexpr float ONE_Y[] = { -1, -1.25f, 0.375f, 0, 1.75f, 0.75f, -2, 0.75f, -0.625f, -0.125f };
    constexpr float ONE_Z[] = { 0.375f, -2, -0.375f, 0, -0.125f, -0.125f, 1, 1.25f, 2, -0.75f };
    constexpr float TWO_Z[] = { 0.3125f, 1.25f, 0.0625f, -0.625f, -2, -0.875f };
    Padding p{ 0, 0 };
    unrolled_for (int i = 0; i < 10; i++)
        if (i == trial)
            p = left == 1 ? Padding{ ONE_Y[i], ONE_Z[i] }
                          : Padding{ 0, i < 6 ? TWO_Z[i < 6 ? i : 0] : 0 };
    return p;
}

/* The error of a trial in its real channels, and the product of these with the decoded channels. */
template <int LEFT>
KVANT_INLINE float2 trial_result(const OctopusLevels &levels, const kvant_cuda_book &book,
                                 uint32_t code, float x, float y)
{
    const Point p = octopus_triplet(levels, book.direction_bits, code, 1);
    const float dx = __fsub_rn(x, p.x), dy = LEFT == 2 ? __fsub_rn(y, p.y) : 0;
    return make_float2(__fadd_rn(__fmul_rn(dx, dx), __fmul_rn(dy, dy)),
                       __fadd_rn(__fmul_rn(x, p.x), LEFT == 2 ? __fmul_rn(y, p.y) : 0));
}

/* ((a b +- c d) +- e f) +- g h, signs as multiples */
KVANT_INLINE float dot4(float a, float b, float s1, float c, float d, float s2, float e, float f,
                        float s3, float g, float h)
{
    return __fadd_rn(
        __fadd_rn(__fadd_rn(__fmul_rn(a, b), __fmul_rn(s1 * c, d)), __fmul_rn(s2 * e, f)),
        __fmul_rn(s3 * g, h));
}

/* x conj(s) */
KVANT_INLINE float4 multiply_conjugate(const float4 &x, const float4 &s)
{
    return make_float4(dot4(x.x, s.x, 1, x.y, s.y, 1, x.z, s.z, 1, x.w, s.w),
                       dot4(x.y, s.x, -1, x.x, s.y, 1, x.w, s.z, -1, x.z, s.w),
                       dot4(x.z, s.x, -1, x.w, s.y, -1, x.x, s.z, 1, x.y, s.w),
                       dot4(x.w, s.x, 1, x.z, s.y, -1, x.y, s.z, -1, x.x, s.w));
}

KVANT_INLINE uint32_t closest_unit(const float4 &v)
{
    const float y[4] = { v.x, v.y, v.z, v.w };
    uint32_t largest = 0, signs = 0;
    float top = fabsf(y[0]);
    bool minus = y[0] < 0;
    unrolled_for (int i = 0; i < 4; i++) {
        signs |= (uint32_t)(y[i] < 0) << i;
        if (fabsf(y[i]) > top)
            top = fabsf(y[i]), largest = i, minus = y[i] < 0;
    }
    const float half = __fmul_rn(
        __fadd_rn(__fadd_rn(fabsf(y[0]), fabsf(y[1])), __fadd_rn(fabsf(y[2]), fabsf(y[3]))), 0.5f);
    return top >= half ? 2 * largest + minus : 8 + signs;
}

/* The direction closest to x: the first secondary with the largest closeness, and then its unit. */
KVANT_INLINE uint32_t closest_direction(const HqmqSecondaries &levels, int n_secondaries,
                                        const float4 &x)
{
    float best = 0;
    int which = 0;
#pragma unroll 4
    for (int k = 0; k < n_secondaries; k++) {
        const float4 y = multiply_conjugate(x, levels.rounded[k]);
        const float a = fabsf(y.x), b = fabsf(y.y), c = fabsf(y.z), d = fabsf(y.w);
        const float largest = fmaxf(fmaxf(a, b), fmaxf(c, d)),
                    half = __fmul_rn(__fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d)), 0.5f),
                    closeness = fmaxf(largest, half);
        if (closeness > best)
            best = closeness, which = k;
    }
    return 24 * which + closest_unit(multiply_conjugate(x, levels.rounded[which]));
}

} // namespace kvant
