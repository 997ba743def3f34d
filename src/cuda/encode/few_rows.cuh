/* few_rows.cuh - a row from its numbers to the words of its page, by one warp, where few rows are
 * appended: in a kernel of their own (append_few.cu) or by attention (../attention/new_rows.cuh).
 * append_few.cu says what counts. */
#pragma once

#include "append_tokens.cuh"
#include "few_rows.h"
#include "token_words.cuh"

namespace kvant
{

/* Numbers as they come, so that nobody waits for them yet. */
template <int D> struct RawRow {
    uint32_t bits[Row<D>::PER_LANE];

    KVANT_INLINE void load(const void *from, size_t offset, kvant_cuda_type type, int lane)
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            bits[j] = type == KVANT_CUDA_F32 ? static_cast<const uint32_t *>(from)[offset + lane + 32 * j]
                                             : static_cast<const uint16_t *>(from)[offset + lane + 32 * j];
    }

    KVANT_INLINE Row<D> numbers(kvant_cuda_type type) const
    {
        Row<D> row;
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
            __half_raw half;
            half.x = (uint16_t)bits[j];
            row.x[j] = type == KVANT_CUDA_F16 ? __half2float(half)
                                              : __uint_as_float(type == KVANT_CUDA_F32 ? bits[j] : bits[j] << 16);
        }
        return row;
    }
};

/* What a row is shifted by, divided by and multiplied with; asked for before the row, because no kernel before
 * this one writes them. Most codecs have none of these. */
template <int D> struct Affine {
    float center[Row<D>::PER_LANE], scale[Row<D>::PER_LANE], weights[Row<D>::PER_LANE];

    KVANT_INLINE void load(const FewRole &role, bool any, int at)
    {
        fill(center, any ? role.center : nullptr, at, 0);
        fill(scale, any ? role.scale : nullptr, at, 1);
        fill(weights, any && role.weighting == KVANT_CUDA_WEIGHTING_DIAGONAL ? role.weights : nullptr, at, 1);
    }

    KVANT_INLINE static void fill(float (&to)[Row<D>::PER_LANE], const float *from, int at, float none)
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            to[j] = none;
        if (from)
            unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
                to[j] = from[at + 32 * j];
    }

    /* A division takes many instructions: they are left out where there is nothing to divide by. */
    KVANT_INLINE void apply(Row<D> &row, bool divides) const
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            row.x[j] = __fsub_rn(row.x[j], center[j]);
        if (divides)
            unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
                row.x[j] = __fdiv_rn(row.x[j], scale[j]);
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            row.x[j] = __fmul_rn(row.x[j], weights[j]);
    }
};

/* y = R W ((x - c) / s). A number that is not finite stays so through the centre, the scale and W. */
template <int D>
KVANT_INLINE void few_row(Row<D> &row, const FewRole &role, const Affine<D> &affine, int lane, bool &finite)
{
    if (role.affine)
        affine.apply(row, role.scale != nullptr);
    finite = true;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        finite &= is_finite(row.x[j]);
    rotate(row, role.rotation, lane);
}

/* A NaN is above or below all numbers here, whatever its sign, so the extremes tell of it. */
template <int D> __device__ __forceinline__ void extremes(const Row<D> &y, float &min, float &max)
{
    min = y.x[0], max = y.x[0];
    unrolled_for (int j = 1; j < Row<D>::PER_LANE; j++)
        min = min_or_nan(min, y.x[j]), max = max_or_nan(max, y.x[j]);
#pragma unroll 1
    for (int k = 16; k > 0; k /= 2) {
        min = min_or_nan(min, __shfl_xor_sync(FULL, min, k));
        max = max_or_nan(max, __shfl_xor_sync(FULL, max, k));
    }
}

template <int D>
KVANT_INLINE Quantized few_uniform(uint32_t (&codes)[Row<D>::PER_LANE], const FewRole &role, const Row<D> &y)
{
    float min, max;
    extremes<D>(y, min, max);
    min = __fadd_rn(min, 0.0f); /* -0 becomes 0, as the CPU has it */
    const float zero = role.symmetric ? 0 : to_half_and_back(min),
                range = role.symmetric ? fmaxf(fabsf(min), fabsf(max)) : __fadd_rn(__fsub_rn(max, min), 0.0f),
                scale = to_half_and_back(__fdiv_rn(range, role.levels)), inverse = scale > 0 ? __frcp_rn(scale) : 0,
                low = role.symmetric ? -role.levels : 0;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        const float level = rintf(__fmul_rn(__fsub_rn(y.x[j], zero), inverse));
        codes[j] = (uint32_t)(fminf(fmaxf(level, low), role.levels) - role.offset);
    }
    return Quantized{ scale, role.symmetric ? 0 : min, fabsf(min) <= 65504.0f && fabsf(max) <= 65504.0f };
}

/* A code is the number of thresholds below: the curve gives it, or one less. */
template <int N>
KVANT_INLINE void find_few(uint32_t (&codes)[N], const NarrowBook &book, uint32_t, const float (&y)[N],
                           float inverse)
{
    const float slope = book.slope * inverse;
    unrolled_for (int j = 0; j < N; j++) {
        const uint32_t guess =
            __float_as_uint(fmaf(tanh_approximately(y[j] * slope), book.gain, book.middle)) >> 3 & 15u;
        codes[j] = guess + (__fmul_rn(y[j], inverse) > book.thresholds[guess] ? 1 : 0);
    }
}

template <int N>
KVANT_INLINE void find_few(uint32_t (&codes)[N], const WideBook &book, uint32_t bits, const float (&y)[N],
                           float inverse)
{
    unrolled_for (int j = 0; j < N; j++)
        codes[j] = 0;
#pragma unroll 1
    for (uint32_t step = 1u << (bits - 1); step > 0; step /= 2)
        unrolled_for (int j = 0; j < N; j++)
            codes[j] += __fmul_rn(y[j], inverse) > book.thresholds[codes[j] + step - 1] ? step : 0;
}

template <int D, class Book>
KVANT_INLINE Quantized few_codebook(uint32_t (&codes)[Row<D>::PER_LANE], const FewRole &role, const Book &book,
                                    const Row<D> &y, int lane)
{
    const float squares = dot_rows<D>(y, y, lane), norm = __fmul_rn(__fsqrt_rn(squares), role.inverse_sqrt_dim),
                scale = to_half_and_back(norm), inverse = scale > 0 ? __frcp_rn(scale) : 0;
    Row<D> decoded;
    float stored = scale;
    find_few(codes, book, role.bits, y.x, inverse);
    if (role.unbiased) {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            decoded.x[j] = book.values[codes[j]];
        const float product = dot_rows<D>(y, decoded, lane);
        stored = scale > 0 ? product > 0 ? __fdiv_rn(squares, product) : 0 : scale;
    }
    return Quantized{ stored, 0, norm <= 65504.0f && stored <= 65504.0f };
}

KVANT_INLINE void refuse_few(uint32_t *refused, bool finite, int lane)
{
    if (refused && lane == 0)
        atomicOr(refused, finite ? KVANT_CUDA_ROW_RANGE : KVANT_CUDA_ROW_NONFINITE);
}

/* Words, by a warp: all at once, where one after another would be waited for one by one. */
template <class T> __device__ __forceinline__ void copy_words(T &to, const T &from, uint32_t n, int lane)
{
#pragma unroll 1
    for (uint32_t i = lane; i < n; i += 32)
        reinterpret_cast<uint32_t *>(&to)[i] = reinterpret_cast<const uint32_t *>(&from)[i];
}

KVANT_INLINE void copy_book(OpenBook &, const OpenBook &, const FewRole &, int)
{
}

KVANT_INLINE void copy_book(NarrowBook &to, const NarrowBook &from, const FewRole &role, int lane)
{
    if (role.codes == KVANT_CUDA_CODES_CODEBOOK)
        copy_words(to, from, sizeof to / 4, lane);
}

KVANT_INLINE void copy_book(WideBook &to, const WideBook &from, const FewRole &role, int lane)
{
#pragma unroll 1
    for (uint32_t i = lane; i < 1u << role.bits; i += 32)
        to.thresholds[i] = from.thresholds[i], to.values[i] = from.values[i];
}

/* rehearsed: nothing is to be stored. */
template <int D>
KVANT_INLINE void write_open(uint32_t *refused, const FewRole &role, const Row<D> &y, uint8_t *page, int token,
                             bool finite, bool rehearsed, int lane)
{
    bool in_range = true;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        in_range &= fabsf(y.x[j]) <= 65504.0f;
    if (!__all_sync(FULL, in_range)) {
        refuse_few(rehearsed ? nullptr : refused, finite, lane);
        return;
    }
    if (rehearsed)
        return;
    const size_t at = (size_t)token * D;
    store_row(page, at, KVANT_CUDA_F16, lane, y);
    if (role.exact)
        store_row(role.exact, (page - role.base) / sizeof(uint16_t) + at, KVANT_CUDA_F32, lane, y);
}

/* A row's codes; false, and it was refused (NULL: nobody is told). */
template <int D, class Book>
KVANT_INLINE bool few_codes(uint32_t *refused, const FewRole &role, const Book &book, const Row<D> &y, bool finite, int lane,
                            uint32_t (&codes)[Row<D>::PER_LANE], Quantized &q)
{
    q = role.codes == KVANT_CUDA_CODES_CODEBOOK ? few_codebook<D>(codes, role, book, y, lane) : few_uniform<D>(codes, role, y);
    if (!q.in_range)
        refuse_few(refused, finite, lane);
    return q.in_range;
}

/* Into a page, by one warp. */
template <int D>
KVANT_INLINE void put_codes(const FewRole &role, const uint32_t (&codes)[Row<D>::PER_LANE], const Quantized &q, uint8_t *page,
                            int at, bool rehearsed, int lane)
{
    uint16_t *numbers = reinterpret_cast<uint16_t *>(page + role.metadata_offset) + at;
    if (lane == 0 && !rehearsed)
        numbers[0] = __half_as_ushort(__float2half_rn(q.scale));
    if (lane == 0 && !rehearsed && role.codes == KVANT_CUDA_CODES_UNIFORM && !role.symmetric)
        numbers[PAGE_TOKENS] = __half_as_ushort(__float2half_rn(q.zero));
    uint32_t *words = reinterpret_cast<uint32_t *>(page);
    if (role.keys)
        TokenWords<D, true>(at, lane).put(words, codes, role.bits, !rehearsed);
    else
        TokenWords<D, false>(at, lane).put(words, codes, role.bits, !rehearsed);
}

} // namespace kvant
