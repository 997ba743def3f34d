/* unpack_trellis.cuh - from a page of trellis codes to a matrix of fp16 numbers. It uses a table of
 * levels (trellis_pairs.cuh, trellis_bytes.cuh), or decodes a row per warp where shared memory has
 * no room for the table. */
#pragma once

#include "../pages/read_code.cuh"
#include "../trellis/trellis_bytes.cuh"
#include "../trellis/trellis_steps.cuh"
#include "unpack_values.cuh"

namespace kvant
{

template <class C> struct TrellisTile : C {
    static constexpr int TILES = 1;
};

/* The planes of column unit u of keys and of the units before it that taps reach; the unit's own
 * plane is the last one. plane(u) reads a plane. The unit before the first one is the last one with
 * its fields moved (trellis.cuh). */
template <int B, int UNITS, class F>
KVANT_INLINE void planes_before(int u, int lane, KeyChain<1> &chain, F &&plane)
{
    unrolled_for (int k = 0; k <= TRELLIS_MEMORY; k++) {
        if (!any_tap(TRELLIS_MEMORY - k))
            continue;
        int at = u - TRELLIS_MEMORY + k, turns = 0;
        unrolled_for (int i = 0; i < (TRELLIS_MEMORY + UNITS - 1) / UNITS; i++)
            if (at < 0)
                at += UNITS, turns++;
        chain[k] = plane(at);
        rolled_for (; turns > 0; turns--)
            chain[k] = key_fields_before<B>(chain[k], lane);
    }
}

/* Unpacks keys; every warp has its own column units. The loops are not unrolled, because the code
 * of all units would exceed the instruction caches. use(row tile, column tile, halves) receives the
 * results. */
template <class C, int D, class T, class F>
KVANT_INLINE void unpack_trellis_keys(const Unpacking &u, const T &table, F &&use)
{
    const uint32_t *words = reinterpret_cast<const uint32_t *>(u.page);
    if constexpr (C::BITS == 4) {
        rolled_for (int unit = u.warp; unit < D / 16; unit += UNPACK_WARPS) {
            KeyChain<1> chain;
            uint32_t w[4];
            planes_before<4, D / 16>(unit, u.lane, chain, [&](int at) {
                load_words<4>(words + (32 * at + u.lane) * 4, w);
                return low_plane(w);
            });
            pair_operands4(
                w, [&](int j) { return chain[TRELLIS_MEMORY - j]; }, table,
                [&](int rt, const uint32_t(&a)[4]) { use(rt, unit, a); });
        }
    } else {
        constexpr int N = D / 32;
        rolled_for (int i = u.warp; i < 2 * N; i += UNPACK_WARPS) {
            const int unit = i / 2, half = i % 2; /* of the row tiles */
            KeyChain<1> chain;
            uint32_t w[2], third[2] = {};
            planes_before<C::BITS, N>(unit, u.lane, chain, [&](int at) {
                load_words<2>(words + (32 * at + u.lane) * 4 + 2 * half, w);
                return even_bits(w[0], w[1]);
            });
            if (C::BITS == 3)
                load_words<2>(words + 128 * N + (32 * (unit / 2) + u.lane) * 4 + 2 * half, third);
            pair_operands<C::BITS>(
                w[0], w[1], third[0], third[1], unit % 2 == 1,
                [&](int j) { return chain[TRELLIS_MEMORY - j]; }, table,
                [&](int k, int t, const uint32_t(&a)[4]) { use(2 * half + k, 2 * unit + t, a); });
        }
    }
}

/* Unpacks values: a warp has a column tile, or a column unit and half of the row tiles. */
template <class C, int D, class T, class F>
KVANT_INLINE void unpack_trellis_values(const Unpacking &u, const T &table, F &&use)
{
    constexpr int N = (D + 63) / 64;
    const uint32_t *page = reinterpret_cast<const uint32_t *>(u.page);
    if constexpr (C::BITS == 4) {
        trellis_value4_column<C, D>(page, u.warp, u.lane, table,
                                    [&](int rt, const uint32_t(&a)[4]) { use(rt, u.warp, a); });
    } else {
        const int unit = u.warp / 2, half = u.warp % 2;
        uint32_t w[N][4], third[N][4] = {};
        Runs<N> runs[2];
        load_column<D, 2>(page, 32 * unit + u.lane, w);
        if constexpr (C::BITS == 3)
            load_column<D, 1>(page + 64 * (D / 16), u.lane, third);
        unrolled_for (int g = 0; g < N; g++)
            unrolled_for (int h = 0; h < 2; h++)
                runs[h].at[g + 1] = even_bits(w[g][2 * h], w[g][2 * h + 1]);
        close_runs<D>(runs);
        unrolled_for (int g = 0; g < N; g++) {
            const TermsBefore terms(half ? runs[1].at[g + 1] : runs[0].at[g + 1],
                                    half ? runs[1].at[g] : runs[0].at[g], u.lane);
            if (4 * g + 2 * half < D / 16)
                pair_operands<C::BITS>(
                    half ? w[g][2] : w[g][0], half ? w[g][3] : w[g][1],
                    half ? third[g][2] : third[g][0], half ? third[g][3] : third[g][1], unit == 1,
                    [&](int j) { return terms.at[j]; }, table,
                    [&](int k, int t, const uint32_t(&a)[4]) {
                        use(4 * g + 2 * half + k, 2 * unit + t, a);
                    });
        }
    }
}

template <class C, int D, bool KEYS> KVANT_INLINE float unpack_trellis(const Unpacking &u)
{
    using OneTile = TrellisTile<C>;
    const Steps steps = steps_of<C, D>(u);
    const auto table = level_table<C, TRELLIS_COPIES>(u.table, u.one, u.lane);
    /* tiles of a warp: for keys all or half of the row tiles, for values one or two column tiles */
    constexpr int ROWS = !KEYS ? 1 : C::BITS == 4 ? 4 : 2, COLUMNS = KEYS || C::BITS == 4 ? 1 : 2;
    StepScales<OneTile, D, KEYS, ROWS> scales[COLUMNS];
    unrolled_for (int t = 0; t < COLUMNS; t++)
        scales[t].load(u, steps, ROWS == 2 ? 2 * (u.warp % 2) : 0,
                       KEYS           ? 0
                       : C::BITS == 4 ? u.warp
                                      : 2 * (u.warp / 2) + t);
    auto use = [&](int rt, int ct, const uint32_t(&halves)[4]) {
        uint32_t a[1][4] = { { halves[0], halves[1], halves[2], halves[3] } };
        in_order<C::ORDER, 1>(a);
        scales[ct & (COLUMNS - 1)].apply(rt & (ROWS - 1), 0, a[0]);
        put_tile(u.tile, rt, ct, u.lane, a[0]);
    };
    if constexpr (KEYS)
        unpack_trellis_keys<C, D>(u, table, use);
    else
        unpack_trellis_values<C, D>(u, table, use);
    return steps.unit;
}

/* The same with a row per warp. table: the values of levels, then the
 * trellis bits of each warp's row. */
template <int D, bool KEYS> KVANT_INLINE float unpack_any_trellis(const Unpacking &u)
{
    const kvant_cuda_params &c = u.codec.params;
    const float *values = reinterpret_cast<const float *>(u.table);
    uint8_t *bits = const_cast<uint8_t *>(u.table) + KVANT_CUDA_TRELLIS_LEVELS * 4 + D * u.user;
    const int e = exponent_of<KVANT_CUDA_GROUP_TOKEN, D>(u, false);
    for (int token = u.warp; token < PAGE_TOKENS; token += UNPACK_WARPS) {
        const float scale = token < u.valid ? __half2float(u.numbers()[token]) * power(-e) : 0;
        uint32_t codes[D / 32];
        int steps[D / 32];
        __syncwarp();
        unrolled_for (int j = 0; j < D / 32; j++) {
            codes[j] =
                read_code(c, reinterpret_cast<const uint32_t *>(u.page), token, u.lane + 32 * j);
            steps[j] = trellis_step(c.role, (int)c.bits, D, u.lane + 32 * j);
            bits[steps[j]] = codes[j] & 1;
        }
        __syncwarp();
        unrolled_for (int j = 0; j < D / 32; j++)
            put_one<KEYS>(
                u.tile, token, u.lane + 32 * j,
                __float2half_rn(scale * values[8 * (codes[j] / 2) + subset_at(bits, D, steps[j])]));
    }
    return power(e);
}

} // namespace kvant
