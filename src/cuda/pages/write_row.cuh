/* write_row.cuh - the end of decoding a token: its row un-rotated, multiplied by the factors, with the
 * centre added, stored. A warp has a row. */
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
    rotate_back(row, args.codec.rotation, lane);
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
