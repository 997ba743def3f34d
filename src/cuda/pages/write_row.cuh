/* write_row.cuh - the end of decoding a token, one row per warp: undoes the transform, multiplies
 * by the scale, adds the centre, stores the row. A row that stays transformed is stored as sealed
 * rows become open ones on the CPU. */
#ifndef KVANT_CUDA_WRITE_ROW_CUH
#define KVANT_CUDA_WRITE_ROW_CUH

#include "pages.h"
#include "../rotate.cuh"

namespace kvant
{

constexpr int WARPS = 8;

template <int D>
__device__ __forceinline__ void write_row(const DecodeArgs &args, Row<D> &row, int token, int kv_head, int lane)
{
    __shared__ __align__(16) float space[WARPS][D];
    transform_back(row, args.codec, weights_of(args.codec, args.inverse_weights, kv_head), space[threadIdx.x >> 5],
                   lane);
#pragma unroll
    for (int j = 0; args.scale && j < Row<D>::PER_LANE; j++)
        row.x[j] = __fmul_rn(row.x[j], args.scale[kv_head * D + lane + 32 * j]);
#pragma unroll
    for (int j = 0; args.center && j < Row<D>::PER_LANE; j++)
        row.x[j] = __fadd_rn(row.x[j], args.center[kv_head * D + lane + 32 * j]);
#pragma unroll
    for (int j = 0; args.transformed && j < Row<D>::PER_LANE; j++)
        row.x[j] = fminf(fmaxf(row.x[j], -65504.0f), 65504.0f);
    const size_t block = args.to ? args.to[blockIdx.x] : blockIdx.x;
    size_t at = (block * 64 + token) * args.token_stride + kv_head * args.out_head_stride;
    store_row(args.out, at, args.type, lane, row);
}

} // namespace kvant

#endif
