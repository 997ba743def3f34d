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
#include "../trellis/trellis_bytes.cuh"
#include "../trellis/trellis_pairs.cuh"
#include "../trellis/trellis_steps.cuh"
#include "operands.cuh"
#include "tiles.h"

namespace kvant
{

constexpr int UNPACK_WARPS = GROUP_THREADS / 32;

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

/* The largest of a page's n scales, or zero points, whose tokens are there; without its sign. Called
 * by whole warps, which all find the same. */
__device__ __forceinline__ float largest_number(const Unpacking &u, const __half *numbers, int n, int head_dim)
{
    const uint32_t *pairs = reinterpret_cast<const uint32_t *>(numbers);
    const bool by_channel = u.codec.params.grouping == KVANT_CUDA_GROUP_TOKENS32;
    uint32_t top = 0;
#pragma unroll 1
    for (int i = u.lane; i < n / 2; i += 32) {
        const int token = by_channel ? 2 * i < head_dim ? 0 : 32 : 2 * i % PAGE_TOKENS;
        const uint32_t pair = pairs[i] & 0x7fff7fffu;
        top = max(top, token < u.valid ? pair & 0xffffu : 0);
        top = max(top, token + (by_channel ? 0 : 1) < u.valid ? pair >> 16 : 0);
    }
    return __half2float(__ushort_as_half((uint16_t)__reduce_max_sync(FULL, top)));
}

/* The exponent e of the page: every scale is below 2^e, every zero point below 2^(e + 23). */
__device__ __forceinline__ int exponent_of(const Unpacking &u, int head_dim, bool zeros)
{
    const kvant_cuda_params &c = u.codec.params;
    const int n = c.codes == KVANT_CUDA_CODES_UNIFORM ? (int)c.n_scales : PAGE_TOKENS;
    float top = largest_number(u, u.numbers(), n, head_dim);
    if (zeros)
        top = fmaxf(top, largest_number(u, u.numbers() + n, n, head_dim) * 0x1p-23f);
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

template <class C> __device__ __forceinline__ Steps steps_of(const Unpacking &u, int head_dim)
{
    const kvant_cuda_params &c = u.codec.params;
    const bool zeros = HAS_ZEROS<C> && !c.symmetric;
    const int e = exponent_of(u, head_dim, zeros);
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
            stored_pair<C::GROUP, D, KEYS>(u.numbers() + u.codec.params.n_scales, row, column, u.valid);
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
    constexpr bool ONCE = KEYS && C::GROUP == KVANT_CUDA_GROUP_TOKEN; /* all steps have the same scales */
    const Steps steps = steps_of<C>(u, D);
    const Bytes bytes = bytes_of(u.codec.params.bytes, u.one);
    StepScales<C, D, KEYS, 4> scales;
    if (ONCE)
        scales.load(u, steps, 0, 0);
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

/* Uniform codes of any width and codebooks of any size: one scale per token. table: levels of a wide
 * codebook, as floats. */
template <int D, bool KEYS> __device__ __forceinline__ float unpack_numbers(const Unpacking &u)
{
    const kvant_cuda_params &c = u.codec.params;
    const bool codebook = c.codes == KVANT_CUDA_CODES_CODEBOOK, zeros = !codebook && !c.symmetric;
    const int e = exponent_of(u, D, zeros);
    const float inverse = power(-1 - e);
    const __half *numbers = u.numbers();
    const float *levels = reinterpret_cast<const float *>(u.table);
    unpack_each<D, KEYS>(u, [&](int token, int channel) {
        const uint32_t code = read_code(c, reinterpret_cast<const uint32_t *>(u.page), token, channel);
        const float scale = __half2float(numbers[token]) * inverse;
        return codebook ? scale * levels[code]
                        : scale * ((float)code + c.offset) +
                              (zeros ? __half2float(numbers[c.n_scales + token]) * inverse : 0);
    });
    return power(e + 1);
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
    } else { /* directions are times 2^15; radii become at most 1 */
        const uint32_t index = min(code & ((1u << u.codec.index_bits) - 1), (uint32_t)C::ENTRIES - 1),
                       radius = code >> u.codec.index_bits;
        x = u.codec.looks_up ? entries[index] : C::entry(u.codec.directions, (int)index);
        scale = multiply_halves(scale, twice((float)radius * 0x1p-6f));
    }
    return make_uint2(multiply_halves(x.x, scale), multiply_halves(x.y, scale));
}

/* Chunks, a code a lane: lanes are tokens. */
template <class C, int D, bool KEYS> __device__ __forceinline__ float unpack_chunks(const Unpacking &u)
{
    constexpr int CHUNKS = (D + C::CHANNELS - 1) / C::CHANNELS;
    const int e = exponent_of(u, D, false);
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

/* What unpacking of a trellis of 256 states needs (trellis_bytes.cuh, trellis_pairs.cuh): the table of
 * pairs of levels; the parts of a page are dealt to warps. */
template <int COPIES_> struct TrellisTable : Magnitudes {
    static constexpr int LOOKED_UP = 4, COPIES = COPIES_;
    const uint8_t *pairs;
    uint32_t own;
    int warp;

    __device__ __forceinline__ uint32_t at(uint32_t distance) const
    {
        return *reinterpret_cast<const uint32_t *>(pairs + distance);
    }
    __device__ __forceinline__ bool mine(int i) const
    {
        return i % UNPACK_WARPS == warp;
    }
};

template <class C> struct TrellisTile : C {
    static constexpr int TILES = 1;
};

template <class C, int D, bool KEYS> __device__ __forceinline__ float unpack_trellis(const Unpacking &u)
{
    const Steps steps = steps_of<C>(u, D);
    TrellisTable<pair_copies<C, false>()> table;
    static_cast<Magnitudes &>(table) = magnitudes_of(u.codec.params.bytes, u.one);
    table.pairs = u.table;
    table.own = 4 * (u.lane % table.COPIES);
    table.warp = u.warp;
    auto use = [&](int rt, int ct, const uint32_t(&halves)[4]) {
        using OneTile = TrellisTile<C>;
        StepScales<OneTile, D, KEYS, 1> scales;
        scales.load(u, steps, rt, ct);
        uint32_t a[1][4] = { { halves[0], halves[1], halves[2], halves[3] } };
        in_order<C::ORDER, 1>(a);
        scales.apply(0, 0, a[0]);
        put_tile(u.tile, rt, ct, u.lane, a[0]);
    };
    if constexpr (!KEYS)
        for_each_trellis_value<C, D>(u.page, u.lane, table, use);
    else if constexpr (C::BITS == 4)
        for_each_trellis_key4<C, D>(u.page, u.lane, table, use);
    else
        for_each_trellis_key<C, D>(u.page, u.lane, table, use);
    return steps.unit;
}

/* The same of any number of states, a row a warp. table: the values of levels, then the trellis bits
 * of each warp's row. */
template <int D, bool KEYS> __device__ __forceinline__ float unpack_any_trellis(const Unpacking &u)
{
    const kvant_cuda_params &c = u.codec.params;
    const float *values = reinterpret_cast<const float *>(u.table);
    uint8_t *bits = const_cast<uint8_t *>(u.table) + KVANT_CUDA_TRELLIS_LEVELS * 4 + D * u.warp;
    const int e = exponent_of(u, D, false);
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

/* Unpacks a sealed page; returns its unit. Called by the whole warpgroup. */
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
    case KVANT_CUDA_OCTOPUS2: return unpack_chunks<Octopus2, D, KEYS>(u);
    case KVANT_CUDA_OCTOPUS3: return unpack_chunks<Octopus3, D, KEYS>(u);
    case KVANT_CUDA_OCTOPUS4: return unpack_chunks<Octopus4, D, KEYS>(u);
    case KVANT_CUDA_HQMQ_S96R4: return unpack_chunks<HqmqS96R4, D, KEYS>(u);
    case KVANT_CUDA_HQMQ_S192R6: return unpack_chunks<HqmqS192R6, D, KEYS>(u);
    case KVANT_CUDA_TRELLIS2:
        return u.codec.looks_up ? unpack_trellis<Trellis2, D, KEYS>(u) : unpack_any_trellis<D, KEYS>(u);
    case KVANT_CUDA_TRELLIS3:
        return u.codec.looks_up ? unpack_trellis<Trellis3, D, KEYS>(u) : unpack_any_trellis<D, KEYS>(u);
    case KVANT_CUDA_TRELLIS4:
        return u.codec.looks_up ? unpack_trellis<Trellis4, D, KEYS>(u) : unpack_any_trellis<D, KEYS>(u);
    default: return unpack_numbers<D, KEYS>(u);
    }
}

/* Fills a codec's table, by all threads of a block. Chunks: chunks.cuh has the numbers. */
__device__ __forceinline__ void fill_table(const TileCodec &codec, uint8_t *table)
{
    if (codec.table_bytes == 0)
        return;
    switch (codec.params.kind) {
    case KVANT_CUDA_OCTOPUS2: return Octopus2::fill(table, codec.directions, 1);
    case KVANT_CUDA_OCTOPUS3: return Octopus3::fill(table, codec.directions, 1);
    case KVANT_CUDA_OCTOPUS4:
        if (threadIdx.x < 8)
            reinterpret_cast<uint32_t *>(table + Octopus4::ENTRIES * 8)[threadIdx.x] =
                twice(codec.directions.norm[threadIdx.x]);
        return Octopus4::fill(table, codec.directions, 1);
    case KVANT_CUDA_HQMQ_S96R4: return HqmqS96R4::fill(table, codec.directions, 1);
    case KVANT_CUDA_HQMQ_S192R6: return HqmqS192R6::fill(table, codec.directions, 1);
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
