/* direct_polar.cuh - polar codes for direct.cuh. A number is the product of a cosine or a sine for
 * each list of the tree. The row's scale multiplies the sums.
 *
 * Four lanes share two tokens. A lane has the four channels from 4 * pair on of every block of 16,
 * so it reads each angle of list 0 once. All four lanes compute the lists above list 3. Values are
 * decoded like keys, and then transposed. */
#pragma once

#include "direct_codes.cuh"

namespace kvant
{

/* Half i of x, in both halves. */
KVANT_INLINE uint32_t both_halves(uint32_t x, int i)
{
    return prmt(x, x, i ? 0x3232 : 0x1010);
}

template <int HEAD_DIM, int BITS> struct PolarCodes : DirectSums<HEAD_DIM / 16> {
    static constexpr int D = HEAD_DIM, T = D / 16, TILES = 4, SUMS = T, QUERIES = 1, SCALES = 1,
                         WEIGHTS = 1, EXTRA_BYTES = 0, LISTS = D == 128 ? 7 : 6,
                         LIST_BYTES = 16 * 32 * 4, BOOK_BYTES = LISTS * LIST_BYTES;
    const DirectLane at;
    const float root;
    const int metadata[2];
    const uint32_t books, second,
        /* addresses for the lane: cosine and sine as halves, 16 entries for every lane; for lists 2
         * and 3 only the lane's half */
        third;

    KVANT_INLINE PolarCodes(const kvant_general &k, const kvant_general &v, const uint8_t *books_,
                            uint8_t *, int lane)
        : at(lane), root(k.view.polar.sqrt_dim / 16), metadata{ (int)k.metadata, (int)v.metadata },
          books(shared_address(books_) + 4 * lane), second(books + 2 * (lane & 1)),
          third(books + (lane & 2))
    {
    }

    /* Keys and values have the same tables. head_dim is a power of two, so the last pair of a list
     * is like all pairs. */
    KVANT_INLINE static void load_books(const kvant_general &k, const kvant_general &,
                                        uint8_t *books, int thread, int threads)
    {
#pragma unroll 4
        for (int i = thread; i < BOOK_BYTES / 4; i += threads) {
            const float *book = general_polar_book(&k, i / 512, false) + i / 32 % 16;
            reinterpret_cast<uint32_t *>(books)[i] = pack_half2(__ldg(book), __ldg(book + 16));
        }
    }

    KVANT_INLINE static int place(int channel)
    {
        return channel;
    }

    /* The channel of a column. The four columns that a lane has of an operand are four neighbouring
     * channels. */
    KVANT_INLINE static int column(int c)
    {
        return 4 * (c >> 1 & 3) + 2 * (c >> 3) + (c & 1);
    }

    /* The address of the cosine for the angle in nibble n of a word. */
    KVANT_INLINE uint32_t angle(int list, uint32_t word, int n, uint32_t from) const
    {
        return __dp4a((n & 1 ? word : word << 4) & 0xf0f0f0f0u, 8u << 8 * (n >> 1), from) +
               list * LIST_BYTES;
    }

    KVANT_INLINE uint32_t both(int list, uint32_t word, int n) const
    {
        return look_up_word(angle(list, word, n, books));
    }

    /* The cosine, or the sine in odd nodes: the half of the list's tree that the lane is in. */
    KVANT_INLINE uint32_t one(int list, uint32_t word, int n) const
    {
        return look_up_half(angle(list, word, n, list == 3 ? third : second));
    }

    /* Computes a token's numbers as pairs of halves, 4 numbers of each block of 16 channels. The
     * call code(list, i, n) returns the word that has the lane's code i of the list, in nibble n.
     * The numbers are 16 times too large, so that few of them are subnormal. */
    template <class C, class F> KVANT_INLINE void numbers(C &&code, F &&use) const
    {
        uint32_t r[T / 2] = { 0x4c00u }; /* radii of pairs of nodes; the root is 16 */
        int n, m;
        unrolled_for (int list = LISTS - 1; list >= 4; list--)
            unrolled_for (int i = T / 2 - 1; i >= 0; i--)
                if (i < 1 << (LISTS - 1 - list)) {
                    const uint32_t word = code(list, i, n);
                    r[i] = multiply_halves(both(list, word, n), both_halves(r[i / 2], i & 1));
                }
        unrolled_for (int list = 3; list >= 2; list--)
            unrolled_for (int i = 0; i < T / 2; i++) {
                const uint32_t left = code(list, 2 * i, n), right = code(list, 2 * i + 1, m);
                r[i] = multiply_halves(r[i], one(list, left, n) | one(list, right, m) << 16);
            }
        unrolled_for (int h = 0; h < T; h++) {
            const uint32_t word = code(1, h, n),
                           pair = multiply_halves(both(1, word, n), both_halves(r[h / 2], h & 1));
            uint32_t x[2];
            unrolled_for (int e = 0; e < 2; e++) {
                const uint32_t leaf = code(0, 2 * h + e, n);
                x[e] = multiply_halves(both(0, leaf, n), both_halves(pair, e));
            }
            use(h, x);
        }
    }

    /* Computes operands of 16 tokens, [block][register], with tokens as rows. code(list, i, b, n)
     * is for token row + 8 b. */
    template <class C> KVANT_INLINE void operands(C &&code, uint32_t (&a)[T][4]) const
    {
        unrolled_for (int b = 0; b < 2; b++)
            numbers([&](int list, int i, int &n) { return code(list, i, b, n); },
                    [&](int h, const uint32_t(&x)[2]) { a[h][b] = x[0], a[h][2 + b] = x[1]; });
    }

    /* The part of a code's index that is equal for all lanes. In list 0 a lane has two codes per
     * block. */
    KVANT_INLINE static int shared_part(int list, int i)
    {
        return D - (D >> list) +
               (list == 0   ? 8 * (i >> 1) + (i & 1)
                : list <= 2 ? (8 >> list) * i
                            : i);
    }

    KVANT_INLINE void keys(const uint8_t *page, const __half *queries, int stride,
                           float (&s)[TILES][4]) const
    {
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
        const __half *mine = queries + at.row * stride + 4 * at.pair;
#pragma unroll 1
        for (int tile = 0; tile < TILES; tile++) {
            const int k = at.own_tile(tile);
            uint32_t a[T][4];
            float sum[4] = {}, scaled[4];
            operands(
                [&](int list, int i, int b, int &n) {
                    /* code c of operand c / 16 is in nibble 4 (c & 1) + b + 2 (c >> 3 & 1) of lane
                     * c / 2. The lane's part of c moves words or bits by the same distance for all
                     * i. */
                    const int fixed = shared_part(list, i),
                              lane_part = list == 0   ? at.pair
                                          : list == 1 ? at.pair >> 1
                                                      : 0,
                              half = list == 1   ? at.pair & 1
                                     : list == 2 ? at.pair >> 1
                                                 : 0;
                    n = 4 * (list == 1 || list == 2 ? 0 : fixed & 1) + b + 2 * (fixed >> 3 & 1);
                    const uint32_t word = nibbles<BITS, true, T>(
                        words, k, fixed >> 4, 4 * at.row + (fixed >> 1 & 3) + lane_part);
                    return list == 1 || list == 2 ? word >> 16 * half : word;
                },
                a);
            unrolled_for (int h = 0; h < T; h++) {
                const uint2 q = *reinterpret_cast<const uint2 *>(mine + 16 * h);
                mma(sum, a[h], q.x, q.y);
            }
            unrolled_for (int r = 0; r < 2; r++) {
                const float scale = root * stored_half(page, metadata[0], 16 * k + 8 * r + at.row);
                unrolled_for (int h = 0; h < 2; h++)
                    scaled[2 * r + h] = scale * sum[2 * r + h];
            }
            put_row(s, k, scaled);
        }
    }

    KVANT_INLINE float value_scale(const uint8_t *page, int, int token) const
    {
        return root * stored_half(page, metadata[1], token);
    }

    KVANT_INLINE static uint32_t pack_weights(int, const float (&e)[2], float scale)
    {
        return pack_half2(e[0] * scale, e[1] * scale);
    }

    KVANT_INLINE void values(const uint8_t *page, const uint32_t (&w)[WEIGHTS][TILES][2])
    {
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
#pragma unroll 1
        for (int k = 0; k < TILES; k++) {
            uint32_t a[T][4], b[2] = { w[0][0][0], w[0][0][1] };
            unrolled_for (int i = 1; i < TILES; i++)
                unrolled_for (int j = 0; j < 2; j++)
                    b[j] = i == k ? w[0][i][j] : b[j];
            operands(
                [&](int list, int i, int bit, int &n) {
                    /* code c of operand c / 16 is in nibble (c >> 3 & 1) + 2 bit of row c & 7 and
                     * column row. */
                    const int fixed = shared_part(list, i), lane_part = list == 0   ? 2 * at.pair
                                                                        : list == 1 ? at.pair
                                                                        : list == 2 ? at.pair >> 1
                                                                                    : 0;
                    n = (fixed >> 3 & 1) + 2 * bit;
                    return nibbles<BITS, false, T>(words, fixed >> 4, k,
                                                   4 * ((fixed & 7) + lane_part) + (at.row >> 1)) >>
                           16 * (at.row & 1);
                },
                a);
            unrolled_for (int h = 0; h < T; h++) {
                const uint32_t t[4] = { transpose8x8(a[h][0]), transpose8x8(a[h][2]),
                                        transpose8x8(a[h][1]), transpose8x8(a[h][3]) };
                mma(this->o[h], t, b[0], b[1]);
            }
        }
    }

    KVANT_INLINE void leave(float *to) const
    {
        this->template leave_as<PolarCodes>(at, to);
    }
};

} // namespace kvant
