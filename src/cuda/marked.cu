/* marked.cu - NaN for query tokens that see a token whose row was refused (kvant/cuda.h). */
#include "checks.h"
#include "launch.h"
#include "params.h"
#include "ptx.cuh"
#include "table.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>

namespace kvant
{

constexpr int THREADS = 128;
constexpr uint32_t MOST_GRID_Y = 65535;
constexpr uint16_t HIDDEN = 0xfc00; /* minus infinity */

KVANT_INLINE bool is_marked(const uint32_t *marks, int64_t number)
{
    return marks[1 + number / 32] >> number % 32 & 1;
}

KVANT_INLINE void mark(const kvant_cuda_spread &in, uint32_t query)
{
    const int64_t number = in.numbers[query];
    atomicOr(in.marks + 1 + number / 32, 1u << number % 32);
    atomicOr(in.marks, 1u);
}

/* A thread block per query token. */
__global__ void __launch_bounds__(THREADS)
    fill_marked_kernel(const __grid_constant__ kvant_cuda_marked_args args)
{
    wait_for_prior();
    if (args.marks[0] == 0)
        return;
    const int query = (int)blockIdx.x, b = (int)blockIdx.y;
    const int length = args.lengths[b],
              seen = args.causal ? length - (int)args.query_tokens + query + 1 : length;
    const int64_t first = args.first + b * args.stride;
    const uint16_t *mask =
        args.mask ? args.mask + ((size_t)b * args.query_tokens + query) * args.mask_token_stride
                  : nullptr;
    bool sees = false;
    for (int t = (int)threadIdx.x; t < seen; t += THREADS)
        sees |= is_marked(args.marks, first + t) && !(mask && mask[t] == HIDDEN);
    if (!__syncthreads_or(sees))
        return;
    if (threadIdx.x < args.n_spread)
        mark(args.spread[threadIdx.x], (uint32_t)b * args.query_tokens + (uint32_t)query);
    for (uint32_t i = threadIdx.x; i < args.n_heads * args.head_dim; i += THREADS) {
        const size_t at = b * args.out_batch_stride + query * args.out_token_stride +
                          i / args.head_dim * args.out_head_stride + i % args.head_dim;
        if (args.type == KVANT_CUDA_F32)
            static_cast<float *>(args.out)[at] = __int_as_float(0x7fffffff);
        else /* a NaN in fp16 and in bf16 */
            static_cast<uint16_t *>(args.out)[at] = 0x7fff;
    }
}

} // namespace kvant

kvant_status kvant_cuda_table_fill_marked(const kvant_cuda_marked_args *args,
                                          kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->marks || !args->lengths || !args->out ||
        args->query_tokens == 0 || args->query_tokens > INT_MAX ||
        args->n_spread > KVANT_CUDA_MOST_SPREAD || args->batch > kvant::MOST_GRID_Y ||
        args->n_heads == 0 || args->head_dim == 0 || args->n_heads > UINT_MAX / args->head_dim)
        return KVANT_ERR_ARGUMENT;
    if (args->batch == 0)
        return KVANT_OK;
    kvant_cuda_marked_args p = *args;
    void *parameters[] = { &p };
    return kvant::from_cuda(kvant::launch_early((const void *)kvant::fill_marked_kernel,
                                                dim3(p.query_tokens, p.batch), kvant::THREADS,
                                                parameters, 0, static_cast<cudaStream_t>(stream)));
}
