/* unpack.cuh - from a page of codes to a matrix of fp16 numbers in shared memory, by the warps of a
 * warpgroup.
 *
 * Numbers stand there divided by the page's unit, a power of two above its scales, so that fp16's
 * range is no limit. A kind of code that the decode kernel unpacks in registers
 * (dequant.cuh) is unpacked by the same instructions; each number is rounded once. Every other kind
 * is read number by number with the arithmetic of decoding pages. Tokens beyond the sequence's end
 * become zeros, whatever their page holds. */
#ifndef KVANT_CUDA_UNPACK_CUH
#define KVANT_CUDA_UNPACK_CUH

#include "../attention/dequant.cuh"
#include "../attention/softmax.cuh"
#include "../chunks/chunk_numbers.cuh"
#include "../chunks/chunks.cuh"
#include "../pages/read_code.cuh"
#include "../rotate.cuh"
#include "../trellis/trellis_pairs.cuh"
#include "../trellis/trellis_steps.cuh"
#include "operands.cuh"
#include "tiles.h"

namespace kvant
{

constexpr int UNPACK_WARPS = GROUP_WARPS;

/* A page, and who unpacks it into what. */
struct Unpacking {
    const TileCodec &codec;
    const uint8_t *page;
    const uint8_t *table; /* of the codec, in shared memory */
    uint8_t *tile;
    uint32_t one;
    int valid; /* tokens that are there */
    int warp, lane;

    __device__ __forceinline__ const __half *numbers() const
    {
        return reinterpret_cast<const __half *>(page + codec.params.metadata_offset);
    }
};

/* A pair of numbers at (row, column) and (row, column + 1). */
__device__ __forceinline__ void put(uint8_t *tile, int row, int column, uint32_t pair)
{
    *reinterpret_cast<uint32_t *>(tile + place_of(PAGE_TOKENS, row, column)) = pair;
}

template <bool KEYS>
__device__ __forceinline__ void put_one(uint8_t *tile, int token, int channel, __half x)
{
    *reinterpret_cast<__half *>(tile + (KEYS ? place_of(PAGE_TOKENS, token, channel)
                                             : place_of(PAGE_TOKENS, channel, token))) = x;
}

/* 2^n as fp32 */
__device__ __forceinline__ float power(int n)
{
    return __int_as_float((n + 127) << 23);
}

/* Scales of a page, and as many zero points. */
template <kvant_cuda_grouping GROUP, int D>
constexpr int N_SCALES = GROUP == KVANT_CUDA_GROUP_TOKEN        ? PAGE_TOKENS
                         : GROUP == KVANT_CUDA_GROUP_CHANNELS32 ? D / 32 * PAGE_TOKENS
                                                                : PAGE_TOKENS / 32 * D;

/* The largest of the scales, or zero points, whose tokens are there, as bits of fp16 without its
 * sign; the lane's own. */
template <kvant_cuda_grouping GROUP, int D>
__device__ __forceinline__ uint32_t largest_number(const Unpacking &u, const __half *numbers)
{
    constexpr bool BY_CHANNEL = GROUP == KVANT_CUDA_GROUP_TOKENS32;
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < N_SCALES<GROUP, D> / 64; i++) {
        const int at = 64 * i + 2 * u.lane, token = BY_CHANNEL ? at / D * 32 : at % PAGE_TOKENS;
        const uint32_t pair = *reinterpret_cast<const uint32_t *>(numbers + at) & 0x7fff7fffu;
        top = max(top, token < u.valid ? pair & 0xffffu : 0);
        top = max(top, token + (BY_CHANNEL ? 0 : 1) < u.valid ? pair >> 16 : 0);
    }
    return top;
}

/* The exponent e of the page: every scale is below 2^e, every zero point below 2^(e + 23). Called by
 * whole warps, which all find the same. */
template <kvant_cuda_grouping GROUP, int D> __device__ __forceinline__ int exponent_of(const Unpacking &u, bool zeros)
{
    auto as_float = [](uint32_t bits) {
        return __half2float(__ushort_as_half((uint16_t)__reduce_max_sync(FULL, bits)));
    };
    float top = as_float(largest_number<GROUP, D>(u, u.numbers()));
    if (zeros)
        top = fmaxf(top, as_float(largest_number<GROUP, D>(u, u.numbers() + N_SCALES<GROUP, D>)) * 0x1p-23f);
    return max((__float_as_int(top) >> 23) - 126, -24);
}

/* Scales or zero points of the numbers at (row, column) and (row, column + 1), as they are stored. */
template <kvant_cuda_grouping GROUP, int D, bool KEYS>
__device__ __forceinline__ float2 stored_pair(const __half *numbers, int row, int column, int valid)
{
    const uint16_t *from = reinterpret_cast<const uint16_t *>(numbers);
    constexpr bool SAME = GROUP == KVANT_CUDA_GROUP_TOKENS32 ? !KEYS : KEYS; /* one scale for the pair */
    const int token = KEYS ? row : column, channel = KEYS ? column : row;
    const int at = GROUP == KVANT_CUDA_GROUP_TOKEN        ? token
                   : GROUP == KVANT_CUDA_GROUP_CHANNELS32 ? channel / 32 * PAGE_TOKENS + token
                                                          : token / 32 * D + channel;
    float2 pair;
    if constexpr (SAME)
        pair.x = pair.y = __half2float(__ushort_as_half(from[at]));
    else
        pair = __half22float2(*reinterpret_cast<const __half2 *>(from + at));
    if (valid < PAGE_TOKENS) {
        const int first = GROUP == KVANT_CUDA_GROUP_TOKENS32 ? token / 32 * 32 : token;
        pair.x = first < valid ? pair.x : 0;
        pair.y = first + (SAME || GROUP == KVANT_CUDA_GROUP_TOKENS32 ? 0 : 1) < valid ? pair.y : 0;
    }
    return pair;
}

__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c)
{
    const __half2 y = __hfma2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b),
                              *reinterpret_cast<__half2 *>(&c));
    return *reinterpret_cast<const uint32_t *>(&y);
}

__device__ __forceinline__ uint32_t twice(float x)
{
    return pack_half2(x, x);
}

__device__ __forceinline__ uint32_t low_halves(uint32_t x, uint32_t y)
{
    return prmt(x, y, 0x5410);
}

__device__ __forceinline__ uint32_t high_halves(uint32_t x, uint32_t y)
{
    return prmt(x, y, 0x7632);
}

/* Operands in the order COLUMNS: halves are neighbours in a row. */
template <Order ORDER, int TILES> __device__ __forceinline__ void in_order(uint32_t (&a)[TILES][4])
{
    auto exchange = [](uint32_t &x, uint32_t &y) {
        const uint32_t low = low_halves(x, y);
        y = high_halves(x, y);
        x = low;
    };
    if constexpr (ORDER == Order::COLUMNS_AND_8)
#pragma unroll
        for (int i = 0; i < TILES; i++)
            exchange(a[i][0], a[i][2]), exchange(a[i][1], a[i][3]);
    if constexpr (ORDER == Order::TILES)
#pragma unroll
        for (int i = 0; i < TILES; i += 2)
#pragma unroll
            for (int k = 0; k < 4; k++)
                exchange(a[i][k], a[i + 1][k]);
}

/* Four registers of a 16 x 16 tile of the matrix. */
__device__ __forceinline__ void put_tile(uint8_t *tile, int row_tile, int column_tile, int lane,
                                         const uint32_t (&a)[4])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    store_matrices(a, shared_address(tile) + place_of(PAGE_TOKENS, 16 * row_tile + (lane & 15),
                                                      16 * column_tile + 8 * (lane >> 4)));
#else
#pragma unroll
    for (int q = 0; q < 4; q++)
        put(tile, 16 * row_tile + (lane >> 2) + 8 * (q & 1), 16 * column_tile + 2 * (lane & 3) + 8 * (q >> 1), a[q]);
#endif
}

/* What turns codes u, as fp16 numbers u 2^-24, into numbers: number / unit = code * s + z, with s = scale
 * * of_scale, and z = scale * of_offset + zero * of_zero. */
struct Steps {
    float of_scale, of_offset, of_zero, unit;
};

template <class C, int D> __device__ __forceinline__ Steps steps_of(const Unpacking &u)
{
    const kvant_cuda_params &c = u.codec.params;
    const bool zeros = HAS_ZEROS<C> && !c.symmetric;
    const int e = exponent_of<C::GROUP, D>(u, zeros);
    const float offset = HAS_ZEROS<C> ? (c.symmetric ? c.offset : 0) : C::BIASED ? -c.bias : 0, small = power(-9 - e);
    return Steps{ power(15 - e), offset * small, zeros ? small : 0, power(9 + e) * (HAS_ZEROS<C> ? 1 : c.step) };
}

struct ScaleAndZero {
    uint32_t scale, zero;
};

/* Of the pair at (row, column). times: what codes of this row are too large by, inverted. */
template <class C, int D, bool KEYS>
__device__ __forceinline__ ScaleAndZero load_scale(const Unpacking &u, const Steps &steps, int row, int column,
                                                   float times)
{
    const float2 s = stored_pair<C::GROUP, D, KEYS>(u.numbers(), row, column, u.valid);
    float2 z = make_float2(s.x * steps.of_offset, s.y * steps.of_offset);
    if (HAS_ZEROS<C> && steps.of_zero != 0) {
        const float2 stored =
            stored_pair<C::GROUP, D, KEYS>(u.numbers() + N_SCALES<C::GROUP, D>, row, column, u.valid);
        z = make_float2(stored.x * steps.of_zero, stored.y * steps.of_zero);
    }
    const float f = steps.of_scale * times;
    return ScaleAndZero{ pack_half2(s.x * f, s.y * f), pack_half2(z.x, z.y) };
}

/* The scales of R row tiles and of the column tiles of a step. They differ by row, and then at most by 32
 * columns; or by column, and then at most by 32 rows. */
template <class C, int D, bool KEYS, int R> struct StepScales {
    static constexpr bool BY_ROW = C::GROUP == KVANT_CUDA_GROUP_TOKENS32 ? !KEYS : KEYS;
    static constexpr int SPAN = C::GROUP == KVANT_CUDA_GROUP_TOKEN ? 8 : 2; /* tiles across that share them */
    static constexpr int ALONG = BY_ROW ? R : C::TILES, ACROSS = ((BY_ROW ? C::TILES : R) + SPAN - 1) / SPAN;
    ScaleAndZero at[ALONG][2][ACROSS];

    __device__ __forceinline__ void load(const Unpacking &u, const Steps &steps, int row_tile, int column_tile)
    {
        constexpr int COLUMNS = KEYS ? D / 16 : PAGE_TOKENS / 16;
        const int row = 16 * row_tile + (u.lane >> 2), column = 2 * (u.lane & 3);
#pragma unroll
        for (int i = 0; i < ALONG; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int k = 0; k < ACROSS; k++) {
                    const int t = min(column_tile + (BY_ROW ? SPAN * k : i), COLUMNS - 1);
                    at[i][h][k] = load_scale<C, D, KEYS>(u, steps, row + (BY_ROW ? 16 * i + 8 * h : 16 * SPAN * k),
                                                         16 * t + column + (BY_ROW ? 0 : 8 * h),
                                                         BY_ROW && h ? 1 / C::ROW8 : 1);
                }
    }

    /* Codes in the order COLUMNS to numbers. i: of the row tile, t: of the column tile. */
    __device__ __forceinline__ void apply(int i, int t, uint32_t (&a)[4]) const
    {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const ScaleAndZero &x = at[BY_ROW ? i : t][BY_ROW ? q & 1 : q >> 1][(BY_ROW ? t : i) / SPAN];
            uint32_t scale = x.scale;
            if (!BY_ROW && C::ROW8 != 1 && q % 2 == 1)
                scale = multiply_halves(scale, twice(1 / C::ROW8));
            a[q] = fma2(a[q], scale, x.zero);
        }
    }
};

/* R row tiles of group g, column tiles from step * TILES on. */
template <class C, int D, bool KEYS, int R>
__device__ __forceinline__ void unpack_step(const Unpacking &u, const Bytes &bytes,
                                            const StepScales<C, D, KEYS, R> &scales, int g, int step)
{
    constexpr int ROWS = KEYS ? PAGE_TOKENS / 16 : D / 16, COLUMNS = KEYS ? D / 16 : PAGE_TOKENS / 16;
    constexpr int FIRST = C::BITS == 3 ? (COLUMNS + 1) / 2 * 32 * ROWS : COLUMNS * 32 * ROWS;
    uint32_t w[R][3], a[C::TILES][4];
    load_step<C, R, COLUMNS>(reinterpret_cast<const uint32_t *>(u.page), g, step, u.lane, FIRST, w);
#pragma unroll
    for (int i = 0; i < R; i++) {
        C::unpack(w[i], bytes, a);
        in_order<C::ORDER, C::TILES>(a);
#pragma unroll
        for (int t = 0; t < C::TILES; t++) {
            if (C::TILES * step + t >= COLUMNS)
                break;
            scales.apply(i, t, a[t]);
            put_tile(u.tile, 4 * g + i, C::TILES * step + t, u.lane, a[t]);
        }
    }
}

/* A kind of dequant.cuh; returns the unit. */
template <class C, int D, bool KEYS> __device__ __forceinline__ float unpack_in_registers(const Unpacking &u)
{
    constexpr int ROWS = KEYS ? PAGE_TOKENS / 16 : D / 16, COLUMNS = KEYS ? D / 16 : PAGE_TOKENS / 16;
    constexpr int STEPS = (COLUMNS + C::TILES - 1) / C::TILES, GROUPS = (ROWS + 3) / 4;
    /* a warp's steps have the same scales: those of keys, and those of values are the same one */
    constexpr bool ONCE = C::GROUP == KVANT_CUDA_GROUP_TOKEN && ROWS % 4 == 0;
    static_assert(KEYS || UNPACK_WARPS % STEPS == 0, "a warp has one step of values");
    const Steps steps = steps_of<C, D>(u);
    const Bytes bytes = bytes_of(u.codec.params.bytes, u.one);
    StepScales<C, D, KEYS, 4> scales;
    if (ONCE)
        scales.load(u, steps, 0, KEYS ? 0 : C::TILES * (u.warp % STEPS));
#pragma unroll 1
    for (int i = u.warp; i < STEPS * GROUPS; i += UNPACK_WARPS) {
        const int g = i / STEPS, step = i % STEPS;
        if (ROWS % 4 == 0 || g < ROWS / 4) {
            if (!ONCE)
                scales.load(u, steps, 4 * g, C::TILES * step);
            unpack_step<C, D, KEYS, 4>(u, bytes, scales, g, step);
        } else if constexpr (ROWS % 4 != 0) {
            StepScales<C, D, KEYS, ROWS % 4> last;
            last.load(u, steps, 4 * g, C::TILES * step);
            unpack_step<C, D, KEYS, ROWS % 4>(u, bytes, last, g, step);
        }
    }
    return steps.unit;
}

/* Open pages: rows of fp16 numbers as they are. */
template <int D, bool KEYS> __device__ __forceinline__ void unpack_open(const Unpacking &u)
{
    const int thread = 32 * u.warp + u.lane;
    if (KEYS) {
        for (int i = thread; i < PAGE_TOKENS * (D / 8); i += GROUP_THREADS) {
            const int token = i / (D / 8), channel = i % (D / 8) * 8;
            *reinterpret_cast<uint4 *>(u.tile + place_of(PAGE_TOKENS, token, channel)) =
                token < u.valid ? __ldg(reinterpret_cast<const uint4 *>(u.page) + i) : make_uint4(0, 0, 0, 0);
        }
        return;
    }
    const uint16_t *rows = reinterpret_cast<const uint16_t *>(u.page) + 2 * u.lane * D;
#pragma unroll 4
    for (int channel = u.warp; channel < D; channel += UNPACK_WARPS) {
        const uint32_t low = 2 * u.lane < u.valid ? __ldg(rows + channel) : 0,
                       high = 2 * u.lane + 1 < u.valid ? __ldg(rows + D + channel) : 0;
        put(u.tile, channel, 2 * u.lane, low | high << 16);
    }
}

/* Numbers one by one, tokens by lanes: number(token, channel) in the page's unit. */
template <int D, bool KEYS, class F> __device__ __forceinline__ void unpack_each(const Unpacking &u, F &&number)
{
#pragma unroll 1
    for (int i = u.warp; i < 2 * D; i += UNPACK_WARPS) {
        const int channel = i / 2, token = 32 * (i % 2) + u.lane;
        put_one<KEYS>(u.tile, token, channel, __float2half_rn(token < u.valid ? number(token, channel) : 0));
    }
}

template <int D> __device__ __forceinline__ int exponent_of_any(const Unpacking &u, bool zeros)
{
    switch (u.codec.params.grouping) {
    case KVANT_CUDA_GROUP_CHANNELS32: return exponent_of<KVANT_CUDA_GROUP_CHANNELS32, D>(u, zeros);
    case KVANT_CUDA_GROUP_TOKENS32: return exponent_of<KVANT_CUDA_GROUP_TOKENS32, D>(u, zeros);
    default: return exponent_of<KVANT_CUDA_GROUP_TOKEN, D>(u, zeros);
    }
}

/* Uniform codes and codebooks of any size. table: levels of a wide codebook, as floats. */
template <int D, bool KEYS> __device__ __forceinline__ float unpack_numbers(const Unpacking &u)
{
    const kvant_cuda_params &c = u.codec.params;
    const bool codebook = c.codes == KVANT_CUDA_CODES_CODEBOOK, zeros = !codebook && !c.symmetric;
    const int e = exponent_of_any<D>(u, zeros) + (zeros ? 9 : 1); /* zero points may be 2^23 scales */
    const float inverse = power(-e);
    const __half *numbers = u.numbers();
    const float *levels = reinterpret_cast<const float *>(u.table);
    unpack_each<D, KEYS>(u, [&](int token, int channel) {
        const uint32_t code = read_code(c, reinterpret_cast<const uint32_t *>(u.page), token, channel);
        const int at = c.grouping == KVANT_CUDA_GROUP_CHANNELS32 ? channel / 32 * PAGE_TOKENS + token
                       : c.grouping == KVANT_CUDA_GROUP_TOKENS32 ? token / 32 * D + channel
                                                                 : token;
        const float scale = __half2float(numbers[at]) * inverse;
        if (codebook)
            return scale * (c.kind == KVANT_CUDA_CODEBOOK_WIDE ? levels[code] : c.values[code]);
        return scale * ((float)code + c.offset) + (zeros ? __half2float(numbers[c.n_scales + at]) * inverse : 0);
    });
    return power(e);
}

template <int P> __device__ __forceinline__ uint32_t chunk_bits(const uint32_t *plane, int n_chunks, bool keys,
                                                                int token, int chunk)
{
    const Place where = chunk_place(P, n_chunks, keys, token, chunk);
    return plane[where.word] >> where.bit & ((1u << P) - 1);
}

template <int BITS, int P = 16>
__device__ __forceinline__ uint32_t chunk_code(const uint32_t *words, int n_chunks, bool keys, int token, int chunk)
{
    if constexpr (P == 0)
        return 0;
    else if constexpr ((BITS & P) == 0)
        return chunk_code<BITS, P / 2>(words, n_chunks, keys, token, chunk);
    else
        return chunk_bits<P>(words, n_chunks, keys, token, chunk) |
               chunk_code<BITS, P / 2>(words + chunk_plane_words(P, n_chunks, keys), n_chunks, keys, token, chunk)
                   << P;
}

/* The direction of a code, times the length without the token's scale. table: C::fill of one copy, and
 * norms that are not in there. */
template <class C> __device__ __forceinline__ uint2 chunk_numbers(const Unpacking &u, uint32_t code, uint32_t scale)
{
    const uint2 *entries = reinterpret_cast<const uint2 *>(u.table);
    uint2 x;
    if constexpr (C::CHANNELS == 3) {
        const uint32_t index = code & (C::ENTRIES - 1);
        x = entries[C::BITS == 7 ? index : (index & 255) << 2 | index >> 8];
        if constexpr (C::HAS_NORM) {
            const uint32_t norm =
                reinterpret_cast<const uint32_t *>(entries + C::ENTRIES)[code >> 2 * C::DIRECTION_BITS];
            x.x = multiply_halves(x.x, norm), x.y = multiply_halves(x.y, norm);
        }
    } else { /* without a table; directions are times 2^15; radii become at most 1 */
        const uint32_t index = min(code & ((1u << u.codec.index_bits) - 1), (uint32_t)C::ENTRIES - 1),
                       radius = code >> u.codec.index_bits;
        x = C::entry(u.codec.directions, (int)index);
        scale = multiply_halves(scale, twice((float)radius * 0x1p-6f));
    }
    return make_uint2(multiply_halves(x.x, scale), multiply_halves(x.y, scale));
}

/* Chunks where there is little room, a code a lane: lanes are tokens. */
template <class C, int D, bool KEYS> __device__ __forceinline__ float unpack_chunks(const Unpacking &u)
{
    constexpr int CHUNKS = (D + C::CHANNELS - 1) / C::CHANNELS;
    const int e = exponent_of<KVANT_CUDA_GROUP_TOKEN, D>(u, false);
    const float to_unit = power(-e);
#pragma unroll 4
    for (int i = u.warp; i < 2 * CHUNKS; i += UNPACK_WARPS) {
        const int chunk = i / 2, token = 32 * (i % 2) + u.lane;
        const uint32_t code =
            chunk_code<C::BITS>(reinterpret_cast<const uint32_t *>(u.page), CHUNKS, KEYS, token, chunk);
        const float scale = token < u.valid ? __half2float(u.numbers()[token]) * to_unit : 0;
        const uint2 x = chunk_numbers<C>(u, code, twice(scale));
#pragma unroll
        for (int k = 0; k < C::CHANNELS; k++)
            if (C::CHANNELS * chunk + k < D) {
                const uint32_t pair = k < 2 ? x.x : x.y;
                put_one<KEYS>(u.tile, token, C::CHANNELS * chunk + k,
                              __ushort_as_half((uint16_t)(k % 2 ? pair >> 16 : pair)));
            }
    }
    return power(C::CHANNELS == 3 ? e : e - 9);
}

/* Copies of the table of chunks beside each other, where there is room (chunks.cuh). */
template <class C> __host__ __device__ constexpr int tile_copies()
{
    return C::CHANNELS == 3 ? C::template copies<false, 64>() : 1;
}

/* A ChunkTable that lies anywhere. */
struct TileChunks {
    const uint8_t *entries;
    uint32_t copy, limit;
    uint32_t norm_low[2], norm_high[2];

    __device__ __forceinline__ uint2 at(uint32_t distance) const
    {
        return *reinterpret_cast<const uint2 *>(entries + distance);
    }
};

/* Pairs of halves that a lane has of tokens r and r + 8 of row tile rt: a[e] is of its chunks 2 c and
 * 2 c + 1 of the step. */
template <class C, int D>
__device__ __forceinline__ void put_key_chunks(const Unpacking &u, int step, int rt, const uint32_t (&a)[2][4],
                                               const uint32_t (&scale)[2])
{
    constexpr int N = 2 * C::CHANNELS;
    const int channel = N * (4 * step + (u.lane & 3));
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int token = 16 * rt + (u.lane >> 2) + 8 * h;
        uint32_t x[4] = { a[0][h], a[0][h + 2], a[1][h], a[1][h + 2] };
        if constexpr (C::CHANNELS == 3) {
            x[1] = low_halves(x[1], x[2]);
            x[2] = prmt(x[2], x[3], 0x5432);
        }
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            x[i] = multiply_halves(x[i], scale[h]);
        if constexpr (C::CHANNELS == 4)
            *reinterpret_cast<uint4 *>(u.tile + place_of(PAGE_TOKENS, token, channel)) =
                make_uint4(x[0], x[1], x[2], x[3]);
        else
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                if (channel + 2 * i < D)
                    put(u.tile, token, channel + 2 * i, x[i]);
    }
}

/* The values of chunks of row lane / 4: a tile's registers. Of four channels every second row has its
 * channels in another order, so that no more than two lanes meet in a bank. */
template <class C, int D>
__device__ __forceinline__ void put_value_chunks(const Unpacking &u, int tile, int ct, const uint32_t (&a)[4],
                                                 const uint32_t (&scale)[2])
{
    const int other = C::CHANNELS == 4 ? u.lane >> 3 & 1 : 0;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const int channel = value_channel<C, D>(tile, u.lane >> 2, 0) +
                            (C::CHANNELS == 4 ? (q & 1) ^ other : value_channel<C, D>(tile, u.lane >> 2, q & 1) -
                                                                      value_channel<C, D>(tile, u.lane >> 2, 0));
        if (C::CHANNELS == 4 || channel < D)
            put(u.tile, channel, 16 * ct + 8 * (q >> 1) + 2 * (u.lane & 3),
                multiply_halves(other ? a[q ^ 1] : a[q], scale[q >> 1]));
    }
}

/* Chunks by the look-ups of the decode kernel. */
template <class C, int D, bool KEYS> __device__ __forceinline__ float look_up_chunks(const Unpacking &u)
{
    constexpr int COPIES = tile_copies<C>(), ENTRY_BYTES = C::ENTRIES * 8 * COPIES;
    const int e = exponent_of<KVANT_CUDA_GROUP_TOKEN, D>(u, false);
    const float to_unit = power(-e);
    TileChunks table{ u.table, 8u * (u.lane % COPIES), (C::ENTRIES - 1) * 8u * COPIES + 8u * (u.lane % COPIES), {}, {} };
    if constexpr (C::CHANNELS == 3) {
        const uint32_t *norms = reinterpret_cast<const uint32_t *>(u.table + ENTRY_BYTES);
        table.norm_low[0] = norms[0], table.norm_low[1] = norms[1];
        table.norm_high[0] = norms[2], table.norm_high[1] = norms[3];
    }
    uint32_t scale[4][2];
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int token = 16 * t + 8 * h + (KEYS ? u.lane >> 2 : 2 * (u.lane & 3));
            const float2 s = stored_pair<KVANT_CUDA_GROUP_TOKEN, D, KEYS>(u.numbers(), KEYS ? token : 0,
                                                                         KEYS ? 0 : token, u.valid);
            scale[t][h] = pack_half2(s.x * to_unit, s.y * to_unit);
        }
    using P = ChunkPlaces<C, D>;
    if constexpr (KEYS) {
#pragma unroll 1
        for (int step = u.warp; step < P::KEY_STEPS; step += UNPACK_WARPS)
            C::template key_step<D, COPIES>(u.page, u.lane, table, step, [&](int rt, const uint32_t(&a)[2][4]) {
                put_key_chunks<C, D>(u, step, rt, a, scale[rt]);
            });
    } else { /* a warp has one or two column tiles */
        constexpr int PARTS = C::CHANNELS == 3 ? 2 : 4, TILES = 4 / PARTS;
        const int part = u.warp % PARTS;
        uint32_t own[TILES][2];
#pragma unroll
        for (int t = 0; t < 4; t++)
            if (t / TILES == part)
                own[t & (TILES - 1)][0] = scale[t][0], own[t & (TILES - 1)][1] = scale[t][1];
#pragma unroll 1
        for (int g = u.warp / PARTS; g < P::VALUE_GROUPS; g += UNPACK_WARPS / PARTS)
            C::template value_step<D, COPIES>(u.page, u.lane, table, g, part,
                                              [&](int tile, int ct, const uint32_t(&a)[4]) {
                                                  put_value_chunks<C, D>(u, tile, ct, a, own[ct & (TILES - 1)]);
                                              });
    }
    return power(C::CHANNELS == 3 ? e : e + 5);
}

/* What unpacking of a trellis of 256 states needs (trellis_pairs.cuh): the table of pairs of
 * levels. */
template <int COPIES_> struct TrellisTable {
    static constexpr int COPIES = COPIES_;
    const uint8_t *pairs;
    uint32_t own, shift1, shift2, shift4;

    __device__ __forceinline__ uint32_t at(uint32_t distance) const
    {
        return *reinterpret_cast<const uint32_t *>(pairs + distance);
    }
};

template <class C> struct TrellisTile : C {
    static constexpr int TILES = 1;
};

/* The planes of column unit u of keys and of the M before it, the last one at [M]: plane(u) reads one.
 * Before the first unit stands the last one, its fields moved (trellis.cuh). */
template <int B, int M, int UNITS, class F>
__device__ __forceinline__ void planes_before(int u, int lane, uint32_t (&chain)[M + 1], F &&plane)
{
#pragma unroll
    for (int k = 0; k <= M; k++) {
        int at = u - M + k, turns = 0;
#pragma unroll
        for (int i = 0; i < (M + UNITS - 1) / UNITS; i++)
            if (at < 0)
                at += UNITS, turns++;
        chain[k] = plane(at);
#pragma unroll 1
        for (; turns > 0; turns--)
            chain[k] = key_fields_before<B>(chain[k], lane);
    }
}

/* Every warp has units of columns of its own. The loops are not unrolled: the code of all units is
 * more than the instruction caches hold. use(row tile, column tile, halves) */
template <class C, int D, class T, class F>
__device__ __forceinline__ void unpack_trellis_keys(const Unpacking &u, const T &table, F &&use)
{
    constexpr int M = C::MEMORY;
    const uint32_t *words = reinterpret_cast<const uint32_t *>(u.page);
    if constexpr (C::BITS == 4) {
#pragma unroll 1
        for (int unit = u.warp; unit < D / 16; unit += UNPACK_WARPS) {
            uint32_t w[4], chain[M + 1];
            planes_before<4, M, D / 16>(unit, u.lane, chain, [&](int at) {
                load_words<4>(words + (32 * at + u.lane) * 4, w);
                return low_plane(w);
            });
            pair_operands4<M>(
                w, [&](int j) { return chain[M - j]; }, table,
                [&](int rt, const uint32_t(&a)[4]) { use(rt, unit, a); });
        }
    } else {
        constexpr int N = D / 32;
#pragma unroll 1
        for (int i = u.warp; i < 2 * N; i += UNPACK_WARPS) {
            const int unit = i / 2, half = i % 2; /* of the row tiles */
            uint32_t w[2], third[2] = {}, chain[M + 1];
            planes_before<C::BITS, M, N>(unit, u.lane, chain, [&](int at) {
                load_words<2>(words + (32 * at + u.lane) * 4 + 2 * half, w);
                return even_bits(w[0], w[1]);
            });
            if (C::BITS == 3)
                load_words<2>(words + 128 * N + (32 * (unit / 2) + u.lane) * 4 + 2 * half, third);
            pair_operands<C::BITS, M>(
                w[0], w[1], third[0], third[1], unit % 2 == 1, [&](int j) { return chain[M - j]; }, table,
                [&](int k, int t, const uint32_t(&a)[4]) { use(2 * half + k, 2 * unit + t, a); });
        }
    }
}

/* Values: a warp has a column tile, or a column unit and half of the row tiles. */
template <class C, int D, class T, class F>
__device__ __forceinline__ void unpack_trellis_values(const Unpacking &u, const T &table, F &&use)
{
    constexpr int N = (D + 63) / 64, M = C::MEMORY;
    const uint32_t *page = reinterpret_cast<const uint32_t *>(u.page);
    if constexpr (C::BITS == 4) {
        trellis_value4_column<C, D>(page, u.warp, u.lane, table,
                                    [&](int rt, const uint32_t(&a)[4]) { use(rt, u.warp, a); });
    } else {
        const int unit = u.warp / 2, half = u.warp % 2;
        uint32_t w[N][4], third[N][4] = {};
        Runs<N> runs[2];
        load_column<D, 2>(page, 32 * unit + u.lane, w);
        if constexpr (C::BITS == 3)
            load_column<D, 1>(page + 64 * (D / 16), u.lane, third);
#pragma unroll
        for (int g = 0; g < N; g++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                runs[h].at[g + 2] = even_bits(w[g][2 * h], w[g][2 * h + 1]);
        close_runs<D>(runs);
#pragma unroll
        for (int g = 0; g < N; g++) {
            Runs<N> own;
#pragma unroll
            for (int k = 0; k < N + 2; k++)
                own.at[k] = half ? runs[1].at[k] : runs[0].at[k];
            const TermsBefore<M> terms = terms_before<M, N>(own, g, u.lane);
            if (4 * g + 2 * half < D / 16)
                pair_operands<C::BITS, M>(
                    half ? w[g][2] : w[g][0], half ? w[g][3] : w[g][1], half ? third[g][2] : third[g][0],
                    half ? third[g][3] : third[g][1], unit == 1, [&](int j) { return terms.at[j]; }, table,
                    [&](int k, int t, const uint32_t(&a)[4]) { use(4 * g + 2 * half + k, 2 * unit + t, a); });
        }
    }
}

template <class C, int D, bool KEYS> __device__ __forceinline__ float unpack_trellis(const Unpacking &u)
{
    using OneTile = TrellisTile<C>;
    constexpr int COPIES = pair_copies<C, false>();
    const Steps steps = steps_of<C, D>(u);
    const TrellisTable<COPIES> table{ u.table, 4u * (u.lane % COPIES), u.one << 31, u.one << 30, u.one << 28 };
    /* what a warp has: all or half of the row tiles of keys, one or two column tiles of values */
    constexpr int ROWS = !KEYS ? 1 : C::BITS == 4 ? 4 : 2, COLUMNS = KEYS || C::BITS == 4 ? 1 : 2;
    StepScales<OneTile, D, KEYS, ROWS> scales[COLUMNS];
#pragma unroll
    for (int t = 0; t < COLUMNS; t++)
        scales[t].load(u, steps, ROWS == 2 ? 2 * (u.warp % 2) : 0,
                       KEYS             ? 0
                       : C::BITS == 4 ? u.warp
                                      : 2 * (u.warp / 2) + t);
    auto use = [&](int rt, int ct, const uint32_t(&halves)[4]) {
        uint32_t a[1][4] = { { halves[0], halves[1], halves[2], halves[3] } };
        in_order<C::ORDER, 1>(a);
        scales[ct & (COLUMNS - 1)].apply(rt & (ROWS - 1), 0, a[0]);
        put_tile(u.tile, rt, ct, u.lane, a[0]);
    };
    if constexpr (KEYS)
        unpack_trellis_keys<C, D>(u, table, use);
    else
        unpack_trellis_values<C, D>(u, table, use);
    return steps.unit;
}

/* The same of any number of states, a row a warp. table: the values of levels, then the trellis bits
 * of each warp's row. */
template <int D, bool KEYS> __device__ __forceinline__ float unpack_any_trellis(const Unpacking &u)
{
    const kvant_cuda_params &c = u.codec.params;
    const float *values = reinterpret_cast<const float *>(u.table);
    uint8_t *bits = const_cast<uint8_t *>(u.table) + KVANT_CUDA_TRELLIS_LEVELS * 4 + D * u.warp;
    const int e = exponent_of<KVANT_CUDA_GROUP_TOKEN, D>(u, false);
    for (int token = u.warp; token < PAGE_TOKENS; token += UNPACK_WARPS) {
        const float scale = token < u.valid ? __half2float(u.numbers()[token]) * power(-e) : 0;
        uint32_t codes[D / 32];
        int steps[D / 32];
        __syncwarp();
#pragma unroll
        for (int j = 0; j < D / 32; j++) {
            codes[j] = read_code(c, reinterpret_cast<const uint32_t *>(u.page), token, u.lane + 32 * j);
            steps[j] = trellis_step(c.role, (int)c.bits, D, u.lane + 32 * j);
            bits[steps[j]] = codes[j] & 1;
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < D / 32; j++)
            put_one<KEYS>(u.tile, token, u.lane + 32 * j,
                          __float2half_rn(scale * values[8 * (codes[j] / 2) +
                                                         subset_at(u.codec.trellis, bits, D, steps[j])]));
    }
    return power(e);
}

template <class C, int D, bool KEYS> __device__ __forceinline__ float unpack_any_chunks(const Unpacking &u)
{
    return u.codec.looks_up ? look_up_chunks<C, D, KEYS>(u) : unpack_chunks<C, D, KEYS>(u);
}

/* The same as unpack_page where shared memory has no room for codes: the page is in device memory, and
 * no table is there. */
template <int D, bool KEYS> __device__ __forceinline__ float unpack_far_page(const Unpacking &u)
{
    switch (u.codec.params.kind) {
    case KVANT_CUDA_OCTOPUS2: return unpack_chunks<Octopus2, D, KEYS>(u);
    case KVANT_CUDA_OCTOPUS3: return unpack_chunks<Octopus3, D, KEYS>(u);
    case KVANT_CUDA_OCTOPUS4: return unpack_chunks<Octopus4, D, KEYS>(u);
    case KVANT_CUDA_HQMQ_S96R4: return unpack_chunks<HqmqS96R4, D, KEYS>(u);
    case KVANT_CUDA_HQMQ_S192R6: return unpack_chunks<HqmqS192R6, D, KEYS>(u);
    case KVANT_CUDA_TRELLIS2:
    case KVANT_CUDA_TRELLIS3:
    case KVANT_CUDA_TRELLIS4: return unpack_any_trellis<D, KEYS>(u);
    default: return unpack_numbers<D, KEYS>(u);
    }
}

/* Unpacks a sealed page, whose codes are in shared memory; returns its unit. Called by the whole
 * warpgroup. */
template <int D, bool KEYS> __device__ __forceinline__ float unpack_page(const Unpacking &u)
{
    switch (u.codec.params.kind) {
    case KVANT_CUDA_UNIFORM2: return unpack_in_registers<Uniform2, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM3: return unpack_in_registers<Uniform3, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM4: return unpack_in_registers<Uniform4, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM8: return unpack_in_registers<Uniform8, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM2_CHANNELS32: return unpack_in_registers<Uniform2Channels32, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM3_CHANNELS32: return unpack_in_registers<Uniform3Channels32, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM2_TOKENS32: return unpack_in_registers<Uniform2Tokens32, D, KEYS>(u);
    case KVANT_CUDA_UNIFORM3_TOKENS32: return unpack_in_registers<Uniform3Tokens32, D, KEYS>(u);
    case KVANT_CUDA_CODEBOOK2: return unpack_in_registers<Codebook2, D, KEYS>(u);
    case KVANT_CUDA_CODEBOOK3: return unpack_in_registers<Codebook3, D, KEYS>(u);
    case KVANT_CUDA_CODEBOOK4: return unpack_in_registers<Codebook4, D, KEYS>(u);
    case KVANT_CUDA_OCTOPUS2: return unpack_any_chunks<Octopus2, D, KEYS>(u);
    case KVANT_CUDA_OCTOPUS3: return unpack_any_chunks<Octopus3, D, KEYS>(u);
    case KVANT_CUDA_OCTOPUS4: return unpack_any_chunks<Octopus4, D, KEYS>(u);
    case KVANT_CUDA_HQMQ_S96R4: return unpack_any_chunks<HqmqS96R4, D, KEYS>(u);
    case KVANT_CUDA_HQMQ_S192R6: return unpack_any_chunks<HqmqS192R6, D, KEYS>(u);
    case KVANT_CUDA_TRELLIS2:
        return u.codec.looks_up ? unpack_trellis<Trellis2, D, KEYS>(u) : unpack_any_trellis<D, KEYS>(u);
    case KVANT_CUDA_TRELLIS3:
        return u.codec.looks_up ? unpack_trellis<Trellis3, D, KEYS>(u) : unpack_any_trellis<D, KEYS>(u);
    case KVANT_CUDA_TRELLIS4:
        return u.codec.looks_up ? unpack_trellis<Trellis4, D, KEYS>(u) : unpack_any_trellis<D, KEYS>(u);
    default: return unpack_numbers<D, KEYS>(u);
    }
}

/* Entries, then (triplets) the bytes of norms: for look_up_chunks in copies, for chunk_numbers one. */
template <class C> __device__ __forceinline__ void fill_chunks(uint8_t *table, const TileCodec &codec)
{
    const int copies = codec.looks_up ? tile_copies<C>() : 1, i = threadIdx.x;
    if (C::CHANNELS == 3 && i < 8) {
        const __half norm = __float2half_rn(codec.directions.norm[i]);
        uint8_t *to = table + C::ENTRIES * 8 * copies;
        if (codec.looks_up)
            to[i] = (uint8_t)__half_as_ushort(norm), to[8 + i] = (uint8_t)(__half_as_ushort(norm) >> 8);
        else
            reinterpret_cast<uint32_t *>(to)[i] = twice(codec.directions.norm[i]);
    }
    C::fill(table, codec.directions, copies);
}

/* Fills a codec's table, by all threads of a block. Chunks: chunks.cuh has the numbers. */
__device__ __forceinline__ void fill_table(const TileCodec &codec, uint8_t *table)
{
    if (codec.table_bytes == 0)
        return;
    switch (codec.params.kind) {
    case KVANT_CUDA_OCTOPUS2: return fill_chunks<Octopus2>(table, codec);
    case KVANT_CUDA_OCTOPUS3: return fill_chunks<Octopus3>(table, codec);
    case KVANT_CUDA_OCTOPUS4: return fill_chunks<Octopus4>(table, codec);
    case KVANT_CUDA_HQMQ_S96R4: return fill_chunks<HqmqS96R4>(table, codec);
    case KVANT_CUDA_HQMQ_S192R6: return fill_chunks<HqmqS192R6>(table, codec);
    case KVANT_CUDA_TRELLIS2:
        if (codec.looks_up)
            return fill_pairs<Trellis2, pair_copies<Trellis2, false>()>(table, codec.params.bytes);
        break;
    case KVANT_CUDA_TRELLIS3:
        if (codec.looks_up)
            return fill_pairs<Trellis3, pair_copies<Trellis3, false>()>(table, codec.params.bytes);
        break;
    case KVANT_CUDA_TRELLIS4:
        if (codec.looks_up)
            return fill_pairs<Trellis4, pair_copies<Trellis4, false>()>(table, codec.params.bytes);
        break;
    default: break;
    }
    const bool trellis = codec.params.codes == KVANT_CUDA_CODES_TRELLIS;
    const int n = trellis ? KVANT_CUDA_TRELLIS_LEVELS : codec.table_bytes / 4;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        reinterpret_cast<float *>(table)[i] = trellis ? codec.trellis.values[i] : codec.levels[i];
}

} // namespace kvant

#endif
