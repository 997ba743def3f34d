/* short_matrix.cuh - keys and queries of a decode step through a matrix, or through its compact
 * form. A thread computes one number of a row.
 *
 * Owns the products. append_short.cu owns the kernels, and the rows' way to their pages. */
#pragma once

#include "../compact.cuh"
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

/* A channel's column of a matrix, AHEAD numbers at a time. Or the channel's column of W from the
 * compact form, which has the numbers of the channel's part. All D threads of a block call it. */
template <int D> struct KeyColumn {
    static constexpr int AHEAD = COMPACT_PART<D>;
    float numbers[AHEAD], diagonal;
    const float *column;
    bool compact;
    int part;

    KVANT_INLINE void load(const ShortRole &role, int kv_head, int channel)
    {
        column = role.key_transform + (size_t)kv_head * D * D + channel;
        compact = role.compact;
        if (compact)
            load_triangle(role.compact, kv_head, channel);
        else
            load_ahead(0);
    }
    KVANT_INLINE void load_ahead(int first)
    {
        unrolled_for (int i = 0; i < AHEAD; i++)
            numbers[i] = column[(size_t)(first + i) * D];
    }

    /* All loads come first, because a branch for each row would wait for its load. So a thread also
     * loads bytes above the diagonal, which hold codes of other numbers. The code of an odd column
     * stays in the upper half of its byte, and makes 2^19 + 8 + code from the bits of `zero`. The
     * code of an even column makes 2^23 + 8 + code. */
    KVANT_INLINE void load_triangle(const void *compact_, int kv_head, int channel)
    {
        __shared__ float4 steps[D / 4];
        const PartChannel at(D, AHEAD, channel);
        const TrianglePart triangle(compact_, D, kv_head, at.part, AHEAD);
        const uint8_t *codes =
            reinterpret_cast<const uint8_t *>(triangle.halves + 2 * AHEAD) + at.own / 2;
        const bool odd = at.own % 2;
        const uint32_t mask = odd ? 0xf0u : 0xfu, zero = odd ? 0x49000080u : 0x4b000008u;
        uint32_t bytes[AHEAD];
        unrolled_for (int i = 0; i < AHEAD; i++)
            bytes[i] = codes[i * i / 4];
        part = (int)at.part;
        diagonal = half_bits(triangle.halves[AHEAD + at.own]);
        reinterpret_cast<float *>(steps)[part * AHEAD + at.own] =
            half_bits(triangle.halves[at.own]);
        __syncthreads();
        unrolled_for (int i = 0; i < AHEAD; i++) {
            const float4 four = steps[(part * AHEAD + i) / 4];
            const float step[4] = { four.x, four.y, four.z, four.w };
            const float number = __fmul_rn(step[i % 4], __uint_as_float((bytes[i] & mask) ^ zero) -
                                                            __uint_as_float(zero));
            numbers[i] = i > (int)at.own ? number : 0.0f;
        }
    }

    /* Calls use(channel, number) in the order of the channels. */
    template <class F> KVANT_INLINE void each(F &&use)
    {
        if (compact)
            use((int)threadIdx.x, diagonal);
        unrolled_for (int first = 0; first < D; first += AHEAD) {
            if (first > 0 && compact)
                break;
            if (first > 0)
                load_ahead(first);
            unrolled_for (int i = 0; i < AHEAD; i++)
                use(D > AHEAD && compact ? (int)kvant_part_channel(D, AHEAD, part, i) : first + i,
                    numbers[i]);
        }
    }
};

/* Computes W ((x - c) / s) with all threads of a block of D, for keys with a matrix. Like
 * combine_rows, it adds the rows of the matrix in their order. */
template <int D>
KVANT_INLINE Row<D> short_row_through_matrix(const ShortRole &role, kvant_cuda_type type,
                                             const FewCenter &center, KeyColumn<D> &column,
                                             size_t row_at, int kv_head, bool &finite)
{
    __shared__ float x[D], y[D];
    const int channel = threadIdx.x, at = kv_head * D + channel;
    float number, sum = 0;
    if (!center.any)
        number = load_number(role.rows, row_at + channel, type);
    if (!role.compact)
        column.load(role, kv_head, channel);
    if (center.any)
        number = center.about(static_cast<const float *>(role.rows) + row_at, x, D);
    if (role.center)
        number = __fsub_rn(number, role.center[at]);
    if (role.scale)
        number = __fdiv_rn(number, role.scale[at]);
    x[channel] = number;
    finite = __syncthreads_and(is_finite(number));
    column.each([&](int i, float weight) { sum = __fadd_rn(sum, __fmul_rn(x[i], weight)); });
    y[channel] = sum;
    __syncthreads();
    Row<D> row;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        row.x[j] = y[threadIdx.x % 32 + 32 * j];
    return row;
}

/* Four query heads of a kv head at a time go through a matrix, a channel a thread. */
template <int D> struct ShortMatrix {
    static constexpr int AHEAD = D > 128 ? 64 : D;
    const float *column;
    float key_transform[AHEAD];

    KVANT_INLINE void load_ahead(int first)
    {
        unrolled_for (int i = 0; i < AHEAD; i++)
            key_transform[i] = column[(size_t)(first + i) * D];
    }
    KVANT_INLINE void load(const QueryArgs &args, uint32_t matrix, int kv_head, int)
    {
        column = static_cast<const float *>(args.matrices[matrix]) + (size_t)kv_head * D * D +
                 threadIdx.x;
        load_ahead(0);
    }
    KVANT_INLINE void multiply(const float4 (&q)[D], bool again, float (&sum)[4])
    {
        unrolled_for (uint32_t first = 0; first < D; first += AHEAD) {
            if (AHEAD < D && (first > 0 || again))
                load_ahead(first);
            unrolled_for (int k = 0; k < AHEAD; k++)
                add_products(key_transform[k], q[first + k], sum);
        }
    }
    KVANT_INLINE static void add_products(float m, const float4 &y, float (&sum)[4])
    {
        sum[0] = fmaf(m, y.x, sum[0]);
        sum[1] = fmaf(m, y.y, sum[1]);
        sum[2] = fmaf(m, y.z, sum[2]);
        sum[3] = fmaf(m, y.w, sum[3]);
    }
};

/* The same with a compact form. Products are rotated afterwards, a head a warp. */
template <int D> struct ShortInverse {
    InverseRow<D, 1> row;

    KVANT_INLINE void load(const QueryArgs &args, uint32_t matrix, int kv_head, int n_kv_heads)
    {
        row.load(args.matrices[matrix], n_kv_heads, kv_head, threadIdx.x, 0);
    }
    KVANT_INLINE void multiply(const float4 (&q)[D], bool, float (&sum)[4])
    {
        row.each_group([&](const float(&m)[KVANT_COMPACT_COLUMNS], int channel) {
            unrolled_for (int i = 0; i < (int)KVANT_COMPACT_COLUMNS; i++)
                ShortMatrix<D>::add_products(m[i], q[channel + i], sum);
        });
        unrolled_for (int h = 0; h < 4; h++)
            sum[h] *= row.unit;
    }
};

/* The queries of a kv head, of tokens first .. end - 1, through their matrix: four heads at a
 * time. */
template <int D, class Matrix>
KVANT_INLINE void queries_through(const QueryArgs &args, uint32_t matrix, uint32_t first_token,
                                  uint32_t end, int kv_head, int n_kv_heads)
{
    constexpr int HEADS = 4;
    constexpr bool COMPACT = std::is_same<Matrix, ShortInverse<D>>::value;
    __shared__ float4 q[D];
    __shared__ float y[COMPACT ? HEADS : 1][D];
    const int channel = threadIdx.x, n = (int)args.heads_a_kv;
    Matrix m;
    m.load(args, matrix, kv_head, n_kv_heads);
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
        m.multiply(q, i > 0, sum);
        float *out =
            args.out +
            (((size_t)(matrix * args.batch + token) * n_kv_heads + kv_head) * n + head) * D;
        if constexpr (COMPACT) {
            unrolled_for (int h = 0; h < HEADS; h++)
                y[h][m.row.channel()] = sum[h];
            __syncthreads();
            for (int h = threadIdx.x >> 5; h < HEADS && head + h < n; h += D / 32)
                store_rotated<D>(y[h], args.rotation, out + h * D);
        } else {
            unrolled_for (int h = 0; h < HEADS; h++)
                if (head + h < n)
                    out[h * D + channel] = sum[h];
        }
    }
}

template <int D>
KVANT_INLINE void short_queries(const QueryArgs &args, uint32_t matrix, uint32_t first_token,
                                uint32_t end, int kv_head, int n_kv_heads)
{
    if (args.compact >> matrix & 1)
        queries_through<D, ShortInverse<D>>(args, matrix, first_token, end, kv_head, n_kv_heads);
    else
        queries_through<D, ShortMatrix<D>>(args, matrix, first_token, end, kv_head, n_kv_heads);
}

/* The rows of N tokens from `first` on, W ((x - c) / s), with all threads of a block of D, as
 * short_row_through_matrix computes one. Each number of the matrix is read once for all of them.
 * Warp i gets the row of token first + i, and whether it was finite before the transform. */
template <int D, int N, class Book>
KVANT_INLINE Row<D> several_rows_through_matrix(const FewArgs<Book> &args, const ShortRole &role,
                                                uint32_t first, int kv_head, bool &finite)
{
    __shared__ float x[D][N], y[N][D];
    const int channel = threadIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31,
              at = kv_head * D + channel;
    float sum[N] = {};
    KeyColumn<D> column;
    column.load(role, kv_head, channel);
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
    column.each([&](int i, float weight) {
        unrolled_for (int t = 0; t < N; t++)
            sum[t] = __fadd_rn(sum[t], __fmul_rn(x[i][t], weight));
    });
    unrolled_for (int t = 0; t < N; t++)
        y[t][channel] = sum[t];
    __syncthreads();
    Row<D> row;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
        row.x[j] = y[warp][lane + 32 * j];
    return row;
}

} // namespace kvant
