/* queries.cu - multiplies queries with the matrices of keys: q times (R W^-1)^T.
 *
 * A thread block multiplies up to 8 query heads of one kv head and one sequence with one matrix. A
 * thread has one channel and a quarter of the matrix's rows, so all of its loads overlap. The
 * quarters are added in order. With a compact form a thread has a quarter of a row of W^-T, and
 * each result is rotated. */
#include "../compact.cuh"
#include "../launch.h"
#include "../ptx.cuh"
#include "queries.h"

namespace kvant
{

constexpr int QUARTERS = 4;

template <int D> struct QuerySpace {
    float q[QUERY_HEADS][D];
    float sums[QUARTERS][QUERY_HEADS][D];
};

/* A warp loads a head. */
template <int D>
KVANT_INLINE void load_queries(QuerySpace<D> &space, const QueryArgs &args, size_t sequence,
                               uint32_t first_head, uint32_t n_heads)
{
    const int lane = threadIdx.x & 31;
    for (uint32_t h = threadIdx.x >> 5; h < QUERY_HEADS; h += QUARTERS * D / 32) {
        Row<D> row{};
        if (h < n_heads)
            row = load_row<D>(args.q,
                              sequence * args.batch_stride + (first_head + h) * args.head_stride,
                              args.type, lane);
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
            space.q[h][lane + 32 * j] = row.x[j];
    }
}

template <int D, int AHEAD>
KVANT_INLINE void load_matrix(float (&key_transform)[AHEAD], const float *m, int first)
{
    unrolled_for (int k = 0; k < AHEAD; k++)
        key_transform[k] = m[(size_t)(first + k) * D];
}

/* Adds the quarters of a head's channel. */
template <int D> KVANT_INLINE float add_quarters(const QuerySpace<D> &space, uint32_t head, int at)
{
    float y = 0;
    for (int i = 0; i < QUARTERS; i++)
        y += space.sums[i][head][at];
    return y;
}

/* The block's heads through a compact form. */
template <int D>
KVANT_INLINE void compact_queries(QuerySpace<D> &space, const QueryArgs &args, uint32_t matrix,
                                  uint32_t first_head, uint32_t n_heads)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quarter = threadIdx.x / D;
    const uint32_t kv_head = blockIdx.y, n_all = gridDim.y * args.heads_a_kv;
    InverseRow<D, QUARTERS> row;
    row.load(args.matrices[matrix], gridDim.y, kv_head, threadIdx.x % D, quarter);
    begin_next();
    wait_for_prior();
    load_queries(space, args, blockIdx.z - matrix * args.batch, first_head, n_heads);
    __syncthreads();
    float sum[QUERY_HEADS] = {};
    row.each_group([&](const float(&m)[KVANT_COMPACT_COLUMNS], int channel) {
        unrolled_for (int h = 0; h < (int)QUERY_HEADS; h++)
            unrolled_for (int i = 0; i < (int)KVANT_COMPACT_COLUMNS; i++)
                sum[h] = fmaf(m[i], space.q[h][channel + i], sum[h]);
    });
    unrolled_for (int h = 0; h < (int)QUERY_HEADS; h++)
        space.sums[quarter][h][row.channel()] = sum[h] * row.unit;
    __syncthreads();
    float *out = args.out + ((size_t)blockIdx.z * n_all + first_head) * D;
    for (uint32_t h = warp; h < n_heads; h += QUARTERS * D / 32) {
        Row<D> y;
        y.each(lane, [&](float &x, int channel) { x = add_quarters(space, h, channel); });
        rotate(y, args.rotation, lane);
        y.each(lane, [&](float x, int channel) { out[(size_t)h * D + channel] = x; });
    }
}

/* AHEAD: numbers of the matrix that a thread reads at once. With few blocks, many reads at once
 * wait least. With many blocks, blocks hide each other's waits and need the registers. */
template <int D, int AHEAD>
__global__ void __launch_bounds__(QUARTERS *D)
    queries_kernel(const __grid_constant__ QueryArgs args)
{
    extern __shared__ uint8_t raw[];
    QuerySpace<D> &space = *reinterpret_cast<QuerySpace<D> *>(raw);
    const uint32_t kv_head = blockIdx.y, first = blockIdx.x * QUERY_HEADS;
    const uint32_t left = args.heads_a_kv - first,
                   n_heads = left < QUERY_HEADS ? left : QUERY_HEADS;
    const uint32_t first_head = kv_head * args.heads_a_kv + first;
    const int channel = threadIdx.x % D, quarter = threadIdx.x / D,
              begin = quarter * (D / QUARTERS);
    const uint32_t matrix = blockIdx.z / args.batch;
    const float *m =
        static_cast<const float *>(args.matrices[matrix]) + (size_t)kv_head * D * D + channel;
    if (args.compact >> matrix & 1)
        return compact_queries(space, args, matrix, first_head, n_heads);
    float sum[QUERY_HEADS] = {}, key_transform[AHEAD];
    load_matrix<D, AHEAD>(key_transform, m, begin); /* these loads run while queries are loaded */
    begin_next();
    wait_for_prior();
    load_queries(space, args, blockIdx.z - matrix * args.batch, first_head, n_heads);
    __syncthreads();
    unrolled_for (int i = 0; i < D / QUARTERS; i += AHEAD) {
        if (i > 0)
            load_matrix<D, AHEAD>(key_transform, m, begin + i);
        unrolled_for (int k = 0; k < AHEAD; k++)
            unrolled_for (int h = 0; h < (int)QUERY_HEADS; h++)
                sum[h] = fmaf(key_transform[k], space.q[h][begin + i + k], sum[h]);
    }
    unrolled_for (int h = 0; h < (int)QUERY_HEADS; h++)
        space.sums[quarter][h][channel] = sum[h];
    __syncthreads();
    float *out = args.out + ((size_t)blockIdx.z * gridDim.y * args.heads_a_kv + first_head) * D;
    for (uint32_t h = quarter; h < n_heads; h += QUARTERS)
        out[(size_t)h * D + channel] = add_quarters(space, h, channel);
}

/* ---- many tokens ---- */

/* Products by tensor cores. A number is split into two halves, which together keep 22 bits of it
 * divided by its unit. Units are powers of two above the largest number of a query row and of a
 * column of the matrix. The product of both lower halves is left out. A thread block processes ROWS
 * query rows of a kv head, and then the next ROWS. A warp has 16 of them and 32 columns. */
constexpr uint32_t ROWS = 32, ROW_BLOCKS = 264; /* two a multiprocessor */
constexpr uint32_t NO_ROW = UINT32_MAX;

template <int D> struct RowSpace {
    /* with this stride, eight rows of an operand lie in different banks */
    static constexpr int STRIDE = D + 8;
    alignas(16) __half m[2][D * STRIDE], q[2][ROWS * STRIDE];
    float largest[2][D];
    alignas(8) float m_unit[D];
    float q_unit[ROWS];
    uint32_t out_row[ROWS]; /* or NO_ROW */
};

/* Splits x / unit into two halves; `lower` holds the remainder of `upper`. */
KVANT_INLINE void split(float x, __half &upper, __half &lower)
{
    upper = __float2half_rn(x);
    lower = __float2half_rn(x - __half2float(upper));
}

/* Rotates N rows at once, so that their shuffles overlap; as rotate. */
template <int D, int N>
KVANT_INLINE void rotate_rows(Row<D> (&rows)[N], const kvant_cuda_wide_rotation &rotation, int lane)
{
    if (rotation.block == 0)
        return;
    unrolled_for (int n = 0; n < N; n++)
        apply_signs(rows[n], rotation, lane);
#pragma unroll 1
    for (uint32_t distance = 1; distance < 32 && distance < rotation.block; distance *= 2) {
        const float sign = lane & distance ? -1.0f : 1.0f;
        unrolled_for (int n = 0; n < N; n++)
            unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++)
                rows[n].x[j] =
                    fmaf(rows[n].x[j], sign, __shfl_xor_sync(FULL, rows[n].x[j], distance));
    }
    unrolled_for (int n = 0; n < N; n++)
        hadamard_of_lane(rows[n], rotation);
}

/* Loads half a column of R W^-T from a compact form. Its numbers are copied to where queries will
 * be. Then a warp makes rows of the matrix, which lie where the matrix's halves will be. */
template <int D>
KVANT_INLINE void load_compact(RowSpace<D> &space, float (&key_transform)[D / 2],
                               const QueryArgs &args, uint32_t matrix, uint32_t kv_head)
{
    constexpr int AT_ONCE = 4, WARPS = 2 * D / 32, GROUPS = D / (int)KVANT_COMPACT_COLUMNS,
                  NUMBERS = GROUPS * D - (int)KVANT_COMPACT_COLUMNS / 2 * GROUPS * (GROUPS - 1);
    static_assert(COMPACT_PART<D> == D && sizeof(space.m) >= D * D * sizeof(float) &&
                      sizeof(space.q) >= NUMBERS * sizeof(uint4),
                  "one part, which fits");
    float *rows = reinterpret_cast<float *>(space.m);
    uint4 *copy = reinterpret_cast<uint4 *>(space.q);
    const int lane = threadIdx.x & 31;
    InversePart of(args.matrices[matrix], D, gridDim.y, kv_head, 0, D);
    static_assert(AT_ONCE == sizeof(Columns) / sizeof(float), "columns that are read at once");
    Row<D> units;
    for (int i = threadIdx.x; i < NUMBERS; i += 2 * D)
        copy[i] = of.groups[i];
    units.each(lane, [&](float &x, int channel) { x = of.units[channel]; });
    of.groups = copy;
    __syncthreads();
#pragma unroll 1
    for (int first = (int)(threadIdx.x >> 5) * AT_ONCE; first < D; first += WARPS * AT_ONCE) {
        Row<D> some[AT_ONCE];
        unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
            const int channel = lane + 32 * j;
            const Columns four = of.columns(channel, first);
            unrolled_for (int n = 0; n < AT_ONCE; n++)
                some[n].x[j] = channel < first + n ? 0.0f : four.number[n] * units.x[j];
        }
        rotate_rows(some, args.rotation, lane);
        unrolled_for (int n = 0; n < AT_ONCE; n++)
            some[n].each(lane, [&](float x, int channel) { rows[(first + n) * D + channel] = x; });
    }
    __syncthreads();
    load_matrix<D, D / 2>(key_transform, rows + threadIdx.x % D, threadIdx.x / D * (D / 2));
}

/* A thread copies half a column. */
template <int D>
KVANT_INLINE void place_matrix(RowSpace<D> &space, const float (&key_transform)[D / 2])
{
    const int column = threadIdx.x % D, half = threadIdx.x / D;
    float largest = 0;
    unrolled_for (int i = 0; i < D / 2; i++)
        largest = fmaxf(largest, fabsf(key_transform[i]));
    space.largest[half][column] = largest;
    __syncthreads();
    const float unit = power_above(fmaxf(space.largest[0][column], space.largest[1][column])),
                inverse = __frcp_rn(unit);
    space.m_unit[column] = unit;
    unrolled_for (int i = 0; i < D / 2; i++) {
        const int at = (half * (D / 2) + i) * RowSpace<D>::STRIDE + column;
        split(key_transform[i] * inverse, space.m[0][at], space.m[1][at]);
    }
}

/* The warp's rows n, n + WARPS, ... of ROWS rows. They are loaded while the preceding ROWS rows are
 * multiplied. */
template <int D> struct WarpRows {
    static constexpr int WARPS = D / 16, N = (ROWS + WARPS - 1) / WARPS;
    Row<D> rows[N];
    uint32_t to; /* the row of the results for the warp's row whose number is the lane */

    /* Rows behind the last one are loaded as the last one. */
    KVANT_INLINE void load(const QueryArgs &args, uint32_t first, uint32_t n_rows,
                           uint32_t first_head, uint32_t n_heads)
    {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const uint32_t r = first + warp + lane * WARPS, there = min(r, n_rows - 1),
                       token = there / args.heads_a_kv,
                       head = first_head + there - token * args.heads_a_kv;
        const unsigned long long from = token * args.batch_stride + head * args.head_stride;
        to = r < n_rows ? token * n_heads + head : NO_ROW;
        unrolled_for (int i = 0; i < N; i++)
            rows[i] = load_row<D>(args.q, __shfl_sync(FULL, from, i), args.type, lane);
    }

    KVANT_INLINE void place(RowSpace<D> &space)
    {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        if (lane < N && warp + lane * WARPS < (int)ROWS)
            space.out_row[warp + lane * WARPS] = to;
        unrolled_for (int i = 0; i < N; i++) {
            const int n = warp + i * WARPS;
            if (n >= (int)ROWS)
                break;
            float largest = 0;
            rows[i].each(lane, [&](float &x, int) { largest = fmaxf(largest, fabsf(x)); });
            const float unit = power_above(largest_of(largest)), inverse = __frcp_rn(unit);
            rows[i].each(lane, [&](float &x, int channel) {
                const int at = n * RowSpace<D>::STRIDE + channel;
                split(x * inverse, space.q[0][at], space.q[1][at]);
            });
            if (lane == 0)
                space.q_unit[n] = unit;
        }
    }
};

/* Multiplies the warp's 16 rows and 32 columns. */
template <int D>
KVANT_INLINE void multiply_rows(const RowSpace<D> &space, int row, int column, int lane,
                                float (&sums)[4][4])
{
    constexpr int STRIDE = RowSpace<D>::STRIDE;
    unrolled_for (int j = 0; j < 4; j++)
        sums[j][0] = sums[j][1] = sums[j][2] = sums[j][3] = 0;
#pragma unroll 2
    for (int k = 0; k < D; k += 32) {
        uint32_t a[2][2][4]; /* by half; 16 channels each */
        unrolled_for (int h = 0; h < 2; h++)
            unrolled_for (int i = 0; i < 2; i++)
                load_matrices<false>(a[h][i], space.q[h] + (row + (lane & 15)) * STRIDE + k +
                                                  16 * i + 8 * (lane >> 4));
        unrolled_for (int j = 0; j < 4; j++) {
            uint32_t b[2][4];
            unrolled_for (int h = 0; h < 2; h++)
                load_matrices<true>(b[h], space.m[h] + (k + lane) * STRIDE + column + 8 * j);
            unrolled_for (int i = 0; i < 2; i++) {
                mma(sums[j], a[1][i], b[0][2 * i], b[0][2 * i + 1]);
                mma(sums[j], a[0][i], b[1][2 * i], b[1][2 * i + 1]);
                mma(sums[j], a[0][i], b[0][2 * i], b[0][2 * i + 1]);
            }
        }
    }
}

template <int D>
__global__ void __launch_bounds__(2 * D, 2)
    query_rows_kernel(const __grid_constant__ QueryArgs args)
{
    extern __shared__ uint8_t raw[];
    RowSpace<D> &space = *reinterpret_cast<RowSpace<D> *>(raw);
    const uint32_t kv_head = blockIdx.y, matrix = blockIdx.z, n_rows = args.batch * args.heads_a_kv,
                   first_head = kv_head * args.heads_a_kv, n_heads = gridDim.y * args.heads_a_kv;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = 16 * (warp % 2),
              column = 32 * (warp / 2);
    float key_transform[D / 2];
    if (args.compact >> matrix & 1)
        load_compact(space, key_transform, args, matrix, kv_head);
    else
        load_matrix<D, D / 2>(key_transform,
                              static_cast<const float *>(args.matrices[matrix]) +
                                  (size_t)kv_head * D * D + threadIdx.x % D,
                              threadIdx.x / D * (D / 2));
    begin_next();
    place_matrix(space, key_transform);
    if (!args.ready)
        wait_for_prior();
    WarpRows<D> rows;
    uint32_t first = blockIdx.x * ROWS;
    rows.load(args, first, n_rows, first_head, n_heads);
    float *out = args.out + (size_t)matrix * args.batch * n_heads * D;
#pragma unroll 1
    for (; first < n_rows; first += gridDim.x * ROWS) {
        float sums[4][4];
        rows.place(space);
        __syncthreads();
        rows.load(args, first + gridDim.x * ROWS, n_rows, first_head, n_heads);
        multiply_rows(space, row, column, lane, sums);
        unrolled_for (int h = 0; h < 2; h++) {
            const uint32_t n = row + lane / 4 + 8 * h, to = space.out_row[n];
            const float unit = space.q_unit[n];
            unrolled_for (int j = 0; j < 4; j++) {
                const int channel = column + 8 * j + 2 * (lane & 3);
                const float2 units = *reinterpret_cast<const float2 *>(space.m_unit + channel);
                if (to != NO_ROW)
                    *reinterpret_cast<float2 *>(out + (size_t)to * D + channel) = make_float2(
                        sums[j][2 * h] * unit * units.x, sums[j][2 * h + 1] * unit * units.y);
            }
        }
        __syncthreads(); /* the rows have been read */
    }
    if (args.ready) /* when this kernel ends, those before it have ended, too */
        wait_for_prior();
}

template <int D>
cudaError_t launch_query_rows(const QueryArgs &args, uint32_t n_kv_heads, cudaStream_t stream)
{
    static_assert(sizeof(RowSpace<D>) <= 99 * 1024, "GPUs of 8.6, 8.9 and 12.0 have no more");
    const uint32_t tiles = (args.batch * args.heads_a_kv + ROWS - 1) / ROWS,
                   most = ROW_BLOCKS / (n_kv_heads * args.n_matrices);
    const void *kernel = (const void *)query_rows_kernel<D>;
    const cudaError_t error = allow_shared(kernel, sizeof(RowSpace<D>));
    QueryArgs p = args;
    void *parameters[] = { &p };
    if (error != cudaSuccess)
        return error;
    return launch_early(kernel,
                        dim3(tiles < most ? tiles
                             : most       ? most
                                          : 1,
                             n_kv_heads, args.n_matrices),
                        2 * D, parameters, sizeof(RowSpace<D>), stream);
}

/* A channel of W^-T q. */
KVANT_INLINE float inverse_product(const QueryArgs &args, uint32_t matrix, uint32_t kv_head,
                                   const float *q)
{
    const uint32_t d = blockDim.x, n = kvant_key_transform_part(d);
    const PartChannel at(d, n, threadIdx.x);
    const InversePart of(args.matrices[matrix], d, gridDim.x / args.heads_a_kv, kv_head, at.part,
                         n);
    float sum = 0;
    for (uint32_t i = 0; i <= at.own; i++)
        sum = fmaf(of.number(at.own, i), q[kvant_part_channel(d, n, at.part, i)], sum);
    return sum * of.units[at.own];
}

/* For any head_dim: a thread block processes a query head, and a thread a channel. */
__global__ void __launch_bounds__(KVANT_CUDA_MOST_DIM)
    queries_any_kernel(const __grid_constant__ QueryArgs args)
{
    __shared__ float q[KVANT_CUDA_MOST_DIM];
    const size_t d = blockDim.x, channel = threadIdx.x, head = blockIdx.x,
                 matrix = blockIdx.y / args.batch, sequence = blockIdx.y - matrix * args.batch;
    q[channel] = load_number(
        args.q, sequence * args.batch_stride + head * args.head_stride + channel, args.type);
    __syncthreads();
    float *out = args.out + (blockIdx.y * (size_t)gridDim.x + head) * d + channel;
    const uint32_t kv_head = (uint32_t)(head / args.heads_a_kv);
    if (args.compact >> matrix & 1) {
        *out = rotate_any(inverse_product(args, (uint32_t)matrix, kv_head, q), q, args.rotation);
        return;
    }
    const float *m = static_cast<const float *>(args.matrices[matrix]) + kv_head * d * d + channel;
    float sum = 0;
#pragma unroll 8
    for (size_t i = 0; i < d; i++)
        sum = fmaf(m[i * d], q[i], sum);
    *out = sum;
}

cudaError_t launch_queries(const QueryArgs &args, uint32_t head_dim, uint32_t n_kv_heads,
                           cudaStream_t stream)
{
    const uint32_t rows = args.batch * args.n_matrices;
    const dim3 grid(groups_of(args), n_kv_heads, rows);
    if (!kvant_cuda_knows(head_dim))
        return launch_kernel(queries_any_kernel, dim3(n_kv_heads * args.heads_a_kv, rows), head_dim,
                             0, stream, args);
    const bool few = (uint64_t)grid.x * grid.y * grid.z <= 256;
    return with_head_dim(head_dim, [&](auto d) {
        constexpr int D = decltype(d)::value, ALL = D == 256 ? 32 : D / QUARTERS,
                      MANY = D == 256 ? ALL / 2 : ALL;
        /* with more channels, a thread's part of the matrix would be too large */
        if constexpr (D <= 128)
            if (!few)
                return launch_query_rows<D>(args, n_kv_heads, stream);
        QueryArgs p = args;
        void *parameters[] = { &p };
        return launch_early(few ? (const void *)queries_kernel<D, ALL>
                                : (const void *)queries_kernel<D, MANY>,
                            grid, QUARTERS * D, parameters, sizeof(QuerySpace<D>), stream);
    });
}

} // namespace kvant
