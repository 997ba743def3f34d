/* octopus.cuh - operands from codes of three channels. chunk_operands.cuh has the places and the
 * names. */
#pragma once

#include "chunk_operands.cuh"

namespace kvant
{

/* Stores n copies of entry i; n is a power of two. Each lane begins with a different copy, so that
 * lanes use different banks. */
KVANT_INLINE void store_copies(uint2 *entries, int i, int n, const uint2 &entry)
{
    for (int k = 0; k < n; k++)
        entries[i * n + ((k + i * n / 16) & (n - 1))] = entry;
}

/* The code of a triplet: 2 (B + 1) bits of direction, B - 1 bits of norm. */
template <int B> struct Octopus : SteppedChunks<Octopus<B>, 2> {
    static constexpr kvant_cuda_kind KIND = B == 2   ? KVANT_CUDA_OCTOPUS2
                                            : B == 3 ? KVANT_CUDA_OCTOPUS3
                                                     : KVANT_CUDA_OCTOPUS4;
    static constexpr int CHANNELS = 3, BITS = 3 * B + 1, DIRECTION_BITS = B + 1;
    /* Codes of up to 10 bits are looked up as a whole. In codes of 13 bits, the 3 bits of the norm
     * are looked up separately. */
    static constexpr bool HAS_NORM = B == 4;
    static constexpr int SECOND = B == 3 ? 2 : 4; /* width of the plane after the plane of 8 bits */
    static constexpr int ENTRIES = 1 << (HAS_NORM ? 2 * DIRECTION_BITS : BITS), ENTRY_BYTES = 8;
    static constexpr float UNIT = 1;
    /* for the kernels of tiles/ */
    static constexpr int MOST_WARPS = 12, TILE_COPIES = B == 2 ? 16 : 8;
    /* keys and values of one head_dim have the same table */
    static constexpr bool SAME_TABLE = true;

    template <bool LARGE, int D, int TILES> __host__ __device__ static constexpr int copies()
    {
        return B == 2 || (LARGE && D <= 128) ? 16 : LARGE ? 8 : 2;
    }

    /* The bits to which key_words and value_words rotate the narrower planes. With codes of 7 bits,
     * the planes lie side by side. With wider codes, bits 8 and 9 and the norm's bits come into one
     * byte. */
    static constexpr int NEXT = B == 2 ? 4 : 0, LAST = B == 2 ? 6 : 4;

    /* Four codes. w[0], w[1], w[2] are the words of the planes, the widest first. */
    struct Four {
        uint32_t index[2], norms[2]; /* indices: bytes of 7 bits, or halves */

        template <class T> KVANT_INLINE Four(const uint32_t (&w)[3], const T &table)
        {
            if constexpr (B == 2)
                index[0] = bit_select<0x0f0f0f0fu>(w[0], bit_select<0x30303030u>(w[1], w[2])) &
                           0x7f7f7f7fu;
            else {
                const uint32_t high = HAS_NORM ? bit_select<0x0f0f0f0fu>(w[1], w[2]) : w[1];
                index[0] = prmt(w[0], high, 0x5140) & 0x03ff03ffu;
                index[1] = prmt(w[0], high, 0x7362) & 0x03ff03ffu;
                /* the factor is 2^30 + 2^26, which shifts by 2 and by 6 */
                if constexpr (HAS_NORM) {
                    const uint32_t k = prmt(__umulhi(high & 0x1c1c1c1cu, 0x44000000u), 0, 0x4420);
                    norms[0] = prmt(table.norm_low[0], table.norm_low[1], k);
                    norms[1] = prmt(table.norm_high[0], table.norm_high[1], k);
                }
            }
        }

        /* Looks up code i. A product of bytes, or of bytes and halves, computes the address on the
         * multiplier. */
        template <class T> KVANT_INLINE uint2 look_up(const T &table, int i) const
        {
            return look_up_two_words(
                B == 2 ? __dp4a(index[0], 8 * T::COPIES << 8 * i, table.copy)
                       : __dp2a_lo(index[i / 2], 8 * T::COPIES << 8 * (i % 2), table.copy));
        }

        /* The norms of codes i and j as a pair of halves. */
        KVANT_INLINE uint32_t norm(int i, int j) const
        {
            return prmt(norms[0], norms[1], i | (i + 4) << 4 | j << 8 | (j + 4) << 12);
        }
    };

    template <class P>
    KVANT_INLINE static void key_words(const uint32_t *page, int pair, int row, uint32_t (&w)[3][4])
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

    /* The registers of column tiles 2 step and 2 step + 1, from the words of a row tile. */
    template <class T>
    KVANT_INLINE static void key_tiles(const uint32_t (&own)[3], const T &table,
                                       uint32_t (&a)[2][4])
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

    /* Calls use(row tile, registers of column tiles 2 step and 2 step + 1). A lane has chunks 8
     * step + 2 (lane mod 4) and the next one of keys. */
    template <int D, class T, class F>
    KVANT_INLINE static void key_step(const uint8_t *page, int lane, const T &table, int step,
                                      F &&use)
    {
        uint32_t w[3][4];
        key_words<ChunkPlaces<Octopus, D>>(reinterpret_cast<const uint32_t *>(page),
                                           4 * step + (lane & 3), lane >> 2, w);
        unrolled_for (int rt = 0; rt < 4; rt++) {
            uint32_t a[2][4];
            key_tiles({ w[0][rt], w[1][rt], w[2][rt] }, table, a);
            use(rt, a);
        }
    }

    /* The same for one row tile. */
    template <int D, class T>
    KVANT_INLINE static void key_step(const uint8_t *page, int lane, const T &table, int step,
                                      int rt, uint32_t (&a)[2][4])
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

    /* For values: tile 3 g + i has numbers 2 i (in rows r) and 2 i + 1 (in rows r + 8) of the x, y,
     * z of chunks 16 g + r and 16 g + 8 + r. */
    template <int D, class T, class F>
    KVANT_INLINE static void value_step(const uint8_t *page, int lane, const T &table, int g, int m,
                                        F &&use)
    {
        uint32_t a[2][3][4];
        unrolled_for (int part = 0; part < 4; part++) {
            /* part: tokens 8 h further, chunks 8 far further */
            const int h = part % 2, far = part / 2;
            uint32_t w[3];
            value_words<ChunkPlaces<Octopus, D>>(reinterpret_cast<const uint32_t *>(page),
                                                 16 * g + 8 * far + (lane >> 2), lane & 3, h, m, w);
            const Four codes(w, table);
            unrolled_for (int i = 0; i < 2; i++) {
                const uint2 x = codes.look_up(table, i), y = codes.look_up(table, i + 2);
                uint32_t n[3] = { prmt(x.x, y.x, 0x5410), prmt(x.x, y.x, 0x7632),
                                  prmt(x.y, y.y, 0x5410) };
                unrolled_for (int k = 0; k < 3; k++) {
                    const int at = 3 * far + k;
                    a[i][at / 2][at % 2 + 2 * h] =
                        HAS_NORM ? multiply_halves(n[k], codes.norm(i, i + 2)) : n[k];
                }
            }
        }
        unrolled_for (int i = 0; i < 2; i++)
            unrolled_for (int k = 0; k < 3; k++)
                use(3 * g + k, 2 * m + i, a[i][k]);
    }

    /* Fills the table's entries; called by all threads of a block. */
    __device__ static void fill(uint8_t *entries, const kvant_cuda_directions &book, int n_copies)
    {
        for (int i = threadIdx.x; i < ENTRIES; i += blockDim.x) {
            const int mask = (1 << DIRECTION_BITS) - 1;
            const float u = book.direction[i & mask],
                        w = book.direction[i >> DIRECTION_BITS & mask],
                        norm = HAS_NORM ? 1 : book.norm[i >> 2 * DIRECTION_BITS];
            const float z = 1 - fabsf(u) - fabsf(w), fold = fmaxf(-z, 0),
                        x = u - copysignf(fold, u), y = w - copysignf(fold, w),
                        f = norm / sqrtf(x * x + y * y + z * z);
            const uint2 entry = make_uint2(pack_half2(f * x, f * y), pack_half2(f * z, 0));
            store_copies(reinterpret_cast<uint2 *>(entries), i, n_copies, entry);
        }
    }
};

} // namespace kvant
