/* direct_tiers.cuh - tiers of channels for direct.cuh. Queries are put into a page's order of
 * channels and rotated by its rotations before they are multiplied with levels. A page's sums of
 * levels are rotated back and reordered.
 *
 * The sums of all pages are in shared memory, because every page adds to channels in its own
 * order. */
#pragma once

#include "../any/decode_planes.cuh"
#include "chunk_operands.cuh"

namespace kvant
{

/* A lane's place in an operand: rows row and row + 8 of A, columns 2 pair and + 1. */
struct DirectLane {
    int lane, row, pair;

    KVANT_INLINE DirectLane(int lane_) : lane(lane_), row(lane_ >> 2), pair(lane_ & 3)
    {
    }
};

/* The levels of pairs of codes, as halves in shared memory. There are COPIES of each entry, so that
 * lanes use different banks. The offset of a pair is computed by a product of bytes whose upper
 * halves are codes. */
template <int BITS, int COPIES> struct PairBook {
    static constexpr int STRIDE = COPIES / 4, BYTES = 4 * COPIES << 2 * BITS;
    static_assert(STRIDE << BITS < 256, "factors are bytes");
    uint32_t at; /* offset of the lane's copy */

    KVANT_INLINE PairBook(const void *memory, int lane)
        : at(shared_address(memory) + 4 * (lane & (COPIES - 1)))
    {
    }

    /* Looks up the codes in bytes j and j + 2. */
    KVANT_INLINE uint32_t look_up(uint32_t bytes, int j) const
    {
        return look_up_word(__dp4a(bytes, (STRIDE | (uint32_t)STRIDE << BITS << 16) << 8 * j, at));
    }

    KVANT_INLINE static void load(void *memory, const float *levels, int thread, int threads)
    {
#pragma unroll 4
        for (int i = thread; i < BYTES / 4; i += threads)
            static_cast<uint32_t *>(memory)[i] =
                pack_half2(__ldg(levels + (i / COPIES & ((1 << BITS) - 1))),
                           __ldg(levels + (i / COPIES >> BITS)));
    }
};

KVANT_INLINE float stored_half(const uint8_t *page, int byte, int at)
{
    return __half2float(__ushort_as_half(reinterpret_cast<const uint16_t *>(page + byte)[at]));
}

/* The codes of a tier (chunk_place), each a chunk: pairs of codes in bytes j and j + 2 of a word,
 * from bit 4 on. */
template <int BITS> struct TierCodes {
    static constexpr int FIRST = BITS >= 4 ? 4 : 2,
                         REST = BITS - FIRST; /* bits of the first and of the second plane */
    int channels;

    /* For keys: tokens 16 k + row (j = 0) and 8 further (j = 1); channels 2 c and 2 c + 1. LOW: the
     * lowest bit. */
    template <int P, int LOW>
    KVANT_INLINE static uint32_t keys(const uint32_t *plane, int c, int k, int row)
    {
        return rotate_left(plane[4 * (P * c + (row & (P - 1))) + k], LOW - row / P * P) &
               0x01010101u * (((1 << P) - 1) << LOW);
    }

    KVANT_INLINE uint32_t keys(const uint32_t *words, int c, int k, int row) const
    {
        const uint32_t x = keys<FIRST, 4>(words, c, k, row);
        if constexpr (REST > 0)
            return x | keys<REST, 4 + FIRST>(words + 2 * FIRST * channels, c, k, row);
        return x;
    }

    /* For values: tokens 16 k + 2 pair and the next one (j = 0), and 8 further (j = 1), of a
     * channel. */
    KVANT_INLINE uint32_t values(const uint32_t *words, int channel, int k, int pair) const
    {
        if constexpr (FIRST == 4) {
            const uint32_t *at = words + 2 * pair * channels + channel;
            return (rotate_left(at[0], 4 - 4 * k) & 0x00f000f0u) |
                   (rotate_left(at[channels], 12 - 4 * k) & 0xf000f000u);
        }
        const uint32_t x = rotate_left(words[pair * channels + channel], 4 - 2 * k) & 0x30303030u;
        if constexpr (REST > 0) { /* bits 0 and 4 go to bits 6 and 14 */
            const uint32_t high = words[2 * FIRST * channels + (pair >> 1) * channels + channel] >>
                                  (8 * (pair & 1) + k);
            return x | ((high & 0x00110011u) * 1088 & 0x40404040u);
        }
        return x;
    }
};

/* Finds the channel at every place in the page's order, in which outliers come first. Called by a
 * warp. */
template <int D>
KVANT_INLINE void find_order(const kvant_general &g, const uint8_t *page, uint16_t *order, int lane)
{
    const uint32_t *mask = reinterpret_cast<const uint32_t *>(page + g.view.tiers.mask);
    __syncwarp();
    unrolled_for (int i = 0; i < D / 32; i++)
        order[general_rank(mask, D, 32 * i + lane)] = (uint16_t)(32 * i + lane);
    __syncwarp();
}

/* LOW: bits of a code of the second tier; a code of the first tier has one bit more. */
template <int HEAD_DIM, int LOW> struct TieredCodes {
    static constexpr int D = HEAD_DIM, T = D / 16, T0 = T / 4, TILES = 4,
                         SUM_BYTES = D * 8 * (int)sizeof(float), EXTRA_BYTES = SUM_BYTES + 2 * D,
                         COPIES = LOW == 2 ? 8 : 4;
    using HighBook = PairBook<LOW + 1, COPIES>;
    using LowBook = PairBook<LOW, COPIES>;
    static constexpr int BOOK_BYTES = 2 * (LowBook::BYTES + HighBook::BYTES);
    using HighCodes = TierCodes<LOW + 1>;
    using LowCodes = TierCodes<LOW>;
    const kvant_general &k, &v;
    const DirectLane at;
    const uint8_t *books;
    float *sums;     /* [channel][row], at the beginning of the warp's memory */
    uint16_t *order; /* the page's channels, outliers first */

    KVANT_INLINE TieredCodes(const kvant_general &k_, const kvant_general &v_,
                             const uint8_t *books_, uint8_t *own, int lane)
        : k(k_), v(v_), at(lane), books(books_), sums(reinterpret_cast<float *>(own)),
          order(reinterpret_cast<uint16_t *>(own + SUM_BYTES))
    {
        for (int i = lane; i < D * 8 / 4; i += 32)
            reinterpret_cast<uint4 *>(sums)[i] = uint4{};
        __syncwarp();
    }

    KVANT_INLINE static void load_books(const kvant_general &k, const kvant_general &v,
                                        uint8_t *books, int thread, int threads)
    {
        unrolled_for (int i = 0; i < 2; i++) {
            const kvant_general &g = i ? v : k;
            HighBook::load(books, g.tables + g.view.books[0].values, thread, threads);
            books += HighBook::BYTES;
            LowBook::load(books, g.tables + g.view.books[1].values, thread, threads);
            books += LowBook::BYTES;
        }
    }

    /* 16 columns of the rotation (for values in the order of channels, for keys in the order of
     * codes), and 16 rows (halves.h). */
    KVANT_INLINE void fragment(const kvant_general &g, int i, int j, uint32_t (&a)[4]) const
    {
        const uint4 x = __ldg(reinterpret_cast<const uint4 *>(g.tables + g.halves) +
                              (i * T + j) * 32 + at.lane);
        a[0] = x.x, a[1] = x.z, a[2] = x.y, a[3] = x.w;
    }

    /* y = rotation x for both tiers. x: 16 channels of 8 rows per operand B. use(tile, y) receives
     * the results. */
    template <class F>
    KVANT_INLINE void rotate_tiles(const kvant_general &g, const uint32_t (&x)[T][2], F &&use) const
    {
        unrolled_for (int i = 0; i < T; i++) {
            const int first = i < T0 ? 0 : T0, end = i < T0 ? T0 : T;
            float y[4] = {};
            unrolled_for (int j = first; j < end; j++) {
                uint32_t a[4];
                fragment(g, i, j, a);
                mma(y, a, x[j][0], x[j][1]);
            }
            use(i, y);
        }
    }

    /* The queries in the order and rotation of a page, as operands. */
    KVANT_INLINE void turned_queries(const __half *queries, int stride, uint32_t (&q)[T][2]) const
    {
        const uint16_t *mine = reinterpret_cast<const uint16_t *>(queries) + at.row * stride;
        uint32_t x[T][2];
        unrolled_for (int i = 0; i < T; i++)
            unrolled_for (int h = 0; h < 2; h++) {
                const uint32_t channels =
                    *reinterpret_cast<const uint32_t *>(order + 16 * i + 8 * h + 2 * at.pair);
                x[i][h] = mine[channels & 0xffffu] | (uint32_t)mine[channels >> 16] << 16;
            }
        rotate_tiles(k, x, [&](int i, const float(&y)[4]) {
            q[i][0] = transpose8x8(pack_half2(y[0], y[1])),
            q[i][1] = transpose8x8(pack_half2(y[2], y[3]));
        });
    }

    template <class C, class Book>
    KVANT_INLINE void score(const C &codes, const uint32_t *words, const Book &book, int tile,
                            int token, const uint32_t (&b)[2], float (&sum)[4]) const
    {
        uint32_t a[4];
        unrolled_for (int h = 0; h < 2; h++) {
            const uint32_t pairs = codes.keys(words, 8 * tile + 4 * h + at.pair, token, at.row);
            a[2 * h] = book.look_up(pairs, 0), a[2 * h + 1] = book.look_up(pairs, 1);
        }
        mma(sum, a, b[0], b[1]);
    }

    KVANT_INLINE void keys(const uint8_t *page, const __half *queries, int stride,
                           float (&s)[TILES][4]) const
    {
        const HighBook high(books, at.lane);
        const LowBook low(books + HighBook::BYTES, at.lane);
        const uint32_t *of_high = reinterpret_cast<const uint32_t *>(page + k.view.tiers.codes[0]),
                       *of_low = reinterpret_cast<const uint32_t *>(page + k.view.tiers.codes[1]);
        uint32_t q[T][2];
        find_order<D>(k, page, order, at.lane);
        turned_queries(queries, stride, q);
        unrolled_for (int t = 0; t < TILES; t++) {
            float sum[2][4] = {};
            unrolled_for (int i = 0; i < T0; i++)
                score(HighCodes{ D / 4 }, of_high, high, i, t, q[i], sum[0]);
            unrolled_for (int i = T0; i < T; i++)
                score(LowCodes{ D - D / 4 }, of_low, low, i - T0, t, q[i], sum[1]);
            unrolled_for (int r = 0; r < 2; r++) {
                const int token = 16 * t + 8 * r + at.row;
                const float first = stored_half(page, (int)k.view.tiers.scales[0], token),
                            second = stored_half(page, (int)k.view.tiers.scales[1], token);
                unrolled_for (int h = 0; h < 2; h++)
                    s[t][2 * r + h] = first * sum[0][2 * r + h] + second * sum[1][2 * r + h];
            }
        }
    }

    KVANT_INLINE float value_scale(const uint8_t *page, int i, int token) const
    {
        return stored_half(page, (int)v.view.tiers.scales[i], token);
    }

    template <class C, class Book>
    KVANT_INLINE void sum_up(const C &codes, const uint32_t *words, const Book &book, int tile,
                             const uint32_t (&w)[TILES][2], float (&sum)[4]) const
    {
        unrolled_for (int t = 0; t < TILES; t++) {
            uint32_t a[4];
            unrolled_for (int h = 0; h < 2; h++) {
                const uint32_t pairs = codes.values(words, 16 * tile + 8 * h + at.row, t, at.pair);
                a[h] = book.look_up(pairs, 0), a[2 + h] = book.look_up(pairs, 1);
            }
            mma(sum, a, w[t][0], w[t][1]);
        }
    }

    KVANT_INLINE float2 &sum_of(int channel) const
    {
        return *reinterpret_cast<float2 *>(sums + 8 * channel + 2 * at.pair);
    }

    KVANT_INLINE void add_to(int channel, float x, float y) const
    {
        float2 &to = sum_of(channel);
        to = make_float2(to.x + x, to.y + y);
    }

    /* The sums of a page are at most 2^8 x 64 times the largest level. The largest level is below
     * 3. Divided by 4 they fit fp16. */
    KVANT_INLINE void values(const uint8_t *page, const uint32_t (&w)[2][TILES][2])
    {
        const uint8_t *book = books + LowBook::BYTES + HighBook::BYTES;
        const HighBook high(book, at.lane);
        const LowBook low(book + HighBook::BYTES, at.lane);
        const uint32_t *of_high = reinterpret_cast<const uint32_t *>(page + v.view.tiers.codes[0]),
                       *of_low = reinterpret_cast<const uint32_t *>(page + v.view.tiers.codes[1]);
        uint32_t x[T][2];
        unrolled_for (int i = 0; i < T; i++) {
            float sum[4] = {};
            if (i < T0)
                sum_up(HighCodes{ D / 4 }, of_high, high, i, w[0], sum);
            else
                sum_up(LowCodes{ D - D / 4 }, of_low, low, i - T0, w[1], sum);
            unrolled_for (int h = 0; h < 2; h++)
                x[i][h] = transpose8x8(pack_half2(0.25f * sum[2 * h], 0.25f * sum[2 * h + 1]));
        }
        find_order<D>(v, page, order, at.lane);
        rotate_tiles(v, x, [&](int i, const float(&y)[4]) {
            unrolled_for (int h = 0; h < 2; h++)
                add_to(order[16 * i + 8 * h + at.row], 4 * y[2 * h], 4 * y[2 * h + 1]);
        });
    }

    KVANT_INLINE void add(int i, const float (&x)[4]) const
    {
        unrolled_for (int h = 0; h < 2; h++)
            add_to(16 * i + 8 * h + at.row, x[2 * h], x[2 * h + 1]);
    }

    KVANT_INLINE void shrink(const float (&by)[2]) const
    {
        unrolled_for (int i = 0; i < D / 8; i++) {
            float2 &x = sum_of(8 * i + at.row);
            x = make_float2(x.x * by[0], x.y * by[1]);
        }
    }
};

} // namespace kvant
