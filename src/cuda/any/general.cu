/* general.cu - encodes rows into pages of the general form (general_encode.h), and copies their
 * tables to GPUs. A warp encodes a row. A thread block encodes a page when 64 rows, or a group of
 * tokens, have to be encoded together. */
#include "any.h"
#include "general_space.cuh"

#include "../checks.h"
#include "../launch.h"

#if KVANT_PAPERS
#include "../papers/seal_pages.cuh"
#endif

#include <mutex>

namespace kvant
{

__device__ __noinline__ bool encode_row(const kvant_general *g, const general_space *s, int token,
                                        uint8_t *page, int lane, int kv_head)
{
    return general_encode(general_team{ lane, 32, kv_head }, g, s, token, page);
}

template <int P>
__global__ void __launch_bounds__(WARPS * 32)
    append_general_kernel(const __grid_constant__ AnyAppendArgs args)
{
    __shared__ GeneralSpace<P> spaces[WARPS];
    const AppendRole &role = args.roles[0];
    const int lane = threadIdx.x & 31, kv_head = blockIdx.y, d = (int)role.codec.head_dim;
    const uint32_t token = blockIdx.x * WARPS + threadIdx.x / 32;
    const int64_t slot = slot_at(args, token);
    if (slot < 0)
        return;
    GeneralSpace<P> &space = spaces[threadIdx.x / 32];
    bool finite, still = true;
    Row<P> row = load_transformed<P>(args, token, kv_head, space.y, lane, finite);
    each_of(row, d, lane, [&](float x, int) { still &= is_finite(x); });
    share_row(row, space.y, lane);
    const general_space s = space.view();
    uint8_t *page =
        role.base + (size_t)page_number(slot) * role.block_stride + kv_head * role.head_stride;
    if (__all_sync(FULL, still) &&
        encode_row(&args.codec.general, &s, (int)(slot % PAGE_TOKENS), page, lane, kv_head))
        return;
    if (lane == 0)
        note_refusal(args, token, slot, finite);
}

/* ---- pages ---- */

__global__ void __launch_bounds__(WARPS * 32)
    seal_groups_kernel(const __grid_constant__ AnyAppendArgs args)
{
    const OpenRows open = open_rows(args);
    const int group = (int)args.codec.general.view.uniform.group;
    for (int i = threadIdx.x; i / open.d * group < open.n_tokens; i += WARPS * 32) {
        const general_run numbers = open.channel(i % open.d, i / open.d * group);
        general_encode_tokens(&args.codec.general, &numbers, i / open.d * group, i % open.d,
                              open.page);
    }
}

kvant_status launch_general(const AppendArgs &args, int n_kv_heads, cudaStream_t stream)
{
    AnyAppendArgs p{};
    static_cast<AppendArgs &>(p) = args;
    const kvant_status status =
        kvant_cuda_codec_with_tables(args.roles[0].source, args.roles[0].centroids, &p.codec);
    if (status != KVANT_OK)
        return status;
    const kvant_cuda_params &codec = p.codec.params;
    const bool groups = codec.grouping == KVANT_CUDA_GROUP_TOKENS;
    const dim3 pages(args.n_tokens / PAGE_TOKENS, n_kv_heads),
        rows((args.n_tokens + WARPS - 1) / WARPS, n_kv_heads);
    with_room(codec.head_dim, [&](auto room) {
        constexpr int P = decltype(room)::value;
        if (!groups)
            append_general_kernel<P><<<rows, WARPS * 32, 0, stream>>>(p);
#if KVANT_PAPERS
        else if (p.codec.general.view.kind == KVANT_GENERAL_TIERS)
            seal_tiers_kernel<P><<<pages, WARPS * 32, 0, stream>>>(p);
        else if (p.codec.general.view.chunks.pool)
            seal_pools_kernel<P><<<pages, WARPS * 32, 0, stream>>>(p);
#endif
        else
            seal_groups_kernel<<<pages, WARPS * 32, 0, stream>>>(p);
        return 0;
    });
    return from_cuda(cudaGetLastError());
}

} // namespace kvant

/* ---- tables ---- */

static cudaError_t copy_tables(void **to, const kvant_cuda_tables_of &tables)
{
    cudaError_t error = cudaMalloc(to, tables.bytes);
    if (error == cudaSuccess)
        error = cudaMemcpy(*to, tables.host, tables.bytes, cudaMemcpyHostToDevice);
    /* so that streams that do not wait for the default stream find the tables, too */
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(cudaStreamLegacy);
    if (error == cudaSuccess)
        return error;
    cudaFree(*to);
    *to = nullptr;
    return error;
}

kvant_status kvant_cuda_codec_with_tables(const kvant_cuda_codec *codec, const float *centroids,
                                          kvant_cuda_codec *placed)
{
    static std::mutex mutex;
    kvant_cuda_tables_of *tables = codec->tables;
    *placed = *codec;
    if ((codec->general.head_stride != 0) != (centroids != nullptr))
        return KVANT_ERR_ARGUMENT;
    placed->general.tables = centroids;
    if (!tables || tables->bytes == 0)
        return KVANT_OK;
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess || device >= KVANT_CUDA_MOST_DEVICES)
        return error == cudaSuccess ? KVANT_ERR_UNSUPPORTED : kvant::from_cuda(error);
    const std::lock_guard<std::mutex> lock(mutex);
    if (!tables->device[device])
        error = copy_tables(&tables->device[device], *tables);
    placed->general.tables = static_cast<const float *>(tables->device[device]);
    return kvant::from_cuda(error);
}

void kvant_cuda_tables_free(kvant_cuda_tables_of *tables)
{
    for (int i = 0; tables && i < KVANT_CUDA_MOST_DEVICES; i++)
        if (tables->device[i])
            cudaFree(tables->device[i]);
}
