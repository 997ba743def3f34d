/* decode_planes.cuh - tiles of codecs with a code per channel: reads codes and puts them into
 * place, and decodes codebooks of 1 to 8 bits. decode_uniform.cuh has uniform codes.
 *
 * A page's words are in the order of the operand of mma.m16n8k16 (layout.cuh). So a lane that reads
 * the words of 16 x 16 numbers has the codes of the four registers of an operand, and stmatrix puts
 * these in place. A pair of codes that is masked out of a word is a pair of fp16 subnormals, code x
 * 2^-24. */
#pragma once

#include "../attention/query.cuh"
#include "rows.cuh"

namespace kvant
{

constexpr int TILE_TOKENS = 32;
/* The smallest unit, so that weights divided by units stay within fp32. */
constexpr float LEAST_UNIT = 0x1p-40f;

/* A power of two and its inverse; both are normal numbers. */
KVANT_INLINE float inverse_of(float power)
{
    return __int_as_float((254 << 23) - __float_as_int(power));
}

/* Waits for the team's warps. Afterwards their writes can be read, and the memory that they read
 * may be overwritten. */
KVANT_INLINE void wait_for_team(int team, int warps)
{
    if (warps == 1)
        __syncwarp();
    else
        meet_at(1 + team, 32 * warps);
}

/* A tile that a team decodes. Token first + t of the page goes to row t: the number of channel c,
 * divided by units[t], goes to numbers[t * stride + c]. A unit is a power of two, at least
 * LEAST_UNIT. Rows from `valid` on become arbitrary finite numbers. The team synchronises before
 * and after a decoder. Decoders are not inlined; if they were, there would not be enough registers
 * for them and for attention's sums. */
struct DecodedTile {
    const uint8_t *page; /* codes and metadata, in device memory */
    uint32_t numbers_at, units_at,
        scratch_at; /* addresses in shared memory; with pointers the compiler would not know that */
    int stride, d, first,
        valid; /* stride: an odd number of 16 bytes, so that ldmatrix has no bank conflicts */
    int first_channel, end_channel, rank,
        team_warps; /* the warp's part: its channels, or every team_warps-th token */
    int lane, kv_head, team;

    KVANT_INLINE __half *numbers() const
    {
        return static_cast<__half *>(__cvta_shared_to_generic(numbers_at));
    }

    KVANT_INLINE float *units() const
    {
        return static_cast<float *>(__cvta_shared_to_generic(units_at));
    }

    /* The codec's any_scratch. */
    KVANT_INLINE uint8_t *scratch() const
    {
        return static_cast<uint8_t *>(__cvta_shared_to_generic(scratch_at));
    }

    KVANT_INLINE void wait() const
    {
        wait_for_team(team, team_warps);
    }
};

/* Stores an operand's registers as rows of tokens: the tile of tokens 16 j.. and channels 16 i...
 * For keys a token is a row of the operand, for values a column. */
template <bool KEYS>
KVANT_INLINE void put_operand(const DecodedTile &tile, int j, int i, const uint32_t (&a)[4])
{
    __half *corner = tile.numbers() + 16 * j * tile.stride + 16 * i;
    const int lane = tile.lane;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (KEYS)
        store_matrices(a, shared_address(corner + (lane & 15) * tile.stride + 8 * (lane >> 4)));
    else
        store_transposed(a, shared_address(corner + ((lane & 7) + 8 * (lane >> 4)) * tile.stride +
                                           8 * (lane >> 3 & 1)));
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

/* The number of bits of plane i of a code as a binary logarithm, and the plane's shift in the
 * code. */
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

/* The codes of 64 channels, four operands, of a tile. N: neighbouring operands that cover the
 * tile's tokens. */
template <int BITS, bool KEYS> struct TileCodes {
    static constexpr int N = TILE_TOKENS / 16, USED = planes_of(BITS);
    uint32_t w[4][USED][N];

    /* Loads the channels from 64 * c on of the first n operands; n is at most 4. */
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
                    load_values(p, k,
                                plane + ((128 * c) << log) +
                                    (32 * ((j + k) >> shift) + tile.lane) * n,
                                n, shift == 2 ? 4 * (j & 2) : 0);
            plane += code_plane_words(log, KEYS, tiles);
        }
    }

    KVANT_INLINE void load_keys(int p, int log, const uint32_t *at, int n)
    {
        unrolled_for (int u = 0; u < 4; u++) {
            /* the operand whose word it is */
            const int shift = 2 - log, first = u >> shift << shift;
            uint2 pair{ w[first][p][0], w[first][p][1] };
            if (u == first)
                pair = u < n ? __ldg(reinterpret_cast<const uint2 *>(at + 128 * (u >> shift)))
                             : uint2{};
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
        w[0][p][k] = four.x >> by, w[1][p][k] = four.y >> by, w[2][p][k] = four.z >> by,
        w[3][p][k] = four.w >> by;
    }

    /* Two codes: register q of operand u of tokens 16 k .. */
    KVANT_INLINE uint32_t pair(int u, int k, int q) const
    {
        uint32_t codes = 0;
        unrolled_for (int p = 0; p < USED; p++) {
            const int log = plane_log(BITS, p), in_word = (1 << (2 - log)) - 1,
                      tile = (KEYS ? u : k) & in_word;
            const int shift = plane_shift(BITS, p), by = (q << log) - shift;
            const uint32_t word = w[u][p][k] >> (4 * tile << log), ones = ((1u << (1 << log)) - 1)
                                                                          << shift;
            codes |= (by >= 0 ? word >> by : word << -by) & (ones | ones << 16);
        }
        return codes;
    }
};

/* Calls number(pair of codes, k, q) for register q of tokens 16 k .., and stores the results. */
template <int BITS, bool KEYS, class F>
KVANT_INLINE void each_operand(const DecodedTile &tile, F &&number)
{
    const int end = tile.end_channel / 16;
    rolled_for (int i = tile.first_channel / 16; i < end; i += 4) {
        TileCodes<BITS, KEYS> codes;
        const int n = min(end - i, 4);
        codes.load(tile, i / 4, n);
        unrolled_for (int u = 0; u < 4; u++)
            unrolled_for (int k = 0; k < TILE_TOKENS / 16; k++)
                if (u < n) {
                    uint32_t a[4];
                    unrolled_for (int q = 0; q < 4; q++)
                        a[q] = number(codes.pair(u, k, q), k, q);
                    put_operand<KEYS>(tile, k, i + u, a);
                }
    }
}

template <int BITS, bool KEYS> __device__ __noinline__ void place_codes_of(const DecodedTile tile)
{
    each_operand<BITS, KEYS>(tile, [](uint32_t pair, int, int) { return pair; });
}

/* Puts codes of 2 to MOST bits in the places of their channels, for decoders that read them
 * there. */
template <bool KEYS, int MOST, int BITS = 2>
KVANT_INLINE void place_codes(int bits, const DecodedTile &tile)
{
    if constexpr (BITS < MOST)
        if (bits != BITS)
            return place_codes<KEYS, MOST, BITS + 1>(bits, tile);
    place_codes_of<BITS, KEYS>(tile);
    tile.wait();
}

KVANT_INLINE float half_at(const uint16_t *numbers, int at)
{
    return __half2float(__ushort_as_half(__ldg(numbers + at)));
}

/* A token's unit is the power of two above its scale. */
template <int BITS, bool KEYS>
__device__ __noinline__ void decode_codebook(int metadata, const float *levels,
                                             const DecodedTile tile)
{
    constexpr int N = TILE_TOKENS / 16;
    const int token = tile.lane;
    const float stored = token < tile.valid
                             ? half_at(reinterpret_cast<const uint16_t *>(tile.page + metadata),
                                       tile.first + token)
                             : 0,
                unit = fmaxf(power_above(stored), LEAST_UNIT), own = stored * inverse_of(unit);
    if (tile.rank == 0)
        tile.units()[token] = unit;
    /* scales of two columns of the operand; the halves belong to its rows for keys, to its columns
     * for values */
    float2 scale[N][2];
    unrolled_for (int k = 0; k < N; k++)
        unrolled_for (int h = 0; h < 2; h++) {
            const int at = 16 * k + 8 * h + (KEYS ? tile.lane >> 2 : 2 * (tile.lane & 3));
            scale[k][h].x = __shfl_sync(FULL, own, at);
            scale[k][h].y = KEYS ? scale[k][h].x : __shfl_sync(FULL, own, at + 1);
        }
    each_operand<BITS, KEYS>(tile, [&](uint32_t pair, int k, int q) {
        const float2 s = scale[k][KEYS ? q & 1 : q >> 1];
        return pack_half2(levels[pair & 0xffffu] * s.x, levels[pair >> 16] * s.y);
    });
}

template <bool KEYS, int BITS = 1>
KVANT_INLINE void decode_book(int bits, int metadata, const float *levels, const DecodedTile &tile)
{
    if constexpr (BITS <= 8)
        bits == BITS ? decode_codebook<BITS, KEYS>(metadata, levels, tile)
                     : decode_book<KEYS, BITS + 1>(bits, metadata, levels, tile);
}

} // namespace kvant
