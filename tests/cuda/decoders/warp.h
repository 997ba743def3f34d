/* warp.h - the parts of CUDA that decoders of tiles (any/decode_*.cuh) and decode kernels'
 * pages (src/cuda/attention) use, for a warp of 32 contexts in a C++ program.
 *
 * A lane runs until the warp synchronises, then the next lane runs. So lanes exchange numbers as on
 * a GPU, and an exchange without a synchronisation reads the number that the lane before it left.
 * numbers.h has the numbers. */
#pragma once

#include <ucontext.h>

#include "numbers.h"

constexpr int LANES = 32;
struct Warp {
    ucontext_t lanes[LANES], caller;
    uint64_t exchange[LANES][8];
    int lane;
    alignas(256) uint8_t shared[1 << 18];
};

extern Warp warp;

inline void meet()
{
    const int own = warp.lane;
    warp.lane = (own + 1) % LANES;
    swapcontext(&warp.lanes[own], &warp.lanes[warp.lane]);
    warp.lane = own;
}

/* Runs `lane` on all lanes; it reads warp.lane. */
inline void run_lanes(void (*lane)())
{
    static uint8_t stacks[LANES][1 << 18];
    static void (*work)();
    work = lane;
    const auto run = [] {
        work();
        warp.lane++; /* the next lane finishes next */
    };
    for (int i = LANES - 1; i >= 0; i--) {
        getcontext(&warp.lanes[i]);
        warp.lanes[i].uc_stack.ss_sp = stacks[i];
        warp.lanes[i].uc_stack.ss_size = sizeof stacks[i];
        warp.lanes[i].uc_link = i + 1 < LANES ? &warp.lanes[i + 1] : &warp.caller;
        makecontext(&warp.lanes[i], (void (*)())run, 0);
    }
    warp.lane = 0;
    swapcontext(&warp.caller, &warp.lanes[0]);
}

/* Returns of(values of all lanes), as long as the values are there. */
template <class T, class F> auto exchanged(const T &own, F &&of)
{
    static_assert(sizeof(T) <= sizeof warp.exchange[0], "too much for an exchange");
    memcpy(warp.exchange[warp.lane], &own, sizeof own);
    meet();
    const auto lane = [](int i) {
        T x;
        memcpy(&x, warp.exchange[i], sizeof x);
        return x;
    };
    const auto result = of(lane);
    meet();
    return result;
}

/* ---- lanes ---- */

inline void __syncwarp()
{
    meet();
}

inline void __syncthreads()
{
    meet();
}

template <class T> T __shfl_sync(unsigned, T x, int from)
{
    return exchanged(x, [&](auto &&lane) { return lane(from & 31); });
}

template <class T> T __shfl_xor_sync(unsigned mask, T x, int with)
{
    return __shfl_sync(mask, x, warp.lane ^ with);
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
    return __shfl_sync(mask, x, max(warp.lane - by, 0));
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

struct Place3 {
    unsigned x;
};
#define threadIdx (Place3{ (unsigned)warp.lane })
#define blockDim (Place3{ LANES })

inline void *__cvta_shared_to_generic(size_t at)
{
    return warp.shared + at;
}

namespace kvant
{

inline uint32_t shared_address(const void *p)
{
    return (uint32_t)(static_cast<const uint8_t *>(p) - warp.shared);
}

template <class T> void keep(const T *&)
{
}

inline float inverse_root(float x)
{
    return 1 / sqrtf(x);
}

/* Barriers of teams do nothing, because a test has one warp. */
inline void meet_at(int, int)
{
    exit(1);
}

inline float exp2_fast(float x)
{
    return exp2f(x);
}

inline float log2_fast(float x)
{
    return log2f(x);
}

inline uint32_t look_up_word(uint32_t address)
{
    uint32_t x;
    memcpy(&x, warp.shared + address, sizeof x);
    return x;
}

inline uint2 look_up_two_words(uint32_t address)
{
    uint2 x;
    memcpy(&x, warp.shared + address, sizeof x);
    return x;
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

/* One lane decodes a row for all lanes, because in C++ a team of the general form is one lane. */
inline void decode_general(const kvant_general *g, const uint8_t *page, int token, float *space,
                           int lane, int kv_head)
{
    float *a = space + g->head_dim;
    const general_space s{ space, a, a + g->head_dim, reinterpret_cast<uint32_t *>(a), nullptr };
    if (lane == 0)
        general_decode(general_team{ 0, 1, kv_head }, g, page, token, &s);
    __syncwarp();
}

/* ---- matrices, laid out as in the PTX ISA, "Matrix Fragments" ---- */

struct Operands {
    uint32_t a[4], b[2];
};

template <class N>
void multiply_matrices(N &&number, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    struct Sums {
        float of[4];
    };
    const Sums sums =
        exchanged(Operands{ { a[0], a[1], a[2], a[3] }, { b0, b1 } }, [&](auto &&lane) {
            Sums s;
            for (int i = 0; i < 4; i++) {
                const int row = warp.lane / 4 + 8 * (i / 2), column = 2 * (warp.lane % 4) + i % 2;
                double sum = d[i];
                for (int k = 0; k < 16; k++)
                    sum += (double)number((uint16_t)half_of(
                               lane(4 * (row % 8) + k % 8 / 2).a[row / 8 + 2 * (k / 8)], k % 2)) *
                           number((uint16_t)half_of(lane(4 * column + k % 8 / 2).b[k / 8], k % 2));
                s.of[i] = (float)sum;
            }
            return s;
        });
    std::copy(sums.of, sums.of + 4, d);
}

inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    multiply_matrices([](uint16_t x) { return kvant_half_to_float(x); }, d, a, b0, b1);
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
                const int row = warp.lane / 4 + 8 * (i / 2), column = 2 * (warp.lane % 4) + i % 2;
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
        const int row = warp.lane / 4, column = 2 * (warp.lane % 4);
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
            const int line = warp.lane / 4, column = 2 * (warp.lane % 4);
            r.of[i] = TRANSPOSED ? number(column, line) | number(column + 1, line) << 16
                                 : number(line, column) | number(line, column + 1) << 16;
        }
        return r;
    });
    std::copy(x.of, x.of + 4, m);
}

template <bool TRANSPOSED> void store_rows(const uint32_t (&m)[4], uint32_t row)
{
    struct Registers {
        uint32_t of[4];
    };
    exchanged(Registers{ { m[0], m[1], m[2], m[3] } }, [&](auto &&lane) {
        const int matrix = warp.lane / 8, line = warp.lane % 8;
        __half *to = reinterpret_cast<__half *>(warp.shared + row);
        for (int column = 0; column < 8; column++)
            to[column].bits =
                (uint16_t)(TRANSPOSED
                               ? half_of(lane(4 * column + line / 2).of[matrix], line % 2)
                               : half_of(lane(4 * line + column / 2).of[matrix], column % 2));
        return 0;
    });
}

inline void store_matrices(const uint32_t (&m)[4], uint32_t row)
{
    store_rows<false>(m, row);
}

inline void store_transposed(const uint32_t (&m)[4], uint32_t row)
{
    store_rows<true>(m, row);
}

} // namespace kvant
