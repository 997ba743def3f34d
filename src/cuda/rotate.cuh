/* rotate.cuh - one row of numbers per warp: loading, storing, Hadamard rotation. Queries, outputs
 * and decoding use it; encoding distributes rows differently (encode.cuh).
 *
 * Lane l holds channels l, l + 32, l + 64, ... All arithmetic is written in single roundings,
 * because decoders must give the CPU's numbers. */
#pragma once

#include "params.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kvant
{

constexpr uint32_t FULL = 0xffffffffu;

template <int D> struct Row {
    static constexpr int PER_LANE = D / 32;
    float x[PER_LANE];

    /* use(number, channel) for the numbers of the lane */
    template <class F> KVANT_INLINE void each(int lane, F &&use)
    {
        unrolled_for (int j = 0; j < PER_LANE; j++)
            use(x[j], lane + 32 * j);
    }
};

/* A number by itself. */
KVANT_INLINE float load_number(const void *from, size_t at, kvant_cuda_type type)
{
    if (type == KVANT_CUDA_F32)
        return static_cast<const float *>(from)[at];
    __half_raw bits;
    bits.x = static_cast<const uint16_t *>(from)[at];
    return type == KVANT_CUDA_F16 ? __half2float(bits) : __uint_as_float((uint32_t)bits.x << 16);
}

/* Loads a row. The type is a run-time choice, made once per row, around the loads. Kernels start
 * with a cold instruction cache, so less code means fewer instructions to fetch. */
template <int D>
KVANT_INLINE Row<D> load_row(const void *from, size_t offset, kvant_cuda_type type, int lane)
{
    Row<D> row;
    if (type == KVANT_CUDA_F32)
        row.each(lane, [&](float &x, int channel) {
            x = static_cast<const float *>(from)[offset + channel];
        });
    else
        row.each(lane, [&](float &x, int channel) {
            __half_raw bits;
            bits.x = static_cast<const uint16_t *>(from)[offset + channel];
            x = type == KVANT_CUDA_F16 ? __half2float(bits)
                                       : __uint_as_float((uint32_t)bits.x << 16);
        });
    return row;
}

template <int D>
KVANT_INLINE void store_row(void *to, size_t offset, kvant_cuda_type type, int lane,
                            const Row<D> &row)
{
    if (type == KVANT_CUDA_F32) {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            static_cast<float *>(to)[offset + lane + 32 * j] = row.x[j];
        return;
    }
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        uint16_t bits = type == KVANT_CUDA_F16
                            ? __half_as_ushort(__float2half_rn(row.x[j]))
                            : __bfloat16_as_ushort(__float2bfloat16_rn(row.x[j]));
        static_cast<uint16_t *>(to)[offset + lane + 32 * j] = bits;
    }
}

/* R: kvant_cuda_rotation, or kvant_cuda_wide_rotation. */
template <int D, class R> KVANT_INLINE void apply_signs(Row<D> &row, const R &rotation, int lane)
{
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        row.x[j] = rotation.signs[j] >> lane & 1 ? -row.x[j] : row.x[j];
}

/* The butterflies of hadamard between the numbers of a lane, and its product. */
template <int D, class R> KVANT_INLINE void hadamard_of_lane(Row<D> &row, const R &rotation)
{
    constexpr int N = Row<D>::PER_LANE;
    unrolled_for (int step = 1; step < N; step *= 2) {
        if (32 * step >= rotation.block)
            break;
        unrolled_for (int j = 0; j < N; j++)
            if ((j & step) == 0 && j + step < N) {
                float a = row.x[j], b = row.x[j + step];
                row.x[j] = __fadd_rn(a, b);
                row.x[j + step] = __fsub_rn(a, b);
            }
    }
    unrolled_for (int j = 0; j < N; j++)
        row.x[j] = __fmul_rn(row.x[j], rotation.scale);
}

/* Butterflies at distances of all powers of two within blocks, then the product with 1 /
 * sqrt(block). A fused x * +-1 + y rounds once, like the sum or the difference. */
template <int D, class R> KVANT_INLINE void hadamard(Row<D> &row, const R &rotation, int lane)
{
    constexpr int N = Row<D>::PER_LANE;
    rolled_for (uint32_t distance = 1; distance < 32 && distance < rotation.block; distance *= 2) {
        float sign = lane & distance ? -1.0f : 1.0f;
        unrolled_for (int j = 0; j < N; j++)
            row.x[j] = __fmaf_rn(row.x[j], sign, __shfl_xor_sync(FULL, row.x[j], distance));
    }
    hadamard_of_lane(row, rotation);
}

/* y = R x */
template <int D, class R> KVANT_INLINE void rotate(Row<D> &row, const R &rotation, int lane)
{
    if (rotation.block == 0)
        return;
    apply_signs(row, rotation, lane);
    hadamard(row, rotation, lane);
}

/* x = R^T y */
template <int D, class R> KVANT_INLINE void rotate_back(Row<D> &row, const R &rotation, int lane)
{
    if (rotation.block == 0)
        return;
    hadamard(row, rotation, lane);
    apply_signs(row, rotation, lane);
}

/* y = sum over i of x_i m[i], where m is D x D numbers by rows. Products and sums are rounded one
 * by one in the order of i, like the CPU's combine_rows. */
template <int D> KVANT_INLINE Row<D> combine_rows(const float *m, const Row<D> &x, int lane)
{
    constexpr int N = Row<D>::PER_LANE;
    Row<D> y;
    unrolled_for (int k = 0; k < N; k++)
        y.x[k] = 0;
    unrolled_for (int j = 0; j < N; j++)
#pragma unroll 8
        for (int l = 0; l < 32; l++) {
            const float x_i = __shfl_sync(FULL, x.x[j], l);
            const float *row = m + (size_t)(32 * j + l) * D + lane;
            unrolled_for (int k = 0; k < N; k++)
                y.x[k] = __fadd_rn(y.x[k], __fmul_rn(x_i, row[32 * k]));
        }
    return y;
}

/* y = R W x. key_transform: the weights of the kv head. A full matrix is R W, or W:
 * AppendRole::after follows. */
template <int D>
KVANT_INLINE void transform(Row<D> &row, const kvant_cuda_params &codec, const float *key_transform,
                            int lane)
{
    if (codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL) {
        row = combine_rows<D>(key_transform, row, lane);
        return;
    }
    if (codec.key_transform_kind == KVANT_CUDA_TRANSFORM_DIAGONAL)
        row.each(lane, [&](float &x, int channel) { x = __fmul_rn(x, key_transform[channel]); });
    rotate(row, codec.rotation, lane);
}

/* The beginning of a kv head's weights; NULL without weights. */
KVANT_INLINE const float *key_transform_of(const kvant_cuda_params &codec,
                                           const float *key_transform, int kv_head)
{
    const size_t d = codec.head_dim;
    return codec.key_transform_kind == KVANT_CUDA_TRANSFORM_NONE
               ? nullptr
               : key_transform +
                     kv_head * (codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL ? d * d : d);
}

/* The warp's largest number, by one instruction. Floats are in the order of whole numbers after the
 * bits of negative numbers, except the sign, are inverted. */
KVANT_INLINE float largest_of(float x)
{
    const int bits = __float_as_int(x),
              top = __reduce_max_sync(FULL, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(top ^ (top >> 31 & 0x7fffffff));
}

/* A power of two above |x|, as bits of a float; its inverse is exact, too. */
KVANT_INLINE float power_above(float x)
{
    uint32_t exponent = min(__float_as_uint(x) >> 23 & 0xffu, 252u);
    return __uint_as_float((exponent + 1) << 23);
}

KVANT_INLINE float warp_sum(float x)
{
    rolled_for (int k = 16; k > 0; k /= 2)
        x += __shfl_xor_sync(FULL, x, k);
    return x;
}

} // namespace kvant
