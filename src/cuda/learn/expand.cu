/* expand.cu - the matrices R W and R W^-T of triangles (kvant_cuda_expand), with the bits that the
 * CPU gives them (src/cache/key_transform.c).
 *
 * A thread block has a kv head. Rows of W^T and of W^-1 are rotated by a line each. */
#include "../checks.h"
#include "../launch.h"
#include "../params.h"
#include "../rotate.cuh"
#include "../table.h"

#include <cuda_fp16.h>

#include "../../math/parts.h"
#include "sums.h"

namespace kvant
{

struct ExpandCall {
    kvant_cuda_expand_args args;
    kvant_cuda_wide_rotation rotation;
    uint32_t head_dim, part, shares;
};

/* The place of a head's channel in its part, or -1: the channel belongs to another part. */
__device__ static int place_in(uint32_t head_dim, uint32_t n, uint32_t part, uint32_t channel)
{
    const uint32_t half = head_dim / 2, own = channel < half ? channel : channel - half;
    if (channel >= head_dim || own / (n / 2) != part)
        return -1;
    return (int)(own % (n / 2) + (channel < half ? 0 : n / 2));
}

template <int D>
__global__ void __launch_bounds__(TEAM_THREADS, 1)
    expand_kernel(const __grid_constant__ ExpandCall call)
{
    extern __shared__ double dynamic[];
    __shared__ uint16_t triangle[LEARN_TRIANGLE(LEARN_MOST)];
    __shared__ double reciprocals[LEARN_MOST];
    const uint32_t d = call.head_dim, n = call.part, head = blockIdx.x;
    const int lane = (int)threadIdx.x % TEAM_WIDTH, stride = (int)n + 1;
    double *const inverse =
        call.shares ? dynamic
                    : static_cast<double *>(call.args.workspace) + (size_t)head * n * (n + 1);
    float *const forward = call.args.key_transform + (size_t)head * d * d,
                 *const backward = call.args.inverse_key_transform + (size_t)head * d * d;
    for (uint32_t part = 0; part < d / n; part++) {
        const uint16_t *from =
            call.args.triangles + ((size_t)head * (d / n) + part) * LEARN_TRIANGLE(n);
        TEAM_EACH (i, 0, (int)LEARN_TRIANGLE(n))
            triangle[i] = from[i];
        __syncthreads();
        learn_invert(triangle, (int)n, inverse, stride, reciprocals);
        TEAM_LINES (i, 0, (int)n) {
            const uint32_t half = n / 2, row = (uint32_t)i < half ? part * half + i
                                                                  : d / 2 + part * half + i - half;
            Row<D> x, y;
            for (int c = 0; c < Row<D>::PER_LANE; c++) {
                const int j = place_in(d, n, part, (uint32_t)(lane + 32 * c));
                x.x[c] = j < 0 || j > i ? 0
                         : j == i       ? learn_of_half(triangle[n + i])
                                        : learn_number(triangle, (int)n, i, j);
                y.x[c] = j < i ? 0 : (float)inverse[j * stride + i];
            }
            rotate<D>(x, call.rotation, lane);
            rotate<D>(y, call.rotation, lane);
            for (int c = 0; c < Row<D>::PER_LANE; c++)
                if ((uint32_t)(lane + 32 * c) < d) {
                    forward[(size_t)row * d + lane + 32 * c] = x.x[c];
                    backward[(size_t)row * d + lane + 32 * c] = y.x[c];
                }
        }
        __syncthreads();
    }
    TEAM_EACH (j, 0, (int)(call.args.center ? d : 0)) {
        double sum = 0;
        for (uint32_t i = 0; i < d; i++)
            sum += (double)forward[(size_t)i * d + j] * call.args.center[head * d + i];
        call.args.key_center[head * d + j] = (float)sum;
    }
}

} // namespace kvant

kvant_status kvant_cuda_table_expand(const kvant_cuda_expand_args *args, kvant_cuda_stream stream)
{
    using namespace kvant;
    if (!args || args->size != sizeof *args || !args->codec || args->n_kv_heads == 0 ||
        !args->triangles || !args->key_transform || !args->inverse_key_transform ||
        (args->center && !args->key_center))
        return KVANT_ERR_ARGUMENT;
    const kvant_cuda_params &params = args->codec->params;
    ExpandCall call = { *args, args->codec->any.rotation, params.head_dim,
                        kvant_key_transform_part(params.head_dim), 1 };
    if (params.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL || params.dense ||
        params.head_dim > KVANT_CUDA_MOST_DIM || call.part > LEARN_MOST || call.part % 2 != 0)
        return KVANT_ERR_UNSUPPORTED;
    const int bytes = (int)(call.part * (call.part + 1) * sizeof(double));
    return with_room(params.head_dim, [&](auto room) {
        const void *kernel = (const void *)expand_kernel<decltype(room)::value>;
        const cudaError_t error = allow_shared(kernel, bytes + 12 * 1024);
        void *parameters[] = { &call };
        call.shares = error == cudaSuccess;
        if (!call.shares && (error != cudaErrorNotSupported || !args->workspace))
            return from_cuda(error);
        return from_cuda(cudaLaunchKernel(kernel, dim3(args->n_kv_heads), dim3(TEAM_THREADS),
                                          parameters, call.shares ? bytes : 0,
                                          static_cast<cudaStream_t>(stream)));
    });
}
