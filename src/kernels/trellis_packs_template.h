/* trellis_packs_template.h - the levels of the trellis codes of a vector index. Included after
 * trellis_dots_template.h: a chunk of a pack has the layout of a row of words of a page, and its
 * codes have the same fields. */

/* Loads chunk i of the codes' low bits. */
KVANT_INLINE row_words load_chunk(uint32_t bits, const uint8_t *codes, uint32_t i)
{
    return load_row((const uint32_t *)(const void *)(codes + (size_t)KVANT_PACK_CHUNK *
                                                                 (bits == 3 ? i + i / 2 : i)));
}

KVANT_INLINE void chunk_levels(const level_tables *tables, uint32_t bits, const row_words *step,
                               const uint8_t *codes, uint32_t i, uint8_t *levels)
{
    const uint8_t *third = codes + (size_t)KVANT_PACK_CHUNK * (i / 2 * 3 + 2);
    uint8_t *out = levels + (size_t)KVANT_PACK_CHUNK * (8 / first_plane(bits)) * i;
#pragma GCC unroll 4
    for (uint32_t v = 0; v < ROW_VECTORS; v++) {
        vi more = step->at[v];
        if (bits == 3) {
            more = vi_load((const uint32_t *)(const void *)(third + 4 * LANES * v));
            more = i % 2 ? vw_shift_right(more, 4) : more;
        }
        store_levels(tables, bits, step, v, more, out + 4 * LANES * v);
    }
}

/* Computes the levels of a circle of n chunks of low bits. The chunks before the first one are the
 * last chunks, moved on by one field. */
KVANT_INLINE void circle_levels(const kvant_trellis *trellis, uint32_t bits, const uint8_t *codes,
                                uint32_t n, uint8_t *levels)
{
    const uint32_t memory = KVANT_TRELLIS_MEMORY;
    const level_tables tables = load_levels(trellis->in_words);
    row_words at[KVANT_TRELLIS_MEMORY + KVANT_PACK_CIRCLE_QUADS];
    for (uint32_t i = 0; i < n; i++)
        at[memory + i] = load_chunk(bits, codes, i);
    for (uint32_t i = memory; i-- > 0;)
#pragma GCC unroll 4
        for (uint32_t v = 0; v < ROW_VECTORS; v++)
            at[i].at[v] = vi_rotate_left(at[i + n].at[v], 2 * first_plane(bits));
    for (uint32_t i = 0; i < n; i++)
        chunk_levels(&tables, bits, &at[memory + i], codes, i, levels);
}

KVANT_INLINE void pack_levels(const kvant_trellis *trellis, uint32_t bits,
                              const kvant_pack_format *format, const uint8_t *codes,
                              uint8_t *levels)
{
    for (uint32_t circle = 0; circle < kvant_pack_circles(format); circle++) {
        const uint32_t quad = kvant_pack_circle(format, circle);
        const uint32_t n = (kvant_pack_circle(format, circle + 1) - quad) / (bits == 4 ? 1 : 2);
        circle_levels(trellis, bits, codes + (size_t)16 * bits * quad, n,
                      levels + (size_t)128 * quad);
    }
}

static KVANT_TRELLIS_PACK_FN(NAME(trellis_pack))
{
    switch (format->bits) {
    case 2: pack_levels(trellis, 2, format, codes, levels); return;
    case 3: pack_levels(trellis, 3, format, codes, levels); return;
    default: pack_levels(trellis, 4, format, codes, levels); return;
    }
}
