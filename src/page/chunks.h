/* chunks.h - where the code of (token, chunk) is in a page, for codecs that quantise several
 * channels together: octahedral triplets, quaternions (format.md, "Chunk codes"). Owns the
 * arithmetic of this code plane. Knows nothing of the meaning of a code.
 *
 * Chunk codes are not padded to 16, unlike the tiles of layout.h. So 43 triplets of 13 bits take 43
 * x 13 bits per token. For K an odd number of chunks is padded by one. */
#pragma once

#include <kvant/codec.h>

#define KVANT_MAX_CHUNK_PLANES 5 /* one for each power of two up to 16 */

typedef struct kvant_chunk_plane {
    uint32_t bits;      /* a power of two, at most 16 */
    uint32_t shift;     /* the lowest bit of the plane within the code */
    size_t word_offset; /* where the plane begins, in 32-bit words; a multiple of 4 */
} kvant_chunk_plane;

typedef struct kvant_chunk_layout {
    kvant_role role;
    uint32_t n_chunks, bits; /* chunks per token; bits of one code */
    uint32_t n_planes;
    kvant_chunk_plane planes[KVANT_MAX_CHUNK_PLANES];
    size_t code_bytes; /* a multiple of 16 */
} kvant_chunk_layout;

/* bits: 1 .. 31; n_chunks: 1 .. KVANT_MAX_HEAD_DIM. */
void kvant_chunk_layout_init(kvant_chunk_layout *layout, kvant_role role, uint32_t n_chunks,
                             uint32_t bits);

/* Writes or reads the codes of all chunks of one token. codes: n_chunks numbers below 2^bits. */
void kvant_chunk_layout_put(const kvant_chunk_layout *layout, void *page, uint32_t token,
                            const uint32_t *codes);
void kvant_chunk_layout_get(const kvant_chunk_layout *layout, const void *page, uint32_t token,
                            uint32_t *codes);
