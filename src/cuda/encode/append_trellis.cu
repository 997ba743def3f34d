/* append_trellis.cu - appends rows to pages of trellis codes. Also seals, as append.cu does.
 *
 * A thread block takes up to 64 tokens of one kv head and one role, a warp one row at a time. The
 * warp transforms the row as for open pages, finds its path (trellis_search.cuh), then its codes
 * and its scale. Codes of all tokens stay in shared memory as nibbles until the words of pages are
 * put together. The memory of a search decides how many warps of the thread block search. */
#include "../any/any.h"
#include "append_tokens.cuh"
#include "../launch.h"
#include "trellis_search.cuh"

namespace kvant
{

constexpr int WARPS = 8;

using TrellisAppendArgs = BookedAppendArgs<kvant_cuda_trellis>;

template <int D, int M> struct TrellisRows {
    /* What a block of 163 KB has room for besides what all share. */
    static constexpr int ROOM = 163840 - (int)(sizeof(CellCosts) + sizeof(Nibbles<D>) + sizeof(BlockTokens)) - 2048,
                         FIT = ROOM / (int)sizeof(SearchSpace<D, M>),
                         SEARCHERS = FIT < 1       ? 1
                                     : FIT < WARPS ? FIT
                                                   : WARPS;
    SearchSpace<D, M> search[SEARCHERS];
    CellCosts costs;
    TrellisLevels levels;
    Nibbles<D> nibbles;
    BlockTokens tokens;
};

/* Nibbles of a row: 16 bits hold one channel of 4 tiles. */
template <int D>
KVANT_INLINE void store_row_nibbles(uint32_t *words, const uint32_t (&codes)[Row<D>::PER_LANE], int lane)
{
    uint16_t *to = reinterpret_cast<uint16_t *>(words);
    unrolled_for (int g = 0; g < Nibbles<D>::GROUPS; g++) {
        uint32_t own = codes[2 * g];
        if (2 * g + 1 < Row<D>::PER_LANE)
            own |= codes[2 * g + 1] << 8;
        const uint32_t other = __shfl_xor_sync(FULL, own, 16);
        if (lane < 16)
            to[16 * g + lane] = (uint16_t)(own | other << 4);
    }
}

/* Codes of a transformed row into nibbles; returns the scale to store. */
template <int D, int M>
KVANT_INLINE Quantized quantize_row(TrellisRows<D, M> &rows, const AppendRole &role,
                                    const kvant_cuda_trellis &trellis, const Row<D> &y, int token, int warp,
                                    int lane)
{
    SearchSpace<D, M> &space = rows.search[warp];
    const float squares = dot_rows<D>(y, y, lane),
                norm = __fmul_rn(__fsqrt_rn(squares), role.codec.inverse_sqrt_dim), scale = to_half_and_back(norm),
                inverse = scale > 0 ? __frcp_rn(scale) : 0;
    uint32_t codes[Row<D>::PER_LANE];
    Row<D> decoded;
    int steps[Row<D>::PER_LANE];
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        steps[j] = trellis_step(role.codec.role, (int)role.codec.bits, D, lane + 32 * j);
        space.cells[steps[j]] = (uint16_t)cell_of(__fmul_rn(y.x[j], inverse));
    }
    __syncwarp();
    Search<D, M>(space, rows.costs, lane).find();
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        const uint32_t subset = subset_at(trellis, space.bits, D, steps[j]),
                       nearest = nearest_of(trellis, rows.levels, space.cells[steps[j]], subset);
        codes[j] = 2 * nearest + space.bits[steps[j]];
        decoded.x[j] = rows.levels.values[8 * nearest + subset];
    }
    store_row_nibbles<D>(rows.nibbles.words[0] + Nibbles<D>::at(token), codes, lane);
    float stored = scale;
    if (role.codec.unbiased && scale > 0) {
        const float product = dot_rows<D>(y, decoded, lane);
        stored = product > 0 ? __fdiv_rn(squares, product) : 0;
    }
    __syncwarp(); /* the memory of the search is free again */
    return Quantized{ stored, 0, norm <= 65504.0f && stored <= 65504.0f };
}

template <int D, int M>
KVANT_INLINE void encode_token(TrellisRows<D, M> &rows, const AppendArgs &args, const AppendRole &role,
                               const kvant_cuda_trellis &trellis, uint32_t first, int token, int kv_head, int warp,
                               int lane)
{
    bool finite;
    const size_t row_at = row_place(args, role, first, token, kv_head);
    const Row<D> y = transformed_row<D>(args, role, row_at, kv_head, lane, finite);
    const Quantized q = quantize_row(rows, role, trellis, y, token, warp, lane);
    if (lane != 0)
        return;
    rows.tokens.scale[token] = __half_as_ushort(__float2half_rn(q.scale));
    if (q.in_range)
        return;
    rows.tokens.slot[token] = -1;
    if (args.refused)
        atomicOr(args.refused, finite ? KVANT_CUDA_ROW_RANGE : KVANT_CUDA_ROW_NONFINITE);
}

template <int D, int M>
__global__ void __launch_bounds__(WARPS * 32, M == 8 ? 3 : 1)
    append_trellis_kernel(const __grid_constant__ TrellisAppendArgs args)
{
    extern __shared__ uint8_t raw[];
    TrellisRows<D, M> &rows = *reinterpret_cast<TrellisRows<D, M> *>(raw);
    const AppendRole &role = args.roles[blockIdx.z];
    const kvant_cuda_trellis &trellis = args.books[blockIdx.z];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    const uint32_t first = blockIdx.x * args.chunk;
    if (threadIdx.x < PAGE_TOKENS) {
        rows.tokens.slot[threadIdx.x] = slot_of(args, first);
        rows.levels.levels[threadIdx.x] = trellis.levels[threadIdx.x];
        rows.levels.values[threadIdx.x] = trellis.values[threadIdx.x];
    }
    fill_costs(rows.costs, trellis);
    __syncthreads();
    if (warp < TrellisRows<D, M>::SEARCHERS)
#pragma unroll 1
        for (int t = warp; t < (int)args.chunk; t += TrellisRows<D, M>::SEARCHERS)
            if (rows.tokens.slot[t] >= 0)
                encode_token(rows, args, role, trellis, first, t, kv_head, warp, lane);
    __syncthreads();
    write_block(
        rows.tokens, role, (int)args.chunk, kv_head,
        [&](uint32_t *page) { write_codes<D>(role.codec, rows.nibbles, rows.tokens.page_tokens, page); },
        [&](int t, int at, uint32_t *page) { write_token<D>(role.codec, rows.nibbles, t, at, page, lane); });
}

template <int D, int M>
static cudaError_t launch_with_memory(const TrellisAppendArgs &args, dim3 grid, cudaStream_t stream)
{
    constexpr int bytes = (int)sizeof(TrellisRows<D, M>);
    const void *kernel = (const void *)append_trellis_kernel<D, M>;
    const cudaError_t error = allow_shared(kernel, bytes);
    if (error != cudaSuccess)
        return error;
    append_trellis_kernel<D, M><<<grid, WARPS * 32, bytes, stream>>>(args);
    return cudaGetLastError();
}

cudaError_t launch_append_trellis(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                                  cudaStream_t stream)
{
    const auto p =
        booked<kvant_cuda_trellis>(args, n_roles, [](const kvant_cuda_codec &codec) { return codec.trellis; });
    const dim3 grid = grid_of(p, n_roles, n_kv_heads);
    cudaError_t error = with_head_dim(head_dim, [&](auto d) {
        switch (p.books[0].memory) {
        case 8: return launch_with_memory<decltype(d)::value, 8>(p, grid, stream);
        case 10: return launch_with_memory<decltype(d)::value, 10>(p, grid, stream);
        default: return launch_with_memory<decltype(d)::value, 12>(p, grid, stream);
        }
    });
    for (int i = 0; error == cudaErrorNotSupported && i < n_roles; i++) { /* too little shared memory */
        AppendArgs one = args;
        one.roles[0] = args.roles[i];
        const cudaError_t launched = launch_append_any(one, n_kv_heads, stream);
        if (launched != cudaSuccess || i + 1 == n_roles)
            return launched;
    }
    return error;
}

} // namespace kvant
