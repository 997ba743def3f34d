/* append.cu - appends rows of any head_dim to open pages, codebook pages and trellis pages;
 * general.cu appends to all other pages. A warp processes a row and changes no bit of another
 * token's codes. */
#include "any.h"
#include "append_rows.cuh"

#include "../launch.h"
#include "../encode/trellis_search.cuh"

namespace kvant
{

constexpr int WARPS = 4;
/* The largest ratio of a scale to the scale for the row's length: codec/feedback.c. */
constexpr float MAX_RATIO = 2;

/* The memory of a warp. */
struct RowSpace {
    alignas(16) float row[MOST_DIM];
};

KVANT_INLINE void put_code(const kvant_cuda_params &codec, uint8_t *page, int token, int channel,
                           uint32_t code)
{
    const bool keys = codec.role == KVANT_ROLE_K;
    const int tiles = codec.head_dim / 16;
    for_each_plane((int)codec.bits, keys, tiles, [&](int log, int first, int shift) {
        const Place where = code_place(log, keys, tiles, token, channel);
        const uint32_t ones = (1u << (1 << log)) - 1;
        put_bits(reinterpret_cast<uint32_t *>(page) + first + where.word,
                 (code >> shift & ones) << where.bit, ones << where.bit);
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
    uint32_t row_token = 0; /* index in the call */

    __device__ AnyWriter(const AnyAppendArgs &args_, RowSpace &space_, const AnyBook &book_)
        : args(args_), role(args_.roles[0]), space(space_), book(book_),
          d((int)args_.roles[0].codec.head_dim), kv_head(blockIdx.y), lane(threadIdx.x & 31),
          codes{}
    {
    }

    KVANT_INLINE void refuse(bool finite) const
    {
        if (lane == 0)
            note_refusal(args, row_token, slot_at(args, row_token), finite);
    }

    KVANT_INLINE R load(uint32_t token, bool &finite)
    {
        row_token = token;
        return load_transformed<P>(args, token, kv_head, space.row, lane, finite);
    }

    /* Writes the codes of one channel to their words. */
    KVANT_INLINE void put_codes(int token, uint8_t *page) const
    {
        unrolled_for (int j = 0; j < LANE_NUMBERS; j++)
            if (lane + 32 * j < d)
                put_code(role.codec, page, token, lane + 32 * j, codes[j]);
    }

    KVANT_INLINE void put_open(R &row, int token, uint8_t *page, bool finite) const
    {
        bool fits = true;
        each_of(row, d, lane, [&](float x, int) { fits &= fabsf(x) <= role.codec.exact_limit; });
        if (!__all_sync(FULL, fits))
            return refuse(finite);
        store_any(page, (size_t)token * d, KVANT_CUDA_F16, d, lane, row);
        if (role.exact)
            store_any(role.exact, (page - role.base) / sizeof(uint16_t) + (size_t)token * d,
                      KVANT_CUDA_F32, d, lane, row);
    }

    KVANT_INLINE static int min_of(int a, int b)
    {
        return a < b ? a : b;
    }

    KVANT_INLINE uint32_t thresholds_below(float u) const
    {
        const kvant_cuda_codec &c = args.codec;
        const float *thresholds =
            c.params.kind == KVANT_CUDA_CODEBOOK_WIDE ? c.wide.thresholds : c.params.thresholds;
        uint32_t code = 0;
        for (uint32_t step = 1u << (c.params.bits - 1); step > 0; step /= 2)
            code += u > thresholds[code + step - 1] ? step : 0;
        return code;
    }

    /* The scale of a row whose squares have this sum, before it is made unbiased, and its
     * inverse. */
    KVANT_INLINE float norm_of(float squares, float &scale, float &inverse) const
    {
        const float norm = __fmul_rn(__fsqrt_rn(squares), role.codec.inverse_sqrt_dim);
        scale = to_half_and_back(norm);
        inverse = scale > 0 ? __frcp_rn(scale) : 0;
        return norm;
    }

    KVANT_INLINE Quantized unbiased(const R &row, const R &decoded, float squares, float norm,
                                    float scale) const
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

    /* Rounds the numbers of a row one after another (format.md, "Feedback"). All lanes know the
     * number that is rounded, and each lane passes its error on to its own channels. */
    KVANT_INLINE Quantized feedback(const R &row)
    {
        float scale, inverse, own = 0, product = 0;
        const float length = norm_of(dot_rows<P>(row, row, lane), scale, inverse),
                    *pivots = role.feedback + (size_t)kv_head * (d + (size_t)d * d),
                    *columns = pivots + d;
        R z = row;
        z.each(lane, [&](float &x, int) { x = __fmul_rn(x, inverse); });
        R target = z, a = z, column{}, next{};
        auto load = [&](int j) {
            each_of(next, d, lane,
                    [&](float &x, int channel) { x = columns[(size_t)j * d + channel]; });
        };
        load(0);
        unrolled_for (int m = 0; m < LANE_NUMBERS; m++)
            rolled_for (int l = 0; l < 32 && 32 * m + l < d; l++) {
                const int j = 32 * m + l;
                column = next;
                load(min_of(j + 1, d - 1));
                const float t = __shfl_sync(FULL, target.x[m], l),
                            a_j = __shfl_sync(FULL, a.x[m], l), z_j = __shfl_sync(FULL, z.x[m], l),
                            weighted = __fmul_rn(pivots[j], a_j);
                const uint32_t code = thresholds_below(t);
                const float value = book.values[code], error = __fsub_rn(value, z_j);
                own = __fadd_rn(own, __fmul_rn(weighted, a_j));
                product =
                    __fadd_rn(product, __fmul_rn(weighted, __fadd_rn(a_j, __fsub_rn(value, t))));
                codes[m] = lane == l ? code : codes[m];
                unrolled_for (int i = 0; i < LANE_NUMBERS; i++) {
                    target.x[i] = __fsub_rn(target.x[i], __fmul_rn(column.x[i], error));
                    a.x[i] = __fadd_rn(a.x[i], __fmul_rn(column.x[i], z_j));
                }
            }
        float stored = scale;
        if (role.codec.unbiased && product > 0) {
            const float ratio = __fdiv_rn(own, product);
            stored = __fmul_rn(scale, ratio > MAX_RATIO       ? MAX_RATIO
                                      : ratio < 1 / MAX_RATIO ? 1 / MAX_RATIO
                                                              : ratio);
        }
        return Quantized{ stored, 0, length <= 65504.0f / MAX_RATIO };
    }

    KVANT_INLINE void write(R &row, int64_t slot, bool finite)
    {
        const kvant_cuda_params &c = role.codec;
        const int token = (int)(slot % PAGE_TOKENS);
        uint8_t *page =
            role.base + (size_t)page_number(slot) * role.block_stride + kv_head * role.head_stride;
        if (c.codes == KVANT_CUDA_CODES_OPEN)
            return put_open(row, token, page, finite);
        store(c.feedback ? feedback(row) : codebook(row), token, page, finite);
    }

    KVANT_INLINE void store(const Quantized &q, int token, uint8_t *page, bool finite) const
    {
        if (!q.in_range)
            return refuse(finite);
        if (lane == 0)
            reinterpret_cast<uint16_t *>(page + role.codec.metadata_offset)[token] =
                __half_as_ushort(__float2half_rn(q.scale));
        put_codes(token, page);
    }
};

template <int P>
__global__ void __launch_bounds__(WARPS * 32)
    append_any_kernel(const __grid_constant__ AnyAppendArgs args)
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

/* The memory of a block. */
struct TrellisSpace {
    using Search = PathSpace<MOST_DIM, 1>;
    AnyBook book;
    CellTable table;
    RowSpace rows[WARPS];
    Search searches[WARPS];
};

__global__ void __launch_bounds__(WARPS * 32)
    append_any_trellis_kernel(const __grid_constant__ AnyAppendArgs args)
{
    using Search = TrellisSpace::Search;
    extern __shared__ __align__(16) uint8_t raw[];
    TrellisSpace &space = *reinterpret_cast<TrellisSpace *>(raw);
    space.book.load(args.codec);
    space.table.fill(args.codec.trellis);
    __syncthreads();
    const uint32_t token = blockIdx.x * WARPS + threadIdx.x / 32;
    const int64_t slot = slot_at(args, token);
    if (slot < 0)
        return;
    AnyWriter<MOST_DIM> writer(args, space.rows[threadIdx.x / 32], space.book);
    Search &search = space.searches[threadIdx.x / 32];
    bool finite;
    float scale, inverse;
    Row<MOST_DIM> row = writer.load(token, finite), decoded{};
    const float squares = dot_rows<MOST_DIM>(row, row, writer.lane),
                norm = writer.norm_of(squares, scale, inverse);
    const uint16_t *steps = space.book.trellis.steps;
    each_of(row, writer.d, writer.lane, [&](float x, int channel) {
        const int cell = cell_of(__fmul_rn(x, inverse));
        for (int step = steps[channel]; step >= -WARM_UP; step -= writer.d)
            search.put_cell(0, Search::position_of(step), cell);
    });
    __syncwarp();
    PathSearch<Search>(search, space.table, writer.lane, 0, 1, writer.d).find();
    unrolled_for (int j = 0; j < Row<MOST_DIM>::PER_LANE; j++) {
        const int channel = writer.lane + 32 * j;
        if (channel >= writer.d)
            break;
        const int position = Search::position_of(steps[channel]);
        uint32_t bit, subset;
        search.read(0, position, bit, subset);
        const uint32_t nearest = space.table.nearest_of(search.cell_at(0, position), subset);
        writer.codes[j] = 2 * nearest + bit;
        decoded.x[j] = space.table.values[8 * nearest + subset];
    }
    const AppendRole &role = args.roles[0];
    writer.store(writer.unbiased(row, decoded, squares, norm, scale), (int)(slot % PAGE_TOKENS),
                 role.base + (size_t)page_number(slot) * role.block_stride +
                     writer.kv_head * role.head_stride,
                 finite);
}

cudaError_t launch_append_any(const AppendArgs &args, int n_kv_heads, cudaStream_t stream)
{
    AnyAppendArgs p{};
    static_cast<AppendArgs &>(p) = args;
    p.codec = *args.roles[0].source;
    const dim3 grid((args.n_tokens + WARPS - 1) / WARPS, n_kv_heads);
    if (p.codec.params.codes == KVANT_CUDA_CODES_TRELLIS) {
        const cudaError_t error =
            allow_shared((const void *)append_any_trellis_kernel, sizeof(TrellisSpace));
        if (error != cudaSuccess)
            return error;
        append_any_trellis_kernel<<<grid, WARPS * 32, sizeof(TrellisSpace), stream>>>(p);
        return cudaGetLastError();
    }
    return with_room(p.codec.params.head_dim, [&](auto room) {
        append_any_kernel<decltype(room)::value><<<grid, WARPS * 32, 0, stream>>>(p);
        return cudaGetLastError();
    });
}

} // namespace kvant
