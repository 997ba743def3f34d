/* unpack_chunks.cuh - from a page of chunks (codes of three or four channels) to a matrix of fp16
 * numbers. It uses the look-ups of the decode kernel (chunks.cuh), or decodes code by code when
 * shared memory has no room for the table. */
#pragma once

#include "chunks.cuh"
#include "../tiles/unpack_values.cuh"

namespace kvant
{

template <int P>
KVANT_INLINE uint32_t chunk_bits(const uint32_t *plane, int n_chunks, bool keys, int token,
                                 int chunk)
{
    const Place where = chunk_place(P, n_chunks, keys, token, chunk);
    return plane[where.word] >> where.bit & ((1u << P) - 1);
}

template <int BITS, int P = 16>
KVANT_INLINE uint32_t chunk_code(const uint32_t *words, int n_chunks, bool keys, int token,
                                 int chunk)
{
    if constexpr (P == 0)
        return 0;
    else if constexpr ((BITS & P) == 0)
        return chunk_code<BITS, P / 2>(words, n_chunks, keys, token, chunk);
    else
        return chunk_bits<P>(words, n_chunks, keys, token, chunk) |
               chunk_code<BITS, P / 2>(words + chunk_plane_words(P, n_chunks, keys), n_chunks, keys,
                                       token, chunk)
                   << P;
}

/* The direction of a code times its length, without the token's scale. table: one copy of C::fill,
 * followed by norms if the table does not include them. */
template <class C>
KVANT_INLINE uint2 chunk_numbers(const Unpacking &u, uint32_t code, uint32_t scale)
{
    const uint2 *entries = reinterpret_cast<const uint2 *>(u.table);
    uint2 x;
    if constexpr (C::CHANNELS == 3) {
        const uint32_t index = code & (C::ENTRIES - 1);
        x = entries[index];
        if constexpr (C::HAS_NORM) {
            const uint32_t norm = reinterpret_cast<const uint32_t *>(
                entries + C::ENTRIES)[code >> 2 * C::DIRECTION_BITS];
            x.x = multiply_halves(x.x, norm), x.y = multiply_halves(x.y, norm);
        }
    } else { /* without a table; directions are multiplied by 2^15, and radii are at most 1 */
        const uint32_t index = min(code & ((1u << C::INDEX_BITS) - 1), (uint32_t)C::ENTRIES - 1),
                       radius = code >> C::INDEX_BITS;
        float y[4];
        C::direction(u.codec.directions, (int)index, y);
        x = make_uint2(pack_half2(32768 * y[0], 32768 * y[1]),
                       pack_half2(32768 * y[2], 32768 * y[3]));
        scale = multiply_halves(scale, twice((float)radius * 0x1p-6f));
    }
    return make_uint2(multiply_halves(x.x, scale), multiply_halves(x.y, scale));
}

/* Unpacks chunks when there is little room, one code per lane; lanes are tokens. */
template <class C, int D, bool KEYS> KVANT_INLINE float unpack_chunks(const Unpacking &u)
{
    constexpr int CHUNKS = (D + C::CHANNELS - 1) / C::CHANNELS;
    const int e = exponent_of<KVANT_CUDA_GROUP_TOKEN, D>(u, false);
    const float to_unit = power(-e);
#pragma unroll 4
    for (int i = u.warp; i < 2 * CHUNKS; i += UNPACK_WARPS) {
        const int chunk = i / 2, token = 32 * (i % 2) + u.lane;
        const uint32_t code = chunk_code<C::BITS>(reinterpret_cast<const uint32_t *>(u.page),
                                                  CHUNKS, KEYS, token, chunk);
        const float scale = token < u.valid ? __half2float(u.numbers()[token]) * to_unit : 0;
        const uint2 x = chunk_numbers<C>(u, code, twice(scale));
        unrolled_for (int k = 0; k < C::CHANNELS; k++)
            if (C::CHANNELS * chunk + k < D) {
                const uint32_t pair = k < 2 ? x.x : x.y;
                put_one<KEYS>(u.tile, token, C::CHANNELS * chunk + k,
                              __ushort_as_half((uint16_t)(k % 2 ? pair >> 16 : pair)));
            }
    }
    return power(C::CHANNELS == 3 ? e : e - 9);
}

/* Copies of the table of chunks that lie side by side, if there is room (chunks.cuh). */
template <class C> __host__ __device__ constexpr int tile_copies()
{
    return C::TILE_COPIES;
}

/* Stores a lane's pairs of halves for tokens r and r + 8 of row tile rt. The pair a[e] belongs to
 * the lane's chunks of the step, 2c and 2c + 1. */
template <class C, int D>
KVANT_INLINE void put_key_chunks(const Unpacking &u, int step, int rt, const uint32_t (&a)[2][4],
                                 const uint32_t (&scale)[2])
{
    constexpr int N = 2 * C::CHANNELS;
    const int channel = N * (4 * step + (u.lane & 3));
    unrolled_for (int h = 0; h < 2; h++) {
        const int distance =
            (16 * rt + 8 * h) * ROW_BYTES; /* does not change the order of pieces */
        uint32_t x[4] = { a[0][h], a[0][h + 2], a[1][h], a[1][h + 2] };
        if constexpr (C::CHANNELS == 3) {
            x[1] = low_halves(x[1], x[2]);
            x[2] = prmt(x[2], x[3], 0x5432);
        }
        unrolled_for (int i = 0; i < N / 2; i++)
            x[i] = multiply_halves(x[i], scale[h]);
        if constexpr (C::CHANNELS == 4)
            *reinterpret_cast<uint4 *>(u.tile + place_of(PAGE_TOKENS, u.lane >> 2, channel) +
                                       distance) = make_uint4(x[0], x[1], x[2], x[3]);
        else
            unrolled_for (int i = 0; i < N / 2; i++)
                store_if(channel + 2 * i < D,
                         shared_address(u.tile) +
                             place_of(PAGE_TOKENS, u.lane >> 2, channel + 2 * i) + distance,
                         x[i]);
    }
}

/* Stores the registers of a tile: the values of the chunks of row lane / 4. With four channels
 * every second row has its channels in another order, so that bank conflicts have at most two
 * lanes. */
template <class C, int D>
KVANT_INLINE void put_value_chunks(const Unpacking &u, int tile, int ct, const uint32_t (&a)[4],
                                   const uint32_t (&scale)[2])
{
    const int other = C::CHANNELS == 4 ? u.lane >> 3 & 1 : 0,
              first = value_channel<C, D>(tile, u.lane >> 2, 0);
    unrolled_for (int q = 0; q < 4; q++) {
        const int channel = C::CHANNELS == 4 ? first + ((q & 1) ^ other)
                                             : value_channel<C, D>(tile, u.lane >> 2, q & 1);
        /* place_of, written so that the piece's number is applied last */
        const uint32_t row = channel * ROW_BYTES + (channel & 7) * 16 + (u.lane & 3) * 4;
        if (C::CHANNELS == 4 || channel < D)
            *reinterpret_cast<uint32_t *>(u.tile + (row ^ (2 * ct + (q >> 1)) * 16)) =
                multiply_halves(other ? a[q ^ 1] : a[q], scale[q >> 1]);
    }
}

/* Unpacks chunks by the look-ups of the decode kernel. */
template <class C, int D, bool KEYS> KVANT_INLINE float look_up_chunks(const Unpacking &u)
{
    constexpr uint32_t COPIES = tile_copies<C>(), BYTES = C::ENTRY_BYTES;
    const int e = exponent_of<KVANT_CUDA_GROUP_TOKEN, D>(u, false);
    const float to_unit = power(-e);
    ChunkTable<COPIES> table{ shared_address(u.table) + BYTES * (u.lane % COPIES), {}, {} };
    if constexpr (C::CHANNELS == 3) {
        const uint32_t *norms =
            reinterpret_cast<const uint32_t *>(u.table + BYTES * COPIES * C::ENTRIES);
        table.norm_low[0] = norms[0], table.norm_low[1] = norms[1];
        table.norm_high[0] = norms[2], table.norm_high[1] = norms[3];
    }
    const float2 own = __half22float2(reinterpret_cast<const __half2 *>(u.numbers())[u.lane]);
    const uint32_t own_scale = pack_half2(2 * u.lane < u.valid ? own.x * to_unit : 0,
                                          2 * u.lane + 1 < u.valid ? own.y * to_unit : 0);
    uint32_t scale[4][2];
    unrolled_for (int t = 0; t < 4; t++)
        unrolled_for (int h = 0; h < 2; h++)
            scale[t][h] = of_tokens<KEYS>(own_scale, 16 * t + 8 * h + (u.lane >> 2),
                                          16 * t + 8 * h + 2 * (u.lane & 3));
    using P = ChunkPlaces<C, D>;
    if constexpr (KEYS) {
        rolled_for (int step = u.warp; step < P::KEY_STEPS; step += UNPACK_WARPS)
            C::template key_step<D>(u.page, u.lane, table, step,
                                    [&](int rt, const uint32_t(&a)[2][4]) {
                                        put_key_chunks<C, D>(u, step, rt, a, scale[rt]);
                                    });
    } else { /* a warp has one or two column tiles */
        constexpr int PARTS = C::CHANNELS == 3 ? 2 : 4, TILES = 4 / PARTS;
        const int part = u.warp % PARTS;
        uint32_t own[TILES][2];
        unrolled_for (int t = 0; t < 4; t++)
            if (t / TILES == part)
                own[t & (TILES - 1)][0] = scale[t][0], own[t & (TILES - 1)][1] = scale[t][1];
        rolled_for (int g = u.warp / PARTS; g < P::VALUE_GROUPS; g += UNPACK_WARPS / PARTS)
            C::template value_step<D>(
                u.page, u.lane, table, g, part, [&](int tile, int ct, const uint32_t(&a)[4]) {
                    put_value_chunks<C, D>(u, tile, ct, a, own[ct & (TILES - 1)]);
                });
    }
    return power(e) * C::UNIT;
}

template <class C, int D, bool KEYS> KVANT_INLINE float unpack_any_chunks(const Unpacking &u)
{
    return u.codec.looks_up ? look_up_chunks<C, D, KEYS>(u) : unpack_chunks<C, D, KEYS>(u);
}

/* Fills the table with entries and, for triplets, the bytes of norms: in several copies for
 * look_up_chunks, one copy for chunk_numbers. */
template <class C> KVANT_INLINE void fill_chunks(uint8_t *table, const TileCodec &codec)
{
    const int copies = codec.looks_up ? tile_copies<C>() : 1, i = threadIdx.x;
    if (C::CHANNELS == 3 && i < 8) {
        const __half norm = __float2half_rn(codec.directions.norm[i]);
        uint8_t *to = table + C::ENTRIES * C::ENTRY_BYTES * copies;
        if (codec.looks_up)
            to[i] = (uint8_t)__half_as_ushort(norm),
            to[8 + i] = (uint8_t)(__half_as_ushort(norm) >> 8);
        else
            reinterpret_cast<uint32_t *>(to)[i] = twice(codec.directions.norm[i]);
    }
    C::fill(table, codec.directions, copies);
}

} // namespace kvant
