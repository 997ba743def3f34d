/* compact.cu - makes the compact form of the matrices of keys (math/compact.h), and makes
 * matrices from it.
 *
 * The inverse of a triangle is solved in binary64, a column a thread. Rows of W are the rows of the
 * triangles. Rows of R W are these rows through the rotation; they have the bits of
 * kvant_transform_set_matrix. */
#include "../any/rows.cuh"
#include "../checks.h"
#include "../compact.cuh"
#include "../launch.h"
#include "../ptx.cuh"
#include "../table.h"

#include <algorithm>

namespace kvant
{

/* The inverse of a triangle in shared memory: row by row, numbers up to the diagonal. Behind it
 * two rows of the triangle. */
struct Inverse {
    double *numbers;
    uint32_t n;

    __host__ __device__ static size_t numbers_of(uint32_t n)
    {
        return n * (n + 1) / 2 + 2 * n;
    }
    __host__ __device__ static size_t bytes(uint32_t n)
    {
        return numbers_of(n) * sizeof(double);
    }
    KVANT_INLINE double &at(uint32_t row, uint32_t column) const
    {
        return numbers[row * (row + 1) / 2 + column];
    }

    /* Adds N products, from number k on, to the sums. Loads all factors first, because a load takes
     * longer than a product. */
    template <int N>
    KVANT_INLINE static void add(double (&sums)[4], const double *row, const double *z, uint32_t k)
    {
        double a[N], b[N];
        unrolled_for (int m = 0; m < N; m++)
            a[m] = row[k + m], b[m] = z[m * k + m * (m + 1) / 2];
        unrolled_for (int m = 0; m < N; m++)
            sums[m % 4] = fma(a[m], b[m], sums[m % 4]);
    }

    /* The sum of row[k] times number k of the column, over all k below i. */
    KVANT_INLINE double product(const double *row, uint32_t i, uint32_t column) const
    {
        double sums[4] = {};
        uint32_t k = column;
#pragma unroll 1
        for (; k + 16 <= i; k += 16)
            add<16>(sums, row, &at(k, column), k);
#pragma unroll 1
        for (; k + 4 <= i; k += 4)
            add<4>(sums, row, &at(k, column), k);
        for (; k < i; k++)
            sums[0] = fma(row[k], at(k, column), sums[0]);
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }

    /* Thread j solves column j: L z = e_j. By all threads of the block. */
    KVANT_INLINE void solve(const TrianglePart &triangle) const
    {
        double *const rows = numbers + n * (n + 1) / 2;
        const uint32_t column = threadIdx.x;
        for (uint32_t i = 0; i < n; i++) {
            double *const row = rows + i % 2 * n; /* the other one may still be read */
            if (column <= i)
                row[column] = triangle.number(i, column);
            __syncthreads();
            if (column > i)
                continue;
            at(i, column) = ((column == i ? 1.0 : 0.0) - product(row, i, column)) / row[i];
        }
        __syncthreads();
    }

    /* Stores the inverse of a part; thread r stores row r. */
    KVANT_INLINE void store(uint8_t *to) const
    {
        const uint32_t r = threadIdx.x;
        double largest = 0;
        if (r >= n)
            return;
        for (uint32_t j = 0; j <= r; j++)
            largest = fmax(largest, fabs(at(r, j)));
        const float unit = power_above((float)largest);
        reinterpret_cast<float *>(to)[r] = unit;
        uint16_t *groups =
            reinterpret_cast<uint16_t *>(to + kvant_compact_aligned(n * sizeof(float)));
        constexpr uint32_t COLUMNS = KVANT_COMPACT_COLUMNS;
        for (uint32_t g = 0; COLUMNS * g <= r; g++)
            for (uint32_t j = 0; j < COLUMNS; j++) {
                const uint32_t column = COLUMNS * g + j;
                const double x = column <= r ? at(r, column) / (double)unit : 0.0;
                groups[(kvant_compact_rows(n, g) + r - COLUMNS * g) * COLUMNS + j] =
                    __half_as_ushort(__double2half(x));
            }
    }
};

/* Makes the compact form of a part of a kv head; parts have at most 128 channels. A block runs next
 * to few others, so its threads may have many registers. Without this bound the compiler would load
 * the factors of one product at a time. */
__global__ void __launch_bounds__(128, 1)
    compact_kernel(const uint16_t *triangles, uint32_t d, uint8_t *compact,
                   const kvant_cuda_compact_layer *layers)
{
    extern __shared__ double inverse_space[];
    const uint32_t n = kvant_key_transform_part(d), part = blockIdx.x, kv_head = blockIdx.y,
                   number = kv_head * (d / n) + part;
    const Inverse inverse{ inverse_space, n };
    if (layers) {
        triangles = layers[blockIdx.z].triangles;
        compact = static_cast<uint8_t *>(layers[blockIdx.z].compact);
    }
    const TrianglePart triangle(triangles, d, kv_head, part, n);
    const TrianglePart own(compact, d, kv_head, part, n);
    for (uint32_t i = threadIdx.x; i < kvant_triangle_size(n); i += blockDim.x)
        const_cast<uint16_t *>(own.halves)[i] = triangle.halves[i];
    inverse.solve(triangle);
    inverse.store(compact + kvant_compact_inverses_at(d, gridDim.y) +
                  number * kvant_compact_inverse_part(n));
}

/* Makes W^-T of a part of a kv head, by rows of the channel that it is multiplied with. It is not
 * rotated yet. */
__global__ void invert_kernel(const void *compact, uint32_t d, float *matrix)
{
    extern __shared__ double inverse_space[];
    const uint32_t n = kvant_key_transform_part(d), part = blockIdx.x, kv_head = blockIdx.y;
    const Inverse inverse{ inverse_space, n };
    inverse.solve(TrianglePart(compact, d, kv_head, part, n));
    for (uint32_t j = 0; j < n; j++) {
        float *row = matrix + ((size_t)kv_head * d + kvant_part_channel(d, n, part, j)) * d;
        for (uint32_t channel = threadIdx.x; channel < d; channel += blockDim.x) {
            const PartChannel at(d, n, channel);
            row[channel] = at.part == part && at.own >= j ? (float)inverse.at(at.own, j) : 0.0f;
        }
    }
}

/* Rows of R W from a compact form, or of R W^-T from W^-T, in place (compact NULL). Without a
 * rotation, rows of W. A warp makes a row. A launch that begins early reads the compact form before
 * the preceding kernel in the stream has ended; that kernel may still read `matrix`. */
template <int P>
__global__ void __launch_bounds__(256)
    expand_kernel(const void *compact, const __grid_constant__ kvant_cuda_wide_rotation rotation,
                  uint32_t d, float *matrix)
{
    const uint32_t lane = threadIdx.x & 31, kv_head = blockIdx.y, n = kvant_key_transform_part(d),
                   position = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32,
                   part = position / n, own = position % n;
    begin_next();
    if (position >= d)
        return;
    float *to = matrix + ((size_t)kv_head * d + kvant_part_channel(d, n, part, own)) * d;
    Row<P> row{};
    if (compact) {
        const TrianglePart triangle(compact, d, kv_head, part, n);
        each_of(row, (int)d, (int)lane, [&](float &x, uint32_t channel) {
            const PartChannel at(d, n, channel);
            if (at.part == part && at.own <= own)
                x = triangle.number(own, at.own);
        });
    } else
        each_of(row, (int)d, (int)lane, [&](float &x, int channel) { x = to[channel]; });
    rotate(row, rotation, (int)lane);
    wait_for_prior();
    each_of(row, (int)d, (int)lane, [&](float x, int channel) { to[channel] = x; });
}

/* Places the centres of a kv head of a layer, a channel a thread. */
__global__ void __launch_bounds__(KVANT_CUDA_MOST_DIM)
    center_kernel(const __grid_constant__ kvant_cuda_center_layer one,
                  const kvant_cuda_center_layer *layers,
                  const __grid_constant__ kvant_cuda_wide_rotation rotation)
{
    __shared__ float row[KVANT_CUDA_MOST_DIM];
    const kvant_cuda_center_layer layer = layers ? layers[blockIdx.y] : one;
    const uint32_t d = blockDim.x, kv_head = blockIdx.x, n = kvant_key_transform_part(d),
                   own = kv_head * d + threadIdx.x;
    for (float *to : layer.centers)
        if (to)
            to[own] = layer.center[own];
    if (layer.starts)
        layer.starts[own] = layer.start[own];
    if (!layer.key_center)
        return;
    const PartChannel at(d, n, threadIdx.x);
    const TrianglePart triangle(layer.compact, d, kv_head, at.part, n);
    float sum = 0;
    for (uint32_t i = at.own; i < n; i++)
        sum = fmaf(triangle.number(i, at.own),
                   layer.center[kv_head * d + kvant_part_channel(d, n, at.part, i)], sum);
    layer.key_center[own] = rotate_any(sum, row, rotation);
}

/* Launches a kernel with a thread block for each part, and memory for its inverse. */
template <class... Parameters, class... Arguments>
static cudaError_t launch_parts(void (*kernel)(Parameters...), uint32_t d, uint32_t n_kv_heads,
                                uint32_t n_layers, cudaStream_t stream, Arguments... arguments)
{
    const uint32_t n = kvant_key_transform_part(d), threads = (n + 31) / 32 * 32;
    const size_t bytes = Inverse::bytes(n);
    const cudaError_t error = allow_shared((const void *)kernel, (int)bytes);
    if (error != cudaSuccess)
        return error;
    return launch_kernel(kernel, dim3(d / n, n_kv_heads, n_layers), threads, bytes, stream,
                         arguments...);
}

static cudaError_t rotate_matrix(const void *compact, const kvant_cuda_wide_rotation &rotation,
                                 uint32_t d, uint32_t n_kv_heads, float *matrix,
                                 cudaStream_t stream)
{
    return with_room(d, [&](auto p) {
        return launch_kernel(expand_kernel<decltype(p)::value>, dim3((d + 7) / 8, n_kv_heads), 256,
                             0, stream, compact, rotation, d, matrix);
    });
}

cudaError_t launch_expand(uint32_t d, uint32_t n_kv_heads, const void *compact, float *matrix,
                          cudaStream_t stream)
{
    kvant_cuda_wide_rotation none{};
    void *parameters[] = { &compact, &none, &d, &matrix };
    return with_room(d, [&](auto p) {
        return launch_early((const void *)expand_kernel<decltype(p)::value>,
                            dim3((d + 7) / 8, n_kv_heads), 256, parameters, 0, stream);
    });
}

} // namespace kvant

using namespace kvant;

static bool has_triangles(uint32_t head_dim)
{
    return head_dim > 0 && head_dim <= KVANT_CUDA_MOST_DIM && head_dim % 8 == 0 &&
           Inverse::bytes(kvant_key_transform_part(head_dim)) <= 99 * 1024;
}

kvant_status kvant_cuda_table_compact(const kvant_cuda_compact_args *args, kvant_cuda_stream stream)
{
    const bool one = args && args->size == sizeof *args && args->n_layers == 0;
    if (!args || args->size != sizeof *args || !has_triangles(args->head_dim) ||
        args->n_kv_heads == 0 || args->n_kv_heads > 65535 || args->n_layers > 65535 ||
        (one ? !args->triangles || !args->compact || args->compact == args->triangles
             : !args->layers))
        return KVANT_ERR_ARGUMENT;
    return from_cuda(
        launch_parts(compact_kernel, args->head_dim, args->n_kv_heads, one ? 1 : args->n_layers,
                     static_cast<cudaStream_t>(stream), args->triangles, args->head_dim,
                     static_cast<uint8_t *>(args->compact), one ? nullptr : args->layers));
}

kvant_status kvant_cuda_table_expand(const kvant_cuda_expand_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->codec || !args->compact ||
        args->n_kv_heads == 0 || args->n_kv_heads > 65535 || args->codec->has_dense_rotation ||
        !has_triangles(args->codec->params.head_dim))
        return KVANT_ERR_ARGUMENT;
    const kvant_cuda_codec &codec = *args->codec;
    const uint32_t d = codec.params.head_dim;
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    cudaError_t error = cudaSuccess;
    if (args->key_transform)
        error = rotate_matrix(args->compact, codec.rotation, d, args->n_kv_heads,
                              args->key_transform, on);
    if (error == cudaSuccess && args->inverse_key_transform) {
        error = launch_parts(invert_kernel, d, args->n_kv_heads, 1, on, args->compact, d,
                             args->inverse_key_transform);
        if (error == cudaSuccess)
            error = rotate_matrix(nullptr, codec.rotation, d, args->n_kv_heads,
                                  args->inverse_key_transform, on);
    }
    return from_cuda(error);
}

kvant_status kvant_cuda_table_place_centers(const kvant_cuda_place_centers_args *args,
                                            kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->codec || args->n_kv_heads == 0 ||
        args->n_kv_heads > 65535 || args->n_layers > 65535 || args->codec->has_dense_rotation ||
        !has_triangles(args->codec->params.head_dim) ||
        (args->n_layers > 0 ? !args->layers
                            : !args->one.center || !args->one.start ||
                                  (args->one.key_center && !args->one.compact)))
        return KVANT_ERR_ARGUMENT;
    const dim3 grid(args->n_kv_heads, std::max(args->n_layers, 1u));
    return from_cuda(launch_kernel(
        center_kernel, grid, args->codec->params.head_dim, 0, static_cast<cudaStream_t>(stream),
        args->one, args->n_layers > 0 ? args->layers : nullptr, args->codec->rotation));
}
