/* direct_sketch.cuh - codebooks with a sketch of the codes' residual, for direct.cuh: <q, y> is
 * scale <q, levels> + norm <S q, signs>. Sums of signs are projected back once, at the end. */
#pragma once

#include "direct_codes.cuh"

namespace kvant
{

constexpr float ROOT_HALF_PI = 1.2533141373155003f;

/* BITS: bits of a code; 0 for a sketch alone. */
template <int HEAD_DIM, int BITS> struct SketchedCodes : DirectSums<2 * HEAD_DIM / 16> {
    static constexpr int D = HEAD_DIM, T = D / 16, TILES = 4, SUMS = 2 * T, QUERIES = 2, SCALES = 2,
                         WEIGHTS = 2, EXTRA_BYTES = 0, COPIES = 32;
    using Book = PairBook<BITS, COPIES>;
    static constexpr int BOOK_BYTES = 2 * Book::BYTES;
    const DirectLane at;
    const Book keys_book, values_book;
    int metadata[2][2]; /* for keys and for values: offsets of scales and norms in the page */

    KVANT_INLINE SketchedCodes(const kvant_general &k, const kvant_general &v, const uint8_t *books,
                               uint8_t *, int lane)
        : at(lane), keys_book(books, lane), values_book(books + Book::BYTES, lane),
          metadata{ { (int)k.metadata, (int)k.view.sketch_norms },
                    { (int)v.metadata, (int)v.view.sketch_norms } }
    {
    }

    KVANT_INLINE static void load_books(const kvant_general &k, const kvant_general &v,
                                        uint8_t *books, int thread, int threads)
    {
        Book::load(books, k.tables + k.view.books[0].values, thread, threads);
        Book::load(books + Book::BYTES, v.tables + v.view.books[0].values, thread, threads);
    }

    /* Queries lie in the order of operands: 8 numbers of a lane, for two column tiles. */
    KVANT_INLINE static int place(int channel)
    {
        return (channel & ~31) + 8 * (channel >> 1 & 3) + 4 * (channel >> 4 & 1) +
               2 * (channel >> 3 & 1) + (channel & 1);
    }

    KVANT_INLINE static int column(int c)
    {
        return c;
    }

    /* The register's codes are bits q and 16 + q. */
    KVANT_INLINE static void sign_operand(uint32_t word, int tile, uint32_t (&a)[4])
    {
        unrolled_for (int q = 0; q < 4; q++)
            a[q] = 0x3c003c00u | (__funnelshift_l(word, word, 15 - 4 * tile - q) & 0x80008000u);
    }

    KVANT_INLINE void keys(const uint8_t *page, const __half *queries, int stride,
                           float (&s)[TILES][4]) const
    {
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page),
                       *signs = words + BITS * 2 * D;
        const __half *mine = queries + at.row * stride + 8 * at.pair;
#pragma unroll 1
        for (int k = 0; k < TILES; k++) {
            float sums[2][4] = {}, both[4];
            unrolled_for (int c = 0; c < T; c += 2) {
                const uint4 first = *reinterpret_cast<const uint4 *>(mine + 16 * c),
                            second = *reinterpret_cast<const uint4 *>(mine + 8 * stride + 16 * c);
                const uint32_t word = signs[(32 * (c / 4) + at.lane) * 4 + k];
                unrolled_for (int j = 0; j < 2; j++) {
                    uint32_t a[4];
                    if (BITS > 0) {
                        keys_book.operand(nibbles<BITS, true, T>(words, k, c + j, at.lane), a);
                        mma(sums[0], a, j ? first.z : first.x, j ? first.w : first.y);
                    }
                    sign_operand(word, (c + j) & 3, a);
                    mma(sums[1], a, j ? second.z : second.x, j ? second.w : second.y);
                }
            }
            unrolled_for (int r = 0; r < 2; r++) {
                const int token = 16 * k + 8 * r + at.row;
                const float scale = BITS > 0 ? stored_half(page, metadata[0][0], token) : 0,
                            norm = stored_half(page, metadata[0][1], token);
                unrolled_for (int h = 0; h < 2; h++)
                    both[2 * r + h] = scale * sums[0][2 * r + h] + norm * sums[1][2 * r + h];
            }
            put_row(s, k, both);
        }
    }

    KVANT_INLINE float value_scale(const uint8_t *page, int i, int token) const
    {
        return BITS > 0 || i ? stored_half(page, metadata[1][i], token) : 0;
    }

    KVANT_INLINE static uint32_t pack_weights(int, const float (&e)[2], float scale)
    {
        return pack_half2(e[0] * scale, e[1] * scale);
    }

    KVANT_INLINE void values(const uint8_t *page, const uint32_t (&w)[WEIGHTS][TILES][2])
    {
        const uint32_t *words = reinterpret_cast<const uint32_t *>(page),
                       *signs = words + BITS * 2 * D;
#pragma unroll 1
        for (int n = 0; n < TILES / 2; n++) {
            uint32_t b[WEIGHTS][2][2];
            unrolled_for (int i = 0; i < WEIGHTS; i++)
                unrolled_for (int k = 0; k < 2; k++)
                    unrolled_for (int j = 0; j < 2; j++)
                        b[i][k][j] = n ? w[i][2 + k][j] : w[i][k][j];
            unrolled_for (int i = 0; i < T; i++) {
                const uint32_t word = signs[128 * (i / 4) + at.lane * 4 + i % 4] >> 8 * n;
                unrolled_for (int k = 0; k < 2; k++) {
                    uint32_t a[4];
                    if (BITS > 0) {
                        values_book.operand(nibbles<BITS, false, T>(words, i, 2 * n + k, at.lane),
                                            a);
                        mma(this->o[i], a, b[0][k][0], b[0][k][1]);
                    }
                    sign_operand(word, k, a);
                    mma(this->o[T + i], a, b[1][k][0], b[1][k][1]);
                }
            }
        }
    }

    /* Computes S q, or projects sums back. row lies in shared memory; result(channel, number)
     * receives the results. */
    template <class A, class F>
    KVANT_INLINE static void project(A &a, const kvant_rotation_position &place,
                                     const float *numbers, float *row, bool back, F &&result)
    {
        if (!place.dense) {
            __syncwarp();
            if (!back)
                a.each_channel([&](int channel) { row[channel] *= numbers[channel]; });
            a.rotate_row(row, D, place.scale);
            a.each_channel([&](int channel) {
                result(channel, ROOT_HALF_PI * row[channel] * (back ? numbers[channel] : 1));
            });
            return;
        }
        __syncwarp();
        float x[D / 32] = {};
#pragma unroll 4
        for (int j = 0; j < D; j++)
            unrolled_for (int i = 0; i < D / 32; i++)
                x[i] += row[j] * __ldg(numbers + (back ? j * D + 32 * i + a.lane
                                                       : (32 * i + a.lane) * D + j));
        unrolled_for (int i = 0; i < D / 32; i++)
            result(32 * i + a.lane, ROOT_HALF_PI * x[i]);
    }

    template <class A> KVANT_INLINE static void prepare(A &a)
    {
        const kvant_general &g = a.p.keys.general;
        float *row = a.results() + a.warp * D;
#pragma unroll 1
        for (int n = a.warp; n < 8; n += a.warps) {
            __syncwarp(); /* the preceding row has been read */
            a.each_channel([&](int channel) {
                row[channel] = __half2float(a.queries[n * a.stride + place(channel)]);
            });
            project(a, g.view.projection, g.tables + g.view.projection.numbers, row, false,
                    [&](int channel, float x) {
                        a.queries[(8 + n) * a.stride + place(channel)] = __float2half_rn(x);
                    });
        }
    }

    template <class A> KVANT_INLINE static void turn_back(A &a, int n)
    {
        const kvant_general &g = a.p.values.general;
        project(a, g.view.projection, g.tables + g.view.projection.numbers,
                a.results() + (8 + n) * D, true,
                [&](int channel, float x) { a.results()[n * D + channel] += x; });
    }

    KVANT_INLINE void leave(float *to) const
    {
        this->template leave_as<SketchedCodes>(at, to);
    }
};

} // namespace kvant
