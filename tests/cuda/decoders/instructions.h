/* instructions.h - instructions of a warp, for C++ programs: exchanges of numbers between lanes,
 * products of matrices (ptx.cuh), and instructions of one lane that CUDA C++ has no operator for.
 *
 * The program defines own_lane() and exchanged() before it includes this file. */
#pragma once

template <class T> T __shfl_sync(unsigned, T x, int from)
{
    return exchanged(x, [&](auto &&lane) { return lane(from & 31); });
}

template <class T> T __shfl_xor_sync(unsigned mask, T x, int with)
{
    return __shfl_sync(mask, x, own_lane() ^ with);
}

inline bool __any_sync(unsigned, bool x)
{
    return exchanged(x, [](auto &&lane) {
        bool any = false;
        for (int i = 0; i < LANES; i++)
            any |= lane(i);
        return any;
    });
}

inline uint32_t __ballot_sync(unsigned, bool x)
{
    return exchanged(x, [](auto &&lane) {
        uint32_t all = 0;
        for (int i = 0; i < LANES; i++)
            all |= (uint32_t)lane(i) << i;
        return all;
    });
}

inline bool __all_sync(unsigned mask, bool x)
{
    return !__any_sync(mask, !x);
}

template <class T> T __reduce_max_sync(unsigned, T x)
{
    return exchanged(x, [](auto &&lane) {
        T most = lane(0);
        for (int i = 1; i < LANES; i++)
            most = max(most, lane(i));
        return most;
    });
}

template <class T> T __reduce_min_sync(unsigned, T x)
{
    return exchanged(x, [](auto lane) {
        T least = lane(0);
        for (int i = 1; i < LANES; i++)
            least = min(least, lane(i));
        return least;
    });
}

inline uint32_t __brev(uint32_t x)
{
    uint32_t y = 0;
    for (int i = 0; i < 32; i++)
        y |= (x >> i & 1) << (31 - i);
    return y;
}

inline uint32_t __viaddmin_u32(uint32_t a, uint32_t b, uint32_t c)
{
    return min(a + b, c);
}

inline uint32_t __vibmin_u16x2(uint32_t a, uint32_t b, bool *high, bool *low)
{
    *high = a >> 16 <= b >> 16;
    *low = (a & 0xffff) <= (b & 0xffff);
    return (*high ? a : b) & 0xffff0000u | (*low ? a : b) & 0xffffu;
}

template <class T> T __shfl_up_sync(unsigned mask, T x, int by)
{
    return __shfl_sync(mask, x, max(own_lane() - by, 0));
}

inline uint32_t __reduce_add_sync(unsigned, uint32_t x)
{
    return exchanged(x, [](auto &&lane) {
        uint32_t sum = 0;
        for (int i = 0; i < LANES; i++)
            sum += lane(i);
        return sum;
    });
}

namespace kvant
{

template <class T> void keep(const T *&)
{
}

inline float inverse_root(float x)
{
    return 1 / sqrtf(x);
}

inline float exp2_fast(float x)
{
    return exp2f(x);
}

inline float log2_fast(float x)
{
    return log2f(x);
}

inline uint32_t pack_half2(float low, float high)
{
    return kvant_half_from_float(low) | (uint32_t)kvant_half_from_float(high) << 16;
}

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector)
{
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t x = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t byte = (uint32_t)(both >> 8 * (selector >> 4 * i & 7)) & 255,
                       sign = byte >> 7 ? 255 : 0;
        x |= (selector >> 4 * i & 8 ? sign : byte) << 8 * i;
    }
    return x;
}

template <uint32_t MASK> uint32_t bit_select(uint32_t a, uint32_t b)
{
    return (a & MASK) | (b & ~MASK);
}

inline uint32_t half_of(uint32_t pair, int i)
{
    return pair >> 16 * i & 0xffffu;
}

/* ---- matrices, laid out as in the PTX ISA, "Matrix Fragments" ---- */

struct Operands {
    uint32_t a[4], b[2];
};

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    struct Numbers {
        float a[8], b[4];
    } own;
    for (int i = 0; i < 8; i++)
        own.a[i] = kvant_half_to_float((uint16_t)half_of(a[i / 2], i % 2));
    for (int i = 0; i < 4; i++)
        own.b[i] = kvant_half_to_float((uint16_t)half_of(i < 2 ? b0 : b1, i % 2));
    exchanged(own, [&](auto &&lane) {
        for (int i = 0; i < 4; i++) {
            const int row = own_lane() / 4 + 8 * (i / 2), column = 2 * (own_lane() % 4) + i % 2;
            double sum = d[i];
            for (int k = 0; k < 16; k++)
                sum +=
                    (double)lane(4 * (row % 8) + k % 8 / 2).a[2 * (row / 8) + k / 8 * 4 + k % 2] *
                    lane(4 * column + k % 8 / 2).b[k / 8 * 2 + k % 2];
            d[i] = (float)sum;
        }
        return 0;
    });
}

/* A is 16 x 32, and a lane has 4 neighbouring columns of it. */
template <bool A_SIGNED, bool B_SIGNED>
void mma_bytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    struct Sums {
        int32_t of[4];
    };
    const Sums sums =
        exchanged(Operands{ { a[0], a[1], a[2], a[3] }, { b0, b1 } }, [&](auto &&lane) {
            const auto number = [](uint32_t x, int i, bool is_signed) {
                return is_signed ? (int)(int8_t)(x >> 8 * i) : (int)(x >> 8 * i & 255);
            };
            Sums s;
            for (int i = 0; i < 4; i++) {
                const int row = own_lane() / 4 + 8 * (i / 2), column = 2 * (own_lane() % 4) + i % 2;
                s.of[i] = d[i];
                for (int k = 0; k < 32; k++)
                    s.of[i] += number(lane(4 * (row % 8) + k % 16 / 4).a[row / 8 + 2 * (k / 16)],
                                      k % 4, A_SIGNED) *
                               number(lane(4 * column + k % 16 / 4).b[k / 16], k % 4, B_SIGNED);
            }
            return s;
        });
    std::copy(sums.of, sums.of + 4, d);
}

inline uint32_t transpose8x8(uint32_t x)
{
    return exchanged(x, [](auto &&lane) {
        const auto number = [&](int row, int column) {
            return half_of(lane(4 * row + column / 2), column % 2);
        };
        const int row = own_lane() / 4, column = 2 * (own_lane() % 4);
        return number(column, row) | number(column + 1, row) << 16;
    });
}

template <bool TRANSPOSED> void load_matrices(uint32_t (&m)[4], const __half *row)
{
    struct Registers {
        uint32_t of[4];
    };
    const Registers x = exchanged(row, [](auto &&lane) {
        Registers r;
        for (int i = 0; i < 4; i++) {
            const auto number = [&](int line, int column) {
                return (uint32_t)lane(8 * i + line)[column].bits;
            };
            const int line = own_lane() / 4, column = 2 * (own_lane() % 4);
            r.of[i] = TRANSPOSED ? number(column, line) | number(column + 1, line) << 16
                                 : number(line, column) | number(line, column + 1) << 16;
        }
        return r;
    });
    std::copy(x.of, x.of + 4, m);
}

} // namespace kvant
