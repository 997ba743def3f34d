/* encode.cuh - encodes rows: load, rotate, sum, quantise, pack to nibbles. The codes are equal to
 * the codes of the CPU's encoder, so all arithmetic is in single roundings and in the CPU's order
 * (format.md, "Numbers").
 *
 * A row has one lane per tile of 16 channels, so a warp works on 2 to 8 rows at a time. First a
 * lane has one tile, so the butterflies at distance 1 to 8 stay within the lane. Then the rows are
 * transposed in shared memory, and a lane has the same few channels of every tile. So the longer
 * butterflies, and the 16 partial sums of a dot product, stay within the lane as well. Only the
 * last steps of sums and extremes exchange numbers between lanes. */
#pragma once

#include "append.h"
#include "../layout.cuh"
#include "../ptx.cuh"
#include "../rotate.cuh"

namespace kvant
{

template <int D> struct Lanes {
    static constexpr int TILES = D / 16;
    static constexpr int LANES =
        D == 96 ? 8 : TILES;                /* with 96 channels, 2 of 8 lanes load nothing */
    static constexpr int ROWS = 32 / LANES; /* rows that a warp processes at a time */
    /* channels of a tile that a lane has after the transposition */
    static constexpr int OWN = 16 / LANES;
    static constexpr int NUMBERS =
        OWN * TILES; /* number k * OWN + e: channel 16 k + OWN * lane + e */
    /* strides in shared memory that avoid bank conflicts before and after the transposition */
    static constexpr int TILE_STRIDE = 20;
    static constexpr int ROW_STRIDE = LANES * TILE_STRIDE + (LANES * TILE_STRIDE % 32 ? 0 : 16);
};

/* The codes of a chunk of tokens as nibbles: 16 bits hold one channel c of 4 consecutive tiles.
 * Codes of 8 bits have two planes of them. With these strides, readers of pack.cuh access different
 * banks. */
template <int D> struct Nibbles {
    static constexpr int GROUPS = (D / 16 + 3) / 4;
    static constexpr int STRIDE = 8 * GROUPS + 4;
    uint32_t words[2][PAGE_TOKENS * STRIDE + 8 * (PAGE_TOKENS / 16)];

    KVANT_INLINE static int at(int token)
    {
        return token * STRIDE + 8 * (token / 16);
    }
};

/* The threshold and the value of each level, side by side: 32 words, so that look-ups have no bank
 * conflicts. */
struct Levels {
    float2 at[KVANT_CUDA_MAX_LEVELS];
};

/* The same for a wide codebook. */
struct WideLevels {
    float thresholds[KVANT_CUDA_WIDE_LEVELS], values[KVANT_CUDA_WIDE_LEVELS];
};

struct Quantized {
    float scale, zero;
    bool in_range;
};

KVANT_INLINE void unpack(float *x, uint32_t word, kvant_cuda_type type)
{
    if (type == KVANT_CUDA_F16) {
        float2 pair = __half22float2(*reinterpret_cast<const __half2 *>(&word));
        x[0] = pair.x;
        x[1] = pair.y;
    } else {
        x[0] = __uint_as_float(word << 16);
        x[1] = __uint_as_float(word & 0xffff0000u);
    }
}

/* x with the sign flipped where bit i of signs is set */
KVANT_INLINE float flip(float x, uint32_t signs, int i)
{
    return __uint_as_float(__float_as_uint(x) ^ (signs << (31 - i) & 0x80000000u));
}

/* Loads a tile. Number i gets its sign flipped if bit i of signs is set, two at once while 16-bit
 * numbers are still packed. Rows need only their type's alignment; `wide` says whether they are
 * aligned to 16 bytes. */
KVANT_INLINE void load_tile(float (&x)[16], const void *from, size_t offset, kvant_cuda_type type,
                            bool wide, uint32_t signs)
{
    if (type == KVANT_CUDA_F32) {
        const float *numbers = static_cast<const float *>(from) + offset;
        unrolled_for (int i = 0; i < 16; i += 4) {
            float4 four =
                wide ? *reinterpret_cast<const float4 *>(numbers + i)
                     : make_float4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]);
            x[i] = flip(four.x, signs, i), x[i + 1] = flip(four.y, signs, i + 1);
            x[i + 2] = flip(four.z, signs, i + 2), x[i + 3] = flip(four.w, signs, i + 3);
        }
        return;
    }
    const uint16_t *numbers = static_cast<const uint16_t *>(from) + offset;
    uint32_t words[8];
    if (wide) {
        uint4 a = reinterpret_cast<const uint4 *>(numbers)[0],
              b = reinterpret_cast<const uint4 *>(numbers)[1];
        words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
        words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
    } else {
        unrolled_for (int i = 0; i < 8; i++)
            words[i] = numbers[2 * i] | (uint32_t)numbers[2 * i + 1] << 16;
    }
    const uint32_t spread =
        signs | signs << 15; /* bits i and i + 16, for even i: numbers i and i + 1 */
    unrolled_for (int i = 0; i < 8; i++)
        unpack(x + 2 * i, words[i] ^ (spread << (15 - 2 * i) & 0x80008000u), type);
}

/* Loads a tile, subtracts its centre, divides by its scale, and flips signs. Here signs are flipped
 * first, on the CPU last. Only the sign of a zero can differ, which no code, scale or zero point
 * depends on. */
template <int D>
KVANT_INLINE void load_centered(float (&x)[16], const AppendArgs &args, const AppendRole &role,
                                size_t row_at, int kv_head, int tile)
{
    const uint32_t signs = role.codec.rotation.signs[tile / 2] >> 16 * (tile % 2) & 0xffffu;
    load_tile(x, role.rows, row_at + 16 * tile, args.type, role.wide, signs);
    if (role.center)
        unrolled_for (int i = 0; i < 16; i++)
            x[i] = __fsub_rn(x[i], flip(role.center[kv_head * D + 16 * tile + i], signs, i));
    if (role.scale)
        unrolled_for (int i = 0; i < 16; i++)
            x[i] = __fdiv_rn(x[i], role.scale[kv_head * D + 16 * tile + i]);
}

/* Butterflies at the given step, in an array whose numbers are `stride` apart. */
template <int N, int STRIDE, int STEP> __device__ __forceinline__ void butterflies(float (&x)[N])
{
    unrolled_for (int i = 0; i < N; i++)
        if ((i / STRIDE & STEP) == 0 && i + STRIDE * STEP < N) {
            float a = x[i], b = x[i + STRIDE * STEP];
            x[i] = __fadd_rn(a, b);
            x[i + STRIDE * STEP] = __fsub_rn(a, b);
        }
}

/* Stages of the transform at distances STRIDE, 2 STRIDE, ..., as many as the block has. Usual
 * blocks have all stages, and without branches between the stages the compiler may move numbers to
 * other registers. */
template <int N, int STRIDE, int STEPS>
__device__ __forceinline__ void stages(float (&x)[N], uint32_t block_steps)
{
    if (block_steps >= STEPS) {
        if constexpr (STEPS > 1)
            butterflies<N, STRIDE, 1>(x);
        if constexpr (STEPS > 2)
            butterflies<N, STRIDE, 2>(x);
        if constexpr (STEPS > 4)
            butterflies<N, STRIDE, 4>(x);
        if constexpr (STEPS > 8)
            butterflies<N, STRIDE, 8>(x);
        return;
    }
    if (block_steps > 1)
        butterflies<N, STRIDE, 1>(x);
    if (STEPS > 4 && block_steps > 2)
        butterflies<N, STRIDE, 2>(x);
    if (STEPS > 8 && block_steps > 4)
        butterflies<N, STRIDE, 4>(x);
}

template <int D, class R>
KVANT_INLINE void rotate_across_tiles(float (&y)[Lanes<D>::NUMBERS], const R &rotation)
{
    constexpr int STEPS =
        D == 96 ? 2 : Lanes<D>::TILES; /* the largest block of 96 channels has 32 */
    stages<Lanes<D>::NUMBERS, Lanes<D>::OWN, STEPS>(y, rotation.block / 16);
    unrolled_for (int i = 0; i < Lanes<D>::NUMBERS; i++)
        y[i] = __fmul_rn(y[i], rotation.scale);
}

/* Loads a few channels of every tile of the row in shared memory. */
template <int D>
KVANT_INLINE void read_rotated(float (&y)[Lanes<D>::NUMBERS], const float *row, int in_row)
{
    using L = Lanes<D>;
    unrolled_for (int k = 0; k < L::TILES; k++) {
        const float *from = row + k * L::TILE_STRIDE + in_row * L::OWN;
        if constexpr (L::OWN == 4) {
            float4 four = *reinterpret_cast<const float4 *>(from);
            y[4 * k] = four.x, y[4 * k + 1] = four.y, y[4 * k + 2] = four.z, y[4 * k + 3] = four.w;
        } else if constexpr (L::OWN == 2) {
            float2 two = *reinterpret_cast<const float2 *>(from);
            y[2 * k] = two.x, y[2 * k + 1] = two.y;
        } else
            y[k] = *from;
    }
}

/* Transposes from one tile per lane to a few channels of every tile. space is the warp's memory. */
template <int D>
KVANT_INLINE void rotate_row(float (&y)[Lanes<D>::NUMBERS], const float (&x)[16], float *space,
                             int lane)
{
    using L = Lanes<D>;
    float *row = space + lane / L::LANES * L::ROW_STRIDE;
    const int in_row = lane % L::LANES;
    __syncwarp(); /* the preceding rows have been read */
    unrolled_for (int i = 0; i < 16; i += 4)
        *reinterpret_cast<float4 *>(row + in_row * L::TILE_STRIDE + i) =
            make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    __syncwarp();
    read_rotated<D>(y, row, in_row);
}

/* The butterflies of a row with a tile per lane, whose signs are flipped. block 0: none. */
template <int D, class R>
KVANT_INLINE void rotate_tiles(float (&y)[Lanes<D>::NUMBERS], float (&x)[16], const R &rotation,
                               float *space, int lane)
{
    if (rotation.block)
        stages<16, 1, 16>(x, rotation.block);
    rotate_row<D>(y, x, space, lane);
    if (rotation.block)
        rotate_across_tiles<D>(y, rotation);
}

/* The sum of the products in the order of format.md. All lanes of a row get the same sum, because a
 * + b equals b + a. */
template <int D>
KVANT_INLINE float row_dot(const float (&a)[Lanes<D>::NUMBERS], const float (&b)[Lanes<D>::NUMBERS])
{
    constexpr int OWN = Lanes<D>::OWN;
    float sum[OWN];
    unrolled_for (int i = 0; i < Lanes<D>::NUMBERS; i++) {
        float product = __fmul_rn(a[i], b[i]);
        sum[i % OWN] = i < OWN ? product : __fadd_rn(sum[i % OWN], product);
    }
    unrolled_for (int width = 8; width > 0; width /= 2)
        unrolled_for (int e = 0; e < OWN; e++)
            if (width >= OWN)
                sum[e] = __fadd_rn(sum[e], __shfl_xor_sync(FULL, sum[e], width / OWN));
            else if (e < width)
                sum[e] = __fadd_rn(sum[e], sum[e + width]);
    return sum[0];
}

KVANT_INLINE float to_half_and_back(float x)
{
    return __half2float(__float2half_rn(x));
}

/* Computes codes times 8. A curve through the thresholds (params.c) gives the one threshold that is
 * left to compare with. Bits 3 and up of the sum are that threshold's number, which is also its
 * offset in the table in bytes. */
template <int N>
KVANT_INLINE void find_codes(uint32_t (&codes)[N], const kvant_cuda_params &codec,
                             const Levels &levels, const float (&y)[N], float inverse)
{
    const char *table = reinterpret_cast<const char *>(&levels);
    const float slope = codec.guess_slope * inverse, gain = codec.guess_gain,
                middle = codec.guess_middle;
    unrolled_for (int i = 0; i < N; i++) {
        uint32_t guess =
            __float_as_uint(fmaf(tanh_approximately(y[i] * slope), gain, middle)) & 0x78u;
        float threshold = *reinterpret_cast<const float *>(table + guess);
        codes[i] = __fmul_rn(y[i], inverse) > threshold ? guess + 8 : guess;
    }
}

KVANT_INLINE float value_of(const Levels &levels, uint32_t code)
{
    return *reinterpret_cast<const float *>(reinterpret_cast<const char *>(&levels) + code + 4);
}

/* Computes codes of a wide codebook: the number of thresholds below, of 2^bits - 1 thresholds. */
template <int N>
KVANT_INLINE void find_codes(uint32_t (&codes)[N], const kvant_cuda_params &codec,
                             const WideLevels &levels, const float (&y)[N], float inverse)
{
    unrolled_for (int i = 0; i < N; i++) {
        const float u = __fmul_rn(y[i], inverse);
        codes[i] = 0;
        for (uint32_t step = 1u << (codec.bits - 1); step > 0; step /= 2)
            codes[i] += u > levels.thresholds[codes[i] + step - 1] ? step : 0;
    }
}

KVANT_INLINE float value_of(const WideLevels &levels, uint32_t code)
{
    return levels.values[code];
}

template <int D, class Book>
KVANT_INLINE Quantized quantize_codebook(uint32_t (&codes)[Lanes<D>::NUMBERS],
                                         const kvant_cuda_params &codec, const Book &levels,
                                         const float (&y)[Lanes<D>::NUMBERS])
{
    constexpr int N = Lanes<D>::NUMBERS;
    const float squares = row_dot<D>(y, y),
                norm = __fmul_rn(__fsqrt_rn(squares), codec.inverse_sqrt_dim),
                scale = to_half_and_back(norm), inverse = scale > 0 ? __frcp_rn(scale) : 0;
    float decoded[N], stored = scale;
    find_codes(codes, codec, levels, y, inverse);
    /* all lanes take part in the sum, even if the scale of their row does not need it */
    if (codec.unbiased) {
        unrolled_for (int i = 0; i < N; i++)
            decoded[i] = value_of(levels, codes[i]);
        const float product = row_dot<D>(y, decoded);
        stored = scale > 0 ? product > 0 ? __fdiv_rn(squares, product) : 0 : scale;
    }
    return Quantized{ stored, 0, norm <= 65504.0f && stored <= 65504.0f };
}

/* Quantises uniform codes. A NaN makes both extremes NaN, and the row is refused for it. The clamp
 * comes before the rounding, which adds 1.5 * 2^23. Bounds are whole numbers and offset is even, so
 * ties stay ties. */
template <int D>
KVANT_INLINE Quantized quantize_uniform(uint32_t (&codes)[Lanes<D>::NUMBERS],
                                        const kvant_cuda_params &codec,
                                        const float (&y)[Lanes<D>::NUMBERS])
{
    constexpr int N = Lanes<D>::NUMBERS;
    float min = y[0], max = y[0];
    unrolled_for (int i = 1; i < N; i++)
        min = min_or_nan(min, y[i]), max = max_or_nan(max, y[i]);
    unrolled_for (int k = Lanes<D>::LANES / 2; k > 0; k /= 2) {
        min = min_or_nan(min, __shfl_xor_sync(FULL, min, k));
        max = max_or_nan(max, __shfl_xor_sync(FULL, max, k));
    }
    min = __fadd_rn(min, 0.0f); /* -0 becomes 0, as the CPU has it */
    float zero = codec.symmetric ? 0 : to_half_and_back(min);
    float range =
        codec.symmetric ? fmaxf(fabsf(min), fabsf(max)) : __fadd_rn(__fsub_rn(max, min), 0.0f);
    float scale = to_half_and_back(__fdiv_rn(range, codec.levels)),
          inverse = scale > 0 ? __frcp_rn(scale) : 0;
    float low = codec.symmetric ? -codec.levels : 0, high = codec.levels,
          round = 12582912.0f - codec.offset;
    unrolled_for (int i = 0; i < N; i++) {
        float level = __fmul_rn(__fsub_rn(y[i], zero), inverse);
        codes[i] = __float_as_uint(__fadd_rn(fminf(fmaxf(level, low), high), round));
    }
    return Quantized{ scale, codec.symmetric ? 0 : min,
                      fabsf(min) <= 65504.0f && fabsf(max) <= 65504.0f };
}

/* Stores bits SHIFT to SHIFT + 3 of each code. With MASK it drops the bits above; without, the code
 * has none. */
template <int D, int SHIFT, bool MASK>
KVANT_INLINE void store_nibbles(uint32_t *words, const uint32_t (&codes)[Lanes<D>::NUMBERS],
                                int lane)
{
    using L = Lanes<D>;
    const int in_row = lane % L::LANES;
    unrolled_for (int group = 0; group < Nibbles<D>::GROUPS; group++) {
        uint32_t packed[L::OWN];
        unrolled_for (int e = 0; e < L::OWN; e++) {
            uint32_t bits = 0;
            unrolled_for (int k = 4 * group + 3; k >= 4 * group; k--)
                if (k < L::TILES)
                    bits = bits * 16 +
                           (MASK ? codes[k * L::OWN + e] & 15u << SHIFT : codes[k * L::OWN + e]);
            packed[e] = bits >> SHIFT;
        }
        if constexpr (L::OWN == 1)
            reinterpret_cast<uint16_t *>(words)[16 * group + in_row] = (uint16_t)packed[0];
        else
            unrolled_for (int e = 0; e + 1 < L::OWN; e += 2)
                words[8 * group + (in_row * L::OWN + e) / 2] = packed[e] | packed[e + 1] << 16;
    }
}

/* Loads and transforms the row of each lane's token, but not with a matrix (matrix_rows.cuh); zeros
 * where there is no token. */
template <int D>
KVANT_INLINE void transform_row(float (&y)[Lanes<D>::NUMBERS], const AppendArgs &args,
                                const AppendRole &role, float *space, bool lacking, size_t row_at,
                                int kv_head, int lane)
{
    using L = Lanes<D>;
    const int tile = lane % L::LANES;
    float x[16] = {};
    if (!lacking && tile < L::TILES)
        load_centered<D>(x, args, role, row_at, kv_head, tile);
    const float *key_transform = key_transform_of(role.codec, role.key_transform, kv_head);
    if (role.codec.key_transform_kind == KVANT_CUDA_TRANSFORM_DIAGONAL && tile < L::TILES)
        unrolled_for (int i = 0; i < 16; i++)
            x[i] = __fmul_rn(x[i], key_transform[16 * tile + i]);
    rotate_tiles<D>(y, x, role.codec.rotation, space, lane);
}

/* Rotates the row of each lane's token, which a matrix has transformed and which is in `space`. */
template <int D>
KVANT_INLINE void rotate_transformed(float (&y)[Lanes<D>::NUMBERS], const AppendRole &role,
                                     float *space, int lane)
{
    using L = Lanes<D>;
    const int tile = lane % L::LANES;
    const float *row = space + lane / L::LANES * L::ROW_STRIDE;
    const uint32_t signs = role.after.signs[tile / 2] >> 16 * (tile % 2);
    float x[16] = {};
    if (!role.after.block)
        return read_rotated<D>(y, row, tile);
    if (tile < L::TILES)
        unrolled_for (int i = 0; i < 16; i++)
            x[i] = flip(row[tile * L::TILE_STRIDE + i], signs, i);
    rotate_tiles<D>(y, x, role.after, space, lane);
}

/* Stores codes in the form in which quantize_codebook returns them. */
template <int D>
KVANT_INLINE void store_codes(uint32_t *low, uint32_t *, const uint32_t (&codes)[Lanes<D>::NUMBERS],
                              const Levels &, int lane)
{
    store_nibbles<D, 3, false>(low, codes, lane);
}

template <int D>
KVANT_INLINE void store_codes(uint32_t *low, uint32_t *high,
                              const uint32_t (&codes)[Lanes<D>::NUMBERS], const WideLevels &,
                              int lane)
{
    store_nibbles<D, 0, true>(low, codes, lane);
    store_nibbles<D, 4, true>(high, codes, lane);
}

/* Transforms and quantises the row of each lane's token to nibbles. Rows without a token are
 * processed as zeros and not stored. */
template <int D, class Book>
KVANT_INLINE Quantized encode_row(Nibbles<D> &nibbles, const AppendArgs &args,
                                  const AppendRole &role, const Book &levels, float *space,
                                  bool lacking, int token, size_t row_at, int kv_head, int lane)
{
    using L = Lanes<D>;
    float y[L::NUMBERS];
    if (role.codec.key_transform_kind ==
        KVANT_CUDA_TRANSFORM_FULL) /* the block has transformed the row already: matrix_rows.cuh */
        rotate_transformed<D>(y, role, space, lane);
    else
        transform_row<D>(y, args, role, space, lacking, row_at, kv_head, lane);
    uint32_t codes[L::NUMBERS];
    uint32_t *low = nibbles.words[0] + Nibbles<D>::at(token),
             *high = nibbles.words[1] + Nibbles<D>::at(token);
    if (role.codec.codes == KVANT_CUDA_CODES_CODEBOOK) {
        Quantized q = quantize_codebook<D>(codes, role.codec, levels, y);
        if (!lacking)
            store_codes<D>(low, high, codes, levels, lane);
        return q;
    }
    Quantized q = quantize_uniform<D>(codes, role.codec, y);
    if (!lacking)
        store_nibbles<D, 0, true>(low, codes, lane);
    if (!lacking && role.codec.bits > 4)
        store_nibbles<D, 4, true>(high, codes, lane);
    return q;
}

} // namespace kvant
