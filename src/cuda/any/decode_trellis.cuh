/* decode_trellis.cuh - tiles of trellis codes (format.md, "Trellis codes").
 *
 * First, codes are put in their places in the tile. Then four lanes decode a token, and each has a
 * line of the circle: the steps of one q for keys, or of one l for values. The windows of a line
 * begin with the bits of the line before. */
#pragma once

#include "../trellis/trellis_steps.cuh"
#include "decode_planes.cuh"

namespace kvant
{

/* Two windows at once, in the halves of a register. Codes: 4 bits in each half. Returns twice the
 * numbers of the levels, which are the offsets of fp16 levels. */
KVANT_INLINE uint32_t places_of_levels(uint32_t windows, uint32_t codes)
{
    /* bit k of z, shifted to bit k + 1: taps are bits of the window */
    const auto tap = [&](int k, int bit) {
        return bit > k ? windows >> (bit - k - 1) : windows << (k + 1 - bit);
    };
    uint32_t parity[3] = {};
    unrolled_for (int k = 0; k < 3; k++)
        unrolled_for (int bit = 0; bit <= TRELLIS_MEMORY; bit++)
            if (trellis_tap(k) >> bit & 1)
                parity[k] ^= tap(k, bit);
    const uint32_t z =
        bit_select<0x00060006u>(bit_select<0x00020002u>(parity[0], parity[1]), parity[2]);
    return bit_select<0x000e000eu>(z, codes << 3 & 0x00700070u);
}

/* The state of a lane that decodes tokens of a tile. */
struct TrellisLines {
    const DecodedTile &tile;
    const uint16_t *levels; /* whole numbers, fp16, in shared memory */
    int token, line;
    float scale; /* the scale of a level, divided by the token's unit */

    KVANT_INLINE uint32_t *words() const
    {
        return reinterpret_cast<uint32_t *>(tile.numbers() + token * tile.stride);
    }

    KVANT_INLINE float number(uint32_t place) const
    {
        const uint16_t level =
            *reinterpret_cast<const uint16_t *>(reinterpret_cast<const uint8_t *>(levels) + place);
        return __half2float(__ushort_as_half(level)) * scale;
    }

    KVANT_INLINE uint32_t numbers(uint32_t windows, uint32_t codes) const
    {
        const uint32_t places = places_of_levels(windows, codes);
        return pack_half2(number(places & 0xffffu), number(places >> 16));
    }

    /* The value of x in the lane of the same token that has the line `other`. */
    KVANT_INLINE uint32_t of_line(uint32_t x, int other) const
    {
        return __shfl_sync(FULL, x, (tile.lane & ~3) | (other & 3));
    }
};

/* Appends n bits. A window has 7. */
KVANT_INLINE uint32_t append_bits(uint32_t bits, int n, uint32_t more)
{
    return n < 16 ? bits << n | more : more;
}

/* Shifts the trellis bits of two codes into their windows. */
KVANT_INLINE uint32_t next_windows(uint32_t windows, uint32_t codes)
{
    return bit_select<0xfffefffeu>(windows << 1, codes);
}

/* WIDE: column tiles of a word of the first plane. There is a run of steps for each half of the
 * columns' tiles, each tile of the word, and even or odd channels. The even and the odd runs are
 * the halves of a register. */
template <int WIDE> KVANT_INLINE void decode_key_line(const TrellisLines &lane)
{
    const int tiles = lane.tile.d / 16;
    uint32_t *words = lane.words() + lane.line, windows[WIDE][2] = {}, runs[WIDE][2] = {};
    auto each = [&](int from, auto &&use) {
#pragma unroll 2
        for (int ct = from; ct < tiles; ct += WIDE)
            unrolled_for (int i = 0; i < WIDE; i++)
                if (i == 0 || ct + i < tiles)
                    unrolled_for (int half = 0; half < 2; half++)
                        use(words[8 * (ct + i) + 4 * half], i, half);
    };
    auto in_order =
        [&](auto &&use) { /* use(tile of the word, half, shift, steps) for the line's runs */
                          unrolled_for (int odd = 0; odd < 2; odd++)
                              unrolled_for (int i = 0; i < WIDE; i++)
                                  unrolled_for (int half = 0; half < 2; half++)
                                      use(i, half, 16 * odd, (tiles + WIDE - 1 - i) / WIDE);
        };
    each(max(tiles / WIDE - 16, 0) * WIDE, [&](uint32_t codes, int i, int half) {
        runs[i][half] = next_windows(runs[i][half], codes);
    });
    uint32_t tail = 0, before = 0;
    in_order([&](int i, int half, int shift, int steps) {
        tail = append_bits(tail, steps, runs[i][half] >> shift & 0xffffu);
    });
    for (int k = 2; k > 0; k--) /* a line has at least 4 steps, a window 7 */
        before = append_bits(before, 4 * tiles, lane.of_line(tail, lane.line - k));
    in_order([&](int i, int half, int shift, int steps) {
        windows[i][half] |= (before & 0xffffu) << shift;
        before = append_bits(before, steps, runs[i][half] >> shift & 0xffffu);
    });
    each(0, [&](uint32_t &codes, int i, int half) {
        windows[i][half] = next_windows(windows[i][half], codes);
        codes = lane.numbers(windows[i][half], codes);
    });
}

/* The trellis bits of the codes of 8 channels; the first code's bit is the highest. */
KVANT_INLINE uint32_t byte_of(const uint4 &codes)
{
    const uint32_t ones = 0x00010001u;
    const uint32_t bits = (((codes.x & ones) << 2 | (codes.y & ones)) << 2 | (codes.z & ones))
                              << 2 |
                          (codes.w & ones);
    return (bits << 1 | bits >> 16) & 0xffu;
}

/* Runs of 8 steps: row tiles 4 g + line, first their first halves, then their second halves. */
KVANT_INLINE void decode_value_line(const TrellisLines &lane)
{
    const int tiles = lane.tile.d / 16, runs = max((tiles - lane.line + 3) / 4, 0);
    uint4 *codes = reinterpret_cast<uint4 *>(lane.words()) + 2 * lane.line;
    uint32_t bits = runs > 0 ? byte_of(codes[8 * (runs - 1) + 1]) : 0;
    bits = lane.of_line(bits, lane.line ? lane.line - 1 : min(tiles, 4) - 1);
    for (int half = 0; half < 2; half++)
        for (int g = 0; g < runs; g++) {
            uint4 &eight = codes[8 * g + half];
            const uint4 own = eight;
            bits = bits << 8 | byte_of(own);
            auto numbers = [&](uint32_t pair, int j) {
                return lane.numbers(prmt(bits >> (7 - 2 * j), bits >> (6 - 2 * j), 0x5410), pair);
            };
            eight = make_uint4(numbers(own.x, 0), numbers(own.y, 1), numbers(own.z, 2),
                               numbers(own.w, 3));
        }
}

/* WIDE 0 means values. */
template <int WIDE>
__device__ __noinline__ void decode_lines(int metadata, float step, const uint16_t *levels,
                                          const DecodedTile tile)
{
    const uint16_t *scales = reinterpret_cast<const uint16_t *>(tile.page + metadata) + tile.first;
    rolled_for (int first = 8 * tile.rank; first < TILE_TOKENS; first += 8 * tile.team_warps) {
        const int token = first + (tile.lane >> 2);
        const float stored = token < tile.valid ? half_at(scales, token) : 0,
                    unit = fmaxf(power_above(stored), LEAST_UNIT);
        const TrellisLines lane{ tile, levels, token, tile.lane & 3,
                                 stored * inverse_of(unit) * step };
        if ((tile.lane & 3) == 0)
            tile.units()[token] = unit;
        if constexpr (WIDE == 0)
            decode_value_line(lane);
        else
            decode_key_line<WIDE>(lane);
    }
}

template <bool KEYS>
KVANT_INLINE void decode_trellis(const kvant_cuda_params &c, const uint16_t *levels,
                                 const DecodedTile &tile)
{
    place_codes<KEYS, 4>((int)c.bits, tile);
    if (!KEYS)
        decode_lines<0>((int)c.metadata_offset, c.step, levels, tile);
    else if (c.bits == 4)
        decode_lines<1>((int)c.metadata_offset, c.step, levels, tile);
    else
        decode_lines<2>((int)c.metadata_offset, c.step, levels, tile);
}

} // namespace kvant
