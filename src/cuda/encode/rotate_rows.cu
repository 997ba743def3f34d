/* rotate_rows.cu - multiplies rows with a matrix. It serves dense rotations (rotate=dense), which
 * the kernels of append and attention do not have. Rows are rotated before they are appended,
 * queries before attention, and outputs after it.
 *
 * A thread block processes a row, and a thread computes one number of the result. Sums have the
 * order of format.md, "Numbers", so encoded rows are equal to the CPU's. The form is simple: every
 * row reads the matrix from the second-level cache. */
#include "../checks.h"
#include "../params.h"
#include "../table.h"

namespace kvant
{

__global__ void __launch_bounds__(KVANT_CUDA_MOST_DIM)
    rotate_rows_kernel(const __grid_constant__ kvant_cuda_rotate_rows_args args)
{
    __shared__ float x[KVANT_CUDA_MOST_DIM];
    const uint32_t d = args.head_dim, channel = threadIdx.x, head = blockIdx.y, token = blockIdx.x;
    const uint32_t kv_head = head / (args.n_heads / args.n_kv_heads);
    const size_t at = (size_t)kv_head * d + channel;
    float number = args.rows[token * args.token_stride + head * args.head_stride + channel];
    if (args.center)
        number = __fsub_rn(number, args.center[at]);
    if (args.divisor)
        number = __fdiv_rn(number, args.divisor[at]);
    if (args.before)
        number = __fmul_rn(number, args.before[at]);
    x[channel] = number;
    __syncthreads();
    const float *column = args.matrix + kv_head * args.matrix_stride + channel;
    float sum[16];
#pragma unroll 1
    for (uint32_t tile = 0; tile < d / 16; tile++)
        unrolled_for (int i = 0; i < 16; i++) {
            const float product = __fmul_rn(column[(size_t)(16 * tile + i) * d], x[16 * tile + i]);
            sum[i] = tile ? __fadd_rn(sum[i], product) : product;
        }
    unrolled_for (int width = 8; width > 0; width /= 2)
        unrolled_for (int i = 0; i < width; i++)
            sum[i] = __fadd_rn(sum[i], sum[i + width]);
    args.out[token * args.out_token_stride + head * args.out_head_stride + channel] =
        args.after ? __fmul_rn(sum[0], args.after[at]) : sum[0];
}

} // namespace kvant

kvant_status kvant_cuda_table_rotate_rows(const kvant_cuda_rotate_rows_args *args,
                                          kvant_cuda_stream stream)
{
    if (args->n_tokens == 0)
        return KVANT_OK;
    kvant::rotate_rows_kernel<<<dim3(args->n_tokens, args->n_heads), args->head_dim, 0,
                                static_cast<cudaStream_t>(stream)>>>(*args);
    return kvant::from_cuda(cudaGetLastError());
}
