/* direct_rows.cuh - raw rows of 16 bits for direct.cuh. With bf16 rows, queries and weights are
 * split into two bf16 numbers each, so that they lose no precision. */
#pragma once

#include "direct_codes.cuh"

namespace kvant
{

/* A number as the sum of two bf16 numbers. */
KVANT_INLINE uint16_t part_as_bf16(float x, int part)
{
    const uint32_t top = __float_as_uint(x) & 0xffff0000u;
    return (uint16_t)(part ? __float_as_uint(x - __uint_as_float(top)) >> 16 : top >> 16);
}

template <int HEAD_DIM, bool BF16> struct RawRows : DirectSums<HEAD_DIM / 16> {
    static constexpr int D = HEAD_DIM, T = D / 16, TILES = 1, SUMS = T, PARTS = BF16 ? 2 : 1,
                         QUERIES = BF16 ? 3 : 1, SCALES = 0, WEIGHTS = PARTS, EXTRA_BYTES = 16,
                         BOOK_BYTES = 0, STRIDE = D + 8, ROW_BYTES = 2 * D;
    const DirectLane at;

    KVANT_INLINE RawRows(const kvant_general &, const kvant_general &, const uint8_t *, uint8_t *,
                         int lane)
        : at(lane)
    {
    }

    KVANT_INLINE static void load_books(const kvant_general &, const kvant_general &, uint8_t *,
                                        int, int)
    {
    }

    __host__ __device__ static int stage_bytes(uint32_t)
    {
        return 16 * STRIDE * 2;
    }

    /* Rows that do not exist become 0. */
    KVANT_INLINE static void copy(uint32_t to, const uint8_t *page, uint32_t, int part, int tokens,
                                  int lane)
    {
        constexpr int PIECES = D / 8;
        unrolled_for (int i = 0; i < 16 * PIECES / 32; i++) {
            const int token = (32 * i + lane) / PIECES, piece = lane % PIECES;
            copy_or_clear(to + token * STRIDE * 2 + 16 * piece,
                          page + (16 * part + (token < tokens ? token : 0)) * D * 2 + 16 * piece,
                          token < tokens);
        }
    }

    /* Clears rows from `tokens` on of a step. */
    KVANT_INLINE static void clear(uint8_t *to, int tokens, int lane)
    {
        for (int i = lane; i < (16 - tokens) * STRIDE / 8; i += 32)
            reinterpret_cast<uint4 *>(to + tokens * STRIDE * 2)[i] = uint4{};
    }

    /* Appends the queries' parts as bf16 to the queries as halves. */
    template <class A> KVANT_INLINE static void prepare(A &a)
    {
        if constexpr (BF16)
#pragma unroll 1
            for (int n = a.warp; n < 16; n += a.warps)
                a.each_channel([&](int channel) {
                    a.queries[(8 + n) * a.stride + channel] = __ushort_as_half(
                        part_as_bf16(__half2float(a.queries[n % 8 * a.stride + channel]), n / 8));
                });
    }

    KVANT_INLINE static int place(int channel)
    {
        return channel;
    }

    KVANT_INLINE static int column(int c)
    {
        return c;
    }

    KVANT_INLINE static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1)
    {
        if constexpr (BF16)
            mma_bf16(d, a, b0, b1);
        else
            mma(d, a, b0, b1);
    }

    KVANT_INLINE void keys(const uint8_t *page, const __half *queries, int stride,
                           float (&s)[TILES][4]) const
    {
        const __half *from = reinterpret_cast<const __half *>(page) + (at.lane & 15) * STRIDE +
                             8 * (at.lane >> 4),
                     *columns = queries + (at.lane & 7) * stride + 8 * (at.lane >> 3);
        float sums[2][4] = {};
        unrolled_for (int c = 0; c < T; c += 2) {
            uint32_t a[2][4], b[4];
            unrolled_for (int j = 0; j < 2; j++)
                load_matrices<false>(a[j], from + 16 * (c + j));
            unrolled_for (int part = 0; part < PARTS; part++) {
                load_matrices<false>(b, columns + 8 * (BF16 ? 1 + part : 0) * stride + 16 * c);
                unrolled_for (int j = 0; j < 2; j++)
                    multiply(sums[j], a[j], b[2 * j], b[2 * j + 1]);
            }
        }
        unrolled_for (int i = 0; i < 4; i++)
            s[0][i] = sums[0][i] + sums[1][i];
    }

    KVANT_INLINE float value_scale(const uint8_t *, int, int) const
    {
        return 1;
    }

    KVANT_INLINE static uint32_t pack_weights(int part, const float (&e)[2], float)
    {
        return BF16 ? part_as_bf16(e[0], part) | (uint32_t)part_as_bf16(e[1], part) << 16
                    : pack_half2(e[0], e[1]);
    }

    KVANT_INLINE void values(const uint8_t *page, const uint32_t (&w)[WEIGHTS][TILES][2])
    {
        const __half *from = reinterpret_cast<const __half *>(page) +
                             ((at.lane & 7) + 8 * (at.lane >> 4)) * STRIDE + 8 * (at.lane >> 3 & 1);
        unrolled_for (int i = 0; i < T; i++) {
            uint32_t a[4];
            load_matrices<true>(a, from + 16 * i);
            unrolled_for (int part = 0; part < PARTS; part++)
                multiply(this->o[i], a, w[part][0][0], w[part][0][1]);
        }
    }

    KVANT_INLINE void leave(float *to) const
    {
        this->template leave_as<RawRows>(at, to);
    }
};

} // namespace kvant
