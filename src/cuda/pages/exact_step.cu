/* exact_step.cu - kvant_cuda_exact_step: a warp plans a step, then every thread finds an entry of
 * the table or the row of a token. exact_step.h has the rules. */
#include "../checks.h"
#include "../table.h"
#include "exact_step.h"

namespace kvant
{

constexpr uint32_t THREADS = 256, MOST_BLOCKS = 1u << 20;

__global__ void __launch_bounds__(EXACT_LANES)
    exact_plan_kernel(const __grid_constant__ kvant_cuda_exact_args args)
{
    exact_plan(&args);
}

__global__ void __launch_bounds__(THREADS)
    exact_find_kernel(const __grid_constant__ kvant_cuda_exact_args args)
{
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < exact_items(&args);
         i += (size_t)gridDim.x * THREADS)
        exact_find(&args, i);
}

} // namespace kvant

kvant_status kvant_cuda_table_exact_step(const kvant_cuda_exact_args *args,
                                         kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !exact_valid(args))
        return KVANT_ERR_ARGUMENT;
    const size_t blocks = (exact_items(args) + kvant::THREADS - 1) / kvant::THREADS;
    if (blocks > kvant::MOST_BLOCKS)
        return KVANT_ERR_ARGUMENT;
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    kvant::exact_plan_kernel<<<1, EXACT_LANES, 0, on>>>(*args);
    if (blocks)
        kvant::exact_find_kernel<<<(unsigned)blocks, kvant::THREADS, 0, on>>>(*args);
    return kvant::from_cuda(cudaGetLastError());
}
