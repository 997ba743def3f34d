/* fold_zmm.h - sums over the 128-bit lanes of 512-bit vectors. Has an include guard, because two
 * headers of a level share it. */
#pragma once

/* (a, b) -> 128-bit lanes a0 + a2, a1 + a3, b0 + b2, b1 + b3 */
KVANT_INLINE vi fold_pair(vi a, vi b)
{
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
}

/* two results of fold_pair -> one lane for each of four sums */
KVANT_INLINE vi fold_quad(vi ab, vi cd)
{
    return _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
}
