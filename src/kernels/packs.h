/* packs.h - codes of 32 vectors of an index, as kernels read them (format.md, "Index").
 *
 * A plane holds codes of 16 vectors in 4 dimensions: byte 4 v + j of a plane is dimension j of
 * vector v. Plane 2 i + h belongs to dimensions 4 i .. 4 i + 3 of vectors 16 h .. 16 h + 15. A chunk
 * of 64 bytes holds 8 / bits planes one above the other, the first in the low bits. So a vector of
 * chunks unpacks with shifts and a byte look-up, and every 32-bit lane sums one vector: no sum is
 * ever folded. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define KVANT_PACK_VECTORS 32u
#define KVANT_PACK_CHUNK 64u

typedef struct kvant_pack_format {
    uint32_t bits;      /* 1, 2, 4 or 8 */
    uint32_t n_quads;   /* dimensions / 4, padded so that chunks are full: kvant_pack_quads */
    int8_t levels[16];  /* of code % 2^bits; none at 8 bits, where the level is code - 128 */
    uint8_t bias;       /* level + bias is from 0 to 2 bias: the largest level; 128 at 8 bits */
} kvant_pack_format;

/* Queries of one call, interleaved: dimensions 4 i .. 4 i + 3 of query j at x[(i * n + j) * 4]. */
typedef struct kvant_pack_queries {
    const int8_t *x; /* -127 .. 127, aligned to 4; n_quads * n * 4 of them, zeros for padding */
    const int32_t *sums; /* of query j: the sum of its integers */
    uint32_t n;
} kvant_pack_queries;

/* Quads of `dim` dimensions. */
static inline uint32_t kvant_pack_quads(uint32_t dim, uint32_t bits)
{
    const uint32_t whole = bits < 4 ? 4 / bits : 1; /* quads of a chunk */
    return (dim + 4 * whole - 1) / (4 * whole) * whole;
}

static inline size_t kvant_pack_bytes(const kvant_pack_format *format)
{
    return (size_t)format->n_quads * 16 * format->bits;
}

/* Where the code of dimension `dim` of vector `v` is: a byte, and the shift within it. */
static inline size_t kvant_pack_place(uint32_t bits, uint32_t dim, uint32_t v, uint32_t *shift)
{
    const uint32_t planes = 8 / bits, plane = dim / 4 * 2 + v / 16;
    *shift = plane % planes * bits;
    return (size_t)(plane / planes) * KVANT_PACK_CHUNK + v % 16 * 4 + dim % 4;
}
