/* append.cu - rows of any head_dim to pages: open ones, and all sorts of codes with scales of a token's
 * own. Also seals such pages. A warp takes a row and changes no bit of another token's. */
#include "any.h"
#include "append_rows.cuh"

#include "../launch.h"
#include "../encode/encode_chunks.cuh"
#include "../encode/trellis_search.cuh"

#include <algorithm>
#include <cstddef>

namespace kvant
{

constexpr int WARPS = 4, MOST_CHUNKS = (MOST_DIM + 2) / 3 + 10;
constexpr float MAX_RATIO = 2; /* of a scale to the one for the row's length: codec/feedback.c */

/* A warp's. */
struct RowSpace {
    alignas(16) float row[MOST_DIM];
    float first[MOST_CHUNKS], second[MOST_CHUNKS]; /* as in append_chunks.cu */
    uint32_t codes[MOST_CHUNKS];
};

KVANT_INLINE void put_code(const kvant_cuda_params &codec, uint8_t *page, int token, int channel, uint32_t code)
{
    const bool keys = codec.role == KVANT_ROLE_K;
    const int tiles = codec.head_dim / 16;
    for_each_plane((int)codec.bits, keys, tiles, [&](int log, int first, int shift) {
        const Place where = code_place(log, keys, tiles, token, channel);
        const uint32_t ones = (1u << (1 << log)) - 1;
        put_bits(reinterpret_cast<uint32_t *>(page) + first + where.word, (code >> shift & ones) << where.bit,
                 ones << where.bit);
    });
}

template <int P> struct AnyWriter {
    using R = Row<P>;
    static constexpr int LANE_NUMBERS = R::PER_LANE;
    const AnyAppendArgs &args;
    const AppendRole &role;
    RowSpace &space;
    const AnyBook &book;
    int d, kv_head, lane;
    uint32_t codes[LANE_NUMBERS];

    __device__ AnyWriter(const AnyAppendArgs &args_, RowSpace &space_, const AnyBook &book_)
        : args(args_), role(args_.roles[0]), space(space_), book(book_), d((int)args_.roles[0].codec.head_dim),
          kv_head(blockIdx.y), lane(threadIdx.x & 31), codes{}
    {
    }

    KVANT_INLINE float sum_of(float x) const /* of lanes alike modulo 16, in both halves of the warp */
    {
        unrolled_for (int width = 8; width > 0; width /= 2)
            x = __fadd_rn(x, __shfl_xor_sync(FULL, x, width));
        return x;
    }

    KVANT_INLINE void refuse(bool finite) const
    {
        if (args.refused && lane == 0)
            atomicOr(args.refused, finite ? KVANT_CUDA_ROW_RANGE : KVANT_CUDA_ROW_NONFINITE);
    }

    KVANT_INLINE R load(uint32_t token, bool &finite)
    {
        return load_transformed<P>(args, token, kv_head, space.row, lane, finite);
    }

    /* Codes of one channel to their words. */
    KVANT_INLINE void put_codes(int token, uint8_t *page) const
    {
        unrolled_for (int j = 0; j < LANE_NUMBERS; j++)
            if (lane + 32 * j < d)
                put_code(role.codec, page, token, lane + 32 * j, codes[j]);
    }

    KVANT_INLINE void put_chunks(int token, uint8_t *page) const
    {
        const int n = (int)args.codec.book.n_chunks;
        const bool keys = role.codec.role == KVANT_ROLE_K;
        __syncwarp();
        for_each_chunk_plane((int)role.codec.bits, n, keys, [&](int p, int first, int shift) {
            const uint32_t ones = (1u << p) - 1;
            for (int chunk = lane; chunk < n; chunk += 32) {
                const Place where = chunk_place(p, n, keys, token, chunk);
                put_bits(reinterpret_cast<uint32_t *>(page) + first + where.word,
                         (space.codes[chunk] >> shift & ones) << where.bit, ones << where.bit);
            }
        });
    }

    KVANT_INLINE void put_open(R &row, int token, uint8_t *page, bool finite) const
    {
        bool fits = true;
        each_of(row, d, lane, [&](float x, int) { fits &= fabsf(x) <= 65504.0f; });
        if (!__all_sync(FULL, fits))
            return refuse(finite);
        store_any(page, (size_t)token * d, KVANT_CUDA_F16, d, lane, row);
        if (role.exact)
            store_any(role.exact, (page - role.base) / sizeof(uint16_t) + (size_t)token * d, KVANT_CUDA_F32, d, lane, row);
    }

    /* Groups of channels, or all of them. Scales and zero points are written at once, unless they do not
     * fit. */
    KVANT_INLINE bool uniform(R &row, int token, uint16_t *numbers)
    {
        const kvant_cuda_params &c = role.codec;
        const int group = (int)args.codec.any.group;
        bool fits = true;
#pragma unroll 1
        for (int pass = 0; pass < 2 && fits; pass++) /* all groups are checked before one is written */
#pragma unroll 1
            for (int first = 0; first < d; first += group) {
                float min = INFINITY, max = -INFINITY;
                each_of(row, d, lane, [&](float x, int channel) {
                    if (channel >= first && channel < first + group)
                        min = min_or_nan(min, x), max = max_or_nan(max, x);
                });
                unrolled_for (int k = 16; k > 0; k /= 2) {
                    min = min_or_nan(min, __shfl_xor_sync(FULL, min, k));
                    max = max_or_nan(max, __shfl_xor_sync(FULL, max, k));
                }
                fits &= fabsf(min) <= 65504.0f && fabsf(max) <= 65504.0f;
                if (pass == 0)
                    continue;
                min = __fadd_rn(min, 0.0f); /* -0 becomes 0, as the CPU has it */
                const float zero = c.symmetric ? 0 : to_half_and_back(min),
                            range = c.symmetric ? fmaxf(fabsf(min), fabsf(max)) : __fadd_rn(__fsub_rn(max, min), 0.0f),
                            scale = to_half_and_back(__fdiv_rn(range, c.levels)),
                            inverse = scale > 0 ? __frcp_rn(scale) : 0, low = c.symmetric ? -c.levels : 0;
                unrolled_for (int j = 0; j < LANE_NUMBERS; j++) {
                    const int channel = lane + 32 * j;
                    if (channel < first || channel >= min_of(first + group, d))
                        continue;
                    const float level = rintf(__fmul_rn(__fsub_rn(row.x[j], zero), inverse));
                    codes[j] = (uint32_t)(fminf(fmaxf(level, low), c.levels) - c.offset);
                }
                if (lane == 0) {
                    uint16_t *own = numbers + first / group * PAGE_TOKENS + token;
                    own[0] = __half_as_ushort(__float2half_rn(scale));
                    if (!c.symmetric)
                        own[c.n_scales] = __half_as_ushort(__float2half_rn(min));
                }
            }
        return fits;
    }

    KVANT_INLINE static int min_of(int a, int b)
    {
        return a < b ? a : b;
    }

    KVANT_INLINE uint32_t thresholds_below(float u) const
    {
        const kvant_cuda_codec &c = args.codec;
        const float *thresholds = c.params.kind == KVANT_CUDA_CODEBOOK_WIDE ? c.wide.thresholds : c.params.thresholds;
        uint32_t code = 0;
        for (uint32_t step = 1u << (c.params.bits - 1); step > 0; step /= 2)
            code += u > thresholds[code + step - 1] ? step : 0;
        return code;
    }

    /* The scale of a row of these squares, before it is made unbiased; its inverse. */
    KVANT_INLINE float norm_of(float squares, float &scale, float &inverse) const
    {
        const float norm = __fmul_rn(__fsqrt_rn(squares), role.codec.inverse_sqrt_dim);
        scale = to_half_and_back(norm);
        inverse = scale > 0 ? __frcp_rn(scale) : 0;
        return norm;
    }

    KVANT_INLINE Quantized unbiased(const R &row, const R &decoded, float squares, float norm, float scale) const
    {
        float stored = scale;
        if (role.codec.unbiased && scale > 0) {
            const float product = dot_rows<P>(row, decoded, lane);
            stored = product > 0 ? __fdiv_rn(squares, product) : 0;
        }
        return Quantized{ stored, 0, norm <= 65504.0f && stored <= 65504.0f };
    }

    KVANT_INLINE Quantized codebook(const R &row)
    {
        float scale, inverse;
        const float squares = dot_rows<P>(row, row, lane), norm = norm_of(squares, scale, inverse);
        R decoded{};
        unrolled_for (int j = 0; j < LANE_NUMBERS; j++)
            if (lane + 32 * j < d) {
                codes[j] = thresholds_below(__fmul_rn(row.x[j], inverse));
                decoded.x[j] = book.values[codes[j]];
            }
        return unbiased(row, decoded, squares, norm, scale);
    }

    /* format.md, "Feedback": the numbers of a row are rounded one after another. All lanes know the number that
     * is rounded; each passes its error on to its own channels. */
    KVANT_INLINE Quantized feedback(const R &row)
    {
        float scale, inverse, own = 0, product = 0;
        const float length = norm_of(dot_rows<P>(row, row, lane), scale, inverse),
                    *pivots = role.feedback + (size_t)kv_head * (d + (size_t)d * d), *columns = pivots + d;
        R z = row;
        z.each(lane, [&](float &x, int) { x = __fmul_rn(x, inverse); });
        R target = z, a = z, column{}, next{};
        auto load = [&](int j) {
            each_of(next, d, lane, [&](float &x, int channel) { x = columns[(size_t)j * d + channel]; });
        };
        load(0);
        unrolled_for (int m = 0; m < LANE_NUMBERS; m++)
#pragma unroll 1
            for (int l = 0; l < 32 && 32 * m + l < d; l++) {
                const int j = 32 * m + l;
                column = next;
                load(min_of(j + 1, d - 1));
                const float t = __shfl_sync(FULL, target.x[m], l), a_j = __shfl_sync(FULL, a.x[m], l),
                            z_j = __shfl_sync(FULL, z.x[m], l), weighted = __fmul_rn(pivots[j], a_j);
                const uint32_t code = thresholds_below(t);
                const float value = book.values[code], error = __fsub_rn(value, z_j);
                own = __fadd_rn(own, __fmul_rn(weighted, a_j));
                product = __fadd_rn(product, __fmul_rn(weighted, __fadd_rn(a_j, __fsub_rn(value, t))));
                codes[m] = lane == l ? code : codes[m];
                unrolled_for (int i = 0; i < LANE_NUMBERS; i++) {
                    target.x[i] = __fsub_rn(target.x[i], __fmul_rn(column.x[i], error));
                    a.x[i] = __fadd_rn(a.x[i], __fmul_rn(column.x[i], z_j));
                }
            }
        float stored = scale;
        if (role.codec.unbiased && product > 0) {
            const float ratio = __fdiv_rn(own, product);
            stored = __fmul_rn(scale, ratio > MAX_RATIO ? MAX_RATIO : ratio < 1 / MAX_RATIO ? 1 / MAX_RATIO : ratio);
        }
        return Quantized{ stored, 0, length <= 65504.0f / MAX_RATIO };
    }

    /* Items: whole triplets, then what the last one is tried with (append_chunks.cu). */
    KVANT_INLINE Quantized triplets(R &row)
    {
        const kvant_cuda_book &b = args.codec.book;
        const int whole = d / 3, left = d % 3, trials = left == 0 ? 0 : b.rounding == 1 ? 1 : left == 1 ? 10 : 6;
        float scale, inverse;
        const float squares = dot_rows<P>(row, row, lane), norm = norm_of(squares, scale, inverse);
        share_row(row, space.row, lane);
#pragma unroll 1
        for (int item = lane; item < whole + trials; item += 32) {
            const float *from = space.row + 3 * min_of(item, whole);
            const bool is_whole = item < whole;
            const float x = __fmul_rn(from[0], inverse);
            float y = is_whole || left == 2 ? __fmul_rn(from[1], inverse) : 0, z = is_whole ? __fmul_rn(from[2], inverse) : 0;
            if (!is_whole && b.rounding != 1) {
                const float size = __fadd_rn(fabsf(x), fabsf(y));
                const Padding pad = padding_of(left, item - whole);
                y = left == 2 ? y : __fmul_rn(pad.y, size);
                z = __fmul_rn(pad.z, size);
            }
            const TripletCode q = quantize_triplet(book.triplets, b, x, y, z);
            space.codes[item] = q.code;
            space.first[item] = __fmul_rn(q.norm, q.along);
            if (!is_whole) {
                const float2 result = left == 1 ? trial_result<1>(book.triplets, b, q.code, x, y)
                                                : trial_result<2>(book.triplets, b, q.code, x, y);
                space.first[item] = result.y;
                space.second[item] = result.x;
            }
        }
        __syncwarp();
        int best = whole;
        for (int i = whole + 1; i < whole + trials; i++)
            if (space.second[i] < space.second[best])
                best = i;
        float sum = 0;
        for (int c = lane % 16; c < (int)b.n_chunks; c += 16)
            sum = __fadd_rn(sum, space.first[c < whole ? c : best]);
        const uint32_t last = trials ? space.codes[best] : 0;
        __syncwarp();
        if (trials && lane == 0)
            space.codes[whole] = last;
        const float product = sum_of(sum), whole_scale = product > 0 ? __fdiv_rn(__fmul_rn(squares, inverse), product) : 0;
        const float stored = role.codec.unbiased && product > 0 && whole_scale <= 4 * scale ? whole_scale : scale;
        return Quantized{ stored, 0, norm <= 65504.0f && stored <= 65504.0f };
    }

    KVANT_INLINE Quantized quaternions(R &row)
    {
        const kvant_cuda_book &b = args.codec.book;
        const int n = (int)b.n_chunks;
        const float top = (float)((1u << b.radius_bits) - 1);
        float magnitude = 0, largest = 0, squares = 0, products = 0;
        each_of(row, d, lane, [&](float x, int) { magnitude = max_or_nan(magnitude, fabsf(x)); });
        unrolled_for (int k = 16; k > 0; k /= 2)
            magnitude = max_or_nan(magnitude, __shfl_xor_sync(FULL, magnitude, k));
        share_row(row, space.row, lane);
#pragma unroll 1
        for (int c = lane; c < n; c += 32) {
            const float4 x = *reinterpret_cast<const float4 *>(space.row + 4 * c);
            const uint32_t index = closest_direction(book.quaternions, (int)b.n_secondaries, x);
            float w[4];
            for (int i = 0; i < 4; i++)
                w[i] = hqmq_component(book.quaternions, index, i);
            space.codes[c] = index;
            space.first[c] = __fadd_rn(__fadd_rn(__fmul_rn(x.x, x.x), __fmul_rn(x.y, x.y)),
                                       __fadd_rn(__fmul_rn(x.z, x.z), __fmul_rn(x.w, x.w)));
            space.second[c] = __fadd_rn(__fadd_rn(__fmul_rn(x.x, w[0]), __fmul_rn(x.y, w[1])),
                                        __fadd_rn(__fmul_rn(x.z, w[2]), __fmul_rn(x.w, w[3])));
        }
        __syncwarp();
        for (int c = lane; c < n; c += 32)
            largest = fmaxf(largest, __fsqrt_rn(space.first[c]));
        const float step = to_half_and_back(__fdiv_rn(largest_of(largest), top)), inverse = step > 0 ? __frcp_rn(step) : 0;
        for (int c = lane % 16; c < n; c += 16) {
            const float level = __fsub_rn(__fadd_rn(__fmul_rn(__fsqrt_rn(space.first[c]), inverse), 8388608.0f), 8388608.0f);
            const float radius = level < top ? level : top;
            squares = __fadd_rn(squares, radius > 0 ? space.first[c] : 0);
            products = __fadd_rn(products, __fmul_rn(radius, space.second[c]));
            if (lane < 16)
                space.codes[c] |= (uint32_t)radius << b.index_bits;
        }
        squares = sum_of(squares), products = sum_of(products);
        const float stored = !role.codec.unbiased || !(step > 0) ? step : products > 0 ? __fdiv_rn(squares, products) : 0;
        return Quantized{ stored, 0, magnitude <= 65504.0f && stored <= 65504.0f };
    }

    KVANT_INLINE void write(R &row, int64_t slot, bool finite)
    {
        const kvant_cuda_params &c = role.codec;
        const int token = (int)(slot % PAGE_TOKENS);
        uint8_t *page = role.base + (size_t)page_number(slot) * role.block_stride + kv_head * role.head_stride;
        uint16_t *numbers = reinterpret_cast<uint16_t *>(page + c.metadata_offset);
        if (c.codes == KVANT_CUDA_CODES_OPEN)
            return put_open(row, token, page, finite);
        if (c.codes == KVANT_CUDA_CODES_UNIFORM)
            return uniform(row, token, numbers) ? put_codes(token, page) : refuse(finite);
        const bool chunks = c.codes == KVANT_CUDA_CODES_TRIPLETS || c.codes == KVANT_CUDA_CODES_QUATERNIONS;
        const Quantized q = c.codes == KVANT_CUDA_CODES_TRIPLETS      ? triplets(row)
                            : c.codes == KVANT_CUDA_CODES_QUATERNIONS ? quaternions(row)
                            : c.feedback                              ? feedback(row)
                                                                      : codebook(row);
        store(q, token, page, finite, chunks);
    }

    KVANT_INLINE void store(const Quantized &q, int token, uint8_t *page, bool finite, bool chunks) const
    {
        if (!q.in_range)
            return refuse(finite);
        if (lane == 0)
            reinterpret_cast<uint16_t *>(page + role.codec.metadata_offset)[token] =
                __half_as_ushort(__float2half_rn(q.scale));
        chunks ? put_chunks(token, page) : put_codes(token, page);
    }
};

template <int P> __global__ void __launch_bounds__(WARPS * 32) append_any_kernel(const __grid_constant__ AnyAppendArgs args)
{
    __shared__ AnyBook book;
    __shared__ RowSpace space[WARPS];
    book.load(args.codec);
    __syncthreads();
    const uint32_t token = blockIdx.x * WARPS + threadIdx.x / 32;
    const int64_t slot = slot_at(args, token);
    if (slot < 0)
        return;
    AnyWriter<P> writer(args, space[threadIdx.x / 32], book);
    bool finite;
    Row<P> row = writer.load(token, finite);
    writer.write(row, slot, finite);
}

/* ---- trellis ---- */

/* Of a block; only its first warp searches. */
template <int M> struct TrellisSpace {
    RowSpace row;
    AnyBook book;
    TrellisLevels levels;
    CellCosts costs;
    SearchSpace<MOST_DIM, M> search; /* the last: it has as many steps as there is room for */

    static int bytes(int steps)
    {
        using S = SearchSpace<MOST_DIM, M>;
        return (int)(offsetof(TrellisSpace, search) + offsetof(S, decisions) + steps * sizeof(S::decisions[0]));
    }
};

template <int M>
__global__ void __launch_bounds__(WARPS * 32)
    append_any_trellis_kernel(const __grid_constant__ AnyAppendArgs args, int room)
{
    extern __shared__ __align__(16) uint8_t raw[];
    TrellisSpace<M> &space = *reinterpret_cast<TrellisSpace<M> *>(raw);
    const kvant_cuda_trellis &trellis = args.codec.trellis;
    const int64_t slot = slot_at(args, blockIdx.x);
    if (slot < 0)
        return;
    space.book.load(args.codec);
    if (threadIdx.x < KVANT_CUDA_TRELLIS_LEVELS)
        space.levels.levels[threadIdx.x] = trellis.levels[threadIdx.x];
    fill_costs(space.costs, trellis);
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    AnyWriter<MOST_DIM> writer(args, space.row, space.book);
    bool finite;
    float scale, inverse;
    Row<MOST_DIM> row = writer.load(blockIdx.x, finite), decoded{};
    const float squares = dot_rows<MOST_DIM>(row, row, writer.lane), norm = writer.norm_of(squares, scale, inverse);
    const uint16_t *steps = space.book.trellis.steps;
    each_of(row, writer.d, writer.lane, [&](float x, int channel) {
        space.search.cells[steps[channel]] = (uint16_t)cell_of(__fmul_rn(x, inverse));
    });
    __syncwarp();
    Search<MOST_DIM, M>(space.search, space.costs, writer.lane, writer.d, room).find();
    unrolled_for (int j = 0; j < Row<MOST_DIM>::PER_LANE; j++) {
        const int channel = writer.lane + 32 * j;
        if (channel >= writer.d)
            break;
        const int step = steps[channel];
        const uint32_t subset = subset_at(trellis, space.search.bits, writer.d, step),
                       nearest = nearest_of(trellis, space.levels, space.search.cells[step], subset);
        writer.codes[j] = 2 * nearest + space.search.bits[step];
        decoded.x[j] = space.book.trellis.values[8 * nearest + subset];
    }
    const AppendRole &role = args.roles[0];
    writer.store(writer.unbiased(row, decoded, squares, norm, scale), (int)(slot % PAGE_TOKENS),
                 role.base + (size_t)page_number(slot) * role.block_stride + writer.kv_head * role.head_stride, finite,
                 false);
}

template <int M>
static cudaError_t launch_trellis(const AnyAppendArgs &args, int n_kv_heads, cudaStream_t stream)
{
    using Space = TrellisSpace<M>;
    const int d = (int)args.codec.params.head_dim, step = Space::bytes(1) - Space::bytes(0);
    int most = 0;
    cudaError_t error = most_shared(most);
    const int room = std::min((most - Space::bytes(0)) / step, d), bytes = Space::bytes(room);
    if (error == cudaSuccess)
        error = room > 0 ? allow_shared((const void *)append_any_trellis_kernel<M>, bytes) : cudaErrorNotSupported;
    if (error != cudaSuccess)
        return error;
    append_any_trellis_kernel<M><<<dim3(args.n_tokens, n_kv_heads), WARPS * 32, bytes, stream>>>(args, room);
    return cudaGetLastError();
}

cudaError_t launch_append_any(const AppendArgs &args, int n_kv_heads, cudaStream_t stream)
{
    AnyAppendArgs p{};
    static_cast<AppendArgs &>(p) = args;
    p.codec = *args.roles[0].source;
    if (p.codec.params.codes == KVANT_CUDA_CODES_TRELLIS)
        switch (p.codec.trellis.memory) {
        case 8: return launch_trellis<8>(p, n_kv_heads, stream);
        case 10: return launch_trellis<10>(p, n_kv_heads, stream);
        default: return launch_trellis<12>(p, n_kv_heads, stream);
        }
    const dim3 grid((args.n_tokens + WARPS - 1) / WARPS, n_kv_heads);
    return with_room(p.codec.params.head_dim, [&](auto room) {
        append_any_kernel<decltype(room)::value><<<grid, WARPS * 32, 0, stream>>>(p);
        return cudaGetLastError();
    });
}

/* ---- groups of tokens ---- */

constexpr int SEAL_THREADS = 256;

/* As in seal.cu: an open page, whose tokens that were not written are copies of their group's first. */
__global__ void __launch_bounds__(SEAL_THREADS) seal_any_kernel(const __grid_constant__ AnyAppendArgs args)
{
    const AppendRole &role = args.roles[0];
    const kvant_cuda_params &c = role.codec;
    const int kv_head = blockIdx.y, d = (int)c.head_dim, group = (int)args.codec.any.group,
              n_tokens = args.tokens ? min(args.tokens[blockIdx.x], PAGE_TOKENS) : PAGE_TOKENS;
    const int64_t from = args.from[blockIdx.x], to = args.to[blockIdx.x];
    if (n_tokens <= 0 || from < 0 || to < 0)
        return;
    const __half *rows =
        static_cast<const __half *>(role.rows) + from * role.row_block_stride + kv_head * role.row_head_stride;
    uint8_t *page = role.base + to * role.block_stride + kv_head * role.head_stride;
    __half *numbers = reinterpret_cast<__half *>(page + c.metadata_offset);
    auto at = [&](int token, int channel) {
        return __half2float(rows[(token < n_tokens ? token : token / group * group) * d + channel]);
    };
    const int groups = (n_tokens + group - 1) / group; /* in which something was written */
    for (int i = threadIdx.x; i < groups * d; i += SEAL_THREADS) {
        const int first = i / d * group, channel = i % d;
        float min = at(first, channel), max = min;
        for (int t = 1; t < group; t++)
            min = fminf(min, at(first + t, channel)), max = fmaxf(max, at(first + t, channel));
        const float range = c.symmetric ? fmaxf(fabsf(min), fabsf(max)) : __fsub_rn(max, min);
        numbers[i] = __float2half_rn(__fdiv_rn(range, c.levels));
        if (!c.symmetric)
            numbers[c.n_scales + i] = __float2half_rn(__fadd_rn(min, 0.0f)); /* -0 becomes 0 */
    }
    __syncthreads();
    for (int i = threadIdx.x; i < groups * group * d; i += SEAL_THREADS) {
        const int token = i / d, channel = i % d, own = token / group * d + channel;
        const float scale = __half2float(numbers[own]), zero = c.symmetric ? 0 : __half2float(numbers[c.n_scales + own]);
        const float level = rintf(__fmul_rn(__fsub_rn(at(token, channel), zero), scale > 0 ? __frcp_rn(scale) : 0));
        const uint32_t code =
            (uint32_t)(fminf(fmaxf(level, c.symmetric ? -c.levels : 0), c.levels) - c.offset);
        put_code(c, page, token, channel, code);
    }
}

cudaError_t launch_seal_any(const AppendArgs &args, int n_kv_heads, cudaStream_t stream)
{
    AnyAppendArgs p{};
    static_cast<AppendArgs &>(p) = args;
    p.codec = *args.roles[0].source;
    seal_any_kernel<<<dim3(args.n_tokens / PAGE_TOKENS, n_kv_heads), SEAL_THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

} // namespace kvant
