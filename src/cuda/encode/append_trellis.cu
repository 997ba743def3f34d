/* append_trellis.cu - appends rows to pages of trellis codes. Also seals, as append.cu does.
 *
 * A thread block processes up to 64 tokens of one kv head and one role; a warp processes one row at
 * a time. The warp transforms the row as for open pages and finds its path (trellis_registers.cuh;
 * trellis_search.cuh for more than 256 states). Then it finds the row's codes and scale. If keys
 * have a matrix, the whole block multiplies them. With few tokens a warp writes its row's words at
 * once. Otherwise codes stay in shared memory as nibbles until the words of pages are put together.
 * The memory of a search limits the number of warps that search. */
#include "../any/any.h"
#include "append_tokens.cuh"
#include "../launch.h"
#include "token_words.cuh"
#include "trellis_registers.cuh"

#include <algorithm>

namespace kvant
{

constexpr int WARPS = 8;

using TrellisAppendArgs = BookedAppendArgs<kvant_cuda_trellis>;

/* The memory of a warp and of a block for searches among many states. */
template <int D, int M> struct RowSpace {
    SearchSpace<D, M> search;
    struct Shared {
        CellCosts costs;
    };

    KVANT_INLINE static void prepare(Shared &shared, const TrellisLevels &levels,
                                     const kvant_cuda_trellis &trellis)
    {
        fill_costs(shared.costs, levels, trellis);
        __syncthreads();
    }

    /* find_path fills these. */
    KVANT_INLINE void read(const kvant_cuda_trellis &trellis, int step, uint32_t &bit,
                           uint32_t &subset) const
    {
        bit = search.bits[step];
        subset = subset_at(trellis, search.bits, D, step);
    }

    KVANT_INLINE void find_path(const Shared &shared, const TrellisLevels &,
                                const kvant_cuda_trellis &, const int (&cells)[Row<D>::PER_LANE],
                                const int (&steps)[Row<D>::PER_LANE], int lane)
    {
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            search.cells[steps[j]] = (uint16_t)cells[j];
        __syncwarp();
        Search<D, M>(search, shared.costs.at, lane).find();
    }
};

template <int D> struct RowSpace<D, 8> {
    PlaceSpace<D> search;
    struct Shared {
    };

    KVANT_INLINE static void prepare(Shared &, const TrellisLevels &, const kvant_cuda_trellis &)
    {
    }

    KVANT_INLINE void read(const kvant_cuda_trellis &, int step, uint32_t &bit,
                           uint32_t &subset) const
    {
        search.read(step, bit, subset);
    }

    KVANT_INLINE void find_path(const Shared &, const TrellisLevels &levels,
                                const kvant_cuda_trellis &trellis,
                                const int (&cells)[Row<D>::PER_LANE],
                                const int (&steps)[Row<D>::PER_LANE], int lane)
    {
        constexpr int N = Row<D>::PER_LANE, AT_ONCE = N < 4 ? N : 4;
        unrolled_for (int first = 0; first < N; first += AT_ONCE) {
            int some[AT_ONCE];
            unrolled_for (int j = 0; j < AT_ONCE; j++)
                some[j] = cells[first + j];
            costs_of_cells(levels, trellis, some,
                           [&](int j, const CostWords &words, uint32_t most) {
                               search.costs[steps[first + j]] = words;
                               search.most[steps[first + j]] = (uint16_t)most;
                           });
        }
        __syncwarp();
        PlaceSearch<D>(search, lane).find();
    }
};

template <int D, int M> struct TrellisRows {
    using Space = RowSpace<D, M>;
    /* Shared memory of a block of 160 KB that is left for searches; of 113 KB where two blocks
     * search faster. */
    static constexpr int ROOM = (M == 10 ? 113 : 160) * 1024 -
                                (int)(sizeof(typename Space::Shared) + sizeof(Nibbles<D>) +
                                      sizeof(BlockTokens)) -
                                2048,
                         FIT = ROOM / (int)sizeof(Space),
                         SEARCHERS = FIT < 1       ? 1
                                     : FIT < WARPS ? FIT
                                                   : WARPS;
    Space space[SEARCHERS];
    typename Space::Shared shared;
    TrellisLevels levels;
    Nibbles<D> nibbles;
    BlockTokens tokens;

    KVANT_INLINE float *row_of(int warp) /* it lies in the memory of the warp's search */
    {
        return reinterpret_cast<float *>(&space[warp]);
    }
};

/* Multiplies the rows of all warps that search with a matrix, like combine_rows. */
template <int D, int M>
KVANT_INLINE void multiply_rows(TrellisRows<D, M> &rows, Row<D> &row, const float *key_transform,
                                int warp, int lane)
{
    constexpr int N = TrellisRows<D, M>::SEARCHERS, TEAMS = WARPS * 32 / D,
                  A_THREAD = (N + TEAMS - 1) / TEAMS;
    const int team = threadIdx.x / D, channel = threadIdx.x % D;
    float y[A_THREAD] = {};
    if (warp < N)
        row.each(lane, [&](float &x, int at) { rows.row_of(warp)[at] = x; });
    __syncthreads();
    if (team < TEAMS)
#pragma unroll 8
        for (int i = 0; i < D; i += 4) {
            float weight[4];
            unrolled_for (int k = 0; k < 4; k++)
                weight[k] = key_transform[(size_t)(i + k) * D + channel];
            unrolled_for (int q = 0; q < A_THREAD; q++) {
                const float4 x = *reinterpret_cast<const float4 *>(
                    rows.row_of(min(team + TEAMS * q, N - 1)) + i);
                y[q] = __fadd_rn(y[q], __fmul_rn(x.x, weight[0]));
                y[q] = __fadd_rn(y[q], __fmul_rn(x.y, weight[1]));
                y[q] = __fadd_rn(y[q], __fmul_rn(x.z, weight[2]));
                y[q] = __fadd_rn(y[q], __fmul_rn(x.w, weight[3]));
            }
        }
    __syncthreads();
    unrolled_for (int q = 0; q < A_THREAD; q++)
        if (team < TEAMS && team + TEAMS * q < N)
            rows.row_of(team + TEAMS * q)[channel] = y[q];
    __syncthreads();
    if (warp < N)
        row.each(lane, [&](float &x, int at) { x = rows.row_of(warp)[at]; });
    __syncwarp();
}

/* Writes the nibbles of a row: 16 bits hold one channel of 4 tiles. */
template <int D>
KVANT_INLINE void store_row_nibbles(uint32_t *words, const uint32_t (&codes)[Row<D>::PER_LANE],
                                    int lane)
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

/* Finds the codes of a transformed row, and the scale to store. */
template <int D, int M>
KVANT_INLINE Quantized quantize_row(TrellisRows<D, M> &rows, const AppendRole &role,
                                    const kvant_cuda_trellis &trellis, const Row<D> &y,
                                    uint32_t (&codes)[Row<D>::PER_LANE], int warp, int lane)
{
    typename TrellisRows<D, M>::Space &space = rows.space[warp];
    const float squares = dot_rows<D>(y, y, lane),
                norm = __fmul_rn(__fsqrt_rn(squares), role.codec.inverse_sqrt_dim),
                scale = to_half_and_back(norm), inverse = scale > 0 ? __frcp_rn(scale) : 0;
    Row<D> decoded;
    int steps[Row<D>::PER_LANE], cells[Row<D>::PER_LANE];
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        steps[j] = trellis_step(role.codec.role, (int)role.codec.bits, D, lane + 32 * j);
        cells[j] = cell_of(__fmul_rn(y.x[j], inverse));
    }
    space.find_path(rows.shared, rows.levels, trellis, cells, steps, lane);
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        uint32_t bit, subset;
        space.read(trellis, steps[j], bit, subset);
        const uint32_t nearest = nearest_of(trellis, rows.levels, cells[j], subset);
        codes[j] = 2 * nearest + bit;
        decoded.x[j] = rows.levels.values[8 * nearest + subset];
    }
    float stored = scale;
    if (role.codec.unbiased && scale > 0) {
        const float product = dot_rows<D>(y, decoded, lane);
        stored = product > 0 ? __fdiv_rn(squares, product) : 0;
    }
    __syncwarp(); /* the memory of the search is free again */
    return Quantized{ stored, 0, norm <= 65504.0f && stored <= 65504.0f };
}

/* Writes a token at once, by a warp. */
template <int D>
KVANT_INLINE void put_token(const AppendRole &role, const BlockTokens &tokens, int token,
                            const uint32_t (&codes)[Row<D>::PER_LANE], float scale, int kv_head,
                            int lane)
{
    const int at = (int)(tokens.slot[token] % PAGE_TOKENS);
    uint8_t *page = page_of(role, tokens, token, kv_head);
    if (lane == 0)
        reinterpret_cast<uint16_t *>(page + role.codec.metadata_offset)[at] =
            __half_as_ushort(__float2half_rn(scale));
    uint32_t *words = reinterpret_cast<uint32_t *>(page);
    if (role.codec.role == KVANT_ROLE_K)
        TokenWords<D, true>(at, lane).put(words, codes, role.codec.bits);
    else
        TokenWords<D, false>(at, lane).put(words, codes, role.codec.bits);
}

/* Loads a token's row, before the transform. */
template <int D>
KVANT_INLINE Row<D> centered_row(const AppendArgs &args, const AppendRole &role, size_t row_at,
                                 int kv_head, int lane, bool &finite)
{
    Row<D> row = load_row<D>(role.rows, row_at, args.type, lane);
    finite = true;
    row.each(lane, [&](float &x, int channel) {
        x = centered(x, role, kv_head * D + channel);
        finite &= is_finite(x);
    });
    finite = __all_sync(FULL, finite);
    return row;
}

/* Encodes the block's tokens from t on, one for each warp that searches. */
template <int D, int M>
KVANT_INLINE void encode_tokens(TrellisRows<D, M> &rows, const AppendArgs &args,
                                const AppendRole &role, const kvant_cuda_trellis &trellis,
                                uint32_t first, int t, int kv_head, int warp, int lane)
{
    const int token = t + warp;
    const bool there = warp < TrellisRows<D, M>::SEARCHERS && token < (int)args.chunk &&
                       rows.tokens.slot[token] >= 0;
    const float *key_transform = key_transform_of(role.codec, role.key_transform, kv_head);
    bool finite = true;
    Row<D> y{};
    if (there)
        y = centered_row<D>(args, role, row_place(args, role, first, token, kv_head), kv_head, lane,
                            finite);
    if (role.codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL)
        multiply_rows(rows, y, key_transform, warp, lane);
    else if (there)
        transform(y, role.codec, key_transform, lane);
    if (!there)
        return;
    uint32_t codes[Row<D>::PER_LANE];
    const Quantized q = quantize_row(rows, role, trellis, y, codes, warp, lane);
    if (!q.in_range) {
        if (lane == 0) {
            note_refusal(args, first + token, rows.tokens.slot[token], finite);
            rows.tokens.slot[token] = -1;
        }
    } else if (args.chunk <= WARPS) {
        put_token<D>(role, rows.tokens, token, codes, q.scale, kv_head, lane);
    } else {
        store_row_nibbles<D>(rows.nibbles.words[0] + Nibbles<D>::at(token), codes, lane);
        if (lane == 0)
            rows.tokens.scale[token] = __half_as_ushort(__float2half_rn(q.scale));
    }
}

template <int D, int M>
__global__ void __launch_bounds__(WARPS * 32, M == 8 ? 2 : 1)
    append_trellis_kernel(const __grid_constant__ TrellisAppendArgs args)
{
    extern __shared__ __align__(16) uint8_t raw[];
    TrellisRows<D, M> &rows = *reinterpret_cast<TrellisRows<D, M> *>(raw);
    const AppendRole &role = args.roles[blockIdx.z];
    const kvant_cuda_trellis &trellis = args.books[blockIdx.z];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    const uint32_t first = blockIdx.x * args.chunk;
    rows.levels.load(trellis);
    wait_for_prior();
    if (threadIdx.x < PAGE_TOKENS)
        rows.tokens.slot[threadIdx.x] = slot_of(args, first);
    __syncthreads();
    TrellisRows<D, M>::Space::prepare(rows.shared, rows.levels, trellis);
#pragma unroll 1
    for (int t = 0; t < (int)args.chunk; t += TrellisRows<D, M>::SEARCHERS)
        encode_tokens(rows, args, role, trellis, first, t, kv_head, warp, lane);
    if (args.chunk <= WARPS)
        return;
    __syncthreads();
    write_block(
        rows.tokens, role, (int)args.chunk, kv_head,
        [&](uint32_t *page) {
            write_codes<D>(role.codec, rows.nibbles, rows.tokens.page_tokens, page);
        },
        [&](int t, int at, uint32_t *page) {
            write_token<D>(role.codec, rows.nibbles, t, at, page, lane);
        });
}

/* Tokens per thread block. Few rows are spread over a GPU's multiprocessors, about 132, so that no
 * row waits for another. */
template <int D, int M> static uint32_t chunk_of(const TrellisAppendArgs &args, uint32_t n_rows)
{
    constexpr uint32_t MULTIPROCESSORS = 132, SEARCHERS = TrellisRows<D, M>::SEARCHERS;
    return args.chunk > WARPS
               ? args.chunk
               : std::min(SEARCHERS, (n_rows + MULTIPROCESSORS - 1) / MULTIPROCESSORS);
}

template <int D, int M>
static cudaError_t launch_with_memory(const TrellisAppendArgs &args, int n_roles, int n_kv_heads,
                                      cudaStream_t stream)
{
    constexpr int bytes = (int)sizeof(TrellisRows<D, M>);
    const void *kernel = (const void *)append_trellis_kernel<D, M>;
    const cudaError_t error = allow_shared(kernel, bytes);
    if (error != cudaSuccess)
        return error;
    TrellisAppendArgs p = args;
    p.chunk = chunk_of<D, M>(args, args.n_tokens * n_roles * n_kv_heads);
    void *parameters[] = { &p };
    return launch_early(kernel, grid_of(p, n_roles, n_kv_heads), WARPS * 32, parameters, bytes,
                        stream);
}

cudaError_t launch_append_trellis(const AppendArgs &args, uint32_t head_dim, int n_roles,
                                  int n_kv_heads, cudaStream_t stream)
{
    const auto p = booked<kvant_cuda_trellis>(
        args, n_roles, [](const kvant_cuda_codec &codec) { return codec.trellis; });
    cudaError_t error = with_head_dim(head_dim, [&](auto d) {
        switch (p.books[0].memory) {
        case 8: return launch_with_memory<decltype(d)::value, 8>(p, n_roles, n_kv_heads, stream);
        case 10: return launch_with_memory<decltype(d)::value, 10>(p, n_roles, n_kv_heads, stream);
        default: return launch_with_memory<decltype(d)::value, 12>(p, n_roles, n_kv_heads, stream);
        }
    });
    for (int i = 0; error == cudaErrorNotSupported && i < n_roles;
         i++) { /* not enough shared memory */
        AppendArgs one = args;
        one.roles[0] = args.roles[i];
        const cudaError_t launched = launch_append_any(one, n_kv_heads, stream);
        if (launched != cudaSuccess || i + 1 == n_roles)
            return launched;
    }
    return error;
}

} // namespace kvant
