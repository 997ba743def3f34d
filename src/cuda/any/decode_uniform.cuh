/* decode_uniform.cuh - tiles of uniform codes, of any groups: a code times a scale plus a zero point. Both are halves
 * in the unit of a token or of 16 tokens; the codes of an operand are multiplied in pairs. */
#pragma once

#include "decode_planes.cuh"
#include "decoders.h"

namespace kvant
{

/* A scale and a zero point, as halves, that turn a code x 2^-24 into a number over the unit. */
struct ToUnit {
    float scale, zero; /* what stored ones are multiplied by */

    /* 2^e is above the scale, and 2^(e + 23) above the zero point. The unit is 2^(e + 9). */
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
    const __half2 y = __hfma2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b), *reinterpret_cast<__half2 *>(&c));
    return *reinterpret_cast<const uint32_t *>(&y);
}

/* What decoders of uniform codes read of a codec. */
struct UniformCodes {
    int metadata, n_scales; /* no scales: no zero points */
    int group, per_channel, hybrid;
    float offset; /* times the scale: in place of a zero point */

    KVANT_INLINE UniformCodes(const kvant_general &g)
        : metadata((int)g.metadata), n_scales(g.view.uniform.mode == GENERAL_SYM ? 0 : (int)g.view.uniform.n_scales),
          group((int)g.view.uniform.group), per_channel((int)g.view.uniform.per_channel),
          hybrid(g.view.uniform.mode >= GENERAL_HYBRID_PAPER), offset(-g.view.uniform.bias)
    {
    }
};

/* Scales and zero points of uniform codes, as pairs of halves for the registers of an operand. ONCE: a token's are the
 * same in the whole operand. */
template <bool KEYS, bool ONCE> struct UniformScales {
    static constexpr int N = TILE_TOKENS / 16;
    const DecodedTile &tile;
    const uint16_t *scales;
    const UniformCodes codes;
    ToUnit to[N];
    uint32_t scale[N][ONCE ? 2 : 4], zero[N][ONCE ? 2 : 4];

    /* Of register q. */
    KVANT_INLINE static int at(int q)
    {
        return !ONCE ? q : KEYS ? q & 1 : q >> 1;
    }

    __device__ UniformScales(const DecodedTile &tile_, const UniformCodes &codes_)
        : tile(tile_), scales(reinterpret_cast<const uint16_t *>(tile_.page + codes_.metadata)), codes(codes_)
    {
    }

    /* A stored scale and zero point, as general_line_of. */
    KVANT_INLINE float2 line(uint32_t scale, uint32_t zero) const
    {
        const float size = __half2float(__ushort_as_half((uint16_t)(codes.hybrid ? scale & 0x7fffu : scale)));
        const bool asymmetric = codes.n_scales && (!codes.hybrid || scale >> 15);
        return make_float2(size, asymmetric ? __half2float(__ushort_as_half((uint16_t)zero)) : size * codes.offset);
    }

    KVANT_INLINE float2 line_at(int at) const
    {
        return line(__ldg(scales + at), codes.n_scales ? __ldg(scales + codes.n_scales + at) : 0);
    }

    KVANT_INLINE static float top_of(float2 line)
    {
        return fmaxf(fabsf(line.x), fabsf(line.y) * 0x1p-23f);
    }

    /* ---- scales of tokens, one or one per group of channels: lanes have a token each ---- */

    KVANT_INLINE int own_token() const
    {
        return tile.first + tile.lane;
    }

    KVANT_INLINE bool has_token() const
    {
        return tile.lane < tile.valid;
    }

    KVANT_INLINE void begin_tokens(int channels)
    {
        float top = 0;
#pragma unroll 4
        for (int first = 0, at = own_token(); first < channels; first += codes.group, at += PAGE_TOKENS)
            top = fmaxf(top, top_of(line_at(at)));
        const float unit = to[0].set(has_token() ? top : 0);
        if (tile.rank == 0)
            tile.units[tile.lane] = unit;
    }

    KVANT_INLINE uint32_t own_scale(int g) const
    {
        const float2 own = line_at(g * PAGE_TOKENS + own_token());
        return has_token() ? pack_half2(own.x * to[0].scale, own.y * to[0].zero) : 0;
    }

    /* own: of the first and the last 8 channels of an operand. */
    KVANT_INLINE void share(const uint32_t (&own)[ONCE ? 1 : 2])
    {
        unrolled_for (int k = 0; k < N; k++)
            unrolled_for (int h = 0; h < 2; h++)
                unrolled_for (int c = 0; c < (ONCE ? 1 : 2); c++) {
                    const int q = ONCE ? h : KEYS ? h + 2 * c : c + 2 * h;
                    if (KEYS) {
                        const uint32_t x = __shfl_sync(FULL, own[c], 16 * k + (tile.lane >> 2) + 8 * h);
                        scale[k][q] = prmt(x, x, 0x1010), zero[k][q] = prmt(x, x, 0x3232);
                    } else {
                        const int from = 16 * k + 2 * (tile.lane & 3) + 8 * h;
                        const uint32_t x = __shfl_sync(FULL, own[c], from), y = __shfl_sync(FULL, own[c], from + 1);
                        scale[k][q] = prmt(x, y, 0x5410), zero[k][q] = prmt(x, y, 0x7632);
                    }
                }
    }

    /* ---- scales of channels, one per group of tokens ---- */

    KVANT_INLINE int first_of(int k) const
    {
        return (tile.first + 16 * k) / codes.group * tile.d;
    }

    KVANT_INLINE void begin_channels()
    {
        unrolled_for (int k = 0; k < N; k++) {
            float top = 0;
#pragma unroll 4
            for (int channel = tile.lane; channel < tile.d && 16 * k < tile.valid; channel += 32)
                top = fmaxf(top, top_of(line_at(first_of(k) + channel)));
            const float unit = to[k].set(largest_of(top));
            if (tile.rank == 0 && tile.lane < 16)
                tile.units[16 * k + tile.lane] = unit;
        }
    }

    /* Stored numbers of an operand's row, twice, or of two columns. */
    KVANT_INLINE static uint32_t stored(const uint16_t *numbers, int at)
    {
        return KEYS ? __ldg(reinterpret_cast<const uint32_t *>(numbers + at)) : __ldg(numbers + at) * 0x10001u;
    }

    KVANT_INLINE void load_channels(int i)
    {
        static_assert(!ONCE, "other scales for every operand");
        unrolled_for (int k = 0; k < N; k++) {
            if (k > 0 && first_of(k) == first_of(0) && 16 * k < tile.valid) { /* the same scales */
                unrolled_for (int q = 0; q < 4; q++)
                    scale[k][q] = scale[0][q], zero[k][q] = zero[0][q];
                continue;
            }
            unrolled_for (int h = 0; h < 2; h++) { /* halves of the operand's channels */
                const int at = first_of(k) + 16 * i + 8 * h + (KEYS ? 2 * (tile.lane & 3) : tile.lane >> 2);
                float2 x = make_float2(0, 0), y = x;
                if (16 * k < tile.valid) {
                    const uint32_t s = stored(scales, at), z = codes.n_scales ? stored(scales + codes.n_scales, at) : 0;
                    x = line(s & 0xffffu, z & 0xffffu), y = line(s >> 16, z >> 16);
                }
                unrolled_for (int other = 0; other < 2; other++) {
                    const int q = KEYS ? 2 * h + other : h + 2 * other;
                    scale[k][q] = pack_half2(x.x * to[k].scale, y.x * to[k].scale);
                    zero[k][q] = pack_half2(x.y * to[k].zero, y.y * to[k].zero);
                }
            }
        }
    }
};

/* Groups of tokens, or any groups of a token's channels. */
template <int BITS, bool KEYS>
__device__ __noinline__ void decode_groups(const UniformCodes code, const DecodedTile tile)
{
    UniformScales<KEYS, false> scales(tile, code);
    const bool per_channel = code.per_channel;
    if (per_channel)
        scales.begin_channels();
    else
        scales.begin_tokens(tile.d);
    int group = tile.first_channel / code.group - 1, end = (group + 1) * code.group; /* of the channel before */
    uint32_t own = 0;
    bool mixed = false; /* the operand before this one had channels of two groups */
    auto begin = [&](int i) {
        if (per_channel)
            scales.load_channels(i);
        else if (mixed || 16 * i + 8 >= end) {
            uint32_t halves[2];
            unrolled_for (int h = 0; h < 2; h++) {
                mixed = 16 * i + 8 * h >= end;
                if (mixed)
                    own = scales.own_scale(++group), end += code.group;
                halves[h] = own;
            }
            scales.share(halves);
        }
    };
    each_operand<BITS, KEYS, false>(tile, begin, [&](uint32_t pair, int k, int q) {
        return multiply_add(pair, scales.scale[k][q], scales.zero[k][q]);
    });
}

/* One scale per token, or (GROUPED) one for every `group` of its channels, a multiple of 16. */
template <int BITS, bool KEYS, bool GROUPED>
__device__ __noinline__ void decode_uniform(const UniformCodes code, const DecodedTile tile)
{
    UniformScales<KEYS, true> scales(tile, code);
    scales.begin_tokens(GROUPED ? tile.d : 1);
    int group = GROUPED ? tile.first_channel / code.group : 0, end = group * code.group; /* of the channel before */
    auto load = [&] {
        const uint32_t own[1] = { scales.own_scale(group) };
        scales.share(own);
    };
    if (!GROUPED)
        load();
    auto begin = [&](int i) {
        if (GROUPED && 16 * i >= end)
            load(), group++, end += code.group;
    };
    each_operand<BITS, KEYS, true>(tile, begin, [&](uint32_t pair, int k, int q) {
        return multiply_add(pair, scales.scale[k][scales.at(q)], scales.zero[k][scales.at(q)]);
    });
}

/* Uniform codes of one bit do not exist. */
template <bool KEYS, bool GROUPED, int BITS = 2>
KVANT_INLINE void decode_uniform_codes(const kvant_general &g, const DecodedTile &tile)
{
    if constexpr (BITS <= 8) {
        if (g.view.uniform.bits != BITS)
            return decode_uniform_codes<KEYS, GROUPED, BITS + 1>(g, tile);
        const UniformCodes code(g);
        if constexpr (GROUPED)
            if (has_groups(g))
                return code.per_channel || code.group % 16 != 0 ? decode_groups<BITS, KEYS>(code, tile)
                                                                : decode_uniform<BITS, KEYS, true>(code, tile);
        decode_uniform<BITS, KEYS, false>(code, tile);
    }
}

} // namespace kvant
