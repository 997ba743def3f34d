/* nibbles.h - codes of 1 to 4 bits as the words of a 4-bit plane, for levels that look codes up four bits at a time.
 * The including file defines vi, vi_load and the integer operations of simd_template.h. */

/* 2-bit fields 0 .. 3 of each half of a word, to 4-bit fields. */
KVANT_INLINE vi spread_pairs(vi w)
{
    w = vi_and(w, vi_set(0x00ff00ff));
    w = vi_and(vi_or(w, vi_shift_left(w, 4)), vi_set(0x0f0f0f0f));
    return vi_and(vi_or(w, vi_shift_left(w, 2)), vi_set(0x33333333));
}

/* 1-bit fields 0 .. 3 likewise. */
KVANT_INLINE vi spread_bits(vi w)
{
    w = vi_and(w, vi_set(0x000f000f));
    w = vi_and(vi_or(w, vi_shift_left(w, 6)), vi_set(0x03030303));
    return vi_and(vi_or(w, vi_shift_left(w, 3)), vi_set(0x11111111));
}

KVANT_INLINE vi plane_word(const kvant_plane *plane, const uint32_t *words, uint32_t group, uint32_t ct,
                           uint32_t at)
{
    vi w = vi_load(words + plane->word_offset + (size_t)128 * (group * plane->units + ct / plane->tiles) + at);
    return vi_shift_right_by(w, 4 * plane->bits * (ct % plane->tiles));
}

/* The words of column tile ct from word `at` of its unit; bits is a constant. */
KVANT_INLINE vi nibble_word(const kvant_layout *layout, uint32_t bits, const uint32_t *words, uint32_t group,
                            uint32_t ct, uint32_t at)
{
    const kvant_plane *planes = layout->planes;
    switch (bits) {
    case 1: return spread_bits(plane_word(&planes[0], words, group, ct, at));
    case 2: return spread_pairs(plane_word(&planes[0], words, group, ct, at));
    case 3:
        return vi_or(spread_pairs(plane_word(&planes[0], words, group, ct, at)),
                     vi_shift_left(spread_bits(plane_word(&planes[1], words, group, ct, at)), 2));
    default: return vi_load(words + (size_t)128 * (group * planes[0].units + ct) + at);
    }
}
