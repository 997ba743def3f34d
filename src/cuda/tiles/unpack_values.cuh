/* unpack_values.cuh - from a page with a code per channel to a matrix of fp16 numbers.
 *
 * Numbers are divided by the page's unit, a power of two above its scales, so fp16's range does not
 * limit them. A kind of code that the decode kernel unpacks in registers (dequant.cuh) is unpacked
 * by the same instructions, and each number is rounded once. All other kinds are read number by
 * number with the arithmetic of decode.cu. Tokens beyond the sequence's end become zeros. */
#pragma once

#include "../attention/dequant.cuh"
#include "../attention/softmax.cuh"
#include "../papers/chunks.cuh"
#include "../pages/read_code.cuh"
#include "operands.cuh"
#include "tiles.h"

namespace kvant
{

constexpr int UNPACK_WARPS = GROUP_WARPS;

/* A page, its destination, and the threads that unpack it. */
struct Unpacking {
    const TileCodec &codec;
    const uint8_t *page;
    const uint8_t *table; /* the codec's table, in shared memory */
    uint8_t *tile;
    uint32_t one;
    int valid; /* tokens that exist */
    int warp, lane;
    int user; /* the warp's index among the warps that use the table */

    KVANT_INLINE const __half *numbers() const
    {
        return reinterpret_cast<const __half *>(page + codec.params.metadata_offset);
    }
};

/* Makes the compiler forget the values of these variables for each page. Otherwise it would keep
 * everything that any kind of codes computes from them in registers, of which there are too few. */
KVANT_INLINE void forget(int &warp, int &lane, uint32_t &one)
{
    asm volatile("" : "+r"(warp), "+r"(lane), "+r"(one));
    __builtin_assume(warp >= 0 && warp < UNPACK_WARPS);
    __builtin_assume(lane >= 0 && lane < 32);
}

/* Stores a pair of numbers at (row, column) and (row, column + 1). */
KVANT_INLINE void put(uint8_t *tile, int row, int column, uint32_t pair)
{
    *reinterpret_cast<uint32_t *>(tile + place_of(PAGE_TOKENS, row, column)) = pair;
}

template <bool KEYS> KVANT_INLINE void put_one(uint8_t *tile, int token, int channel, __half x)
{
    *reinterpret_cast<__half *>(tile + (KEYS ? place_of(PAGE_TOKENS, token, channel)
                                             : place_of(PAGE_TOKENS, channel, token))) = x;
}

/* 2^n as fp32 */
KVANT_INLINE float power(int n)
{
    return __int_as_float((n + 127) << 23);
}

/* The number of scales of a page, and of its zero points. */
template <kvant_cuda_grouping GROUP, int D>
constexpr int N_SCALES = GROUP == KVANT_CUDA_GROUP_TOKEN      ? PAGE_TOKENS
                         : GROUP == KVANT_CUDA_GROUP_CHANNELS ? D / 32 * PAGE_TOKENS
                                                              : PAGE_TOKENS / 32 * D;

/* The lane's own part of the largest scale (or zero point) of existing tokens, as bits of fp16
 * without its sign. */
template <kvant_cuda_grouping GROUP, int D>
KVANT_INLINE uint32_t largest_number(const Unpacking &u, const __half *numbers)
{
    constexpr bool BY_CHANNEL = GROUP == KVANT_CUDA_GROUP_TOKENS;
    uint32_t top = 0;
    unrolled_for (int i = 0; i < N_SCALES<GROUP, D> / 64; i++) {
        const int at = 64 * i + 2 * u.lane, token = BY_CHANNEL ? at / D * 32 : at % PAGE_TOKENS;
        const uint32_t pair = *reinterpret_cast<const uint32_t *>(numbers + at) & 0x7fff7fffu;
        top = max(top, token < u.valid ? pair & 0xffffu : 0);
        top = max(top, token + (BY_CHANNEL ? 0 : 1) < u.valid ? pair >> 16 : 0);
    }
    return top;
}

/* The exponent e of the page: every scale is below 2^e, and every zero point below 2^(e + 23).
 * Called by whole warps, and all find the same e. */
template <kvant_cuda_grouping GROUP, int D>
KVANT_INLINE int exponent_of(const Unpacking &u, bool zeros)
{
    auto as_float = [](uint32_t bits) {
        return __half2float(__ushort_as_half((uint16_t)__reduce_max_sync(FULL, bits)));
    };
    float top = as_float(largest_number<GROUP, D>(u, u.numbers()));
    if (zeros)
        top = fmaxf(top, as_float(largest_number<GROUP, D>(u, u.numbers() + N_SCALES<GROUP, D>)) *
                             0x1p-23f);
    return max((__float_as_int(top) >> 23) - 126, -24);
}

/* The stored scales or zero points of the numbers at (row, column) and (row, column + 1). */
template <kvant_cuda_grouping GROUP, int D, bool KEYS>
KVANT_INLINE float2 stored_pair(const __half *numbers, int row, int column, int valid)
{
    const uint16_t *from = reinterpret_cast<const uint16_t *>(numbers);
    constexpr bool SAME =
        GROUP == KVANT_CUDA_GROUP_TOKENS ? !KEYS : KEYS; /* whether one scale serves the pair */
    const int token = KEYS ? row : column, channel = KEYS ? column : row;
    const int at = GROUP == KVANT_CUDA_GROUP_TOKEN      ? token
                   : GROUP == KVANT_CUDA_GROUP_CHANNELS ? channel / 32 * PAGE_TOKENS + token
                                                        : token / 32 * D + channel;
    float2 pair;
    if constexpr (SAME)
        pair.x = pair.y = __half2float(__ushort_as_half(from[at]));
    else
        pair = __half22float2(*reinterpret_cast<const __half2 *>(from + at));
    if (valid < PAGE_TOKENS) {
        const int first = GROUP == KVANT_CUDA_GROUP_TOKENS ? token / 32 * 32 : token;
        pair.x = first < valid ? pair.x : 0;
        pair.y = first + (SAME || GROUP == KVANT_CUDA_GROUP_TOKENS ? 0 : 1) < valid ? pair.y : 0;
    }
    return pair;
}

KVANT_INLINE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c)
{
    const __half2 y = __hfma2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b),
                              *reinterpret_cast<__half2 *>(&c));
    return *reinterpret_cast<const uint32_t *>(&y);
}

KVANT_INLINE uint32_t twice(float x)
{
    return pack_half2(x, x);
}

KVANT_INLINE uint32_t low_halves(uint32_t x, uint32_t y)
{
    return prmt(x, y, 0x5410);
}

KVANT_INLINE uint32_t high_halves(uint32_t x, uint32_t y)
{
    return prmt(x, y, 0x7632);
}

/* Reorders operands from the order COLUMNS, so that halves are neighbours in a row. */
template <Order ORDER, int TILES> KVANT_INLINE void in_order(uint32_t (&a)[TILES][4])
{
    auto exchange = [](uint32_t &x, uint32_t &y) {
        const uint32_t low = low_halves(x, y);
        y = high_halves(x, y);
        x = low;
    };
    if constexpr (ORDER == Order::COLUMNS_AND_8)
        unrolled_for (int i = 0; i < TILES; i++)
            exchange(a[i][0], a[i][2]), exchange(a[i][1], a[i][3]);
    if constexpr (ORDER == Order::TILES)
        unrolled_for (int i = 0; i < TILES; i += 2)
            unrolled_for (int k = 0; k < 4; k++)
                exchange(a[i][k], a[i + 1][k]);
}

/* Stores four registers of a 16 x 16 tile of the matrix. */
KVANT_INLINE void put_tile(uint8_t *tile, int row_tile, int column_tile, int lane,
                           const uint32_t (&a)[4])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    store_matrices(a, shared_address(tile) + place_of(PAGE_TOKENS, 16 * row_tile + (lane & 15),
                                                      16 * column_tile + 8 * (lane >> 4)));
#else
    unrolled_for (int q = 0; q < 4; q++)
        put(tile, 16 * row_tile + (lane >> 2) + 8 * (q & 1),
            16 * column_tile + 2 * (lane & 3) + 8 * (q >> 1), a[q]);
#endif
}

/* The factors that make numbers of codes u, which are fp16 numbers u 2^-24. A number / unit is
 * code * s + z, where s is scale * of_scale, and z is scale * of_offset + zero * of_zero. */
struct Steps {
    float of_scale, of_offset, of_zero, unit;
};

template <class C, int D> KVANT_INLINE Steps steps_of(const Unpacking &u)
{
    const kvant_cuda_params &c = u.codec.params;
    const bool zeros = HAS_ZEROS<C> && !c.symmetric;
    const int e = exponent_of<C::GROUP, D>(u, zeros);
    const float offset = HAS_ZEROS<C> ? (c.symmetric ? c.offset : 0)
                         : C::BIASED  ? -c.bias
                                      : 0,
                small = power(-9 - e);
    return Steps{ power(15 - e), offset * small, zeros ? small : 0,
                  power(9 + e) * (HAS_ZEROS<C> ? 1 : c.step) };
}

struct ScaleAndZero {
    uint32_t scale, zero;
};

/* s and z for the pair at (row, column). times: the inverse of the factor by which codes of this
 * row are too large. */
template <class C, int D, bool KEYS>
KVANT_INLINE ScaleAndZero load_scale(const Unpacking &u, const Steps &steps, int row, int column,
                                     float times)
{
    const float2 s = stored_pair<C::GROUP, D, KEYS>(u.numbers(), row, column, u.valid);
    float2 z = make_float2(s.x * steps.of_offset, s.y * steps.of_offset);
    if (HAS_ZEROS<C> && steps.of_zero != 0) {
        const float2 stored = stored_pair<C::GROUP, D, KEYS>(u.numbers() + N_SCALES<C::GROUP, D>,
                                                             row, column, u.valid);
        z = make_float2(stored.x * steps.of_zero, stored.y * steps.of_zero);
    }
    const float f = steps.of_scale * times;
    return ScaleAndZero{ pack_half2(s.x * f, s.y * f), pack_half2(z.x, z.y) };
}

/* s and z of a token as in Steps, two tokens per lane. */
template <class C, int D>
KVANT_INLINE ScaleAndZero own_tokens(const Unpacking &u, const Steps &steps)
{
    auto pair_of = [&](const __half *numbers) {
        float2 x = __half22float2(reinterpret_cast<const __half2 *>(numbers)[u.lane]);
        x.x = 2 * u.lane < u.valid ? x.x : 0;
        x.y = 2 * u.lane + 1 < u.valid ? x.y : 0;
        return x;
    };
    const float2 s = pair_of(u.numbers());
    float2 z = make_float2(s.x * steps.of_offset, s.y * steps.of_offset);
    if (HAS_ZEROS<C> && steps.of_zero != 0) {
        const float2 stored = pair_of(u.numbers() + PAGE_TOKENS);
        z = make_float2(stored.x * steps.of_zero, stored.y * steps.of_zero);
    }
    return ScaleAndZero{ pack_half2(s.x * steps.of_scale, s.y * steps.of_scale),
                         pack_half2(z.x, z.y) };
}

/* The pair of numbers for the tile element at (row, column) and the next one, from numbers of which
 * each lane has two tokens'. BY_ROW: twice the number of the row's token; otherwise the numbers of
 * tokens column and column + 1. */
template <bool BY_ROW> KVANT_INLINE uint32_t of_tokens(uint32_t own, int row, int column)
{
    const uint32_t pair = __shfl_sync(FULL, own, (BY_ROW ? row : column) / 2);
    return BY_ROW ? prmt(pair, 0, row % 2 ? 0x3232 : 0x1010) : pair;
}

/* The scales of R row tiles and of the column tiles of a step. They may differ by row, and then are
 * equal for at least 32 columns; or by column, and then are equal for at least 32 rows. */
template <class C, int D, bool KEYS, int R> struct StepScales {
    static constexpr bool BY_ROW = C::GROUP == KVANT_CUDA_GROUP_TOKENS ? !KEYS : KEYS;
    static constexpr int SPAN =
        C::GROUP == KVANT_CUDA_GROUP_TOKEN ? 8 : 2; /* tiles across that share scales */
    static constexpr int ALONG = BY_ROW ? R : C::TILES,
                         ACROSS = ((BY_ROW ? C::TILES : R) + SPAN - 1) / SPAN;
    ScaleAndZero at[ALONG][2][ACROSS];

    KVANT_INLINE void load(const Unpacking &u, const Steps &steps, int row_tile, int column_tile)
    {
        constexpr int COLUMNS = KEYS ? D / 16 : PAGE_TOKENS / 16;
        const int row = 16 * row_tile + (u.lane >> 2), column = 2 * (u.lane & 3);
        const ScaleAndZero own =
            C::GROUP == KVANT_CUDA_GROUP_TOKEN ? own_tokens<C, D>(u, steps) : ScaleAndZero{};
        unrolled_for (int i = 0; i < ALONG; i++)
            unrolled_for (int h = 0; h < 2; h++)
                unrolled_for (int k = 0; k < ACROSS; k++) {
                    const int t = min(column_tile + (BY_ROW ? SPAN * k : i), COLUMNS - 1);
                    const int r = row + (BY_ROW ? 16 * i + 8 * h : 16 * SPAN * k),
                              c = 16 * t + column + (BY_ROW ? 0 : 8 * h);
                    const float times = BY_ROW && h ? 1 / C::ROW8 : 1;
                    if constexpr (C::GROUP == KVANT_CUDA_GROUP_TOKEN) {
                        at[i][h][k].scale = of_tokens<BY_ROW>(own.scale, r, c);
                        at[i][h][k].zero = of_tokens<BY_ROW>(own.zero, r, c);
                        if (BY_ROW && h && C::ROW8 != 1)
                            at[i][h][k].scale = multiply_halves(at[i][h][k].scale, twice(times));
                    } else
                        at[i][h][k] = load_scale<C, D, KEYS>(u, steps, r, c, times);
                }
    }

    /* Computes numbers from codes in the order COLUMNS. i: number of the row tile, t: number of the
     * column tile. */
    KVANT_INLINE void apply(int i, int t, uint32_t (&a)[4]) const
    {
        unrolled_for (int q = 0; q < 4; q++) {
            const ScaleAndZero &x =
                at[BY_ROW ? i : t][BY_ROW ? q & 1 : q >> 1][(BY_ROW ? t : i) / SPAN];
            uint32_t scale = x.scale;
            if (!BY_ROW && C::ROW8 != 1 && q % 2 == 1)
                scale = multiply_halves(scale, twice(1 / C::ROW8));
            a[q] = fma2(a[q], scale, x.zero);
        }
    }
};

/* Unpacks R row tiles of group g, and column tiles from step * TILES on. */
template <class C, int D, bool KEYS, int R>
KVANT_INLINE void unpack_step(const Unpacking &u, const Bytes &bytes,
                              const StepScales<C, D, KEYS, R> &scales, int g, int step)
{
    constexpr int ROWS = KEYS ? PAGE_TOKENS / 16 : D / 16,
                  COLUMNS = KEYS ? D / 16 : PAGE_TOKENS / 16;
    constexpr int FIRST = C::BITS == 3 ? (COLUMNS + 1) / 2 * 32 * ROWS : COLUMNS * 32 * ROWS;
    uint32_t w[R][3], a[C::TILES][4];
    load_step<C, R, COLUMNS>(reinterpret_cast<const uint32_t *>(u.page), g, step, u.lane, FIRST, w);
    unrolled_for (int i = 0; i < R; i++) {
        C::unpack(w[i], bytes, a);
        in_order<C::ORDER, C::TILES>(a);
        unrolled_for (int t = 0; t < C::TILES; t++) {
            if (C::TILES * step + t >= COLUMNS)
                break;
            scales.apply(i, t, a[t]);
            put_tile(u.tile, 4 * g + i, C::TILES * step + t, u.lane, a[t]);
        }
    }
}

/* Unpacks a kind of dequant.cuh; returns the unit. */
template <class C, int D, bool KEYS> KVANT_INLINE float unpack_in_registers(const Unpacking &u)
{
    constexpr int ROWS = KEYS ? PAGE_TOKENS / 16 : D / 16,
                  COLUMNS = KEYS ? D / 16 : PAGE_TOKENS / 16;
    constexpr int STEPS = (COLUMNS + C::TILES - 1) / C::TILES, GROUPS = (ROWS + 3) / 4;
    /* Whether all steps of a warp have the same scales, for keys; for values, whether there is only
     * one step. */
    constexpr bool ONCE = C::GROUP == KVANT_CUDA_GROUP_TOKEN && ROWS % 4 == 0;
    static_assert(KEYS || UNPACK_WARPS % STEPS == 0, "a warp has one step of values");
    const Steps steps = steps_of<C, D>(u);
    const Bytes bytes = bytes_of(u.codec.params.bytes, u.one);
    StepScales<C, D, KEYS, 4> scales;
    if (ONCE)
        scales.load(u, steps, 0, KEYS ? 0 : C::TILES * (u.warp % STEPS));
    rolled_for (int i = u.warp; i < STEPS * GROUPS; i += UNPACK_WARPS) {
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

/* Copies open pages, which are rows of fp16 numbers. */
template <int D, bool KEYS> KVANT_INLINE void unpack_open(const Unpacking &u)
{
    const int thread = 32 * u.warp + u.lane;
    if (KEYS) {
#pragma unroll 4
        for (int i = thread; i < PAGE_TOKENS * (D / 8); i += GROUP_THREADS) {
            const int token = i / (D / 8), channel = i % (D / 8) * 8;
            *reinterpret_cast<uint4 *>(u.tile + place_of(PAGE_TOKENS, token, channel)) =
                token < u.valid ? __ldg(reinterpret_cast<const uint4 *>(u.page) + i)
                                : make_uint4(0, 0, 0, 0);
        }
        return;
    }
    /* eight tokens by 32 channels at a time */
    const uint32_t *rows = reinterpret_cast<const uint32_t *>(u.page);
#pragma unroll 2
    for (int i = u.warp; i < PAGE_TOKENS / 8 * (D / 32); i += UNPACK_WARPS) {
        const int first = i % (PAGE_TOKENS / 8) * 8, channel = i / (PAGE_TOKENS / 8) * 32,
                  token = first + u.lane / 4;
        uint32_t x[4];
        unrolled_for (int k = 0; k < 4; k++)
            x[k] =
                token < u.valid ? __ldg(rows + (token * D + channel) / 2 + 4 * k + u.lane % 4) : 0;
        unrolled_for (int k = 0; k < 4; k++)
            put(u.tile, channel + 8 * k + u.lane / 4, first + u.lane % 4 * 2, transpose8x8(x[k]));
    }
}

/* Unpacks numbers one by one, with tokens in lanes. number(token, channel) returns a number in the
 * page's unit. */
template <int D, bool KEYS, class F> KVANT_INLINE void unpack_each(const Unpacking &u, F &&number)
{
    rolled_for (int i = u.warp; i < 2 * D; i += UNPACK_WARPS) {
        const int channel = i / 2, token = 32 * (i % 2) + u.lane;
        put_one<KEYS>(u.tile, token, channel,
                      __float2half_rn(token < u.valid ? number(token, channel) : 0));
    }
}

template <int D> KVANT_INLINE int exponent_of_any(const Unpacking &u, bool zeros)
{
    switch (u.codec.params.grouping) {
    case KVANT_CUDA_GROUP_CHANNELS: return exponent_of<KVANT_CUDA_GROUP_CHANNELS, D>(u, zeros);
    case KVANT_CUDA_GROUP_TOKENS: return exponent_of<KVANT_CUDA_GROUP_TOKENS, D>(u, zeros);
    default: return exponent_of<KVANT_CUDA_GROUP_TOKEN, D>(u, zeros);
    }
}

/* Unpacks uniform codes and codebooks of any size. table: the levels of a wide codebook, as
 * floats. */
template <int D, bool KEYS> KVANT_INLINE float unpack_numbers(const Unpacking &u)
{
    const kvant_cuda_params &c = u.codec.params;
    const bool codebook = c.codes == KVANT_CUDA_CODES_CODEBOOK, zeros = !codebook && !c.symmetric;
    const int e =
        exponent_of_any<D>(u, zeros) + (zeros ? 9 : 1); /* zero points may be 2^23 scales */
    const float inverse = power(-e);
    const __half *numbers = u.numbers();
    const float *levels = reinterpret_cast<const float *>(u.table);
    unpack_each<D, KEYS>(u, [&](int token, int channel) {
        const uint32_t code =
            read_code(c, reinterpret_cast<const uint32_t *>(u.page), token, channel);
        const int at = c.grouping == KVANT_CUDA_GROUP_CHANNELS ? channel / 32 * PAGE_TOKENS + token
                       : c.grouping == KVANT_CUDA_GROUP_TOKENS ? token / 32 * D + channel
                                                               : token;
        const float scale = __half2float(numbers[at]) * inverse;
        if (codebook)
            return scale * (c.kind == KVANT_CUDA_CODEBOOK_WIDE ? levels[code] : c.values[code]);
        return scale * ((float)code + c.offset) +
               (zeros ? __half2float(numbers[c.n_scales + at]) * inverse : 0);
    });
    return power(e);
}

} // namespace kvant
