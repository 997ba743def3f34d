/* rotate.cuh - a warp's row of numbers: loading, storing, Hadamard rotation, for queries, outputs and
 * decoding. Encoding has its own arrangement (encode.cuh).
 *
 * Lane l holds channels l, l + 32, l + 64, ... All arithmetic is spelt out in single roundings, because
 * decoders must give the CPU's numbers. */
#ifndef KVANT_CUDA_ROTATE_CUH
#define KVANT_CUDA_ROTATE_CUH

#include "params.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace kvant
{

constexpr uint32_t FULL = 0xffffffffu;

template <int D> struct Row {
    static constexpr int PER_LANE = D / 32;
    float x[PER_LANE];
};

/* The type is a run-time choice made once a row, around the loads: kernels start with a cold instruction
 * cache, and every instruction that is not there need not be fetched. */
template <int D>
__device__ __forceinline__ Row<D> load_row(const void *from, size_t offset, kvant_cuda_type type, int lane)
{
    Row<D> row;
    if (type == KVANT_CUDA_F32) {
#pragma unroll
        for (int j = 0; j < Row<D>::PER_LANE; j++)
            row.x[j] = static_cast<const float *>(from)[offset + lane + 32 * j];
        return row;
    }
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++) {
        __half_raw bits;
        bits.x = static_cast<const uint16_t *>(from)[offset + lane + 32 * j];
        row.x[j] = type == KVANT_CUDA_F16 ? __half2float(bits) : __uint_as_float((uint32_t)bits.x << 16);
    }
    return row;
}

template <int D>
__device__ __forceinline__ void store_row(void *to, size_t offset, kvant_cuda_type type, int lane,
                                          const Row<D> &row)
{
    if (type == KVANT_CUDA_F32) {
#pragma unroll
        for (int j = 0; j < Row<D>::PER_LANE; j++)
            static_cast<float *>(to)[offset + lane + 32 * j] = row.x[j];
        return;
    }
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++) {
        uint16_t bits = type == KVANT_CUDA_F16 ? __half_as_ushort(__float2half_rn(row.x[j]))
                                               : __bfloat16_as_ushort(__float2bfloat16_rn(row.x[j]));
        static_cast<uint16_t *>(to)[offset + lane + 32 * j] = bits;
    }
}

template <int D>
__device__ __forceinline__ void apply_signs(Row<D> &row, const kvant_cuda_rotation &rotation, int lane)
{
#pragma unroll
    for (int j = 0; j < Row<D>::PER_LANE; j++)
        row.x[j] = rotation.signs[j] >> lane & 1 ? -row.x[j] : row.x[j];
}

/* Butterflies at distance 1, 2, 4, ... within blocks, then the product with 1 / sqrt(block). x * +-1 + other
 * rounds once, as the sum or difference would. */
template <int D>
__device__ __forceinline__ void hadamard(Row<D> &row, const kvant_cuda_rotation &rotation, int lane)
{
    constexpr int N = Row<D>::PER_LANE;
#pragma unroll 1
    for (uint32_t distance = 1; distance < 32 && distance < rotation.block; distance *= 2) {
        float sign = lane & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < N; j++)
            row.x[j] = __fmaf_rn(row.x[j], sign, __shfl_xor_sync(FULL, row.x[j], distance));
    }
#pragma unroll
    for (int step = 1; step < N; step *= 2) {
        if (32 * step >= rotation.block)
            break;
#pragma unroll
        for (int j = 0; j < N; j++)
            if ((j & step) == 0 && j + step < N) {
                float a = row.x[j], b = row.x[j + step];
                row.x[j] = __fadd_rn(a, b);
                row.x[j + step] = __fsub_rn(a, b);
            }
    }
#pragma unroll
    for (int j = 0; j < N; j++)
        row.x[j] = __fmul_rn(row.x[j], rotation.scale);
}

/* y = R x */
template <int D> __device__ __forceinline__ void rotate(Row<D> &row, const kvant_cuda_rotation &rotation, int lane)
{
    if (rotation.block == 0)
        return;
    apply_signs(row, rotation, lane);
    hadamard(row, rotation, lane);
}

/* x = R^T y */
template <int D>
__device__ __forceinline__ void rotate_back(Row<D> &row, const kvant_cuda_rotation &rotation, int lane)
{
    if (rotation.block == 0)
        return;
    hadamard(row, rotation, lane);
    apply_signs(row, rotation, lane);
}

/* The warp's largest number, by one instruction: with the bits of negative ones inverted but for the sign, floats are in the
 * order of whole numbers. */
__device__ __forceinline__ float largest_of(float x)
{
    const int bits = __float_as_int(x), top = __reduce_max_sync(FULL, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(top ^ (top >> 31 & 0x7fffffff));
}

__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll 1
    for (int k = 16; k > 0; k /= 2)
        x += __shfl_xor_sync(FULL, x, k);
    return x;
}

} // namespace kvant

#endif
