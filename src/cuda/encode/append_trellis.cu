/* append_trellis.cu - appends rows to pages of trellis codes. Also seals, as append.cu does.
 *
 * A thread block processes up to 64 tokens of one kv head and one role at a time, and a warp
 * searches the paths of up to four rows at once (trellis_search.cuh). A warp transforms its rows,
 * or the whole block multiplies them with the matrix of the keys. With few tokens a warp writes its
 * row's words at once. Otherwise codes stay in shared memory as nibbles until the words of pages
 * are put together. */
#include "../any/any.h"
#include "../launch.h"
#include "append_tokens.cuh"
#include "token_words.cuh"
#include "trellis_search.cuh"

#include <algorithm>

namespace kvant
{

constexpr int WARPS = 8, THREADS = 32 * WARPS;

/* A thread block takes every gridDim.x-th item: a chunk of tokens of one role and kv head. */
struct TrellisAppendArgs : BookedAppendArgs<kvant_cuda_trellis> {
    uint32_t n_kv_heads, items_of_role, n_items;
};

template <int D> struct TrellisRows {
    /* SEARCHERS: warps that search. With long rows there is no memory for more. */
    static constexpr int ROWS = 4, SEARCHERS = D <= 128 ? WARPS : WARPS / 2,
                         AT_ONCE = ROWS * SEARCHERS;
    using Space = PathSpace<D, ROWS>;
    Space space[SEARCHERS];
    CellTable table;
    alignas(16) float y[AT_ONCE][D]; /* transformed rows */
    BlockTokens tokens;
    Nibbles<D> nibbles; /* has to be last: its second plane has no memory */

    static constexpr int BYTES = (int)(offsetof(TrellisRows, nibbles) + sizeof(Nibbles<D>) / 2);
};

/* An item on its way through a block, and the lane's places in it. */
template <int D> struct TrellisItem {
    using R = TrellisRows<D>;
    static constexpr int N = Row<D>::PER_LANE;
    R &rows;
    const TrellisAppendArgs &args;
    const AppendRole &role;
    uint32_t first;
    int kv_head, warp, lane;
    /* the positions of the lane's channels in costs; `again`: of the same steps before step 0 */
    int position[N], again[N];

    KVANT_INLINE TrellisItem(R &rows_, const TrellisAppendArgs &args_, uint32_t item)
        : rows(rows_), args(args_), role(args_.roles[item / args_.items_of_role]),
          first(item % args_.items_of_role / args_.n_kv_heads * args_.chunk),
          kv_head((int)(item % args_.items_of_role % args_.n_kv_heads)), warp(threadIdx.x >> 5),
          lane(threadIdx.x & 31)
    {
        unrolled_for (int j = 0; j < N; j++) {
            const int step = trellis_step(role.codec.role, (int)role.codec.bits, D, lane + 32 * j);
            position[j] = R::Space::position_of(step);
            again[j] = step < D - WARM_UP ? position[j] : R::Space::position_of(step - D);
        }
    }

    /* Loads a token's row, and transforms it unless keys have a matrix. */
    KVANT_INLINE Row<D> load(int token, const float *key_transform, bool &finite) const
    {
        Row<D> row =
            load_row<D>(role.rows, row_place(args, role, first, token, kv_head), args.type, lane);
        finite = true;
        row.each(lane, [&](float &x, int channel) {
            x = centered(x, role, kv_head * D + channel);
            finite &= is_finite(x);
        });
        finite = __all_sync(FULL, finite);
        if (role.codec.key_transform_kind != KVANT_CUDA_TRANSFORM_FULL)
            transform(row, role.codec, key_transform, lane);
        return row;
    }

    KVANT_INLINE Row<D> kept_row(int at) const
    {
        Row<D> row;
        row.each(lane, [&](float &x, int channel) { x = rows.y[at][channel]; });
        return row;
    }

    /* Loads rows at .. at + n - 1 of the tokens from t on. Returns a bit for each row that is
     * there, and in the upper half for each row that is finite. */
    KVANT_INLINE uint32_t load_rows(int t, int at, int n, const float *key_transform) const
    {
        uint32_t there = 0;
#pragma unroll 1
        for (int r = 0; r < n; r++) {
            const int token = t + at + r;
            Row<D> y{};
            if (token < (int)args.chunk && rows.tokens.slot[token] >= 0) {
                bool finite;
                y = load(token, key_transform, finite);
                there |= (finite ? 0x10001u : 1u) << r;
            }
            y.each(lane, [&](float &x, int channel) { rows.y[at + r][channel] = x; });
        }
        __syncwarp();
        return there;
    }

    struct Scale {
        float norm, stored, inverse;
    };

    KVANT_INLINE Scale scale_of(float squares) const
    {
        const float norm = __fmul_rn(__fsqrt_rn(squares), role.codec.inverse_sqrt_dim),
                    scale = to_half_and_back(norm);
        return Scale{ norm, scale, scale > 0 ? __frcp_rn(scale) : 0 };
    }

    /* Finds the cells of n rows. Lane r returns the sum of the squares of row r. */
    KVANT_INLINE float find_cells(int at, int n) const
    {
        float all = 0;
#pragma unroll 1
        for (int r = 0; r < n; r++) {
            const Row<D> y = kept_row(at + r);
            const float squares = dot_rows<D>(y, y, lane), inverse = scale_of(squares).inverse;
            all = lane == r ? squares : all;
            unrolled_for (int j = 0; j < N; j++) {
                const int cell = cell_of(__fmul_rn(y.x[j], inverse));
                rows.space[warp].put_cell(r, position[j], cell);
                rows.space[warp].put_cell(r, again[j], cell);
            }
        }
        __syncwarp();
        return all;
    }

    /* Finds the codes of row r of the warp, and the scale to store. */
    KVANT_INLINE Quantized quantize(int r, int at, float squares, uint32_t (&codes)[N]) const
    {
        const typename R::Space &space = rows.space[warp];
        const Row<D> y = kept_row(at);
        const Scale scale = scale_of(squares);
        Row<D> decoded;
        unrolled_for (int j = 0; j < N; j++) {
            uint32_t bit, subset;
            space.read(r, position[j], bit, subset);
            const uint32_t nearest = rows.table.nearest_of(space.cell_at(r, position[j]), subset);
            codes[j] = 2 * nearest + bit;
            decoded.x[j] = rows.table.values[8 * nearest + subset];
        }
        float stored = scale.stored;
        if (role.codec.unbiased && stored > 0) {
            const float product = dot_rows<D>(y, decoded, lane);
            stored = product > 0 ? __fdiv_rn(squares, product) : 0;
        }
        return Quantized{ stored, 0, scale.norm <= 65504.0f && stored <= 65504.0f };
    }

    /* Writes a token at once. */
    KVANT_INLINE void put_token(int token, const uint32_t (&codes)[N], uint16_t scale) const
    {
        const int at = (int)(rows.tokens.slot[token] % PAGE_TOKENS);
        uint8_t *page = page_of(role, rows.tokens, token, kv_head);
        if (lane == 0)
            reinterpret_cast<uint16_t *>(page + role.codec.metadata_offset)[at] = scale;
        uint32_t *words = reinterpret_cast<uint32_t *>(page);
        if (role.codec.role == KVANT_ROLE_K)
            TokenWords<D, true>(at, lane).put(words, codes, role.codec.bits);
        else
            TokenWords<D, false>(at, lane).put(words, codes, role.codec.bits);
    }

    /* Stores the codes of a row as nibbles: 16 bits hold one channel of 4 tiles. */
    KVANT_INLINE void store_nibbles(int token, const uint32_t (&codes)[N]) const
    {
        uint16_t *to = reinterpret_cast<uint16_t *>(rows.nibbles.words[0] + Nibbles<D>::at(token));
        unrolled_for (int g = 0; g < Nibbles<D>::GROUPS; g++) {
            uint32_t own = codes[2 * g];
            if (2 * g + 1 < N)
                own |= codes[2 * g + 1] << 8;
            const uint32_t other = __shfl_xor_sync(FULL, own, 16);
            if (lane < 16)
                to[16 * g + lane] = (uint16_t)(own | other << 4);
        }
    }

    KVANT_INLINE void keep(const Quantized &q, const uint32_t (&codes)[N], int token,
                           bool finite) const
    {
        if (!q.in_range) {
            if (lane == 0) {
                note_refusal(args, first + token, rows.tokens.slot[token], finite);
                rows.tokens.slot[token] = -1;
            }
            return;
        }
        const uint16_t scale = __half_as_ushort(__float2half_rn(q.scale));
        if (args.chunk <= WARPS)
            return put_token(token, codes, scale);
        store_nibbles(token, codes);
        if (lane == 0)
            rows.tokens.scale[token] = scale;
    }

    /* Multiplies n rows with a matrix, like combine_rows. A thread has two channels of A_THREAD
     * rows, which are TEAMS rows apart. */
    template <int A_THREAD> KVANT_INLINE void multiply_rows(const float *key_transform, int n) const
    {
        constexpr int TEAMS = THREADS / (D / 2);
        const int team = threadIdx.x / (D / 2), channel = 2 * (threadIdx.x % (D / 2));
        float2 y[A_THREAD] = {};
        if (team < TEAMS && team < n)
#pragma unroll 4
            for (int i = 0; i < D; i += 4) {
                float2 w[4];
                unrolled_for (int k = 0; k < 4; k++)
                    w[k] = *reinterpret_cast<const float2 *>(key_transform + (i + k) * D + channel);
                unrolled_for (int q = 0; q < A_THREAD; q++) {
                    const float4 four =
                        *reinterpret_cast<const float4 *>(rows.y[min(team + TEAMS * q, n - 1)] + i);
                    const float x[4] = { four.x, four.y, four.z, four.w };
                    unrolled_for (int k = 0; k < 4; k++) {
                        y[q].x = __fadd_rn(y[q].x, __fmul_rn(x[k], w[k].x));
                        y[q].y = __fadd_rn(y[q].y, __fmul_rn(x[k], w[k].y));
                    }
                }
            }
        __syncthreads();
        unrolled_for (int q = 0; q < A_THREAD; q++)
            if (team < TEAMS && team + TEAMS * q < n)
                *reinterpret_cast<float2 *>(rows.y[team + TEAMS * q] + channel) = y[q];
    }

    KVANT_INLINE void multiply(const float *key_transform, int n) const
    {
        constexpr int TEAMS = THREADS / (D / 2), MOST = (R::AT_ONCE + TEAMS - 1) / TEAMS;
        __syncthreads();
        if (n <= TEAMS)
            multiply_rows<1>(key_transform, n);
        else if (n <= 2 * TEAMS)
            multiply_rows<2>(key_transform, n);
        else
            multiply_rows<MOST>(key_transform, n);
        __syncthreads();
    }

    /* Encodes the item's tokens from t on. */
    KVANT_INLINE void encode(int t) const
    {
        const float *key_transform = key_transform_of(role.codec, role.key_transform, kv_head);
        const int n = min((int)args.chunk - t, R::AT_ONCE), of_warp = (n - 1) / R::SEARCHERS + 1,
                  at = warp * of_warp, own = max(min(of_warp, n - at), 0);
        const uint32_t there = warp < R::SEARCHERS ? load_rows(t, at, own, key_transform) : 0;
        if (role.codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL)
            multiply(key_transform, n);
        if (there == 0)
            return;
        const float squares = find_cells(at, own);
        PathSearch<typename R::Space>(rows.space[warp], rows.table, lane, own).find();
#pragma unroll 1
        for (int r = 0; r < own; r++) {
            if (!(there >> r & 1))
                continue;
            uint32_t codes[N];
            const Quantized q = quantize(r, at + r, __shfl_sync(FULL, squares, r), codes);
            keep(q, codes, t + at + r, there >> r & 0x10000);
        }
        __syncwarp(); /* the memory of the search is free again */
    }

    KVANT_INLINE void write() const
    {
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
};

template <int D>
__global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1)
    append_trellis_kernel(const __grid_constant__ TrellisAppendArgs args)
{
    extern __shared__ __align__(128) uint8_t raw[];
    TrellisRows<D> &rows = *reinterpret_cast<TrellisRows<D> *>(raw);
    uint32_t filled = 2; /* the role whose table is there */
#pragma unroll 1
    for (uint32_t item = blockIdx.x; item < args.n_items; item += gridDim.x) {
        const TrellisItem<D> own(rows, args, item);
        __syncthreads();
        if (item / args.items_of_role != filled) {
            filled = item / args.items_of_role;
            rows.table.fill(args.books[filled]);
        }
        if (item == blockIdx.x) {
            wait_for_prior();
            begin_next();
        }
        if (threadIdx.x < PAGE_TOKENS)
            rows.tokens.slot[threadIdx.x] = slot_of(args, own.first);
        __syncthreads();
#pragma unroll 1
        for (int t = 0; t < (int)args.chunk; t += TrellisRows<D>::AT_ONCE)
            own.encode(t);
        if (args.chunk > WARPS)
            own.write();
    }
}

/* Tokens per item. Few rows are spread over a GPU's multiprocessors, about 132 with two blocks
 * each, so that no row waits for another. */
template <int D> static uint32_t chunk_of(uint32_t n_rows)
{
    constexpr uint32_t MULTIPROCESSORS = 132, AT_ONCE = TrellisRows<D>::AT_ONCE;
    if (n_rows <= MULTIPROCESSORS * WARPS)
        return (n_rows + MULTIPROCESSORS - 1) / MULTIPROCESSORS;
    return n_rows <= 2 * MULTIPROCESSORS * AT_ONCE ? AT_ONCE : PAGE_TOKENS;
}

template <int D>
static cudaError_t launch_with_memory(TrellisAppendArgs &args, int n_roles, cudaStream_t stream)
{
    const void *kernel = (const void *)append_trellis_kernel<D>;
    cudaError_t error = allow_shared(kernel, TrellisRows<D>::BYTES);
    if (error != cudaSuccess)
        return error;
    args.chunk = chunk_of<D>(args.n_tokens * args.n_kv_heads * n_roles);
    args.items_of_role = (args.n_tokens + args.chunk - 1) / args.chunk * args.n_kv_heads;
    args.n_items = n_roles * args.items_of_role;
    int blocks = (int)args.n_items;
    if (args.chunk == PAGE_TOKENS)
        error = blocks_at_once(kernel, THREADS, TrellisRows<D>::BYTES, blocks);
    if (error != cudaSuccess)
        return error;
    void *parameters[] = { &args };
    return launch_early(kernel, dim3(std::min(args.n_items, (uint32_t)blocks)), THREADS, parameters,
                        TrellisRows<D>::BYTES, stream);
}

cudaError_t launch_append_trellis(const AppendArgs &args, uint32_t head_dim, int n_roles,
                                  int n_kv_heads, cudaStream_t stream)
{
    TrellisAppendArgs p{};
    static_cast<BookedAppendArgs<kvant_cuda_trellis> &>(p) = booked<kvant_cuda_trellis>(
        args, n_roles, [](const kvant_cuda_codec &codec) { return codec.trellis; });
    p.n_kv_heads = (uint32_t)n_kv_heads;
    cudaError_t error = with_head_dim(head_dim, [&](auto d) {
        return launch_with_memory<decltype(d)::value>(p, n_roles, stream);
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
