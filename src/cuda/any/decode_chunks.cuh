/* decode_chunks.cuh - tiles of codes that stand for several channels: octahedral triplets, and codewords of 4
 * channels times a radius.
 *
 * A word of a plane has the codes of two neighbours: of keys two chunks of a token, of values two tokens of a
 * chunk (format.md, "Chunk codes"). A lane takes a token of keys, or a chunk of values: then neighbouring lanes
 * read neighbouring words. A token's unit follows from its scale, whose numbers are at most 8 units. */
#pragma once

#include "decode_planes.cuh"

namespace kvant
{

/* The two codes of a word and its fellows in other planes. */
struct CodePair {
    uint32_t code[2];
};

/* A lane's words: of keys those of its token, of values those of its chunk. What depends on the lane alone is computed
 * once. PLANES: at most, of codes of up to 23 bits. */
template <bool KEYS> struct ChunkWords {
    static constexpr int PLANES = 4;
    const uint32_t *words[PLANES];
    int log[PLANES], bit[PLANES], n_planes, n_chunks; /* bit: of keys */

    /* own: the lane's token, or its chunk. */
    KVANT_INLINE ChunkWords(const void *codes, int bits, int n_chunks_, int own) : n_planes(0), n_chunks(n_chunks_)
    {
        const uint32_t *plane = static_cast<const uint32_t *>(codes);
        unrolled_for (int i = 0; i < PLANES; i++) {
            log[i] = bit[i] = 0, words[i] = plane;
            if (bits == 0)
                continue;
            log[i] = 31 - __clz(bits & 31);
            const int p = 1 << log[i];
            const Place first = KEYS ? chunk_place(p, n_chunks, true, own, 0) : Place{ own, 0 };
            words[i] += first.word, bit[i] = first.bit;
            plane += chunk_plane_words(p, n_chunks, KEYS);
            bits -= p, n_planes = i + 1;
        }
    }

    /* Keys: chunks 2 at and + 1 of the lane's token. */
    KVANT_INLINE CodePair chunks(int at) const
    {
        return read([&](int i) { return __ldg(words[i] + (4 * at << log[i])) >> bit[i]; });
    }

    /* Values: tokens t and t + 1 of the lane's chunk; t is even. */
    KVANT_INLINE CodePair tokens(int t) const
    {
        const int k = 8 * (t % 8 / 2) + 4 * (t % 16 / 8) + t / 16; /* as chunk_place */
        return read([&](int i) {
            const int fields = 4 - log[i]; /* of a word: their binary logarithm */
            return __ldg(words[i] + n_chunks * (k >> fields)) >> ((k & ((1 << fields) - 1)) << log[i]);
        });
    }

    template <class F> KVANT_INLINE CodePair read(F &&word) const
    {
        CodePair pair{};
        int shift = 0;
        unrolled_for (int i = 0; i < PLANES; i++)
            if (i < n_planes) {
                const uint32_t x = word(i), ones = (1u << (1 << log[i])) - 1;
                pair.code[0] |= (x & ones) << shift;
                pair.code[1] |= (x >> 16 & ones) << shift;
                shift += 1 << log[i];
            }
        return pair;
    }
};

/* Numbers of a code for a scale, in halves. */
struct ChunkDecoder {
    const kvant_general &g;
    const float *direction, *norm;
    const float4 *codewords;
    const uint16_t *slots; /* of the page's first token */
    int bits;

    KVANT_INLINE ChunkDecoder(const kvant_general &g_, const uint8_t *page)
        : g(g_), direction(g_.tables + g_.view.chunks.direction), norm(g_.tables + g_.view.chunks.norm),
          codewords(reinterpret_cast<const float4 *>(g_.tables + g_.view.chunks.codewords)),
          slots(reinterpret_cast<const uint16_t *>(page + g_.metadata) + PAGE_TOKENS), bits((int)g_.view.chunks.index_bits)
    {
    }

    KVANT_INLINE float4 triplet(uint32_t code, float scale) const
    {
        const uint32_t half = bits / 2, mask = (1u << half) - 1;
        const float u = __ldg(direction + (code & mask)), w = __ldg(direction + (code >> half & mask)),
                    z = 1 - fabsf(u) - fabsf(w), fold = fmaxf(-z, 0), x = u - copysignf(fold, u), y = w - copysignf(fold, w),
                    factor = scale * __ldg(norm + (code >> bits)) * rsqrtf(x * x + y * y + z * z);
        return make_float4(factor * x, factor * y, factor * z, 0);
    }

    KVANT_INLINE float4 outlier(uint32_t slot, int token, float inverse) const
    {
        const uint16_t *at = slots + 4 * (PAGE_TOKENS * slot + token);
        float x[4];
        unrolled_for (int i = 0; i < 4; i++)
            x[i] = __half2float(__ushort_as_half(__ldg(at + i))) * inverse;
        return make_float4(x[0], x[1], x[2], x[3]);
    }

    /* scale: over the token's unit, of which inverse is the inverse. */
    KVANT_INLINE float4 word(uint32_t code, float scale, float inverse, int token) const
    {
        const uint32_t index = code & ((1u << bits) - 1), above = code >> bits;
        if (index == g.view.chunks.n_codewords && above < g.view.chunks.slots)
            return outlier(above, token, inverse);
        const float4 w = __ldg(codewords + index);
        const float radius = scale * (float)above;
        return make_float4(radius * w.x, radius * w.y, radius * w.z, radius * w.w);
    }

    /* The largest of a token's outliers. */
    KVANT_INLINE float largest_outlier(int token) const
    {
        float largest = 0;
        for (int i = 0; i < 4 * (int)g.view.chunks.slots; i++)
            largest = fmaxf(largest, fabsf(__half2float(__ushort_as_half(__ldg(slots + 4 * (PAGE_TOKENS * (i / 4) + token) + i % 4)))));
        return largest;
    }
};

template <int CHANNELS> KVANT_INLINE void put_chunk(__half *to, const float4 &x)
{
    if (CHANNELS == 4) {
        const __half2 low = __floats2half2_rn(x.x, x.y), high = __floats2half2_rn(x.z, x.w);
        *reinterpret_cast<uint2 *>(to) =
            make_uint2(*reinterpret_cast<const uint32_t *>(&low), *reinterpret_cast<const uint32_t *>(&high));
        return;
    }
    to[0] = __float2half_rn(x.x), to[1] = __float2half_rn(x.y), to[2] = __float2half_rn(x.z);
}

/* Triplets write up to 4 halves behind a row, where nothing is. */
template <int CHANNELS, bool KEYS>
__device__ __noinline__ void decode_chunks(const kvant_general &g, const DecodedTile tile)
{
    const ChunkDecoder decoder(g, tile.page);
    const int n = (int)g.view.chunks.n, bits = decoder.bits + (int)g.view.chunks.length_bits, own = tile.first + tile.lane;
    const bool valid = tile.lane < tile.valid;
    const float stored = valid ? __half2float(__ushort_as_half(__ldg(decoder.slots - PAGE_TOKENS + own))) : 0,
                top = CHANNELS == 3 ? stored : 0.25f * stored * (float)((1 << g.view.chunks.length_bits) - 1),
                other = CHANNELS == 4 && valid ? 0.25f * decoder.largest_outlier(own) : 0,
                unit = fmaxf(power_above(fmaxf(top, other)), LEAST_UNIT), inverse = valid ? inverse_of(unit) : 0, scale = stored * inverse;
    if (tile.rank == 0)
        tile.units[tile.lane] = unit;
    const auto number = [&](uint32_t code, float scale_of, float inverse_of, int token) {
        return CHANNELS == 3 ? decoder.triplet(code, scale_of) : decoder.word(code, scale_of, inverse_of, token);
    };
    if constexpr (KEYS) {
        const ChunkWords<true> codes(tile.page, bits, n, own);
        __half *row = tile.numbers + tile.lane * tile.stride;
#pragma unroll 2
        for (int c = tile.rank; 2 * c < n; c += tile.team_warps) {
            const CodePair pair = codes.chunks(c);
            unrolled_for (int i = 0; i < 2; i++)
                put_chunk<CHANNELS>(row + CHANNELS * (2 * c + i), number(pair.code[i], scale, inverse, own));
        }
    } else {
        for (int first = 0; first < n; first += 32) {
            const int c = min(first + tile.lane, n - 1); /* lanes beyond the end do the last chunk, too */
            const ChunkWords<false> codes(tile.page, bits, n, c);
#pragma unroll 2
            for (int t = 2 * tile.rank; t < TILE_TOKENS; t += 2 * tile.team_warps) {
                const CodePair pair = codes.tokens(tile.first + t);
                unrolled_for (int i = 0; i < 2; i++)
                    put_chunk<CHANNELS>(tile.numbers + (t + i) * tile.stride + CHANNELS * c,
                                        number(pair.code[i], __shfl_sync(FULL, scale, t + i),
                                               __shfl_sync(FULL, inverse, t + i), tile.first + t + i));
            }
        }
    }
}

} // namespace kvant
