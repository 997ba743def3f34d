/* trellis_steps.cuh - the trellis (format.md, "Trellis codes"), the order in which a row's channels
 * are steps of the circle, and the subset of a step. It serves kernels that process a row at
 * a time. Attention needs both in the order of words (trellis.cuh). */
#pragma once

#include "../params.h"

namespace kvant
{

/* A trellis has 2^TRELLIS_MEMORY states. */
constexpr int TRELLIS_MEMORY = 6;

/* The taps: bit j of parity p selects the trellis bit of j steps earlier. */
__host__ __device__ constexpr uint32_t trellis_tap(int p)
{
    constexpr uint32_t taps[3] = { 010, 0101, 042 };
    return taps[p];
}

/* The step of a channel of keys. bits is the number of bits of a code, and head_dim is a multiple
 * of 32. */
__host__ __device__ constexpr int key_step(int bits, int head_dim, int channel)
{
    const int ct = channel / 16, q = channel % 8 / 2, odd = channel % 2, far = channel % 16 / 8;
    return bits == 4 ? (4 * q + far + 2 * odd) * (head_dim / 16) + ct
                     : (8 * q + far + 2 * (ct % 2) + 4 * odd) * (head_dim / 32) + ct / 2;
}

__host__ __device__ constexpr int value_step(int head_dim, int channel)
{
    /* A last group with fewer than four row tiles has no tiles with the last l. */
    const int rt = channel / 16, l = rt % 4, groups = (head_dim + 63) / 64,
              lacking = 4 * groups - head_dim / 16;
    const int short_before = l > 4 - lacking ? l - (4 - lacking) : 0;
    const int own = l >= 4 - lacking ? groups - 1 : groups;
    const int runs = 2 * (groups * l - short_before) + channel % 16 / 8 * own + rt / 4;
    return 8 * runs + channel % 8;
}

__host__ __device__ constexpr int trellis_step(uint32_t role, int bits, int head_dim, int channel)
{
    return role == KVANT_ROLE_K ? key_step(bits, head_dim, channel) : value_step(head_dim, channel);
}

/* bits: the trellis bits of all n steps, one per byte. */
KVANT_INLINE uint32_t subset_at(const uint8_t *bits, int n, int step)
{
    uint32_t z = 0;
    unrolled_for (int j = 0; j <= TRELLIS_MEMORY; j++) {
        const uint32_t bit = bits[step < j ? step - j + n : step - j];
        unrolled_for (int p = 0; p < 3; p++)
            z ^= trellis_tap(p) >> j & 1 ? bit << p : 0;
    }
    return z;
}

} // namespace kvant
