/* decode_uniform.cuh - tiles of uniform codes in any groups. A number is a code times a scale plus
 * a zero point. Both are halves in the unit of a token or of 16 tokens, and codes are multiplied in
 * pairs.
 *
 * With a scale per token, operands are multiplied as they are read. Codes with groups are put into
 * the tile first; then a lane processes a token, or channels. */
#pragma once

#include "decode_planes.cuh"
#include "decoders.h"

namespace kvant
{

/* The factors for a stored scale and zero point, as halves. With them, a code x 2^-24 becomes a
 * number divided by the unit. */
struct ToUnit {
    float scale, zero; /* factors for stored scales, and for stored zero points */

    /* Sets the factors and returns the unit, 2^(e + 9). The exponent e is chosen so that 2^e is
     * above the scale and 2^(e + 23) is above the zero point. */
    KVANT_INLINE float set(float top)
    {
        const int e = max((__float_as_int(top) >> 23) - 126, -24);
        scale = __int_as_float((15 - e + 127) << 23);
        zero = __int_as_float((-9 - e + 127) << 23);
        return __int_as_float((9 + e + 127) << 23);
    }
};

KVANT_INLINE uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c)
{
    const __half2 y = __hfma2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b),
                              *reinterpret_cast<__half2 *>(&c));
    return *reinterpret_cast<const uint32_t *>(&y);
}

/* A stored scale and its zero point. */
struct UniformLine {
    float scale, zero;

    /* The argument of ToUnit::set. */
    KVANT_INLINE float top() const
    {
        return fmaxf(fabsf(scale), fabsf(zero) * 0x1p-23f);
    }
};

/* The data of a codec that decoders of uniform codes read. */
struct UniformCodes {
    int metadata, n_scales; /* n_scales 0: no zero points are stored */
    int group, per_channel, hybrid;
    float offset; /* the zero point is the scale times offset if none is stored */

    KVANT_INLINE UniformCodes(const kvant_general &g)
        : metadata((int)g.metadata),
          n_scales(g.view.uniform.mode == GENERAL_SYM ? 0 : (int)g.view.uniform.n_scales),
          group((int)g.view.uniform.group), per_channel((int)g.view.uniform.per_channel),
          hybrid(g.view.uniform.mode >= GENERAL_HYBRID_PAPER), offset(-g.view.uniform.bias)
    {
    }

    /* Computes a line like general_line_of. */
    KVANT_INLINE UniformLine line(uint32_t scale, uint32_t zero) const
    {
        const float size =
            __half2float(__ushort_as_half((uint16_t)(hybrid ? scale & 0x7fffu : scale)));
        const bool asymmetric = n_scales && (!hybrid || scale >> 15);
        return UniformLine{ size, asymmetric ? __half2float(__ushort_as_half((uint16_t)zero))
                                             : size * offset };
    }

    KVANT_INLINE const uint16_t *scales(const uint8_t *page) const
    {
        return reinterpret_cast<const uint16_t *>(page + metadata);
    }

    KVANT_INLINE UniformLine line_at(const uint8_t *page, int at) const
    {
        const uint16_t *from = scales(page) + at;
        return line(__ldg(from), n_scales ? __ldg(from + n_scales) : 0);
    }
};

/* Decodes codes with one scale per token. */
template <int BITS, bool KEYS>
__device__ __noinline__ void decode_uniform(const UniformCodes code, const DecodedTile tile)
{
    constexpr int N = TILE_TOKENS / 16;
    const bool valid = tile.lane < tile.valid;
    const UniformLine line = code.line_at(tile.page, tile.first + tile.lane);
    ToUnit to;
    const float unit = to.set(valid ? line.top() : 0);
    const uint32_t own = valid ? pack_half2(line.scale * to.scale, line.zero * to.zero) : 0;
    if (tile.rank == 0)
        tile.units()[tile.lane] = unit;
    uint32_t scale[N][2],
        /* for two columns of the operand; the halves belong to its rows for keys, to its columns
         * for values */
        zero[N][2];
    unrolled_for (int k = 0; k < N; k++)
        unrolled_for (int h = 0; h < 2; h++) {
            const int from = 16 * k + 8 * h + (KEYS ? tile.lane >> 2 : 2 * (tile.lane & 3));
            const uint32_t x = __shfl_sync(FULL, own, from),
                           y = KEYS ? x : __shfl_sync(FULL, own, from + 1);
            scale[k][h] = prmt(x, y, 0x5410), zero[k][h] = prmt(x, y, 0x7632);
        }
    each_operand<BITS, KEYS>(tile, [&](uint32_t pair, int k, int q) {
        return multiply_add(pair, scale[k][KEYS ? q & 1 : q >> 1], zero[k][KEYS ? q & 1 : q >> 1]);
    });
}

KVANT_INLINE void scale_pairs(uint4 &codes, uint32_t scale, uint32_t zero)
{
    codes = make_uint4(multiply_add(codes.x, scale, zero), multiply_add(codes.y, scale, zero),
                       multiply_add(codes.z, scale, zero), multiply_add(codes.w, scale, zero));
}

/* Scales codes with a scale for every `group` channels of a token, a multiple of 8. A lane
 * processes a token. */
__device__ static __noinline__ void scale_tokens(const UniformCodes code, const DecodedTile tile)
{
    const bool valid = tile.lane < tile.valid;
    const int token = tile.first + tile.lane;
    float top = 0;
#pragma unroll 4
    for (int first = 0, at = token; first < tile.d; first += code.group, at += PAGE_TOKENS)
        top = fmaxf(top, code.line_at(tile.page, at).top());
    ToUnit to;
    const float unit = to.set(valid ? top : 0);
    if (tile.rank == 0)
        tile.units()[tile.lane] = unit;
    __half *row = tile.numbers() + tile.lane * tile.stride;
#pragma unroll 2
    for (int group = tile.first_channel / code.group; group * code.group < tile.end_channel;
         group++) {
        const UniformLine line = code.line_at(tile.page, PAGE_TOKENS * group + token);
        const float scale = valid ? line.scale * to.scale : 0,
                    zero = valid ? line.zero * to.zero : 0;
        const uint32_t scales = pack_half2(scale, scale), zeros = pack_half2(zero, zero);
        const int end = min((group + 1) * code.group, tile.end_channel);
#pragma unroll 2
        for (int channel = max(group * code.group, tile.first_channel); channel < end; channel += 8)
            scale_pairs(*reinterpret_cast<uint4 *>(row + channel), scales, zeros);
    }
}

/* Scales codes with a scale for every `group` tokens of a channel, a multiple of 16. A lane
 * processes four channels. */
__device__ static __noinline__ void scale_channels(const UniformCodes code, const DecodedTile tile)
{
    const uint16_t *scales = code.scales(tile.page);
    rolled_for (int k = 0; k < TILE_TOKENS; k += 16) { /* a group's tokens */
        const int group = (tile.first + k) / code.group * tile.d;
        const bool valid = k < tile.valid;
        float top = 0;
#pragma unroll 4
        for (int channel = tile.lane; channel < tile.d; channel += 32)
            top = fmaxf(top, code.line_at(tile.page, group + channel).top());
        ToUnit to;
        const float unit = to.set(valid ? largest_of(top) : 0);
        if (tile.rank == 0 && tile.lane < 16)
            tile.units()[k + tile.lane] = unit;
        for (int channel = tile.first_channel + 4 * tile.lane; channel < tile.end_channel;
             channel += 128) {
            const uint2 stored = __ldg(reinterpret_cast<const uint2 *>(scales + group + channel)),
                        zeros = code.n_scales ? __ldg(reinterpret_cast<const uint2 *>(
                                                    scales + code.n_scales + group + channel))
                                              : uint2{};
            uint32_t scale[2], zero[2];
            unrolled_for (int i = 0; i < 2; i++) {
                const uint32_t s = i ? stored.y : stored.x, z = i ? zeros.y : zeros.x;
                const UniformLine x = code.line(s & 0xffffu, z & 0xffffu),
                                  y = code.line(s >> 16, z >> 16);
                scale[i] = valid ? pack_half2(x.scale * to.scale, y.scale * to.scale) : 0;
                zero[i] = valid ? pack_half2(x.zero * to.zero, y.zero * to.zero) : 0;
            }
#pragma unroll 8
            for (int t = k; t < k + 16; t++) {
                uint2 &codes =
                    *reinterpret_cast<uint2 *>(tile.numbers() + t * tile.stride + channel);
                codes = make_uint2(multiply_add(codes.x, scale[0], zero[0]),
                                   multiply_add(codes.y, scale[1], zero[1]));
            }
        }
    }
}

/* Uniform codes of one bit do not exist. */
template <bool KEYS, int BITS = 2>
KVANT_INLINE void decode_plain(const kvant_general &g, const DecodedTile &tile)
{
    if constexpr (BITS <= 8)
        g.view.uniform.bits == BITS ? decode_uniform<BITS, KEYS>(UniformCodes(g), tile)
                                    : decode_plain<KEYS, BITS + 1>(g, tile);
}

template <bool KEYS, bool GROUPED>
KVANT_INLINE void decode_uniform_codes(const kvant_general &g, const DecodedTile &tile)
{
    if (!GROUPED || !has_groups(g))
        return decode_plain<KEYS>(g, tile);
    place_codes<KEYS, 8>((int)g.view.uniform.bits, tile);
    g.view.uniform.per_channel ? scale_channels(UniformCodes(g), tile)
                               : scale_tokens(UniformCodes(g), tile);
}

} // namespace kvant
