/* words.h - four words of a page as an Advanced SIMD vector: the codes of one row in one column
 * quad, from each of the group's four row tiles. A word has four bytes. They hold columns 2q and 2q
 * + 8, then 2q + 1 and 2q + 9 of a tile. Low nibbles belong to row r < 8, high nibbles to row r +
 * 8. */
#pragma once

#include <arm_neon.h>

#include "../../base/attributes.h"
#include "../kernels.h"

typedef uint32x4_t vi;

#define vi_and(a, b) vandq_u32(a, b)
#define vi_or(a, b) vorrq_u32(a, b)
#define vi_set(x) vdupq_n_u32((uint32_t)(x))
#define vi_shift_left(v, n) vshlq_n_u32(v, n)
#define vi_shift_right_by(v, n) vshlq_u32(v, vdupq_n_s32(-(int32_t)(n)))
#define vi_load(p) vld1q_u32((const uint32_t *)(p))

#include "../nibbles.h"

/* The codes of row r (index 0) and of row r + 8 (index 1), in each row tile. */
typedef struct code_bytes {
    uint8x16_t at[2];
} code_bytes;

KVANT_INLINE code_bytes split_nibbles(vi words)
{
    uint8x16_t w = vreinterpretq_u8_u32(words);
    return (code_bytes){ { vandq_u8(w, vdupq_n_u8(15)), vshrq_n_u8(w, 4) } };
}

/* Four numbers of 32 bits from each of four row tiles. */
typedef struct four_words {
    int32x4_t at[4];
} four_words;

/* Transposes: vector k gets number k of all row tiles. equal: all row tiles have the same
 * numbers. */
KVANT_INLINE four_words spread_words(const int32x4_t of_tile[4], bool equal)
{
    int32x4_t a = of_tile[0], b = of_tile[1], c = of_tile[2], d = of_tile[3];
    if (equal)
        return (four_words){ { vdupq_laneq_s32(a, 0), vdupq_laneq_s32(a, 1), vdupq_laneq_s32(a, 2),
                               vdupq_laneq_s32(a, 3) } };
    int32x4_t ac[2] = { vzip1q_s32(a, c), vzip2q_s32(a, c) },
              bd[2] = { vzip1q_s32(b, d), vzip2q_s32(b, d) };
    return (four_words){ { vzip1q_s32(ac[0], bd[0]), vzip2q_s32(ac[0], bd[0]),
                           vzip1q_s32(ac[1], bd[1]), vzip2q_s32(ac[1], bd[1]) } };
}

KVANT_INLINE bool equal_bands(const int16_t *const bands[4])
{
    return bands[0] == bands[1] && bands[0] == bands[2] && bands[0] == bands[3];
}

/* The numbers x of a tile in the order of columns. In a block of 64, positions run through its 4
 * tiles first. */
typedef struct tile_columns {
    int16x8_t first, second; /* the lower 8 columns, and the upper 8 columns */
} tile_columns;

typedef struct block_columns {
    tile_columns tile[4];
} block_columns;

KVANT_INLINE block_columns load_block(const int16_t *x)
{
    int16x8x4_t first = vld4q_s16(x), second = vld4q_s16(x + 32);
    block_columns b;
    unrolled_for (uint32_t t = 0; t < 4; t++)
        b.tile[t] = (tile_columns){ first.val[t], second.val[t] };
    return b;
}
