/* chunks.cuh - from the words of a page of chunk codes (format.md, "Chunk codes") to operands
 * of mma.m16n8k16. Chunks of octopus are triplets of channels, chunks of hqmq are four channels.
 *
 * A chunk's direction is looked up in shared memory: three channels as fp16 in 8 bytes, or four as
 * bytes. A norm or a radius multiplies the direction in fp16. The table stands there in several copies
 * side by side, so that fewer lanes read the same bank. Of 8 bytes 16 lanes at a time read from 16 pairs
 * of banks: with 16 copies no two lanes read the same pair, with 8 copies at most two do. Of 4 bytes 3
 * lanes on average read the fullest bank with 8 copies. This sets the pace, so there are as many copies
 * as the ring of pages leaves room for.
 *
 * The kernel may choose which channel is which column (keys) or row (values) of the product. For
 * keys a lane's four columns of a tile are one chunk, so a look-up gives the operand. For values a
 * lane's rows r and r + 8 of two or three tiles are the channels of one chunk of four or of two
 * triplets; prmt pairs the look-ups of neighbouring tokens. */
#pragma once

#include "../attention/attention.h"
#include "../attention/dequant.cuh"

#include <type_traits>

namespace kvant
{

struct ChunkCodes {
    static constexpr kvant_cuda_grouping GROUP = KVANT_CUDA_GROUP_TOKEN;
    static constexpr float ROW8 = 1;
    static constexpr bool BIASED = false;
    static constexpr Order ORDER = Order::COLUMNS;
};

/* Codes whose sizes are known in a launch (any_chunks.cuh). */
struct AnySizes {
};
template <class C> constexpr bool HAS_ANY_SIZES = std::is_base_of<AnySizes, C>::value;

template <class C> constexpr bool HAS_CHUNKS = std::is_base_of<ChunkCodes, C>::value;

/* The data of a lane for look-ups in a table in shared memory: where the lane's copy is. Levels of the
 * norm are fp16, lower bytes and upper bytes. */
template <int COPIES_> struct ChunkTable {
    static constexpr uint32_t COPIES = COPIES_;
    uint32_t copy;
    uint32_t norm_low[2], norm_high[2];
};

/* a * b of two pairs of halves */
KVANT_INLINE uint32_t multiply_halves(uint32_t a, uint32_t b)
{
    __half2 c = __hmul2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
    return *reinterpret_cast<uint32_t *>(&c);
}

/* a times the lower or the upper half of b. */
template <bool UPPER> KVANT_INLINE uint32_t multiply_by_half(uint32_t a, uint32_t b)
{
    const __half2 y = *reinterpret_cast<__half2 *>(&b),
                  c = __hmul2(*reinterpret_cast<__half2 *>(&a), UPPER ? __high2half2(y) : __low2half2(y));
    return *reinterpret_cast<const uint32_t *>(&c);
}

/* x shifted left by so many bits, to the right when negative. */
KVANT_INLINE uint32_t shifted(uint32_t x, int left)
{
    return left >= 0 ? x << left : x >> -left;
}

KVANT_INLINE uint32_t rotate_left(uint32_t x, int bits)
{
    return __funnelshift_l(x, x, bits);
}

constexpr uint32_t FIRST_AND_THIRD = 0x00ff00ffu; /* of four bytes */

/* Where a lane finds codes. row is lane / 4, column lane mod 4. */
template <class C, int D> struct ChunkPlaces {
    static constexpr int CHUNKS = (D + C::CHANNELS - 1) / C::CHANNELS;
    static constexpr int KEY_STEPS = ((CHUNKS + 1) / 2 + 3) / 4;   /* of 8 chunks, two tiles */
    static constexpr int GROUP_CHUNKS = C::CHANNELS == 3 ? 16 : 8; /* of values: rows of GROUP_TILES tiles */
    static constexpr int GROUP_TILES = GROUP_CHUNKS * C::CHANNELS / 16;
    static constexpr int VALUE_GROUPS = (CHUNKS + GROUP_CHUNKS - 1) / GROUP_CHUNKS;

    /* Words of a plane of P bits for the 4 row tiles of a pair of chunks. In each word the codes
     * of tokens r and r + 8 and of both chunks begin at bits LEFT + 0, 8, 16 and 24 (mod 32), in
     * this order; other bits belong to other codes. P = 16: row r + 8 h alone, at bits 0 and 16. */
    template <int P, int LEFT = 0>
    KVANT_INLINE static void key_words(const uint32_t *page, int pair, int row, int h, uint32_t (&w)[4])
    {
        const uint32_t *plane = page + chunk_plane_at(C::BITS, P, CHUNKS, true);
        load_words<4>(plane + 4 * P * pair + (P == 16 ? 32 * h + 4 * row : 4 * (row % P)), w);
        if constexpr (P < 8)
            unrolled_for (int i = 0; i < 4; i++)
                w[i] = rotate_left(w[i], LEFT - P * (row / P));
    }

    /* The same of one row tile. */
    template <int P, int LEFT = 0>
    KVANT_INLINE static uint32_t key_word(const uint32_t *page, int pair, int row, int h, int rt)
    {
        const uint32_t *plane = page + chunk_plane_at(C::BITS, P, CHUNKS, true);
        const uint32_t w = plane[4 * P * pair + (P == 16 ? 32 * h + 4 * row : 4 * (row % P)) + rt];
        return P < 8 ? rotate_left(w, LEFT - P * (row / P)) : w;
    }

    /* The word of a plane of P bits for a chunk and tokens 2 column, + 1 of column tiles 2 m and 2
     * m + 1, + 8 h: codes of both tiles, then of the next token, begin at bits LEFT + 0, 8, 16 and
     * 24. */
    template <int P, int LEFT = 0>
    KVANT_INLINE static uint32_t value_word(const uint32_t *page, int chunk, int column, int h, int m)
    {
        const uint32_t *plane = page + chunk_plane_at(C::BITS, P, CHUNKS, false) + chunk;
        if constexpr (P == 8)
            return plane[CHUNKS * (4 * column + 2 * h + m)];
        else {
            constexpr int FIELDS = 16 / P;
            uint32_t x = plane[CHUNKS * ((8 * column + 4 * h) / FIELDS)];
            if constexpr (P == 1) /* what depends on the lane once, for all h and m */
                x >>= 8 * (column % 2);
            const int left = LEFT - P * (4 * h % FIELDS + 2 * m);
            return bit_select<FIRST_AND_THIRD << LEFT | (LEFT ? FIRST_AND_THIRD >> (32 - LEFT) : 0)>(
                shifted(x, left), shifted(x, left + 8 - P));
        }
    }

    /* The same for column tile ct alone, of planes of any width: codes begin at bits 0 and 16. */
    template <int P>
    KVANT_INLINE static uint32_t value_pair(const uint32_t *page, int chunk, int column, int h, int ct)
    {
        const uint32_t *plane = page + chunk_plane_at(C::BITS, P, CHUNKS, false) + chunk;
        const int k = 8 * column + 4 * h + ct, fields = 16 / P;
        return plane[CHUNKS * (k / fields)] >> (P * (k % fields));
    }
};

/* n copies of entry i, a power of two; lanes begin with different ones, so that they use different banks. */
KVANT_INLINE void store_copies(uint2 *entries, int i, int n, const uint2 &entry)
{
    for (int k = 0; k < n; k++)
        entries[i * n + ((k + i * n / 16) & (n - 1))] = entry;
}

/* A triplet's code: 2 (B + 1) bits of direction, B - 1 of norm. */
template <int B> struct Octopus : ChunkCodes {
    static constexpr kvant_cuda_kind KIND = B == 2   ? KVANT_CUDA_OCTOPUS2
                                            : B == 3 ? KVANT_CUDA_OCTOPUS3
                                                     : KVANT_CUDA_OCTOPUS4;
    static constexpr int CHANNELS = 3, BITS = 3 * B + 1, DIRECTION_BITS = B + 1;
    /* Up to 10 bits are looked up as they are; of 13 bits the norm's 3 apart. */
    static constexpr bool HAS_NORM = B == 4;
    static constexpr int SECOND = B == 3 ? 2 : 4; /* width of the plane below that of 8 bits */
    static constexpr int ENTRIES = 1 << (HAS_NORM ? 2 * DIRECTION_BITS : BITS), ENTRY_BYTES = 8;
    static constexpr float UNIT = 1;
    static constexpr int MOST_WARPS = 12, TILE_COPIES = B == 2 ? 16 : 8; /* of tiles/ */
    static constexpr bool SAME_TABLE = true; /* for keys and values of one head_dim */

    template <bool LARGE, int D, int TILES> __host__ __device__ static constexpr int copies()
    {
        return B == 2 || (LARGE && D <= 128) ? 16 : LARGE ? 8 : 2;
    }

    /* Where key_words and value_words rotate the narrower planes to: of 7 bits, side by side; of more,
     * into a byte of bits 8 and 9 and of the norm. */
    static constexpr int NEXT = B == 2 ? 4 : 0, LAST = B == 2 ? 6 : 4;

    /* Four codes: w[0], w[1], w[2] are the words of the planes, the widest first. */
    struct Four {
        uint32_t index[2], norms[2]; /* indices: bytes of 7 bits, or halves */

        template <class T> KVANT_INLINE Four(const uint32_t (&w)[3], const T &table)
        {
            if constexpr (B == 2)
                index[0] = bit_select<0x0f0f0f0fu>(w[0], bit_select<0x30303030u>(w[1], w[2])) & 0x7f7f7f7fu;
            else {
                const uint32_t high = HAS_NORM ? bit_select<0x0f0f0f0fu>(w[1], w[2]) : w[1];
                index[0] = prmt(w[0], high, 0x5140) & 0x03ff03ffu;
                index[1] = prmt(w[0], high, 0x7362) & 0x03ff03ffu;
                if constexpr (HAS_NORM) { /* 2^30 + 2^26: shifts by 2 and by 6 */
                    const uint32_t k = prmt(__umulhi(high & 0x1c1c1c1cu, 0x44000000u), 0, 0x4420);
                    norms[0] = prmt(table.norm_low[0], table.norm_low[1], k);
                    norms[1] = prmt(table.norm_high[0], table.norm_high[1], k);
                }
            }
        }

        /* A product of bytes, or of bytes and halves, makes the address on the multiplier. */
        template <class T> KVANT_INLINE uint2 look_up(const T &table, int i) const
        {
            return look_up_two_words(B == 2 ? __dp4a(index[0], 8 * T::COPIES << 8 * i, table.copy)
                                                   : __dp2a_lo(index[i / 2], 8 * T::COPIES << 8 * (i % 2), table.copy));
        }

        /* The norms of codes i and j as a pair of halves. */
        KVANT_INLINE uint32_t norm(int i, int j) const
        {
            return prmt(norms[0], norms[1], i | (i + 4) << 4 | j << 8 | (j + 4) << 12);
        }
    };

    template <class P> KVANT_INLINE static void key_words(const uint32_t *page, int pair, int row, uint32_t (&w)[3][4])
    {
        if constexpr (B == 2) {
            P::template key_words<4>(page, pair, row, 0, w[0]);
            P::template key_words<2, NEXT>(page, pair, row, 0, w[1]);
            P::template key_words<1, LAST>(page, pair, row, 0, w[2]);
        } else {
            P::template key_words<8>(page, pair, row, 0, w[0]);
            P::template key_words<SECOND, NEXT>(page, pair, row, 0, w[1]);
            if constexpr (B == 4)
                P::template key_words<1, LAST>(page, pair, row, 0, w[2]);
        }
    }

    template <class P>
    KVANT_INLINE static void value_words(const uint32_t *page, int chunk, int column, int h, int m,
                                         uint32_t (&w)[3])
    {
        w[2] = 0;
        if constexpr (B == 2) {
            w[0] = P::template value_word<4>(page, chunk, column, h, m);
            w[1] = P::template value_word<2, NEXT>(page, chunk, column, h, m);
            w[2] = P::template value_word<1, LAST>(page, chunk, column, h, m);
        } else {
            w[0] = P::template value_word<8>(page, chunk, column, h, m);
            w[1] = P::template value_word<SECOND, NEXT>(page, chunk, column, h, m);
            if constexpr (B == 4)
                w[2] = P::template value_word<1, LAST>(page, chunk, column, h, m);
        }
    }

    /* Registers of column tiles 2 step and 2 step + 1 from the words of a row tile. */
    template <class T>
    KVANT_INLINE static void key_tiles(const uint32_t (&own)[3], const T &table, uint32_t (&a)[2][4])
    {
        const Four codes(own, table);
        unrolled_for (int e = 0; e < 2; e++) {
            const uint2 x = codes.look_up(table, 2 * e), y = codes.look_up(table, 2 * e + 1);
            const uint32_t norms = codes.norm(2 * e, 2 * e + 1);
            a[e][0] = HAS_NORM ? multiply_by_half<false>(x.x, norms) : x.x;
            a[e][2] = HAS_NORM ? multiply_by_half<false>(x.y, norms) : x.y;
            a[e][1] = HAS_NORM ? multiply_by_half<true>(y.x, norms) : y.x;
            a[e][3] = HAS_NORM ? multiply_by_half<true>(y.y, norms) : y.y;
        }
    }

    /* use(row tile, registers of column tiles 2 step and 2 step + 1): a lane has chunks 8 step + 2 (lane
     * mod 4) and + 1 of keys. */
    template <int D, class T, class F>
    KVANT_INLINE static void key_step(const uint8_t *page, int lane, const T &table, int step, F &&use)
    {
        uint32_t w[3][4];
        key_words<ChunkPlaces<Octopus, D>>(reinterpret_cast<const uint32_t *>(page), 4 * step + (lane & 3), lane >> 2, w);
        unrolled_for (int rt = 0; rt < 4; rt++) {
            uint32_t a[2][4];
            key_tiles({ w[0][rt], w[1][rt], w[2][rt] }, table, a);
            use(rt, a);
        }
    }

    /* The same of one row tile. */
    template <int D, class T>
    KVANT_INLINE static void key_step(const uint8_t *page, int lane, const T &table, int step, int rt,
                                      uint32_t (&a)[2][4])
    {
        using P = ChunkPlaces<Octopus, D>;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        const int pair = 4 * step + (lane & 3), row = lane >> 2;
        uint32_t w[3] = {};
        if constexpr (B == 2) {
            w[0] = P::template key_word<4>(words, pair, row, 0, rt);
            w[1] = P::template key_word<2, NEXT>(words, pair, row, 0, rt);
            w[2] = P::template key_word<1, LAST>(words, pair, row, 0, rt);
        } else {
            w[0] = P::template key_word<8>(words, pair, row, 0, rt);
            w[1] = P::template key_word<SECOND, NEXT>(words, pair, row, 0, rt);
            if constexpr (B == 4)
                w[2] = P::template key_word<1, LAST>(words, pair, row, 0, rt);
        }
        key_tiles(w, table, a);
    }

    /* use(row tile, column tile, registers) for a page of keys. */
    template <int D, class T, class F>
    KVANT_INLINE static void for_each_key_tile(const uint8_t *page, int lane, const T &table, F &&use)
    {
        unrolled_for (int step = 0; step < ChunkPlaces<Octopus, D>::KEY_STEPS; step++)
            key_step<D>(page, lane, table, step, [&](int rt, const uint32_t(&a)[2][4]) {
                use(rt, 2 * step, a[0]);
                use(rt, 2 * step + 1, a[1]);
            });
    }

    /* For values: tile 3 g + i has numbers 2 i (rows r) and 2 i + 1 (rows r + 8) of the x, y, z of
     * chunks 16 g + r and 16 g + 8 + r. */
    template <int D, class T, class F>
    KVANT_INLINE static void value_step(const uint8_t *page, int lane, const T &table, int g, int m, F &&use)
    {
        uint32_t a[2][3][4];
        unrolled_for (int part = 0; part < 4; part++) {
            const int h = part % 2, far = part / 2; /* tokens + 8 h, chunks + 8 far */
            uint32_t w[3];
            value_words<ChunkPlaces<Octopus, D>>(reinterpret_cast<const uint32_t *>(page), 16 * g + 8 * far + (lane >> 2),
                                                 lane & 3, h, m, w);
            const Four codes(w, table);
            unrolled_for (int i = 0; i < 2; i++) {
                const uint2 x = codes.look_up(table, i), y = codes.look_up(table, i + 2);
                uint32_t n[3] = { prmt(x.x, y.x, 0x5410), prmt(x.x, y.x, 0x7632), prmt(x.y, y.y, 0x5410) };
                unrolled_for (int k = 0; k < 3; k++) {
                    const int at = 3 * far + k;
                    a[i][at / 2][at % 2 + 2 * h] = HAS_NORM ? multiply_halves(n[k], codes.norm(i, i + 2)) : n[k];
                }
            }
        }
        unrolled_for (int i = 0; i < 2; i++)
            unrolled_for (int k = 0; k < 3; k++)
                use(3 * g + k, 2 * m + i, a[i][k]);
    }

    template <int D, class T, class F>
    KVANT_INLINE static void for_each_value_tile(const uint8_t *page, int lane, const T &table, F &&use)
    {
        unrolled_for (int g = 0; g < ChunkPlaces<Octopus, D>::VALUE_GROUPS; g++)
            unrolled_for (int m = 0; m < 2; m++)
                value_step<D>(page, lane, table, g, m, use);
    }

    /* The table's entries, by all threads of a block. */
    __device__ static void fill(uint8_t *entries, const kvant_cuda_directions &book, int n_copies)
    {
        for (int i = threadIdx.x; i < ENTRIES; i += blockDim.x) {
            const int mask = (1 << DIRECTION_BITS) - 1;
            const float u = book.direction[i & mask], w = book.direction[i >> DIRECTION_BITS & mask],
                        norm = HAS_NORM ? 1 : book.norm[i >> 2 * DIRECTION_BITS];
            const float z = 1 - fabsf(u) - fabsf(w), fold = fmaxf(-z, 0), x = u - copysignf(fold, u),
                        y = w - copysignf(fold, w), f = norm / sqrtf(x * x + y * y + z * z);
            const uint2 entry = make_uint2(pack_half2(f * x, f * y), pack_half2(f * z, 0));
            store_copies(reinterpret_cast<uint2 *>(entries), i, n_copies, entry);
        }
    }
};

/* A code of four channels: INDEX_BITS of direction, RADIUS_BITS of radius. A direction's bytes are 128
 * + 128 times its channels. Radii are small whole numbers, so as fp16 they are subnormal, and their
 * products with bytes are exact if they have 4 bits. */
template <int SECONDARIES, int INDEX_BITS, int RADIUS_BITS> struct Hqmq : ChunkCodes {
    static constexpr kvant_cuda_kind KIND = RADIUS_BITS == 4 ? KVANT_CUDA_HQMQ_S96R4 : KVANT_CUDA_HQMQ_S192R6;
    static constexpr int CHANNELS = 4, BITS = INDEX_BITS + RADIUS_BITS;
    static constexpr int ENTRIES = 24 * SECONDARIES + 1, ENTRY_BYTES = 4; /* the last one is zero, for every index beyond */
    static constexpr int RADIUS_LOG = 7 - RADIUS_BITS + 4; /* of a radius' lowest bit: 11 bits of a half are linear */
    static constexpr float UNIT = (float)(1 << (17 - RADIUS_LOG));
    static constexpr int MOST_WARPS = SECONDARIES <= 96 ? 8 : 12, TILE_COPIES = 1;
    static constexpr bool SAME_TABLE = false;                     /* keys and values have seeds of their own */

    template <bool LARGE, int D, int TILES> __host__ __device__ static constexpr int copies()
    {
        return (SECONDARIES <= 96 ? 2 : 1) * (!LARGE ? 1 : SECONDARIES <= 96 && TILES == 1 ? 4 : 2);
    }

    /* The directions of the codes at bits 0 and 16 of a word. */
    struct Directions {
        uint32_t x, y;
    };

    template <class T> KVANT_INLINE static Directions look_up(const T &table, uint32_t word)
    {
        constexpr uint32_t MASK = (1u << INDEX_BITS) - 1, BYTES = ENTRY_BYTES * T::COPIES;
        const uint32_t index = __vminu2(word & MASK * 0x10001u, (ENTRIES - 1) * 0x10001u);
        return Directions{ look_up_word(__dp2a_lo(index, BYTES, table.copy)),
                           look_up_word(__dp2a_lo(index, BYTES << 8, table.copy)) };
    }

    /* A pair of radii, and -1152 times them: two bytes above 0x64 are 1024 + 128 + numbers as halves. */
    struct Radii {
        __half2 r, bias;

        KVANT_INLINE explicit Radii(uint32_t radii)
        {
            memcpy(&r, &radii, sizeof r);
            bias = __hmul2(r, __float2half2_rn(-1152));
        }

        /* Bytes I and J of x times the radii, or times the lower or the upper one. */
        template <int I, int J> KVANT_INLINE uint32_t times(uint32_t x) const
        {
            return product(prmt(x, 0x64646464u, I | J << 8 | 0x4040), r, bias);
        }
        template <int I, int J, bool UPPER> KVANT_INLINE uint32_t times_one(uint32_t x) const
        {
            return product(prmt(x, 0x64646464u, I | J << 8 | 0x4040), UPPER ? __high2half2(r) : __low2half2(r),
                           UPPER ? __high2half2(bias) : __low2half2(bias));
        }

        KVANT_INLINE static uint32_t product(uint32_t x, __half2 a, __half2 b)
        {
            const __half2 y = __hfma2(*reinterpret_cast<__half2 *>(&x), a, b);
            return *reinterpret_cast<const uint32_t *>(&y);
        }
    };

    /* Radii of the codes at bits 0 and 16, as halves: two and one are words of the planes of 2 bits
     * and 1 bit. */
    KVANT_INLINE static uint32_t radii(uint32_t word, uint32_t two, uint32_t one)
    {
        if constexpr (RADIUS_BITS == 4)
            return word >> 5 & 0x07800780u;
        return (word >> 8 & 0x00e000e0u) | (two << 8 & 0x03000300u) | (one << 10 & 0x04000400u);
    }

    /* Registers of column tiles 2 step and 2 step + 1 of a row tile: w, words of rows r and r + 8. */
    template <class T>
    KVANT_INLINE static void key_tiles(const uint32_t (&w)[2], uint32_t two, uint32_t one, const T &table,
                                       uint32_t (&a)[2][4])
    {
        unrolled_for (int h = 0; h < 2; h++) {
            const Radii r(radii(w[h], two >> 8 * h, one >> 8 * h));
            const Directions own = look_up(table, w[h]);
            a[0][h] = r.template times_one<0, 1, false>(own.x);
            a[0][h + 2] = r.template times_one<2, 3, false>(own.x);
            a[1][h] = r.template times_one<0, 1, true>(own.y);
            a[1][h + 2] = r.template times_one<2, 3, true>(own.y);
        }
    }

    template <int D, class T, class F>
    KVANT_INLINE static void key_step(const uint8_t *page, int lane, const T &table, int step, F &&use)
    {
        using P = ChunkPlaces<Hqmq, D>;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        const int row = lane >> 2, pair = 4 * step + (lane & 3);
        uint32_t w[2][4], two[4] = {}, one[4] = {};
        P::template key_words<16>(words, pair, row, 0, w[0]);
        P::template key_words<16>(words, pair, row, 1, w[1]);
        if constexpr (RADIUS_BITS == 6) {
            P::template key_words<2>(words, pair, row, 0, two);
            P::template key_words<1>(words, pair, row, 0, one);
        }
        unrolled_for (int rt = 0; rt < 4; rt++) {
            uint32_t a[2][4];
            key_tiles({ w[0][rt], w[1][rt] }, two[rt], one[rt], table, a);
            use(rt, a);
        }
    }

    /* The same of one row tile. */
    template <int D, class T>
    KVANT_INLINE static void key_step(const uint8_t *page, int lane, const T &table, int step, int rt,
                                      uint32_t (&a)[2][4])
    {
        using P = ChunkPlaces<Hqmq, D>;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        const int row = lane >> 2, pair = 4 * step + (lane & 3);
        const uint32_t w[2] = { P::template key_word<16>(words, pair, row, 0, rt),
                                P::template key_word<16>(words, pair, row, 1, rt) };
        const uint32_t two = RADIUS_BITS == 6 ? P::template key_word<2>(words, pair, row, 0, rt) : 0,
                       one = RADIUS_BITS == 6 ? P::template key_word<1>(words, pair, row, 0, rt) : 0;
        key_tiles(w, two, one, table, a);
    }

    template <int D, class T, class F>
    KVANT_INLINE static void for_each_key_tile(const uint8_t *page, int lane, const T &table, F &&use)
    {
        unrolled_for (int step = 0; step < ChunkPlaces<Hqmq, D>::KEY_STEPS; step++)
            key_step<D>(page, lane, table, step, [&](int rt, const uint32_t(&a)[2][4]) {
                use(rt, 2 * step, a[0]);
                use(rt, 2 * step + 1, a[1]);
            });
    }

    /* For values: tile 2 g + i has channels 2 i (rows r) and 2 i + 1 (rows r + 8) of chunk 8 g +
     * r. */
    template <int D, class T, class F>
    KVANT_INLINE static void value_step(const uint8_t *page, int lane, const T &table, int g, int ct, F &&use)
    {
        using P = ChunkPlaces<Hqmq, D>;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        const int chunk = 8 * g + (lane >> 2), column = lane & 3;
        uint32_t a[2][4];
        unrolled_for (int h = 0; h < 2; h++) {
            const uint32_t w = P::template value_pair<16>(words, chunk, column, h, ct);
            uint32_t two = 0, one = 0;
            if constexpr (RADIUS_BITS == 6) {
                two = P::template value_pair<2>(words, chunk, column, h, ct);
                one = P::template value_pair<1>(words, chunk, column, h, ct);
            }
            const Radii r(radii(w, two, one));
            const Directions own = look_up(table, w);
            const uint32_t near = prmt(own.x, own.y, 0x5140), far = prmt(own.x, own.y, 0x7362);
            a[0][2 * h] = r.template times<0, 1>(near);
            a[0][2 * h + 1] = r.template times<2, 3>(near);
            a[1][2 * h] = r.template times<0, 1>(far);
            a[1][2 * h + 1] = r.template times<2, 3>(far);
        }
        use(2 * g, ct, a[0]);
        use(2 * g + 1, ct, a[1]);
    }

    template <int D, class T, class F>
    KVANT_INLINE static void for_each_value_tile(const uint8_t *page, int lane, const T &table, F &&use)
    {
        unrolled_for (int g = 0; g < ChunkPlaces<Hqmq, D>::VALUE_GROUPS; g++)
            unrolled_for (int ct = 0; ct < 4; ct++)
                value_step<D>(page, lane, table, g, ct, use);
    }

    /* unit * secondary; a unit's components are 0, 1 and 1/2, so products are exact and three sums
     * are rounded. */
    __device__ static void direction(const kvant_cuda_directions &book, int i, float (&y)[4])
    {
        const int unit = i % 24, secondary = min(i / 24, SECONDARIES - 1);
        const float *s = book.secondaries[secondary];
        float p[4];
        for (int k = 0; k < 4; k++)
            p[k] = i + 1 >= ENTRIES ? 0 : unit >= 8 ? (unit - 8) >> k & 1 ? -0.5f : 0.5f : unit / 2 != k ? 0 : unit % 2 ? -1 : 1;
        y[0] = p[0] * s[0] - p[1] * s[1] - p[2] * s[2] - p[3] * s[3];
        y[1] = p[0] * s[1] + p[1] * s[0] + p[2] * s[3] - p[3] * s[2];
        y[2] = p[0] * s[2] - p[1] * s[3] + p[2] * s[0] + p[3] * s[1];
        y[3] = p[0] * s[3] + p[1] * s[2] - p[2] * s[1] + p[3] * s[0];
    }

    __device__ static void fill(uint8_t *entries, const kvant_cuda_directions &book, int n_copies)
    {
        for (int i = threadIdx.x; i < ENTRIES; i += blockDim.x) {
            float y[4];
            direction(book, i, y);
            uint32_t own = 0;
            unrolled_for (int k = 0; k < 4; k++)
                own |= (uint32_t)min(128 + __float2int_rn(128 * y[k]), 255) << 8 * k;
            for (int k = 0; k < n_copies; k++)
                reinterpret_cast<uint32_t *>(entries)[i * n_copies + (k + i / 4) % n_copies] = own;
        }
    }
};

using Octopus2 = Octopus<2>;
using Octopus3 = Octopus<3>;
using Octopus4 = Octopus<4>;
using HqmqS96R4 = Hqmq<96, 12, 4>;
using HqmqS192R6 = Hqmq<192, 13, 6>;

/* Warps a multiprocessor, if they find room. */
template <class C> __host__ __device__ constexpr int most_warps()
{
    if constexpr (HAS_CHUNKS<C>)
        return C::MOST_WARPS;
    else
        return 8;
}

/* Bytes of a kind's table; none for other kinds. */
template <class C, bool LARGE, int D, int TILES> __host__ __device__ constexpr int table_bytes()
{
    if constexpr (HAS_ANY_SIZES<C>)
        return C::template bytes<LARGE>();
    else if constexpr (HAS_CHUNKS<C>)
        return (C::ENTRIES * C::ENTRY_BYTES * C::template copies<LARGE, D, TILES>() + 15) / 16 * 16;
    else
        return 0;
}

template <class C, int COPIES>
KVANT_INLINE ChunkTable<COPIES> chunk_table(const uint8_t *entries, const kvant_cuda_directions &book, int lane)
{
    ChunkTable<COPIES> t{ shared_address(entries) + C::ENTRY_BYTES * (lane % COPIES), {}, {} };
    if constexpr (C::CHANNELS == 3)
        unrolled_for (int k = 0; k < 8; k++) {
            const uint32_t level = __half_as_ushort(__float2half_rn(book.norm[k]));
            t.norm_low[k / 4] |= (level & 255) << 8 * (k % 4);
            t.norm_high[k / 4] |= level >> 8 << 8 * (k % 4);
        }
    return t;
}

/* Tiles of an operand: columns of keys, rows of values. */
template <class C, int D> __host__ __device__ constexpr int key_tiles()
{
    if constexpr (HAS_CHUNKS<C>)
        return 2 * ChunkPlaces<C, D>::KEY_STEPS;
    else
        return D / 16;
}

template <class C, int D> __host__ __device__ constexpr int value_tiles()
{
    if constexpr (HAS_CHUNKS<C>)
        return ChunkPlaces<C, D>::VALUE_GROUPS * ChunkPlaces<C, D>::GROUP_TILES;
    else
        return D / 16;
}

/* The channel of a row of a tile of values; not below D: none. */
template <class C, int D> KVANT_INLINE int value_channel(int tile, int row, int far)
{
    if constexpr (HAS_CHUNKS<C>) {
        constexpr int T = ChunkPlaces<C, D>::GROUP_TILES;
        const int at = 2 * (tile % T) + far;
        const int chunk = ChunkPlaces<C, D>::GROUP_CHUNKS * (tile / T) + 8 * (at / C::CHANNELS) + row;
        return C::CHANNELS * chunk + at % C::CHANNELS;
    } else
        return 16 * tile + row + 8 * far;
}

} // namespace kvant
