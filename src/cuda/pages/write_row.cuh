/* write_row.cuh - the end of decoding a token, one row per warp: undoes the transform, multiplies
 * by the factors, adds the centre, stores the row. */
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
    for (int j = 0; args.factors && j < Row<D>::PER_LANE; j++)
        row.x[j] = __fmul_rn(row.x[j], args.factors[kv_head * D + lane + 32 * j]);
#pragma unroll
    for (int j = 0; args.center && j < Row<D>::PER_LANE; j++)
        row.x[j] = __fadd_rn(row.x[j], args.center[kv_head * D + lane + 32 * j]);
    size_t at = ((size_t)blockIdx.x * 64 + token) * args.token_stride + kv_head * args.out_head_stride;
    store_row(args.out, at, args.type, lane, row);
}

} // namespace kvant

#endif
