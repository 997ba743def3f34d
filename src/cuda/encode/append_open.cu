/* append_open.cu - appends rows to open pages: transformed, rounded to fp16, row by row.
 *
 * A warp appends one row. For keys with a matrix (transform=file), a thread computes one channel of
 * up to ROWS_A_BLOCK rows. So the reads of the matrix overlap and serve all these rows. */
#include "append.h"
#include "../block_center.cuh"
#include "../launch.h"
#include "../layout.cuh"
#include "../ptx.cuh"

namespace kvant
{

constexpr int WARPS = 8, ROWS_A_BLOCK = 8;

KVANT_INLINE int64_t slot_of(const AppendArgs &args, uint32_t token)
{
    return token < args.n_tokens ? args.slots[token] : -1;
}

KVANT_INLINE uint8_t *page_of(const AppendRole &role, int64_t slot, int kv_head)
{
    return role.base + (size_t)(slot / PAGE_TOKENS) * role.block_stride +
           kv_head * role.head_stride;
}

/* The index of a row among pages of floats. */
KVANT_INLINE size_t exact_place(const AppendRole &role, int64_t slot, int kv_head, int d)
{
    return (page_of(role, slot, kv_head) - role.base) / sizeof(uint16_t) +
           (size_t)(slot % PAGE_TOKENS) * d;
}

/* Stores a transformed row, or refuses it; by a warp. finite: whether it was finite before. */
template <int D>
KVANT_INLINE void put_row(const AppendArgs &args, const AppendRole &role, uint32_t token,
                          int64_t slot, int kv_head, int lane, const Row<D> &row, bool finite)
{
    const size_t at = (size_t)(slot % PAGE_TOKENS) * D;
    bool in_range = true;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        in_range &= fabsf(row.x[j]) <= role.codec.exact_limit;
    if (!__all_sync(FULL, in_range)) {
        if (lane == 0)
            note_refusal(args, token, slot, finite);
        if (args.clear_refused)
            store_row(page_of(role, slot, kv_head), at, KVANT_CUDA_F16, lane, Row<D>{});
        return;
    }
    store_row(page_of(role, slot, kv_head), at, KVANT_CUDA_F16, lane, row);
    if (role.exact)
        store_row(role.exact, exact_place(role, slot, kv_head, D), KVANT_CUDA_F32, lane, row);
}

template <int D>
KVANT_INLINE void append_row(const AppendArgs &args, const AppendRole &role, uint32_t token,
                             int kv_head, int lane)
{
    const int64_t slot = slot_of(args, token);
    if (slot < 0)
        return;
    bool finite;
    const Row<D> row =
        transformed_row<D>(args, role, token * role.token_stride + kv_head * role.row_head_stride,
                           kv_head, lane, finite);
    put_row<D>(args, role, token, slot, kv_head, lane, row, finite);
}

/* Waits for the preceding kernel, and lets the next one begin. False: none of the block's ROWS rows
 * is stored. If slots are there before that kernel has ended, such blocks do not wait, so that they
 * leave their multiprocessors. One block waits always, because the next kernel relies on this one
 * to end later than those before it. */
template <int ROWS> KVANT_INLINE bool begin(const AppendArgs &args, uint32_t first)
{
    bool any = false;
    if (args.next_early)
        begin_next();
    if (args.slots_ready && threadIdx.x < ROWS)
        any = slot_of(args, first + threadIdx.x) >= 0;
    any = __syncthreads_or(any) || !args.slots_ready;
    if (any || blockIdx.x + blockIdx.y + blockIdx.z == 0)
        wait_for_prior();
    begin_next();
    return any;
}

template <int D>
__global__ void __launch_bounds__(WARPS * 32)
    append_open_kernel(const __grid_constant__ AppendArgs args)
{
    if (!begin<WARPS>(args, blockIdx.x * WARPS))
        return;
    append_row<D>(args, args.roles[blockIdx.z], blockIdx.x * WARPS + (threadIdx.x >> 5), blockIdx.y,
                  threadIdx.x & 31);
}

/* Loads keys first .. first + ROWS - 1 less the centres of their blocks. A thread has a pair of
 * channels of half of them. Without branches, so that all of its loads overlap: tokens behind the
 * last one are loaded as the last one. */
template <int D, int ROWS>
KVANT_INLINE void load_about_centers(const AppendArgs &args, const AppendRole &role, uint32_t first,
                                     int kv_head, float (&x)[ROWS][D])
{
    constexpr int N = ROWS / 2;
    const uint32_t i = threadIdx.x % (D / 2), own = threadIdx.x / (D / 2) * N;
    int64_t slots[N];
    CenterPair pairs[N];
    float2 rows[N];
    auto token_of = [&](int r) { return min(first + own + r, args.n_tokens - 1); };
    unrolled_for (int r = 0; r < N; r++)
        slots[r] = args.center_slots[token_of(r)];
    CenterPair::load_all(pairs, args.block_centers, slots, i, kv_head, gridDim.y, D);
    unrolled_for (int r = 0; r < N; r++) {
        const float *row = static_cast<const float *>(role.rows) + token_of(r) * role.token_stride +
                           kv_head * role.row_head_stride;
        rows[r] = make_float2(row[pairs[r].channels.x], row[pairs[r].channels.y]);
    }
    unrolled_for (int r = 0; r < N; r++) {
        const float2 center = pairs[r].center();
        x[own + r][pairs[r].channels.x] = __fsub_rn(rows[r].x, center.x);
        x[own + r][pairs[r].channels.y] = __fsub_rn(rows[r].y, center.y);
    }
    __syncthreads();
}

/* Loads this thread's channel of the rows from `first` on. The loads are not in branches, so they
 * wait for memory at the same time. */
template <int ROWS>
KVANT_INLINE void load_channel(const AppendArgs &args, const AppendRole &role, uint32_t first,
                               size_t at, float (&own)[ROWS])
{
    size_t from[ROWS];
    unrolled_for (int r = 0; r < ROWS; r++)
        from[r] = min(first + r, args.n_tokens - 1) * role.token_stride + at;
    if (args.type == KVANT_CUDA_F32)
        unrolled_for (int r = 0; r < ROWS; r++)
            own[r] = static_cast<const float *>(role.rows)[from[r]];
    else
        unrolled_for (int r = 0; r < ROWS; r++)
            own[r] = load_number(role.rows, from[r], args.type);
}

/* The rows of a thread block, which it multiplies with a matrix. */
template <int D, int ROWS> struct MatrixSpace {
    alignas(16) float x[ROWS][D];
    int64_t slots[ROWS];
    uint32_t not_finite; /* bit r: of row r */
};

/* Loads rows, less their centres; zeros where no row is stored. */
template <int D, int ROWS>
KVANT_INLINE void load_rows(const AppendArgs &args, const AppendRole &role, uint32_t first,
                            int kv_head, MatrixSpace<D, ROWS> &space)
{
    const int channel = threadIdx.x;
    const bool about_centers = blockIdx.z == 0 && args.block_centers.start;
    float own[ROWS];
    uint32_t not_finite = 0;
    if (about_centers) {
        load_about_centers(args, role, first, kv_head, space.x);
        unrolled_for (int r = 0; r < ROWS; r++)
            own[r] = space.x[r][channel];
    } else
        load_channel(args, role, first, kv_head * role.row_head_stride + channel, own);
    unrolled_for (int r = 0; r < ROWS; r++) {
        own[r] = space.slots[r] < 0 ? 0 : centered(own[r], role, kv_head * D + channel);
        not_finite |= (uint32_t)!is_finite(own[r]) << r;
    }
    unrolled_for (int r = 0; r < ROWS; r++)
        space.x[r][channel] = own[r];
    not_finite = __reduce_or_sync(FULL, not_finite);
    if (not_finite != 0 && threadIdx.x % 32 == 0)
        atomicOr(&space.not_finite, not_finite);
    __syncthreads();
}

/* Numbers of a column of the matrix, which a thread loads at once. */
constexpr int AHEAD = 16;
struct Weights {
    float of[AHEAD];

    template <int D> KVANT_INLINE void load(const float *column, int first)
    {
        unrolled_for (int k = 0; k < AHEAD; k++)
            of[k] = load_here(column + (size_t)(first + k) * D);
    }
};

/* Adds the products of AHEAD numbers of each row, from the first-th on. */
template <int D, int ROWS>
KVANT_INLINE void add_products(float (&y)[ROWS], const MatrixSpace<D, ROWS> &space,
                               const Weights &weights, int first)
{
    unrolled_for (int k = 0; k < AHEAD; k += 4)
        unrolled_for (int r = 0; r < ROWS; r++) {
            const float4 x = *reinterpret_cast<const float4 *>(space.x[r] + first + k);
            y[r] = __fadd_rn(y[r], __fmul_rn(x.x, weights.of[k]));
            y[r] = __fadd_rn(y[r], __fmul_rn(x.y, weights.of[k + 1]));
            y[r] = __fadd_rn(y[r], __fmul_rn(x.z, weights.of[k + 2]));
            y[r] = __fadd_rn(y[r], __fmul_rn(x.w, weights.of[k + 3]));
        }
}

/* Multiplies rows first .. first + ROWS - 1 with the matrix of the kv head, in the order of
 * combine_rows, a channel a thread. Then a warp has a row. The next numbers of the matrix are on
 * their way while products are added. */
template <int D, int ROWS>
KVANT_INLINE void append_through_matrix(const AppendArgs &args, const AppendRole &role,
                                        uint32_t first, int kv_head)
{
    __shared__ MatrixSpace<D, ROWS> space;
    const int channel = threadIdx.x, lane = threadIdx.x & 31;
    bool any = false;
    float y[ROWS] = {};
    if (channel < ROWS) {
        space.slots[channel] = slot_of(args, first + channel);
        any = space.slots[channel] >= 0;
    }
    if (channel == 0)
        space.not_finite = 0;
    if (!__syncthreads_or(any)) /* of a prompt, most rows have no open page */
        return;
    const float *column = key_transform_of(role.codec, role.key_transform, kv_head) + channel;
    const int filled = is_triangle<D>(role) ? channel / AHEAD * AHEAD : 0; /* zeros before */
    Weights now, next;
    now.load<D>(column, filled);
    load_rows(args, role, first, kv_head, space);
#pragma unroll 1
    for (int i = filled; i < D; i += AHEAD) {
        next.load<D>(column, min(i + AHEAD, D - AHEAD));
        add_products(y, space, now, i);
        now = next;
    }
    __syncthreads();
    unrolled_for (int r = 0; r < ROWS; r++)
        space.x[r][channel] = y[r];
    __syncthreads();
    for (int r = threadIdx.x / 32; r < ROWS; r += D / 32) {
        if (space.slots[r] < 0)
            continue;
        Row<D> row;
        row.each(lane, [&](float &number, int of) { number = space.x[r][of]; });
        rotate(row, role.after, lane);
        put_row<D>(args, role, first + r, space.slots[r], kv_head, lane, row,
                   !(space.not_finite >> r & 1));
    }
}

/* For launches in which at least one role has a matrix. */
template <int D, int ROWS>
__global__ void __launch_bounds__(D)
    append_open_matrix_kernel(const __grid_constant__ AppendArgs args)
{
    const AppendRole &role = args.roles[blockIdx.z];
    const uint32_t first = blockIdx.x * ROWS;
    if (!begin<ROWS>(args, first))
        return;
    if (role.codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL) {
        append_through_matrix<D, ROWS>(args, role, first, blockIdx.y);
        return;
    }
    for (int r = threadIdx.x >> 5; r < ROWS; r += D / 32)
        append_row<D>(args, role, first + r, blockIdx.y, threadIdx.x & 31);
}

static bool has_matrix(const AppendArgs &args, int n_roles)
{
    for (int i = 0; i < n_roles; i++)
        if (args.roles[i].codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL)
            return true;
    return false;
}

template <int D, int ROWS>
static cudaError_t launch_matrix(AppendArgs args, int n_roles, int n_kv_heads, cudaStream_t stream)
{
    const dim3 grid((args.n_tokens + ROWS - 1) / ROWS, n_kv_heads, n_roles);
    void *parameters[] = { &args };
    return launch_early((const void *)append_open_matrix_kernel<D, ROWS>, grid, D, parameters, 0,
                        stream);
}

cudaError_t launch_append_open(const AppendArgs &args, uint32_t head_dim, int n_roles,
                               int n_kv_heads, cudaStream_t stream)
{
    const dim3 grid((args.n_tokens + WARPS - 1) / WARPS, n_kv_heads, n_roles);
    return with_head_dim(head_dim, [&](auto d) {
        constexpr int D = decltype(d)::value;
        if (has_matrix(args, n_roles))
            return launch_matrix<D, ROWS_A_BLOCK>(args, n_roles, n_kv_heads, stream);
        AppendArgs p = args;
        void *parameters[] = { &p };
        return launch_early((const void *)append_open_kernel<D>, grid, WARPS * 32, parameters, 0,
                            stream);
    });
}

} // namespace kvant
