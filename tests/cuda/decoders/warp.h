/* warp.h - the parts of CUDA that decoders of tiles (any/decode_*.cuh) and decode kernels'
 * pages (src/cuda/attention) use, for a warp of 32 contexts in a C++ program.
 *
 * A lane runs until the warp synchronises, then the next lane runs. So lanes exchange numbers as on
 * a GPU, and an exchange without a synchronisation reads the number that the lane before it left.
 * numbers.h has the numbers, instructions.h the instructions that lanes execute together. */
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

inline int own_lane()
{
    return warp.lane;
}

#include "instructions.h"

inline void __syncwarp()
{
    meet();
}

inline void __syncthreads()
{
    meet();
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

/* Barriers of teams do nothing, because a test has one warp. */
inline void meet_at(int, int)
{
    exit(1);
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
