/* attention.cu - chooses the kernel of any/ for a problem, and launches it. */
#include "any.h"
#include "block.cuh"

#include "../checks.h"
#include "../launch.h"

#if KVANT_PAPERS
#include "../papers/direct.h"
#endif

#include <algorithm>
#include <climits>

namespace kvant
{

/* A kernel and its blocks: query rows, the most and the fewest warps, and the warps that shared
 * memory has room for. */
struct AnyKernel {
    const void *kernel;
    int rows, warps, least_warps;
};

template <class F>
static kvant_status launch(const AnyKernel &with, AnyAttentionArgs &p, F &&bytes_of,
                           int multiprocessors, int shared_bytes, cudaStream_t stream)
{
    int warps = with.warps, bytes;
    while ((bytes = bytes_of(warps)) > shared_bytes && warps > with.least_warps)
        warps /= 2;
    const int64_t all = (int64_t)p.query_tokens * p.heads_a_kv,
                  tiles = (all + with.rows - 1) / with.rows, items = tiles * p.batch * p.kv_heads;
    p.tiles = (int)tiles;
    p.splits = (int)std::max<int64_t>(
        std::min<int64_t>(AnyShape<1>::BLOCKS * multiprocessors / items,
                          p.max_tokens / (warps / with.least_warps * PAGE_TOKENS)),
        1);
    if (items * p.splits > INT_MAX || bytes > shared_bytes)
        return KVANT_ERR_UNSUPPORTED;
    const cudaError_t error = allow_shared(with.kernel, bytes);
    if (error != cudaSuccess)
        return from_cuda(error);
    void *parameters[] = { &p };
    return from_cuda(cudaLaunchKernel(with.kernel, dim3((unsigned)(items * p.splits)),
                                      dim3(warps * 32), parameters, bytes, stream));
}

/* Tile kernels read such codes number by number. */
static bool has_no_unpacker(const kvant_cuda_params &codec)
{
    return codec.codes == KVANT_CUDA_CODES_UNIFORM ? codec.bits > 4 && codec.bits < 8
                                                   : codec.kind == KVANT_CUDA_CODEBOOK_WIDE;
}

bool prefers_any(const kvant_cuda_kernel_attention_args &args, uint32_t rows)
{
    const bool plain = (decoders_for(*args.k_codec) | decoders_for(*args.v_codec)) == PLAIN,
               wide =
                   has_no_unpacker(args.k_codec->params) || has_no_unpacker(args.v_codec->params);
    return plain && rows <= (wide ? KVANT_CUDA_SCRATCH_ROWS : AnyShape<2>::ROWS);
}

using KernelOf = const void *(*)(bool many);

static KernelOf kernel_for(unsigned decoders)
{
    switch (decoders) {
    case PLAIN: return any_kernel<PLAIN>;
    case GROUPS: return any_kernel<GROUPS>;
    case TRELLISES: return any_kernel<TRELLISES>;
#if KVANT_PAPERS
    case CHUNKS: return any_kernel<CHUNKS>;
#endif
    default: return any_kernel<ALL_DECODERS>;
    }
}

static kvant_status launch_rows(AnyAttentionArgs &p, bool many, int multiprocessors,
                                int shared_bytes, cudaStream_t stream)
{
    const int rows = many ? AnyShape<2>::ROWS : AnyShape<1>::ROWS;
    const AnyKernel kernel{ kernel_for(decoders_for(p.keys) | decoders_for(p.values))(many), rows,
                            MOST_WARPS, team_of((int)p.keys.params.head_dim) };
    const auto bytes_of = [&](int warps) { return AnyPlaces(p.keys, p.values, rows, warps).end; };
    return launch(kernel, p, bytes_of, multiprocessors, shared_bytes, stream);
}

kvant_status launch_attention_any(const kvant_cuda_kernel_attention_args &args,
                                  const AttentionArgs &common, int multiprocessors,
                                  int shared_bytes, cudaStream_t stream)
{
    AnyAttentionArgs p{};
    static_cast<AttentionArgs &>(p) = common;
    p.keys = *args.k_codec;
    p.values = *args.v_codec;
#if KVANT_PAPERS
    const DirectKernel direct = direct_for(p);
    if (direct.kernel)
        return launch(
            { direct.kernel, DIRECT_ROWS, DIRECT_WARPS, 1 }, p,
            [&](int warps) { return direct.shared_bytes(p.k.bytes, p.v.bytes, warps); },
            multiprocessors, shared_bytes, stream);
#endif
    /* a block has 16 rows if there are more than 8 and shared memory has room for them */
    kvant_status status = KVANT_ERR_UNSUPPORTED;
    if ((int64_t)p.query_tokens * p.heads_a_kv > AnyShape<1>::ROWS)
        status = launch_rows(p, true, multiprocessors, shared_bytes, stream);
    return status == KVANT_ERR_UNSUPPORTED
               ? launch_rows(p, false, multiprocessors, shared_bytes, stream)
               : status;
}

} // namespace kvant
