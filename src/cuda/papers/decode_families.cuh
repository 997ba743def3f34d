/* decode_families.cuh - tiles of codecs that only families of papers have (any/decode_tile.cuh). */
#pragma once

#include "decode_rotated.cuh"
#include "decode_rows.cuh"

namespace kvant
{

template <bool KEYS>
KVANT_INLINE void decode_chunk_codes(const kvant_general &g, const DecodedTile &tile)
{
    g.view.kind == KVANT_GENERAL_TRIPLETS ? decode_chunks<3, KEYS>(g, tile)
                                          : decode_chunks<4, KEYS>(g, tile);
}

/* Decodes codecs in the general form. */
template <bool KEYS>
KVANT_INLINE void decode_family(const kvant_general &g, const DecodedTile &tile)
{
    const kvant_codebook_position &levels = g.view.books[0];
    if (g.view.chunks.pool)
        return decode_rows(g, tile);
    switch (g.view.kind) {
    case KVANT_GENERAL_CODEBOOK:
        decode_book<KEYS>((int)levels.bits, (int)g.metadata, g.tables + levels.values, tile);
        break;
    case KVANT_GENERAL_TRIPLETS:
    case KVANT_GENERAL_DIRECTIONS: decode_chunk_codes<KEYS>(g, tile); break;
    case KVANT_GENERAL_SKETCH: clear_tile(tile); break;
    default: return decode_rows(g, tile);
    }
    if (g.view.sketched)
        add_sketch<KEYS>(g, tile);
}

} // namespace kvant
