/* nibbles.h - codes as words of 4-bit planes, for levels that look up 4 bits at a time. Codes of up
 * to 4 bits have one plane, wider codes two. The including file defines vi, vi_load and the integer
 * operations of simd_template.h. */

/* Spreads the 2-bit fields 0 .. 3 of each half of a word to 4-bit fields. */
KVANT_INLINE vi spread_pairs(vi w)
{
    w = vi_and(w, vi_set(0x00ff00ff));
    w = vi_and(vi_or(w, vi_shift_left(w, 4)), vi_set(0x0f0f0f0f));
    return vi_and(vi_or(w, vi_shift_left(w, 2)), vi_set(0x33333333));
}

/* The same for 1-bit fields. */
KVANT_INLINE vi spread_bits(vi w)
{
    w = vi_and(w, vi_set(0x000f000f));
    w = vi_and(vi_or(w, vi_shift_left(w, 6)), vi_set(0x03030303));
    return vi_and(vi_or(w, vi_shift_left(w, 3)), vi_set(0x11111111));
}

/* In this function and the following ones, bits is a constant. */
KVANT_INLINE vi plane_word(const uint32_t *words, uint32_t bits, uint32_t ct, uint32_t at)
{
    uint32_t tiles = 4 / bits;
    return vi_shift_right_by(vi_load(words + 128 * (ct / tiles) + at), 4 * bits * (ct % tiles));
}

KVANT_INLINE uint32_t code_digits(uint32_t bits)
{
    return bits > 4 ? 2 : 1;
}

/* Digit 0 (the low four bits) or digit 1 of the codes of column tile ct, from word `at` of its unit
 * on. The planes belong to a row group of 4 row tiles. */
KVANT_INLINE vi nibble_word(const uint32_t *const *planes, uint32_t bits, uint32_t digit,
                            uint32_t ct, uint32_t at)
{
    if (digit)
        planes++;
    switch (digit ? bits - 4 : bits) {
    case 1: return spread_bits(plane_word(planes[0], 1, ct, at));
    case 2: return spread_pairs(plane_word(planes[0], 2, ct, at));
    case 3:
        return vi_or(spread_pairs(plane_word(planes[0], 2, ct, at)),
                     vi_shift_left(spread_bits(plane_word(planes[1], 1, ct, at)), 2));
    default: return vi_load(planes[0] + 128 * ct + at);
    }
}
