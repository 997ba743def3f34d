/* decode_chunks.cuh - tiles of codes that stand for several channels: octahedral triplets, and
 * codewords of 4 channels times a radius.
 *
 * A word of a plane has the codes of two neighbours (format.md, "Chunk codes"): for keys two chunks
 * of a token, for values two tokens of a chunk. A lane processes a token of keys, or a chunk of
 * values, so neighbouring lanes read neighbouring words. A token's unit follows from its scale, and
 * its numbers are at most 8 units. Codewords are looked up in device memory, and triplets are
 * computed. */
#pragma once

#include "chunk_operands.cuh"
#include "../any/decode_planes.cuh"
#include "../any/decoders.h"

namespace kvant
{

/* The two codes of a word and of the corresponding words in other planes: the lowest 16 bits of
 * each, and the bits above. */
struct CodePair {
    uint32_t low, high;

    KVANT_INLINE uint32_t code(int i) const
    {
        return prmt(low, high, i ? 0x7632 : 0x5410);
    }
};

/* The words of a page's chunk codes, of PLANES planes. The bits of both codes in a plane are
 * rotated into position together. A plane of 16 bits fills the low half of each code; other planes
 * lie above it. */
template <bool KEYS, int PLANES> struct ChunkWords {
    const uint32_t *words[PLANES];
    uint32_t mask[PLANES];
    int log[PLANES], n_chunks;
    /* bits to rotate to the left; for values, for the lowest bits of a word */
    int rotation[PLANES];
    bool wide; /* the first plane has 16 bits */

    /* token: the lane's token, for keys. */
    KVANT_INLINE ChunkWords(const void *codes, int bits, int n_chunks_, int token = 0)
        : n_chunks(n_chunks_), wide(bits >= 16)
    {
        const uint32_t *plane = static_cast<const uint32_t *>(codes);
        int shift = wide ? -16 : 0;
        unrolled_for (int i = 0; i < PLANES; i++) {
            log[i] = 31 - __clz(bits);
            const int p = 1 << log[i];
            const Place first = KEYS ? chunk_place(p, n_chunks, true, token, 0) : Place{};
            const uint32_t ones = (1u << p) - 1;
            words[i] = plane + first.word;
            rotation[i] = (shift - first.bit) & 31;
            mask[i] = shift < 0 ? 0 : (ones | ones << 16) << shift;
            plane += chunk_plane_words(p, n_chunks, KEYS);
            bits -= p, shift += p;
        }
    }

    /* For keys: chunks 2 at and 2 at + 1 of the lane's token. */
    KVANT_INLINE CodePair chunks(int at) const
    {
        return read([&](int i) { return __ldg(words[i] + (4 * at << log[i])); },
                    [&](int i) { return rotation[i]; });
    }

    /* For values: tokens t and t + 1 of a chunk; t is even. */
    KVANT_INLINE CodePair tokens(int t, int chunk) const
    {
        const int k = 8 * (t % 8 / 2) + 4 * (t % 16 / 8) + t / 16; /* the same as in chunk_place */
        return read(
            [&](int i) { return __ldg(words[i] + (n_chunks * (k >> (4 - log[i])) + chunk)); },
            [&](int i) { return rotation[i] - (k << log[i] & 15); });
    }

    template <class W, class T> KVANT_INLINE CodePair read(W &&word, T &&rotation_of) const
    {
        uint32_t first = 0, rest = 0;
        unrolled_for (int i = 0; i < PLANES; i++) {
            const uint32_t x = word(i);
            first = i == 0 ? x : first;
            rest |= __funnelshift_l(x, x, rotation_of(i)) & mask[i];
        }
        return CodePair{ wide ? first : rest, wide ? rest : 0 };
    }
};

/* Calls decode(planes) with the number of planes as a constant. */
template <class F> KVANT_INLINE void with_planes(int bits, F &&decode)
{
    switch (__popc(bits)) {
    case 1: return decode(std::integral_constant<int, 1>{});
    case 2: return decode(std::integral_constant<int, 2>{});
    case 3: return decode(std::integral_constant<int, 3>{});
    default: return decode(std::integral_constant<int, 4>{}); /* codes of 31 bits do not exist */
    }
}

/* The numbers of a chunk, as halves. */
struct ChunkNumbers {
    uint32_t low, high;
};

/* Computes the numbers of a code, for a scale. */
struct ChunkDecoder {
    const kvant_general &g;
    const float *direction, *norm;
    const uint2 *codewords; /* as halves (halves.h) */
    const uint16_t *slots;  /* slots of the page's first token */
    int bits;

    KVANT_INLINE ChunkDecoder(const kvant_general &g_, const uint8_t *page)
        : g(g_), direction(g_.tables + g_.view.chunks.direction),
          norm(g_.tables + g_.view.chunks.norm),
          codewords(reinterpret_cast<const uint2 *>(g_.tables + g_.halves)),
          slots(reinterpret_cast<const uint16_t *>(page + g_.metadata) + PAGE_TOKENS),
          bits((int)g_.view.chunks.index_bits)
    {
        keep(direction), keep(norm), keep(codewords);
    }

    KVANT_INLINE ChunkNumbers triplet(uint32_t code, float scale) const
    {
        const uint32_t half = bits / 2, mask = (1u << half) - 1;
        const float u = __ldg(direction + (code & mask)),
                    w = __ldg(direction + (code >> half & mask)), z = 1 - fabsf(u) - fabsf(w),
                    fold = fmaxf(-z, 0), x = u - copysignf(fold, u), y = w - copysignf(fold, w),
                    factor =
                        scale * __ldg(norm + (code >> bits)) * inverse_root(x * x + y * y + z * z);
        return ChunkNumbers{ pack_half2(factor * x, factor * y), pack_half2(factor * z, 0) };
    }

    KVANT_INLINE ChunkNumbers outlier(uint32_t slot, int token, float inverse) const
    {
        const uint16_t *at = slots + 4 * (PAGE_TOKENS * slot + token);
        float x[4];
        unrolled_for (int i = 0; i < 4; i++)
            x[i] = __half2float(__ushort_as_half(__ldg(at + i))) * inverse;
        return ChunkNumbers{ pack_half2(x[0], x[1]), pack_half2(x[2], x[3]) };
    }

    /* scale: the token's scale divided by its unit; inverse: the inverse of the unit. */
    KVANT_INLINE ChunkNumbers word(uint32_t code, float scale, float inverse, int token) const
    {
        const uint32_t index = code & ((1u << bits) - 1), above = code >> bits;
        const uint2 w = __ldg(codewords + index);
        const float r = scale * (float)above;
        const uint32_t radius = pack_half2(r, r);
        return is_outlier(code)
                   ? outlier(above, token, inverse)
                   : ChunkNumbers{ multiply_halves(radius, w.x), multiply_halves(radius, w.y) };
    }

    KVANT_INLINE bool is_outlier(uint32_t code) const
    {
        return (code & ((1u << bits) - 1)) == g.view.chunks.n_codewords &&
               code >> bits < g.view.chunks.slots;
    }

    /* The largest magnitude among a token's outliers. */
    KVANT_INLINE float largest_outlier(int token) const
    {
        float largest = 0;
        for (int i = 0; i < 4 * (int)g.view.chunks.slots; i++)
            largest = fmaxf(largest, fabsf(__half2float(__ushort_as_half(__ldg(
                                         slots + 4 * (PAGE_TOKENS * (i / 4) + token) + i % 4)))));
        return largest;
    }
};

template <int CHANNELS> KVANT_INLINE void put_chunk(__half *to, const ChunkNumbers &x)
{
    if (CHANNELS == 4) {
        *reinterpret_cast<uint2 *>(to) = make_uint2(x.low, x.high);
        return;
    }
    to[0] = __ushort_as_half((uint16_t)x.low), to[1] = __ushort_as_half((uint16_t)(x.low >> 16));
    to[2] = __ushort_as_half((uint16_t)x.high);
}

/* Stores two neighbouring chunks. */
template <int CHANNELS> KVANT_INLINE void put_chunks(__half *to, const ChunkNumbers (&x)[2])
{
    if (CHANNELS == 4) {
        put_chunk<4>(to, x[0]);
        put_chunk<4>(to + 4, x[1]);
        return;
    }
    uint32_t *words = reinterpret_cast<uint32_t *>(to);
    words[0] = x[0].low, words[1] = prmt(x[0].high, x[1].low, 0x5410),
    words[2] = prmt(x[1].low, x[1].high, 0x5432);
}

/* Decodes a tile. Triplets write up to 4 halves behind a row, into padding. */
template <int CHANNELS, bool KEYS, int PLANES>
__device__ __noinline__ void decode_chunks_of(const kvant_general &g, const DecodedTile tile)
{
    const ChunkDecoder decoder(g, tile.page);
    const int n = (int)g.view.chunks.n, bits = decoder.bits + (int)g.view.chunks.length_bits,
              own = tile.first + tile.lane;
    const bool valid = tile.lane < tile.valid;
    const float stored = valid ? half_at(decoder.slots - PAGE_TOKENS, own) : 0,
                top = CHANNELS == 3
                          ? stored
                          : 0.25f * stored * (float)((1 << g.view.chunks.length_bits) - 1),
                other = CHANNELS == 4 && valid ? 0.25f * decoder.largest_outlier(own) : 0,
                unit = fmaxf(power_above(fmaxf(top, other)), LEAST_UNIT),
                inverse = valid ? inverse_of(unit) : 0, scale = stored * inverse;
    if (tile.rank == 0)
        tile.units()[tile.lane] = unit;
    /* of: the lanes that have the codes' tokens */
    const auto read = [&](const CodePair &pair, const int(&of)[2], ChunkNumbers(&x)[2]) {
        unrolled_for (int i = 0; i < 2; i++) {
            const float norm = KEYS ? scale : __shfl_sync(FULL, scale, of[i]),
                        own_inverse = KEYS ? inverse : __shfl_sync(FULL, inverse, of[i]);
            x[i] = CHANNELS == 3
                       ? decoder.triplet(pair.code(i), norm)
                       : decoder.word(pair.code(i), norm, own_inverse, tile.first + of[i]);
        }
    };
    ChunkNumbers x[2];
    const ChunkWords<KEYS, PLANES> codes(tile.page, bits, n, own);
    if constexpr (KEYS) {
#pragma unroll 2
        for (int c = tile.rank; 2 * c < n; c += tile.team_warps) {
            read(codes.chunks(c), { tile.lane, tile.lane }, x);
            put_chunks<CHANNELS>(tile.numbers() + tile.lane * tile.stride + 2 * CHANNELS * c, x);
        }
    } else {
        int t = 0, c = 32 * tile.rank + tile.lane;
#pragma unroll 2
        for (int at = 32 * tile.rank; at < TILE_TOKENS / 2 * n;
             at += 32 * tile.team_warps) { /* chunks of two tokens, then of the next two */
            for (; c >= n; c -= n)
                t += 2;
            t = min(t, TILE_TOKENS - 2);
            read(codes.tokens(tile.first + t, c), { t, t + 1 }, x);
            unrolled_for (int i = 0; i < 2; i++)
                put_chunk<CHANNELS>(tile.numbers() + (t + i) * tile.stride + CHANNELS * c, x[i]);
            c += 32 * tile.team_warps;
        }
    }
}

template <int CHANNELS, bool KEYS>
KVANT_INLINE void decode_chunks(const kvant_general &g, const DecodedTile &tile)
{
    with_planes((int)(g.view.chunks.index_bits + g.view.chunks.length_bits), [&](auto planes) {
        decode_chunks_of<CHANNELS, KEYS, decltype(planes)::value>(g, tile);
    });
}

} // namespace kvant
