/* general.cu - encodes rows into pages of the general form (general_encode.h), and copies their
 * tables to GPUs. A warp encodes a row. A thread block encodes a page when 64 rows, or a group of
 * tokens, have to be encoded together. */
#include "any.h"
#include "append_rows.cuh"
#include "general_encode.h"

#include "../checks.h"
#include "../launch.h"

#include <mutex>

namespace kvant
{

constexpr int WARPS = 4;

/* The memory of a warp. */
template <int P> struct GeneralSpace {
    alignas(16) float y[P], a[P], b[P], sums[16];
    uint32_t codes[P];

    KVANT_INLINE general_space view()
    {
        return general_space{ y, a, b, codes, sums };
    }
};

__device__ __noinline__ bool encode_row(const kvant_general *g, const general_space *s, int token,
                                        uint8_t *page, int lane, int kv_head)
{
    return general_encode(general_team{ lane, 32, kv_head }, g, s, token, page);
}

__device__ __noinline__ void encode_tiers(const kvant_general *g, const general_space *s, int token,
                                          uint8_t *page, int lane)
{
    general_encode_tiers(general_team{ lane, 32, 0 }, g, s, token, page);
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

/* The page of a block and the tokens that were written to it. Other tokens count as copies of their
 * group's first token. */
struct OpenRows {
    const uint16_t *rows;
    uint8_t *page;
    int n_tokens, d;

    KVANT_INLINE general_run channel(int channel, int first) const
    {
        return general_run{ nullptr, rows + (size_t)first * d + channel, d, n_tokens - first };
    }
};

KVANT_INLINE OpenRows open_rows(const AnyAppendArgs &args)
{
    const AppendRole &role = args.roles[0];
    const int64_t from = args.from[blockIdx.x], to = args.to[blockIdx.x];
    const int n_tokens = args.tokens ? min(args.tokens[blockIdx.x], PAGE_TOKENS) : PAGE_TOKENS;
    return OpenRows{ static_cast<const uint16_t *>(role.rows) + from * role.row_block_stride +
                         blockIdx.y * role.row_head_stride,
                     role.base + to * role.block_stride + blockIdx.y * role.head_stride,
                     from < 0 || to < 0 ? 0 : n_tokens, (int)role.codec.head_dim };
}

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

template <int P>
__global__ void __launch_bounds__(WARPS * 32)
    seal_tiers_kernel(const __grid_constant__ AnyAppendArgs args)
{
    __shared__ GeneralSpace<P> spaces[WARPS];
    __shared__ float energy[P];
    __shared__ uint32_t mask[P / 32];
    const kvant_general &g = args.codec.general;
    const OpenRows open = open_rows(args);
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    if (open.n_tokens <= 0)
        return;
    for (int j = threadIdx.x; j < open.d; j += WARPS * 32) {
        const general_run numbers = open.channel(j, 0);
        energy[j] = general_energy(&numbers);
        mask[j / 32] = 0;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < open.d; j += WARPS * 32)
        if (general_is_outlier(&g, energy, j))
            atomicOr(&mask[j / 32], 1u << j % 32);
    __syncthreads();
    if ((int)threadIdx.x < (open.d + 31) / 32)
        reinterpret_cast<uint32_t *>(open.page + g.view.tiers.mask)[threadIdx.x] =
            mask[threadIdx.x];
    __syncthreads();
    const general_space s = spaces[warp].view();
    for (int t = warp; t < PAGE_TOKENS; t += WARPS) {
        Row<P> row = load_any<P>(open.rows, (size_t)(t < open.n_tokens ? t : 0) * open.d,
                                 KVANT_CUDA_F16, open.d, lane);
        share_row(row, s.y, lane);
        encode_tiers(&g, &s, t, open.page, lane);
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
    const bool groups = codec.grouping == KVANT_CUDA_GROUP_TOKENS,
               tiers = p.codec.general.view.kind == KVANT_GENERAL_TIERS;
    const dim3 pages(args.n_tokens / PAGE_TOKENS, n_kv_heads),
        rows((args.n_tokens + WARPS - 1) / WARPS, n_kv_heads);
    with_room(codec.head_dim, [&](auto room) {
        constexpr int P = decltype(room)::value;
        if (!groups)
            append_general_kernel<P><<<rows, WARPS * 32, 0, stream>>>(p);
        else if (tiers)
            seal_tiers_kernel<P><<<pages, WARPS * 32, 0, stream>>>(p);
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
