/* trellis_values_template.h - the numbers of a page of values, from its trellis codes. Included
 * after trellis_dots_template.h, which makes levels of codes.
 *
 * 64 bytes of levels are 4 lanes of 4 words. Word t of a lane has levels of row tile t, and its
 * bytes belong to 4 tokens. In a row of the tile, the levels of the 4 words lie next to each other.
 * The levels of the next three tile rows follow. So the bytes of each lane are transposed, and then
 * the words of 4 rows. The including file also defines vi_low_dwords, vi_high_dwords, vi_low_qwords
 * and vi_high_qwords. */

/* out[b][16 q ...] becomes the levels of byte b in lane q: 4 row tiles for each of 4 rows r. */
KVANT_INLINE void gather_tokens(const uint8_t *levels, size_t stride, uint8_t out[4][64])
{
    static const uint32_t bytes[4] = { 0x0c080400, 0x0d090501, 0x0e0a0602, 0x0f0b0703 };
    const vi order = vi_load_repeated(bytes, 4);
#pragma GCC unroll 4
    for (uint32_t v = 0; v < ROW_VECTORS; v++) {
        vi row[4];
        unrolled_for (uint32_t r = 0; r < 4; r++)
            row[r] = vi_pick_bytes(vi_load(levels + r * stride + 4 * LANES * v), order);
        const vi low = vi_low_dwords(row[0], row[1]), low2 = vi_low_dwords(row[2], row[3]);
        const vi high = vi_high_dwords(row[0], row[1]), high2 = vi_high_dwords(row[2], row[3]);
        vi_store_aligned(out[0] + 4 * LANES * v, vi_low_qwords(low, low2));
        vi_store_aligned(out[1] + 4 * LANES * v, vi_high_qwords(low, low2));
        vi_store_aligned(out[2] + 4 * LANES * v, vi_low_qwords(high, high2));
        vi_store_aligned(out[3] + 4 * LANES * v, vi_high_qwords(high, high2));
    }
}

/* Writes 16 rows of a token, rounded as the decoder rounds: first the level's value, then the
 * number. */
KVANT_INLINE void write_numbers(const uint8_t *restrict levels, float unit, float scale,
                                float *restrict out)
{
    for (uint32_t i = 0; i < 16; i++)
        out[i] = (float)((int32_t)levels[i] - LEVEL_BIAS) * unit * scale;
}

/* Writes the tokens of operand o (level_operand). tile points to the first of 16 rows. */
KVANT_INLINE void write_tokens(uint32_t bits, uint32_t o, uint8_t levels[4][64], float unit,
                               const float *scale, float *tile, size_t stride)
{
    for (uint32_t b = 0; b < 4; b++) {
        const uint32_t column_tile = bits == 4 ? o : o / 2 * 2 + b % 2;
        const uint32_t side = bits == 4 ? b % 2 : o % 2;
        for (uint32_t q = 0; q < 4; q++) {
            const uint32_t token = 32 * side + 4 * (2 * q + b / 2) + column_tile; /* position */
            write_numbers(levels[b] + 16 * q, unit, scale[token], tile + token * stride);
        }
    }
}

KVANT_INLINE void write_values(const level_job *job, uint32_t bits, float unit, const float *scale,
                               float *tile)
{
    const uint32_t n_operands = KVANT_PAGE_TOKENS / KVANT_TILE;
    const size_t stride = job->layout->padded_dim;
    _Alignas(64) uint8_t levels[4][64];
    for (uint32_t group = 0; 4 * group < job->layout->row_tiles; group++)
        for (uint32_t quad = 0; quad < 2; quad++)
            for (uint32_t part = 0; part < 2 * n_operands; part++) {
                const uint32_t o = part / 2, half = part % 2;
                const size_t at =
                    (size_t)128 * (n_operands * (8 * group + 4 * quad) + o) + 64 * half;
                gather_tokens(job->tile->at + at, (size_t)128 * n_operands, levels);
                write_tokens(bits, o, levels, unit, scale,
                             tile + KVANT_PAGE_TOKENS * group + 32 * half + 16 * quad, stride);
            }
}

static KVANT_TRELLIS_VALUES_FN(NAME(trellis_values))
{
    level_tile levels;
    level_job job = { .trellis = trellis, .layout = layout, .tile = &levels };
    if (layout->row_tiles % 4) {
        kvant_trellis_values_c(trellis, layout, page, unit, scale, tile);
        return;
    }
    NAME(make_levels)(&job, page);
    if (layout->bits == 4)
        write_values(&job, 4, unit, scale, tile);
    else
        write_values(&job, 2, unit, scale, tile);
}
