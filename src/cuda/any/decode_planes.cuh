/* decode_planes.cuh - tiles of codecs with a code per channel: uniform codes and codebooks of 1 to 8 bits.
 *
 * A page's words are in the order of the operand of mma.m16n8k16 (layout.cuh), so a lane that reads the
 * words of 16 x 16 numbers has the codes of the four registers of an operand, which stmatrix puts
 * in their places. A pair of codes masked out of a word is a pair of fp16 subnormals, code x 2^-24. */
#pragma once

#include "../attention/query.cuh"
#include "rows.cuh"

namespace kvant
{

constexpr int TILE_TOKENS = 32;
constexpr float LEAST_UNIT = 0x1p-40f; /* so that weights over units stay within fp32 */

/* A power of two and its inverse; both are normal numbers. */
KVANT_INLINE float inverse_of(float power)
{
    return __int_as_float((254 << 23) - __float_as_int(power));
}

/* What the team's warps wrote is there, and what they read may be written. */
KVANT_INLINE void wait_for_team(int team, int warps)
{
    if (warps == 1)
        __syncwarp();
    else
        asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(32 * warps) : "memory");
}

/* Token first + t of the page belongs into row t: the number of channel c, over units[t], into
 * numbers[t * stride + c]. A unit is a power of two, at least LEAST_UNIT. Rows from `valid` on become any
 * finite numbers. The team synchronises before and after a decoder. Decoders are functions of their own: inlined,
 * they would leave no registers for attention's sums, or the other way round. */
struct DecodedTile {
    const uint8_t *page; /* codes and metadata, in device memory */
    __half *numbers;     /* rows are an odd number of 16 bytes apart: ldmatrix meets no bank twice */
    float *units;
    uint8_t *scratch; /* any_scratch of the codec */
    int stride, d, first, valid;
    int first_channel, end_channel, rank, team_warps; /* the warp's share: channels, or every team_warps-th token */
    int lane, kv_head, team;

    KVANT_INLINE void wait() const
    {
        wait_for_team(team, team_warps);
    }
};

/* An operand's registers to rows of tokens; the tile of tokens 16 j.. and channels 16 i... Keys have a row of
 * the operand per token, values a column. */
template <bool KEYS> KVANT_INLINE void put_operand(const DecodedTile &tile, int j, int i, const uint32_t (&a)[4])
{
    __half *corner = tile.numbers + 16 * j * tile.stride + 16 * i;
    const int lane = tile.lane;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (KEYS)
        store_matrices(a, shared_address(corner + (lane & 15) * tile.stride + 8 * (lane >> 4)));
    else
        store_transposed(a, shared_address(corner + ((lane & 7) + 8 * (lane >> 4)) * tile.stride + 8 * (lane >> 3 & 1)));
#else
    unrolled_for (int q = 0; q < 4; q++) {
        const int row = (lane >> 2) + 8 * (q & 1), column = 2 * (lane & 3) + 8 * (q >> 1);
        if (KEYS)
            *reinterpret_cast<uint32_t *>(corner + row * tile.stride + column) = a[q];
        else {
            corner[column * tile.stride + row] = __ushort_as_half((uint16_t)a[q]);
            corner[(column + 1) * tile.stride + row] = __ushort_as_half((uint16_t)(a[q] >> 16));
        }
    }
#endif
}

/* Plane i of a code: its bits as a binary logarithm, and how far they are shifted in the code. */
__host__ __device__ constexpr int widest(int bits)
{
    return bits >= 4 ? 4 : bits >= 2 ? 2 : bits;
}

__host__ __device__ constexpr int plane_shift(int bits, int i)
{
    return i == 0 ? 0 : i == 1 ? widest(bits) : widest(bits) + widest(bits - widest(bits));
}

__host__ __device__ constexpr int plane_log(int bits, int i)
{
    return bits - plane_shift(bits, i) >= 4 ? 2 : bits - plane_shift(bits, i) >= 2 ? 1 : 0;
}

__host__ __device__ constexpr int planes_of(int bits)
{
    return bits == 7 ? 3 : bits == 1 || bits == 2 || bits == 4 ? 1 : 2;
}

/* Codes of 64 channels, four operands, of a tile. N: operands beside each other that cover its tokens. */
template <int BITS, bool KEYS> struct TileCodes {
    static constexpr int N = TILE_TOKENS / 16, USED = planes_of(BITS);
    uint32_t w[4][USED][N];

    /* Channels 64 c .. of operands 0 .. n - 1, n at most 4. */
    KVANT_INLINE void load(const DecodedTile &tile, int c, int n)
    {
        const int tiles = tile.d / 16, j = tile.first / 16;
        const uint32_t *plane = reinterpret_cast<const uint32_t *>(tile.page);
        unrolled_for (int p = 0; p < USED; p++) {
            const int log = plane_log(BITS, p), shift = 2 - log;
            if (KEYS)
                load_keys(p, log, plane + (32 * (c << log) + tile.lane) * 4 + j, n);
            else
                unrolled_for (int k = 0; k < N; k++)
                    load_values(p, k, plane + ((128 * c) << log) + (32 * ((j + k) >> shift) + tile.lane) * n, n,
                                shift == 2 ? 4 * (j & 2) : 0);
            plane += code_plane_words(log, KEYS, tiles);
        }
    }

    KVANT_INLINE void load_keys(int p, int log, const uint32_t *at, int n)
    {
        unrolled_for (int u = 0; u < 4; u++) {
            const int shift = 2 - log, first = u >> shift << shift; /* whose word it is */
            uint2 pair{ w[first][p][0], w[first][p][1] };
            if (u == first)
                pair = u < n ? __ldg(reinterpret_cast<const uint2 *>(at + 128 * (u >> shift))) : uint2{};
            w[u][p][0] = pair.x, w[u][p][1] = pair.y;
        }
    }

    KVANT_INLINE void load_values(int p, int k, const uint32_t *at, int n, int by)
    {
        uint4 four{};
        if (n == 4)
            four = __ldg(reinterpret_cast<const uint4 *>(at));
        else {
            four.x = __ldg(at);
            four.y = n > 1 ? __ldg(at + 1) : 0;
            four.z = n > 2 ? __ldg(at + 2) : 0;
        }
        w[0][p][k] = four.x >> by, w[1][p][k] = four.y >> by, w[2][p][k] = four.z >> by, w[3][p][k] = four.w >> by;
    }

    /* Two codes: those of register q of operand u of tokens 16 k .. */
    KVANT_INLINE uint32_t pair(int u, int k, int q) const
    {
        uint32_t codes = 0;
        unrolled_for (int p = 0; p < USED; p++) {
            const int log = plane_log(BITS, p), in_word = (1 << (2 - log)) - 1, tile = (KEYS ? u : k) & in_word;
            const int shift = plane_shift(BITS, p), by = (q << log) - shift;
            const uint32_t word = w[u][p][k] >> (4 * tile << log), ones = ((1u << (1 << log)) - 1) << shift;
            codes |= (by >= 0 ? word >> by : word << -by) & (ones | ones << 16);
        }
        return codes;
    }
};

/* begin(i): operands of channels 16 i come. number(pair of codes, k, q): of register q of tokens 16 k .. */
template <int BITS, bool KEYS, bool UNROLL, class B, class F>
KVANT_INLINE void each_operand(const DecodedTile &tile, B &&begin, F &&number)
{
    const int end = tile.end_channel / 16;
#pragma unroll 1
    for (int i = tile.first_channel / 16; i < end; i += 4) {
        TileCodes<BITS, KEYS> codes;
        const int n = min(end - i, 4);
        codes.load(tile, i / 4, n);
        auto step = [&](int u) {
            begin(i + u);
            unrolled_for (int k = 0; k < TILE_TOKENS / 16; k++) {
                uint32_t a[4];
                unrolled_for (int q = 0; q < 4; q++)
                    a[q] = number(codes.pair(u, k, q), k, q);
                put_operand<KEYS>(tile, k, i + u, a);
            }
        };
        if constexpr (UNROLL) {
            unrolled_for (int u = 0; u < 4; u++)
                if (u < n)
                    step(u);
        } else {
#pragma unroll 1
            for (int u = 0; u < n; u++)
                step(u);
        }
    }
}

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

KVANT_INLINE float half_at(const uint16_t *numbers, int at)
{
    return __half2float(__ushort_as_half(__ldg(numbers + at)));
}

KVANT_INLINE float top_of(float scale, float zero)
{
    return fmaxf(fabsf(scale), fabsf(zero) * 0x1p-23f);
}

KVANT_INLINE uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c)
{
    const __half2 y = __hfma2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b), *reinterpret_cast<__half2 *>(&c));
    return *reinterpret_cast<const uint32_t *>(&y);
}

/* What decoders of uniform codes read of a codec. */
struct UniformCodes {
    int metadata, n_scales; /* no scales: no zero points */
    int group, per_channel;
    float offset;
};

/* Scales and zero points of uniform codes, as pairs of halves for the registers of an operand. ONCE: a token's are the
 * same in the whole operand. */
template <bool KEYS, bool ONCE> struct UniformScales {
    static constexpr int N = TILE_TOKENS / 16;
    const DecodedTile &tile;
    const uint16_t *scales, *zeros; /* zeros NULL: the offset times the scale */
    int group;
    float offset;
    ToUnit to[N];
    uint32_t scale[N][ONCE ? 2 : 4], zero[N][ONCE ? 2 : 4];

    /* Of register q. */
    KVANT_INLINE static int at(int q)
    {
        return !ONCE ? q : KEYS ? q & 1 : q >> 1;
    }

    __device__ UniformScales(const DecodedTile &tile_, const UniformCodes &codes)
        : tile(tile_), scales(reinterpret_cast<const uint16_t *>(tile_.page + codes.metadata)),
          zeros(codes.n_scales ? scales + codes.n_scales : nullptr), group(codes.group), offset(codes.offset)
    {
    }

    KVANT_INLINE uint32_t packed(float s, float z, const ToUnit &by) const
    {
        return pack_half2(s * by.scale, (zeros ? z : s * offset) * by.zero);
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
        for (int first = 0, at = own_token(); first < channels; first += group, at += PAGE_TOKENS)
            top = fmaxf(top, top_of(half_at(scales, at), zeros ? half_at(zeros, at) : 0));
        const float unit = to[0].set(has_token() ? top : 0);
        if (tile.rank == 0)
            tile.units[tile.lane] = unit;
    }

    KVANT_INLINE uint32_t own_scale(int g) const
    {
        const int at = g * PAGE_TOKENS + own_token();
        return has_token() ? packed(half_at(scales, at), zeros ? half_at(zeros, at) : 0, to[0]) : 0;
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
        return (tile.first + 16 * k) / group * tile.d;
    }

    KVANT_INLINE void begin_channels()
    {
        unrolled_for (int k = 0; k < N; k++) {
            float top = 0;
            for (int channel = tile.lane; channel < tile.d && 16 * k < tile.valid; channel += 32) {
                const int at = first_of(k) + channel;
                top = fmaxf(top, top_of(half_at(scales, at), zeros ? half_at(zeros, at) : 0));
            }
            const float unit = to[k].set(largest_of(top));
            if (tile.rank == 0 && tile.lane < 16)
                tile.units[16 * k + tile.lane] = unit;
        }
    }

    KVANT_INLINE float2 stored(const uint16_t *numbers, int at) const /* of an operand's row, or of two columns */
    {
        if (!KEYS) {
            const float x = half_at(numbers, at);
            return make_float2(x, x);
        }
        const uint32_t pair = __ldg(reinterpret_cast<const uint32_t *>(numbers + at));
        return __half22float2(*reinterpret_cast<const __half2 *>(&pair));
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
                float2 s = make_float2(0, 0), z = s;
                if (16 * k < tile.valid) {
                    s = stored(scales, at);
                    z = zeros ? stored(zeros, at) : make_float2(s.x * offset, s.y * offset);
                }
                unrolled_for (int other = 0; other < 2; other++) {
                    const int q = KEYS ? 2 * h + other : h + 2 * other;
                    scale[k][q] = pack_half2(s.x * to[k].scale, s.y * to[k].scale);
                    zero[k][q] = pack_half2(z.x * to[k].zero, z.y * to[k].zero);
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
                    own = scales.own_scale(++group), end += scales.group;
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

/* Levels in shared memory. A token's unit is a power of two above its scale. */
template <int BITS, bool KEYS>
__device__ __noinline__ void decode_codebook(int metadata, const float *levels, const DecodedTile tile)
{
    constexpr int N = TILE_TOKENS / 16;
    const int token = tile.lane;
    const float stored = token < tile.valid ? half_at(reinterpret_cast<const uint16_t *>(tile.page + metadata), tile.first + token) : 0,
                unit = fmaxf(power_above(stored), LEAST_UNIT), own = stored * inverse_of(unit);
    if (tile.rank == 0)
        tile.units[token] = unit;
    float2 scale[N][2]; /* of two columns of the operand; halves of its rows of keys, of its columns of values */
    unrolled_for (int k = 0; k < N; k++)
        unrolled_for (int h = 0; h < 2; h++) {
            const int at = 16 * k + 8 * h + (KEYS ? tile.lane >> 2 : 2 * (tile.lane & 3));
            scale[k][h].x = __shfl_sync(FULL, own, at);
            scale[k][h].y = KEYS ? scale[k][h].x : __shfl_sync(FULL, own, at + 1);
        }
    each_operand<BITS, KEYS, true>(tile, [](int) {}, [&](uint32_t pair, int k, int q) {
        const float2 s = scale[k][KEYS ? q & 1 : q >> 1];
        return pack_half2(levels[pair & 0xffffu] * s.x, levels[pair >> 16] * s.y);
    });
}

__host__ __device__ inline bool has_groups(const kvant_cuda_codec &codec)
{
    return codec.any.per_channel || codec.any.group < codec.params.head_dim;
}

/* PLAIN: the codec has no groups. */
template <bool KEYS, bool PLAIN, int BITS = 1>
KVANT_INLINE void decode_planes(const kvant_cuda_codec &codec, const float *levels, const DecodedTile &tile)
{
    const kvant_cuda_params &c = codec.params;
    const UniformCodes uniform{ (int)c.metadata_offset, c.symmetric ? 0 : (int)c.n_scales, (int)codec.any.group,
                                (int)codec.any.per_channel, c.offset };
    if constexpr (BITS <= 8) {
        if (c.bits != BITS)
            return decode_planes<KEYS, PLAIN, BITS + 1>(codec, levels, tile);
        if (c.codes == KVANT_CUDA_CODES_CODEBOOK)
            return decode_codebook<BITS, KEYS>((int)c.metadata_offset, levels, tile);
        if constexpr (!PLAIN && BITS > 1)
            if (has_groups(codec))
                return uniform.per_channel || uniform.group % 16 != 0 ? decode_groups<BITS, KEYS>(uniform, tile)
                                                                      : decode_uniform<BITS, KEYS, true>(uniform, tile);
        if constexpr (BITS > 1) /* uniform codes of one bit do not exist */
            decode_uniform<BITS, KEYS, false>(uniform, tile);
    }
}

} // namespace kvant
