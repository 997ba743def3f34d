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
    uint32_t n_kv_heads, n_roles;
};

/* How the rows of a call are cut into items. */
struct TrellisCut {
    uint32_t chunk, of_role, all;
};

template <int D> struct TrellisRows {
    /* SEARCHERS: warps that search. With long rows there is no memory for more. */
    static constexpr int ROWS = 4, SEARCHERS = D <= 128 ? WARPS : WARPS / 2,
                         AT_ONCE = ROWS * SEARCHERS;
    /* The most tokens of an item of which each has a warp: a warp for each scheduler. */
    static constexpr int FEW = 4;
    static_assert(FEW <= SEARCHERS, "memory for all of them");
    using Space = PathSpace<D, ROWS>;
    Space space[SEARCHERS];
    CellTable table;
    alignas(16) float y[AT_ONCE][D]; /* transformed rows */
    /* by channel: the position of its step in PathSpace::costs and, in the upper half, of the same
     * step before step 0, or the first position again */
    uint32_t places[D];
    BlockTokens tokens;
    Nibbles<D> nibbles; /* has to be last: its second plane has no memory */

    static constexpr int BYTES = (int)(offsetof(TrellisRows, nibbles) + sizeof(Nibbles<D>) / 2);
};

/* An item on its way through a block. */
template <int D> struct TrellisItem {
    using R = TrellisRows<D>;
    R &rows;
    const TrellisAppendArgs &args;
    const AppendRole &role;
    const float *key_transform;
    uint32_t first, chunk;
    int kv_head, warp, lane;

    KVANT_INLINE TrellisItem(R &rows_, const TrellisAppendArgs &args_, const TrellisCut &cut,
                             uint32_t item)
        : rows(rows_), args(args_), role(args_.roles[item / cut.of_role]),
          first(item % cut.of_role / args_.n_kv_heads * cut.chunk), chunk(cut.chunk),
          kv_head((int)(item % cut.of_role % args_.n_kv_heads)), warp(threadIdx.x >> 5),
          lane(threadIdx.x & 31)
    {
        key_transform = key_transform_of(role.codec, role.key_transform, kv_head);
    }

    /* Called by all threads when the role changes. */
    KVANT_INLINE void prepare(const kvant_cuda_trellis &trellis) const
    {
        rows.table.fill(trellis);
        for (int i = threadIdx.x; i < D; i += THREADS) {
            const int step = trellis_step(role.codec.role, (int)role.codec.bits, D, i),
                      again = step < D - WARM_UP ? step : step - D;
            rows.places[i] = (uint32_t)R::Space::position_of(step) |
                             (uint32_t)R::Space::position_of(again) << 16;
        }
    }

    KVANT_INLINE bool through_matrix() const
    {
        return role.codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL;
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

    /* Stores where the costs of a channel's step are. space: a warp's memory. */
    KVANT_INLINE void put_cell(int space, int row, int channel, float u) const
    {
        const int cell = cell_of(u);
        const uint32_t places = rows.places[channel];
        rows.space[space].put_cell(row, (int)(places & 0xffffu), cell);
        rows.space[space].put_cell(row, (int)(places >> 16), cell);
    }

    /* Returns a channel's code, and the number that its level stands for. */
    KVANT_INLINE uint32_t code_of(int space, int row, int channel, float &decoded) const
    {
        const int place = (int)(rows.places[channel] & 0xffffu);
        uint32_t bit, subset;
        rows.space[space].read(row, place, bit, subset);
        const uint32_t nearest =
            rows.table.nearest_of(rows.space[space].cell_at(row, place), subset);
        decoded = rows.table.values[8 * nearest + subset];
        return 2 * nearest + bit;
    }

    /* product: the sum of products of a row and its decoded numbers. */
    KVANT_INLINE float stored_scale(const Scale &scale, float squares, float product) const
    {
        if (!role.codec.unbiased || !(scale.stored > 0))
            return scale.stored;
        return product > 0 ? __fdiv_rn(squares, product) : 0;
    }

    KVANT_INLINE static bool in_range(const Scale &scale, float stored)
    {
        return scale.norm <= 65504.0f && stored <= 65504.0f;
    }

    /* The two channels of a thread, and the first rows of the matrix that can have numbers in these
     * channels. A triangle has zeros in the rows before. The warps of a team share such work
     * equally, because a warp's second channels are as far from the end as its first channels are
     * from the beginning. */
    struct TwoChannels {
        int channel[2], first[2];

        KVANT_INLINE TwoChannels(int i, bool triangle)
        {
            constexpr bool WARPS_DIVIDE = D % 64 == 0;
            channel[0] = i;
            channel[1] = WARPS_DIVIDE ? D - 32 - i / 32 * 32 + i % 32 : D / 2 + i;
            first[0] = triangle && WARPS_DIVIDE ? channel[0] / 32 * 32 : 0;
            first[1] = !triangle ? 0 : WARPS_DIVIDE ? channel[1] / 32 * 32 : D / 2;
        }
    };

    /* Adds the products of numbers begin .. end - 1 of A_THREAD rows with the first N channels of
     * the thread. */
    template <int N, int A_THREAD>
    KVANT_INLINE void add_products(float (&y)[A_THREAD][2], const TwoChannels &own, int begin,
                                   int end, int team, int n) const
    {
        constexpr int TEAMS = THREADS / (D / 2);
#pragma unroll 4
        for (int i = begin; i < end; i += 4) {
            float w[4][N];
            unrolled_for (int k = 0; k < 4; k++)
                unrolled_for (int c = 0; c < N; c++)
                    w[k][c] = key_transform[(i + k) * D + own.channel[c]];
            unrolled_for (int q = 0; q < A_THREAD; q++) {
                const float4 four =
                    *reinterpret_cast<const float4 *>(rows.y[min(team + TEAMS * q, n - 1)] + i);
                const float x[4] = { four.x, four.y, four.z, four.w };
                unrolled_for (int k = 0; k < 4; k++)
                    unrolled_for (int c = 0; c < N; c++)
                        y[q][c] = __fadd_rn(y[q][c], __fmul_rn(x[k], w[k][c]));
            }
        }
    }

    /* Multiplies n rows with a matrix, like combine_rows. A thread has two channels of A_THREAD
     * rows, which are TEAMS rows apart. */
    template <int A_THREAD> KVANT_INLINE void multiply_rows(int n) const
    {
        constexpr int TEAMS = THREADS / (D / 2);
        const int team = threadIdx.x / (D / 2);
        const TwoChannels own(threadIdx.x % (D / 2), is_triangle<D>(role));
        float y[A_THREAD][2] = {};
        if (team < TEAMS && team < n) {
            add_products<1>(y, own, own.first[0], own.first[1], team, n);
            add_products<2>(y, own, own.first[1], D, team, n);
        }
        __syncthreads();
        unrolled_for (int q = 0; q < A_THREAD; q++)
            unrolled_for (int c = 0; c < 2; c++)
                if (team < TEAMS && team + TEAMS * q < n)
                    rows.y[team + TEAMS * q][own.channel[c]] = y[q][c];
    }

    /* Rotates n rows, a row a warp. */
    KVANT_INLINE void rotate_rows(int n) const
    {
        if (role.after.block == 0)
            return;
        for (int i = warp; i < n; i += WARPS) {
            Row<D> y;
            y.each(lane, [&](float &x, int channel) { x = rows.y[i][channel]; });
            rotate(y, role.after, lane);
            y.each(lane, [&](float x, int channel) { rows.y[i][channel] = x; });
        }
        __syncthreads();
    }

    /* Multiplies n rows, of which each team has at most A_THREAD or, if need be, twice as many. */
    template <int A_THREAD = 1> KVANT_INLINE void multiply_all(int n) const
    {
        constexpr int TEAMS = THREADS / (D / 2), MOST = (R::AT_ONCE + TEAMS - 1) / TEAMS;
        if constexpr (A_THREAD >= MOST)
            multiply_rows<MOST>(n);
        else if (n <= A_THREAD * TEAMS)
            multiply_rows<A_THREAD>(n);
        else
            multiply_all<2 * A_THREAD>(n);
    }

    KVANT_INLINE void multiply(int n) const
    {
        __syncthreads();
        multiply_all(n);
        __syncthreads();
        rotate_rows(n);
    }

    /* ---- few rows: a warp has one row, whose lane l has channels l, l + 32, ... ---- */

    static constexpr int N = Row<D>::PER_LANE;

    /* Loads a token's row, and transforms it unless keys have a matrix. */
    KVANT_INLINE Row<D> load(int token, bool &finite) const
    {
        Row<D> row =
            load_row<D>(role.rows, row_place(args, role, first, token, kv_head), args.type, lane);
        finite = true;
        row.each(lane, [&](float &x, int channel) {
            x = centered(x, role, kv_head * D + channel);
            finite &= is_finite(x);
        });
        finite = __all_sync(FULL, finite);
        if (!through_matrix())
            transform(row, role.codec, key_transform, lane);
        return row;
    }

    /* Writes a token at once. */
    KVANT_INLINE void put_token(int token, const uint32_t (&codes)[N], float scale) const
    {
        const int at = (int)(rows.tokens.slot[token] % PAGE_TOKENS);
        uint8_t *page = page_of(role, rows.tokens, token, kv_head);
        if (lane == 0)
            reinterpret_cast<uint16_t *>(page + role.codec.metadata_offset)[at] =
                __half_as_ushort(__float2half_rn(scale));
        uint32_t *words = reinterpret_cast<uint32_t *>(page);
        if (role.codec.role == KVANT_ROLE_K)
            TokenWords<D, true>(at, lane).put(words, codes, role.codec.bits);
        else
            TokenWords<D, false>(at, lane).put(words, codes, role.codec.bits);
    }

    /* Finds the codes of the warp's row. */
    KVANT_INLINE void encode_row(bool finite) const
    {
        Row<D> y, decoded;
        y.each(lane, [&](float &x, int channel) { x = rows.y[warp][channel]; });
        const float squares = dot_rows<D>(y, y, lane);
        const Scale scale = scale_of(squares);
        y.each(lane, [&](float &x, int channel) {
            put_cell(warp, 0, channel, __fmul_rn(x, scale.inverse));
        });
        __syncwarp();
        PathSearch<typename R::Space>(rows.space[warp], rows.table, lane, 0, 1).find();
        uint32_t codes[N];
        unrolled_for (int j = 0; j < N; j++)
            codes[j] = code_of(warp, 0, lane + 32 * j, decoded.x[j]);
        const float stored = stored_scale(scale, squares, dot_rows<D>(y, decoded, lane));
        if (in_range(scale, stored))
            put_token(warp, codes, stored);
        else if (lane == 0)
            note_refusal(args, first + warp, rows.tokens.slot[warp], finite);
    }

    /* Encodes the item's tokens, at most R::FEW. */
    KVANT_INLINE void encode_few() const
    {
        const int n = (int)chunk;
        const bool there = warp < n && rows.tokens.slot[warp] >= 0;
        bool finite = true;
        if (warp < n) {
            Row<D> y{};
            if (there)
                y = load(warp, finite);
            y.each(lane, [&](float &x, int channel) { rows.y[warp][channel] = x; });
            __syncwarp();
        }
        if (through_matrix())
            multiply(n);
        if (there)
            encode_row(finite);
    }

    /* ---- many rows: lanes share a row as in encode.cuh, and a warp has R::ROWS rows ---- */

    using L = Lanes<D>;
    static constexpr int NUMBERS = L::NUMBERS;

    /* The channel of the lane's number i. */
    KVANT_INLINE int channel_of(int i) const
    {
        return 16 * (i / L::OWN) + lane % L::LANES * L::OWN + i % L::OWN;
    }

    KVANT_INLINE void read_row(float (&y)[NUMBERS], int at) const
    {
        unrolled_for (int i = 0; i < NUMBERS; i++)
            y[i] = rows.y[at][channel_of(i)];
    }

    /* Calls use(row, whether it is one of n) for the warp's rows; with all lanes, L::ROWS rows at a
     * time. */
    template <class F> KVANT_INLINE void each_row(int n, F &&use) const
    {
#pragma unroll 1
        for (int i = 0; i < n; i += L::ROWS) {
            const int r = i + lane / L::LANES;
            use(min(r, n - 1), r < n);
        }
        __syncwarp();
    }

    /* Loads rows at .. at + n - 1 of the tokens from t on, and transforms them unless keys have a
     * matrix. Rows without a token are zeros. */
    KVANT_INLINE void load_rows(int t, int at, int n) const
    {
        float *scratch = reinterpret_cast<float *>(rows.space[warp].from);
        static_assert(sizeof rows.space[0].from >= sizeof(float[L::ROWS * L::ROW_STRIDE]), "room");
        each_row(n, [&](int r, bool own) {
            const int tile = lane % L::LANES;
            const bool lacking = !own || rows.tokens.slot[t + at + r] < 0;
            const size_t from = lacking ? 0 : row_place(args, role, first, t + at + r, kv_head);
            float *to = rows.y[at + r];
            if (through_matrix()) {
                float x[16] = {};
                if (!lacking && tile < L::TILES)
                    load_centered<D>(x, args, role, from, kv_head, tile);
                if (own && tile < L::TILES)
                    unrolled_for (int k = 0; k < 16; k += 4)
                        *reinterpret_cast<float4 *>(to + 16 * tile + k) =
                            make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
            } else {
                float y[NUMBERS];
                transform_row<D>(y, args, role, scratch, lacking, from, kv_head, lane);
                if (own)
                    unrolled_for (int k = 0; k < NUMBERS; k++)
                        to[channel_of(k)] = y[k];
            }
        });
    }

    KVANT_INLINE void find_cells(int at, int n) const
    {
        each_row(n, [&](int r, bool own) {
            float y[NUMBERS];
            read_row(y, at + r);
            const float inverse = scale_of(row_dot<D>(y, y)).inverse;
            if (own)
                unrolled_for (int k = 0; k < NUMBERS; k++)
                    put_cell(warp, r, channel_of(k), __fmul_rn(y[k], inverse));
        });
    }

    /* Finds codes and scales, and keeps them until the words of pages are put together. */
    KVANT_INLINE void quantize_rows(int t, int at, int n) const
    {
        each_row(n, [&](int r, bool own) {
            const int token = t + at + r;
            const bool lacking = !own || rows.tokens.slot[token] < 0;
            float y[NUMBERS], decoded[NUMBERS];
            uint32_t codes[NUMBERS];
            read_row(y, at + r);
            const float squares = row_dot<D>(y, y);
            const Scale scale = scale_of(squares);
            unrolled_for (int k = 0; k < NUMBERS; k++)
                codes[k] = code_of(warp, r, channel_of(k), decoded[k]);
            const float stored = stored_scale(scale, squares, row_dot<D>(y, decoded));
            if (!lacking) {
                store_nibbles<D, 0, false>(rows.nibbles.words[0] + Nibbles<D>::at(token), codes,
                                           lane);
                if (lane % L::LANES == 0)
                    rows.tokens.scale[token] = __half_as_ushort(__float2half_rn(stored));
            }
            const bool refused = !lacking && !in_range(scale, stored);
            if (__any_sync(FULL, refused))
                refuse<D>(args, role, rows.tokens, refused, first, token,
                          refused ? row_place(args, role, first, token, kv_head) : 0, kv_head,
                          lane);
        });
    }

    /* Encodes the item's tokens from t on. */
    KVANT_INLINE void encode_many(int t) const
    {
        const int n = min((int)chunk - t, R::AT_ONCE), at = warp * R::ROWS,
                  own = warp < R::SEARCHERS ? max(min(R::ROWS, n - at), 0) : 0;
        if (own > 0)
            load_rows(t, at, own);
        if (through_matrix())
            multiply(n);
        if (!__any_sync(FULL, lane < own && rows.tokens.slot[t + at + lane] >= 0))
            return;
        find_cells(at, own);
        PathSearch<typename R::Space>(rows.space[warp], rows.table, lane, 0, own).find();
        quantize_rows(t, at, own);
    }

    KVANT_INLINE void write() const
    {
        __syncthreads();
        write_block(
            rows.tokens, role, (int)chunk, kv_head,
            [&](uint32_t *page) {
                write_codes<D>(role.codec, rows.nibbles, rows.tokens.page_tokens, page);
            },
            [&](int t, int at, uint32_t *page) {
                write_token<D>(role.codec, rows.nibbles, t, at, page, lane);
            });
    }
};

/* Tokens per item. Rows are spread over a GPU's multiprocessors, about 132, with up to two thread
 * blocks each. A warp takes as long for ROWS rows as for one, and warps that share a scheduler wait
 * for each other. So more than FEW tokens are ROWS a warp. Their number is a power of two, because
 * words of pages then have few writers. A list may have no rows, and 0 tokens an item would be an
 * endless loop. */
template <int D> __host__ __device__ inline uint32_t chunk_of(uint32_t n_rows)
{
    using R = TrellisRows<D>;
    constexpr uint32_t MULTIPROCESSORS = 132;
    const uint32_t each = n_rows == 0 ? 1 : (n_rows + MULTIPROCESSORS - 1) / MULTIPROCESSORS;
    if (each <= R::FEW)
        return each;
    for (uint32_t chunk = 2 * R::FEW; chunk <= R::AT_ONCE; chunk *= 2)
        if (each <= (chunk < R::AT_ONCE ? chunk : 2 * chunk))
            return chunk;
    return PAGE_TOKENS;
}

template <int D>
__host__ __device__ inline TrellisCut cut_of(const TrellisAppendArgs &args, uint32_t n_tokens)
{
    const uint32_t chunk = chunk_of<D>(n_tokens * args.n_kv_heads * args.n_roles),
                   of_role = (n_tokens + chunk - 1) / chunk * args.n_kv_heads;
    return TrellisCut{ chunk, of_role, args.n_roles * of_role };
}

template <int D>
__global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1)
    append_trellis_kernel(const __grid_constant__ TrellisAppendArgs args)
{
    extern __shared__ __align__(128) uint8_t raw[];
    TrellisRows<D> &rows = *reinterpret_cast<TrellisRows<D> *>(raw);
    uint32_t filled = 2; /* the role whose table is there */
    const TrellisCut cut = cut_of<D>(args, row_count(args));
    if (blockIdx.x >= cut.all) { /* a list may be empty; the next kernel relies on this wait */
        begin_next();
        wait_for_prior();
        return;
    }
#pragma unroll 1
    for (uint32_t item = blockIdx.x; item < cut.all; item += gridDim.x) {
        const TrellisItem<D> own(rows, args, cut, item);
        __syncthreads();
        if (item / cut.of_role != filled) {
            filled = item / cut.of_role;
            own.prepare(args.books[filled]);
        }
        if (item == blockIdx.x) {
            wait_for_prior();
            begin_next();
        }
        if (threadIdx.x < PAGE_TOKENS)
            rows.tokens.slot[threadIdx.x] = slot_of(args, own.first, cut.chunk);
        __syncthreads();
        if (cut.chunk <= TrellisRows<D>::FEW) {
            own.encode_few();
            continue;
        }
#pragma unroll 1
        for (int t = 0; t < (int)cut.chunk; t += TrellisRows<D>::AT_ONCE)
            own.encode_many(t);
        own.write();
    }
}

/* The GPU's multiprocessors, and the shared memory with which a thread block has one for itself. */
static cudaError_t find_multiprocessors(int &multiprocessors, int &lone)
{
    int all = 0;
    cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, multiprocessors);
    if (error == cudaSuccess)
        error = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, all);
    if (error == cudaSuccess)
        error = most_shared(lone);
    lone = std::min(lone, all / 2);
    return error;
}

/* Launches a thread block for each item. Blocks that begin early find other kernels on some
 * multiprocessors. Then two blocks share a multiprocessor while another one has none. So up to one
 * block a multiprocessor gets memory with which no second one fits. More blocks than that begin
 * when all multiprocessors are free. */
static cudaError_t launch_items(const void *kernel, int blocks, int bytes, void **parameters,
                                cudaStream_t stream)
{
    int multiprocessors = 0, lone = 0;
    cudaError_t error = find_multiprocessors(multiprocessors, lone);
    if (error == cudaSuccess && blocks > multiprocessors)
        return cudaLaunchKernel(kernel, dim3(blocks), dim3(THREADS), parameters, bytes, stream);
    lone = std::max(lone, bytes);
    if (error == cudaSuccess)
        error = allow_shared(kernel, lone);
    return error == cudaSuccess
               ? launch_early(kernel, dim3(blocks), THREADS, parameters, lone, stream)
               : error;
}

template <int D>
static cudaError_t launch_with_memory(TrellisAppendArgs &args, int n_roles, cudaStream_t stream)
{
    const void *kernel = (const void *)append_trellis_kernel<D>;
    constexpr int BYTES = TrellisRows<D>::BYTES;
    cudaError_t error = allow_shared(kernel, BYTES);
    if (error != cudaSuccess || args.n_tokens == 0)
        return error;
    args.n_roles = (uint32_t)n_roles;
    const TrellisCut cut = cut_of<D>(args, args.n_tokens);
    int blocks = (int)cut.all;
    void *parameters[] = { &args };
    if (cut.chunk == PAGE_TOKENS || args.listed)
        error = blocks_at_once(kernel, THREADS, BYTES, blocks);
    if (error != cudaSuccess)
        return error;
    if (args.listed)
        return launch_early(kernel, dim3(blocks), THREADS, parameters, BYTES, stream);
    return launch_items(kernel, std::min((int)cut.all, blocks), BYTES, parameters, stream);
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
    for (int i = 0; error == cudaErrorNotSupported && !args.listed && i < n_roles;
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
