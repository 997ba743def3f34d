/* attention.cu - chooses the kernel of any/ for a problem, and launches it. */
#include "any.h"
#include "block.cuh"

#include "../checks.h"
#include "../launch.h"

#include <algorithm>
#include <climits>

namespace kvant
{

/* rows: of queries, of a thread block. */
static kvant_status launch(const void *kernel, int rows, AnyAttentionArgs &p, int multiprocessors, int shared_bytes, cudaStream_t stream)
{
    const int team = team_of((int)p.keys.params.head_dim);
    int warps = MOST_WARPS, bytes;
    while ((bytes = AnyPlaces(p.keys, p.values, rows, warps).end) > shared_bytes && warps > team)
        warps /= 2;
    const int64_t all = (int64_t)p.query_tokens * p.heads_a_kv, tiles = (all + rows - 1) / rows,
                  items = tiles * p.batch * p.kv_heads;
    p.tiles = (int)tiles;
    p.splits = (int)std::max<int64_t>(std::min<int64_t>(AnyShape<1>::BLOCKS * multiprocessors / items, p.max_tokens / (warps / team * PAGE_TOKENS)), 1);
    if (items * p.splits > INT_MAX || bytes > shared_bytes)
        return KVANT_ERR_UNSUPPORTED;
    const cudaError_t error = allow_shared(kernel, bytes);
    if (error != cudaSuccess)
        return from_cuda(error);
    void *parameters[] = { &p };
    return from_cuda(cudaLaunchKernel(kernel, dim3((unsigned)(items * p.splits)), dim3(warps * 32), parameters, bytes, stream));
}

/* Tile kernels read such codes number by number. */
static bool has_no_unpacker(const kvant_cuda_params &codec)
{
    return codec.codes == KVANT_CUDA_CODES_UNIFORM ? codec.bits > 4 && codec.bits < 8 : codec.kind == KVANT_CUDA_CODEBOOK_WIDE;
}

bool prefers_any(const kvant_cuda_attention_args &args, uint32_t rows)
{
    const bool plain = (decoders_for(*args.k_codec) | decoders_for(*args.v_codec)) == PLAIN,
               wide = has_no_unpacker(args.k_codec->params) || has_no_unpacker(args.v_codec->params);
    return plain && rows <= (wide ? KVANT_CUDA_SCRATCH_ROWS : AnyShape<2>::ROWS);
}

using KernelOf = const void *(*)(bool many);

static KernelOf kernel_for(unsigned decoders)
{
    switch (decoders) {
    case PLAIN: return any_kernel<PLAIN>;
    case GROUPS: return any_kernel<GROUPS>;
    case TRELLISES: return any_kernel<TRELLISES>;
    case CHUNKS: return any_kernel<CHUNKS>;
    default: return any_kernel<ALL_DECODERS>;
    }
}

kvant_status launch_attention_any(const kvant_cuda_attention_args &args, const AttentionArgs &common,
                                  int multiprocessors, int shared_bytes, cudaStream_t stream)
{
    AnyAttentionArgs p{};
    static_cast<AttentionArgs &>(p) = common;
    p.keys = *args.k_codec;
    p.values = *args.v_codec;
    const unsigned decoders = decoders_for(p.keys) | decoders_for(p.values);
    const bool many = (int64_t)p.query_tokens * p.heads_a_kv > AnyShape<1>::ROWS;
    return launch(kernel_for(decoders)(many), many ? AnyShape<2>::ROWS : AnyShape<1>::ROWS, p, multiprocessors, shared_bytes, stream);
}

} // namespace kvant
