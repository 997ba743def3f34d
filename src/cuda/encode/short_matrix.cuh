/* short_matrix.cuh - keys and queries of a decode step through the matrix of transform=file. A
 * thread computes one number of a row.
 *
 * Owns the products. append_short.cu owns the kernels, and the rows' way to their pages. */
#pragma once

#include "short_row.cuh"

namespace kvant
{

/* The pair of the block's centre that each of the first D / 2 threads loads before the key. */
struct FewCenter {
    CenterPair pair;
    bool any;

    template <class Book> KVANT_INLINE void load(const FewArgs<Book> &args, int d)
    {
        any = blockIdx.z == 0 && args.block_centers.start;
        if (any && threadIdx.x < d / 2)
            pair.load(args.block_centers, args.center_slots[blockIdx.x], threadIdx.x, blockIdx.y,
                      gridDim.y, d);
    }
    /* The row about the centre, a number a thread; by all threads of a block of d. */
    KVANT_INLINE float about(const float *row, float *x, int d) const
    {
        if (threadIdx.x < d / 2) {
            const float2 center = pair.center();
            x[pair.channels.x] = __fsub_rn(row[pair.channels.x], center.x);
            x[pair.channels.y] = __fsub_rn(row[pair.channels.y], center.y);
        }
        __syncthreads();
        return x[threadIdx.x];
    }
};

/* Computes W ((x - c) / s) with all threads of a block of D, for keys with a matrix. Like
 * combine_rows, it adds the rows of the matrix in their order. */
template <int D>
KVANT_INLINE Row<D> short_row_through_matrix(const ShortRole &role, kvant_cuda_type type,
                                             const FewCenter &center, size_t row_at, int kv_head,
                                             bool &finite)
{
    constexpr int AHEAD = D > 128 ? 64 : D;
    __shared__ float x[D], y[D];
    const int channel = threadIdx.x, at = kv_head * D + channel;
    const float *column = role.key_transform + (size_t)kv_head * D * D + channel;
    float key_transform[AHEAD], number, sum = 0;
    if (!center.any)
        number = load_number(role.rows, row_at + channel, type);
    unrolled_for (int i = 0; i < AHEAD; i++)
        key_transform[i] = column[(size_t)i * D];
    if (center.any)
        number = center.about(static_cast<const float *>(role.rows) + row_at, x, D);
    if (role.center)
        number = __fsub_rn(number, role.center[at]);
    if (role.scale)
        number = __fdiv_rn(number, role.scale[at]);
    x[channel] = number;
    finite = __syncthreads_and(is_finite(number));
    unrolled_for (int first = 0; first < D; first += AHEAD) {
        if (first > 0)
            unrolled_for (int i = 0; i < AHEAD; i++)
                key_transform[i] = column[(size_t)(first + i) * D];
        unrolled_for (int i = 0; i < AHEAD; i++)
            sum = __fadd_rn(sum, __fmul_rn(x[first + i], key_transform[i]));
    }
    y[channel] = sum;
    __syncthreads();
    Row<D> row;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        row.x[j] = y[threadIdx.x % 32 + 32 * j];
    return row;
}

/* The queries of a kv head, of tokens first .. end - 1, through their matrix: four heads at a time,
 * a channel a thread. */
template <int D>
KVANT_INLINE void short_queries(const QueryArgs &args, uint32_t matrix, uint32_t first_token,
                                uint32_t end, int kv_head, int n_kv_heads)
{
    constexpr int HEADS = 4, AHEAD = D > 128 ? 64 : D;
    __shared__ float4 q[D];
    const int channel = threadIdx.x, n = (int)args.heads_a_kv;
    const float *column = args.inverse_key_transform[matrix] + (size_t)kv_head * D * D + channel;
    float key_transform[AHEAD];
    unrolled_for (int i = 0; i < AHEAD; i++)
        key_transform[i] = column[(size_t)i * D];
    wait_for_prior();
    const uint32_t groups = (uint32_t)(n + HEADS - 1) / HEADS;
#pragma unroll 1
    for (uint32_t i = 0; i < (end - first_token) * groups; i++) {
        const uint32_t token = first_token + i / groups;
        const int head = (int)(i % groups) * HEADS;
        float x[HEADS], sum[HEADS] = {};
        unrolled_for (int h = 0; h < HEADS; h++)
            x[h] = head + h < n
                       ? load_number(args.q,
                                     token * args.batch_stride +
                                         (kv_head * n + head + h) * args.head_stride + channel,
                                     args.type)
                       : 0;
        __syncthreads();
        q[channel] = make_float4(x[0], x[1], x[2], x[3]);
        __syncthreads();
        unrolled_for (uint32_t first = 0; first < D; first += AHEAD) {
            if (AHEAD < D && first + i > 0)
                unrolled_for (int k = 0; k < AHEAD; k++)
                    key_transform[k] = column[(size_t)(first + k) * D];
            unrolled_for (int k = 0; k < AHEAD; k++) {
                const float4 y = q[first + k];
                sum[0] = fmaf(key_transform[k], y.x, sum[0]);
                sum[1] = fmaf(key_transform[k], y.y, sum[1]);
                sum[2] = fmaf(key_transform[k], y.z, sum[2]);
                sum[3] = fmaf(key_transform[k], y.w, sum[3]);
            }
        }
        unrolled_for (int h = 0; h < HEADS; h++)
            if (head + h < n)
                args.out[(((size_t)(matrix * args.batch + token) * n_kv_heads + kv_head) * n +
                          head + h) *
                             D +
                         channel] = sum[h];
    }
}

/* The rows of N tokens from `first` on, W ((x - c) / s), with all threads of a block of D, as
 * short_row_through_matrix computes one. Each number of the matrix is read once for all of them.
 * Warp i gets the row of token first + i, and whether it was finite before the transform. */
template <int D, int N, class Book>
KVANT_INLINE Row<D> several_rows_through_matrix(const FewArgs<Book> &args, const ShortRole &role,
                                                uint32_t first, int kv_head, bool &finite)
{
    constexpr int AHEAD = D > 128 ? 64 : D;
    __shared__ float x[D][N], y[N][D];
    const int channel = threadIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31,
              at = kv_head * D + channel;
    const float *column = role.key_transform + (size_t)kv_head * D * D + channel;
    float key_transform[AHEAD], sum[N] = {};
    unrolled_for (int i = 0; i < AHEAD; i++)
        key_transform[i] = column[(size_t)i * D];
    unrolled_for (int t = 0; t < N; t++) {
        float number = 0;
        if (first + t < args.n_tokens)
            number = load_number(role.rows,
                                 (first + t) * role.token_stride + kv_head * role.row_head_stride +
                                     channel,
                                 args.type);
        if (role.center)
            number = __fsub_rn(number, role.center[at]);
        if (role.scale)
            number = __fdiv_rn(number, role.scale[at]);
        x[channel][t] = number;
    }
    __syncthreads();
    finite = true;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        finite &= is_finite(x[lane + 32 * j][warp]);
    unrolled_for (int from = 0; from < D; from += AHEAD) {
        if (from > 0)
            unrolled_for (int i = 0; i < AHEAD; i++)
                key_transform[i] = column[(size_t)(from + i) * D];
        unrolled_for (int i = 0; i < AHEAD; i++)
            unrolled_for (int t = 0; t < N; t++)
                sum[t] = __fadd_rn(sum[t], __fmul_rn(x[from + i][t], key_transform[i]));
    }
    unrolled_for (int t = 0; t < N; t++)
        y[t][channel] = sum[t];
    __syncthreads();
    Row<D> row;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        row.x[j] = y[warp][lane + 32 * j];
    return row;
}

} // namespace kvant
