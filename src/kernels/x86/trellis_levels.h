/* trellis_levels.h - levels of trellis codes as bytes in tables of 16, for pshufb.
 * trellis_dots_ymm.h and trellis_dots_zmm.h include it. */
typedef struct level_tables {
    vi at[4];
} level_tables;

KVANT_INLINE level_tables load_levels(const uint8_t *levels)
{
    level_tables tables;
    for (uint32_t i = 0; i < 4; i++)
        tables.at[i] = vi_load_repeated((const uint32_t *)(const void *)(levels + 16 * i), 4);
    return tables;
}
