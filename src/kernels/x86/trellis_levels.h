/* trellis_levels.h - levels of trellis codes as bytes in tables of 16, for pshufb.
 * trellis_dots_ymm.h and trellis_dots_zmm.h include it. */
typedef struct level_tables {
    vi at[4];
} level_tables;

/* Fewer than 64 levels repeated. */
KVANT_INLINE level_tables load_levels(const int8_t *levels, uint32_t bits)
{
    level_tables tables;
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t some[4];
        memcpy(some, levels + 16 * (i % (1u << (bits - 2))), sizeof some);
        tables.at[i] = vi_xor(vi_load_repeated(some, 4), vi_set((int)0x80808080u)); /* 128 more */
    }
    return tables;
}
