/* hqmq.cuh - operands from codes of four channels. chunk_operands.cuh has the places and the
 * names. */
#pragma once

#include "chunk_operands.cuh"

namespace kvant
{

/* A code of four channels: 12 bits of direction, 4 bits of radius. The bytes of a direction are 128
 * + 128 times its channels. Radii are small whole numbers, which are subnormal as fp16, so their
 * products with bytes are exact. */
struct HqmqS96R4 : SteppedChunks<HqmqS96R4, 4> {
    static constexpr kvant_cuda_kind KIND = KVANT_CUDA_HQMQ_S96R4;
    static constexpr int CHANNELS = 4, INDEX_BITS = 12, BITS = 16;
    static constexpr int SECONDARIES = KVANT_CUDA_SECONDARIES, ENTRIES = 24 * SECONDARIES + 1,
                         /* the last entry is zero, for every index beyond the codewords */
        ENTRY_BYTES = 4;
    static constexpr int RADIUS_LOG =
        7; /* position of a radius' lowest bit: 11 bits of a half are linear */
    static constexpr float UNIT = (float)(1 << (17 - RADIUS_LOG));
    static constexpr int MOST_WARPS = 8, TILE_COPIES = 1;
    static constexpr bool SAME_TABLE = false; /* keys and values have different seeds */

    template <bool LARGE, int D, int TILES> __host__ __device__ static constexpr int copies()
    {
        return !LARGE ? 2 : TILES == 1 ? 8 : 4;
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

    /* A pair of radii, and -1152 times the radii. A half with the upper byte 0x64 is 1024 plus its
     * lower byte, which here is 128 plus a number. */
    struct Radii {
        __half2 r, bias;

        KVANT_INLINE explicit Radii(uint32_t radii)
        {
            memcpy(&r, &radii, sizeof r);
            bias = __hmul2(r, __float2half2_rn(-1152));
        }

        /* Bytes I and J of x times the two radii, or times the lower or the upper radius. */
        template <int I, int J> KVANT_INLINE uint32_t times(uint32_t x) const
        {
            return product(prmt(x, 0x64646464u, I | J << 8 | 0x4040), r, bias);
        }
        template <int I, int J, bool UPPER> KVANT_INLINE uint32_t times_one(uint32_t x) const
        {
            return product(prmt(x, 0x64646464u, I | J << 8 | 0x4040),
                           UPPER ? __high2half2(r) : __low2half2(r),
                           UPPER ? __high2half2(bias) : __low2half2(bias));
        }

        KVANT_INLINE static uint32_t product(uint32_t x, __half2 a, __half2 b)
        {
            const __half2 y = __hfma2(*reinterpret_cast<__half2 *>(&x), a, b);
            return *reinterpret_cast<const uint32_t *>(&y);
        }
    };

    /* The radii of the codes at bits 0 and 16, as halves. */
    KVANT_INLINE static uint32_t radii(uint32_t word)
    {
        return word >> 5 & 0x07800780u;
    }

    /* The registers of a row tile for column tiles 2 step and 2 step + 1. The array w has two
     * words, one for row r and one for row r + 8. */
    template <class T>
    KVANT_INLINE static void key_tiles(const uint32_t (&w)[2], const T &table, uint32_t (&a)[2][4])
    {
        unrolled_for (int h = 0; h < 2; h++) {
            const Radii r(radii(w[h]));
            const Directions own = look_up(table, w[h]);
            a[0][h] = r.times_one<0, 1, false>(own.x);
            a[0][h + 2] = r.times_one<2, 3, false>(own.x);
            a[1][h] = r.times_one<0, 1, true>(own.y);
            a[1][h + 2] = r.times_one<2, 3, true>(own.y);
        }
    }

    template <int D, class T, class F>
    KVANT_INLINE static void key_step(const uint8_t *page, int lane, const T &table, int step,
                                      F &&use)
    {
        using P = ChunkPlaces<HqmqS96R4, D>;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        const int row = lane >> 2, pair = 4 * step + (lane & 3);
        uint32_t w[2][4];
        P::template key_words<16>(words, pair, row, 0, w[0]);
        P::template key_words<16>(words, pair, row, 1, w[1]);
        unrolled_for (int rt = 0; rt < 4; rt++) {
            uint32_t a[2][4];
            key_tiles({ w[0][rt], w[1][rt] }, table, a);
            use(rt, a);
        }
    }

    /* The same for one row tile. */
    template <int D, class T>
    KVANT_INLINE static void key_step(const uint8_t *page, int lane, const T &table, int step,
                                      int rt, uint32_t (&a)[2][4])
    {
        using P = ChunkPlaces<HqmqS96R4, D>;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        const int row = lane >> 2, pair = 4 * step + (lane & 3);
        const uint32_t w[2] = { P::template key_word<16>(words, pair, row, 0, rt),
                                P::template key_word<16>(words, pair, row, 1, rt) };
        key_tiles(w, table, a);
    }

    /* For values: tile 2g + i has channel 2i (in rows r) and the channel after it (in rows r + 8)
     * of chunk 8g + r. */
    template <int D, class T, class F>
    KVANT_INLINE static void value_step(const uint8_t *page, int lane, const T &table, int g,
                                        int ct, F &&use)
    {
        using P = ChunkPlaces<HqmqS96R4, D>;
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        const int chunk = 8 * g + (lane >> 2), column = lane & 3;
        uint32_t a[2][4];
        unrolled_for (int h = 0; h < 2; h++) {
            const uint32_t w = words[P::CHUNKS * (8 * column + 4 * h + ct) + chunk];
            const Radii r(radii(w));
            const Directions own = look_up(table, w);
            const uint32_t near = prmt(own.x, own.y, 0x5140), far = prmt(own.x, own.y, 0x7362);
            a[0][2 * h] = r.times<0, 1>(near);
            a[0][2 * h + 1] = r.times<2, 3>(near);
            a[1][2 * h] = r.times<0, 1>(far);
            a[1][2 * h + 1] = r.times<2, 3>(far);
        }
        use(2 * g, ct, a[0]);
        use(2 * g + 1, ct, a[1]);
    }

    /* unit * secondary. A unit's components are 0, 1 and 1/2. So products are exact, and only three
     * sums are rounded. */
    __device__ static void direction(const kvant_cuda_directions &book, int i, float (&y)[4])
    {
        const int unit = i % 24, secondary = min(i / 24, SECONDARIES - 1);
        const float *s = book.secondaries[secondary];
        float p[4];
        for (int k = 0; k < 4; k++)
            p[k] = i + 1 >= ENTRIES ? 0
                   : unit >= 8      ? (unit - 8) >> k & 1 ? -0.5f : 0.5f
                   : unit / 2 != k  ? 0
                   : unit % 2       ? -1
                                    : 1;
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

} // namespace kvant
